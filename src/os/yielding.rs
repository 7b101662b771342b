//! Yielding the core while a thread waits, as long as that pays.
//!
//! A yield costs 0.4 us where no other thread wants the core, and lets a rank run that waits for it. Beside a thread that
//! computes it costs a slice of the scheduler, 1 to 4 ms: a thread that yields queues up behind the one that computes, while
//! one that sleeps is woken ahead of it. No call says beforehand which of the two it will be, but the yield itself does: after
//! a long one the waits of this process sleep at once for a while. That while grows as long as every new try is long again.

use std::sync::atomic::{AtomicU64, Ordering};

use super::clock;

/// A yield that lasts this long has met a thread that computes. Ranks that wait yield within microseconds; one that moves
/// megabytes takes this long, too, and then sleeping costs little.
const LONG: u64 = 1_000_000;
/// Nanoseconds without yields after the first long one, and the most.
const FIRST: u64 = 20_000_000;
const MOST: u64 = 1_000_000_000;

/// All words are hints: two threads that change them at once leave the time of one of them. Written by threads that wait
/// after a long yield, read by every thread that waits (relaxed: nothing else is read by them).
#[derive(Debug, Default)]
pub struct Yielding {
    /// Until when waits do not yield (`clock::stamp`); 0 before the first long yield.
    off_until: AtomicU64,
    /// For how long they did not, the last time.
    off_for: AtomicU64,
}

impl Yielding {
    /// Whether a thread that waits shall yield rather than sleep.
    pub fn pays(&self) -> bool {
        let until = self.off_until.load(Ordering::Relaxed);
        until == 0 || clock::stamp() >= until
    }

    /// Yields the core, and notices if that took long.
    pub fn yield_now(&self) {
        let begin = clock::stamp();
        std::thread::yield_now();
        let end = clock::stamp();
        if end - begin >= LONG {
            self.took_long(end);
        }
    }

    /// A long yield ended at `now`.
    fn took_long(&self, now: u64) {
        let (until, last) = (self.off_until.load(Ordering::Relaxed), self.off_for.load(Ordering::Relaxed));
        // Within the same time after the last end: the core is still shared.
        let again = last > 0 && now < until.saturating_add(last);
        let pause = if again { (2 * last).min(MOST) } else { FIRST };
        self.off_for.store(pause, Ordering::Relaxed);
        self.off_until.store(now.saturating_add(pause), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_long_yield_waits_sleep_for_a_while_that_grows_while_yields_stay_long() {
        let yielding = Yielding::default();
        assert!(yielding.pays());
        yielding.yield_now();

        let mut now = clock::stamp();
        yielding.took_long(now);
        assert!(!yielding.pays());
        let pause = |yielding: &Yielding, now: u64| yielding.off_until.load(Ordering::Relaxed) - now;
        assert_eq!(pause(&yielding, now), FIRST);
        // Each time the first try after the pause is long again.
        for doubled in [2, 4, 8, 16, 32] {
            now = yielding.off_until.load(Ordering::Relaxed);
            yielding.took_long(now);
            assert_eq!(pause(&yielding, now), doubled * FIRST);
        }
        for _ in 0..3 {
            now = yielding.off_until.load(Ordering::Relaxed);
            yielding.took_long(now);
        }
        assert_eq!(pause(&yielding, now), MOST);
        // A long one after a time of short ones begins anew.
        now = yielding.off_until.load(Ordering::Relaxed) + 2 * MOST;
        yielding.took_long(now);
        assert_eq!(pause(&yielding, now), FIRST);
    }
}
