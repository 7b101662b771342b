//! The transfers of a lane, whose thread waits for them.

use std::sync::Arc;
use std::time::Duration;

use super::Wire;
use super::channel::Channel;
use super::memory::Memory;
use super::transfer::Slot;
use crate::engine::multihost::link::{Broken, Transfer};
use crate::types::Span;

/// A group's channel, and the wire that carries it.
pub struct Seat {
    pub wire: Arc<Wire>,
    pub channel: Arc<Channel>,
}

/// A transfer of a lane, whose thread waits for it.
pub struct Lane {
    seat: Arc<Seat>,
    peer: usize,
    slot: Arc<Slot>,
    /// Whether the transfer uses memory of the caller.
    borrows: bool,
}

impl Lane {
    pub fn new(seat: &Arc<Seat>, peer: usize, slot: Arc<Slot>, borrows: bool) -> Lane {
        Lane { seat: Arc::clone(seat), peer, slot, borrows }
    }
}

impl Transfer for Lane {
    fn wait(self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        if self.slot.has_ended() || self.seat.wire.wait(|| self.slot.has_ended(), timeout) {
            let ended = self.slot.take().expect("it has ended, and one thread waits for it");
            return ended.map_err(Broken::from);
        }
        Err(Broken::late(format!("Timed out after {} ms", timeout.as_millis())))
    }

    fn ends_within(&self, timeout: Duration) -> bool {
        self.slot.has_ended() || (!timeout.is_zero() && self.seat.wire.wait(|| self.slot.has_ended(), timeout))
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.borrows && !self.slot.has_ended() {
            self.seat.channel.give_up(self.peer, &self.slot);
        }
    }
}

/// A receive of a short message into the caller's memory. `wait` copies the message from a buffer.
pub struct ShortInto {
    pub received: Box<dyn Transfer>,
    pub pieces: Vec<Span>,
}

impl Transfer for ShortInto {
    fn wait(self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        let ShortInto { received, pieces } = *self;
        Memory::Borrowed(pieces).write(0, &received.wait(timeout)?);
        Ok(Vec::new())
    }

    fn ends_within(&self, timeout: Duration) -> bool {
        self.received.ends_within(timeout)
    }
}
