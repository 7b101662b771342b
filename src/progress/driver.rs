//! The threads that make progress. A thread that waits drives every group of its process; if no thread waits, the
//! progress thread drives them. No thread keeps a group for longer than one pass: `Driven::drive` takes the group's
//! lock if it is free, advances what it can, and releases the lock.
//!
//! A waiting thread first spins, then yields, then sleeps on the wake words of all groups that it drives. The budgets
//! were measured. A futex wake across cores costs 14 to 26 us, so before a thread sleeps, it pays to yield for several
//! times as long. Spinning is short even if every rank can have its own core: if other work pushes two ranks onto one
//! core, 25 us of spinning keep the peer off the core and cost 70 us in every operation. If the ranks do have their own
//! cores, spinning for only 3 us costs nothing, because a yield takes 0.4 us if no other thread can run
//! (docs/internals/benchmarks.md). If yields take long, the thread sleeps directly after spinning (`os::yielding`).
//!
//! `roles` defines which event wakes which thread. This file handles groups, clocks and the kernel, and has no shared
//! word of its own.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::domain::{Domain, Driven, SpinPolicy};
use super::roles;
use super::roles::Words;
use crate::engine::Polled;
use crate::host::Host;
use crate::os::event_count;
use crate::os::event_count::{Listening, WakeWords};
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::os::yielding::Gaps;
use crate::os::{futex, watch};
use crate::threads;

/// The longest sleep between two checks of deadlines and signals.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The longest sleep if more groups are busy than one futex wait can watch, or if no other thread can end the sleep.
const SHORT_NAP: Duration = Duration::from_millis(1);
/// If nothing has advanced for this long, a waiting thread no longer reads the connections to other hosts itself.
const LONG_WAIT: Duration = Duration::from_millis(30);
/// A rest that ends within this time without a result has not slept.
const AT_ONCE: Duration = Duration::from_micros(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Elapsed,
    Interrupted,
}

/// Drives until `done` returns true, `until` passes, or the host was interrupted. It does not check deadlines of
/// operations itself: the groups check them and end late operations, so that `done` becomes true.
pub fn wait_until(group: &dyn Driven, host: &dyn Host, until: Option<Instant>, done: impl Fn() -> bool) -> Outcome {
    let spin_policy = group.spin_policy();
    let begin = is_from_afar(spin_policy).then(Instant::now);
    let outcome = drive_until(group, host, until, spin_policy, done);
    if let Some(begin) = begin.filter(|_| outcome == Outcome::Done) {
        group.waited(begin.elapsed());
    }
    outcome
}

fn drive_until(
    group: &dyn Driven,
    host: &dyn Host,
    until: Option<Instant>,
    spin_policy: SpinPolicy,
    done: impl Fn() -> bool,
) -> Outcome {
    let driving = roles::Driving::new(&**group.domain());
    let (_lending, _waiting) = (group.helpers().map(threads::lend), threads::wait());
    // How long nothing has advanced, according to the last reading of the clock.
    let mut idle_since: Option<Instant> = None;
    let mut idle = Duration::ZERO;
    let mut last_look = Instant::now();
    let mut turns = 0u32;
    let mut gaps = Gaps::default();
    let mut long_wait: Option<Registered<'_>> = None;
    loop {
        if done() {
            return Outcome::Done;
        }
        let mut moved = group.drive();
        if done() {
            return Outcome::Done;
        }
        turns = turns.wrapping_add(1);
        // Drives the other groups of this process, whose peers may wait for this rank: every eighth turn, and always
        // before a sleep.
        if turns & 7 == 0 && group.domain().pending() > group.pending() {
            moved |= drive_others(group);
        }
        if moved {
            if is_from_afar(spin_policy) {
                gaps.came(since(idle_since));
            }
            (idle_since, idle) = (None, Duration::ZERO);
        } else {
            std::hint::spin_loop();
        }
        // Reading the clock costs as much as a pass, so a spinning thread reads it only in every eighth turn.
        if idle < spin_policy.spin && turns & 7 != 0 {
            continue;
        }
        let now = Instant::now();
        if until.is_some_and(|until| now >= until) {
            return Outcome::Elapsed;
        }
        // Checked even while operations advance, because a long transfer or a peer that violates the protocol must not
        // delay deadlines and signals.
        if now - last_look >= POLL_INTERVAL {
            last_look = now;
            long_wait.get_or_insert_with(|| Registered::new(group));
            if !look_around(group, host, &driving) {
                return Outcome::Interrupted;
            }
        }
        if moved {
            continue;
        }
        idle = now - *idle_since.get_or_insert(now);
        let next_look = POLL_INTERVAL - (now - last_look).min(POLL_INTERVAL);
        if idle < spin_policy.spin {
            continue;
        } else if idle < yields(spin_policy, &gaps) && group.domain().yielding.pays() {
            yield_core(group, &done);
        } else {
            let pause = until.map_or(next_look, |until| (until - now).min(next_look));
            // If this thread itself reads the connections to other hosts (`rest`), no other thread has to read them and
            // wake it. If another thread ends the operation before or during `rest`, or issues an operation in another
            // group, this thread notices when `rest` returns. If nothing comes for long, this thread leaves the
            // connections to the background thread, instead of waking up every millisecond.
            let rests = idle <= LONG_WAIT && group.domain().pending() == group.pending();
            match if rests { group.rest(pause.min(SHORT_NAP)) } else { Polled::Elsewhere } {
                Polled::Advanced => {
                    gaps.came(since(idle_since));
                    (idle_since, idle) = (None, Duration::ZERO);
                }
                Polled::Nothing if now.elapsed() < AT_ONCE => yield_core(group, &done), // it could not sleep
                Polled::Nothing => (),
                Polled::Elsewhere => sleep(group.domain(), Some(group), pause.max(Duration::from_micros(50)), &done),
            }
        }
    }
}

