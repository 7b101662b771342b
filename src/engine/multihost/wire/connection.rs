//! The connection to another process, which all groups of the two processes share: one TCP connection (`single`),
//! several (`several`), or UCX (`carried`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::ProcessId;
use super::carried::Carried;
use super::driving::Driving;
use super::expected::Expected;
use super::path::Socket;
use super::receiver::{Origin, Routes, Turn};
use super::several::Several;
use super::single::Single;
use super::transfer::{End, Events, Outgoing};

pub struct Connection {
    pub token: u64,
    pub peer: ProcessId,
    sockets: Sockets,
}

/// What carries the frames.
#[allow(clippy::large_enum_variant)] // the usual one is reached without a further pointer
enum Sockets {
    Single(Single),
    Several(Box<Several>),
    Carried(Arc<Carried>),
}

impl Connection {
    pub fn new(token: u64, peer: ProcessId, fd: OwnedFd) -> Connection {
        Connection { token, peer, sockets: Sockets::Single(Single::new(token, fd)) }
    }

    /// Makes a connection that consists of several sockets. `first` is the first one; `Several::attach` adds the
    /// others.
    pub fn of_several(driving: &Arc<Driving>, peer: ProcessId, number: u64, first: &Arc<Socket>) -> Connection {
        let several = Several::new(driving, number);
        several.attach(driving, 0, first);
        Connection { token: first.token, peer, sockets: Sockets::Several(Box::new(several)) }
    }

    /// Makes a connection whose frames UCX carries.
    pub fn by_ucx(from: Origin, carried: Arc<Carried>) -> Connection {
        Connection { token: from.token, peer: from.peer, sockets: Sockets::Carried(carried) }
    }

    pub fn several(&self) -> Option<&Several> {
        match &self.sockets {
            Sockets::Several(several) => Some(several),
            Sockets::Single(_) | Sockets::Carried(_) => None,
        }
    }

    /// Called once, when the connection may be read.
    pub fn introduce(&self) -> io::Result<()> {
        match &self.sockets {
            Sockets::Carried(carried) => carried.introduce(),
            Sockets::Single(_) | Sockets::Several(_) => Ok(()),
        }
    }

    /// Called once, when everything was written and nothing more will be.
    pub fn conclude(&self) {
        match &self.sockets {
            Sockets::Carried(carried) => carried.conclude(),
            Sockets::Single(_) | Sockets::Several(_) => (),
        }
    }

    /// Returns the descriptors and tokens of the connection's sockets.
    pub fn sockets(&self) -> Vec<(i32, u64)> {
        match &self.sockets {
            Sockets::Single(single) => vec![(single.fd(), self.token)],
            Sockets::Several(several) => several.sockets().iter().map(|socket| (socket.fd(), socket.token)).collect(),
            Sockets::Carried(carried) => vec![(carried.fd(), self.token)],
        }
    }

    /// Whether frames are received one after the other, in the order in which they were sent. UCX receives long frames
    /// at the same time.
    pub fn keeps_order(&self) -> bool {
        !matches!(self.sockets, Sockets::Carried(_))
    }

    /// Returns the counts of posted receives of bodies, if UCX carries the connection. TCP does not need them.
    pub fn expected(&self) -> Option<&Expected> {
        match &self.sockets {
            Sockets::Carried(carried) => Some(carried.expected()),
            Sockets::Single(_) | Sockets::Several(_) => None,
        }
    }

    pub fn broken(&self) -> Option<&str> {
        match &self.sockets {
            Sockets::Single(single) => single.broken(),
            Sockets::Several(several) => several.broken(),
            Sockets::Carried(carried) => carried.broken(),
        }
    }

    /// Whether all queued frames have been written.
    pub fn is_flushed(&self) -> bool {
        match &self.sockets {
            Sockets::Single(single) => single.is_flushed(),
            Sockets::Several(several) => several.is_flushed(),
            Sockets::Carried(carried) => carried.is_flushed(),
        }
    }

    /// Whether the peer's system has all that was queued. Then the peer reads it even if this process ends. If this
    /// process ends before that, queued data may be lost: data that arrives for a closed socket resets the connection.
    pub fn is_delivered(&self) -> bool {
        match &self.sockets {
            Sockets::Single(single) => single.is_delivered(),
            Sockets::Several(several) => several.is_flushed(), // the peer's process has acknowledged everything
            Sockets::Carried(carried) => carried.is_delivered(), // the system or the device has everything
        }
    }

    /// Queues a frame and writes as much of the queue as the system accepts now. If the connection is broken, the frame
    /// is dropped and its transfer fails.
    pub fn push(&self, driving: &Driving, outgoing: Outgoing, events: &mut Events) {
        match &self.sockets {
            Sockets::Single(single) => single.push(driving, outgoing, events),
            Sockets::Several(several) => several.push(driving, outgoing, events),
            Sockets::Carried(carried) => carried.push(outgoing, events),
        }
    }

    /// Writes as much of the queue as the system accepts now on this socket.
    pub fn flush(&self, driving: &Driving, token: u64, events: &mut Events) {
        match &self.sockets {
            Sockets::Single(single) => single.flush(driving, events),
            Sockets::Several(several) => several.writable(driving, token),
            Sockets::Carried(_) => (), // UCX waits for its own sockets
        }
    }

    /// Reads and handles what has arrived on this socket. Only the thread that drives the wire calls it.
    pub fn read(&self, driving: &Driving, routes: &impl Routes, token: u64, events: &mut Events) -> Turn {
        let from = Origin { peer: self.peer, token: self.token };
        match &self.sockets {
            Sockets::Single(single) => single.read(routes, from, events),
            Sockets::Several(several) => several.read(driving, routes, from, token, events),
            Sockets::Carried(carried) => carried.read(events),
        }
    }

    /// Stops using the memory of this channel's transfers. A frame that was partly written continues from a copy; one
    /// that was partly read is discarded.
    pub fn forget(&self, driving: &Driving, channel: u64, why: &str, events: &mut Events) {
        match &self.sockets {
            Sockets::Single(single) => single.forget(channel, why, events),
            Sockets::Several(several) => several.forget(driving, channel, why, events),
            Sockets::Carried(carried) => carried.forget(channel, why, events),
        }
    }

    /// Stops using the memory of the transfer that `is_it` selects. Calls `meanwhile` while the reading side is locked,
    /// so that no transfer can start.
    pub fn give_up(&self, driving: &Driving, is_it: impl Fn(&End) -> bool, meanwhile: impl FnOnce()) {
        match &self.sockets {
            Sockets::Single(single) => single.give_up(is_it, meanwhile),
            Sockets::Several(several) => several.give_up(driving, is_it, meanwhile),
            Sockets::Carried(carried) => carried.give_up(is_it, meanwhile),
        }
    }

    /// Marks the connection as broken and fails every transfer in flight.
    pub fn fail(&self, driving: &Driving, why: &str, events: &mut Events) {
        match &self.sockets {
            Sockets::Single(single) => single.fail(driving, why, events),
            Sockets::Several(several) => several.fail(why, events),
            Sockets::Carried(carried) => carried.fail(why, events),
        }
    }
}
