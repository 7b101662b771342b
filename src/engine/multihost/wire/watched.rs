//! What all connections that UCX carries share: the worker, and the list of connections that must be checked.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::driving::{Counted, Driving};
use super::locked;
use crate::engine::multihost::ucx::{Data, Worker};

pub struct Watched {
    pub worker: Worker,
    pub driving: Arc<Driving>,
    /// The numbers of connections that may have to end. The wire is driven for each of them.
    numbers: Mutex<HashMap<u64, Counted>>,
    /// Whether `numbers` has any. Written under the lock of `numbers`, read without it (relaxed: a pass that misses it
    /// ends soon).
    any: AtomicBool,
}

impl Watched {
    pub fn new(worker: Worker, driving: &Arc<Driving>) -> Watched {
        Watched { worker, driving: Arc::clone(driving), numbers: Mutex::default(), any: AtomicBool::new(false) }
    }

    /// Adds a connection, which is then checked until it has ended or no longer has to end.
    pub fn add(&self, who: u64) {
        let mut numbers = locked(&self.numbers);
        numbers.entry(who).or_insert_with(|| Counted::new(&self.driving));
        self.any.store(true, Ordering::Relaxed);
        drop(numbers);
        self.driving.wake_for_pending();
    }

    pub fn has_any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Removes all numbers and returns them. The caller checks these connections. If one may still have to end, the
    /// caller adds its number again.
    pub fn take(&self) -> Vec<u64> {
        let mut numbers = locked(&self.numbers);
        self.any.store(false, Ordering::Relaxed);
        std::mem::take(&mut *numbers).into_keys().collect()
    }

    /// Gives UCX back data that is no longer needed. If it is still at the sender, it is not sent.
    pub fn release(&self, data: Data) {
        if let Data::Held(held) = data {
            self.worker.release(held);
        }
    }
}
