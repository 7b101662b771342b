//! Moves messages between two ranks of a host.
//!
//! Each ordered pair of ranks has a ring buffer of envelopes. A message of up to `eager_bytes` is copied into its
//! envelope, and its send ends at once. A larger message waits at the sender until the receiver has matched its
//! envelope and granted it a channel (`channels`). Then it is copied through the two buffers of that channel, in the
//! order of the grants. Receivers always move envelopes to a private list, so if no receive has asked for the tag of a
//! message yet, the message still blocks no later one. Receives match in the order in which they were posted, first in
//! first out per (source, tag). A receive from `ANY_RANK` takes the message that arrived first.
//!
//! For an eager message, N bytes are written and N read. For a larger one, N bytes are staged and N read, in N /
//! body_bytes rounds that overlap.
//!
//! | word | written by | value |
//! | --- | --- | --- |
//! | SENT | sender, release after the envelope | number of envelopes written |
//! | CONSUMED | receiver, release after reading the envelope | number of envelopes that may be overwritten |
//! | GRANTS | receiver, release after the grant entry (message number, channel) | number of grant entries written |
//! | TAKEN | sender, release after reading the entry | number of grant entries that may be overwritten |
//! | READY | sender, release after filling | number of body rounds filled |
//! | DRAINED | receiver, release after reading | number of body rounds that may be overwritten |
//!
//! Every reader uses an acquire load. Numbers that a peer wrote are compared and bounded, and never used as an address.

#![allow(unsafe_code)] // copies messages between caller memory and the segment

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::channels::Channels;
use super::memory::area::Area;
use super::memory::layout::{Layout, Part};
use super::protocol;
use super::rank_set::RankSet;
use crate::engine::Ended;
use crate::engine::pieces::Pieces;
use crate::error::{Error, Result};
use crate::op::Op;
use crate::op::words::{not_taken, wrong_size};
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::types::{ANY_RANK, Kind};

// Words that the sender writes have even numbers, words that the receiver writes odd numbers (`Layout::pair_word`).
const SENT: usize = 0;
const CONSUMED: usize = 1;
const TAKEN: usize = 2;
const GRANTS: usize = 3;
const READY: usize = 4;
const DRAINED: usize = 5;

/// A flag in a grant entry: the receiver rejects the message, so the send fails too.
const REJECTED: u64 = 1 << 63;
/// The bits of a grant entry from here up to `REJECTED` are the channel; the bits below are the message's number.
const CHANNEL_SHIFT: u32 = 48;

#[derive(Default)]
struct Outgoing {
    sent: u64,
    taken: u64,
    round: u64,
    /// Sends that are not in the ring buffer yet.
    queue: VecDeque<Arc<Op>>,
    /// Sends that are in the ring buffer and wait for a grant, each with its envelope number.
    waiting: VecDeque<(u64, Arc<Op>)>,
    /// Sends that the receiver has granted, each with its channel and the number of bytes staged so far.
    bodies: VecDeque<(Arc<Op>, usize, usize)>,
}

#[derive(Default)]
struct Incoming {
    consumed: u64,
    grants: u64,
    round: u64,
    /// Messages that arrived and are not matched.
    unexpected: VecDeque<Message>,
    /// Grants and rejections that wait for room in the ring buffer of grants, or for a channel.
    ungranted: VecDeque<u64>,
    /// Receives that this rank has granted, each with the number of bytes received so far.
    bodies: VecDeque<(Arc<Op>, usize)>,
}

struct Message {
    /// Position in the order in which messages from all sources arrived at this rank.
    stamp: u64,
    tag: u32,
    bytes: usize,
    number: u64,
    /// The data of an eager message. None for a larger one.
    data: Option<Vec<u8>>,
}

