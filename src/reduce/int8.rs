//! The formats that compressed sums send instead of 32-bit floats: 8-bit integers with a scale for each block, or the
//! indices of the largest elements.
//!
//! An encoded block consists of its scale (the largest magnitude divided by 127, as an f32 in native byte order) and
//! one byte per element. The byte is the element divided by the scale, rounded to the nearest integer (ties to even),
//! in the range from -127 to 127. Missing elements of the last block are 0. If a block contains an infinity or NaN, all
//! its elements decode to NaN. Like in `scalar`, a result depends only on its own block, so the vector width changes no
//! bit. `levels!` compiles each loop for every instruction set.

use super::Level;
use super::float::StandardMode;
use crate::error::{Error, Result};

/// Size of a block's scale in bytes.
const SCALE: usize = size_of::<f32>();
const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
/// 1.5 * 2^23. If a number below 2^22 is added, the sum has no fraction bits, and the rounded number is in the sum's
/// low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Encoded size of `elements` numbers in bytes, in whole blocks.
pub fn encoded_bytes(elements: usize, block: usize) -> usize {
    elements.div_ceil(block) * (SCALE + block)
}

/// Encodes `values` into the blocks of `encoded`. Blocks after the last value are set to 0.
pub fn encode(level: Level, values: &[f32], block: usize, encoded: &mut [u8]) -> Result<()> {
    has_room(encoded.len(), values.len(), block)?;
    let _mode = StandardMode::enter();
    encode_at(level, values, block, encoded);
    Ok(())
}

/// Decodes as many numbers as `values` has room for.
pub fn decode(level: Level, encoded: &[u8], block: usize, values: &mut [f32]) -> Result<()> {
    has_room(encoded.len(), values.len(), block)?;
    let _mode = StandardMode::enter();
    decode_at(level, encoded, block, values);
    Ok(())
}

/// Adds the addends in order and encodes the sums. The addends are stored one after the other. Each scale is first
/// divided by `divisor`, so that an average does not overflow.
pub fn sum(level: Level, addends: &[u8], block: usize, divisor: f32, summed: &mut [u8]) -> Result<()> {
    whole_blocks(block, summed.len())?;
    if addends.is_empty() != summed.is_empty() || !summed.is_empty() && !addends.len().is_multiple_of(summed.len()) {
        return Err(sizes("addends", addends.len(), summed.len()));
    }
    let _mode = StandardMode::enter();
    sum_at(level, addends, block, divisor, summed);
    Ok(())
}

/// Writes the indices of the `places.len()` elements with the largest magnitudes, in ascending order. If magnitudes are
/// equal, the lower index is chosen. A NaN counts as larger than any number.
pub fn largest(values: &[f32], places: &mut [i32]) -> Result<()> {
    if i32::try_from(values.len()).is_err() || places.len() > values.len() {
        return Err(sizes("values", values.len(), places.len()));
    }
    if places.is_empty() {
        return Ok(());
    }
    let (least, mut equal) = bound(values, places.len());
    let mut found = 0;
    for (place, value) in values.iter().enumerate() {
        let magnitude = value.to_bits() & MAGNITUDE;
        if magnitude < least || magnitude == least && equal == 0 {
            continue;
        }
        equal -= usize::from(magnitude == least);
        places[found] = place as i32;
        found += 1;
    }
    Ok(())
}

/// The magnitude of the `wanted`th largest element, and how many of the `wanted` largest elements have exactly that
/// magnitude. Finds the magnitude digit by digit, the highest first, by counting. So memory is read three times,
/// whatever the values are.
fn bound(values: &[f32], wanted: usize) -> (u32, usize) {
    const BITS: u32 = 11;
    let mut known = 0;
    let mut left = wanted;
    for shift in [20u32, 10, 0] {
        let mask = if shift == 20 { 0 } else { u32::MAX << (shift + 10) };
        let mut counts = [0usize; 1 << BITS];
        for value in values {
            let magnitude = value.to_bits() & MAGNITUDE;
            if magnitude & mask == known {
                counts[(magnitude & !mask) as usize >> shift] += 1;
            }
        }
        for digit in (0..counts.len()).rev() {
            if counts[digit] >= left {
                known |= (digit as u32) << shift;
                break;
            }
            left -= counts[digit];
        }
    }
    (known, left)
}

/// Checks that the encoded bytes are whole blocks and enough for the values.
fn has_room(encoded: usize, values: usize, block: usize) -> Result<()> {
    whole_blocks(block, encoded)?;
    let needed = encoded_bytes(values, block);
    if encoded < needed {
        return Err(sizes("encoded", encoded, needed));
    }
    Ok(())
}

