//! How ranks ask each other what they do. Ranks that share memory use words and pages in it (`shm_channel`); ranks that
//! do not share memory use a few keys in their store (`store_channel`). The rest of the diagnosis sees only this trait.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use super::monitor::Watched;
use super::query::Participant;
use super::reply::Speaker;
use super::status::{Status, Waits};
use crate::engine::Told;
use crate::error::Error;

pub trait Channel: Send + Sync {
    /// Asks `rank`. Returns the number of the question. `None` if the channel itself asks all ranks while one rank
    /// waits.
    fn ask(&self, rank: usize) -> Option<u32>;

    /// Returns the last answer of `rank` if that is an answer to this question or a later one. `None` if the channel
    /// delivers answers by `Participant::receive`.
    fn answer(&self, rank: usize, question: u32) -> Option<Status>;

    /// Whether every answer about an operation has arrived.
    fn has_all(&self, watched: &Watched) -> bool;

    /// Returns how long the first answers take at most, for an operation with this timeout.
    fn takes(&self, timeout: Duration) -> Duration;

    /// Whether answers contain the signatures of launches and say which processes are stopped. Ranks with shared memory
    /// read both directly, so their answers contain neither.
    fn is_detailed(&self) -> bool;

    /// Why no answers arrive, if this rank knows it: the store has failed or does not respond.
    fn obstacle(&self) -> Option<String> {
        None
    }

    /// If the channel has a store, wakes the threads that answer questions and read stores. Called when an operation
    /// begins to wait for long, or when the group has failed.
    fn look_again(&self);

    /// Starts to look whether another rank has published why its group failed. Returns how long this takes at most.
    fn ask_for_fault(&self) -> Duration;

    /// Returns true if this rank knows that no other rank had published a fault at this time, or if it cannot find out
    /// because the store has failed. Otherwise starts a read that will find out. A channel in shared memory always
    /// knows, because a fault is visible there immediately. Never waits.
    fn had_no_fault_at(&self, _at: Instant) -> bool {
        true
    }

    /// True once this rank need not wait for its fault to be published: the other ranks can read why the group failed
    /// on this rank, or the store has failed and they never will. Meaningful only after the group has failed.
    fn has_published(&self) -> bool {
        true
    }

    /// The fault that another rank has published, if the engine does not see it by itself.
    fn told(&self) -> Option<Told> {
        None
    }

    /// The word with the number of the last question to this rank. The answering thread (`answering`) sleeps on it.
    /// `None` if the channel has no such word.
    fn question(&self) -> Option<&AtomicU32> {
        None
    }

    /// Answers all questions up to `_question` that can be answered now and were not answered before. Never waits.
    fn reply(&self, _me: &dyn Speaker, _question: u32) {}

    /// The connection to the store, for the threads that read stores (`store_threads`). `None` if the channel has no
    /// store.
    fn connection(&self) -> Option<usize> {
        None
    }

    /// Called after this rank has left the group of `_ranks` ranks for good. Removes this rank's keys from the store;
    /// the last rank to leave removes all other keys. Waits for the store, but for nothing else.
    fn leave(&self, _ranks: usize) {}

    /// Reads the store if it is time. Returns how long to wait until the next call; `None` if no further call is
    /// needed. Waits for the store, but for nothing else.
    fn look(&self, _me: &dyn Member) -> Option<Duration> {
        None
    }
}

/// A waiting thread: it has waited for a long time in the engine of a group, or it waits for an operation that no
/// engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongWait {
    /// The thread, as `os::watch::this_thread` numbers it.
    pub thread: u64,
    /// `Member::id` of the group.
    pub watch: u64,
    /// Record of the operation that the thread waits for, if no engine runs it.
    pub external: Option<u64>,
}

/// A group's watch, as the group's channel and the threads of the process see it.
pub trait Member: Speaker + Participant + Send + Sync {
    /// Number of this watch, unique in the process.
    fn id(&self) -> u64;
    fn channel(&self) -> Option<Arc<dyn Channel>>;
    /// The connection of the group's channel to a store.
    fn connection(&self) -> Option<usize> {
        self.channel()?.connection()
    }
    /// What a thread waits for in the group. Without a thread (`None`): a device operation that has been pending for
    /// long.
    fn waits(&self, wait: Option<&LongWait>) -> Option<Waits>;
    /// Whether an operation has been pending for long.
    fn waits_long(&self) -> bool;
    /// Checks the operation with the next deadline among those that no engine runs.
    fn look_external(&self);
    /// The group's timeout, for operations that name no timeout.
    fn timeout(&self) -> Duration;
    /// The fault of the group.
    fn fault(&self) -> Option<Error>;
    /// Whether the group has failed or was destroyed.
    fn has_ended(&self) -> bool;
}
