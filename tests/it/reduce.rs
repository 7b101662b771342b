//! Reduction kernels against plain loops, bit for bit: every dtype, operation and instruction set of this machine.

use sagellm::error::ErrorKind;
use sagellm::reduce;
use sagellm::reduce::{Level, f16_to_f32, f32_to_bf16, f32_to_f16, kernel, kernel_at};
use sagellm::types::{Dtype, ReduceOp};

use crate::common::reference::{bytes_of, decode_16, is_complex, is_defined, is_float, power_of_two, reference_all};
use crate::common::this_program;

const OPS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Band,
    ReduceOp::Bor,
    ReduceOp::Bxor,
    ReduceOp::PremulSum(3.0),
];

/// Random numbers that are the same on every run (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Bit patterns that are rare in random data and often handled wrongly: zeros, infinities, NaNs of all kinds,
/// denormals, extremes.
const RARE_16: [u16; 16] = [
    0, 0x8000, 0x7c00, 0xfc00, 0x7c01, 0xfe35, 1, 0x83ff, 0x7bff, 0x7f80, 0xff80, 0x7f81, 0xffc1, 0x007f, 0x7f7f,
    0xffff,
];
const RARE_32: [u32; 10] =
    [0, 1 << 31, 0x7f80_0000, 0xff80_0000, 0x7f80_0001, 0xffc1_2345, 1, 0x807f_ffff, 0x7f7f_ffff, 0xffff_ffff];
const RARE_64: [u64; 10] =
    [0, 1 << 63, 0x7ff << 52, 0xfff << 52, (0x7ff << 52) + 1, 0xfff8_0000_0000_1234, 1, (1 << 52) - 1, !0 >> 1, !0];

/// Returns random elements. If `wild`, they may have any bit pattern, and one in four has a rare one. Otherwise they
/// are near 1, so that their sums and products stay finite.
fn fill(random: &mut Random, dtype: Dtype, wild: bool, elements: usize) -> Vec<u8> {
    let (part, parts) = match dtype {
        Dtype::C32 => (Dtype::F16, 2),
        Dtype::C64 => (Dtype::F32, 2),
        Dtype::C128 => (Dtype::F64, 2),
        other => (other, 1),
    };
    let mut bytes = Vec::with_capacity(elements * dtype.size());
    for _ in 0..elements * parts {
        let bits = random.next();
        let rare = wild && random.below(4) == 0;
        if rare {
            match part.size() {
                1 => bytes.push([0, 1, 0x7f, 0x80, 0xff, 2][random.below(6)]),
                2 => bytes.extend(RARE_16[random.below(RARE_16.len())].to_le_bytes()),
                4 => bytes.extend(RARE_32[random.below(RARE_32.len())].to_le_bytes()),
                _ => bytes.extend(RARE_64[random.below(RARE_64.len())].to_le_bytes()),
            }
        } else if wild || !is_float(part) {
            bytes.extend(&bits.to_le_bytes()[..part.size()]);
        } else {
            let near = (bits as i64 >> 11) as f64 / power_of_two(51);
            match part {
                Dtype::F64 => bytes.extend(near.to_le_bytes()),
                _ => bytes.extend(bytes_of(part, near as f32)),
            }
        }
    }
    bytes
}

/// A copy of some bytes, with a frame around it. The copy's address is `offset` past a multiple of 64.
struct Placed {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Placed {
    fn new(content: &[u8], offset: usize) -> Placed {
        // The frame: no kernel may write to these bytes.
        let mut memory = vec![0xa5; content.len() + 256];
        let start = 64 + memory.as_ptr().align_offset(64) + offset;
        memory[start..start + content.len()].copy_from_slice(content);
        Placed { memory, start, bytes: content.len() }
    }

    /// Returns a pointer to the copy. Makes no slice, because a slice would end the right to write through pointers
    /// that were returned before.
    fn at(&mut self) -> *mut u8 {
        self.memory.as_mut_ptr().wrapping_add(self.start)
    }

    fn content(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }

