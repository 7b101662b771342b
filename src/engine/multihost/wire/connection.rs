//! One TCP connection to another process, which all groups of the two processes share. Reads and writes never block.
//!
//! Frames are written in the order in which they were pushed. A thread that pushes a frame writes it itself if the
//! queue is empty. If the system does not accept everything at once, the thread that drives the wire writes the rest.
//! Only the driving thread reads. Data of a body is read directly into the body's memory; headers and short data pass
//! through a buffer.

#![allow(unsafe_code)] // the callers of transfers vouch for the memory

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use once_cell::sync::OnceCell;

use super::carried::Carried;
use super::frame::{Frame, HEAD, Kind};
use super::memory::{Memory, Pieces};
use super::path::Socket;
use super::several::Several;
use super::sockets;
pub use super::transfer::Outgoing;
use super::transfer::{End, Events, Target};
use super::{ProcessId, Wire};
use crate::engine::multihost::ucx::Worker;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::os::watch;
use crate::types::Span;

/// Size of the buffer for headers and short data.
const BUFFER: usize = 64 << 10;
/// Longer data is received directly into its memory, not through the buffer.
const SHORT: usize = 16 << 10;
/// One connection receives roughly this many bytes in one turn. Then other connections get their turn, and a waiting
/// thread checks whether its segment has arrived, because a segment is combined faster while it is in the cache.
const TURN: usize = 256 << 10;

pub struct Connection {
    pub token: u64,
    pub peer: ProcessId,
    /// None only while this is dropped in a forked child, because the child's copy of the descriptor was closed at the
    /// fork.
    fd: Option<OwnedFd>,
    generation: u32,
    out: Mutex<Out>,
    inn: Mutex<In>,
    /// Set if several TCP connections carry the frames. `fd`, `out` and `inn` are then unused.
    several: Option<Box<Several>>,
    /// Set if UCX carries the frames. `out` and `inn` are then unused.
    carried: Option<Box<Carried>>,
    /// Why the connection failed. Set once.
    broken: OnceCell<String>,
}

/// Frames that have not been written completely.
#[derive(Default)]
struct Out {
    queue: VecDeque<Outgoing>,
    /// Whether epoll watches the socket for space to write.
    watched: bool,
}

/// Handles the frames of one group. Called with the lock of the connection's reading side held.
pub trait Receiver: Send + Sync {
    /// Handles a frame without data. An error ends the connection.
    fn control(
        &self,
        wire: &Wire,
        from: &Connection,
        frame: Frame,
        events: &mut Events,
    ) -> std::result::Result<(), String>;
    /// Returns where the data of this frame is to be stored. An error ends the connection.
    fn begin(&self, peer: ProcessId, frame: &Frame) -> std::result::Result<Target, String>;
    /// Called when all data of a frame has arrived.
    fn finish(&self, wire: &Wire, from: &Connection, frame: &Frame, target: Target, events: &mut Events);
}

/// State of the reading side: the buffer, whose bytes `from..to` are not handled yet, and the frame whose data is
/// arriving.
struct In {
    buffer: Box<[u8]>,
    from: usize,
    to: usize,
    current: Option<Incoming>,
}

pub struct Incoming {
    pub frame: Frame,
    pub channel: Option<Arc<dyn Receiver>>,
    pub target: Target,
    pub got: usize,
}

/// The result of one call of `read`.
#[derive(PartialEq, Eq)]
pub enum Turn {
    Nothing,
    Moved,
    Broken(String),
}

impl Connection {
    pub fn new(token: u64, peer: ProcessId, fd: OwnedFd) -> Connection {
        sockets::close_in_children(fd.as_raw_fd(), true);
        let inn = In { buffer: vec![0; BUFFER].into_boxed_slice(), from: 0, to: 0, current: None };
        Connection {
            token,
            peer,
            fd: Some(fd),
            generation: watch::generation(),
            out: Mutex::default(),
            inn: Mutex::new(inn),
            several: None,
            carried: None,
            broken: OnceCell::new(),
        }
    }

    /// A connection whose frames UCX carries. `fd`: the TCP connection beside it. `is_first`: whether this process has
    /// called the other.
    pub fn by_ucx(worker: &Arc<Worker>, token: u64, peer: ProcessId, fd: OwnedFd, is_first: bool) -> Connection {
        let carried = Carried::new(worker, token, fd.as_raw_fd(), is_first);
        let mut made = Connection::new(token, peer, fd);
        made.inn = Mutex::new(In { buffer: Box::default(), from: 0, to: 0, current: None });
        made.carried = Some(Box::new(carried));
        made
    }

