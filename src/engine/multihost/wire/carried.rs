//! A connection whose frames UCX carries. Its TCP connection stays open beside the endpoint. The two processes have
//! named each other on the TCP connection. They also exchange their workers' addresses there and, at the end, the
//! numbers of frames that they have sent. When the TCP connection ends, the peer's process has ended. UCX itself may
//! need many seconds to detect that.
//!
//! Each frame is one active message. `departures` sends the frames, `arrivals` hands over those of the peer. This file
//! decides when the connection has ended.

#![allow(unsafe_code)] // reads and writes the TCP connection

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use super::arrivals::{Arrivals, Handler};
use super::departures::Departures;
use super::descriptor::Descriptor;
use super::expected::Expected;
use super::label;
use super::receiver::{Origin, Routes, Turn};
use super::transfer::{End, Events, Outcome, Outgoing};
use super::watched::Watched;
use super::{locked, sockets};
use crate::engine::multihost::ucx::{Data, HEAD, What};
use crate::types::Span;

/// The reason that is given if the peer's process has ended.
const CLOSED: &str = "Connection closed by peer";
const NO_END: &str = "a transfer that was given up did not end";
/// After the end of the TCP connection, frames that were sent earlier may still arrive. If the peer has not said how
/// many, the connection ends when nothing has arrived for this long, at the latest after `LONGEST_END`.
const QUIET: Duration = Duration::from_millis(50);
const LONGEST_END: Duration = Duration::from_millis(500);
/// If the peer has said how many frames it has sent, the frames have this long to arrive.
const ORDERLY_END: Duration = Duration::from_secs(5);
/// How long a transfer that was given up may go on before the endpoint is closed by force. That ends other groups too, so
/// a large transfer on a slow network gets some time.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long closing by force may take.
const FORCED: Duration = Duration::from_secs(10);
/// The longest address of a worker.
const LONGEST_ADDRESS: usize = 1 << 20;

/// What the peer has sent on the TCP connection.
#[derive(Default)]
struct Said {
    /// Bytes that were received but not handled yet.
    bytes: Vec<u8>,
    /// How many frames the peer has sent in all. None until the peer has reported it.
    last: Option<u64>,
    /// Why and when the TCP connection has ended.
    ending: Option<(String, Instant)>,
}

struct Inn {
    said: Said,
    arrivals: Arrivals,
    /// When the first of the transfers in flight was given up.
    doomed: Option<Instant>,
}

pub struct Carried {
    watched: Arc<Watched>,
    /// UCX's events and the peer's frames name the connection by the token of `origin`.
    origin: Origin,
    /// The TCP connection.
    descriptor: Descriptor,
    out: Mutex<Departures>,
    inn: Mutex<Inn>,
    expected: Arc<Expected>,
    /// Why the connection failed. Set once.
    broken: OnceCell<String>,
}

impl Carried {
    /// `fd`: the TCP connection. `is_first`: whether this process has called the other.
    pub fn new(watched: &Arc<Watched>, origin: Origin, fd: OwnedFd, is_first: bool) -> Carried {
        let expected = Arc::default();
        let out = Departures::new(watched, origin.token, is_first);
        let inn =
            Inn { said: Said::default(), arrivals: Arrivals::new(watched, origin.token, &expected), doomed: None };
        let (descriptor, broken) = (Descriptor::new(fd), OnceCell::new());
        let (out, inn) = (Mutex::new(out), Mutex::new(inn));
        Carried { watched: Arc::clone(watched), origin, descriptor, out, inn, expected, broken }
    }

    pub fn fd(&self) -> i32 {
        self.descriptor.fd()
    }

    pub fn broken(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    /// Whether UCX has sent everything that was pushed.
    pub fn is_flushed(&self) -> bool {
        locked(&self.out).is_flushed()
    }

    /// Whether the system, or the device, has everything that was pushed.
    pub fn is_delivered(&self) -> bool {
        locked(&self.out).is_delivered()
    }

    /// Whether the connection is broken and UCX has ended all its requests.
    pub fn is_over(&self) -> bool {
        let inn = locked(&self.inn);
        self.broken().is_some() && inn.arrivals.is_over() && locked(&self.out).is_over()
    }

    // ----------------------------------------------------------------------------------------------------- beside UCX

    /// Sends on the TCP connection, which has room: little is ever sent on it.
    fn say(&self, bytes: &[u8]) -> io::Result<()> {
        let piece = Span { addr: bytes.as_ptr() as usize, bytes: bytes.len() };
        // SAFETY: the bytes are readable during the call.
        match unsafe { sockets::send(self.fd(), &[piece]) }? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(io::Error::other("its system accepts nothing")),
        }
    }

