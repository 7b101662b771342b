//! Splits copies and reductions of one thread among several (`host::Host::parallel`).
//!
//! A thread that waits for an operation *lends* torch's intra-op threads to itself for the time of the wait (`lend`). The
//! code that copies and combines calls `split`, which runs one part of the range on each thread. If nothing was lent to
//! a thread, it does the whole range itself, as the lanes of groups over several hosts do.
//!
//! The progress thread drives operations while the program computes on the intra-op threads. It has helpers only if the
//! rank has more cores than torch has threads (`Helpers::beside_the_program`). OpenMP gives each thread that starts a
//! region its own team, so these helpers are not the threads on which the program computes.
//!
//! A parallel region ends when its last thread has arrived. If another process runs on that thread's core, this takes
//! until the scheduler's next tick: a copy that needs microseconds then takes milliseconds. So if a thread had to wait
//! that long, it does its ranges itself for a while (`Patience`). The loss on a busy machine is then at most 4 per
//! cent.
//!
//! Only one thread writes each byte, and only one thread combines each element, from all its sources. So the number of
//! threads never changes a bit of the result, and peers cannot notice it.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::host::Host;
use crate::os::clock;

/// The smallest part. A core needs about 8 us to copy this many bytes (docs/internals/benchmarks.md). To start and end
/// a parallel region takes less time, so a range of two parts is faster on two threads.
pub const LEAST_BYTES: usize = 64 << 10;
/// Ranges are cut at multiples of a cache line, which is a multiple of every element size.
const LINE: usize = 64;

/// The threads that one thread of a group may use.
#[derive(Clone)]
pub struct Helpers {
    host: Arc<dyn Host>,
    /// The largest number of threads, including the thread that they help.
    threads: usize,
    /// Number of cores of this rank.
    cores: usize,
    /// Number of torch's threads in the thread of the program that last issued an operation or waited. Such threads
    /// write it, the progress thread reads it. Relaxed, because it guards no other data.
    computing: Arc<AtomicUsize>,
    /// Whether the program may compute meanwhile.
    is_beside: bool,
}

impl Helpers {
    /// `threads` is the result of `agreed`, `cores` that of `own_cores`.
    pub fn new(host: Arc<dyn Host>, threads: usize, cores: usize) -> Helpers {
        let computing = Arc::new(AtomicUsize::new(host.threads()));
        Helpers { host, threads, cores, computing, is_beside: false }
    }

    /// Returns the threads for the progress thread: as many as the rank has cores that torch's threads leave free.
    pub fn beside_the_program(&self) -> Helpers {
        Helpers { is_beside: true, ..self.clone() }
    }

    /// The largest number of threads for a waiting thread, unless torch has fewer.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Called by a thread of the program when it issues an operation.
    pub fn note_issue(&self) {
        self.computing.store(self.host.threads(), Ordering::Relaxed);
    }

    /// The largest number of threads, including the thread that they help. 1 if they would not help.
    pub fn count(&self) -> usize {
        let most = self.threads.min(self.host.threads());
        let free =
            if self.is_beside { self.cores.saturating_sub(self.computing.load(Ordering::Relaxed)) } else { most };
        most.min(free).max(1)
    }
}

thread_local! {
    /// What was lent to this thread.
    static LENT: RefCell<Option<Helpers>> = const { RefCell::new(None) };
    static WAITS: Cell<bool> = const { Cell::new(false) };
    static PATIENCE: Cell<Patience> = const { Cell::new(Patience::new()) };
}

/// For how long a thread does not use its helpers, because they arrived late. Times are nanoseconds of
/// `clock::now`.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// Until this time the thread does its ranges itself.
    until: u64,
    /// Length of that pause.
    pause: u64,
}

impl Patience {
    /// After a late region, the pause is this many times as long as the region. If less time has passed since the last
    /// pause than that pause lasted, the new pause is at least twice as long as the last one.
    const PAUSE: u64 = 25;
    const LONGEST: u64 = 1_000_000_000;

    const fn new() -> Patience {
        Patience { until: 0, pause: 0 }
    }

    /// Returns the state after a region of `bytes` bytes that began at `began` and ended at `now`. The region was late
    /// if it took over 100 us longer than one thread alone at 1 GB/s, which is a fraction of any core's speed.
    fn after(self, bytes: usize, began: u64, now: u64) -> Patience {
        let took = now.saturating_sub(began);
        if took <= 100_000 + bytes as u64 {
            return self;
        }
        let again = began < self.until + self.pause;
        let pause = (Patience::PAUSE * took).max(if again { 2 * self.pause } else { 0 }).min(Patience::LONGEST);
        Patience { until: now + pause, pause }
    }
}

