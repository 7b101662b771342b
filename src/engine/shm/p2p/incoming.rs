//! One rank's messages from one peer, from the envelope to the end of the receive.

#![allow(unsafe_code)] // copies messages into the caller's memory

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;

use super::channels::Channels;
use super::shares::Shares;
use super::{Answer, CONSUMED, DRAINED, EAGER, GRANTS, Grant, REACHABLE, READY, SENT, TAKEN, end, last_round};
use crate::engine::Ended;
use crate::engine::pieces::{Pieces, transfer};
use crate::engine::shm::mapped::{Arenas, impossible, withdraw};
use crate::engine::shm::memory::area::Area;
use crate::engine::shm::memory::arena::Lease;
use crate::engine::shm::memory::layout::Part;
use crate::engine::shm::protocol;
use crate::error::{Error, Result};
use crate::op::Op;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::select::Choice;
use crate::types::Span;

#[derive(Default)]
pub struct Incoming {
    consumed: u64,
    grants: u64,
    round: u64,
    /// Messages that arrived and are not matched.
    unexpected: VecDeque<Message>,
    /// Answers that wait for room in the ring buffer of grants, or for a channel. The channel is not set yet.
    answers: VecDeque<Grant>,
    /// Receives whose message was accepted. Data arrives for the first one.
    bodies: VecDeque<Body>,
}

/// A message whose envelope this rank has read.
pub struct Message {
    /// Position in the order in which messages from all sources arrived at this rank.
    stamp: u64,
    pub tag: u32,
    pub bytes: usize,
    number: u64,
    /// Whether the tensor is in the sender's arena.
    reachable: bool,
    /// The data of an eager message. None for a larger one.
    data: Option<Vec<u8>>,
}

/// A receive whose message was accepted.
struct Body {
    op: Arc<Op>,
    progress: Progress,
}

enum Progress {
    /// The next round says where the data is.
    Offered,
    InPlace(InPlace),
    /// The number of bytes that were received through the channel.
    Staged(usize),
}

/// A message that both ranks may copy (`shares`).
struct InPlace {
    /// The address in this process of the sender's tensor.
    at: usize,
    /// Bytes that this rank has copied.
    copied: usize,
    /// The output, into which the sender copies too. None if this rank cannot lend the output.
    output: Option<Lease>,
    /// Whether no range is left to claim.
    all_claimed: bool,
}

/// What a step of a message in place did.
enum InPlaceStep {
    Copied,
    /// The sender must make progress first.
    Waits,
    Done,
}

impl InPlace {
    /// Finds the tensor, which the sender offers at `offset` of its arena. Lends the output to the sender if peers can
    /// reach the output. Fails if the tensor is not within the arena.
    fn begin(shares: Shares<'_>, arenas: &Arenas, op: &Op, (from, offset): (usize, usize)) -> Result<InPlace> {
        let total = Pieces(op.request.outputs()).bytes();
        let at = arenas.at(from, offset, total).ok_or_else(|| impossible(op, from))?;
        op.record_choice(Choice::MAPPED.code());
        let output = arenas.lend_output(shares.area, op);
        if let Some(lease) = &output {
            shares.set_home(lease.offset);
        }
        Ok(InPlace { at, copied: 0, output, all_claimed: false })
    }

    /// Copies the next share of the tensor, or checks whether all are copied.
    fn step(&mut self, shares: Shares<'_>, from: usize, outputs: Pieces) -> InPlaceStep {
        let total = outputs.bytes();
        if !self.all_claimed
            && let Some(range) = shares.claim(total)
        {
            let source = [Span { addr: self.at, bytes: total }];
            // SAFETY: the range is in the sender's arena, which `arenas` keeps mapped, and nobody else copies it. If
            // the sender's program changes the tensor meanwhile, its send has failed, which is checked below. The
            // outputs belong to the caller until the receive ends.
            unsafe { transfer(Pieces(&source), range.start, outputs, range.start, range.len()) };
            self.copied += range.len();
            return InPlaceStep::Copied;
        }
        self.all_claimed = true;
        // If the check fails, the group finds the reason.
        if self.needs_sender(shares, total) || !protocol::was_whole(&Sender { area: shares.area, rank: from }) {
            return InPlaceStep::Waits;
        }
        InPlaceStep::Done
    }

    /// Whether this rank has copied all ranges that it claimed, and the sender still has to copy some.
    fn needs_sender(&self, shares: Shares<'_>, total: usize) -> bool {
        self.all_claimed && self.copied.saturating_add(shares.sent()) < total
    }
}

impl Message {
    pub fn is_eager(&self) -> bool {
        self.data.is_some()
    }

