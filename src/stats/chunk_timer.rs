//! Times the parts of a large operation: two clock readings around each chunk that is copied or reduced; the time
//! between chunks is charged to the rank that was missing. Reads no clock while the operation is blocked.

use std::sync::atomic::AtomicU64;

use crate::op::{Op, OpTiming};
use crate::os::clock;

pub struct ChunkTimer {
    /// End of the last chunk, or issue.
    rest: u64,
    /// The rank that was missing at the last check.
    missing: Option<usize>,
    /// The longest single wait so far; the operation records its rank.
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

    /// A chunk is available.
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

    /// The work on the chunk is done; its time is added to `sum`.
    pub fn end(&mut self, sum: &AtomicU64, began: u64) {
        let now = clock::stamp();
        OpTiming::spend(sum, now - began);
        self.rest = now;
    }
}