/// Until this is dropped, `split` on this thread uses the lent threads.
pub struct Lending(Option<Helpers>);

/// Lends `helpers` to the calling thread.
pub fn lend(helpers: Helpers) -> Lending {
    if !helpers.is_beside {
        helpers.note_issue();
    }
    Lending(LENT.replace(Some(helpers)))
}

impl Drop for Lending {
    fn drop(&mut self) {
        LENT.replace(self.0.take());
    }
}

/// While this exists, this thread waits for an operation (`is_waiting`).
pub struct Waiting(bool);

/// Records that this thread has nothing to do but to wait for an operation.
pub fn wait() -> Waiting {
    Waiting(WAITS.replace(true))
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITS.set(self.0);
    }
}

/// Whether this thread waits for an operation. If not, it may be the progress thread of a program that computes.
pub fn is_waiting() -> bool {
    WAITS.get()
}

/// On how many threads `split` would run a long range if this thread called it.
pub fn count() -> usize {
    LENT.with_borrow(|lent| lent.as_ref().map_or(1, Helpers::count))
}

/// Calls `work(start, length)` for parts that cover `0..bytes` once, and returns after all calls. The parts run on the
/// threads that were lent to this thread. If the range is too short for that, it is a single part.
#[inline]
pub fn split(bytes: usize, work: impl Fn(usize, usize) + Sync) {
    if bytes < 2 * LEAST_BYTES {
        return work(0, bytes);
    }
    split_long(bytes, &work);
}

fn split_long(bytes: usize, work: &(dyn Fn(usize, usize) + Sync)) {
    let Some(helpers) = LENT.with_borrow(Clone::clone) else { return work(0, bytes) };
    let parts = (bytes / LEAST_BYTES).min(helpers.count());
    let (patience, began) = (PATIENCE.get(), clock::now());
    if parts < 2 || began < patience.until {
        return work(0, bytes);
    }
    let each = bytes.div_ceil(parts).next_multiple_of(LINE);
    contained(&*helpers.host, parts, &|part| {
        let start = (part * each).min(bytes);
        work(start, each.min(bytes - start));
    });
    PATIENCE.set(patience.after(bytes, began, clock::now()));
}

/// Calls `part` on the intra-op threads. If a call panics, this function panics only after all calls have returned,
/// because a panic must not unwind the frames of `Host::parallel`, which are C++.
fn contained(host: &dyn Host, parts: usize, part: &(dyn Fn(usize) + Sync)) {
    let panicked: Mutex<Option<Box<dyn Any + Send>>> = Mutex::new(None);
    host.parallel(parts, &|number| {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| part(number))) {
            *panicked.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
    });
    if let Some(panic) = panicked.into_inner().unwrap_or_else(PoisonError::into_inner) {
        resume_unwind(panic);
    }
}

/// The facts about one rank that decide how many threads each rank of its group uses (`agreed`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The largest number of threads of this rank; at least 1.
    pub threads: usize,
    /// Whether the program named the number. If not, all ranks together use at most as many threads as they have cores.
    pub named: bool,
    /// Number of cores on which this rank may run.
    pub cores: usize,
}

/// Returns how many threads each rank of a group uses: the minimum over the ranks of the number that a rank may use.
/// `cores` is the number of cores that all ranks may use together.
pub fn agreed(wishes: &[Wish], cores: usize) -> usize {
    let share = cores / wishes.len().max(1);
    let each = wishes.iter().map(|wish| {
        let most = if wish.named { wish.cores } else { wish.cores.min(share) };
        wish.threads.min(most)
    });
    each.min().unwrap_or(1).max(1)
}

/// Returns the number of cores of a rank: its own CPUs if no rank of its group shares them, otherwise its share of the
/// group's CPUs. Of the CPUs `per_core` share a core, because two threads that copy on one core are not faster than one.
/// `most_ranks` is the number of ranks of the largest group on this host, whose ranks need cores, too.
pub fn own_cores(own_cpus: usize, group_cpus: usize, per_core: usize, (ranks, most_ranks): (usize, usize)) -> usize {
    let shares = own_cpus * ranks != group_cpus;
    let cpus = if shares { group_cpus / most_ranks.max(ranks).max(1) } else { own_cpus };
    cpus / per_core.max(1)
}