fn whole_blocks(block: usize, bytes: usize) -> Result<()> {
    if block == 0 || !bytes.is_multiple_of(SCALE + block) {
        return Err(Error::bug(format!("sagellm: {bytes} encoded bytes are no whole blocks of {block} elements")));
    }
    Ok(())
}

fn sizes(what: &str, have: usize, wanted: usize) -> Error {
    Error::bug(format!("sagellm: {what} has the size {have}, which does not fit to {wanted}"))
}

/// Defines a function that runs a loop compiled for the instructions of a level.
macro_rules! levels {
    ($name:ident, $body:ident, $($argument:ident: $type:ty),*) => {
        fn $name(level: Level, $($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn avx2($($argument: $type),*) {
                $body($($argument),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn avx512($($argument: $type),*) {
                $body($($argument),*);
            }
            assert!(level.can_run(), "kernels for {level:?} cannot run here");
            match level {
                // SAFETY: the processor can run it, as the assertion has checked.
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => unsafe { avx512($($argument),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2($($argument),*) },
                _ => $body($($argument),*),
            }
        }
    };
}
levels!(encode_at, encode_all, values: &[f32], block: usize, encoded: &mut [u8]);
levels!(decode_at, decode_all, encoded: &[u8], block: usize, values: &mut [f32]);
levels!(sum_at, sum_all, addends: &[u8], block: usize, divisor: f32, summed: &mut [u8]);

#[inline(always)]
fn encode_all(values: &[f32], block: usize, encoded: &mut [u8]) {
    let mut rest = values;
    for into in encoded.chunks_exact_mut(SCALE + block) {
        let (part, behind) = rest.split_at(block.min(rest.len()));
        rest = behind;
        encode_block(part, into);
    }
}

#[inline(always)]
fn encode_block(values: &[f32], into: &mut [u8]) {
    let (scale, numbers) = into.split_at_mut(SCALE);
    let (numbers, missing) = numbers.split_at_mut(values.len());
    missing.fill(0);
    // Magnitudes have the same order as integers and as floats, with infinity and then NaN at the end. Their maximum
    // does not depend on the order of the elements.
    let mut most = 0;
    for value in values {
        most = most.max(value.to_bits() & MAGNITUDE);
    }
    if most >= INFINITY {
        numbers.fill(0);
        scale.copy_from_slice(&f32::NAN.to_ne_bytes());
        return;
    }
    let found = f32::from_bits(most) / 127.0;
    scale.copy_from_slice(&found.to_ne_bytes());
    let divisor = if found > 0.0 { found } else { 1.0 };
    for (number, value) in numbers.iter_mut().zip(values) {
        *number = nearest(value / divisor);
    }
}

/// The nearest integer from -127 to 127, as a byte. A denormal scale is rounded coarsely, so then the quotient can be
/// outside that range.
#[inline(always)]
fn nearest(value: f32) -> u8 {
    let held = if value > 127.0 { 127.0 } else { value };
    let held = if held < -127.0 { -127.0 } else { held };
    (held + ROUNDER).to_bits() as u8
}

#[inline(always)]
fn scale_of(place: &[u8]) -> f32 {
    f32::from_ne_bytes([place[0], place[1], place[2], place[3]])
}

#[inline(always)]
fn decode_all(encoded: &[u8], block: usize, values: &mut [f32]) {
    for (from, into) in encoded.chunks_exact(SCALE + block).zip(values.chunks_mut(block)) {
        let scale = scale_of(from);
        for (value, number) in into.iter_mut().zip(&from[SCALE..]) {
            *value = f32::from(*number as i8) * scale;
        }
    }
}

#[inline(always)]
fn sum_all(addends: &[u8], block: usize, divisor: f32, summed: &mut [u8]) {
    // Holds the sums of only one block, so that addends are read once and no sum is stored to memory before it is
    // encoded.
    let mut total = vec![0.0f32; block];
    let whole = summed.len();
    for (at, into) in summed.chunks_exact_mut(SCALE + block).enumerate() {
        total.fill(0.0);
        for addend in addends.chunks_exact(whole) {
            let from = &addend[at * (SCALE + block)..][..SCALE + block];
            let scale = scale_of(from) / divisor;
            for (sum, number) in total.iter_mut().zip(&from[SCALE..]) {
                *sum += f32::from(*number as i8) * scale;
            }
        }
        encode_block(&total, into);
    }
}
