//! Computes the cost of a schedule: the time that its steps take in an alpha-beta-gamma model, from its messages and
//! parts. Pure, and equal on every rank. The choice between hosts uses the cost if the link was measured and no
//! stronger source decides (`inter`), and `torch-sagellm simulate` prints it.
//!
//! A step takes as long as its slowest rank: `alpha + (messages - 1) * overhead + bytes * beta`, over the network or
//! inside the host, whichever is longer, plus `gamma` for every byte that this rank combines. Long messages count as
//! two (`Link::short_bytes`). Ranks of one host share the host's network link, so their bytes add up. Inside a host
//! every rank has its own link. Ranks are numbered host by host. Links carry data in both directions at the same time.
//! In the model all ranks start a step together. Real ranks drift, so a pipeline may be a little faster than predicted.
//! A machine with fewer cores than ranks is slower than predicted.
//!
//! This file also computes the cost of hierarchical all_reduces, for `torch-sagellm simulate`. The ranks of a host
//! reduce to leaders, the leaders exchange with other hosts' leaders, and the result is distributed inside the host.
//! The data is cut into segments, so that these three phases overlap.
//!
//! Inside a host the cost is that of direct exchange, because in shared memory every rank reads the others' data. If
//! there is one leader per host, the phases are reduce, all_reduce between leaders, broadcast. If every rank is a
//! leader, they are reduce_scatter, exchange of each rank's share, all_gather; then the leaders share the host's link.
//! Segments pass through the phases as a pipeline, so the slowest phase counts once for each segment and the others
//! count only once. The model treats every host as if it had as many ranks as the largest host.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::algorithms::{Algorithm, How, Schedule, count};
use crate::types::Kind;

/// Parameters of a link between two ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds until an empty message has arrived.
    pub alpha: f64,
    /// Seconds for each further message of the same step, which is work of the sender or the receiver.
    pub overhead: f64,
    /// Seconds per byte.
    pub beta: f64,
    /// If the messages of a step have more bytes than this on average, each of them counts as two, because its header
    /// and its data are sent separately.
    pub short_bytes: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// The link between two ranks of one host.
    pub host: Link,
    /// The link between hosts. `beta` is for the network link that all ranks of a host share.
    pub network: Link,
    /// Seconds per byte that is combined.
    pub gamma: f64,
    /// Ranks on each host; the last host may have fewer.
    pub ranks_per_host: usize,
}

/// The load of one rank in one step. `network_parts` is the load of its whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Load {
    host_messages: usize,
    host_parts: usize,
    network_messages: usize,
    network_parts: usize,
    combined_parts: usize,
}

/// A schedule together with the loads of its steps. The loads hold for any size and any links.
pub struct Priced {
    pub schedule: Schedule,
    /// For each combination of loads of the busiest ranks: the number of steps with these loads. Only the sum of the
    /// steps is needed, so their order is not kept.
    steps: BTreeMap<Vec<Load>, usize>,
}

/// If there are at most this many ranks, the loads of all ranks are examined in every step.
const ALL_RANKS: usize = 64;
/// The numbers of segments that are tried for pipelined algorithms.
const SEGMENTS: [usize; 6] = [1, 4, 16, 64, 256, 1024];

impl Priced {
    pub fn new(schedule: Schedule, ranks_per_host: usize) -> Priced {
        Priced::sampled(schedule, ranks_per_host.max(1), schedule.ranks <= ALL_RANKS)
    }

    fn sampled(schedule: Schedule, ranks_per_host: usize, all: bool) -> Priced {
        let mut steps: BTreeMap<Vec<Load>, usize> = BTreeMap::new();
        let hosts_of = |ranks: Vec<usize>| ranks.into_iter().map(|rank| rank / ranks_per_host).collect::<BTreeSet<_>>();
        let mut k = 0;
        while k < schedule.steps() {
            let alike = schedule.alike(k);
            let hosts = hosts_of(if all { (0..schedule.ranks).collect() } else { schedule.busiest(k) });
            let mut loads: Vec<Load> =
                hosts.into_iter().flat_map(|host| host_loads(&schedule, host, ranks_per_host, k)).collect();
            loads.sort_unstable();
            loads.dedup();
            *steps.entry(only_greatest(&loads)).or_insert(0) += alike;
            k += alike;
        }
        Priced { schedule, steps }
    }

