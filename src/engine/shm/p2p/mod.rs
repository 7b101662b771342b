//! Moves messages between two ranks of a host.
//!
//! Each ordered pair of ranks has a ring buffer of envelopes. A message of up to `eager_bytes` is copied into its
//! envelope, and its send ends immediately. A larger message waits at the sender until the receiver has matched its
//! envelope and granted it a channel (`channels`). Then it moves through the two buffers of that channel, in the order
//! of the grants. While any receive is posted, the receiver empties the ring buffers. It moves envelopes that match no
//! receive to a private list, so that they do not block later messages. Receives match in the order in which they were
//! posted, first in first out per (source, tag). A receive from `ANY_RANK` takes the message that arrived first.
//!
//! **In place.** If the receiver can map the sender's tensor (`memory/arena.rs`), the first round of a large message
//! has only the tensor's offset in the sender's arena. The receiver copies from the tensor. If the sender can also
//! reach the receiver's tensor, it copies a share while it waits (`shares`). The receiver drains the round when
//! everything is copied; only then does the send end. The envelope says whether the tensor is in the arena, and the
//! grant says whether the receiver has mapped the arena. Only after the grant does the sender decide whether it lends
//! the tensor. If a later operation of the sender needs the tensor's memory before that, the send continues from a
//! copy.
//!
//! For an eager message, N bytes are written and N read. For a larger one, N bytes are staged and N read, in N /
//! body_bytes rounds that overlap. In place, N bytes are read and written once.
//!
//! | word | written by | value |
//! | --- | --- | --- |
//! | SENT | sender, release after the envelope | number of envelopes written |
//! | CONSUMED | receiver, release after reading the envelope | number of envelopes that may be overwritten |
//! | GRANTS | receiver, release after the grant entry | number of grant entries written |
//! | TAKEN | sender, release after reading the entry | number of grant entries that may be overwritten |
//! | READY | sender, release after filling | number of body rounds filled |
//! | DRAINED | receiver, release after reading | number of body rounds that may be overwritten |
//!
//! Every reader uses an acquire load. Numbers that a peer wrote are compared and bounded, and never used as an address.
//!
//! **When a rank fails.** A sender whose send fails continues its program, which may change the tensor while the
//! receiver copies from it. So after copying, the receiver checks whether the group has failed or the sender has left,
//! as in `mapped`. If so, its receive does not end successfully. A sender may copy into an output late, after the
//! receive has failed. So the receiver makes the output private before its program gets the error.

pub mod channels;
mod incoming;
mod outgoing;
mod shares;

use std::collections::VecDeque;
use std::sync::Arc;

use self::channels::Channels;
use self::incoming::{Incoming, Message};
use self::outgoing::Outgoing;
use super::mapped::Arenas;
use super::memory::area::Area;
use super::memory::layout::Layout;
use super::protocol;
use super::rank_set::RankSet;
use crate::engine::Ended;
use crate::engine::pieces::Pieces;
use crate::error::Result;
use crate::op::Op;
use crate::op::words::wrong_size;
use crate::threads;
use crate::types::{ANY_RANK, Kind};

// Words that the sender writes have even numbers, words that the receiver writes odd numbers (`Layout::pair_word`).
const SENT: usize = 0;
const CONSUMED: usize = 1;
const TAKEN: usize = 2;
const GRANTS: usize = 3;
const READY: usize = 4;
const DRAINED: usize = 5;
// The words of `shares`. Both ranks write CLAIMED.
const PLACE: usize = 6;
const HOME: usize = 7;
const COPIED: usize = 8;
const CLAIMED: usize = 9;

/// Flags in the first word of an envelope, above the tag.
const EAGER: u64 = 1 << 32;
/// The sender's tensor is in its arena.
const REACHABLE: u64 = 1 << 33;

/// The receiver's answer to the envelope of a message that is not eager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Grant {
    /// Number of the message.
    number: u64,
    answer: Answer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The receiver rejects the message, so the send fails too.
    Rejected,
    /// The message may move through this channel. `in_place`: the receiver can read the sender's arena.
    Channel { channel: usize, in_place: bool },
}

impl Grant {
    const REJECTED: u64 = 1 << 63;
    const IN_PLACE: u64 = 1 << 62;
    /// The bits from here up to `IN_PLACE` are the channel; the bits below are the message's number.
    const CHANNEL_SHIFT: u32 = 48;

    fn encode(self) -> u64 {
        self.number
            | match self.answer {
                Answer::Rejected => Grant::REJECTED,
                Answer::Channel { channel, in_place } => {
                    (channel as u64) << Grant::CHANNEL_SHIFT | if in_place { Grant::IN_PLACE } else { 0 }
                }
            }
    }

