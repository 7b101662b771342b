//! What the ranks of a group over several hosts tell each other by mail beside messages, as far as it is known here; and who
//! carries letters out. Used under the lock of `queue::State` (`post`).

use std::collections::{HashMap, HashSet};

#[derive(Default)]
pub(super) struct Talk {
    /// A thread carries out errands.
    pub busy: bool,
    /// The ranks that have answered the goodbye.
    pub heard: HashSet<usize>,
    /// On rank 0: the last monitored barrier that each rank has come to.
    pub came: HashMap<usize, u64>,
    /// The outcomes of the last two, by number and whether it failed.
    pub decided: [(u64, bool); 2],
    /// This rank waits in a monitored barrier, or for answers to its goodbye.
    pub in_barrier: bool,
    pub leaving: bool,
    /// Held while letters are awaited.
    pub awaiting: Option<Box<dyn Send>>,
}

impl Talk {
    /// A thread of the program waits for letters.
    pub fn is_awaited(&self) -> bool {
        self.in_barrier || self.leaving
    }
}
