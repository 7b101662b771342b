//! All groups of one rank, and the words by which its threads share the driving of them (`roles`). A process is one
//! domain; in tests, where ranks are threads of one process, each rank has its own.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::roles::Words;
use crate::engine::WakeAddress;
use crate::os::event_count;
use crate::os::event_count::WakeWords;
use crate::os::futex;
use crate::os::watch::PerProcess;
use crate::os::yielding::Yielding;

/// A group, as its drivers see it.
pub trait Driven: Send + Sync {
    /// Advances what can advance without waiting; false when nothing did, or another thread is driving it. Never
    /// panics.
    fn drive(&self) -> bool;
    /// Sleeps for at most `pause` where only this thread can then advance the group, and advances it; false when nothing moved
    /// or the group has no such sleep.
    fn rest(&self, _pause: Duration) -> bool {
        false
    }
    /// Checks deadlines and peers that left; called between sleeps, at least every 50 ms while something is pending.
    fn check_deadlines_and_peers(&self);
    /// Operations that have not ended.
    fn pending(&self) -> usize;
    /// The word on which peers wake this rank, if they can.
    fn wake_address(&self) -> Option<WakeAddress<'_>>;
    /// The rank that this group belongs to.
    fn domain(&self) -> &Arc<Domain>;
    /// Spin and yield budgets.
    fn spin_policy(&self) -> SpinPolicy;
    /// True when a lower rank was last seen waiting on the core that this thread runs on.
    fn shares_core(&self) -> bool;
    /// The process ends: fails pending operations and tells the peers.
    fn leave(&self);
    /// A thread (`os::watch::this_thread`) has waited for long in this group, or (`more` is false) has stopped waiting.
    fn count_long_wait(&self, thread: u64, more: bool);
}

#[derive(Clone, Copy, Debug)]
pub struct SpinPolicy {
    pub spin: Duration,
    pub yield_for: Duration,
    /// Every rank could have its own core.
    pub own_cores: bool,
}

impl SpinPolicy {
    /// For `ranks` ranks of one host that may use `cores` cores together.
    pub fn for_ranks(ranks: usize, cores: usize) -> SpinPolicy {
        if ranks <= cores {
            SpinPolicy { spin: Duration::from_micros(3), yield_for: Duration::from_micros(200), own_cores: true }
        } else {
            SpinPolicy { spin: Duration::from_micros(1), yield_for: Duration::from_micros(200), own_cores: false }
        }
    }

    /// The budgets of a wait that another thread of this process must end: that thread may need this core.
    pub fn none() -> SpinPolicy {
        SpinPolicy { spin: Duration::ZERO, yield_for: Duration::ZERO, own_cores: false }
    }
}

impl SpinPolicy {
    /// The budgets of a wait for another host, which a thread of this process may end as well.
    pub fn yielding() -> SpinPolicy {
        SpinPolicy { spin: Duration::ZERO, yield_for: Duration::from_micros(200), own_cores: false }
    }
}

impl fmt::Display for SpinPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (spin, yield_for) = (self.spin.as_micros(), self.yield_for.as_micros());
        write!(f, "a wait spins {spin} us, yields its core for {yield_for} us, then sleeps")
    }
}

/// An event count inside one process. Its one "rank" is this process.
#[derive(Default)]
pub struct EventCount {
    /// Futex word: incremented (release) by the waking thread, read (acquire) before a sleep.
    word: AtomicU32,
    /// Threads that sleep on it or are about to. Relaxed, ordered by the fences of `event_count`.
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
    /// Its groups, in the order in which they were made. Weak: a dropped group leaves by itself.
    groups: RwLock<Vec<Weak<dyn Driven>>>,
    /// Operations of all its groups that have not ended. Raised by groups at issue, lowered when they end.
    pending: AtomicUsize,
    /// Number of threads in `driver::wait_until`. Changed by these threads, read by the progress thread and by the last
    /// of them that leaves.
    drivers: AtomicUsize,
    /// Signalled when there may be something new to drive.
    pub work: EventCount,
    /// Signalled when an operation ended on another thread than the one that waits for it.
    pub ended: EventCount,
    /// Set once, at the end of the process; read by the progress thread.
    pub(crate) stopping: AtomicBool,
    pub(crate) thread: Mutex<Option<JoinHandle<()>>>,
    /// Set (release) when the thread was started, read (acquire) by every asynchronous operation, to skip the lock.
    pub(crate) running: AtomicBool,
    /// When a waiting thread last checked whether it shares its core with a peer (`clock::now`), so that it checks at most
    /// every 5 ms. Written and read by waiting threads, relaxed: nothing else is read by it.
    pub(super) dodged: AtomicU64,
    /// Whether threads that wait yield their core or sleep.
    pub(super) yielding: Yielding,
}

static DOMAINS: PerProcess<Mutex<HashMap<u64, Arc<Domain>>>> = PerProcess::new();

impl Domain {
    /// The domain with this number: 0 is that of the process; tests give their ranks others.
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

    /// Groups with something pending.
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

    /// Operations ended: wakes the threads that may wait for them.
    pub fn announce_ended(&self) {
        event_count::announce(&self.ended, 1);
    }

    /// A condition that drivers check has changed: a peer ended.
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
        self.drivers.load(Ordering::Relaxed)
    }
    fn count_driver(&self, more: bool) {
        if more {
            self.drivers.fetch_add(1, Ordering::Relaxed);
        } else {
            self.drivers.fetch_sub(1, Ordering::Relaxed);
        }
    }
    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}
