//! Makes the choice between hosts: the schedule that the hosts' leaders run, the number of leaders, and the segments
//! into which a large operation is cut so that the exchange overlaps with the work inside the hosts. Pure, total, and
//! equal on every rank.
//!
//! The sources that decide, from strong to weak: strict mode; the user's rules; the table; the start rules, if the user
//! has set a topology or turned off the link measurement; one fixed order for small sums of floats; the cost model, if
//! the link was measured; the start rules. A batch uses only schedules whose order of summation does not depend on an
//! element's position in the batch. So the bits of an operation do not depend on the batch's other operations.

use super::cost::{Link, Model, Priced};
use super::rules::{AlgorithmChoice, Rule};
use super::start;
use super::start::Topology;
use super::{Choice, Class, OpDesc, Path, Policy, Reason, WHOLE};
use crate::algorithms::{Algorithm, Schedule};
use crate::types::Kind;

/// The measured latency and bandwidth between two hosts. The ranks agree on these values before they use them. Zeros
/// mean that the link was not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkFacts {
    /// Nanoseconds until an empty message has arrived.
    pub alpha_ns: u64,
    pub beta_ps_per_byte: u64,
    /// Nanoseconds that each further message of the same step adds. 0 if the measurement found no such time, or if
    /// there was no measurement because there are only two hosts or the latency is long.
    pub message_ns: u64,
}

impl std::fmt::Display for LinkFacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.known() {
            return f.write_str("the link was not measured");
        }
        let rate = 8e3 / self.beta_ps_per_byte.max(1) as f64;
        write!(f, "a message takes {:.0} us, {rate:.2} Gbit/s", self.alpha_ns as f64 / 1e3)?;
        match self.message_ns {
            0 => Ok(()),
            more => write!(f, ", each further message of a step {:.1} us", more as f64 / 1e3),
        }
    }
}

impl LinkFacts {
    pub fn known(self) -> bool {
        self.alpha_ns > 0 || self.beta_ps_per_byte > 0
    }
}

/// Facts about a group's hosts; all ranks know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hosts {
    pub hosts: usize,
    pub ranks: usize,
    /// The smallest number of ranks on any host.
    pub least_ranks: usize,
    pub link: LinkFacts,
    /// Whether results must have the bits that one host would give: every element is combined in rank order.
    pub strict: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostsChoice {
    pub algorithm: Algorithm,
    /// How many ranks of each host talk to other hosts, each for its share of the data.
    pub leaders: u8,
    /// How many bytes pass through the phases (reduce, exchange, distribute) at a time; `WHOLE` if the operation is not
    /// cut. `segments` is the number of such pieces.
    pub segment_bytes: usize,
    pub segments: usize,
    pub reason: Reason,
    /// Predicted nanoseconds. 0 if there is no prediction (`predict`).
    pub predicted_ns: u64,
}

impl HostsChoice {
    pub fn choice(&self) -> Choice {
        let path = Path::Hosts { algorithm: self.algorithm, leaders: self.leaders, segment: self.segment_bytes };
        Choice { path, reason: self.reason }
    }
}

/// Above this size, an operation other than an all_reduce is split over all ranks of a host, if its kind can be split
/// (`leaders`).
const LARGE: u64 = 1 << 20;
/// Up to this size an operation may be fused and is never cut. It has one leader, because a second one would cost more
/// messages than it saves.
pub const SMALL: u64 = 64 << 10;
/// The largest overhead of a message, in nanoseconds, that is assumed instead of measured (`overhead_ns`), and that
/// counts when the size of segments is chosen.
const MOST_OVERHEAD_NS: u64 = 20_000;
/// The largest message that is sent together with its header.
pub const SHORT_BYTES: usize = (16 << 10) - 56;
/// Segment size in bytes if the link was not measured. `LEAST_SEGMENT`: the smallest segment size if it was.
/// `LEAST_ALONE`: the smallest segment size if, in addition, no ranks share a host. Then there is no work inside a host
/// that could overlap with the exchange, and smaller segments only cost more messages (docs/internals/benchmarks.md).
const SEGMENT: usize = 2 << 20;
const LEAST_SEGMENT: f64 = 256.0 * 1024.0;
const LEAST_ALONE: f64 = 2048.0 * 1024.0;
/// Nanoseconds per byte for the work inside a host that overlaps with the exchange (docs/internals/benchmarks.md).
const INSIDE_NS: f64 = 0.05;
/// Nanoseconds per byte that a rank receives into a buffer and combines (docs/internals/choosing.md).
const COMBINE_NS: f64 = 0.1;
/// If there are at most this many hosts, the costs of all schedules are computed in advance.
const MOST_PRICED: usize = 1024;

