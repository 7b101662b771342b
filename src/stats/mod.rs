//! Statistics of a group: how many operations and bytes there were, how long operations took, and for which peers this
//! rank waited.
//!
//! `group` reports every operation twice, at issue and at its end. It does so with its lock held and with clock
//! readings that it needs anyway. The engine stores the route in the op and the times in `Op::timing`. So everything
//! here is plain single-threaded code. It calls no higher layer, allocates only when a kind, path and size appears for
//! the first time, and its memory is bounded.
//!
//! While an operation runs, only its record is written. Counts are computed from the records later: by a driver that
//! has nothing to move, by a caller of the statistics, or when many records have accumulated.
//!
//! | file | |
//! | --- | --- |
//! | `histogram` | times, in buckets of equal relative width |
//! | `history` | the last operations, one record each |
//! | `chunk_timer` | where a large operation spends its time |
//! | `export` | counts and records as JSON |
//! | `kept` | usual times of calls, in a file for later groups |

pub mod chunk_timer;
pub mod export;
pub mod histogram;
pub mod history;
pub mod kept;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use self::histogram::Histogram;
use self::history::{History, Record, State};
use crate::error::Result;
use crate::op::{FusedWith, Op};
use crate::os::clock;
use crate::types::Kind;

/// How many kinds (0 is none), path codes and size classes there are. `Stats::index` is a table over all three.
const KINDS: usize = Kind::ALL.len() + 1;
const PATHS: usize = 32;
const CLASSES: usize = 48;
/// There are at most this many entries. A combination gets its own entry while there is room; further combinations of a
/// kind share one entry.
const CELLS: usize = 128;
/// Largest number of operations that have ended and are not counted yet.
const APART: usize = 64;
/// A median counts as a usual time only if at least this many calls were timed.
const ENOUGH: u64 = 5;
/// Path and class of a shared entry.
pub const MIXED: u8 = u8::MAX;

/// The size class of a payload: 0 if it has no bytes, 1 for one byte, c for up to 2^(c-1) bytes.
pub fn class(bytes: u64) -> u8 {
    match bytes {
        0 => 0,
        bytes => (65 - (bytes - 1).leading_zeros()).min(CLASSES as u32 - 1) as u8,
    }
}

/// The counts for one kind, path and size class. Times are in nanoseconds.
#[derive(Clone, Debug)]
pub struct Cell {
    pub kind: Kind,
    pub path: u8,
    pub class: u8,
    /// Calls that ended without an error.
    pub count: u64,
    /// Calls that failed.
    pub failed: u64,
    /// Tensors in the calls that ended without an error.
    pub tensors: u64,
    /// Bytes of payload (`Op::payload`).
    pub bytes: u64,
    /// Bytes of the timed calls, counted like in nccl-tests: the whole tensor, even on ranks that have only a part of
    /// it.
    pub whole: u64,
    /// Sums of times. `took` is the time from issue to end. The part of it that is not waiting, copying or reducing was
    /// not measured separately.
    pub took: u64,
    pub waiting: u64,
    pub copying: u64,
    pub reducing: u64,
    pub longest: u64,
    pub times: Histogram,
}

impl Cell {
    fn new(kind: Kind, path: u8, class: u8) -> Cell {
        Cell {
            kind,
            path,
            class,
            count: 0,
            failed: 0,
            tensors: 0,
            bytes: 0,
            whole: 0,
            took: 0,
            waiting: 0,
            copying: 0,
            reducing: 0,
            longest: 0,
            times: Histogram::default(),
        }
    }
}

/// The sums of a kind's calls, with fields like those of `Cell`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Total {
    pub kind: Kind,
    pub count: u64,
    pub bytes: u64,
    pub waiting: u64,
}

/// A usual time of the calls of one kind and size class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Typical {
    /// Mean bytes of payload of a call.
    pub payload: f64,
    /// Median time from issue to end.
    pub nanoseconds: f64,
    /// How many calls were timed.
    pub calls: u64,
}

/// This rank's waits for one peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wait {
    /// Number of operations for which this peer came last, or in which it delayed this rank longest.
    pub count: u64,
    /// Nanoseconds that these operations took from issue to end, without copying and reducing.
    pub total: u64,
    pub longest: u64,
}

/// Counts of fused operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fused {
    pub batches: u64,
    /// Operations in batches. Each tensor of a list counts.
    pub ops: u64,
    pub largest: u64,
}

/// For each operation of `ended` that succeeded, records its batch: all operations that succeeded in this pass over the
/// group. A message is counted in the batch, but its number is not recorded, because messages have separate numbers. An
/// operation between hosts already has its batch, which stays.
#[inline(never)]
fn introduce(ended: &[(Arc<Op>, Result<()>)]) {
    let well = || ended.iter().filter(|(_, outcome)| outcome.is_ok()).map(|(op, _)| op);
    let numbers = || well().filter(|op| !op.request.kind.is_p2p()).map(|op| op.number);
    let collectives = numbers().min().zip(numbers().max());
    let count = well().count();
    for op in well().filter(|op| op.route().fused_with == FusedWith::ALONE) {
        let numbers = collectives.filter(|_| !op.request.kind.is_p2p()).unwrap_or((op.number, op.number));
        op.set_fused_with(FusedWith::new(op.number, numbers, count));
    }
}

