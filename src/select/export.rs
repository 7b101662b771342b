//! Explanations and tables as JSON, for Python: `Explanation` and `ChoiceTable` of `_C.pyi`. Unknown nanoseconds are 0.

use super::explain::{Alternative, Batch, Explanation, Past, Row, Table};
use super::start::{Start, Topology};
use crate::json;
use crate::types::Kind;

pub fn explanation(found: &Explanation) -> String {
    json::text(|to| {
        to.string("kind", found.desc.kind.name()).number("bytes", found.desc.bytes);
        to.number("ranks", found.shape.ranks).number("hosts", found.shape.hosts);
        to.number("slot_bytes", found.shape.slot_bytes);
        to.string("choice", &found.choice.path.to_string()).string("reason", found.choice.reason.name());
        to.number("code", found.choice.code()).string("decided", &found.decided);
        to.number("predicted_ns", found.predicted_ns).number("scaled_ns", found.scaled.map_or(0, |to| to.ns));
        to.string("scaled_by", found.scaled.map_or("", |to| to.by.text()));
        to.number("measured_ns", found.measured_ns.unwrap_or(0));
        to.string("table", &found.table);
        to.list("overruled", &found.overruled, |out, each| json::string(out, each));
        to.list("rejected", &found.rejected, |out, each| json::object(out, |to| alternative(to, each)));
        match &found.past {
            Some(each) => to.object("past", |to| past(to, each)),
            None => to.null("past"),
        };
    })
}

fn alternative(to: &mut json::Object<'_>, other: &Alternative) {
    to.string("way", &other.way).number("predicted_ns", other.predicted_ns.unwrap_or(0));
    to.string("why_not", &other.why_not);
}

fn past(to: &mut json::Object<'_>, past: &Past) {
    to.number("number", past.number).flag("host_staged", past.host_staged).number("took_ns", past.took_ns);
    to.number("recorded", past.choice.map_or(0, |choice| choice.code()));
    match past.batch {
        Some(Batch { count, first, last, bytes }) => to.object("batch", |to| {
            to.number("operations", count).number("first", first).number("last", last);
            to.number("bytes", bytes.map_or(-1, |bytes| bytes as i64));
        }),
        None => to.null("batch"),
    };
}

/// The answer of the start rules for `ranks` devices: `StartRule` of `_C.pyi`.
pub fn start_rule(bytes: u64, ranks: usize, start: Start, topology: &Topology, decided: &str) -> String {
    json::text(|to| {
        to.string("kind", Kind::AllReduce.name()).number("bytes", bytes).number("ranks", ranks);
        to.number("hosts", topology.hosts).string("choice", start.name()).string("reason", start.reason.name());
        to.string("decided", decided);
    })
}

pub fn table(found: &Table) -> String {
    let row = |to: &mut json::Object<'_>, row: &Row| {
        to.string("kind", row.kind.name()).string("sizes", &row.sizes());
        to.string("way", &row.choice.path.to_string()).string("reason", row.choice.reason.name());
        to.number("measured_ns", row.measured_ns.unwrap_or(0));
    };
    json::text(|to| {
        to.string("note", &found.note).list("rules", &found.rules, |out, rule| json::string(out, rule));
        to.list("rows", &found.rows, |out, each| json::object(out, |to| row(to, each)));
    })
}
