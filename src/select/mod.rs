//! How an operation travels, and why: a pure function of what all ranks share. Nothing local may enter here: no clock, no
//! queue length, no `sync` flag; two ranks that chose differently would wait for one another for ever.
//!
//! Who decides, from strong to weak: the user's rules, a line of the measured table, the start values. The first two are
//! rank 0's [`policy`], which every rank of the group has.
//!
//! | file | |
//! | --- | --- |
//! | `mod` | `choose`, and the start values |
//! | `reason` | why, in one byte |
//! | `rules` | the syntax of rules; `size`: of sizes |
//! | `table`, `policy` | what was measured, and what rank 0 sends, as text |
//! | `file` | tables on disk: the only effects |
//! | `model`, `explain` | predicted times inside a host, and the whole answer in words |
//! | `hosts`, `cost` | the choice between hosts, and predicted times of schedules |
//! | `levels` | predicted times of all_reduce inside hosts and between them, for `sagellm simulate` |

pub mod cost;
pub mod explain;
pub mod file;
pub mod hosts;
pub mod levels;
pub mod model;
pub mod policy;
pub mod reason;
pub mod rules;
pub mod size;
pub mod table;

use std::fmt;

pub use self::policy::Policy;
pub use self::reason::Reason;
use self::rules::{Rule, Rules, Way};
use self::table::Line;

use crate::algorithms::Algorithm;
use crate::types::{Dtype, Kind, Request};

/// Last-level cache where the machine does not say.
pub const DEFAULT_CACHE_BYTES: u64 = 32 << 20;
/// Chunk of a tensor that comes from memory: two of them a rank stay in a core's own cache.
pub const SMALL_CHUNK: usize = 128 << 10;

/// The way an operation took or would take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Not recorded.
    Unknown,
    /// A group of one rank: a local copy.
    Alone,
    /// A send or a receive (`engine/shm/p2p.rs`).
    Message,
    /// One exchange of tagged slots (`engine/shm/small.rs`).
    Slots,
    /// Rounds through staging buffers, `chunk` bytes a round (`engine/shm/bulk.rs`).
    Rounds { chunk: usize },
    /// A schedule between the leaders of several hosts, `segment` bytes at a time or `WHOLE` (`hosts`).
    Hosts { algorithm: Algorithm, leaders: u8, segment: usize },
    /// torch's own backend.
    Delegate,
    /// Several operations of ours, which have records of their own.
    Composed,
    /// The library of a device's vendor.
    Device,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub path: Path,
    pub reason: Reason,
}

impl Choice {
    pub const ALONE: Choice = Choice { path: Path::Alone, reason: Reason::Alone };
    pub const MESSAGE: Choice = Choice { path: Path::Message, reason: Reason::Message };
    pub const DELEGATE: Choice = Choice { path: Path::Delegate, reason: Reason::Delegated };
    pub const COMPOSED: Choice = Choice { path: Path::Composed, reason: Reason::Composed };
    pub const DEVICE: Choice = Choice { path: Path::Device, reason: Reason::Vendor };

    /// As an operation keeps it: path (8 bits), reason (8), leaders (16), bytes of a chunk or segment (32).
    pub fn code(self) -> u64 {
        let (leaders, bytes) = match self.path {
            Path::Rounds { chunk } => (0, chunk),
            Path::Hosts { leaders, segment, .. } => (leaders, segment),
            _ => (0, 0),
        };
        let bytes = bytes.min(u32::MAX as usize) as u64;
        u64::from(self.path.code()) | (self.reason as u64) << 8 | u64::from(leaders) << 16 | bytes << 32
    }

    /// What `code` gave; anything else is `Unknown`.
    pub fn from_code(code: u64) -> Choice {
        let path = match code as u8 {
            SLOTS => Path::Slots,
            ROUNDS => Path::Rounds { chunk: (code >> 32) as usize },
            LOCAL => Path::Alone,
            MESSAGE => Path::Message,
            DELEGATE => Path::Delegate,
            COMPOSED => Path::Composed,
            DEVICE => Path::Device,
            path => match Algorithm::from_code(path.wrapping_sub(BEFORE_ALGORITHMS)) {
                Some(algorithm) => {
                    Path::Hosts { algorithm, leaders: (code >> 16) as u8, segment: (code >> 32) as usize }
                }
                None => Path::Unknown,
            },
        };
        Choice { path, reason: Reason::from_u8((code >> 8) as u8) }
    }
}

