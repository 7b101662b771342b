//! Divides the copying of a message between its sender and its receiver, if each can reach the other's tensor.
//!
//! Idea: a sender that would otherwise only wait copies too. Both ranks claim ranges of the message from one counter
//! and copy them, the receiver from the sender's tensor, the sender into the receiver's. While the sender's program
//! computes, its progress thread claims nothing, and the receiver copies everything.
//!
//! The words belong to the ordered pair of ranks. Only one message of a pair moves at a time. (The words cannot belong
//! to the channel. The receiver may lend the channel to another rank before this message's sender sees that the message
//! is drained. The sender would then copy a share of the other rank's message.)
//!
//! | word | written by | value |
//! | --- | --- | --- |
//! | PLACE | sender, before READY | where the tensor begins in the sender's arena, + 1; 0: the message is staged |
//! | CLAIMED | sender writes 0 before READY; then both | number of bytes that the ranks have claimed |
//! | HOME | sender writes 0 before READY; receiver, release | where the output begins in the receiver's arena, + 1 |
//! | COPIED | sender writes 0 before READY; then release after each copy | number of bytes that the sender has copied |
//!
//! The message is complete when the bytes that the receiver has copied and COPIED (acquire) add up to its size. The
//! sender changes the words again only when DRAINED says that this message has ended.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::{CLAIMED, COPIED, HOME, PLACE};
use crate::engine::shm::memory::area::Area;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::threads;

/// A rank claims this many bytes at a time for each of its threads. Between two claims, a waiting thread checks for
/// signals, deadlines and ended peers.
const STEP_BYTES: usize = 256 << 10;

/// The words of the message that moves between two ranks.
#[derive(Clone, Copy)]
pub struct Shares<'a> {
    pub area: &'a Area,
    pub from: usize,
    pub to: usize,
}

impl<'a> Shares<'a> {
    fn word(self, index: usize) -> &'a AtomicU64 {
        self.area.pair_word(self.from, self.to, index)
    }

    /// Called by the sender before it publishes the round. `place`: where the tensor begins in the sender's arena; None
    /// if the message is staged.
    pub fn open(self, place: Option<usize>) {
        self.word(PLACE).store(place.map_or(0, |offset| offset as u64 + 1), Relaxed);
        [CLAIMED, HOME, COPIED].into_iter().for_each(|index| self.word(index).store(0, Relaxed));
    }

    /// Where the tensor begins in the sender's arena. Called by the receiver after it has seen the round.
    pub fn place(self) -> Option<usize> {
        offset(self.word(PLACE).load(Relaxed))
    }

    /// Lets the sender copy into the output, which begins at `offset` in the receiver's arena.
    pub fn set_home(self, offset: usize) {
        self.word(HOME).store(offset as u64 + 1, Release);
    }

    /// Where the output begins in the receiver's arena, if the sender may copy into it.
    pub fn home(self) -> Option<usize> {
        offset(self.word(HOME).load(Acquire))
    }

    /// Claims the next range of a message of `total` bytes. None if everything is claimed. Relaxed, because the range
    /// belongs to this rank alone: the acquire of READY or `home` orders the accesses to the tensors.
    pub fn claim(self, total: usize) -> Option<Range<usize>> {
        let bytes = STEP_BYTES * threads::count();
        let start = usize::try_from(self.word(CLAIMED).fetch_add(bytes as u64, Relaxed)).ok()?;
        fault_points::reached(FaultPoint::RangeClaimed);
        (start < total).then(|| start..total.min(start.saturating_add(bytes)))
    }

    /// Called by the sender after it has copied; it has copied `bytes` in all.
    pub fn set_sent(self, bytes: usize) {
        self.word(COPIED).store(bytes as u64, Release);
    }

    /// How many bytes the sender has copied.
    pub fn sent(self) -> usize {
        self.word(COPIED).load(Acquire) as usize
    }
}

fn offset(word: u64) -> Option<usize> {
    usize::try_from(word.checked_sub(1)?).ok()
}
