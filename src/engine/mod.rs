//! The engines that run the operations of a group: `shm` between the processes of one host, `multihost` for ranks on
//! several hosts (over a link between them), `solo` for a group of one, `delegate` where another backend serves the
//! group. A group uses them only as an [`Engine`] and its [`Control`]; `group/builder.rs` alone makes one. `device` has
//! the libraries of accelerators, `local` areas and links for ranks that are threads (feature `testing`).

pub mod delegate;
pub mod device;
#[cfg(feature = "testing")]
pub mod local;
pub mod multihost;
pub mod order;
pub mod pieces;
pub mod shm;
pub mod solo;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::op::Op;
use crate::os::event_count::WakeWords;
use crate::reduce::Kernel;
use crate::select::OpDesc;
use crate::select::explain::Explanation;

/// Operations that ended, with their outcomes.
pub type Ended = Vec<(Arc<Op>, Result<()>)>;

/// One rank's part of an engine. Called with the group's lock held, so state that only these calls use needs no lock.
/// None of them waits for a peer or for another thread of the group.
pub trait Engine: Send {
    /// The part that may be used without the group's lock.
    fn control(&self) -> Arc<dyn Control>;

    /// Name and set-up of the engine, for `Group::describe`.
    fn describe(&self) -> String;

    /// Why another backend serves the whole group, if one does: then the engine only numbers that backend's operations.
    fn delegate_reason(&self) -> Option<&str> {
        None
    }

    /// Takes an operation that was validated and numbered, and advances what can advance. An error concerns the whole
    /// group; after it the group ends the operation, unless the engine `holds` it.
    ///
    /// For each operation an engine records what is carried and how (`Op::record_load`, `Op::record_choice`: statistics and
    /// explanations use these), calls `Op::prepare` before it first reads the inputs and `Op::store_back` after it wrote
    /// the last output (strided tensors are copied there), calls `Op::release` where it no longer needs the memory although
    /// the operation goes on, and hands the operation out in `ended`. `solo` is the shortest example.
    fn submit(&mut self, op: Arc<Op>, kernel: Option<Kernel>, ended: &mut Ended) -> Result<()>;

    /// True while the engine has this operation and will end it or return it from `take_pending`.
    fn holds(&self, _op: &Arc<Op>) -> bool {
        false
    }

    /// Advances everything that can advance, without waiting. True when something did. An error concerns the whole
    /// group.
    fn poll(&mut self, _ended: &mut Ended) -> Result<bool> {
        Ok(false)
    }

    /// Whether `poll` may have something to move.
    fn has_pending(&self) -> bool {
        false
    }

    /// A pending operation that cannot end before `rank` makes further progress; `gone` says which ranks will make
    /// none.
    fn needs(&self, _rank: usize, _gone: &dyn Fn(usize) -> bool) -> Option<Arc<Op>> {
        None
    }

    /// The pending operation with the earliest deadline.
    fn next_deadline(&self) -> Option<Arc<Op>> {
        None
    }

    /// What a pending operation waits for, for error texts and log lines.
    fn blockers(&self, _op: &Op) -> Blockers {
        Blockers::Unknown("nothing is known of what it waits for".to_string())
    }

    /// The pending collective with this number.
    fn collective(&self, _number: u64) -> Option<Arc<Op>> {
        None
    }

    /// The group ends with `error`: returns the pending operations, whose memory is not used any more. A thread of the
    /// engine ends the operations that it works on itself (`Report::ended`).
    fn take_pending(&mut self, _error: &Error) -> Vec<Arc<Op>> {
        Vec::new()
    }

    /// Explains the choice for an operation, alone or `batched` with others.
    fn explain(&self, desc: OpDesc, batched: bool) -> Explanation;
}

/// What a pending operation waits for.
pub enum Blockers {
    /// Other ranks, by rank; never empty.
    Ranks(Vec<(usize, PeerProgress)>),
    /// An earlier operation of this rank, which it must follow.
    Earlier(Arc<Op>),
    /// Neither can be named; the text says what is known.
    Unknown(String),
}

/// How far a rank that a pending operation waits for has come in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerProgress {
    /// It has not entered the operation; this is the last one that it has entered, if any.
    NotEntered(Option<LastCall>),
    /// It entered the operation and did not finish its part.
    Entered,
    /// Nothing is known of it.
    Unknown,
    /// It has not taken part in the message; this is its last collective, if any.
    NotInMessage(Option<String>),
}

/// The last operation that a rank has entered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastCall {
    /// Its number in the group.
    pub number: u64,
    /// It in words, with that number.
    pub text: String,
}

impl PeerProgress {
    /// True where the rank still has to make a call, which this rank cannot cause.
    pub fn is_absent(&self) -> bool {
        !matches!(self, PeerProgress::Entered)
    }
}

/// A fault as a rank has told it, and that rank.
pub type Told = (usize, Error);

/// The part of an engine that any thread may use without the group's lock. The defaults are right for an engine that
/// shares nothing with its peers.
pub trait Control: Send + Sync {
    /// A fault was announced, by a peer or by this rank.
    fn is_poisoned(&self) -> bool {
        false
    }