    /// Tells the peer the worker's address.
    pub fn introduce(&self) -> io::Result<()> {
        let address = &self.watched.worker.address;
        let mut bytes = (address.len() as u32).to_le_bytes().to_vec();
        bytes.extend(self.origin.token.to_le_bytes());
        bytes.extend(address);
        self.say(&bytes)
    }

    /// Tells the peer how many frames it gets in all. Called once, when nothing more will be sent.
    pub fn conclude(&self) {
        let sent = locked(&self.out).sent();
        let _ = self.say(&sent.to_le_bytes()); // else the peer waits a bit
    }

    /// Reads what came on the TCP connection. Only the thread that drives the wire calls it.
    pub fn read(&self, events: &mut Events) -> Turn {
        let mut inn = locked(&self.inn);
        let end = self.listen(&mut inn.said.bytes);
        if let Err(why) = self.heard(&mut inn.said, events) {
            return Turn::Broken(why);
        }
        let Some(why) = end else { return Turn::Moved };
        if !locked(&self.out).has_connected() {
            return Turn::Broken(why);
        }
        inn.said.ending = Some((why, Instant::now()));
        inn.arrivals.touch();
        drop(inn);
        self.watched.driving.epoll().remove(self.fd()); // it stays readable
        self.watched.add(self.origin.token);
        Turn::Moved
    }

    /// Appends what has come. Returns why the TCP connection has ended, if it has.
    fn listen(&self, said: &mut Vec<u8>) -> Option<String> {
        let mut buffer = [0; 4096];
        let piece = Span { addr: buffer.as_mut_ptr() as usize, bytes: buffer.len() };
        loop {
            // SAFETY: nothing else uses the buffer during the call.
            match unsafe { sockets::receive(self.fd(), &[piece]) } {
                Ok(Some(0)) => return Some(CLOSED.to_string()),
                Ok(Some(got)) => said.extend_from_slice(&buffer[..got]),
                Ok(None) => return None,
                Err(error) => return Some(error.to_string()),
            }
        }
    }

    /// Handles what the peer has sent: its worker's address, then its number of frames.
    fn heard(&self, said: &mut Said, events: &mut Events) -> Result<(), String> {
        const HEAD: usize = 4 + 8;
        let mut out = locked(&self.out);
        if out.is_unknown() {
            let Some(head) = said.bytes.first_chunk::<HEAD>() else { return Ok(()) };
            let bytes = u32::from_le_bytes(head[..4].try_into().expect("four bytes")) as usize;
            let theirs = u64::from_le_bytes(head[4..].try_into().expect("eight bytes"));
            if bytes > LONGEST_ADDRESS {
                return Err("it sent what is no address".to_string());
            }
            let Some(address) = said.bytes.get(HEAD..HEAD + bytes).map(<[u8]>::to_vec) else { return Ok(()) };
            said.bytes.drain(..HEAD + bytes);
            out.told(address, theirs, events)?;
        }
        said.last = said.bytes.first_chunk().map(|last| u64::from_le_bytes(*last));
        Ok(())
    }

    // --------------------------------------------------------------------------------------------------------- by UCX

    /// As `Connection::expected`.
    pub fn expected(&self) -> &Expected {
        &self.expected
    }

    /// As `Connection::push`.
    pub fn push(&self, outgoing: Outgoing, events: &mut Events) {
        let mut out = locked(&self.out);
        match self.broken() {
            None => out.push(outgoing, events),
            Some(why) => outgoing.end.tell(Err(why.to_string()), outgoing.data, events),
        }
    }

    /// Handles a message that arrived. An error ends the connection. Only the thread that drives the wire calls it.
    pub fn came(&self, head: &[u8; HEAD], data: Data, routes: &impl Routes, events: &mut Events) -> Result<(), String> {
        let Some(number) = label::number(head) else {
            self.watched.release(data);
            return locked(&self.out).knocked(events);
        };
        let with = &mut Handler { routes, from: self.origin, events };
        locked(&self.inn).arrivals.came(number, head, data, with)
    }

