//! Runs small operations in one exchange of tagged slots.
//!
//! Idea: every rank writes the data that its peers need into its own slot. Then each rank reads all the slots that it
//! needs and combines them by itself. Steps: 1 (write, tag, read). Bytes per rank: it writes its own payload and reads
//! up to (P-1) payloads. Order of summation: rank 0 to P-1. Source: the flag-in-line idea of NCCL's LL protocol and the
//! single exchange of DeepSpeed's shm all_reduce, with one numbering for all kinds of operation and no trailing barrier
//! (protocol.rs).

#![allow(unsafe_code)] // copies and reduces between caller memory and the slots of the segment

use std::sync::atomic::Ordering;

use super::memory::area::{Area, Header};
use super::memory::layout::{OFFER_BYTES, SLOT_BYTES};
use super::protocol::Slots;
use crate::engine::pieces::Pieces;
use crate::error::{Error, Result, SAME_CALLS, laid_out};
use crate::op;
use crate::op::words::{Called, UNTOUCHED, different};
use crate::op::{Op, lists};
use crate::reduce::Kernel;
use crate::select;
use crate::types::{Kind, ReduceOp, Request};

/// Size of rank `q`'s block: `blocks[q]`, or an equal part of `total` if `blocks` is empty.
pub fn block(blocks: &[usize], total: usize, ranks: usize, q: usize) -> usize {
    if blocks.is_empty() { total / ranks } else { blocks[q] }
}

/// Offset of rank `q`'s block.
pub fn block_start(blocks: &[usize], total: usize, ranks: usize, q: usize) -> usize {
    if blocks.is_empty() { total / ranks * q } else { blocks[..q].iter().sum() }
}

/// The `aux` word of an operation's header (`Header`).
fn aux(op: &Op, inline: bool) -> u64 {
    let request = &op.request;
    match (request.kind, request.op) {
        (kind, ReduceOp::PremulSum(factor)) if kind.reduces() => factor.to_bits(),
        (Kind::AllToAll, _) => u64::from(inline),
        _ if !request.list.is_empty() => op.lists,
        _ => Pieces(request.inputs()).bytes() as u64,
    }
}

/// Writes the tensors of a call's list to the end of the call's slot, as far as the data leaves room. A peer whose list
/// differs compares the tensors to find the first difference.
fn write_list(area: &Area, op: &Op) {
    if op.request.list.is_empty() {
        return;
    }
    for (at, tensor) in op.request.list.iter().take(list_room(area, op)).enumerate() {
        area.list_word(area.me, op.number, at).store(lists::word(tensor), Ordering::Relaxed);
    }
}

/// For how many tensors of a list a slot has room. Equal on all ranks with the same signature.
fn list_room(area: &Area, op: &Op) -> usize {
    let data = select::slot_payload(&op.request, area.ranks);
    // If the operation runs in rounds, its slot has no data, but may have an offer (`mapped`).
    SLOT_BYTES.checked_sub(data).unwrap_or(SLOT_BYTES - OFFER_BYTES) / 8
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
    write_list(area, op);
    area.write_header(op.number, Header { signature: op.signature, chain, aux: aux(op, true) });
}

/// Writes the header of an operation that runs in rounds. Its data follows through the stage buffers.
pub fn write_header(area: &Area, op: &Op, chain: u64) {
    write_list(area, op);
    area.write_header(op.number, Header { signature: op.signature, chain, aux: aux(op, false) });
}

/// Writes the slot of an all_to_all: the table of this rank's block sizes, then the blocks if they fit. `aux` in the
/// header says whether they did.
pub fn write_table(area: &Area, op: &Op, chain: u64) {
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
    area.write_header(op.number, Header { signature: op.signature, chain, aux: aux(op, inline) });
}

