//! The receiving side of a connection that UCX carries: hands over the peer's frames in the order in which they were sent.
//!
//! UCX keeps no order between short and long messages, so frames are numbered, and one that arrives early waits for its
//! turn. The data of a body goes from memory to memory. While a body arrives, later mail and `Cut` frames wait, because
//! they must be handed over after the body (`Mail::send_body`); everything else is handled immediately.

#![allow(unsafe_code)] // the callers of transfers vouch for the memory

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use super::driving::Counted;
use super::expected::Expected;
use super::frame::{Frame, Kind};
use super::label;
use super::receiver::{Incoming, Origin, Routes};
use super::transfer::{End, Events, Target};
use super::watched::Watched;
use crate::engine::multihost::ucx::{Data, HEAD};

/// The error of a peer that does not speak this protocol.
const NO_FRAME: &str = "it sent what is no frame";

/// What has to be handed over in order.
enum Step {
    Body(Body),
    /// A frame that waits until the body before it is handed over.
    Behind(Frame, Data),
}

struct Body {
    incoming: Incoming,
    /// The number of the UCX receive that still uses the body's memory.
    flying: Option<(u64, Counted)>,
    /// Whether the receive failed. Then the connection ends, and this body with it.
    failed: bool,
    /// Set if the transfer was given up: its error.
    doomed: Option<String>,
}

/// Handles the frames, and collects the events that must run after all locks are released.
pub struct Handler<'a, R> {
    pub routes: &'a R,
    pub from: Origin,
    pub events: &'a mut Events,
}

pub struct Arrivals {
    watched: Arc<Watched>,
    who: u64,
    /// How many frames were handled.
    next: u64,
    /// Frames that came before their turn.
    early: BTreeMap<u64, (Frame, Data)>,
    steps: VecDeque<Step>,
    /// How many receives UCX was given.
    numbers: u64,
    /// When something last arrived.
    moved: Instant,
    /// Whether the peer has sent something that ends the connection. Then nothing more is handled.
    refused: bool,
    expected: Arc<Expected>,
}

impl Arrivals {
    pub fn new(watched: &Arc<Watched>, who: u64, expected: &Arc<Expected>) -> Arrivals {
        Arrivals {
            watched: Arc::clone(watched),
            who,
            next: 0,
            early: BTreeMap::new(),
            steps: VecDeque::new(),
            numbers: 0,
            moved: Instant::now(),
            refused: false,
            expected: Arc::clone(expected),
        }
    }

    /// Records that something has arrived.
    pub fn touch(&mut self) {
        self.moved = Instant::now();
    }

    /// Returns when something last arrived.
    pub fn moved(&self) -> Instant {
        self.moved
    }

    /// Whether all of the peer's first `count` frames were handed over.
    pub fn has_handled(&self, count: u64) -> bool {
        self.next == count && self.steps.is_empty()
    }

    /// Whether UCX no longer uses the memory of any receive.
    pub fn is_over(&self) -> bool {
        !self.steps.iter().any(Step::is_flying)
    }