/// For a number of hosts, the schedules that serve each kind, with the loads of their steps. Computed once per group,
/// because it takes longer to examine every step than to run a small operation.
pub struct Menu {
    hosts: usize,
    priced: Vec<Priced>,
}

impl Menu {
    pub fn new(hosts: usize) -> Menu {
        let few = if (2..=MOST_PRICED).contains(&hosts) { hosts } else { 2 };
        let priced = Kind::COLLECTIVES
            .into_iter()
            .flat_map(|kind| serving(kind, few))
            .map(|schedule| Priced::new(schedule, 1))
            .collect();
        Menu { hosts: few, priced }
    }
}

/// If there are at most this many hosts, small sums cost less by direct exchange than by a schedule with more steps.
const MOST_DIRECT: usize = 8;
/// The schedules for a kind, each with one segment: the engine cuts operations into segments, so a schedule does not
/// have to.
fn serving(kind: Kind, hosts: usize) -> impl Iterator<Item = Schedule> {
    Algorithm::ALL.into_iter().filter_map(move |algorithm| Schedule::new(algorithm, kind, hosts, 0, 1))
}

/// Chooses for one operation between hosts, or for a batch (`batched`). `desc.bytes` is one rank's size. If there is
/// only one host, or if the kind is not a collective, the answer is direct exchange, which is always correct.
pub fn between_hosts(desc: OpDesc, batched: bool, hosts: &Hosts, menu: &Menu, policy: &Policy) -> HostsChoice {
    let bytes = exchanged(desc, hosts);
    let mut choice = HostsChoice {
        algorithm: Algorithm::Direct,
        leaders: leaders(desc, hosts),
        segment_bytes: segment(bytes, hosts),
        segments: 1,
        reason: Reason::Strict,
        predicted_ns: 0,
    };
    if hosts.hosts < 2 || desc.kind.is_p2p() {
        return HostsChoice { leaders: 1, segment_bytes: WHOLE, reason: Reason::OneSchedule, ..choice };
    }
    let allowed = |algorithm| allowed(algorithm, desc, batched, hosts);
    if !hosts.strict {
        (choice.algorithm, choice.reason, choice.predicted_ns) = without_rules(desc, batched, hosts, menu, policy);
    }
    if let Some((rule, reason)) = said(desc, policy, &allowed) {
        let (algorithm, leaders, segment) = match rule.way {
            AlgorithmChoice::Hosts { algorithm, leaders, segment } => (algorithm, leaders, segment),
            AlgorithmChoice::Hierarchical { leaders, segment } => {
                (by_start_rules(desc, batched, hosts.hosts, policy.topology, &allowed).0, leaders, segment)
            }
            _ => (choice.algorithm, None, None), // `said` returns no other algorithm
        };
        if !hosts.strict {
            choice.reason = reason;
        }
        if algorithm != choice.algorithm {
            (choice.algorithm, choice.predicted_ns) = (algorithm, 0);
        }
        if let Some(count) = leaders {
            choice.leaders = possible_leaders(desc.kind, count, hosts);
        }
        choice.segment_bytes = segment.unwrap_or(choice.segment_bytes);
    }
    let cut = matches!(desc.kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast) && !batched;
    if cut && desc.bytes > SMALL.max(choice.segment_bytes as u64) {
        let parts = desc.bytes.div_ceil(choice.segment_bytes as u64);
        choice.segments = usize::try_from(parts).unwrap_or(usize::MAX);
    } else {
        choice.segment_bytes = WHOLE;
    }
    choice
}

