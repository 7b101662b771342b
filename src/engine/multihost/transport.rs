//! Sends messages between hosts: frames over any [`Link`], and the messages of one step of a schedule. Each lane has:
//!
//! - *Frames*. A frame is a short message: a header (which batch it belongs to, what the sender has issued) and the
//!   data, if it fits. Receives for the next frames of a peer are always posted ahead, so a frame takes one latency. If
//!   a sender had to wait for a ready message, like gloo's, it would take a further round trip whenever the receive is
//!   posted late.
//! - Data messages, for data that does not fit into a frame. Their tag contains a hash of the batch: the tags of two
//!   ranks that disagree about an operation must not match; the ranks then find the mismatch by their frame headers.
//!   The data is sent directly from its memory and received directly into its memory (`Outgoing`, `Incoming`). If the
//!   receiver combines the data, it arrives in segments, so that one segment is combined in the cache while the next is
//!   in flight.

#![allow(unsafe_code)] // sends from and receives into memory of operations

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::link::{Broken, Link, Transfer};
use super::names::Names;
use super::vector::{copy_in, copy_out, cut};
use crate::error::{Error, GO_ON, Result, SAME_CALLS, laid_out};
use crate::op;
use crate::op::lists;
use crate::op::words::{Called, MOVED, different};
use crate::os::clock;
use crate::types::Span;

/// Longest frame.
const FRAME: usize = 16 << 10;
/// Size of a frame's header in bytes.
const HEADER: usize = 56;
/// The largest amount of data that fits into a frame.
pub const INLINE: usize = FRAME - HEADER;
/// Data of at least this size is sent from its own memory. Shorter data is copied first, so that the sender does not
/// have to wait for the receiver.
const IN_PLACE: usize = 192 << 10;
/// How many receives are posted ahead for each peer. With two, one is still posted while the other is read.
const AHEAD: usize = 2;

/// The header of every frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameHeader {
    /// Signature of the batch's first operation. `lists` is the hash of its list (`Op::lists`).
    pub signature: u64,
    pub lists: u64,
    /// Hash of all batches so far, including this one.
    pub chain: u64,
    /// Number of the batch's first operation.
    pub number: u64,
    /// Highest operation number that is issued and may be fused (`State::promised`): the minimum over all ranks whose
    /// number the sender has received in this batch, including its own.
    pub issued: u64,
    /// The sender's factor of PREMUL_SUM. In other operations, a word of `results` or 0.
    pub factor: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Word {
    Data = 1,
    /// The sender's group failed; the encoded fault follows.
    Fault = 2,
    /// The sender has left the group in order.
    Bye = 3,
}

/// Identifies the first operation of a batch by its signature and number.
#[derive(Clone, Copy, Default)]
struct Step(u64, u64);

impl Step {
    fn during(self) -> String {
        match self {
            Step(0, _) => "meets the other hosts".to_string(), // the messages that measure the link
            Step(signature, number) => format!("is in {} number {number}", op::describe(signature)),
        }
    }
}

impl FrameHeader {
    fn step(&self) -> Step {
        Step(self.signature, self.number)
    }

    /// Describes what the sending rank was doing, for error texts.
    pub fn during(&self) -> String {
        self.step().during()
    }

    /// The call of the rank that sent this header.
    pub fn called_by(&self, rank: usize) -> Called {
        Called { rank, signature: self.signature, number: self.number }
    }

    /// The error if two ranks agree about the first operation of a batch, but not about the rest of it.
    pub fn differs_in_part(&self, me: usize, peer: usize, came: String) -> Error {
        let (call, number) = (op::describe(self.signature), self.number);
        let head = format!(
            "rank {me} and rank {peer} agree about {call} number {number} of their group, but not about all of it"
        );
        let what =
            "its list of sizes, an operation before it, one that travels with it, or the options of the group differ";
        Error::mismatch(laid_out(&head, &[what.to_string(), came, MOVED.to_string()], SAME_CALLS))
    }

