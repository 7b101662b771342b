//! The sending side of a connection that UCX carries: the endpoint, and the frames in flight.
//!
//! UCX cannot stop a transfer that it has begun, so the transfer's memory is in use until UCX reports the end. If that
//! takes too long, the endpoint is closed by force, which ends everything on it.

#![allow(unsafe_code)] // the callers of transfers vouch for the memory

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use super::driving::Counted;
use super::frame::Kind;
use super::label;
use super::memory::Memory;
use super::transfer::{End, Events, Outcome, Outgoing};
use super::watched::Watched;
use crate::engine::multihost::ucx::Endpoint;

/// How this process reaches the peer's worker.
enum Way {
    /// The peer has not sent its worker's address.
    Unknown,
    /// The peer must connect first, because UCX has stalled when two workers connected to each other at the same time.
    Told {
        address: Vec<u8>,
        theirs: u64,
    },
    /// `theirs` is the peer's number for the connection.
    Open {
        endpoint: Endpoint,
        theirs: u64,
    },
    Closed,
}

/// A frame, or the data of a body, that UCX is sending.
struct Flying {
    channel: u64,
    data: Memory,
    end: End,
    /// Set if the transfer was given up: its error.
    doomed: Option<String>,
    _counted: Counted,
}

pub struct Departures {
    watched: Arc<Watched>,
    who: u64,
    /// Whether this process connects first.
    is_first: bool,
    way: Way,
    /// Whether the peer's endpoint is connected to this process's worker.
    knocked: bool,
    /// Frames that were not passed to UCX, because there is no endpoint yet or it has failed.
    queue: VecDeque<Outgoing>,
    /// Transfers that failed before the connection did. They end when the connection fails, after the mail that has
    /// arrived was handled.
    lost: Vec<Flying>,
    /// The sends in flight, by number, from 1 on.
    flights: HashMap<u64, Flying>,
    /// How many sends UCX was given.
    numbers: u64,
    /// How many frames were sent, and how many of them UCX has flushed or is flushing.
    sent: u64,
    flushed: u64,
    flushing: Option<u64>,
    /// Why the endpoint failed, and when.
    failed: Option<(String, Instant)>,
    /// Whether UCX is closing the endpoint.
    closing: bool,
}

impl Departures {
    pub fn new(watched: &Arc<Watched>, who: u64, is_first: bool) -> Departures {
        Departures {
            watched: Arc::clone(watched),
            who,
            is_first,
            way: Way::Unknown,
            knocked: false,
            queue: VecDeque::new(),
            lost: Vec::new(),
            flights: HashMap::new(),
            numbers: 0,
            sent: 0,
            flushed: 0,
            flushing: None,
            failed: None,
            closing: false,
        }
    }

    /// Returns how many frames were sent.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Whether UCX has sent everything that was pushed.
    pub fn is_flushed(&self) -> bool {
        self.queue.is_empty() && self.flights.is_empty() && self.lost.is_empty()
    }

    /// Whether the system, or the device, has everything that was pushed.
    pub fn is_delivered(&mut self) -> bool {
        if !self.is_flushed() {
            return false;
        }
        let Way::Open { endpoint, .. } = &self.way else { return true };
        if self.flushed != self.sent && self.flushing != Some(self.sent) {
            match self.watched.worker.flush(endpoint) {
                Ok(false) => self.flushing = Some(self.sent),
                Ok(true) | Err(_) => self.flushed = self.sent, // what cannot be flushed is lost
            }
        }
        self.flushed == self.sent
    }

    /// Whether UCX has ended all requests of this side.
    pub fn is_over(&self) -> bool {
        self.flights.is_empty() && !self.closing && !matches!(self.way, Way::Open { .. })
    }

    /// Returns why the endpoint has failed, and when.
    pub fn failed(&self) -> Option<&(String, Instant)> {
        self.failed.as_ref()
    }

    /// Whether UCX is still sending the data of a transfer that was given up.
    pub fn has_doomed(&self) -> bool {
        self.flights.values().any(|one| one.doomed.is_some())
    }

    // ------------------------------------------------------------------------------------------------------ connecting

    /// Whether the peer has not sent its worker's address yet.
    pub fn is_unknown(&self) -> bool {
        matches!(self.way, Way::Unknown)
    }

    /// Whether there is, or was, an endpoint.
    pub fn has_connected(&self) -> bool {
        matches!(self.way, Way::Open { .. } | Way::Closed)
    }

    /// Called when the peer has sent its worker's address and its number for the connection.
    pub fn told(&mut self, address: Vec<u8>, theirs: u64, events: &mut Events) -> Result<(), String> {
        self.way = Way::Told { address, theirs };
        if self.is_first || self.knocked { self.connect(events) } else { Ok(()) }
    }

    /// Called when the peer's endpoint is connected to this worker. The peer's address may arrive later.
    pub fn knocked(&mut self, events: &mut Events) -> Result<(), String> {
        self.knocked = true;
        self.connect(events)
    }

    /// Makes the endpoint, if the worker's address is known and there is none yet, and sends what was queued.
    fn connect(&mut self, events: &mut Events) -> Result<(), String> {
        let Way::Told { address, theirs } = &self.way else { return Ok(()) };
        let theirs = *theirs;
        let endpoint = self.watched.worker.connect(address, self.who)?;
        self.way = Way::Open { endpoint, theirs };
        if self.is_first {
            self.knock()?;
        }
        mem::take(&mut self.queue).into_iter().for_each(|outgoing| self.push(outgoing, events));
        Ok(())
    }

