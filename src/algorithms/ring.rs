//! Ring: every rank sends to the next rank and receives from the previous one.
//!
//! p ranks, N bytes (for all_gather and reduce_scatter: all blocks together).
//!
//! - reduce_scatter: block q starts at rank q + 1 and is passed once around; every rank adds its own numbers. p - 1
//!   steps.
//! - all_gather: every block is passed once around. p - 1 steps.
//! - all_reduce: reduce_scatter, then all_gather. 2 (p - 1) steps.
//! - broadcast, reduce: a chain through all ranks, in S consecutive segments. S + p - 2 steps.
//!
//! Each rank sends and receives N (p - 1) / p bytes, and twice that for all_reduce; both are the minimum. For the chain
//! this is N. Order of summation: block q is ((x[q+1] op x[q+2]) op ...) op x[q], around the ring, so the order depends
//! on an element's position in the vector. In the chain of reduce it is x[root] op (x[root+1] op (... op x[root-1])),
//! the same for all elements. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations" (2009); NCCL's ring.

use super::{How, Pattern, Schedule, Step, Volume, one};
use crate::types::Kind;

pub(super) struct Ring;

impl Pattern for Ring {
    fn serves(&self, kind: Kind) -> bool {
        matches!(kind, Kind::AllReduce | Kind::ReduceScatter | Kind::AllGather | Kind::Broadcast | Kind::Reduce)
    }

    fn pipelines(&self, kind: Kind) -> bool {
        matches!(kind, Kind::Broadcast | Kind::Reduce)
    }

    fn cuts(&self, s: &Schedule) -> usize {
        if self.pipelines(s.kind) { s.segments } else { s.ranks }
    }

    fn steps(&self, s: &Schedule) -> usize {
        match s.kind {
            Kind::AllReduce => 2 * (s.ranks - 1),
            Kind::Broadcast | Kind::Reduce => s.segments + s.ranks - 2,
            _ => s.ranks - 1,
        }
    }

    fn step(&self, s: &Schedule, rank: usize, k: usize) -> Step {
        match s.kind {
            Kind::Broadcast => forward(s, s.place_of(rank), k),
            Kind::Reduce => backward(s, s.place_of(rank), k),
            Kind::AllGather => gather(s.ranks, rank, k),
            Kind::AllReduce if k >= s.ranks - 1 => gather(s.ranks, rank, k - (s.ranks - 1)),
            _ => scatter(s.ranks, rank, k),
        }
    }

    fn volume(&self, s: &Schedule) -> Volume {
        let each = self.steps(s).min(match s.kind {
            Kind::Broadcast | Kind::Reduce => s.segments,
            _ => usize::MAX,
        });
        Volume { sent: each, received: each }
    }

    fn alike(&self, s: &Schedule, k: usize) -> usize {
        let circle = s.ranks - 1;
        if self.pipelines(s.kind) { 1 } else { circle - k % circle }
    }

    /// In a chain, the busy ranks are consecutive, one for each segment in flight. The first and the last of them are
    /// examined.
    fn busiest(&self, s: &Schedule, k: usize) -> Vec<usize> {
        let wave = match s.kind {
            Kind::Broadcast => [(k + 1).saturating_sub(s.segments), k.min(s.ranks - 1)],
            Kind::Reduce => [(s.ranks + s.segments - 1 - k).min(s.ranks) - 1, (s.ranks - 2).saturating_sub(k)],
            _ => return (0..s.ranks).collect(),
        };
        wave.into_iter().map(|place| s.rank_at(place)).collect()
    }
}

/// One step of the reduce_scatter. After the last step rank q has block q.
fn scatter(ranks: usize, rank: usize, k: usize) -> Step {
    let mut step = Step::default();
    let out = (rank + 2 * ranks - 1 - k) % ranks;
    let come = (rank + 2 * ranks - 2 - k) % ranks;
    step.send((rank + 1) % ranks, one(out));
    step.recv((rank + ranks - 1) % ranks, one(come), How::ReduceBefore);
    step
}

fn gather(ranks: usize, rank: usize, k: usize) -> Step {
    let mut step = Step::default();
    let out = (rank + ranks - k) % ranks;
    let come = (rank + ranks - 1 - k) % ranks;
    step.send((rank + 1) % ranks, one(out));
    step.recv((rank + ranks - 1) % ranks, one(come), How::Copy);
    step
}

/// The chain away from the root: `place` sends segment `i` in step `i + place`.
fn forward(s: &Schedule, place: usize, k: usize) -> Step {
    let mut step = Step::default();
    let segment = |at: usize| k.checked_sub(at).filter(|i| *i < s.segments);
    if let Some(part) = segment(place).filter(|_| place + 1 < s.ranks) {
        step.send(s.rank_at(place + 1), one(part));
    }
    if place > 0
        && let Some(part) = segment(place - 1)
    {
        step.recv(s.rank_at(place - 1), one(part), How::Copy);
    }
    step
}

/// The chain towards the root: the last place sends segment `i` in step `i`, the place before it in step `i + 1`.
fn backward(s: &Schedule, place: usize, k: usize) -> Step {
    let mut step = Step::default();
    let segment = |at: usize| k.checked_sub(s.ranks - 1 - at).filter(|i| *i < s.segments);
    if let Some(part) = segment(place).filter(|_| place > 0) {
        step.send(s.rank_at(place - 1), one(part));
    }
    if let Some(part) = (place + 1 < s.ranks).then(|| segment(place + 1)).flatten() {
        step.recv(s.rank_at(place + 1), one(part), How::ReduceAfter);
    }
    step
}
