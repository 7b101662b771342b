//! Reduces a rank count to the largest power of two below or equal to it, for algorithms that pair ranks by the bits of
//! their numbers. Among the first `2 * extra` ranks, every odd rank sends its data to the even rank before it and waits
//! for the result. The `size` ranks that take part have indices; consecutive indices stand for consecutive ranks.

use std::ops::Range;

#[derive(Clone, Copy)]
pub(super) struct Power {
    pub size: usize,
    pub bits: usize,
    /// Number of pairs that act as one rank.
    pub extra: usize,
}

/// The role of a rank in the exchanges.
pub(super) enum Role {
    /// Takes part, with this index.
    Active(usize),
    /// Does nothing: the rank before it acts for both.
    Resting,
}

/// The phase of a step. The first and the last step serve the resting ranks, if there are any.
pub(super) enum Phase {
    FoldIn,
    Exchange(usize),
    FoldOut,
}

impl Power {
    pub fn of(ranks: usize) -> Power {
        let bits = ranks.ilog2() as usize;
        Power { size: 1 << bits, bits, extra: ranks - (1 << bits) }
    }

    /// Number of steps of a schedule with `exchanges` exchanges.
    pub fn steps(self, exchanges: usize) -> usize {
        if self.extra > 0 { exchanges + 2 } else { exchanges }
    }

    pub fn phase(self, k: usize, exchanges: usize) -> Phase {
        match (self.extra > 0, k) {
            (false, _) => Phase::Exchange(k),
            (true, 0) => Phase::FoldIn,
            (true, _) if k <= exchanges => Phase::Exchange(k - 1),
            _ => Phase::FoldOut,
        }
    }

    pub fn role(self, rank: usize) -> Role {
        if rank >= 2 * self.extra {
            Role::Active(rank - self.extra)
        } else if rank.is_multiple_of(2) {
            Role::Active(rank / 2)
        } else {
            Role::Resting
        }
    }

    /// The rank with which `rank` forms a pair in the folding steps. None if `rank` is in no pair.
    pub fn partner(self, rank: usize) -> Option<usize> {
        (rank < 2 * self.extra).then_some(rank ^ 1)
    }

    /// Returns the rank that acts under `index`: the first of the ranks for which it acts.
    pub fn rank(self, index: usize) -> usize {
        if index < self.extra { 2 * index } else { index + self.extra }
    }

    /// The ranks of the indices `of`, and the ranks for which these act.
    pub fn ranks(self, of: Range<usize>) -> Range<usize> {
        self.rank(of.start)..self.rank(of.end)
    }
}
