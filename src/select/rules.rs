//! Rules that assign algorithms to operations by size. The option `algorithm`, the environment variable
//! `SAGELLM_ALGORITHM` and the lines of a decision table have the same syntax.
//!
//! ```text
//! rules  = rule { ";" rule }              the first rule that fits decides
//! rule   = op ":" range "=" algorithm
//! op     = all_reduce | broadcast | ... | *
//! range  = from "-" [ to ]                both ends belong to it; without `to` it has no upper end
//! algorithm = start                       the default, where no rule applies and nothing is measured
//!      | slots | rounds "(" chunk ")"   inside one host
//!      | ( schedule | tree | hierarchical ) [ "(" [ "leaders=" count ] [ "," ] [ "segment=" size ] ")" ] between hosts
//! sizes  = whole numbers, or with a unit: 4096, 64KiB, 1MiB
//! ```

use std::fmt;

use super::start::{HIERARCHICAL, TREE};
use crate::algorithms::Algorithm;
use crate::types::Kind;

pub const SYNTAX: &str =
    "rules are OP:FROM-TO=ALGORITHM, separated by ';', for example \"all_reduce:0-4KiB=slots;*:1MiB-=rounds(128KiB)\"";
/// The longest list of rules in bytes. The limit makes rank 0's list fit into its rendezvous message.
pub const MAX_BYTES: usize = 4096;
/// Smallest chunk. Chunks are multiples of a cache line.
pub const LEAST_CHUNK: usize = 1024;
const MOST_CHUNK: usize = 1 << 30;

/// The algorithm that a rule assigns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlgorithmChoice {
    /// The default algorithm.
    Start,
    Slots,
    Rounds {
        chunk: usize,
    },
    /// Between hosts. If a parameter is not set, it keeps its default.
    Hosts {
        algorithm: Algorithm,
        leaders: Option<u8>,
        segment: Option<usize>,
    },
    /// Between hosts: the schedule that the start rules choose for the size (`start`).
    Hierarchical {
        leaders: Option<u8>,
        segment: Option<usize>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// `None` stands for every kind of collective.
    pub kind: Option<Kind>,
    /// First and last size in bytes to which the rule applies.
    pub from: u64,
    pub to: u64,
    pub way: AlgorithmChoice,
}

/// Rules, in the user's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules(pub Vec<Rule>);

impl Rules {
    /// Parses a list of rules. The empty text is the empty list. The error quotes the wrong rule and says what was
    /// expected.
    pub fn parse(text: &str) -> Result<Rules, String> {
        if text.len() > MAX_BYTES {
            return Err(format!("{} bytes of rules are more than {MAX_BYTES}", text.len()));
        }
        let rules = text.split(';').map(str::trim).filter(|rule| !rule.is_empty());
        rules.map(|rule| Rule::parse(rule).map_err(|what| format!("rule {rule:?}: {what}; {SYNTAX}"))).collect()
    }

    /// The first rule that fits an operation of this kind and size.
    pub fn find(&self, kind: Kind, bytes: u64) -> Option<&Rule> {
        self.0.iter().find(|rule| rule.fits(kind, bytes))
    }

    /// Refuses rules that no group could follow. A slot holds `slot_bytes` bytes.
    pub fn check(&self, slot_bytes: usize) -> Result<(), String> {
        for rule in &self.0 {
            let wrong = |what: String| Err(format!("rule \"{rule}\": {what}"));
            if rule.way == AlgorithmChoice::Slots && (rule.to > slot_bytes as u64) {
                let most = size_text(slot_bytes as u64);
                return wrong(format!("a slot holds {most}, so the range of slots ends at {most} or below"));
            }
        }
        Ok(())
    }
}

impl FromIterator<Rule> for Rules {
    fn from_iter<T: IntoIterator<Item = Rule>>(rules: T) -> Rules {
        Rules(rules.into_iter().collect())
    }
}

impl Rule {
    pub fn fits(&self, kind: Kind, bytes: u64) -> bool {
        self.kind.is_none_or(|own| own == kind) && (self.from..=self.to).contains(&bytes)
    }

