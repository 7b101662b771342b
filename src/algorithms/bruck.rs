//! Bruck: blocks are sent in groups over the distances 1, 2, 4, .... For any rank count this takes ceil(log2 p) steps.
//!
//! p ranks, L = ceil(log2 p), N bytes (all blocks together; for all_to_all, all blocks of one rank).
//!
//! - all_gather: in step k a rank sends 2^k consecutive blocks, starting with its own, to the rank 2^k before it. L
//!   steps, N (p - 1) / p bytes sent and received.
//! - all_to_all: a block is forwarded from its source to its destination through other ranks. Each set bit k of the
//!   distance from source to destination stands for one transfer over the distance 2^k. L steps, compared with p - 1
//!   messages of direct exchange. Bytes sent and received: N / p times the number of set bits in the numbers 1 to
//!   p - 1, about N L / 2. This pays if blocks are small and there are many ranks. Blocks must be of equal size,
//!   because a rank forwards blocks whose sizes it does not know.
//!
//! Nothing is summed.
//! Source: Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems"
//! (1997).

use std::ops::Range;

use super::{How, Pattern, Schedule, Step, Volume, around, ceil_log2};
use crate::types::Kind;

pub(super) struct Bruck;

impl Pattern for Bruck {
    fn serves(&self, kind: Kind) -> bool {
        matches!(kind, Kind::AllGather | Kind::AllToAll)
    }

    fn cuts(&self, s: &Schedule) -> usize {
        s.ranks
    }

    fn steps(&self, s: &Schedule) -> usize {
        ceil_log2(s.ranks)
    }

    fn step(&self, s: &Schedule, rank: usize, k: usize) -> Step {
        let mut step = Step::default();
        let distance = 1 << k;
        let before = (rank + s.ranks - distance) % s.ranks;
        let after = (rank + distance) % s.ranks;
        if s.kind == Kind::AllGather {
            let blocks = distance.min(s.ranks - distance);
            step.send(before, around(rank, blocks, s.ranks));
            step.recv(after, around(after, blocks, s.ranks), How::Copy);
        } else {
            step.send(after, passing(s.ranks, rank, k));
            step.recv(before, passing(s.ranks, before, k), How::Copy);
        }
        step
    }

    fn volume(&self, s: &Schedule) -> Volume {
        let each = match s.kind {
            Kind::AllGather => s.ranks - 1,
            _ => (1..s.ranks).map(|far| far.count_ones() as usize).sum(),
        };
        Volume { sent: each, received: each }
    }

    /// All ranks move the same number of parts.
    fn busiest(&self, s: &Schedule, _k: usize) -> Vec<usize> {
        vec![0, s.ranks / 2, s.ranks - 1]
    }
}

/// The blocks that `rank` sends in step `k` of all_to_all. A block is sent if bit k is set in the distance from its
/// source to its destination.
fn passing(ranks: usize, rank: usize, k: usize) -> Vec<Range<usize>> {
    let mut parts: Vec<Range<usize>> = Vec::new();
    for far in (1..ranks).filter(|far| far >> k & 1 == 1) {
        let gone = far % (1 << k);
        let source = (rank + ranks - gone) % ranks;
        let part = source * ranks + (source + far) % ranks;
        parts.push(part..part + 1);
    }
    parts
}
