//! A set of ranks of one group. Each rank is one bit.

use super::memory::layout::MAX_RANKS;

const WORDS: usize = MAX_RANKS / 64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankSet([u64; WORDS]);

impl RankSet {
    pub fn insert(&mut self, rank: usize) {
        self.0[rank / 64] |= 1 << (rank % 64);
    }

    pub fn remove(&mut self, rank: usize) {
        self.0[rank / 64] &= !(1 << (rank % 64));
    }

    /// Adds ranks `64 * word + i` for the bits `i` of `bits`.
    pub fn add_word(&mut self, word: usize, bits: u64) {
        self.0[word] |= bits;
    }

    /// The union with `other`.
    pub fn with(self, other: RankSet) -> RankSet {
        RankSet(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    /// The ranks in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        self.0.into_iter().enumerate().flat_map(|(word, mut bits)| {
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(64 * word + bit)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_come_in_rising_order() {
        let mut set = RankSet::default();
        for rank in [255, 0, 63, 64, 7, 128] {
            set.insert(rank);
        }
        set.remove(7);
        let mut more = RankSet::default();
        more.add_word(2, 0b110);
        let set = set.with(more);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 63, 64, 128, 129, 130, 255]);
    }
}
