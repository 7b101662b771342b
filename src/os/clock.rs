//! The clock that deadlines run on: monotonic, minus the time in which this process did not run.
//!
//! Waiting threads read it at least every 100 ms. A gap of more than a second between two readings during a wait means
//! that the process was stopped (SIGSTOP, a suspended machine), which must not count against its peers. A gap while no
//! thread waits is subtracted as well and does no harm: deadlines are set on the same clock, after the reading.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use once_cell::sync::Lazy;

const GAP: u64 = 1_000_000_000;

static START: Lazy<Instant> = Lazy::new(Instant::now);
/// What the clock remembers. Both relaxed: read and written by every thread that reads the clock.
struct Readings {
    /// The last reading, in nanoseconds since START: any thread's will do.
    last: AtomicU64,
    /// Sum of the gaps. Several readings at once subtract each gap at most once, because it is taken by a swap of `last`.
    lost: AtomicU64,
}

static READINGS: Readings = Readings { last: AtomicU64::new(0), lost: AtomicU64::new(0) };

/// Nanoseconds since the first reading in this process, including stops: timestamps for records.
#[inline]
pub fn stamp() -> u64 {
    START.elapsed().as_nanos() as u64
}

/// Nanoseconds that this process has been running, without stops.
pub fn now() -> u64 {
    at(stamp())
}

/// As `now`, for a `stamp` that the caller has just taken.
pub fn at(time: u64) -> u64 {
    let last = READINGS.last.swap(time, Ordering::Relaxed);
    let gap = time.saturating_sub(last);
    if gap > GAP {
        READINGS.lost.fetch_add(gap, Ordering::Relaxed);
    }
    time.saturating_sub(READINGS.lost.load(Ordering::Relaxed))
}
