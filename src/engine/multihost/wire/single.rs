//! A connection that is one TCP connection. Reads and writes never block.
//!
//! Frames are written in the order in which they were pushed. A thread that pushes a frame writes it itself if the
//! queue is empty. If the system does not accept everything immediately, the thread that drives the wire writes the
//! rest. Only the driving thread reads. Data of a body is read directly into the body's memory; headers and short data
//! pass through a buffer.

#![allow(unsafe_code)] // the callers of transfers vouch for the memory

use std::collections::VecDeque;
use std::mem;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use once_cell::sync::OnceCell;

use super::descriptor::Descriptor;
use super::driving::Driving;
use super::frame::{Frame, HEAD};
use super::memory::{Memory, Pieces};
use super::receiver::{Incoming, Origin, Routes, Turn};
use super::transfer::{End, Events, Outgoing};
use super::{locked, sockets};
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::types::Span;

/// Size of the buffer for headers and short data.
const BUFFER: usize = 64 << 10;
/// Longer data is received directly into its memory, not through the buffer.
const SHORT: usize = 16 << 10;
/// One connection receives roughly this many bytes in one turn. Then other connections get their turn, and a waiting
/// thread checks whether its segment has arrived, because a segment is combined faster while it is in the cache.
const TURN: usize = 256 << 10;

/// The system accepts no more than about this many bytes that it has not sent. Otherwise it usually accepts up to 4
/// MiB, and the copies have often left the processor's cache before it sends them (docs/internals/benchmarks.md). Bytes
/// that are on their way do not count, so the limit does not slow down a long link.
const UNSENT: usize = 1 << 20;

pub struct Single {
    descriptor: Descriptor,
    token: u64,
    out: Mutex<Out>,
    inn: Mutex<In>,
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

/// State of the reading side: the buffer, whose bytes `from..to` are not handled yet, and the frame whose data is
/// arriving.
struct In {
    buffer: Box<[u8]>,
    from: usize,
    to: usize,
    current: Option<Incoming>,
}

impl Single {
    pub fn new(token: u64, fd: OwnedFd) -> Single {
        let inn = In { buffer: vec![0; BUFFER].into_boxed_slice(), from: 0, to: 0, current: None };
        let (descriptor, broken) = (Descriptor::new(fd), OnceCell::new());
        sockets::limit_unsent(descriptor.fd(), UNSENT);
        Single { descriptor, token, out: Mutex::default(), inn: Mutex::new(inn), broken }
    }

    pub fn fd(&self) -> i32 {
        self.descriptor.fd()
    }

    pub fn broken(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    pub fn is_flushed(&self) -> bool {
        locked(&self.out).queue.is_empty()
    }

    pub fn is_delivered(&self) -> bool {
        self.is_flushed() && sockets::backlog(self.fd()) == 0
    }

    // -------------------------------------------------------------------------------------------------------- writing

    pub fn push(&self, driving: &Driving, outgoing: Outgoing, events: &mut Events) {
        let mut out = locked(&self.out);
        if let Some(why) = self.broken.get() {
            drop(out);
            return outgoing.end.tell(Err(why.clone()), outgoing.data, events);
        }
        out.queue.push_back(outgoing);
        if out.queue.len() == 1 {
            self.write(driving, &mut out, events);
        }
    }

    pub fn flush(&self, driving: &Driving, events: &mut Events) {
        self.write(driving, &mut locked(&self.out), events);
    }

    fn write(&self, driving: &Driving, out: &mut Out, events: &mut Events) {
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
            driving.watch_output(self.fd(), self.token, watch);
        }
    }

    /// Makes one system call. Returns None if the queue is empty, otherwise whether the system accepted less than
    /// everything.
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

    pub fn read(&self, routes: &impl Routes, from: Origin, events: &mut Events) -> Turn {
        let mut inn = locked(&self.inn);
        let mut moved = 0;
        loop {
            match handle_buffered(&mut inn, routes, from, events) {
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
                        return match handle_buffered(&mut inn, routes, from, events) {
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
            && current.missing() > SHORT
        {
            current.target.pieces(current.got, current.missing(), &mut pieces);
        }
        let direct = pieces.bytes();
        if direct == current.as_ref().map_or(0, Incoming::missing) && direct > 0 {
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

    // ------------------------------------------------------------------------------------------------- what ends early

    pub fn forget(&self, channel: u64, why: &str, events: &mut Events) {
        if let Some(current) = &mut locked(&self.inn).current {
            current.forget(channel, why, events);
        }
        let mut out = locked(&self.out);
        let (kept, gone): (VecDeque<_>, VecDeque<_>) = mem::take(&mut out.queue)
            .into_iter()
            .partition(|one| one.frame.channel != channel || one.sent > 0 || matches!(one.end, End::Nobody));
        out.queue = kept;
        for one in out.queue.iter_mut().filter(|one| one.frame.channel == channel) {
            one.data.own(one.sent.saturating_sub(HEAD));
            mem::replace(&mut one.end, End::Nobody).tell(Err(why.to_string()), Memory::Owned(Vec::new()), events);
        }
        drop(out);
        for one in gone {
            one.end.tell(Err(why.to_string()), one.data, events);
        }
    }

    pub fn give_up(&self, is_it: impl Fn(&End) -> bool, meanwhile: impl FnOnce()) {
        let mut inn = locked(&self.inn);
        meanwhile();
        if let Some(current) = &mut inn.current {
            current.give_up(&is_it);
        }
        let mut out = locked(&self.out);
        out.queue.retain(|one| !is_it(&one.end) || one.sent > 0);
        for one in out.queue.iter_mut().filter(|one| is_it(&one.end)) {
            one.data.own(one.sent.saturating_sub(HEAD));
            one.end = End::Nobody;
        }
    }

    pub fn fail(&self, driving: &Driving, why: &str, events: &mut Events) {
        let mut out = locked(&self.out);
        if self.broken.set(why.to_string()).is_err() {
            return;
        }
        let queue = mem::take(&mut out.queue);
        if mem::take(&mut out.watched) {
            driving.watch_output(self.fd(), self.token, false);
        }
        drop(out);
        queue.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.data, events));
        if let Some(current) = locked(&self.inn).current.take() {
            current.target.fail(why, events);
        }
    }
}

/// Handles the frames in the buffer, and completes data that was read directly into its memory.
fn handle_buffered(inn: &mut In, routes: &impl Routes, from: Origin, events: &mut Events) -> Result<(), String> {
    loop {
        if inn.current.is_none() {
            let Some(head) = inn.buffer[inn.from..inn.to].first_chunk::<HEAD>() else { return Ok(()) };
            let frame = Frame::read(head).ok_or("it sent what is no frame")?;
            inn.from += HEAD;
            fault_points::reached(FaultPoint::FrameSeen);
            inn.current = Incoming::begin(routes, from, frame, events)?;
            if inn.current.is_none() {
                continue;
            }
        }
        let In { buffer, from: start, to, current } = inn;
        let one = current.as_mut().expect("just set");
        *start += one.store(&buffer[*start..*to]);
        if one.missing() > 0 {
            return Ok(());
        }
        fault_points::reached(FaultPoint::FrameDone);
        current.take().expect("just used").end(from, events);
    }
}
