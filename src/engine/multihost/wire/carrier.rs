//! The part of a wire that exists only if UCX carries its frames: the worker, and the connections that UCX knows.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::carried::Carried;
use super::driving::Driving;
use super::label;
use super::locked;
use super::receiver::{Origin, Routes};
use super::transfer::Events;
use super::watched::Watched;
use crate::engine::multihost::ucx::{Event, Worker, log_messages};

/// Connections that may have to end are checked at this interval.
const LOOK: Duration = Duration::from_millis(10);

pub struct Carrier {
    watched: Arc<Watched>,
    /// The connections by number. A connection stays until UCX has ended all its requests.
    connections: Mutex<HashMap<u64, Arc<Carried>>>,
}

impl Carrier {
    pub fn new(worker: Worker, driving: &Arc<Driving>) -> Carrier {
        Carrier { watched: Arc::new(Watched::new(worker, driving)), connections: Mutex::default() }
    }

    /// Makes a connection, whose events are handled from now on. `fd`, `is_first`: as for `Carried::new`.
    pub fn carry(&self, origin: Origin, fd: OwnedFd, is_first: bool) -> Arc<Carried> {
        let carried = Arc::new(Carried::new(&self.watched, origin, fd, is_first));
        locked(&self.connections).insert(origin.token, Arc::clone(&carried));
        carried
    }

    /// Returns how long a pass may sleep: `sleep` or less. Unless the result is zero, an event of UCX ends the sleep.
    pub fn longest_sleep(&self, sleep: Duration) -> Duration {
        let sleep = if self.watched.has_any() { sleep.min(LOOK) } else { sleep };
        // If the library has events already, it will not wake a sleeping thread.
        if sleep.is_zero() || self.watched.worker.is_armed() { sleep } else { Duration::ZERO }
    }

    /// Advances UCX and handles what has happened. Appends the numbers of connections that have ended, and why. Returns
    /// true if something advanced.
    pub fn pass(&self, routes: &impl Routes, events: &mut Events, gone: &mut Vec<(u64, String)>) -> bool {
        let mut happened = Vec::new();
        let moved = self.watched.worker.progress(&mut happened);
        log_messages();
        for event in happened {
            self.handle(event, routes, events, gone);
        }
        if self.watched.has_any() {
            self.look(gone);
        }
        moved
    }

    fn handle(&self, event: Event, routes: &impl Routes, events: &mut Events, gone: &mut Vec<(u64, String)>) {
        match event {
            Event::Message { head, data } => {
                let who = label::who(&head);
                match self.known(who).filter(|one| one.broken().is_none()) {
                    Some(one) => gone.extend(one.came(&head, data, routes, events).err().map(|why| (who, why))),
                    None => self.watched.release(data),
                }
            }
            Event::Ended { who, what, outcome } => {
                if let Some(one) = self.known(who) {
                    one.ended(what, outcome, routes, events);
                    self.forget_if_over(who, &one);
                }
            }
            Event::Failed { who, why } => {
                if let Some(one) = self.known(who) {
                    one.failed(&why);
                }
            }
        }
    }

    fn known(&self, who: u64) -> Option<Arc<Carried>> {
        locked(&self.connections).get(&who).cloned()
    }

    fn forget_if_over(&self, who: u64, one: &Carried) {
        if one.is_over() {
            locked(&self.connections).remove(&who);
        }
    }

    /// Checks the connections that may have to end.
    fn look(&self, gone: &mut Vec<(u64, String)>) {
        let now = Instant::now();
        for who in self.watched.take() {
            let one = self.known(who);
            let found = match &one {
                Some(one) if one.broken().is_none() => one.look(now),
                Some(one) => {
                    self.forget_if_over(who, one);
                    Ok(false)
                }
                None => Ok(false),
            };
            match found {
                Ok(true) => self.watched.add(who),
                Ok(false) => (),
                Err(why) => gone.push((who, why)),
            }
        }
    }
}
