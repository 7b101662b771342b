//! f16 and bf16 in integer arithmetic, and the thread's floating-point mode.

pub const F32_NAN: u32 = 0x7fc0_0000;
pub const F64_NAN: u64 = 0x7ff8_0000_0000_0000;

/// Widens exactly.
#[inline(always)]
pub fn bf16_to_f32(stored: u16) -> f32 {
    f32::from_bits((stored as u32) << 16)
}

/// Rounds to nearest, ties to even. Keeps denormals, unlike x86's bf16 instructions.
#[inline(always)]
pub fn f32_to_bf16(number: f32) -> u16 {
    // The NaN is selected here, because a selection between values of the same width vectorizes well. Rounding does not
    // change this NaN.
    let number = if number.is_nan() { f32::from_bits(F32_NAN) } else { number };
    let bits = number.to_bits();
    // Adds half of the last place that is kept, minus one if that place is even. So a tie carries only if the place is
    // odd.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    (rounded >> 16) as u16
}

/// f32's exponent bias minus f16's, shifted to f32's exponent.
const REBIAS: u32 = (127 - 15) << 23;
const F16_NAN: u32 = 0x7e00;
const F32_INFINITY: u32 = 0x7f80_0000;
/// The smallest normal f16 as f32: 2^-14.
const F16_MIN_NORMAL: u32 = 0x3880_0000;
/// 2^16 as f32. From this magnitude on every number becomes infinity. Some smaller numbers do too, when they are
/// rounded.
const F16_BEYOND: u32 = 0x4780_0000;

/// Widens exactly.
#[inline(always)]
pub fn f16_to_f32(stored: u16) -> f32 {
    let sign = ((stored & 0x8000) as u32) << 16;
    let magnitude = (stored & 0x7fff) as u32;
    // A denormal is an integer multiple of 2^-24.
    let denormal = (magnitude as i32 as f32 * f32::from_bits(0x3380_0000)).to_bits();
    let normal = (magnitude << 13) + REBIAS;
    // Infinity and NaN have the largest exponent in both formats.
    let special = normal + REBIAS;
    let bits = if magnitude < 0x0400 { denormal } else { normal };
    let bits = if magnitude >= 0x7c00 { special } else { bits };
    f32::from_bits(sign | bits)
}

/// Rounds to nearest, ties to even. Keeps denormals.
#[inline(always)]
pub fn f32_to_f16(number: f32) -> u16 {
    let number = if number.is_nan() { f32::from_bits(F32_NAN) } else { number };
    let sign = (number.to_bits() >> 16) & 0x8000;
    let magnitude = number.to_bits() & 0x7fff_ffff;
    // Rounds to nearest even by an addition, like `f32_to_bf16`. A carry out of the largest exponent gives infinity,
    // which is correct.
    let normal = magnitude.wrapping_sub(REBIAS).wrapping_add(0x0fff + ((magnitude >> 13) & 1)) >> 13;
    // The last place of f32 numbers in [0.5, 1) is 2^-24, f16's smallest step, so this addition rounds to that step.
    let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let bits = if magnitude < F16_MIN_NORMAL { denormal } else { normal };
    let special = if magnitude > F32_INFINITY { F16_NAN } else { 0x7c00 };
    let bits = if magnitude >= F16_BEYOND { special } else { bits };
    (sign | bits) as u16
}

/// While this exists, this thread computes with the mode that IEEE 754 and Rust assume: it rounds to nearest even and
/// keeps denormals.
///
/// A program may change the mode of its own threads (`torch.set_flush_denormal`), but that does not change our threads
/// or other ranks. Without this guard, the bits would depend on which thread ran the operation.
pub struct StandardMode {
    /// The previous value of the control register, if it had to be changed.
    found: Option<mode::Register>,
}

impl StandardMode {
    #[inline(always)]
    pub fn enter() -> StandardMode {
        let found = mode::read();
        if mode::is_standard(found) {
            return StandardMode { found: None };
        }
        mode::write(mode::standard(found));
        StandardMode { found: Some(found) }
    }
}

impl Drop for StandardMode {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(found) = self.found {
            mode::write(found);
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod mode {
    use std::arch::asm;

    pub type Register = u32;

    /// MXCSR: denormals-are-zero (bit 6), rounding (13, 14), flush-to-zero (15).
    const NOT_STANDARD: Register = 1 << 6 | 3 << 13 | 1 << 15;

    #[inline(always)]
    pub fn read() -> Register {
        let mut register: Register = 0;
        // SAFETY: every x86_64 has SSE. The instruction writes the four bytes of `register` and nothing else.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut register, options(nostack, preserves_flags)) };
        register
    }

    #[inline(always)]
    pub fn is_standard(register: Register) -> bool {
        register & NOT_STANDARD == 0
    }

    #[inline(always)]
    pub fn standard(register: Register) -> Register {
        register & !NOT_STANDARD
    }

    #[cold]
    pub fn write(register: Register) {
        // SAFETY: the value was read from the register, possibly with the bits above cleared, so no reserved bit is set
        // and no exception is unmasked. `nomem` is not set, so that no store to memory moves across the instruction.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &register, options(nostack, preserves_flags)) };
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod mode {
    use std::arch::asm;

    pub type Register = u64;

    /// FPCR: FIZ (bit 0), AH (1), rounding (22, 23), flush-to-zero (24). Default NaN (25) is harmless.
    const NOT_STANDARD: Register = 1 | 1 << 1 | 3 << 22 | 1 << 24;

    #[inline(always)]
    pub fn read() -> Register {
        let register: Register;
        // SAFETY: reading FPCR is allowed in user mode and has no effect.
        unsafe { asm!("mrs {}, fpcr", out(reg) register, options(nostack, preserves_flags)) };
        register
    }

    #[inline(always)]
    pub fn is_standard(register: Register) -> bool {
        register & NOT_STANDARD == 0
    }

    #[inline(always)]
    pub fn standard(register: Register) -> Register {
        register & !NOT_STANDARD
    }

    #[cold]
    pub fn write(register: Register) {
        // SAFETY: the value was read from the register, possibly with the bits above cleared.
        unsafe { asm!("msr fpcr, {}", in(reg) register, options(nostack, preserves_flags)) };
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod mode {
    //! Reading and setting the floating-point mode is not implemented for this processor, so the mode stays unchanged.
    //! Miri has only one mode, and runs no assembly.
    pub type Register = ();

    pub fn read() -> Register {}
    pub fn is_standard(_: Register) -> bool {
        true
    }
    pub fn standard(_: Register) -> Register {}
    pub fn write(_: Register) {}
}
