//! Large operations on tensors that peers can reach: no copy on the way.
//!
//! Idea: the tensors lie in the arenas of their processes (`memory/arena.rs`), which every rank has mapped. In all_reduce each
//! rank combines its slice of all inputs and writes the result into all outputs; where data only move, each rank copies what
//! it needs out of its peers' inputs. Then it says that its part is done, and the operation ends when all have said so.
//!
//! | kind | bytes read and written per rank | order of summation |
//! | --- | --- | --- |
//! | all_reduce | N read, N written | rank 0..P-1, each slice at one rank |
//! | reduce | N read, N/P written | the same |
//! | reduce_scatter | N read, N/P written | the same |
//! | all_gather, all_to_all | what it gets, read and written once | - |
//!
//! Steps: two exchanges (the headers, the ends of the parts). Source: the single-copy collectives of XPMEM-based MPI libraries
//! (Open MPI's coll/xhc), here over memory that needs no kernel module.
//!
//! **Who decides.** Every rank's header says whether it offers its tensors (`offer.rs`); the operation is mapped if all do,
//! else its data are staged (`bulk.rs`).
//!
//! **When a rank fails.** A rank whose operation fails goes on in its program, which writes into the inputs again and expects
//! that nobody writes into the outputs. A peer may still be in the middle of its part.
//! - *Late writes*: outputs are made private before the program gets the error (`Mapped::withdraw`).
//! - *Late reads*: after it has read, a rank looks whether the group has failed or a rank has left, and if so it does not say
//!   that its part is done. The failing rank stored the fault, or that it leaves, before its program goes on (`Shm::take_pending`
//!   sees to that), so who reads changed data finds one of them. No rank's operation ends before all parts are done.

#![allow(unsafe_code)] // reads and writes the tensors of peers

mod offer;
mod part;

use std::sync::atomic::{Ordering, fence};

use self::offer::Theirs;
pub use self::offer::{Arenas, Offer};
use self::part::{Part, Shape};
use super::bulk::Step;
use super::memory::area::Area;
use super::protocol;
use super::protocol::Slots;
use super::small;
use crate::engine::pieces::{Pieces, transfer};
use crate::error::{Error, Result, laid_out};
use crate::op::Op;
use crate::reduce::Kernel;
use crate::select::Choice;
use crate::stats::chunk_timer::ChunkTimer;

/// Bytes that are combined, then written to all, while they are in the nearest cache.
const FOLD_BYTES: usize = 32 << 10;
/// Bytes of one step: a waiting thread looks for signals, deadlines and ended peers between steps.
const STEP_BYTES: usize = 1 << 20;

/// The progress of an operation whose tensors this rank offers.
pub struct Mapped {
    offer: Offer,
    /// Ranks whose headers were seen and agree.
    seen: usize,
    work: Option<Work>,
    /// Bytes of the own part that are done.
    at: usize,
    /// The own part is done, and the others know it.
    told: bool,
    timer: ChunkTimer,
}

/// What all have agreed to do.
struct Work {
    part: Part,
    theirs: Vec<Theirs>,
    factors: Vec<f64>,
}

/// The result of a step.
pub enum Outcome {
    Step(Step),
    /// A rank offers nothing: the data must be staged.
    Staged,
}

impl Mapped {
    pub fn new(op: &Op, offer: Offer) -> Mapped {
        Mapped { offer, seen: 0, work: None, at: 0, told: false, timer: ChunkTimer::new(op) }
    }

