//! Runs large operations in rounds through staging buffers that stay in the cache.
//!
//! Idea: an operation is cut into rounds. In each round a rank *fills* its stage buffer with the data that its peers
//! need, then *takes* the data that it needs from their stage buffers. In all_reduce and reduce every rank takes one
//! slice and reduces it into its result buffer, from which the other ranks *collect* it. Stage and result have two
//! buffers each, so the three steps can be in different rounds: a rank copies round k+1 while it waits for round k. The
//! staging area stays in the cache, so the DRAM traffic is the input once and the output once.
//!
//! P ranks, N bytes of input of one rank; in broadcast and scatter, of the root:
//!
//! | kind | steps a round | bytes staged / read per rank | order of summation |
//! | --- | --- | --- | --- |
//! | all_reduce | fill, take, collect | N(1-1/P) + N/P / 2N(1-1/P) | rank 0..P-1, each slice at one rank |
//! | reduce | fill, take; root collects | N(1-1/P) + N/P / N(1-1/P), root 2N(1-1/P) | the same |
//! | reduce_scatter | fill, take | N(1-1/P) / N(1-1/P) | the same |
//! | all_gather, gather | fill, take | N / (P-1)N (gather: root only) | - |
//! | broadcast | root fills, others take | N / N | - |
//! | scatter | root fills, others take | N(1-1/P) / N/P | - |
//! | all_to_all | fill, take | N(1-1/P) / N(1-1/P) | - |
//!
//! Source: the two-shot all_reduce of MSCCL++ and DeepSpeed, here with pipelining and one round counter for all kinds.

#![allow(unsafe_code)] // copies and reduces between caller memory and the segment

use super::memory::area::Area;
use super::memory::layout::Part;
use super::protocol;
use super::protocol::{Region, Slots};
use super::small::{block, block_start};
use super::{headers, table};
use crate::engine::pieces::{Pieces, Starts, transfer};
use crate::error::Result;
use crate::op::Op;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::reduce::Kernel;
use crate::select;
use crate::stats::chunk_timer::ChunkTimer;
use crate::threads;
use crate::types::Kind;

/// For each region, the number of the first round of the next large operation. Equal on all ranks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bases {
    pub stage: u64,
    pub result: u64,
}

/// The progress of a large operation.
pub struct Rounds {
    chunk: usize,
    /// Among the ranks from which this rank takes, the headers of those below this number agree. The headers of all
    /// ranks from which it takes must agree before the first take.
    seen: usize,
    /// The same number for the ranks from which this rank does not take. A step compares their headers only if it can
    /// do nothing else.
    beside: usize,
    /// Set when the operation is first among the large ones and its number of rounds is known.
    plan: Option<Plan>,
    fill: u64,
    take: u64,
    collect: u64,
    factors: Vec<f64>,
    chunk_timer: ChunkTimer,
}

struct Plan {
    bases: Bases,
    rounds: u64,
    /// For all_to_all: the tables of block sizes, one for each rank whose blocks are sent in rounds, this rank
    /// included.
    tables: Vec<Option<Vec<usize>>>,
    /// For all_to_all, whose tensors may be rows in any order: where the pieces of the inputs and outputs begin.
    starts: (Starts, Starts),
}

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Blocked,
    Moved,
    Done,
}

impl Rounds {
    pub fn new(op: &Op, chunk: usize) -> Rounds {
        let chunk_timer = ChunkTimer::new(op);
        Rounds { chunk, seen: 0, beside: 0, plan: None, fill: 0, take: 0, collect: 0, factors: Vec::new(), chunk_timer }
    }

    /// How many bytes of the result this rank has, counted from the beginning. Only for all_reduce and broadcast, where
    /// every round extends the result.
    pub fn complete(&self) -> usize {
        self.fill.min(self.take).min(self.collect) as usize * self.chunk
    }

    /// True while the operation cannot end before `peer` makes further progress. Checks the conditions that `step`
    /// checks, but for the last round instead of the next.
    pub fn needs(&self, area: &Area, op: &Op, peer: usize) -> bool {
        let bulk = Bulk { area, op, kernel: None, scratch: &mut Vec::new() };
        if self.seen < area.ranks && bulk.verifies(peer) && !Slots::is_published(area, peer, op.number) {
            return true;
        }
        // Without a plan, the operation waits for an earlier one.
        let Some(&Plan { bases, rounds: rounds @ 1.., .. }) = self.plan.as_ref() else { return false };
        let last = rounds - 1;
        self.fill < rounds && bulk.fill_needs(bases, last, peer)
            || self.take < rounds && bulk.take_needs(bases, last, peer)
            || self.collect < rounds && bulk.collect_needs(bases, last, peer)
    }
}

