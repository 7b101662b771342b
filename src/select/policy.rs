//! Rank 0's decisions for its group before the first operation: the user's rules, a measured table, the user's
//! topology, whether the link is measured, whether results are compared, and the size of the cache. The rendezvous
//! sends them to the other ranks. The chain of signatures (`area::chain`) starts with the policy's hash, so if two
//! ranks have different policies, their first operation fails.

use super::rules;
use super::rules::Rules;
use super::start::Topology;
use super::table;
use super::table::{Found, Table};
use crate::cache_file;
use crate::config::Verify;
use crate::error::{Error, Result as Outcome};
use crate::host::first_time;
use crate::os::topology;

const HEAD: &str = "sagellm policy 4";
/// Longest policy that is sent, in bytes.
pub const MAX_BYTES: usize = rules::MAX_BYTES + table::MAX_BYTES + 2048;
const MOST_NOTE: usize = 1024;

/// The variable that contains rules for all groups of the process. They apply after the rules of the group's option.
pub const RULES_VARIABLE: &str = "SAGELLM_ALGORITHM";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub rules: Rules,
    pub table: Option<Table>,
    /// The user's description of the machines. If it is set and no rule and no table line decides, the start rules
    /// decide.
    pub topology: Option<Topology>,
    /// Whether the link between hosts is measured. If not, the start rules decide, as they do with a `topology`.
    pub measure_link: bool,
    /// How much of each result the ranks compare.
    pub verify: Verify,
    /// The path of the table, or why there is none. Only for display.
    pub note: String,
    /// Size of the last-level cache that the ranks of a host share.
    pub cache_bytes: u64,
}

impl Default for Policy {
    /// The defaults alone.
    fn default() -> Policy {
        Policy {
            rules: Rules::default(),
            table: None,
            topology: None,
            measure_link: true,
            verify: Verify::default(),
            note: "no table was searched for".into(),
            cache_bytes: super::DEFAULT_CACHE_BYTES,
        }
    }
}

impl Policy {
    pub fn text(&self) -> String {
        let note: String = self.note.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let cut = note.char_indices().map(|(at, _)| at).find(|at| *at >= MOST_NOTE).unwrap_or(note.len());
        let table = self.table.as_ref().map(Table::text).unwrap_or_default();
        let topology = self.topology.map(|topology| topology.to_string()).unwrap_or_default();
        format!(
            "{HEAD}\ncache {}\nrules {}\ntopology {topology}\nmeasure link {}\nverify {}\nnote {}\n{table}",
            self.cache_bytes,
            self.rules,
            self.measure_link,
            self.verify,
            &note[..cut]
        )
    }

    /// Parses and fully checks the text that rank 0 sent.
    pub fn parse(text: &str) -> Result<Policy, String> {
        if text.len() > MAX_BYTES {
            return Err(format!("rank 0's policy has {} bytes, more than {MAX_BYTES}", text.len()));
        }
        let mut rest = text;
        let mut next = |name: &str| {
            let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
            rest = after;
            line.strip_prefix(name).ok_or_else(|| format!("rank 0's policy has {line:?} where '{name}' was expected"))
        };
        if !next(HEAD)?.is_empty() {
            return Err("rank 0's policy is of another format".into());
        }
        let cache = next("cache ")?;
        let cache_bytes = cache.parse().map_err(|_| format!("rank 0's policy has a cache of {cache:?} bytes"))?;
        let rules = Rules::parse(next("rules ")?)?;
        let topology = Topology::parse(next("topology ")?)
            .map_err(|what| format!("rank 0's policy has a wrong topology: {what}"))?;
        let measure = next("measure link ")?;
        let measure_link =
            measure.parse().map_err(|_| format!("rank 0's policy says {measure:?} of measuring the link"))?;
        let verify = next("verify ")?;
        let verify =
            Verify::parse(verify).ok_or_else(|| format!("rank 0's policy says {verify:?} of comparing results"))?;
        let note = next("note ")?.to_string();
        let table = if rest.is_empty() { None } else { Some(Table::parse(rest.as_bytes())?) };
        Ok(Policy { rules, table, topology, measure_link, verify, note, cache_bytes })
    }

    /// Start value of the chain of signatures.
    pub fn hash(&self) -> u64 {
        cache_file::hash(self.text().as_bytes())
    }
}

