//! A connection whose frames UCX carries. Its TCP connection stays open beside the endpoint: on it the two processes
//! have named each other, they tell each other their workers' addresses and at last how many frames they have sent, and
//! its end says that the peer's process has ended. UCX itself may need many seconds to find that out.
//!
//! Each frame is one active message. UCX keeps no order between short and long ones, so frames are numbered, and one
//! that arrives early waits for its turn. The data of a body goes from memory to memory. While a body arrives, later
//! mail and the peer's leaving wait, because they must be handed over after it (`Mail::send_body`); everything else is
//! handled at once.
//!
//! What UCX has begun it cannot stop, so memory in flight is in use until UCX reports its end. If that takes too long,
//! the endpoint is closed by force, which ends everything on it.

#![allow(unsafe_code)] // the callers of transfers vouch for the memory

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::mem;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::connection::{Connection, Incoming, Turn};
use super::driving::Counted;
use super::frame::{Frame, HEAD as FRAME_HEAD, Kind};
use super::memory::Memory;
use super::transfer::{End, Events, Outgoing, Target};
use super::{Wire, locked};
use crate::engine::multihost::ucx::{Data, Endpoint, HEAD, Held, Name, Worker};

/// The reason that is given if the peer's process has ended.
const CLOSED: &str = "Connection closed by peer";
/// After the end of the TCP connection, frames that were sent before may still arrive. If the peer has not said how many,
/// the connection ends when it is quiet for this long, at the latest after `LONGEST_END`.
const QUIET: Duration = Duration::from_millis(50);
const LONGEST_END: Duration = Duration::from_millis(500);
/// If the peer has said how many frames it has sent, they have this long to arrive.
const ORDERLY_END: Duration = Duration::from_secs(5);
/// How long a transfer that was given up may go on before the endpoint is closed by force. That ends other groups too, so
/// a large transfer on a slow network gets some time.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long closing by force may take.
const FORCED: Duration = Duration::from_secs(10);

/// The numbers of receives are odd, those of sends even. These two have numbers of their own.
const CLOSE: u64 = u64::MAX;
const FLUSH: u64 = u64::MAX - 1;
const KNOCK: u64 = u64::MAX - 2;
/// In place of a frame's number: the message has no frame. It tells a process that the other's endpoint leads to it.
const NO_FRAME: u64 = u64::MAX;

/// How this process reaches the peer's worker.
enum Way {
    /// The peer has not told its worker's address.
    Unknown,
    /// The peer connects first, because UCX has stalled where two workers connected to each other at the same time.
    Told {
        address: Vec<u8>,
        theirs: u64,
    },
    /// `theirs`: by this number the peer knows the connection.
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

struct Out {
    way: Way,
    /// Whether the peer's endpoint leads here.
    knocked: bool,
    /// Frames that UCX has not got: the way is unknown, or has failed.
    queue: VecDeque<Outgoing>,
    /// Transfers that failed before the connection did. They end with it, because mail that has arrived comes first.
    lost: Vec<Flying>,
    flights: HashMap<u64, Flying>,
    /// How many frames were sent, and how many of them UCX has flushed or is flushing.
    sent: u64,
    flushed: u64,
    flushing: Option<u64>,
    numbers: u64,
    /// Why the endpoint failed, and when.
    failed: Option<(String, Instant)>,
    /// When the first of the transfers in flight was given up.
    doomed: Option<Instant>,
    /// Whether the endpoint is closed.
    closed: bool,
}

/// What has to be handed over in order.
enum Step {
    /// A body. `flying`: the number of its receive, while UCX uses its memory.
    Body {
        incoming: Incoming,
        flying: Option<(u64, Counted)>,
        failed: bool,
        doomed: Option<String>,
    },
    Mail(Frame, Data),
    Control(Frame),
}

struct Inn {
    /// What came over the TCP connection and was not handled.
    said: Vec<u8>,
    /// How many frames were handled.
    next: u64,
    /// Frames that came before their turn.
    early: BTreeMap<u64, (Frame, Data)>,
    steps: VecDeque<Step>,
    numbers: u64,
    /// How many frames the peer has sent in all, once it says so.
    last: Option<u64>,
    /// Why and when the TCP connection has ended.
    ending: Option<(String, Instant)>,
    /// When something last arrived.
    moved: Instant,
}

pub struct Carried {
    worker: Arc<Worker>,
    /// By this number UCX's events, and the frames of the peer, name the connection.
    who: u64,
    /// The TCP connection.
    fd: i32,
    /// Whether this process connects first.
    is_first: bool,
    out: Mutex<Out>,
    inn: Mutex<Inn>,
}

impl Carried {
    /// `fd`: the TCP connection, which outlives this. `is_first`: whether this process has called the other.
    pub fn new(worker: &Arc<Worker>, who: u64, fd: i32, is_first: bool) -> Carried {
        let out = Out {
            way: Way::Unknown,
            knocked: false,
            queue: VecDeque::new(),
            lost: Vec::new(),
            flights: HashMap::new(),
            sent: 0,
            flushed: 0,
            flushing: None,
            numbers: 0,
            failed: None,
            doomed: None,
            closed: true,
        };
        let inn = Inn {
            said: Vec::new(),
            next: 0,
            early: BTreeMap::new(),
            steps: VecDeque::new(),
            numbers: 1,
            last: None,
            ending: None,
            moved: Instant::now(),
        };
        Carried { worker: Arc::clone(worker), who, fd, is_first, out: Mutex::new(out), inn: Mutex::new(inn) }
    }

