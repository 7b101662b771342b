//! Sends messages between hosts: frames over any [`Link`], and the messages of one step of a schedule. Each lane has:
//!
//! - *Frames* (`frames`). A frame is a short message: a header and the data, if it fits. Receives for the next frames
//!   of a peer are always posted ahead, so a frame takes one latency. In gloo, a sender waits for a ready message of
//!   the receiver, so a receive that is posted late costs a further round trip.
//! - Data messages, for data that does not fit into a frame. Their tag contains a hash of the batch, so that the tags
//!   of two ranks that disagree about an operation do not match. Such ranks find the mismatch by their frame headers.
//!   The data is sent directly from its memory and received directly into its memory (`Outgoing`, `Incoming`). If the
//!   receiver combines the data, it arrives in segments, so that one segment is combined in the cache while the next is
//!   in flight.

#![allow(unsafe_code)] // sends from and receives into memory of operations

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::buffers::Buffers;
use super::frames::{DIFFERED_BEFORE, FRAME, FrameHeader, HEADER, INLINE, Step, Word, frame, refusal, unframe};
use super::link::{Broken, Link, Transfer};
use super::names::Names;
use super::peer::Peer;
use super::step::{Arrived, Incoming, Outgoing, Take, segments};
use super::vector::{copy_in, copy_out, cut};
use crate::error::{Error, GO_ON, Result, laid_out};
use crate::os::clock;
use crate::types::Span;

/// Data of at least this size is sent from its own memory. Shorter data is copied first, so that the sender does not
/// have to wait for the receiver.
const IN_PLACE: usize = 192 << 10;

/// The receives of one peer's data. Fields drop in the order in which they are declared: the transfers must be given up
/// before their memory is freed.
struct Body {
    /// The segments of the message that are not yet used. Empty from the start if the data is in the frame.
    parts: VecDeque<(Range<usize>, Box<dyn Transfer>)>,
    peer: usize,
    bytes: usize,
    into: Option<Vec<Span>>,
    /// Holds the data until it is combined.
    buffer: Vec<u8>,
}

/// The posted receives of a step. Dropping this gives up the receives.
#[derive(Default)]
pub struct Posted(Vec<Body>);

/// A step whose sends have begun. Dropping this gives up its transfers.
pub struct Begun {
    header: FrameHeader,
    deadline: u64,
    receives: Posted,
    /// The sends from memory of the operation, each with its peer.
    sends: Vec<(usize, Box<dyn Transfer>)>,
}

/// The messages of one step of a schedule.
pub struct Exchange<'a> {
    pub header: FrameHeader,
    pub deadline: u64,
    /// The size of the segments of a message that the receiver combines. Equal on both sides.
    pub segment: usize,
    pub sends: &'a [Outgoing],
    pub receives: Posted,
    /// The receives of the next step that can be posted now, so that their data need not wait for a request.
    pub next: Vec<Incoming>,
}

/// The messages of one lane of a group. They never match those of the other lane.
pub struct Transport {
    link: Arc<dyn Link>,
    pub names: Arc<Names>,
    /// The first operation of the current batch, for error texts.
    at: Step,
    lane: u32,
    peers: HashMap<usize, Peer>,
    spare: Buffers,
    /// The ranks whose headers of this batch have arrived, each with its word (`FrameHeader::factor`). None if results
    /// are not compared.
    pub heard: Option<Vec<(usize, u64)>>,
    /// The rank for which this lane waits now, for error texts.
    waiting_for: Arc<AtomicUsize>,
}

/// The value of `waiting_for` while the lane waits for no rank.
pub const NOBODY: usize = usize::MAX;
/// A lane's wait ends by itself this long after its operation's deadline. Usually the check of deadlines has ended the
/// wait before that, with a text that says what the other ranks do. On a very busy machine the check may be late.
pub const AFTER_DEADLINE: Duration = Duration::from_secs(2);

