//! How ranks publish where their tensors are: in the slot of the operation, behind its header.
//!
//! A rank *offers* its tensors when it publishes the operation. The word behind the header is 0 if there is no offer;
//! otherwise it has the numbers of input and output pieces, and each piece's offset and length in the rank's arena
//! follow. An operation is mapped if every rank offers. All ranks see the same words, so all decide alike. A rank whose
//! tensors are not in its arena offers nothing, and knows immediately that the operation is staged.

use std::sync::Arc;

use super::part;
use crate::engine::pieces::Pieces;
use crate::engine::shm::memory::area::Area;
use crate::engine::shm::memory::arena;
use crate::engine::shm::memory::arena::{Identity, Lease};
use crate::engine::shm::memory::layout::{MOST_PIECES, Part};
use crate::engine::shm::memory::reach::Reach;
use crate::engine::shm::table::{is_inline, table_bytes};
use crate::op::Op;
use crate::types::{Request, Span};

/// Messages of at least this size are read in place if possible.
const MESSAGE_FROM: usize = 64 << 10;

/// Value of the output count if the outputs are the inputs.
const SAME: u64 = 0xff;

/// What this rank offers in one operation. It owns the leases until the operation ends.
#[derive(Debug)]
pub struct Offer {
    inputs: Vec<Lease>,
    /// Empty if peers write nothing, or write into the inputs.
    outputs: Vec<Lease>,
    /// Whether peers write into `outputs`, or into the inputs if `outputs` is empty.
    pub written: bool,
}

impl Offer {
    /// The pieces that peers write into.
    pub fn targets(&self) -> &[Lease] {
        match self.written {
            true if self.outputs.is_empty() => &self.inputs,
            true => &self.outputs,
            false => &[],
        }
    }

    /// The word behind the header.
    fn word(&self) -> u64 {
        let outputs = if self.written && self.outputs.is_empty() { SAME } else { self.outputs.len() as u64 };
        1 | (self.inputs.len() as u64) << 8 | outputs << 16
    }
}

/// The tensors of a peer, as addresses in this process.
#[derive(Debug)]
pub struct Theirs {
    pub inputs: Vec<Span>,
    pub outputs: Vec<Span>,
}

/// The arenas of the ranks of one group, as far as this rank has mapped them.
pub struct Arenas {
    /// Process of each rank; 0 if unknown.
    pids: Vec<i32>,
    reached: Vec<Option<Arc<Reach>>>,
    /// Arenas that could not be mapped, by rank. Each failure is logged once.
    refused: Vec<Option<Identity>>,
    /// The group's id for `arena::lease`, unique to the group and this rank.
    group: u64,
    /// Whether the host has fewer cores than ranks; equal on all ranks.
    crowded: bool,
}

impl Arenas {
    /// `pids` has the process of each rank, 0 if unknown. `group` must be unique in this process while the group lives.
    pub fn new(pids: Vec<i32>, group: u64, crowded: bool) -> Arenas {
        let ranks = pids.len();
        Arenas { pids, reached: vec![None; ranks], refused: vec![None; ranks], group, crowded }
    }

    /// Returns the mapping of `rank`'s arena. The first call after `rank` has published its arena's identity makes the
    /// mapping.
    fn reach(&mut self, area: &Area, rank: usize) -> Option<&Arc<Reach>> {
        if self.reached[rank].is_none() {
            let identity = area.arena(rank)?;
            if self.refused[rank] == Some(identity) {
                return None;
            }
            match Reach::new(self.pids[rank], identity) {
                Ok(reach) => self.reached[rank] = Some(reach),
                Err(why) => {
                    log::warn!(
                        "tensors in shared memory of rank {rank} cannot be reached, so data is copied twice: {why}"
                    );
                    self.refused[rank] = Some(identity);
                }
            }
        }
        self.reached[rank].as_ref()
    }

    /// Returns what this rank can offer for `op`, whose inputs have been prepared. None if operations of this kind and
    /// size are not mapped, or if this rank cannot offer all of its tensors or cannot map the arenas of all peers.
    pub fn offer(&mut self, area: &Area, op: &Op) -> Option<Offer> {
        let request = &op.request;
        let (kind, me, root) = (request.kind, area.me, request.root as usize);
        if !part::is_mapped(kind, Pieces(request.inputs()).bytes(), Pieces(request.outputs()).bytes(), self.crowded) {
            return None;
        }
        let lease = |spans: &[Span]| -> Option<Vec<Lease>> {
            let spans = || spans.iter().filter(|span| span.bytes > 0);
            if spans().nth(MOST_PIECES).is_some() {
                return None;
            }
            spans().map(|span| arena::lease(self.group, *span)).collect()
        };
        // Blocks of an all_to_all that are in the slot are not offered: the slot has no room for both, and the offer is
        // not needed.
        let inputs = if is_inline(request, area.ranks) { Vec::new() } else { lease(request.inputs())? };
        let written = part::exposes_outputs(kind, me, root);
        let outputs =
            if written && request.outputs() != request.inputs() { lease(request.outputs())? } else { Vec::new() };
        // Every rank whose sums another one reads must have a stage before any rank writes a result. Without memory for it
        // the operation is staged, and fails with the amounts.
        if part::uses_stage(kind, me, &area.nodes) && area.make_present([Part::Stage]).is_err() {
            return None;
        }
        publish_arena(area);
        let reached = (0..area.ranks).filter(|q| *q != me).all(|q| self.reach(area, q).is_some());
        reached.then_some(Offer { inputs, outputs, written })
    }

