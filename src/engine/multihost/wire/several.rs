//! A connection that consists of several TCP connections, its *paths*.
//!
//! `stripes` sends the stream of frames; `assembly` puts it together, and `parser` handles the frames. This file
//! connects them to the sockets.

#![allow(unsafe_code)] // receives into memory for which the callers of transfers vouch

use std::mem;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use super::assembly::{Assembly, Came, Sink};
use super::driving::{Counted, Driving};
use super::memory::{Memory, Pieces};
use super::parser::{Frames, Parser};
use super::path::Socket;
use super::receiver::{Origin, Routes, Turn};
use super::segment::{HEAD, Segment, WINDOW};
use super::stripes::{Change, Stripes};
use super::transfer::{End, Events, Outgoing};
use super::{locked, sockets};
use crate::types::Span;

/// Size of each path's buffer for headers and short data.
const BUFFER: usize = 64 << 10;
/// Longer data is received directly into its memory.
const SHORT: usize = 8 << 10;
/// As in `single`.
const TURN: usize = 256 << 10;
/// A path whose end was seen is reported after this time, unless the whole connection has ended meanwhile: the paths of
/// a process that leaves do not all end at the same time.
const REPORT: Duration = Duration::from_millis(50);

/// The reason that is given for the end of a path if the peer has closed it.
const CLOSED: &str = "Connection closed by peer";
/// The ends of warnings about a path.
const OTHERS: &str = "others between the two processes carry its data";
const NONE: &str = "nor on any other between the two processes";

/// The reading side of one path: the buffer, whose bytes `from..to` are not handled yet, and the segment that arrives.
struct Arriving {
    socket: Arc<Socket>,
    buffer: Box<[u8]>,
    from: usize,
    to: usize,
    /// Where the next byte of the segment belongs in the stream, and how many bytes of the segment are missing.
    at: u64,
    left: usize,
}

struct Inn {
    parser: Parser,
    assembly: Assembly,
    /// By number. None if the path was not made, or has ended.
    paths: Vec<Option<Arriving>>,
    /// The numbers of the paths that were made, one bit each.
    made: u32,
    /// The highest acknowledgement of the peer.
    acknowledged: u64,
    /// The highest `Segment::changes` of the peer.
    changes: u64,
}

/// A path that has ended and is not reported yet.
struct Lost {
    since: Instant,
    /// Its two addresses.
    ends: String,
    why: String,
}

pub struct Several {
    /// Number that the connecting process gave to this connection, for the paths that follow the first.
    pub number: u64,
    out: Mutex<Stripes<Arc<Socket>>>,
    inn: Mutex<Inn>,
    lost: Mutex<Vec<Lost>>,
    /// Keeps the wire driven even if no thread of the program waits, so that acknowledgements are sent. None once the
    /// connection has failed.
    driven: Mutex<Option<Counted>>,
    /// Why the connection failed. Set once.
    broken: OnceCell<String>,
}

impl Several {
    pub fn new(driving: &Arc<Driving>, number: u64) -> Several {
        let out = Stripes::new();
        let parser = Parser::new(out.ack());
        let (assembly, paths) = (Assembly::default(), Vec::new());
        let inn = Inn { parser, assembly, paths, made: 0, acknowledged: 0, changes: 0 };
        let driven = Mutex::new(Some(Counted::new(driving)));
        let (out, inn, lost) = (Mutex::new(out), Mutex::new(inn), Mutex::default());
        Several { number, out, inn, lost, driven, broken: OnceCell::new() }
    }

    /// Adds a path, whose number is below `MOST_PATHS`. Epoll must know the socket if there may be something to send.
    pub fn attach(&self, driving: &Driving, number: usize, socket: &Arc<Socket>) {
        let buffer = vec![0; BUFFER].into_boxed_slice();
        let arriving = Arriving { socket: Arc::clone(socket), buffer, from: 0, to: 0, at: 0, left: 0 };
        let mut inn = locked(&self.inn);
        if inn.paths.len() <= number {
            inn.paths.resize_with(number + 1, || None);
        }
        inn.paths[number] = Some(arriving);
        inn.made |= 1 << number;
        self.change(driving, |out| out.attach(number, Arc::clone(socket)));
    }