    /// The error if two ranks passed different lists of tensors to the first operation of the batch. None if the lists
    /// agree.
    pub fn other_list(&self, me: usize, peer: usize, theirs: u64) -> Option<Error> {
        let differ = theirs != self.lists && (lists::is_of_tensors(theirs) || lists::is_of_tensors(self.lists));
        let call = || op::describe(self.signature);
        differ.then(|| lists::differ(&call(), self.number, (me, self.lists), (peer, theirs), (None, MOVED)))
    }
}

fn frame(word: Word, header: &FrameHeader, bytes: usize) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    let first = (word as u64) << 56 | bytes as u64;
    let words = [first, header.signature, header.chain, header.number, header.issued, header.factor, header.lists];
    for (at, value) in out.chunks_exact_mut(8).zip(words) {
        at.copy_from_slice(&value.to_le_bytes());
    }
    out
}

fn unframe(frame: &[u8]) -> (u64, usize, FrameHeader) {
    let word = |at: usize| u64::from_le_bytes(frame[at * 8..at * 8 + 8].try_into().expect("eight bytes"));
    let (first, header) = (
        word(0),
        FrameHeader {
            signature: word(1),
            chain: word(2),
            number: word(3),
            issued: word(4),
            factor: word(5),
            lists: word(6),
        },
    );
    (first >> 56, (first & ((1 << 56) - 1)) as usize, header)
}

/// A transfer whose frame has arrived.
struct Came(Vec<u8>);

impl Transfer for Came {
    fn wait(self: Box<Self>, _timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        Ok(self.0)
    }

    fn ends_within(&self, _timeout: Duration) -> bool {
        true
    }
}

/// The receives of one peer's data. Fields drop in the order in which they are declared: the transfers must be given up
/// before their memory is freed.
struct Body {
    /// The segments of the message. Empty if the data is in the frame.
    parts: Vec<(Range<usize>, Box<dyn Transfer>)>,
    peer: usize,
    bytes: usize,
    into: Option<Vec<Span>>,
    /// Holds the data until it is combined.
    buffer: Vec<u8>,
}

/// The messages to and from one peer.
#[derive(Default)]
struct Wire {
    /// Posted receives, the next one first.
    ahead: VecDeque<Box<dyn Transfer>>,
    /// Sends whose completion was not checked yet.
    sending: VecDeque<Box<dyn Transfer>>,
    /// Number of data messages sent. `received` counts those received.
    sent: u32,
    received: u32,
}

/// The messages of one lane of a group, which never match those of the other lane.
pub struct Transport {
    link: Arc<dyn Link>,
    names: Arc<Names>,
    /// The first operation of the current batch, for error texts.
    at: Step,
    lane: u32,
    wires: HashMap<usize, Wire>,
    spare: Vec<Vec<u8>>,
    /// The ranks whose headers of this batch have arrived, each with its word (`FrameHeader::factor`). None if results are
    /// not compared.
    pub heard: Option<Vec<(usize, u64)>>,
    /// The rank for which this lane waits now, for error texts.
    waiting_for: Arc<AtomicUsize>,
}

/// The value of `waiting_for` while the lane waits for no rank.
pub const NOBODY: usize = usize::MAX;
/// How long after its operation's deadline a wait of a lane ends by itself. The check of that deadline ends the wait
/// earlier, with a text that says what the other ranks do, unless the machine is so busy that the check is late.
pub const AFTER_DEADLINE: Duration = Duration::from_secs(2);

/// What a step sends to one peer: the bytes of `pieces`, in order.
pub struct Outgoing {
    pub peer: usize,
    pub pieces: Vec<Span>,
    /// Whether the memory stays unchanged until the exchange has ended. If not, it is copied before anything is
    /// received.
    pub stays: bool,
}