/// The codes of paths, for records and statistics; they never change their meaning. 0 is an operation that has not set
/// out.
const SLOTS: u8 = 1;
const ROUNDS: u8 = 2;
const LOCAL: u8 = 3;
const MESSAGE: u8 = 4;
const DELEGATE: u8 = 5;
const COMPOSED: u8 = 31;
const DEVICE: u8 = 30;
/// Between hosts: this plus the algorithm's own code.
const BEFORE_ALGORITHMS: u8 = 5;

impl Path {
    /// One byte for records and statistics; `path_name` reads it.
    pub fn code(self) -> u8 {
        match self {
            Path::Unknown => 0,
            Path::Slots => SLOTS,
            Path::Rounds { .. } => ROUNDS,
            Path::Alone => LOCAL,
            Path::Message => MESSAGE,
            Path::Delegate => DELEGATE,
            Path::Composed => COMPOSED,
            Path::Device => DEVICE,
            Path::Hosts { algorithm, .. } => BEFORE_ALGORITHMS + algorithm.code(),
        }
    }
}

/// What a code is called; `none` for an operation that has not set out.
pub fn path_name(code: u8) -> &'static str {
    const NAMES: [&str; 6] = ["none", "slots", "rounds", "local", "message", "delegate"];
    let between = || Algorithm::from_code(code.wrapping_sub(BEFORE_ALGORITHMS)).map(Algorithm::name);
    match code {
        COMPOSED => return "composed",
        DEVICE => return "device",
        _ => (),
    }
    NAMES.get(usize::from(code)).copied().or_else(between).unwrap_or("unknown")
}

/// What a reason's code is called.
pub fn reason_name(code: u8) -> &'static str {
    Reason::from_u8(code).name()
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Unknown => f.write_str("unknown"),
            Path::Alone => f.write_str("local copy"),
            Path::Message => f.write_str("message"),
            Path::Slots => write!(f, "{}", Way::Slots),
            Path::Rounds { chunk } => write!(f, "{}", Way::Rounds { chunk: *chunk }),
            Path::Delegate => f.write_str("delegate"),
            Path::Composed => f.write_str("composed"),
            Path::Device => f.write_str("device"),
            Path::Hosts { algorithm, leaders, segment: WHOLE } => {
                write!(f, "{}(leaders={leaders})", algorithm.name())
            }
            Path::Hosts { algorithm, leaders, segment } => {
                write!(f, "{}(leaders={leaders},segment={})", algorithm.name(), self::size::text(*segment as u64))
            }
        }
    }
}

/// The segment of what is not cut.
pub const WHOLE: usize = 0;

/// What the choice sees of an element type. The numbers stand in records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Class {
    /// Data that is moved and never combined.
    Moved = 0,
    /// Integers and booleans: the order of a sum does not show.
    Exact = 1,
    Float = 2,
    /// Two-byte floats, which are rounded once from 32 bits.
    Low = 3,
}

impl Class {
    pub fn of(kind: Kind, dtype: Dtype) -> Class {
        use Dtype::*;
        match dtype {
            _ if !kind.reduces() => Class::Moved,
            Bytes => Class::Moved,
            Bool | U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64 => Class::Exact,
            F32 | F64 | C64 | C128 => Class::Float,
            F16 | Bf16 | C32 | F8E4M3 | F8E5M2 => Class::Low,
        }
    }
}

/// An operation, as far as the choice sees it. `bytes` as `slot_payload` counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    pub kind: Kind,
    pub bytes: u64,
    pub class: Class,
}