/// Returns the choice if no rule and no table line names a schedule: the schedule, the reason, and the predicted time
/// or 0. Strict mode is ignored here. If the user has set a topology, all ranks decide by rank 0's topology and ignore
/// the measured link. If the link measurement is turned off, the start rules decide.
pub(crate) fn without_rules(
    desc: OpDesc,
    batched: bool,
    hosts: &Hosts,
    menu: &Menu,
    policy: &Policy,
) -> (Algorithm, Reason, u64) {
    let allowed = |algorithm| allowed(algorithm, desc, batched, hosts);
    let predicted = |algorithm| predict(desc, algorithm, hosts, menu).unwrap_or(0);
    if desc.kind == Kind::AllToAll {
        return (Algorithm::Direct, Reason::NoCommonSize, 0);
    }
    if policy.topology.is_none() && policy.measure_link {
        if one_order(desc, batched) {
            let algorithm = if hosts.hosts <= MOST_DIRECT { Algorithm::Direct } else { Algorithm::Doubling };
            return (algorithm, Reason::OneOrder, predicted(algorithm));
        }
        if let Some((priced, seconds)) = fastest(desc.kind, exchanged(desc, hosts), hosts, menu, &allowed) {
            return (priced.schedule.algorithm, Reason::Model, (seconds * 1e9) as u64);
        }
    }
    let (algorithm, reason) = by_start_rules(desc, batched, hosts.hosts, policy.topology, &allowed);
    (algorithm, reason, predicted(algorithm))
}

/// The start rules for an operation or a batch. A small sum of floats counts as small even in a large batch, because
/// its order of summation must be the same alone and in every batch (rule 18).
fn by_start_rules(
    desc: OpDesc,
    batched: bool,
    hosts: usize,
    topology: Option<Topology>,
    allowed: &dyn Fn(Algorithm) -> bool,
) -> (Algorithm, Reason) {
    let bytes = if one_order(desc, batched) { 0 } else { desc.bytes };
    start::schedule(desc, bytes, hosts, topology.is_some_and(|topology| topology.full_nvlink), allowed)
}

/// Predicted nanoseconds of one schedule for an operation, with the measured link. `None` if the link was not measured,
/// and for an all_to_all, because no rank knows all of its sizes.
pub fn predict(desc: OpDesc, algorithm: Algorithm, hosts: &Hosts, menu: &Menu) -> Option<u64> {
    if desc.kind == Kind::AllToAll {
        return None;
    }
    let only = |other: Algorithm| other == algorithm;
    fastest(desc.kind, exchanged(desc, hosts), hosts, menu, &only).map(|(_, seconds)| (seconds * 1e9) as u64)
}

/// Whether the operation is a small sum of floats, or a batch that contains such sums. They always use one order,
/// whatever else is in the batch and whatever was measured on the link, so their bits are equal in every run.
fn one_order(desc: OpDesc, batched: bool) -> bool {
    desc.kind == Kind::AllReduce && order_shows(desc) && (batched || desc.bytes <= SMALL)
}

/// Whether an operation may use a schedule. In strict mode, and for an all_to_all, only direct exchange is allowed, and
/// for a batch only schedules that combine every element in the same order.
pub fn allowed(algorithm: Algorithm, desc: OpDesc, batched: bool, hosts: &Hosts) -> bool {
    let only_direct = hosts.strict || desc.kind == Kind::AllToAll;
    algorithm.serves(desc.kind)
        && (!only_direct || algorithm == Algorithm::Direct)
        && (!batched || algorithm.one_order() || !order_shows(desc))
}

