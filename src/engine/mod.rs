//! What carries out the operations of a group: `shm` between the processes of one host, `multihost` where the ranks live
//! on several (over a link between them), `solo` for a group of one, `delegate` where another backend serves the group.
//! A group knows them as an [`Engine`] and its [`Control`], and nothing else of them; `group/builder.rs` alone makes one.
//! `device` are the libraries of accelerators, `local` areas and links of ranks that are threads (tests and tools).

pub mod delegate;
pub mod device;
pub mod local;
pub mod multihost;
pub mod pieces;
pub mod shm;
pub mod solo;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use crate::error::{Error, Result};
use crate::op::Op;
use crate::op::overlap::Reach;
use crate::os::event_count::Bell;
use crate::reduce::Kernel;
use crate::select::Asked;
use crate::select::explain::Explanation;

/// Operations that ended, and how.
pub type Ended = Vec<(Arc<Op>, Result<()>)>;

/// One rank's side of what carries out a group's operations. Called with the group's lock held, so it needs no lock for
/// what only these calls touch, and none of them waits for a peer or for another thread of the group.
pub trait Engine: Send {
    /// What is asked and told without the group's lock.
    fn control(&self) -> Arc<dyn Control>;

    /// Which engine it is and how it is set up, for `Group::describe`.
    fn describe(&self) -> String;

    /// Why another backend serves the whole group, if one does: it then numbers what that backend carries.
    fn delegate_reason(&self) -> Option<&str> {
        None
    }

    /// Takes an operation that was validated and numbered, and moves what can move. An error concerns the whole group;
    /// the operation is then the engine's to end only where it `holds` it.
    ///
    /// Of each operation an engine says what is carried and how (`Op::loads`, `Op::sets_out`: statistics and explanations
    /// go by these), calls `Op::prepare` before it first reads the inputs and `Op::store_back` after it wrote the last
    /// output (strided tensors are copied there), calls `Op::release` where it needs the memory no longer although the
    /// operation goes on, and hands the operation out in `ended`. `solo` is the shortest example.
    fn submit(&mut self, op: Arc<Op>, kernel: Option<Kernel>, ended: &mut Ended) -> Result<()>;

    /// True while the engine has this operation and will end it, or give it back in `drain`.
    fn holds(&self, _op: &Arc<Op>) -> bool {
        false
    }

    /// Moves whatever can move, without waiting. True when something did. An error concerns the whole group.
    fn poll(&mut self, _ended: &mut Ended) -> Result<bool> {
        Ok(false)
    }

    /// Whether `poll` may have something to move.
    fn has_pending(&self) -> bool {
        false
    }

    /// A pending operation that cannot end without something more from `rank`; `gone` says which ranks will do nothing
    /// more.
    fn needs(&self, _rank: usize, _gone: &dyn Fn(usize) -> bool) -> Option<Arc<Op>> {
        None
    }

    /// The pending operation whose deadline comes first.
    fn next_deadline(&self) -> Option<Arc<Op>> {
        None
    }

    /// The ranks that a pending operation waits for and what they did last, for the error at its deadline. `process` gives
    /// a rank's process and state.
    fn missing(&self, _op: &Op, _process: &dyn Fn(usize) -> String) -> String {
        String::new()
    }

    /// The pending collective with this number.
    fn collective(&self, _number: u64) -> Option<Arc<Op>> {
        None
    }

    /// The group ends with `error`: gives back the pending operations, whose memory is not used any more. What a thread of
    /// the engine works on, it ends itself (`Report::ended`).
    fn drain(&mut self, _error: &Error) -> Vec<Arc<Op>> {
        Vec::new()
    }

    /// How an operation would go, alone or `batched` with others.
    fn explain(&self, asked: Asked, batched: bool) -> Explanation;
}

/// What any thread may ask and tell an engine, without the group's lock. What is not overridden is right for an engine
/// that shares nothing with its peers.
pub trait Control: Send + Sync {
    /// A fault was announced, by a peer or by this rank.
    fn is_poisoned(&self) -> bool {
        false
    }

    /// The fault that was announced first: by which rank, its `Error::code`, its text.
    fn reported(&self) -> Option<(usize, char, String)> {
        None
    }

    /// Tells the peers why this rank's group failed, and breaks off what its threads wait for. Called once a group.
    fn announce(&self, _fault: &Error) {}

    /// Leaves the peers in order: what was published stays readable for them, threads of the engine end, and what they
    /// cannot finish ends with `error`. May wait for delivery, until `interrupted`.
    fn leave(&self, _error: &Error, _interrupted: &dyn Fn() -> bool) {}

    /// `rank` has left in order.
    fn left(&self, _rank: usize) -> bool {
        false
    }

    /// Some rank has left in order.
    fn has_leavers(&self) -> bool {
        false
    }

    /// Threads of the engine's own carry operations, which are therefore not driven by threads that wait.
    fn has_threads(&self) -> bool {
        false
    }

    /// Where peers wake this rank.
    fn doorbell(&self) -> Option<Doorbell<'_>> {
        None
    }

    /// True when a lower rank was last seen waiting on the core that this thread runs on.
    fn shares_core(&self) -> bool {
        false
    }

    /// An operation that has not ended and that a message of a delegate which touches `reach` must follow.
    fn using(&self, _reach: &Reach) -> Option<Arc<Op>> {
        None
    }

    /// What a monitored barrier goes by, where peers can be told.
    fn monitor(&self) -> Option<&dyn Monitor> {
        None
    }

    /// Tells the peers the number and kind of this rank's last operation on a device.
    fn set_launched(&self, _number: u64, _kind: u8) {}

    /// What `rank` told by `set_launched`, where it can be seen.
    fn launched(&self, _rank: usize) -> Option<(u64, u8)> {
        None
    }
}

/// The word that peers change to wake this rank, and the event count around it.
pub struct Doorbell<'a> {
    pub bell: &'a dyn Bell,
    /// This rank.
    pub me: usize,
    pub word: &'a AtomicU32,
}

/// What the ranks of a monitored barrier tell each other. Barriers are counted in the order of their calls.
pub trait Monitor {
    /// This rank has come to barrier number `turn`.
    fn come(&self, turn: u64);
    fn has_come(&self, rank: usize, turn: u64) -> bool;
    /// Rank 0 tells how it ended.
    fn decide(&self, turn: u64, failed: bool);
    /// What rank 0 told: whether it failed. None while it has told nothing.
    fn decision(&self, turn: u64) -> Option<bool>;
}

/// The group, for threads of an engine. Never called with a lock of the engine's held.
pub trait Report: Send + Sync {
    fn ended(&self, ended: Ended);
    /// A thread of the engine found a fault; the group announces it and drains the engine.
    fn failed(&self, error: Error);
}
