//! One rank's messages to one peer, from the envelope to the end of the send.

#![allow(unsafe_code)] // copies the caller's memory into the segment

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::shares::Shares;
use super::{Answer, CONSUMED, DRAINED, EAGER, GRANTS, Grant, REACHABLE, READY, SENT, TAKEN, end, last_round};
use crate::engine::Ended;
use crate::engine::pieces::{Pieces, transfer};
use crate::engine::shm::mapped::{Arenas, impossible};
use crate::engine::shm::memory::area::Area;
use crate::engine::shm::memory::arena::Lease;
use crate::engine::shm::memory::layout::Part;
use crate::engine::shm::protocol;
use crate::error::{Error, Result};
use crate::op::Op;
use crate::op::words::not_taken;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::select::Choice;
use crate::types::Span;

#[derive(Default)]
pub struct Outgoing {
    sent: u64,
    taken: u64,
    round: u64,
    /// Sends that are not in the ring buffer yet.
    queue: VecDeque<Arc<Op>>,
    /// Sends that are in the ring buffer and wait for a grant, each with its envelope number.
    waiting: VecDeque<(u64, Arc<Op>)>,
    /// Sends that the receiver has granted. Only the first one is being transferred.
    bodies: VecDeque<Body>,
}

/// A granted message.
struct Body {
    op: Arc<Op>,
    channel: usize,
    progress: Progress,
}

enum Progress {
    /// The receiver has mapped this rank's arena. The next round tells the receiver the tensor's offset in the arena,
    /// or that the data is staged.
    Offered,
    /// The ranks copy the tensor until the receiver has drained round `round`. The lease keeps other groups from making
    /// the tensor's pages private.
    Lent { _lease: Lease, round: u64, share: Share },
    /// The number of bytes that were staged.
    Staged(usize),
}

/// This rank's share of the copy of a lent tensor (`shares`).
enum Share {
    /// It is not known yet whether this rank can write into the receiver's output.
    Unknown,
    /// The output begins at the address `to`; this rank has copied `copied` bytes.
    Begun { to: usize, copied: usize },
    /// Nothing is left to copy for this rank.
    Over,
}

