//! Finds two ranks that signed different launches on devices. `group/launches.rs` publishes and compares the
//! signatures.

use std::collections::BTreeMap;

use crate::engine::Signed;
use crate::error::{Error, SAME_CALLS, laid_out};
use crate::op::signature;
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
    /// The difference with the lowest number among the answers of `ranks` ranks.
    pub fn among<'a>(ranks: usize, answers: impl Iterator<Item = (usize, &'a [Launch])> + Clone) -> Option<Difference> {
        let found = Difference::of_two(answers.clone());
        let misfit = Difference::of_shares(ranks, answers);
        found.into_iter().chain(misfit).min_by_key(|found| found.number)
    }

    /// The first all_to_all whose sizes do not match, among those for which the shares of all ranks are known. The sum
    /// of the shares does not tell which ranks differ, so the text shows the calls of any two ranks.
    fn of_shares<'a>(ranks: usize, answers: impl Iterator<Item = (usize, &'a [Launch])>) -> Option<Difference> {
        let mut sums: BTreeMap<u64, (usize, u32, Difference)> = BTreeMap::new();
        for (rank, launches) in answers {
            for (number, signed) in launches.iter().filter(|(_, signed)| signed.has_share()) {
                let two = Difference { number: *number, ranks: [rank; 2], signed: [*signed; 2] };
                let (count, sum, two) = sums.entry(*number).or_insert((0, 0, two));
                (*count, *sum) = (*count + 1, sum.wrapping_add(signed.lists));
                (two.ranks[1], two.signed[1]) = (rank, *signed);
            }
        }
        sums.into_values().find(|(count, sum, _)| *count == ranks && *sum != 0).map(|(_, _, two)| two)
    }

    /// The first number for which two ranks signed different calls.
    fn of_two<'a>(answers: impl Iterator<Item = (usize, &'a [Launch])>) -> Option<Difference> {
        let mut first: BTreeMap<u64, (usize, Signed)> = BTreeMap::new();
        let mut found: Option<Difference> = None;
        for (rank, launches) in answers {
            for (number, signed) in launches {
                let (other, others) = *first.entry(*number).or_insert((rank, *signed));
                if others.differs(signed) && found.is_none_or(|found| *number < found.number) {
                    found = Some(Difference { number: *number, ranks: [other, rank], signed: [others, *signed] });
                }
            }
        }
        found
    }

    pub fn error(&self, group: &str) -> Error {
        let Difference { number, ranks: [a, b], signed: [own, other] } = self;
        if own.has_share() && !own.differs(other) {
            return misfit_error(group, (*number, own.signature), None);
        }
        let (head, mut lines) = if own.signature == other.signature {
            let call = signature::describe(own.signature);
            let what =
                format!("passed different tensors or lists of sizes to {call}, number {number} on their devices");
            (format!("ranks {a} and {b} of group '{group}' {what}"), Vec::new())
        } else {
            let called = |(rank, signed): (&usize, &Signed)| {
                (*rank, format!("rank {rank} called {}", signature::describe(signed.signature)))
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

const SAME_BLOCKS: &str = "What a rank sends to another must have the size that this one expects from it";

/// Two ranks of an all_to_all: one sends a size that the other does not expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misfit {
    pub from: usize,
    pub to: usize,
    pub sent: u64,
    pub expected: u64,
}

/// Returns the error of an all_to_all on devices whose sizes do not match between the ranks.
pub fn misfit_error(group: &str, (number, signature): (u64, u64), named: Option<Misfit>) -> Error {
    let call = signature::describe(signature);
    let what = format!("passed sizes that do not belong together to {call}, number {number} on their devices");
    let head = format!("ranks of group '{group}' {what}");
    let named = named.map_or_else(String::new, |Misfit { from, to, sent, expected }| {
        format!("rank {from} brings {sent} bytes where rank {to} has room for {expected}")
    });
    Error::mismatch(laid_out(&head, &[named, MOVED.to_string()], SAME_BLOCKS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::BlockSizes;
    use crate::types::{Dtype, Kind, ReduceOp};

    #[test]
    fn the_first_number_for_which_two_ranks_differ_is_found() {
        let sign = |kind: Kind, bytes: u64| {
            let signature = signature::of_call(kind, (Dtype::F32, ReduceOp::Sum), 0, (bytes, bytes));
            Signed { signature, lists: 0 }
        };
        let (reduce, other) = (sign(Kind::AllReduce, 16), sign(Kind::Broadcast, 32));
        let alike = [(0, &[(1, reduce), (2, reduce)][..]), (1, &[(2, reduce), (3, other)])];
        assert_eq!(Difference::among(3, alike.into_iter()), None, "of number 3 rank 0 has said nothing");
        let answers = [(0, &[(2, reduce), (3, reduce)][..]), (1, &[(2, reduce), (3, other)]), (2, &[(2, other)])];
        let found = Difference::among(3, answers.into_iter()).unwrap();
        assert_eq!((found.number, found.ranks, found.signed), (2, [0, 2], [reduce, other]));
        let text = found.error("g").to_string();
        let both = "rank 0 called all_reduce(16 bytes, float32, SUM)\n  rank 2 called broadcast(32 bytes, root 0)\n";
        assert!(text.contains("as number 2 on their devices") && text.contains(both), "{text}");
        let exchange = |rank, sent: [usize; 3], received: [usize; 3]| {
            let sizes = BlockSizes { rank, ranks: 3, sent: (&sent, 0), received: (&received, 0) };
            (4, Signed::all_to_all(sign(Kind::AllToAll, 0).signature, &sizes))
        };
        let fits = [exchange(0, [1, 2, 3], [1, 4, 7]), exchange(1, [4, 5, 6], [2, 5, 8])];
        for (last, found) in [([3, 6, 9], None), ([2, 6, 9], Some(4)), ([6, 3, 9], Some(4))] {
            let third = exchange(2, [7, 8, 9], last);
            let answers = [(0, &fits[..1]), (1, &fits[1..]), (2, std::slice::from_ref(&third))];
            let difference = Difference::among(3, answers.into_iter());
            assert_eq!(difference.map(|found| found.number), found, "{last:?}");
            assert_eq!(Difference::among(4, answers.into_iter()), None, "of one rank nothing is known");
            if let Some(difference) = difference {
                let text = difference.error("g").to_string();
                assert!(text.contains("passed sizes that do not belong together to all_to_all(), number 4"), "{text}");
            }
        }
        let lists = Difference { signed: [reduce, Signed { lists: 1, ..reduce }], ..found };
        assert!(lists.error("g").to_string().contains("ranks 0 and 2 of group 'g' passed different tensors or lists"));
    }
}
