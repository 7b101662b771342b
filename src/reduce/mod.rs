//! Combines numbers: `dst[i] = sources[0][i] op sources[1][i] op ...`, always in that order.
//!
//! Every result is computed only from its own elements, in rank order. It does not depend on how a tensor was cut, on
//! the vector width, or on the thread (design, "same bits"):
//! - f16 and bf16 are widened to f32, combined there, and rounded once (to nearest even) at the end;
//! - f32 and f64 are combined as they are, without fused multiply-add; denormals are kept;
//! - a NaN result is always the quiet NaN without sign and payload; MIN and MAX give NaN if any rank has one, and treat
//!   -0 as smaller than +0;
//! - integers wrap; bool is true for any byte except 0, its SUM and MAX are "or", its PRODUCT and MIN "and";
//! - AVG divides the sum once; integers truncate towards zero;
//! - PREMUL_SUM multiplies each rank's number by that rank's factor, which is rounded to the type in which numbers are
//!   combined.
//!
//! A group of one rank copies its source bit for bit (PREMUL_SUM scales it).
//!
//! `number` defines how numbers are stored and combined, `scalar` has the one loop, and `x86` compiles it for wider
//! vectors. `float` converts f16 and bf16, `int8` has the encodings of compressed sums, `hash` the hash of a result. To
//! add an operation, add an `Op` in `scalar.rs`, and a line in each of `bits`, `integer`, `real` and `complex` whose
//! types it supports.

#![allow(unsafe_code)] // loops over raw pointers, and instructions that the processor must have

mod float;
pub mod hash;
pub mod int8;
mod number;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

use once_cell::sync::Lazy;

use self::number::{Bf16, Bool, Complex, Float, Format, Int, Number};
use self::scalar::{
    And, Avg, ComplexProduct, Isa, Job, Max, Min, Or, Partial, Portable, PremulSum, Product, Run, Sum, Xor,
};
use crate::config;
use crate::error::{Error, Result};
use crate::types::{Dtype, ReduceOp};

pub use self::float::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// Instruction sets for which the kernels are compiled. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Portable,
    Avx2,
    Avx512,
}

impl Level {
    /// The levels that this processor can run, the best last.
    pub fn available() -> Vec<Level> {
        [Level::Portable, Level::Avx2, Level::Avx512].into_iter().filter(|level| level.can_run()).collect()
    }

    fn can_run(self) -> bool {
        self as u8 <= Level::best() as u8
    }

    /// The widest level of this processor that `SAGELLM_KERNELS` permits. The variable is read once, so all calls of a
    /// process use the same level.
    pub fn best() -> Level {
        static BEST: Lazy<Level> = Lazy::new(|| {
            let widest = Level::detect();
            let Some(asked) = config::kernels() else { return widest };
            match [Level::Portable, Level::Avx2, Level::Avx512].into_iter().find(|level| level.name() == asked.trim()) {
                Some(level) if level as u8 <= widest as u8 => level,
                known => {
                    let why = if known.is_some() {
                        "this processor does not have it"
                    } else {
                        "portable, avx2 and avx512 are known"
                    };
                    log::warn!("SAGELLM_KERNELS={asked} is ignored ({why}); the kernels use {}", widest.name());
                    widest
                }
            }
        });
        *BEST
    }