/// Makes this rank's own policy: the user's rules (option `algorithm`, then the environment), topology (option
/// `topology`), whether the link is measured, and on rank 0 (`leads`) the table and the cache size of this machine. The
/// other ranks' policies are only compared with rank 0's, so these ranks read no file.
pub fn decide(
    (algorithm, topology, measure_link): (&str, &str, bool),
    ranks: usize,
    slot_bytes: usize,
    leads: bool,
) -> Outcome<Policy> {
    let environment = std::env::var(RULES_VARIABLE).unwrap_or_default();
    let read = |name: &str, text: &str| {
        Rules::parse(text)
            .and_then(|rules| rules.check(slot_bytes).map(|()| rules))
            .map_err(|what| Error::invalid(format!("sagellm: {name}: {what}")))
    };
    let mut rules = read("the option algorithm", algorithm)?;
    rules.0.extend(read(RULES_VARIABLE, &environment)?.0);
    if rules.to_string().len() > rules::MAX_BYTES {
        return Err(Error::invalid(format!(
            "sagellm: the rules of the option algorithm and of {RULES_VARIABLE} together are more than {} bytes",
            rules::MAX_BYTES
        )));
    }
    let topology = Topology::parse(topology)
        .map_err(|what| Error::invalid(format!("sagellm: the option topology is {topology:?}: {what}")))?;
    let mut policy = Policy { rules, topology, measure_link, ..Policy::default() };
    if !leads || ranks < 2 {
        return Ok(policy);
    }
    policy.cache_bytes = topology::last_level_cache().unwrap_or(super::DEFAULT_CACHE_BYTES);
    (policy.table, policy.note) = match cache_file::directory() {
        None => (None, format!("there is none: neither {} nor HOME names a directory", cache_file::VARIABLE)),
        Some(directory) => match table::load(&directory, &table::key(ranks), slot_bytes) {
            Found::Table(table, path) => (Some(table), path.display().to_string()),
            Found::Missing(why) => (None, why),
            Found::Refused(why) => {
                if first_time("a bad decision table") {
                    log::warn!("the decision table {why}");
                }
                (None, why)
            }
        },
    };
    Ok(policy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::table::tests::example;

    fn full() -> Policy {
        Policy {
            rules: Rules::parse("all_reduce:0-4KiB=slots;*:1MiB-=rounds(128KiB)").unwrap(),
            table: Some(example()),
            topology: Some(Topology { hosts: 2, full_nvlink: true }),
            measure_link: false,
            verify: Verify::parse("sampled:warn").unwrap(),
            note: "from /a path/with\nlines".into(),
            cache_bytes: 32 << 20,
        }
    }

    #[test]
    fn a_policy_arrives_as_it_was_sent() {
        for policy in [Policy::default(), full(), Policy { note: "ü".repeat(4000), ..full() }] {
            let text = policy.text();
            let read = Policy::parse(&text).unwrap();
            assert_eq!(
                (&read.rules, &read.table, read.topology, read.measure_link, read.verify, read.cache_bytes),
                (&policy.rules, &policy.table, policy.topology, policy.measure_link, policy.verify, policy.cache_bytes)
            );
            assert_eq!((read.text(), read.hash()), (text, policy.hash()));
        }
        assert_ne!(full().hash(), Policy::default().hash());
        assert_ne!(full().hash(), Policy { topology: None, ..full() }.hash());
        assert_ne!(full().hash(), Policy { measure_link: true, ..full() }.hash());
        assert_ne!(full().hash(), Policy { verify: Verify::default(), ..full() }.hash());
    }

    #[test]
    fn garbage_is_refused_without_a_panic() {
        let text = full().text();
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 0x15;
            // Changed rules may still be valid rules. The chain of signatures detects such a change.
            if let Ok(other) = std::str::from_utf8(&bytes).map_err(|_| String::new()).and_then(Policy::parse) {
                assert_ne!(other.hash(), full().hash());
            }
            let _ = Policy::parse(text.get(..at).unwrap_or(""));
        }
        for wrong in [
            "",
            "nonsense",
            "sagellm policy 1\ncache 1\nrules \nnote \n",
            "sagellm policy 2\ncache 1\nrules \ntopology \nnote \n",
            "sagellm policy 3\ncache 1\nrules \ntopology \nnote \n",
            "sagellm policy 4\ncache 1\nrules \ntopology hosts=0\nmeasure link true\nverify off\nnote \n",
            "sagellm policy 4\ncache 1\nrules \ntopology \nmeasure link yes\nverify off\nnote \n",
            "sagellm policy 4\ncache 1\nrules \ntopology \nmeasure link true\nverify some\nnote \n",
        ] {
            Policy::parse(wrong).unwrap_err();
        }
        Policy::parse(&"a".repeat(MAX_BYTES + 1)).unwrap_err();
    }
}
