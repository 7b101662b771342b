//! Recursive halving and doubling: ranks exchange over the distances 1, 2, 4, ..., and each time halve the set of parts
//! that they still reduce. Then they gather the results in reverse order.
//!
//! p ranks, P = 2^L is the largest power of two up to p, N bytes (for all_gather and reduce_scatter: all blocks
//! together). If p is not a power of two, p - P odd ranks first send their data to the rank before them, and receive
//! the result in a last step (`power.rs`). Values for this case are in brackets.
//!
//! - reduce_scatter: L steps (L + 2); N (p - 1) / p bytes sent and received (at most N sent, and N + N (P - 1) / p plus
//!   a few blocks received).
//! - all_gather: its reverse; N (p - 1) / p bytes (at most N (P - 1) / p + N plus a few blocks sent).
//! - all_reduce: both of these; 2 L steps (2 L + 2), 2 N (P - 1) / P bytes (and N more).
//!
//! The nearest ranks exchange the most data, which is good if ranks are numbered host by host. Order of summation: that
//! of recursive doubling, for every element, because both use the distances in the same order. So it does not depend on
//! an element's position in the vector. Source: Rabenseifner, "Optimization of collective reduction operations" (2004);
//! MPICH. In both of these the largest distance comes first, which gives a different order of summation.

use std::ops::Range;

use super::power::{Phase, Power, Role};
use super::{How, Pattern, Schedule, Step, Volume, one, run};
use crate::types::Kind;

pub(super) struct Halving;

impl Pattern for Halving {
    fn serves(&self, kind: Kind) -> bool {
        matches!(kind, Kind::AllReduce | Kind::ReduceScatter | Kind::AllGather)
    }

    fn one_order(&self) -> bool {
        true
    }

    fn cuts(&self, s: &Schedule) -> usize {
        Power::of(s.ranks).size
    }

    fn steps(&self, s: &Schedule) -> usize {
        let power = Power::of(s.ranks);
        power.steps(exchanges(s.kind, power))
    }

    fn step(&self, s: &Schedule, rank: usize, k: usize) -> Step {
        let power = Power::of(s.ranks);
        match power.phase(k, exchanges(s.kind, power)) {
            Phase::FoldIn => fold_in(s, power, rank),
            Phase::FoldOut => fold_out(s, power, rank),
            Phase::Exchange(k) => {
                let Role::Active(index) = power.role(rank) else { return Step::default() };
                match s.kind {
                    Kind::AllGather => double(s.kind, power, index, power.bits - 1 - k),
                    Kind::AllReduce if k >= power.bits => double(s.kind, power, index, 2 * power.bits - 1 - k),
                    _ => halve(s.kind, power, index, k),
                }
            }
        }
    }

    fn volume(&self, s: &Schedule) -> Volume {
        let power = Power::of(s.ranks);
        let folded = power.extra > 0;
        // The parts that rank 0 still reduces after each halving. No rank has more, because the ranks that act for
        // pairs are the first ones.
        let kept: usize = (1..=power.bits).map(|bit| (power.size >> bit) + power.extra.div_ceil(1 << bit)).sum();
        let (sent, received) = match s.kind {
            Kind::AllReduce => {
                let each = 2 * (power.size - 1) + if folded { power.size } else { 0 };
                (each, each)
            }
            Kind::ReduceScatter if folded => (s.ranks, s.ranks + kept),
            Kind::AllGather if folded => (kept + s.ranks - 1, s.ranks - 1),
            _ => (s.ranks - 1, s.ranks - 1),
        };
        Volume { sent, received }
    }

    /// Listing the parts of a rank takes time if they are blocks, so only a few ranks are examined, including the last
    /// rank of the pairs and the rank after it.
    fn busiest(&self, s: &Schedule, _k: usize) -> Vec<usize> {
        const SOME: usize = 64;
        if s.kind == Kind::AllReduce || s.ranks < SOME {
            return (0..s.ranks).collect();
        }
        let pairs = 2 * Power::of(s.ranks).extra;
        (0..SOME).map(|i| i * s.ranks / SOME).chain([pairs.saturating_sub(1), pairs, s.ranks - 1]).collect()
    }
}

fn exchanges(kind: Kind, power: Power) -> usize {
    if kind == Kind::AllReduce { 2 * power.bits } else { power.bits }
}

/// The parts that the rank with this index still reduces after `halvings` halvings.
fn kept(kind: Kind, power: Power, index: usize, halvings: usize) -> Vec<Range<usize>> {
    if kind == Kind::AllReduce {
        // In all_reduce parts belong to no rank, so each rank keeps one contiguous range: the half that its bit
        // selects.
        let start = (0..halvings).map(|bit| (index >> bit & 1) * (power.size >> (bit + 1))).sum();
        return run(start..start + (power.size >> halvings));
    }
    let mut parts: Vec<Range<usize>> = Vec::new();
    for member in (index % (1 << halvings)..power.size).step_by(1 << halvings) {
        let ranks = power.ranks(member..member + 1);
        match parts.last_mut() {
            Some(last) if last.end == ranks.start => last.end = ranks.end,
            _ => parts.push(ranks),
        }
    }
    parts
}

fn halve(kind: Kind, power: Power, index: usize, bit: usize) -> Step {
    let mut step = Step::default();
    let other = index ^ (1 << bit);
    let how = if index < other { How::ReduceAfter } else { How::ReduceBefore };
    step.send(power.rank(other), kept(kind, power, other, bit + 1));
    step.recv(power.rank(other), kept(kind, power, index, bit + 1), how);
    step
}

fn double(kind: Kind, power: Power, index: usize, bit: usize) -> Step {
    let mut step = Step::default();
    let other = index ^ (1 << bit);
    step.send(power.rank(other), kept(kind, power, index, bit + 1));
    step.recv(power.rank(other), kept(kind, power, other, bit + 1), How::Copy);
    step
}

/// First step: odd ranks of pairs send their numbers, or their block, to their partner.
fn fold_in(s: &Schedule, power: Power, rank: usize) -> Step {
    let mut step = Step::default();
    let Some(partner) = power.partner(rank) else { return step };
    let (parts, how) = match s.kind {
        Kind::AllGather => (rank | 1..(rank | 1) + 1, How::Copy),
        _ => (0..s.parts(), How::ReduceAfter),
    };
    match power.role(rank) {
        Role::Resting => step.send(partner, run(parts)),
        Role::Active(_) => step.recv(partner, run(parts), how),
    }
    step
}

/// Last step: the rank that acted for a pair sends its partner's parts to the partner.
fn fold_out(s: &Schedule, power: Power, rank: usize) -> Step {
    let mut step = Step::default();
    let Some(partner) = power.partner(rank) else { return step };
    let odd = rank | 1;
    let parts: Vec<_> = match s.kind {
        Kind::AllReduce => run(0..power.size),
        Kind::ReduceScatter => one(odd),
        _ => [0..odd, odd + 1..s.ranks].into_iter().filter(|parts| !parts.is_empty()).collect(),
    };
    match power.role(rank) {
        Role::Resting => step.recv(partner, parts, How::Copy),
        Role::Active(_) => step.send(partner, parts),
    }
    step
}