    fn frame_is_intact(&self) -> bool {
        let outside = self.memory[..self.start].iter().chain(&self.memory[self.start + self.bytes..]);
        outside.into_iter().all(|byte| *byte == 0xa5)
    }
}

/// Runs the kernel on copies of `inputs`. `in_place` is the index of the source that is also the destination, or None.
fn run(
    kernel: &reduce::Kernel,
    inputs: &[Vec<u8>],
    factors: &[f64],
    offset: usize,
    in_place: Option<usize>,
) -> Vec<u8> {
    let elements = inputs[0].len() / kernel.element_size();
    let mut placed: Vec<Placed> =
        inputs.iter().enumerate().map(|(i, c)| Placed::new(c, offset * (i + 1) % 64)).collect();
    let mut out = Placed::new(&vec![0x5a; inputs[0].len()], offset);
    let dst = in_place.map_or(out.at(), |source| placed[source].at());
    let sources: Vec<*const u8> = placed.iter_mut().map(|p| p.at().cast_const()).collect();
    // SAFETY: every pointer is to `elements` elements; `dst` is a separate buffer or exactly one of the sources.
    unsafe { kernel.reduce(dst, &sources, factors, elements) };
    for (source, (now, before)) in placed.iter().zip(inputs).enumerate() {
        assert!(now.frame_is_intact(), "wrote outside source {source}");
        assert!(in_place == Some(source) || now.content() == before, "changed source {source}");
    }
    assert!(out.frame_is_intact(), "wrote outside the destination");
    match in_place {
        Some(source) => placed[source].content().to_vec(),
        None => out.content().to_vec(),
    }
}

/// Like `run`, but combines the first `cut` inputs, continues with all but the last of the rest, and ends with the last.
fn run_in_parts(kernel: &reduce::Kernel, inputs: &[Vec<u8>], factors: &[f64], cut: usize) -> Vec<u8> {
    let elements = inputs[0].len() / kernel.element_size();
    let sources: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
    let (mut sums, mut out) = (vec![0x5a; elements * kernel.accumulator_size()], vec![0xa5; inputs[0].len()]);
    let of = |from: usize, until: usize| (&sources[from..until], factors.get(from..until).unwrap_or(&[]));
    let last = inputs.len() - 1;
    let ((first, scaled), (middle, by), (rest, finally)) =
        (of(0, cut), of(cut, last.max(cut)), of(last.max(cut), last + 1));
    // SAFETY: every pointer is to `elements` elements or accumulators. The buffers do not overlap.
    unsafe {
        kernel.accumulate(sums.as_mut_ptr(), std::ptr::null(), first, scaled, elements);
        kernel.accumulate(sums.as_mut_ptr(), sums.as_ptr(), middle, by, elements);
        kernel.finish(out.as_mut_ptr(), sums.as_ptr(), rest, finally, elements);
    }
    out
}

fn assert_same(dtype: Dtype, got: &[u8], expected: &[u8], what: &dyn std::fmt::Debug) {
    if got != expected {
        let size = dtype.size();
        let at = (0..expected.len() / size).find(|i| got[i * size..][..size] != expected[i * size..][..size]).unwrap();
        let (got, expected) = (&got[at * size..][..size], &expected[at * size..][..size]);
        panic!("{}, {what:?}: element {at} is {got:02x?}, expected {expected:02x?}", dtype.name());
    }
}

/// Returns the factor of each rank for PREMUL_SUM; whole numbers for integer types. Empty for other reduce ops.
fn factors_of(dtype: Dtype, op: ReduceOp, ranks: usize) -> Vec<f64> {
    let whole = !is_float(dtype) && !is_complex(dtype);
    match op {
        ReduceOp::PremulSum(_) if whole => (0..ranks).map(|rank| rank as f64 * 3.0 - 7.0).collect(),
        ReduceOp::PremulSum(_) => (0..ranks).map(|rank| 0.1 + rank as f64 * -0.77).collect(),
        _ => Vec::new(),
    }
}

fn check(dtype: Dtype, ranks: usize) {
    let mut random = Random(dtype as u64 * 1000 + ranks as u64);
    for op in OPS.into_iter().filter(|op| is_defined(dtype, *op)) {
        let factors = factors_of(dtype, op, ranks);
        let counts: &[usize] = if cfg!(miri) { &[0, 1, 21] } else { &[0, 1, 77, 4097] };
        for &count in counts {
            // Under Miri a NaN has random bits.
            for &wild in if cfg!(miri) { &[false][..] } else { &[false, true] } {
                let inputs: Vec<Vec<u8>> = (0..ranks).map(|_| fill(&mut random, dtype, wild, count)).collect();
                let expected = reference_all(dtype, op, &inputs, &factors);
                for level in Level::available() {
                    let kernel = kernel_at(level, dtype, op, ranks).unwrap();
                    let try_it = |offset: usize, in_place: Option<usize>| {
                        let got = run(&kernel, &inputs, &factors, offset, in_place);
                        assert_same(dtype, &got, &expected, &(op, level, ranks, count, wild, offset, in_place));
                    };
                    try_it(0, None);
                    try_it(1, None);
                    for cut in [1, ranks / 2, ranks - 1].into_iter().filter(|cut| (1..ranks).contains(cut)) {
                        let got = run_in_parts(&kernel, &inputs, &factors, cut);
                        assert_same(dtype, &got, &expected, &(op, level, ranks, count, wild, "cut", cut));
                    }
                    // In place on every source if the run is short, else only on the first and the last source.
                    for source in (0..ranks).filter(|s| count < 100 || *s == 0 || s + 1 == ranks) {
                        try_it(0, Some(source));
                        try_it(3, Some(source));
                    }
                }
            }
        }
    }
}

macro_rules! every_rank_count {
    ($($name:ident: $dtype:expr;)*) => {$(
        #[test]
        fn $name() {
            for &ranks in if cfg!(miri) { &[2, 3][..] } else { &[1, 2, 3, 4, 5, 17] } {
                check($dtype, ranks);
            }
        }
    )*};
}
every_rank_count! {
    bool_equals_reference: Dtype::Bool;
    u8_equals_reference: Dtype::U8;
    i8_equals_reference: Dtype::I8;
    u16_equals_reference: Dtype::U16;
    i16_equals_reference: Dtype::I16;
    u32_equals_reference: Dtype::U32;
    i32_equals_reference: Dtype::I32;
    u64_equals_reference: Dtype::U64;
    i64_equals_reference: Dtype::I64;
    f16_equals_reference: Dtype::F16;
    bf16_equals_reference: Dtype::Bf16;
    f32_equals_reference: Dtype::F32;
    f64_equals_reference: Dtype::F64;
    c32_equals_reference: Dtype::C32;
    c64_equals_reference: Dtype::C64;
    c128_equals_reference: Dtype::C128;
}

/// Invariant "same bits": a tensor that is reduced in pieces gives the same bits as the whole tensor.
#[test]
#[cfg_attr(miri, ignore = "under Miri a NaN has random bits")]
fn cutting_does_not_change_a_bit() {
    let mut random = Random(42);
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::C64, Dtype::I16, Dtype::Bool] {
        for op in OPS.into_iter().filter(|op| is_defined(dtype, *op)) {
            let (count, ranks, size) = (1500, 3, dtype.size());
            let factors = factors_of(dtype, op, ranks);
            let inputs: Vec<Vec<u8>> = (0..ranks).map(|_| fill(&mut random, dtype, true, count)).collect();
            let kernel = kernel(dtype, op, ranks).unwrap();
            let whole = run(&kernel, &inputs, &factors, 0, None);
            let mut pieces = Vec::new();
            while pieces.len() < whole.len() {
                let from = pieces.len();
                let until = (from + (1 + random.below(200)) * size).min(whole.len());
                let cut: Vec<Vec<u8>> = inputs.iter().map(|input| input[from..until].to_vec()).collect();
                pieces.extend(run(&kernel, &cut, &factors, random.below(64), None));
            }
            assert_same(dtype, &pieces, &whole, &op);
        }
    }
}