    /// Whether a path of this number was added, even if it has ended since.
    pub fn had(&self, number: usize) -> bool {
        locked(&self.inn).made & 1 << number != 0
    }

    pub fn sockets(&self) -> Vec<Arc<Socket>> {
        locked(&self.inn).paths.iter().flatten().map(|path| Arc::clone(&path.socket)).collect()
    }

    pub fn broken(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    pub fn is_flushed(&self) -> bool {
        locked(&self.out).is_flushed()
    }

    // -------------------------------------------------------------------------------------------------------- writing

    /// Changes the sending side, and makes epoll watch the sockets that accept no more.
    fn change<T>(&self, driving: &Driving, change: impl FnOnce(&mut Stripes<Arc<Socket>>) -> T) -> T {
        let mut out = locked(&self.out);
        let result = change(&mut out);
        for (_, socket, blocked) in out.paths() {
            if socket.watched.swap(blocked, Ordering::Relaxed) != blocked {
                driving.watch_path(socket.fd(), socket.token, blocked);
            }
        }
        result
    }

    /// As `Connection::push`.
    pub fn push(&self, driving: &Driving, outgoing: Outgoing, events: &mut Events) {
        let refused = self.change(driving, |out| {
            if self.broken.get().is_some() {
                return Some(outgoing);
            }
            out.push(outgoing);
            None
        });
        if let Some(refused) = refused {
            let why = self.broken().unwrap_or_default().to_string();
            refused.end.tell(Err(why), refused.data, events);
        }
    }

    pub fn writable(&self, driving: &Driving, token: u64) {
        self.change(driving, |out| {
            let number = out.paths().find(|(_, socket, _)| socket.token == token).map(|(number, ..)| number);
            if let Some(number) = number {
                out.writable(number);
            }
        });
    }

    /// Checks which paths advance, and reports what has changed unless the connection `is_closing`. Returns why the
    /// connection has ended, if it has.
    pub fn look(&self, driving: &Driving, now: Instant, is_closing: bool) -> Option<String> {
        let (mut gone, mut others, mut lines) = (false, OTHERS, Vec::new());
        let is_doubted = self.change(driving, |out| {
            let changes = out.look(now);
            let several = out.paths().count() > 1;
            for change in changes {
                let ends = |number: usize| {
                    let path = out.paths().find(|(known, ..)| several && *known == number);
                    path.map(|(_, socket, _)| socket.ends.clone())
                };
                match change {
                    Change::Gone => gone = true,
                    Change::Stalled(number) => lines.extend(ends(number).map(|ends| (ends, true))),
                    Change::Advances(number) => lines.extend(ends(number).map(|ends| (ends, false))),
                }
            }
            if !out.is_any_trusted() {
                others = NONE;
            }
            out.is_doubted()
        });
        let mut lost = locked(&self.lost);
        if gone {
            return Some(lost.last().map_or(CLOSED.to_string(), |last| last.why.clone()));
        }
        let ready = |lost: &mut Lost| !is_doubted && now.duration_since(lost.since) >= REPORT;
        let ended: Vec<Lost> = lost.extract_if(.., ready).collect();
        drop(lost);
        if is_closing {
            return None;
        }
        for (ends, stalled) in lines {
            match stalled {
                true => log::warn!("nothing arrives on the connection {ends}: {others}"),
                false => log::info!("the connection {ends} carries data again"),
            }
        }
        for Lost { ends, why, .. } in ended {
            log::warn!("the connection {ends} has ended ({why}): {OTHERS}");
        }
        None
    }

    // -------------------------------------------------------------------------------------------------------- reading

    /// Reads and handles what has arrived on one path. Only the thread that drives the wire calls it.
    pub fn read(&self, driving: &Driving, routes: &impl Routes, from: Origin, token: u64, events: &mut Events) -> Turn {
        let mut inn = locked(&self.inn);
        let number = inn.paths.iter().position(|path| path.as_ref().is_some_and(|path| path.socket.token == token));
        let Some(number) = number else { return Turn::Nothing };
        let before = inn.parser.position;
        let turn = Reading { inn: &mut inn, number, several: self, driving, routes, from, events }.turn();
        let position = inn.parser.position;
        if position > before {
            inn.parser.ack.store(position, Ordering::Release);
            self.change(driving, Stripes::acknowledge);
        }
        match turn {
            Ok(turn) => turn,
            Err(Failure::Stream(why)) => Turn::Broken(why),
            Err(Failure::Path(why)) => {
                let since = Instant::now();
                if !self.change(driving, |out| out.lose(number, since)) {
                    return Turn::Broken(why);
                }
                let Arriving { socket, .. } = inn.paths[number].take().expect("just read");
                drop(inn);
                locked(&self.lost).push(Lost { since, ends: socket.ends.clone(), why });
                Turn::Without(socket)
            }
        }
    }

    // ------------------------------------------------------------------------------------------------- what ends early

    /// As `Connection::forget`.
    pub fn forget(&self, driving: &Driving, channel: u64, why: &str, events: &mut Events) {
        let mut inn = locked(&self.inn);
        if let Some(current) = &mut inn.parser.current {
            current.forget(channel, why, events);
        }
        drop(inn);
        let mut ended = Vec::new();
        let gone = self.change(driving, |out| {
            let keeps = |one: &Outgoing| matches!(one.end, End::Nobody);
            let begun = |one: &mut Outgoing| ended.push(mem::replace(&mut one.end, End::Nobody));
            out.remove(|one| one.frame.channel == channel, keeps, begun)
        });
        for end in ended {
            end.tell(Err(why.to_string()), Memory::Owned(Vec::new()), events);
        }
        for one in gone {
            one.end.tell(Err(why.to_string()), one.data, events);
        }
    }

    /// As `Connection::give_up`.
    pub fn give_up(&self, driving: &Driving, is_it: impl Fn(&End) -> bool, meanwhile: impl FnOnce()) {
        let mut inn = locked(&self.inn);
        meanwhile();
        if let Some(current) = &mut inn.parser.current {
            current.give_up(&is_it);
        }
        let gone =
            self.change(driving, |out| out.remove(|one| is_it(&one.end), |_| false, |one| one.end = End::Nobody));
        drop(inn);
        drop(gone);
    }

    /// As `Connection::fail`.
    pub fn fail(&self, why: &str, events: &mut Events) {
        let mut out = locked(&self.out);
        if self.broken.set(why.to_string()).is_err() {
            return;
        }
        let all = out.take_all();
        drop(out);
        all.into_iter().for_each(|(end, data)| end.tell(Err(why.to_string()), data, events));
        let mut inn = locked(&self.inn);
        inn.paths.clear();
        inn.assembly = Assembly::default();
        if let Some(current) = inn.parser.current.take() {
            current.target.fail(why, events);
        }
        drop(inn);
        locked(&self.driven).take();
    }
}

/// Why nothing more is read.
enum Failure {
    /// This path failed.
    Path(String),
    /// The received data violates the protocol, so the whole connection ends.
    Stream(String),
}

impl From<String> for Failure {
    fn from(why: String) -> Failure {
        Failure::Stream(why)
    }
}

/// One turn of reading one path.
struct Reading<'a, R> {
    inn: &'a mut Inn,
    /// The path's number.
    number: usize,
    several: &'a Several,
    driving: &'a Driving,
    routes: &'a R,
    from: Origin,
    events: &'a mut Events,
}

