//! Dissemination barrier: in step k every rank tells the one 2^k ahead that it has come, and all ranks it has heard of.
//!
//! p ranks: ceil(log2 p) steps, one empty message sent and received per step; no rank waits for a central one.
//! Nothing is summed.
//! Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization" (1988); MPICH's barrier.

use super::{How, Pattern, Schedule, Step, Volume, ceil_log2};
use crate::types::Kind;

pub(super) struct Dissemination;

impl Pattern for Dissemination {
    fn serves(&self, kind: Kind) -> bool {
        kind == Kind::Barrier
    }

    fn cuts(&self, _s: &Schedule) -> usize {
        0
    }

    fn steps(&self, s: &Schedule) -> usize {
        ceil_log2(s.ranks)
    }

    fn step(&self, s: &Schedule, rank: usize, k: usize) -> Step {
        let mut step = Step::default();
        step.send((rank + (1 << k)) % s.ranks, Vec::new());
        step.recv((rank + s.ranks - (1 << k)) % s.ranks, Vec::new(), How::Copy);
        step
    }

    fn volume(&self, _s: &Schedule) -> Volume {
        Volume { sent: 0, received: 0 }
    }
}
