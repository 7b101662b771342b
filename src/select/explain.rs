//! Explains which algorithm an operation uses and why: the choice, what it overruled, and for every other algorithm its
//! predicted time and why it was not chosen. Pure; past operations and hypothetical ones are explained in the same way.

use std::fmt::Write as _;

use super::Reason;
use super::inter;
use super::inter::{Hosts, Menu};
use super::intra::{self, Decisive, decisive, out_of_cache, possible, start};
use super::rules::AlgorithmChoice;
use super::rules::size_text;
use super::start::Start;
use super::table::Line;
use super::{Choice, Class, GroupShape, OpDesc, Path, Policy};
use crate::algorithms::Algorithm;
use crate::types::{Dtype, Kind};

/// Chunk sizes that are listed as alternatives. A size is left out if it is larger than the stage.
pub const CHUNKS: [usize; 6] = [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alternative {
    pub way: String,
    /// `None` if the alternative is impossible, or if the model cannot predict it.
    pub predicted_ns: Option<u64>,
    pub why_not: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    pub desc: OpDesc,
    pub shape: GroupShape,
    pub choice: Choice,
    /// The record of a past operation. `None` for a hypothetical one.
    pub past: Option<Past>,
    /// Predicted time of the choice. 0 if the model cannot predict it.
    pub predicted_ns: u64,
    /// The model's time, scaled to measured times of such calls. None for a past call, or if too few such calls were
    /// measured.
    pub scaled: Option<Scaled>,
    /// Measured time of the choice. None if the table has no line for this size.
    pub measured_ns: Option<u64>,
    /// Which rule, measurement or default decided.
    pub decided: String,
    /// What the rules, tables or models of lower priority would have chosen, the highest priority first.
    pub overruled: Vec<String>,
    pub rejected: Vec<Alternative>,
    /// The source of the measured table, or why there is none.
    pub table: String,
}

/// A time by the model, scaled to calls that were made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scaled {
    pub ns: u64,
    pub by: CallsOf,
}

/// The groups that made the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallsOf {
    ThisGroup,
    /// Earlier groups of this kind on this machine (`stats::kept`).
    EarlierGroups,
}

impl CallsOf {
    pub fn text(self) -> &'static str {
        match self {
            CallsOf::ThisGroup => "this group",
            CallsOf::EarlierGroups => "earlier groups on this machine",
        }
    }
}

/// The record of an operation that was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Past {
    /// The operation's number in its group; a message's number in the ordered pair of its sender and its receiver.
    pub number: u64,
    /// The recorded choice. `None` if the operation has not started, or failed before it started.
    pub choice: Option<Choice>,
    /// The operations with which it was fused. `None` while this is not known.
    pub batch: Option<Batch>,
    /// Whether its tensors were on a device and were moved as copies in host memory.
    pub host_staged: bool,
    /// Nanoseconds from its issue to its end. 0 while it runs.
    pub took_ns: u64,
}

/// Operations that were fused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Number of operations, including this one.
    pub count: u64,
    /// The lowest number among the batch's operations. `last`: the highest.
    pub first: u64,
    pub last: u64,
    /// The bytes of a batch between hosts, if the algorithm was chosen for the whole batch. `None` if it was chosen for
    /// each operation alone.
    pub bytes: Option<u64>,
}

pub fn explain(desc: OpDesc, shape: &GroupShape, policy: &Policy) -> Explanation {
    let choice = intra::choose(desc, shape, policy);
    let mut explanation = Explanation {
        desc,
        shape: *shape,
        choice,
        past: None,
        predicted_ns: way_of(choice.path).map_or(0, |way| predicted(desc, way, shape, policy)),
        scaled: None,
        measured_ns: None,
        decided: format!("{}: {}", choice.reason.basis(), choice.reason.text()),
        overruled: Vec::new(),
        rejected: Vec::new(),
        table: policy.note.clone(),
    };
    if way_of(choice.path).is_some() {
        explanation.settle(policy);
        explanation.rejected = rejected(&explanation, policy);
    }
    explanation
}