    fn stream(&self) -> io::Result<TcpStream> {
        // SAFETY: the connection owns the descriptor and outlives this.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        Ok(TcpStream::from(fd.try_clone_to_owned()?))
    }

    /// Tells the peer the worker's address.
    pub fn introduce(&self) -> io::Result<()> {
        let mut said = (self.worker.address.len() as u32).to_le_bytes().to_vec();
        said.extend(self.who.to_le_bytes());
        said.extend(&self.worker.address);
        self.stream()?.write_all(&said) // a fresh connection has room for it
    }

    /// Tells the peer how many frames it gets in all. Called once, when nothing more will be sent.
    pub fn conclude(&self) {
        let sent = locked(&self.out).sent;
        let _ = self.stream().and_then(|mut stream| stream.write_all(&sent.to_le_bytes())); // else the peer waits a bit
    }

    /// Whether UCX has sent everything that was pushed.
    pub fn is_flushed(&self) -> bool {
        locked(&self.out).is_flushed()
    }

    /// Whether the system, or the device, has everything that was pushed.
    pub fn is_delivered(&self) -> bool {
        let mut out = locked(&self.out);
        if !out.is_flushed() {
            return false;
        }
        let sent = out.sent;
        let Way::Open { endpoint, .. } = &out.way else { return true };
        if out.flushed == sent || out.flushing == Some(sent) {
            return out.flushed == sent;
        }
        match self.worker.flush(endpoint, self.name(FLUSH)) {
            Ok(false) => out.flushing = Some(sent),
            Ok(true) | Err(_) => out.flushed = sent, // what cannot be flushed is lost
        }
        out.flushed == sent
    }

    /// Whether nothing of this connection is left in UCX.
    pub fn is_over(&self) -> bool {
        let inn = locked(&self.inn);
        let out = locked(&self.out);
        out.closed && out.flights.is_empty() && !inn.steps.iter().any(Step::is_flying)
    }

    fn name(&self, number: u64) -> Name {
        Name { who: self.who, number }
    }

    // -------------------------------------------------------------------------------------------------------- writing

    /// Sends a frame, unless `broken` says why not.
    pub fn push(&self, wire: &Wire, outgoing: Outgoing, broken: impl FnOnce() -> Option<String>, events: &mut Events) {
        let mut out = locked(&self.out);
        if let Some(why) = broken() {
            drop(out);
            return outgoing.end.tell(Err(why), outgoing.data, events);
        }
        self.send(wire, &mut out, outgoing, events);
    }