pub struct P2p {
    out: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    posted: VecDeque<Arc<Op>>,
    arrivals: u64,
    /// The peers with which a message is in flight that `poll` can advance.
    busy: RankSet,
    /// Peers whose mail bit this rank has seen. Before that, their envelopes may not be populated (`presence.rs`).
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
    pub fn issue(&mut self, area: &Area, op: Arc<Op>, ended: &mut Ended) -> Result<()> {
        self.active += 1;
        op.prepare();
        if op.request.kind == Kind::Send {
            self.busy.insert(op.request.root as usize);
            self.out[op.request.root as usize].queue.push_back(op);
            return Ok(());
        }
        let found = self
            .incoming
            .iter()
            .enumerate()
            .filter(|(source, _)| op.request.root == ANY_RANK || op.request.root as usize == *source)
            .filter_map(|(source, channel)| {
                let at = channel.unexpected.iter().position(|message| message.tag == op.request.tag)?;
                Some((channel.unexpected[at].stamp, source, at))
            })
            .min();
        match found {
            Some((_, source, at)) => {
                let message = self.incoming[source].unexpected.remove(at).expect("just found");
                self.deliver(area, source, op, message, ended)
            }
            None => {
                self.posted.push_back(op);
                Ok(())
            }
        }
    }

    /// Advances what can advance. Returns true if something advanced. Fails if a peer's counters are inconsistent or if
    /// there is no memory.
    pub fn poll(&mut self, area: &Area, ended: &mut Ended) -> Result<bool> {
        if self.active == 0 {
            return Ok(false);
        }
        let mut moved = false;
        for peer in self.busy.iter() {
            moved |= self.push_envelopes(area, peer, ended)?;
            moved |= self.take_grants(area, peer, ended)?;
            moved |= self.fill_body(area, peer, ended);
            moved |= self.give_grants(area, peer)?;
            moved |= self.receive_body(area, peer, ended);
            if self.is_idle(peer) {
                self.busy.remove(peer);
            }
        }
        if self.posted.is_empty() {
            return Ok(moved);
        }
        let mail = protocol::collect(area, area.ranks);
        self.senders = if area.layout.has_mail() { mail } else { self.senders.with(mail) };
        for peer in self.senders.iter().filter(|peer| *peer < area.ranks && *peer != area.me) {
            moved |= self.take_envelopes(area, peer, ended)?;
        }
        Ok(moved)
    }

    /// Whether no send to `peer` and no granted receive from `peer` is in progress. A new message of `peer` is found by
    /// its envelope.
    fn is_idle(&self, peer: usize) -> bool {
        let (out, incoming) = (&self.out[peer], &self.incoming[peer]);
        out.queue.is_empty()
            && out.waiting.is_empty()
            && out.bodies.is_empty()
            && incoming.ungranted.is_empty()
            && incoming.bodies.is_empty()
    }

    fn end(&mut self, op: Arc<Op>, outcome: Result<()>, ended: &mut Ended) {
        self.active -= 1;
        if outcome.is_ok() {
            op.store_back();
        }
        op.release();
        ended.push((op, outcome));
    }

    fn push_envelopes(&mut self, area: &Area, to: usize, ended: &mut Ended) -> Result<bool> {
        let me = area.me;
        let mut moved = false;
        if !self.out[to].queue.is_empty() {
            area.make_present([Part::Envelopes])?;
        }
        while let Some(op) = self.out[to].queue.front().cloned() {
            if self.ring_is_full(area, to) {
                break;
            }
            let number = self.out[to].sent;
            let inputs = Pieces(op.sent());
            let bytes = inputs.bytes();
            let eager = bytes <= area.layout.eager_bytes;
            let word = |i| area.envelope_word(me, to, number, i);
            word(0).store(u64::from(op.request.tag) | u64::from(eager) << 32, Relaxed);
            word(1).store(bytes as u64, Relaxed);
            if eager && bytes > 0 {
                // SAFETY: the envelope has room for `bytes`, and CONSUMED says that the receiver no longer reads it.
                unsafe { inputs.read(0, area.envelope_data(me, to, number, bytes), bytes) };
            }
            let channel = &mut self.out[to];
            channel.queue.pop_front();
            channel.sent += 1;
            fault_points::reached(FaultPoint::EnvelopeWritten);
            area.pair_word(me, to, SENT).store(channel.sent, Release);
            fault_points::reached(FaultPoint::EnvelopeSent);
            if number == 0 || area.layout.has_mail() {
                protocol::post(area, to, me);
            }
            if eager {
                self.end(op, Ok(()), ended);
            } else {
                channel.waiting.push_back((number, op));
            }
            moved = true;
        }
        Ok(moved)
    }