    /// Returns the predicted seconds. `bytes` is the size of the vector for all_reduce, broadcast and reduce; of all
    /// blocks together for all_gather, reduce_scatter, gather and scatter; and of one rank's data for all_to_all.
    pub fn seconds(&self, bytes: f64, model: &Model) -> f64 {
        let parts = if self.schedule.kind == Kind::AllToAll { self.schedule.ranks } else { self.schedule.parts() };
        let part = if parts == 0 { 0.0 } else { bytes / parts as f64 };
        let over = |link: &Link, messages: usize, parts: usize| {
            let (count, bytes) = (messages as f64, parts as f64 * part);
            let sent = if bytes > count * link.short_bytes { 2.0 * count } else { count };
            if messages == 0 { 0.0 } else { link.alpha + (sent - 1.0) * link.overhead + bytes * link.beta }
        };
        let step = |load: &Load| {
            over(&model.host, load.host_messages, load.host_parts).max(over(
                &model.network,
                load.network_messages,
                load.network_parts,
            )) + load.combined_parts as f64 * part * model.gamma
        };
        self.steps.iter().map(|(loads, times)| loads.iter().map(step).fold(0.0, f64::max) * *times as f64).sum()
    }
}

/// Every schedule of an algorithm in `only` that serves `kind`. A pipelined algorithm appears once for each number of
/// segments.
pub fn candidates(kind: Kind, ranks: usize, root: usize, ranks_per_host: usize, only: &[Algorithm]) -> Vec<Priced> {
    only.iter()
        .flat_map(|algorithm| {
            let segments: &[usize] = if algorithm.pipelines(kind) { &SEGMENTS } else { &SEGMENTS[..1] };
            segments.iter().filter_map(|segments| Schedule::new(*algorithm, kind, ranks, root, *segments))
        })
        .map(|schedule| Priced::new(schedule, ranks_per_host))
        .collect()
}

/// The fastest candidate for this size; among equally fast ones, the first. None if there are no candidates.
pub fn fastest<'a>(candidates: &'a [Priced], bytes: f64, model: &Model) -> Option<(&'a Priced, f64)> {
    candidates.iter().map(|priced| (priced, priced.seconds(bytes, model))).min_by(|a, b| a.1.total_cmp(&b.1))
}

/// The loads of the ranks of a host in step `k`.
fn host_loads(s: &Schedule, host: usize, ranks_per_host: usize, k: usize) -> Vec<Load> {
    let ranks = host * ranks_per_host..((host + 1) * ranks_per_host).min(s.ranks);
    let (mut network_out, mut network_in) = (0, 0);
    let mut loads = Vec::with_capacity(ranks.len());
    for rank in ranks.clone() {
        let step = s.step(rank, k);
        let inside = |peer: usize| ranks.contains(&peer);
        let (sends, sent, away, away_parts) = sorted(step.sends.iter().map(|x| (inside(x.peer), &x.parts)));
        let (recvs, received, from, from_parts) = sorted(step.recvs.iter().map(|x| (inside(x.peer), &x.parts)));
        network_out += away_parts;
        network_in += from_parts;
        loads.push(Load {
            host_messages: sends.max(recvs),
            host_parts: sent.max(received),
            network_messages: away.max(from),
            network_parts: 0,
            combined_parts: step.recvs.iter().filter(|x| x.how != How::Copy).map(|x| count(&x.parts)).sum(),
        });
    }
    for load in &mut loads {
        load.network_parts = if load.network_messages > 0 { network_out.max(network_in) } else { 0 };
    }
    loads
}

/// Returns the numbers of messages and of parts inside the host, and then those to or from other hosts.
fn sorted<'a>(transfers: impl Iterator<Item = (bool, &'a Vec<Range<usize>>)>) -> (usize, usize, usize, usize) {
    transfers.fold(
        (0, 0, 0, 0),
        |(a, b, c, d), (inside, parts)| {
            if inside { (a + 1, b + count(parts), c, d) } else { (a, b, c + 1, d + count(parts)) }
        },
    )
}

/// Drops a load if another load is at least as large in every value, because the dropped load can never be the slowest.
fn only_greatest(loads: &[Load]) -> Vec<Load> {
    let within = |a: &Load, b: &Load| {
        a.host_messages <= b.host_messages
            && a.host_parts <= b.host_parts
            && a.network_messages <= b.network_messages
            && a.network_parts <= b.network_parts
            && a.combined_parts <= b.combined_parts
    };
    loads.iter().filter(|a| !loads.iter().any(|b| *a != b && within(a, b))).copied().collect()
}

/// The algorithms that leaders may use between hosts.
const BETWEEN: [Algorithm; 6] =
    [Algorithm::Doubling, Algorithm::Halving, Algorithm::Ring, Algorithm::Torus, Algorithm::Direct, Algorithm::TwoStep];
const PARTS: [usize; 5] = [1, 2, 4, 16, 64];

/// One way to run a hierarchical all_reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HierarchicalPlan {
    /// The algorithm between the leaders.
    pub algorithm: Algorithm,
    /// Leaders per host.
    pub leaders: usize,
    /// Segments into which the vector is cut.
    pub segments: usize,
}

/// The schedules of all plans, with their loads. The loads hold for any size and any links.
pub struct HierarchicalCosts {
    per_host: usize,
    reduce: Priced,
    broadcast: Priced,
    scatter: Priced,
    gather: Priced,
    between: Vec<Priced>,
}

