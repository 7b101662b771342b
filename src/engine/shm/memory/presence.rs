//! Memory that is populated when it is first needed: most of a segment, because most groups use little of it.
//!
//! **Which rank populates a part, and why its peers may rely on it.** A part belongs to one rank, which populates it
//! before any rank touches it. The existing release and acquire pairs order the peers' accesses after that:
//!
//! | part | populated | peers touch it after |
//! | --- | --- | --- |
//! | stage, result | before the first round that fills them | `Ready` of a round (release, acquire) |
//! | envelopes of a sender | before its first message | mail (release, acquire): its first message to a rank always brings some |
//! | channel of a receiver | before it is first lent | the grant (release, acquire) |
//!
//! Words and slots are used before ranks exchange anything, so a rank populates them before it says that it has mapped
//! the memory, and no rank gets its group before all have said so (`rendezvous`).
//!
//! **The limits.** Filling memory past the limit of a control group kills the process, and memory that was free when
//! the group was made may be gone. So the limits are read again. Where they leave too little, the operation fails
//! before anything is written: on this rank with the amounts, on the others with the same text, as for any fault of a
//! group. A part may take half of the free memory, counted for all ranks, because they may all be about to do the same;
//! the other half is for another group and for what the programs do at the same time.

use std::sync::atomic::{AtomicU32, Ordering};

use super::area::Area;
use super::layout::Part;
use super::segment::Backing;
use crate::error::{Error, Result};

/// The populated parts of a rank, a bit each. The thread that drives the rank's group reads and writes it under the
/// group's lock (relaxed).
#[derive(Debug, Default)]
pub struct Presence(AtomicU32);

impl Presence {
    fn bit(part: Part) -> u32 {
        match part {
            Part::Stage => 1,
            Part::Result => 1 << 1,
            Part::Envelopes => 1 << 2,
            Part::Channel(channel) => 1 << (3 + channel),
        }
    }

    fn has(&self, part: Part) -> bool {
        self.0.load(Ordering::Relaxed) & Presence::bit(part) != 0
    }
}

impl Area {
    /// Populates parts of this rank's memory that are not populated yet. Call it before this rank writes them or lets a
    /// peer write them. Fails where memory is short.
    pub fn make_present(&self, parts: impl IntoIterator<Item = Part>) -> Result<()> {
        let missing: Vec<Part> = parts.into_iter().filter(|part| !self.presence.has(*part)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        self.look_for_room(missing.iter().map(|part| self.layout.part(self.me, *part).len()).sum())?;
        for part in missing {
            self.segment().populate(self.layout.part(self.me, part))?;
            self.presence.0.fetch_or(Presence::bit(part), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Fails where the limits leave too little for `bytes` more on every rank.
    fn look_for_room(&self, bytes: usize) -> Result<()> {
        if self.segment().backing() == Backing::Unsealed {
            return Ok(()); // its pages were taken when it was made
        }
        let needed = (bytes * self.ranks) as u64;
        match (self.headroom)() {
            Some(left) if left / 2 < needed => Err(Error::System(format!(
                "sagellm: rank {} has too little memory for its first large operation or message in this group: the {} ranks \
                 of this host need {} KiB more of shared memory, and may use half of the {} KiB that their memory limit leaves. \
                 Raise the limit, or free memory before",
                self.me,
                self.ranks,
                needed >> 10,
                left >> 10
            ))),
            _ => Ok(()),
        }
    }
}
