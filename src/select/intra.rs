//! Makes the choice inside one host: one exchange of slots, or rounds through the stage and their chunk size.
//!
//! If nothing was measured on this machine, `explain` compares algorithms by predicted times:
//! time = call + exchanges + rounds x cost per round + bytes of the busiest rank x time per byte x ranks per core
//!
//! The constants are from docs/internals/benchmarks.md (two and four ranks on two cores, 2026-11-21). A call through
//! torch takes 2.8 us. An exchange takes 0.2 us between cores and 17 us if ranks share a core. A byte takes 21 ps in
//! the cache and 37 ps from memory. `torch-sagellm tune` replaces predictions by measured times.

use super::rules::{AlgorithmChoice, Rule, Rules};
use super::table::Line;
use super::{Choice, GroupShape, OpDesc, Path, Policy, Reason, unit};
use crate::threads::LEAST_BYTES;
use crate::types::Kind;

/// The chunk size for a tensor that is read from memory, if each rank has one thread. A core's own cache holds two
/// chunks.
pub const SMALL_CHUNK: usize = 128 << 10;
/// Time of a call through torch to the core and back, whatever the algorithm.
const CALL_NS: f64 = 2800.0;
const EXCHANGE_NS: f64 = 200.0;
/// If ranks share a core, they wait for each other by context switches.
const OVERSUBSCRIBED_EXCHANGE_NS: f64 = 17_000.0;
const ROUND_NS: f64 = 300.0;
const OVERSUBSCRIBED_ROUND_NS: f64 = 5_000.0;
/// Time per byte through a slot: every rank writes its own slot, and reads and combines all slots by itself.
const SLOT_NS: f64 = 0.060;
/// Starting and ending a parallel region of the threads of a rank.
const REGION_NS: f64 = 2_000.0;
/// Time per byte through the stage, for a tensor that stays in the cache.
const CACHED_NS: f64 = 0.021;
/// Time per byte through the stage, for a tensor that is read from memory.
const MEMORY_NS: f64 = 0.037;

/// Makes the choice for one operation. Every operation gets a choice. Inside one host (`shape.hosts` is 1), a
/// collective of at least two ranks gets `Slots`, or `Rounds` that fit into the stage.
pub fn choose(desc: OpDesc, shape: &GroupShape, policy: &Policy) -> Choice {
    if desc.kind.is_p2p() {
        return Choice::MESSAGE;
    }
    if shape.ranks < 2 {
        return Choice::ALONE;
    }
    match decisive(desc, shape, policy) {
        Decisive::Rule(_, path) => Choice { path, reason: Reason::Override },
        Decisive::Line(_, path) => Choice { path, reason: Reason::Measured },
        Decisive::Start => start(desc, shape, policy.cache_bytes),
    }
}

/// The source that decides for an operation of a group of at least two ranks.
pub(crate) enum Decisive<'a> {
    Rule(&'a Rule, Path),
    Line(&'a Line, Path),
    Start,
}

pub(crate) fn decisive<'a>(desc: OpDesc, shape: &GroupShape, policy: &'a Policy) -> Decisive<'a> {
    let Rules(rules) = &policy.rules;
    for rule in rules.iter().filter(|rule| rule.fits(desc.kind, desc.bytes)) {
        if rule.way == AlgorithmChoice::Start {
            return Decisive::Start;
        }
        if let Some(path) = possible(rule.way, desc, shape) {
            return Decisive::Rule(rule, path);
        }
    }
    let line = policy.table.as_ref().and_then(|table| table.find(desc.kind, desc.bytes));
    match line.and_then(|line| Some((line, possible(line.rule.way, desc, shape)?))) {
        Some((line, path)) => Decisive::Line(line, path),
        None => Decisive::Start,
    }
}

/// The path for this algorithm, or None if it cannot run this operation.
pub(crate) fn possible(way: AlgorithmChoice, desc: OpDesc, shape: &GroupShape) -> Option<Path> {
    match way {
        AlgorithmChoice::Slots if fits_slot(desc, shape) => Some(Path::Slots),
        AlgorithmChoice::Rounds { chunk } if desc.kind != Kind::Barrier => {
            Some(Path::Rounds { chunk: fitting(chunk, shape) })
        }
        _ => None, // algorithms between hosts do not run inside a host
    }
}

fn fits_slot(desc: OpDesc, shape: &GroupShape) -> bool {
    desc.kind != Kind::AllToAll && desc.bytes <= shape.slot_bytes as u64
}

