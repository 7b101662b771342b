//! Which thread drives the wire of this process: a thread that waits for a message, or the background thread if no
//! thread waits and something is pending. The wire does the work, in passes (`Wire::pass`).

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use super::bell::Bell;
use super::locked;
use super::sockets::{Epoll, Kick, Ready};
use super::transfer::{Event, Events};
use crate::engine::Polled;
use crate::error::{Error, Result};
use crate::os::yielding::{Gaps, Yielding};
use crate::os::{clock, watch};

/// How long a waiting thread polls, yielding its core between polls, before it sleeps.
const EAGER: Duration = Duration::from_micros(100);
/// A pass of a thread of the program probably ends within this time after its sleep. Sending or receiving a megabyte
/// takes longer than `EAGER`; the background thread must not wake up and look meanwhile.
const PASS: Duration = Duration::from_millis(10);
/// A waiting thread sleeps at most this long and then checks its deadline.
const NAP: Duration = Duration::from_millis(50);

pub struct Driving {
    epoll: Epoll,
    /// Wakes the thread that drives.
    kick: Kick,
    /// Held by the thread that drives, with its list of ready descriptors. Threads only try this lock.
    driver: Mutex<Vec<Ready>>,
    /// Rung when a transfer has ended or a thread has stopped driving.
    changed: Bell,
    /// Number of threads in `wait`. Each of these threads counts itself. The background thread and a thread that leaves
    /// `wait` read it (relaxed: it is a hint, and sleeping threads check again after at most `NAP`).
    waiting: AtomicUsize,
    /// Number of things that must be driven even if no thread waits (`Counted`). Relaxed: a hint like `waiting`.
    pending: AtomicUsize,
    deferred: Mutex<Vec<(Event, Counted)>>,
    /// Rung when the background thread may be needed.
    background: Bell,
    /// Rung when the background thread may be needed and no thread is expected to wait soon.
    urgent: Bell,
    /// Whether the background thread drives now, or is about to. That thread writes it; a thread that finds the driver's
    /// lock held reads it (relaxed: a hint).
    in_background: AtomicBool,
    /// Whether the background thread's pass was interrupted. A thread that finds the driver's lock held sets it, the
    /// background thread clears it before a pass (relaxed: a hint).
    interrupted: AtomicBool,
    /// When a thread of the program last called `poll` (`clock::stamp`). While a thread sleeps in `poll`: when its
    /// sleep ends. While a thread is in its pass: `PASS` after the end of the pass's sleep. The background thread drives
    /// only when `EAGER` has passed since this time. The polling threads write it, the background thread reads it
    /// (relaxed: a hint).
    polled: AtomicU64,
    started: AtomicBool,
    /// Decides whether a waiting thread yields its core or sleeps.
    yielding: Yielding,
}

/// One thing that the wire still has to do. While a `Counted` exists and no thread of the program waits, the background
/// thread drives the wire.
pub struct Counted(Arc<Driving>);

impl Counted {
    pub fn new(driving: &Arc<Driving>) -> Counted {
        driving.count(true);
        Counted(Arc::clone(driving))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.count(false);
    }
}

impl Driving {
    /// `token`: the token of the kick in `epoll`.
    pub fn new(epoll: Epoll, token: u64) -> io::Result<Driving> {
        let kick = Kick::new()?;
        epoll.add(std::os::fd::AsRawFd::as_raw_fd(&kick), token)?;
        Ok(Driving {
            epoll,
            kick,
            driver: Mutex::default(),
            changed: Bell::default(),
            waiting: AtomicUsize::new(0),
            pending: AtomicUsize::new(0),
            deferred: Mutex::default(),
            background: Bell::default(),
            urgent: Bell::default(),
            in_background: AtomicBool::new(false),
            interrupted: AtomicBool::new(false),
            polled: AtomicU64::new(0),
            started: AtomicBool::new(false),
            yielding: Yielding::default(),
        })
    }

    /// Returns the epoll that the passes read.
    pub fn epoll(&self) -> &Epoll {
        &self.epoll
    }

    /// Sets whether epoll also reports a connection's socket when it accepts more. While `watch` is set, the wire is
    /// driven even if no thread waits.
    pub fn watch_output(&self, fd: i32, token: u64, watch: bool) {
        self.count(watch);
        self.watch_path(fd, token, watch);
        if watch {
            self.wake_for_pending();
        }
    }

    /// Sets whether epoll also reports a path when its socket accepts more.
    pub fn watch_path(&self, fd: i32, token: u64, watch: bool) {
        let _ = self.epoll.watch_output(fd, token, watch); // reading finds closed ones
    }