    /// How the variable `SAGELLM_KERNELS` spells this level.
    pub fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> Level {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match (avx2, avx512) {
            (_, true) => Level::Avx512,
            (true, _) => Level::Avx2,
            _ => Level::Portable,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect() -> Level {
        Level::Portable
    }
}

/// How one operation combines its elements.
#[derive(Clone, Copy)]
pub struct Kernel {
    run: Run,
    /// For a part of the sources.
    partial: Run,
    element_size: usize,
    /// Size of an element in the type in which it is combined.
    accumulator_size: usize,
    /// How many units of the kernel an element has: 2 if a complex number is processed as two parts, the size in bytes
    /// for bit operations, otherwise 1.
    units: usize,
    ranks: usize,
    /// Whether the op is PREMUL_SUM. If so, there is one factor for each source, and a single source is not just
    /// copied.
    scales: bool,
}

/// The kernel for an operation, chosen once. An error says which dtypes or operations are possible.
pub fn kernel(dtype: Dtype, op: ReduceOp, ranks: usize) -> Result<Kernel> {
    kernel_at(Level::best(), dtype, op, ranks)
}

/// Like `kernel`, but for any level of `Level::available`, so that levels can be compared.
///
/// # Panics
/// If this processor does not have the level, or `SAGELLM_KERNELS` does not permit it.
pub fn kernel_at(level: Level, dtype: Dtype, op: ReduceOp, ranks: usize) -> Result<Kernel> {
    assert!(level.can_run(), "kernels for {level:?} cannot run here");
    check(dtype, op)?;
    let (run, partial, units) = match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => choose_both::<self::x86::Avx512>(dtype, op),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => choose_both::<self::x86::Avx2>(dtype, op),
        _ => choose_both::<Portable>(dtype, op),
    }
    .ok_or_else(|| {
        Error::bug(format!("sagellm: no kernel for {} of {}", ReduceOp::name_of(op.code()), dtype.name()))
    })?;
    let scales = matches!(op, ReduceOp::PremulSum(_));
    let accumulator_size = dtype.size() * if matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::C32) { 2 } else { 1 };
    Ok(Kernel { run, partial, element_size: dtype.size(), accumulator_size, units, ranks, scales })
}

impl Kernel {
    /// Size of an element in bytes.
    pub fn element_size(&self) -> usize {
        self.element_size
    }

    /// Size of an element's accumulator in bytes. Elements of 16 bits are combined in 32.
    pub fn accumulator_size(&self) -> usize {
        self.accumulator_size
    }

    /// Computes `dst[i] = sources[0][i] op sources[1][i] op ...`, in the order of `sources`, for `elements` elements.
    /// For PREMUL_SUM, `factors` has one number for each source; otherwise it is not read.
    ///
    /// # Safety
    /// Every source must be readable and `dst` writable for `elements * element_size()` bytes, aligned or not. `dst`
    /// may be exactly one of the sources; otherwise it must not overlap any of them.
    pub unsafe fn reduce(&self, dst: *mut u8, sources: &[*const u8], factors: &[f64], elements: usize) {
        assert!(!sources.is_empty(), "a reduction needs at least one source");
        if !self.scales && sources.len() == 1 && self.ranks == 1 {
            // SAFETY: the caller vouches for it. `copy` allows the source to be the destination.
            return unsafe { copy(dst, sources[0], elements * self.element_size) };
        }
        let (elements, from) = (elements * self.units, std::ptr::null());
        // SAFETY: the caller vouches for it.
        unsafe { self.run(self.run, Job { dst, sources, factors, ranks: self.ranks, elements, from, keeps: false }) }
    }

    /// Begins a sum over some ranks that `finish` or another call of this function continues: writes the accumulators
    /// of `sources` to `dst`. If `from` is not null, the sum continues from the accumulators there. The result of
    /// several calls, each with some of the sources, has the bits of one `reduce` with all of them in the same order.
    ///
    /// # Safety
    /// As for `reduce`, except that `dst` and `from` have `accumulator_size()` bytes for each element. `dst` must not
    /// overlap a source; it may be `from`.
    pub unsafe fn accumulate(
        &self,
        dst: *mut u8,
        from: *const u8,
        sources: &[*const u8],
        factors: &[f64],
        elements: usize,
    ) {
        let elements = elements * self.units;
        // SAFETY: the caller vouches for it.
        unsafe { self.run(self.partial, Job { dst, sources, factors, ranks: self.ranks, elements, from, keeps: true }) }
    }

    /// Ends a sum that `accumulate` began: combines the accumulators at `from` with `sources` and writes the result to
    /// `dst`.
    ///
    /// # Safety
    /// As for `reduce`, and `from` must be readable for `accumulator_size()` bytes for each element and not overlap
    /// `dst`.
    pub unsafe fn finish(
        &self,
        dst: *mut u8,
        from: *const u8,
        sources: &[*const u8],
        factors: &[f64],
        elements: usize,
    ) {
        let elements = elements * self.units;
        // SAFETY: the caller vouches for it.
        unsafe {
            self.run(self.partial, Job { dst, sources, factors, ranks: self.ranks, elements, from, keeps: false })
        }
    }