impl Asked {
    pub fn of(request: &Request, ranks: usize) -> Asked {
        let bytes = match request.kind {
            Kind::Send => sum(&request.inputs),
            Kind::Recv => sum(&request.outputs),
            _ => slot_payload(request, ranks),
        };
        Asked { kind: request.kind, bytes: bytes as u64, class: Class::of(request.kind, request.dtype) }.normal()
    }

    /// As an operation keeps it: class (8 bits), bytes (56). Its kind it has anyway.
    pub fn load(self) -> u64 {
        (self.class as u64) << 56 | self.bytes.min((1 << 56) - 1)
    }

    /// What `load` gave.
    pub fn from_load(kind: Kind, load: u64) -> Asked {
        let class = match load >> 56 {
            1 => Class::Exact,
            2 => Class::Float,
            3 => Class::Low,
            _ => Class::Moved,
        };
        Asked { kind, bytes: load & ((1 << 56) - 1), class }
    }

    /// What several operations of one kind are together.
    pub fn together(all: impl IntoIterator<Item = Asked>) -> Option<Asked> {
        all.into_iter().reduce(|all, one| Asked {
            bytes: all.bytes.saturating_add(one.bytes),
            // Of different classes the one that asks for most care.
            class: if one.class == all.class { all.class } else { Class::Float },
            ..all
        })
    }

    /// Without what the ranks do not share: none knows all the sizes of an all_to_all, and a barrier has none.
    pub fn normal(self) -> Asked {
        if matches!(self.kind, Kind::AllToAll | Kind::Barrier) { Asked { bytes: 0, ..self } } else { self }
    }
}

/// What all ranks of a group know about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub ranks: usize,
    pub hosts: usize,
    /// Cores that the ranks of this host may use together; agreed when they met.
    pub cores: usize,
    pub slot_bytes: usize,
    pub stage_bytes: usize,
}

impl Shape {
    /// Of ranks that have no memory in common.
    pub fn without_memory(ranks: usize) -> Shape {
        Shape { ranks, hosts: 1, cores: 1, slot_bytes: 0, stage_bytes: 0 }
    }

    pub fn crowded(&self) -> bool {
        self.ranks > self.cores
    }
}

fn sum(spans: &[crate::types::Span]) -> usize {
    spans.iter().map(|span| span.bytes).sum()
}

/// Bytes that the rank with the most writes into its slot when the operation goes by slots.
pub fn slot_payload(request: &Request, ranks: usize) -> usize {
    match request.kind {
        Kind::AllReduce | Kind::Reduce | Kind::Gather | Kind::ReduceScatter => sum(&request.inputs),
        Kind::Broadcast => sum(&request.inputs).max(sum(&request.outputs)),
        Kind::AllGather => {
            request.out_blocks.iter().copied().max().unwrap_or_else(|| sum(&request.outputs) / ranks.max(1))
        }
        Kind::Scatter => sum(&request.outputs) * ranks,
        // The slot always carries the block table; whether the blocks fit too is said in its header (small.rs).
        Kind::AllToAll => ranks * 8,
        Kind::Barrier | Kind::Send | Kind::Recv => 0,
    }
}

/// Bytes of one block that travel in one round of `chunk` bytes: kinds with a block for every peer share the chunk out.
pub fn unit(kind: Kind, ranks: usize, chunk: usize) -> usize {
    match kind {
        Kind::Scatter | Kind::ReduceScatter | Kind::AllToAll => (chunk / ranks.max(1) / 64 * 64).max(64),
        _ => chunk.max(1),
    }
}

/// The way of one operation, for every possible question. Inside one host (`shape.hosts` is 1) a collective of at least
/// two ranks gets `Slots` or `Rounds`, and what it gets fits into the slots and the stage.
pub fn choose(asked: Asked, shape: &Shape, policy: &Policy) -> Choice {
    if asked.kind.is_p2p() {
        return Choice::MESSAGE;
    }
    if shape.ranks < 2 {
        return Choice::ALONE;
    }
    match decisive(asked, shape, policy) {
        Decisive::Rule(_, path) => Choice { path, reason: Reason::Override },
        Decisive::Line(_, path) => Choice { path, reason: Reason::Measured },
        Decisive::Start => start(asked, shape, policy.cache_bytes),
    }
}

