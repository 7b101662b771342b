//! Who handles the frames that a connection reads, whether it is one TCP connection or several.

use std::sync::Arc;

use super::ProcessId;
use super::frame::{Frame, Kind};
use super::path::Socket;
use super::transfer::{End, Events, Target};

/// The connection on which a frame came: the process at its other end, and its token.
#[derive(Clone, Copy)]
pub struct Origin {
    pub peer: ProcessId,
    pub token: u64,
}

/// Handles the frames of one group. Called with the lock of the connection's reading side held.
pub trait Receiver: Send + Sync {
    /// Handles a frame without data. An error ends the connection.
    fn control(&self, from: Origin, frame: Frame, events: &mut Events) -> Result<(), String>;
    /// Returns where the data of this frame is to be stored. An error ends the connection.
    fn begin(&self, peer: ProcessId, frame: &Frame) -> Result<Target, String>;
    /// Called when all data of a frame has arrived.
    fn finish(&self, from: Origin, frame: &Frame, target: Target, events: &mut Events);
}

/// The receivers of all groups.
pub trait Routes {
    fn receiver(&self, channel: u64) -> Option<Arc<dyn Receiver>>;
    /// Handles a frame without data that has no receiver.
    fn of_none(&self, from: Origin, frame: Frame, events: &mut Events) -> Result<(), String>;
}

/// The frame whose data is arriving.
pub struct Incoming {
    pub frame: Frame,
    pub target: Target,
    /// How much of the data has arrived.
    pub got: usize,
    receiver: Option<Arc<dyn Receiver>>,
}

impl Incoming {
    /// Handles a header that has arrived. Returns None if the frame ends with it. An error ends the connection.
    #[inline]
    pub fn begin(
        routes: &impl Routes,
        from: Origin,
        frame: Frame,
        events: &mut Events,
    ) -> Result<Option<Incoming>, String> {
        let receiver = routes.receiver(frame.channel);
        if frame.data() == 0 && !matches!(frame.kind, Kind::Message | Kind::Mail | Kind::Body) {
            match receiver {
                Some(receiver) => receiver.control(from, frame, events)?,
                None => routes.of_none(from, frame, events)?,
            }
            return Ok(None);
        }
        let target = match &receiver {
            Some(receiver) => receiver.begin(from.peer, &frame)?,
            None => Target::Discard,
        };
        Ok(Some(Incoming { frame, target, got: 0, receiver }))
    }

    /// Returns how many bytes of the data are missing.
    pub fn missing(&self) -> usize {
        self.frame.data() - self.got
    }

    /// Stores the next data, as much of it as belongs to this frame. Returns how much that is.
    pub fn store(&mut self, data: &[u8]) -> usize {
        let here = self.missing().min(data.len());
        if here > 0 {
            self.target.write(self.got, &data[..here]);
            self.got += here;
        }
        here
    }

    /// Called when all data has arrived.
    #[inline]
    pub fn end(self, from: Origin, events: &mut Events) {
        let Incoming { frame, target, receiver, .. } = self;
        if let Some(receiver) = receiver {
            receiver.finish(from, &frame, target, events);
        }
    }

    /// If the frame is of this channel, fails its transfer and discards the rest of the data.
    pub fn forget(&mut self, channel: u64, why: &str, events: &mut Events) {
        if self.frame.channel == channel {
            std::mem::replace(&mut self.target, Target::Discard).fail(why, events);
        }
    }

    /// If `is_it` selects the frame's transfer, discards the rest of the data.
    pub fn give_up(&mut self, is_it: impl Fn(&End) -> bool) {
        if self.is_of(is_it) {
            self.target = Target::Discard;
        }
    }

    /// Whether `is_it` selects the frame's transfer.
    pub fn is_of(&self, is_it: impl Fn(&End) -> bool) -> bool {
        matches!(&self.target, Target::Posted(_, end) if is_it(end))
    }
}

/// The result of reading from a socket once.
pub enum Turn {
    Nothing,
    Moved,
    /// One of several sockets has ended, and the connection continues without it.
    Without(Arc<Socket>),
    Broken(String),
}
