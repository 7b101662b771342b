//! The interfaces that the core needs from its caller: a key-value store (`Store`, `Counting`), the process (`Host`:
//! pending signals, places in the program, threads), and callbacks of an operation (`Completion`). The bridge
//! implements them for torch; tests implement them in memory.

use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::os::watch::PerProcess;

/// The key-value store for the rendezvous of a group. It may still contain keys of an earlier run.
pub trait Store {
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Returns the key's value without waiting for the key. `None` if the key does not exist.
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>>;
}

/// A store with counters.
pub trait Counting: Store {
    /// Adds `by` to the key's value and returns the sum.
    fn add(&self, key: &str, by: i64) -> Result<i64>;
    /// Deletes a key that only this rank reads. Does nothing if the store cannot delete.
    fn remove(&self, key: &str) -> Result<()>;
    /// Identifies the connection. If two stores have the same number, they share a connection, and a slow request of
    /// one delays the other.
    fn connection(&self) -> usize;
}

/// The process that uses the core.
pub trait Host: Send + Sync {
    /// Whether a signal handler of the caller raised an exception. If so, the wait must end with
    /// `ErrorKind::Interrupted`. A waiting thread calls this at least every 100 ms, and never while it holds a lock.
    fn interrupted(&self) -> bool;

    /// Returns the place in the program at which a thread is, as text. The thread is a number of
    /// `os::watch::this_thread`, or 0 for the main thread. Waits for the interpreter's lock, however long native code
    /// holds it. `None` if the thread runs no code of the program.
    fn place(&self, _thread: u64) -> Option<String> {
        None
    }

    /// Returns the place in the program at which an operation was called; `site` is its `CallNote::site`. `None` if
    /// places are not recorded.
    fn call_site(&self, _site: u32) -> Option<String> {
        None
    }

    /// Returns on how many threads `parallel` would run a large number of parts if the calling thread called it now.
    /// The calling thread is one of these threads.
    fn threads(&self) -> usize {
        1
    }

    /// Calls `part` with each number below `parts`, on up to `threads` threads, and returns after all of these calls
    /// have returned.
    fn parallel(&self, parts: usize, part: &(dyn Fn(usize) + Sync)) {
        (0..parts).for_each(part);
    }
}

/// A caller without signals, for a rank that is a thread or for a wait that no signal may end.
pub struct NoSignals;

impl Host for NoSignals {
    fn interrupted(&self) -> bool {
        false
    }
}

/// The caller's steps at the start and end of an operation. Called on any thread.
pub trait Completion: Send + Sync {
    /// Called before the inputs are read.
    fn prepare(&self);
    /// Called after the outputs were written, before the end is reported.
    fn store_back(&self);
    /// Called when the operation has ended. `None` means that it ended without an error.
    fn ended(&self, error: Option<&Error>);
}

/// Whether this is the first call in the process with this `what`. Used to log a warning only once, however many groups
/// the process creates.
pub fn first_time(what: &'static str) -> bool {
    static TOLD: PerProcess<Mutex<Vec<&'static str>>> = PerProcess::new();
    let mut told = TOLD.get().lock().unwrap_or_else(PoisonError::into_inner);
    let first = !told.contains(&what);
    if first {
        told.push(what);
    }
    first
}

/// A store in the memory of this process, for tests.
#[cfg(test)]
#[derive(Clone, Default)]
pub struct Memory(std::sync::Arc<Mutex<std::collections::HashMap<String, Vec<u8>>>>);

#[cfg(test)]
impl Memory {
    /// Returns the keys that begin with `begin`, sorted.
    pub fn keys(&self, begin: &str) -> Vec<String> {
        let all = self.0.lock().unwrap();
        let mut keys: Vec<String> = all.keys().filter(|key| key.starts_with(begin)).cloned().collect();
        keys.sort();
        keys
    }
}

#[cfg(test)]
impl Store for Memory {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.lock().unwrap().insert(key.into(), value.into());
        Ok(())
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.0.lock().unwrap().get(key).cloned())
    }
}

#[cfg(test)]
impl Counting for Memory {
    fn add(&self, key: &str, by: i64) -> Result<i64> {
        let mut all = self.0.lock().unwrap();
        let value = all.entry(key.into()).or_insert_with(|| b"0".to_vec());
        let sum = std::str::from_utf8(value).unwrap().parse::<i64>().unwrap() + by;
        *value = sum.to_string().into_bytes();
        Ok(sum)
    }
    fn remove(&self, key: &str) -> Result<()> {
        self.0.lock().unwrap().remove(key);
        Ok(())
    }
    fn connection(&self) -> usize {
        std::sync::Arc::as_ptr(&self.0) as usize
    }
}
