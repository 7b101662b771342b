//! The choice between hosts: which schedule the leaders of the hosts run, how many leaders there are, and in which
//! segments a large operation overlaps with the work inside the hosts. Pure and total, the same on every rank.
//!
//! Who decides, from strong to weak: strict mode, the user's rules, the table, the cost model where the link was measured,
//! the start rules. A batch of operations goes only by schedules whose order of summation does not depend on where an
//! element lies in the batch, so that the bits of an operation do not depend on its neighbours.

use super::cost::{Link, Model, Priced};
use super::rules::{Rule, Way};
use super::{Asked, Choice, Class, Path, Policy, Reason, WHOLE};
use crate::algorithms::{Algorithm, Schedule};
use crate::types::Kind;

/// What was found out about the way between two hosts, agreed between the ranks before it is used. Zeros: not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkFacts {
    /// Until a message of no length has arrived.
    pub alpha_ns: u64,
    pub beta_ps_per_byte: u64,
}

impl std::fmt::Display for LinkFacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rate = 8e3 / self.beta_ps_per_byte.max(1) as f64;
        write!(f, "a message takes {:.0} us, {rate:.2} Gbit/s", self.alpha_ns as f64 / 1e3)
    }
}

impl LinkFacts {
    pub fn known(self) -> bool {
        self.alpha_ns > 0 || self.beta_ps_per_byte > 0
    }
}

/// Hosts with a leader or more each, and what all ranks know about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hosts {
    pub hosts: usize,
    pub ranks: usize,
    /// On the host that has the fewest.
    pub least_ranks: usize,
    pub link: LinkFacts,
    /// The bits of one host: every element in the order of the ranks.
    pub strict: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostsChoice {
    pub algorithm: Algorithm,
    /// Ranks of each host that take part, each with its share of the data.
    pub leaders: u8,
    /// Bytes of the operation that pass through reduce, exchange and spread at a time (`WHOLE` where it is not cut), and
    /// how many such parts it has.
    pub segment_bytes: usize,
    pub segments: usize,
    pub reason: Reason,
    /// 0 where the link was not measured.
    pub predicted_ns: u64,
}

impl HostsChoice {
    pub fn choice(&self) -> Choice {
        let path = Path::Hosts { algorithm: self.algorithm, leaders: self.leaders, segment: self.segment_bytes };
        Choice { path, reason: self.reason }
    }
}

/// From here on bytes count more than steps: the public start rules have their border here.
pub const LARGE: u64 = 1 << 20;
/// Up to here an operation may share a batch and is never cut, and a second leader would cost more messages than it saves.
pub const SMALL: u64 = 64 << 10;
const MOST_OVERHEAD_NS: u64 = 20_000;
/// Segments where the link was not measured, and the smallest ones where it was.
const SEGMENT: usize = 2 << 20;
const LEAST_SEGMENT: f64 = 256.0 * 1024.0;
/// Nanoseconds a byte inside a host, from docs/benchmarks.md: what a segment overlaps with.
const INSIDE_NS: f64 = 0.05;
/// Up to as many hosts the predicted times of all schedules are kept ready.
const MOST_PRICED: usize = 1024;

/// The schedules that serve each kind among so many hosts, with the cost of their steps: made once a group, because
/// looking at every step takes longer than a small operation.
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

/// Up to so many hosts a direct exchange of small sums costs less than more steps would.
const MOST_DIRECT: usize = 8;
/// Pipelining is done above the schedules, in segments of the whole operation, so none cuts its streams itself.
fn serving(kind: Kind, hosts: usize) -> impl Iterator<Item = Schedule> {
    Algorithm::ALL.into_iter().filter_map(move |algorithm| Schedule::new(algorithm, kind, hosts, 0, 1))
}

