//! Applies a group's rules and decision table to a vendor's library. Pure.

use crate::select::Policy;
use crate::select::rules::{AlgorithmChoice, Rule};
use crate::types::Kind;

/// The algorithm that the policy names for an operation on a library. The first rule that applies decides; if no rule
/// applies, the table's line decides. Rules for the engines of CPU tensors (`slots`, `rounds`) are skipped. `None`
/// leaves the choice to the library.
pub fn named(policy: &Policy, kind: Kind, bytes: u64) -> Option<AlgorithmChoice> {
    use AlgorithmChoice::{Hierarchical, Hosts, Start};
    let means = |rule: &&Rule| matches!(rule.way, Start | Hosts { .. } | Hierarchical { .. });
    let rule = policy.rules.0.iter().filter(|rule| rule.fits(kind, bytes)).find(means);
    let line = || policy.table.as_ref().and_then(|table| table.find(kind, bytes)).map(|line| &line.rule).filter(means);
    rule.or_else(line).map(|rule| rule.way).filter(|way| *way != Start)
}

/// Says, for `explain`, which rule or line names the algorithm of an operation. Empty if the library decides.
/// `takes_topologies`: the library asks us for the algorithm that follows from the user's topology.
pub fn decides(policy: &Policy, takes_topologies: bool, kind: Kind, bytes: u64) -> String {
    match (named(policy, kind, bytes), policy.topology) {
        (Some(way), _) => format!("a rule or line names {way}"),
        (None, Some(topology)) if takes_topologies && kind == Kind::AllReduce => {
            format!("the start rules name its algorithm, because a topology was given: {topology}")
        }
        _ => String::new(),
    }
}

/// Returns the algorithm of the first rule if that rule applies to every operation and size.
pub fn named_for_all(policy: &Policy) -> Option<AlgorithmChoice> {
    let all = |rule: &&Rule| rule.kind.is_none() && (rule.from, rule.to) == (0, u64::MAX);
    policy.rules.0.first().filter(all).map(|rule| rule.way)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::rules::Rules;
    use crate::select::start::Topology;

    #[test]
    fn rules_of_the_cpu_engines_are_passed_over() {
        let policy = |rules: &str| Policy { rules: Rules::parse(rules).unwrap(), ..Policy::default() };
        let rules = policy("*:0-4KiB=slots;all_reduce:0-1KiB=start;*:0-=ring");
        assert_eq!(named(&rules, Kind::AllReduce, 8), None);
        assert!(matches!(named(&rules, Kind::AllReduce, 2000), Some(AlgorithmChoice::Hosts { .. })));
        assert!(matches!(named(&rules, Kind::Broadcast, 8), Some(AlgorithmChoice::Hosts { .. })));
    }

    #[test]
    fn a_rule_decides_before_a_topology_which_only_some_libraries_are_asked_about() {
        let given = |rules: &str| Policy {
            topology: Some(Topology { hosts: 1, full_nvlink: true }),
            rules: Rules::parse(rules).unwrap(),
            ..Policy::default()
        };
        let found = |rules: &str, takes, kind| decides(&given(rules), takes, kind, 8);
        assert_eq!(found("*:0-=tree", true, Kind::AllReduce), "a rule or line names binomial_tree");
        assert!(found("", true, Kind::AllReduce).ends_with("a topology was given: hosts=1,full_nvlink=true"));
        assert_eq!(found("", true, Kind::Broadcast), "");
        assert_eq!(found("", false, Kind::AllReduce), "", "HCCL asks no plugin");
    }
}
