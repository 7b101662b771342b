//! One operation from issue to end: its request, its number, and its outcome.
//!
//! The engine advances the operation, the group ends it, the caller waits for it. Other threads read the outcome (see
//! `state`) and the route (see `choice`) without a lock.

pub mod lists;
pub mod overlap;
pub mod pending;
pub mod signature;
pub mod words;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use once_cell::sync::OnceCell;

use self::overlap::Reach;
use crate::error::{Error, Result};
use crate::host::Completion;
use crate::os::clock;
use crate::types::{Request, Span};

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// The value of a rank field that names no rank.
pub const NOBODY: u32 = u32::MAX;

/// How long the parts of an operation took, for the statistics.
///
/// Read and written only with the group's lock held, which orders all accesses, so all are relaxed. Every field is a
/// whole word and starts as zero: if single bytes were written shortly before the operation is copied, the copy would
/// stall.
#[derive(Debug, Default)]
pub struct OpTiming {
    /// Id of the operation's record in the statistics.
    pub record: AtomicU64,
    /// 1 if the operation did not end in the pass that issued it.
    blocked: AtomicU32,
    /// One more than the rank for which the operation waited longest or, if that is unknown, for which it waited last.
    /// 0 if it waited for no rank.
    late: AtomicU32,
    /// Nanoseconds that copying took. `reducing`: nanoseconds that reducing took.
    pub copying: AtomicU64,
    pub reducing: AtomicU64,
}

impl OpTiming {
    /// Records that the operation did not end in the pass that issued it.
    pub fn set_blocked(&self) {
        self.blocked.store(1, Ordering::Relaxed);
    }
    pub fn blocked(&self) -> bool {
        self.blocked.load(Ordering::Relaxed) != 0
    }

    pub fn set_late(&self, rank: usize) {
        self.late.store(rank as u32 + 1, Ordering::Relaxed);
    }

    /// The rank for which the operation waited, or `NOBODY`.
    pub fn late(&self) -> u32 {
        self.late.load(Ordering::Relaxed).wrapping_sub(1)
    }

    /// Adds nanoseconds to one of the sums. The group's lock excludes concurrent calls.
    pub fn spend(sum: &AtomicU64, time: u64) {
        sum.store(sum.load(Ordering::Relaxed) + time, Ordering::Relaxed);
    }
}

/// The operations with which an operation was fused: between hosts the other operations of its batch, on one host those
/// that ended in the same pass. All is in one word, so that it is read atomically: the number of other operations (16
/// bits), and the distances to the first and last number (24 bits each). The operation was alone if all bits are zero,
/// which is also the initial value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FusedWith(u64);

impl FusedWith {
    pub const ALONE: FusedWith = FusedWith(0);

    /// The value for operation `number`, which is one of `count` operations with the numbers `first` to `last`.
    pub fn new(number: u64, (first, last): (u64, u64), count: usize) -> FusedWith {
        let near = |distance: u64| distance.min((1 << 24) - 1);
        let others = count.saturating_sub(1).min(usize::from(u16::MAX)) as u64;
        FusedWith(others | near(number.saturating_sub(first)) << 16 | near(last.saturating_sub(number)) << 40)
    }

    /// Number of fused operations, including this one.
    pub fn count(self) -> u64 {
        (self.0 & 0xffff) + 1
    }

    /// First and last number of the operations with which operation `number` was fused. Both are `number` if the other
    /// operations are messages.
    pub fn numbers(self, number: u64) -> (u64, u64) {
        (number - (self.0 >> 16 & 0xff_ffff).min(number), number + (self.0 >> 40))
    }
}

/// What is recorded of an operation's path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// `select::Choice::code`. 0 before the operation has started.
    pub choice: u64,
    /// `select::OpDesc::load` of what the algorithm was chosen for: the operation, or the whole batch that contains it.
    pub load: u64,
    pub fused_with: FusedWith,
}

