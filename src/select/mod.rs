//! Chooses the algorithm of an operation, with the reason. The choice is a pure function of what all ranks share.
//! Nothing local may be an input: no clock, no queue length, no `sync` flag. If two ranks chose differently, they would
//! wait for each other until the deadline.
//!
//! The sources that decide, from strong to weak: the user's rules, a line of the measured table, the user's topology,
//! the defaults. The first three are in rank 0's [`policy`], which every rank of the group has.
//!
//! | file | |
//! | --- | --- |
//! | `mod` | the operation's description, the choice, the codes of paths and reasons |
//! | `intra` | the choice inside one host, with predicted times |
//! | `inter` | the choice between hosts |
//! | `start` | the start rules between ranks: the choice if nothing was measured |
//! | `cost` | predicted times of schedules, flat and hierarchical |
//! | `rules` | the syntax of rules and sizes |
//! | `table` | the measured table, as text and on disk |
//! | `policy` | rules, table and topology that rank 0 sends to the other ranks |
//! | `explain` | the choice and its alternatives as text |
//! | `export` | the explanations as JSON |

pub mod cost;
pub mod explain;
pub mod export;
pub mod inter;
pub mod intra;
pub mod policy;
pub mod rules;
pub mod start;
pub mod table;

use std::fmt;

pub use self::intra::choose;
pub use self::policy::Policy;
use self::rules::AlgorithmChoice;

use crate::algorithms::Algorithm;
use crate::types::{Dtype, Kind, Request};

/// Assumed size of the last-level cache if the machine does not report it.
pub const DEFAULT_CACHE_BYTES: u64 = 32 << 20;

/// The algorithm of an operation, with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Not recorded.
    Unknown,
    /// A group of one rank: a local copy.
    Alone,
    /// A send or a receive (`engine/shm/p2p`).
    Message,
    /// One exchange of tagged slots (`engine/shm/small.rs`).
    Slots,
    /// Rounds through staging buffers with `chunk` bytes per round (`engine/shm/bulk.rs`).
    Rounds { chunk: usize },
    /// Direct access to the tensors, which every rank can reach (`engine/shm/mapped`).
    Mapped,
    /// A schedule between the leaders of several hosts, for `segment` bytes at a time (`WHOLE` if not cut); see
    /// `inter`.
    Hosts { algorithm: Algorithm, leaders: u8, segment: usize },
    /// One of torch's built-in backends.
    Delegate,
    /// The call consists of several of our operations, each with its own record.
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
    /// This choice depends on the addresses of the tensors, which only the call knows.
    pub const MAPPED: Choice = Choice { path: Path::Mapped, reason: Reason::Reachable };
    pub const DEVICE: Choice = Choice { path: Path::Device, reason: Reason::Vendor };

    /// The form in which an operation stores its choice: path (8 bits), reason (8), leaders (16), bytes of chunk or
    /// segment (32).
    pub fn code(self) -> u64 {
        let (leaders, bytes) = match self.path {
            Path::Rounds { chunk } => (0, chunk),
            Path::Hosts { leaders, segment, .. } => (leaders, segment),
            _ => (0, 0),
        };
        let bytes = bytes.min(u32::MAX as usize) as u64;
        u64::from(self.path.code()) | (self.reason as u64) << 8 | u64::from(leaders) << 16 | bytes << 32
    }

    /// The inverse of `code`. Any other value gives `Unknown`.
    pub fn from_code(code: u64) -> Choice {
        let path = match code as u8 {
            SLOTS => Path::Slots,
            ROUNDS => Path::Rounds { chunk: (code >> 32) as usize },
            LOCAL => Path::Alone,
            MESSAGE => Path::Message,
            DELEGATE => Path::Delegate,
            COMPOSED => Path::Composed,
            DEVICE => Path::Device,
            MAPPED => Path::Mapped,
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

/// The codes of paths, for records and statistics. Their meaning never changes. 0 means that the operation has not
/// started.
const SLOTS: u8 = 1;
const ROUNDS: u8 = 2;
const LOCAL: u8 = 3;
const MESSAGE: u8 = 4;
const DELEGATE: u8 = 5;
const COMPOSED: u8 = 31;
const DEVICE: u8 = 30;
const MAPPED: u8 = 29;
/// The code of a path between hosts is this value plus the algorithm's code.
const BEFORE_ALGORITHMS: u8 = 5;

impl Path {
    /// One byte for records and statistics. `path_name` converts it to a name.
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
            Path::Mapped => MAPPED,
            Path::Hosts { algorithm, .. } => BEFORE_ALGORITHMS + algorithm.code(),
        }
    }
}

