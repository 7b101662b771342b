//! The engines that run the operations of a group: `shm` for ranks that are processes of one host, `multihost` for
//! ranks on several hosts, `solo` for a group of one rank, `delegate` if another backend serves the group. A group uses
//! its engine only as an [`Engine`] and its [`Control`]. `group/builder.rs` makes the engine; in tests `group/local.rs`
//! does so too. `device` has the libraries of accelerators; `loader` opens libraries at run time. `local` has areas and
//! links for ranks that are threads (feature `testing`).

pub mod delegate;
pub mod device;
pub mod loader;
#[cfg(feature = "testing")]
pub mod local;
pub mod multihost;
pub mod order;
pub mod pieces;
pub mod shm;
pub mod solo;
pub mod verify;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::op::Op;
use crate::op::signature;
use crate::os::event_count::WakeWords;
use crate::reduce::Kernel;
use crate::select::OpDesc;
use crate::select::explain::Explanation;

/// Operations that ended, with their outcomes.
pub type Ended = Vec<(Arc<Op>, Result<()>)>;

/// One rank's part of an engine. All functions are called with the group's lock held, so state that is used only in
/// them needs no other lock. No call waits for a peer or for another thread of the group.
pub trait Engine: Send {
    /// The part that may be used without the group's lock.
    fn control(&self) -> Arc<dyn Control>;

    /// Name and set-up of the engine, for `Group::describe`.
    fn describe(&self) -> String;

    /// Returns why another backend serves the whole group; such an engine only numbers operations. None if this engine
    /// serves the group.
    fn delegate_reason(&self) -> Option<&str> {
        None
    }

    /// Accepts an operation that was validated and numbered, and advances what can advance. If this returns an error,
    /// the whole group fails, and the group ends the operation unless the engine `holds` it.
    ///
    /// For each operation an engine records the size and the path (`Op::record_load`, `Op::record_choice`), which
    /// statistics and explanations use. It calls `Op::prepare` before it first reads the inputs, and `Op::store_back`
    /// after it wrote the last output; these two copy strided tensors. If it no longer needs the memory before the
    /// operation ends, it calls `Op::release`. When the operation ends, the engine adds it to `ended`. `solo` is the
    /// shortest example.
    fn submit(&mut self, op: Arc<Op>, kernel: Option<Kernel>, ended: &mut Ended) -> Result<()>;

    /// Whether the engine has this operation and will end it or return it from `take_pending`.
    fn holds(&self, _op: &Arc<Op>) -> bool {
        false
    }

    /// Advances everything that can advance, without waiting. Returns true if something advanced. An error fails the
    /// whole group.
    fn poll(&mut self, _ended: &mut Ended) -> Result<bool> {
        Ok(false)
    }

    /// Whether `poll` may have something to advance.
    fn has_pending(&self) -> bool {
        false
    }

    /// Returns a pending operation that cannot end before `rank` makes further progress. `gone` selects the ranks that
    /// will make no further progress.
    fn needs(&self, _rank: usize, _gone: &dyn Fn(usize) -> bool) -> Option<Arc<Op>> {
        None
    }

    /// The pending operation with the earliest deadline.
    fn next_deadline(&self) -> Option<Arc<Op>> {
        None
    }

    /// What a pending operation waits for, for error texts and log lines.
    fn blockers(&self, _op: &Op) -> Blockers {
        Blockers::Unknown(Some("nothing is known of what it waits for".to_string()))
    }

    /// The pending collective with this number.
    fn collective(&self, _number: u64) -> Option<Arc<Op>> {
        None
    }

    /// Called when the group ends with `error`. Removes and returns the pending operations; the engine no longer uses
    /// their memory. Operations on which a thread of the engine works are not returned: that thread ends them
    /// (`Report::ended`).
    fn take_pending(&mut self, _error: &Error) -> Vec<Arc<Op>> {
        Vec::new()
    }

    /// Explains the choice for an operation that runs alone or `batched` with others.
    fn explain(&self, desc: OpDesc, batched: bool) -> Explanation;
}

/// What a pending operation waits for.
pub enum Blockers {
    /// Other ranks, by rank; never empty.
    Ranks(Vec<(usize, PeerProgress)>),
    /// An earlier operation of this rank, which must come first.
    Earlier(Arc<Op>),
    /// It is not known for which operation or ranks the operation waits. The text says what is known. None if this rank
    /// knows nothing before it asks its peers.
    Unknown(Option<String>),
}