/// A host with threads, for tests.
#[cfg(test)]
pub struct Scoped(pub usize);

#[cfg(test)]
impl Host for Scoped {
    fn interrupted(&self) -> bool {
        false
    }
    fn threads(&self) -> usize {
        self.0
    }
    fn parallel(&self, parts: usize, part: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|scope| (0..parts).for_each(|number| drop(scope.spawn(move || part(number)))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of a range, for a thread that has not waited for a late region before. `Scoped` starts new threads,
    /// which can take long on a busy machine.
    fn parts_of(bytes: usize) -> Vec<(usize, usize)> {
        PATIENCE.set(Patience::new());
        split_into(bytes)
    }

    fn split_into(bytes: usize) -> Vec<(usize, usize)> {
        let parts = Mutex::new(Vec::new());
        split(bytes, |start, length| parts.lock().unwrap().push((start, length)));
        let mut parts = parts.into_inner().unwrap();
        parts.sort_unstable();
        parts
    }

    fn helpers(threads: usize) -> Helpers {
        Helpers::new(Arc::new(Scoped(threads)), threads, threads)
    }

    #[test]
    fn the_parts_cover_every_byte_once_and_none_is_too_small() {
        for threads in 1..9 {
            let _lending = lend(helpers(threads));
            for bytes in
                [0, 1, 64, LEAST_BYTES, 2 * LEAST_BYTES - 1, 2 * LEAST_BYTES, 1 << 20, (5 << 20) + 4, 12_345_678]
            {
                let parts = parts_of(bytes);
                let mut next = 0;
                for (start, length) in &parts {
                    assert_eq!((*start, start % LINE), (next, 0), "{bytes} bytes on {threads} threads: {parts:?}");
                    next += length;
                }
                assert_eq!(next, bytes);
                let expected = threads.min(bytes / LEAST_BYTES).max(1);
                assert_eq!(parts.len(), expected, "{bytes} bytes on {threads} threads");
            }
        }
    }

    #[test]
    fn nothing_is_split_without_a_loan_or_after_it() {
        assert_eq!((count(), parts_of(1 << 20).len()), (1, 1));
        {
            let _lending = lend(helpers(4));
            assert_eq!((count(), parts_of(1 << 20).len()), (4, 4));
            {
                let _inner = lend(helpers(2));
                assert_eq!((count(), parts_of(1 << 20).len()), (2, 2));
            }
            assert_eq!(count(), 4);
            std::thread::scope(|scope| drop(scope.spawn(|| assert_eq!(parts_of(1 << 20).len(), 1))));
        }
        assert_eq!((count(), parts_of(1 << 20).len()), (1, 1));
    }

    #[test]
    fn the_host_limits_the_threads() {
        let _lending = lend(Helpers::new(Arc::new(Scoped(2)), 8, 8));
        assert_eq!((count(), parts_of(1 << 20).len()), (2, 2));
    }

    #[test]
    fn the_progress_thread_has_the_cores_that_torchs_threads_leave_free() {
        for (torchs, most, cores, expected) in
            [(4, 4, 8, 4), (4, 4, 7, 3), (4, 4, 5, 1), (4, 4, 4, 1), (4, 4, 2, 1), (8, 2, 16, 2), (1, 1, 64, 1)]
        {
            let helpers = Helpers::new(Arc::new(Scoped(torchs)), most, cores);
            let _lending = lend(helpers.beside_the_program());
            assert_eq!((count(), parts_of(1 << 20).len()), (expected, expected), "{torchs} {most} {cores}");
            assert_eq!(helpers.count(), most.min(torchs), "a waiting thread has all");
        }
        // 8 ranks share 64 CPUs, two of each core; so do 2 of these 8 in a group of their own.
        assert_eq!(
            (own_cores(64, 64, 2, (8, 8)), own_cores(64, 64, 2, (2, 8)), own_cores(64, 64, 1, (8, 8))),
            (4, 4, 8)
        );
        // Each of 8 ranks is bound to 8 CPUs; the second case is a group of two of them.
        assert_eq!((own_cores(8, 64, 2, (8, 8)), own_cores(8, 16, 2, (2, 8))), (4, 4));
        assert_eq!(own_cores(2, 2, 1, (4, 4)), 0);
    }

    /// The program may change the number of torch's threads at any time.
    #[test]
    fn the_progress_thread_counts_the_threads_that_torch_has_now() {
        struct Changing(AtomicUsize);
        impl Host for Changing {
            fn interrupted(&self) -> bool {
                false
            }
            fn threads(&self) -> usize {
                self.0.load(Ordering::Relaxed)
            }
        }
        let host = Arc::new(Changing(AtomicUsize::new(8)));
        let helpers = Helpers::new(Arc::<Changing>::clone(&host), 8, 12);
        let beside = helpers.beside_the_program();
        assert_eq!(beside.count(), 4);
        host.0.store(6, Ordering::Relaxed);
        helpers.note_issue();
        assert_eq!(beside.count(), 6);
        host.0.store(12, Ordering::Relaxed);
        drop(lend(helpers));
        assert_eq!(beside.count(), 1);
    }

    #[test]
    fn a_panic_of_one_part_reaches_the_caller_after_all_parts() {
        PATIENCE.set(Patience::new());
        let _lending = lend(helpers(4));
        let done = Mutex::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            split(1 << 20, |start, _| {
                *done.lock().unwrap() += 1;
                assert_ne!(start, 0, "the first part fails");
            });
        }));
        assert!(result.is_err());
        assert_eq!(*done.lock().unwrap_or_else(PoisonError::into_inner), 4);
    }

    #[test]
    fn threads_that_arrive_late_are_not_used_for_a_while() {
        const MS: u64 = 1_000_000;
        let in_time = Patience::new().after(1 << 20, 0, MS);
        assert_eq!((in_time.until, in_time.pause), (0, 0), "1 ms for 1 MiB is what one thread may take");
        let late = in_time.after(1 << 17, 0, 4 * MS);
        assert_eq!((late.until, late.pause), (104 * MS, 100 * MS));
        let mut again = late.after(1 << 17, 200 * MS, 204 * MS);
        assert_eq!((again.until, again.pause), (404 * MS, 200 * MS), "late soon after a pause");
        for _ in 0..20 {
            again = again.after(1 << 17, again.until, again.until + 4 * MS);
        }
        assert_eq!(again.pause, 1000 * MS, "a pause is at most a second");
        let much_later = again.until + again.pause;
        assert_eq!(again.after(1 << 17, much_later, much_later + 4 * MS).pause, 100 * MS);
    }

    #[test]
    fn after_a_late_region_the_waiting_thread_works_alone() {
        struct Late;
        impl Host for Late {
            fn interrupted(&self) -> bool {
                false
            }
            fn threads(&self) -> usize {
                2
            }
            fn parallel(&self, parts: usize, part: &(dyn Fn(usize) + Sync)) {
                (0..parts).for_each(part);
                std::thread::sleep(std::time::Duration::from_millis(4));
            }
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _lending = lend(Helpers::new(Arc::new(Late), 2, 2));
                let began = clock::now();
                assert_eq!(split_into(1 << 20).len(), 2);
                let patience = PATIENCE.get();
                assert!(patience.pause >= 100_000_000, "25 times as long as the region: {patience:?}");
                assert!(patience.until >= began + patience.pause, "from the end of the region on: {patience:?}");
                // Sets the end of the pause itself, because on a busy machine the pause may pass between two calls.
                PATIENCE.set(Patience { until: u64::MAX, ..patience });
                assert_eq!(split_into(1 << 20).len(), 1, "during the pause");
                PATIENCE.set(Patience { until: 0, ..patience });
                assert_eq!(split_into(1 << 20).len(), 2, "after the pause");
            });
        });
    }

    #[test]
    fn ranks_share_the_cores_unless_the_program_names_a_number() {
        let wish = |threads, named, cores| Wish { threads, named, cores };
        assert_eq!(agreed(&[wish(16, false, 16); 2], 16), 8);
        assert_eq!(agreed(&[wish(16, false, 8); 2], 16), 8);
        assert_eq!(agreed(&[wish(2, false, 2); 2], 2), 1);
        assert_eq!(agreed(&[wish(2, true, 2); 2], 2), 2);
        assert_eq!(agreed(&[wish(64, true, 2); 2], 2), 2);
        assert_eq!(agreed(&[wish(16, false, 16), wish(1, false, 16)], 16), 1);
        assert_eq!(agreed(&[wish(4, false, 1); 8], 2), 1);
    }
}
