//! The sending side of a stream of frames that several TCP connections carry. Such a connection is a *path*.
//!
//! The stream is cut into segments. Each segment is sent on the path that has the fewest bytes in flight, and begins
//! with a header that says where in the stream it belongs (`Segment`). The receiver acknowledges the stream up to the
//! first gap (`assembly`). A frame is kept, and its transfer continues, until it is acknowledged: if a path fails or
//! does not advance, its segments are sent again on other paths. So the stream ends only with its last path, and the
//! order of frames is that of one connection.
//!
//! A path is suspected if the peer's system has acknowledged nothing on it for a while although bytes are in flight
//! (`trust`). It gets no more segments, but stays open, because the network may drop packets without being dead. After
//! the path has delivered what it had, it is used again, and it has twice as much time before it is suspected again. If
//! that time stayed the same, a network that drops packets would make this side send everything again and again. If all
//! paths are suspected, each keeps its segments.
//!
//! Each segment tells the peer which paths its sender suspects. The peer sends nothing new on these, and suspects them
//! itself as soon as its own bytes do not advance there. Otherwise the two sides would notice a dead path one after the
//! other, and an operation of several steps would be delayed twice.

#![allow(unsafe_code)] // calls `Path::send`, for whose pieces this file vouches

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::frame::HEAD as FRAME_HEAD;
use super::memory::{Memory, Pieces};
use super::path::Path;
use super::segment::{HEAD, SEGMENT, Segment, WINDOW};
use super::transfer::{End, Events, Outgoing};
use super::trust::{Trust, Turned};
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::types::Span;

/// How often paths are checked.
pub const LOOK: Duration = Duration::from_millis(20);
/// If more time passes between two checks, this process was stopped, and the check says nothing about the paths.
const PAUSE: Duration = Duration::from_millis(80);
/// After a path has ended, another path must advance within this time, or the peer counts as gone. A peer that ends
/// closes all of its paths, but if the network of a path is dead, this side does not see that path close.
const SILENT: Duration = Duration::from_millis(500);
/// Backlogs are compared in units of this size, so that short messages stay on the first path.
const UNIT: usize = 64 << 10;

/// A change that `look` has found, with the number of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Stalled(usize),
    Advances(usize),
    /// A path has ended, and no other path has advanced since.
    Gone,
}

/// A frame whose bytes begin at this offset of the stream.
struct Queued {
    start: u64,
    outgoing: Outgoing,
}

impl Queued {
    fn end(&self) -> u64 {
        self.start + (FRAME_HEAD + self.outgoing.frame.data()) as u64
    }
}

/// A segment of which the system has accepted only a part.
struct Writing {
    head: [u8; HEAD],
    range: Range<u64>,
    /// Bytes of header and data that were accepted.
    sent: usize,
    /// A copy of the segment's data from this offset on. Made when the frames of the segment may end before the segment
    /// is sent.
    copy: Option<(usize, Vec<u8>)>,
}

struct Lane<P> {
    path: P,
    writing: Option<Writing>,
    /// The ranges of the stream that this path has sent or begun to send and that are not acknowledged yet.
    in_flight: VecDeque<Range<u64>>,
    /// Whether the system accepts no more for now.
    blocked: bool,
    trust: Trust,
    /// How much the peer had acknowledged on this path (`Progress::acked`) when another path last ended.
    doubted_at: u64,
}

pub struct Stripes<P> {
    /// `frames`: the frames that are not acknowledged. `end`: the offset in the stream behind them.
    frames: VecDeque<Queued>,
    end: u64,
    /// Everything before this offset was sent, or begun to be sent, on some path.
    next: u64,
    acked: u64,
    /// What must be sent again, in the order of the stream.
    again: VecDeque<Range<u64>>,
    lanes: Vec<Option<Lane<P>>>,
    /// The offset up to which this process has received the other direction's stream. Written by the thread that reads,
    /// before it ends a transfer (release); read when a segment is begun (acquire). So a frame that is sent in reaction
    /// to received data never overtakes the acknowledgement of that data.
    ack: Arc<AtomicU64>,
    /// Whether received data must still be acknowledged: by an empty segment, if no other segment is sent.
    ack_due: bool,
    /// What the last segment told the peer: which paths this side suspects, and how often that has changed.
    told: (u16, u64),
    /// The paths that the peer suspects, one bit each.
    peer_suspects: u16,
    /// When a path last ended, if no other path has advanced since.
    doubted: Option<Instant>,
    looked: Instant,
}