/// What a step receives from one peer.
pub struct Incoming {
    pub peer: usize,
    pub bytes: usize,
    /// The memory for the data. If None, the data is passed to the exchange's `take`.
    pub into: Option<Vec<Span>>,
}

/// Data that arrived from one peer: the whole message or a segment of it. Empty if the data went directly to its
/// memory.
pub struct Arrived<'a> {
    pub header: FrameHeader,
    /// Offset of the data in the message.
    pub at: usize,
    pub data: &'a [u8],
}

/// The segments of a message of `bytes` bytes, equal on both sides. The last one includes the remainder, so that none
/// is short.
fn segments(bytes: usize, segment: usize) -> impl Iterator<Item = Range<usize>> {
    let count = (bytes / segment).max(1);
    (0..count).map(move |at| at * segment..if at + 1 == count { bytes } else { (at + 1) * segment })
}

impl Transport {
    pub fn new(link: Arc<dyn Link>, names: Arc<Names>, lane: usize, waiting_for: Arc<AtomicUsize>) -> Transport {
        let (lane, at) = (lane as u32, Step::default());
        Transport { link, names, at, lane, wires: HashMap::new(), spare: Vec::new(), heard: None, waiting_for }
    }

    pub fn names(&self) -> &Arc<Names> {
        &self.names
    }

    fn frame_tag(&self) -> u32 {
        self.lane
    }

    /// Bit 30 marks a data message. The next two bits are the lane, the next two distinguish consecutive messages, and
    /// the rest is a hash of the batch.
    fn data_tag(&self, header: &FrameHeader, bytes: usize, count: u32) -> u32 {
        let mixed = (header.chain ^ bytes as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        1 << 30 | self.lane << 28 | (count & 3) << 26 | (mixed >> 38) as u32
    }

    /// Returns the smallest spare buffer that fits, so that a posted receive of a frame does not hold a large buffer.
    fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        let fitting = self.spare.iter().enumerate().filter(|(_, spare)| spare.len() >= bytes);
        let smallest = fitting.min_by_key(|(_, spare)| spare.len()).map(|(at, _)| at);
        smallest.map_or_else(|| vec![0; bytes], |at| self.spare.swap_remove(at))
    }

    fn give_back(&mut self, buffer: Vec<u8>) {
        const KEPT: usize = 16;
        const LARGEST: usize = 8 << 20;
        if self.spare.len() < KEPT && buffer.len() <= LARGEST {
            self.spare.push(buffer);
        }
    }

