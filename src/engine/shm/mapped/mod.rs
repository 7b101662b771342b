//! Large operations on tensors that peers can reach, without intermediate copies.
//!
//! Idea: the tensors are in the arenas of their processes (`memory/arena.rs`), which every rank has mapped. In
//! all_reduce, each rank combines its slice of all inputs and writes the result into all outputs. In a broadcast, each
//! rank copies its slice of the root's input into all outputs. In scatter and gather, the root does its share of the
//! copies, too. In the other kinds that only move data, each rank copies what it needs from its peers' inputs. Then
//! each rank publishes that its part is done. The operation ends when all parts are done.
//!
//! | kind | bytes read and written per rank | order of summation |
//! | --- | --- | --- |
//! | all_reduce | N read, N written | rank 0..P-1, each slice at one rank |
//! | reduce | N read, N/P written | the same |
//! | reduce_scatter | N read, N/P written | the same |
//! | all_gather, all_to_all | its output, read and written once | - |
//! | broadcast | N/P read, N (P-1)/P written | - |
//! | scatter, gather | (P-1)/P of a block, read and written once; the root also its own block | - |
//!
//! With the option `numa` and many ranks, bound to several NUMA nodes or last-level caches (`Nodes`), an all_reduce or reduce is
//! made node by node (`relay.rs`), and in a broadcast each rank writes only into outputs on its node.
//!
//! Steps: two exchanges (the headers, then the notices that the parts are done). Source: the single-copy collectives of
//! XPMEM-based MPI libraries (Open MPI's coll/xhc), here over memory that needs no kernel module.
//!
//! **Choice.** Every rank's header says whether it offers its tensors (`offer.rs`). The operation is mapped if all
//! ranks do, else its data is staged (`bulk.rs`).
//!
//! **When a rank fails.** A rank whose operation fails continues its program, which writes into the inputs again and
//! expects that no rank writes into the outputs. A peer may still be in the middle of its part.
//! - *Late writes*: outputs are made private before the program receives the error (`Mapped::withdraw`).
//! - *Late reads*: after reading, a rank checks whether the group has failed or a rank has left. If so, it does not
//!   publish that its part is done. The failing rank has stored its fault or departure before its program continues
//!   (`Shm::take_pending` ensures that), so a rank that has read changed data finds the fault or the departure. No
//!   rank's operation ends before all parts are done.

#![allow(unsafe_code)] // reads and writes the tensors of peers

mod offer;
mod part;
mod relay;

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use self::offer::Theirs;
pub use self::offer::{Arenas, Offer};
use self::part::{Part, Shape};
use self::relay::Relay;
use super::bulk::Step;
use super::memory::area::Area;
use super::memory::arena::Lease;
use super::protocol;
use super::protocol::Slots;
use super::{headers, table};
use crate::engine::pieces::{Pieces, transfer};
use crate::error::{Error, Result, laid_out};
use crate::op::Op;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::reduce::Kernel;
use crate::select::Choice;
use crate::stats::chunk_timer::ChunkTimer;
use crate::threads;

/// Bytes that are read or combined, then written to all outputs, while they are in the nearest cache.
const FOLD_BYTES: usize = 32 << 10;
/// Bytes of one step for each thread that works on it. Between steps, a waiting thread checks for signals, deadlines
/// and ended peers.
const STEP_BYTES: usize = 1 << 20;

/// The progress of an operation whose tensors this rank offers.
pub struct Mapped {
    offer: Offer,
    /// Ranks below this number have headers that agree.
    seen: usize,
    work: Option<Work>,
    /// Bytes of this rank's part that are done.
    at: usize,
    /// Replaces `at` if the sum is made node by node.
    relay: Relay,
    /// Whether this rank's part is done and published.
    told: bool,
    timer: ChunkTimer,
}

/// What the ranks have agreed to do.
struct Work {
    part: Part,
    theirs: Vec<Theirs>,
    factors: Vec<f64>,
}

/// The result of a step.
pub enum Outcome {
    Step(Step),
    /// A rank offers nothing, so the data must be staged.
    Staged,
}