    fn decode(entry: u64) -> Grant {
        let channel = ((entry & !(Grant::REJECTED | Grant::IN_PLACE)) >> Grant::CHANNEL_SHIFT) as usize;
        let answer = match entry & Grant::REJECTED {
            0 => Answer::Channel { channel, in_place: entry & Grant::IN_PLACE != 0 },
            _ => Answer::Rejected,
        };
        Grant { number: entry & ((1 << Grant::CHANNEL_SHIFT) - 1), answer }
    }
}

/// Ends an operation of this rank.
fn end(op: Arc<Op>, outcome: Result<()>, ended: &mut Ended) {
    if outcome.is_ok() {
        op.store_back();
    }
    op.release();
    ended.push((op, outcome));
}

pub struct P2p {
    out: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    posted: VecDeque<Arc<Op>>,
    arrivals: u64,
    /// The peers whose messages to or from this rank `poll` must advance.
    busy: RankSet,
    /// Peers whose mail bit this rank has seen. With `Layout::has_mail`, only those whose bit it saw in the last poll.
    /// Until a peer has set its bit, its envelopes are possibly not populated yet (`presence.rs`).
    senders: RankSet,
    /// This rank's channels as a receiver.
    channels: Channels,
    /// Number of operations that have not ended. While it is zero, nothing is polled.
    active: usize,
}

impl P2p {
    pub fn new(layout: &Layout) -> P2p {
        let ranks = layout.ranks;
        P2p {
            out: (0..ranks).map(|_| Outgoing::default()).collect(),
            incoming: (0..ranks).map(|_| Incoming::default()).collect(),
            posted: VecDeque::new(),
            arrivals: 0,
            busy: RankSet::default(),
            senders: RankSet::default(),
            channels: Channels::new(layout.channels, ranks),
            active: 0,
        }
    }

    pub fn active(&self) -> usize {
        self.active
    }

    /// Adds a send or receive, which `poll` advances. Fails if there is no memory for a channel.
    pub fn issue(&mut self, area: &Area, arenas: &mut Arenas, op: Arc<Op>, ended: &mut Ended) -> Result<()> {
        let before = ended.len();
        let issued = self.begin(area, arenas, op, ended);
        self.active = self.active + 1 - (ended.len() - before);
        issued
    }

    fn begin(&mut self, area: &Area, arenas: &mut Arenas, op: Arc<Op>, ended: &mut Ended) -> Result<()> {
        op.prepare();
        if op.request.kind == Kind::Send {
            self.busy.insert(op.request.root as usize);
            self.out[op.request.root as usize].add(op);
            return Ok(());
        }
        let found = self
            .incoming
            .iter()
            .enumerate()
            .filter(|(source, _)| op.request.root == ANY_RANK || op.request.root as usize == *source)
            .filter_map(|(source, channel)| channel.first_with(op.request.tag).map(|(at, stamp)| (stamp, source, at)))
            .min();
        match found {
            Some((_, source, at)) => {
                let message = self.incoming[source].take_unexpected(at);
                self.deliver(area, arenas, source, op, message, ended)
            }
            None => {
                self.posted.push_back(op);
                Ok(())
            }
        }
    }

    /// Advances what can advance. Returns true if something advanced. Fails if a peer's counters are inconsistent or if
    /// there is no memory.
    pub fn poll(&mut self, area: &Area, arenas: &mut Arenas, ended: &mut Ended) -> Result<bool> {
        if self.active == 0 {
            return Ok(false);
        }
        let before = ended.len();
        let moved = self.advance(area, arenas, ended);
        self.active -= ended.len() - before;
        moved
    }

    fn advance(&mut self, area: &Area, arenas: &mut Arenas, ended: &mut Ended) -> Result<bool> {
        let mut moved = false;
        for peer in self.busy.iter() {
            moved |= self.out[peer].advance(area, arenas, peer, ended)?;
            moved |= self.incoming[peer].advance(area, arenas, peer, &mut self.channels, ended)?;
            if self.out[peer].is_idle() && self.incoming[peer].is_idle() {
                self.busy.remove(peer);
            }
        }
        // If this pass has advanced a message, this rank copies no shares, and the receivers copy the lent tensors. The
        // progress thread copies no shares either, because the program is computing.
        if !moved && threads::is_waiting() {
            for peer in self.busy.iter() {
                moved |= self.out[peer].share(area, arenas, peer)?;
            }
        }
        if self.posted.is_empty() {
            return Ok(moved);
        }
        let mail = protocol::collect(area, area.ranks);
        self.senders = if area.layout.has_mail() { mail } else { self.senders.with(mail) };
        for peer in self.senders.iter().filter(|peer| *peer < area.ranks && *peer != area.me) {
            moved |= self.take_envelopes(area, arenas, peer, ended)?;
        }
        Ok(moved)
    }

