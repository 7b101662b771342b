//! The interface between the device engine and the group that it serves, in both directions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::layout::Buffers;
use super::lowering::LoweringInput;
use crate::engine::{BlockSizes, Signed};
use crate::error::{Error, Result};
use crate::op::lists;
use crate::op::signature;
use crate::select::Policy;
use crate::types::{CallNote, Kind};

/// The functions that the engine needs from the group whose devices it serves.
pub trait DeviceGroup: Send + Sync {
    fn name(&self) -> &str;
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    /// Identifies this attempt to create the group, and is part of the group's keys in the store. `None` if the ranks
    /// have not met.
    fn id(&self) -> Option<String>;
    fn policy(&self) -> &Arc<Policy>;
    /// The default timeout of calls, and the timeout within which a communicator must be made. Zero: no timeout.
    fn timeout(&self) -> Duration;
    /// The timeout of a call that begins now; its caller has requested `asked`. The call must already have been counted
    /// (`count`).
    fn timeout_of_call(&self, asked: Option<Duration>) -> Duration {
        asked.unwrap_or_else(|| self.timeout())
    }
    /// Fails if no operation may start.
    fn usable(&self, what: &str) -> Result<()>;
    /// Returns the error with which the group failed, on this rank or on a peer that reported it.
    fn fault(&self) -> Option<Error>;
    /// Fails the group on all ranks. Only the first error counts.
    fn fail(&self, error: Error);
    /// If `fault` does not see reports of other ranks by itself, starts to look whether another rank has reported why
    /// it failed. Returns how long this takes at most. Never waits.
    fn ask_for_fault(&self) -> Duration;
    /// Whether this rank knows that no other rank had reported a failure at the time `at`. If this is unknown and
    /// `fault` does not see such reports by itself, this rank begins to look for them. Never waits.
    fn had_no_fault_at(&self, at: Instant) -> bool;
    /// Waits for at most a second until the other ranks can read why the group failed on this rank.
    fn await_report(&self);
    /// Returns the error of an operation whose library call failed with the text `words`. It says which ranks have not
    /// issued the operation, what they do, and where they are. `None` if no rank is known to be missing.
    fn failed_within(&self, watched: &Watched, words: &str) -> Option<Error>;
    /// Whether a signal handler of the program raised an exception.
    fn interrupted(&self) -> bool;
    /// Ranks whose process has ended.
    fn dead_ranks(&self) -> Vec<usize>;
    /// Whether a rank has left the group in order.
    fn left(&self, rank: usize) -> bool;
    /// Number of the last collective that a rank has begun on a device; `None` if this rank cannot see the number,
    /// because that rank is on another host.
    fn launched(&self, rank: usize) -> Option<u64>;
    fn death_of(&self, rank: usize, during: &str) -> Error;
    /// Takes the next number of a collective on a device, and publishes the signature for that number. For an
    /// all_to_all, `sizes` is set and published too.
    fn next_number(&self, signed: Signed, sizes: Option<&BlockSizes<'_>>) -> u64;
    /// Compares this rank's signatures for the numbers `first` to `last` with those of other ranks, as far as both are
    /// still kept. Never waits.
    fn compare(&self, first: u64, last: u64) -> Agreed;
    /// If an operation has been pending for long, asks the ranks for which the operation waits what they are doing.
    /// Otherwise this is cheap.
    fn look_at_long_waits(&self);
    /// The error at an operation's deadline. It says which ranks have not issued the operation, what they do, and where
    /// they are.
    fn deadline_passed(&self, watched: &Watched) -> Error;
    /// Records a call in the statistics. The call's number was taken before.
    fn count(&self, call: &DeviceRequest<'_>) -> Box<dyn Counted>;
}

/// Whether the ranks called the same operations under certain numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Agreed {
    /// Every rank whose signatures can be seen has launched its operations, and they agree.
    WithAll,
    /// No disagreement yet; some ranks have not launched their operations.
    SoFar,
    Not(Error),
}

/// A call that was recorded in the statistics. If this is dropped before `end`, the call counts as failed.
pub trait Counted: Send + Sync {
    /// `well`: the call succeeded. `timed`: the call ended at this moment, so its duration can be recorded.
    fn end(&self, well: bool, timed: bool);
}

/// A device in error texts, for instance "npu:0".
#[derive(Clone, Debug)]
pub struct Place {
    /// torch's name of the device type.
    pub device_type: Arc<str>,
    pub index: i32,
}

impl std::fmt::Display for Place {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{}:{}", self.device_type, self.index)
    }
}

/// Description of an operation that has not ended.
#[derive(Clone, Debug)]
pub struct Watched {
    /// The operation's name in error texts.
    pub op: Arc<str>,
    pub kind: Kind,
    pub number: u64,
    pub device: Place,
    /// Peer of a send or a receive; `None` for a collective.
    pub peer: Option<u32>,
    /// Only this rank and `peer` take part in the operation.
    pub with_peer_alone: bool,
    pub issued: Instant,
    /// Zero: no timeout.
    pub timeout: Duration,
}

impl Watched {
    /// The operation in error texts, for instance "all_reduce number 7 on npu:0".
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
    /// The operation's name in error texts.
    pub name: &'a str,
    /// The engine sets the field `ranks`.
    pub asked: LoweringInput,
    /// Rank of the root, or the peer of a message.
    pub root: u32,
    pub tag: u32,
    /// `None`: the group's timeout.
    pub timeout: Option<Duration>,
    pub buffers: Buffers<'a>,
    /// Hash of the call's list of tensors (`op::lists::of_tensors`); 0 if the call has one tensor.
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
        signature::of_call(kind, (dtype, op), self.root, (self.read(), self.written()))
    }

    /// The sizes of the blocks, if this is an all_to_all of rank `rank` of `ranks`.
    pub(super) fn block_sizes(&self, (rank, ranks): (usize, usize)) -> Option<BlockSizes<'_>> {
        let Buffers { in_blocks, out_blocks, .. } = self.buffers;
        let (sent, received) = ((in_blocks, self.read()), (out_blocks, self.written()));
        (self.asked.kind == Kind::AllToAll).then_some(BlockSizes { rank, ranks, sent, received })
    }

    /// The common signature of calls that share one number. `sizes` is set if there is only one call and it is an
    /// all_to_all.
    pub(super) fn signed(calls: &[DeviceRequest<'_>], sizes: Option<&BlockSizes<'_>>) -> Signed {
        if let ([call], Some(sizes)) = (calls, sizes) {
            return Signed::all_to_all(call.signature(), sizes);
        }
        let mix = |hash: u64, word: u64| (hash.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (mut signature, mut hash) = (0, 0);
        for call in calls {
            let own = call.signature();
            signature = if signature == 0 { own } else { signature::with_bytes_of(signature, own) };
            let blocks = (call.buffers.in_blocks, call.buffers.out_blocks);
            let lists = if call.list != 0 { call.list } else { lists::of_blocks(call.asked.kind, blocks) };
            if calls.len() > 1 || lists != 0 {
                hash = mix(mix(hash, own), lists);
            }
        }
        Signed { signature, lists: (hash >> 32) as u32 }
    }
}

/// The conditions under which the calls of one launch run.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub device: i32,
    /// The calls form a coalescing region. All ranks know the region's calls, so its sends and receives use the
    /// communicator of the whole group and not a communicator of their pair.
    pub region: bool,
    /// The caller's stream is being captured into a graph.
    pub capturing: bool,
}
