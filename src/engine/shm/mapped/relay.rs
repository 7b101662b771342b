//! all_reduce and reduce of many ranks that are bound to several nodes, with the option `numa`: the sum is made node by node.
//! A node is a NUMA node, or a last-level cache if all ranks are on one NUMA node.
//!
//! Idea: the ranks of each node share the whole input, so that each combines a larger slice, but only of the inputs on
//! its node. Sums go from node to node in rank order, and the last node has the result.
//!
//! Steps, for each chunk of a slice:
//! 1. The rank on the first node combines the inputs of its node into its stage buffer.
//! 2. The rank with its position on the next node continues from there, and so on (`fold_waits_for`).
//! 3. The rank on the last node writes the result into the outputs of its node.
//! 4. The result goes back from node to node. On each node, the rank with the same position copies the result from the
//!    next node's outputs to its own node's outputs (`has_delivered`). A reduce skips this step: the last node writes the
//!    result into the root's output.
//!
//! While one node works on a chunk, the node before it works on the next one.
//!
//! Bytes of an all_reduce of P ranks on M nodes, N bytes each: every rank reads N and writes N, as without nodes. It also
//! writes the sums of its slice (`M N / P` bytes), and reads those of the node before and the result. N bytes of sums and N
//! bytes of the result move between two neighbouring nodes; without nodes, `N P` bytes move between two nodes. Sums of
//! 16-bit numbers have 32 bits.
//!
//! Order: rank 0..P-1 for each element, the same as without nodes, because a sum continues from an accumulator that was
//! not rounded (`Kernel::accumulate`).
//!
//! Source: the hierarchical all_reduce of Open MPI's coll/xhc, here in the order of ranks.

#![allow(unsafe_code)] // reads and writes the tensors of peers and the stage buffers

use super::part::Part;
use super::{Context, Work, in_cache};
use crate::engine::pieces::Pieces;
use crate::engine::shm::nodes::Neighbours;
use crate::engine::shm::protocol;
use crate::engine::shm::protocol::Region;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::reduce::Kernel;
use crate::stats::chunk_timer::ChunkTimer;
use crate::threads;

/// A rank's progress.
#[derive(Default)]
pub struct Relay {
    /// Chunks that this rank has combined, and chunks of the result that it has written.
    folded: u64,
    delivered: u64,
}

/// A rank's slice.
struct Slice<'a> {
    neighbours: &'a Neighbours,
    from: usize,
    bytes: usize,
    targets: &'a [usize],
    /// Bytes of a chunk, whose accumulators fill a stage buffer.
    chunk: usize,
}

impl Slice<'_> {
    fn chunks(&self) -> u64 {
        self.bytes.div_ceil(self.chunk) as u64
    }

    /// Offset and length of chunk `c` in the tensors.
    fn range(&self, c: u64) -> (usize, usize) {
        let start = c as usize * self.chunk;
        (self.from + start, self.chunk.min(self.bytes - start))
    }
}

impl Relay {
    /// Combines at most one chunk, and copies at most one. Returns whether something moved, and whether this rank's part
    /// is done.
    pub fn step(&mut self, work: &Work, context: &Context, timer: &mut ChunkTimer) -> (bool, bool) {
        let Part::Relay { neighbours, from, bytes, targets, delivers } = &work.part else {
            unreachable!("called for this part only")
        };
        let kernel = context.kernel.expect("a reducing operation has a kernel");
        let elements = context.area.layout.stage_bytes / kernel.accumulator_size();
        let chunk = elements * kernel.element_size();
        let slice = Slice { neighbours, from: *from, bytes: *bytes, targets, chunk };
        let chunks = slice.chunks();
        let mut moved = self.folded < chunks && self.try_fold(&slice, work, kernel, context, timer);
        if !delivers {
            self.delivered = chunks;
        }
        moved |= self.delivered < chunks && self.try_deliver(&slice, work, context, timer);
        (moved, self.folded == chunks && self.delivered == chunks)
    }

