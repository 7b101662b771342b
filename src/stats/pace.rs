//! Where a large operation spends its time: two clock readings around each chunk that is copied or reduced, and the time
//! between chunks charged to the rank that was missing. Nothing is read while it is blocked.

use std::sync::atomic::AtomicU64;

use crate::op::{Op, OpTiming};
use crate::os::clock;

pub struct ChunkTimer {
    /// End of the last chunk, or issue.
    rest: u64,
    /// The rank that was missing at the last look.
    missing: Option<usize>,
    /// The longest single wait so far; its rank is noted in the operation.
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

    /// A chunk may be worked on.
    pub fn begin(&mut self, op: &Op) -> u64 {
        let now = clock::stamp();
        if let Some(rank) = self.missing.take() {
            let waited = now - self.rest;
            if waited > self.longest {
                self.longest = waited;
                op.timing.waits_for(rank);
            }
        }
        now
    }

    /// The work that `begin` announced is done; it belongs to `sum`.
    pub fn end(&mut self, sum: &AtomicU64, began: u64) {
        let now = clock::stamp();
        OpTiming::spend(sum, now - began);
        self.rest = now;
    }
}