/// What an operation needs to advance.
pub struct Context<'a> {
    pub area: &'a Area,
    pub op: &'a Op,
    pub kernel: Option<&'a Kernel>,
    pub arenas: &'a Arenas,
    /// The next round of the stage (`bulk::Bases`).
    pub round: u64,
}

impl Mapped {
    pub fn new(op: &Op, offer: Offer) -> Mapped {
        Mapped { offer, seen: 0, work: None, at: 0, relay: Relay::default(), told: false, timer: ChunkTimer::new(op) }
    }

    /// Does at most one step of this rank's part.
    pub fn step(&mut self, context: &Context) -> Result<Outcome> {
        let &Context { area, op, arenas, .. } = context;
        if self.seen < area.ranks {
            self.seen = headers::look(area, op, self.seen, |_| true)?;
            if (0..area.ranks).any(|q| Slots::is_published(area, q, op.number) && area.offer(q, op.number) == 0) {
                return Ok(Outcome::Staged);
            }
            if self.seen < area.ranks {
                self.timer.misses(self.seen);
                return Ok(Outcome::Step(Step::Blocked));
            }
        }
        if self.work.is_none() {
            self.work = agree(area, op, arenas)?;
            if self.work.is_none() {
                return Ok(Outcome::Staged);
            }
            op.record_choice(Choice::MAPPED.code());
        }
        let work = self.work.as_ref().expect("agreed above");
        if self.told {
            let missing = (0..area.ranks).find(|q| !protocol::has_moved(area, *q, op.number));
            return Ok(Outcome::Step(missing.map_or(Step::Done, |rank| {
                self.timer.misses(rank);
                Step::Blocked
            })));
        }
        if !protocol::was_whole(area) {
            return Ok(Outcome::Step(Step::Blocked)); // the group finds the reason
        }
        let (moved, done) = match &work.part {
            Part::Relay { .. } => self.relay.step(work, context, &mut self.timer),
            _ => (true, self.advance(context)),
        };
        if done && protocol::was_whole(area) {
            fault_points::reached(FaultPoint::PartDone);
            protocol::moved(area, area.me, op.number);
            fault_points::reached(FaultPoint::PartPublished);
            self.told = true;
        }
        Ok(Outcome::Step(if moved || self.told { Step::Moved } else { Step::Blocked }))
    }

    /// Does the next step of a part that waits for no other rank. Returns whether the part is done.
    fn advance(&mut self, context: &Context) -> bool {
        let &Context { area, op, kernel, .. } = context;
        let work = self.work.as_ref().expect("agreed before");
        let whole = work.part.bytes();
        if self.at < whole {
            let bytes = (STEP_BYTES * threads::count()).min(whole - self.at);
            fault_points::reached(FaultPoint::PartBegun);
            let began = self.timer.begin(op);
            let at = self.at;
            threads::split(bytes, |start, length| {
                // SAFETY: every rank has published the operation and keeps its tensors until it ends. `agree` has
                // checked that the part is within them. No two ranges have a byte in common.
                unsafe { work.advance(area.me, kernel, at + start, length) }
            });
            let timing = &op.timing;
            self.timer.end(if op.request.kind.reduces() { &timing.reducing } else { &timing.copying }, began);
            self.at += bytes;
        }
        self.at == whole
    }

    /// True while the operation cannot end before `peer` makes further progress. A peer that left has given up its part
    /// of this operation, and its inputs may change.
    pub fn needs(&self, area: &Area, op: &Op, peer: usize) -> bool {
        let published = |q| Slots::is_published(area, q, op.number);
        if !(0..area.ranks).all(published) {
            // No rank starts its part before all have published, so a peer that offers and then ends has not done its
            // part.
            return !published(peer) || area.offer(peer, op.number) != 0;
        }
        if self.work.is_none() {
            return false; // the next step decides, or an earlier operation runs first
        }
        !protocol::has_moved(area, peer, op.number) || !self.told && area.left(peer)
    }

