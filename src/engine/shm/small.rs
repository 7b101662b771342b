//! Runs small operations in one exchange of tagged slots.
//!
//! Idea: every rank writes into its own slot the data that its peers need. Then each rank reads all the slots that it
//! needs and combines them by itself. Steps: 1 (write, tag, read). Bytes per rank: it writes its own payload and reads
//! up to (P-1) payloads. Order of summation: rank 0 to P-1. Source: the flag-in-line idea of NCCL's LL protocol and the
//! single exchange of DeepSpeed's shm all_reduce, with one numbering for all kinds of operation and no trailing barrier
//! (protocol.rs).

#![allow(unsafe_code)] // copies and reduces between caller memory and the slots of the segment

use super::headers;
use super::memory::area::Area;
use super::protocol::Slots;
use crate::engine::pieces::Pieces;
use crate::error::Result;
use crate::op::Op;
use crate::reduce::Kernel;
use crate::select;
use crate::types::{Kind, Request};

/// Size of rank `q`'s block: `blocks[q]`, or an equal part of `total` if `blocks` is empty.
pub fn block(blocks: &[usize], total: usize, ranks: usize, q: usize) -> usize {
    if blocks.is_empty() { total / ranks } else { blocks[q] }
}

/// Offset of rank `q`'s block.
pub fn block_start(blocks: &[usize], total: usize, ranks: usize, q: usize) -> usize {
    if blocks.is_empty() { total / ranks * q } else { blocks[..q].iter().sum() }
}

/// Writes this rank's slot for an operation that uses slots. The caller then makes it visible with `Slots::publish`.
pub fn write(area: &Area, op: &Op, chain: u64) {
    let request = &op.request;
    let bytes = select::slot_payload(request, area.ranks).min(Pieces(request.inputs()).bytes());
    let writes = match request.kind {
        Kind::Broadcast | Kind::Scatter => area.me == request.root as usize,
        Kind::Barrier => false,
        _ => true,
    };
    if writes && bytes > 0 {
        let to = area.payload(area.me, op.number, bytes);
        // SAFETY: `payload` checked that the slot has room for `bytes`. `may_publish` returned true, so no peer reads
        // the slot. The caller keeps the inputs alive until the operation ends.
        unsafe { Pieces(request.inputs()).read(0, to, bytes) };
    }
    headers::write(area, op, chain);
}

/// True when this rank reads rank `q`'s slot in this operation.
pub fn reads_from(request: &Request, me: usize, q: usize) -> bool {
    match request.kind {
        Kind::Broadcast | Kind::Scatter => q == request.root as usize,
        Kind::Reduce | Kind::Gather => me == request.root as usize,
        _ => true,
    }
}

/// True while this rank cannot finish the operation without rank `q`'s slot.
pub fn needs(area: &Area, op: &Op, q: usize) -> bool {
    reads_from(&op.request, area.me, q) && !Slots::is_published(area, q, op.number)
}

/// Reads the slots and writes the results. All slots that this rank needs are published. `scratch` is a buffer for one
/// payload.
pub fn finish(area: &Area, op: &Op, kernel: Option<&Kernel>, scratch: &mut Vec<u8>) -> Result<()> {
    let request = &op.request;
    let (me, ranks, n) = (area.me, area.ranks, op.number);
    let outputs = Pieces(request.outputs());
    let total_out = outputs.bytes();
    if total_out == 0 {
        return Ok(()); // a barrier, or a rank that receives no data
    }
    match request.kind {
        Kind::AllReduce | Kind::Reduce => {
            combine(area, op, kernel, (0, total_out, total_out), scratch);
        }
        Kind::ReduceScatter => {
            let total = Pieces(request.inputs()).bytes();
            let start = block_start(&request.in_blocks, total, ranks, me);
            combine(area, op, kernel, (start, total_out, total), scratch);
        }
        Kind::AllGather | Kind::Gather => {
            let mut to = 0;
            for q in 0..ranks {
                let bytes = block(&request.out_blocks, total_out, ranks, q);
                // SAFETY: the slot has `bytes` bytes (checked by `payload`), its tag was acquired, and the outputs
                // belong to the caller.
                unsafe { outputs.write(to, area.payload(q, n, bytes), bytes) };
                to += bytes;
            }
        }
        Kind::Broadcast => {
            let from = area.payload(request.root as usize, n, total_out);
            // SAFETY: as above.
            unsafe { outputs.write(0, from, total_out) };
        }
        Kind::Scatter => {
            // All blocks have the same size: the root checks that, and the signature covers it.
            let from = area.payload(request.root as usize, n, total_out * ranks);
            // SAFETY: as above.
            unsafe { outputs.write(0, from.add(me * total_out), total_out) };
        }
        Kind::AllToAll | Kind::Barrier | Kind::Send | Kind::Recv => unreachable!("never goes by slots with data"),
    }
    Ok(())
}

/// Combines bytes `start..start + bytes` of the ranks' payloads, each of `payload` bytes, into the outputs.
fn combine(
    area: &Area,
    op: &Op,
    kernel: Option<&Kernel>,
    (start, bytes, payload): (usize, usize, usize),
    scratch: &mut Vec<u8>,
) {
    let kernel = kernel.expect("a reducing operation has a kernel");
    let outputs = Pieces(op.request.outputs());
    // SAFETY: `start` is within the payload, whose bounds were checked.
    let source = |q| unsafe { area.payload(q, op.number, payload).cast_const().add(start) };
    let to = outputs.contiguous(0, bytes);
    scratch.resize(bytes, 0);
    let target = to.unwrap_or(scratch.as_mut_ptr());
    let count = bytes / kernel.element_size();
    let factors = headers::factors(area, op);
    let mut few = [std::ptr::null(); 8];
    // SAFETY: every source has `bytes` bytes beginning at `start`, and the target has room for them. Slots do not
    // overlap caller memory.
    unsafe {
        if area.ranks <= few.len() {
            for (q, slot) in few[..area.ranks].iter_mut().enumerate() {
                *slot = source(q);
            }
            kernel.reduce(target, &few[..area.ranks], &factors, count);
        } else {
            let many: Vec<_> = (0..area.ranks).map(source).collect();
            kernel.reduce(target, &many, &factors, count);
        }
        if to.is_none() {
            outputs.write(0, scratch.as_ptr(), bytes);
        }
    }
}
