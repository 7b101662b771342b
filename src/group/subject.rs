//! Implements the interface through which the watch sees the group. No other code connects the diagnosis of hangs with
//! the group.

use std::time::Duration;

use super::Group;
use crate::engine::Blockers;
use crate::error::Error;
use crate::hang::store_channel::StoreChannel;
use crate::hang::store_keys::SharedStore;
use crate::hang::waiting::{Waiting, Which};
use crate::hang::{Progress, Subject, store_threads};
use crate::os::clock;
use crate::select::Choice;
use crate::stats::history::{Record, State};

impl Subject for Group {
    fn next_external(&self) -> Option<Waiting> {
        self.lock().external.next_deadline().map(|external| external.waiting())
    }

    fn next_of_engine(&self) -> Option<Waiting> {
        self.lock().engine.next_deadline().map(|op| Waiting::of(&op, clock::now()))
    }

    fn waiting(&self, which: &Which) -> Option<Waiting> {
        match which {
            Which::Engine(op) => op.upgrade().filter(|op| !op.is_done()).map(|op| Waiting::of(&op, clock::now())),
            Which::External { id, .. } => self.external(*id).filter(|waiting| waiting.which == *which),
        }
    }

    fn external(&self, id: u64) -> Option<Waiting> {
        self.lock().external.get(id).map(|external| external.waiting())
    }

    fn blockers(&self, waiting: &Waiting) -> Blockers {
        match &waiting.which {
            Which::Engine(op) => match op.upgrade() {
                Some(op) => self.lock().engine.blockers(&op),
                None => Blockers::Unknown(Some("it has ended meanwhile".to_string())),
            },
            Which::External { .. } => self.launches.blockers(waiting, |rank| self.watch.process_of(rank)),
        }
    }

    fn progress(&self) -> Progress {
        let inner = self.lock();
        let history = inner.stats.history();
        let newest = history.iter().next_back().filter(|last| last.state != State::Pending);
        let idle = newest.map(|last| clock::stamp().saturating_sub(last.ended) / 1_000_000);
        let device = Choice::DEVICE.code();
        let on_device = |last: &&Record| last.route.choice == device;
        let named = |last: &Record| format!("{} number {}", last.kind, last.number);
        let last = history.collectives().find(|last| !on_device(last)).map(named);
        let launched_last = history.collectives().find(on_device).map(|last| format!("{} on a device", named(last)));
        let issued = inner.counters.collectives();
        drop(inner);
        let launched = self.launches.number();
        Progress { issued, last, launched, launched_last, signed: self.launches.own().into(), idle }
    }

    fn ended_ago(&self, number: u64, on_device: bool) -> Option<u64> {
        let inner = self.lock();
        let device = Choice::DEVICE.code();
        let mut alike = inner.stats.history().collectives().filter(|one| (one.route.choice == device) == on_device);
        let record = alike.find(|record| record.number == number);
        let record = record.filter(|record| record.state != State::Pending && record.timed)?;
        Some(clock::stamp().saturating_sub(record.ended) / 1_000_000)
    }

    fn timeout(&self) -> Duration {
        self.timeouts.usual()
    }

    fn fault(&self) -> Option<Error> {
        Group::fault(self)
    }

    fn has_ended(&self) -> bool {
        self.faults.standing().is_err()
    }

    fn fail(&self, error: Error) {
        self.poison(error);
    }
}

impl Group {
    /// Lets ranks that share no memory ask each other through this store.
    pub fn set_board(&self, store: SharedStore) {
        // Without the id on which the ranks agree at the rendezvous, the keys of two groups would collide.
        let needs_one = self.config.size > 1 && self.watch.channel().is_none() && self.id != [0; 16];
        let (connection, responder) = (store.connection(), self.watch.responder());
        if needs_one
            && self.watch.set_channel(StoreChannel::over(store, &self.id(), responder, self.watch.who.keys.clone()))
        {
            store_threads::start(responder, connection);
        }
    }
}