/// The way of one operation between hosts. `batched`: it travels together with others. `asked.bytes` as one rank gives
/// them. For a single host, or a kind that is no collective, the answer is a direct exchange, which is right everywhere.
pub fn between_hosts(asked: Asked, batched: bool, hosts: &Hosts, menu: &Menu, policy: &Policy) -> HostsChoice {
    let bytes = exchanged(asked, hosts);
    let mut choice = HostsChoice {
        algorithm: Algorithm::Direct,
        leaders: leaders(asked, hosts),
        segment_bytes: segment(bytes, hosts.link),
        segments: 1,
        reason: Reason::Strict,
        predicted_ns: 0,
    };
    if hosts.hosts < 2 || asked.kind.is_p2p() {
        return HostsChoice { leaders: 1, segment_bytes: WHOLE, reason: Reason::OneSchedule, ..choice };
    }
    let allowed = |algorithm| allowed(algorithm, asked, batched, hosts);
    if !hosts.strict {
        (choice.algorithm, choice.reason) = start_rule(asked, hosts, &allowed);
    }
    let fastest = fastest(asked.kind, bytes, hosts, menu, &allowed);
    if let Some((priced, seconds)) = fastest
        && !hosts.strict
    {
        choice.algorithm = priced.schedule.algorithm;
        choice.predicted_ns = (seconds * 1e9) as u64;
        choice.reason = Reason::Model;
    }
    if !hosts.strict && one_order(asked, batched) {
        choice.algorithm = if hosts.hosts <= MOST_DIRECT { Algorithm::Direct } else { Algorithm::Doubling };
        choice.predicted_ns = predict(asked, choice.algorithm, hosts, menu).unwrap_or(0);
        choice.reason = Reason::OneOrder;
    }
    if let Some((rule, reason)) = said(asked, policy, &allowed)
        && let Way::Hosts { algorithm, leaders, segment } = rule.way
    {
        if !hosts.strict {
            choice.reason = reason;
        }
        if algorithm != choice.algorithm {
            (choice.algorithm, choice.predicted_ns) = (algorithm, 0);
        }
        if let Some(count) = leaders {
            choice.leaders = possible_leaders(asked.kind, count, hosts);
        }
        choice.segment_bytes = segment.unwrap_or(choice.segment_bytes);
    }
    let cut = matches!(asked.kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast) && !batched;
    if cut && asked.bytes > SMALL.max(choice.segment_bytes as u64) {
        let parts = asked.bytes.div_ceil(choice.segment_bytes as u64);
        choice.segments = usize::try_from(parts).unwrap_or(usize::MAX);
    } else {
        choice.segment_bytes = WHOLE;
    }
    choice
}

/// Time of one schedule for an operation, by the measured link; `None` where nothing is known.
pub fn predict(asked: Asked, algorithm: Algorithm, hosts: &Hosts, menu: &Menu) -> Option<u64> {
    let only = |other: Algorithm| other == algorithm;
    fastest(asked.kind, exchanged(asked, hosts), hosts, menu, &only).map(|(_, seconds)| (seconds * 1e9) as u64)
}

/// Small sums of floats, alone or in a batch, are added in one order whatever the batch holds and whatever the link
/// measured, so that their bits are the same in every run.
fn one_order(asked: Asked, batched: bool) -> bool {
    asked.kind == Kind::AllReduce && order_shows(asked) && (batched || asked.bytes <= SMALL)
}

/// Whether an operation may go by a schedule: the direct one alone in strict mode, and in a batch only one that adds every
/// element in the same order.
pub fn allowed(algorithm: Algorithm, asked: Asked, batched: bool, hosts: &Hosts) -> bool {
    algorithm.serves(asked.kind)
        && (!hosts.strict || algorithm == Algorithm::Direct)
        && (!batched || algorithm.one_order() || !order_shows(asked))
}

/// The rule or line that names the schedule, for `explain`.
pub fn said_by(asked: Asked, batched: bool, hosts: &Hosts, policy: &Policy) -> Option<Rule> {
    let allowed = |algorithm| allowed(algorithm, asked, batched, hosts);
    said(asked, policy, &allowed).map(|(rule, _)| *rule)
}

/// The first rule, or else the line of the table, that names an allowed schedule for this operation.
fn said<'a>(asked: Asked, policy: &'a Policy, allowed: &dyn Fn(Algorithm) -> bool) -> Option<(&'a Rule, Reason)> {
    let names = |rule: &Rule| matches!(rule.way, Way::Hosts { algorithm, .. } if allowed(algorithm));
    for rule in policy.rules.0.iter().filter(|rule| rule.fits(asked.kind, asked.bytes)) {
        if rule.way == Way::Start {
            return None;
        }
        if names(rule) {
            return Some((rule, Reason::Override));
        }
    }
    let lines = policy.table.iter().flat_map(|table| &table.lines).map(|line| &line.rule);
    lines
        .filter(|rule| rule.fits(asked.kind, asked.bytes))
        .find(|rule| names(rule))
        .map(|rule| (rule, Reason::Measured))
}

