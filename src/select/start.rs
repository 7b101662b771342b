//! The start rules choose the algorithm between ranks if there is no measured link, table line or rule of the user.
//! They are the usual rules of collective libraries:
//!
//! - below [`LARGE`] bytes the number of steps dominates: recursive doubling, or a tree if NVLink joins all devices;
//! - from that size on the number of bytes dominates: a ring. If the number of ranks is not a power of two, the ring is
//!   used from [`MIDDLE`] on, because recursive doubling sends the data of the extra ranks once more;
//! - if hosts have several ranks each, `hierarchical`: first the ranks of each host combine, then the hosts combine by
//!   the two rules above.
//!
//! Pure. Three places use the start rules: `inter` for groups over several hosts, the plugin that a vendor's library
//! calls (`tuner.rs` in `engine/device`), and `select_all_reduce_algorithm` of the Python package.

use std::fmt;

use super::{OpDesc, Reason};
use crate::algorithms::Algorithm;
use crate::types::Kind;

/// From this size in bytes on, the number of bytes dominates the time; below it, the number of steps.
pub const LARGE: u64 = 1_000_000;
/// If the number of ranks is not a power of two: from this size on, the additional bytes of recursive doubling cost
/// more than its fewer steps save. This equals the size up to which sums of floats have one order (`inter`).
pub const MIDDLE: u64 = 64 << 10;
/// Name of two-level algorithms in rules and answers.
pub const HIERARCHICAL: &str = "hierarchical";
/// Name of trees in rules and answers.
pub const TREE: &str = "tree";

/// The user's description of a group's machines. Rank 0's description applies to the whole group (`policy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The number of hosts on which the ranks are. A group that knows its own hosts ignores this number.
    pub hosts: usize,
    /// Whether NVLink joins every pair of the ranks' devices.
    pub full_nvlink: bool,
}

impl Topology {
    /// Parses `hosts=2,full_nvlink=true`. The empty text is no topology. A missing field means one host, or no NVLink.
    /// The error is a clause that names the field.
    pub fn parse(text: &str) -> Result<Option<Topology>, String> {
        if text.trim().is_empty() {
            return Ok(None);
        }
        let mut found = Topology { hosts: 1, full_nvlink: false };
        for part in text.split(',').map(str::trim) {
            let (name, value) = part.split_once('=').map_or((part, ""), |(name, value)| (name.trim(), value.trim()));
            let wrong = |expected: &str| format!("the field {name}: expected {expected}, got {value:?}");
            match name {
                "hosts" => {
                    let count = value.parse().ok().filter(|count| *count > 0);
                    found.hosts = count.ok_or_else(|| wrong("a whole number from 1 on"))?;
                }
                "full_nvlink" => found.full_nvlink = value.parse().map_err(|_| wrong("true or false"))?,
                _ => return Err(format!("{name:?} is no field; expected hosts or full_nvlink")),
            }
        }
        Ok(Some(found))
    }
}

impl fmt::Display for Topology {
    /// Writes the topology in the syntax of `parse`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hosts={},full_nvlink={}", self.hosts, self.full_nvlink)
    }
}

/// The start rules' answer for an all_reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// Whether the ranks of each host combine first. If so, `algorithm` is the one between the hosts.
    pub hierarchical: bool,
    pub algorithm: Algorithm,
    pub reason: Reason,
}

impl Start {
    /// The answer for an all_reduce of `bytes` over `ranks` ranks on `hosts` hosts.
    pub fn of(bytes: u64, ranks: usize, hosts: usize, full_nvlink: bool) -> Start {
        let hierarchical = hosts > 1 && ranks > hosts;
        let (algorithm, reason) = by_size(bytes, if hierarchical { hosts } else { ranks }, full_nvlink);
        Start { hierarchical, algorithm, reason }
    }

    /// "ring", "tree", "recursive_doubling" or "hierarchical".
    pub fn name(self) -> &'static str {
        if self.hierarchical { HIERARCHICAL } else { public_name(self.algorithm) }
    }
}

impl fmt::Display for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.hierarchical {
            true => write!(f, "{HIERARCHICAL} ({} between the hosts)", public_name(self.algorithm)),
            false => f.write_str(public_name(self.algorithm)),
        }
    }
}

/// The name by which users know an algorithm of the start rules.
fn public_name(algorithm: Algorithm) -> &'static str {
    if algorithm == Algorithm::Binomial { TREE } else { algorithm.name() }
}

/// The first two rules, for `ranks` ranks that all reach each other in the same way.
fn by_size(bytes: u64, ranks: usize, full_nvlink: bool) -> (Algorithm, Reason) {
    let few = if ranks.is_power_of_two() || ranks == 0 { LARGE } else { MIDDLE };
    match bytes < few {
        true if full_nvlink => (Algorithm::Binomial, Reason::FullNvlink),
        true => (Algorithm::Doubling, Reason::FewSteps),
        false => (Algorithm::Ring, Reason::FewBytes),
    }
}

