//! The tables of an all_to_all: each rank writes the sizes of its blocks into its slot, and the blocks too if they fit.

#![allow(unsafe_code)] // copies between caller memory and the slots of the segment

use super::headers::wrong_block;
use super::memory::area::{Area, Header};
use super::memory::layout::SLOT_BYTES;
use super::small::block;
use crate::engine::pieces::Pieces;
use crate::error::Result;
use crate::op::Op;
use crate::types::{Kind, Request};

/// Writes the slot of an all_to_all: the table of this rank's block sizes, then the blocks if they fit. `aux` in the
/// header says whether they fit.
pub fn write(area: &Area, op: &Op, chain: u64) {
    let request = &op.request;
    let inputs = Pieces(request.inputs());
    let total = inputs.bytes();
    let table = table_bytes(request, area.ranks);
    let inline = is_inline(request, area.ranks);
    // Ask for the whole slot, so that the table is behind the header line whatever the table's size.
    let to = area.payload(area.me, op.number, SLOT_BYTES);
    for q in 0..area.ranks {
        let bytes = block(&request.in_blocks, total, area.ranks, q) as u64;
        // SAFETY: the table is within the slot (MAX_RANKS * 8 <= SLOT_BYTES), which no peer reads now.
        unsafe { to.add(q * 8).cast::<u64>().write_unaligned(bytes) };
    }
    if inline {
        // SAFETY: the table and `total` bytes fit into the slot.
        unsafe { inputs.read(0, to.add(table), total) };
    }
    area.write_header(op.number, Header { signature: op.signature, chain, aux: u64::from(inline) });
}

/// The block sizes that rank `q` wrote into its table. The values are unchecked.
fn read(area: &Area, op: &Op, q: usize) -> Vec<usize> {
    let from = area.payload(q, op.number, SLOT_BYTES);
    (0..area.ranks)
        // SAFETY: the table is within the slot, and the tag of `q` was acquired.
        .map(|r| unsafe { from.add(r * 8).cast::<u64>().read_unaligned() } as usize)
        .collect()
}

/// Whether this rank's blocks of an all_to_all fit into its slot, behind the table.
pub fn is_inline(request: &Request, ranks: usize) -> bool {
    request.kind == Kind::AllToAll && table_bytes(request, ranks) + Pieces(request.inputs()).bytes() <= SLOT_BYTES
}

/// Size of the table at the beginning of a slot.
pub fn table_bytes(request: &Request, ranks: usize) -> usize {
    if request.kind == Kind::AllToAll { ranks * 8 } else { 0 }
}

/// Called when all tables of an all_to_all are published. Checks all sizes and copies every block that is in a slot.
/// Returns the tables of the ranks whose blocks are sent in rounds.
pub fn finish(area: &Area, op: &Op) -> Result<Vec<Option<Vec<usize>>>> {
    let request = &op.request;
    let (me, ranks) = (area.me, area.ranks);
    let outputs = Pieces(request.outputs());
    let total_out = outputs.bytes();
    let mut in_rounds = Vec::with_capacity(ranks);
    // For each block that is in a slot: its offset in that slot.
    let mut in_slots = Vec::with_capacity(ranks);
    for q in 0..ranks {
        let table = read(area, op, q);
        let expected = block(&request.out_blocks, total_out, ranks, q);
        if table[me] != expected {
            return Err(wrong_block(op, me, q, table[me] as u64, expected as u64));
        }
        if area.read_header(q, op.number).aux == 1 {
            let before: usize = table[..me].iter().fold(0, |sum, bytes| sum.saturating_add(*bytes));
            let at = (ranks * 8).saturating_add(before);
            if at.saturating_add(expected) > SLOT_BYTES {
                return Err(wrong_block(op, me, q, before as u64, SLOT_BYTES as u64));
            }
            in_slots.push(Some(at));
            in_rounds.push(None);
        } else {
            in_slots.push(None);
            in_rounds.push(Some(table));
        }
    }
    let mut to = 0;
    for (q, at) in in_slots.into_iter().enumerate() {
        let bytes = block(&request.out_blocks, total_out, ranks, q);
        if let Some(at) = at {
            // SAFETY: `at + bytes` is within the slot, as checked above, and its tag was acquired.
            unsafe { outputs.write(to, area.payload(q, op.number, SLOT_BYTES).add(at), bytes) };
        }
        to += bytes;
    }
    Ok(in_rounds)
}