/// Calls whose tensors were on a device and were copied through host memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostStaged {
    pub count: u64,
    /// Bytes of payload (`Op::payload`).
    pub bytes: u64,
}

#[derive(Clone, Debug)]
pub struct Stats {
    /// One more than the position in `cells`, by kind, path and class. 0 if there is no entry yet.
    index: Vec<u16>,
    cells: Vec<Cell>,
    waits: Vec<Wait>,
    fused: Fused,
    host_staged: HostStaged,
    history: History,
    /// Ids of records whose operations have ended and that are not counted yet. `oldest_apart` is the smallest of these
    /// ids.
    apart: Vec<u64>,
    oldest_apart: u64,
    /// Time of creation or of the last reset (`clock::stamp`).
    since: u64,
}

impl Stats {
    /// Makes the statistics of a group of `ranks` ranks, with a history of `room` records.
    pub fn new(ranks: usize, room: usize) -> Stats {
        Stats {
            index: vec![0; KINDS * PATHS * CLASSES],
            cells: Vec::new(),
            waits: vec![Wait::default(); ranks],
            fused: Fused::default(),
            host_staged: HostStaged::default(),
            history: History::new(room),
            apart: Vec::with_capacity(APART),
            oldest_apart: u64::MAX,
            since: clock::stamp(),
        }
    }

    /// Resets all counts. The history stays.
    pub fn reset(&mut self) {
        self.fold_all();
        let history = std::mem::replace(&mut self.history, History::new(0));
        *self = Stats { history, ..Stats::new(self.waits.len(), 0) };
    }

    /// A copy of all counts, without the records.
    pub fn counts(&mut self) -> Stats {
        self.fold_all();
        Stats {
            index: Vec::new(),
            apart: Vec::new(),
            oldest_apart: u64::MAX,
            cells: self.cells.clone(),
            waits: self.waits.clone(),
            fused: self.fused,
            host_staged: self.host_staged,
            history: self.history.without_records(),
            since: self.since,
        }
    }

    /// Returns the sums of each kind that has any calls.
    pub fn totals(&mut self) -> Vec<Total> {
        self.fold_all();
        let mut totals = Kind::ALL.map(|kind| Total { kind, count: 0, bytes: 0, waiting: 0 });
        for cell in &self.cells {
            let total = totals.iter_mut().find(|total| total.kind == cell.kind).expect("it has every kind");
            total.count += cell.count;
            total.bytes += cell.bytes;
            total.waiting += cell.waiting;
        }
        totals.into_iter().filter(|total| total.count > 0 || total.bytes > 0 || total.waiting > 0).collect()
    }

    /// The usual time of the calls in each size class of the kind, the smallest class first. A class is left out if too
    /// few of its calls were timed. If a class has several paths, the most used path counts.
    pub fn typical(&mut self, kind: Kind) -> Vec<Typical> {
        self.fold_all();
        let timed = |cell: &Cell| cell.times.filled().map(|(_, count)| count).sum::<u64>();
        let mut cells: Vec<&Cell> = self.cells.iter().filter(|cell| cell.kind == kind && cell.class != MIXED).collect();
        cells.retain(|cell| timed(cell) >= ENOUGH);
        cells.sort_by_key(|cell| (cell.class, std::cmp::Reverse(cell.count)));
        cells.dedup_by_key(|cell| cell.class);
        let typical = |cell: &Cell| Typical {
            payload: cell.bytes as f64 / cell.count.max(1) as f64,
            nanoseconds: cell.times.median() as f64,
            calls: timed(cell),
        };
        cells.into_iter().map(typical).collect()
    }

    pub fn history(&self) -> &History {
        &self.history
    }
    pub fn cells(&self) -> &[Cell] {
        &self.cells
    }
    pub fn waits(&self) -> &[Wait] {
        &self.waits
    }
    pub fn fused(&self) -> Fused {
        self.fused
    }
    pub fn host_staged(&self) -> HostStaged {
        self.host_staged
    }
    pub fn since(&self) -> u64 {
        self.since
    }

    /// Records that an operation was issued.
    #[inline(always)]
    pub fn issued(&mut self, op: &Op) {
        op.timing.record.store(self.push(Record::of(op)), Relaxed);
    }

    #[inline(always)]
    fn push(&mut self, record: Record) -> u64 {
        if self.history.next_to_go().is_some_and(|id| id >= self.oldest_apart) {
            self.fold_all();
        }
        self.history.push(record)
    }