/// What has the last word about an operation of a group with peers.
pub(crate) enum Decisive<'a> {
    Rule(&'a Rule, Path),
    Line(&'a Line, Path),
    Start,
}

pub(crate) fn decisive<'a>(asked: Asked, shape: &Shape, policy: &'a Policy) -> Decisive<'a> {
    let Rules(rules) = &policy.rules;
    for rule in rules.iter().filter(|rule| rule.fits(asked.kind, asked.bytes)) {
        if rule.way == Way::Start {
            return Decisive::Start;
        }
        if let Some(path) = possible(rule.way, asked, shape) {
            return Decisive::Rule(rule, path);
        }
    }
    let line = policy.table.as_ref().and_then(|table| table.find(asked.kind, asked.bytes));
    match line.and_then(|line| Some((line, possible(line.rule.way, asked, shape)?))) {
        Some((line, path)) => Decisive::Line(line, path),
        None => Decisive::Start,
    }
}

/// The path by which this operation can go this way, if it can.
pub(crate) fn possible(way: Way, asked: Asked, shape: &Shape) -> Option<Path> {
    match way {
        Way::Slots if fits_slot(asked, shape) => Some(Path::Slots),
        Way::Rounds { chunk } if asked.kind != Kind::Barrier => Some(Path::Rounds { chunk: fitting(chunk, shape) }),
        _ => None, // a way between hosts is none inside of one
    }
}

fn fits_slot(asked: Asked, shape: &Shape) -> bool {
    asked.kind != Kind::AllToAll && asked.bytes <= shape.slot_bytes as u64
}

/// A chunk that the stage holds, cut at cache lines.
fn fitting(chunk: usize, shape: &Shape) -> usize {
    (chunk.min(shape.stage_bytes) / 64 * 64).max(64)
}

/// Where tensors no longer stay in the last-level cache.
pub(crate) fn out_of_cache(cache_bytes: u64) -> u64 {
    cache_bytes / 4 * 3
}

