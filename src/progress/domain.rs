//! All groups of one rank, and the words through which its threads share the driving of these groups (`roles`). A
//! process is one domain; in tests, where ranks are threads of one process, each rank has its own domain.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::roles::Words;
use crate::engine::{Polled, WakeAddress};
use crate::os::event_count;
use crate::os::event_count::WakeWords;
use crate::os::futex;
use crate::os::watch::PerProcess;
use crate::os::yielding::Yielding;
use crate::threads::Helpers;

/// A group, as its drivers use it.
pub trait Driven: Send + Sync {
    /// Advances what can advance without waiting. Returns false if nothing advanced or another thread is driving the
    /// group. Never panics.
    fn drive(&self) -> bool;
    /// If the calling thread must advance the group itself, sleeps at most `_pause` for events and then advances it.
    fn rest(&self, _pause: Duration) -> Polled {
        Polled::Elsewhere
    }
    /// Checks deadlines, and whether peers have left. Called between sleeps, at least every 50 ms while something is
    /// pending.
    fn check_deadlines_and_peers(&self);
    /// Returns the number of operations that have not ended.
    fn pending(&self) -> usize;
    /// Returns the word on which peers wake this rank; `None` if peers cannot wake it.
    fn wake_address(&self) -> Option<WakeAddress<'_>>;
    /// Returns the domain of the rank to which this group belongs.
    fn domain(&self) -> &Arc<Domain>;
    /// Returns the threads that copy and combine for a thread that waits for this group. If `None`, the waiting thread
    /// does this alone.
    fn helpers(&self) -> Option<Helpers> {
        None
    }
    /// Returns the threads that copy and combine for the progress thread. If `None`, it does this alone.
    fn helpers_beside_the_program(&self) -> Option<Helpers> {
        self.helpers().map(|helpers| helpers.beside_the_program())
    }
    /// Returns how long a waiting thread spins and yields.
    fn spin_policy(&self) -> SpinPolicy;
    /// Called at the end of a wait that yielded without spinning, with the duration of that wait.
    fn waited(&self, took: Duration);
    /// Whether a lower rank was last seen waiting on the core on which this thread runs.
    fn shares_core(&self) -> bool;
    /// Called at the end of the process: fails pending operations and leaves the group.
    fn leave(&self);
    /// Records that a thread (`os::watch::this_thread`) has waited for long in this group (`more`), or that it has
    /// stopped waiting.
    fn count_long_wait(&self, thread: u64, more: bool);
}

#[derive(Clone, Copy, Debug)]
pub struct SpinPolicy {
    pub spin: Duration,
    pub yield_for: Duration,
    /// Whether there are enough cores for every rank to have its own.
    pub own_cores: bool,
}

impl SpinPolicy {
    /// Returns the budgets for `ranks` ranks on one host, which together may use `cores` cores.
    pub fn for_ranks(ranks: usize, cores: usize) -> SpinPolicy {
        if ranks <= cores {
            SpinPolicy { spin: Duration::from_micros(3), yield_for: Duration::from_micros(200), own_cores: true }
        } else {
            SpinPolicy { spin: Duration::from_micros(1), yield_for: Duration::from_micros(200), own_cores: false }
        }
    }

    /// Returns a policy without spinning and without yielding, because another thread of this process must end the wait
    /// and may need this core.
    pub fn none() -> SpinPolicy {
        SpinPolicy { spin: Duration::ZERO, yield_for: Duration::ZERO, own_cores: false }
    }
}

impl SpinPolicy {
    /// Returns the budgets of a wait for another host, which yields for this long. Another thread of this process may
    /// end such a wait, too.
    pub fn yielding(yield_for: Duration) -> SpinPolicy {
        SpinPolicy { spin: Duration::ZERO, yield_for, own_cores: false }
    }
}

impl fmt::Display for SpinPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (spin, yield_for) = (self.spin.as_micros(), self.yield_for.as_micros());
        write!(f, "a wait spins {spin} us, yields its core for {yield_for} us, then sleeps")
    }
}

/// An event count inside one process. As `WakeWords` it has one rank, this process.
#[derive(Default)]
pub struct EventCount {
    /// Futex word. The waking thread increments it (release); a sleeper reads it before it sleeps (acquire).
    word: AtomicU32,
    /// Number of threads that sleep on the word or are about to sleep. Relaxed, because the fences of `event_count`
    /// order it.
    sleepers: AtomicU32,
}

impl EventCount {
    pub fn word(&self) -> &AtomicU32 {
        &self.word
    }
}

