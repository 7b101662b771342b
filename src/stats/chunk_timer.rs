//! Measures how long the parts of a large operation take, with a clock reading before and after each chunk that is
//! copied or reduced. The time between chunks is attributed to the rank whose data was missing. Does not read the clock
//! while the operation is blocked.

use std::sync::atomic::AtomicU64;

use crate::op::{Op, OpTiming};
use crate::os::clock;

pub struct ChunkTimer {
    /// Time at which the last chunk ended; before the first chunk, the time of issue.
    rest: u64,
    /// The rank whose data was missing at the last check.
    missing: Option<usize>,
    /// The longest wait so far. The operation records the rank that caused it.
    longest: u64,
}

impl ChunkTimer {
    pub fn new(op: &Op) -> ChunkTimer {
        ChunkTimer { rest: op.issued, missing: None, longest: 0 }
    }

    #[inline]
    pub fn misses(&mut self, rank: usize) {
        self.missing = Some(rank);
    }

    /// Called when a chunk is available. Returns the start time of the work on it.
    pub fn begin(&mut self, op: &Op) -> u64 {
        let now = clock::stamp();
        if let Some(rank) = self.missing.take() {
            let waited = now - self.rest;
            if waited > self.longest {
                self.longest = waited;
                op.timing.set_late(rank);
            }
        }
        now
    }

    /// Called when the work on a chunk is done. Adds its time to `sum`.
    pub fn end(&mut self, sum: &AtomicU64, began: u64) {
        let now = clock::stamp();
        OpTiming::spend(sum, now - began);
        self.rest = now;
    }
}