/// Multiplies every f16 and bf16 value by several factors, with every kernel, so that the results to be rounded are
/// arbitrary f32 numbers.
#[test]
#[cfg_attr(miri, ignore = "takes Miri minutes, and is about numbers alone")]
fn low_precision_rounds_alike_for_all_values_and_levels() {
    let every: Vec<u8> = (0..=u16::MAX).flat_map(|bits| bits.to_le_bytes()).collect();
    let op = ReduceOp::PremulSum(1.0);
    for dtype in [Dtype::F16, Dtype::Bf16] {
        // The factor 1 must return each number unchanged. The others produce denormals, ties, overflow, and full f32
        // fractions.
        for factor in [1.0, 0.5, 2f64.powi(-9), 1.0 + 2f64.powi(-11), 1.0 - 2f64.powi(-11), 2.0, -1.0 / 3.0, 1e-3, 1e30]
        {
            let inputs = [every.clone()];
            let expected = reference_all(dtype, op, &inputs, &[factor]);
            for level in Level::available() {
                let kernel = kernel_at(level, dtype, op, 1).unwrap();
                assert_same(dtype, &run(&kernel, &inputs, &[factor], 0, None), &expected, &(level, factor));
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes Miri minutes, and is about numbers alone")]
fn conversions_are_exact_and_round_to_nearest_even() {
    for bits in 0..=u16::MAX {
        let (half, brain) = (f16_to_f32(bits), reduce::bf16_to_f32(bits));
        let (half_expected, brain_expected) = (decode_16(bits, 10), decode_16(bits, 7));
        assert_eq!(half.is_nan(), half_expected.is_nan(), "f16 {bits:#06x}");
        assert_eq!(brain.is_nan(), brain_expected.is_nan(), "bf16 {bits:#06x}");
        let back = if half.is_nan() { 0x7e00 } else { bits };
        assert_eq!(f32_to_f16(half), back, "f16 {bits:#06x} there and back");
        let back = if brain.is_nan() { 0x7fc0 } else { bits };
        assert_eq!(f32_to_bf16(brain), back, "bf16 {bits:#06x} there and back");
        if !half.is_nan() {
            assert_eq!(half.to_bits(), (half_expected as f32).to_bits(), "f16 {bits:#06x}");
        }
        if !brain.is_nan() {
            assert_eq!(brain.to_bits(), (brain_expected as f32).to_bits(), "bf16 {bits:#06x}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes Miri minutes, and is about numbers alone")]
fn halfway_cases_go_to_the_even_neighbour() {
    let neighbours = |number: f32| [f32::from_bits(number.to_bits() - 1), number, f32::from_bits(number.to_bits() + 1)];
    // The last step is from the largest finite number to infinity.
    for bits in 0..0x7c00u16 {
        let next = if bits == 0x7bff { 65536.0 } else { f16_to_f32(bits + 1) };
        let middle = (f16_to_f32(bits) + next) / 2.0;
        let even = bits + (bits & 1);
        assert_eq!(neighbours(middle).map(f32_to_f16), [bits, even, bits + 1], "between f16 {bits:#06x} and the next");
        let minus = |h: u16| h | 0x8000;
        assert_eq!(neighbours(middle).map(|n| f32_to_f16(-n)), [bits, even, bits + 1].map(minus), "-f16 {bits:#06x}");
    }
    for bits in 0..0x7f80u16 {
        let middle = f32::from_bits((bits as u32) << 16 | 0x8000);
        let even = bits + (bits & 1);
        assert_eq!(
            neighbours(middle).map(f32_to_bf16),
            [bits, even, bits + 1],
            "between bf16 {bits:#06x} and the next"
        );
    }
    assert_eq!(f32_to_f16(f32::MAX), 0x7c00);
    assert_eq!(f32_to_f16(f32::NEG_INFINITY), 0xfc00);
    assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
    assert_eq!(f32_to_bf16(f32::from_bits(0xffff_ffff)), 0x7fc0, "a NaN that carries out of its bits");
}

/// A low-precision sum is rounded once, not after each addition: 2048 + 1 + 1 is 2048 in f16 arithmetic.
#[test]
fn low_precision_is_rounded_once() {
    let inputs: Vec<Vec<u8>> = [0x6800u16, 0x3c00, 0x3c00].iter().map(|bits| bits.to_le_bytes().to_vec()).collect();
    let kernel = kernel(Dtype::F16, ReduceOp::Sum, 3).unwrap();
    assert_eq!(run(&kernel, &inputs, &[], 0, None), 0x6801u16.to_le_bytes());
}

#[test]
fn nan_and_zeros_in_min_and_max() {
    let nan = f32::from_bits(0xff80_0001);
    let cases = [
        (ReduceOp::Max, [nan, 1.0], 0x7fc0_0000),
        (ReduceOp::Max, [1.0, nan], 0x7fc0_0000),
        (ReduceOp::Min, [nan, f32::NEG_INFINITY], 0x7fc0_0000),
        (ReduceOp::Max, [-0.0, 0.0], 0),
        (ReduceOp::Max, [0.0, -0.0], 0),
        (ReduceOp::Min, [-0.0, 0.0], 1 << 31),
        (ReduceOp::Min, [0.0, -0.0], 1 << 31),
    ];
    for (op, values, expected) in cases {
        // 75 elements fill several vectors and leave a remainder.
        let inputs: Vec<Vec<u8>> = values.iter().map(|v| v.to_le_bytes().repeat(75)).collect();
        for level in Level::available() {
            let kernel = kernel_at(level, Dtype::F32, op, 2).unwrap();
            let expected = u32::to_le_bytes(expected).repeat(75);
            assert_same(Dtype::F32, &run(&kernel, &inputs, &[], 0, None), &expected, &(op, values, level));
        }
    }
}

/// 200 does not fit into an i8, so the divisor must not be converted to the element type.
#[test]
fn integer_average_divides_by_many_ranks() {
    let inputs: Vec<Vec<u8>> = (0..200).map(|rank| vec![if rank < 100 { 1u8 } else { 0 }]).collect();
    for (dtype, expected) in [(Dtype::I8, 0u8), (Dtype::U8, 0)] {
        let kernel = kernel(dtype, ReduceOp::Avg, 200).unwrap();
        assert_eq!(run(&kernel, &inputs, &[], 0, None), [expected]);
    }
    let kernel = kernel(Dtype::I32, ReduceOp::Avg, 2).unwrap();
    let inputs = [(-3i32).to_le_bytes().to_vec(), (-4i32).to_le_bytes().to_vec()];
    assert_eq!(run(&kernel, &inputs, &[], 0, None), (-3i32).to_le_bytes(), "-7 / 2 truncates towards zero");
}

/// Access to the thread's floating-point control register. `ODD` has the bits that flush denormals and round towards
/// zero.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
mod float_mode {
    use std::arch::asm;

    #[cfg(target_arch = "x86_64")]
    pub const ODD: u64 = 1 << 15 | 1 << 6 | 3 << 13;
    #[cfg(target_arch = "aarch64")]
    pub const ODD: u64 = 1 << 24 | 3 << 22;

    pub fn get() -> u64 {
        let mut mode = 0u64;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: stores MXCSR into the lower four bytes of `mode`.
        unsafe {
            asm!("stmxcsr [{}]", in(reg) &mut mode, options(nostack));
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: reads FPCR.
        unsafe {
            asm!("mrs {}, fpcr", out(reg) mode, options(nostack));
        }
        mode
    }

    pub fn set(mode: u64) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: loads a value that was read from MXCSR, with `ODD` set or not.
        unsafe {
            asm!("ldmxcsr [{}]", in(reg) &mode, options(nostack));
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: writes a value that was read from FPCR, with `ODD` set or not.
        unsafe {
            asm!("msr fpcr, {}", in(reg) mode, options(nostack));
        }
    }
}

/// A thread that flushes denormals must get the same bits as every other thread.
#[test]
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))] // Miri runs no assembly
fn result_does_not_depend_on_the_threads_float_mode() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64] {
        let mut random = Random(7);
        let mut denormals = |count: usize| -> Vec<u8> {
            let exponent = match dtype {
                Dtype::F64 => 0x800f_ffff_ffff_ffffu64,
                Dtype::F32 => 0x807f_ffff,
                Dtype::Bf16 => 0x807f,
                _ => 0x83ff,
            };
            (0..count).flat_map(|_| (random.next() & exponent).to_le_bytes()[..dtype.size()].to_vec()).collect()
        };
        let inputs = [denormals(75), denormals(75)];
        let expected = reference_all(dtype, ReduceOp::Sum, &inputs, &[]);
        for level in Level::available() {
            let kernel = kernel_at(level, dtype, ReduceOp::Sum, 2).unwrap();
            let before = float_mode::get();
            float_mode::set(before | float_mode::ODD);
            let got = run(&kernel, &inputs, &[], 0, None);
            let after = float_mode::get();
            float_mode::set(before);
            assert_same(dtype, &got, &expected, &level);
            assert_eq!(after & float_mode::ODD, float_mode::ODD, "the thread's own mode was not put back");
        }
    }
}

#[test]
fn undefined_operations_are_refused_with_what_is_possible() {
    for dtype in Dtype::ALL {
        for op in OPS {
            match kernel(dtype, op, 2) {
                Ok(_) => assert!(is_defined(dtype, op), "{op:?} of {} must be refused", dtype.name()),
                Err(error) if error.kind() == ErrorKind::Invalid => {
                    let text = error.text();
                    assert!(!is_defined(dtype, op), "{op:?} of {} is defined, got: {text}", dtype.name());
                    assert!(text.contains(dtype.name()) && text.contains(ReduceOp::name_of(op.code())), "{text}");
                }
                Err(other) => panic!("{op:?} of {}: {other:?}", dtype.name()),
            }
        }
    }
    let text = |dtype, op| kernel(dtype, op, 2).err().expect("refused").text().to_string();
    assert_eq!(
        text(Dtype::Bool, ReduceOp::Avg),
        "ReduceOp.AVG is not defined for bool; use SUM, MAX or BOR (any rank), PRODUCT, MIN or BAND (every rank), BXOR, \
         or convert to a float dtype first"
    );
    assert_eq!(
        text(Dtype::C64, ReduceOp::Max),
        "ReduceOp.MAX is not defined for complex64; complex numbers have SUM, AVG, PRODUCT and PREMUL_SUM; \
         torch.view_as_real gives their parts"
    );
    assert_eq!(
        text(Dtype::I32, ReduceOp::PremulSum(0.5)),
        "ReduceOp.PREMUL_SUM of int32 needs a whole number as its factor, got 0.5; convert to a float dtype first"
    );
}

#[test]
fn copy_moves_bytes_and_takes_the_same_address() {
    const SIZE: usize = if cfg!(miri) { (128 << 10) + 2 } else { 300_000 };
    let content: Vec<u8> = (0..SIZE).map(|i| (i % 251) as u8).collect();
    for bytes in [0, 1, 63, 4096, 128 << 10, (128 << 10) + 1, SIZE] {
        let (mut from, mut to) = (Placed::new(&content, 1), Placed::new(&[0; SIZE], 5));
        let mut expected = vec![0; SIZE];
        expected[..bytes].copy_from_slice(&content[..bytes]);
        // SAFETY: both buffers hold SIZE bytes and do not overlap; the second call copies a buffer to itself.
        unsafe {
            reduce::copy(to.at(), from.at(), bytes);
            reduce::copy(from.at(), from.at().cast_const(), bytes);
        }
        assert!(to.content() == expected && from.content() == content, "copy of {bytes} bytes");
        assert!(to.frame_is_intact() && from.frame_is_intact());
    }
}

#[test]
#[cfg_attr(miri, ignore = "starts processes")]
fn a_variable_limits_the_instruction_set() {
    const VARIABLE: &str = "SAGELLM_KERNELS";
    if let Ok(asked) = std::env::var("SAGELLM_TEST_CHILD") {
        let levels = Level::available();
        let (widest, expected) = (levels.last().unwrap().name(), std::env::var(VARIABLE).unwrap());
        // A name of an instruction set that this processor lacks, or that no processor has, is ignored.
        assert!(widest == expected || asked == "ignored", "{levels:?} under {VARIABLE}={expected}");
        return;
    }
    let levels: Vec<&str> = Level::available().into_iter().map(Level::name).collect();
    let permitted = levels.iter().map(|level| (*level, "taken")).chain([("sse9", "ignored"), ("", "ignored")]);
    for (level, expected) in permitted {
        let mut child = this_program(module_path!(), "a_variable_limits_the_instruction_set");
        let output = child.env(VARIABLE, level).env("SAGELLM_TEST_CHILD", expected).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