    fn send(&self, wire: &Wire, out: &mut Out, outgoing: Outgoing, events: &mut Events) {
        let (Way::Open { endpoint, theirs }, None) = (&out.way, &out.failed) else {
            return out.queue.push_back(outgoing);
        };
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(&theirs.to_le_bytes());
        head[8..16].copy_from_slice(&out.sent.to_le_bytes());
        head[16..].copy_from_slice(&outgoing.head);
        out.sent += 1;
        out.numbers += 2;
        let (name, is_eager) = (self.name(out.numbers), outgoing.frame.kind != Kind::Body);
        let pieces = outgoing.data.all(outgoing.frame.data());
        // SAFETY: `flights` keeps an owned buffer until the transfer has ended; the callers vouch for borrowed memory
        // until then.
        let sent = unsafe { self.worker.send(endpoint, name, head, &pieces, is_eager) };
        let Outgoing { frame, data, end, .. } = outgoing;
        if let Ok(true) = sent {
            return end.tell(Ok(()), data, events);
        }
        let counted = Counted::new(wire.driving());
        let flying = Flying { channel: frame.channel, data, end, doomed: None, _counted: counted };
        match sent {
            Ok(_) => {
                out.flights.insert(name.number, flying);
                wire.driving().interrupt(); // who drives may be asleep, and UCX needs to be called
            }
            Err(why) => {
                out.lost.push(flying);
                out.fail(&why);
                wire.watch(self.who);
            }
        }
    }

    // -------------------------------------------------------------------------------------------------------- reading

    /// Reads what came over the TCP connection. Only the thread that drives the wire calls it.
    pub fn read(&self, wire: &Wire, events: &mut Events) -> Turn {
        let mut inn = locked(&self.inn);
        let mut buffer = [0; 4096];
        let end = loop {
            match self.stream().and_then(|mut stream| stream.read(&mut buffer)) {
                Ok(0) => break Some(CLOSED.to_string()),
                Ok(got) => inn.said.extend_from_slice(&buffer[..got]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break None,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) => break Some(error.to_string()),
            }
        };
        if let Err(why) = self.heard(wire, &mut inn, events) {
            return Turn::Broken(why);
        }
        let Some(why) = end else { return Turn::Moved };
        if matches!(locked(&self.out).way, Way::Unknown | Way::Told { .. }) {
            return Turn::Broken(why);
        }
        let now = Instant::now();
        (inn.ending, inn.moved) = (Some((why, now)), now);
        drop(inn);
        wire.forget_socket(self.fd, self.who); // it stays readable
        wire.watch(self.who);
        Turn::Moved
    }

    /// Handles what the peer has said: its worker's address, then how many frames it has sent.
    fn heard(&self, wire: &Wire, inn: &mut Inn, events: &mut Events) -> Result<(), String> {
        const LONGEST: usize = 1 << 20;
        let mut out = locked(&self.out);
        if matches!(out.way, Way::Unknown) {
            let Some(head) = inn.said.first_chunk::<12>() else { return Ok(()) };
            let bytes = u32::from_le_bytes(head[..4].try_into().expect("four bytes")) as usize;
            let theirs = u64::from_le_bytes(head[4..].try_into().expect("eight bytes"));
            if bytes > LONGEST {
                return Err("it sent what is no address".to_string());
            }
            let Some(address) = inn.said.get(12..12 + bytes) else { return Ok(()) };
            out.way = Way::Told { address: address.to_vec(), theirs };
            inn.said.drain(..12 + bytes);
            if self.is_first || out.knocked {
                self.connect(wire, &mut out, events)?;
            }
        }
        if let Some(last) = inn.said.first_chunk::<8>() {
            inn.last = Some(u64::from_le_bytes(*last));
        }
        Ok(())
    }