    /// Records that operations ended in one pass over the group, at the stamp `at`, before their owners are notified.
    #[inline]
    pub fn ended(&mut self, ended: &[(Arc<Op>, Result<()>)], at: u64) {
        if ended.len() > 1 {
            introduce(ended);
        }
        let mut together = 0;
        for (op, outcome) in ended {
            self.end(op, outcome.is_ok(), at);
            together += if outcome.is_ok() { u64::from(op.request.note.tensors) } else { 0 };
        }
        if together > 1 {
            self.fused.batches += 1;
            self.fused.ops += together;
            self.fused.largest = self.fused.largest.max(together);
        }
    }

    #[inline]
    fn end(&mut self, op: &Op, well: bool, at: u64) {
        let id = op.timing.record.load(Relaxed);
        if let Some(record) = self.history.get_mut(id) {
            record.end(op, well, at);
            self.apart.push(id);
            self.oldest_apart = self.oldest_apart.min(id);
            if self.apart.len() >= APART {
                self.fold_all();
            }
        } else {
            let mut record = Record::of(op);
            record.end(op, well, at);
            self.fold(&record);
        }
    }

    /// Records the start of an operation that the core does not run itself.
    pub fn external_issued(&mut self, record: Record) -> u64 {
        self.push(record)
    }

    /// Removes the record of an operation that was refused and never started. If there are later records, the record
    /// stays, is marked as failed, and is not counted.
    pub fn take_back(&mut self, id: u64) {
        if !self.history.take_back(id)
            && let Some(record) = self.history.get_mut(id)
        {
            (record.state, record.ended) = (State::Failed, clock::stamp());
        }
    }

    /// Records the end of an operation that the core did not run itself. `record` is complete.
    pub fn external_ended(&mut self, record: Record) {
        if let Some(kept) = self.history.get_mut(record.id) {
            *kept = record;
        }
        self.fold(&record);
    }

    /// Counts the records that are not counted yet. The group calls this when it has no data to move.
    #[inline]
    pub fn catch_up(&mut self) {
        if !self.apart.is_empty() {
            self.fold_all();
        }
    }

    #[inline(never)]
    fn fold_all(&mut self) {
        for id in std::mem::take(&mut self.apart) {
            let record = *self.history.get_mut(id).expect("folded before it is overwritten");
            self.fold(&record);
        }
        self.apart.reserve(APART);
        self.oldest_apart = u64::MAX;
    }

    /// Adds an ended operation to the counts.
    fn fold(&mut self, record: &Record) {
        let waiting = record.waiting();
        if let Some(wait) = record.late().and_then(|rank| self.waits.get_mut(rank))
            && waiting > 0
        {
            wait.count += 1;
            wait.total += waiting;
            wait.longest = wait.longest.max(waiting);
        }
        if !record.note.counts && record.note.tensors == 0 {
            return; // part of a call that is counted as a whole
        }
        if record.note.host_staged && record.state == State::Done {
            self.host_staged.count += u64::from(record.note.counts);
            self.host_staged.bytes += record.bytes();
        }
        let ranks = self.waits.len() as u64;
        let cell = self.cell(record.kind, record.path(), class(record.bytes()));
        if record.state == State::Failed {
            cell.failed += u64::from(record.note.counts);
            return;
        }
        let took = record.took();
        cell.count += u64::from(record.note.counts);
        cell.tensors += u64::from(record.note.tensors);
        cell.bytes += record.bytes();
        cell.whole += if record.timed { whole(record, ranks) } else { 0 };
        if !record.timed {
            return;
        }
        cell.took += took;
        cell.waiting += waiting;
        cell.copying += record.copying;
        cell.reducing += record.reducing;
        cell.longest = cell.longest.max(took);
        cell.times.add(took);
    }

    #[inline]
    fn cell(&mut self, kind: Kind, path: u8, class: u8) -> &mut Cell {
        let at = (kind as usize * PATHS + usize::from(path).min(PATHS - 1)) * CLASSES + usize::from(class);
        if self.index[at] == 0 {
            self.index[at] = self.place(kind, path, class);
        }
        let cell = usize::from(self.index[at]) - 1;
        &mut self.cells[cell]
    }

    /// Returns the entry for a combination: a new entry if there is room, otherwise the entry that the kind's further
    /// combinations share.
    #[cold]
    fn place(&mut self, kind: Kind, path: u8, class: u8) -> u16 {
        let mixed = self.cells.iter().position(|cell| cell.kind == kind && cell.class == MIXED);
        let at = match mixed {
            Some(at) => at,
            None => {
                let own = self.cells.len() + KINDS < CELLS;
                let (path, class) = if own { (path, class) } else { (MIXED, MIXED) };
                self.cells.push(Cell::new(kind, path, class));
                self.cells.len() - 1
            }
        };
        at as u16 + 1
    }
}

/// The bytes that nccl-tests counts for the call.
fn whole(record: &Record, ranks: u64) -> u64 {
    match record.kind {
        Kind::Gather => record.read * ranks,
        Kind::Scatter => record.written * ranks,
        _ => record.bytes(),
    }
}

#[cfg(test)]
mod tests;