    /// Posts receives for the next frames of `peer` as soon as a message is expected. A broken connection is an error
    /// only if no posted receive is left, because frames that have arrived are still read.
    pub fn expect(&mut self, peer: usize) -> Result<()> {
        while self.wires.entry(peer).or_default().ahead.len() < AHEAD {
            let buffer = self.buffer(FRAME);
            match self.link.receive(peer, self.frame_tag(), buffer, FRAME) {
                Ok(transfer) => self.wires.entry(peer).or_default().ahead.push_back(transfer),
                Err(error) if self.wires.entry(peer).or_default().ahead.is_empty() => {
                    return Err(self.refused(peer, error));
                }
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    /// Returns the fault or goodbye that the peer sent before a send to it failed, or else the send's error.
    fn last_word(&mut self, peer: usize, own: &FrameHeader, error: Error) -> Error {
        let arrived = self.wires.get_mut(&peer).and_then(|wire| wire.ahead.pop_front());
        let Some(transfer) = arrived else { return error };
        match self.finish(peer, transfer, clock::now()).map(|frame| self.refusal(peer, own, &frame)) {
            Ok(Some(said)) => said,
            _ => error,
        }
    }

    fn start(&mut self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<()> {
        let sent = self.link.send(peer, tag, buffer, bytes);
        let transfer = sent.map_err(|error| self.refused(peer, error))?;
        self.wires.entry(peer).or_default().sending.push_back(transfer);
        Ok(())
    }

    /// Waits until at most `most` sends to `peer` are in flight.
    fn settle(&mut self, peer: usize, most: usize, deadline: u64) -> Result<()> {
        loop {
            let wire = self.wires.entry(peer).or_default();
            if wire.sending.len() <= most {
                return Ok(());
            }
            let transfer = wire.sending.pop_front().expect("not empty");
            let buffer = self.finish(peer, transfer, deadline)?;
            self.give_back(buffer);
        }
    }

    fn finish(&mut self, peer: usize, transfer: Box<dyn Transfer>, deadline: u64) -> Result<Vec<u8>> {
        self.waiting_for.store(peer, Ordering::Relaxed);
        let left = Duration::from_nanos(deadline.saturating_sub(clock::now()));
        let result = transfer.wait(left + AFTER_DEADLINE);
        self.waiting_for.store(NOBODY, Ordering::Relaxed);
        result.map_err(|broken| self.lost(peer, &broken))
    }

    /// The error for a peer from which the link receives nothing. It includes the link's text.
    fn lost(&self, peer: usize, Broken { is_late, words }: &Broken) -> Error {
        if *is_late {
            let first = words.lines().next().unwrap_or_default();
            let head = format!("rank {} Timed out waiting for rank {peer} on another host: {first}", self.names.me);
            return Error::timeout(laid_out(&head, &[], GO_ON));
        }
        self.names.lost(peer, &self.at.during(), words)
    }

    /// The error after the link has refused a call for a peer.
    fn refused(&self, peer: usize, error: Error) -> Error {
        match error {
            error if error.rank().is_some() => self.lost(peer, &error.text().into()),
            other => other,
        }
    }

    /// One step: posts the receives, starts a send to each peer in `sends`, then completes each receive in order. If a
    /// receive has no `into`, its data is passed to `take`, with the index of the receive, in pieces of about `segment`
    /// bytes. `segment` must be equal on both sides. Returns the smallest `issued` of all headers. After this returns,
    /// even with an error, the memory of the step is no longer used.
    ///
    /// # Safety
    /// All pieces must be valid during the call. Nothing else may write the pieces of `sends` that stay, or use those
    /// of `receives`. These two sets must not overlap.
    pub unsafe fn exchange(
        &mut self,
        header: FrameHeader,
        deadline: u64,
        sends: &[Outgoing],
        receives: Vec<Incoming>,
        segment: usize,
        mut take: impl FnMut(usize, Arrived) -> Result<()>,
    ) -> Result<u64> {
        const ON_THEIR_WAY: usize = 4;
        self.at = header.step();
        let mut bodies = Vec::with_capacity(receives.len());
        for incoming in receives {
            self.expect(incoming.peer)?;
            // SAFETY: the caller vouches for the memory. The result of `expect_data` is dropped when this function
            // returns.
            bodies.push(unsafe { self.expect_data(incoming, &header, segment) }?);
        }
        let mut held = Vec::new();
        for outgoing in sends {
            let peer = outgoing.peer;
            self.expect(peer)?; // the peer may send a fault or a goodbye
            let settled = self.settle(peer, ON_THEIR_WAY, deadline);
            // SAFETY: as above. `held` is emptied or dropped before this function returns.
            let sent = settled.and_then(|()| unsafe { self.send_data(&header, outgoing, segment, &mut held) });
            sent.map_err(|error| self.last_word(peer, &header, error))?;
        }
        let mut issued = header.issued;
        for (at, body) in bodies.into_iter().enumerate() {
            issued = issued.min(self.take_data(&header, deadline, body, |arrived| take(at, arrived))?);
        }
        for (peer, transfer) in held {
            self.finish_held(peer, transfer, &header, deadline)?;
        }
        Ok(issued)
    }

    /// Waits for a send from memory of the operation. The send ends when the receiver has received it. If a frame of
    /// the receiver arrives meanwhile and does not belong to this batch, the two ranks disagree and the receiver may
    /// never receive; that is an error.
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

    /// The error, if the next frame of `peer` has arrived and contradicts this batch. The frame stays in the queue.
    fn early_word(&mut self, peer: usize, own: &FrameHeader) -> Option<Error> {
        let ahead = &mut self.wires.get_mut(&peer)?.ahead;
        if !ahead.front()?.ends_within(Duration::ZERO) {
            return None;
        }
        let frame = ahead.pop_front()?.wait(Duration::ZERO).ok()?; // on an error the send fails too
        let said = self.refusal(peer, own, &frame).or_else(|| self.disagreement(peer, own, &unframe(&frame).2));
        self.wires.get_mut(&peer)?.ahead.push_front(Box::new(Came(frame)));
        said
    }

    /// Posts the receives of one peer's data.
    ///
    /// # Safety
    /// The memory of `incoming` must be valid, and unused by others, until the result was dropped.
    unsafe fn expect_data(&mut self, incoming: Incoming, header: &FrameHeader, segment: usize) -> Result<Body> {
        let Incoming { peer, bytes, into } = incoming;
        let mut body = Body { parts: Vec::new(), peer, bytes, into, buffer: Vec::new() };
        if bytes <= INLINE {
            return Ok(body);
        }
        let wire = self.wires.entry(peer).or_default();
        let count = wire.received;
        wire.received = count.wrapping_add(1);
        let tag = self.data_tag(header, bytes, count);
        if body.into.is_none() {
            body.buffer = self.buffer(bytes);
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
            body.parts.push((range, transfer));
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
        let mut buffer = self.buffer(FRAME);
        buffer[..HEADER].copy_from_slice(&head);
        if bytes <= INLINE {
            copy_in(pieces, 0, &mut buffer[HEADER..HEADER + bytes]);
            return self.start(*peer, self.frame_tag(), buffer, HEADER + bytes);
        }
        self.start(*peer, self.frame_tag(), buffer, HEADER)?;
        let wire = self.wires.entry(*peer).or_default();
        let count = wire.sent;
        wire.sent = count.wrapping_add(1);
        let tag = self.data_tag(header, bytes, count);
        for range in segments(bytes, segment) {
            if *stays && range.len() >= IN_PLACE {
                // SAFETY: the caller keeps the memory while the transfer is in `held`.
                let transfer = unsafe { self.link.send_from(*peer, tag, cut(pieces, &range)) };
                held.push((*peer, transfer.map_err(|error| self.refused(*peer, error))?));
                continue;
            }
            let mut data = self.buffer(range.len());
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
        body: Body,
        mut take: impl FnMut(Arrived) -> Result<()>,
    ) -> Result<u64> {
        // The order of these variables matters, because the last one is dropped first: the transfers must be dropped
        // before their memory.
        let Body { buffer, into, bytes, peer, parts } = body;
        let (header, frame) = self.next_frame(peer, own, bytes, deadline)?;
        let inline = parts.is_empty();
        for (range, transfer) in parts {
            self.finish(peer, transfer, deadline)?;
            if into.is_none() {
                // SAFETY: `expect_data` checked the range. This part has arrived; a reference to the whole buffer would
                // include parts that transfers still write.
                let data = unsafe { std::slice::from_raw_parts(buffer.as_ptr().add(range.start), range.len()) };
                take(Arrived { header, at: range.start, data })?;
            }
        }
        let data = &frame[HEADER..HEADER + if inline { bytes } else { 0 }];
        match &into {
            Some(pieces) => {
                copy_out(pieces, 0, data);
                take(Arrived { header, at: 0, data: &[] })?;
            }
            None if inline => take(Arrived { header, at: 0, data })?,
            None => self.give_back(buffer),
        }
        self.give_back(frame);
        Ok(header.issued)
    }

    /// Waits for the next frame of `peer` and checks it against this rank's batch.
    fn next_frame(
        &mut self,
        peer: usize,
        own: &FrameHeader,
        bytes: usize,
        deadline: u64,
    ) -> Result<(FrameHeader, Vec<u8>)> {
        self.expect(peer)?;
        let transfer = self.wires.get_mut(&peer).and_then(|wire| wire.ahead.pop_front()).expect("posted above");
        let frame = self.finish(peer, transfer, deadline)?;
        self.expect(peer)?; // one is still posted; this posts another
        if let Some(error) = self.refusal(peer, own, &frame) {
            return Err(error);
        }
        let (_, length, theirs) = unframe(&frame);
        let came = || format!("{bytes} bytes were expected, {length} came");
        let other_size = || (length != bytes).then(|| own.differs_in_part(self.names.me, peer, came()));
        match self.disagreement(peer, own, &theirs).or_else(other_size) {
            Some(error) => Err(error),
            None => {
                self.heard.iter_mut().for_each(|heard| heard.push((peer, theirs.factor)));
                Ok((theirs, frame))
            }
        }
    }

    /// The error if `peer` does not run the same batch as this rank.
    fn disagreement(&self, peer: usize, own: &FrameHeader, theirs: &FrameHeader) -> Option<Error> {
        let me = self.names.me;
        if theirs.signature != own.signature || theirs.number != own.number {
            return Some(different(own.called_by(me), theirs.called_by(peer), MOVED));
        }
        let in_part = || own.differs_in_part(me, peer, "what was agreed before it differs".to_string());
        own.other_list(me, peer, theirs.lists).or_else(|| (theirs.chain != own.chain).then(in_part))
    }

    /// The error for a Fault or Bye frame. None for a Data frame.
    fn refusal(&self, peer: usize, own: &FrameHeader, frame: &[u8]) -> Option<Error> {
        let (word, length, _) = unframe(frame);
        if word == Word::Fault as u64 {
            return Some(told(frame, length));
        }
        (word == Word::Bye as u64).then(|| self.names.left(peer, &own.during()))
    }

    /// Leaves in order. First waits for at most `delivery` until all sends have completed, because a peer may reach the
    /// operation later than this rank. Then exchanges goodbyes with every peer, within `farewell`, because closing a
    /// connection may lose messages in flight. Peers that are gone are skipped.
    pub fn bye(&mut self, delivery: Duration, farewell: Duration) {
        let after = |time: Duration| clock::now().saturating_add(time.as_nanos() as u64);
        let peers = self.peers();
        let deadline = after(delivery);
        let reached: Vec<usize> = peers.into_iter().filter(|peer| self.settle(*peer, 0, deadline).is_ok()).collect();
        let deadline = after(farewell);
        for peer in &reached {
            let mut buffer = self.buffer(FRAME);
            buffer[..HEADER].copy_from_slice(&frame(Word::Bye, &FrameHeader::default(), 0));
            let _ = self.start(*peer, self.frame_tag(), buffer, HEADER);
        }
        for peer in reached {
            while let Some(transfer) = self.wires.get_mut(&peer).and_then(|wire| wire.ahead.pop_front()) {
                let frame = self.finish(peer, transfer, deadline);
                if frame.is_err() || frame.is_ok_and(|frame| unframe(&frame).0 != Word::Data as u64) {
                    break;
                }
            }
        }
    }

    /// The ranks with which this lane has exchanged messages.
    pub fn peers(&self) -> Vec<usize> {
        self.wires.keys().copied().collect()
    }
}

/// Sends this rank's fault to `peers` on all lanes. Takes a short time; delivery is not guaranteed, because a lane may
/// be in the middle of a message or the peer may be gone.
pub fn tell_fault(link: &dyn Link, lanes: usize, peers: &[usize], error: &Error) {
    let text = error.encode(INLINE);
    let mut telling = Vec::new();
    for lane in 0..lanes as u32 {
        for peer in peers {
            let mut buffer = frame(Word::Fault, &FrameHeader::default(), text.len()).to_vec();
            buffer.extend(&text);
            let bytes = buffer.len();
            telling.extend(link.send(*peer, lane, buffer, bytes));
        }
    }
    // A message that the system does not accept in this time is lost.
    let until = Instant::now() + Duration::from_millis(20);
    for transfer in telling {
        let _ = transfer.wait(until.saturating_duration_since(Instant::now()));
    }
}

/// The fault that a peer sent, as this rank's error.
fn told(frame: &[u8], length: usize) -> Error {
    let fault = Error::decode(&frame[HEADER..HEADER + length.min(INLINE)]);
    fault.map_or_else(|| Error::aborted("sagellm: the group failed on another host"), Error::as_told)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::multihost::link::{Done, Mail, Mailbox};

    /// A link whose peer is lost. Its transfers write to their memory when they are dropped, like a thread that is
    /// still reading.
    struct Lost;

    struct Writes(Vec<Span>);

    impl Drop for Writes {
        fn drop(&mut self) {
            // SAFETY: the test checks exactly this: the memory lives as long as the transfer.
            self.0.iter().for_each(|span| unsafe { std::ptr::write_bytes(span.addr as *mut u8, 7, span.bytes) });
        }
    }

    impl Transfer for Writes {
        fn wait(self: Box<Self>, _timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
            Err("Connection closed by peer".to_string().into())
        }
        fn ends_within(&self, _timeout: Duration) -> bool {
            true
        }
    }

    impl Link for Lost {
        fn receive(&self, _: usize, _: u32, _: Vec<u8>, _: usize) -> Result<Box<dyn Transfer>> {
            Ok(Box::new(Writes(Vec::new())))
        }
        fn send(&self, _: usize, _: u32, _: Vec<u8>, _: usize) -> Result<Box<dyn Transfer>> {
            Ok(Box::new(Writes(Vec::new())))
        }
        unsafe fn receive_into(&self, _: usize, _: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>> {
            Ok(Box::new(Writes(pieces)))
        }
        unsafe fn send_from(&self, _: usize, _: u32, _: Vec<Span>) -> Result<Box<dyn Transfer>> {
            Ok(Box::new(Writes(Vec::new())))
        }
        fn cut(&self) {}
    }

    impl Mail for Lost {
        fn open_mailbox(&self, _: Arc<dyn Mailbox>) {}
        fn abandon_body(&self, _: usize, _: u64) {}
        fn mail(&self, _: usize, _: Vec<u8>) -> Result<()> {
            Ok(())
        }
        unsafe fn send_body(&self, _: usize, _: u64, _: Vec<Span>, _: Done) -> Result<()> {
            Ok(())
        }
        unsafe fn receive_body(&self, _: usize, _: u64, _: Vec<Span>, _: Done) -> Result<()> {
            Ok(())
        }
        fn await_mail(&self) -> Box<dyn Send> {
            Box::new(())
        }
        fn poll(&self, _: Duration) -> bool {
            false
        }
    }

    /// A freed buffer of this size is unmapped, so a transfer that outlives it crashes the process.
    #[test]
    fn a_buffer_outlives_its_transfers_where_the_peer_is_lost() {
        let names = Arc::new(Names { processes: vec![String::new(); 2], ..Names::default() });
        let mut transport = Transport::new(Arc::new(Lost), names, 0, Arc::new(AtomicUsize::new(NOBODY)));
        let receives = vec![Incoming { peer: 1, bytes: 64 << 20, into: None }];
        let deadline = clock::now() + 1_000_000_000;
        // SAFETY: no memory of the caller is used.
        let outcome =
            unsafe { transport.exchange(FrameHeader::default(), deadline, &[], receives, 1 << 20, |_, _| Ok(())) };
        assert!(outcome.as_ref().is_err_and(|error| error.rank() == Some(1)), "{outcome:?}");
    }
}
