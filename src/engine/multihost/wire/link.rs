//! A group's channel as its engine holds it: implements `Link` for the lanes and `Mail` for messages of programs.

#![allow(unsafe_code)] // the caller vouches for the memory of bodies

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Wire;
use super::channel::Channel;
use super::driving::Counted;
use super::lane::{Lane, Seat, ShortInto};
use super::memory::Memory;
use super::peer::{SHORT, Waiting};
use super::transfer::{End, Events, Slot};
use crate::engine::Polled;
use crate::engine::multihost::link::{Done, Ended, LONGEST_MAIL, Link, MOST_BODIES, Mail, Mailbox, Transfer};
use crate::error::Result;
use crate::types::Span;

/// Set in the number of a lane's body; the rest of the number is the tag.
const OF_LANE: u64 = MOST_BODIES;

/// When this is dropped, the rank leaves the channel.
pub struct WireLink {
    channel: Arc<Channel>,
    seat: Arc<Seat>,
}

impl WireLink {
    pub fn new(wire: &Arc<Wire>, channel: Arc<Channel>) -> WireLink {
        let seat = Arc::new(Seat { wire: Arc::clone(wire), channel: Arc::clone(&channel) });
        WireLink { channel, seat }
    }

    pub fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    fn wire(&self) -> &Arc<Wire> {
        &self.seat.wire
    }

    /// Makes a transfer of a lane. If `is_send`, the wire must be driven for the transfer even while no thread waits.
    fn waiting(&self, slot: &Arc<Slot>, memory: Memory, bytes: usize, is_send: bool) -> Waiting {
        let counted = is_send.then(|| Counted::new(self.wire().driving()));
        Waiting { memory, bytes, end: End::Slot(Arc::clone(slot)), counted }
    }

    fn lane(&self, peer: usize, slot: Arc<Slot>, borrows: bool) -> Box<dyn Transfer> {
        Box::new(Lane::new(&self.seat, peer, slot, borrows))
    }

    /// Makes a body of a program. Its end is reported to `done`.
    fn body(&self, pieces: Vec<Span>, done: Done) -> Waiting {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let counted = Some(Counted::new(self.wire().driving()));
        Waiting { memory: Memory::Borrowed(pieces), bytes, end: End::Done(done), counted }
    }

    /// Passes the events of a call for a body to the thread that drives, which runs them.
    fn defer(&self, events: Events) {
        self.wire().driving().defer(events);
        self.wire().driving().expect_wait();
    }
}

impl Link for WireLink {
    fn process(&self, peer: usize) -> String {
        self.channel.who(peer)
    }

    fn receive(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>> {
        assert!(bytes <= buffer.len(), "a receive of {bytes} bytes into {}", buffer.len());
        let slot = Arc::new(Slot::default());
        let waiting = self.waiting(&slot, Memory::Owned(buffer), bytes, false);
        if bytes > SHORT {
            self.channel.receive_body(peer, OF_LANE | u64::from(tag), waiting, &mut Events::default())?;
        } else if let Some(buffer) = self.channel.receive_short(peer, tag, waiting)? {
            return Ok(Box::new(Ended(buffer)));
        }
        Ok(self.lane(peer, slot, false))
    }

    fn send(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>> {
        assert!(bytes <= buffer.len(), "a send of {bytes} bytes from {}", buffer.len());
        let slot = Arc::new(Slot::default());
        let waiting = self.waiting(&slot, Memory::Owned(buffer), bytes, true);
        if bytes > SHORT {
            self.channel.send_body(peer, OF_LANE | u64::from(tag), waiting, &mut Events::default())?;
        } else {
            self.channel.send_short(peer, tag, waiting)?;
        }
        Ok(self.lane(peer, slot, false))
    }

    fn has_unread(&self, peer: usize, tag: u32) -> bool {
        self.channel.has_unread(peer, tag)
    }

    unsafe fn receive_into(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        if bytes <= SHORT {
            let received = self.receive(peer, tag, vec![0; bytes], bytes)?;
            return Ok(Box::new(ShortInto { received, pieces }));
        }
        let slot = Arc::new(Slot::default());
        let waiting = self.waiting(&slot, Memory::Borrowed(pieces), bytes, false);
        self.channel.receive_body(peer, OF_LANE | u64::from(tag), waiting, &mut Events::default())?;
        Ok(self.lane(peer, slot, true))
    }

    unsafe fn send_from(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let mut memory = Memory::Borrowed(pieces);
        if bytes <= SHORT {
            memory.own(0);
            let Memory::Owned(buffer) = memory else { unreachable!("just copied") };
            return self.send(peer, tag, buffer, bytes);
        }
        let slot = Arc::new(Slot::default());
        let waiting = self.waiting(&slot, memory, bytes, true);
        self.channel.send_body(peer, OF_LANE | u64::from(tag), waiting, &mut Events::default())?;
        Ok(self.lane(peer, slot, true))
    }

    fn hand_over(&self) {
        self.wire().driving().wake_for_pending();
    }

    fn cut(&self) {
        if !self.wire().is_inherited() {
            self.channel.leave("the group has ended on this rank");
        }
    }

    fn await_taken(&self, peer: usize, timeout: Duration) -> bool {
        self.wire().is_inherited() || self.wire().wait(|| self.channel.is_taken(peer), timeout)
    }

    fn await_delivery(&self, until: Instant) -> bool {
        /// Interval of the checks: no event of epoll reports that the peer's system has acknowledged data.
        const LOOK: Duration = Duration::from_millis(2);
        if self.wire().is_inherited() {
            return true;
        }
        let connections = self.channel.connections();
        let delivered = || connections.iter().all(|one| one.broken().is_some() || one.is_delivered());
        while !delivered() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.wire().wait(delivered, left.min(LOOK));
        }
        true
    }

    fn close(&self) {
        if !self.wire().is_inherited() {
            self.cut();
            self.wire().close(&self.channel);
        }
    }
}

impl Mail for WireLink {
    fn open_mailbox(&self, mailbox: Arc<dyn Mailbox>) {
        self.channel.open_mailbox(mailbox);
    }

    fn mail(&self, peer: usize, message: Vec<u8>) -> Result<()> {
        assert!(message.len() <= LONGEST_MAIL, "mail of {} bytes", message.len());
        self.channel.send_mail(peer, message)
    }

    unsafe fn send_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()> {
        assert!(number < MOST_BODIES, "body {number}");
        let mut events = Events::default();
        self.channel.send_body(peer, number, self.body(pieces, done), &mut events)?;
        self.defer(events);
        Ok(())
    }

    unsafe fn receive_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()> {
        assert!(number < MOST_BODIES, "body {number}");
        let mut events = Events::default();
        self.channel.receive_body(peer, number, self.body(pieces, done), &mut events)?;
        self.defer(events);
        Ok(())
    }

    fn abandon_body(&self, peer: usize, number: u64) {
        self.channel.abandon_body(peer, number);
    }

    fn keep_driven(&self) -> Box<dyn Send> {
        let counted = Counted::new(self.wire().driving());
        self.wire().driving().expect_wait();
        Box::new(counted)
    }

    fn poll(&self, sleep: Duration) -> Polled {
        self.wire().poll(sleep)
    }
}

impl Drop for WireLink {
    fn drop(&mut self) {
        self.close();
    }
}
