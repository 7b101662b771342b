//! A hash of a result. Ranks use it to find out whether their results differ (`engine::verify`). It detects faults of
//! processors and memory. It is not a cryptographic hash: two results with the same hash are easy to construct.
//!
//! Memory is hashed in cells of 64 bytes. A cell has eight lanes of one little-endian word each; the last cell is
//! filled up with zeros. Each lane has two sums, modulo 2^64:
//! - *plain*: the words themselves;
//! - *mixed*: the product of the two halves of each word, after the word was combined with a key that depends on the
//!   cell's position. So if words change places, this sum changes.
//!
//! What a cell adds to the sums does not depend on other cells, so a result may be cut at any multiples of 64 bytes and
//! its parts hashed in any order, for instance each part while it is in the cache.
//!
//! A single flipped bit always changes the hash. It changes one plain sum by ±2^b. The plain sums are combined with odd
//! factors, and the upper half of the result is the upper half of the hash. Every factor times ±2^b is large enough to
//! change this half (a test checks all cases). Other differences, for instance several flipped bits, are missed with a
//! probability of about 2^-60.
//!
//! Source: the sums of products of NH (Black et al., UMAC, 1999) and of the accumulators of XXH3 (Collet, 2019), which
//! also add the words themselves. The keys that grow with the position and the two halves of the hash are ours.

use super::Level;

/// Bytes of a cell. Parts are cut at multiples of it.
pub const CELL: usize = 64;
const LANES: usize = CELL / 8;
/// Bits of a hash that are always zero, for a caller that stores something in the same word as the hash.
pub const SPARE: u64 = 0xf;

/// The keys of the first cell. From cell to cell, each key grows by twice this value. The values are odd numbers
/// without a pattern (fractions of the square roots of primes, like in SHA-512).
const KEYS: [u64; LANES] = [
    0x6a09_e667_f3bc_c909,
    0xbb67_ae85_84ca_a73b,
    0x3c6e_f372_fe94_f82b,
    0xa54f_f53a_5f1d_36f1,
    0x510e_527f_ade6_82d1,
    0x9b05_688c_2b3e_6c1f,
    0x1f83_d9ab_fb41_bd6b,
    0x5be0_cd19_137e_2179,
];
/// The factors with which `value` combines the sums, one for each lane. They must be odd; see
/// `a_flipped_bit_always_changes_the_upper_half`.
const FACTORS: [u64; LANES] = [
    0x9e37_79b9_7f4a_7c15,
    0xbf58_476d_1ce4_e5b9,
    0x94d0_49bb_1331_11eb,
    0xff51_afd7_ed55_8ccd,
    0xc4ce_b9fe_1a85_ec53,
    0xd6e8_feb8_6659_fd93,
    0xa076_1d64_78bd_642f,
    0xe703_7ed1_a0b4_28db,
];

/// The sums of the cells that were added so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hash {
    plain: [u64; LANES],
    mixed: [u64; LANES],
}

impl Default for Hash {
    fn default() -> Hash {
        Hash { plain: [0; LANES], mixed: [0; LANES] }
    }
}

impl Hash {
    /// Adds `bytes` bytes beginning at `from`, which are at position `at` of the result. `at` is a multiple of `CELL`;
    /// `bytes` is too, unless the result ends there.
    ///
    /// # Safety
    /// `from` must be readable for `bytes`.
    pub unsafe fn add(&mut self, at: usize, from: *const u8, bytes: usize) {
        debug_assert!(at.is_multiple_of(CELL));
        let cells = bytes / CELL;
        let first = (at / CELL) as u64;
        // SAFETY: the caller vouches for it. `Level::best` says that the processor has the instructions.
        unsafe {
            match Level::best() {
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 | Level::Avx512 if cells > 4 => add_with_avx2(self, first, from, cells),
                _ => self.add_cells(first, from, cells),
            }
        }
        let rest = bytes % CELL;
        if rest > 0 {
            let mut last = [0; CELL];
            // SAFETY: these are the `rest` bytes after the whole cells, which are fewer than a cell has.
            unsafe { last.as_mut_ptr().copy_from_nonoverlapping(from.add(cells * CELL), rest) };
            self.add_cell(first + cells as u64, &last);
        }
    }

    /// Adds one cell that is at position `index` (in cells).
    pub fn add_cell(&mut self, index: u64, cell: &[u8; CELL]) {
        // SAFETY: the array has one cell.
        unsafe { self.add_cells(index, cell.as_ptr(), 1) };
    }

