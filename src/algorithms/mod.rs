//! Schedules: which rank sends which parts to which rank in which step of a collective. Pure arithmetic over rank
//! numbers, without data, clock or side effects. So the same schedule can be executed over a link, proved for every
//! rank count (`tests/it/algorithms.rs`), and priced for 100,000 ranks (`select/cost.rs`).
//!
//! # What a schedule guarantees
//!
//! - The vector of the collective is cut into [`Schedule::parts`] parts, numbered in memory order. For all_reduce,
//!   broadcast and reduce their sizes are about equal, and they may be empty. A broadcast is cut by [`part_range`]; a
//!   vector whose elements are combined is cut between elements, at cache lines (`engine/multihost/vector.rs`). For
//!   all_gather, reduce_scatter, gather and scatter, part `q` is the block of rank `q`, of any size. For all_to_all,
//!   part `src * ranks + dst` is the data that `src` sends to `dst`. A barrier has no parts: its messages are empty,
//!   but must still be sent.
//! - At the start a rank has every part of its own input (all_reduce, reduce, reduce_scatter; on the root also
//!   broadcast and scatter), its own part (all_gather, gather), or its parts for other ranks (all_to_all). All other
//!   parts are scratch: a schedule may pass other ranks' parts through a rank, and may leave partial sums in parts that
//!   are not a result of that rank.
//! - All transfers of one [`Step`] are in flight at the same time. A send reads what its rank had before the step. Step
//!   `k + 1` of a rank starts when step `k` of the same rank is done. Ranks do not run in lockstep.
//! - Between two ranks there is at most one message per step and direction. Sender and receiver name the same parts in
//!   the same order under the same step number. So receives that are posted step by step never match a wrong message,
//!   and a rank that has posted only the receives of its current step cannot cause a deadlock.
//! - If a [`How::Copy`] writes a part in a step, the same rank does not send that part in that step.
//! - Every element is combined by the same expression, wherever it is computed, so that all ranks get equal bits. The
//!   head of each algorithm's file has its expression.
//!
//! `CONTRIBUTING.md` describes how to add an algorithm.

/// The Rust examples of `docs/internals/algorithms.md` run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/internals/algorithms.md")]
struct Page;

mod binomial;
mod bruck;
mod direct;
mod dissemination;
mod double_tree;
mod doubling;
mod halving;
mod power;
mod ring;
mod torus;

use std::ops::Range;

use crate::types::{Kind, enumeration};

enumeration! {
    /// The numbers are stored in tables and records. Their meaning never changes.
    Algorithm {
        Ring = 1, "ring";
        Torus = 2, "torus";
        Binomial = 3, "binomial_tree";
        DoubleTree = 4, "double_tree";
        Doubling = 5, "recursive_doubling";
        Halving = 6, "halving_doubling";
        Direct = 7, "direct";
        TwoStep = 8, "direct_two_step";
        Bruck = 9, "bruck";
        Dissemination = 10, "dissemination";
    }
}

impl Algorithm {
    fn pattern(self) -> &'static dyn Pattern {
        match self {
            Algorithm::Ring => &self::ring::Ring,
            Algorithm::Torus => &self::torus::Torus,
            Algorithm::Binomial => &self::binomial::Binomial,
            Algorithm::DoubleTree => &self::double_tree::DoubleTree,
            Algorithm::Doubling => &self::doubling::Doubling,
            Algorithm::Halving => &self::halving::Halving,
            Algorithm::Direct => &self::direct::Direct,
            Algorithm::TwoStep => &self::direct::TwoStep,
            Algorithm::Bruck => &self::bruck::Bruck,
            Algorithm::Dissemination => &self::dissemination::Dissemination,
        }
    }

    pub fn from_name(name: &str) -> Option<Algorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }

    pub fn code(self) -> u8 {
        self as u8
    }

    pub fn from_code(code: u8) -> Option<Algorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| algorithm.code() == code)
    }

    /// Whether this algorithm has schedules for `kind`. If so, it has one for every rank count.
    pub fn serves(self, kind: Kind) -> bool {
        self.pattern().serves(kind)
    }

    /// Whether every element is combined in the same order, whatever its position in the vector. Only a schedule with
    /// one order may run a batch of sums, because otherwise the bits of an operation would depend on the batch's other
    /// operations (rule 18).
    pub fn one_order(self) -> bool {
        self.pattern().one_order()
    }

    /// Whether steps can overlap if the vector is cut into more segments. If not, `segments` is always 1.
    pub fn pipelines(self, kind: Kind) -> bool {
        self.pattern().pipelines(kind)
    }
}

