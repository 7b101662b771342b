//! Recursive doubling: in step j each rank and the rank at distance 2^j send each other all the data that they have.
//!
//! p ranks, L = floor(log2 p), N bytes (for all_gather: all blocks together). If p is not a power of two, p - 2^L odd
//! ranks first send their data to the rank before them, and receive the result in a last step (`power.rs`). Values for
//! this case are in brackets.
//!
//! - all_reduce: L steps (L + 2); every rank sends and receives N L bytes (N (L + 1)).
//! - all_gather: L steps (L + 2); every rank sends and receives N (p - 1) / p bytes. If p is not a power of two, the
//!   ranks that act for two send up to almost twice that, and Bruck's algorithm is better.
//! - barrier: all_reduce without data.
//!
//! Order of summation: the balanced tree over consecutive ranks, lower ranks on the left. If a pair acts as one rank,
//! the values of its two ranks are combined first. The order is the same for all elements, whatever their position in
//! the vector. Source: MPICH's recursive doubling (Thakur, Rabenseifner, Gropp 2005).

use std::ops::Range;

use super::power::{Phase, Power, Role};
use super::{How, Pattern, Schedule, Step, Volume, one, run};
use crate::types::Kind;

pub(super) struct Doubling;

impl Pattern for Doubling {
    fn serves(&self, kind: Kind) -> bool {
        matches!(kind, Kind::AllReduce | Kind::AllGather | Kind::Barrier)
    }

    fn one_order(&self) -> bool {
        true
    }

    fn cuts(&self, _s: &Schedule) -> usize {
        1
    }

    fn steps(&self, s: &Schedule) -> usize {
        let power = Power::of(s.ranks);
        power.steps(power.bits)
    }

    fn step(&self, s: &Schedule, rank: usize, k: usize) -> Step {
        let power = Power::of(s.ranks);
        match power.phase(k, power.bits) {
            Phase::FoldIn => fold_in(s.kind, power, rank),
            Phase::FoldOut => fold_out(s, power, rank),
            Phase::Exchange(bit) => exchange(s.kind, power, rank, bit),
        }
    }

    fn volume(&self, s: &Schedule) -> Volume {
        let power = Power::of(s.ranks);
        match s.kind {
            Kind::AllReduce => {
                let each = power.bits + usize::from(power.extra > 0);
                Volume { sent: each, received: each }
            }
            Kind::AllGather if power.extra > 0 => {
                // In each step rank 0 sends the data that it has so far. In the last step it sends its partner all
                // parts except the partner's own.
                let grown: usize = (0..power.bits).map(|bit| power.ranks(0..1 << bit).len()).sum();
                Volume { sent: grown + s.ranks - 1, received: s.ranks - 1 }
            }
            Kind::AllGather => Volume { sent: s.ranks - 1, received: s.ranks - 1 },
            _ => Volume { sent: 0, received: 0 },
        }
    }
}

/// The whole vector. Empty for a barrier.
fn whole(kind: Kind) -> Vec<Range<usize>> {
    if kind == Kind::AllReduce { one(0) } else { Vec::new() }
}

/// First step: odd ranks of pairs send their data to their partner.
fn fold_in(kind: Kind, power: Power, rank: usize) -> Step {
    let mut step = Step::default();
    let Some(partner) = power.partner(rank) else { return step };
    let own = |rank: usize| if kind == Kind::AllGather { one(rank) } else { whole(kind) };
    match power.role(rank) {
        Role::Resting => step.send(partner, own(rank)),
        Role::Active(_) => {
            let how = if kind == Kind::AllReduce { How::ReduceAfter } else { How::Copy };
            step.recv(partner, own(partner), how);
        }
    }
    step
}

/// Last step: the rank that acted for a pair sends the result to its partner.
fn fold_out(s: &Schedule, power: Power, rank: usize) -> Step {
    let mut step = Step::default();
    let Some(partner) = power.partner(rank) else { return step };
    let result = |odd: usize| {
        if s.kind == Kind::AllGather {
            [0..odd, odd + 1..s.ranks].into_iter().filter(|parts| !parts.is_empty()).collect()
        } else {
            whole(s.kind)
        }
    };
    match power.role(rank) {
        Role::Resting => step.recv(partner, result(rank), How::Copy),
        Role::Active(_) => step.send(partner, result(partner)),
    }
    step
}

fn exchange(kind: Kind, power: Power, rank: usize, bit: usize) -> Step {
    let mut step = Step::default();
    let Role::Active(index) = power.role(rank) else { return step };
    let distance = 1 << bit;
    let other = index ^ distance;
    let group = |index: usize| {
        let start = index & !(distance - 1);
        if kind == Kind::AllGather { run(power.ranks(start..start + distance)) } else { whole(kind) }
    };
    let how = match kind {
        Kind::AllReduce if index < other => How::ReduceAfter,
        Kind::AllReduce => How::ReduceBefore,
        _ => How::Copy,
    };
    step.send(power.rank(other), group(index));
    step.recv(power.rank(other), group(other), how);
    step
}