/// The progress of a rank for which a pending operation waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerProgress {
    /// The rank has not entered the operation. Holds the last operation that it has entered, if there is one.
    NotEntered(Option<LastCall>),
    /// The rank has entered the operation and has not finished its part.
    Entered,
    /// The rank waits in another operation, whose number is that of this operation or higher.
    CalledOther,
    /// Nothing is known of the rank.
    Unknown,
    /// The rank has not taken part in the message. Holds its last collective as text, if there is one.
    NotInMessage(Option<String>),
}

/// The last operation that a rank has entered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastCall {
    /// Its number in the group.
    pub number: u64,
    /// Description of the operation for error texts, with its number.
    pub text: String,
}

impl PeerProgress {
    /// Whether the program of that rank must first make a call. This rank can do nothing to cause that.
    pub fn is_absent(&self) -> bool {
        !matches!(self, PeerProgress::Entered)
    }
}

/// What a call of `Control::poll` has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    Advanced,
    /// It has polled, and nothing has advanced.
    Nothing,
    /// It has not polled: there is nothing to wait for here, or another thread polls.
    Elsewhere,
}

/// The rank that reported a fault, and the fault.
pub type Told = (usize, Error);

/// The part of an engine that any thread may use without the group's lock. The default functions suit an engine that
/// shares nothing with its peers.
pub trait Control: Send + Sync {
    /// Whether a peer or this rank has announced a fault.
    fn is_poisoned(&self) -> bool {
        false
    }

    /// The fault that was announced first.
    fn reported(&self) -> Option<Told> {
        None
    }

    /// Sends this group's fault to the peers, and aborts the waits of the engine's threads. Called once per group.
    fn announce(&self, _fault: &Error) {}

    /// Leaves the group in order: published data stays readable for the peers, threads of the engine end, and
    /// operations that they cannot finish end with `error`. Stops waiting for delivery when `interrupted` returns true.
    fn leave(&self, _error: &Error, _interrupted: &dyn Fn() -> bool) {}

    /// Whether `rank` has left in order.
    fn left(&self, _rank: usize) -> bool {
        false
    }

    /// The ranks whose end the engine detects by itself, and for each of them whether it has ended or left.
    fn watched(&self) -> Vec<(usize, bool)> {
        Vec::new()
    }

    /// Whether any rank has left in order.
    fn has_leavers(&self) -> bool {
        false
    }

    /// Whether the engine's own threads run its operations. If so, waiting threads call `Control::poll` instead of
    /// `Engine::poll`.
    fn has_threads(&self) -> bool {
        false
    }

    /// The word on which peers wake this rank.
    fn wake_address(&self) -> Option<WakeAddress<'_>> {
        None
    }

    /// Whether this thread runs on the core on which a lower rank last waited.
    fn shares_core(&self) -> bool {
        false
    }

    /// Advances the work that threads of the program must drive even if the engine has its own threads. Operations can
    /// end in this call. Must be called without the group's lock. Sleeps for at most `sleep` if nothing can advance.
    fn poll(&self, _sleep: Duration) -> Polled {
        Polled::Elsewhere
    }

    /// Whether `poll` may soon have something to advance, so that a waiting thread should poll often.
    fn polls(&self) -> bool {
        false
    }

    /// The channel of monitored barriers. None if the engine has none.
    fn monitor(&self) -> Option<&dyn Monitor> {
        None
    }

    /// The channel on which ranks ask each other what their programs are doing. None if the engine has none.
    fn inquiry(&self) -> Option<&dyn Inquiry> {
        None
    }

    /// Publishes the number and signature of this rank's last operation on a device. For an all_to_all, `_sizes` is set
    /// and published too.
    fn set_launched(&self, _number: u64, _signed: Signed, _sizes: Option<&BlockSizes<'_>>) {}

    /// Returns how many bytes `_rank` sends to `_peer`, and how many it expects from `_peer`, in the all_to_all with
    /// this number. None if this cannot be seen: only the sizes of each rank's last all_to_all are kept, and only in
    /// groups up to a certain size.
    fn block_sizes(&self, _rank: usize, _number: u64, _peer: usize) -> Option<[u64; 2]> {
        None
    }

    /// The last number that `rank` gave to `set_launched`, and the operation's kind. None if it cannot be seen.
    fn launched(&self, _rank: usize) -> Option<(u64, u8)> {
        None
    }

    /// What `rank` signed for the launch with this number. None before that launch, and for launches older than the
    /// last `LAUNCHES_KEPT - 1`.
    fn signed(&self, _rank: usize, _number: u64) -> Option<Signed> {
        None
    }
}

/// The signatures of this many device launches of each rank are kept.
pub const LAUNCHES_KEPT: u64 = 16;