    /// Makes the endpoint, if the worker's address is known and there is none yet, and sends what was queued.
    fn connect(&self, wire: &Wire, out: &mut Out, events: &mut Events) -> Result<(), String> {
        let Way::Told { address, theirs } = &out.way else { return Ok(()) };
        let theirs = *theirs;
        let endpoint = self.worker.connect(address, self.who)?;
        if self.is_first {
            let mut head = [0; HEAD];
            head[..8].copy_from_slice(&theirs.to_le_bytes());
            head[8..16].copy_from_slice(&NO_FRAME.to_le_bytes());
            // SAFETY: there is no memory.
            unsafe { self.worker.send(&endpoint, self.name(KNOCK), head, &[], true) }?;
        }
        out.way = Way::Open { endpoint, theirs };
        out.closed = false;
        for outgoing in mem::take(&mut out.queue) {
            self.send(wire, out, outgoing, events);
        }
        Ok(())
    }

    /// Handles a message that arrived. An error ends the connection. Only the thread that drives the wire calls it.
    pub fn arrived(
        &self,
        wire: &Wire,
        connection: &Connection,
        head: &[u8; HEAD],
        data: Data,
        events: &mut Events,
    ) -> Result<(), String> {
        let number = u64::from_le_bytes(head[8..16].try_into().expect("eight bytes"));
        if number == NO_FRAME {
            self.release(data);
            let mut out = locked(&self.out);
            out.knocked = true; // perhaps before the address has come
            return self.connect(wire, &mut out, events);
        }
        let frame = Frame::read(head.last_chunk::<FRAME_HEAD>().expect("the frame's header"));
        let mut inn = locked(&self.inn);
        inn.moved = Instant::now();
        let frame = match frame {
            Some(frame) if frame.data() == data.bytes() && number >= inn.next => frame,
            _ => {
                self.release(data);
                return Err("it sent what is no frame".to_string());
            }
        };
        inn.early.insert(number, (frame, data));
        loop {
            let next = inn.next;
            let Some((frame, data)) = inn.early.remove(&next) else { return Ok(()) };
            inn.next += 1;
            let mut reading = Reading { carried: self, wire, connection, events };
            reading.take(&mut inn, frame, data)?;
        }
    }

    fn release(&self, data: Data) {
        if let Data::Held(held) = data {
            self.worker.release(held);
        }
    }

    /// What UCX was doing under this number has ended.
    pub fn ended(
        &self,
        wire: &Wire,
        connection: &Connection,
        number: u64,
        outcome: Result<(), String>,
        events: &mut Events,
    ) {
        let mut inn = locked(&self.inn);
        inn.moved = Instant::now();
        let mut out = locked(&self.out);
        events.ended = true;
        match number {
            CLOSE => out.closed = true,
            KNOCK => (), // if it failed, the endpoint has too
            FLUSH => {
                out.flushed = out.flushed.max(out.flushing.take().unwrap_or(0));
            }
            odd if odd % 2 == 1 => {
                if let Err(why) = &outcome {
                    out.fail(why);
                    wire.watch(self.who);
                }
                drop(out);
                let broken = connection.broken().map(str::to_string);
                let mut reading = Reading { carried: self, wire, connection, events };
                reading.received(&mut inn, odd, outcome.is_err(), broken.as_deref());
            }
            _ => {
                let Some(Flying { channel, data, end, doomed, _counted }) = out.flights.remove(&number) else { return };
                let broken = connection.broken().map(str::to_string);
                match (outcome, doomed.or(broken)) {
                    (Ok(()), None) => end.tell(Ok(()), data, events),
                    (_, Some(why)) => end.tell(Err(why), data, events),
                    (Err(why), None) => {
                        out.lost.push(Flying { channel, data, end, doomed: None, _counted });
                        out.fail(&why);
                        wire.watch(self.who);
                    }
                }
            }
        }
    }

    /// The endpoint has failed.
    pub fn failed(&self, why: &str) {
        locked(&self.out).fail(why);
    }

    // ------------------------------------------------------------------------------------------------- what ends early