    /// Called when a request of UCX has ended. Only the thread that drives the wire calls this.
    pub fn ended(&self, what: What, outcome: Outcome, routes: &impl Routes, events: &mut Events) {
        let mut inn = locked(&self.inn);
        inn.arrivals.touch();
        events.ended = true;
        let broken = self.broken();
        match what {
            What::Close => locked(&self.out).close_ended(),
            What::Flush => locked(&self.out).flush_ended(),
            What::Send(number) => locked(&self.out).send_ended(number, outcome, broken, events),
            What::Receive(number) => {
                if let Err(why) = &outcome {
                    self.failed(why);
                }
                let with = &mut Handler { routes, from: self.origin, events };
                if let Err(why) = inn.arrivals.receive_ended(number, outcome.is_err(), broken, with) {
                    self.failed(&why);
                }
            }
        }
    }

    /// Called when the endpoint has failed.
    pub fn failed(&self, why: &str) {
        locked(&self.out).fail(why);
    }

    // ------------------------------------------------------------------------------------------------- what ends early

    /// Called from time to time while the connection is watched. Returns whether it must still be watched, or an error
    /// if it has ended.
    pub fn look(&self, now: Instant) -> Result<bool, String> {
        let mut inn = locked(&self.inn);
        let out = locked(&self.out);
        let Inn { said, arrivals, doomed } = &mut *inn;
        let late = |since: Instant| {
            let quiet = now.duration_since(arrivals.moved()) >= QUIET && now.duration_since(since) >= QUIET;
            quiet || now.duration_since(since) >= LONGEST_END
        };
        if let Some((why, since)) = &said.ending {
            let is_over = match said.last {
                Some(last) if arrivals.has_handled(last) => true,
                Some(_) if out.failed().is_none() => now.duration_since(*since) >= ORDERLY_END,
                _ => late(*since),
            };
            return if is_over { Err(why.clone()) } else { Ok(true) };
        }
        if let Some((why, since)) = out.failed() {
            return if late(*since) { Err(format!("UCX: {why}")) } else { Ok(true) };
        }
        if !(out.has_doomed() || arrivals.has_doomed()) {
            *doomed = None;
            return Ok(false);
        }
        match now.duration_since(*doomed.get_or_insert(now)) >= PATIENCE {
            true => Err(NO_END.to_string()),
            false => Ok(true),
        }
    }

    /// As `Connection::forget`. A transfer that UCX has begun ends with this error when UCX reports its end.
    pub fn forget(&self, channel: u64, why: &str, events: &mut Events) {
        let mut inn = locked(&self.inn);
        let mut out = locked(&self.out);
        inn.arrivals.forget(channel, why, events);
        out.forget(channel, why, events);
        if out.has_doomed() || inn.arrivals.has_doomed() {
            self.watched.add(self.origin.token);
        }
    }

    /// As `Connection::give_up`. Waits until UCX no longer uses the memory.
    pub fn give_up(&self, is_it: impl Fn(&End) -> bool, meanwhile: impl FnOnce()) {
        let mut inn = locked(&self.inn);
        meanwhile();
        let received = inn.arrivals.give_up(&is_it);
        let sent = locked(&self.out).give_up(&is_it);
        drop(inn);
        let is_free = || !(locked(&self.inn).arrivals.is_flying(&received) || locked(&self.out).is_flying(&sent));
        let driving = &self.watched.driving;
        if is_free() || driving.wait_for_others(is_free, PATIENCE) {
            return;
        }
        let mut out = locked(&self.out);
        out.fail(NO_END);
        out.close();
        drop(out);
        driving.interrupt();
        while !driving.wait_for_others(is_free, FORCED) {
            log::error!("sagellm: UCX has not ended a transfer {FORCED:?} after its endpoint was closed");
        }
    }

    /// As `Connection::fail`. Transfers in flight end with the same error when UCX reports their end.
    pub fn fail(&self, why: &str, events: &mut Events) {
        let mut out = locked(&self.out);
        if self.broken.set(why.to_string()).is_err() {
            return;
        }
        out.fail_all(why, events);
        drop(out);
        self.expected.clear();
        locked(&self.inn).arrivals.fail_all(why, events);
        self.watched.add(self.origin.token); // so that it is removed later
        events.ended = true;
    }
}
