//! Who makes progress: any thread that waits drives every group of its process; when nobody waits, the progress thread
//! does. Nobody owns a group for longer than one pass: `Driven::drive` takes the group's lock if it is free, moves what
//! can move, and lets go.
//!
//! A waiting thread first spins, then yields, then sleeps on the doors of all groups it drives. The budgets come from
//! measured facts: a futex wake across cores costs 14 to 26 us, so giving way for several times that before sleeping
//! pays. Spinning is short even where every rank could have a core of its own: when other work pushes two ranks onto one
//! core, 25 us of spinning keep the peer off it and cost 70 us an operation, for ever; 3 us cost nothing where the
//! ranks do run apart, because a yield with nobody else to run takes 0.4 us (docs/benchmarks.md).

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::{Duration, Instant};

use crate::engine::shm::area::Area;
use crate::engine::shm::{futex, signal};
use crate::host::Host;

/// A group, as its drivers see it.
pub trait Driven: Send + Sync {
    /// Moves what can move without waiting; false when nothing did, or another thread is at it.
    fn drive(&self) -> bool;
    /// Looks at deadlines and at peers that left; called between sleeps, at least every 50 ms while something is pending.
    fn tick(&self);
    /// Operations that have not ended.
    fn pending(&self) -> usize;
    /// Where this rank's door is, if it has one.
    fn area(&self) -> Option<&Area>;
    /// Added to and woken when an operation ended, where there is no door: the lanes' threads end those.
    fn bell(&self) -> Option<&AtomicU32>;
    /// Ranks that are threads of one process drive only their own groups, as separate processes would.
    fn domain(&self) -> u64;
    /// Spin and yield budgets.
    fn patience(&self) -> Patience;
    /// True when a lower rank was last seen waiting on the core that this thread runs on.
    fn shares_core(&self) -> bool;
    /// The process ends: what is pending fails, peers are told.
    fn leave(&self);
}

#[derive(Clone, Copy, Debug)]
pub struct Patience {
    pub spin: Duration,
    pub give_way: Duration,
    /// Every rank could have a core of its own.
    pub apart: bool,
}

impl Patience {
    /// For `ranks` ranks of one host that may use `cores` cores together.
    pub fn for_ranks(ranks: usize, cores: usize) -> Patience {
        if ranks <= cores {
            Patience { spin: Duration::from_micros(3), give_way: Duration::from_micros(200), apart: true }
        } else {
            Patience { spin: Duration::from_micros(1), give_way: Duration::from_micros(200), apart: false }
        }
    }

    /// For a wait that another thread of this process must end: it may need this core.
    pub fn none() -> Patience {
        Patience { spin: Duration::ZERO, give_way: Duration::ZERO, apart: false }
    }
}

/// Longest sleep between two looks at deadlines and signals.
const NAP: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Elapsed,
    Interrupted,
}

/// All groups of the process. Weak: a dropped group leaves by itself.
static GROUPS: RwLock<Vec<Weak<dyn Driven>>> = RwLock::new(Vec::new());
/// Pending operations of all groups. Written by groups, read by waiters to skip the list when theirs is the only one.
pub static PENDING: AtomicUsize = AtomicUsize::new(0);
/// Threads in `wait_until`. The progress thread stays away while there are any.
static WAITERS: AtomicUsize = AtomicUsize::new(0);

pub fn register(group: &Arc<dyn Driven>) {
    let mut groups = GROUPS.write().unwrap();
    groups.retain(|weak| weak.strong_count() > 0);
    groups.push(Arc::downgrade(group));
}

pub fn unregister(group: &Arc<dyn Driven>) {
    GROUPS.write().unwrap().retain(|weak| !std::ptr::addr_eq(weak.as_ptr(), Arc::as_ptr(group)));
}

pub fn for_each(each: impl Fn(&dyn Driven)) {
    let groups: Vec<_> = GROUPS.read().unwrap().iter().filter_map(Weak::upgrade).collect();
    // The last one first: a group over several hosts was made after those that it has inside its host.
    groups.iter().rev().for_each(|group| each(&**group));
}

/// Groups with something pending, of `domain` or of all.
fn busy(domain: Option<u64>) -> Vec<Arc<dyn Driven>> {
    let groups = GROUPS.read().unwrap();
    groups
        .iter()
        .filter_map(Weak::upgrade)
        .filter(|group| group.pending() > 0 && domain.is_none_or(|domain| group.domain() == domain))
        .collect()
}