impl HierarchicalCosts {
    /// None if there are no ranks.
    pub fn new(ranks: usize, ranks_per_host: usize) -> Option<HierarchicalCosts> {
        let per_host = ranks_per_host.clamp(1, ranks.max(1));
        let hosts = ranks.div_ceil(per_host);
        let priced = |algorithm, kind, ranks, per_host| {
            Some(Priced::new(Schedule::new(algorithm, kind, ranks, 0, 1)?, per_host))
        };
        let inside = |kind| priced(Algorithm::Direct, kind, per_host, per_host);
        Some(HierarchicalCosts {
            per_host,
            reduce: inside(Kind::Reduce)?,
            broadcast: inside(Kind::Broadcast)?,
            scatter: inside(Kind::ReduceScatter)?,
            gather: inside(Kind::AllGather)?,
            between: BETWEEN
                .into_iter()
                .map(|algorithm| priced(algorithm, Kind::AllReduce, hosts, 1))
                .collect::<Option<_>>()?,
        })
    }

    /// The fastest plan for this size, with its predicted seconds.
    pub fn fastest(&self, bytes: f64, model: &Model) -> (HierarchicalPlan, f64) {
        let leaders = if self.per_host > 1 { vec![1, self.per_host] } else { vec![1] };
        let mut best: Option<(HierarchicalPlan, f64)> = None;
        for between in &self.between {
            for leaders in &leaders {
                for segments in PARTS {
                    let algorithm = between.schedule.algorithm;
                    let choice = HierarchicalPlan { algorithm, leaders: *leaders, segments };
                    let seconds = self.seconds(between, choice, bytes, model);
                    if best.is_none_or(|(_, least)| seconds < least) {
                        best = Some((choice, seconds));
                    }
                }
            }
        }
        best.expect("there is always a plan")
    }

    fn seconds(&self, between: &Priced, choice: HierarchicalPlan, bytes: f64, model: &Model) -> f64 {
        let bytes = bytes / choice.segments as f64;
        let (first, last) =
            if choice.leaders == 1 { (&self.reduce, &self.broadcast) } else { (&self.scatter, &self.gather) };
        let leaders = choice.leaders as f64;
        let shared = Model { network: Link { beta: model.network.beta * leaders, ..model.network }, ..*model };
        let stages =
            [first.seconds(bytes, model), between.seconds(bytes / leaders, &shared), last.seconds(bytes, model)];
        let slowest = stages.iter().copied().fold(0.0, f64::max);
        stages.iter().sum::<f64>() + (choice.segments - 1) as f64 * slowest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(alpha: f64, beta: f64) -> Link {
        Link { alpha, overhead: alpha / 4.0, beta, short_bytes: f64::INFINITY }
    }

    fn model(ranks_per_host: usize) -> Model {
        Model { host: link(1e-6, 1e-10), network: link(1e-4, 1e-9), gamma: 1e-10, ranks_per_host }
    }

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * b.abs()
    }

    /// Compares the model with the closed formulas of textbooks, for ranks that all have the same kind of link.
    #[test]
    fn known_formulas() {
        let flat = Model { host: link(3.0, 0.5), network: link(3.0, 0.5), gamma: 0.25, ranks_per_host: 64 };
        let price = |algorithm, kind, ranks, segments, bytes| {
            Priced::new(Schedule::new(algorithm, kind, ranks, 0, segments).unwrap(), 64).seconds(bytes, &flat)
        };
        for p in [2usize, 3, 8, 13, 64] {
            let (n, q) = (1000.0, p as f64);
            let share = n * (q - 1.0) / q;
            let ring = price(Algorithm::Ring, Kind::AllReduce, p, 1, n);
            assert!(near(ring, 2.0 * (q - 1.0) * 3.0 + 2.0 * share * 0.5 + share * 0.25), "{p}: {ring}");
            let tree = price(Algorithm::Binomial, Kind::Broadcast, p, 1, n);
            assert!(near(tree, q.log2().ceil() * (3.0 + n * 0.5)), "{p}: {tree}");
            let direct = price(Algorithm::Direct, Kind::AllGather, p, 1, n);
            assert!(near(direct, 3.0 + (q - 2.0) * 0.75 + share * 0.5), "{p}: {direct}");
            let chain = price(Algorithm::Ring, Kind::Broadcast, p, 4, n);
            assert!(near(chain, (4.0 + q - 2.0) * (3.0 + n / 4.0 * 0.5)), "{p}: {chain}");
            if p.is_power_of_two() {
                let halving = price(Algorithm::Halving, Kind::AllReduce, p, 1, n);
                assert!(near(halving, 2.0 * q.log2() * 3.0 + 2.0 * share * 0.5 + share * 0.25), "{p}: {halving}");
            }
        }
    }

