//! Binomial tree: in every step each rank that has the data passes it to a rank that does not have it.
//!
//! p ranks, L = ceil(log2 p), N bytes (for gather and scatter: all blocks together). A rank's place is its number
//! counted from the root. The subtree of place v consists of the consecutive places v, v + 1, ...; their number is the
//! value of the lowest set bit of v, or less if the places end before.
//!
//! - broadcast: L steps; the root sends N L bytes, a rank receives N.
//! - reduce: the same in reverse; a rank sends N, the root receives N L.
//! - all_reduce: reduce to rank 0, then broadcast. 2 L steps, at most N L sent and received.
//! - gather, scatter: L steps; the root moves N (p - 1) / p. Any other rank moves at most its subtree, which has up to
//!   max(p - 2^(L-1), 2^(L-2)) blocks.
//! - barrier: reduce and broadcast without data. 2 L steps.
//!
//! Order of summation: the balanced tree over consecutive ranks, counted from the root, with lower ranks on the left:
//! ((x0 op x1) op (x2 op x3)) op .... It is the same for all elements. Source: MPICH's binomial broadcast, reduce,
//! gather and scatter (Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH",
//! 2005).

use std::ops::Range;

use super::{How, Pattern, Schedule, Step, Volume, around, ceil_log2, one};
use crate::types::Kind;

pub(super) struct Binomial;

impl Pattern for Binomial {
    fn serves(&self, kind: Kind) -> bool {
        use Kind::*;
        matches!(kind, Broadcast | Reduce | AllReduce | Gather | Scatter | Barrier)
    }

    fn one_order(&self) -> bool {
        true
    }

    fn cuts(&self, _s: &Schedule) -> usize {
        1
    }

    fn steps(&self, s: &Schedule) -> usize {
        match s.kind {
            Kind::AllReduce | Kind::Barrier => 2 * ceil_log2(s.ranks),
            _ => ceil_log2(s.ranks),
        }
    }

    fn step(&self, s: &Schedule, rank: usize, k: usize) -> Step {
        let levels = ceil_log2(s.ranks);
        match s.kind {
            Kind::Broadcast | Kind::Scatter => down(s, rank, levels - 1 - k),
            Kind::AllReduce | Kind::Barrier if k >= levels => down(s, rank, 2 * levels - 1 - k),
            _ => up(s, rank, k),
        }
    }

    fn volume(&self, s: &Schedule) -> Volume {
        let levels = ceil_log2(s.ranks);
        let subtree = (s.ranks - (1 << (levels - 1))).max((1 << levels) / 4);
        let (sent, received) = match s.kind {
            Kind::Broadcast => (levels, 1),
            Kind::Reduce => (1, levels),
            Kind::AllReduce => (levels, levels),
            Kind::Gather => (subtree, s.ranks - 1),
            Kind::Scatter => (s.ranks - 1, subtree),
            _ => (0, 0),
        };
        Volume { sent, received }
    }
}

/// Returns the parts that move between the rank at `place` and its parent, which is `1 << level` places away.
fn cargo(s: &Schedule, place: usize, level: usize) -> Vec<Range<usize>> {
    match s.kind {
        Kind::Gather | Kind::Scatter => {
            let length = (1 << level).min(s.ranks - place);
            around(s.root + place, length, s.ranks)
        }
        Kind::Barrier => Vec::new(),
        _ => one(0),
    }
}

/// The step towards the root, over the distance `1 << level`.
fn up(s: &Schedule, rank: usize, level: usize) -> Step {
    let mut step = Step::default();
    let (place, distance) = (s.place_of(rank), 1 << level);
    if place % (2 * distance) == distance {
        step.send(s.rank_at(place - distance), cargo(s, place, level));
    } else if place % (2 * distance) == 0 && place + distance < s.ranks {
        let how = if matches!(s.kind, Kind::Reduce | Kind::AllReduce) { How::ReduceAfter } else { How::Copy };
        step.recv(s.rank_at(place + distance), cargo(s, place + distance, level), how);
    }
    step
}

/// The step away from the root, over the distance `1 << level`.
fn down(s: &Schedule, rank: usize, level: usize) -> Step {
    let mut step = Step::default();
    let (place, distance) = (s.place_of(rank), 1 << level);
    if place % (2 * distance) == distance {
        step.recv(s.rank_at(place - distance), cargo(s, place, level), How::Copy);
    } else if place % (2 * distance) == 0 && place + distance < s.ranks {
        step.send(s.rank_at(place + distance), cargo(s, place + distance, level));
    }
    step
}