/// The name of a path's code. `none` means that the operation has not started.
pub fn path_name(code: u8) -> &'static str {
    const NAMES: [&str; 6] = ["none", "slots", "rounds", "local", "message", "delegate"];
    let between = || Algorithm::from_code(code.wrapping_sub(BEFORE_ALGORITHMS)).map(Algorithm::name);
    match code {
        COMPOSED => return "composed",
        DEVICE => return "device",
        MAPPED => return "mapped",
        _ => (),
    }
    NAMES.get(usize::from(code)).copied().or_else(between).unwrap_or("unknown")
}

/// The name of a reason's code.
pub fn reason_name(code: u8) -> &'static str {
    Reason::from_u8(code).name()
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Unknown => f.write_str("unknown"),
            Path::Alone => f.write_str("local copy"),
            Path::Message => f.write_str("message"),
            Path::Slots => write!(f, "{}", AlgorithmChoice::Slots),
            Path::Rounds { chunk } => write!(f, "{}", AlgorithmChoice::Rounds { chunk: *chunk }),
            Path::Delegate => f.write_str("delegate"),
            Path::Composed => f.write_str("composed"),
            Path::Device => f.write_str("device"),
            Path::Mapped => f.write_str("mapped"),
            Path::Hosts { algorithm, leaders, segment: WHOLE } => {
                write!(f, "{}(leaders={leaders})", algorithm.name())
            }
            Path::Hosts { algorithm, leaders, segment } => {
                write!(f, "{}(leaders={leaders},segment={})", algorithm.name(), rules::size_text(*segment as u64))
            }
        }
    }
}

/// The segment size of an operation that is not cut.
pub const WHOLE: usize = 0;

/// The class of an element type. The choice depends only on the class. The numbers are stored in records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Class {
    /// Data that is moved and never combined.
    Moved = 0,
    /// Integers and booleans: the order of summation does not change the bits of the result.
    Exact = 1,
    Float = 2,
    /// Small floats, which are combined in 32 bits and rounded once.
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

/// The facts about an operation on which the choice depends. `bytes` has the same meaning as in `slot_payload`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpDesc {
    pub kind: Kind,
    pub bytes: u64,
    pub class: Class,
}

impl OpDesc {
    pub fn of(request: &Request, ranks: usize) -> OpDesc {
        let bytes = match request.kind {
            Kind::Send => sum(request.inputs()),
            Kind::Recv => sum(request.outputs()),
            _ => slot_payload(request, ranks),
        };
        OpDesc { kind: request.kind, bytes: bytes as u64, class: Class::of(request.kind, request.dtype) }.normal()
    }

    /// The form in which an operation stores its description: class (8 bits), bytes (56). The kind is stored
    /// separately.
    pub fn load(self) -> u64 {
        (self.class as u64) << 56 | self.bytes.min((1 << 56) - 1)
    }

    /// The inverse of `load`.
    pub fn from_load(kind: Kind, load: u64) -> OpDesc {
        let class = match load >> 56 {
            1 => Class::Exact,
            2 => Class::Float,
            3 => Class::Low,
            _ => Class::Moved,
        };
        OpDesc { kind, bytes: load & ((1 << 56) - 1), class }
    }

    /// Describes several operations of one kind as one.
    pub fn together(all: impl IntoIterator<Item = OpDesc>) -> Option<OpDesc> {
        all.into_iter().reduce(|all, one| OpDesc {
            bytes: all.bytes.saturating_add(one.bytes),
            // If classes differ, the strictest one is used.
            class: if one.class == all.class { all.class } else { Class::Float },
            ..all
        })
    }

    /// Removes values that differ between ranks: no rank knows all sizes of an all_to_all, and a barrier has none.
    pub fn normal(self) -> OpDesc {
        if matches!(self.kind, Kind::AllToAll | Kind::Barrier) { OpDesc { bytes: 0, ..self } } else { self }
    }
}

/// Facts about a group that all its ranks know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupShape {
    pub ranks: usize,
    pub hosts: usize,
    /// How many cores the ranks of this host may use together. The ranks agree on this in the rendezvous.
    pub cores: usize,
    /// On each rank, how many threads copy and combine for a waiting thread. The ranks agree on this in the rendezvous.
    pub threads: usize,
    pub slot_bytes: usize,
    pub stage_bytes: usize,
}

