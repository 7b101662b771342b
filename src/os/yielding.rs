//! Decides whether a waiting thread yields its core or sleeps.
//!
//! A yield costs 0.4 us if no other thread wants the core, and lets a waiting rank run. If a thread that computes
//! shares the core, a yield costs a time slice, 1 to 4 ms: the thread that yields is scheduled after the computing
//! thread, but a thread that sleeps is scheduled before it when it wakes. No system call predicts the cost, but the
//! yield itself shows it. After a long yield, there is a period in which waiting threads of this process sleep at once.
//! The period grows as long as each new attempt is long again.

use std::sync::atomic::{AtomicU64, Ordering};

use super::clock;

/// If a yield takes at least this long (in nanoseconds), a thread that computes shares the core; a thread that only
/// waits would yield in turn within microseconds. A rank that moves megabytes takes this long too, but then sleeping
/// costs little.
const LONG: u64 = 1_000_000;
/// After the first long yield, threads do not yield for this many nanoseconds. `MOST`: the longest such period.
const FIRST: u64 = 20_000_000;
const MOST: u64 = 1_000_000_000;

/// Both words are hints: if two threads change them at the same time, one of the two results remains. A waiting thread
/// writes them after a long yield, and every waiting thread reads them. Relaxed, because they order nothing else.
#[derive(Debug, Default)]
pub struct Yielding {
    /// Time until which waits do not yield (`clock::stamp`). 0 before the first long yield.
    off_until: AtomicU64,
    /// Length of the last period without yields.
    off_for: AtomicU64,
}

impl Yielding {
    /// Whether a waiting thread should yield rather than sleep.
    pub fn pays(&self) -> bool {
        let until = self.off_until.load(Ordering::Relaxed);
        until == 0 || clock::stamp() >= until
    }

    /// Yields the core, and starts a period without yields if that took long.
    pub fn yield_now(&self) {
        let begin = clock::stamp();
        std::thread::yield_now();
        let end = clock::stamp();
        if end - begin >= LONG {
            self.took_long(end);
        }
    }

    /// Starts a period without yields, after a long yield that ended at `now`.
    fn took_long(&self, now: u64) {
        let (until, last) = (self.off_until.load(Ordering::Relaxed), self.off_for.load(Ordering::Relaxed));
        // If this is soon after the end of the last period, a computing thread still shares the core.
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
        // This time is in the future, so that the test's own duration does not matter.
        let mut now = clock::stamp() + 60 * MOST;
        yielding.took_long(now);
        assert!(!yielding.pays());
        let pause = |yielding: &Yielding, now: u64| yielding.off_until.load(Ordering::Relaxed) - now;
        assert_eq!(pause(&yielding, now), FIRST);
        // Each time, the first yield after a period without yields is long again.
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
        // If yields were short for a while, the next long yield starts a period of the first length.
        now = yielding.off_until.load(Ordering::Relaxed) + 2 * MOST;
        yielding.took_long(now);
        assert_eq!(pause(&yielding, now), FIRST);
    }
}