/// Explains an operation of a group on several hosts, or (`batched`) a whole batch.
pub fn between(
    desc: OpDesc,
    batched: bool,
    shape: &GroupShape,
    hosts: &Hosts,
    menu: &Menu,
    policy: &Policy,
) -> Explanation {
    let found = inter::between_hosts(desc, batched, hosts, menu, policy);
    let ruled = matches!(found.reason, Reason::Override | Reason::Measured);
    let rule = if ruled { inter::said_by(desc, batched, hosts, policy) } else { None };
    let decided = match rule {
        Some(rule) => format!("{}: the rule \"{rule}\"", found.reason.basis()),
        None if found.reason.is_start_rule() => {
            let hierarchical = hosts.ranks > hosts.hosts;
            by_start_rule(Start { hierarchical, algorithm: found.algorithm, reason: found.reason }, policy)
        }
        None => format!("{}: {}", found.reason.basis(), found.reason.text()),
    };
    let by_topology = !hosts.strict && !ruled && policy.topology.is_some();
    let overruled = by_topology.then(|| {
        let (algorithm, reason, ns) =
            inter::without_rules(desc, batched, hosts, menu, &Policy { topology: None, ..policy.clone() });
        let predicted = if ns > 0 { format!(", predicted {} between the hosts", time(ns)) } else { String::new() };
        format!("{} ({}: {}){predicted}, by the topology", algorithm.name(), reason.basis(), reason.text())
    });
    let others = Algorithm::ALL.into_iter().filter(|other| *other != found.algorithm && other.serves(desc.kind));
    let rejected = others.map(|other| {
        let time_of = inter::predict(desc, other, hosts, menu);
        let against =
            time_of.map(|ns| format!("predicted {} between the hosts, against {}", time(ns), time(found.predicted_ns)));
        let why_not = match (hosts.strict, against) {
            (true, _) => Reason::Strict.text().to_string(),
            _ if desc.kind == Kind::AllToAll => "between hosts an all_to_all is exchanged directly".to_string(),
            _ if !inter::allowed(other, desc, batched, hosts) => {
                "in a batch the order of a sum must not depend on the position of an element".to_string()
            }
            _ if found.reason == Reason::OneOrder => Reason::OneOrder.text().to_string(),
            (false, Some(against)) if by_topology => {
                format!("{against}; with a topology the start rules decide, not the measured link")
            }
            (false, Some(against)) => against,
            (false, None) => found.reason.text().to_string(),
        };
        Alternative { way: other.name().to_string(), predicted_ns: time_of, why_not }
    });
    Explanation {
        desc,
        shape: GroupShape { hosts: hosts.hosts, ..*shape },
        choice: found.choice(),
        past: None,
        predicted_ns: found.predicted_ns,
        scaled: None,
        measured_ns: None,
        decided,
        overruled: overruled.into_iter().collect(),
        rejected: rejected.collect(),
        table: policy.note.clone(),
    }
}

/// The reason why a start rule decides, as text: the rule, and the topology or the missing measurement that makes it
/// apply.
pub fn by_start_rule(start: Start, policy: &Policy) -> String {
    let first = if start.hierarchical { "hosts of several ranks combine inside each host first; " } else { "" };
    let because = match policy.topology {
        Some(topology) => format!("the topology that was given says {topology}"),
        None if !policy.measure_link => {
            "the link was not measured, as the option measure_link or SAGELLM_MEASURE_LINK asks".to_string()
        }
        None => "the link was not measured".to_string(),
    };
    format!("{} {start}: {first}{}; {because}", start.reason.basis(), start.reason.text())
}

