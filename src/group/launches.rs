//! What the launches on devices sign. A vendor's library compares nothing: where two ranks call different operations as one
//! number it hangs, or gives numbers that mean nothing. So each rank publishes what its last launches signed (`Signed`), in the
//! memory that the ranks share, or in its answers over the store; and the thread that watches a launch compares it with what
//! the others have signed for its number.

use std::collections::{BTreeMap, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::Group;
use crate::engine::device::Agreed;
use crate::engine::{LAUNCHES_KEPT, Signed};
use crate::error::{Error, SAME_CALLS, laid_out};
use crate::op;
use crate::op::words::MOVED;

/// A launch by its number, and what was signed for it.
pub(super) type Launch = (u64, Signed);

/// Two ranks that signed different calls for one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    pub number: u64,
    pub ranks: [usize; 2],
    pub signed: [Signed; 2],
}

impl Difference {
    /// The first one among the answers of the ranks.
    pub fn among<'a>(answers: impl Iterator<Item = (usize, &'a [Launch])>) -> Option<Difference> {
        let mut first: BTreeMap<u64, (usize, Signed)> = BTreeMap::new();
        let mut found: Option<Difference> = None;
        for (rank, launches) in answers {
            for (number, signed) in launches {
                let (other, others) = *first.entry(*number).or_insert((rank, *signed));
                if others != *signed && found.is_none_or(|found| *number < found.number) {
                    found = Some(Difference { number: *number, ranks: [other, rank], signed: [others, *signed] });
                }
            }
        }
        found
    }

    pub fn error(&self, group: &str) -> Error {
        let Difference { number, ranks: [a, b], signed: [own, other] } = self;
        let (head, mut lines) = if own.signature == other.signature {
            let call = op::describe(own.signature);
            let what =
                format!("passed different tensors or lists of sizes to {call}, number {number} on their devices");
            (format!("ranks {a} and {b} of group '{group}' {what}"), Vec::new())
        } else {
            let called = |(rank, signed): (&usize, &Signed)| {
                (*rank, format!("rank {rank} called {}", op::describe(signed.signature)))
            };
            let mut calls = [called((a, own)), called((b, other))];
            calls.sort();
            let head =
                format!("ranks of group '{group}' called different operations as number {number} on their devices");
            (head, calls.into_iter().map(|(_, line)| line).collect())
        };
        lines.push(MOVED.to_string());
        Error::mismatch(laid_out(&head, &lines, SAME_CALLS))
    }
}

impl Group {
    /// Takes the next number of a launch, and publishes what it signs.
    pub(super) fn sign_launch(&self, signed: Signed) -> u64 {
        let mut kept = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.device_number.fetch_add(1, Ordering::Relaxed) + 1;
        if kept.len() as u64 == LAUNCHES_KEPT {
            kept.pop_front();
        }
        kept.push_back((number, signed));
        self.control.set_launched(number, signed);
        number
    }

    /// The last launches of this rank.
    pub(super) fn own_launches(&self) -> VecDeque<Launch> {
        self.signed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What this rank signed for the numbers of a launch, as far as that is kept.
    fn launches_of(&self, first: u64, last: u64) -> ([Launch; LAUNCHES_KEPT as usize], usize) {
        let (mut found, mut count) = ([Launch::default(); LAUNCHES_KEPT as usize], 0);
        let kept = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        for (place, launch) in found.iter_mut().zip(kept.iter().filter(|(number, _)| (first..=last).contains(number))) {
            *place = *launch;
            count += 1;
        }
        (found, count)
    }

    /// Compares launches of this rank with those of the ranks on its host.
    pub(super) fn compare_launches(&self, first: u64, last: u64) -> Agreed {
        if self.control.inquiry().is_none() {
            return Agreed::WithAll; // nothing of theirs is seen here
        }
        let (own, count) = self.launches_of(first, last);
        let me = self.config.rank;
        let mut agreed = Agreed::WithAll;
        for rank in (0..self.config.size).filter(|rank| *rank != me) {
            if self.control.launched(rank).is_none_or(|(number, _)| number < last) {
                agreed = Agreed::SoFar;
            }
            for (number, signed) in &own[..count] {
                if let Some(other) = self.control.signed(rank, *number).filter(|other| other != signed) {
                    let signed = [*signed, other];
                    let difference = Difference { number: *number, ranks: [me, rank], signed };
                    return Agreed::Not(difference.error(&self.config.name));
                }
            }
        }
        agreed
    }

    /// What a rank of this host has called as a number instead of what this rank called, where they differ.
    pub(super) fn called_instead(&self, rank: usize, number: u64) -> Option<String> {
        let (own, count) = self.launches_of(number, number);
        let (_, signed) = own[..count].first()?;
        let other = self.control.signed(rank, number).filter(|other| other != signed)?;
        Some(format!("has issued {} as number {number} instead", op::describe(other.signature)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Dtype, Kind, ReduceOp};

    #[test]
    fn the_first_number_for_which_two_ranks_differ_is_found() {
        let sign = |kind: Kind, bytes: u64| {
            let signature = op::signature_of(kind, (Dtype::F32, ReduceOp::Sum), 0, (bytes, bytes));
            Signed { signature, lists: 0 }
        };
        let (reduce, other) = (sign(Kind::AllReduce, 16), sign(Kind::Broadcast, 32));
        let alike = [(0, &[(1, reduce), (2, reduce)][..]), (1, &[(2, reduce), (3, other)])];
        assert_eq!(Difference::among(alike.into_iter()), None, "of number 3 rank 0 has said nothing");
        let answers = [(0, &[(2, reduce), (3, reduce)][..]), (1, &[(2, reduce), (3, other)]), (2, &[(2, other)])];
        let found = Difference::among(answers.into_iter()).unwrap();
        assert_eq!((found.number, found.ranks, found.signed), (2, [0, 2], [reduce, other]));
        let text = found.error("g").to_string();
        let both = "rank 0 called all_reduce(16 bytes, float32, SUM)\n  rank 2 called broadcast(32 bytes, root 0)\n";
        assert!(text.contains("as number 2 on their devices") && text.contains(both), "{text}");
        let lists = Difference { signed: [reduce, Signed { lists: 1, ..reduce }], ..found };
        assert!(lists.error("g").to_string().contains("ranks 0 and 2 of group 'g' passed different tensors or lists"));
    }
}
