//! Memory that becomes present when it is first needed: most of a segment, because most groups use little of it.
//!
//! **Who makes what present, and who relies on it.** A part belongs to one rank, which makes it present before anybody
//! touches it; that others do so only afterwards follows from the orders that there are anyway:
//!
//! | part | made present | others touch it after |
//! | --- | --- | --- |
//! | stage, result | before the first round that fills them | `Ready` of a round (release, acquire) |
//! | envelopes of a sender | before its first message | mail (release, acquire): its first message to a rank always brings some |
//! | lane of a receiver | before it is first lent | the grant (release, acquire) |
//!
//! What ranks use before they know anything of each other, words and slots, is present before a rank says that it has mapped
//! the memory, and no rank gets its group before all have said so (`rendezvous`).
//!
//! **The limits.** Memory that is filled past the limit of a control group kills the process, and the room that was there
//! when the group was made may be gone. So the limits are read again, and the operation fails before anything is written
//! where they leave too little: on this rank with the amounts, on the others with the same text, as for any fault of a group.
//! A part may take half of what is left, counted for all ranks, because they may all be about to do the same; the other
//! half is for another group of theirs, and for what their programs do at the same time.

use std::sync::atomic::{AtomicU32, Ordering};

use super::area::Area;
use super::layout::Part;
use super::segment::Backing;
use crate::error::{Error, Result};

/// The parts of a rank that are present, a bit each. Written and read by the thread that drives the rank's group, under the
/// group's lock (relaxed).
#[derive(Debug, Default)]
pub struct Presence(AtomicU32);

impl Presence {
    fn bit(part: Part) -> u32 {
        match part {
            Part::Stage => 1,
            Part::Result => 1 << 1,
            Part::Envelopes => 1 << 2,
            Part::Lane(lane) => 1 << (3 + lane),
        }
    }

    fn has(&self, part: Part) -> bool {
        self.0.load(Ordering::Relaxed) & Presence::bit(part) != 0
    }
}

impl Area {
    /// Makes parts of this rank's memory present, unless they are. To be called before this rank writes them or lets
    /// another one do so. The error is that there is no room.
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