/// Explains an operation that backend `by` serves for the reason `why`.
pub fn delegated(desc: OpDesc, shape: &GroupShape, policy: &Policy, (by, why): (&str, &str)) -> Explanation {
    let refused =
        |way: AlgorithmChoice| Alternative { way: way.to_string(), predicted_ns: None, why_not: why.to_string() };
    Explanation {
        desc,
        shape: *shape,
        choice: Choice::DELEGATE,
        past: None,
        predicted_ns: 0,
        scaled: None,
        measured_ns: None,
        decided: format!("{} serves the group: {why}", by),
        overruled: Vec::new(),
        rejected: vec![refused(AlgorithmChoice::Slots), refused(AlgorithmChoice::Rounds { chunk: shape.stage_bytes })],
        table: policy.note.clone(),
    }
}

fn way_of(path: Path) -> Option<AlgorithmChoice> {
    match path {
        Path::Slots => Some(AlgorithmChoice::Slots),
        Path::Rounds { chunk } => Some(AlgorithmChoice::Rounds { chunk }),
        _ => None,
    }
}

fn predicted(desc: OpDesc, way: AlgorithmChoice, shape: &GroupShape, policy: &Policy) -> u64 {
    intra::predict(desc.kind, desc.bytes, way, shape, policy.cache_bytes)
}

impl Explanation {
    /// Records the source that decided, and the sources that it overruled.
    fn settle(&mut self, policy: &Policy) {
        let (desc, shape) = (self.desc, self.shape);
        let by_start = start(desc, &shape, policy.cache_bytes);
        let line = policy.table.as_ref().and_then(|table| table.find(desc.kind, desc.bytes));
        let line = line.filter(|line| possible(line.rule.way, desc, &shape).is_some());
        match decisive(desc, &shape, policy) {
            Decisive::Rule(rule, path) => {
                self.decided = format!("override: the rule \"{rule}\"");
                if rule.way != way_of(path).unwrap_or(AlgorithmChoice::Start) {
                    let _ =
                        write!(self.decided, ", its chunk cut to the stage of {}", size_text(shape.stage_bytes as u64));
                }
                self.overruled.extend(line.map(|line| format!("the table's {}", measured(line))));
                self.overruled.push(by_start_text(by_start));
            }
            Decisive::Line(line, _) => {
                self.decided = format!("measurement: {}", measured(line));
                self.measured_ns = Some(line.nanoseconds);
                if way_of(by_start.path) != Some(line.rule.way) {
                    self.overruled.push(format!(
                        "{}, measured {}",
                        by_start_text(by_start),
                        time(line.start_nanoseconds)
                    ));
                }
            }
            Decisive::Start => {
                // A rule may have overruled the table.
                self.overruled.extend(line.map(|line| format!("the table's {}, by a rule", measured(line))));
            }
        }
    }
}

/// All choices of a group inside one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The path of the measured table, or why there is none.
    pub note: String,
    pub rules: Vec<String>,
    pub rows: Vec<Row>,
}

/// A kind, and a range of sizes (both ends included) in which the choice is the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub kind: Kind,
    pub from: u64,
    pub to: u64,
    pub choice: Choice,
    pub measured_ns: Option<u64>,
}

impl Row {
    /// The range in the syntax of rules.
    pub fn sizes(&self) -> String {
        let to = if self.to == u64::MAX { String::new() } else { size_text(self.to) };
        format!("{}-{to}", size_text(self.from))
    }
}

pub fn table(shape: &GroupShape, policy: &Policy) -> Table {
    let rows = Kind::COLLECTIVES.into_iter().flat_map(|kind| {
        let found = ranges(kind, shape, policy).into_iter();
        found.map(move |(from, to, found)| {
            let (choice, measured_ns) = (found.choice, found.measured_ns);
            Row { kind, from, to, choice, measured_ns }
        })
    });
    let rules = policy.rules.0.iter().map(ToString::to_string).collect();
    Table { note: policy.note.clone(), rules, rows: rows.collect() }
}

