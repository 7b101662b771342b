//! The clock for deadlines: monotonic time, without the time in which this process did not run.
//!
//! Waiting threads read it at least every 100 ms. If more than a second passes between two readings during a wait, the
//! process was stopped (by SIGSTOP or because the machine was suspended), and that time must not count against its
//! peers. If no thread waited, a gap is subtracted too. That does no harm, because a new deadline is computed from a
//! reading after the gap.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use once_cell::sync::Lazy;

const GAP: u64 = 1_000_000_000;

static START: Lazy<Instant> = Lazy::new(Instant::now);

/// State of the clock.
struct Readings {
    /// The last reading by any thread, in nanoseconds since START. It never decreases. It passes a gap only while `gap`
    /// is locked, after the gap was added to `lost`. Every thread that reads the clock writes it (release) and reads it
    /// (acquire), so if a thread finds a reading from after a gap, it finds that gap in `lost`.
    last: AtomicU64,
    /// Sum of the gaps. Written under `gap`, read by every thread. Relaxed: ordered by `last`.
    lost: AtomicU64,
    /// Held while a gap is added, so that it is added only once.
    gap: Mutex<()>,
}

static READINGS: Readings = Readings::new();

/// Returns the nanoseconds since the first reading in this process, including the times in which the process was
/// stopped. For timestamps in records.
#[inline]
pub fn stamp() -> u64 {
    START.elapsed().as_nanos() as u64
}

/// Returns the nanoseconds since the first reading in this process, without the times in which the process was stopped.
pub fn now() -> u64 {
    at(stamp())
}

/// Like `now`, for a `stamp` that the caller has just taken.
pub fn at(time: u64) -> u64 {
    READINGS.at(time)
}

impl Readings {
    const fn new() -> Readings {
        Readings { last: AtomicU64::new(0), lost: AtomicU64::new(0), gap: Mutex::new(()) }
    }

    fn at(&self, time: u64) -> u64 {
        let last = self.last.load(Ordering::Acquire);
        if time.saturating_sub(last) > GAP {
            self.lose(time);
        } else if time > last {
            // If the exchange fails, another thread has stored its own reading.
            let _ = self.last.compare_exchange(last, time, Ordering::Release, Ordering::Relaxed);
        }
        // If the stamp is older than `last`, it may be from before a gap that is now in `lost`, so `last` is used
        // instead.
        time.max(last).saturating_sub(self.lost.load(Ordering::Relaxed))
    }

    /// Adds the gap before the reading `time`, unless another thread has added it.
    #[cold]
    fn lose(&self, time: u64) {
        let _only = self.gap.lock().unwrap_or_else(PoisonError::into_inner);
        let gap = time.saturating_sub(self.last.load(Ordering::Acquire));
        if gap > GAP {
            self.lost.fetch_add(gap, Ordering::Relaxed);
            self.last.fetch_max(time, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_stop_is_subtracted_once_and_a_short_pause_is_not() {
        let clock = Readings::new();
        assert_eq!(clock.at(GAP), GAP);
        assert_eq!(clock.at(GAP + GAP / 2), GAP + GAP / 2);
        let stopped = clock.at(50 * GAP);
        assert_eq!(stopped, GAP + GAP / 2, "it does not run during a stop");
        assert_eq!(clock.at(50 * GAP + 7), stopped + 7);
        assert_eq!(clock.at(GAP + GAP / 2 + 1), stopped + 7, "taken before the stop, looked at behind it");
        assert_eq!(clock.at(50 * GAP + 9), stopped + 9, "and it is not subtracted again");
    }

    #[test]
    fn threads_that_read_it_at_once_subtract_each_stop_once_and_none_is_ahead() {
        const STOP: u64 = 100 * GAP;
        let (clock, time, running) = (Readings::new(), AtomicU64::new(0), AtomicBool::new(true));
        let reads = || (0..1000).map(|_| clock.at(time.load(Ordering::Acquire))).max().unwrap_or(0);
        // The process is stopped all the time, so every reading is 0.
        let ahead: u64 = std::thread::scope(|scope| {
            let others = [0, 1].map(|_| {
                scope.spawn(|| {
                    let mut most = 0;
                    while running.load(Ordering::Acquire) {
                        most = most.max(reads());
                    }
                    most
                })
            });
            for stop in 1..100_000 {
                time.store(stop * STOP, Ordering::Release);
                clock.at(stop * STOP);
            }
            running.store(false, Ordering::Release);
            others.into_iter().map(|thread| thread.join().expect("it only reads")).max().unwrap_or(0)
        });
        assert_eq!(ahead, 0, "nanoseconds that a thread was ahead");
        let end = time.load(Ordering::Acquire);
        assert_eq!(clock.at(end + 7), 7, "no stop was subtracted twice");
    }
}