    /// # Safety
    /// `from` must be readable for `cells` cells.
    #[inline(always)]
    unsafe fn add_cells(&mut self, first: u64, from: *const u8, cells: usize) {
        let Hash { mut plain, mut mixed } = *self;
        let mut keys = KEYS.map(|key| key.wrapping_mul(first.wrapping_mul(2).wrapping_add(1)));
        for cell in 0..cells {
            // SAFETY: within the cells.
            let words: [u64; LANES] = unsafe { from.add(cell * CELL).cast::<[u64; LANES]>().read_unaligned() };
            for lane in 0..LANES {
                let word = u64::from_le(words[lane]);
                let keyed = word ^ keys[lane];
                plain[lane] = plain[lane].wrapping_add(word);
                mixed[lane] = mixed[lane].wrapping_add((keyed & 0xffff_ffff).wrapping_mul(keyed >> 32));
                keys[lane] = keys[lane].wrapping_add(KEYS[lane].wrapping_mul(2));
            }
        }
        *self = Hash { plain, mixed };
    }

    /// The hash. Its bits of `SPARE` are zero.
    pub fn value(&self) -> u64 {
        let plain = (0..LANES).fold(0u64, |sum, lane| sum.wrapping_add(self.plain[lane].wrapping_mul(FACTORS[lane])));
        let mixed =
            (0..LANES).fold(0u64, |sum, lane| (sum ^ self.mixed[lane]).wrapping_mul(FACTORS[lane]).rotate_left(29));
        (plain & 0xffff_ffff_0000_0000) | ((mixed ^ plain) >> 32 & !SPARE)
    }
}

/// `Hash::add_cells` with wider vectors.
///
/// # Safety
/// As for `Hash::add_cells`, on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn add_with_avx2(hash: &mut Hash, first: u64, from: *const u8, cells: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { hash.add_cells(first, from, cells) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(data: &[u8]) -> u64 {
        let mut hash = Hash::default();
        // SAFETY: a slice.
        unsafe { hash.add(0, data.as_ptr(), data.len()) };
        hash.value()
    }

    fn data(bytes: usize) -> Vec<u8> {
        let mut state = 88_172_645_463_325_252u64;
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        (0..bytes).map(next).collect()
    }

    /// This is the proof to which the head of this file refers: the upper half of a sum changes if the sum changes by
    /// at least 2^32 in either direction.
    #[test]
    fn a_flipped_bit_always_changes_the_upper_half() {
        for factor in FACTORS {
            for bit in 0..64 {
                let change = factor.wrapping_mul(1 << bit);
                assert!(change.min(change.wrapping_neg()) >= 1 << 32, "{factor:#x} and bit {bit}");
            }
        }
    }

    #[test]
    fn every_flipped_bit_changes_the_hash_of_zeros_ones_and_random_data() {
        for bytes in [1, 8, 9, 63, 64, 65, 200, 320, 1000, 4096] {
            for before in [vec![0; bytes], vec![255; bytes], data(bytes)] {
                let (whole, mut flipped) = (of(&before), before.clone());
                for bit in 0..bytes * 8 {
                    flipped[bit / 8] ^= 1 << (bit % 8);
                    assert_ne!(of(&flipped), whole, "bit {bit} of {bytes} bytes");
                    flipped[bit / 8] ^= 1 << (bit % 8);
                }
            }
        }
    }

    #[test]
    fn words_and_cells_that_change_places_change_the_hash() {
        let before = data(4096);
        let whole = of(&before);
        for (one, other, size) in [(0, 64, 64), (0, 8, 8), (64, 1024, 64), (0, 4, 4), (4, 68, 4), (0, 2048, 2048)] {
            let mut swapped = before.clone();
            for at in 0..size {
                swapped.swap(one + at, other + at);
            }
            assert_ne!(of(&swapped), whole, "{size} bytes at {one} and {other}");
        }
        assert_eq!(of(&before) & SPARE, 0);
    }

    #[test]
    fn parts_in_any_order_and_every_level_give_one_hash() {
        let data = data(100_003);
        let whole = of(&data);
        let mut parts: Vec<usize> = (0..data.len()).step_by(CELL * 37).collect();
        parts.reverse();
        let (mut hash, mut plain) = (Hash::default(), Hash::default());
        for start in parts {
            let part = &data[start..data.len().min(start + CELL * 37)];
            // SAFETY: slices.
            unsafe { hash.add(start, part.as_ptr(), part.len()) };
        }
        assert_eq!(hash.value(), whole);
        let mut last = [0; CELL];
        let rest = data.len() % CELL;
        last[..rest].copy_from_slice(&data[data.len() - rest..]);
        // SAFETY: the whole cells of a slice.
        unsafe { plain.add_cells(0, data.as_ptr(), data.len() / CELL) };
        plain.add_cell((data.len() / CELL) as u64, &last);
        assert_eq!(plain.value(), whole, "without the widest instructions");
    }
}