    fn take_grants(&mut self, area: &Area, to: usize, ended: &mut Ended) -> Result<bool> {
        let me = area.me;
        let mut moved = false;
        while !self.out[to].waiting.is_empty() {
            let channel = &mut self.out[to];
            let grants = area.pair_word(me, to, GRANTS).load(Acquire);
            if grants == channel.taken {
                break;
            }
            let most = area.layout.envelopes;
            if grants.wrapping_sub(channel.taken) > most {
                return Err(Error::system(format!(
                    "sagellm: rank {to} says that it granted {grants} messages of rank {me}, which took {} of at most {most} \
                     in flight: the group's shared memory was overwritten",
                    channel.taken
                )));
            }
            fault_points::reached(FaultPoint::GrantSeen);
            let entry = area.grant(me, to, channel.taken).load(Relaxed);
            channel.taken += 1;
            area.pair_word(me, to, TAKEN).store(channel.taken, Release);
            moved = true;
            let (number, through) =
                (entry & ((1 << CHANNEL_SHIFT) - 1), ((entry & !REJECTED) >> CHANNEL_SHIFT) as usize);
            let Some(at) = channel.waiting.iter().position(|(waiting, _)| *waiting == number) else {
                continue; // this rank sent no such message: the peer broke the protocol
            };
            if through >= area.layout.channels {
                return Err(Error::system(format!(
                    "sagellm: rank {to} granted rank {me} its channel {through} of {}: the group's shared memory was overwritten",
                    area.layout.channels
                )));
            }
            let (_, op) = channel.waiting.remove(at).expect("just found");
            if entry & REJECTED == 0 {
                channel.bodies.push_back((op, through, 0));
            } else {
                let bytes = Pieces(op.sent()).bytes();
                let error = not_taken(me, to, op.request.tag, bytes);
                self.end(op, Err(error), ended);
            }
        }
        Ok(moved)
    }

    fn fill_body(&mut self, area: &Area, to: usize, ended: &mut Ended) -> bool {
        let me = area.me;
        let channel = &mut self.out[to];
        let Some((op, through, offset)) = channel.bodies.front_mut() else { return false };
        let round = channel.round;
        if !protocol::may_fill_body(round, area.pair_word(me, to, DRAINED).load(Acquire)) {
            return false;
        }
        let inputs = Pieces(op.sent());
        let total = inputs.bytes();
        let bytes = area.layout.body_bytes.min(total - *offset);
        // SAFETY: the body buffer has room for `bytes`. This rank was granted the channel, and DRAINED says that the
        // receiver no longer reads the buffer.
        unsafe { inputs.read(*offset, area.body(to, *through, round, bytes), bytes) };
        *offset += bytes;
        channel.round += 1;
        fault_points::reached(FaultPoint::BodyFilled);
        area.pair_word(me, to, READY).store(channel.round, Release);
        if *offset == total {
            let (op, ..) = channel.bodies.pop_front().expect("the front");
            self.end(op, Ok(()), ended);
        }
        true
    }

