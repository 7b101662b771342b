//! The kernels for compressed sums: every instruction set of this machine gives the bits of a plain loop.

use sagellm::reduce::Level;
use sagellm::reduce::int8::{decode, encode, encoded_bytes, largest, sum};

/// Returns numbers of all magnitudes. One in eight is an extreme; with `beyond`, one in several hundred is an infinity
/// or a NaN.
fn numbers(seed: u64, count: usize, beyond: bool) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let wild = [0.0, -0.0, 1e-45, -3e-43, f32::MIN_POSITIVE, f32::MAX, f32::MIN, 127.5, -0.5];
    let mut one = |_| {
        let bits = next();
        if beyond && bits.is_multiple_of(701) {
            return [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][(bits >> 20) as usize % 3];
        }
        if bits.is_multiple_of(8) {
            return wild[(bits >> 20) as usize % wild.len()];
        }
        let found = f32::from_bits((bits >> 16) as u32);
        if found.is_finite() { found } else { 1.0 }
    };
    (0..count).map(&mut one).collect()
}

/// Encodes a block by its definition, one element at a time.
fn plain(values: &[f32], block: usize) -> Vec<u8> {
    let most =
        values.iter().fold(0.0f32, |most, v| if v.is_nan() || most.is_nan() { f32::NAN } else { most.max(v.abs()) });
    let scale = if most.is_finite() { most / 127.0 } else { f32::NAN };
    let mut bytes = scale.to_ne_bytes().to_vec();
    for at in 0..block {
        let value = values.get(at).copied().unwrap_or(0.0);
        let number = match scale {
            s if s.is_nan() => 0.0,
            s if s > 0.0 => (value / s).round_ties_even().clamp(-127.0, 127.0),
            _ => value.round_ties_even(),
        };
        bytes.push(number as i8 as u8);
    }
    bytes
}

#[test]
fn every_level_gives_the_bits_of_a_plain_loop() {
    for level in Level::available() {
        for (seed, count) in [0, 1, 31, 255, 256, 257, 5000].into_iter().enumerate() {
            for block in [1, 7, 64, 256] {
                let values = numbers(seed as u64 + 1, count, seed % 2 == 1);
                let mut encoded = vec![0xaa; encoded_bytes(count, block)];
                encode(level, &values, block, &mut encoded).unwrap();
                let expected: Vec<u8> = values.chunks(block).flat_map(|part| plain(part, block)).collect();
                assert_eq!(encoded, expected, "{level:?}, {count} elements in blocks of {block}");
                let mut back = vec![7.0; count];
                decode(level, &encoded, block, &mut back).unwrap();
                for (at, value) in back.iter().enumerate() {
                    let from = &encoded[at / block * (4 + block)..];
                    let scale = f32::from_ne_bytes(from[..4].try_into().unwrap());
                    let exact = f32::from(from[4 + at % block] as i8) * scale;
                    assert!(
                        value.to_bits() == exact.to_bits() || value.is_nan() && exact.is_nan(),
                        "{level:?} at {at}"
                    );
                }
            }
        }
    }
}

#[test]
fn sums_are_added_in_the_order_of_the_ranks_at_every_level() {
    let (block, count, ranks) = (64, 1000, 3);
    let size = encoded_bytes(count, block);
    let mut addends = vec![0; size * ranks];
    for (rank, into) in addends.chunks_exact_mut(size).enumerate() {
        encode(Level::Portable, &numbers(rank as u64 + 5, count, false), block, into).unwrap();
    }
    for divisor in [1.0, 3.0] {
        let mut expected = Vec::new();
        for at in (0..size).step_by(4 + block) {
            let mut total = vec![0.0f32; block];
            for addend in addends.chunks_exact(size) {
                let scale = f32::from_ne_bytes(addend[at..at + 4].try_into().unwrap()) / divisor;
                for (sum, number) in total.iter_mut().zip(&addend[at + 4..at + 4 + block]) {
                    *sum += f32::from(*number as i8) * scale;
                }
            }
            expected.extend(plain(&total, block));
        }
        for level in Level::available() {
            let mut found = vec![0; size];
            sum(level, &addends, block, divisor, &mut found).unwrap();
            assert_eq!(found, expected, "{level:?}, divided by {divisor}");
        }
    }
}

#[test]
fn the_largest_are_found_in_their_order() {
    for (count, wanted) in [(1, 1), (1000, 10), (1000, 1000), (1000, 0), (5000, 2500)] {
        let values = numbers(count as u64, count, true);
        let mut by_size: Vec<usize> = (0..count).collect();
        by_size.sort_by_key(|&at| (std::cmp::Reverse(values[at].to_bits() & 0x7fff_ffff), at));
        let mut expected: Vec<i32> = by_size[..wanted].iter().map(|&at| at as i32).collect();
        expected.sort_unstable();
        let mut found = vec![-1; wanted];
        largest(&values, &mut found).unwrap();
        assert_eq!(found, expected, "{wanted} of {count}");
    }
    assert!(largest(&[1.0], &mut [0, 0]).is_err());
    assert!(encode(Level::Portable, &[1.0], 0, &mut []).is_err());
    assert!(decode(Level::Portable, &[0; 8], 4, &mut [0.0; 5]).is_err());
    assert!(sum(Level::Portable, &[0; 9], 4, 1.0, &mut [0; 8]).is_err());
}