/// The block sizes that rank `q` wrote into its table. The values are unchecked.
pub fn read_table(area: &Area, op: &Op, q: usize) -> Vec<usize> {
    let from = area.payload(q, op.number, SLOT_BYTES);
    (0..area.ranks)
        // SAFETY: the table is within the slot, and the tag of `q` was acquired.
        .map(|r| unsafe { from.add(r * 8).cast::<u64>().read_unaligned() } as usize)
        .collect()
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

/// Checks that the `needed` slots of rank `seen` and higher ranks are published and that their signatures agree.
/// Returns the first rank whose slot is not published yet, or the number of ranks.
pub fn look(area: &Area, op: &Op, mut seen: usize, needed: impl Fn(usize) -> bool) -> Result<usize> {
    while seen < area.ranks {
        if seen != area.me && needed(seen) {
            if !Slots::is_published(area, seen, op.number) {
                break;
            }
            let (own, theirs) = (area.read_header(area.me, op.number), area.read_header(seen, op.number));
            if theirs.signature != op.signature {
                return Err(mismatch(op.number, area.me, op.signature, seen, theirs.signature));
            }
            if theirs.chain != own.chain
                && let Some(error) = other_list(area, op, (seen, theirs.aux), own.aux)
            {
                return Err(error);
            }
            // Rank `seen` must have exactly the bytes that this rank's list of blocks expects from it.
            if matches!(op.request.kind, Kind::AllGather | Kind::Gather) {
                let expected = op.request.out_blocks.get(seen).map_or(own.aux, |bytes| *bytes as u64);
                if theirs.aux != expected {
                    return Err(wrong_block(op, area.me, seen, theirs.aux, expected));
                }
            }
            if theirs.chain != own.chain {
                return Err(earlier_mismatch(area, op, seen));
            }
        }
        seen += 1;
    }
    Ok(seen)
}

const SAME_LISTS: &str = "Every rank must pass the same list of sizes";

fn mismatch(number: u64, me: usize, own: u64, peer: usize, theirs: u64) -> Error {
    let called = |rank, signature| Called { rank, signature, number };
    different(called(me, own), called(peer, theirs), UNTOUCHED)
}

/// The error, if the `aux` words of the headers show that two ranks passed different lists of tensors to this
/// operation. None if the words do not show this; for PREMUL_SUM they are factors.
fn other_list(area: &Area, op: &Op, (peer, theirs): (usize, u64), own: u64) -> Option<Error> {
    if !lists::possible(op.signature)
        || matches!(op.request.op, ReduceOp::PremulSum(_))
        || own == theirs
        || !(lists::is_of_tensors(own) || lists::is_of_tensors(theirs))
    {
        return None;
    }
    let listed = op.request.list.iter().map(lists::word).take(lists::count(theirs)).take(list_room(area, op));
    let mut pairs = listed.enumerate().map(|(at, own)| {
        let theirs = area.list_word(peer, op.number, at).load(Ordering::Relaxed);
        lists::Place { at, own, theirs }
    });
    let place = pairs.find(|place| place.own != place.theirs);
    Some(lists::differ(&op::describe(op.signature), op.number, (area.me, own), (peer, theirs), (place, UNTOUCHED)))
}

/// Called if the signatures of this operation agree but the chains differ. Then either this operation's lists of sizes
/// differ, or an earlier operation differed and neither rank read the other's header in it. The segment still has the
/// last headers of both ranks; this function reports the first difference between them.
fn earlier_mismatch(area: &Area, op: &Op, peer: usize) -> Error {
    let me = area.me;
    let oldest = op.number.saturating_sub(area.layout.depth - 1).max(1);
    // Whether it is known that all calls before `n` agreed. True before the first call; false if earlier headers were
    // overwritten.
    let mut agreed = oldest == 1;
    for n in oldest..=op.number {
        if !Slots::is_published(area, me, n) || !Slots::is_published(area, peer, n) {
            agreed = false; // the slot already has a later operation
            continue;
        }
        let (own, theirs) = (area.read_header(me, n), area.read_header(peer, n));
        if own.signature != theirs.signature {
            return mismatch(n, me, own.signature, peer, theirs.signature);
        }
        let lists_differ = !lists::told_by_aux(own.signature) || own.aux != theirs.aux;
        if own.chain != theirs.chain && agreed && lists::possible(own.signature) && lists_differ {
            let sizes = if n == op.number { sizes(me, &op.request) } else { String::new() };
            let call = op::describe(own.signature);
            let head = format!(
                "rank {me} and rank {peer} passed different lists of sizes to {call}, number {n} of their group"
            );
            let lines = [sizes, UNTOUCHED.to_string()];
            return Error::mismatch(laid_out(&head, &lines, SAME_LISTS));
        }
        agreed = own.chain == theirs.chain;
    }
    if oldest == 1 {
        let head = format!("ranks {me} and {peer} choose algorithms by different tables or rules");
        let lines = ["rank 0's were sent to all ranks".to_string()];
        return Error::mismatch(laid_out(&head, &lines, "Make the group anew, and report this if it comes again"));
    }
    let number = op.number;
    let head = format!(
        "ranks {me} and {peer} called different operations at some point before number {number} of their group"
    );
    Error::mismatch(laid_out(&head, &[], SAME_CALLS))
}

/// This rank's list for error texts. A long list is cut.
fn sizes(me: usize, request: &Request) -> String {
    const SHOWN: usize = 8;
    let tensors: Vec<usize> = request.list.iter().map(|tensor| tensor.bytes).collect();
    let list = match request.kind {
        _ if !tensors.is_empty() => &tensors,
        Kind::AllGather => &request.out_blocks,
        _ => &request.in_blocks,
    };
    match list.len() {
        0 if request.kind == Kind::AllReduce => format!("rank {me} passed one tensor"),
        0 => format!("rank {me} passed equal ones"),
        n if n <= SHOWN => format!("rank {me} passed {list:?} bytes"),
        n => format!("rank {me} passed {n} that begin with {:?} bytes", &list[..SHOWN]),
    }
}

/// The PREMUL_SUM factors by rank, from the headers. Empty for every other reduction.
pub fn factors(area: &Area, op: &Op) -> Vec<f64> {
    match op.request.op {
        ReduceOp::PremulSum(_) => (0..area.ranks).map(|q| f64::from_bits(area.read_header(q, op.number).aux)).collect(),
        _ => Vec::new(),
    }
}

/// Whether this rank's blocks of an all_to_all fit into its slot, behind the table.
pub fn is_inline(request: &Request, ranks: usize) -> bool {
    request.kind == Kind::AllToAll && table_bytes(request, ranks) + Pieces(request.inputs()).bytes() <= SLOT_BYTES
}

/// Size of the table at the beginning of a slot.
pub fn table_bytes(request: &Request, ranks: usize) -> usize {
    if request.kind == Kind::AllToAll { ranks * 8 } else { 0 }
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

fn wrong_block(op: &Op, me: usize, peer: usize, theirs: u64, expected: u64) -> Error {
    let head = format!("in {} rank {peer} brings {theirs} bytes where rank {me} has room for {expected}", op.what());
    Error::mismatch(laid_out(&head, &[UNTOUCHED.to_string()], SAME_LISTS))
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
    let factors = factors(area, op);
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

/// Called when all tables of an all_to_all are published. Checks all sizes and copies every block that is in a slot.
/// Returns the tables of the ranks whose blocks are sent in rounds.
pub fn finish_table(area: &Area, op: &Op) -> Result<Vec<Option<Vec<usize>>>> {
    let request = &op.request;
    let (me, ranks) = (area.me, area.ranks);
    let outputs = Pieces(request.outputs());
    let total_out = outputs.bytes();
    let mut in_rounds = Vec::with_capacity(ranks);
    // For each block that is in a slot: its offset in that slot.
    let mut in_slots = Vec::with_capacity(ranks);
    for q in 0..ranks {
        let table = read_table(area, op, q);
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