    fn take_envelopes(&mut self, area: &Area, arenas: &mut Arenas, from: usize, ended: &mut Ended) -> Result<bool> {
        let sent = self.incoming[from].count_sent(area, from)?;
        let mut moved = false;
        while let Some(message) = self.incoming[from].take_envelope(area, from, sent, self.arrivals + 1) {
            self.arrivals += 1;
            moved = true;
            let matching = self.posted.iter().position(|op| {
                op.request.tag == message.tag && (op.request.root == ANY_RANK || op.request.root as usize == from)
            });
            match matching {
                Some(at) => {
                    let op = self.posted.remove(at).expect("just found");
                    self.deliver(area, arenas, from, op, message, ended)?;
                }
                None => self.incoming[from].keep(message),
            }
        }
        Ok(moved)
    }

    /// Passes a matched message to its receive: copies an eager message, grants a larger one.
    fn deliver(
        &mut self,
        area: &Area,
        arenas: &mut Arenas,
        from: usize,
        op: Arc<Op>,
        message: Message,
        ended: &mut Ended,
    ) -> Result<()> {
        let room = Pieces(op.request.outputs()).bytes();
        let fits = message.bytes == room;
        op.set_source(from);
        if message.is_eager() {
            let outcome = match fits {
                true => {
                    message.write_to(&op);
                    Ok(())
                }
                false => Err(wrong_size(area.me, from, message.tag, room, message.bytes)),
            };
            end(op, outcome, ended);
            return Ok(());
        }
        self.busy.insert(from);
        if fits {
            self.incoming[from].accept(area, arenas, from, op, &message);
        } else {
            let error = wrong_size(area.me, from, message.tag, room, message.bytes);
            end(op, Err(error), ended);
            self.incoming[from].reject(&message);
        }
        self.incoming[from].give_grants(area, from, &mut self.channels).map(drop)
    }

    /// Returns the operations that cannot end before `peer` makes further progress. A receive from `ANY_RANK` needs
    /// `peer` if no other rank can still send. `gone` selects the ranks that cannot send any more.
    pub fn blocked_by(&self, area: &Area, peer: usize, gone: impl Fn(usize) -> bool) -> impl Iterator<Item = &Arc<Op>> {
        let only_peer = (0..area.ranks).all(|q| q == area.me || q == peer || gone(q));
        let posted = self.posted.iter().filter(move |op| match op.request.root {
            ANY_RANK => only_peer,
            root => root as usize == peer,
        });
        self.out[peer].blocked(area, peer).chain(self.incoming[peer].blocked(area, peer)).chain(posted)
    }

    /// Whether the receiver may be reading the tensor of this send.
    pub fn is_lent(&self, send: &Op) -> bool {
        self.out[send.request.root as usize].is_lent(send)
    }

    /// Whether a peer may be reading or writing a tensor of this rank.
    pub fn exposes_some(&self) -> bool {
        self.out.iter().any(Outgoing::lends_some) || self.incoming.iter().any(Incoming::exposes_some)
    }

    /// Removes and returns all operations that have not ended. If `exposes_some`, this rank must have stored the fault
    /// or its departure before.
    pub fn take_pending(&mut self) -> Vec<Arc<Op>> {
        let mut all: Vec<Arc<Op>> = self.posted.drain(..).collect();
        self.out.iter_mut().for_each(|out| all.extend(out.take_pending()));
        self.incoming.iter_mut().for_each(|incoming| all.extend(incoming.take_pending()));
        self.active = 0;
        all
    }

    /// Pending operations, in no particular order.
    pub fn pending(&self) -> impl Iterator<Item = &Arc<Op>> {
        let out = self.out.iter().flat_map(Outgoing::pending);
        let incoming = self.incoming.iter().flat_map(Incoming::pending);
        self.posted.iter().chain(out).chain(incoming)
    }
}

/// The last staged round of a message, if `moved` of its bytes were moved and its next round is `next`.
fn last_round(area: &Area, next: u64, op: &Op, moved: usize) -> u64 {
    let left = op.payload() as usize - moved;
    next + (left.div_ceil(area.layout.body_bytes) as u64).max(1) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_decoded_as_it_was_encoded() {
        for number in [0, 1, (1 << 48) - 1] {
            for answer in [
                Answer::Rejected,
                Answer::Channel { channel: 0, in_place: false },
                Answer::Channel { channel: 3, in_place: true },
                Answer::Channel { channel: 255, in_place: false },
            ] {
                let grant = Grant { number, answer };
                assert_eq!(Grant::decode(grant.encode()), grant);
            }
        }
    }
}
