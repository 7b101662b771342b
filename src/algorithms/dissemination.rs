//! Dissemination barrier: in step k every rank sends to the rank 2^k ahead, after it has received the messages of step
//! k - 1. So a message shows that its sender has entered the barrier. It shows the same for every rank whose messages
//! have reached the sender, directly or through other ranks.
//!
//! p ranks: ceil(log2 p) steps, one empty message sent and received per step. There is no central rank. Nothing is
//! summed.
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