/// The schedule that the start rules choose between `hosts` hosts, for every kind. `bytes` is the size that decides;
/// for small sums of floats it is not the size of their batch (`inter`). If the rule's algorithm does not serve the
/// kind or is not allowed, the schedule with the fewest steps is used. Direct exchange serves all kinds.
pub fn schedule(
    desc: OpDesc,
    bytes: u64,
    hosts: usize,
    full_nvlink: bool,
    allowed: &dyn Fn(Algorithm) -> bool,
) -> (Algorithm, Reason) {
    use Algorithm::*;
    // Only in an all_reduce does recursive doubling send the data of extra ranks once more (`MIDDLE`), so other kinds
    // use the limit for powers of two.
    let doubled = if desc.kind == Kind::AllReduce { hosts } else { 1 };
    let (algorithm, reason) = by_size(bytes, doubled, full_nvlink);
    // A chain from one root moves the same number of bytes as a tree and needs more steps. A barrier has no bytes.
    let wish = match (algorithm, desc.kind) {
        (Ring, Kind::Broadcast | Kind::Reduce) => DoubleTree,
        (_, Kind::Barrier) => Dissemination,
        (algorithm, _) => algorithm,
    };
    if wish != Dissemination && allowed(wish) {
        return (wish, reason);
    }
    let last = [Dissemination, Bruck, Binomial, Halving].into_iter().find(|algorithm| allowed(*algorithm));
    (last.unwrap_or(Direct), Reason::OneSchedule)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Class;

    #[test]
    fn the_rules_that_users_know() {
        let name = |bytes, ranks, hosts, full| Start::of(bytes, ranks, hosts, full).name();
        for ranks in [1, 2, 6, 8] {
            let few = if ranks == 6 { MIDDLE } else { LARGE };
            assert_eq!(name(few - 1, ranks, 1, false), "recursive_doubling");
            assert_eq!(name(few - 1, ranks, 1, true), "tree");
            assert_eq!(name(few, ranks, 1, false), "ring");
            assert_eq!(name(few, ranks, 1, true), "ring");
            assert_eq!(name(LARGE, ranks, 1, false), "ring");
            assert_eq!(name(LARGE, ranks, 1, true), "ring");
        }
        assert_eq!(name(8, 16, 2, false), "hierarchical");
        assert_eq!(name(1 << 30, 16, 2, true), "hierarchical");
        assert_eq!(name(8, 2, 2, false), "recursive_doubling", "one rank on each host");
        assert_eq!(Start::of(LARGE, 4, 2, false).to_string(), "hierarchical (ring between the hosts)");
        assert_eq!(Start::of(8, 4, 2, true).to_string(), "hierarchical (tree between the hosts)");
    }

    #[test]
    fn recursive_doubling_needs_no_more_steps_than_a_tree_for_any_number_of_ranks() {
        let steps = |algorithm, ranks| {
            crate::algorithms::Schedule::new(algorithm, Kind::AllReduce, ranks, 0, 1).unwrap().steps()
        };
        for ranks in 2..200 {
            assert!(steps(Algorithm::Doubling, ranks) <= steps(Algorithm::Binomial, ranks), "{ranks} ranks");
        }
    }

    /// Users' older tables have a tree over PCIe here. It cannot be faster, because no algorithm moves fewer bytes than
    /// a ring.
    #[test]
    fn from_the_large_size_on_a_ring_moves_the_fewest_bytes() {
        let bytes = |algorithm, ranks| {
            let schedule = crate::algorithms::Schedule::new(algorithm, Kind::AllReduce, ranks, 0, 1).unwrap();
            let moved = schedule.volume();
            moved.sent.max(moved.received) as f64 / schedule.parts() as f64
        };
        for ranks in 2..40 {
            let ring = bytes(Algorithm::Ring, ranks);
            for other in [Algorithm::Binomial, Algorithm::DoubleTree, Algorithm::Doubling] {
                assert!(ring <= bytes(other, ranks), "{ranks} ranks: {other:?}");
            }
        }
    }

    #[test]
    fn every_kind_has_a_schedule_that_serves_it() {
        for kind in Kind::COLLECTIVES {
            for (bytes, full_nvlink) in [(0, false), (0, true), (LARGE, false), (u64::MAX, true)] {
                let desc = OpDesc { kind, bytes, class: Class::Moved };
                let (algorithm, _) = schedule(desc, bytes, 3, full_nvlink, &|algorithm| algorithm.serves(kind));
                assert!(algorithm.serves(kind), "{kind} of {bytes}: {algorithm:?}");
                assert_eq!(schedule(desc, bytes, 3, full_nvlink, &|_| false).0, Algorithm::Direct);
            }
        }
    }

    #[test]
    fn a_topology_is_read_and_written_back_and_errors_name_the_field() {
        let both = Topology { hosts: 2, full_nvlink: true };
        assert_eq!(Topology::parse(&both.to_string()), Ok(Some(both)));
        assert_eq!(Topology::parse(" "), Ok(None));
        assert_eq!(Topology::parse("full_nvlink = true"), Ok(Some(Topology { hosts: 1, ..both })));
        for (text, expected) in [
            ("hosts=0", "the field hosts: expected a whole number from 1 on, got \"0\""),
            ("hosts=two", "the field hosts: expected a whole number from 1 on, got \"two\""),
            ("hosts", "the field hosts: expected a whole number from 1 on, got \"\""),
            ("hosts=1,full_nvlink=yes", "the field full_nvlink: expected true or false, got \"yes\""),
            ("hops=1", "\"hops\" is no field; expected hosts or full_nvlink"),
        ] {
            assert_eq!(Topology::parse(text).unwrap_err(), expected);
        }
    }
}
