//! The headers of the slots, which show what each rank called. In a collective, a rank compares a peer's header with
//! its own (`look`) before it reads the peer's data. If the headers differ, `look` makes the error.

use std::sync::atomic::Ordering;

use super::memory::area::{Area, Header};
use super::memory::layout::{OFFER_BYTES, SLOT_BYTES};
use super::protocol::Slots;
use crate::engine::pieces::Pieces;
use crate::error::{Error, Result, SAME_CALLS, laid_out};
use crate::op::signature;
use crate::op::words::{Called, UNTOUCHED, different};
use crate::op::{Op, lists};
use crate::select;
use crate::types::{Kind, ReduceOp, Request};

/// The `aux` word of an operation's header (`Header`).
#[inline]
fn aux(op: &Op) -> u64 {
    let request = &op.request;
    match (request.kind, request.op) {
        (kind, ReduceOp::PremulSum(factor)) if kind.reduces() => factor.to_bits(),
        _ if !request.list.is_empty() => op.lists,
        _ => Pieces(request.inputs()).bytes() as u64,
    }
}

/// Writes the tensors of a call's list to the end of the call's slot, as far as the data leaves room. A peer whose list
/// differs compares the tensors to find the first difference.
#[inline]
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

/// Writes the header of an operation whose data is in the slot or follows in rounds. The caller then makes it visible
/// with `Slots::publish`.
#[inline]
pub fn write(area: &Area, op: &Op, chain: u64) {
    write_list(area, op);
    area.write_header(op.number, Header { signature: op.signature, chain, aux: aux(op) });
}

/// The PREMUL_SUM factors by rank, from the headers. Empty for every other reduction.
#[inline]
pub fn factors(area: &Area, op: &Op) -> Vec<f64> {
    match op.request.op {
        ReduceOp::PremulSum(_) => (0..area.ranks).map(|q| f64::from_bits(area.read_header(q, op.number).aux)).collect(),
        _ => Vec::new(),
    }
}

/// For each `needed` rank from `seen` on, checks that its slot is published and that its header agrees with this
/// rank's. Returns the first rank whose slot is not published yet, or the number of ranks.
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

/// Returns an error if the `aux` words of the headers show that two ranks passed different lists of tensors to this
/// operation. None if the words do not show this, or if they are factors (PREMUL_SUM).
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
    Some(lists::differ(
        &signature::describe(op.signature),
        op.number,
        (area.me, own),
        (peer, theirs),
        (place, UNTOUCHED),
    ))
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
            let call = signature::describe(own.signature);
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

/// Returns the error for a block of rank `peer` that has another size than this rank expects.
pub fn wrong_block(op: &Op, me: usize, peer: usize, theirs: u64, expected: u64) -> Error {
    let head = format!("in {} rank {peer} brings {theirs} bytes where rank {me} has room for {expected}", op.what());
    Error::mismatch(laid_out(&head, &[UNTOUCHED.to_string()], SAME_LISTS))
}