impl WakeWords for EventCount {
    fn wake_count(&self, _: usize) -> u32 {
        self.word.load(Ordering::Acquire)
    }
    fn wake(&self, _: usize) {
        self.word.fetch_add(1, Ordering::Release);
        futex::wake_all(&self.word);
    }
    fn asleep(&self, _: usize) -> u32 {
        self.sleepers.load(Ordering::Relaxed)
    }
    fn sleepers(&self) -> u32 {
        self.sleepers.load(Ordering::Relaxed)
    }
    fn count_sleeper(&self, _: usize, more: bool) {
        self.sleepers.fetch_add(if more { 1 } else { u32::MAX }, Ordering::Relaxed);
    }
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

#[derive(Default)]
pub struct Domain {
    /// Groups of the domain, in the order in which they were created. Weak, so that a dropped group disappears by
    /// itself.
    groups: RwLock<Vec<Weak<dyn Driven>>>,
    /// Number of operations of all groups that have not ended. Groups increment it at issue and decrement it at the
    /// end.
    pending: AtomicUsize,
    /// The bits below `WAITS` are the number of threads in `driver::wait_until`; the bits above are the number of waits
    /// that have begun. Threads that begin or end such a wait change it. The progress thread reads it, and a thread
    /// that ends its wait reads it too.
    drivers: AtomicUsize,
    /// Number of operations that were issued and did not end at once, modulo a power of two. Threads that issue them
    /// write it, the progress thread reads it (relaxed: a hint).
    issues: AtomicUsize,
    /// Signalled when there may be new work for drivers.
    pub work: EventCount,
    /// Signalled when an operation has ended on a thread other than the one that waits for it.
    pub ended: EventCount,
    /// Set by `driver::stop` at the end of the process, and reset after the thread has ended. Read by the progress
    /// thread.
    pub(crate) stopping: AtomicBool,
    pub(crate) thread: Mutex<Option<JoinHandle<()>>>,
    /// Whether the progress thread was started. Set with release. Every asynchronous operation reads it with acquire,
    /// so that it does not need the lock of `thread`.
    pub(crate) running: AtomicBool,
    /// The largest number of ranks of a group on this host. Threads that make groups write it and read it. Relaxed,
    /// because it guards no other data.
    most_ranks: AtomicUsize,
    /// Time (`clock::now`) at which a waiting thread last checked whether it shares its core with a peer. Such a check
    /// is made at most once in 5 ms. Written and read by waiting threads. Relaxed, because it guards no other data.
    pub(super) dodged: AtomicU64,
    /// Decides whether waiting threads yield their core or sleep.
    pub(super) yielding: Yielding,
}

/// The number by which one wait increases `Domain::drivers`. A process never has this many threads.
const WAITS: usize = 1 << 16;

static DOMAINS: PerProcess<Mutex<HashMap<u64, Arc<Domain>>>> = PerProcess::new();

impl Domain {
    /// Returns the domain with this number. Number 0 belongs to the process; tests give each rank another number.
    pub fn numbered(number: u64) -> Arc<Domain> {
        Arc::clone(DOMAINS.get().lock().unwrap_or_else(PoisonError::into_inner).entry(number).or_default())
    }

    pub fn all() -> Vec<Arc<Domain>> {
        DOMAINS.get().lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub fn register(&self, group: &Arc<dyn Driven>) {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|weak| weak.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }

    pub fn unregister(&self, group: &Arc<dyn Driven>) {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|weak| !std::ptr::addr_eq(weak.as_ptr(), Arc::as_ptr(group)));
    }

    pub fn groups(&self) -> Vec<Arc<dyn Driven>> {
        self.groups.read().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect()
    }

    /// Called when a group of `ranks` ranks is made. Returns the largest such number so far.
    pub fn note_ranks(&self, ranks: usize) -> usize {
        self.most_ranks.fetch_max(ranks, Ordering::Relaxed).max(ranks)
    }

    /// Returns the groups that have pending operations.
    pub fn busy(&self) -> Vec<Arc<dyn Driven>> {
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        groups.iter().filter_map(Weak::upgrade).filter(|group| group.pending() > 0).collect()
    }

    pub fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }
    pub fn add_pending(&self, operations: usize) {
        self.pending.fetch_add(operations, Ordering::Relaxed);
    }
    pub fn remove_pending(&self, operations: usize) {
        self.pending.fetch_sub(operations, Ordering::Relaxed);
    }

    /// Returns the number of waits that have begun, modulo a power of two.
    pub(super) fn waits(&self) -> usize {
        self.drivers.load(Ordering::Relaxed) / WAITS
    }

    pub(super) fn count_issue(&self) {
        self.issues.fetch_add(1, Ordering::Relaxed);
    }
    pub(super) fn issues(&self) -> usize {
        self.issues.load(Ordering::Relaxed)
    }

    /// Wakes the threads that may wait for operations that have just ended.
    pub fn announce_ended(&self) {
        event_count::announce(&self.ended, 1);
    }

    /// Wakes drivers, because a condition that they check has changed, for instance because a peer has ended.
    pub fn announce_work(&self) {
        event_count::announce(&self.work, 1);
    }
}

impl Words for Domain {
    type Work = EventCount;
    fn work(&self) -> &EventCount {
        &self.work
    }
    fn pending(&self) -> usize {
        Domain::pending(self)
    }
    fn drivers(&self) -> usize {
        self.drivers.load(Ordering::Relaxed) % WAITS
    }
    fn count_driver(&self, more: bool) {
        if more {
            self.drivers.fetch_add(WAITS + 1, Ordering::Relaxed);
        } else {
            self.drivers.fetch_sub(1, Ordering::Relaxed);
        }
    }
    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}