impl<P: Path> Stripes<P> {
    pub fn new() -> Stripes<P> {
        Stripes {
            frames: VecDeque::new(),
            end: 0,
            next: 0,
            acked: 0,
            again: VecDeque::new(),
            lanes: Vec::new(),
            ack: Arc::default(),
            ack_due: false,
            told: (0, 0),
            peer_suspects: 0,
            doubted: None,
            looked: Instant::now(),
        }
    }

    pub fn attach(&mut self, number: usize, path: P) {
        if self.lanes.len() <= number {
            self.lanes.resize_with(number + 1, || None);
        }
        let (in_flight, trust) = (VecDeque::new(), Trust::new(Instant::now()));
        self.lanes[number] = Some(Lane { path, writing: None, in_flight, blocked: false, trust, doubted_at: 0 });
        self.pump();
    }

    /// Returns the paths that are open, each with its number and whether the system accepts no more for now.
    pub fn paths(&self) -> impl Iterator<Item = (usize, &P, bool)> {
        let lanes = self.lanes.iter().enumerate();
        lanes.filter_map(|(number, lane)| lane.as_ref().map(|lane| (number, &lane.path, lane.blocked)))
    }

    /// Whether everything was sent and acknowledged. What a suspected path has not sent yet was sent on other paths as
    /// well.
    pub fn is_flushed(&self) -> bool {
        let mut lanes = self.lanes.iter().flatten();
        self.frames.is_empty() && !self.ack_due && lanes.all(|lane| lane.trust.is_suspect() || lane.writing.is_none())
    }

    pub fn push(&mut self, outgoing: Outgoing) {
        let queued = Queued { start: self.end, outgoing };
        self.end = queued.end();
        self.frames.push_back(queued);
        self.pump();
    }

    /// Called when the system accepts more on this path.
    pub fn writable(&mut self, number: usize) {
        if let Some(lane) = &mut self.lanes[number] {
            lane.blocked = false;
            self.pump();
        }
    }

