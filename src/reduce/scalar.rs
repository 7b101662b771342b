//! The loop of every kernel, and the kernels for any processor.
//!
//! `fold` is always inlined into a small function for each instruction set (`Isa`), where the compiler vectorizes it.
//! It combines element by element in the order of the sources, so vector width and block size cannot change a bit.

use super::number::{Format, Half, Number};

/// The arguments of one call.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    pub dst: *mut u8,
    pub sources: &'a [*const u8],
    /// For PREMUL_SUM, one factor for each source; otherwise empty.
    pub factors: &'a [f64],
    pub ranks: usize,
    /// Number of elements in units of the kernel's format.
    pub elements: usize,
    /// Not null only in a `PARTIAL` job: the accumulators from which it continues, as an earlier job wrote them.
    pub from: *const u8,
    /// True only in a `PARTIAL` job: `dst` gets the accumulators, not the result.
    pub keeps: bool,
}

/// A kernel.
///
/// # Safety
/// As for `Kernel::reduce`, and the processor must have the features for which the kernel was compiled.
pub type Run = unsafe fn(&Job<'_>);

/// How numbers are combined.
pub trait Op<N> {
    /// True only for `PremulSum`, whose `enter` uses the source's factor.
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

/// This many elements are kept in registers at a time, which is enough to have several loads of every source in flight.
const BLOCK: usize = 64;
/// After the last whole block, this many elements are kept in registers at a time. If fewer are left, they are
/// processed one by one.
const PIECE: usize = 8;

/// Runs the whole job. `PARTIAL`: the job may combine a part of the sources (`Job::from`, `Job::keeps`). Other kernels do
/// not check this, because the check costs time: an all_reduce of 1 MiB on two ranks took a third longer.
///
/// # Safety
/// As for `Run`.
#[inline(always)]
pub unsafe fn fold<F: Format, O: Op<F::Number>, const PARTIAL: bool>(job: &Job<'_>) {
    let mut at = 0;
    // SAFETY: the caller vouches for `elements` elements, and every call stays below that.
    unsafe {
        while job.elements - at >= BLOCK {
            fold_block::<F, O, PARTIAL, BLOCK>(job, at);
            at += BLOCK;
        }
        while job.elements - at >= PIECE {
            fold_block::<F, O, PARTIAL, PIECE>(job, at);
            at += PIECE;
        }
        while at < job.elements {
            fold_block::<F, O, PARTIAL, 1>(job, at);
            at += 1;
        }
    }
}

/// Combines `N` elements beginning at `at`. All sources are read before `dst` is written, because `dst` may be one of
/// them.
///
/// # Safety
/// As for `Run`, and `at + N <= job.elements`.
#[inline(always)]
unsafe fn fold_block<F: Format, O: Op<F::Number>, const PARTIAL: bool, const N: usize>(job: &Job<'_>, at: usize) {
    let continues = PARTIAL && !job.from.is_null();
    let mut sum = if continues {
        // SAFETY: `from` is readable for `job.elements` accumulators, and needs no alignment.
        unsafe { job.from.cast::<F::Number>().add(at).cast::<[F::Number; N]>().read_unaligned() }
    } else {
        // SAFETY: the caller vouches for it, here and in the loop.
        unsafe { enter::<F, O, N>(job, 0, at) }
    };
    for source in usize::from(!continues)..job.sources.len() {
        // SAFETY: as above.
        let next = unsafe { enter::<F, O, N>(job, source, at) };
        for i in 0..N {
            sum[i] = O::combine(sum[i], next[i]);
        }
    }
    if PARTIAL && job.keeps {
        // SAFETY: `dst` is writable for `job.elements` accumulators, and needs no alignment.
        return unsafe { job.dst.cast::<F::Number>().add(at).cast::<[F::Number; N]>().write_unaligned(sum) };
    }
    for number in &mut sum {
        *number = O::leave(*number, job.ranks);
    }
    // SAFETY: the caller's processor has the features that `F` needs.
    let stored = unsafe { F::narrow_all(sum) };
    // SAFETY: `dst` is writable for `job.elements` elements, and needs no alignment.
    unsafe { job.dst.cast::<F::Stored>().add(at).cast::<[F::Stored; N]>().write_unaligned(stored) };
}

/// Reads `N` elements of one source and makes them ready to be combined. This is not a closure, because a closure would
/// not be inlined into the function for the instruction set, and its intrinsics would become calls.
///
/// # Safety
/// As for `fold_block`, and `source` must be the index of a source.
#[inline(always)]
unsafe fn enter<F: Format, O: Op<F::Number>, const N: usize>(
    job: &Job<'_>,
    source: usize,
    at: usize,
) -> [F::Number; N] {
    // SAFETY: the source is readable for `job.elements` elements, and needs no alignment.
    let stored = unsafe { job.sources[source].cast::<F::Stored>().add(at).cast::<[F::Stored; N]>().read_unaligned() };
    // SAFETY: the caller's processor has the features that `F` needs.
    let mut numbers = unsafe { F::widen_all(stored) };
    if O::SCALES {
        for number in &mut numbers {
            *number = O::enter(*number, job.factors[source]);
        }
    }
    numbers
}

/// An instruction set for which `fold` is compiled.
pub trait Isa {
    /// f16, converted by this set's own instructions if it has any.
    type Half: Format<Stored = u16, Number = f32>;

    fn compile<F: Format, O: Op<F::Number>>() -> Run;
    fn compile_partial<F: Format, O: Op<F::Number>>() -> Run;
}

/// The instruction set `I`, for `PARTIAL` jobs.
pub struct Partial<I>(std::marker::PhantomData<I>);

impl<I: Isa> Isa for Partial<I> {
    type Half = I::Half;

    fn compile<F: Format, O: Op<F::Number>>() -> Run {
        I::compile_partial::<F, O>()
    }
    fn compile_partial<F: Format, O: Op<F::Number>>() -> Run {
        I::compile_partial::<F, O>()
    }
}

/// The instructions that every processor has.
pub struct Portable;

impl Isa for Portable {
    type Half = Half;

    fn compile<F: Format, O: Op<F::Number>>() -> Run {
        fold::<F, O, false>
    }
    fn compile_partial<F: Format, O: Op<F::Number>>() -> Run {
        fold::<F, O, true>
    }
}
