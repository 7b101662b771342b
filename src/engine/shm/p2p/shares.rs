//! How the two ranks of a message divide the copy of its tensor, if both tensors can be reached.
//!
//! Idea: a rank that would only wait copies too. Both ranks claim ranges of the message from one counter and copy them,
//! the receiver from the sender's tensor, the sender into the receiver's. While the sender's program computes, its
//! progress thread claims nothing, and the receiver copies everything.
//!
//! The words are in the body buffer of the round, which holds no data then.
//!
//! | word | written by | value |
//! | --- | --- | --- |
//! | place | sender, before READY | where the tensor begins in the sender's arena, + 1; 0: the message is staged |
//! | claimed | sender 0, before READY; then both | number of bytes that the ranks have claimed |
//! | home | sender 0, before READY; receiver, release | where the output begins in the receiver's arena, + 1 |
//! | sent | sender 0, before READY; sender, release after each copy | number of bytes that the sender has copied |
//!
//! The message is complete when the bytes that the receiver has copied and `sent` (acquire) add up to its size.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::engine::shm::memory::area::Area;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::threads;

/// A rank claims so many bytes at a time for each of its threads. Between two claims, a waiting thread checks for
/// signals, deadlines and ended peers.
const STEP_BYTES: usize = 256 << 10;

/// The words of one message: those of a round of a channel of rank `to`.
#[derive(Clone, Copy)]
pub struct Shares<'a> {
    pub area: &'a Area,
    pub to: usize,
    pub channel: usize,
    pub round: u64,
}

impl<'a> Shares<'a> {
    fn word(self, index: usize) -> &'a AtomicU64 {
        self.area.share_word(self.to, self.channel, self.round, index)
    }

    /// Called by the sender before it publishes the round. `place`: where the tensor begins in its arena; None if the
    /// message is staged.
    pub fn open(self, place: Option<usize>) {
        self.word(0).store(place.map_or(0, |offset| offset as u64 + 1), Relaxed);
        (1..4).for_each(|index| self.word(index).store(0, Relaxed));
    }

    /// Where the tensor begins in the sender's arena. Called by the receiver after it has seen the round.
    pub fn place(self) -> Option<usize> {
        offset(self.word(0).load(Relaxed))
    }

    /// Lets the sender copy into the output, which begins here in the receiver's arena.
    pub fn set_home(self, offset: usize) {
        self.word(2).store(offset as u64 + 1, Release);
    }

    /// Where the output begins in the receiver's arena, if the sender may copy into it.
    pub fn home(self) -> Option<usize> {
        offset(self.word(2).load(Acquire))
    }

    /// Claims the next range of a message of `total` bytes. None if everything is claimed. Relaxed, because the range
    /// belongs to this rank alone: the acquire of READY or `home` orders the accesses to the tensors.
    pub fn claim(self, total: usize) -> Option<Range<usize>> {
        let bytes = STEP_BYTES * threads::count();
        let start = usize::try_from(self.word(1).fetch_add(bytes as u64, Relaxed)).ok()?;
        fault_points::reached(FaultPoint::RangeClaimed);
        (start < total).then(|| start..total.min(start.saturating_add(bytes)))
    }

    /// Called by the sender after it has copied; it has copied `bytes` in all.
    pub fn set_sent(self, bytes: usize) {
        self.word(3).store(bytes as u64, Release);
    }

    /// How many bytes the sender has copied.
    pub fn sent(self) -> usize {
        self.word(3).load(Acquire) as usize
    }
}

fn offset(word: u64) -> Option<usize> {
    usize::try_from(word.checked_sub(1)?).ok()
}