    /// Returns the offset to acknowledge. The thread that reads writes it.
    pub fn ack(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.ack)
    }

    /// Sends an acknowledgement to the peer, in the next segment or in an empty one.
    pub fn acknowledge(&mut self) {
        self.ack_due = true;
        self.pump();
    }

    /// Called when the peer has everything before this offset. Ends the transfers of the frames that the peer has
    /// completely.
    pub fn acknowledged(&mut self, offset: u64, events: &mut Events) -> Result<(), String> {
        if offset > self.next {
            return Err("it acknowledged what was not sent".to_string());
        }
        if offset <= self.acked {
            return Ok(());
        }
        for number in 0..self.lanes.len() {
            // A segment that was sent on two paths may arrive on one path while the other has sent only a part of it.
            // Its frames end below, so the other path continues from a copy.
            let begun = self.lanes[number].as_ref().and_then(|lane| lane.writing.as_ref());
            let done = |writing: &Writing| writing.range.start + writing.sent.saturating_sub(HEAD) as u64;
            if begun.is_some_and(|writing| done(writing) < offset) {
                self.copy_rest(number);
            }
        }
        self.acked = offset;
        for lane in self.lanes.iter_mut().flatten() {
            lane.in_flight.retain(|range| range.end > offset);
        }
        while self.frames.front().is_some_and(|first| first.end() <= offset) {
            let Outgoing { end, data, .. } = self.frames.pop_front().expect("just seen").outgoing;
            end.tell(Ok(()), data, events);
        }
        self.pump();
        Ok(())
    }

    /// Notes which paths the peer suspects, one bit each.
    pub fn peer_suspects(&mut self, paths: u16) {
        self.peer_suspects = paths;
        self.pump();
    }

    // --------------------------------------------------------------------------------------------------------- writing

    /// Appends pieces for this range of the stream, as many as fit. Returns the offset behind the last one.
    fn pieces(&self, range: Range<u64>, into: &mut Pieces) -> u64 {
        let mut at = range.start;
        let first = self.frames.partition_point(|one| one.end() <= at);
        for one in self.frames.range(first..) {
            if at >= range.end {
                break;
            }
            let within = (at - one.start) as usize;
            if within < FRAME_HEAD {
                let bytes = (FRAME_HEAD - within).min((range.end - at) as usize);
                if !into.push(Span { addr: one.outgoing.head.as_ptr() as usize + within, bytes }) {
                    break;
                }
                at += bytes as u64;
            }
            let from = ((at - one.start) as usize).saturating_sub(FRAME_HEAD);
            let bytes = (one.outgoing.frame.data() - from).min((range.end - at) as usize);
            if bytes > 0 {
                let before = into.bytes();
                one.outgoing.data.pieces(from, bytes, into);
                let found = into.bytes() - before;
                at += found as u64;
                if found < bytes {
                    break;
                }
            }
        }
        at
    }

    /// Returns the next range to send.
    fn upcoming(&mut self) -> Option<Range<u64>> {
        while let Some(first) = self.again.front_mut() {
            first.start = first.start.max(self.acked);
            if first.start < first.end {
                return Some(first.clone());
            }
            self.again.pop_front();
        }
        let end = self.end.min(self.acked + WINDOW).min(self.next + SEGMENT);
        (self.next < end).then_some(self.next..end)
    }

    /// Returns the path on which the next segment is sent.
    fn best(&self) -> Option<usize> {
        // Prefers a path that both sides trust, then one that this side trusts, then any.
        let doubt = |number: usize, lane: &Lane<P>| match (lane.trust.is_suspect(), self.peer_suspects & 1 << number) {
            (true, _) => 2,
            (false, 1..) => 1,
            (false, 0) => 0,
        };
        let open = || self.lanes.iter().enumerate().filter_map(|(number, lane)| Some((number, lane.as_ref()?)));
        let least = open().map(|(number, lane)| doubt(number, lane)).min()?;
        let is_free = |lane: &Lane<P>| lane.writing.is_none() && !lane.blocked;
        let free = open().filter(|(number, lane)| is_free(lane) && doubt(*number, lane) == least);
        free.min_by_key(|(_, lane)| lane.path.backlog() / UNIT).map(|(number, _)| number)
    }

    /// Sends as much as the system accepts now.
    fn pump(&mut self) {
        for number in 0..self.lanes.len() {
            if self.lanes[number].as_ref().is_some_and(|lane| lane.writing.is_some() && !lane.blocked) {
                self.write(number);
            }
        }
        loop {
            let range = self.upcoming();
            if range.is_none() && !self.ack_due {
                return;
            }
            let Some(best) = self.best() else { return };
            let mut range = range.unwrap_or(self.next..self.next);
            range.end = self.pieces(range.clone(), &mut Pieces::default());
            if let Some(first) = self.again.front_mut().filter(|first| first.start == range.start) {
                first.start = range.end;
            } else {
                self.next = self.next.max(range.end);
            }
            let suspected = self.suspected();
            if suspected != self.told.0 {
                self.told = (suspected, self.told.1 + 1);
            }
            let segment = Segment {
                at: range.start,
                bytes: (range.end - range.start) as u32,
                ack: self.ack.load(Ordering::Acquire),
                suspected,
                changes: self.told.1,
            };
            self.ack_due = false;
            let lane = self.lanes[best].as_mut().expect("it is open");
            if !range.is_empty() {
                lane.in_flight.push_back(range.clone());
            }
            lane.writing = Some(Writing { head: segment.write(), range, sent: 0, copy: None });
            self.write(best);
        }
    }

    /// Continues the segment that was begun on this path.
    fn write(&mut self, number: usize) {
        loop {
            let Some(lane) = &self.lanes[number] else { return };
            let Some(writing) = &lane.writing else { return };
            let mut pieces = Pieces::default();
            if writing.sent < HEAD {
                pieces.push(Span { addr: writing.head.as_ptr() as usize + writing.sent, bytes: HEAD - writing.sent });
            }
            let done = writing.sent.saturating_sub(HEAD);
            match &writing.copy {
                Some((from, copy)) => {
                    let rest = &copy[done - from..];
                    pieces.push(Span { addr: rest.as_ptr() as usize, bytes: rest.len() });
                }
                None => {
                    self.pieces(writing.range.start + done as u64..writing.range.end, &mut pieces);
                }
            }
            let given = pieces.bytes();
            fault_points::reached(FaultPoint::SegmentReady);
            // SAFETY: `self` owns the headers, copies and owned buffers, and nothing changes them during the call. The
            // callers vouch for borrowed memory until the transfer has ended.
            let sent = unsafe { lane.path.send(pieces.as_slice()) };
            fault_points::reached(FaultPoint::SegmentWritten);
            let lane = self.lanes[number].as_mut().expect("just seen");
            let writing = lane.writing.as_mut().expect("just seen");
            let Ok(sent) = sent else {
                lane.blocked = true; // reading finds the error and gives the path up
                return;
            };
            writing.sent += sent;
            if writing.sent == HEAD + (writing.range.end - writing.range.start) as usize {
                lane.writing = None;
                return;
            }
            if sent < given {
                lane.blocked = true;
                return;
            }
        }
    }

    // --------------------------------------------------------------------------------------------- what goes elsewhere

    /// Copies the part of a segment that a path has not sent yet, so that the path no longer needs the frames.
    fn copy_rest(&mut self, number: usize) {
        let Some(writing) = self.lanes[number].as_ref().and_then(|lane| lane.writing.as_ref()) else { return };
        if writing.copy.is_some() {
            return;
        }
        let done = writing.sent.saturating_sub(HEAD);
        let (mut at, end) = (writing.range.start + done as u64, writing.range.end);
        let mut rest = Vec::with_capacity((end - at) as usize);
        while at < end {
            let mut pieces = Pieces::default();
            at = self.pieces(at..end, &mut pieces);
            for piece in pieces.as_slice() {
                // SAFETY: as in `write`.
                rest.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.addr as *const u8, piece.bytes) });
            }
        }
        let writing = self.lanes[number].as_mut().and_then(|lane| lane.writing.as_mut()).expect("just seen");
        writing.copy = Some((done, rest));
    }

    /// Adds to `again` everything that was sent on this path and was not acknowledged.
    fn take_back(&mut self, number: usize) {
        let Some(lane) = &mut self.lanes[number] else { return };
        let back = std::mem::take(&mut lane.in_flight);
        self.again.extend(back);
        self.again.make_contiguous().sort_by_key(|range| range.start);
    }

    /// Gives up a path that has ended. Returns whether a path is left.
    pub fn lose(&mut self, number: usize, now: Instant) -> bool {
        self.take_back(number);
        self.lanes[number] = None;
        for lane in self.lanes.iter_mut().flatten() {
            lane.doubted_at = lane.path.progress().acked;
        }
        self.doubted = Some(now);
        self.ack_due = true; // the last acknowledgement may be lost; and other paths advance only if something is sent
        self.pump();
        self.lanes.iter().any(Option::is_some)
    }

    /// Returns the numbers of the paths that are suspected, one bit each.
    fn suspected(&self) -> u16 {
        let lanes = self.lanes.iter().enumerate();
        let suspected = lanes.filter(|(_, lane)| lane.as_ref().is_some_and(|lane| lane.trust.is_suspect()));
        suspected.fold(0, |all, (number, _)| all | 1 << number)
    }

    /// Whether there is a path that is not suspected.
    pub fn is_any_trusted(&self) -> bool {
        self.lanes.iter().flatten().any(|lane| !lane.trust.is_suspect())
    }

    /// Whether a path has ended and no other path has advanced since.
    pub fn is_doubted(&self) -> bool {
        self.doubted.is_some()
    }

    /// Checks which paths advance. If a path does not, its bytes are queued to be sent again on paths that do. Returns
    /// what has changed. If a path is suspected repeatedly, only the first suspicion is returned.
    pub fn look(&mut self, now: Instant) -> Vec<Change> {
        let paused = now.duration_since(self.looked) > PAUSE;
        self.looked = now;
        let mut changes = Vec::new();
        let (mut changed, mut lives, mut longest) = (false, false, SILENT);
        for (number, lane) in self.lanes.iter_mut().enumerate() {
            let Some(lane) = lane else { continue };
            let progress = lane.path.progress();
            // Bytes that wait because the peer reports no room prove that the peer is alive.
            lives |= progress.acked != lane.doubted_at || (!progress.owes && lane.path.backlog() > 0);
            longest = longest.max(progress.round_trip * 4);
            let confirmed = self.peer_suspects & 1 << number != 0;
            if let Some(Turned { suspect, first }) = lane.trust.look(&progress, now, confirmed, paused) {
                changed = true;
                if first {
                    changes.push(if suspect { Change::Stalled(number) } else { Change::Advances(number) });
                }
            }
        }
        match self.doubted {
            Some(_) if lives => self.doubted = None,
            Some(_) if paused => self.doubted = Some(now),
            Some(since) if now.duration_since(since) >= longest => changes.push(Change::Gone),
            _ => (),
        }
        if self.is_any_trusted() {
            for number in 0..self.lanes.len() {
                if self.lanes[number].as_ref().is_some_and(|lane| lane.trust.is_suspect() && !lane.in_flight.is_empty())
                {
                    self.copy_rest(number);
                    self.take_back(number);
                }
            }
            self.ack_due |= changed; // the last acknowledgement may be on such a path
        }
        self.pump();
        changes
    }

    // ------------------------------------------------------------------------------------------------- what ends early

    /// Whether a byte of this frame may have been sent.
    fn is_begun(next: u64, one: &Queued) -> bool {
        one.start < next
    }

    /// Removes and returns the frames that `is_it` selects, except those that are begun or that `keeps` selects. These
    /// exceptions continue from copies of their data, and `begun` is called for each of them.
    pub fn remove(
        &mut self,
        is_it: impl Fn(&Outgoing) -> bool,
        keeps: impl Fn(&Outgoing) -> bool,
        mut begun: impl FnMut(&mut Outgoing),
    ) -> Vec<Outgoing> {
        let (acked, next) = (self.acked, self.next);
        let mut gone = Vec::new();
        let mut kept = VecDeque::with_capacity(self.frames.len());
        self.end = self.frames.front().map_or(self.end, |first| first.start);
        for mut one in std::mem::take(&mut self.frames) {
            if is_it(&one.outgoing) && !Self::is_begun(next, &one) && !keeps(&one.outgoing) {
                gone.push(one.outgoing);
                continue;
            }
            if is_it(&one.outgoing) {
                one.outgoing.data.own((acked.saturating_sub(one.start) as usize).saturating_sub(FRAME_HEAD));
                begun(&mut one.outgoing);
            }
            one.start = self.end;
            self.end = one.end();
            kept.push_back(one);
        }
        self.frames = kept;
        gone
    }

    /// Gives up the paths and the transfers that have not ended. Returns the transfers.
    pub fn take_all(&mut self) -> Vec<(End, Memory)> {
        self.lanes.clear();
        self.again.clear();
        std::mem::take(&mut self.frames).into_iter().map(|one| (one.outgoing.end, one.outgoing.data)).collect()
    }
}

#[cfg(test)]
mod tests;