    /// Copies an eager message into the outputs of `op`, which have the size of the message.
    pub fn write_to(&self, op: &Op) {
        let Some(data) = &self.data else { return };
        assert_eq!(Pieces(op.request.outputs()).bytes(), data.len(), "sagellm: the size was compared");
        // SAFETY: the outputs belong to the caller until the receive ends, and have the size of the message.
        unsafe { Pieces(op.request.outputs()).write(0, data.as_ptr(), data.len()) };
    }
}

impl Incoming {
    pub fn is_idle(&self) -> bool {
        self.answers.is_empty() && self.bodies.is_empty()
    }

    /// Position and stamp of the first unmatched message with this tag.
    pub fn first_with(&self, tag: u32) -> Option<(usize, u64)> {
        let at = self.unexpected.iter().position(|message| message.tag == tag)?;
        Some((at, self.unexpected[at].stamp))
    }

    pub fn take_unexpected(&mut self, at: usize) -> Message {
        self.unexpected.remove(at).expect("the caller found it here")
    }

    pub fn keep(&mut self, message: Message) {
        self.unexpected.push_back(message);
    }

    /// How many messages the peer has sent. Fails if the ring buffer cannot hold so many.
    pub fn count_sent(&self, area: &Area, from: usize) -> Result<u64> {
        let me = area.me;
        let sent = area.pair_word(from, me, SENT).load(Acquire);
        let (before, most) = (self.consumed, area.layout.envelopes);
        if sent.wrapping_sub(before) > most {
            return Err(Error::system(format!(
                "sagellm: rank {from} says that it sent {sent} messages to rank {me}, which took {before} of at most {most} \
                 in flight: the group's shared memory was overwritten"
            )));
        }
        Ok(sent)
    }

    /// Reads the next envelope, unless all of the `sent` envelopes have been read.
    pub fn take_envelope(&mut self, area: &Area, from: usize, sent: u64, stamp: u64) -> Option<Message> {
        let (me, number) = (area.me, self.consumed);
        if number >= sent {
            return None;
        }
        fault_points::reached(FaultPoint::EnvelopeSeen);
        let word = |i| area.envelope_word(from, me, number, i).load(Relaxed);
        let (first, bytes) = (word(0), word(1) as usize);
        let reachable = first & REACHABLE != 0;
        let mut message = Message { stamp, tag: first as u32, bytes, number, reachable, data: None };
        if first & EAGER != 0 {
            let bytes = bytes.min(area.layout.eager_bytes);
            message.bytes = bytes;
            let mut data = vec![0u8; bytes];
            // SAFETY: the envelope has `bytes` bytes, which was bounded above, and SENT was acquired.
            unsafe { crate::reduce::copy(data.as_mut_ptr(), area.envelope_data(from, me, number, bytes), bytes) };
            message.data = Some(data);
        }
        self.consumed += 1;
        fault_points::reached(FaultPoint::EnvelopeRead);
        area.pair_word(from, me, CONSUMED).store(number + 1, Release);
        Some(message)
    }

    /// Matches a non-eager message with its receive, which has the same size.
    pub fn accept(&mut self, area: &Area, arenas: &mut Arenas, from: usize, op: Arc<Op>, message: &Message) {
        let in_place = message.reachable && arenas.reaches(area, from);
        let answer = Answer::Channel { channel: 0, in_place };
        self.answers.push_back(Grant { number: message.number, answer });
        let progress = if in_place { Progress::Offered } else { Progress::Staged(0) };
        self.bodies.push_back(Body { op, progress });
    }

    /// Refuses a message that is not eager.
    pub fn reject(&mut self, message: &Message) {
        self.answers.push_back(Grant { number: message.number, answer: Answer::Rejected });
    }

    pub fn advance(
        &mut self,
        area: &Area,
        arenas: &Arenas,
        from: usize,
        channels: &mut Channels,
        ended: &mut Ended,
    ) -> Result<bool> {
        let granted = self.give_grants(area, from, channels)?;
        Ok(self.receive_body(area, arenas, from, channels, ended)? || granted)
    }

    pub fn give_grants(&mut self, area: &Area, from: usize, channels: &mut Channels) -> Result<bool> {
        let me = area.me;
        let mut moved = false;
        while let Some(mut grant) = self.answers.front().copied() {
            if self.grants.wrapping_sub(area.pair_word(from, me, TAKEN).load(Acquire)) >= area.layout.envelopes {
                break;
            }
            if let Answer::Channel { channel, .. } = &mut grant.answer {
                let Some(lent) = channels.lend(from) else { break }; // `poll` asks again
                area.make_present([Part::Channel(lent)])?;
                *channel = lent;
            }
            area.grant(from, me, self.grants).store(grant.encode(), Relaxed);
            self.answers.pop_front();
            self.grants += 1;
            fault_points::reached(FaultPoint::GrantWritten);
            area.pair_word(from, me, GRANTS).store(self.grants, Release);
            moved = true;
        }
        Ok(moved)
    }