    /// Tells the peer that this endpoint is connected to it. If that message fails, the endpoint fails too.
    fn knock(&mut self) -> Result<(), String> {
        let Way::Open { endpoint, theirs } = &self.way else { return Ok(()) };
        self.numbers += 1;
        // SAFETY: there is no memory.
        unsafe { self.watched.worker.send(endpoint, self.numbers, label::of_none(*theirs), &[], true) }?;
        Ok(())
    }

    // --------------------------------------------------------------------------------------------------------- sending

    /// Sends a frame, or queues it if there is no endpoint or the endpoint has failed.
    pub fn push(&mut self, outgoing: Outgoing, events: &mut Events) {
        let (Way::Open { endpoint, theirs }, None) = (&self.way, &self.failed) else {
            return self.queue.push_back(outgoing);
        };
        let head = label::of_frame(*theirs, self.sent, &outgoing.head);
        self.sent += 1;
        self.numbers += 1;
        let is_eager = outgoing.frame.kind != Kind::Body;
        let pieces = outgoing.data.all(outgoing.frame.data());
        // SAFETY: `flights` keeps an owned buffer until the transfer has ended; the callers vouch for borrowed memory
        // until then.
        let sent = unsafe { self.watched.worker.send(endpoint, self.numbers, head, &pieces, is_eager) };
        let Outgoing { frame, data, end, .. } = outgoing;
        if let Ok(true) = sent {
            return end.tell(Ok(()), data, events);
        }
        let counted = Counted::new(&self.watched.driving);
        let flying = Flying { channel: frame.channel, data, end, doomed: None, _counted: counted };
        match sent {
            Ok(_) => {
                self.flights.insert(self.numbers, flying);
                self.watched.driving.interrupt(); // the driving thread may be asleep, but must call UCX
            }
            Err(why) => {
                self.lost.push(flying);
                self.fail(&why);
            }
        }
    }

    /// Called when a send has ended. `broken`: why the connection is broken, if it is.
    pub fn send_ended(&mut self, number: u64, outcome: Outcome, broken: Option<&str>, events: &mut Events) {
        let Some(mut one) = self.flights.remove(&number) else { return }; // a knock; if it failed, the endpoint has too
        match (outcome, one.doomed.take().or(broken.map(str::to_string))) {
            (Ok(()), None) => one.end.tell(Ok(()), one.data, events),
            (_, Some(why)) => one.end.tell(Err(why), one.data, events),
            (Err(why), None) => {
                self.lost.push(one);
                self.fail(&why);
            }
        }
    }

    /// Called when a flush has ended.
    pub fn flush_ended(&mut self) {
        self.flushed = self.flushed.max(self.flushing.take().unwrap_or(0));
    }

    /// Called when UCX has closed the endpoint.
    pub fn close_ended(&mut self) {
        self.closing = false;
    }

    // ------------------------------------------------------------------------------------------------- what ends early

    /// Called when the endpoint has failed.
    pub fn fail(&mut self, why: &str) {
        self.failed.get_or_insert_with(|| (why.to_string(), Instant::now()));
        self.watched.add(self.who);
    }

    /// Closes the endpoint by force, if it is open.
    pub fn close(&mut self) {
        if let Way::Open { endpoint, .. } = mem::replace(&mut self.way, Way::Closed) {
            self.closing = !self.watched.worker.close(endpoint);
        }
    }

    /// As `Connection::forget`. If UCX has begun to send borrowed memory, the transfer ends with this error when UCX
    /// reports its end.
    pub fn forget(&mut self, channel: u64, why: &str, events: &mut Events) {
        let is_it = |of: u64, end: &End| of == channel && !matches!(end, End::Nobody);
        let (gone, kept): (VecDeque<_>, VecDeque<_>) =
            mem::take(&mut self.queue).into_iter().partition(|one| is_it(one.frame.channel, &one.end));
        self.queue = kept;
        gone.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.data, events));
        for one in self.lost.extract_if(.., |one| one.channel == channel) {
            one.end.tell(Err(why.to_string()), one.data, events);
        }
        for one in self.flights.values_mut().filter(|one| is_it(one.channel, &one.end)) {
            match &one.data {
                Memory::Borrowed(_) => drop(one.doomed.get_or_insert_with(|| why.to_string())),
                // UCX goes on with our own buffer for as long as it likes.
                Memory::Owned(_) => {
                    let end = mem::replace(&mut one.end, End::Nobody);
                    end.tell(Err(why.to_string()), Memory::Owned(Vec::new()), events);
                }
            }
        }
    }

    /// Forgets the transfers that `is_it` selects. Returns the numbers of those whose borrowed memory UCX still uses.
    pub fn give_up(&mut self, is_it: impl Fn(&End) -> bool) -> Vec<u64> {
        self.queue.retain(|one| !is_it(&one.end));
        self.lost.retain(|one| !is_it(&one.end));
        let mut numbers = Vec::new();
        for (number, one) in self.flights.iter_mut().filter(|(_, one)| is_it(&one.end)) {
            match &one.data {
                Memory::Borrowed(_) => numbers.push(*number),
                Memory::Owned(_) => one.end = End::Nobody,
            }
        }
        numbers
    }

    /// Whether UCX still runs a send with one of these numbers.
    pub fn is_flying(&self, numbers: &[u64]) -> bool {
        numbers.iter().any(|number| self.flights.contains_key(number))
    }

    /// Closes the endpoint, and fails the frames that UCX does not have. Transfers in flight end when UCX reports their
    /// end.
    pub fn fail_all(&mut self, why: &str, events: &mut Events) {
        self.close();
        mem::take(&mut self.queue).into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.data, events));
        mem::take(&mut self.lost).into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.data, events));
    }
}