    /// Whether this rank can read tensors of `rank` in place. `rank` must have published its arena's identity.
    pub fn reaches(&mut self, area: &Area, rank: usize) -> bool {
        self.reach(area, rank).is_some()
    }

    /// The address in this process of a piece of `rank`'s arena. None if the arena is not mapped or has no such piece.
    pub fn at(&self, rank: usize, offset: usize, bytes: usize) -> Option<usize> {
        self.reached[rank].as_ref()?.at(offset, bytes)
    }

    /// Whether, as far as this rank knows, the receiver of this send can read the tensor in place. If so, also
    /// publishes the identity of this rank's arena, so that the receiver can map it.
    pub fn announce(&self, area: &Area, send: &Op) -> bool {
        let [span] = send.sent() else { return false };
        let found = span.bytes >= MESSAGE_FROM && arena::reaches(span.addr as *const u8);
        if found {
            publish_arena(area);
        }
        found
    }

    /// Leases the tensor of a send. None if the receiver cannot read it in place any more.
    pub fn lend(&self, send: &Op) -> Option<Lease> {
        let [span] = send.sent() else { return None };
        arena::lease(self.group, *span)
    }

    /// Leases the output of a receive, and publishes the identity of this rank's arena, so that the sender can map it.
    /// None if the sender cannot write there.
    pub fn lend_output(&self, area: &Area, receive: &Op) -> Option<Lease> {
        let [span] = receive.request.outputs() else { return None };
        let lease = arena::lease(self.group, *span)?;
        publish_arena(area);
        Some(lease)
    }

    /// The address in this process of the output of a receive of `rank`, which lies at `offset` in that rank's arena.
    pub fn output(&mut self, area: &Area, rank: usize, offset: usize, bytes: usize) -> Option<usize> {
        self.reach(area, rank)?.at(offset, bytes)
    }

    /// Writes an offer into this rank's slot, before it is published.
    pub fn write(area: &Area, op: &Op, offer: Option<&Offer>) {
        area.set_offer(op.number, offer.map_or(0, Offer::word));
        let Some(offer) = offer else { return };
        let first = table_bytes(&op.request, area.ranks) / 8;
        for (at, lease) in offer.inputs.iter().chain(&offer.outputs).enumerate() {
            area.set_offered(op.number, first + 2 * at, [lease.offset as u64, lease.bytes as u64]);
        }
    }

    /// The tensors that every rank offers, by rank. None if a rank offers nothing. All ranks must have published the
    /// operation. The error is a rank whose offer is invalid.
    pub fn theirs(&self, area: &Area, op: &Op) -> Result<Option<Vec<Theirs>>, usize> {
        if (0..area.ranks).any(|rank| area.offer(rank, op.number) == 0) {
            return Ok(None);
        }
        let read = |rank| if rank == area.me { Some(own(&op.request)) } else { self.read(area, op, rank) };
        (0..area.ranks).map(|rank| read(rank).ok_or(rank)).collect::<Result<Vec<Theirs>, usize>>().map(Some)
    }

    fn read(&self, area: &Area, op: &Op, rank: usize) -> Option<Theirs> {
        let request = &op.request;
        let (word, reach) = (area.offer(rank, op.number), self.reached[rank].as_ref()?);
        let (inputs, outputs) = ((word >> 8 & 0xff) as usize, word >> 16 & 0xff);
        let separate = if outputs == SAME { 0 } else { outputs as usize };
        if inputs > MOST_PIECES || separate > MOST_PIECES {
            return None;
        }
        let first = table_bytes(request, area.ranks) / 8;
        let pieces = (0..inputs + separate).map(|at| {
            let [offset, bytes] = area.offered(rank, op.number, first + 2 * at).map(|word| usize::try_from(word).ok());
            let (offset, bytes) = (offset?, bytes?);
            Some(Span { addr: reach.at(offset, bytes)?, bytes })
        });
        let mut pieces: Vec<Span> = pieces.collect::<Option<_>>()?;
        let separate = pieces.split_off(inputs);
        let outputs = if outputs == SAME { pieces.clone() } else { separate };
        Some(Theirs { inputs: pieces, outputs })
    }
}

fn publish_arena(area: &Area) {
    if let Some(own) = arena::identity().filter(|own| area.arena(area.me) != Some(*own)) {
        area.set_arena(own);
    }
}

fn own(request: &Request) -> Theirs {
    Theirs { inputs: request.inputs().to_vec(), outputs: request.outputs().to_vec() }
}