    /// Advances the first accepted message by one step. Fails if the offered tensor is not within the sender's arena.
    fn receive_body(
        &mut self,
        area: &Area,
        arenas: &Arenas,
        from: usize,
        channels: &mut Channels,
        ended: &mut Ended,
    ) -> Result<bool> {
        let Some(Body { op, progress }) = self.bodies.front_mut() else { return Ok(false) };
        let Some(channel) = channels.of(from) else { return Ok(false) };
        let shares = Shares { area, from, to: area.me };
        let outputs = Pieces(op.request.outputs());
        if !matches!(progress, Progress::InPlace(_)) && area.pair_word(from, area.me, READY).load(Acquire) <= self.round
        {
            return Ok(false);
        }
        fault_points::reached(FaultPoint::BodySeen);
        let done = match progress {
            Progress::Offered => match shares.place() {
                None => {
                    *progress = Progress::Staged(0);
                    false
                }
                Some(offset) => {
                    *progress = Progress::InPlace(InPlace::begin(shares, arenas, op, (from, offset))?);
                    return Ok(true);
                }
            },
            Progress::InPlace(message) => match message.step(shares, from, outputs) {
                InPlaceStep::Copied => return Ok(true),
                InPlaceStep::Waits => return Ok(false),
                InPlaceStep::Done => true,
            },
            Progress::Staged(moved) => {
                *moved += receive_part(area, (channel, self.round), outputs, *moved);
                *moved == outputs.bytes()
            }
        };
        self.round += 1;
        fault_points::reached(FaultPoint::BodyRead);
        area.pair_word(from, area.me, DRAINED).store(self.round, Release);
        if done {
            let Body { op, .. } = self.bodies.pop_front().expect("the front");
            channels.give_back(from);
            end(op, Ok(()), ended);
        }
        Ok(true)
    }

    /// The receives that cannot end before the sender makes further progress.
    pub fn blocked(&self, area: &Area, from: usize) -> impl Iterator<Item = &Arc<Op>> {
        let not_ready = self.bodies.front().is_some_and(|body| {
            let ready = || area.pair_word(from, area.me, READY).load(Acquire);
            match body.progress {
                Progress::Offered => ready() <= self.round,
                Progress::InPlace(ref message) => {
                    let shares = Shares { area, from, to: area.me };
                    // A sender that has left may have changed the tensor.
                    area.left(from) || message.needs_sender(shares, Pieces(body.op.request.outputs()).bytes())
                }
                Progress::Staged(moved) => ready() <= last_round(area, self.round, &body.op, moved),
            }
        });
        self.bodies.iter().take(usize::from(not_ready)).map(|body| &body.op)
    }

    /// Whether a sender may be writing into an output of this rank.
    pub fn exposes_some(&self) -> bool {
        self.bodies.iter().any(|body| matches!(&body.progress, Progress::InPlace(message) if message.output.is_some()))
    }

    /// Removes and returns all receives that have not ended. If a sender may write into an output, this rank must have
    /// stored the fault or its departure before.
    pub fn take_pending(&mut self) -> Vec<Arc<Op>> {
        let remove = |body: Body| {
            if let Progress::InPlace(InPlace { output: Some(lease), .. }) = &body.progress {
                withdraw(lease);
            }
            body.op
        };
        self.bodies.drain(..).map(remove).collect()
    }

    pub fn pending(&self) -> impl Iterator<Item = &Arc<Op>> {
        self.bodies.iter().map(|body| &body.op)
    }
}

/// Copies the part of a message that the channel contains to offset `moved` of the outputs. Returns the part's size.
fn receive_part(area: &Area, (channel, round): (usize, u64), outputs: Pieces, moved: usize) -> usize {
    let bytes = area.layout.body_bytes.min(outputs.bytes() - moved);
    // SAFETY: the body buffer is ready and has `bytes` bytes. The outputs belong to the caller until the receive ends.
    unsafe { outputs.write(moved, area.body(area.me, channel, round, bytes), bytes) };
    bytes
}

/// The sender of a message that is read in place.
struct Sender<'a> {
    area: &'a Area,
    rank: usize,
}

impl protocol::Ends for Sender<'_> {
    fn is_over(&self) -> bool {
        self.area.is_poisoned() || self.area.left(self.rank)
    }
    fn fence(&self) {
        fence(Acquire);
    }
}
