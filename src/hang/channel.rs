//! How ranks ask each other what they do. Ranks that share memory use words and pages in it (`shm_channel`); ranks that
//! do not share memory use a few keys in their store (`store_channel`). The rest of the diagnosis sees only these traits.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use super::monitor::Watched;
use super::query::Participant;
use super::reply::Speaker;
use super::status::{Status, Waits};
use crate::engine::Told;
use crate::error::Error;

/// What both kinds of channels have, and access to what only one of them has.
pub trait Channel: Send + Sync {
    /// Whether every answer about an operation has arrived.
    fn has_all(&self, watched: &Watched) -> bool;

    /// Returns how long the first answers take at most, for an operation with this timeout.
    fn takes(&self, timeout: Duration) -> Duration;

    /// The channel, if it is in memory that the ranks share.
    fn memory(&self) -> Option<&dyn MemoryChannel> {
        None
    }

    /// The channel, if it uses a store.
    fn store(&self) -> Option<&dyn StoreAccess> {
        None
    }
}

/// A channel in shared memory. A rank asks other ranks individually, and their answering threads (`answering`) write the
/// answers into the memory. The fault of a rank needs no channel: all ranks see it in the memory.
pub trait MemoryChannel {
    /// Asks `rank`. Returns the number of the question.
    fn ask(&self, rank: usize) -> u32;

    /// Returns the last answer of `rank` if that is an answer to this question or a later one.
    fn answer(&self, rank: usize, question: u32) -> Option<Status>;

    /// The word with the number of the last question to this rank. The answering thread sleeps on it.
    fn question(&self) -> &AtomicU32;

    /// Answers all questions up to `question` that can be answered now and were not answered before. Never waits.
    fn reply(&self, me: &dyn Speaker, question: u32);
}

/// A channel through a store. While one rank waits, all ranks are asked, and `Participant::receive` gets the answers. A
/// rank also publishes in the store why its group failed. `look` and `leave` wait for the store, and for nothing else; a
/// thread for each connection (`store_threads`) calls them. The other functions never wait.
pub trait StoreAccess {
    /// Number of the connection to the store.
    fn connection(&self) -> usize;

    /// Reads the store if it is time. Returns how long to wait until the next call; `None` if no further call is needed.
    fn look(&self, me: &dyn Member) -> Option<Duration>;

    /// Called after this rank has left the group of `ranks` ranks for good. Removes this rank's keys from the store; the
    /// last rank to leave removes all other keys.
    fn leave(&self, ranks: usize);

    /// Wakes the threads that answer questions and read stores. Called when an operation begins to wait for long, or when
    /// the group has failed.
    fn look_again(&self);

    /// Why no answers arrive, if this rank knows it: the store has failed or does not respond.
    fn obstacle(&self) -> Option<String>;

    /// Starts to look whether another rank has published why its group failed.
    fn ask_for_fault(&self);

    /// Returns true if this rank knows that no other rank had published a fault at this time, or if it cannot find out
    /// because the store has failed. Otherwise starts a read that will find out.
    fn had_no_fault_at(&self, at: Instant) -> bool;

    /// True once this rank need not wait for its fault to be published: the other ranks can read why the group failed
    /// on this rank, or the store has failed and they never will. Meaningful only after the group has failed.
    fn has_published(&self) -> bool;

    /// The fault that another rank has published.
    fn told(&self) -> Option<Told>;
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
        self.channel()?.store().map(StoreAccess::connection)
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