    pub fn parse(text: &str) -> Result<Rule, String> {
        let (op, rest) = text.split_once(':').ok_or("there is no ':' after the operation")?;
        let (range, way) = rest.split_once('=').ok_or("there is no '=' before the algorithm")?;
        let kind = parse_op(op.trim())?;
        let (from, to) = parse_range(range.trim())?;
        let way = AlgorithmChoice::parse(way.trim())?;
        match kind {
            Some(Kind::AllToAll) if way == AlgorithmChoice::Slots => {
                Err("all_to_all always puts its table of sizes into a slot, and its blocks where they fit".into())
            }
            Some(Kind::AllToAll) if (from, to) != (0, u64::MAX) => {
                Err("no rank knows all the sizes of an all_to_all, so its range must be 0-".into())
            }
            Some(Kind::AllToAll) if matches!(way, AlgorithmChoice::Hosts { algorithm, .. } if algorithm != Algorithm::Direct) => {
                Err("between hosts an all_to_all is always exchanged directly".into())
            }
            Some(kind) if matches!(way, AlgorithmChoice::Hosts { algorithm, .. } if !algorithm.serves(kind)) => {
                Err(format!("there is no such schedule for {kind}"))
            }
            Some(Kind::Barrier) if matches!(way, AlgorithmChoice::Slots | AlgorithmChoice::Rounds { .. }) => {
                Err("a barrier moves no data; inside a host there is nothing to choose".into())
            }
            _ => Ok(Rule { kind, from, to, way }),
        }
    }
}

fn parse_op(name: &str) -> Result<Option<Kind>, String> {
    if name == "*" {
        return Ok(None);
    }
    let kinds = || (1..=255).map_while(Kind::from_u8).filter(|kind| !kind.is_p2p());
    kinds().find(|kind| kind.name() == name).map(Some).ok_or_else(|| {
        let known: Vec<&str> = kinds().map(Kind::name).collect();
        format!("{name:?} is no operation with a choice; expected * or one of {}", known.join(", "))
    })
}

fn parse_range(text: &str) -> Result<(u64, u64), String> {
    let (from, to) = text.split_once('-').ok_or_else(|| format!("{text:?} is no range; expected FROM-TO or FROM-"))?;
    let read = |text: &str| {
        parse_size(text)
            .ok_or_else(|| format!("{text:?} is no size; expected a whole number, or one of B, KiB, MiB, GiB"))
    };
    let from = read(from)?;
    let to = if to.trim().is_empty() { u64::MAX } else { read(to)? };
    if from > to {
        return Err(format!("the range {text:?} ends before it begins"));
    }
    Ok((from, to))
}

impl AlgorithmChoice {
    pub fn parse(text: &str) -> Result<AlgorithmChoice, String> {
        let (name, argument) = match text.split_once('(') {
            Some((name, rest)) => {
                (name.trim(), Some(rest.strip_suffix(')').ok_or_else(|| format!("{text:?} lacks its ')'"))?.trim()))
            }
            None => (text, None),
        };
        match (name, argument) {
            ("start", None) => Ok(AlgorithmChoice::Start),
            ("slots", None) => Ok(AlgorithmChoice::Slots),
            ("rounds", Some(chunk)) => {
                let bytes = parse_size(chunk).and_then(|bytes| usize::try_from(bytes).ok());
                match bytes {
                    Some(chunk) if (LEAST_CHUNK..=MOST_CHUNK).contains(&chunk) && chunk.is_multiple_of(64) => {
                        Ok(AlgorithmChoice::Rounds { chunk })
                    }
                    _ => Err(format!("the chunk {chunk:?} is not a multiple of 64 bytes from 1KiB to 1GiB")),
                }
            }
            ("rounds", None) => Err("rounds need their chunk, as in rounds(128KiB)".into()),
            (HIERARCHICAL, _) => {
                let (leaders, segment) = parse_between(argument.unwrap_or(""))?;
                Ok(AlgorithmChoice::Hierarchical { leaders, segment })
            }
            _ => match schedule_named(name) {
                Some(algorithm) => {
                    let (leaders, segment) = parse_between(argument.unwrap_or(""))?;
                    Ok(AlgorithmChoice::Hosts { algorithm, leaders, segment })
                }
                None => Err(format!(
                    "{text:?} is no algorithm; expected start, slots, rounds(CHUNK) or one of {}",
                    algorithms()
                )),
            },
        }
    }
}