/// Returns the ranges of sizes within which the choice stays the same, in order, starting with 0.
fn ranges(kind: Kind, shape: &GroupShape, policy: &Policy) -> Vec<(u64, u64, Explanation)> {
    let mut begins = vec![0];
    let ends = [shape.slot_bytes as u64, out_of_cache(policy.cache_bytes)];
    begins.extend(ends.map(|end| end.saturating_add(1)));
    let lines = policy.table.iter().flat_map(|table| &table.lines).map(|line| &line.rule);
    for rule in policy.rules.0.iter().chain(lines) {
        begins.extend([rule.from, rule.to.saturating_add(1)]);
    }
    begins.sort_unstable();
    begins.dedup();
    let mut found: Vec<(u64, u64, Explanation)> = Vec::new();
    for (at, from) in begins.iter().enumerate() {
        let to = begins.get(at + 1).map_or(u64::MAX, |next| next - 1);
        let here = explain(OpDesc { kind, bytes: *from, class: Class::of(kind, Dtype::F32) }.normal(), shape, policy);
        match found.last_mut() {
            Some((_, end, last)) if (last.choice, last.measured_ns) == (here.choice, here.measured_ns) => *end = to,
            _ => found.push((*from, to, here)),
        }
    }
    found
}

fn by_start_text(choice: Choice) -> String {
    format!("the default {} ({})", choice.path, choice.reason.text())
}

fn measured(line: &Line) -> String {
    format!(
        "line \"{}\", {} against {} of the defaults",
        line.rule,
        time(line.nanoseconds),
        time(line.start_nanoseconds)
    )
}