/// The first of the group's large operations, together with what it needs to advance.
pub struct Bulk<'a> {
    pub area: &'a Area,
    pub op: &'a Op,
    pub kernel: Option<&'a Kernel>,
    pub scratch: &'a mut Vec<u8>,
}

impl Bulk<'_> {
    /// Does at most one fill, one take and one collect. Advances `bases` when the operation ends.
    pub fn step(&mut self, state: &mut Rounds, bases: &mut Bases) -> Result<Step> {
        let ranks = self.area.ranks;
        let mut moved = false;
        if state.seen < ranks {
            let op = self.op;
            let before = state.seen;
            state.seen = headers::look(self.area, op, before, |q| self.verifies(q))?;
            moved = state.seen > before;
            if state.seen < ranks {
                state.chunk_timer.misses(state.seen);
            }
        }
        if state.plan.is_none() && !self.make_plan(state, *bases)? {
            return Ok(if moved { Step::Moved } else { Step::Blocked });
        }
        let plan = state.plan.as_ref().expect("made above");
        let (rounds, base) = (plan.rounds, plan.bases);
        moved |= self.try_fill(state, rounds, base);
        moved |= self.try_take(state, rounds, base);
        moved |= self.try_collect(state, rounds, base);
        if state.fill == rounds && state.take == rounds && state.collect == rounds && state.seen == ranks {
            bases.stage = base.stage + rounds;
            bases.result = base.result + if self.uses_result() { rounds } else { 0 };
            return Ok(Step::Done);
        }
        if moved {
            return Ok(Step::Moved);
        }
        if state.beside < ranks {
            // Also compare the headers of ranks from which this rank does not take. Otherwise, if this rank waits for
            // one of them, it might find a mismatch only at the deadline.
            state.beside = headers::look(self.area, self.op, state.beside, |q| !self.verifies(q))?;
        }
        Ok(Step::Blocked)
    }

    /// Derives the number of rounds from the sizes on which all ranks agree. For all_to_all it needs the tables of all
    /// ranks. Returns false if they are not published yet.
    fn make_plan(&mut self, state: &mut Rounds, bases: Bases) -> Result<bool> {
        let (area, request) = (self.area, &self.op.request);
        let ranks = area.ranks;
        let (mut tables, mut starts) = (Vec::new(), (Starts::default(), Starts::default()));
        let longest = match request.kind {
            Kind::AllToAll => {
                if state.seen < ranks {
                    return Ok(false);
                }
                tables = table::finish(area, self.op)?;
                starts = (Starts::of(Pieces(request.inputs())), Starts::of(Pieces(request.outputs())));
                tables.iter().flatten().flatten().copied().max().unwrap_or(0)
            }
            Kind::AllGather => {
                let total = Pieces(request.outputs()).bytes();
                (0..ranks).map(|q| block(&request.out_blocks, total, ranks, q)).max().unwrap_or(0)
            }
            Kind::ReduceScatter => {
                let total = Pieces(request.inputs()).bytes();
                (0..ranks).map(|q| block(&request.in_blocks, total, ranks, q)).max().unwrap_or(0)
            }
            Kind::Scatter => Pieces(request.outputs()).bytes(),
            Kind::Broadcast => Pieces(request.inputs()).bytes().max(Pieces(request.outputs()).bytes()),
            _ => Pieces(request.inputs()).bytes(),
        };
        let rounds = longest.div_ceil(self.unit(state.chunk)) as u64;
        let stage = (self.fills() && rounds > 0).then_some(Part::Stage);
        let result = (self.uses_result() && rounds > 0).then_some(Part::Result);
        area.make_present(stage.into_iter().chain(result))?;
        state.plan = Some(Plan { bases, rounds, tables, starts });
        self.skip_idle_parts(state, rounds, bases);
        Ok(true)
    }

    /// Marks all rounds as done for the steps that this rank never does in this operation.
    fn skip_idle_parts(&self, state: &mut Rounds, rounds: u64, bases: Bases) {
        if !self.fills() {
            state.fill = rounds;
        }
        if !self.takes() {
            state.take = rounds;
            if rounds > 0 {
                protocol::drained(self.area, Region::Stage, self.area.me, bases.stage + rounds - 1);
            }
        }
        if !self.collects() {
            state.collect = rounds;
            if self.uses_result() && rounds > 0 {
                protocol::drained(self.area, Region::Result, self.area.me, bases.result + rounds - 1);
            }
        }
    }

    fn root(&self) -> bool {
        self.area.me == self.op.request.root as usize
    }
    fn fills(&self) -> bool {
        match self.op.request.kind {
            Kind::Broadcast | Kind::Scatter => self.root(),
            Kind::Gather => !self.root(),
            _ => true,
        }
    }
    fn takes(&self) -> bool {
        match self.op.request.kind {
            Kind::Broadcast | Kind::Scatter => !self.root(),
            Kind::Gather => self.root(),
            _ => true,
        }
    }
    fn uses_result(&self) -> bool {
        matches!(self.op.request.kind, Kind::AllReduce | Kind::Reduce)
    }
    fn collects(&self) -> bool {
        match self.op.request.kind {
            Kind::AllReduce => true,
            Kind::Reduce => self.root(),
            _ => false,
        }
    }
    /// Whether the header of `q` must agree before this rank reads any data. True for every rank from which this rank
    /// takes.
    fn verifies(&self, q: usize) -> bool {
        match self.op.request.kind {
            Kind::Broadcast | Kind::Scatter => q == self.op.request.root as usize,
            Kind::Gather => self.root(),
            _ => true,
        }
    }

    // Conditions on rank `q` under which a step for round `k` must wait. `step` checks the next round, `Rounds::needs`
    // the last one.

    fn fill_needs(&self, base: Bases, k: u64, q: usize) -> bool {
        !protocol::has_read(self.area, Region::Stage, q, base.stage + k)
    }
    /// A take reads the peers' stage buffers, so these must be ready.
    fn take_needs_data(&self, base: Bases, k: u64, q: usize) -> bool {
        let kind = self.op.request.kind;
        let takes_from = !matches!(kind, Kind::Broadcast | Kind::Scatter) || q == self.op.request.root as usize;
        takes_from && !protocol::is_ready(self.area, Region::Stage, q, base.stage + k)
    }
    /// A take writes this rank's result buffer, which its peers may still be reading.
    fn take_needs_room(&self, base: Bases, k: u64, q: usize) -> bool {
        self.uses_result() && !protocol::has_read(self.area, Region::Result, q, base.result + k)
    }
    fn take_needs(&self, base: Bases, k: u64, q: usize) -> bool {
        self.take_needs_data(base, k, q) || self.take_needs_room(base, k, q)
    }
    fn collect_needs(&self, base: Bases, k: u64, q: usize) -> bool {
        !protocol::is_ready(self.area, Region::Result, q, base.result + k)
    }
    /// The first peer for which `needs` is true.
    fn first_peer(&self, needs: impl Fn(usize) -> bool) -> Option<usize> {
        (0..self.area.ranks).find(|q| *q != self.area.me && needs(*q))
    }

    /// Bytes of one block that are sent in one round.
    fn unit(&self, chunk: usize) -> usize {
        select::unit(self.op.request.kind, self.area.ranks, chunk)
    }

    /// The part of a block of `block` bytes that is sent in round `k`: its offset and length.
    fn part(&self, state: &Rounds, k: u64, block: usize) -> (usize, usize) {
        let unit = self.unit(state.chunk);
        let start = (k as usize * unit).min(block);
        (start, unit.min(block - start))
    }

    /// The slice that rank `q` reduces in a chunk of `bytes` bytes: its start and length. Chunks are cut at cache
    /// lines.
    fn slice(&self, bytes: usize, q: usize) -> (usize, usize) {
        let each = bytes.div_ceil(self.area.ranks).div_ceil(64) * 64;
        let start = (q * each).min(bytes);
        (start, each.min(bytes - start))
    }

    fn try_fill(&mut self, state: &mut Rounds, rounds: u64, base: Bases) -> bool {
        let (area, k) = (self.area, state.fill);
        if k >= rounds || !protocol::may_fill(area, Region::Stage, area.me, area.ranks, base.stage + k) {
            return false;
        }
        let began = state.chunk_timer.begin(self.op);
        // SAFETY: `may_fill` was true, so no peer reads this buffer. `Area::stage` checks every
        // bound. The caller keeps the inputs alive until the operation ends.
        unsafe { self.fill(state, k, base.stage + k) };
        state.chunk_timer.end(&self.op.timing.copying, began);
        fault_points::reached(FaultPoint::StageFilled);
        protocol::filled(area, Region::Stage, area.me, base.stage + k);
        fault_points::reached(FaultPoint::StagePublished);
        state.fill += 1;
        true
    }

    /// Writes the data that the peers read in the stage's round `g`, which is round `k` of the operation. One function
    /// handles all kinds, because each needs only a short arm that maps bytes to offsets.
    ///
    /// # Safety
    /// No peer may read this rank's stage buffer of round `g`.
    unsafe fn fill(&mut self, state: &Rounds, k: u64, g: u64) {
        let (area, request) = (self.area, &self.op.request);
        let (me, ranks) = (area.me, area.ranks);
        let (inputs, outputs) = (Pieces(request.inputs()), Pieces(request.outputs()));
        let (total, total_out) = (self.op.read as usize, self.op.written as usize);
        // SAFETY: see the function's contract. `part` and `slice` stay within the inputs, so the reads do too.
        unsafe {
            match request.kind {
                Kind::AllReduce | Kind::Reduce => {
                    let (start, bytes) = self.part(state, k, total);
                    let (own, own_bytes) = self.slice(bytes, me);
                    let stage = area.stage(me, g, 0, bytes);
                    if inputs.contiguous(start + own, own_bytes).is_some() {
                        inputs.read(start, stage, own);
                        let rest = own + own_bytes;
                        inputs.read(start + rest, stage.add(rest), bytes - rest);
                    } else {
                        inputs.read(start, stage, bytes);
                    }
                }
                Kind::Broadcast | Kind::Gather => {
                    let (start, bytes) = self.part(state, k, total);
                    inputs.read(start, area.stage(me, g, 0, bytes), bytes);
                }
                Kind::AllGather => {
                    let (start, bytes) = self.part(state, k, total);
                    inputs.read(start, area.stage(me, g, 0, bytes), bytes);
                    let own = block_start(&request.out_blocks, total_out, ranks, me);
                    transfer(inputs, start, outputs, own + start, bytes);
                }
                Kind::Scatter | Kind::ReduceScatter => {
                    for q in (0..ranks).filter(|q| *q != me) {
                        let from = block_start(&request.in_blocks, total, ranks, q);
                        let (start, bytes) = self.part(state, k, block(&request.in_blocks, total, ranks, q));
                        inputs.read(from + start, area.stage(me, g, q * self.unit(state.chunk), bytes), bytes);
                    }
                    if request.kind == Kind::Scatter {
                        let own = block_start(&request.in_blocks, total, ranks, me);
                        let (start, bytes) = self.part(state, k, total_out);
                        transfer(inputs, own + start, outputs, start, bytes);
                    }
                }
                Kind::AllToAll => {
                    let plan = state.plan.as_ref().expect("filling follows planning");
                    if plan.tables[me].is_none() {
                        return; // the blocks were sent with the table
                    }
                    for q in 0..ranks {
                        let from = block_start(&request.in_blocks, total, ranks, q);
                        let (start, bytes) = self.part(state, k, block(&request.in_blocks, total, ranks, q));
                        let (inputs, from) = plan.starts.0.skip(inputs, from + start);
                        if q == me {
                            let own = block_start(&request.out_blocks, total_out, ranks, me);
                            let (outputs, to) = plan.starts.1.skip(outputs, own + start);
                            transfer(inputs, from, outputs, to, bytes);
                        } else {
                            inputs.read(from, area.stage(me, g, q * self.unit(state.chunk), bytes), bytes);
                        }
                    }
                }
                Kind::Barrier | Kind::Send | Kind::Recv => unreachable!("never a large operation"),
            }
        }
    }

    fn try_take(&mut self, state: &mut Rounds, rounds: u64, base: Bases) -> bool {
        let (area, k) = (self.area, state.take);
        let kind = self.op.request.kind;
        // This rank takes a round only after it has filled that round, because an operation in place overwrites the
        // data that the fill must stage.
        if k >= rounds || state.seen < area.ranks || (self.fills() && state.fill <= k) {
            return false;
        }
        if let Some(q) = self.first_peer(|q| self.take_needs_data(base, k, q)) {
            state.chunk_timer.misses(q);
            return false;
        }
        if self.uses_result() && !protocol::may_fill(area, Region::Result, area.me, area.ranks, base.result + k) {
            return false;
        }
        fault_points::reached(FaultPoint::StageSeen);
        let g = base.stage + k;
        if k == 0 && kind.reduces() {
            state.factors = headers::factors(area, self.op);
        }
        let began = state.chunk_timer.begin(self.op);
        // SAFETY: the stage buffers read here stay filled until this rank stores `Drained`. Only this rank writes its
        // result buffer.
        unsafe { self.take(state, k, g, base.result + k) };
        let timing = &self.op.timing;
        state.chunk_timer.end(if kind.reduces() { &timing.reducing } else { &timing.copying }, began);
        fault_points::reached(FaultPoint::StageRead);
        protocol::drained(area, Region::Stage, area.me, g);
        if self.uses_result() {
            fault_points::reached(FaultPoint::ResultFilled);
            protocol::filled(area, Region::Result, area.me, base.result + k);
        }
        state.take += 1;
        true
    }

    /// Reads the peers' stage buffers of round `g`. Has one arm for each kind, like `fill`.
    ///
    /// # Safety
    /// The peers' stage buffers of round `g` must be ready, and no peer may read this rank's result buffer of round
    /// `result`.
    unsafe fn take(&mut self, state: &Rounds, k: u64, g: u64, result: u64) {
        let (area, request) = (self.area, &self.op.request);
        let (me, ranks) = (area.me, area.ranks);
        let outputs = Pieces(request.outputs());
        let (total_in, total_out) = (self.op.read as usize, self.op.written as usize);
        let unit = self.unit(state.chunk);
        // SAFETY: see the function's contract. `Area` checks the bounds of every stage address, and `Pieces` checks
        // those of every output range.
        unsafe {
            match request.kind {
                Kind::AllReduce | Kind::Reduce => {
                    let (start, bytes) = self.part(state, k, total_in);
                    let (own, own_bytes) = self.slice(bytes, me);
                    let to = area.result(me, result, own_bytes);
                    self.reduce(to, start + own, |q| area.stage(q, g, own, own_bytes), own_bytes, &state.factors);
                    if self.collects() {
                        outputs.write(start + own, to, own_bytes);
                    }
                }
                Kind::ReduceScatter => {
                    let (start, bytes) = self.part(state, k, total_out);
                    let own = block_start(&request.in_blocks, total_in, ranks, me);
                    let direct = outputs.contiguous(start, bytes);
                    let mut scratch = std::mem::take(self.scratch);
                    scratch.resize(if direct.is_some() { 0 } else { bytes }, 0);
                    let to = direct.unwrap_or(scratch.as_mut_ptr());
                    let stage = |q| area.stage(q, g, me * unit, bytes);
                    self.reduce(to, own + start, stage, bytes, &state.factors);
                    if direct.is_none() {
                        outputs.write(start, scratch.as_ptr(), bytes);
                    }
                    *self.scratch = scratch;
                }
                Kind::AllGather | Kind::Gather => {
                    for q in 0..ranks {
                        let to = block_start(&request.out_blocks, total_out, ranks, q);
                        let (start, bytes) = self.part(state, k, block(&request.out_blocks, total_out, ranks, q));
                        if q != me {
                            outputs.write(to + start, area.stage(q, g, 0, bytes), bytes);
                        } else if request.kind == Kind::Gather {
                            transfer(Pieces(request.inputs()), start, outputs, to + start, bytes);
                        }
                    }
                }
                Kind::Broadcast => {
                    let (start, bytes) = self.part(state, k, total_out);
                    outputs.write(start, area.stage(request.root as usize, g, 0, bytes), bytes);
                }
                Kind::Scatter => {
                    let (start, bytes) = self.part(state, k, total_out);
                    outputs.write(start, area.stage(request.root as usize, g, me * unit, bytes), bytes);
                }
                Kind::AllToAll => {
                    let plan = state.plan.as_ref().expect("taking follows planning");
                    for q in (0..ranks).filter(|q| *q != me && plan.tables[*q].is_some()) {
                        let to = block_start(&request.out_blocks, total_out, ranks, q);
                        let (start, bytes) = self.part(state, k, block(&request.out_blocks, total_out, ranks, q));
                        let (outputs, to) = plan.starts.1.skip(outputs, to + start);
                        outputs.write(to, area.stage(q, g, me * unit, bytes), bytes);
                    }
                }
                Kind::Barrier | Kind::Send | Kind::Recv => unreachable!("never a large operation"),
            }
        }
    }

    /// Combines `bytes` of every rank into `to`, in rank order. This rank's own bytes are read from the inputs at `at`,
    /// never from its stage buffer. This rank refills that buffer as soon as its peers have read it, without waiting
    /// for this function, so it may already contain a later round.
    ///
    /// # Safety
    /// `stage(q)` must be ready for `bytes` for every peer. `to` must have room for `bytes` and overlap no stage
    /// buffer.
    unsafe fn reduce(
        &mut self,
        to: *mut u8,
        at: usize,
        stage: impl Fn(usize) -> *mut u8,
        bytes: usize,
        factors: &[f64],
    ) {
        if bytes == 0 {
            return;
        }
        let (area, inputs) = (self.area, Pieces(self.op.request.inputs()));
        let kernel = self.kernel.expect("a reducing operation has a kernel");
        let mut own = Vec::new();
        let own = match inputs.contiguous(at, bytes) {
            Some(address) => address.cast_const(),
            None => {
                own.resize(bytes, 0);
                // SAFETY: `own` holds `bytes`; the range lies within the inputs.
                unsafe { inputs.read(at, own.as_mut_ptr(), bytes) };
                own.as_ptr()
            }
        };
        let sources: Vec<*const u8> =
            (0..area.ranks).map(|q| if q == area.me { own } else { stage(q).cast_const() }).collect();
        // SAFETY: every source has `bytes`. `to` is the result buffer, or output memory that is either exactly this
        // rank's input or does not overlap it (the contract of `Request`).
        unsafe { reduce_on_threads(kernel, to, &sources, factors, bytes) };
    }

    fn try_collect(&mut self, state: &mut Rounds, rounds: u64, base: Bases) -> bool {
        let (area, k) = (self.area, state.collect);
        if k >= rounds || state.take <= k {
            return false;
        }
        let g = base.result + k;
        if let Some(q) = self.first_peer(|q| self.collect_needs(base, k, q)) {
            state.chunk_timer.misses(q);
            return false;
        }
        fault_points::reached(FaultPoint::ResultSeen);
        let began = state.chunk_timer.begin(self.op);
        let outputs = Pieces(self.op.request.outputs());
        let (start, bytes) = self.part(state, k, outputs.bytes());
        for q in (0..area.ranks).filter(|q| *q != area.me) {
            let (slice, slice_bytes) = self.slice(bytes, q);
            // SAFETY: the result buffer of `q` stays filled until this rank stores `Drained`. The range is within the
            // outputs.
            unsafe { outputs.write(start + slice, area.result(q, g, slice_bytes), slice_bytes) };
        }
        state.chunk_timer.end(&self.op.timing.copying, began);
        fault_points::reached(FaultPoint::ResultRead);
        protocol::drained(area, Region::Result, area.me, g);
        state.collect += 1;
        true
    }
}

/// Calls `Kernel::reduce` for `bytes` bytes, split among the threads that were lent to the calling thread.
///
/// # Safety
/// As for `Kernel::reduce`.
unsafe fn reduce_on_threads(kernel: &Kernel, to: *mut u8, sources: &[*const u8], factors: &[f64], bytes: usize) {
    if bytes < 2 * threads::LEAST_BYTES || threads::count() == 1 {
        // SAFETY: the caller vouches for it.
        return unsafe { kernel.reduce(to, sources, factors, bytes / kernel.element_size()) };
    }
    let to = to as usize;
    let from: Vec<usize> = sources.iter().map(|source| *source as usize).collect();
    threads::split(bytes, |start, length| {
        let sources: Vec<*const u8> = from.iter().map(|source| (source + start) as *const u8).collect();
        // SAFETY: the caller vouches for the whole range. Parts begin at multiples of a cache line, where elements
        // begin too, and no two parts have a byte in common.
        unsafe { kernel.reduce((to + start) as *mut u8, &sources, factors, length / kernel.element_size()) };
    });
}
