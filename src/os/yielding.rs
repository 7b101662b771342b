//! Decides whether a waiting thread yields its core or sleeps.
//!
//! A yield costs 0.4 us if no other thread wants the core, and lets a waiting rank run. If a thread that computes
//! shares the core, a yield costs a time slice, 1 to 4 ms: the thread that yields is scheduled after the computing
//! thread, but a thread that slept is scheduled before the computing thread. No system call predicts the cost, but the
//! yield itself shows it. After a long yield, there is a period in which waiting threads of this process sleep without
//! yielding first. The period grows as long as each new yield is long again.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::clock;

/// If a yield takes at least this long (in nanoseconds), a thread that computes shares the core; a thread that only
/// waits would yield in turn within microseconds. If another rank moves megabytes meanwhile, a yield takes this long
/// too, but then sleeping costs little.
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

/// Decides how long waits for messages from other hosts yield, by how long the last waits took. A thread that yields
/// and then sleeps all the same has kept its core busy, and starts later when it wakes. For example, a message of 8
/// bytes over a link of 0.2 ms took 15 us longer after 200 us of yielding, and a pair of messages took twice the
/// processor time.
///
/// A wait counts as long if it takes at least `FACTOR` times the time for which it may yield. If the threads of both
/// sides sleep, a wait takes 100 us longer than if both yield, and such a wait must not count as long, or both would
/// always sleep.
#[derive(Debug, Default)]
pub struct Eagerness {
    /// How many waits in a row were long. Waiting threads write and read it (relaxed: a hint).
    long: AtomicU32,
}

impl Eagerness {
    /// After this many long waits in a row, threads yield only for `BRIEF`.
    const MANY: u32 = 4;
    const BRIEF: Duration = Duration::from_micros(20);
    const FACTOR: u32 = 3;

    /// Returns how long the next wait yields: `most` or less.
    pub fn budget(&self, most: Duration) -> Duration {
        if self.long.load(Ordering::Relaxed) >= Self::MANY { Self::BRIEF } else { most }
    }

    /// Records how long a wait took that could have yielded for `most`.
    pub fn waited(&self, took: Duration, most: Duration) {
        let long = self.long.load(Ordering::Relaxed);
        let now = if took < most * Self::FACTOR { 0 } else { (long + 1).min(Self::MANY) };
        if now != long {
            self.long.store(now, Ordering::Relaxed);
        }
    }
}

/// The gaps between the pieces of data that come during one wait. If most of them are long, the rest of the data probably
/// comes in such gaps too, for example over 1 Gbit/s. A thread that yields in each of them keeps its core busy most of the
/// time and gains nothing, because only the end of the last one ends the wait. Short messages end before there are so many
/// gaps: for all_reduces of 64 KiB to 1 MiB over 1 Gbit/s, a limit of 2 instead of `MANY` cost up to a quarter of the speed
/// (docs/internals/benchmarks.md).
#[derive(Debug, Default)]
pub struct Gaps {
    /// A long gap adds 1, a shorter one subtracts 1. Stays between 0 and twice `MANY`.
    long: u32,
}

impl Gaps {
    const MANY: u32 = 8;
    /// A gap of this length is long.
    const LONG: Duration = Duration::from_micros(100);

    pub fn are_long(&self) -> bool {
        self.long >= Self::MANY
    }

    /// Called when data has come, `gap` after the data before it or after the begin of the wait.
    pub fn came(&mut self, gap: Duration) {
        self.long = if gap >= Self::LONG { (self.long + 1).min(2 * Self::MANY) } else { self.long.saturating_sub(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_long_while_most_of_them_are() {
        let after = |gaps: &[(Duration, u32)]| {
            let mut found = Gaps::default();
            for (gap, count) in gaps {
                (0..*count).for_each(|_| found.came(*gap));
            }
            found.are_long()
        };
        let (many, long, short) = (Gaps::MANY, Gaps::LONG, Gaps::LONG / 2);
        assert!(!after(&[]) && !after(&[(long, many - 1)]) && !after(&[(long, many), (short, 1)]));
        assert!(after(&[(short, 100), (long, many)]) && after(&[(long, many + 3), (short, 3)]));
        assert!(!after(&[(long, 100), (short, many + 1)]), "old gaps do not count forever");
    }

    #[test]
    fn after_several_long_waits_threads_yield_briefly_until_a_wait_is_short() {
        let (eagerness, most) = (Eagerness::default(), Duration::from_micros(200));
        let (long, short) = (most * Eagerness::FACTOR, most * Eagerness::FACTOR / 2);
        for _ in 0..Eagerness::MANY {
            assert_eq!(eagerness.budget(most), most);
            eagerness.waited(long, most);
        }
        assert_eq!(eagerness.budget(most), Eagerness::BRIEF);
        eagerness.waited(long * 20, most);
        assert_eq!(eagerness.budget(most), Eagerness::BRIEF);
        eagerness.waited(short, most);
        assert_eq!(eagerness.budget(most), most, "even if this wait slept");
        for took in [long, long, long, short, long] {
            eagerness.waited(took, most);
        }
        assert_eq!(eagerness.budget(most), most, "not in a row");
    }

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
