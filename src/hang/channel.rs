//! How ranks ask each other what they do. Ranks that share memory have words and pages there (`shm_channel`), others a few
//! keys in their store (`store_channel`). This is the only place where the two differ.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use super::monitor::Watched;
use super::queries::Participant;
use super::reply::Speaker;
use super::status::{Status, Waits};
use crate::engine::Told;
use crate::error::Error;

pub trait Channel: Send + Sync {
    /// Asks `rank`. Returns the number of the question; None where the channel itself asks all ranks while one waits.
    fn ask(&self, rank: usize) -> Option<u32>;

    /// What `rank` has answered to this question or a later one, where that can be read at any time. Other answers come by
    /// `Participant::receive`.
    fn answer(&self, rank: usize, question: u32) -> Option<Status>;

    /// Whether every answer about an operation has come.
    fn has_all(&self, watched: &Watched) -> bool;

    /// How long the first answers about an operation with this timeout may take.
    fn takes(&self, timeout: Duration) -> Duration;

    /// Whether answers carry the signatures of launches and the stopped processes. Ranks with shared memory read these
    /// directly, so their answers leave them out.
    fn is_detailed(&self) -> bool;

    /// Wakes the threads that answer questions and read stores, if there are any. Call it when an operation has begun
    /// to wait for long, or when the group has failed.
    fn look_again(&self);

    /// Looks from now on whether another rank has told why its group failed. Returns how long that may take.
    fn ask_for_fault(&self) -> Duration;

    /// What another rank has told about that, where the engine does not know.
    fn told(&self) -> Option<Told> {
        None
    }

    /// For the answering thread (`responder`): the number of the last question to this rank, on which that thread sleeps.
    fn question(&self) -> Option<&AtomicU32> {
        None
    }

    /// Answers all questions up to this one, as far as that was not done and can be done now. Never waits.
    fn reply(&self, _me: &dyn Speaker, _question: u32) {}

    /// For the threads that look into stores (`store_threads`): the connection to the store.
    fn connection(&self) -> Option<usize> {
        None
    }

    /// Looks into the store where the time has come. Returns when to look next. Waits for the store, and for nothing else.
    fn look(&self, _me: &dyn Member) -> Option<Duration> {
        None
    }
}

/// A thread that has waited for long in a group, or waits there for what no engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongWait {
    /// `os::watch::this_thread`.
    pub thread: u64,
    /// `Member::id` of the group's.
    pub watch: u64,
    /// The record of what it waits for, where no engine runs that.
    pub external: Option<u64>,
}

/// The watch of a group, as its channel and the threads of the process see it.
pub trait Member: Speaker + Participant + Send + Sync {
    /// Its number in the process.
    fn id(&self) -> u64;
    fn channel(&self) -> Option<Arc<dyn Channel>>;
    /// What a thread waits for in the group or, for none, a device that has been at it for long.
    fn waits(&self, wait: Option<&LongWait>) -> Option<Waits>;
    /// An operation has been pending for long.
    fn waits_long(&self) -> bool;
    /// Looks at the operation that no engine runs and whose deadline is the next.
    fn look_external(&self);
    /// Of operations that name none.
    fn timeout(&self) -> Duration;
    /// Why the group has failed.
    fn fault(&self) -> Option<Error>;
    /// It has failed, or was destroyed.
    fn has_ended(&self) -> bool;
}