    /// Called when the operation fails on this rank, after the rank has stored the fault or its departure. Makes
    /// private the memory that peers write, so that a peer that continues later cannot change it.
    pub fn withdraw(self) {
        self.offer.targets().iter().for_each(withdraw);
    }
}

/// Makes memory private that a peer may still write, after an operation on it has failed here.
pub fn withdraw(lease: &Lease) {
    if let Err(error) = lease.take_out() {
        log::error!(
            "{} bytes of a tensor in shared memory could not be made private after an operation on them had failed ({error}); \
             a rank that continues late may still write into them",
            lease.bytes
        );
    }
}

/// Returns what this rank has to do, or None if a rank does not offer its tensors. All ranks must have published the
/// operation.
fn agree(area: &Area, op: &Op, arenas: &Arenas) -> Result<Option<Work>> {
    let request = &op.request;
    let theirs = match arenas.theirs(area, op) {
        Ok(Some(theirs)) => theirs,
        Ok(None) => return Ok(None),
        Err(rank) => return Err(impossible(op, rank)),
    };
    let tables = match request.kind {
        crate::types::Kind::AllToAll => table::finish(area, op)?,
        _ => Vec::new(),
    };
    let shape = Shape {
        kind: request.kind,
        me: area.me,
        ranks: area.ranks,
        root: request.root as usize,
        total_in: Pieces(request.inputs()).bytes(),
        total_out: Pieces(request.outputs()).bytes(),
        in_blocks: &request.in_blocks,
        out_blocks: &request.out_blocks,
        nodes: &area.nodes,
    };
    let part = Part::of(&shape, &tables);
    let sizes = |spans: fn(&Theirs) -> &[_]| theirs.iter().map(|one| Pieces(spans(one)).bytes()).collect::<Vec<_>>();
    let (inputs, outputs) = (sizes(|one| &one.inputs), sizes(|one| &one.outputs));
    if let Some(rank) = part.too_small(&inputs, &outputs) {
        return Err(impossible(op, rank));
    }
    let factors = if request.kind.reduces() { headers::factors(area, op) } else { Vec::new() };
    Ok(Some(Work { part, theirs, factors }))
}

/// Cuts `at..at + bytes` into ranges that stay in the nearest cache. Yields the start and length of each.
fn in_cache(at: usize, bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (at..at + bytes).step_by(FOLD_BYTES).map(move |next| (next, FOLD_BYTES.min(at + bytes - next)))
}

/// Returns the error if the memory that `rank` offers is not in its arena or is too short.
pub fn impossible(op: &Op, rank: usize) -> Error {
    let head = format!("rank {rank} offers memory for {} that does not lie in its file or is too short", op.what());
    Error::bug(laid_out(&head, &[], "Please report this"))
}

impl protocol::Ends for Area {
    fn is_over(&self) -> bool {
        self.is_poisoned() || self.has_leavers()
    }
    fn fence(&self) {
        fence(Ordering::Acquire);
    }
}

impl Work {
    /// Does `bytes` of this rank's part, from `at` on.
    ///
    /// # Safety
    /// All tensors of `theirs` must be valid, and `at + bytes` must not exceed the part's length.
    unsafe fn advance(&self, me: usize, kernel: Option<&Kernel>, at: usize, bytes: usize) {
        match &self.part {
            Part::Copy(pieces) => {
                let mut start = 0;
                for piece in pieces {
                    let (from, to) = (at.max(start), (at + bytes).min(start + piece.bytes));
                    if from < to {
                        let (skip, length) = (from - start, to - from);
                        let source = Pieces(&self.theirs[piece.source].inputs);
                        let outputs = Pieces(&self.theirs[piece.target].outputs);
                        // SAFETY: the caller vouches for it. If this rank's own input and output are the same bytes,
                        // nothing is copied.
                        unsafe { transfer(source, piece.from + skip, outputs, piece.to + skip, length) };
                    }
                    start += piece.bytes;
                }
            }
            Part::Spread { root, at: start, targets, .. } => {
                let source = Pieces(&self.theirs[*root].inputs);
                // SAFETY: the caller vouches for it.
                unsafe { self.copy_to(targets, source, start + at, bytes) };
            }
            Part::Fold { from, to, targets, .. } => {
                let kernel = kernel.expect("a reducing operation has a kernel");
                for (next, length) in in_cache(at, bytes) {
                    // SAFETY: the caller vouches for it.
                    unsafe { self.fold(me, kernel, (from + next, to + next, length), targets) };
                }
            }
            Part::Relay { .. } => unreachable!("waits for other ranks (`Relay::step`)"),
        }
    }