/// The values on which all ranks must agree for a launch on devices. Several calls with one number have one signature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signed {
    /// The signature of the call (`op::signature`). For several calls, the first call's signature with the sum of all
    /// calls' bytes.
    pub signature: u64,
    /// A hash of the calls' signatures and lists (of tensors or sizes). 0 for a single call without a list. If
    /// `has_share`, it is this rank's share of a sum over all ranks (`BlockSizes::share`) instead.
    pub lists: u32,
}

impl Signed {
    /// The signature of an all_to_all whose number no other call has.
    pub fn all_to_all(signature: u64, sizes: &BlockSizes<'_>) -> Signed {
        Signed { signature: signature::marked(signature), lists: sizes.share() }
    }

    /// Whether `lists` is a share, which differs between ranks.
    pub fn has_share(&self) -> bool {
        signature::is_marked(self.signature)
    }

    /// Whether two ranks signed different calls. The shares of an all_to_all are not compared, because they can be
    /// checked only if all ranks' shares are known.
    pub fn differs(&self, other: &Signed) -> bool {
        self.signature != other.signature || (self.lists != other.lists && !self.has_share())
    }
}

/// The sizes of a rank's blocks in an all_to_all.
#[derive(Clone, Copy, Debug)]
pub struct BlockSizes<'a> {
    pub rank: usize,
    pub ranks: usize,
    /// `sent` and `received` each hold the size of the block to or from each rank (empty if all blocks are equal), and
    /// the sum of these sizes.
    pub sent: (&'a [usize], u64),
    pub received: (&'a [usize], u64),
}

impl BlockSizes<'_> {
    /// Number of bytes that this rank sends to `peer`, and number of bytes that it receives from `peer`.
    pub fn with(&self, peer: usize) -> [u64; 2] {
        [self.sent, self.received].map(|(blocks, total)| match blocks.get(peer) {
            Some(bytes) => *bytes as u64,
            None => total / self.ranks.max(1) as u64,
        })
    }

    /// This rank's share of a sum over all ranks. The sum is 0 if every rank sends to every other rank what that rank
    /// expects. Each size is hashed with its sender and receiver. The sender adds the hash to its share, and the
    /// receiver subtracts the hash from its own. So one word per rank is enough for any number of ranks, and no rank
    /// needs another rank's list.
    fn share(&self) -> u32 {
        let word = |from: usize, to: usize, bytes: u64| {
            let mixed = ((from as u64) << 32 | to as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ bytes;
            let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32) as u32
        };
        (0..self.ranks).fold(0, |sum: u32, peer| {
            let [sent, received] = self.with(peer);
            sum.wrapping_add(word(self.rank, peer, sent)).wrapping_sub(word(peer, self.rank, received))
        })
    }
}

/// The word that peers change to wake this rank, and the words of the event count.
pub struct WakeAddress<'a> {
    pub words: &'a dyn WakeWords,
    /// This rank.
    pub me: usize,
    pub word: &'a AtomicU32,
}

/// The channel of a monitored barrier. Barriers are numbered in the order of the calls.
pub trait Monitor {
    /// Publishes that this rank has entered barrier number `turn`.
    fn come(&self, turn: u64);
    fn has_come(&self, rank: usize, turn: u64) -> bool;
    /// Publishes the outcome. Called on rank 0.
    fn decide(&self, turn: u64, failed: bool);
    /// The outcome that rank 0 published: whether the barrier failed. None before that.
    fn decision(&self, turn: u64) -> Option<bool>;
    /// Returns why waiting is useless, for the case that only the engine knows that a rank is gone.
    fn hopeless(&self, _turn: u64) -> Option<Error> {
        None
    }
    /// Called when this rank no longer waits in a barrier.
    fn left_off(&self) {}
}

/// The channel on which a rank asks another rank what its program is doing. Questions are counted, because several
/// ranks may ask at the same time, and one answer serves all of them.
pub trait Inquiry: Send + Sync {
    /// Asks a rank and wakes its answering thread. Returns the number of the question.
    fn ask(&self, rank: usize) -> u32;
    /// The number of the last question to this rank. Its answering thread sleeps on this word.
    fn question(&self) -> &AtomicU32;
    /// Publishes this rank's answer. If it is too long, it is cut. Only the answering thread calls this.
    fn answer(&self, answer: &[u8]);
    /// The last answer of a rank. Empty before its first answer.
    fn heard(&self, rank: usize) -> Vec<u8>;
}

/// Functions of the group that an engine's threads call. A caller must hold no lock of the engine.
pub trait Report: Send + Sync {
    fn ended(&self, ended: Ended);
    /// Reports a fault that a thread of the engine found. The group announces it and takes the engine's pending
    /// operations.
    fn failed(&self, error: Error);
    /// Reports a change, other than ended operations, for which threads of the program may wait.
    fn changed(&self);
}
