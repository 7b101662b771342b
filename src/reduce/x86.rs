//! For x86_64 with AVX2 or AVX-512: compiles the loop of `scalar.rs` for wider vectors, and converts f16 with the
//! processor's conversion instructions.

use std::arch::x86_64::{
    _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_blendv_ps, _mm256_cmp_ps,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_set1_ps, _mm256_storeu_ps,
};

use super::float;
use super::number::Format;
use super::scalar::{Isa, Job, Op, Run, fold};

/// f16, converted eight at a time. The instructions round to nearest even and keep denormals in any mode of the thread.
pub struct HalfF16c;

impl Format for HalfF16c {
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

    #[inline(always)]
    unsafe fn widen_all<const N: usize>(stored: [u16; N]) -> [f32; N] {
        if !N.is_multiple_of(8) {
            return stored.map(Self::widen);
        }
        let mut numbers = [0.0; N];
        for i in (0..N).step_by(8) {
            // SAFETY: the caller vouches for F16C. `i + 8 <= N`, because N is a multiple of 8.
            unsafe {
                let eight = _mm_loadu_si128(stored.as_ptr().add(i).cast());
                _mm256_storeu_ps(numbers.as_mut_ptr().add(i), _mm256_cvtph_ps(eight));
            }
        }
        numbers
    }

    #[inline(always)]
    unsafe fn narrow_all<const N: usize>(numbers: [f32; N]) -> [u16; N] {
        if !N.is_multiple_of(8) {
            return numbers.map(Self::narrow);
        }
        let mut stored = [0; N];
        for i in (0..N).step_by(8) {
            // SAFETY: as in `widen_all`.
            unsafe {
                let eight = _mm256_loadu_ps(numbers.as_ptr().add(i));
                // The instruction would keep a part of a NaN's payload.
                let nan = _mm256_set1_ps(f32::from_bits(float::F32_NAN));
                let eight = _mm256_blendv_ps(eight, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(eight, eight));
                _mm_storeu_si128(
                    stored.as_mut_ptr().add(i).cast(),
                    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(eight),
                );
            }
        }
        stored
    }
}

macro_rules! isa {
    ($name:ident, $run:ident, $features:literal) => {
        pub struct $name;

        impl Isa for $name {
            type Half = HalfF16c;

            fn compile<F: Format, O: Op<F::Number>>() -> Run {
                $run::<F, O, false>
            }
            fn compile_partial<F: Format, O: Op<F::Number>>() -> Run {
                $run::<F, O, true>
            }
        }

        /// # Safety
        /// As for `Run`.
        #[target_feature(enable = $features)]
        unsafe fn $run<F: Format, O: Op<F::Number>, const PARTIAL: bool>(job: &Job<'_>) {
            // SAFETY: the caller vouches for it.
            unsafe { fold::<F, O, PARTIAL>(job) }
        }
    };
}
isa!(Avx2, run_avx2, "avx2,f16c");
isa!(Avx512, run_avx512, "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl");