/// The programs of all ranks for one collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    pub kind: Kind,
    pub algorithm: Algorithm,
    pub ranks: usize,
    /// 0 if the kind has no root.
    pub root: usize,
    /// Number of segments into which each stream of data is cut, for pipelining. 1 if the algorithm does not pipeline.
    pub segments: usize,
}

/// What one rank does in one step. Empty if it pauses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub sends: Vec<Send>,
    /// Received numbers are combined in the order of this list.
    pub recvs: Vec<Recv>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Send {
    pub peer: usize,
    /// Part numbers, in the order of the parts in the message.
    pub parts: Vec<Range<usize>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recv {
    pub peer: usize,
    pub parts: Vec<Range<usize>>,
    pub how: How,
}

/// How received parts are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// own = theirs
    Copy,
    /// own = own op theirs
    ReduceAfter,
    /// own = theirs op own
    ReduceBefore,
    /// own = x0 op x1 op x2 ..., from left to right in rank order. The operands are this rank's own value and the
    /// values of all receives of the step. All receives of such a step have this kind and name the same parts.
    InRankOrder,
}

/// The total number of parts that the busiest sender sends, and that the busiest receiver receives. These may be
/// different ranks. If all parts have `b` bytes, the busiest sender sends `sent * b` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Volume {
    pub sent: usize,
    pub received: usize,
}

/// One algorithm. Callers have checked `serves`, `ranks > 1`, `rank < ranks` and `k < steps`.
trait Pattern: Sync {
    fn serves(&self, kind: Kind) -> bool;
    fn pipelines(&self, _kind: Kind) -> bool {
        false
    }
    /// The value of `Algorithm::one_order`. It holds for all kinds that the algorithm serves; `tests/it/algorithms.rs`
    /// proves it.
    fn one_order(&self) -> bool {
        false
    }
    /// Returns into how many parts the algorithm cuts the vector of an all_reduce, broadcast or reduce.
    fn cuts(&self, s: &Schedule) -> usize;
    fn steps(&self, s: &Schedule) -> usize;
    fn step(&self, s: &Schedule, rank: usize, k: usize) -> Step;
    /// The numbers of parts sent and received, computed with the formulas in the head of the algorithm's file.
    fn volume(&self, s: &Schedule) -> Volume;
    /// Returns for how many steps, beginning with `k`, no rank changes its peers or its counts of parts.
    fn alike(&self, _s: &Schedule, _k: usize) -> usize {
        1
    }
    /// The value of `Schedule::busiest`. All ranks, unless there are too many to examine.
    fn busiest(&self, s: &Schedule, _k: usize) -> Vec<usize> {
        (0..s.ranks).collect()
    }
}

impl Schedule {
    /// None if the algorithm does not serve the kind, or if `root` is not a rank. `segments` only matters if the
    /// algorithm pipelines the kind; 0 counts as 1.
    pub fn new(algorithm: Algorithm, kind: Kind, ranks: usize, root: usize, segments: usize) -> Option<Schedule> {
        if !algorithm.serves(kind) || root >= ranks {
            return None;
        }
        let root = if kind.rooted() { root } else { 0 };
        let segments = if algorithm.pipelines(kind) { segments.max(1) } else { 1 };
        Some(Schedule { kind, algorithm, ranks, root, segments })
    }