/// The rule or table line that names the schedule, for `explain`.
pub fn said_by(desc: OpDesc, batched: bool, hosts: &Hosts, policy: &Policy) -> Option<Rule> {
    let allowed = |algorithm| allowed(algorithm, desc, batched, hosts);
    said(desc, policy, &allowed).map(|(rule, _)| *rule)
}

/// The first rule that names an allowed schedule for this operation or, if there is none, the first such table line.
/// None if a rule for the default (`start`) comes first.
fn said<'a>(desc: OpDesc, policy: &'a Policy, allowed: &dyn Fn(Algorithm) -> bool) -> Option<(&'a Rule, Reason)> {
    let names = |rule: &Rule| match rule.way {
        AlgorithmChoice::Hosts { algorithm, .. } => allowed(algorithm),
        AlgorithmChoice::Hierarchical { .. } => true,
        _ => false,
    };
    for rule in policy.rules.0.iter().filter(|rule| rule.fits(desc.kind, desc.bytes)) {
        if rule.way == AlgorithmChoice::Start {
            return None;
        }
        if names(rule) {
            return Some((rule, Reason::Override));
        }
    }
    let lines = policy.table.iter().flat_map(|table| &table.lines).map(|line| &line.rule);
    lines.filter(|rule| rule.fits(desc.kind, desc.bytes)).find(|rule| names(rule)).map(|rule| (rule, Reason::Measured))
}

/// Whether the order of summation affects the bits of the result.
fn order_shows(desc: OpDesc) -> bool {
    matches!(desc.class, Class::Float | Class::Low) && desc.kind.reduces()
}

fn fastest<'a>(
    kind: Kind,
    bytes: u64,
    hosts: &Hosts,
    menu: &'a Menu,
    allowed: &dyn Fn(Algorithm) -> bool,
) -> Option<(&'a Priced, f64)> {
    if !hosts.link.known() || menu.hosts != hosts.hosts {
        return None;
    }
    let (alpha, overhead) = (hosts.link.alpha_ns as f64 * 1e-9, overhead_ns(hosts.link) * 1e-9);
    let beta = hosts.link.beta_ps_per_byte as f64 * 1e-12;
    let link = Link { alpha, overhead, beta, short_bytes: SHORT_BYTES as f64 };
    let model = Model { host: link, network: link, gamma: COMBINE_NS * 1e-9, ranks_per_host: 1 };
    let mine = menu.priced.iter().filter(|one| one.schedule.kind == kind && allowed(one.schedule.algorithm));
    mine.map(|priced| (priced, priced.seconds(bytes as f64, &model))).min_by(|a, b| a.1.total_cmp(&b.1))
}

/// The bytes that the cost model counts: those of the whole vector, or of all ranks' blocks together.
fn exchanged(desc: OpDesc, hosts: &Hosts) -> u64 {
    match desc.kind {
        Kind::AllGather | Kind::Gather => desc.bytes.saturating_mul(hosts.ranks as u64),
        _ => desc.bytes,
    }
}

/// Nanoseconds that each message of a step costs after the first: what was measured, but at least a quarter of the
/// latency. This quarter counts at most `MOST_OVERHEAD_NS`, because a further message costs processor time, not delay.
fn overhead_ns(link: LinkFacts) -> f64 {
    let assumed = (link.alpha_ns / 4).min(MOST_OVERHEAD_NS);
    link.message_ns.max(assumed) as f64
}

fn cap(count: usize) -> u8 {
    u8::try_from(count.clamp(1, 255)).unwrap_or(u8::MAX)
}

/// Returns the default number of leaders. A large operation is split over all ranks of a host, which fill the link with
/// several connections. For kinds other than all_reduce, the size above which an operation counts as large was measured
/// on hosts that have a core for each rank (docs/internals/benchmarks.md).
fn leaders(desc: OpDesc, hosts: &Hosts) -> u8 {
    let border = if desc.kind == Kind::AllReduce { SMALL } else { LARGE };
    if exchanged(desc, hosts) > border { possible_leaders(desc.kind, u8::MAX, hosts) } else { 1 }
}