    /// Called from time to time while the connection is watched. Returns whether it still needs to be, or why it has
    /// ended.
    pub fn look(&self, now: Instant) -> Result<bool, String> {
        let inn = locked(&self.inn);
        let mut out = locked(&self.out);
        let late = |since: Instant| {
            now.duration_since(inn.moved) >= QUIET && now.duration_since(since) >= QUIET
                || now.duration_since(since) >= LONGEST_END
        };
        if let Some((why, since)) = &inn.ending {
            let is_over = match inn.last {
                Some(last) if last == inn.next && inn.steps.is_empty() => true,
                Some(_) if out.failed.is_none() => now.duration_since(*since) >= ORDERLY_END,
                _ => late(*since),
            };
            return if is_over { Err(why.clone()) } else { Ok(true) };
        }
        if let Some((why, since)) = &out.failed {
            return if late(*since) { Err(format!("UCX: {why}")) } else { Ok(true) };
        }
        let doomed = out.flights.values().any(|one| one.doomed.is_some())
            || inn.steps.iter().any(|step| matches!(step, Step::Body { flying: Some(_), doomed: Some(_), .. }));
        if !doomed {
            out.doomed = None;
        }
        match out.doomed {
            Some(since) if now.duration_since(since) >= PATIENCE => {
                Err("a transfer that was given up did not end".to_string())
            }
            _ => Ok(doomed),
        }
    }

    /// As `Connection::forget`. What UCX has begun ends with this error when UCX has ended it.
    pub fn forget(&self, wire: &Wire, channel: u64, why: &str, events: &mut Events) {
        let mut doomed_any = false;
        let mut inn = locked(&self.inn);
        for step in &mut inn.steps {
            let Step::Body { incoming, flying, doomed, .. } = step else { continue };
            if incoming.frame.channel != channel {
                continue;
            }
            if flying.is_some() {
                doomed.get_or_insert_with(|| why.to_string());
                doomed_any = true;
            } else {
                mem::replace(&mut incoming.target, Target::Discard).fail(why, events);
            }
        }
        let mut out = locked(&self.out);
        let (kept, gone): (VecDeque<_>, VecDeque<_>) = mem::take(&mut out.queue)
            .into_iter()
            .partition(|one| one.frame.channel != channel || matches!(one.end, End::Nobody));
        out.queue = kept;
        for one in out.flights.values_mut().filter(|one| one.channel == channel && !matches!(one.end, End::Nobody)) {
            one.doomed.get_or_insert_with(|| why.to_string());
            doomed_any = true;
        }
        let lost: Vec<_> = out.lost.extract_if(.., |one| one.channel == channel).collect();
        if doomed_any {
            out.doomed.get_or_insert_with(Instant::now);
        }
        drop((out, inn));
        gone.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.data, events));
        lost.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.data, events));
        if doomed_any {
            wire.watch(self.who);
        }
    }

    /// As `Connection::give_up`. Waits until UCX does not use the memory any more.
    pub fn give_up(&self, wire: &Wire, is_it: impl Fn(&End) -> bool, meanwhile: impl FnOnce()) {
        let mut flying = Vec::new();
        let mut inn = locked(&self.inn);
        meanwhile();
        for step in &mut inn.steps {
            if let Step::Body { incoming, flying: now, .. } = step
                && matches!(&incoming.target, Target::Posted(_, end) if is_it(end))
            {
                match now {
                    Some((number, _)) => flying.push(*number),
                    None => incoming.target = Target::Discard,
                }
            }
        }
        let mut out = locked(&self.out);
        out.queue.retain(|one| !is_it(&one.end));
        out.lost.retain(|one| !is_it(&one.end));
        flying.extend(out.flights.iter().filter(|(_, one)| is_it(&one.end)).map(|(number, _)| *number));
        drop((out, inn));
        if flying.is_empty() || wire.wait(|| !self.is_flying(&flying), PATIENCE) {
            return;
        }
        locked(&self.out).fail("a transfer that was given up did not end");
        self.close();
        wire.watch(self.who);
        wire.driving().interrupt();
        while !wire.wait(|| !self.is_flying(&flying), FORCED) {
            log::error!("sagellm: UCX has not ended a transfer {FORCED:?} after its endpoint was closed");
        }
    }

    /// Whether UCX is still doing any of these.
    fn is_flying(&self, numbers: &[u64]) -> bool {
        let inn = locked(&self.inn);
        let out = locked(&self.out);
        let received = |number: &u64| inn.steps.iter().any(|step| step.number() == Some(*number));
        numbers.iter().any(|number| out.flights.contains_key(number) || received(number))
    }

    /// Closes the endpoint by force, if it is open.
    fn close(&self) {
        let mut out = locked(&self.out);
        if let Way::Open { endpoint, .. } = mem::replace(&mut out.way, Way::Closed) {
            // The lock is held, so `ended` finds the result of this.
            out.closed = self.worker.close(endpoint, self.name(CLOSE));
        }
    }

    /// As `Connection::fail`. `broken` marks the connection, and returns false if it was broken before. What UCX has
    /// begun ends when UCX says so, with the same error.
    pub fn fail(&self, why: &str, broken: impl FnOnce() -> bool, events: &mut Events) {
        let mut out = locked(&self.out);
        if !broken() {
            return;
        }
        let queue = mem::take(&mut out.queue);
        let lost = mem::take(&mut out.lost);
        drop(out);
        self.close();
        queue.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.data, events));
        lost.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.data, events));
        let mut inn = locked(&self.inn);
        mem::take(&mut inn.early).into_values().for_each(|(_, data)| self.release(data));
        let (kept, gone): (VecDeque<_>, VecDeque<_>) = mem::take(&mut inn.steps).into_iter().partition(Step::is_flying);
        inn.steps = kept;
        drop(inn);
        for step in gone {
            match step {
                Step::Body { incoming, .. } => incoming.target.fail(why, events),
                Step::Mail(_, data) => self.release(data),
                Step::Control(_) => (),
            }
        }
        events.ended = true;
    }
}