    /// # Safety
    /// As for `Run`, except for the processor's features, which `kernel_at` has checked.
    unsafe fn run(&self, run: Run, job: Job<'_>) {
        let wanted = if self.scales { job.sources.len() } else { job.factors.len() };
        assert_eq!(job.factors.len(), wanted, "PREMUL_SUM needs one factor for each source");
        let _mode = self::float::StandardMode::enter();
        // SAFETY: the caller vouches for it. `kernel_at` has checked that the processor can run this kernel.
        unsafe { run(&job) }
    }
}

/// Copies into or out of a staging area. The written data stays in the cache, where a peer will read it.
///
/// The platform's `memcpy` is best for this. Compared with AVX2 and AVX-512 loops it was 1.3 times as fast from 64 to
/// 512 KiB, and up to twice as slow between 4 and 16 KiB. But for large copies it bypasses the cache, from a size that
/// depends on the machine and on tunables. So this function copies in pieces well below that size.
///
/// # Safety
/// `src` must be readable and `dst` writable for `bytes`. They must be the same address or not overlap.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, bytes: usize) {
    const PIECE: usize = 128 << 10;
    if dst.cast_const() == src {
        return;
    }
    let mut at = 0;
    while at < bytes {
        let piece = PIECE.min(bytes - at);
        // SAFETY: the caller vouches for it. The ranges do not overlap, because the addresses differ.
        unsafe { std::ptr::copy_nonoverlapping(src.add(at), dst.add(at), piece) };
        at += piece;
    }
}

/// Refuses combinations that have no meaning.
fn check(dtype: Dtype, op: ReduceOp) -> Result<()> {
    use ReduceOp::*;
    let advice = match dtype {
        Dtype::Bytes => {
            return Err(Error::invalid(format!(
                "ReduceOp.{} cannot combine plain bytes: the call must name the dtype of its elements",
                ReduceOp::name_of(op.code())
            )));
        }
        Dtype::F8E4M3 | Dtype::F8E5M2 => "the CPU only moves 8-bit floats; convert to float16 or wider first",
        Dtype::Bool if matches!(op, Avg | PremulSum(_)) => {
            "use SUM, MAX or BOR (any rank), PRODUCT, MIN or BAND (every rank), BXOR, or convert to a float dtype first"
        }
        Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 if matches!(op, Band | Bor | Bxor) => {
            "use an integer or bool dtype (Tensor.view reinterprets the bits), or SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM"
        }
        Dtype::C32 | Dtype::C64 | Dtype::C128 if matches!(op, Min | Max | Band | Bor | Bxor) => {
            "complex numbers have SUM, AVG, PRODUCT and PREMUL_SUM; torch.view_as_real gives their parts"
        }
        _ => return check_factor(dtype, op),
    };
    let op = ReduceOp::name_of(op.code());
    Err(Error::invalid(format!("ReduceOp.{op} is not defined for {}; {advice}", dtype.name())))
}

/// Refuses fractional factors of integers: an integer times 0.5 would be an integer times 0.
fn check_factor(dtype: Dtype, op: ReduceOp) -> Result<()> {
    let integer =
        !matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 | Dtype::C32 | Dtype::C64 | Dtype::C128);
    match op {
        ReduceOp::PremulSum(factor) if integer && factor.fract() != 0.0 => Err(Error::invalid(format!(
            "ReduceOp.PREMUL_SUM of {} needs a whole number as its factor, got {factor}; convert to a float dtype first",
            dtype.name()
        ))),
        _ => Ok(()),
    }
}

/// The kernels for all sources and for a part of them, and their units per element. `None` for combinations that
/// `check` refuses.
fn choose_both<I: Isa>(dtype: Dtype, op: ReduceOp) -> Option<(Run, Run, usize)> {
    let (run, units) = choose::<I>(dtype, op)?;
    let (partial, _) = choose::<Partial<I>>(dtype, op)?;
    Some((run, partial, units))
}

