//! The transfers of one lane to and from one peer: receives of frames that are posted ahead, and sends that have not
//! ended.

use std::collections::VecDeque;
use std::time::Duration;

use super::link::{Ended, Transfer};

/// How many receives are posted ahead for each peer. With two, one is still posted while the other is read.
const AHEAD: usize = 2;

/// The messages of one lane to and from one peer.
#[derive(Default)]
pub struct Peer {
    /// Posted receives, the next one first.
    ahead: VecDeque<Box<dyn Transfer>>,
    /// Sends whose completion was not checked yet.
    sending: VecDeque<Box<dyn Transfer>>,
    /// Number of data messages sent. `received` counts those received.
    sent: u32,
    received: u32,
}

impl Peer {
    /// Whether a receive for another frame is to be posted.
    pub fn needs_receive(&self) -> bool {
        self.ahead.len() < AHEAD
    }

    /// Whether no receive for a frame is posted.
    pub fn expects_nothing(&self) -> bool {
        self.ahead.is_empty()
    }

    pub fn expect(&mut self, receive: Box<dyn Transfer>) {
        self.ahead.push_back(receive);
    }

    /// Removes and returns the receive of the next frame.
    pub fn next_frame(&mut self) -> Option<Box<dyn Transfer>> {
        self.ahead.pop_front()
    }

    /// Removes and returns the next frame, if it has arrived. `put_back` makes it the next frame again.
    pub fn arrived_frame(&mut self) -> Option<Vec<u8>> {
        if !self.ahead.front()?.ends_within(Duration::ZERO) {
            return None;
        }
        self.ahead.pop_front()?.wait(Duration::ZERO).ok() // on an error the send fails too
    }

    pub fn put_back(&mut self, frame: Vec<u8>) {
        self.ahead.push_front(Box::new(Ended(frame)));
    }

    pub fn add_send(&mut self, send: Box<dyn Transfer>) {
        self.sending.push_back(send);
    }

    /// Removes and returns the oldest send, if more than `most` sends are in flight.
    pub fn oldest_send(&mut self, most: usize) -> Option<Box<dyn Transfer>> {
        if self.sending.len() > most { self.sending.pop_front() } else { None }
    }

    /// Counts a data message that is sent. Returns how many were sent before it.
    pub fn count_sent(&mut self) -> u32 {
        let before = self.sent;
        self.sent = before.wrapping_add(1);
        before
    }

    /// Counts a data message that is received. Returns how many were received before it.
    pub fn count_received(&mut self) -> u32 {
        let before = self.received;
        self.received = before.wrapping_add(1);
        before
    }
}