/// Start values, measured with two ranks on two cores (docs/benchmarks.md): as few rounds as the buffers allow while the
/// tensor stays in the last-level cache, smaller chunks where it does not, as few rounds as possible where ranks share
/// cores, because then every round costs context switches.
pub(crate) fn start(asked: Asked, shape: &Shape, cache_bytes: u64) -> Choice {
    let rounds = |chunk: usize, reason| Choice { path: Path::Rounds { chunk: fitting(chunk, shape) }, reason };
    match asked.kind {
        Kind::Barrier => Choice { path: Path::Slots, reason: Reason::NothingToMove },
        Kind::AllToAll => rounds(shape.stage_bytes, Reason::NoCommonSize),
        _ if fits_slot(asked, shape) => Choice { path: Path::Slots, reason: Reason::FitsSlot },
        _ if shape.crowded() => rounds(shape.stage_bytes, Reason::Crowded),
        _ if asked.bytes > out_of_cache(cache_bytes) => rounds(SMALL_CHUNK, Reason::OutOfCache),
        _ => rounds(shape.stage_bytes, Reason::InCache),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { ranks: 2, hosts: 1, cores: 2, slot_bytes: 4096, stage_bytes: 512 << 10 };
    const COLLECTIVES: [Kind; 9] = [
        Kind::AllReduce,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::AllGather,
        Kind::Gather,
        Kind::Scatter,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Barrier,
    ];

    fn asked(kind: Kind, bytes: u64) -> Asked {
        Asked { kind, bytes, class: Class::of(kind, Dtype::F32) }
    }

    #[test]
    fn rule_07_the_choice_ignores_local_facts_and_is_total() {
        let policy = Policy::default();
        let path = |kind, bytes, shape: &Shape| choose(asked(kind, bytes), shape, &policy).path;
        for kind in [Kind::AllReduce, Kind::Broadcast, Kind::AllGather, Kind::ReduceScatter] {
            assert_eq!(path(kind, 0, &SHAPE), Path::Slots);
            assert_eq!(path(kind, 4096, &SHAPE), Path::Slots);
            assert_eq!(path(kind, 4097, &SHAPE), Path::Rounds { chunk: 512 << 10 });
            assert_eq!(path(kind, 64 << 20, &SHAPE), Path::Rounds { chunk: 128 << 10 });
            assert_eq!(path(kind, 64 << 20, &Shape { ranks: 4, ..SHAPE }), Path::Rounds { chunk: 512 << 10 });
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
        for _ in 0..20_000 {
            let policy = random.policy();
            let sent = Policy::parse(&policy.text()).unwrap();
            let shape = Shape {
                ranks: random.below(300) as usize,
                hosts: 1,
                cores: random.below(300) as usize,
                slot_bytes: 4096,
                stage_bytes: 32 << 10 << random.below(5),
            };
            let kind = COLLECTIVES[random.below(9) as usize];
            let asked = asked(kind, random.next() >> random.below(64));
            let choice = choose(asked, &shape, &policy);
            assert_eq!(choice, choose(asked, &shape, &sent), "rank 0 and the ranks it sent its policy to");
            assert_eq!(Choice::from_code(choice.code()), choice);
            let kept = Asked::from_load(kind, asked.load());
            assert_eq!(kept, Asked { bytes: asked.bytes.min((1 << 56) - 1), ..asked });
            assert_ne!(choice.reason, Reason::Unknown);
            match choice.path {
                Path::Alone => assert!(shape.ranks < 2),
                Path::Slots => assert!(asked.bytes <= 4096 || kind == Kind::Barrier),
                Path::Rounds { chunk } => {
                    assert!(chunk >= 64 && chunk <= shape.stage_bytes && chunk.is_multiple_of(64), "{chunk}");
                }
                other => panic!("{other:?} inside one host"),
            }
        }
        for kind in [Kind::Send, Kind::Recv] {
            assert_eq!(choose(asked(kind, 8), &SHAPE, &Policy::default()), Choice::MESSAGE);
        }
    }

    #[test]
    fn rules_come_before_the_table_and_the_table_before_the_start_values() {
        let mut policy = Policy { table: Some(table::tests::example()), ..Policy::default() };
        let at = |policy: &Policy, bytes| {
            let choice = choose(asked(Kind::AllReduce, bytes), &SHAPE, policy);
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
    fn a_batch_is_asked_for_as_a_whole() {
        let one = |bytes, class| Asked { kind: Kind::AllReduce, bytes, class };
        assert_eq!(Asked::together([]), None);
        assert_eq!(Asked::together([one(5, Class::Low), one(7, Class::Low)]), Some(one(12, Class::Low)));
        assert_eq!(Asked::together([one(5, Class::Exact), one(7, Class::Low)]), Some(one(12, Class::Float)));
    }

    #[test]
    fn every_path_has_a_code_and_every_code_the_same_name() {
        let paths =
            [Path::Alone, Path::Message, Path::Slots, Path::Rounds { chunk: 64 }, Path::Delegate, Path::Composed];
        let between = Algorithm::ALL.map(|algorithm| Path::Hosts {
            algorithm,
            leaders: 2,
            segment: if algorithm.code() > 3 { WHOLE } else { 7 },
        });
        let mut names = Vec::new();
        for path in paths.into_iter().chain(between) {
            let choice = Choice { path, reason: Reason::Override };
            assert_eq!(Choice::from_code(choice.code()), choice);
            let name = path_name(path.code());
            assert!(path.to_string().starts_with(name), "{path} is called {name} in records");
            names.push(name);
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), paths.len() + Algorithm::ALL.len());
    }

    #[test]
    fn a_code_that_nobody_wrote_is_unknown() {
        assert_eq!(Choice::from_code(0), Choice { path: Path::Unknown, reason: Reason::Unknown });
        assert_eq!(Choice::from_code(u64::MAX).path, Path::Unknown);
    }
}
