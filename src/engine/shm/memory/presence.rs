//! Populates parts of a segment (`layout::Part`) at their first use. The parts are most of the segment, and most groups
//! use few of them.
//!
//! **Which rank populates a part, and why its peers may rely on it.** A part belongs to one rank, which populates it
//! before any rank touches it. Release and acquire pairs that exist anyway order the peers' accesses after that:
//!
//! | part | populated | peers touch it after |
//! | --- | --- | --- |
//! | stage, result | before the first round that fills them | `Ready` of a round (release, acquire) |
//! | stage, for sums that go from node to node | before the operation is published | `Folded` of a chunk (release, acquire) |
//! | envelopes of a sender | before its first message | mail (release, acquire): a first message to a rank sets a bit |
//! | channel of a receiver | before it is first lent | the grant (release, acquire) |
//!
//! Words and slots are used before ranks exchange anything. So a rank populates them before it reports that it has
//! mapped the memory, and no rank gets its group before all have reported (`rendezvous`).
//!
//! With the option `numa` and ranks that are bound to several NUMA nodes (`Nodes::numa`), each slice of a stage buffer is on the
//! node of the rank that reads it in a staged sum: the reader waits for its loads, while the writer's stores do not wait.
//! Other operations read the buffers elsewhere, too.
//!
//! **The limits.** Filling memory past the limit of a cgroup kills the process, and memory that was free when the
//! ranks' group was created may be in use now. So the limits are read again. If they leave too little, the operation
//! fails before anything is written, and its error, which has the amounts, ends the group on all ranks. The new parts,
//! times the number of ranks, must fit into half of the free memory, because all ranks may be about to populate their
//! parts. The other half is left for other groups and for what the programs allocate at the same time.

use std::sync::atomic::{AtomicU32, Ordering};

use super::layout::{Layout, Part};
use super::segment::{Backing, Segment};
use crate::engine::shm::nodes::Nodes;
use crate::error::{Error, Result};

/// Which parts of a rank's memory are populated.
#[derive(Debug)]
pub struct Presence {
    /// One bit per part. The thread that drives the rank's group reads and writes it under the group's lock (relaxed).
    parts: AtomicU32,
    /// Returns the bytes of memory that this process may still use.
    headroom: fn() -> Option<u64>,
}

impl Presence {
    pub fn new(headroom: fn() -> Option<u64>) -> Presence {
        Presence { parts: AtomicU32::new(0), headroom }
    }

    fn bit(part: Part) -> u32 {
        match part {
            Part::Stage => 1,
            Part::Result => 1 << 1,
            Part::Envelopes => 1 << 2,
            Part::Channel(channel) => 1 << (3 + channel),
        }
    }

    /// Implements `Area::make_present` for the memory of rank `me`.
    pub fn make(
        &self,
        segment: &Segment,
        layout: &Layout,
        (me, nodes): (usize, &Nodes),
        parts: impl IntoIterator<Item = Part>,
    ) -> Result<()> {
        let present = self.parts.load(Ordering::Relaxed);
        let missing: Vec<Part> = parts.into_iter().filter(|part| present & Presence::bit(*part) == 0).collect();
        if missing.is_empty() {
            return Ok(());
        }
        // The pages of an unsealed file were reserved when it was made.
        if segment.backing() != Backing::Unsealed {
            let bytes: usize = missing.iter().map(|part| layout.part(me, *part).len()).sum();
            self.look_for_room(bytes, me, layout.ranks)?;
        }
        if missing.contains(&Part::Stage) {
            place(segment, layout, me, nodes);
        }
        for part in missing {
            segment.populate(layout.part(me, part))?;
            self.parts.fetch_or(Presence::bit(part), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Fails if the limits leave too little memory for `bytes` more bytes on every rank.
    fn look_for_room(&self, bytes: usize, me: usize, ranks: usize) -> Result<()> {
        let needed = (bytes * ranks) as u64;
        match (self.headroom)() {
            Some(left) if left / 2 < needed => Err(Error::system(format!(
                "sagellm: rank {me} has too little memory for its first large operation or message in this group: the {ranks} \
                 ranks of this host need {} KiB more of shared memory, and may use half of the {} KiB that their memory limit \
                 leaves. Raise the limit, or free memory before",
                needed >> 10,
                left >> 10
            ))),
            _ => Ok(()),
        }
    }
}

/// Has the slices of this rank's stage buffers placed on the NUMA nodes of the ranks that read them. Without such nodes the
/// pages are placed on the node of this rank, which populates them.
fn place(segment: &Segment, layout: &Layout, me: usize, nodes: &Nodes) {
    for (range, node) in layout.readers(me, nodes) {
        if let Err(error) = segment.prefer(range, node) {
            log::debug!("slices of a stage buffer are not placed on NUMA node {node}: {error}");
            return; // a container may forbid it
        }
    }
}