    pub fn parts(&self) -> usize {
        match self.kind {
            Kind::AllReduce | Kind::Broadcast | Kind::Reduce if self.ranks == 1 => 1,
            Kind::AllReduce | Kind::Broadcast | Kind::Reduce => self.algorithm.pattern().cuts(self),
            Kind::AllGather | Kind::ReduceScatter | Kind::Gather | Kind::Scatter => self.ranks,
            Kind::AllToAll => self.ranks * self.ranks,
            Kind::Barrier | Kind::Send | Kind::Recv => 0,
        }
    }

    /// The largest number of steps that a rank has.
    pub fn steps(&self) -> usize {
        if self.ranks == 1 { 0 } else { self.algorithm.pattern().steps(self) }
    }

    /// The sends and receives of `rank` in step `k`. Panics if there is no such rank or step.
    pub fn step(&self, rank: usize, k: usize) -> Step {
        assert!(rank < self.ranks && k < self.steps(), "no step {k} of rank {rank} in {self:?}");
        self.algorithm.pattern().step(self, rank, k)
    }

    /// How many parts the busiest ranks move.
    pub fn volume(&self) -> Volume {
        if self.ranks == 1 { Volume { sent: 0, received: 0 } } else { self.algorithm.pattern().volume(self) }
    }

    /// Returns for how many steps (at least 1), beginning with `k`, no rank changes its peers or its counts of parts.
    /// So the cost model does not have to examine each of 200,000 steps.
    pub fn alike(&self, k: usize) -> usize {
        self.algorithm.pattern().alike(self, k)
    }

    /// Returns the ranks to examine in step `k`. No rank does much more in this step than one of these ranks, or than a
    /// rank on the host of one of these.
    pub fn busiest(&self, k: usize) -> Vec<usize> {
        self.algorithm.pattern().busiest(self, k)
    }

    /// The rank's place, counted from the root as 0.
    fn place_of(&self, rank: usize) -> usize {
        (rank + self.ranks - self.root) % self.ranks
    }

    /// The rank at a place, which is counted from the root.
    fn rank_at(&self, place: usize) -> usize {
        (self.root + place) % self.ranks
    }
}

impl Step {
    fn send(&mut self, peer: usize, parts: Vec<Range<usize>>) {
        self.sends.push(Send { peer, parts });
    }

    fn recv(&mut self, peer: usize, parts: Vec<Range<usize>>, how: How) {
        self.recvs.push(Recv { peer, parts, how });
    }

    pub fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.recvs.is_empty()
    }
}

/// Returns the range of part `part` if `count` elements or bytes are cut into `parts` parts. The first `count % parts`
/// parts have one more than the rest.
pub fn part_range(count: usize, parts: usize, part: usize) -> Range<usize> {
    let start = |q: usize| q * (count / parts) + q.min(count % parts);
    start(part)..start(part + 1)
}

/// Number of parts in these ranges.
pub fn count(parts: &[Range<usize>]) -> usize {
    parts.iter().map(|range| range.len()).sum()
}

/// Smallest `n` with `2^n >= ranks`.
fn ceil_log2(ranks: usize) -> usize {
    ranks.next_power_of_two().trailing_zeros() as usize
}

/// A message of one part.
fn one(part: usize) -> Vec<Range<usize>> {
    run(part..part + 1)
}

/// A message of consecutive parts.
fn run(parts: Range<usize>) -> Vec<Range<usize>> {
    std::iter::once(parts).collect()
}

/// The `length` parts beginning with `start`, modulo `ranks`.
fn around(start: usize, length: usize, ranks: usize) -> Vec<Range<usize>> {
    let start = start % ranks;
    if start + length <= ranks { run(start..start + length) } else { vec![start..ranks, 0..start + length - ranks] }
}

/// All ranks except `rank`, in order.
fn others(ranks: usize, rank: usize) -> impl Iterator<Item = usize> {
    (0..ranks).filter(move |peer| *peer != rank)
}