/// The largest chunk up to `chunk` that fits into the stage, cut at cache lines.
fn fitting(chunk: usize, shape: &GroupShape) -> usize {
    (chunk.min(shape.stage_bytes) / 64 * 64).max(64)
}

/// The size in bytes above which tensors no longer stay in the last-level cache.
pub(crate) fn out_of_cache(cache_bytes: u64) -> u64 {
    cache_bytes / 4 * 3
}

/// The defaults, measured with two ranks on two cores (docs/internals/benchmarks.md). If the tensor stays in the
/// last-level cache, there are as few rounds as the buffers allow. If it is larger, chunks are smaller. If ranks share
/// cores, there are as few rounds as possible, because every round costs context switches. There are also as few rounds
/// as possible if a rank has several threads, because each of them copies a part of each round.
pub(crate) fn start(desc: OpDesc, shape: &GroupShape, cache_bytes: u64) -> Choice {
    let rounds = |chunk: usize, reason| Choice { path: Path::Rounds { chunk: fitting(chunk, shape) }, reason };
    match desc.kind {
        Kind::Barrier => Choice { path: Path::Slots, reason: Reason::NothingToMove },
        Kind::AllToAll => rounds(shape.stage_bytes, Reason::NoCommonSize),
        _ if fits_slot(desc, shape) => Choice { path: Path::Slots, reason: Reason::FitsSlot },
        _ if shape.oversubscribed() => rounds(shape.stage_bytes, Reason::Oversubscribed),
        _ if shape.threads > 1 => rounds(shape.stage_bytes, Reason::SeveralThreads),
        _ if desc.bytes > out_of_cache(cache_bytes) => rounds(SMALL_CHUNK, Reason::OutOfCache),
        _ => rounds(shape.stage_bytes, Reason::InCache),
    }
}

/// Predicted nanoseconds of one operation of `bytes` (as in `slot_payload`) with the algorithm `way`.
pub fn predict(kind: Kind, bytes: u64, way: AlgorithmChoice, shape: &GroupShape, cache_bytes: u64) -> u64 {
    let ranks = shape.ranks.max(1) as f64;
    let oversubscribed = shape.oversubscribed();
    let share = (ranks / shape.cores.max(1) as f64).max(1.0);
    let exchange = if oversubscribed { OVERSUBSCRIBED_EXCHANGE_NS } else { EXCHANGE_NS };
    let time = match way {
        AlgorithmChoice::Rounds { chunk } => {
            let chunk = chunk.clamp(64, shape.stage_bytes.max(64));
            let rounds = bytes.div_ceil(unit(kind, shape.ranks, chunk) as u64).max(1);
            let round = if oversubscribed { OVERSUBSCRIBED_ROUND_NS } else { ROUND_NS };
            // One for the header, one for the stage and one for collecting results, which not every kind needs.
            let exchanges = if oversubscribed { 1.0 } else { 3.0 };
            let byte = per_byte(bytes, cache_bytes) * spill(bytes, chunk as u64, shape, cache_bytes);
            let parts = (chunk.min(bytes as usize) / LEAST_BYTES).clamp(1, shape.threads.max(1));
            // Each of the three steps of a round is one region.
            let regions = if parts > 1 { 3.0 * rounds as f64 * REGION_NS } else { 0.0 };
            let moving = moved(kind, ranks, bytes) * byte * share / parts as f64;
            exchanges * exchange + rounds as f64 * round + regions + moving
        }
        _ => exchange + moved_by_slots(kind, ranks, bytes) * SLOT_NS * share,
    };
    (CALL_NS + time) as u64
}

/// Nanoseconds per byte. Up to an eighth of the last-level cache, this is the time for cached data, because several
/// buffers are used in turn. Above half of the cache it is the time for memory; in between it is interpolated.
fn per_byte(bytes: u64, cache_bytes: u64) -> f64 {
    let (low, high) = (cache_bytes as f64 / 8.0, cache_bytes as f64 / 2.0);
    let at = ((bytes as f64 - low) / (high - low).max(1.0)).clamp(0.0, 1.0);
    CACHED_NS + (MEMORY_NS - CACHED_NS) * at
}

/// Returns a factor for a large stage, which does not stay in the cache while a tensor streams from memory.
/// Measurements show that small chunks are faster there; the factor 1.1 is an assumption.
fn spill(bytes: u64, chunk: u64, shape: &GroupShape, cache_bytes: u64) -> f64 {
    let alone = shape.threads < 2 && !shape.oversubscribed();
    if bytes > out_of_cache(cache_bytes) && alone && chunk > SMALL_CHUNK as u64 { 1.1 } else { 1.0 }
}