pub struct Op {
    pub request: Request,
    /// Number within the group (collectives) or the ordered pair of ranks (point to point).
    pub number: u64,
    /// The hash that must be equal on all ranks, see [`signature`].
    pub signature: u64,
    /// A second hash that must be equal on all ranks: [`lists::hash`].
    pub lists: u64,
    /// Time of issue (`clock::stamp`).
    pub issued: u64,
    /// Bytes that this rank's call reads. `written`: bytes that the call writes.
    pub read: u64,
    pub written: u64,
    pub timeout: Duration,
    /// Time at which the operation fails (`clock::now`).
    pub deadline: u64,
    /// The address range that contains all its memory: `overlap::extent`.
    extent: (usize, usize),
    /// All its memory in detail. Computed when it is first needed: in a comparison with another operation for which
    /// `overlap::conflict_in_pairs` does not suffice.
    reach: OnceCell<Box<Reach>>,
    /// The copy that a send reads instead of its inputs: see `send_copy`.
    copy: OnceCell<Box<(Vec<u8>, [Span; 1])>>,
    /// Whether the engine no longer uses its memory. Accessed under the group's lock, so relaxed.
    released: AtomicBool,
    /// First PENDING, finally DONE or FAILED. The thread that ends the operation writes it once (release), after the
    /// results are in the caller's memory and `source` and `error` are set. Readers load it (acquire), and may then use
    /// the results, `source` and `error`.
    state: AtomicU8,
    error: OnceCell<Error>,
    source: AtomicI32,
    nanoseconds: AtomicU64,
    /// The parts of `Route`. The engine writes `choice` when the operation starts (release), after `load` and, between
    /// hosts, after `fused_with`. It writes `choice` again if the tensors turn out to be accessed in place
    /// (`Choice::MAPPED`). A reader loads `choice` first (acquire). On one host, `fused_with` is written when a fused
    /// operation ends, before `state`.
    choice: AtomicU64,
    load: AtomicU64,
    fused_with: AtomicU64,
    pub timing: OpTiming,
    completion: Mutex<Option<Box<dyn Completion>>>,
}