    fn take_envelopes(&mut self, area: &Area, from: usize, ended: &mut Ended) -> Result<bool> {
        let me = area.me;
        let sent = area.pair_word(from, me, SENT).load(Acquire);
        let (before, most) = (self.incoming[from].consumed, area.layout.envelopes);
        if sent.wrapping_sub(before) > most {
            return Err(Error::system(format!(
                "sagellm: rank {from} says that it sent {sent} messages to rank {me}, which took {before} of at most {most} \
                 in flight: the group's shared memory was overwritten"
            )));
        }
        let mut moved = false;
        while self.incoming[from].consumed < sent {
            let number = self.incoming[from].consumed;
            fault_points::reached(FaultPoint::EnvelopeSeen);
            let word = |i| area.envelope_word(from, me, number, i).load(Relaxed);
            let (tag, eager) = (word(0) as u32, word(0) >> 32 & 1 == 1);
            let bytes = word(1) as usize;
            self.arrivals += 1;
            let mut message = Message { stamp: self.arrivals, tag, bytes, number, data: None };
            if eager {
                let bytes = bytes.min(area.layout.eager_bytes);
                message.bytes = bytes;
                let mut data = vec![0u8; bytes];
                // SAFETY: the envelope has `bytes` bytes, which was bounded above, and SENT was acquired.
                unsafe { crate::reduce::copy(data.as_mut_ptr(), area.envelope_data(from, me, number, bytes), bytes) };
                message.data = Some(data);
            }
            self.incoming[from].consumed += 1;
            fault_points::reached(FaultPoint::EnvelopeRead);
            area.pair_word(from, me, CONSUMED).store(number + 1, Release);
            moved = true;
            let matching = self.posted.iter().position(|op| {
                op.request.tag == tag && (op.request.root == ANY_RANK || op.request.root as usize == from)
            });
            match matching {
                Some(at) => {
                    let op = self.posted.remove(at).expect("just found");
                    self.deliver(area, from, op, message, ended)?;
                }
                None => self.incoming[from].unexpected.push_back(message),
            }
        }
        Ok(moved)
    }

    /// Passes a matched message to its receive: copies an eager message, grants a larger one.
    fn deliver(&mut self, area: &Area, from: usize, op: Arc<Op>, message: Message, ended: &mut Ended) -> Result<()> {
        let outputs = Pieces(op.request.outputs());
        let room = outputs.bytes();
        op.set_source(from);
        if message.bytes != room {
            let error = wrong_size(area.me, from, message.tag, room, message.bytes);
            self.end(op, Err(error), ended);
            if message.data.is_none() {
                self.busy.insert(from);
                self.incoming[from].ungranted.push_back(message.number | REJECTED);
                self.give_grants(area, from)?;
            }
            return Ok(());
        }
        match message.data {
            Some(data) => {
                // SAFETY: the outputs have `room` bytes, which is the size of the message.
                unsafe { outputs.write(0, data.as_ptr(), room) };
                self.end(op, Ok(()), ended);
            }
            None => {
                self.busy.insert(from);
                self.incoming[from].ungranted.push_back(message.number);
                self.incoming[from].bodies.push_back((op, 0));
                self.give_grants(area, from)?;
            }
        }
        Ok(())
    }

    fn give_grants(&mut self, area: &Area, from: usize) -> Result<bool> {
        let me = area.me;
        let channel = &mut self.incoming[from];
        let mut moved = false;
        while let Some(message) = channel.ungranted.front().copied() {
            if channel.grants.wrapping_sub(area.pair_word(from, me, TAKEN).load(Acquire)) >= area.layout.envelopes {
                break;
            }
            let entry = match message & REJECTED {
                0 => match self.channels.lend(from) {
                    Some(through) => {
                        area.make_present([Part::Channel(through)])?;
                        message | (through as u64) << CHANNEL_SHIFT
                    }
                    None => break, // `poll` asks again
                },
                _ => message,
            };
            area.grant(from, me, channel.grants).store(entry, Relaxed);
            channel.ungranted.pop_front();
            channel.grants += 1;
            fault_points::reached(FaultPoint::GrantWritten);
            area.pair_word(from, me, GRANTS).store(channel.grants, Release);
            moved = true;
        }
        Ok(moved)
    }

    fn receive_body(&mut self, area: &Area, from: usize, ended: &mut Ended) -> bool {
        let me = area.me;
        let channel = &mut self.incoming[from];
        let Some((op, offset)) = channel.bodies.front_mut() else { return false };
        let round = channel.round;
        let Some(through) = self.channels.of(from) else { return false };
        if area.pair_word(from, me, READY).load(Acquire) <= round {
            return false;
        }
        fault_points::reached(FaultPoint::BodySeen);
        let outputs = Pieces(op.request.outputs());
        let total = outputs.bytes();
        let bytes = area.layout.body_bytes.min(total - *offset);
        // SAFETY: the body buffer is ready and has `bytes` bytes.
        unsafe { outputs.write(*offset, area.body(me, through, round, bytes), bytes) };
        *offset += bytes;
        channel.round += 1;
        fault_points::reached(FaultPoint::BodyRead);
        area.pair_word(from, me, DRAINED).store(channel.round, Release);
        if *offset == total {
            let (op, _) = channel.bodies.pop_front().expect("the front");
            self.channels.give_back(from);
            self.end(op, Ok(()), ended);
        }
        true
    }

