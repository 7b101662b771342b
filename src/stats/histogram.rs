//! Counts times in buckets: 16 buckets for single values, then for each power of two 8 buckets of equal width. So the
//! width of a bucket is at most an eighth of the values in it, and the relative error of any quantile is at most an
//! eighth. Uses fixed memory, and one addition per value.
//!
//! Source: the log-linear layout of HdrHistogram.

/// Each value below this has its own bucket.
const EXACT: u64 = 16;
/// Buckets per power of two. `SHIFT` is the binary logarithm.
const PER_OCTAVE: u64 = 8;
const SHIFT: u32 = 3;
/// Values of at least 2^TOP nanoseconds (18 minutes) are counted in the last bucket.
const TOP: u32 = 40;
const BUCKETS: usize = (EXACT + (TOP as u64 - 4) * PER_OCTAVE) as usize;

#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: [u64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: [0; BUCKETS] }
    }
}

/// The bucket of `value`.
fn bucket(value: u64) -> usize {
    if value < EXACT {
        return value as usize;
    }
    let exponent = value.ilog2();
    if exponent >= TOP {
        return BUCKETS - 1;
    }
    let within = (value >> (exponent - SHIFT)) & (PER_OCTAVE - 1);
    (EXACT + u64::from(exponent - 4) * PER_OCTAVE + within) as usize
}

/// The first value above bucket `at`.
fn bound(at: usize) -> u64 {
    let at = at as u64;
    if at < EXACT {
        return at + 1;
    }
    let (exponent, within) = ((at - EXACT) / PER_OCTAVE + 4, (at - EXACT) % PER_OCTAVE);
    (PER_OCTAVE + within + 1) << (exponent - u64::from(SHIFT))
}

impl Histogram {
    #[inline]
    pub fn add(&mut self, value: u64) {
        self.buckets[bucket(value)] += 1;
    }

    /// The middle of the bucket that contains the median; 0 if there are no values.
    pub fn median(&self) -> u64 {
        let half = self.buckets.iter().sum::<u64>().div_ceil(2);
        let mut seen = 0;
        let found = self.buckets.iter().position(|count| {
            seen += count;
            seen >= half && half > 0
        });
        found.map_or(0, |at| u64::midpoint(if at == 0 { 0 } else { bound(at - 1) }, bound(at) - 1))
    }

    /// The buckets that are not empty, each with the first value above it and its count.
    pub fn filled(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.buckets.iter().enumerate().filter(|(_, count)| **count > 0).map(|(at, count)| (bound(at), *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_buckets_follow_one_another_without_a_gap() {
        for at in 0..BUCKETS - 1 {
            assert_eq!(bucket(bound(at)), at + 1, "the first value behind bucket {at}");
            assert_eq!(bucket(bound(at) - 1), at, "the last value of bucket {at}");
        }
        assert_eq!(bound(BUCKETS - 1), 1 << TOP);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        assert_eq!(bucket(0), 0);
    }

    proptest! {
        #[test]
        fn a_value_lies_within_an_eighth_of_the_bound_of_its_bucket(value in 0u64..(1 << TOP)) {
            let bound = bound(bucket(value));
            prop_assert!(value < bound);
            prop_assert!(bound - value <= (value / PER_OCTAVE).max(1));
        }

        #[test]
        fn the_median_is_right_within_a_sixteenth(values in prop::collection::vec(1u64..1 << 30, 1..100)) {
            let mut histogram = Histogram::default();
            values.iter().for_each(|value| histogram.add(*value));
            let mut sorted = values.clone();
            sorted.sort_unstable();
            let right = sorted[(sorted.len() - 1) / 2];
            prop_assert!(histogram.median().abs_diff(right) <= right / 16 + 1, "{} {right}", histogram.median());
        }

        #[test]
        fn nothing_is_lost_or_made_up(values in prop::collection::vec(any::<u64>(), 0..200)) {
            let mut histogram = Histogram::default();
            values.iter().for_each(|value| histogram.add(*value));
            prop_assert_eq!(histogram.filled().map(|(_, count)| count).sum::<u64>(), values.len() as u64);
            let mut bounds: Vec<u64> = histogram.filled().map(|(bound, _)| bound).collect();
            let sorted = bounds.clone();
            bounds.sort_unstable();
            bounds.dedup();
            prop_assert_eq!(bounds, sorted);
        }
    }
}