/// A time with a unit: "3.04 us", "1.2 ms".
pub fn time(nanoseconds: u64) -> String {
    let ns = nanoseconds as f64;
    match nanoseconds {
        0..1_000 => format!("{nanoseconds} ns"),
        1_000..1_000_000 => format!("{:.2} us", ns / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", ns / 1e6),
        _ => format!("{:.2} s", ns / 1e9),
    }
}

/// A predicted time as text. The model's constants come from another machine, so the time is rounded to one digit:
/// "about 3 us".
fn about(nanoseconds: u64) -> String {
    let digit = 10u64.pow(nanoseconds.checked_ilog10().unwrap_or(0));
    let rounded = (nanoseconds + digit / 2) / digit * digit;
    let (unit, name) = match rounded {
        0..1_000 => (1, "ns"),
        1_000..1_000_000 => (1_000, "us"),
        1_000_000..1_000_000_000 => (1_000_000, "ms"),
        _ => (1_000_000_000, "s"),
    };
    format!("about {} {name}", rounded / unit)
}

fn rejected(explanation: &Explanation, policy: &Policy) -> Vec<Alternative> {
    let Explanation { desc, shape, choice, predicted_ns, .. } = explanation;
    if desc.kind == Kind::Barrier {
        return Vec::new();
    }
    let rounds =
        CHUNKS.into_iter().filter(|chunk| *chunk <= shape.stage_bytes).map(|chunk| AlgorithmChoice::Rounds { chunk });
    let others = [AlgorithmChoice::Slots].into_iter().chain(rounds).filter(|way| way_of(choice.path) != Some(*way));
    others
        .map(|way| {
            if possible(way, *desc, shape).is_none() {
                return Alternative { way: way.to_string(), predicted_ns: None, why_not: impossible(*desc, shape) };
            }
            let time_of = predicted(*desc, way, shape, policy);
            let (own, choice_takes) = (about(time_of), about(*predicted_ns));
            let against = if own == choice_takes {
                format!("predicted {own}, as the choice")
            } else {
                format!("predicted {own}, the choice {choice_takes}")
            };
            let why_not = match explanation.measured_ns {
                Some(_) => format!("{against}; a measurement outweighs predictions"),
                None if desc.kind == Kind::AllToAll => {
                    "its rounds depend on sizes that no rank knows alone; the largest chunk needs the fewest"
                        .to_string()
                }
                None if choice.reason == Reason::Override => format!("{against}; the rule decides"),
                None if time_of >= *predicted_ns => against,
                None => format!("{against}; the defaults decide until `torch-sagellm tune` has measured it"),
            };
            Alternative { way: way.to_string(), predicted_ns: Some(time_of), why_not }
        })
        .collect()
}

fn impossible(desc: OpDesc, shape: &GroupShape) -> String {
    match desc.kind {
        Kind::AllToAll => "its table of sizes uses a slot, and so do the blocks where they fit".into(),
        _ => format!("{} do not fit: a slot holds {}", size_text(desc.bytes), size_text(shape.slot_bytes as u64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::rules::Rules;
    use crate::select::start::Topology;
    use crate::select::table;

    const SHAPE: GroupShape =
        GroupShape { ranks: 2, hosts: 1, cores: 2, threads: 1, slot_bytes: 4096, stage_bytes: 512 << 10 };

    fn desc(bytes: u64) -> OpDesc {
        OpDesc { kind: Kind::AllReduce, bytes, class: Class::Float }
    }

    #[test]
    fn a_start_value_is_explained_and_the_model_agrees_with_it() {
        let policy = Policy::default();
        let large = explain(desc(1 << 20), &SHAPE, &policy);
        assert_eq!(large.choice.path, Path::Rounds { chunk: 512 << 10 });
        assert!(large.decided.starts_with("default: it stays in the last-level cache"), "{}", large.decided);
        assert!(large.rejected.iter().any(|other| other.way == "slots" && other.why_not.contains("a slot holds 4KiB")));
        // These numbers of ranks were measured. For more ranks the model would choose rounds a little below 4 KiB.
        for crowd in [2, 4] {
            let shape = GroupShape { ranks: crowd, ..SHAPE };
            for power in 0..30 {
                let found = explain(desc(1 << power), &shape, &policy);
                for other in &found.rejected {
                    let time = other.predicted_ns.unwrap_or(u64::MAX);
                    assert!(time >= found.predicted_ns, "{power}: {} beats {}", other.way, found.choice.path);
                }
            }
        }
    }

    #[test]
    fn it_says_which_source_overruled_which() {
        let mut policy = Policy { table: Some(table::tests::example()), ..Policy::default() };
        let by_table = explain(desc(8192), &SHAPE, &policy);
        assert_eq!((by_table.choice.reason, by_table.measured_ns), (Reason::Measured, Some(4700)));
        assert!(by_table.overruled[0].contains("rounds(512KiB)") && by_table.overruled[0].contains("5.20 us"));
        policy.rules = Rules::parse("*:8KiB-=rounds(1GiB)").unwrap();
        let by_rule = explain(desc(8192), &SHAPE, &policy);
        assert!(by_rule.decided.contains("*:8KiB-=rounds(1GiB)") && by_rule.decided.contains("stage of 512KiB"));
        assert!(by_rule.overruled.len() == 2 && by_rule.overruled[0].contains("rounds(64KiB)"));
        policy.rules = Rules::parse("*:0-=start").unwrap();
        assert!(explain(desc(8192), &SHAPE, &policy).overruled[0].contains("rounds(64KiB)"));
    }

    #[test]
    fn the_table_covers_every_size_once_and_says_what_choose_says() {
        let policy = Policy {
            rules: Rules::parse("all_reduce:100-200=rounds(1KiB)").unwrap(),
            table: Some(table::tests::example()),
            ..Policy::default()
        };
        let table = table(&SHAPE, &policy);
        assert_eq!(table.rules, ["all_reduce:100-200=rounds(1KiB)"]);
        let has = |kind, sizes: &str, way: &str, reason: &str, measured| {
            let named = |row: &&Row| row.kind == kind && row.sizes() == sizes && row.measured_ns == measured;
            let found = table.rows.iter().find(named).map(|row| row.choice);
            let found = found.map(|choice| (choice.path.to_string(), choice.reason.name()));
            assert_eq!(found, Some((way.to_string(), reason)), "{kind} {sizes}: {table:?}");
        };
        has(Kind::AllReduce, "100-200", "rounds(1KiB)", "override", None);
        has(Kind::AllReduce, "201-4KiB", "slots", "measured", Some(3040));
        has(Kind::Broadcast, "0-", "rounds(16KiB)", "measured", Some(9000));
        has(Kind::Barrier, "0-", "slots", "nothing_to_move", None);
        for (from, to, found) in ranges(Kind::AllReduce, &SHAPE, &policy) {
            for bytes in [from, to, from + (to - from) / 2] {
                assert_eq!(crate::select::choose(desc(bytes), &SHAPE, &policy), found.choice, "{bytes}");
            }
        }
    }

    #[test]
    fn a_start_rule_is_named_with_the_topology_that_said_so() {
        let link = inter::LinkFacts { alpha_ns: 30_000, beta_ps_per_byte: 100, message_ns: 0 };
        let hosts = Hosts { hosts: 2, ranks: 4, least_ranks: 2, link, strict: false };
        let (menu, topology) = (Menu::new(2), Some(Topology { hosts: 2, full_nvlink: false }));
        let policy = Policy { topology, ..Policy::default() };
        let large = between(desc(4 << 20), false, &SHAPE, &hosts, &menu, &policy);
        assert_eq!(
            large.decided,
            "start rule hierarchical (ring between the hosts): hosts of several ranks combine inside each host first; from \
             1,000,000 bytes on the bytes on each link count most: a ring, or from one root a double tree, spreads them \
             evenly; the topology that was given says hosts=2,full_nvlink=false"
        );
        assert!(large.predicted_ns > 0);
        let [overruled] = &large.overruled[..] else { panic!("{:?}", large.overruled) };
        assert!(overruled.contains("cost model") && overruled.ends_with("by the topology"), "{overruled}");
        assert!(large.rejected.iter().any(|other| other.why_not.contains("not the measured link")), "{large:?}");
        let small = between(desc(8), false, &SHAPE, &hosts, &menu, &policy);
        assert!(small.decided.starts_with("start rule hierarchical (recursive_doubling between"), "{}", small.decided);
        assert!(small.overruled[0].starts_with("direct (only choice: small sums of floats"), "{:?}", small.overruled);
        // If the link was not measured, the explanation says so.
        let unmeasured = Hosts { link: inter::LinkFacts::default(), ranks: 2, least_ranks: 1, ..hosts };
        let found = between(desc(4 << 20), false, &SHAPE, &unmeasured, &menu, &Policy::default());
        assert!(found.decided.starts_with("start rule ring: ") && found.decided.ends_with("the link was not measured"));
        assert_eq!((found.predicted_ns, found.overruled.len()), (0, 0));
        let asked = Policy { measure_link: false, ..Policy::default() };
        let found = between(desc(8), false, &SHAPE, &unmeasured, &menu, &asked);
        assert!(found.decided.starts_with("start rule recursive_doubling: "), "{}", found.decided);
        assert!(
            found.decided.ends_with("as the option measure_link or SAGELLM_MEASURE_LINK asks"),
            "{}",
            found.decided
        );
        // A rule has priority over the topology, and strict mode over both.
        let ruled = Policy { rules: Rules::parse("*:0-=hierarchical").unwrap(), ..policy.clone() };
        let found = between(desc(8), false, &SHAPE, &hosts, &menu, &ruled);
        assert_eq!(found.decided, "override: the rule \"*:0-=hierarchical\"");
        assert!(found.overruled.is_empty());
        let strict = Hosts { strict: true, ..hosts };
        let found = between(desc(8), false, &SHAPE, &strict, &menu, &policy);
        assert!(found.decided.contains("strict") && found.overruled.is_empty());
    }

    #[test]
    fn times_are_written_in_the_unit_that_suits_them() {
        let texts: Vec<String> = [7, 3040, 5_210_000, 2_000_000_000].into_iter().map(time).collect();
        assert_eq!(texts, ["7 ns", "3.04 us", "5.21 ms", "2.00 s"]);
        let texts = [7, 996, 3044, 66_640, 487_512, 5_210_000, 999_600_000, 2_000_000_000].map(about);
        assert_eq!(
            texts,
            [
                "about 7 ns",
                "about 1 us",
                "about 3 us",
                "about 70 us",
                "about 500 us",
                "about 5 ms",
                "about 1 s",
                "about 2 s"
            ]
        );
    }
}