impl Outgoing {
    pub fn add(&mut self, send: Arc<Op>) {
        self.queue.push_back(send);
    }

    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.waiting.is_empty() && self.bodies.is_empty()
    }

    pub fn advance(&mut self, area: &Area, arenas: &Arenas, to: usize, ended: &mut Ended) -> Result<bool> {
        let mut moved = self.push_envelopes(area, arenas, to, ended)?;
        moved |= self.take_grants(area, to, ended)?;
        moved |= self.fill_body(area, arenas, to, ended);
        Ok(moved)
    }

    /// Copies a range of the message that is being transferred, if its tensor is lent and this rank can reach the
    /// receiver's output (`shares`). Returns false if nothing was copied. Fails if the receiver's output is not within
    /// its arena.
    pub fn share(&mut self, area: &Area, arenas: &mut Arenas, to: usize) -> Result<bool> {
        match self.bodies.front_mut() {
            Some(Body { op, progress: Progress::Lent { share, .. }, .. }) => {
                share.advance(Shares { area, from: area.me, to }, arenas, op)
            }
            _ => Ok(false),
        }
    }

    fn push_envelopes(&mut self, area: &Area, arenas: &Arenas, to: usize, ended: &mut Ended) -> Result<bool> {
        let me = area.me;
        let mut moved = false;
        if !self.queue.is_empty() {
            area.make_present([Part::Envelopes])?;
        }
        while let Some(op) = self.queue.front().cloned() {
            if self.ring_is_full(area, to) {
                break;
            }
            let number = self.sent;
            let inputs = Pieces(op.sent());
            let bytes = inputs.bytes();
            let eager = bytes <= area.layout.eager_bytes;
            let flags = match eager {
                true => EAGER,
                false if arenas.announce(area, &op) => REACHABLE,
                false => 0,
            };
            let word = |i| area.envelope_word(me, to, number, i);
            word(0).store(u64::from(op.request.tag) | flags, Relaxed);
            word(1).store(bytes as u64, Relaxed);
            if eager && bytes > 0 {
                // SAFETY: the envelope has room for `bytes`, and CONSUMED says that the receiver no longer reads it.
                unsafe { inputs.read(0, area.envelope_data(me, to, number, bytes), bytes) };
            }
            self.queue.pop_front();
            self.sent += 1;
            fault_points::reached(FaultPoint::EnvelopeWritten);
            area.pair_word(me, to, SENT).store(self.sent, Release);
            fault_points::reached(FaultPoint::EnvelopeSent);
            if number == 0 || area.layout.has_mail() {
                protocol::post(area, to, me);
            }
            if eager {
                end(op, Ok(()), ended);
            } else {
                self.waiting.push_back((number, op));
            }
            moved = true;
        }
        Ok(moved)
    }

    fn take_grants(&mut self, area: &Area, to: usize, ended: &mut Ended) -> Result<bool> {
        let me = area.me;
        let mut moved = false;
        while !self.waiting.is_empty() {
            let grants = area.pair_word(me, to, GRANTS).load(Acquire);
            if grants == self.taken {
                break;
            }
            let most = area.layout.envelopes;
            if grants.wrapping_sub(self.taken) > most {
                return Err(Error::system(format!(
                    "sagellm: rank {to} says that it granted {grants} messages of rank {me}, which took {} of at most {most} \
                     in flight: the group's shared memory was overwritten",
                    self.taken
                )));
            }
            fault_points::reached(FaultPoint::GrantSeen);
            let Grant { number, answer } = Grant::decode(area.grant(me, to, self.taken).load(Relaxed));
            self.taken += 1;
            area.pair_word(me, to, TAKEN).store(self.taken, Release);
            moved = true;
            let Some(at) = self.waiting.iter().position(|(waiting, _)| *waiting == number) else {
                continue; // this rank sent no such message: the peer broke the protocol
            };
            let (_, op) = self.waiting.remove(at).expect("just found");
            match answer {
                Answer::Rejected => {
                    let error = not_taken(me, to, op.request.tag, Pieces(op.sent()).bytes());
                    end(op, Err(error), ended);
                }
                Answer::Channel { channel, .. } if channel >= area.layout.channels => {
                    self.waiting.insert(at, (number, op));
                    return Err(Error::system(format!(
                        "sagellm: rank {to} granted rank {me} its channel {channel} of {}: the group's shared memory was \
                         overwritten",
                        area.layout.channels
                    )));
                }
                Answer::Channel { channel, in_place } => {
                    let progress = if in_place { Progress::Offered } else { Progress::Staged(0) };
                    self.bodies.push_back(Body { op, channel, progress });
                }
            }
        }
        Ok(moved)
    }

    /// Advances the first granted message by one step.
    fn fill_body(&mut self, area: &Area, arenas: &Arenas, to: usize, ended: &mut Ended) -> bool {
        let Some(body) = self.bodies.front_mut() else { return false };
        let drained = area.pair_word(area.me, to, DRAINED).load(Acquire);
        if let Progress::Lent { round, .. } = body.progress {
            if drained > round {
                self.end_first(ended);
            }
            return drained > round;
        }
        if !protocol::may_fill_body(self.round, drained) {
            return false;
        }
        match &mut body.progress {
            Progress::Staged(moved) => {
                let inputs = Pieces(body.op.sent());
                let bytes = area.layout.body_bytes.min(inputs.bytes() - *moved);
                // SAFETY: the body buffer has room for `bytes`. This rank was granted the channel, and DRAINED says
                // that the receiver no longer reads the buffer.
                unsafe { inputs.read(*moved, area.body(to, body.channel, self.round, bytes), bytes) };
                *moved += bytes;
            }
            progress => {
                let lease = arenas.lend(&body.op);
                Shares { area, from: area.me, to }.open(lease.as_ref().map(|lease| lease.offset));
                *progress = match lease {
                    Some(lease) => {
                        body.op.record_choice(Choice::MAPPED.code());
                        Progress::Lent { _lease: lease, round: self.round, share: Share::Unknown }
                    }
                    None => Progress::Staged(0),
                };
            }
        }
        self.round += 1;
        fault_points::reached(FaultPoint::BodyFilled);
        area.pair_word(area.me, to, READY).store(self.round, Release);
        if matches!(body.progress, Progress::Staged(moved) if moved == Pieces(body.op.sent()).bytes()) {
            self.end_first(ended);
        }
        true
    }

    fn end_first(&mut self, ended: &mut Ended) {
        let body = self.bodies.pop_front().expect("a message moves");
        end(body.op, Ok(()), ended);
    }

    /// The sends that cannot end before the receiver makes further progress.
    pub fn blocked(&self, area: &Area, to: usize) -> impl Iterator<Item = &Arc<Op>> {
        let no_room = self.ring_is_full(area, to);
        let not_read = self.bodies.front().is_some_and(|body| {
            let drained = area.pair_word(area.me, to, DRAINED).load(Acquire);
            match body.progress {
                Progress::Offered => true, // whether or not the round can be filled, the receiver must answer it
                Progress::Lent { round, .. } => drained <= round,
                Progress::Staged(moved) => {
                    !protocol::may_fill_body(last_round(area, self.round, &body.op, moved), drained)
                }
            }
        });
        let queued = self.queue.iter().take(usize::from(no_room));
        let waiting = self.waiting.iter().map(|(_, op)| op);
        let sent = self.bodies.iter().take(usize::from(not_read)).map(|body| &body.op);
        queued.chain(waiting).chain(sent)
    }

    pub fn is_lent(&self, send: &Op) -> bool {
        self.bodies.iter().any(|body| matches!(body.progress, Progress::Lent { .. }) && std::ptr::eq(&*body.op, send))
    }

    pub fn lends_some(&self) -> bool {
        self.bodies.iter().any(|body| matches!(body.progress, Progress::Lent { .. }))
    }

    pub fn take_pending(&mut self) -> Vec<Arc<Op>> {
        let mut all: Vec<Arc<Op>> = self.queue.drain(..).collect();
        all.extend(self.waiting.drain(..).map(|(_, op)| op));
        all.extend(self.bodies.drain(..).map(|body| body.op));
        all
    }

    pub fn pending(&self) -> impl Iterator<Item = &Arc<Op>> {
        let waiting = self.waiting.iter().map(|(_, op)| op);
        self.queue.iter().chain(waiting).chain(self.bodies.iter().map(|body| &body.op))
    }

    /// Whether the ring buffer has no envelope that may be overwritten. Does not read the peer's counter before this
    /// rank has sent as many messages as the ring holds, because the memory is possibly not populated before the first
    /// message.
    fn ring_is_full(&self, area: &Area, to: usize) -> bool {
        let (sent, most) = (self.sent, area.layout.envelopes);
        sent >= most && sent.wrapping_sub(area.pair_word(area.me, to, CONSUMED).load(Acquire)) >= most
    }
}

