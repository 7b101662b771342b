//! State of the diagnosis that the groups of a process share: which threads wait, which rank waits for which, and the
//! words on which the answering threads sleep. In tests, where ranks are threads of one process, each rank has its own
//! `Responder`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::channel::{Channel, LongWait, Member, StoreAccess};
use super::cycle::Edge;
use super::places::{self, Asked, Places};
use super::store_keys::Request;
use crate::host::Host;
use crate::os::event_count::WakeWords;
use crate::os::watch::PerProcess;
use crate::progress::domain::EventCount;

/// A group that ends waits at most this long for the answering thread to drop its reference to the group's memory.
const RELEASE: Duration = Duration::from_millis(50);

/// A group's keys stay in the store for this long after the group's end. When a program ends, all its groups end within
/// this time. No keys are removed then, because no group uses the connection any more and the store may already be
/// gone.
pub(super) const KEYS_STAY: Duration = Duration::from_secs(2);

/// A group that this rank has left, and whose keys are still in the store.
pub(super) struct LeftGroup {
    pub(super) channel: Arc<dyn Channel>,
    pub(super) ranks: usize,
    since: Instant,
}

impl LeftGroup {
    fn connection(&self) -> Option<usize> {
        self.channel.store().map(StoreAccess::connection)
    }
}

#[derive(Default)]
pub struct Responder {
    /// The groups, in the order in which they were made. Weak, so that a dropped group disappears by itself.
    members: RwLock<Vec<Weak<dyn Member>>>,
    /// Number of watches made so far. Any thread may increment it. Relaxed, because it guards no other data.
    watches: AtomicU64,
    /// The waiting threads, in the order in which they were recorded.
    long_waits: Mutex<Vec<LongWait>>,
    /// Which rank waits for which, from the answers of other ranks, with the time of each answer (`clock::now`).
    edges: Mutex<Vec<(Edge, u64)>>,
    /// The answering thread (`answering`) sleeps on this word. `add` and `look_again` wake it.
    pub(super) changed: EventCount,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) places: Arc<Places>,
    /// The threads that read stores (`store_threads`) sleep on `stores_changed`; `look_again` wakes them. The field
    /// `store_threads` holds these threads, each with its connection.
    pub(super) stores_changed: EventCount,
    pub(super) store_threads: Mutex<Vec<(usize, JoinHandle<()>)>>,
    /// For each connection to a store, the request that its thread is making. Weak: the groups of the connection hold it.
    requests: Mutex<HashMap<usize, Weak<Request>>>,
    /// The groups that this rank has left and whose keys are still in the store, in the order in which they ended. A
    /// group is removed when no living group uses its connection, so that this list keeps no store alive.
    left: Mutex<Vec<LeftGroup>>,
    /// Number of groups that were removed. `remove` increments it (release); the answering thread reads it (acquire)
    /// before it lists the groups.
    pub(super) removed: AtomicU64,
    /// Value of `removed` up to which the answering thread has dropped its references to the removed groups' memory.
    /// That thread writes it (release); `remove` reads it (acquire).
    pub(super) released: AtomicU64,
    /// Set at the end of the process (release). Read by the answering thread and by the threads that read stores
    /// (acquire).
    pub(super) stopping: AtomicBool,
}

static RESPONDERS: PerProcess<Mutex<HashMap<u64, Arc<Responder>>>> = PerProcess::new();

impl Responder {
    /// The responder with this number. Number 0 belongs to the process; tests give each rank another number.
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
        self.remember_left(member);
        let removed = self.removed.fetch_add(1, Ordering::Release) + 1;
        self.look_again();
        // Waits, so that the group's memory is unmapped when this returns. The wait may time out if the thread is
        // writing an answer.
        let until = Instant::now() + RELEASE;
        while self.answers() && self.released.load(Ordering::Acquire) < removed && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn remember_left(&self, member: &Arc<dyn Member>) {
        let used: Vec<Option<usize>> = self.members().iter().map(|other| other.connection()).collect();
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |channel| LeftGroup { channel, ranks: member.ranks(), since: Instant::now() };
        left.extend(member.channel().map(of));
        let unused = |one: &mut LeftGroup| one.connection().is_none_or(|used_by| !used.contains(&Some(used_by)));
        let gone: Vec<LeftGroup> = left.extract_if(.., unused).collect();
        drop(left);
        drop(gone); // may close a connection
    }

    /// Removes and returns the groups of a connection that this rank left at least `after` ago. Also returns the time
    /// until the next of these groups is due.
    pub(super) fn take_left(&self, connection: usize, after: Duration) -> (Vec<LeftGroup>, Option<Duration>) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let of_it = |one: &LeftGroup| one.connection() == Some(connection);
        let due = left.extract_if(.., |one| of_it(one) && one.since.elapsed() >= after).collect();
        let next = left.iter().find(|one| of_it(one)).map(|one| after.saturating_sub(one.since.elapsed()));
        (due, next)
    }

    /// The request that the thread of this connection is making.
    pub(super) fn request(&self, connection: usize) -> Arc<Request> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.retain(|_, request| request.strong_count() > 0);
        let known = requests.get(&connection).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let request = Arc::default();
            requests.insert(connection, Arc::downgrade(&request));
            request
        })
    }

    /// Whether the answering thread runs.
    fn answers(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Wakes the threads that answer questions and read stores. Called if there is work for them: a group has ended and
    /// they must drop it, an operation begins to wait for long, a group looks for a fault or has failed, a place is
    /// known, or the process ends.
    pub fn look_again(&self) {
        self.changed.wake(0);
        self.stores_changed.wake(0);
    }

    /// Requests the place of a thread of the program. When the place is known, the threads that answer are woken.
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

    /// Records a waiting thread (`more`), or removes it when it has stopped waiting (not `more`).
    pub fn count_long_wait(&self, wait: LongWait, more: bool) {
        let mut waits = self.long_waits.lock().unwrap_or_else(PoisonError::into_inner);
        match waits.iter().position(|one| *one == wait).filter(|_| !more) {
            Some(at) => drop(waits.remove(at)),
            None if more => waits.push(wait),
            None => (),
        }
    }

    /// Stores the edges in an answer of rank `speaker`, each with its age in milliseconds. They replace all known edges
    /// that start at the speaker, and older edges that start at other ranks.
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

    /// The edges that are at most `within` nanoseconds old, each with its age in milliseconds.
    pub fn edges(&self, now: u64, within: u64) -> Vec<(Edge, u64)> {
        let known = self.edges.lock().unwrap_or_else(PoisonError::into_inner);
        let young = known.iter().filter(|(_, at)| now.saturating_sub(*at) <= within);
        young.map(|(edge, at)| (edge.clone(), now.saturating_sub(*at) / 1_000_000)).collect()
    }
}
