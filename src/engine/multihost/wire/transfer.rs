//! Ends transfers: their results, and the callbacks that run outside the locks of connections and channels.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::frame::{Frame, HEAD};
use super::memory::{Memory, Pieces};
use crate::engine::multihost::link::Done;
use crate::error::contained;
use crate::types::Span;

pub type Outcome = std::result::Result<(), String>;

/// The result of a transfer for which a thread waits.
#[derive(Default)]
pub struct Slot {
    /// Set (release) after `result`, read (acquire) by the waiting thread.
    ended: AtomicBool,
    result: Mutex<Option<std::result::Result<Vec<u8>, String>>>,
}

impl Slot {
    pub fn end(&self, result: std::result::Result<Vec<u8>, String>) {
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.ended.store(true, Ordering::Release);
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub fn take(&self) -> Option<std::result::Result<Vec<u8>, String>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// How the end of a transfer is reported.
pub enum End {
    Nobody,
    Slot(Arc<Slot>),
    Done(Done),
}

impl End {
    /// Reports the end of the transfer. If a thread waits for it, an owned buffer is returned to that thread.
    pub fn tell(self, outcome: Outcome, memory: Memory, events: &mut Events) {
        match self {
            End::Nobody => (),
            End::Slot(slot) => {
                let buffer = if let Memory::Owned(buffer) = memory { buffer } else { Vec::new() };
                slot.end(outcome.map(|()| buffer));
                events.ended = true;
            }
            End::Done(done) => events.list.push(Event::Done(done, outcome)),
        }
    }
}

/// A frame that is queued or partly written.
pub struct Outgoing {
    pub frame: Frame,
    pub data: Memory,
    pub end: End,
    pub(super) head: [u8; HEAD],
    /// Bytes of header and data that the system has accepted. Unused if several connections carry the frame.
    pub(super) sent: usize,
}

impl Outgoing {
    pub fn new(frame: Frame, data: Memory, end: End) -> Outgoing {
        Outgoing { frame, data, end, head: frame.write(), sent: 0 }
    }

    pub fn control(frame: Frame) -> Outgoing {
        Outgoing::new(frame, Memory::Owned(Vec::new()), End::Nobody)
    }

    pub(super) fn left(&self) -> usize {
        HEAD + self.frame.data() - self.sent
    }
}

/// Where the data of a frame is stored.
pub enum Target {
    Discard,
    /// For mail, or for a message that has no posted receive. The buffer has the size of the data.
    Fresh(Vec<u8>),
    Posted(Memory, End),
}

impl Target {
    /// Appends pieces for the `bytes` bytes at offset `from`, as many as fit. Appends none if the data is discarded.
    pub fn pieces(&mut self, from: usize, bytes: usize, into: &mut Pieces) {
        match self {
            Target::Discard => (),
            Target::Fresh(buffer) => {
                into.push(Span { addr: buffer[from..].as_mut_ptr() as usize, bytes });
            }
            Target::Posted(memory, _) => memory.pieces(from, bytes, into),
        }
    }

    /// Returns all pieces of the first `bytes` bytes. Empty if the data is discarded.
    pub fn all(&mut self, bytes: usize) -> Vec<Span> {
        match self {
            Target::Discard => Vec::new(),
            Target::Fresh(buffer) => vec![Span { addr: buffer.as_mut_ptr() as usize, bytes }],
            Target::Posted(memory, _) => memory.all(bytes),
        }
    }

    pub fn write(&mut self, from: usize, data: &[u8]) {
        match self {
            Target::Discard => (),
            Target::Fresh(buffer) => buffer[from..from + data.len()].copy_from_slice(data),
            Target::Posted(memory, _) => memory.write(from, data),
        }
    }

    pub fn fail(self, why: &str, events: &mut Events) {
        if let Target::Posted(memory, end) = self {
            end.tell(Err(why.to_string()), memory, events);
        }
    }
}

pub enum Event {
    Done(Done, Outcome),
    /// Passes mail to the mailbox, or handles the loss of a peer or of a connection.
    Call(Box<dyn FnOnce() + Send>),
}

/// Callbacks that must run after all locks of connections and channels are released.
#[derive(Default)]
pub struct Events {
    pub list: Vec<Event>,
    /// Whether a transfer for which a thread waits has ended.
    pub ended: bool,
}

impl Events {
    /// Runs all callbacks, which may start transfers. A panic, which is our own bug, is logged: the other callbacks may
    /// be of other groups, or record that a peer is lost.
    pub fn run(self) {
        for event in self.list {
            let run = || {
                match event {
                    Event::Done(done, outcome) => done(outcome),
                    Event::Call(call) => call(),
                }
                Ok(())
            };
            contained(run).unwrap_or_else(|bug| log::error!("{}", bug.in_one_line()));
        }
    }
}