impl Transport {
    pub fn new(link: Arc<dyn Link>, names: Arc<Names>, lane: usize, waiting_for: Arc<AtomicUsize>) -> Transport {
        let (lane, at) = (lane as u32, Step::default());
        Transport { link, names, at, lane, peers: HashMap::new(), spare: Buffers::default(), heard: None, waiting_for }
    }

    pub fn names(&self) -> &Arc<Names> {
        &self.names
    }

    fn peer(&mut self, peer: usize) -> &mut Peer {
        self.peers.entry(peer).or_default()
    }

    fn frame_tag(&self) -> u32 {
        self.lane
    }

    /// Posts receives for the next frames of `peer`. Called as soon as a message of `peer` is expected. A broken
    /// connection is an error only if no posted receive is left, because frames that have arrived are still read.
    pub fn expect(&mut self, peer: usize) -> Result<()> {
        while self.peer(peer).needs_receive() {
            let buffer = self.spare.take(FRAME);
            match self.link.receive(peer, self.frame_tag(), buffer, FRAME) {
                Ok(transfer) => self.peer(peer).expect(transfer),
                Err(error) if self.peer(peer).expects_nothing() => {
                    return Err(self.refused(peer, error));
                }
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    /// Called with the error of a send to `peer`. Returns the fault or goodbye that `peer` sent before, or else that
    /// error.
    fn last_word(&mut self, peer: usize, own: &FrameHeader, error: Error) -> Error {
        while let Some(transfer) = self.peers.get_mut(&peer).and_then(Peer::next_frame) {
            let Ok(frame) = self.finish(peer, transfer, clock::now()) else { return error };
            if let Some(said) = refusal(&self.names, peer, own, &frame) {
                return said;
            }
            if unframe(&frame).0 != Word::Question as u64 {
                return error;
            }
        }
        error
    }

    fn start(&mut self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<()> {
        let sent = self.link.send(peer, tag, buffer, bytes);
        let transfer = sent.map_err(|error| self.refused(peer, error))?;
        self.peer(peer).add_send(transfer);
        Ok(())
    }

    /// Waits until at most `most` sends to `peer` are in flight.
    fn settle(&mut self, peer: usize, most: usize, deadline: u64) -> Result<()> {
        while let Some(transfer) = self.peer(peer).oldest_send(most) {
            let buffer = self.finish(peer, transfer, deadline)?;
            self.spare.give_back(buffer);
        }
        Ok(())
    }

    fn finish(&mut self, peer: usize, transfer: Box<dyn Transfer>, deadline: u64) -> Result<Vec<u8>> {
        self.waiting_for.store(peer, Ordering::Relaxed);
        let left = Duration::from_nanos(deadline.saturating_sub(clock::now()));
        let result = transfer.wait(left + AFTER_DEADLINE);
        self.waiting_for.store(NOBODY, Ordering::Relaxed);
        result.map_err(|broken| self.lost(peer, &broken))
    }

    /// Returns the error for a failed transfer to or from `peer`. It includes the link's text.
    fn lost(&self, peer: usize, Broken { is_late, words }: &Broken) -> Error {
        if *is_late {
            let first = words.lines().next().unwrap_or_default();
            let head = format!("rank {} Timed out waiting for rank {peer} on another host: {first}", self.names.me);
            return Error::timeout(laid_out(&head, &[], GO_ON));
        }
        self.names.lost(peer, &self.at.during(), words)
    }

    /// Returns this rank's error for the link's refusal to send to `peer` or to receive from it.
    fn refused(&self, peer: usize, error: Error) -> Error {
        match error {
            error if error.rank().is_some() => self.lost(peer, &error.text().into()),
            other => other,
        }
    }

    /// Posts receives and starts sends. The caller may do other work while the data is in flight, and must then call
    /// `complete`.
    ///
    /// # Safety
    /// As for `step`, until the result was dropped or passed to a `complete` that has returned.
    pub unsafe fn begin(
        &mut self,
        header: FrameHeader,
        deadline: u64,
        sends: &[Outgoing],
        receives: Vec<Incoming>,
        segment: usize,
    ) -> Result<Begun> {
        // SAFETY: the caller vouches for the memory.
        unsafe {
            let receives = self.post(&header, receives, segment)?;
            self.start_sends(header, deadline, sends, receives, segment)
        }
    }

    /// Posts the receives of a step.
    ///
    /// # Safety
    /// All pieces must be valid, and unused by others, until the result was dropped or passed to a `step` that has
    /// returned.
    pub unsafe fn post(&mut self, header: &FrameHeader, receives: Vec<Incoming>, segment: usize) -> Result<Posted> {
        let mut bodies = Vec::with_capacity(receives.len());
        for incoming in receives {
            self.expect(incoming.peer)?;
            // SAFETY: the caller vouches for the memory.
            bodies.push(unsafe { self.expect_data(incoming, header, segment) }?);
        }
        Ok(Posted(bodies))
    }

    /// Runs one step: starts a send to each peer in `sends`, posts the receives of the next step, then completes the
    /// posted receives of this step. If a receive has no `into`, its data is passed to `take` in pieces of about
    /// `segment` bytes. Returns the smallest `issued` of all headers, and the receives of the next step. After this
    /// returns, the memory of this step is no longer used. After an error, the memory of the next step is not used
    /// either.
    ///
    /// # Safety
    /// All pieces must be valid during the call, and those of `next` for as long as `post` says. Nothing else may write
    /// the pieces of a send with `stays`, or use the pieces of the receives. These sets must not overlap, except that a
    /// peer may return in `next` what it got in this step.
    pub unsafe fn step(&mut self, step: Exchange, take: Take) -> Result<(u64, Posted)> {
        let Exchange { header, deadline, segment, sends, receives, next } = step;
        // SAFETY: the caller vouches for the memory.
        let (begun, next) = unsafe {
            let begun = self.start_sends(header, deadline, sends, receives, segment)?;
            (begun, self.post(&header, next, segment)?)
        };
        Ok((self.complete(begun, take)?, next))
    }

    /// Starts a send to each peer in `sends`.
    ///
    /// # Safety
    /// As for `begin`.
    unsafe fn start_sends(
        &mut self,
        header: FrameHeader,
        deadline: u64,
        sends: &[Outgoing],
        receives: Posted,
        segment: usize,
    ) -> Result<Begun> {
        const ON_THEIR_WAY: usize = 4;
        self.at = header.step();
        let mut begun = Begun { header, deadline, receives, sends: Vec::new() };
        for outgoing in sends {
            let peer = outgoing.peer;
            self.expect(peer)?; // the peer may send a fault or a goodbye
            if let Some(error) = self.questions(peer, &header) {
                return Err(error);
            }
            let settled = self.settle(peer, ON_THEIR_WAY, deadline);
            // SAFETY: the caller vouches for the memory until `begun` was dropped.
            let sent = settled.and_then(|()| unsafe { self.send_data(&header, outgoing, segment, &mut begun.sends) });
            sent.map_err(|error| self.last_word(peer, &header, error))?;
        }
        Ok(begun)
    }

    /// Completes the receives and sends of a step. If a receive has no `into`, its data is passed to `take`. Returns the
    /// smallest `issued` of all headers. After this returns, even with an error, the memory of the step is no longer
    /// used.
    pub fn complete(&mut self, begun: Begun, take: Take) -> Result<u64> {
        let Begun { header, deadline, receives: Posted(bodies), sends } = begun;
        let mut issued = header.issued;
        match take {
            Take::Each(take) => {
                for (at, body) in bodies.into_iter().enumerate() {
                    issued = issued.min(self.take_data(&header, deadline, body, |arrived| take(at, arrived))?);
                }
            }
            Take::Together(take) => issued = issued.min(self.take_together(&header, deadline, bodies, take)?),
        }
        for (peer, transfer) in sends {
            self.finish_held(peer, transfer, &header, deadline)?;
        }
        Ok(issued)
    }

    /// Waits for a send from memory of the operation. While the message waits for the receiver's request, a frame of
    /// the receiver may arrive that does not belong to this batch. That is an error: the two ranks disagree, and the
    /// receiver may never send its request.
    fn finish_held(
        &mut self,
        peer: usize,
        transfer: Box<dyn Transfer>,
        own: &FrameHeader,
        deadline: u64,
    ) -> Result<()> {
        const LOOK: Duration = Duration::from_millis(20);
        self.waiting_for.store(peer, Ordering::Relaxed);
        while clock::now() < deadline && !transfer.ends_within(LOOK) {
            // The send may have ended since the check above, together with the arrival of the frame.
            if let Some(error) = self.early_word(peer, own)
                && !transfer.ends_within(Duration::ZERO)
            {
                return Err(error);
            }
        }
        self.finish(peer, transfer, deadline).map(drop).map_err(|error| self.last_word(peer, own, error))
    }

    /// Returns the error if the next frame of `peer` has arrived and contradicts this batch. The frame stays in the
    /// queue.
    fn early_word(&mut self, peer: usize, own: &FrameHeader) -> Option<Error> {
        if let Some(error) = self.questions(peer, own) {
            return Some(error);
        }
        let frame = self.peers.get_mut(&peer)?.arrived_frame()?;
        let (word, _, theirs) = unframe(&frame);
        let is_data = word == Word::Data as u64; // a Question may have arrived since
        let other = || own.disagreement(self.names.me, peer, &theirs, DIFFERED_BEFORE).filter(|_| is_data);
        let said = refusal(&self.names, peer, own, &frame).or_else(other);
        self.peers.get_mut(&peer)?.put_back(frame);
        said
    }

    /// Posts the receives of one peer's data.
    ///
    /// # Safety
    /// The memory of `incoming` must be valid, and unused by others, until the result was dropped.
    unsafe fn expect_data(&mut self, incoming: Incoming, header: &FrameHeader, segment: usize) -> Result<Body> {
        let Incoming { peer, bytes, into } = incoming;
        let mut body = Body { parts: VecDeque::new(), peer, bytes, into, buffer: Vec::new() };
        if bytes <= INLINE {
            return Ok(body);
        }
        let count = self.peer(peer).count_received();
        let tag = header.data_tag(self.lane, bytes, count);
        if body.into.is_none() {
            body.buffer = self.spare.take(bytes);
        }
        // All parts use one pointer: a reference to the buffer, even to a different part of it, would end the right of
        // the transfers to write through their pointers.
        let base = body.buffer.as_mut_ptr() as usize;
        for range in segments(bytes, segment) {
            let pieces = match &body.into {
                Some(pieces) => cut(pieces, &range),
                None => {
                    assert!(range.end <= body.buffer.len(), "sagellm: {range:?} of a buffer of {}", body.buffer.len());
                    vec![Span { addr: base + range.start, bytes: range.len() }]
                }
            };
            // SAFETY: this is the caller's memory or the buffer. The buffer is dropped after the transfers and not used
            // before they end.
            let transfer = unsafe { self.link.receive_into(peer, tag, pieces) };
            let transfer = transfer.map_err(|error| self.refused(peer, error))?;
            body.parts.push_back((range, transfer));
        }
        Ok(body)
    }

    /// Sends data to one peer. If a send uses the caller's memory directly, it is added to `held`.
    ///
    /// # Safety
    /// The memory must be valid during the call, and as long as a transfer of it is in `held`.
    unsafe fn send_data(
        &mut self,
        header: &FrameHeader,
        outgoing: &Outgoing,
        segment: usize,
        held: &mut Vec<(usize, Box<dyn Transfer>)>,
    ) -> Result<()> {
        let Outgoing { peer, pieces, stays } = outgoing;
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let head = frame(Word::Data, header, bytes);
        let mut buffer = self.spare.take(FRAME);
        buffer[..HEADER].copy_from_slice(&head);
        if bytes <= INLINE {
            copy_in(pieces, 0, &mut buffer[HEADER..HEADER + bytes]);
            return self.start(*peer, self.frame_tag(), buffer, HEADER + bytes);
        }
        self.start(*peer, self.frame_tag(), buffer, HEADER)?;
        let count = self.peer(*peer).count_sent();
        let tag = header.data_tag(self.lane, bytes, count);
        for range in segments(bytes, segment) {
            if *stays && range.len() >= IN_PLACE {
                // SAFETY: the caller keeps the memory while the transfer is in `held`.
                let transfer = unsafe { self.link.send_from(*peer, tag, cut(pieces, &range)) };
                held.push((*peer, transfer.map_err(|error| self.refused(*peer, error))?));
                continue;
            }
            let mut data = self.spare.take(range.len());
            copy_in(pieces, range.start, &mut data[..range.len()]);
            self.start(*peer, tag, data, range.len())?;
        }
        Ok(())
    }

    /// Waits for the frame and the data of one peer. Returns the peer's `issued`.
    fn take_data(
        &mut self,
        own: &FrameHeader,
        deadline: u64,
        mut body: Body,
        mut take: impl FnMut(Arrived),
    ) -> Result<u64> {
        let (header, frame) = self.next_frame(body.peer, own, body.bytes, deadline)?;
        let (inline, direct) = (body.parts.is_empty(), body.into.is_some());
        while let Some((at, data)) = self.next_part(&mut body, deadline)? {
            if !direct {
                take(Arrived { header, at, data });
            }
        }
        let data = &frame[HEADER..HEADER + if inline { body.bytes } else { 0 }];
        match &body.into {
            Some(pieces) => {
                copy_out(pieces, 0, data);
                take(Arrived { header, at: 0, data: &[] });
            }
            None if inline => take(Arrived { header, at: 0, data }),
            None => self.spare.give_back(body.buffer),
        }
        self.spare.give_back(frame);
        Ok(header.issued)
    }

    /// Waits for the frames of all peers. Then waits for each segment of all peers, and passes these to `take`. Returns
    /// the smallest `issued`.
    fn take_together(
        &mut self,
        own: &FrameHeader,
        deadline: u64,
        mut bodies: Vec<Body>,
        take: &mut dyn FnMut(usize, &[&[u8]]),
    ) -> Result<u64> {
        let mut issued = own.issued;
        let mut frames = Vec::with_capacity(bodies.len());
        for body in &bodies {
            let (header, frame) = self.next_frame(body.peer, own, body.bytes, deadline)?;
            issued = issued.min(header.issued);
            frames.push(frame);
        }
        if bodies.iter().all(|body| body.parts.is_empty()) {
            let data: Vec<&[u8]> =
                frames.iter().zip(&bodies).map(|(frame, body)| &frame[HEADER..HEADER + body.bytes]).collect();
            take(0, &data);
        }
        while bodies.iter().any(|body| !body.parts.is_empty()) {
            let mut begin = 0;
            let mut data: Vec<&[u8]> = Vec::with_capacity(bodies.len());
            for body in &mut bodies {
                let (at, part) = self.next_part(body, deadline)?.expect("all messages have the same segments");
                begin = at;
                data.push(part);
            }
            take(begin, &data);
        }
        bodies.into_iter().for_each(|body| self.spare.give_back(body.buffer));
        frames.into_iter().for_each(|frame| self.spare.give_back(frame));
        Ok(issued)
    }

    /// Waits for the next segment of a message. Returns its offset, and its data if it was received into the buffer.
    /// None if the message has no further segment.
    fn next_part<'b>(&mut self, body: &'b mut Body, deadline: u64) -> Result<Option<(usize, &'b [u8])>> {
        let Some((range, transfer)) = body.parts.pop_front() else { return Ok(None) };
        self.finish(body.peer, transfer, deadline)?;
        if body.into.is_some() {
            return Ok(Some((range.start, &[])));
        }
        // SAFETY: `expect_data` checked the range, and the buffer lives as long as the body. This part has arrived; a
        // reference to the whole buffer would include parts that transfers still write.
        let data = unsafe { std::slice::from_raw_parts(body.buffer.as_ptr().add(range.start), range.len()) };
        Ok(Some((range.start, data)))
    }

    /// Waits for the next frame of `peer` and checks it against this rank's batch.
    fn next_frame(
        &mut self,
        peer: usize,
        own: &FrameHeader,
        bytes: usize,
        deadline: u64,
    ) -> Result<(FrameHeader, Vec<u8>)> {
        let frame = self.await_frame(peer, own, deadline)?;
        if let Some(error) = refusal(&self.names, peer, own, &frame) {
            return Err(error);
        }
        let (_, length, theirs) = unframe(&frame);
        let came = || format!("{bytes} bytes were expected, {length} came");
        let other_size = || (length != bytes).then(|| own.differs_in_part(self.names.me, peer, came()));
        match own.disagreement(self.names.me, peer, &theirs, DIFFERED_BEFORE).or_else(other_size) {
            Some(error) => Err(error),
            None => {
                self.heard.iter_mut().for_each(|heard| heard.push((peer, theirs.factor)));
                Ok((theirs, frame))
            }
        }
    }

    /// Leaves in order. First waits for at most `delivery` until all sends have completed, because a peer may reach the
    /// operation later than this rank. Then exchanges goodbyes with every peer, within `farewell`, because closing a
    /// connection may lose messages in flight. Peers that are gone are skipped. Returns the peers that have not received
    /// everything.
    pub fn bye(&mut self, delivery: Duration, farewell: Duration) -> Vec<usize> {
        let after = |time: Duration| clock::now().saturating_add(time.as_nanos() as u64);
        let peers = self.peers();
        let deadline = after(delivery);
        let left = || Duration::from_nanos(deadline.saturating_sub(clock::now()));
        let mut not_taken = Vec::new();
        let is_reached = |peer: &usize| {
            let is_sent = self.settle(*peer, 0, deadline).is_ok();
            let is_taken = is_sent && self.link.await_taken(*peer, left());
            if is_sent && !is_taken {
                not_taken.push(*peer);
            }
            is_taken
        };
        let reached: Vec<usize> = peers.into_iter().filter(is_reached).collect();
        let deadline = after(farewell);
        for peer in &reached {
            let mut buffer = self.spare.take(FRAME);
            buffer[..HEADER].copy_from_slice(&frame(Word::Bye, &FrameHeader::default(), 0));
            let _ = self.start(*peer, self.frame_tag(), buffer, HEADER);
        }
        for peer in reached {
            while let Some(transfer) = self.peers.get_mut(&peer).and_then(Peer::next_frame) {
                let frame = self.finish(peer, transfer, deadline);
                let passes = [Word::Data as u64, Word::Question as u64];
                if !frame.is_ok_and(|frame| passes.contains(&unframe(&frame).0)) || self.expect(peer).is_err() {
                    break;
                }
            }
        }
        not_taken
    }

    /// While the returned guard lives, transfers advance even if this lane waits for none of them.
    pub fn keep_driven(&self) -> Box<dyn Send> {
        self.link.keep_driven()
    }

    /// Returns the ranks with which this lane has exchanged messages.
    pub fn peers(&self) -> Vec<usize> {
        self.peers.keys().copied().collect()
    }
}

mod questions;
#[cfg(test)]
mod tests;
