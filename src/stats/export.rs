//! The JSON file of a failed group; the conversions that its records share with those over the bridge.

use std::fmt::Write as _;

use super::history::{Record, State};
use crate::op::NOBODY;
use crate::types::{ANY_RANK, Dtype, ReduceOp};

/// The names of path and reason codes, which `select` has.
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

/// One moment on our clock (`clock::stamp`) and since the epoch, in nanoseconds.
#[derive(Clone, Copy)]
pub struct Moment {
    pub now: u64,
    pub wall: u64,
}

/// A rank in a record; -1 is none, or any.
pub fn rank(rank: u32) -> i64 {
    if rank == NOBODY || rank == ANY_RANK { -1 } else { i64::from(rank) }
}

/// Names of the element type and the reduce op of a record, empty where nothing is combined.
pub fn reduction(record: &Record) -> (&'static str, &'static str) {
    let dtype = if record.dtype == Dtype::Bytes { "" } else { record.dtype.name() };
    (dtype, if record.kind.reduces() { ReduceOp::name_of(record.op) } else { "" })
}

/// Number of operations that it was fused with, itself included; 0 while that is not known.
pub fn together(record: &Record) -> u64 {
    if record.state == State::Done { record.route.fused_with.count() } else { 0 }
}

/// The records, oldest first. Nanoseconds, `clock::stamp`. The names are those of `ffi::Record`.
fn records<'a>(records: impl Iterator<Item = &'a Record>, names: Names) -> String {
    let mut out = String::new();
    list(&mut out, records, |out, record| {
        let (dtype, op) = reduction(record);
        let (first, last) = record.route.fused_with.numbers(record.number);
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
            together(record),
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

/// The file of a failed group: its ranks, the fault, and its records.
pub fn dump<'a>(
    group: &str,
    fault: &str,
    (rank, members): (usize, &[u32]),
    Moment { now, wall }: Moment,
    history: impl Iterator<Item = &'a Record>,
    names: Names,
) -> String {
    let (group, fault, records) = (quoted(group), quoted(fault), records(history, names));
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
        let names = Names { path: |_| "", reason: |_| "" };
        let text = dump("g", "why", (1, &[4, 7]), Moment { now: 2, wall: 3 }, std::iter::empty(), names);
        assert_eq!(
            text,
            "{\"group\":\"g\",\"rank\":1,\"members\":[4, 7],\"fault\":\"why\",\"now\":2,\"wall\":3,\"records\":[]}\n"
        );
    }
}
