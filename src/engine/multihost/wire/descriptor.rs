//! The descriptor of a socket. Forked children close their copy.

use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};

use super::sockets;
use crate::os::watch;

pub struct Descriptor {
    /// None only while this is dropped in a forked child, because the child's copy of the descriptor was closed at the
    /// fork.
    fd: Option<OwnedFd>,
    generation: u32,
}

impl Descriptor {
    pub fn new(fd: OwnedFd) -> Descriptor {
        sockets::close_in_children(fd.as_raw_fd(), true);
        Descriptor { fd: Some(fd), generation: watch::generation() }
    }

    pub fn fd(&self) -> i32 {
        self.fd.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if self.generation != watch::generation() {
            mem::forget(self.fd.take()); // closed at the fork; its number may be another file now
        } else {
            sockets::close_in_children(self.fd(), false);
        }
    }
}
