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
/// Last reading, in nanoseconds since START. Relaxed: any thread's reading will do, and the sum below tolerates several
/// readings at once, because each gap is subtracted at most once (swap).
static LAST: AtomicU64 = AtomicU64::new(0);
/// Sum of the gaps.
static LOST: AtomicU64 = AtomicU64::new(0);

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
    let last = LAST.swap(time, Ordering::Relaxed);
    let gap = time.saturating_sub(last);
    if gap > GAP {
        LOST.fetch_add(gap, Ordering::Relaxed);
    }
    time.saturating_sub(LOST.load(Ordering::Relaxed))
}
