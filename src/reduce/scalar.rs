//! The loop of every kernel, and the kernels for any processor.
//!
//! `fold` is always inlined into a small function per instruction set (`Isa`), where the compiler makes vectors of it.
//! It combines element by element in the order of the sources, so vector width and blocking cannot change a bit.

use super::number::{Format, Half, Number};

/// One call.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    pub dst: *mut u8,
    pub sources: &'a [*const u8],
    /// One per source for PREMUL_SUM, else empty.
    pub factors: &'a [f64],
    pub ranks: usize,
    /// In units of the kernel's format.
    pub elements: usize,
}

/// A kernel.
///
/// # Safety
/// As `Kernel::reduce`, and the processor has the features the kernel was compiled for.
pub type Run = unsafe fn(&Job<'_>);

/// How numbers are combined.
pub trait Op<N> {
    /// `PremulSum` only: `enter` reads the source's factor.
    const SCALES: bool = false;

    #[inline(always)]
    fn enter(number: N, _factor: f64) -> N {
        number
    }
    fn combine(left: N, right: N) -> N;
    #[inline(always)]
    fn leave(number: N, _ranks: usize) -> N {
        number
    }
}

macro_rules! simple_op {
    ($name:ident, $bound:path, |$left:ident, $right:ident| $combine:expr) => {
        pub struct $name;

        impl<N: $bound> Op<N> for $name {
            #[inline(always)]
            fn combine($left: N, $right: N) -> N {
                $combine
            }
        }
    };
}
simple_op!(Sum, Number, |left, right| left.add(right));
simple_op!(Product, Number, |left, right| left.multiply(right));
simple_op!(Min, Number, |left, right| left.smaller(right));
simple_op!(Max, Number, |left, right| left.larger(right));

macro_rules! bit_op {
    ($name:ident, $operator:tt) => {
        pub struct $name;

        impl Op<u8> for $name {
            #[inline(always)]
            fn combine(left: u8, right: u8) -> u8 {
                left $operator right
            }
        }
    };
}
bit_op!(And, &);
bit_op!(Or, |);
bit_op!(Xor, ^);

pub struct Avg;

impl<N: Number> Op<N> for Avg {
    #[inline(always)]
    fn combine(left: N, right: N) -> N {
        left.add(right)
    }
    #[inline(always)]
    fn leave(number: N, ranks: usize) -> N {
        number.divide(ranks)
    }
}

pub struct PremulSum;

impl<N: Number> Op<N> for PremulSum {
    const SCALES: bool = true;

    #[inline(always)]
    fn enter(number: N, factor: f64) -> N {
        number.scale(factor)
    }
    #[inline(always)]
    fn combine(left: N, right: N) -> N {
        left.add(right)
    }
}

pub struct ComplexProduct;

impl<N: Number + std::ops::Sub<Output = N>> Op<[N; 2]> for ComplexProduct {
    #[inline(always)]
    fn combine([a, b]: [N; 2], [c, d]: [N; 2]) -> [N; 2] {
        [a.multiply(c) - b.multiply(d), a.multiply(d).add(b.multiply(c))]
    }
}

/// Elements that are held in registers at a time: enough for several loads of every source to be in flight.
const BLOCK: usize = 64;
/// The same for what is left; then one by one.
const PIECE: usize = 8;

/// The whole job.
///
/// # Safety
/// As `Run`.
#[inline(always)]
pub unsafe fn fold<F: Format, O: Op<F::Number>>(job: &Job<'_>) {
    let mut at = 0;
    // SAFETY: the caller's promise holds for `elements` elements, and every call stays below that.
    unsafe {
        while job.elements - at >= BLOCK {
            fold_block::<F, O, BLOCK>(job, at);
            at += BLOCK;
        }
        while job.elements - at >= PIECE {
            fold_block::<F, O, PIECE>(job, at);
            at += PIECE;
        }
        while at < job.elements {
            fold_block::<F, O, 1>(job, at);
            at += 1;
        }
    }
}

/// `N` elements from `at`. All sources are read before `dst` is written: it may be one of them.
///
/// # Safety
/// As `Run`; `at + N <= job.elements`.
#[inline(always)]
unsafe fn fold_block<F: Format, O: Op<F::Number>, const N: usize>(job: &Job<'_>, at: usize) {
    // SAFETY: the caller's promise, here and in the loop.
    let mut sum = unsafe { enter::<F, O, N>(job, 0, at) };
    for source in 1..job.sources.len() {
        // SAFETY: as above.
        let next = unsafe { enter::<F, O, N>(job, source, at) };
        for i in 0..N {
            sum[i] = O::combine(sum[i], next[i]);
        }
    }
    for number in &mut sum {
        *number = O::leave(*number, job.ranks);
    }
    // SAFETY: the caller's processor has the features that `F` asks for.
    let stored = unsafe { F::narrow_all(sum) };
    // SAFETY: `dst` is writable for `job.elements` elements; alignment is not asked for.
    unsafe { job.dst.cast::<F::Stored>().add(at).cast::<[F::Stored; N]>().write_unaligned(stored) };
}

/// `N` elements of one source, ready to be combined. (Not a closure: that would not be inlined into the function with
/// the instruction set, and its instructions would then be calls.)
///
/// # Safety
/// As `fold_block`; `source` is one of the sources.
#[inline(always)]
unsafe fn enter<F: Format, O: Op<F::Number>, const N: usize>(
    job: &Job<'_>,
    source: usize,
    at: usize,
) -> [F::Number; N] {
    // SAFETY: the source is readable for `job.elements` elements; alignment is not asked for.
    let stored = unsafe { job.sources[source].cast::<F::Stored>().add(at).cast::<[F::Stored; N]>().read_unaligned() };
    // SAFETY: the caller's processor has the features that `F` asks for.
    let mut numbers = unsafe { F::widen_all(stored) };
    if O::SCALES {
        for number in &mut numbers {
            *number = O::enter(*number, job.factors[source]);
        }
    }
    numbers
}

/// An instruction set: compiles `fold` for itself.
pub trait Isa {
    /// f16 with the instructions there are.
    type Half: Format<Stored = u16, Number = f32>;

    fn compile<F: Format, O: Op<F::Number>>() -> Run;
}

/// The instructions that every processor has.
pub struct Portable;

impl Isa for Portable {
    type Half = Half;

    fn compile<F: Format, O: Op<F::Number>>() -> Run {
        fold::<F, O>
    }
}