/// Bytes that the busiest rank stages and reads, from the table in engine/shm/bulk.rs.
fn moved(kind: Kind, ranks: f64, bytes: u64) -> f64 {
    let n = bytes as f64;
    match kind {
        Kind::AllReduce | Kind::Reduce => n * (3.0 * (1.0 - 1.0 / ranks) + 1.0 / ranks),
        Kind::ReduceScatter => n * 2.0 * (1.0 - 1.0 / ranks),
        Kind::AllGather | Kind::Gather => n * ranks,
        _ => n,
    }
}

fn moved_by_slots(kind: Kind, ranks: f64, bytes: u64) -> f64 {
    match kind {
        Kind::Broadcast | Kind::Scatter => bytes as f64,
        Kind::ReduceScatter => bytes as f64 * 2.0,
        _ => bytes as f64 * ranks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::{Class, DEFAULT_CACHE_BYTES as CACHE, table};
    use crate::types::Dtype;

    const SHAPE: GroupShape =
        GroupShape { ranks: 2, hosts: 1, cores: 2, threads: 1, slot_bytes: 4096, stage_bytes: 512 << 10 };
    fn desc(kind: Kind, bytes: u64) -> OpDesc {
        OpDesc { kind, bytes, class: Class::of(kind, Dtype::F32) }
    }

    #[test]
    fn rule_07_the_choice_ignores_local_facts_and_is_total() {
        let policy = Policy::default();
        let path = |kind, bytes, shape: &GroupShape| choose(desc(kind, bytes), shape, &policy).path;
        for kind in [Kind::AllReduce, Kind::Broadcast, Kind::AllGather, Kind::ReduceScatter] {
            assert_eq!(path(kind, 0, &SHAPE), Path::Slots);
            assert_eq!(path(kind, 4096, &SHAPE), Path::Slots);
            assert_eq!(path(kind, 4097, &SHAPE), Path::Rounds { chunk: 512 << 10 });
            assert_eq!(path(kind, 64 << 20, &SHAPE), Path::Rounds { chunk: 128 << 10 });
            assert_eq!(path(kind, 64 << 20, &GroupShape { ranks: 4, ..SHAPE }), Path::Rounds { chunk: 512 << 10 });
        }
    }

    /// xorshift64*.
    struct Random(u64);
    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
        }
        fn below(&mut self, n: u64) -> u64 {
            (self.next() >> 16) % n
        }
        fn policy(&mut self) -> Policy {
            let count = self.below(5);
            let rules: Vec<String> = (0..count).map(|_| self.rule()).collect();
            let lines = (0..self.below(5)).map(|_| self.rule()).filter(|rule| !rule.ends_with("start"));
            let lines: Vec<Line> =
                lines.map(|rule| Line::parse(&format!("{rule} 10 ns; start 20 ns")).unwrap()).collect();
            let table = table::Table { lines, ..table::tests::example() };
            Policy {
                rules: Rules::parse(&rules.join(";")).unwrap(),
                table: (self.below(2) == 0).then_some(table),
                cache_bytes: self.next() >> self.below(64),
                ..Policy::default()
            }
        }
        fn rule(&mut self) -> String {
            let ways = ["slots", "rounds(1KiB)", "rounds(64KiB)", "rounds(1GiB)", "start"];
            let way = ways[self.below(5) as usize];
            let ops = ["*", "all_reduce", "broadcast", "reduce_scatter"];
            let from = self.next() >> (30 + self.below(34));
            format!("{}:{from}-{}={way}", ops[self.below(4) as usize], from + (self.next() >> 32))
        }
    }

    #[test]
    fn the_choice_is_total_repeatable_and_fits_what_the_engine_has() {
        let mut random = Random(7);
        for _ in 0..if cfg!(miri) { 50 } else { 20_000 } {
            let policy = random.policy();
            let sent = Policy::parse(&policy.text()).unwrap();
            let shape = GroupShape {
                ranks: random.below(300) as usize,
                hosts: 1,
                threads: 1 + random.below(9) as usize,
                cores: random.below(300) as usize,
                slot_bytes: 4096,
                stage_bytes: 32 << 10 << random.below(5),
            };
            let kind = Kind::COLLECTIVES[random.below(9) as usize];
            let desc = desc(kind, random.next() >> random.below(64));
            let choice = choose(desc, &shape, &policy);
            assert_eq!(choice, choose(desc, &shape, &sent), "rank 0 and the ranks it sent its policy to");
            assert_eq!(Choice::from_code(choice.code()), choice);
            let kept = OpDesc::from_load(kind, desc.load());
            assert_eq!(kept, OpDesc { bytes: desc.bytes.min((1 << 56) - 1), ..desc });
            assert_ne!(choice.reason, Reason::Unknown);
            match choice.path {
                Path::Alone => assert!(shape.ranks < 2),
                Path::Slots => assert!(desc.bytes <= 4096 || kind == Kind::Barrier),
                Path::Rounds { chunk } => {
                    assert!(chunk >= 64 && chunk <= shape.stage_bytes && chunk.is_multiple_of(64), "{chunk}");
                }
                other => panic!("{other:?} inside one host"),
            }
        }
        for kind in [Kind::Send, Kind::Recv] {
            assert_eq!(choose(desc(kind, 8), &SHAPE, &Policy::default()), Choice::MESSAGE);
        }
    }

    #[test]
    fn rules_come_before_the_table_and_the_table_before_the_start_values() {
        let mut policy = Policy { table: Some(table::tests::example()), ..Policy::default() };
        let at = |policy: &Policy, bytes| {
            let choice = choose(desc(Kind::AllReduce, bytes), &SHAPE, policy);
            (choice.path.to_string(), choice.reason)
        };
        assert_eq!(at(&policy, 8192), ("rounds(64KiB)".into(), Reason::Measured));
        assert_eq!(at(&policy, 1 << 20), ("rounds(512KiB)".into(), Reason::InCache));
        policy.rules = Rules::parse("all_reduce:8KiB-=rounds(16KiB)").unwrap();
        assert_eq!(at(&policy, 8192), ("rounds(16KiB)".into(), Reason::Override));
        assert_eq!(at(&policy, 5000), ("rounds(64KiB)".into(), Reason::Measured));
        policy.rules = Rules::parse("*:0-=start").unwrap();
        assert_eq!(at(&policy, 8192), ("rounds(512KiB)".into(), Reason::InCache));
    }

    #[test]
    fn several_threads_share_the_largest_rounds_also_out_of_the_cache() {
        let at = |threads, bytes| {
            let shape = GroupShape { threads, ..SHAPE };
            let choice = start(desc(Kind::AllReduce, bytes), &shape, CACHE);
            (choice.path, choice.reason)
        };
        let (small, large) = (Path::Rounds { chunk: SMALL_CHUNK }, Path::Rounds { chunk: SHAPE.stage_bytes });
        assert_eq!(at(1, 1 << 20), (large, Reason::InCache));
        assert_eq!(at(1, CACHE), (small, Reason::OutOfCache));
        assert_eq!([at(2, 1 << 20), at(2, CACHE)], [(large, Reason::SeveralThreads); 2]);
    }

    const APART: GroupShape =
        GroupShape { ranks: 2, hosts: 1, cores: 2, threads: 1, slot_bytes: 4096, stage_bytes: 512 << 10 };

    /// Medians of docs/internals/benchmarks.md in microseconds. The model ranks algorithms and predicts only an order
    /// of magnitude, so the test accepts a factor between 0.6 and 1.67.
    #[test]
    fn the_start_values_are_near_the_measured_table() {
        let oversubscribed = GroupShape { ranks: 4, stage_bytes: 512 << 10, ..APART };
        let big = AlgorithmChoice::Rounds { chunk: 512 << 10 };
        let small = AlgorithmChoice::Rounds { chunk: 128 << 10 };
        let cases = [
            (Kind::AllReduce, 8, AlgorithmChoice::Slots, APART, 3.04),
            (Kind::AllReduce, 64 << 10, big, APART, 6.40),
            (Kind::AllReduce, 1 << 20, big, APART, 49.5),
            (Kind::AllReduce, 64 << 20, small, APART, 5210.0),
            (Kind::AllGather, 512 << 10, big, APART, 33.8),
            (Kind::ReduceScatter, 1 << 20, big, APART, 30.6),
            (Kind::Broadcast, 1 << 20, big, APART, 24.1),
            (Kind::AllReduce, 8, AlgorithmChoice::Slots, oversubscribed, 20.0),
            (Kind::AllReduce, 1 << 20, big, oversubscribed, 171.0),
            (Kind::AllReduce, 16 << 20, big, oversubscribed, 3170.0),
        ];
        for (kind, bytes, way, shape, measured) in cases {
            let ratio = predict(kind, bytes, way, &shape, CACHE) as f64 / 1000.0 / measured;
            assert!((0.6..1.67).contains(&ratio), "{kind} of {bytes} bytes by {way}: {ratio} of what was measured");
        }
    }
}