    /// Copies `bytes` of `source` at `at` into the outputs of `targets` at `at`.
    ///
    /// # Safety
    /// The range must be within `source` and all these outputs. No other rank may write it in `source` or access it in
    /// the outputs.
    unsafe fn copy_to(&self, targets: &[usize], source: Pieces, at: usize, bytes: usize) {
        for (next, length) in in_cache(at, bytes) {
            for rank in targets {
                // SAFETY: the caller vouches for it. The outputs of different ranks do not overlap.
                unsafe { transfer(source, next, Pieces(&self.theirs[*rank].outputs), next, length) };
            }
        }
    }

    /// Calls `combine` with one address for each of `ranks`, at which its input has the `bytes` bytes from `from` on. If
    /// they consist of several pieces, the address is that of a copy.
    ///
    /// # Safety
    /// The range must be within these inputs, and no other rank may write it during the call.
    unsafe fn with_sources(
        &self,
        ranks: Range<usize>,
        (from, bytes): (usize, usize),
        combine: impl FnOnce(&[*const u8]),
    ) {
        let mut gathered: Vec<Vec<u8>> = Vec::new();
        let sources: Vec<*const u8> = self.theirs[ranks]
            .iter()
            .map(|one| {
                let inputs = Pieces(&one.inputs);
                inputs.contiguous(from, bytes).map_or_else(
                    || {
                        let mut copied = vec![0; bytes];
                        // SAFETY: within the inputs, by the function's contract.
                        unsafe { inputs.read(from, copied.as_mut_ptr(), bytes) };
                        gathered.push(copied);
                        gathered.last().expect("just pushed").as_ptr()
                    },
                    |address| address.cast_const(),
                )
            })
            .collect();
        combine(&sources);
    }

    /// Calls `combine` with an address for `bytes` bytes of a result, then writes the result into the outputs of
    /// `targets` at `to`. The address is in this rank's output if this rank is a target, otherwise in the first
    /// target's. From there the result is copied to the other targets, while it is in the cache.
    ///
    /// # Safety
    /// The range must be within these outputs, and no other rank may access it during the call.
    unsafe fn with_result(
        &self,
        me: usize,
        targets: &[usize],
        (to, bytes): (usize, usize),
        combine: impl FnOnce(*mut u8),
    ) {
        let outputs = |rank: usize| Pieces(&self.theirs[rank].outputs);
        let first = if targets.contains(&me) { me } else { targets[0] };
        let direct = outputs(first).contiguous(to, bytes);
        let mut scratch = vec![0; if direct.is_some() { 0 } else { bytes }];
        let result = direct.unwrap_or(scratch.as_mut_ptr());
        combine(result);
        for rank in targets.iter().filter(|rank| **rank != first || direct.is_none()) {
            // SAFETY: the function's contract. The result does not overlap the outputs of other ranks.
            unsafe { outputs(*rank).write(to, result, bytes) };
        }
    }

    /// Combines `bytes` of all inputs at `from` and writes them into the outputs of `targets` at `to`.
    ///
    /// # Safety
    /// The ranges must be within all tensors, and no other rank may access them in this operation.
    unsafe fn fold(&self, me: usize, kernel: &Kernel, (from, to, bytes): (usize, usize, usize), targets: &[usize]) {
        // SAFETY: the function's contract. An output is exactly an input or overlaps none (the contract of `Request`).
        unsafe {
            self.with_sources(0..self.theirs.len(), (from, bytes), |sources| {
                self.with_result(me, targets, (to, bytes), |result| {
                    kernel.reduce(result, sources, &self.factors, bytes / kernel.element_size());
                });
            });
        }
    }
}