fn algorithms() -> String {
    format!("{}, {TREE}, {HIERARCHICAL}", Algorithm::ALL.map(Algorithm::name).join(", "))
}

/// `tree` is another name of the binomial tree.
fn schedule_named(name: &str) -> Option<Algorithm> {
    if name == TREE { Some(Algorithm::Binomial) } else { Algorithm::from_name(name) }
}

/// Parses the parameters of a schedule: `leaders=2,segment=1MiB`.
fn parse_between(text: &str) -> Result<(Option<u8>, Option<usize>), String> {
    let (mut leaders, mut segment) = (None, None);
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let wrong = || format!("{part:?} is not leaders=COUNT (1 to 255) or segment=SIZE (1KiB to 1GiB)");
        match part.split_once('=').map(|(name, value)| (name.trim(), value.trim())) {
            Some(("leaders", count)) => {
                leaders = Some(count.parse().ok().filter(|count: &u8| *count > 0).ok_or_else(wrong)?);
            }
            Some(("segment", bytes)) => {
                let bytes = parse_size(bytes).and_then(|bytes| usize::try_from(bytes).ok());
                segment = Some(bytes.filter(|bytes| (LEAST_CHUNK..=MOST_CHUNK).contains(bytes)).ok_or_else(wrong)?);
            }
            _ => return Err(wrong()),
        }
    }
    Ok((leaders, segment))
}

impl fmt::Display for AlgorithmChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = |name: &str, leaders: Option<u8>, segment: Option<usize>| {
            let leaders = leaders.map(|count| format!("leaders={count}"));
            let segment = segment.map(|bytes| format!("segment={}", size_text(bytes as u64)));
            let parts: Vec<String> = leaders.into_iter().chain(segment).collect();
            f.write_str(name)?;
            if parts.is_empty() { Ok(()) } else { write!(f, "({})", parts.join(",")) }
        };
        match *self {
            AlgorithmChoice::Start => f.write_str("start"),
            AlgorithmChoice::Slots => f.write_str("slots"),
            AlgorithmChoice::Rounds { chunk } => write!(f, "rounds({})", size_text(chunk as u64)),
            AlgorithmChoice::Hosts { algorithm, leaders, segment } => between(algorithm.name(), leaders, segment),
            AlgorithmChoice::Hierarchical { leaders, segment } => between(HIERARCHICAL, leaders, segment),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}-", self.kind.map_or("*", Kind::name), size_text(self.from))?;
        if self.to != u64::MAX {
            f.write_str(&size_text(self.to))?;
        }
        write!(f, "={}", self.way)
    }
}

impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, rule) in self.0.iter().enumerate() {
            write!(f, "{}{rule}", if at == 0 { "" } else { ";" })?;
        }
        Ok(())
    }
}

const UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Parses a size in bytes: a whole number with an optional unit B, KiB, MiB or GiB. `None` if the text is anything
/// else.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    let unit = match unit.trim() {
        "" => 1,
        unit => UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?.1,
    };
    number.checked_mul(unit)
}

