//! What the groups of a process share in the diagnosis: who waits for long, which rank waits for which, and the words on which
//! the threads sleep that answer other ranks. In tests, where ranks are threads of one process, each rank has its own.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::channel::{LongWait, Member};
use super::cycle::Edge;
use super::places::{self, Asked, Places};
use crate::host::Host;
use crate::os::event_count::WakeWords;
use crate::os::watch::PerProcess;
use crate::progress::domain::EventCount;

/// How long the end of a group waits until the answering thread has dropped its reference to the group's memory.
const RELEASE: Duration = Duration::from_millis(50);

#[derive(Default)]
pub struct Responder {
    /// The groups, in the order in which they were made. Weak: a dropped group leaves by itself.
    members: RwLock<Vec<Weak<dyn Member>>>,
    /// The number of watches made so far. Any thread raises it (relaxed: nothing else is read by it).
    watches: AtomicU64,
    /// The threads that have waited for long, the first one first.
    long_waits: Mutex<Vec<LongWait>>,
    /// Which rank waits for which, as other ranks have answered, and the time of each answer (`clock::now`).
    edges: Mutex<Vec<(Edge, u64)>>,
    /// Signalled when a group was made or has ended, a place is known (`places`), or `stopping` was set: wakes the answering
    /// thread.
    pub(super) changed: EventCount,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) places: Arc<Places>,
    /// The same for the threads that look into stores (`store_threads`), which are listed by their connections.
    pub(super) stores_changed: EventCount,
    pub(super) store_threads: Mutex<Vec<(usize, JoinHandle<()>)>>,
    /// Groups that were removed. Raised by `remove` (release), read by the answering thread (acquire) before it looks at
    /// the groups.
    pub(super) removed: AtomicU64,
    /// The value of `removed` up to which the answering thread has dropped its references to the removed groups'
    /// memory. Written by it (release), read by `remove` (acquire).
    pub(super) released: AtomicU64,
    /// Set at the end of the process (release), read by the answering thread and by the threads of stores (acquire).
    pub(super) stopping: AtomicBool,
}

static RESPONDERS: PerProcess<Mutex<HashMap<u64, Arc<Responder>>>> = PerProcess::new();

impl Responder {
    /// The responder with this number: 0 is that of the process; tests give their ranks others.
    pub fn numbered(number: u64) -> Arc<Responder> {
        Arc::clone(RESPONDERS.get().lock().unwrap_or_else(PoisonError::into_inner).entry(number).or_default())
    }

    pub fn all() -> Vec<Arc<Responder>> {
        RESPONDERS.get().lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub(super) fn next_id(&self) -> u64 {
        self.watches.fetch_add(1, Ordering::Relaxed)
    }

    pub fn add(&self, member: &Arc<dyn Member>) {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        members.retain(|weak| weak.strong_count() > 0);
        members.push(Arc::downgrade(member));
        drop(members);
        self.changed.wake(0);
    }

    pub fn remove(&self, member: &Arc<dyn Member>) {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        members.retain(|weak| !std::ptr::addr_eq(weak.as_ptr(), Arc::as_ptr(member)));
        drop(members);
        let removed = self.removed.fetch_add(1, Ordering::Release) + 1;
        self.look_again();
        // Waits, so that the memory of a group is unmapped when its end returns. Where the thread is giving an answer,
        // this may time out.
        let until = Instant::now() + RELEASE;
        while self.answers() && self.released.load(Ordering::Acquire) < removed && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Whether the answering thread runs.
    fn answers(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Wakes the threads that answer: they must drop a group that has ended, a group has a question, or a place is known.
    pub fn look_again(&self) {
        self.changed.wake(0);
        self.stores_changed.wake(0);
    }

    /// Asks for the place that a thread of the program is at, and wakes the threads that answer when it is known.
    pub fn ask_place(self: &Arc<Responder>, thread: u64, host: &Arc<dyn Host>) -> Asked {
        let this = Arc::clone(self);
        places::ask(&self.places, thread, host, Arc::new(move || this.look_again()))
    }

    pub fn members(&self) -> Vec<Arc<dyn Member>> {
        self.members.read().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect()
    }

    pub fn long_waits(&self) -> Vec<LongWait> {
        self.long_waits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts a thread that has waited for long, or (`more` is false) has stopped waiting.
    pub fn count_long_wait(&self, wait: LongWait, more: bool) {
        let mut waits = self.long_waits.lock().unwrap_or_else(PoisonError::into_inner);
        match waits.iter().position(|one| *one == wait).filter(|_| !more) {
            Some(at) => drop(waits.remove(at)),
            None if more => waits.push(wait),
            None => (),
        }
    }

    /// Stores what `speaker` said about which rank waits for which, each edge with its age in milliseconds. It
    /// replaces all edges from the speaker, and older ones from other ranks.
    pub fn receive(&self, speaker: u32, edges: &[(Edge, u64)], now: u64) {
        let mut known = self.edges.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(edge, _)| edge.from != speaker);
        for (edge, age) in edges {
            let at = now.saturating_sub(age.saturating_mul(1_000_000));
            if known.iter().any(|(other, then)| other.from == edge.from && *then > at) {
                continue;
            }
            known.retain(|(other, then)| other.from != edge.from || *then == at);
            known.push((edge.clone(), at));
        }
    }

    /// The edges that are at most `within` nanoseconds old, with their age in milliseconds.
    pub fn edges(&self, now: u64, within: u64) -> Vec<(Edge, u64)> {
        let known = self.edges.lock().unwrap_or_else(PoisonError::into_inner);
        let young = known.iter().filter(|(_, at)| now.saturating_sub(*at) <= within);
        young.map(|(edge, at)| (edge.clone(), now.saturating_sub(*at) / 1_000_000)).collect()
    }
}
