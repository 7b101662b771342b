//! Ranks that share no memory ask each other what they do through keys of the store in which they met. A thread reads
//! the store (`store_threads`), because a store may block its caller for minutes. `queries` decides which rank asks and
//! which collects the answers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use super::channel::{Channel, Member, StoreAccess};
use super::monitor::Watched;
use super::queries::{FaultRead, Queries};
use super::responder::Responder;
use super::store_keys::{Request, SharedStore, interval};
use super::{SHORTEST, SILENCE, in_seconds};
use crate::engine::Told;
use crate::os::clock;

/// Interval at which this rank reads the store to find a fault that another rank has published.
const WHY: Duration = Duration::from_millis(25);

pub struct StoreChannel {
    queries: Queries,
    /// Keys that this rank has set, and that no rank reads any more.
    keys: Vec<String>,
    responder: Arc<Responder>,
    /// Set by a thread of this rank that wants to know whether another rank has failed the group, and why. Read by the
    /// thread that reads the store. Relaxed, because it guards no other data.
    asks_why: AtomicBool,
    told: OnceCell<Told>,
    /// When the last read that found no fault began. Written by the thread that reads the store.
    no_fault_at: Mutex<Option<Instant>>,
    /// Set by a thread that wants one read for a fault. Cleared, before it reads, by the thread that reads the store.
    /// Relaxed, because it guards no other data.
    wants_read: AtomicBool,
    /// The request that the thread of the connection is making, for this group or another one.
    request: Arc<Request>,
    /// Set by the thread that reads the store after it has published this rank's fault (release). Read (acquire) before
    /// this rank ends communicators on devices, so that a peer that finds one ended can read the reason.
    published: AtomicBool,
}

impl StoreChannel {
    /// `id` is unique to this attempt to make the group. `keys`: further keys of this rank, to be removed after the
    /// group has ended.
    pub fn over(store: SharedStore, id: &str, responder: &Arc<Responder>, keys: Vec<String>) -> Arc<dyn Channel> {
        let request = responder.request(store.connection());
        let (queries, responder) = (Queries::new(store, id, Arc::clone(&request)), Arc::clone(responder));
        Arc::new(StoreChannel {
            queries,
            request,
            keys,
            responder,
            asks_why: AtomicBool::new(false),
            told: OnceCell::new(),
            no_fault_at: Mutex::default(),
            wants_read: AtomicBool::new(false),
            published: AtomicBool::new(false),
        })
    }
}

impl Channel for StoreChannel {
    fn has_all(&self, watched: &Watched) -> bool {
        watched.complete
    }

    fn takes(&self, timeout: Duration) -> Duration {
        interval(timeout) * 2 + SILENCE
    }

    fn store(&self) -> Option<&dyn StoreAccess> {
        Some(self)
    }
}

impl StoreAccess for StoreChannel {
    fn obstacle(&self) -> Option<String> {
        if let Some(failure) = self.queries.failure() {
            return Some(format!("the store has failed ({failure})"));
        }
        let waits = self.request.waits().filter(|waits| *waits >= SILENCE)?;
        Some(format!("the store has not responded for {}", in_seconds(waits)))
    }

    fn look_again(&self) {
        self.responder.look_again();
    }

    fn ask_for_fault(&self) {
        self.asks_why.store(true, Ordering::Relaxed);
        self.look_again();
    }

    fn had_no_fault_at(&self, at: Instant) -> bool {
        let known = *self.no_fault_at.lock().unwrap_or_else(PoisonError::into_inner) >= Some(at);
        if known || self.queries.failure().is_some() {
            return true;
        }
        if !self.wants_read.swap(true, Ordering::Relaxed) {
            self.look_again();
        }
        false
    }

    fn has_published(&self) -> bool {
        self.told.get().is_some() || self.published.load(Ordering::Acquire)
    }

    fn told(&self) -> Option<Told> {
        self.told.get().cloned()
    }

    fn connection(&self) -> usize {
        self.queries.connection()
    }

    fn leave(&self, ranks: usize) {
        self.queries.leave(ranks, &self.keys);
    }

    fn look(&self, me: &dyn Member) -> Option<Duration> {
        if let Some(fault) = me.fault() {
            // A rank that read the fault from another rank would only repeat it.
            if self.told.get().is_none() {
                self.queries.publish_fault(me.rank(), &fault);
                self.published.store(true, Ordering::Release);
            }
            return None;
        }
        if me.has_ended() {
            return None;
        }
        let pause = interval(me.timeout());
        me.look_external(); // no other thread does this for a delegate's operations
        let waits = me.waits_long();
        let next = self.queries.look(me, waits, clock::stamp(), pause);
        let asks_why = self.asks_why.load(Ordering::Relaxed) && self.told.get().is_none();
        let (wants_read, begin) = (self.wants_read.swap(false, Ordering::Relaxed), Instant::now());
        match self.queries.fault(asks_why || wants_read) {
            FaultRead::Told(told) => drop(self.told.set(told)),
            FaultRead::NoFault => {
                *self.no_fault_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(begin);
            }
            FaultRead::NotRead | FaultRead::Impossible => (),
        }
        me.look_external(); // again, for the line at the soft limit, which is due even if the store fails
        // While an operation waits, this thread reads the clock often, because the clock takes a long gap between two
        // readings as a sign that the process was stopped.
        let next = next.unwrap_or(if waits { SHORTEST } else { pause });
        Some(if asks_why { next.min(WHY) } else { next })
    }
}
