//! What the rules and the table of a group say to a vendor's library. Pure.

use crate::select::Policy;
use crate::select::rules::{AlgorithmChoice, Rule};
use crate::types::Kind;

/// The algorithm that they name for an operation: that of the first rule, else of the first line, which is for libraries.
/// Rules of the engines for CPU tensors (`slots`, `rounds`) are passed over. `None` leaves the choice to the library.
pub fn named(policy: &Policy, kind: Kind, bytes: u64) -> Option<AlgorithmChoice> {
    let means = |rule: &&Rule| matches!(rule.way, AlgorithmChoice::Start | AlgorithmChoice::Hosts { .. });
    let rule = policy.rules.0.iter().filter(|rule| rule.fits(kind, bytes)).find(means);
    let line = || policy.table.as_ref().and_then(|table| table.find(kind, bytes)).map(|line| &line.rule).filter(means);
    rule.or_else(line).map(|rule| rule.way).filter(|way| *way != AlgorithmChoice::Start)
}

/// The algorithm that the first rule names for every operation and size.
pub fn named_for_all(policy: &Policy) -> Option<AlgorithmChoice> {
    let all = |rule: &&Rule| rule.kind.is_none() && (rule.from, rule.to) == (0, u64::MAX);
    policy.rules.0.first().filter(all).map(|rule| rule.way)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::rules::Rules;

    #[test]
    fn rules_of_the_cpu_engines_are_passed_over() {
        let policy = |rules: &str| Policy { rules: Rules::parse(rules).unwrap(), ..Policy::default() };
        let rules = policy("*:0-4KiB=slots;all_reduce:0-1KiB=start;*:0-=ring");
        assert_eq!(named(&rules, Kind::AllReduce, 8), None);
        assert!(matches!(named(&rules, Kind::AllReduce, 2000), Some(AlgorithmChoice::Hosts { .. })));
        assert!(matches!(named(&rules, Kind::Broadcast, 8), Some(AlgorithmChoice::Hosts { .. })));
    }
}
