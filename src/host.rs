//! What the core asks of its surroundings: a key-value store to meet in, the caller's pending signals, and what to do
//! when an operation starts and ends. The bridge implements these for torch; tests implement them in memory.

use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// The key-value store that the ranks of a group meet through. Keys of an earlier incarnation may still be in it.
pub trait Store {
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Does not wait for the key: `None` when it is not there.
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>>;
}

/// A store that also counts.
pub trait Counting: Store {
    /// The sum of all that was added to the key.
    fn add(&self, key: &str, by: i64) -> Result<i64>;
}

/// The process that calls us.
pub trait Host: Send + Sync {
    /// True when a signal handler of the caller raised, so that the wait must end with `Error::Interrupted`.
    /// Asked at least every 100 ms while waiting, never with a lock held.
    fn interrupted(&self) -> bool;
}

/// What an operation does outside the engine. Called on any thread.
pub trait Completion: Send + Sync {
    /// Before the inputs are read.
    fn prepare(&self);
    /// After the outputs were written, before the end is told.
    fn store_back(&self);
    /// The operation has ended, well (`None`) or not.
    fn ended(&self, error: Option<&Error>);
}

/// Whether this is the first call in the process that names `what`: for a warning about something that concerns all
/// groups alike, however many of them a process makes.
pub fn first_time(what: &'static str) -> bool {
    static TOLD: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    let first = !told.contains(&what);
    if first {
        told.push(what);
    }
    first
}