/// Whether the thread waits for a message from another host.
fn is_from_afar(spin_policy: SpinPolicy) -> bool {
    spin_policy.spin.is_zero() && !spin_policy.yield_for.is_zero()
}

/// Returns for how long nothing has advanced.
fn since(idle_since: Option<Instant>) -> Duration {
    idle_since.map_or(Duration::ZERO, |begin| begin.elapsed())
}

/// Returns for how long a thread spins and yields when nothing advances. If data from another host comes in long
/// intervals, as over a slow link, it does not yield: it would keep a core busy for the whole message.
fn yields(spin_policy: SpinPolicy, gaps: &Gaps) -> Duration {
    if gaps.are_long() { Duration::ZERO } else { spin_policy.spin + spin_policy.yield_for }
}

/// Checks signals, and the deadlines and peers of all groups of the process. Returns false if a signal must end the
/// wait.
fn look_around(group: &dyn Driven, host: &dyn Host, driving: &roles::Driving<'_, Domain>) -> bool {
    // `interrupted` may wait seconds for the interpreter's lock. Meanwhile this thread drives nothing, so it must not
    // count as a driver, and the progress thread must be able to take over.
    start_progress(group.domain());
    if driving.pause(|| host.interrupted()) {
        return false;
    }
    group.check_deadlines_and_peers();
    // The other groups are checked too, because the progress thread checks no deadlines while a thread waits.
    group.domain().busy().iter().for_each(|other| other.check_deadlines_and_peers());
    true
}

/// Yields the core to another thread. If this rank shares the core with a peer, sleeps briefly instead (`may_dodge`).
fn yield_core(group: &dyn Driven, done: &impl Fn() -> bool) {
    let spin_policy = group.spin_policy();
    if spin_policy.own_cores && may_dodge(group.domain()) && group.shares_core() {
        sleep(group.domain(), Some(group), spin_policy.yield_for, done);
    } else {
        group.domain().yielding.yield_now();
    }
}

/// While this lives, the group counts this thread as one that has waited for long. It is created only late in a wait,
/// so short waits do not pay for it.
struct Registered<'a>(&'a dyn Driven, u64);