/// True where the order in which numbers are added shows in the bits of the sum.
fn order_shows(asked: Asked) -> bool {
    matches!(asked.class, Class::Float | Class::Low) && asked.kind.reduces()
}

/// Where nothing is measured: few steps for small ones, few bytes for large ones.
fn start_rule(asked: Asked, hosts: &Hosts, allowed: &dyn Fn(Algorithm) -> bool) -> (Algorithm, Reason) {
    use Algorithm::*;
    let wishes: &[(Algorithm, Reason)] = match (asked.bytes < LARGE, hosts.hosts.is_power_of_two()) {
        (true, true) => &[(Doubling, Reason::PowerOfTwo)],
        (true, false) => &[(Ring, Reason::AnyCount)],
        (false, _) => &[(DoubleTree, Reason::Large), (Binomial, Reason::Large)],
    };
    let last = [Dissemination, Bruck, Binomial, Halving].map(|algorithm| (algorithm, Reason::OneSchedule));
    let all_reduce = asked.kind == Kind::AllReduce;
    let wishes = wishes.iter().filter(|(algorithm, _)| all_reduce || *algorithm != Ring || asked.bytes >= LARGE);
    let found = wishes.chain(&last).find(|(algorithm, _)| allowed(*algorithm));
    found.copied().unwrap_or((Direct, Reason::OneSchedule))
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
    let link = Link { alpha, overhead, beta: hosts.link.beta_ps_per_byte as f64 * 1e-12 };
    let model = Model { host: link, network: link, gamma: INSIDE_NS * 1e-9, ranks_per_host: 1 };
    let mine = menu.priced.iter().filter(|one| one.schedule.kind == kind && allowed(one.schedule.algorithm));
    mine.map(|priced| (priced, priced.seconds(bytes as f64, &model))).min_by(|a, b| a.1.total_cmp(&b.1))
}

/// Bytes as the cost model counts them: the whole vector, or the blocks of all hosts together.
fn exchanged(asked: Asked, hosts: &Hosts) -> u64 {
    match asked.kind {
        Kind::AllGather | Kind::Gather => asked.bytes.saturating_mul(hosts.ranks as u64),
        _ => asked.bytes,
    }
}

/// What one more message in flight costs its ends, which is not the time it is under way: a quarter of a short latency.
fn overhead_ns(link: LinkFacts) -> f64 {
    link.alpha_ns.min(MOST_OVERHEAD_NS * 4) as f64 / 4.0
}

fn cap(count: usize) -> u8 {
    u8::try_from(count.clamp(1, 255)).unwrap_or(u8::MAX)
}

/// A start value: what is large is shared out over all ranks of a host, which fill the link with several connections.
/// The border of kinds that move blocks was measured on hosts with a core for every rank (docs/benchmarks.md).
fn leaders(asked: Asked, hosts: &Hosts) -> u8 {
    let border = if asked.kind == Kind::AllReduce { SMALL } else { LARGE };
    if exchanged(asked, hosts) > border { possible_leaders(asked.kind, u8::MAX, hosts) } else { 1 }
}

/// Leaders of each host where `count` are wished for: at most all; of kinds that cannot be shared by some, all or one.
fn possible_leaders(kind: Kind, count: u8, hosts: &Hosts) -> u8 {
    let most = cap(hosts.least_ranks);
    let even = hosts.ranks == hosts.hosts.saturating_mul(most.into());
    match kind {
        Kind::AllReduce | Kind::Broadcast => count.min(most),
        Kind::AllGather | Kind::ReduceScatter if even && count > 1 => most,
        _ => 1,
    }
}

