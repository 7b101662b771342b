//! A *path*: one of several TCP connections that together carry a stream of frames.

#![allow(unsafe_code)] // sends memory for which the caller vouches

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::descriptor::Descriptor;
use super::segment::SEGMENT;
use super::sockets;
use crate::types::Span;

/// Largest number of TCP connections between two processes.
pub const MOST_PATHS: usize = 16;

/// What the system says about a path.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Total number of bytes that the peer's system has acknowledged.
    pub acked: u64,
    /// Whether the peer's system still has to acknowledge bytes for which it has room.
    pub owes: bool,
    pub round_trip: Duration,
}

/// One of the connections that carry a stream.
pub trait Path {
    /// Sends the pieces in order, without blocking. Returns the bytes that the system accepted.
    ///
    /// # Safety
    /// The pieces must be readable.
    unsafe fn send(&self, pieces: &[Span]) -> io::Result<usize>;
    /// Returns how many bytes this system has accepted and the peer's system has not acknowledged.
    fn backlog(&self) -> usize;
    fn progress(&self) -> Progress;
}

/// The socket of one path.
pub struct Socket {
    descriptor: Descriptor,
    pub token: u64,
    /// Its two addresses, for the log.
    pub ends: String,
    /// Whether epoll watches for space to write. Written and read under the lock of the sending side.
    pub watched: AtomicBool,
}

impl Socket {
    pub fn new(token: u64, fd: OwnedFd) -> Arc<Socket> {
        let ends = sockets::ends(&fd);
        let descriptor = Descriptor::new(fd);
        // Otherwise a slow path would accept as many bytes as a fast one.
        sockets::limit_unsent(descriptor.fd(), SEGMENT as usize);
        Arc::new(Socket { descriptor, token, ends, watched: AtomicBool::new(false) })
    }

    pub fn fd(&self) -> i32 {
        self.descriptor.fd()
    }
}

impl Path for Arc<Socket> {
    unsafe fn send(&self, pieces: &[Span]) -> io::Result<usize> {
        // SAFETY: as the caller's.
        unsafe { sockets::send(self.fd(), pieces) }
    }

    fn backlog(&self) -> usize {
        sockets::backlog(self.fd())
    }

    fn progress(&self) -> Progress {
        let sent = sockets::sent(self.fd());
        // A slow peer reports no room, and none of our packets is in flight. If the network is dead, the peer's last
        // report still shows room, although perhaps no packet gets out.
        let has_room = sent.room.is_some_and(|room| room > 0);
        let owes = sent.in_flight > 0 || (has_room && self.backlog() > 0);
        Progress { acked: sent.acked, owes, round_trip: sent.round_trip }
    }
}