    /// A connection that consists of several sockets. `first` is the first one; `attach` adds the others.
    pub fn of_several(wire: &Arc<Wire>, peer: ProcessId, number: u64, first: &Arc<Socket>) -> Connection {
        let several = Several::new(wire, number);
        several.attach(wire, 0, first);
        let inn = In { buffer: Box::default(), from: 0, to: 0, current: None };
        Connection {
            token: first.token,
            peer,
            fd: None,
            generation: watch::generation(),
            out: Mutex::default(),
            inn: Mutex::new(inn),
            several: Some(Box::new(several)),
            carried: None,
            broken: OnceCell::new(),
        }
    }

    pub fn several(&self) -> Option<&Several> {
        self.several.as_deref()
    }

    pub fn carried(&self) -> Option<&Carried> {
        self.carried.as_deref()
    }

    pub fn fd(&self) -> i32 {
        self.fd.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// The descriptors and tokens of its sockets.
    pub fn sockets(&self) -> Vec<(i32, u64)> {
        match &self.several {
            Some(several) => several.sockets().iter().map(|socket| (socket.fd(), socket.token)).collect(),
            None => vec![(self.fd(), self.token)],
        }
    }

    pub fn broken(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inn(&self) -> MutexGuard<'_, In> {
        self.inn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all queued frames have been written.
    pub fn is_flushed(&self) -> bool {
        if let Some(several) = &self.several {
            return several.is_flushed();
        }
        if let Some(carried) = &self.carried {
            return carried.is_flushed();
        }
        self.out().queue.is_empty()
    }

    /// Whether the peer's system has all that was queued. Then the peer reads it even if this process ends. Before that,
    /// the end of this process may discard it: data that arrives for a closed socket resets the connection.
    pub fn is_delivered(&self) -> bool {
        if let Some(carried) = &self.carried {
            return carried.is_delivered();
        }
        // Paths are flushed when the peer's process has acknowledged everything.
        self.is_flushed() && (self.several.is_some() || sockets::backlog(self.fd()) == 0)
    }

    /// Called once, when everything was written and nothing more will be.
    pub fn conclude(&self) {
        if let Some(carried) = &self.carried {
            carried.conclude();
        }
    }

    // -------------------------------------------------------------------------------------------------------- writing

    /// Queues a frame and writes as much of the queue as the system accepts now. If the connection is broken, the frame
    /// is dropped and its transfer fails.
    pub fn push(&self, wire: &Wire, outgoing: Outgoing, events: &mut Events) {
        if let Some(several) = &self.several {
            if let Some(refused) = several.push(wire, outgoing, || self.broken.get().is_some()) {
                let why = self.broken().unwrap_or_default().to_string();
                refused.end.tell(Err(why), refused.data, events);
            }
            return;
        }
        if let Some(carried) = &self.carried {
            return carried.push(wire, outgoing, || self.broken.get().cloned(), events);
        }
        let mut out = self.out();
        if let Some(why) = self.broken.get() {
            drop(out);
            return outgoing.end.tell(Err(why.clone()), outgoing.data, events);
        }
        out.queue.push_back(outgoing);
        if out.queue.len() == 1 {
            self.write(wire, &mut out, events);
        }
    }

    /// Writes as much of the queue as the system accepts now on this socket.
    pub fn flush(&self, wire: &Wire, token: u64, events: &mut Events) {
        if let Some(several) = &self.several {
            return several.writable(wire, token);
        }
        if self.carried.is_some() {
            return; // UCX waits for its own sockets
        }
        self.write(wire, &mut self.out(), events);
    }

    fn write(&self, wire: &Wire, out: &mut Out, events: &mut Events) {
        while let Some(wanted) = self.write_some(out) {
            let Ok(wanted) = wanted else { break }; // reading finds the error and fails all transfers
            while out.queue.front().is_some_and(|first| first.left() == 0) {
                let first = out.queue.pop_front().expect("just seen");
                first.end.tell(Ok(()), first.data, events);
            }
            if wanted {
                break;
            }
        }
        let watch = !out.queue.is_empty();
        if watch != out.watched {
            out.watched = watch;
            wire.watch_output(self, watch);
        }
    }

    /// Makes one system call. None if the queue is empty; otherwise whether the system accepted less than everything.
    fn write_some(&self, out: &mut Out) -> Option<std::io::Result<bool>> {
        let mut pieces = Pieces::default();
        for one in &out.queue {
            if one.sent < HEAD {
                let head = Span { addr: one.head.as_ptr() as usize + one.sent, bytes: HEAD - one.sent };
                if !pieces.push(head) {
                    break;
                }
            }
            let from = one.sent.saturating_sub(HEAD);
            let before = pieces.bytes();
            let data = one.frame.data() - from;
            if data > 0 {
                one.data.pieces(from, data, &mut pieces);
            }
            if pieces.bytes() - before < data {
                break; // the list of pieces was full
            }
        }
        let given = pieces.bytes();
        if given == 0 {
            return None;
        }
        fault_points::reached(FaultPoint::FrameReady);
        // SAFETY: headers and owned buffers are in the queue, which is locked. The callers vouch for borrowed memory
        // until the transfer has ended.
        let sent = match unsafe { sockets::send(self.fd(), pieces.as_slice()) } {
            Ok(sent) => sent,
            Err(error) => return Some(Err(error)),
        };
        fault_points::reached(FaultPoint::FrameWritten);
        let mut left = sent;
        for one in &mut out.queue {
            let here = left.min(one.left());
            one.sent += here;
            left -= here;
        }
        Some(Ok(sent < given))
    }

    // -------------------------------------------------------------------------------------------------------- reading

    /// Reads and handles what has arrived on this socket. Only the thread that drives the wire calls it.
    pub fn read(&self, wire: &Wire, token: u64, events: &mut Events) -> Turn {
        if let Some(several) = &self.several {
            return several.read(wire, self, token, events);
        }
        if let Some(carried) = &self.carried {
            return carried.read(wire, events);
        }
        let mut inn = self.inn();
        let mut moved = 0;
        loop {
            match self.handle_buffered(wire, &mut inn, events) {
                Err(why) => return Turn::Broken(why),
                Ok(()) if moved >= TURN => return Turn::Moved,
                Ok(()) => (),
            }
            match self.receive(&mut inn) {
                Err(error) => return Turn::Broken(error.to_string()),
                Ok(Some((0, _))) => return Turn::Broken("Connection closed by peer".to_string()),
                Ok(Some((got, all))) => {
                    moved += got;
                    if !all {
                        // The system had no more data, so another call would find nothing.
                        return match self.handle_buffered(wire, &mut inn, events) {
                            Err(why) => Turn::Broken(why),
                            Ok(()) => Turn::Moved,
                        };
                    }
                }
                Ok(None) => return if moved > 0 { Turn::Moved } else { Turn::Nothing },
            }
        }
    }

    /// Makes one system call. If much of the current data is missing, it reads into that data's memory, otherwise into
    /// the buffer. Returns the number of bytes read, and whether they filled all the space.
    fn receive(&self, inn: &mut In) -> std::io::Result<Option<(usize, bool)>> {
        let In { buffer, from, to, current } = inn;
        let mut pieces = Pieces::default();
        if let Some(current) = current.as_mut()
            && current.frame.data() - current.got > SHORT
        {
            current.target.pieces(current.got, current.frame.data() - current.got, &mut pieces);
        }
        let direct = pieces.bytes();
        if direct == current.as_ref().map_or(0, |current| current.frame.data() - current.got) && direct > 0 {
            // The next header is read together with the end of the data, so that the next frame's data also goes
            // directly to its memory.
            (*from, *to) = (0, 0);
            pieces.push(Span { addr: buffer.as_mut_ptr() as usize, bytes: HEAD });
        }
        if direct == 0 {
            if *from > 0 {
                buffer.copy_within(*from..*to, 0);
                (*from, *to) = (0, *to - *from);
            }
            pieces.push(Span { addr: buffer[*to..].as_mut_ptr() as usize, bytes: buffer.len() - *to });
        }
        // SAFETY: the buffer and the current data's memory are used only under this lock. The callers vouch for
        // borrowed memory until the transfer has ended.
        let got = unsafe { sockets::receive(self.fd(), pieces.as_slice()) }?;
        if let Some(got) = got {
            let data = got.min(direct);
            if let Some(current) = current.as_mut() {
                current.got += data;
            }
            *to += got - data;
        }
        Ok(got.map(|got| (got, got == pieces.bytes())))
    }

    /// Handles the frames in the buffer, and completes data that was read directly into its memory.
    fn handle_buffered(&self, wire: &Wire, inn: &mut In, events: &mut Events) -> std::result::Result<(), String> {
        loop {
            if inn.current.is_none() {
                let Some(head) = inn.buffer[inn.from..inn.to].first_chunk::<HEAD>() else { return Ok(()) };
                let frame = Frame::read(head).ok_or("it sent what is no frame")?;
                inn.from += HEAD;
                fault_points::reached(FaultPoint::FrameSeen);
                let channel = wire.channels().receiver(frame.channel);
                if frame.data() == 0 && !matches!(frame.kind, Kind::Message | Kind::Mail | Kind::Body) {
                    match channel {
                        Some(channel) => channel.control(wire, self, frame, events)?,
                        None => wire.channels().of_none(wire, self, frame, events)?,
                    }
                    continue;
                }
                let target = match &channel {
                    Some(channel) => channel.begin(self.peer, &frame)?,
                    None => Target::Discard,
                };
                inn.current = Some(Incoming { frame, channel, target, got: 0 });
            }
            let In { buffer, from, to, current } = inn;
            let one = current.as_mut().expect("just set");
            let here = (*to - *from).min(one.frame.data() - one.got);
            if here > 0 {
                one.target.write(one.got, &buffer[*from..*from + here]);
                one.got += here;
                *from += here;
            }
            if one.got < one.frame.data() {
                return Ok(());
            }
            fault_points::reached(FaultPoint::FrameDone);
            let Incoming { frame, channel, target, .. } = current.take().expect("just used");
            if let Some(channel) = channel {
                channel.finish(wire, self, &frame, target, events);
            }
        }
    }

    // ------------------------------------------------------------------------------------------------- what ends early

    /// Stops using the memory of this channel's transfers. A frame that was partly written continues from a copy; one
    /// that was partly read is discarded.
    pub fn forget(&self, wire: &Wire, channel: u64, why: &str, events: &mut Events) {
        if let Some(several) = &self.several {
            return several.forget(wire, channel, why, events);
        }
        if let Some(carried) = &self.carried {
            return carried.forget(wire, channel, why, events);
        }
        let mut inn = self.inn();
        if let Some(current) = inn.current.as_mut()
            && current.frame.channel == channel
        {
            std::mem::replace(&mut current.target, Target::Discard).fail(why, events);
        }
        drop(inn);
        let mut out = self.out();
        let (kept, gone): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut out.queue)
            .into_iter()
            .partition(|one| one.frame.channel != channel || one.sent > 0 || matches!(one.end, End::Nobody));
        out.queue = kept;
        for one in out.queue.iter_mut().filter(|one| one.frame.channel == channel) {
            one.data.own(one.sent.saturating_sub(HEAD));
            std::mem::replace(&mut one.end, End::Nobody).tell(Err(why.to_string()), Memory::Owned(Vec::new()), events);
        }
        drop(out);
        for one in gone {
            one.end.tell(Err(why.to_string()), one.data, events);
        }
    }

    /// Stops using the memory of the transfer that `is_it` selects. Calls `meanwhile` while the reading side is locked,
    /// so that no transfer can start.
    pub fn give_up(&self, wire: &Wire, is_it: impl Fn(&End) -> bool, meanwhile: impl FnOnce()) {
        if let Some(several) = &self.several {
            return several.give_up(wire, is_it, meanwhile);
        }
        if let Some(carried) = &self.carried {
            return carried.give_up(wire, is_it, meanwhile);
        }
        let mut inn = self.inn();
        meanwhile();
        if let Some(Incoming { target, .. }) = inn.current.as_mut()
            && matches!(target, Target::Posted(_, end) if is_it(end))
        {
            *target = Target::Discard;
        }
        let mut out = self.out();
        out.queue.retain(|one| !is_it(&one.end) || one.sent > 0);
        for one in out.queue.iter_mut().filter(|one| is_it(&one.end)) {
            one.data.own(one.sent.saturating_sub(HEAD));
            one.end = End::Nobody;
        }
    }

    /// Marks the connection as broken and fails every transfer in flight.
    pub fn fail(&self, wire: &Wire, why: &str, events: &mut Events) {
        if let Some(several) = &self.several {
            return several.fail(why, || self.broken.set(why.to_string()).is_ok(), events);
        }
        if let Some(carried) = &self.carried {
            carried.fail(why, || self.broken.set(why.to_string()).is_ok(), events);
            return wire.carrier().expect("UCX carries it").forget_if_over(self);
        }
        let mut out = self.out();
        if self.broken.set(why.to_string()).is_err() {
            return;
        }
        let queue = std::mem::take(&mut out.queue);
        if std::mem::take(&mut out.watched) {
            wire.watch_output(self, false);
        }
        drop(out);
        queue.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.data, events));
        if let Some(current) = self.inn().current.take() {
            current.target.fail(why, events);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.generation != watch::generation() {
            std::mem::forget(self.fd.take()); // closed at the fork; its number may be another file now
        } else {
            sockets::close_in_children(self.fd(), false);
        }
    }
}