    #[test]
    fn a_long_message_costs_one_more_overhead() {
        let network = Link { short_bytes: 100.0, ..link(4.0, 0.0) };
        let model = Model { host: network, network, gamma: 0.0, ranks_per_host: 1 };
        let gather = Priced::new(Schedule::new(Algorithm::Direct, Kind::AllGather, 4, 0, 1).unwrap(), 1);
        // Three messages of a quarter of the bytes each.
        assert!(near(gather.seconds(400.0, &model), 4.0 + 2.0));
        assert!(near(gather.seconds(404.0, &model), 4.0 + 5.0));
    }

    #[test]
    fn ranks_of_a_host_share_its_link() {
        // The four ranks of one host and the four of the other exchange at the same time.
        let s = Schedule::new(Algorithm::Doubling, Kind::AllReduce, 8, 0, 1).unwrap();
        let free = link(0.0, 0.0);
        let model = Model { host: free, network: Link { beta: 1.0, ..free }, gamma: 0.0, ranks_per_host: 4 };
        assert!(near(Priced::new(s, 4).seconds(100.0, &model), 400.0));
    }

    /// If only few ranks are examined, the cost must be at most 5 per cent below that of examining all ranks, and not
    /// above it; otherwise the cost for 100,000 ranks would be a guess.
    #[test]
    fn few_ranks_tell_what_all_tell() {
        let shapes = [(64, 8), (64, 1), (60, 4), (48, 3), (37, 5), (128, 16), (81, 9), (200, 8), (300, 7)];
        for kind in Kind::COLLECTIVES {
            for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| algorithm.serves(kind)) {
                for (ranks, per_host) in shapes {
                    for (root, segments) in [(0, 1), (0, 4), (ranks / 3, 16)] {
                        let s = Schedule::new(algorithm, kind, ranks, root, segments).unwrap();
                        let seconds = |all| Priced::sampled(s, per_host, all).seconds(1e6, &model(per_host));
                        let (few, all) = (seconds(false), seconds(true));
                        assert!(few <= all * 1.000_001, "{s:?} {per_host}: {few} of {all}");
                        assert!(few >= all * 0.95, "{s:?} {per_host} a host: {few} of {all}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_hundred_thousand_ranks_have_a_price() {
        let priced = candidates(Kind::AllReduce, 100_000, 0, 8, &Algorithm::ALL);
        let (small, _) = fastest(&priced, 8.0, &model(8)).unwrap();
        let (large, seconds) = fastest(&priced, 1e9, &model(8)).unwrap();
        assert!(small.schedule.steps() < 40, "{:?}", small.schedule);
        // No all_reduce is faster than its bandwidth bound: all bytes enter and leave a host once.
        assert!(seconds > 1e9 * 1e-9, "{:?} in {seconds} s", large.schedule);
    }

    fn far(ranks_per_host: usize) -> Model {
        Model {
            host: Link { overhead: 2e-7, ..link(1e-6, 1e-10) },
            network: Link { overhead: 5e-6, ..link(1e-3, 8e-9) },
            gamma: 1e-10,
            ranks_per_host,
        }
    }

    #[test]
    fn small_ones_take_one_latency_and_large_ones_fill_the_link() {
        let (costs, model) = (HierarchicalCosts::new(4, 2).unwrap(), far(2));
        let (small, seconds) = costs.fastest(8.0, &model);
        assert_eq!(small.segments, 1);
        assert!(seconds < 1.1e-3, "one latency, not {seconds} s");
        let bytes = 16.0 * 1024.0 * 1024.0;
        let (large, seconds) = costs.fastest(bytes, &model);
        let bound = bytes * model.network.beta; // of two hosts: all bytes once per direction
        assert!(seconds > bound && seconds < bound / 0.9, "{large:?}: {seconds} s, bound {bound} s");
    }

    #[test]
    fn two_levels_beat_one_where_hosts_are_far_apart() {
        let (costs, model) = (HierarchicalCosts::new(64, 8).unwrap(), far(8));
        let flat = candidates(Kind::AllReduce, 64, 0, 8, &Algorithm::ALL);
        for bytes in [8.0, 1e4, 1e6, 1e9] {
            let (_, one) = fastest(&flat, bytes, &model).unwrap();
            let (choice, two) = costs.fastest(bytes, &model);
            assert!(two <= one * 1.01, "{bytes} bytes: {choice:?} {two} s, flat {one} s");
        }
    }

    #[test]
    fn one_host_needs_no_link() {
        let (costs, model) = (HierarchicalCosts::new(4, 8).unwrap(), far(8));
        let (_, seconds) = costs.fastest(1e6, &model);
        assert!(seconds < model.network.alpha, "{seconds}");
        assert!(HierarchicalCosts::new(0, 8).is_none());
    }
}