impl Op {
    #[inline(always)] // a call would copy the operation once more on its way into the `Arc`
    pub fn new(
        request: Request,
        number: u64,
        signature: u64,
        timeout: Duration,
        completion: Option<Box<dyn Completion>>,
    ) -> Op {
        let issued = clock::stamp();
        let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes as u64).sum::<u64>();
        Op {
            read: sum(request.inputs()),
            written: sum(request.outputs()),
            lists: lists::hash(&request),
            extent: overlap::extent(&request),
            reach: OnceCell::new(),
            copy: OnceCell::new(),
            released: AtomicBool::new(false),
            request,
            number,
            signature,
            issued,
            timeout,
            deadline: clock::at(issued).saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)),
            state: AtomicU8::new(PENDING),
            error: OnceCell::new(),
            source: AtomicI32::new(-1),
            nanoseconds: AtomicU64::new(0),
            choice: AtomicU64::new(0),
            load: AtomicU64::new(0),
            fused_with: AtomicU64::new(0),
            timing: OpTiming::default(),
            completion: Mutex::new(completion),
        }
    }

    /// Whether one of the two operations writes memory that the other reads or writes, so that the later one must run
    /// after the earlier one.
    pub fn conflicts_with(&self, other: &Op) -> bool {
        if self.extent.0 >= other.extent.1 || other.extent.0 >= self.extent.1 {
            return false;
        }
        if overlap::is_short(&self.request) && overlap::is_short(&other.request) {
            return overlap::conflict_in_pairs(&self.request, &other.request);
        }
        self.reach().conflicts_with(other.reach())
    }

    /// The memory that the operation reads and writes.
    pub fn reach(&self) -> &Reach {
        self.reach.get_or_init(|| Box::new(Reach::of(&self.request)))
    }

    /// The data of a send: the inputs, or their copy.
    pub fn sent(&self) -> &[Span] {
        self.copy.get().map_or(self.request.inputs(), |copy| &copy.1)
    }

    /// Makes the send read from `copy`, which has the bytes of its inputs, so that later operations may overwrite the
    /// inputs.
    pub fn send_copy(&self, copy: Vec<u8>) {
        let span = Span { addr: copy.as_ptr() as usize, bytes: copy.len() };
        let _ = self.copy.set(Box::new((copy, [span])));
        self.release();
    }

    /// Records that the engine no longer reads or writes the operation's memory.
    pub fn release(&self) {
        self.released.store(true, Ordering::Relaxed);
    }
    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Relaxed)
    }

    /// The caller's payload: the number of bytes that this rank's call reads or the number that it writes, whichever is
    /// larger.
    pub fn payload(&self) -> u64 {
        self.read.max(self.written)
    }

    pub fn is_done(&self) -> bool {
        self.state.load(Ordering::Acquire) != PENDING
    }

    /// The error, if the operation has failed.
    pub fn error(&self) -> Option<&Error> {
        if self.state.load(Ordering::Acquire) == FAILED { self.error.get() } else { None }
    }

    /// The outcome. Must be called only after `is_done` has returned true.
    pub fn outcome(&self) -> Result<()> {
        match self.error() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// The rank whose message a receive matched. -1 before that, and for all other operations.
    pub fn source(&self) -> i32 {
        self.source.load(Ordering::Relaxed)
    }
    pub fn set_source(&self, rank: usize) {
        self.source.store(rank as i32, Ordering::Relaxed);
    }

    /// The recorded route.
    pub fn route(&self) -> Route {
        Route {
            choice: self.choice.load(Ordering::Acquire),
            load: self.load.load(Ordering::Relaxed),
            fused_with: FusedWith(self.fused_with.load(Ordering::Relaxed)),
        }
    }

    /// Records `select::OpDesc::load`.
    pub fn record_load(&self, load: u64) {
        self.load.store(load, Ordering::Relaxed);
    }

    pub fn set_fused_with(&self, fused_with: FusedWith) {
        self.fused_with.store(fused_with.0, Ordering::Relaxed);
    }

    /// Records `select::Choice::code`, and that the operation has started.
    pub fn record_choice(&self, choice: u64) {
        self.choice.store(choice, Ordering::Release);
    }

    /// Time from issue to end. Zero while the operation runs.
    pub fn duration(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed))
    }

    /// Locks and returns the owner; None after the end of the operation. A poisoned lock is accepted, because the owner
    /// must be notified of the end even if `prepare` or `store_back` has panicked.
    fn completion(&self) -> MutexGuard<'_, Option<Box<dyn Completion>>> {
        self.completion.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies strided inputs into contiguous memory. Called right before the engine first reads them.
    pub fn prepare(&self) {
        if let Some(completion) = self.completion().as_ref() {
            completion.prepare();
        }
    }

    /// Copies contiguous results into strided outputs. Called right after the engine wrote them.
    pub fn store_back(&self) {
        if let Some(completion) = self.completion().as_ref() {
            completion.store_back();
        }
    }

    /// Ends the operation, which finished at `at` (`clock::stamp`), and notifies its owner. Called once, by a thread
    /// that holds no lock, because the owner queues further work.
    pub fn end(&self, outcome: Result<()>, at: u64) {
        let completion = self.completion().take();
        self.nanoseconds.store(at.saturating_sub(self.issued).max(1), Ordering::Relaxed);
        let state = match outcome {
            Ok(()) => DONE,
            Err(error) => {
                let _ = self.error.set(error);
                FAILED
            }
        };
        self.state.store(state, Ordering::Release);
        if let Some(completion) = completion {
            completion.ended(self.error.get());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operations_fused_with_one_keep_their_numbers() {
        for (number, first, last, count) in [(5, 1, 5, 5), (17, 17, 42, 26), (1 << 40, 1 << 40, (1 << 40) + 4095, 4096)]
        {
            let fused_with = FusedWith::new(number, (first, last), count);
            assert_eq!((fused_with.numbers(number), fused_with.count()), ((first, last), count as u64));
        }
        assert_eq!(FusedWith::new(7, (7, 7), 1), FusedWith::ALONE);
        assert_eq!((FusedWith::ALONE.count(), FusedWith::ALONE.numbers(7)), (1, (7, 7)));
        assert_eq!(FusedWith::new(7, (7, 7), 1 << 20).count(), 0x10000);
    }
}
