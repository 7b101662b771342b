//! Counts and records as JSON, for Python and for the file of a failed group.

use super::history::{History, Record, State};
use super::{Cell, MIXED, Stats, Total};
use crate::json;
use crate::op::NOBODY;
use crate::types::{ANY_RANK, Dtype, ReduceOp};

/// Functions of `select` that name path and reason codes.
#[derive(Clone, Copy)]
pub struct Names {
    pub path: fn(u8) -> &'static str,
    pub reason: fn(u8) -> &'static str,
}

/// One moment in nanoseconds, on our clock (`clock::stamp`) and since the epoch.
#[derive(Clone, Copy)]
pub struct Moment {
    pub now: u64,
    pub wall: u64,
}

/// A rank in a record. -1 stands for no rank or any rank.
fn rank(rank: u32) -> i64 {
    if rank == NOBODY || rank == ANY_RANK { -1 } else { i64::from(rank) }
}

/// Names of a record's element type and reduce op. Empty if nothing is combined.
fn reduction(record: &Record) -> (&'static str, &'static str) {
    let dtype = if record.dtype == Dtype::Bytes { "" } else { record.dtype.name() };
    (dtype, if record.kind.reduces() { ReduceOp::name_of(record.op) } else { "" })
}

/// Number of operations that were fused, including this one. 0 while it is not known.
fn together(record: &Record) -> u64 {
    if record.state == State::Done { record.route.fused_with.count() } else { 0 }
}

/// Everything except the records: `Stats` of `_C.pyi`.
pub fn counts(
    stats: &Stats,
    (rank, size): (usize, usize),
    Moment { now, wall }: Moment,
    Names { path, .. }: Names,
) -> String {
    let (fused, staged) = (stats.fused(), stats.host_staged());
    json::text(|to| {
        to.number("rank", rank).number("size", size).number("now", now).number("wall", wall);
        to.number("since", stats.since()).number("issued", stats.history().issued());
        to.number("batches", fused.batches).number("batched_ops", fused.ops).number("largest_batch", fused.largest);
        to.number("host_staged_count", staged.count).number("host_staged_bytes", staged.bytes);
        to.list("waits", stats.waits(), |out, wait| json::numbers(out, [wait.count, wait.total, wait.longest]));
        to.list("cells", stats.cells(), |out, cell| write_cell(out, cell, path));
    })
}

/// The sums of each kind: `Totals` of `_C.pyi`.
pub fn totals(since: u64, totals: &[Total]) -> String {
    json::text(|to| {
        to.number("since", since);
        to.list("kinds", totals, |out, total| {
            json::object(out, |to| {
                to.string("kind", total.kind.name());
                to.number("count", total.count).number("bytes", total.bytes).number("waiting", total.waiting);
            });
        });
    })
}

fn write_cell(out: &mut String, cell: &Cell, path: fn(u8) -> &'static str) {
    json::object(out, |to| {
        to.string("kind", cell.kind.name());
        to.string("path", if cell.path == MIXED { "mixed" } else { path(cell.path) });
        to.number("size_class", if cell.class == MIXED { -1 } else { i32::from(cell.class) });
        to.number("count", cell.count).number("failed", cell.failed).number("tensors", cell.tensors);
        to.number("bytes", cell.bytes).number("whole", cell.whole).number("took", cell.took);
        to.number("waiting", cell.waiting).number("copying", cell.copying).number("reducing", cell.reducing);
        to.number("longest", cell.longest);
        to.list("times", cell.times.filled(), |out, (bound, count)| json::numbers(out, [bound, count]));
    });
}

/// The last `last` records, the oldest first, as a list of `Record` of `_C.pyi`. If the oldest pending record is older
/// than these, it precedes them.
pub fn last_records(history: &History, last: usize, names: Names) -> String {
    let skipped = history.iter().count().saturating_sub(last);
    let pending = history.iter().take(skipped).find(|record| record.state == State::Pending);
    let mut out = String::new();
    let records = pending.into_iter().chain(history.iter().skip(skipped));
    json::list(&mut out, records, |out, record| json::object(out, |to| write_record(to, record, names)));
    out
}

/// Writes one record. Times are in nanoseconds of `clock::stamp`.
fn write_record(to: &mut json::Object<'_>, record: &Record, names: Names) {
    let (dtype, op) = reduction(record);
    let (first, last) = record.route.fused_with.numbers(record.number);
    to.number("id", record.id).number("number", record.number);
    to.string("kind", record.kind.name()).string("dtype", dtype).string("op", op);
    to.string("path", (names.path)(record.path())).string("reason", (names.reason)(record.reason()));
    to.string("state", record.state.name());
    to.flag("counts", record.note.counts).number("tensors", record.note.tensors);
    to.number("element", record.note.element).number("site", record.note.site);
    to.flag("host_staged", record.note.host_staged);
    to.number("root", rank(record.root)).number("tag", record.tag).number("late", rank(record.late));
    to.number("together", together(record)).number("first", first).number("last", last);
    to.number("read", record.read).number("written", record.written);
    to.number("issued", record.issued).number("ended", record.ended);
    to.number("waiting", record.waiting()).number("copying", record.copying).number("reducing", record.reducing);
}

/// The file of a failed group, with its ranks, the fault and the records.
pub fn dump<'a>(
    group: &str,
    fault: &str,
    (rank, members): (usize, &[u32]),
    Moment { now, wall }: Moment,
    history: impl Iterator<Item = &'a Record>,
    names: Names,
) -> String {
    let mut out = json::text(|to| {
        to.string("group", group).number("rank", rank);
        to.numbers("members", members);
        to.string("fault", fault).number("now", now).number("wall", wall);
        to.list("records", history, |out, record| json::object(out, |to| write_record(to, record, names)));
    });
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_failed_group_is_json() {
        let names = Names { path: |_| "", reason: |_| "" };
        let text = dump("g", "why", (1, &[4, 7]), Moment { now: 2, wall: 3 }, std::iter::empty(), names);
        assert_eq!(
            text,
            "{\"group\":\"g\",\"rank\":1,\"members\":[4,7],\"fault\":\"why\",\"now\":2,\"wall\":3,\"records\":[]}\n"
        );
    }

    #[test]
    fn the_oldest_pending_record_stands_before_the_last() {
        let names = Names { path: |_| "", reason: |_| "" };
        let mut history = History::new(8);
        for number in 0..4 {
            let record =
                Record::external_op(crate::types::Kind::Barrier, 0, number, (0, 0), crate::types::CallNote::default());
            let state = if number == 1 { State::Pending } else { State::Done };
            history.push(Record { state, ..record });
        }
        let numbers = |last| {
            let text = last_records(&history, last, names);
            text.split("\"number\":").skip(1).map(|rest| rest[..1].parse().unwrap()).collect::<Vec<u8>>()
        };
        assert_eq!(numbers(2), [1, 2, 3]);
        assert_eq!(numbers(3), [1, 2, 3]);
        assert_eq!(numbers(usize::MAX), [0, 1, 2, 3]);
    }
}
