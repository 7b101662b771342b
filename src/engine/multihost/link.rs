//! Defines the traits for carrying bytes between hosts: tagged messages to other ranks, and mail.
//!
//! A lane sends and receives with [`Link`], and waits for each message. Sends and receives of the program use [`Mail`],
//! which carries mail and bodies. Mail is short, and the receiver's [`Mailbox`] accepts it on arrival. A body is copied
//! from one tensor's memory to another's, and no thread waits for it. There are two links: one uses TCP connections or
//! UCX (`wire`), and in the other the ranks are threads of one process (`engine/local.rs`).

#![allow(unsafe_code)] // the caller vouches for the memory

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::Polled;
use crate::error::Result;
use crate::types::Span;

/// Sends messages to other ranks and receives theirs. A message has one receiver and one tag; messages of one tag
/// arrive in order.
pub trait Link: Mail {
    /// Starts to receive a message of at most `bytes` into the front of `buffer`.
    fn receive(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>>;
    /// Starts to send the first `bytes` of `buffer`.
    fn send(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>>;
    /// Whether a message of `peer` with this tag has arrived for which no receive is posted.
    fn has_unread(&self, peer: usize, tag: u32) -> bool;
    /// Like `receive`, into the memory of `pieces`. The message must have the size of that memory. The buffer that
    /// `wait` returns is empty.
    ///
    /// # Safety
    /// The memory must be valid, and unused by others, until the transfer was waited for or dropped.
    unsafe fn receive_into(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>>;
    /// Like `send`, from the memory of `pieces`, in order. The send may last until the peer receives the message. The
    /// buffer that `wait` returns is empty.
    ///
    /// # Safety
    /// The memory must be valid and not written until the transfer was waited for or dropped.
    unsafe fn send_from(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>>;
    /// Cuts this rank off. Every wait of this rank ends with an error now, and so does every wait of a peer for this
    /// rank. Bodies of this rank end with an error soon. Mail that was sent before is still delivered if that needs no
    /// wait.
    fn cut(&self);
    /// Returns the process of a rank as text, for error messages. Empty if the rank has not reported it.
    fn process(&self, _peer: usize) -> String {
        String::new()
    }
    /// Called when a thread that started transfers stops waiting, perhaps before all of them have ended: another thread
    /// must advance the rest. Never blocks.
    fn hand_over(&self) {}
    /// The link may send a message before the receiver has asked for it. Waits until `peer` has asked for all such
    /// messages of this rank, or is lost. Returns false after `timeout`. Until the receiver has asked for a message,
    /// the end of the send does not say that the receiver has come.
    fn await_taken(&self, _peer: usize, _timeout: Duration) -> bool {
        true
    }
    /// Waits until the systems of all peers have this rank's mail, so that the mail arrives even if this process ends.
    /// Returns false if `until` passes first.
    fn await_delivery(&self, _until: Instant) -> bool {
        true
    }
    /// Leaves the link for good, and closes connections that no other group uses. The group object may outlive this
    /// call.
    fn close(&self) {
        self.cut();
    }
}

/// Why a message was not sent or received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Whether the timeout has passed. If so, the peer may be alive.
    pub is_late: bool,
    /// The link's error text.
    pub words: String,
}

impl Broken {
    pub fn late(words: String) -> Broken {
        Broken { is_late: true, words }
    }
}

impl From<String> for Broken {
    fn from(words: String) -> Broken {
        Broken { is_late: false, words }
    }
}

/// A message in flight. A transfer that is dropped, or whose wait fails, is given up: the link stops using its memory.
pub trait Transfer: Send {
    /// Waits for the end of the transfer and returns its buffer.
    fn wait(self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, Broken>;
    /// Waits for at most `timeout`; the transfer continues afterwards. True if `wait` would now return immediately.
    fn ends_within(&self, timeout: Duration) -> bool;
}

/// A transfer that has ended, with its buffer.
pub struct Ended(pub Vec<u8>);

impl Transfer for Ended {
    fn wait(self: Box<Self>, _timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        Ok(self.0)
    }

    fn ends_within(&self, _timeout: Duration) -> bool {
        true
    }
}

/// Longest mail in bytes.
pub const LONGEST_MAIL: usize = 144 << 10;

/// Callers number bodies (`Mail::send_body`) below this. The link itself uses the numbers from this one on.
pub const MOST_BODIES: u64 = 1 << 63;

/// Called once by any thread when a body has ended. The thread holds no lock of the link. An error is the link's text.
pub type Done = Box<dyn FnOnce(std::result::Result<(), String>) + Send>;

/// Sends mail and bodies of the program to other ranks. Of these functions, only `poll` and `open_mailbox` call a
/// mailbox.
pub trait Mail: Send + Sync {
    /// Sets the mailbox of this rank. Called once; mail that has already arrived is delivered within this call.
    fn open_mailbox(&self, mailbox: Arc<dyn Mailbox>);

    /// Sends at most `LONGEST_MAIL` bytes. Never blocks. Mail from one rank to another arrives in order.
    fn mail(&self, peer: usize, message: Vec<u8>) -> Result<()>;

    /// Starts to send the memory of `pieces`, in order, as the body `number`. `peer` receives it under the same number.
    /// Numbers are below `MOST_BODIES`, and a rank uses each number only once per peer. The peer must have posted its
    /// receive before, and must have said so by mail, because the body is sent at once. The body keeps its place among
    /// this rank's mail: on the peer, `done` is called after the mail that was sent before the body, and before the mail that
    /// was sent after it. Never blocks.
    ///
    /// # Safety
    /// The memory must be valid and not written until `done` was called.
    unsafe fn send_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()>;

    /// Starts to receive the body `number` of `peer` into the memory of `pieces`, which must have the body's size. The
    /// peer does not hear of it: the caller tells it by mail.
    ///
    /// # Safety
    /// The memory must be valid, and unused by others, until `done` was called.
    unsafe fn receive_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()>;

    /// Gives up the receive of the body `number`, if the body has not begun to arrive and never will. The receive's
    /// memory is no longer used, and its `done` is dropped without being called.
    fn abandon_body(&self, peer: usize, number: u64);

    /// While the returned guard lives, the link is driven even if no thread waits: mail is read, transfers advance.
    fn keep_driven(&self) -> Box<dyn Send>;

    /// Called by a thread of the program that waits for a message. Advances what can advance, and sleeps for at most
    /// `sleep` if nothing can. Calls mailboxes and `Done`s.
    fn poll(&self, sleep: Duration) -> Polled;
}

/// Accepts a rank's mail. Any thread that holds no lock of the link calls it, but only one thread at a time for each
/// peer.
pub trait Mailbox: Send + Sync {
    fn came(&self, peer: usize, message: Vec<u8>);
    /// Reports that nothing more will arrive from this peer: its process ended, it cut the link, or the network failed.
    /// Pending bodies of this peer end with the same text.
    fn lost(&self, peer: usize, why: &str);
}