impl<R: Routes> Reading<'_, R> {
    fn turn(mut self) -> Result<Turn, Failure> {
        let mut moved = 0;
        loop {
            self.handle_buffered()?;
            if moved >= TURN {
                return Ok(Turn::Moved);
            }
            match self.receive()? {
                Some((0, _)) => return Err(Failure::Path(CLOSED.to_string())),
                Some((got, true)) => moved += got,
                Some((_, false)) => {
                    // The system had no more data, so another call would find nothing.
                    self.handle_buffered()?;
                    return Ok(Turn::Moved);
                }
                None => return Ok(if moved > 0 { Turn::Moved } else { Turn::Nothing }),
            }
        }
    }

    fn handle_buffered(&mut self) -> Result<(), String> {
        let Reading { number, several, driving, routes, from, ref mut events, .. } = *self;
        let Inn { parser, assembly, paths, acknowledged, changes, .. } = &mut *self.inn;
        let path = paths[number].as_mut().expect("it is read");
        let mut frames = Frames { parser, routes, from, events };
        loop {
            if path.left == 0 {
                let Some(head) = path.buffer[path.from..path.to].first_chunk::<HEAD>() else { return Ok(()) };
                let segment = Segment::read(head).ok_or("it sent what is no segment")?;
                if segment.at > frames.position() + 2 * WINDOW {
                    return Err("it sent more than was asked for".to_string());
                }
                path.from += HEAD;
                (path.at, path.left) = (segment.at, segment.bytes as usize);
                if segment.ack > *acknowledged {
                    // Applied before the data, because the data may answer the frames that the segment acknowledges.
                    *acknowledged = segment.ack;
                    several.change(driving, |out| out.acknowledged(segment.ack, frames.events))?;
                }
                if segment.changes > *changes {
                    *changes = segment.changes;
                    several.change(driving, |out| out.peer_suspects(segment.suspected));
                }
                continue;
            }
            let here = (path.to - path.from).min(path.left);
            if here == 0 {
                return Ok(());
            }
            let data = &path.buffer[path.from..path.from + here];
            assembly.arrived(&mut frames, path.at, Came::Data(data))?;
            path.from += here;
            path.at += here as u64;
            path.left -= here;
        }
    }

    /// Makes one system call. It reads into the memory of the current frame if much of the segment belongs there, else
    /// into the buffer. Returns the number of bytes read, and whether they filled all the space.
    fn receive(&mut self) -> Result<Option<(usize, bool)>, Failure> {
        let Reading { number, routes, from, ref mut events, .. } = *self;
        let Inn { parser, assembly, paths, .. } = &mut *self.inn;
        let path = paths[number].as_mut().expect("it is read");
        let mut pieces = Pieces::default();
        // A segment that was sent again may begin with bytes of earlier frames, whose memory is no longer ours.
        let current = parser.current.as_mut().filter(|_| path.from == path.to && path.at >= parser.start);
        if let Some(current) = current {
            let from = (path.at - parser.start) as usize;
            let bytes = current.frame.data().saturating_sub(from).min(path.left);
            if bytes > SHORT {
                current.target.pieces(from, bytes, &mut pieces);
            }
        }
        let direct = pieces.bytes();
        if direct > 0 {
            (path.from, path.to) = (0, 0);
            if direct == path.left {
                pieces.push(Span { addr: path.buffer.as_mut_ptr() as usize, bytes: HEAD });
            }
        } else {
            path.buffer.copy_within(path.from..path.to, 0);
            (path.from, path.to) = (0, path.to - path.from);
            let space = &mut path.buffer[path.to..];
            pieces.push(Span { addr: space.as_mut_ptr() as usize, bytes: space.len() });
        }
        // SAFETY: the buffer and the current frame's memory are used only under this lock. The callers vouch for
        // borrowed memory until the transfer has ended, and it ends under this lock.
        let got = unsafe { sockets::receive(path.socket.fd(), pieces.as_slice()) };
        let got = got.map_err(|error| Failure::Path(error.to_string()))?;
        let Some(got) = got else { return Ok(None) };
        let data = got.min(direct);
        if data > 0 {
            let mut frames = Frames { parser, routes, from, events };
            assembly.arrived(&mut frames, path.at, Came::Stored(data as u64))?;
            path.at += data as u64;
            path.left -= data;
        }
        path.to += got - data;
        Ok(Some((got, got == pieces.bytes())))
    }
}