/// The number of leaders per host if `count` are requested: at most all ranks of the smallest host. If a kind can be
/// split only over all ranks, it gets all ranks as leaders or only one.
fn possible_leaders(kind: Kind, count: u8, hosts: &Hosts) -> u8 {
    let most = cap(hosts.least_ranks);
    let even = hosts.ranks == hosts.hosts.saturating_mul(most.into());
    match kind {
        Kind::AllReduce | Kind::Broadcast => count.min(most),
        Kind::AllGather | Kind::ReduceScatter if even && count > 1 => most,
        _ => 1,
    }
}

/// Returns the segment size at which the cost of one more message equals the time saved by a shorter first and last
/// segment. A power of two, at least `LEAST_SEGMENT` or `LEAST_ALONE`.
fn segment(bytes: u64, hosts: &Hosts) -> usize {
    if !hosts.link.known() {
        return SEGMENT;
    }
    let least = if hosts.ranks == hosts.hosts { LEAST_ALONE } else { LEAST_SEGMENT };
    let most = (1u64 << 30) as f64;
    let overhead = overhead_ns(hosts.link).min(MOST_OVERHEAD_NS as f64);
    let balanced = (bytes as f64 * overhead / INSIDE_NS).sqrt();
    (balanced.clamp(least, most) as usize).next_power_of_two().min(1 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::rules::Rules;

    const FAST: LinkFacts = LinkFacts { alpha_ns: 30_000, beta_ps_per_byte: 100, message_ns: 0 };

    fn hosts(count: usize, link: LinkFacts) -> Hosts {
        Hosts { hosts: count, ranks: count * 2, least_ranks: 2, link, strict: false }
    }

    fn desc(kind: Kind, bytes: u64) -> OpDesc {
        OpDesc { kind, bytes, class: if kind.reduces() { Class::Float } else { Class::Moved } }.normal()
    }

    fn given(hosts: usize, full_nvlink: bool) -> Policy {
        Policy { topology: Some(Topology { hosts, full_nvlink }), ..Policy::default() }
    }

    #[test]
    fn hosts_with_one_rank_each_cut_operations_into_larger_segments() {
        let segments = |ranks, kib: u64| {
            let hosts = Hosts { ranks, least_ranks: ranks / 4, ..hosts(4, FAST) };
            between_hosts(desc(Kind::AllReduce, kib << 10), false, &hosts, &Menu::new(4), &Policy::default()).segments
        };
        assert_eq!([1024, 2048, 4096, 16384].map(|kib| segments(4, kib)), [1, 1, 2, 8]);
        assert!(segments(8, 1024) > 1, "several ranks share a host");
    }

    #[test]
    fn the_start_rules_hold_where_no_link_was_measured() {
        let policy = Policy::default();
        let at = |count, kind, bytes| {
            let hosts = hosts(count, LinkFacts::default());
            let found = between_hosts(desc(kind, bytes), false, &hosts, &Menu::new(count), &policy);
            (found.algorithm, found.reason)
        };
        for count in [2, 3, 4] {
            let below = match count {
                3 => (Algorithm::Ring, Reason::FewBytes),
                _ => (Algorithm::Doubling, Reason::FewSteps),
            };
            assert_eq!(at(count, Kind::AllReduce, 999_999), below);
            assert_eq!(at(count, Kind::AllReduce, 1_000_000), (Algorithm::Ring, Reason::FewBytes));
        }
        assert_eq!(at(4, Kind::AllReduce, SMALL), (Algorithm::Direct, Reason::OneOrder), "in a group of threads");
        assert_eq!(at(4, Kind::Broadcast, 1_000_000), (Algorithm::DoubleTree, Reason::FewBytes));
        assert_eq!(at(4, Kind::AllGather, 1_000_000), (Algorithm::Ring, Reason::FewBytes));
        assert_eq!(at(4, Kind::ReduceScatter, 8), (Algorithm::Halving, Reason::OneSchedule));
        assert_eq!(at(4, Kind::Barrier, 0), (Algorithm::Dissemination, Reason::OneSchedule));
    }

    #[test]
    fn a_link_that_shall_not_be_measured_leaves_all_to_the_start_rules_and_small_sums_in_one_order() {
        let policy = Policy { measure_link: false, ..Policy::default() };
        for count in [2, 3, 16] {
            let at = |bytes, batched| {
                let hosts = hosts(count, LinkFacts::default());
                let found = between_hosts(desc(Kind::AllReduce, bytes), batched, &hosts, &Menu::new(count), &policy);
                (found.algorithm, found.reason)
            };
            for (bytes, batched) in [(8, false), (8, true), (SMALL, false), (SMALL, true)] {
                assert_eq!(at(bytes, batched), (Algorithm::Doubling, Reason::FewSteps), "{bytes} {batched}");
            }
            assert_eq!(at(1_000_000, false), (Algorithm::Ring, Reason::FewBytes));
            assert_eq!(at(2_000_000, true), (Algorithm::Doubling, Reason::FewSteps), "a batch of small sums");
        }
    }

    #[test]
    fn a_topology_makes_the_start_rules_come_before_the_measured_link_and_rules_before_both() {
        let menu = Menu::new(4);
        let at = |bytes, policy: &Policy| {
            let found = between_hosts(desc(Kind::AllReduce, bytes), false, &hosts(4, FAST), &menu, policy);
            (found.algorithm, found.reason)
        };
        let measured = at(4 << 20, &Policy::default());
        assert_eq!(measured.1, Reason::Model);
        assert_ne!(measured.0, Algorithm::Ring, "nothing would be seen of the topology");
        assert_eq!(at(4 << 20, &given(4, false)), (Algorithm::Ring, Reason::FewBytes));
        assert_eq!(at(8, &given(4, false)), (Algorithm::Doubling, Reason::FewSteps));
        assert_eq!(at(8, &given(4, true)), (Algorithm::Binomial, Reason::FullNvlink));
        let ruled = Policy { rules: Rules::parse("*:0-=torus").unwrap(), ..given(4, true) };
        assert_eq!(at(8, &ruled), (Algorithm::Torus, Reason::Override));
        let start = Policy { rules: Rules::parse("*:0-=start").unwrap(), ..given(4, true) };
        assert_eq!(at(8, &start), (Algorithm::Binomial, Reason::FullNvlink));
    }

    #[test]
    fn the_rule_hierarchical_takes_the_schedule_of_the_start_rules_and_as_many_leaders_as_it_says() {
        let menu = Menu::new(2);
        let even = Hosts { ranks: 8, least_ranks: 4, ..hosts(2, FAST) };
        let at = |rules: &str, bytes, batched| {
            let policy = Policy { rules: Rules::parse(rules).unwrap(), ..Policy::default() };
            let found = between_hosts(desc(Kind::AllReduce, bytes), batched, &even, &menu, &policy);
            (found.algorithm, found.leaders, found.reason)
        };
        assert_eq!(at("*:0-=hierarchical", 8, false), (Algorithm::Doubling, 1, Reason::Override));
        assert_eq!(at("*:0-=hierarchical", 1_000_000, false), (Algorithm::Ring, 4, Reason::Override));
        assert_eq!(at("*:0-=hierarchical(leaders=2)", 1_000_000, false), (Algorithm::Ring, 2, Reason::Override));
        assert_eq!(at("*:0-=hierarchical", 1_000_000, true).0, Algorithm::Doubling, "a batch has one order");
        assert_eq!(at("all_reduce:0-=tree", 8, false), (Algorithm::Binomial, 1, Reason::Override));
    }

    #[test]
    fn a_measured_link_overrules_the_start_rules_and_a_rule_overrules_both() {
        let menu = Menu::new(3);
        let mut policy = Policy::default();
        let small = desc(Kind::AllReduce, 64);
        let large = desc(Kind::AllReduce, (2 << 20) + 1);
        let exact = OpDesc { class: Class::Exact, ..small };
        let found = between_hosts(exact, false, &hosts(3, FAST), &menu, &policy);
        assert_eq!(found.reason, Reason::Model);
        assert_eq!(found.algorithm, Algorithm::Direct, "one step, two messages");
        assert!(found.predicted_ns >= FAST.alpha_ns);
        policy.rules = Rules::parse("*:0-=dissemination;all_reduce:0-=ring(leaders=9,segment=1MiB)").unwrap();
        let found = between_hosts(small, false, &hosts(3, FAST), &menu, &policy);
        assert_eq!((found.algorithm, found.leaders), (Algorithm::Ring, 2));
        assert_eq!((found.segment_bytes, found.segments), (WHOLE, 1));
        let cut = between_hosts(large, false, &hosts(3, FAST), &menu, &policy);
        assert_eq!((cut.segment_bytes, cut.segments), (1 << 20, 3));
        assert_eq!(found.reason, Reason::Override);
        assert_eq!(Choice::from_code(found.choice().code()), found.choice());
        let batched = between_hosts(small, true, &hosts(3, FAST), &menu, &policy);
        assert_eq!((batched.algorithm, batched.reason), (Algorithm::Direct, Reason::OneOrder));
        let strict = Hosts { strict: true, ..hosts(3, FAST) };
        let strict = between_hosts(small, false, &strict, &menu, &policy);
        assert_eq!((strict.algorithm, strict.reason), (Algorithm::Direct, Reason::Strict));
    }

    #[test]
    fn rule_18_small_sums_go_one_way_alone_in_a_batch_and_over_any_link() {
        let policies = [Policy::default(), given(1, false), given(1, true)];
        for (count, policy) in [2, 3, 8, 9, 100].into_iter().flat_map(|count| policies.iter().map(move |p| (count, p)))
        {
            let menu = Menu::new(count);
            let links = [
                LinkFacts::default(),
                LinkFacts { alpha_ns: 50_000, beta_ps_per_byte: 800, message_ns: 30_000 },
                FAST,
                LinkFacts { alpha_ns: 1_000_000, beta_ps_per_byte: 8000, message_ns: 10_000 },
            ];
            let ways = links.map(|link| {
                [(8, false), (SMALL, false), (1 << 20, true)].map(|(bytes, batched)| {
                    between_hosts(desc(Kind::AllReduce, bytes), batched, &hosts(count, link), &menu, policy).algorithm
                })
            });
            assert!(ways.iter().flatten().all(|way| *way == ways[0][0]), "{count} hosts: {ways:?}");
        }
    }

    #[test]
    fn an_all_to_all_is_exchanged_directly_over_any_link_and_under_any_rule() {
        let slow = LinkFacts { alpha_ns: 1_000_000, beta_ps_per_byte: 8, message_ns: 1_000_000 };
        for (count, link) in [(2, FAST), (16, slow), (16, LinkFacts::default())] {
            let policy = Policy { rules: Rules::parse("*:0-=bruck").unwrap(), ..Policy::default() };
            let all_to_all = desc(Kind::AllToAll, 1 << 20);
            let found = between_hosts(all_to_all, false, &hosts(count, link), &Menu::new(count), &policy);
            assert_eq!((found.algorithm, found.reason), (Algorithm::Direct, Reason::NoCommonSize));
            assert_eq!(found.predicted_ns, 0, "no rank knows its size");
        }
    }

    #[test]
    fn what_is_large_is_shared_out_as_far_as_its_kind_can_be() {
        let menu = Menu::new(3);
        let leaders = |kind, bytes, rules: &str, hosts: &Hosts| {
            let policy = Policy { rules: Rules::parse(rules).unwrap(), ..Policy::default() };
            between_hosts(desc(kind, bytes), false, hosts, &menu, &policy).leaders
        };
        let even = Hosts { ranks: 12, least_ranks: 4, ..hosts(3, FAST) };
        let uneven = Hosts { ranks: 13, ..even };
        let kinds =
            [Kind::AllReduce, Kind::Broadcast, Kind::AllGather, Kind::ReduceScatter, Kind::Reduce, Kind::AllToAll];
        let all = |bytes, rules: &str, hosts: &Hosts| kinds.map(|kind| leaders(kind, bytes, rules, hosts));
        assert_eq!(all(4 << 20, "", &even), [4, 4, 4, 4, 1, 1]);
        assert_eq!(all(4 << 20, "", &uneven), [4, 4, 1, 1, 1, 1]);
        assert_eq!(all(LARGE / 12, "", &even), [4, 1, 1, 1, 1, 1]);
        assert_eq!(all(64, "", &even), [1; 6]);
        assert_eq!(all(1 << 20, "*:0-=direct(leaders=3)", &even), [3, 3, 4, 4, 1, 1]);
        assert_eq!(all(1 << 20, "*:0-=direct(leaders=1)", &even), [1; 6]);
    }

    #[test]
    fn every_question_has_an_answer_that_can_be_carried_out() {
        let kinds: Vec<Kind> = (1..=u8::MAX).map_while(Kind::from_u8).collect();
        let mut state = 9u64;
        let mut next = move |n: u64| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) % n.max(1)
        };
        let menus: Vec<[Menu; 2]> = (0..20).map(|count| [Menu::new(count), Menu::new(count)]).collect();
        let policies = [
            Policy::default(),
            Policy { rules: Rules::parse("*:0-1MiB=bruck;*:0-=ring;*:5-=slots").unwrap(), ..Policy::default() },
            Policy { rules: Rules::parse("*:5-1MiB=hierarchical(segment=1KiB)").unwrap(), ..given(3, true) },
        ];
        for _ in 0..20_000 {
            let count = next(20) as usize;
            let any = LinkFacts { alpha_ns: next(1 << 40), beta_ps_per_byte: next(1 << 40), message_ns: next(1 << 40) };
            let facts = [LinkFacts::default(), FAST, any];
            let hosts = Hosts {
                hosts: count,
                ranks: next(1000) as usize,
                least_ranks: next(300) as usize,
                link: facts[next(3) as usize],
                strict: next(4) == 0,
            };
            let kind = kinds[next(kinds.len() as u64) as usize];
            let bytes = next(u64::MAX) >> next(33);
            let desc =
                OpDesc { class: [Class::Float, Class::Exact, Class::Low][next(3) as usize], ..desc(kind, bytes) };
            let (batched, policy) = (next(2) == 0, &policies[next(3) as usize]);
            let [menu, another] = &menus[count];
            let found = between_hosts(desc, batched, &hosts, menu, policy);
            assert_eq!(found, between_hosts(desc, batched, &hosts, another, policy));
            assert!(found.leaders >= 1 && usize::from(found.leaders) <= hosts.least_ranks.max(1));
            assert!(found.segments >= 1);
            let cut = (1024..=1 << 30).contains(&found.segment_bytes) && desc.bytes > SMALL && !batched;
            assert!(if found.segments == 1 { found.segment_bytes == WHOLE } else { cut }, "{found:?}");
            let shared = matches!(kind, Kind::AllReduce | Kind::Broadcast | Kind::AllGather | Kind::ReduceScatter);
            assert!(found.leaders == 1 || shared, "{found:?}");
            if !kind.is_p2p() {
                assert!(found.algorithm.serves(kind), "{found:?} for {kind}");
            }
            if hosts.strict {
                assert_eq!(found.algorithm, Algorithm::Direct);
            }
            assert!(!batched || found.algorithm.one_order() || !order_shows(desc), "{found:?}");
        }
    }
}