impl GroupShape {
    /// The shape of a group without shared memory.
    pub fn without_memory(ranks: usize) -> GroupShape {
        GroupShape { ranks, hosts: 1, cores: 1, threads: 1, slot_bytes: 0, stage_bytes: 0 }
    }

    pub fn oversubscribed(&self) -> bool {
        self.ranks > self.cores
    }
}

fn sum(spans: &[crate::types::Span]) -> usize {
    spans.iter().map(|span| span.bytes).sum()
}

/// Bytes that the rank with the largest payload writes into its slot if the operation uses slots.
pub fn slot_payload(request: &Request, ranks: usize) -> usize {
    match request.kind {
        Kind::AllReduce | Kind::Reduce | Kind::Gather | Kind::ReduceScatter => sum(request.inputs()),
        Kind::Broadcast => sum(request.inputs()).max(sum(request.outputs())),
        Kind::AllGather => {
            request.out_blocks.iter().copied().max().unwrap_or_else(|| sum(request.outputs()) / ranks.max(1))
        }
        Kind::Scatter => sum(request.outputs()) * ranks,
        // The slot always has the table of block sizes. The header says whether the blocks fit too (small.rs).
        Kind::AllToAll => ranks * 8,
        Kind::Barrier | Kind::Send | Kind::Recv => 0,
    }
}

