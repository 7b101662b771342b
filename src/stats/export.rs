//! The numbers and the records as JSON text, which Python reads.

use std::fmt::Write as _;

use super::ring::{Record, State};
use super::{MIXED, Stats};
use crate::op::NOBODY;
use crate::types::{ANY_RANK, Dtype, ReduceOp};

/// What the codes of a path and a reason are called; `select` knows.
#[derive(Clone, Copy)]
pub struct Names {
    pub path: fn(u8) -> &'static str,
    pub reason: fn(u8) -> &'static str,
}

/// A JSON list of what `each` writes.
fn list<T>(out: &mut String, items: impl Iterator<Item = T>, mut each: impl FnMut(&mut String, T)) {
    out.push('[');
    for (at, item) in items.enumerate() {
        if at > 0 {
            out.push(',');
        }
        each(out, item);
    }
    out.push(']');
}

/// Everything but the ring. `rank` and `size` of the group, `now` and `wall` (nanoseconds of `clock::stamp` and of
/// the epoch) at the same moment.
pub fn numbers(stats: &Stats, names: Names, rank: usize, size: usize, (now, wall): (u64, u64)) -> String {
    let fused = stats.fused();
    let mut out = format!(
        "{{\"rank\":{rank},\"size\":{size},\"now\":{now},\"wall\":{wall},\"since\":{},\"issued\":{},\"fused\":{{\"batches\":{},\
         \"ops\":{},\"largest\":{}}},\"host_staged\":[{},{}],\"waits\":",
        stats.since(),
        stats.ring().issued(),
        fused.batches,
        fused.ops,
        fused.largest,
        stats.host_staged().count,
        stats.host_staged().bytes
    );
    list(&mut out, stats.waits().iter(), |out, wait| {
        let _ = write!(out, "[{},{},{}]", wait.count, wait.total, wait.longest);
    });
    out.push_str(",\"cells\":");
    list(&mut out, stats.cells().iter(), |out, cell| {
        let path = if cell.path == MIXED { "mixed" } else { (names.path)(cell.path) };
        let class = if cell.class == MIXED { -1 } else { i32::from(cell.class) };
        let _ = write!(
            out,
            "{{\"kind\":\"{}\",\"path\":\"{path}\",\"class\":{class},\"count\":{},\"failed\":{},\"tensors\":{},\"bytes\":{},\
             \"whole\":{},\"took\":{},\"waiting\":{},\"copying\":{},\"reducing\":{},\"longest\":{},\"times\":",
            cell.kind,
            cell.count,
            cell.failed,
            cell.tensors,
            cell.bytes,
            cell.whole,
            cell.took,
            cell.waiting,
            cell.copying,
            cell.reducing,
            cell.longest
        );
        list(out, cell.times.filled(), |out, (bound, count)| {
            let _ = write!(out, "[{bound},{count}]");
        });
        out.push('}');
    });
    out.push('}');
    out
}

/// The ring, oldest first. Nanoseconds, `clock::stamp`.
pub fn records<'a>(records: impl Iterator<Item = &'a Record>, names: Names) -> String {
    let mut out = String::new();
    list(&mut out, records, |out, record| {
        // Minus one: nobody, anyone.
        let rank = |rank: u32| if rank == NOBODY || rank == ANY_RANK { -1 } else { i64::from(rank) };
        let dtype = if record.dtype == Dtype::Bytes { "" } else { record.dtype.name() };
        let op = if record.kind.reduces() { ReduceOp::name_of(record.op) } else { "" };
        let (first, last) = record.route.company.numbers(record.number);
        let _ = write!(
            out,
            "{{\"id\":{},\"number\":{},\"kind\":\"{}\",\"dtype\":\"{dtype}\",\"op\":\"{op}\",\"path\":\"{}\",\"reason\":\"{}\",\
             \"state\":\"{}\",\"counts\":{},\"tensors\":{},\"element\":{},\"site\":{},\"host_staged\":{},\"root\":{},\"tag\":{},\"late\":{},\
             \"together\":{},\"first\":{first},\"last\":{last},\"read\":{},\"written\":{},\"issued\":{},\"ended\":{},\"waiting\":{},\"copying\":{},\"reducing\":{}}}",
            record.id,
            record.number,
            record.kind,
            (names.path)(record.path()),
            (names.reason)(record.reason()),
            record.state.name(),
            record.note.counts,
            record.note.tensors,
            record.note.element,
            record.note.site,
            record.note.host_staged,
            rank(record.root),
            record.tag,
            rank(record.late),
            if record.state == State::Done { record.route.company.count() } else { 0 },
            record.read,
            record.written,
            record.issued,
            record.ended,
            record.waiting(),
            record.copying,
            record.reducing
        );
    });
    out
}

/// What a group that failed leaves behind: who it was, why, and its records.
pub fn dump(group: &str, fault: &str, rank: usize, members: &[u32], (now, wall): (u64, u64), records: &str) -> String {
    let (group, fault) = (quoted(group), quoted(fault));
    format!(
        "{{\"group\":{group},\"rank\":{rank},\"members\":{members:?},\"fault\":{fault},\"now\":{now},\"wall\":{wall},\
         \"records\":{records}}}\n"
    )
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_quoted_as_json_wants() {
        assert_eq!(quoted("a \"b\" \\ c\nd \u{e9}"), "\"a \\\"b\\\" \\\\ c\\u000ad \u{e9}\"");
        let text = dump("g", "why", 1, &[4, 7], (2, 3), "[]");
        assert_eq!(
            text,
            "{\"group\":\"g\",\"rank\":1,\"members\":[4, 7],\"fault\":\"why\",\"now\":2,\"wall\":3,\"records\":[]}\n"
        );
    }
}