    /// Whether UCX is still receiving the data of a transfer that was given up.
    pub fn has_doomed(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Body(Body { flying: Some(_), doomed: Some(_), .. })))
    }

    // ------------------------------------------------------------------------------------------------------- arriving

    /// Handles the frame with this number, and then the later frames that have already arrived. An error ends the
    /// connection.
    pub fn came<R: Routes>(
        &mut self,
        number: u64,
        head: &[u8; HEAD],
        data: Data,
        with: &mut Handler<R>,
    ) -> Result<(), String> {
        self.touch();
        let is_known = |frame: &Frame| frame.data() == data.bytes() && number >= self.next && !self.refused;
        let Some(frame) = label::frame(head).filter(is_known) else {
            self.watched.release(data);
            return self.refuse(NO_FRAME.to_string());
        };
        if let Some((_, twice)) = self.early.insert(number, (frame, data)) {
            self.watched.release(twice);
            return self.refuse(NO_FRAME.to_string());
        }
        while let Some((frame, data)) = self.early.remove(&self.next) {
            self.next += 1;
            if let Err(why) = self.take(frame, data, with) {
                return self.refuse(why);
            }
        }
        Ok(())
    }

    fn refuse(&mut self, why: String) -> Result<(), String> {
        self.refused = true;
        Err(why)
    }

    fn take<R: Routes>(&mut self, frame: Frame, data: Data, with: &mut Handler<R>) -> Result<(), String> {
        match frame.kind {
            Kind::Cut | Kind::Mail if !self.steps.is_empty() => {
                self.steps.push_back(Step::Behind(frame, data));
                Ok(())
            }
            Kind::Body => {
                let channel = frame.channel;
                let body = self.begin(frame, data, with)?;
                self.steps.push_back(Step::Body(body));
                self.expected.began(channel); // if UCX is receiving it, `flying` counts
                self.hand_over(with)
            }
            Kind::Hello | Kind::Want | Kind::Credit | Kind::Cut | Kind::Mail | Kind::Message => {
                self.handle(frame, data, with)
            }
        }
    }

    /// Handles a frame whose data has arrived completely.
    fn handle<R: Routes>(&mut self, frame: Frame, data: Data, with: &mut Handler<R>) -> Result<(), String> {
        if frame.kind == Kind::Cut {
            self.expected.ended(frame.channel);
        }
        if data.is_far() {
            self.watched.release(data);
            return Err("it sent a short message as a long one".to_string());
        }
        let begun = Incoming::begin(with.routes, with.from, frame, with.events);
        if let Ok(Some(mut incoming)) = begun {
            self.store(&mut incoming, data);
            incoming.end(with.from, with.events);
            return Ok(());
        }
        self.watched.release(data);
        begun.map(drop)
    }

    /// Begins to receive a body.
    fn begin<R: Routes>(&mut self, frame: Frame, data: Data, with: &mut Handler<R>) -> Result<Body, String> {
        let begun = Incoming::begin(with.routes, with.from, frame, with.events);
        let Ok(Some(mut incoming)) = begun else {
            self.watched.release(data);
            return Err(begun.err().unwrap_or(NO_FRAME.to_string()));
        };
        let mut flying = None;
        match data {
            Data::Held(held) if held.is_far() && !matches!(incoming.target, Target::Discard) => {
                self.numbers += 1;
                let pieces = incoming.target.all(frame.data());
                // SAFETY: the step keeps an owned buffer until UCX has ended; the callers of transfers vouch for
                // borrowed memory until then.
                match unsafe { self.watched.worker.receive(held, self.who, self.numbers, &pieces) } {
                    Ok(true) => (),
                    Ok(false) => flying = Some((self.numbers, Counted::new(&self.watched.driving))),
                    Err(why) => {
                        incoming.target.fail(&why, with.events);
                        return Err(format!("UCX: {why}"));
                    }
                }
            }
            data => self.store(&mut incoming, data),
        }
        Ok(Body { incoming, flying, failed: false, doomed: None })
    }

    /// Stores data that has arrived. Discards data that is still at the sender.
    fn store(&self, incoming: &mut Incoming, data: Data) {
        match &data {
            Data::Copied(bytes) => drop(incoming.store(bytes)),
            Data::Held(held) if !held.is_far() => drop(incoming.store(held.bytes())),
            Data::Held(_) => (),
        }
        self.watched.release(data);
    }

    /// Called when a receive has ended. `broken`: why the connection is broken, if it is. An error ends the connection.
    pub fn receive_ended<R: Routes>(
        &mut self,
        number: u64,
        has_failed: bool,
        broken: Option<&str>,
        with: &mut Handler<R>,
    ) -> Result<(), String> {
        self.touch();
        let Some(at) = self.steps.iter().position(|step| step.number() == Some(number)) else { return Ok(()) };
        let Step::Body(body) = &mut self.steps[at] else { return Ok(()) };
        (body.flying, body.failed) = (None, has_failed);
        if let Some(why) = body.doomed.as_deref().or(broken) {
            mem::replace(&mut body.incoming.target, Target::Discard).fail(why, with.events);
        }
        if broken.is_some() {
            self.steps.remove(at);
            return Ok(());
        }
        self.hand_over(with)
    }

    /// Hands over what has arrived, in order.
    fn hand_over<R: Routes>(&mut self, with: &mut Handler<R>) -> Result<(), String> {
        while self.steps.front().is_some_and(Step::is_ready) {
            match self.steps.pop_front().expect("just seen") {
                Step::Body(body) => body.incoming.end(with.from, with.events),
                Step::Behind(frame, data) => self.handle(frame, data, with)?,
            }
        }
        Ok(())
    }

    // ------------------------------------------------------------------------------------------------- what ends early

    /// As `Connection::forget`. A transfer that UCX has begun ends with this error when UCX reports its end.
    pub fn forget(&mut self, channel: u64, why: &str, events: &mut Events) {
        for body in self.bodies().filter(|body| body.incoming.frame.channel == channel) {
            match body.flying {
                Some(_) => drop(body.doomed.get_or_insert_with(|| why.to_string())),
                None => body.incoming.forget(channel, why, events),
            }
        }
    }

    /// Discards the transfers that `is_it` selects. Returns the numbers of transfers that UCX has begun.
    pub fn give_up(&mut self, is_it: impl Fn(&End) -> bool) -> Vec<u64> {
        let mut numbers = Vec::new();
        for body in self.bodies() {
            match &body.flying {
                Some((number, _)) if body.incoming.is_of(&is_it) => numbers.push(*number),
                Some(_) => (),
                None => body.incoming.give_up(&is_it),
            }
        }
        numbers
    }

    fn bodies(&mut self) -> impl Iterator<Item = &mut Body> {
        self.steps.iter_mut().filter_map(|step| if let Step::Body(body) = step { Some(body) } else { None })
    }

    /// Whether UCX still runs a receive with one of these numbers.
    pub fn is_flying(&self, numbers: &[u64]) -> bool {
        self.steps.iter().filter_map(Step::number).any(|number| numbers.contains(&number))
    }

    /// Fails the frames that UCX is not receiving. A receive in flight ends when UCX reports its end.
    pub fn fail_all(&mut self, why: &str, events: &mut Events) {
        mem::take(&mut self.early).into_values().for_each(|(_, data)| self.watched.release(data));
        let (kept, gone): (VecDeque<_>, VecDeque<_>) =
            mem::take(&mut self.steps).into_iter().partition(Step::is_flying);
        self.steps = kept;
        for step in gone {
            match step {
                Step::Body(body) => body.incoming.target.fail(why, events),
                Step::Behind(_, data) => self.watched.release(data),
            }
        }
    }
}

impl Step {
    /// Returns the number of the receive that UCX is doing.
    fn number(&self) -> Option<u64> {
        match self {
            Step::Body(body) => body.flying.as_ref().map(|(number, _)| *number),
            Step::Behind(..) => None,
        }
    }

    fn is_flying(&self) -> bool {
        self.number().is_some()
    }

    /// Whether this step can be handed over as soon as the steps before it have been.
    fn is_ready(&self) -> bool {
        match self {
            Step::Body(body) => body.flying.is_none() && !body.failed,
            Step::Behind(..) => true,
        }
    }
}