/// A kernel and its units per element. `None` for combinations that `check` refuses.
fn choose<I: Isa>(dtype: Dtype, op: ReduceOp) -> Option<(Run, usize)> {
    if let Some(run) = bits::<I>(dtype, op) {
        return Some((run, dtype.size()));
    }
    let run = match dtype {
        Dtype::Bytes | Dtype::Bool | Dtype::F8E4M3 | Dtype::F8E5M2 => None,
        Dtype::U8 => integer::<I, u8, u8>(op),
        Dtype::I8 => integer::<I, i8, u8>(op),
        Dtype::U16 => integer::<I, u16, u16>(op),
        Dtype::I16 => integer::<I, i16, u16>(op),
        Dtype::U32 => integer::<I, u32, u32>(op),
        Dtype::I32 => integer::<I, i32, u32>(op),
        Dtype::U64 => integer::<I, u64, u64>(op),
        Dtype::I64 => integer::<I, i64, u64>(op),
        Dtype::F16 => real::<I, I::Half>(op),
        Dtype::Bf16 => real::<I, Bf16>(op),
        Dtype::F32 => real::<I, Float<f32>>(op),
        Dtype::F64 => real::<I, Float<f64>>(op),
        Dtype::C32 => return complex::<I, I::Half>(op),
        Dtype::C64 => return complex::<I, Float<f32>>(op),
        Dtype::C128 => return complex::<I, Float<f64>>(op),
    };
    run.map(|run| (run, 1))
}

/// Bitwise kernels, for bool and for integers. Bytes of a bool are converted to 0 or 1 when they are read; integers of
/// any width are processed as bytes.
fn bits<I: Isa>(dtype: Dtype, op: ReduceOp) -> Option<Run> {
    use ReduceOp::*;
    Some(match (dtype, op) {
        (Dtype::Bool, Sum | Max | Bor) => I::compile::<Bool, Or>(),
        (Dtype::Bool, Product | Min | Band) => I::compile::<Bool, And>(),
        (Dtype::Bool, Bxor) => I::compile::<Bool, Xor>(),
        (_, Bor) => I::compile::<Int<u8>, Or>(),
        (_, Band) => I::compile::<Int<u8>, And>(),
        (_, Bxor) => I::compile::<Int<u8>, Xor>(),
        _ => return None,
    })
}

/// `U` is the unsigned type that has the width of `T`. Wrapping sums and products have the same bits in both types, so
/// one kernel serves both.
fn integer<I: Isa, T: Number, U: Number>(op: ReduceOp) -> Option<Run> {
    Some(match op {
        ReduceOp::Sum => I::compile::<Int<U>, Sum>(),
        ReduceOp::Product => I::compile::<Int<U>, Product>(),
        ReduceOp::PremulSum(_) => I::compile::<Int<U>, PremulSum>(),
        ReduceOp::Avg => I::compile::<Int<T>, Avg>(),
        ReduceOp::Min => I::compile::<Int<T>, Min>(),
        ReduceOp::Max => I::compile::<Int<T>, Max>(),
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => return None,
    })
}

fn real<I: Isa, F: Format<Number: Number>>(op: ReduceOp) -> Option<Run> {
    Some(match op {
        ReduceOp::Sum => I::compile::<F, Sum>(),
        ReduceOp::Avg => I::compile::<F, Avg>(),
        ReduceOp::Product => I::compile::<F, Product>(),
        ReduceOp::Min => I::compile::<F, Min>(),
        ReduceOp::Max => I::compile::<F, Max>(),
        ReduceOp::PremulSum(_) => I::compile::<F, PremulSum>(),
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => return None,
    })
}

/// Kernels of complex numbers. All except the product treat each number as two real numbers.
fn complex<I: Isa, F: Format>(op: ReduceOp) -> Option<(Run, usize)>
where
    F::Number: Number + std::ops::Sub<Output = F::Number>,
{
    match op {
        ReduceOp::Product => Some((I::compile::<Complex<F>, ComplexProduct>(), 1)),
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => real::<I, F>(op).map(|run| (run, 2)),
        _ => None,
    }
}