/// Bytes of one block in a round of `chunk` bytes. If a kind has a block for every peer, the blocks share the chunk.
pub fn unit(kind: Kind, ranks: usize, chunk: usize) -> usize {
    match kind {
        Kind::Scatter | Kind::ReduceScatter | Kind::AllToAll => (chunk / ranks.max(1) / 64 * 64).max(64),
        _ => chunk.max(1),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Reason {
    /// Nothing was recorded: the operation was refused or has not been issued.
    Unknown = 0,
    Alone = 1,
    Message = 2,
    Delegated = 3,
    /// A rule of the option `algorithm` or of `SAGELLM_ALGORITHM`.
    Override = 4,
    /// A line of the decision table that `torch-sagellm tune` wrote.
    Measured = 5,
    FitsSlot = 6,
    InCache = 7,
    OutOfCache = 8,
    Oversubscribed = 9,
    NoCommonSize = 10,
    NothingToMove = 11,
    /// Only between hosts.
    Strict = 12,
    Model = 13,
    // 14 to 17 and 19 were reasons that no longer occur. Records of older versions may contain them.
    OneSchedule = 18,
    Composed = 20,
    OneOrder = 21,
    /// Tensors on a device are passed to the library of its vendor.
    Vendor = 22,
    /// This reason and the next two are the start rules between ranks (`start`).
    FewSteps = 23,
    FullNvlink = 24,
    FewBytes = 25,
    /// Every rank's tensors are in memory that the other ranks have mapped.
    Reachable = 26,
    SeveralThreads = 27,
}

impl Reason {
    pub const ALL: [Reason; 23] = [
        Reason::Unknown,
        Reason::Alone,
        Reason::Message,
        Reason::Delegated,
        Reason::Override,
        Reason::Measured,
        Reason::FitsSlot,
        Reason::InCache,
        Reason::OutOfCache,
        Reason::Oversubscribed,
        Reason::NoCommonSize,
        Reason::NothingToMove,
        Reason::Strict,
        Reason::Model,
        Reason::OneSchedule,
        Reason::Composed,
        Reason::OneOrder,
        Reason::Vendor,
        Reason::FewSteps,
        Reason::FullNvlink,
        Reason::FewBytes,
        Reason::Reachable,
        Reason::SeveralThreads,
    ];

    pub fn from_u8(value: u8) -> Reason {
        Reason::ALL.into_iter().find(|reason| *reason as u8 == value).unwrap_or(Reason::Unknown)
    }

    /// One word, for records and programs.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Unknown => "unknown",
            Reason::Alone => "alone",
            Reason::Message => "message",
            Reason::Delegated => "delegated",
            Reason::Override => "override",
            Reason::Measured => "measured",
            Reason::FitsSlot => "fits_slot",
            Reason::InCache => "in_cache",
            Reason::OutOfCache => "out_of_cache",
            Reason::Oversubscribed => "oversubscribed",
            Reason::NoCommonSize => "no_common_size",
            Reason::NothingToMove => "nothing_to_move",
            Reason::Strict => "strict",
            Reason::Model => "model",
            Reason::OneSchedule => "one_schedule",
            Reason::Composed => "composed",
            Reason::OneOrder => "one_order",
            Reason::Vendor => "vendor",
            Reason::FewSteps => "few_steps",
            Reason::FullNvlink => "full_nvlink",
            Reason::FewBytes => "few_bytes",
            Reason::Reachable => "reachable",
            Reason::SeveralThreads => "several_threads",
        }
    }

    /// Whether this is one of the start rules between ranks.
    pub fn is_start_rule(self) -> bool {
        matches!(self, Reason::FewSteps | Reason::FullNvlink | Reason::FewBytes)
    }

    /// The kind of source that decided.
    pub fn basis(self) -> &'static str {
        match self {
            Reason::Override => "override",
            Reason::Measured => "measurement",
            Reason::FitsSlot | Reason::InCache | Reason::OutOfCache => "default",
            Reason::Oversubscribed | Reason::SeveralThreads => "default",
            reason if reason.is_start_rule() => "start rule",
            Reason::Model => "cost model",
            Reason::Unknown => "nothing",
            _ => "only choice",
        }
    }

    pub fn text(self) -> &'static str {
        match self {
            Reason::Unknown => "nothing was recorded for it",
            Reason::Alone => "a group of one rank copies locally",
            Reason::Message => "messages have one algorithm: small ones travel in their envelope, large ones in pieces",
            Reason::Delegated => "another backend of torch serves the whole group",
            Reason::Override => "a rule that the user gave",
            Reason::Measured => "the decision table: measured on this machine by `torch-sagellm tune`",
            Reason::FitsSlot => "it fits into a slot, and one exchange is the minimum",
            Reason::InCache => "it stays in the last-level cache, where fewer rounds win",
            Reason::OutOfCache => "it is larger than the last-level cache, where a small stage that stays cached wins",
            Reason::SeveralThreads => "the threads of a rank share each round, so few large rounds win",
            Reason::Oversubscribed => "ranks share cores, so every round costs context switches and fewer rounds win",
            Reason::NoCommonSize => "no rank knows all the sizes of an all_to_all, so one algorithm serves them all",
            Reason::NothingToMove => "it moves no data",
            Reason::Strict => "strict mode: only the direct exchange adds in the order of the ranks",
            Reason::OneOrder => {
                "small sums of floats are added in one order, whatever they are fused with and whatever the link"
            }
            Reason::Vendor => "the library of the device's vendor carries tensors on a device",
            Reason::Composed => "no single operation does it, so several are composed",
            Reason::Model => "the cost model, with the link as it was measured when the group was made",
            Reason::FewSteps => {
                "below 1,000,000 bytes the number of steps counts most, and recursive doubling needs few"
            }
            Reason::FullNvlink => {
                "below 1,000,000 bytes the number of steps counts most, and where NVLink joins all devices a tree needs few"
            }
            Reason::FewBytes => {
                "from 1,000,000 bytes on the bytes on each link count most: a ring, or from one root a double tree, spreads \
                 them evenly"
            }
            Reason::Reachable => "every rank can reach the tensors of the others, so nothing is copied on the way",
            Reason::OneSchedule => "it is the schedule for this kind that needs the fewest steps",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_asked_for_as_a_whole() {
        let one = |bytes, class| OpDesc { kind: Kind::AllReduce, bytes, class };
        assert_eq!(OpDesc::together([]), None);
        assert_eq!(OpDesc::together([one(5, Class::Low), one(7, Class::Low)]), Some(one(12, Class::Low)));
        assert_eq!(OpDesc::together([one(5, Class::Exact), one(7, Class::Low)]), Some(one(12, Class::Float)));
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
    fn a_code_that_no_choice_has_is_unknown() {
        assert_eq!(Choice::from_code(0), Choice { path: Path::Unknown, reason: Reason::Unknown });
        assert_eq!(Choice::from_code(u64::MAX).path, Path::Unknown);
    }

    #[test]
    fn every_byte_is_a_reason_and_every_reason_has_its_own_word_and_text() {
        let mut names: Vec<&str> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
        for value in 0..=255 {
            let reason = Reason::from_u8(value);
            assert!(reason == Reason::Unknown || reason as u8 == value);
            assert!(!reason.text().is_empty() && !reason.basis().is_empty());
        }
    }
}