    /// Does at most one piece of the own part.
    pub fn step(&mut self, area: &Area, op: &Op, kernel: Option<&Kernel>, arenas: &Arenas) -> Result<Outcome> {
        if self.seen < area.ranks {
            self.seen = small::look(area, op, self.seen, |_| true)?;
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
        if !self.told {
            if !protocol::was_whole(area) {
                return Ok(Outcome::Step(Step::Blocked)); // the group finds out why
            }
            let whole = work.part.bytes();
            if self.at < whole {
                let bytes = STEP_BYTES.min(whole - self.at);
                let began = self.timer.begin(op);
                // SAFETY: every rank has published the operation and keeps its tensors until it ends; `agree` has checked
                // that the part lies within them.
                unsafe { work.advance(area, op, kernel, self.at, bytes) };
                let timing = &op.timing;
                self.timer.end(if op.request.kind.reduces() { &timing.reducing } else { &timing.copying }, began);
                self.at += bytes;
            }
            if self.at == whole && protocol::was_whole(area) {
                protocol::moved(area, area.me, op.number);
                self.told = true;
            }
            return Ok(Outcome::Step(Step::Moved));
        }
        let missing = (0..area.ranks).find(|q| !protocol::has_moved(area, *q, op.number));
        Ok(Outcome::Step(missing.map_or(Step::Done, |rank| {
            self.timer.misses(rank);
            Step::Blocked
        })))
    }

    /// True while the operation cannot end before `peer` makes further progress. A peer that left has given up its part of
    /// this operation: its inputs may change.
    pub fn needs(&self, area: &Area, op: &Op, peer: usize) -> bool {
        let published = |q| Slots::is_published(area, q, op.number);
        if !(0..area.ranks).all(published) {
            // Nobody has begun its part before all are here: a rank that offers and is gone will not do it.
            return !published(peer) || area.offer(peer, op.number) != 0;
        }
        if self.work.is_none() {
            return false; // the next step decides, or an earlier operation is in the way
        }
        !protocol::has_moved(area, peer, op.number) || !self.told && area.left(peer)
    }

    /// The operation fails here, and the group has: keeps peers that continue later from writing into the outputs.
    pub fn withdraw(self) {
        // The fault, or that this rank has left, was stored before; no later write of the program may come before it.
        fence(Ordering::SeqCst);
        for lease in self.offer.targets() {
            if let Err(error) = lease.take_out() {
                log::error!(
                    "{} bytes of a tensor in shared memory could not be made private after an operation on them had failed \
                     ({error}); a rank that continues late may still write into them",
                    lease.bytes
                );
            }
        }
    }
}

/// What to do if every rank offers its tensors; all have published the operation.
fn agree(area: &Area, op: &Op, arenas: &Arenas) -> Result<Option<Work>> {
    let request = &op.request;
    let theirs = match arenas.theirs(area, op) {
        Ok(Some(theirs)) => theirs,
        Ok(None) => return Ok(None),
        Err(rank) => return Err(impossible(op, rank)),
    };
    let tables = match request.kind {
        crate::types::Kind::AllToAll => small::finish_table(area, op)?,
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
    };
    let part = Part::of(&shape, &tables);
    let sizes = |spans: fn(&Theirs) -> &[_]| theirs.iter().map(|one| Pieces(spans(one)).bytes()).collect::<Vec<_>>();
    let (inputs, outputs) = (sizes(|one| &one.inputs), sizes(|one| &one.outputs));
    if let Some(rank) = part.too_small(&inputs, &outputs) {
        return Err(impossible(op, rank));
    }
    let factors = if request.kind.reduces() { small::factors(area, op) } else { Vec::new() };
    Ok(Some(Work { part, theirs, factors }))
}

fn impossible(op: &Op, rank: usize) -> Error {
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
    /// Does `bytes` of the part, from `at` on.
    ///
    /// # Safety
    /// All tensors of `theirs` are valid, and `at + bytes` is at most the part's length.
    unsafe fn advance(&self, area: &Area, op: &Op, kernel: Option<&Kernel>, at: usize, bytes: usize) {
        match &self.part {
            Part::Copy(pieces) => {
                let (outputs, mut start) = (Pieces(op.request.outputs()), 0);
                for piece in pieces {
                    let (from, to) = (at.max(start), (at + bytes).min(start + piece.bytes));
                    if from < to {
                        let (skip, length) = (from - start, to - from);
                        let source = Pieces(&self.theirs[piece.peer].inputs);
                        // SAFETY: the caller's promise. This rank's own input may be the same bytes of its output, which
                        // are not copied then.
                        unsafe { transfer(source, piece.from + skip, outputs, piece.to + skip, length) };
                    }
                    start += piece.bytes;
                }
            }
            Part::Fold { from, to, targets, .. } => {
                let kernel = kernel.expect("a reducing operation has a kernel");
                for at in (at..at + bytes).step_by(FOLD_BYTES).map(|next| (next, FOLD_BYTES.min(at + bytes - next))) {
                    let (next, length) = at;
                    // SAFETY: the caller's promise.
                    unsafe { self.fold(area.me, kernel, (from + next, to + next, length), targets) };
                }
            }
        }
    }

    /// Combines `bytes` of all inputs at `from` and writes them into the outputs of `targets` at `to`.
    ///
    /// # Safety
    /// The ranges lie within all tensors, and no other rank reads or writes them in this operation.
    unsafe fn fold(&self, me: usize, kernel: &Kernel, (from, to, bytes): (usize, usize, usize), targets: &[usize]) {
        let mut gathered: Vec<Vec<u8>> = Vec::new();
        let sources: Vec<*const u8> = self
            .theirs
            .iter()
            .map(|one| {
                let inputs = Pieces(&one.inputs);
                inputs.contiguous(from, bytes).map_or_else(
                    || {
                        let mut copied = vec![0; bytes];
                        // SAFETY: within the inputs (the function's contract).
                        unsafe { inputs.read(from, copied.as_mut_ptr(), bytes) };
                        gathered.push(copied);
                        gathered.last().expect("just pushed").as_ptr()
                    },
                    |address| address.cast_const(),
                )
            })
            .collect();
        let outputs = |rank: usize| Pieces(&self.theirs[rank].outputs);
        // Into the own output if it is one, and from there, where it is in the cache, to the others.
        let first = if targets.contains(&me) { me } else { targets[0] };
        let direct = outputs(first).contiguous(to, bytes);
        let mut scratch = vec![0; if direct.is_some() { 0 } else { bytes }];
        let result = direct.unwrap_or(scratch.as_mut_ptr());
        // SAFETY: the function's contract; an output is exactly an input or overlaps none (the contract of `Request`).
        unsafe { kernel.reduce(result, &sources, &self.factors, bytes / kernel.element_size()) };
        for rank in targets.iter().filter(|rank| **rank != first || direct.is_none()) {
            // SAFETY: as above; the result does not overlap the outputs of other ranks.
            unsafe { outputs(*rank).write(to, result, bytes) };
        }
    }
}