/// The shortest exact text of a size. `parse_size` is its inverse.
pub fn size_text(bytes: u64) -> String {
    match UNITS.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit)) {
        Some((name, unit)) if *unit > 1 => format!("{}{name}", bytes / unit),
        _ => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_and_written_back() {
        let text = "all_reduce:0-4KiB=slots; *:1MiB-=rounds(128KiB) ;all_to_all:0-=rounds(64KiB);;broadcast:8-16=start;\
                    *:0-=ring();barrier:0-=dissemination; all_reduce:1MiB-=double_tree( segment=1MiB, leaders=2);\
                    *:0-=hierarchical;*:0-=hierarchical(leaders=2);all_reduce:0-8=tree;*:0-=tree(leaders=1)";
        let rules = Rules::parse(text).unwrap();
        assert_eq!(
            rules.to_string(),
            "all_reduce:0-4KiB=slots;*:1MiB-=rounds(128KiB);all_to_all:0-=rounds(64KiB);broadcast:8-16=start;\
             *:0-=ring;barrier:0-=dissemination;all_reduce:1MiB-=double_tree(leaders=2,segment=1MiB);\
             *:0-=hierarchical;*:0-=hierarchical(leaders=2);all_reduce:0-8=binomial_tree;*:0-=binomial_tree(leaders=1)"
        );
        assert_eq!(Rules::parse(&rules.to_string()).unwrap(), rules);
        assert_eq!(Rules::parse(" ; ").unwrap(), Rules::default());
    }

    #[test]
    fn the_first_rule_that_fits_decides_and_both_ends_belong_to_a_range() {
        let rules = Rules::parse("all_reduce:4KiB-8KiB=rounds(1KiB);*:8KiB-=rounds(2KiB)").unwrap();
        let chunk = |kind, bytes| rules.find(kind, bytes).map(|rule| rule.way.to_string());
        assert_eq!(chunk(Kind::AllReduce, 4095), None);
        assert_eq!(chunk(Kind::AllReduce, 4096).unwrap(), "rounds(1KiB)");
        assert_eq!(chunk(Kind::AllReduce, 8192).unwrap(), "rounds(1KiB)");
        assert_eq!(chunk(Kind::Broadcast, 8192).unwrap(), "rounds(2KiB)");
        assert_eq!(chunk(Kind::AllReduce, 8193).unwrap(), "rounds(2KiB)");
    }

    #[test]
    fn errors_quote_the_rule_and_the_syntax() {
        for (text, expected) in [
            ("all_reduce", "there is no ':'"),
            ("all_reduce:0-", "there is no '='"),
            ("allreduce:0-=slots", "\"allreduce\" is no operation"),
            ("send:0-=slots", "\"send\" is no operation"),
            ("all_reduce:0=slots", "\"0\" is no range"),
            ("all_reduce:1KB-=slots", "\"1KB\" is no size"),
            ("all_reduce:8-4=slots", "ends before it begins"),
            ("all_reduce:0-=fast", "\"fast\" is no algorithm"),
            ("all_reduce:0-=trees", "or one of ring, torus, binomial_tree, double_tree, recursive_doubling,"),
            ("all_reduce:0-=trees", "dissemination, tree, hierarchical"),
            ("all_gather:0-=tree", "no such schedule for all_gather"),
            ("all_to_all:0-=bruck", "always exchanged directly"),
            ("all_reduce:0-=hierarchical(ring)", "\"ring\" is not leaders=COUNT"),
            ("all_reduce:0-=rounds", "rounds need their chunk"),
            ("all_reduce:0-=rounds(100)", "multiple of 64"),
            ("all_reduce:0-=rounds(64KiB", "lacks its ')'"),
            ("all_reduce:0-=ring(leaders=0)", "\"leaders=0\" is not leaders=COUNT"),
            ("all_reduce:0-=ring(segments=2)", "\"segments=2\" is not"),
            ("all_reduce:0-=dissemination", "no such schedule for all_reduce"),
            ("all_to_all:0-=slots", "table of sizes"),
            ("all_to_all:0-4KiB=rounds(64KiB)", "must be 0-"),
            ("barrier:0-=slots", "nothing to choose"),
        ] {
            let error = Rules::parse(&format!("*:0-=start;{text}")).unwrap_err();
            assert!(error.contains(expected) && error.contains(&format!("{text:?}")), "{error}");
            assert!(error.contains("OP:FROM-TO=ALGORITHM"), "{error}");
        }
        assert!(Rules::parse(&"*:0-=start;".repeat(1000)).unwrap_err().contains("more than 4096"));
        let error = Rules::parse("all_reduce:0-64KiB=slots").unwrap().check(4096).unwrap_err();
        assert!(error.contains("all_reduce:0-64KiB=slots") && error.contains("4KiB"), "{error}");
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [("0", 0), ("17", 17), ("8B", 8), ("64KiB", 65536), ("1 MiB", 1 << 20), ("2gib", 2 << 30)]
        {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for wrong in ["", "KiB", "-1", "1.5KiB", "1KB", "1 2", "99999999999999999999", "99999999999GiB"] {
            assert_eq!(parse_size(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        for bytes in [0, 1, 1023, 1024, 1025, 4096, 65536, 1 << 20, (1 << 20) + 1, 3 << 30, u64::MAX] {
            assert_eq!(parse_size(&size_text(bytes)), Some(bytes));
        }
        assert_eq!(size_text(65536), "64KiB");
    }
}