impl<'a> Registered<'a> {
    fn new(group: &'a dyn Driven) -> Registered<'a> {
        let thread = watch::this_thread();
        group.count_long_wait(thread, true);
        Registered(group, thread)
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.0.count_long_wait(self.1, false);
    }
}

/// Whether a thread may try to leave a core that it shares with a peer. As long as two ranks on one core only yield to
/// each other, they stay there, which costs 20 us per operation. If a thread really sleeps, the kernel can wake it on
/// an idle core. This is tried at most once in five milliseconds, because it does not help if no core is idle.
fn may_dodge(domain: &Domain) -> bool {
    const EVERY: u64 = 5_000_000;
    let now = crate::os::clock::now();
    let last = domain.dodged.load(Ordering::Relaxed);
    now.saturating_sub(last) >= EVERY
        && domain.dodged.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

fn drive_others(group: &dyn Driven) -> bool {
    let mut moved = false;
    for other in group.domain().busy() {
        if !std::ptr::addr_eq(Arc::as_ptr(&other), group) {
            moved |= other.drive();
        }
    }
    moved
}

/// Makes a last pass over the busy groups, and sleeps unless something advanced. The sleep ends when a peer wakes this
/// rank in a busy group or in `own`, when an operation is issued anywhere in the domain, or when `stop` may have become
/// true. If this is a waiting thread (`own` is set), it is also woken when another thread ends an operation.
fn sleep(domain: &Arc<Domain>, own: Option<&dyn Driven>, pause: Duration, stop: impl Fn() -> bool) {
    // Must come first: an operation that is issued after this line wakes the thread, and the group of an operation that
    // was issued before is in the list of busy groups.
    let work = Listening::new(&domain.work, 0);
    let ended = own.map(|_| Listening::new(&domain.ended, 0));
    let busy = domain.busy();
    let others =
        busy.iter().map(|group| &**group).filter(|group| !own.is_some_and(|own| std::ptr::addr_eq(*group, own)));
    // The word of `own` comes first: if only one word can be watched, it must be this one.
    let groups: Vec<&dyn Driven> = own.into_iter().chain(others).collect();
    let addresses = groups.iter().filter_map(|group| group.wake_address());
    let doors: Vec<(&AtomicU32, Listening<dyn WakeWords>)> =
        addresses.map(|address| (address.word, Listening::new(address.words, address.me))).collect();
    let mut moved = stop();
    for group in &groups {
        moved |= group.drive();
    }
    if moved || stop() {
        return;
    }
    let mut words: Vec<(&AtomicU32, u32)> = doors.iter().map(|(word, wake_count)| (*word, wake_count.value)).collect();
    let here = words.len().min(1);
    words.insert(here, (domain.work.word(), work.value));
    if let Some(ended) = &ended {
        words.insert(here, (domain.ended.word(), ended.value));
    }
    let pause = if words.len() > futex::MOST { pause.min(SHORT_NAP) } else { pause };
    words.truncate(futex::MOST);
    fault_points::reached(FaultPoint::Sleeping);
    futex::wait(&words, pause);
}

/// Must be called after an operation was issued, if it did not end immediately and its caller does not wait for it now.
pub fn issued(domain: &Arc<Domain>) {
    start_progress(domain);
    domain.count_issue();
    roles::issued(&**domain);
}

fn start_progress(domain: &Arc<Domain>) {
    if domain.running.load(Ordering::Acquire) {
        return;
    }
    let mut thread = domain.thread.lock().unwrap_or_else(PoisonError::into_inner);
    if thread.is_none() && !domain.stopping() {
        let theirs = Arc::clone(domain);
        *thread = watch::spawn("sagellm-progress", move || progress(&theirs))
            .inspect_err(|error| log::error!("cannot start the progress thread: {error}"))
            .ok();
        domain.running.store(thread.is_some(), Ordering::Release);
    }
}

/// Ends the progress thread. Pending operations stay pending.
pub fn stop(domain: &Domain) {
    domain.stopping.store(true, Ordering::Relaxed);
    event_count::announce(&domain.work, 1);
    let thread = domain.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(thread) = thread {
        let _ = thread.join();
    }
    domain.running.store(false, Ordering::Release);
    domain.stopping.store(false, Ordering::Relaxed);
}

/// A thread that has just issued an operation usually waits for it immediately, so the progress thread sleeps this long
/// before it takes over.
const GRACE: Duration = Duration::from_micros(50);
/// The longest such sleep. It is used if the progress thread was woken again and again without being needed.
const LONGEST_GRACE: Duration = Duration::from_micros(500);

/// Runs the progress thread of a domain. The thread drives while operations are pending and no thread waits, and ends
/// when the domain stops.
fn progress(domain: &Arc<Domain>) {
    let mut grace = GRACE;
    let looked = Cell::new(Instant::now());
    // If threads wait one after another, each for less than `POLL_INTERVAL`, they check no deadlines themselves. If
    // such a thread leaves pending operations behind, it wakes this thread.
    let look = || {
        if domain.pending() > 0 && looked.get().elapsed() >= POLL_INTERVAL {
            looked.set(Instant::now());
            domain.busy().iter().for_each(|group| group.check_deadlines_and_peers());
        }
    };
    let sleep_idle = |value| {
        futex::wait(&[(domain.work.word(), value)], Duration::from_secs(3600));
        look();
    };
    while roles::await_work(&**domain, sleep_idle) {
        // If a thread has waited during the sleep, it has driven all groups, and it usually waits again soon. Operations
        // that are pending now were issued after its wait.
        let mut seen = Seen::within(domain, grace);
        look();
        // To wake this thread costs a thread that issues an operation up to 10 us. While threads issue and wait again
        // and again, this thread therefore does not go back to `await_work`, where it would be woken, but looks by
        // itself. It may then drive an operation that nobody waits for up to `LONGEST_GRACE` later.
        while seen.waits && seen.issues && grace == LONGEST_GRACE && !domain.stopping() {
            seen = Seen::within(domain, grace);
            look();
        }
        if seen.waits || !roles::needs_progress(&**domain) {
            grace = (grace * 2).min(LONGEST_GRACE);
            continue;
        }
        grace = GRACE;
        // A panic that no group has caught is our own bug. The operations of all groups still need a driver afterwards.
        if catch_unwind(AssertUnwindSafe(|| drive_while_needed(domain))).is_err() {
            log::error!("internal error in the progress thread, please report it with the text above");
        }
    }
}

/// What the progress thread sees after a sleep: whether threads have begun to wait meanwhile, and whether they have
/// issued operations that did not end at once.
struct Seen {
    waits: bool,
    issues: bool,
}

impl Seen {
    /// Sleeps for `pause`.
    fn within(domain: &Domain, pause: Duration) -> Seen {
        let (waits, issues) = (domain.waits(), domain.issues());
        std::thread::sleep(pause);
        Seen { waits: domain.waits() != waits, issues: domain.issues() != issues }
    }
}

fn drive_while_needed(domain: &Arc<Domain>) {
    let mut quiet_since = Instant::now();
    let mut last_look = quiet_since;
    while roles::needs_progress(&**domain) {
        let groups = domain.busy();
        let mut moved = false;
        for group in &groups {
            let _lending = group.helpers_beside_the_program().map(threads::lend);
            moved |= group.drive();
        }
        let now = Instant::now();
        if now - last_look >= POLL_INTERVAL {
            last_look = now;
            groups.iter().for_each(|group| group.check_deadlines_and_peers());
        }
        drop(groups);
        if moved {
            quiet_since = now;
        } else if now - quiet_since < Duration::from_micros(60) && domain.yielding.pays() {
            domain.yielding.yield_now();
        } else {
            sleep(domain, None, POLL_INTERVAL, || !roles::needs_progress(&**domain));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// Issues an operation and waits for it, as a thread of the program does.
    fn issue_and_wait(domain: &Arc<Domain>) {
        domain.add_pending(1);
        issued(domain);
        drop(roles::Driving::new(&**domain));
        domain.remove_pending(1);
    }

    fn until(what: impl Fn() -> bool) {
        let begin = Instant::now();
        while !what() {
            assert!(begin.elapsed() < LONG);
            std::thread::yield_now();
        }
    }

    /// Runs `call` on another thread, again and again, until the result is dropped.
    struct Again(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

    impl Again {
        fn new(domain: &Arc<Domain>, call: fn(&Arc<Domain>)) -> Again {
            let (domain, over) = (Arc::clone(domain), Arc::<AtomicBool>::default());
            let is_over = Arc::clone(&over);
            let run = move || {
                while !is_over.load(Ordering::Relaxed) {
                    call(&domain);
                }
            };
            Again(over, Some(std::thread::spawn(run)))
        }
    }

    impl Drop for Again {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
            self.1.take().unwrap().join().unwrap();
        }
    }

    /// Waits until the progress thread is hardly woken for a while: without looking by itself it would be woken once in
    /// each pause.
    fn until_it_looks_by_itself(domain: &Domain) {
        let begin = Instant::now();
        let wakes = || domain.work.word().load(Ordering::Relaxed);
        loop {
            let before = wakes();
            std::thread::sleep(40 * LONGEST_GRACE);
            if wakes() - before <= 10 {
                return;
            }
            assert!(begin.elapsed() < LONG, "the progress thread was woken all the time");
        }
    }

    #[test]
    fn threads_that_issue_and_wait_again_and_again_hardly_wake_the_progress_thread() {
        let domain = Arc::<Domain>::default();
        let asleep = || roles::Words::work(&*domain).asleep(0) == 1;
        let program = Again::new(&domain, issue_and_wait);
        until_it_looks_by_itself(&domain);
        drop(program);
        until(asleep);
        // It ends although threads go on.
        let program = Again::new(&domain, issue_and_wait);
        until_it_looks_by_itself(&domain);
        let theirs = Arc::clone(&domain);
        let stopping = std::thread::spawn(move || stop(&theirs));
        until(|| stopping.is_finished());
        stopping.join().unwrap();
        drop(program);
    }

    #[test]
    fn threads_that_only_wait_let_the_progress_thread_sleep() {
        let domain = Arc::<Domain>::default();
        let program = Again::new(&domain, issue_and_wait);
        until_it_looks_by_itself(&domain);
        drop(program);
        let program = Again::new(&domain, |domain| drop(roles::Driving::new(&**domain)));
        until(|| roles::Words::work(&*domain).asleep(0) == 1);
        drop(program);
        stop(&domain);
    }
}