impl Share {
    /// Claims the next range and copies it into the receiver's output. Returns false if nothing was copied.
    fn advance(&mut self, shares: Shares<'_>, arenas: &mut Arenas, op: &Op) -> Result<bool> {
        let inputs = Pieces(op.sent());
        let total = inputs.bytes();
        if let Share::Unknown = self {
            fault_points::reached(FaultPoint::HomeSought);
            let Some(offset) = shares.home() else { return Ok(false) };
            let output = arenas.output(shares.area, shares.to, offset, total);
            *self = match output {
                Some(to) => Share::Begun { to, copied: 0 },
                None if arenas.reaches(shares.area, shares.to) => return Err(impossible(op, shares.to)),
                None => Share::Over, // the receiver copies everything
            };
        }
        let Share::Begun { to, copied } = self else { return Ok(false) };
        let Some(range) = shares.claim(total) else {
            *self = Share::Over;
            return Ok(false);
        };
        let output = [Span { addr: *to, bytes: total }];
        // SAFETY: the output is in the receiver's arena, which `arenas` keeps mapped, and nobody else copies this
        // range. The receiver's program does not use the output before its receive has ended, and if the receive fails,
        // the output is made private first (`Incoming::take_pending`).
        unsafe { transfer(inputs, range.start, Pieces(&output), range.start, range.len()) };
        *copied += range.len();
        shares.set_sent(*copied);
        Ok(true)
    }
}