impl Out {
    fn is_flushed(&self) -> bool {
        self.queue.is_empty() && self.flights.is_empty() && self.lost.is_empty()
    }

    fn fail(&mut self, why: &str) {
        self.failed.get_or_insert_with(|| (why.to_string(), Instant::now()));
    }
}

impl Step {
    fn is_flying(&self) -> bool {
        self.number().is_some()
    }

    fn number(&self) -> Option<u64> {
        match self {
            Step::Body { flying, .. } => flying.as_ref().map(|(number, _)| *number),
            _ => None,
        }
    }
}

/// Handles the frames of the peer, in order.
struct Reading<'a> {
    carried: &'a Carried,
    wire: &'a Wire,
    connection: &'a Connection,
    events: &'a mut Events,
}

impl Reading<'_> {
    fn take(&mut self, inn: &mut Inn, frame: Frame, data: Data) -> Result<(), String> {
        match frame.kind {
            Kind::Hello | Kind::Want | Kind::Credit => self.control(frame),
            Kind::Cut if inn.steps.is_empty() => self.control(frame),
            Kind::Cut => {
                inn.steps.push_back(Step::Control(frame));
                Ok(())
            }
            Kind::Mail if !inn.steps.is_empty() => {
                inn.steps.push_back(Step::Mail(frame, data));
                Ok(())
            }
            Kind::Body => {
                let step = self.body(inn, frame, data)?;
                inn.steps.push_back(step);
                self.hand_over(inn)
            }
            Kind::Mail | Kind::Message => self.whole(frame, data),
        }
    }

    fn control(&mut self, frame: Frame) -> Result<(), String> {
        match self.wire.channels().receiver(frame.channel) {
            Some(channel) => channel.control(self.wire, self.connection, frame, self.events),
            None => self.wire.channels().of_none(self.wire, self.connection, frame, self.events),
        }
    }

    /// Where the data of a frame is stored. On an error the data was released.
    fn begin(&mut self, frame: Frame, data: Data) -> Result<(Incoming, Data), String> {
        let channel = self.wire.channels().receiver(frame.channel);
        let target = match &channel {
            Some(channel) => channel.begin(self.connection.peer, &frame),
            None => Ok(Target::Discard),
        };
        match target {
            Ok(target) => Ok((Incoming { frame, channel, target, got: 0 }, data)),
            Err(why) => {
                self.carried.release(data);
                Err(why)
            }
        }
    }

    /// Stores data that is here.
    fn store(&mut self, target: &mut Target, data: Data) {
        match data {
            Data::Copied(bytes) => target.write(0, &bytes),
            Data::Held(held) => {
                if !held.is_far {
                    target.write(0, held.bytes());
                }
                self.carried.worker.release(held);
            }
        }
    }

    /// Handles a frame all of whose data is here.
    fn whole(&mut self, frame: Frame, data: Data) -> Result<(), String> {
        if matches!(data, Data::Held(Held { is_far: true, .. })) {
            self.carried.release(data);
            return Err("it sent a short message as a long one".to_string());
        }
        let (mut incoming, data) = self.begin(frame, data)?;
        self.store(&mut incoming.target, data);
        self.finish(incoming);
        Ok(())
    }

    /// Begins to receive a body.
    fn body(&mut self, inn: &mut Inn, frame: Frame, data: Data) -> Result<Step, String> {
        let (mut incoming, data) = self.begin(frame, data)?;
        let mut flying = None;
        match data {
            Data::Held(held) if held.is_far && !matches!(incoming.target, Target::Discard) => {
                inn.numbers += 2;
                let name = self.carried.name(inn.numbers);
                let pieces = incoming.target.all(frame.data());
                // SAFETY: the step keeps an owned buffer until UCX has ended; the callers of transfers vouch for
                // borrowed memory until then.
                match unsafe { self.carried.worker.receive(held, name, &pieces) } {
                    Ok(true) => (),
                    Ok(false) => flying = Some((name.number, Counted::new(self.wire.driving()))),
                    Err(why) => {
                        incoming.target.fail(&why, self.events);
                        return Err(format!("UCX: {why}"));
                    }
                }
            }
            data => self.store(&mut incoming.target, data),
        }
        Ok(Step::Body { incoming, flying, failed: false, doomed: None })
    }

    fn finish(&mut self, incoming: Incoming) {
        let Incoming { frame, channel, target, .. } = incoming;
        if let Some(channel) = channel {
            channel.finish(self.wire, self.connection, &frame, target, self.events);
        }
    }

    /// A receive has ended. `broken`: why the connection is broken, if it is.
    fn received(&mut self, inn: &mut Inn, number: u64, has_failed: bool, broken: Option<&str>) {
        let Some(at) = inn.steps.iter().position(|step| step.number() == Some(number)) else { return };
        let Step::Body { incoming, flying, failed, doomed } = &mut inn.steps[at] else { return };
        *flying = None;
        *failed = has_failed;
        if let Some(why) = doomed.as_deref().or(broken) {
            mem::replace(&mut incoming.target, Target::Discard).fail(why, self.events);
        }
        match broken {
            Some(_) => drop(inn.steps.remove(at)),
            None => {
                if let Err(why) = self.hand_over(inn) {
                    self.carried.failed(&why);
                    self.wire.watch(self.carried.who);
                }
            }
        }
    }

    /// Hands over what has arrived, in order.
    fn hand_over(&mut self, inn: &mut Inn) -> Result<(), String> {
        loop {
            match inn.steps.front() {
                None | Some(Step::Body { flying: Some(_), .. } | Step::Body { failed: true, .. }) => return Ok(()),
                Some(_) => (),
            }
            match inn.steps.pop_front().expect("just seen") {
                Step::Body { incoming, .. } => self.finish(incoming),
                Step::Mail(frame, data) => self.whole(frame, data)?,
                Step::Control(frame) => self.control(frame)?,
            }
        }
    }
}