    fn try_fold(
        &mut self,
        slice: &Slice,
        work: &Work,
        kernel: &Kernel,
        context: &Context,
        timer: &mut ChunkTimer,
    ) -> bool {
        let (&Context { area, op, round, .. }, neighbours, c) = (context, slice.neighbours, self.folded);
        let mut missing = protocol::fold_waits_for(area, neighbours.before, neighbours.after, op.number, c);
        if c == 0 && neighbours.after.is_some() {
            // A peer may still read this rank's stage buffers for an earlier operation.
            let reads = |q: &usize| *q != area.me && !protocol::has_read(area, Region::Stage, *q, round + 1);
            missing = missing.or_else(|| (0..area.ranks).find(reads));
        }
        if let Some(rank) = missing {
            timer.misses(rank);
            return false;
        }
        let began = timer.begin(op);
        let (at, bytes) = slice.range(c);
        let (size, wide) = (kernel.element_size(), kernel.accumulator_size());
        let buffer = |rank| area.stage(rank, c, 0, bytes / size * wide) as usize;
        let (before, own) = (neighbours.before.map(buffer), neighbours.after.map(|_| buffer(area.me)));
        threads::split(bytes, |start, length| {
            for (next, length) in in_cache(start, length) {
                let wide = next / size * wide;
                let sums = before.map_or(std::ptr::null(), |before| (before + wide) as *const u8);
                // SAFETY: every rank has published the operation and keeps its tensors until it ends. `agree` has
                // checked that the slice is within them. Of the ranks of this node only this one has the slice, and a
                // rank of another node accesses it in an output only after `Delivered`. The buffer of the rank before
                // has this chunk, and the rank after no longer reads this rank's buffer (`fold_waits_for`). No two
                // ranges have a byte in common.
                unsafe { fold(work, slice, kernel, area.me, (at + next, length), sums, own.map(|own| own + wide)) };
            }
        });
        timer.end(&op.timing.reducing, began);
        if !protocol::was_whole(area) {
            return false; // the group finds the reason
        }
        fault_points::reached(FaultPoint::ChunkFolded);
        protocol::folded(area, area.me, op.number, c);
        if neighbours.after.is_none() {
            protocol::delivered(area, area.me, op.number, c);
        }
        fault_points::reached(FaultPoint::ChunkPublished);
        self.folded += 1;
        true
    }

    /// Copies the next chunk of the result from the output of the rank after this one.
    fn try_deliver(&mut self, slice: &Slice, work: &Work, context: &Context, timer: &mut ChunkTimer) -> bool {
        let (&Context { area, op, .. }, c) = (context, self.delivered);
        let after = slice.neighbours.after.expect("the last node does not copy");
        if !protocol::has_delivered(area, after, op.number, c) {
            timer.misses(after);
            return false;
        }
        let began = timer.begin(op);
        let (at, bytes) = slice.range(c);
        let source = Pieces(&work.theirs[after].outputs);
        threads::split(bytes, |start, length| {
            // SAFETY: as in `try_fold`. `has_delivered` was true: the rank after has written this chunk of its output, and
            // no rank writes it again.
            unsafe { work.copy_to(slice.targets, source, at + start, length) }
        });
        timer.end(&op.timing.copying, began);
        if !protocol::was_whole(area) {
            return false; // the group finds the reason
        }
        fault_points::reached(FaultPoint::ChunkDelivered);
        protocol::delivered(area, area.me, op.number, c);
        self.delivered += 1;
        true
    }
}

/// Combines `bytes` at `at` of the inputs of a node with `sums`, which is null on the first node. Writes the sums to
/// `own` or, on the last node, where `own` is None, the result into the outputs of the slice's targets.
///
/// # Safety
/// The range must be within these tensors, and no other rank may access it during the call. `sums` and `own` must have room for the
/// accumulators and not overlap.
unsafe fn fold(
    work: &Work,
    slice: &Slice,
    kernel: &Kernel,
    me: usize,
    (at, bytes): (usize, usize),
    sums: *const u8,
    own: Option<usize>,
) {
    let (mates, elements) = (slice.neighbours.mates.clone(), bytes / kernel.element_size());
    let factors = work.factors.get(mates.clone()).unwrap_or(&[]);
    // SAFETY: the function's contract. An output is exactly an input or overlaps none (the contract of `Request`).
    unsafe {
        work.with_sources(mates, (at, bytes), |sources| match own {
            Some(own) => kernel.accumulate(own as *mut u8, sums, sources, factors, elements),
            None => work.with_result(me, slice.targets, (at, bytes), |result| {
                kernel.finish(result, sums, sources, factors, elements);
            }),
        });
    }
}
