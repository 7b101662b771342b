//! What carries bytes between hosts: messages to other ranks under tags, and mail.
//!
//! A lane sends and receives with [`Link`], and waits for each message. Sends and receives of the program use [`Mail`].
//! Mail proper is short messages, which the receiver's [`Mailbox`] accepts as they arrive. Bodies are copied from one
//! tensor's memory to another's, without a thread that waits. TCP connections are one link (`wire`), ranks as threads
//! are another (`engine/local.rs`).

#![allow(unsafe_code)] // the caller vouches for the memory

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::types::Span;

/// Sends messages to other ranks and receives theirs. A message has one receiver and one tag; messages of one tag
/// arrive in order.
pub trait Link: Mail {
    /// Starts to receive a message of at most `bytes` into the front of `buffer`.
    fn receive(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>>;
    /// Starts to send the first `bytes` of `buffer`.
    fn send(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>>;
    /// Like `receive`, into the memory of `pieces`, whose size the message must have. The buffer that `wait` returns is
    /// empty.
    ///
    /// # Safety
    /// The memory must be valid, and unused by others, until the transfer was waited for or dropped.
    unsafe fn receive_into(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>>;
    /// Like `send`, from the memory of `pieces`, in order. The send may not end before the peer receives. The buffer
    /// that `wait` returns is empty.
    ///
    /// # Safety
    /// The memory must be valid and not written until the transfer was waited for or dropped.
    unsafe fn send_from(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>>;
    /// Breaks off. Every wait of this rank ends with an error now, and so does every wait of a peer for this rank.
    /// Bodies of this rank end with an error soon. Mail sent before is still delivered if that needs no wait.
    fn cut(&self);
    /// The process of a rank as text, for error messages. Empty if the rank has not said it.
    fn process(&self, _peer: usize) -> String {
        String::new()
    }
    /// A thread that started transfers stops waiting, perhaps before all of them have ended: another thread must advance
    /// the rest. Never blocks.
    fn hand_over(&self) {}
    /// Leaves for good, and closes connections that no other group uses. The group object may outlive this call.
    fn close(&self) {
        self.cut();
    }
}

/// Why a message was not sent or received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Whether the timeout passed; the peer may be alive.
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

/// A message in flight. Dropping it, or a wait that fails, gives it up: the link stops using its memory.
pub trait Transfer: Send {
    /// Waits for the end of the transfer and returns its buffer.
    fn wait(self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, Broken>;
    /// Waits for at most `timeout`; the transfer continues afterwards. True if `wait` would now return at once.
    fn ends_within(&self, timeout: Duration) -> bool;
}

/// Longest mail in bytes.
pub const LONGEST_MAIL: usize = 80 << 10;

/// Called once when a body has ended, by any thread, with no lock of the link held. An error is the link's text.
pub type Done = Box<dyn FnOnce(std::result::Result<(), String>) + Send>;

/// Sends mail and bodies of the program to other ranks. Only `poll` and `open_mailbox` call a mailbox.
pub trait Mail: Send + Sync {
    /// Sets the mailbox of this rank. Called once; mail that has already arrived is delivered within this call.
    fn open_mailbox(&self, mailbox: Arc<dyn Mailbox>);

    /// Sends at most `LONGEST_MAIL` bytes. Never blocks. Mail from one rank to another arrives in order.
    fn mail(&self, peer: usize, message: Vec<u8>) -> Result<()>;

    /// Starts to send the memory of `pieces`, in order, as the body `number`. `peer` receives it under the same number.
    /// A rank uses each number once per peer. No byte is sent before the peer has posted its receive. If it has, the body
    /// keeps its place among this rank's mail: the peer's `done` is called between the mail before and behind it. Never
    /// blocks.
    ///
    /// # Safety
    /// The memory must be valid and not written until `done` was called.
    unsafe fn send_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()>;

    /// Starts to receive the body `number` of `peer` into the memory of `pieces`, whose size is the body's.
    ///
    /// # Safety
    /// The memory must be valid, and unused by others, until `done` was called.
    unsafe fn receive_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()>;

    /// Gives up a receive of the body `number` that has not begun to arrive and will not. Its memory is no longer used, and
    /// its `done` is dropped. Never calls back.
    fn abandon_body(&self, peer: usize, number: u64);

    /// While the returned guard lives, arriving mail is read even if no thread waits, because a message of the program
    /// is pending.
    fn await_mail(&self) -> Box<dyn Send>;

    /// Advances what can advance, for a thread of the program that waits for a message. Sleeps for at most `sleep` if
    /// nothing can advance. Returns true if something did. Calls mailboxes and `Done`s.
    fn poll(&self, sleep: Duration) -> bool;
}

/// Accepts a rank's mail. Called with no lock of the link held, by any thread, but for one peer by one thread at a
/// time.
pub trait Mailbox: Send + Sync {
    fn came(&self, peer: usize, message: Vec<u8>);
    /// Reports that nothing more arrives from this peer: its process ended, it cut the link, or the network failed.
    /// Pending bodies of this peer end with the same text.
    fn lost(&self, peer: usize, why: &str);
}