/// Drives until `done`, or `until` passes, or the host was interrupted. Deadlines of operations are the groups' own
/// business: they end them, which makes `done` true.
pub fn wait_until(group: &dyn Driven, host: &dyn Host, until: Option<Instant>, done: impl Fn() -> bool) -> Outcome {
    WAITERS.fetch_add(1, Ordering::Relaxed);
    let outcome = wait_inner(group, host, until, done);
    WAITERS.fetch_sub(1, Ordering::Relaxed);
    nudge_progress(); // what is left pending is now the progress thread's
    outcome
}

fn wait_inner(group: &dyn Driven, host: &dyn Host, until: Option<Instant>, done: impl Fn() -> bool) -> Outcome {
    let patience = group.patience();
    // Since when nothing has moved, as far as the clock was read.
    let mut idle_since: Option<Instant> = None;
    let mut idle = Duration::ZERO;
    let mut last_look = Instant::now();
    let mut turns = 0u32;
    loop {
        if done() {
            return Outcome::Done;
        }
        let mut moved = group.drive();
        if done() {
            return Outcome::Done;
        }
        turns = turns.wrapping_add(1);
        // Other groups of this process, whose peers may wait for us: every few turns, and always before a sleep.
        if turns & 7 == 0 && PENDING.load(Ordering::Relaxed) > group.pending() {
            moved |= drive_others(group);
        }
        if moved {
            (idle_since, idle) = (None, Duration::ZERO);
        } else {
            std::hint::spin_loop();
        }
        // Reading the clock costs as much as a pass: every eighth turn is enough while we spin.
        if idle < patience.spin && turns & 7 != 0 {
            continue;
        }
        let now = Instant::now();
        if until.is_some_and(|until| now >= until) {
            return Outcome::Elapsed;
        }
        // Also while things move: a long transfer, or a peer that breaks the protocol, must not hide deadlines and signals.
        if now - last_look >= NAP {
            last_look = now;
            if host.interrupted() {
                return Outcome::Interrupted;
            }
            group.tick();
            // Also the others': while somebody waits, the progress thread looks at no deadline.
            busy(Some(group.domain())).iter().for_each(|other| other.tick());
        }
        if moved {
            continue;
        }
        idle = now - *idle_since.get_or_insert(now);
        if idle < patience.spin {
            continue;
        }
        if idle < patience.spin + patience.give_way {
            if patience.apart && may_dodge() && group.shares_core() {
                sleep(&[], Some(group), patience.give_way, &done);
            } else {
                std::thread::yield_now();
            }
            continue;
        }
        let nap = until.map_or(NAP, |until| (until - now).min(NAP)).min(NAP - (now - last_look).min(NAP));
        let groups = busy(Some(group.domain()));
        sleep(&groups, Some(group), nap.max(Duration::from_micros(50)), &done);
    }
}