    /// Counts one more or one less thing that must be driven even if no thread waits.
    pub fn count(&self, more: bool) {
        match more {
            true => self.pending.fetch_add(1, Ordering::Relaxed),
            false => self.pending.fetch_sub(1, Ordering::Relaxed),
        };
    }

    /// Tells the waiting threads that a transfer has ended.
    pub fn ring(&self) {
        self.changed.ring();
    }

    /// Clears a kick. Only the thread that drives calls this.
    pub fn clear_kick(&self) {
        self.kick.clear();
    }

    /// Removes and returns the events that wait for the thread that drives.
    pub fn take_deferred(&self) -> Vec<Event> {
        let deferred = std::mem::take(&mut *locked(&self.deferred));
        deferred.into_iter().map(|(event, _)| event).collect()
    }

    /// Drives the wire by `pass` until `done` returns true. Returns false if the deadline passes first.
    pub fn wait(
        &self,
        pass: impl Fn(&mut Vec<Ready>, Duration) -> bool,
        done: impl Fn() -> bool,
        timeout: Duration,
    ) -> bool {
        // This clock excludes the time in which the process was stopped.
        let deadline = clock::now().saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        let (mut quiet, mut gaps) = (Instant::now(), Gaps::default());
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let ended = loop {
            if done() {
                break true;
            }
            let left = Duration::from_nanos(deadline.saturating_sub(clock::now()));
            if left.is_zero() {
                break false;
            }
            match self.driver.try_lock() {
                Ok(mut ready) => {
                    let eager = quiet.elapsed() < EAGER && !gaps.are_long() && self.yielding.pays();
                    let sleep = if eager { Duration::ZERO } else { left.min(NAP) };
                    let moved = pass(&mut ready, sleep);
                    drop(ready);
                    if moved {
                        gaps.came(quiet.elapsed());
                        quiet = Instant::now();
                    } else if eager {
                        self.yielding.yield_now();
                    }
                }
                Err(TryLockError::Poisoned(_)) => self.driver.clear_poison(),
                Err(TryLockError::WouldBlock) => {
                    self.take_over();
                    self.changed.sleep(left.min(NAP), || done() || self.driver.try_lock().is_ok());
                }
            }
        };
        let others = self.waiting.fetch_sub(1, Ordering::Relaxed) - 1;
        if others > 0 {
            self.changed.ring(); // a waiting thread drives from now on
        } else {
            self.wake_for_pending();
        }
        ended
    }

    /// Makes the background thread stop driving, so that a waiting thread can drive.
    fn take_over(&self) {
        // Interrupts each pass at most once, because a thread that polls while the pass ends would otherwise write
        // again and again.
        let runs = self.in_background.load(Ordering::Relaxed) && !self.interrupted.load(Ordering::Relaxed);
        if runs && !self.interrupted.swap(true, Ordering::Relaxed) {
            self.kick.kick();
        }
    }

    /// Ends the sleep of the thread that drives, or its next sleep.
    pub fn interrupt(&self) {
        self.kick.kick();
    }

    /// Waits until `done` returns true, while other threads drive: something must be pending (`Counted`). Returns false
    /// if the deadline passes first.
    pub fn wait_for_others(&self, done: impl Fn() -> bool, timeout: Duration) -> bool {
        let deadline = clock::now().saturating_add(timeout.as_nanos() as u64);
        loop {
            if done() {
                return true;
            }
            let left = Duration::from_nanos(deadline.saturating_sub(clock::now()));
            if left.is_zero() {
                return false;
            }
            self.wake_for_pending();
            self.changed.sleep(left.min(NAP), &done);
        }
    }

    /// Makes one pass, unless another thread drives. If nothing is ready, the pass sleeps for at most `sleep`.
    ///
    /// If the background thread drives, this thread takes over; it waits at most `sleep` until it can. Its pass then
    /// does not sleep, because what the caller waits for may have come meanwhile.
    pub fn poll(&self, pass: impl Fn(&mut Vec<Ready>, Duration) -> bool, sleep: Duration) -> Polled {
        for (longest, is_last) in [(sleep, sleep.is_zero()), (Duration::ZERO, true)] {
            match self.driver.try_lock() {
                Ok(mut ready) => {
                    let until = clock::stamp().saturating_add((longest + PASS).as_nanos() as u64);
                    self.polled.store(until, Ordering::Relaxed);
                    let moved = pass(&mut ready, longest);
                    drop(ready);
                    self.polled.store(clock::stamp(), Ordering::Relaxed);
                    self.changed.ring();
                    return if moved { Polled::Advanced } else { Polled::Nothing };
                }
                Err(TryLockError::Poisoned(_)) => self.driver.clear_poison(),
                Err(TryLockError::WouldBlock) => {
                    let waits = !is_last && self.in_background.load(Ordering::Relaxed);
                    let until = clock::stamp().saturating_add(if waits { sleep.as_nanos() as u64 } else { 0 });
                    self.polled.fetch_max(until, Ordering::Relaxed); // another thread of the program may be in its pass
                    self.take_over();
                    if !waits {
                        break;
                    }
                    self.changed.sleep(sleep, || self.driver.try_lock().is_ok());
                }
            }
        }
        Polled::Elsewhere
    }