    /// The operations that cannot end before `peer` makes further progress. A receive from `ANY_RANK` needs `peer` if
    /// no other rank can still send. `gone` selects the ranks that cannot send any more.
    pub fn blocked_by(&self, area: &Area, peer: usize, gone: impl Fn(usize) -> bool) -> impl Iterator<Item = &Arc<Op>> {
        let (out, incoming) = (&self.out[peer], &self.incoming[peer]);
        let no_room = self.ring_is_full(area, peer);
        let not_read = out.bodies.front().is_some_and(|(op, _, moved)| {
            let last = last_round(area, out.round, op, *moved);
            !protocol::may_fill_body(last, area.pair_word(area.me, peer, DRAINED).load(Acquire))
        });
        let not_ready = incoming.bodies.front().is_some_and(|(op, moved)| {
            area.pair_word(peer, area.me, READY).load(Acquire) <= last_round(area, incoming.round, op, *moved)
        });
        let only_peer = (0..area.ranks).all(|q| q == area.me || q == peer || gone(q));
        let queued = out.queue.iter().take(usize::from(no_room));
        let waiting = out.waiting.iter().map(|(_, op)| op);
        let sent = out.bodies.iter().take(usize::from(not_read)).map(|(op, ..)| op);
        let received = incoming.bodies.iter().take(usize::from(not_ready)).map(|(op, _)| op);
        let posted = self.posted.iter().filter(move |op| match op.request.root {
            ANY_RANK => only_peer,
            root => root as usize == peer,
        });
        queued.chain(waiting).chain(sent).chain(received).chain(posted)
    }

    /// Whether the ring buffer to `to` has no envelope that may be overwritten. Does not read the peer's counter before
    /// this rank has sent as many messages as the ring holds, because the memory may not be populated before the first
    /// message.
    fn ring_is_full(&self, area: &Area, to: usize) -> bool {
        let (sent, most) = (self.out[to].sent, area.layout.envelopes);
        sent >= most && sent.wrapping_sub(area.pair_word(area.me, to, CONSUMED).load(Acquire)) >= most
    }

    /// Removes and returns all operations that have not ended.
    pub fn take_pending(&mut self) -> Vec<Arc<Op>> {
        let mut all: Vec<Arc<Op>> = self.posted.drain(..).collect();
        for channel in &mut self.out {
            all.extend(channel.queue.drain(..));
            all.extend(channel.waiting.drain(..).map(|(_, op)| op));
            all.extend(channel.bodies.drain(..).map(|(op, ..)| op));
        }
        for channel in &mut self.incoming {
            all.extend(channel.bodies.drain(..).map(|(op, _)| op));
        }
        self.active = 0;
        all
    }

    /// Pending operations, in no particular order.
    pub fn pending(&self) -> impl Iterator<Item = &Arc<Op>> {
        let out = self.out.iter().flat_map(|channel| {
            channel
                .queue
                .iter()
                .chain(channel.waiting.iter().map(|(_, op)| op))
                .chain(channel.bodies.iter().map(|(op, ..)| op))
        });
        let incoming = self.incoming.iter().flat_map(|channel| channel.bodies.iter().map(|(op, _)| op));
        self.posted.iter().chain(out).chain(incoming)
    }
}

/// The last round of a message, if `moved` of its bytes were moved and its next round is `next`.
fn last_round(area: &Area, next: u64, op: &Op, moved: usize) -> u64 {
    let left = op.payload() as usize - moved;
    next + (left.div_ceil(area.layout.body_bytes) as u64).max(1) - 1
}