/// Two ranks that landed on one core stay there as long as they only yield to each other, at 20 us an operation. A real
/// sleep lets the kernel wake the thread on an idle core. At most one try in five milliseconds: where no core is idle it
/// does not help.
fn may_dodge() -> bool {
    const EVERY: u64 = 5_000_000;
    static LAST: AtomicU64 = AtomicU64::new(0);
    let now = crate::clock::now();
    let last = LAST.load(Ordering::Relaxed);
    now.saturating_sub(last) >= EVERY && LAST.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

fn drive_others(group: &dyn Driven) -> bool {
    let mut moved = false;
    for other in busy(Some(group.domain())) {
        if !std::ptr::addr_eq(Arc::as_ptr(&other), group) {
            moved |= other.drive();
        }
    }
    moved
}

/// Sleeps on the doors of `groups` and of `own`, unless something moves in the last look.
fn sleep(groups: &[Arc<dyn Driven>], own: Option<&dyn Driven>, nap: Duration, done: impl Fn() -> bool) {
    let all: Vec<&dyn Driven> = groups
        .iter()
        .map(|group| &**group)
        .chain(own.filter(|own| !groups.iter().any(|group| std::ptr::addr_eq(Arc::as_ptr(group), *own))))
        .collect();
    let areas: Vec<&Area> = all.iter().filter_map(|group| group.area()).take(futex::MOST).collect();
    let values: Vec<u32> = areas.iter().map(|area| signal::lie_down(*area, area.me)).collect();
    let bells: Vec<&AtomicU32> = all.iter().filter_map(|group| group.bell()).take(futex::MOST - areas.len()).collect();
    let rung: Vec<u32> = bells.iter().map(|bell| bell.load(Ordering::Acquire)).collect();
    let mut moved = done();
    for group in &all {
        moved |= group.drive();
    }
    if !moved && !done() {
        let doors = areas.iter().zip(&values).map(|(area, value)| (area.door_word(area.me), *value));
        let doors: Vec<(&AtomicU32, u32)> = doors.chain(bells.iter().copied().zip(rung)).collect();
        futex::wait(&doors, nap);
    }
    for area in areas {
        signal::get_up(area, area.me);
    }
}

// The progress thread: one a process, started with the first operation that nobody waits on at once.

/// Rung to give the progress thread something to do or to stop it. Futex word; added to by whoever rings.
static WORK: AtomicU32 = AtomicU32::new(0);
/// The progress thread sleeps, or is about to, with nothing to do. Dekker with PENDING, see `nudge_progress`.
static IDLE: AtomicBool = AtomicBool::new(false);
static STOP: AtomicBool = AtomicBool::new(false);
static THREAD: Mutex<Option<std::thread::JoinHandle<()>>> = Mutex::new(None);
/// Set while the thread runs: lets `start_progress` skip the lock.
static RUNNING: AtomicBool = AtomicBool::new(false);

/// A thread that just issued usually waits at once: leave it that long before taking over.
const GRACE: Duration = Duration::from_micros(50);
/// While others drive, look again after this long.
const STAND_BY: Duration = Duration::from_micros(500);

/// Makes sure that the progress thread runs and knows that something is pending.
pub fn start_progress() {
    if !RUNNING.load(Ordering::Acquire) {
        let mut thread = THREAD.lock().unwrap();
        if thread.is_none() && !STOP.load(Ordering::Relaxed) {
            *thread = crate::watch::spawn("sagellm-progress", progress)
                .inspect_err(|error| log::error!("cannot start the progress thread: {error}"))
                .ok();
            RUNNING.store(thread.is_some(), Ordering::Release);
        }
    }
    nudge_progress();
}

fn nudge_progress() {
    fence(Ordering::SeqCst); // PENDING was raised before; pairs with the fence after IDLE is set
    if IDLE.load(Ordering::Relaxed) && PENDING.load(Ordering::Relaxed) > 0 {
        WORK.fetch_add(1, Ordering::Release);
        futex::wake_all(&WORK);
    }
}

/// Ends the progress thread; operations that are still pending stay pending.
pub fn stop_progress() {
    STOP.store(true, Ordering::Release);
    WORK.fetch_add(1, Ordering::Release);
    futex::wake_all(&WORK);
    let thread = THREAD.lock().unwrap().take();
    if let Some(thread) = thread {
        let _ = thread.join();
    }
    RUNNING.store(false, Ordering::Release);
    STOP.store(false, Ordering::Release);
}

fn progress() {
    let mut quiet_since = Instant::now();
    let mut last_look = Instant::now();
    while !STOP.load(Ordering::Acquire) {
        if PENDING.load(Ordering::Relaxed) == 0 {
            let value = WORK.load(Ordering::Acquire);
            IDLE.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst); // pairs with the fence in nudge_progress
            if PENDING.load(Ordering::Relaxed) == 0 && !STOP.load(Ordering::Acquire) {
                futex::wait(&[(&WORK, value)], Duration::from_secs(3600));
            }
            IDLE.store(false, Ordering::Relaxed);
            std::thread::sleep(GRACE);
            quiet_since = Instant::now();
            continue;
        }
        if WAITERS.load(Ordering::Relaxed) > 0 {
            let value = WORK.load(Ordering::Acquire);
            futex::wait(&[(&WORK, value)], STAND_BY);
            quiet_since = Instant::now();
            continue;
        }
        let groups = busy(None);
        let mut moved = false;
        for group in &groups {
            moved |= group.drive();
        }
        let now = Instant::now();
        if now - last_look >= NAP {
            last_look = now;
            groups.iter().for_each(|group| group.tick());
        }
        if moved {
            quiet_since = now;
        } else if now - quiet_since < Duration::from_micros(60) {
            std::thread::yield_now();
        } else {
            sleep(&groups, None, NAP, || STOP.load(Ordering::Acquire));
        }
    }
}
