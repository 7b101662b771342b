//! Defines numbers in memory (`Format`) and in the accumulator (`Number`).
//!
//! Everything here works on one element at a time, without branches and with a fixed meaning, so that the compiler may
//! vectorize it at any width without changing a bit.

use super::float;

/// A number in the accumulator.
pub trait Number: Copy + Default {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    /// Multiplies by a rank's PREMUL_SUM factor, which is first converted to this type.
    fn scale(self, factor: f64) -> Self;
    fn divide(self, ranks: usize) -> Self;
}

macro_rules! integer_number {
    ($($type:ty as $wide:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                if other < self { other } else { self }
            }
            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                if other > self { other } else { self }
            }
            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                // Converted through 64 bits, so that -1 is all ones in an unsigned type too: a factor wraps like a
                // product.
                let factor = if factor < 0.0 { factor as i64 as Self } else { factor as u64 as Self };
                self.wrapping_mul(factor)
            }
            #[inline(always)]
            fn divide(self, ranks: usize) -> Self {
                // Computed in 64 bits, because a count of 200 ranks does not fit into an i8. Truncates towards zero.
                (self as $wide / ranks as $wide) as Self
            }
        }
    )*};
}
integer_number!(u8 as u64, u16 as u64, u32 as u64, u64 as u64, i8 as i64, i16 as i64, i32 as i64, i64 as i64);

macro_rules! float_number {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }
            // In `smaller` and `larger`, a NaN on either side gives NaN, and -0 is smaller than +0. The `min` and `max`
            // of the language and of processors guarantee neither.
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                let lower = if self < other { self } else { other };
                let lower = if self == other { Self::from_bits(self.to_bits() | other.to_bits()) } else { lower };
                if self.is_nan() { self } else { lower }
            }
            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                let upper = if self > other { self } else { other };
                let upper = if self == other { Self::from_bits(self.to_bits() & other.to_bits()) } else { upper };
                if self.is_nan() { self } else { upper }
            }
            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                self * factor as Self
            }
            #[inline(always)]
            fn divide(self, ranks: usize) -> Self {
                self / ranks as Self
            }
        }
    )*};
}
float_number!(f32, f64);

/// The storage format of an element: `widen` reads it, `narrow` rounds once and writes it.
pub trait Format {
    type Stored: Copy + Default;
    type Number: Copy + Default;

    fn widen(stored: Self::Stored) -> Self::Number;
    fn narrow(number: Self::Number) -> Self::Stored;

    /// This function and the next one are `widen` and `narrow` for several elements. A format with a conversion
    /// instruction overrides both.
    ///
    /// # Safety
    /// The processor must have the features of the instruction set to which the format belongs (`Isa`).
    #[inline(always)]
    unsafe fn widen_all<const N: usize>(stored: [Self::Stored; N]) -> [Self::Number; N] {
        let mut numbers = [Self::Number::default(); N];
        for i in 0..N {
            numbers[i] = Self::widen(stored[i]);
        }
        numbers
    }
    /// # Safety
    /// As for `widen_all`.
    #[inline(always)]
    unsafe fn narrow_all<const N: usize>(numbers: [Self::Number; N]) -> [Self::Stored; N] {
        let mut stored = [Self::Stored::default(); N];
        for i in 0..N {
            stored[i] = Self::narrow(numbers[i]);
        }
        stored
    }
}

/// Integers, stored in the form in which they are accumulated.
pub struct Int<T>(std::marker::PhantomData<T>);

impl<T: Copy + Default> Format for Int<T> {
    type Stored = T;
    type Number = T;

    #[inline(always)]
    fn widen(stored: T) -> T {
        stored
    }
    #[inline(always)]
    fn narrow(number: T) -> T {
        number
    }
}

/// Bool in one byte. Any value except 0 is true; results are 0 or 1.
pub struct Bool;

impl Format for Bool {
    type Stored = u8;
    type Number = u8;

    #[inline(always)]
    fn widen(stored: u8) -> u8 {
        (stored != 0) as u8
    }
    #[inline(always)]
    fn narrow(number: u8) -> u8 {
        number
    }
}

/// f32 and f64. Every NaN is stored as the quiet, positive NaN without payload. After an addition, the payload depends
/// on the order of operands that the compiler chooses, which must not change the result.
pub struct Float<T>(std::marker::PhantomData<T>);

impl Format for Float<f32> {
    type Stored = f32;
    type Number = f32;

    #[inline(always)]
    fn widen(stored: f32) -> f32 {
        stored
    }
    #[inline(always)]
    fn narrow(number: f32) -> f32 {
        if number.is_nan() { f32::from_bits(float::F32_NAN) } else { number }
    }
}

impl Format for Float<f64> {
    type Stored = f64;
    type Number = f64;

    #[inline(always)]
    fn widen(stored: f64) -> f64 {
        stored
    }
    #[inline(always)]
    fn narrow(number: f64) -> f64 {
        if number.is_nan() { f64::from_bits(float::F64_NAN) } else { number }
    }
}

/// f16, converted without special instructions.
pub struct Half;

impl Format for Half {
    type Stored = u16;
    type Number = f32;

    #[inline(always)]
    fn widen(stored: u16) -> f32 {
        float::f16_to_f32(stored)
    }
    #[inline(always)]
    fn narrow(number: f32) -> u16 {
        float::f32_to_f16(number)
    }
}

pub struct Bf16;

impl Format for Bf16 {
    type Stored = u16;
    type Number = f32;

    #[inline(always)]
    fn widen(stored: u16) -> f32 {
        float::bf16_to_f32(stored)
    }
    #[inline(always)]
    fn narrow(number: f32) -> u16 {
        float::f32_to_bf16(number)
    }
}

/// Real and imaginary part in one of the formats above, for the product, which needs both together. A sum processes the
/// parts as twice as many elements.
pub struct Complex<F>(std::marker::PhantomData<F>);

impl<F: Format> Format for Complex<F> {
    type Stored = [F::Stored; 2];
    type Number = [F::Number; 2];

    #[inline(always)]
    fn widen([real, imaginary]: Self::Stored) -> Self::Number {
        [F::widen(real), F::widen(imaginary)]
    }
    #[inline(always)]
    fn narrow([real, imaginary]: Self::Number) -> Self::Stored {
        [F::narrow(real), F::narrow(imaginary)]
    }
}
