//! Direct exchange: every rank sends its data directly to every other rank, all at the same time. There are two forms.
//!
//! p ranks, N bytes (the vector, or all blocks together). [`Direct`], always one step:
//!
//! - all_reduce: each rank sends the whole vector to every rank; N (p - 1) bytes sent and received. For small vectors.
//! - reduce_scatter, all_gather, all_to_all: N (p - 1) / p (for all_to_all, N is all blocks of one rank, including its
//!   own).
//! - broadcast: the root sends N (p - 1), each other rank receives N. scatter: N (p - 1) / p and N / p.
//! - reduce, gather: the same towards the root. barrier: an empty message to every rank.
//!
//! [`TwoStep`], two steps; the vector is cut into p parts:
//!
//! - all_reduce: direct reduce_scatter, then direct all_gather; 2 N (p - 1) / p sent and received.
//! - broadcast: direct scatter, then every rank sends its part to all except the root. The root sends 2 N (p - 1) / p,
//!   the others receive N.
//! - reduce: direct reduce_scatter, then direct gather; a rank sends N, the root receives 2 N (p - 1) / p.
//!
//! Order of summation: x0 op x1 op x2 ..., from left to right in rank order, for every element, so a sum in low
//! precision needs only one rounding, at the end. The engine for shared memory uses the same order. Source: the
//! pairwise exchange of MPICH's reduce_scatter and the scattered all_to_all, with all messages posted together; the
//! two-shot all_reduce of NCCL's and vLLM's one-host kernels.

use super::{How, Pattern, Schedule, Step, Volume, one, others};
use crate::types::Kind;

pub(super) struct Direct;
pub(super) struct TwoStep;

impl Pattern for Direct {
    fn serves(&self, kind: Kind) -> bool {
        !kind.is_p2p()
    }

    fn one_order(&self) -> bool {
        true
    }

    fn cuts(&self, _s: &Schedule) -> usize {
        1
    }

    fn steps(&self, _s: &Schedule) -> usize {
        1
    }

    fn step(&self, s: &Schedule, rank: usize, _k: usize) -> Step {
        let mut step = Step::default();
        for peer in others(s.ranks, rank) {
            match s.kind {
                Kind::AllReduce => swap(&mut step, peer, 0, 0, How::InRankOrder),
                Kind::ReduceScatter => swap(&mut step, peer, peer, rank, How::InRankOrder),
                Kind::AllGather => swap(&mut step, peer, rank, peer, How::Copy),
                Kind::AllToAll => swap(&mut step, peer, rank * s.ranks + peer, peer * s.ranks + rank, How::Copy),
                Kind::Barrier => {
                    step.send(peer, Vec::new());
                    step.recv(peer, Vec::new(), How::Copy);
                }
                Kind::Broadcast => from_root(&mut step, s, rank, peer, 0),
                Kind::Scatter => from_root(&mut step, s, rank, peer, if rank == s.root { peer } else { rank }),
                Kind::Reduce => to_root(&mut step, s, rank, peer, 0, How::InRankOrder),
                Kind::Gather => {
                    to_root(&mut step, s, rank, peer, if rank == s.root { peer } else { rank }, How::Copy);
                }
                Kind::Send | Kind::Recv => unreachable!("`serves` says no"),
            }
        }
        step
    }

    fn volume(&self, s: &Schedule) -> Volume {
        let all = s.ranks - 1;
        let (sent, received) = match s.kind {
            Kind::Broadcast | Kind::Scatter => (all, 1),
            Kind::Reduce | Kind::Gather => (1, all),
            Kind::Barrier => (0, 0),
            _ => (all, all),
        };
        Volume { sent, received }
    }

    /// All ranks except the root are equal.
    fn busiest(&self, s: &Schedule, _k: usize) -> Vec<usize> {
        vec![s.root, s.ranks / 2, s.ranks - 1]
    }
}

impl Pattern for TwoStep {
    fn serves(&self, kind: Kind) -> bool {
        matches!(kind, Kind::AllReduce | Kind::Broadcast | Kind::Reduce)
    }

    fn one_order(&self) -> bool {
        true
    }

    fn cuts(&self, s: &Schedule) -> usize {
        s.ranks
    }

    fn steps(&self, _s: &Schedule) -> usize {
        2
    }

    fn step(&self, s: &Schedule, rank: usize, k: usize) -> Step {
        let mut step = Step::default();
        for peer in others(s.ranks, rank) {
            match (s.kind, k) {
                (Kind::Broadcast, 0) => from_root(&mut step, s, rank, peer, if rank == s.root { peer } else { rank }),
                (Kind::Broadcast, _) => {
                    if peer != s.root {
                        step.send(peer, one(rank));
                    }
                    if rank != s.root {
                        step.recv(peer, one(peer), How::Copy);
                    }
                }
                (_, 0) => swap(&mut step, peer, peer, rank, How::InRankOrder),
                (Kind::Reduce, _) => {
                    to_root(&mut step, s, rank, peer, if rank == s.root { peer } else { rank }, How::Copy);
                }
                _ => swap(&mut step, peer, rank, peer, How::Copy),
            }
        }
        step
    }

    fn volume(&self, s: &Schedule) -> Volume {
        let all = s.ranks - 1;
        let (sent, received) = match s.kind {
            Kind::Broadcast => (2 * all, s.ranks),
            Kind::Reduce => (s.ranks, 2 * all),
            _ => (2 * all, 2 * all),
        };
        Volume { sent, received }
    }

    /// All ranks except the root are equal.
    fn busiest(&self, s: &Schedule, _k: usize) -> Vec<usize> {
        vec![s.root, s.ranks / 2, s.ranks - 1]
    }
}

fn swap(step: &mut Step, peer: usize, out: usize, come: usize, how: How) {
    step.send(peer, one(out));
    step.recv(peer, one(come), how);
}

/// If `rank` or `peer` is the root, adds the transfer of one part from the root to the other of the two.
fn from_root(step: &mut Step, s: &Schedule, rank: usize, peer: usize, part: usize) {
    if rank == s.root {
        step.send(peer, one(part));
    } else if peer == s.root {
        step.recv(peer, one(part), How::Copy);
    }
}

fn to_root(step: &mut Step, s: &Schedule, rank: usize, peer: usize, part: usize, how: How) {
    if rank == s.root {
        step.recv(peer, one(part), how);
    } else if peer == s.root {
        step.send(peer, one(part));
    }
}