    /// Queues events for the thread that drives, because the caller may hold locks under which events must not run.
    pub fn defer(self: &Arc<Driving>, events: Events) {
        if events.ended {
            self.changed.ring();
        }
        if events.list.is_empty() && !events.ended {
            return;
        }
        locked(&self.deferred).extend(events.list.into_iter().map(|event| (event, Counted::new(self))));
        self.kick.kick(); // the driver may be asleep, and the transfer that it waits for may have ended
        self.expect_wait();
    }

    /// Wakes the background thread if it is needed.
    pub fn wake_for_pending(&self) {
        if self.is_needed() {
            self.background.ring();
            self.urgent.ring();
        }
    }

    /// Like `wake_for_pending`, for a caller that will probably wait soon and then drive. While threads of the program
    /// keep polling, this does not wake the background thread, which then looks by itself.
    pub fn expect_wait(&self) {
        if self.is_needed() {
            self.background.ring();
        }
    }

    /// Whether something is pending and no thread waits.
    fn is_needed(&self) -> bool {
        self.pending.load(Ordering::Relaxed) > 0 && self.waiting.load(Ordering::Relaxed) == 0
    }

    /// Starts the background thread, unless it already runs. `run`: calls `Driving::run`.
    pub fn start(&self, run: impl FnOnce() + Send + 'static) -> Result<()> {
        if self.started.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        watch::spawn("sagellm-wire", run).map_err(|error| {
            self.started.store(false, Ordering::Relaxed);
            Error::system(format!("sagellm: cannot start a thread for the connections: {error}"))
        })?;
        Ok(())
    }

