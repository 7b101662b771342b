//! The interface between the engine of devices and the group that it serves, in both directions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::layout::Buffers;
use super::lowering::LoweringInput;
use crate::engine::Signed;
use crate::error::{Error, Result};
use crate::op;
use crate::op::lists;
use crate::select::Policy;
use crate::types::{CallNote, Kind};

/// The functions that the engine needs from the group whose devices it serves.
pub trait DeviceGroup: Send + Sync {
    fn name(&self) -> &str;
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    /// Keeps the group's keys in the store apart from those of any other attempt to make it; `None` where the ranks have
    /// not met.
    fn id(&self) -> Option<String>;
    fn policy(&self) -> &Arc<Policy>;
    /// The timeout of calls that name none, and of making communicators; zero: no timeout.
    fn timeout(&self) -> Duration;
    /// The timeout of a call that is made now and asks for this one; it was counted already.
    fn timeout_of_call(&self, asked: Option<Duration>) -> Duration {
        asked.unwrap_or_else(|| self.timeout())
    }
    /// An error where no operation may start.
    fn usable(&self, what: &str) -> Result<()>;
    /// Why the group has failed, on this rank or on a peer that reported it.
    fn fault(&self) -> Option<Error>;
    /// Fails it, on all ranks; the first error counts.
    fn fail(&self, error: Error);
    /// Looks from now on whether another rank has told why it failed, where `fault` does not see that by itself. Returns
    /// how long that may take. Never waits.
    fn ask_for_fault(&self) -> Duration;
    /// The error of an operation that its library has failed with these `words`: the ranks that have not issued it, what
    /// they do, and where. `None` where none is known to be missing.
    fn failed_within(&self, watched: &Watched, words: &str) -> Option<Error>;
    /// True when a signal handler of the program raised.
    fn interrupted(&self) -> bool;
    /// Ranks whose process has ended.
    fn dead_ranks(&self) -> Vec<usize>;
    /// Whether a rank has left the group in order.
    fn left(&self, rank: usize) -> bool;
    /// The number of the last collective that a rank has launched, where it can be seen: on one host.
    fn launched(&self, rank: usize) -> Option<u64>;
    fn death_of(&self, rank: usize, during: &str) -> Error;
    /// Takes the next number of a collective on a device, and publishes what it signs.
    fn next_number(&self, signed: Signed) -> u64;
    /// Compares what this rank signed for numbers, those still kept, with what others have signed for them. Never waits.
    fn compare(&self, first: u64, last: u64) -> Agreed;
    /// Asks the ranks that an operation waits for what they do, once it has been under way for long. Cheap before that.
    fn look_at_long_waits(&self);
    /// The error at the deadline of an operation: the ranks that have not issued it, what they do, and where.
    fn deadline_passed(&self, watched: &Watched) -> Error;
    /// Enters a call into the statistics, after its number was taken.
    fn count(&self, call: &DeviceRequest<'_>) -> Box<dyn Counted>;
}

/// Whether the ranks called the same operations as some numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Agreed {
    /// Those that can be seen have all launched theirs.
    WithAll,
    /// Some have not launched theirs yet.
    SoFar,
    Not(Error),
}

/// A call in the statistics. Dropped before `end`, it counts as failed.
pub trait Counted: Send + Sync {
    /// `timed`: this is the moment in which it ended.
    fn end(&self, well: bool, timed: bool);
}

/// What is known of an operation that has not ended.
#[derive(Clone, Debug)]
pub struct Watched {
    /// The operation's name in error texts.
    pub op: String,
    pub kind: Kind,
    pub number: u64,
    /// "npu:0"
    pub device: String,
    /// The other rank of a message.
    pub peer: Option<u32>,
    /// Only this rank and `peer` take part in it.
    pub with_peer_alone: bool,
    pub issued: Instant,
    /// Zero: no timeout.
    pub timeout: Duration,
}

impl Watched {
    /// "all_reduce number 7 on npu:0"
    pub fn what(&self) -> String {
        let Watched { op, number, device, .. } = self;
        match self.peer {
            Some(peer) => format!("{op} with rank {peer} on {device}"),
            None => format!("{op} number {number} on {device}"),
        }
    }
}

/// A call as its caller passed it.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRequest<'a> {
    /// The operation's name in messages.
    pub name: &'a str,
    /// `ranks` is filled in by the engine.
    pub asked: LoweringInput,
    /// Root, or the peer of a message.
    pub root: u32,
    pub tag: u32,
    /// `None`: the group's.
    pub timeout: Option<Duration>,
    pub buffers: Buffers<'a>,
    /// Hash of the call's list of tensors (`op::lists::of_tensors`); 0 where it has one tensor.
    pub list: u64,
    pub note: CallNote,
}

impl DeviceRequest<'_> {
    /// Bytes of the inputs.
    pub fn read(&self) -> u64 {
        self.buffers.inputs.iter().map(|span| span.bytes as u64).sum()
    }

    /// Bytes of the outputs.
    pub fn written(&self) -> u64 {
        self.buffers.outputs.iter().map(|span| span.bytes as u64).sum()
    }

    fn signature(&self) -> u64 {
        let LoweringInput { kind, dtype, op, .. } = self.asked;
        op::signature_of(kind, (dtype, op), self.root, (self.read(), self.written()))
    }

    /// What calls that have one number sign together.
    pub(super) fn signed(calls: &[DeviceRequest<'_>]) -> Signed {
        const BYTES: u64 = (1 << 40) - 1;
        let mix = |hash: u64, word: u64| (hash.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (mut signature, mut hash) = (0, 0);
        for call in calls {
            let own = call.signature();
            let bytes = ((signature & BYTES) + (own & BYTES)) & BYTES;
            signature = if signature == 0 { own } else { signature & !BYTES | bytes };
            let blocks = (call.buffers.in_blocks, call.buffers.out_blocks);
            let lists = if call.list != 0 { call.list } else { lists::of_blocks(call.asked.kind, blocks) };
            if calls.len() > 1 || lists != 0 {
                hash = mix(mix(hash, own), lists);
            }
        }
        Signed { signature, lists: (hash >> 32) as u32 }
    }
}

/// How the calls of one launch are made.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub device: i32,
    /// The calls form a coalescing region. All ranks know of its calls, so its sends and receives use the communicator
    /// of the whole group and need none of their own.
    pub region: bool,
    /// The caller's stream is being captured into a graph.
    pub capturing: bool,
}
