//! The signatures of the ranks' launches on devices, and a difference between two ranks. `group/launches.rs` publishes
//! and compares signatures.

use std::collections::BTreeMap;

use crate::engine::Signed;
use crate::error::{Error, SAME_CALLS, laid_out};
use crate::op;
use crate::op::words::MOVED;

/// Number of a launch, and its signature.
pub type Launch = (u64, Signed);

/// Two ranks that signed different calls under one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    pub number: u64,
    pub ranks: [usize; 2],
    pub signed: [Signed; 2],
}

impl Difference {
    /// The difference with the lowest number among the ranks' answers.
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