    /// Drives in the background, as long as the process lives.
    pub fn run(&self, pass: impl Fn(&mut Vec<Ready>, Duration) -> bool) {
        const ASLEEP: Duration = Duration::from_secs(1);
        /// A thread that has begun a transfer usually waits for it immediately, and then that thread drives.
        const GRACE: Duration = Duration::from_micros(50);
        /// The longest grace. The grace doubles each time that this thread was not needed.
        const LONGEST_GRACE: Duration = Duration::from_micros(500);
        /// If no thread of the program has polled for this long, this thread sleeps until it is woken. Before that it
        /// wakes by itself and looks, because waking it would delay a polling thread by more than the time of a look.
        const POLLED: Duration = Duration::from_millis(10);
        let after_poll = |more: Duration| {
            let end = Duration::from_nanos(self.polled.load(Ordering::Relaxed)) + more;
            end.saturating_sub(Duration::from_nanos(clock::stamp()))
        };
        let mut grace = GRACE;
        loop {
            if !self.is_needed() {
                if after_poll(POLLED).is_zero() {
                    self.background.sleep(ASLEEP, || self.is_needed());
                    std::thread::sleep(GRACE);
                } else {
                    self.urgent.sleep(grace, || false);
                    grace = (grace * 2).min(LONGEST_GRACE);
                }
                continue;
            }
            let left = after_poll(EAGER);
            if !left.is_zero() {
                std::thread::sleep(left.min(LONGEST_GRACE)); // a thread of the program drives
                continue;
            }
            self.interrupted.store(false, Ordering::Relaxed);
            self.in_background.store(true, Ordering::Relaxed);
            let locked = self.driver.try_lock().map(|mut ready| {
                grace = GRACE;
                pass(&mut ready, NAP);
            });
            self.in_background.store(false, Ordering::Relaxed);
            match locked {
                Ok(()) => self.changed.ring(), // a waiting thread drives from now on
                Err(TryLockError::Poisoned(_)) => self.driver.clear_poison(),
                Err(TryLockError::WouldBlock) => std::thread::sleep(EAGER),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than every sleep of the threads here.
    const LONG: Duration = Duration::from_secs(20);

    fn pass(driving: &Driving, ready: &mut Vec<Ready>, sleep: Duration) -> bool {
        driving.epoll().wait(sleep.as_millis() as i32, ready);
        if !ready.is_empty() {
            driving.clear_kick();
        }
        !ready.is_empty()
    }

    fn until(what: impl Fn() -> bool) {
        let begin = Instant::now();
        while !what() {
            assert!(begin.elapsed() < LONG);
            std::thread::yield_now();
        }
    }

    fn made() -> Arc<Driving> {
        Arc::new(Driving::new(Epoll::new().unwrap(), 0).unwrap())
    }

    #[test]
    fn a_thread_that_polls_takes_over_from_the_background_thread() {
        let driving = made();
        let _counted = Counted::new(&driving);
        let theirs = Arc::clone(&driving);
        driving.start(move || theirs.run(|ready, sleep| pass(&theirs, ready, sleep))).unwrap();
        until(|| driving.in_background.load(Ordering::Relaxed));
        // The background thread may be between two passes; then this thread drives immediately, and sleeps until the
        // kick.
        let theirs = Arc::clone(&driving);
        let kicks = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            theirs.interrupt();
        });
        assert_ne!(driving.poll(|ready, sleep| pass(&driving, ready, sleep), LONG / 2), Polled::Elsewhere);
        kicks.join().unwrap();
    }

    #[test]
    fn a_thread_that_polls_does_not_wait_for_another_thread_of_the_program_that_drives() {
        let driving = made();
        let (theirs, drives, over) =
            (Arc::clone(&driving), Arc::new(AtomicBool::new(false)), Arc::<AtomicBool>::default());
        let (is_driving, is_over) = (Arc::clone(&drives), Arc::clone(&over));
        let waiting = std::thread::spawn(move || {
            let own = |ready: &mut Vec<Ready>, sleep: Duration| {
                is_driving.store(true, Ordering::Relaxed);
                pass(&theirs, ready, sleep)
            };
            theirs.wait(own, || is_over.load(Ordering::Relaxed), LONG)
        });
        until(|| drives.load(Ordering::Relaxed));
        // It is no failure if this thread makes a pass between two passes of the other.
        let begin = Instant::now();
        let polled = driving.poll(|ready, _| pass(&driving, ready, Duration::ZERO), LONG);
        assert!(polled != Polled::Advanced && begin.elapsed() < LONG);
        over.store(true, Ordering::Relaxed);
        driving.interrupt();
        assert!(waiting.join().unwrap());
    }

    #[test]
    fn a_pass_of_a_thread_of_the_program_is_noted_until_its_end() {
        let driving = made();
        let _counted = Counted::new(&driving);
        let (begin, polled) = (clock::stamp(), || driving.polled.load(Ordering::Relaxed));
        let pass = |_: &mut Vec<Ready>, _: Duration| {
            assert!(polled() >= begin + PASS.as_nanos() as u64);
            // A second thread that polls finds the lock held, and must not hide the pass.
            let elsewhere = std::thread::scope(|scope| {
                let poll = || driving.poll(|_, _| unreachable!("the lock is held"), Duration::ZERO);
                scope.spawn(poll).join().unwrap()
            });
            assert!(elsewhere == Polled::Elsewhere && polled() >= begin + PASS.as_nanos() as u64);
            true
        };
        assert_eq!(driving.poll(pass, Duration::ZERO), Polled::Advanced);
        assert!(polled() <= clock::stamp(), "it drives soon if nobody polls");
    }

    #[test]
    fn a_thread_whose_data_comes_late_again_and_again_sleeps_without_polling() {
        let (driving, over, polls) = (made(), Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let (theirs, is_over, count) = (Arc::clone(&driving), Arc::clone(&over), Arc::clone(&polls));
        let waiting = std::thread::spawn(move || {
            let own = |ready: &mut Vec<Ready>, sleep: Duration| {
                count.fetch_add(usize::from(sleep.is_zero()), Ordering::Relaxed);
                pass(&theirs, ready, sleep)
            };
            theirs.wait(own, || is_over.load(Ordering::Relaxed), LONG)
        });
        until(|| polls.load(Ordering::Relaxed) > 0);
        // After a long yield the thread does not poll for a while either, so many gaps in a row must have no poll.
        let (begin, mut without) = (Instant::now(), 0);
        while without < 40 {
            assert!(begin.elapsed() < LONG);
            driving.interrupt(); // counts as data that has come
            let before = polls.load(Ordering::Relaxed);
            std::thread::sleep(50 * EAGER);
            without = if polls.load(Ordering::Relaxed) == before { without + 1 } else { 0 };
        }
        over.store(true, Ordering::Relaxed);
        driving.interrupt();
        assert!(waiting.join().unwrap());
    }
}
