//! What carries bytes between hosts: messages to other ranks under tags, and mail.
//!
//! A lane sends and receives with [`Link`], and waits for each message. Sends and receives of the program use
//! [`Mail`]: short messages that the receiver's [`Mailbox`] takes as they come, and bodies, which go from the memory of a
//! tensor to that of another one, without a thread that waits. TCP connections are one link (`wire`), ranks as threads are
//! another (`engine/local.rs`).

#![allow(unsafe_code)] // sends from and receives into memory that the caller vouches for

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::types::Span;

/// Carries messages to other ranks. Every message goes to one rank under one tag; messages of one tag arrive in order.
pub trait Link: Mail {
    /// Starts to receive a message of at most `bytes` into the front of `buffer`.
    fn receive(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>>;
    /// Starts to send the first `bytes` of `buffer`.
    fn send(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>>;
    /// As `receive`, a message of just the size of `pieces` into their memory. The buffer that `wait` returns is empty.
    ///
    /// # Safety
    /// The memory is valid, and nobody else uses it, until the transfer was waited for or dropped.
    unsafe fn receive_into(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>>;
    /// As `send`, from the memory of `pieces`, one after the other. It may not end before the peer receives. The buffer that
    /// `wait` returns is empty.
    ///
    /// # Safety
    /// The memory is valid, and nobody writes it, until the transfer was waited for or dropped.
    unsafe fn send_from(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>>;
    /// Breaks off: every wait on this rank ends with an error now, and so does every wait of a peer for this rank. Bodies of
    /// this rank end with an error soon. Mail that was sent before is delivered as far as that takes no time.
    fn cut(&self);
    /// The process of a rank in words, as far as it has said that; for error texts.
    fn process(&self, _peer: usize) -> String {
        String::new()
    }
    /// Leaves for good, and gives back connections that nobody else uses. The group may be kept after its end.
    fn close(&self) {
        self.cut();
    }
}

/// Why a message did not come or go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// The time that it may take has passed; the peer may be well.
    pub is_late: bool,
    /// What the link says.
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

/// A message in flight. Dropping it, or a wait that fails, gives it up: the link no longer uses its memory.
pub trait Transfer: Send {
    /// Waits for its end and returns the buffer.
    fn wait(self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, Broken>;
    /// Waits at most so long, and goes on with the transfer. True where `wait` will return at once.
    fn ends_within(&self, timeout: Duration) -> bool;
}

/// Longest mail.
pub const LONGEST_MAIL: usize = 32 << 10;

/// Called once, at the end of a body, by any thread, without a lock of the link; an error is the text of the link.
pub type Done = Box<dyn FnOnce(std::result::Result<(), String>) + Send>;

/// Carries what the program sends to other ranks. No call but `poll` and `open_mailbox` calls a mailbox.
pub trait Mail: Send + Sync {
    /// Names what takes this rank's mail. Called once; mail that came before is handed to it in this call.
    fn open_mailbox(&self, mailbox: Arc<dyn Mailbox>);

    /// Sends at most `LONGEST_MAIL` bytes, which are copied. Never waits. Mail from one rank to another arrives in order.
    fn mail(&self, peer: usize, message: &[u8]) -> Result<()>;

    /// Starts to send the memory of `pieces`, one after the other, as the body with this number, which `peer` receives under
    /// the same number. Numbers of a rank for one peer are used once. No byte leaves before the peer receives it. Never waits.
    ///
    /// # Safety
    /// The memory is valid, and nobody writes it, until `done` was called.
    unsafe fn send_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()>;

    /// Starts to receive the body with this number of `peer` into the memory of `pieces`, which have its size.
    ///
    /// # Safety
    /// The memory is valid, and nobody else uses it, until `done` was called.
    unsafe fn receive_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()>;

    /// Mail is read as it comes while one of these lives, also where no thread waits: a message of the program is pending.
    fn await_mail(&self) -> Box<dyn Send>;

    /// Advances what can advance, for a thread of the program that waits for a message; sleeps for at most `sleep` where nothing
    /// can. True where something did. Calls mailboxes and `Done`s.
    fn poll(&self, sleep: Duration) -> bool;
}

/// Takes a rank's mail. Called by any thread, without a lock of the link, for one peer by one thread at a time.
pub trait Mailbox: Send + Sync {
    fn came(&self, peer: usize, message: Vec<u8>);
    /// Nothing more comes from this peer: its process ended, it has cut the link, or the network failed. Pending bodies of
    /// this peer end with the same text.
    fn lost(&self, peer: usize, why: &str);
}