    /// The fault that was announced first.
    fn reported(&self) -> Option<Told> {
        None
    }

    /// Tells the peers why this rank's group failed, and aborts the waits of its threads. Called once per group.
    fn announce(&self, _fault: &Error) {}

    /// Leaves the peers in an orderly way: published data stays readable for them, threads of the engine end, and
    /// operations that they cannot finish end with `error`. May wait for delivery, until `interrupted`.
    fn leave(&self, _error: &Error, _interrupted: &dyn Fn() -> bool) {}

    /// `rank` has left in an orderly way.
    fn left(&self, _rank: usize) -> bool {
        false
    }

    /// Other ranks whose end the engine detects by itself, and whether each has ended or left.
    fn watched(&self) -> Vec<(usize, bool)> {
        Vec::new()
    }

    /// Some rank has left in an orderly way.
    fn has_leavers(&self) -> bool {
        false
    }

    /// The engine's own threads run its operations, so waiting threads do not drive them but for `poll`.
    fn has_threads(&self) -> bool {
        false
    }

    /// The word on which peers wake this rank.
    fn wake_address(&self) -> Option<WakeAddress<'_>> {
        None
    }

    /// True when a lower rank was last seen waiting on the core that this thread runs on.
    fn shares_core(&self) -> bool {
        false
    }

    /// Advances what threads of the program drive although the engine has threads, and ends operations: call it without the
    /// group's lock. Sleeps for at most `sleep` where nothing can move. True when something moved.
    fn poll(&self, _sleep: Duration) -> bool {
        false
    }

    /// Whether `poll` may soon have something to move, so that a waiting thread looks often.
    fn polls(&self) -> bool {
        false
    }

    /// The channel of a monitored barrier, where peers can be reached.
    fn monitor(&self) -> Option<&dyn Monitor> {
        None
    }

    /// The channel on which ranks ask each other what they are doing, where peers can be reached.
    fn inquiry(&self) -> Option<&dyn Inquiry> {
        None
    }

    /// Publishes the number of this rank's last operation on a device, and what it signs.
    fn set_launched(&self, _number: u64, _signed: Signed) {}

    /// The number that `rank` gave to `set_launched` last and its kind, where they can be seen.
    fn launched(&self, _rank: usize) -> Option<(u64, u8)> {
        None
    }

    /// What `rank` signed for a number, where it can be seen: not before it has launched it, and only for its last
    /// launches, fewer than `LAUNCHES_KEPT`.
    fn signed(&self, _rank: usize, _number: u64) -> Option<Signed> {
        None
    }
}

/// How many launches on devices a rank's signatures are kept for.
pub const LAUNCHES_KEPT: u64 = 16;

/// What the ranks of a launch on devices must agree on. Several calls that have one number sign together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signed {
    /// `op::signature` of the call; of several the first one's, with the bytes of all.
    pub signature: u64,
    /// A hash of the lists of sizes and of the signatures of several calls; 0 where there is neither.
    pub lists: u32,
}

/// The word that peers change to wake this rank, and the event count around it.
pub struct WakeAddress<'a> {
    pub words: &'a dyn WakeWords,
    /// This rank.
    pub me: usize,
    pub word: &'a AtomicU32,
}

/// The channel of a monitored barrier. Barriers are counted in the order of their calls.
pub trait Monitor {
    /// This rank has come to barrier number `turn`.
    fn come(&self, turn: u64);
    fn has_come(&self, rank: usize, turn: u64) -> bool;
    /// Rank 0 publishes the outcome.
    fn decide(&self, turn: u64, failed: bool);
    /// The outcome that rank 0 published: whether it failed. None before that.
    fn decision(&self, turn: u64) -> Option<bool>;
    /// Why this rank waits in vain, where the engine alone knows of a rank that is gone.
    fn hopeless(&self, _turn: u64) -> Option<Error> {
        None
    }
    /// This rank no longer waits.
    fn left_off(&self) {}
}

/// The channel on which a rank asks another one what its program is doing. Questions are counted, because several ranks
/// may ask at once and one answer serves them all.
pub trait Inquiry: Send + Sync {
    /// Asks a rank, and wakes its thread that answers. Returns the number of the question.
    fn ask(&self, rank: usize) -> u32;
    /// The number of the last question to this rank: the word on which its answering thread sleeps.
    fn question(&self) -> &AtomicU32;
    /// Publishes this rank's answer. Called by its answering thread alone. Cut where it is too long.
    fn answer(&self, text: &str);
    /// What a rank answered last; empty before its first answer.
    fn heard(&self, rank: usize) -> String;
}

/// The functions of the group that threads of an engine call. Never called with a lock of the engine held.
pub trait Report: Send + Sync {
    fn ended(&self, ended: Ended);
    /// A thread of the engine found a fault; the group announces it and takes the engine's pending operations.
    fn failed(&self, error: Error);
    /// Something changed for which threads of the program may wait, besides operations.
    fn changed(&self);
}