/// Where the cost of one more message equals what a shorter first and last segment save: a power of two, and at least
/// one whole small operation.
fn segment(bytes: u64, link: LinkFacts) -> usize {
    if !link.known() {
        return SEGMENT;
    }
    let most = (1u64 << 30) as f64;
    let balanced = (bytes as f64 * overhead_ns(link) / INSIDE_NS).sqrt();
    (balanced.clamp(LEAST_SEGMENT, most) as usize).next_power_of_two().min(1 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::rules::Rules;

    const FAST: LinkFacts = LinkFacts { alpha_ns: 30_000, beta_ps_per_byte: 100 };

    fn hosts(count: usize, link: LinkFacts) -> Hosts {
        Hosts { hosts: count, ranks: count * 2, least_ranks: 2, link, strict: false }
    }

    fn asked(kind: Kind, bytes: u64) -> Asked {
        Asked { kind, bytes, class: if kind.reduces() { Class::Float } else { Class::Moved } }.normal()
    }

    #[test]
    fn the_start_rules_hold_where_no_link_was_measured() {
        let policy = Policy::default();
        let at = |count, bytes| {
            let hosts = hosts(count, LinkFacts::default());
            let found = between_hosts(asked(Kind::AllReduce, bytes), false, &hosts, &Menu::new(count), &policy);
            (found.algorithm, found.reason)
        };
        assert_eq!(at(4, LARGE - 1), (Algorithm::Doubling, Reason::PowerOfTwo));
        assert_eq!(at(3, LARGE - 1), (Algorithm::Ring, Reason::AnyCount));
        assert_eq!(at(4, LARGE), (Algorithm::DoubleTree, Reason::Large));
    }

    #[test]
    fn a_measured_link_overrules_the_start_rules_and_a_rule_overrules_both() {
        let menu = Menu::new(3);
        let mut policy = Policy::default();
        let small = asked(Kind::AllReduce, 64);
        let large = asked(Kind::AllReduce, (2 << 20) + 1);
        let exact = Asked { class: Class::Exact, ..small };
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
        let policy = Policy::default();
        for count in [2, 3, 8, 9, 100] {
            let menu = Menu::new(count);
            let links = [
                LinkFacts { alpha_ns: 50_000, beta_ps_per_byte: 800 },
                FAST,
                LinkFacts { alpha_ns: 1_000_000, beta_ps_per_byte: 8000 },
            ];
            let ways = links.map(|link| {
                [(8, false), (SMALL, false), (1 << 20, true)].map(|(bytes, batched)| {
                    between_hosts(asked(Kind::AllReduce, bytes), batched, &hosts(count, link), &menu, &policy).algorithm
                })
            });
            assert!(ways.iter().flatten().all(|way| *way == ways[0][0]), "{count} hosts: {ways:?}");
        }
    }

    #[test]
    fn what_is_large_is_shared_out_as_far_as_its_kind_can_be() {
        let menu = Menu::new(3);
        let leaders = |kind, bytes, rules: &str, hosts: &Hosts| {
            let policy = Policy { rules: Rules::parse(rules).unwrap(), ..Policy::default() };
            between_hosts(asked(kind, bytes), false, hosts, &menu, &policy).leaders
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
        ];
        for _ in 0..20_000 {
            let count = next(20) as usize;
            let facts =
                [LinkFacts::default(), FAST, LinkFacts { alpha_ns: next(1 << 40), beta_ps_per_byte: next(1 << 40) }];
            let hosts = Hosts {
                hosts: count,
                ranks: next(1000) as usize,
                least_ranks: next(300) as usize,
                link: facts[next(3) as usize],
                strict: next(4) == 0,
            };
            let kind = kinds[next(kinds.len() as u64) as usize];
            let bytes = next(u64::MAX) >> next(33);
            let asked =
                Asked { class: [Class::Float, Class::Exact, Class::Low][next(3) as usize], ..asked(kind, bytes) };
            let (batched, policy) = (next(2) == 0, &policies[next(2) as usize]);
            let [menu, another] = &menus[count];
            let found = between_hosts(asked, batched, &hosts, menu, policy);
            assert_eq!(found, between_hosts(asked, batched, &hosts, another, policy));
            assert!(found.leaders >= 1 && usize::from(found.leaders) <= hosts.least_ranks.max(1));
            assert!(found.segments >= 1);
            let cut = (1024..=1 << 30).contains(&found.segment_bytes) && asked.bytes > SMALL && !batched;
            assert!(if found.segments == 1 { found.segment_bytes == WHOLE } else { cut }, "{found:?}");
            let shared = matches!(kind, Kind::AllReduce | Kind::Broadcast | Kind::AllGather | Kind::ReduceScatter);
            assert!(found.leaders == 1 || shared, "{found:?}");
            if !kind.is_p2p() {
                assert!(found.algorithm.serves(kind), "{found:?} for {kind}");
            }
            if hosts.strict {
                assert_eq!(found.algorithm, Algorithm::Direct);
            }
            assert!(!batched || found.algorithm.one_order() || !order_shows(asked), "{found:?}");
        }
    }
}
