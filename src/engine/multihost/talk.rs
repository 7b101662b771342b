//! The state of this rank's mail except for messages of the program: goodbyes, monitored barriers, and whether a thread
//! runs errands. `post` uses it under the lock of `queue::State`.

use std::collections::{HashMap, HashSet};

#[derive(Default)]
pub(super) struct Talk {
    /// Whether a thread is running errands.
    pub busy: bool,
    /// The ranks that have answered this rank's goodbye.
    pub heard: HashSet<usize>,
    /// On rank 0: per rank, the highest number of a monitored barrier that it has entered.
    pub came: HashMap<usize, u64>,
    /// The outcomes of the last two monitored barriers: for each, its number and whether it failed. The index is the
    /// number modulo 2.
    pub decided: [(u64, bool); 2],
    /// `in_barrier`: whether this rank waits in a monitored barrier. `leaving`: whether it waits for answers to its
    /// goodbye.
    pub in_barrier: bool,
    pub leaving: bool,
    /// While this guard exists, the link reads letters even if no thread waits.
    pub awaiting: Option<Box<dyn Send>>,
}

impl Talk {
    /// Whether a thread of the program waits for letters.
    pub fn is_awaited(&self) -> bool {
        self.in_barrier || self.leaving
    }
}
