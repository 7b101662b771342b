//! Typed access to a group's segment: its words, headers and buffers. All addresses come from `Layout`, and `Segment`
//! checks each against the segment's length. So no index, length or offset that was read from shared memory becomes
//! part of a pointer unchecked.

#![allow(unsafe_code)] // returns pointers into the segment as the protocol allows

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::arena::Identity;
use super::layout::{ANSWER_BYTES, INLINE_BYTES, Layout, PAIR_OF_LINES, Part, SLOT_BYTES};
use super::presence::Presence;
use super::segment::Segment;
use crate::engine::shm::nodes::Nodes;
use crate::engine::shm::protocol::{Mail, Region, Word, Words};
use crate::engine::{BlockSizes, LAUNCHES_KEPT, Signed};
use crate::error::{Error, Result};
use crate::op::Op;
use crate::op::signature;
use crate::os::event_count::WakeWords;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::os::topology;

/// Indices for `Layout::control_word`. The first five are words of `protocol::Word`.
const DONE: usize = 0;
const STAGE_READY: usize = 1;
const STAGE_DRAINED: usize = 2;
const RESULT_READY: usize = 3;
const RESULT_DRAINED: usize = 4;
const DOOR: usize = 5;
/// A rank sets its own word when it leaves. Peers read the word after a long wait, and after they have read a tensor of
/// that rank in place. The same pair of cache lines has the rank's core and its last device launch.
const LIFE: usize = 6;
const MONITOR: usize = 7;
/// One bit for each rank that has sent to this rank. Senders set bits, this rank clears them; see `protocol::post`.
const MAIL: usize = 8;
/// Number of questions to this rank (`Inquiry`). This word begins a pair of cache lines, whose second half has the
/// identity of the rank's arena.
const QUESTION: usize = 9;
/// The signatures of this rank's last device launches, by number.
const LAUNCHES: usize = 10;

/// In groups of at most this many ranks, the sizes of an all_to_all on a device are published. They must fit behind the
/// outcomes of monitored barriers.
const MOST_SIZED: usize = (PAIR_OF_LINES - 80) / 4;

/// Indices of `Layout::group_word`.
const ABORT: usize = 0;
const SLEEPERS: usize = 1;
/// Number of ranks that left. A leaving rank increments it after it has set its own word. A driver that has nothing to
/// move reads this number (relaxed: the driver then reads the ranks' own words, and checks again later).
const LEAVERS: usize = 2;

pub struct Area {
    segment: Arc<Segment>,
    pub layout: Layout,
    pub me: usize,
    pub ranks: usize,
    /// Equal on all ranks.
    pub nodes: Nodes,
    presence: Presence,
}

/// The contents of a slot's header line, except its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub signature: u64,
    /// Hash of this signature and all earlier signatures of the group; see `chain`.
    pub chain: u64,
    /// Depends on the operation: the size of this rank's data, the hash of its list of tensors, the bits of a
    /// PREMUL_SUM factor, or whether the blocks of an all_to_all are in the slot.
    pub aux: u64,
}

/// Extends the chain by one operation: its signature, and its list if it has one. Two ranks with equal chains have
/// called the same operations. That includes operations in which neither rank reads the other's header, for instance a
/// broadcast in which each believes that it is the root. So the large operations of both ranks use the same rounds
/// (`bulk::Bases`).
pub fn chain(before: u64, op: &Op) -> u64 {
    let mix = |before: u64, word: u64| (before.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let signed = mix(before, op.signature);
    if op.lists == 0 { signed } else { mix(signed, op.lists) }
}

impl Area {
    pub fn new(segment: Arc<Segment>, layout: Layout, me: usize, nodes: Nodes) -> Area {
        let presence = Presence::new(topology::memory_headroom);
        Area { segment, layout, me, ranks: layout.ranks, nodes, presence }
    }

    /// Replaces the function that returns the free memory of this process.
    #[cfg(feature = "testing")]
    pub fn with_headroom(self, headroom: fn() -> Option<u64>) -> Area {
        Area { presence: Presence::new(headroom), ..self }
    }

    /// Populates parts of this rank's memory, if they are not populated yet. Must be called before this rank writes the
    /// parts or lets a peer write them. Fails if there is too little memory.
    pub fn make_present(&self, parts: impl IntoIterator<Item = Part>) -> Result<()> {
        self.presence.make(&self.segment, &self.layout, (self.me, &self.nodes), parts)
    }

    fn word64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: `ptr` checks the bounds. Offsets are multiples of eight in a page-aligned mapping that lives as long
        // as `self`. Other processes access these words with atomic instructions only.
        unsafe { AtomicU64::from_ptr(self.segment.ptr(offset, 8).cast()) }
    }

    fn word32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as in `word64`, with multiples of four.
        unsafe { AtomicU32::from_ptr(self.segment.ptr(offset, 4).cast()) }
    }

    fn at(&self, word: Word) -> &AtomicU64 {
        let l = &self.layout;
        self.word64(match word {
            Word::Tag { rank, n } => l.slot(rank, n),
            Word::Moved { rank, n } => l.slot(rank, n) + 40,
            Word::Folded { rank, n } => l.slot(rank, n) + 48,
            Word::Delivered { rank, n } => l.slot(rank, n) + 56,
            Word::Hash { rank, n } => l.hash_word(rank, n),
            Word::Done(rank) => l.control_word(rank, DONE),
            Word::Ready(Region::Stage, rank) => l.control_word(rank, STAGE_READY),
            Word::Drained(Region::Stage, rank) => l.control_word(rank, STAGE_DRAINED),
            Word::Ready(Region::Result, rank) => l.control_word(rank, RESULT_READY),
            Word::Drained(Region::Result, rank) => l.control_word(rank, RESULT_DRAINED),
        })
    }

    /// Futex word of `rank`, which counts its wake-ups. A thread that wakes `rank` increments it (release); a thread of
    /// `rank` reads it before it sleeps (acquire).
    pub fn futex_word(&self, rank: usize) -> &AtomicU32 {
        self.word32(self.layout.control_word(rank, DOOR))
    }
    /// Number of sleeping threads of `rank`. These threads change it; publishing threads read it. Relaxed, ordered by
    /// the fences of `os/event_count.rs`.
    fn asleep_word(&self, rank: usize) -> &AtomicU32 {
        self.word32(self.layout.control_word(rank, DOOR) + 4)
    }

    // Slots. The header is read with relaxed loads after the tag was acquired. A peer that breaks the protocol can make
    // the values wrong, but not the accesses invalid.

    pub fn write_header(&self, n: u64, header: Header) {
        let at = self.layout.slot(self.me, n);
        self.word64(at + 8).store(header.signature, Ordering::Relaxed);
        self.word64(at + 16).store(header.chain, Ordering::Relaxed);
        self.word64(at + 24).store(header.aux, Ordering::Relaxed);
    }

    pub fn read_header(&self, rank: usize, n: u64) -> Header {
        let at = self.layout.slot(rank, n);
        Header {
            signature: self.word64(at + 8).load(Ordering::Relaxed),
            chain: self.word64(at + 16).load(Ordering::Relaxed),
            aux: self.word64(at + 24).load(Ordering::Relaxed),
        }
    }

    // An offer (`mapped/offer.rs`) begins in the header line and continues behind it. The header line has room for the
    // offer's first word, because an operation that makes an offer has no payload there. Offers are written before the
    // tag (relaxed) and read after the tag was acquired.

    /// Stores the offer's first word, and clears the words for `Moved`, `Folded` and `Delivered`.
    pub fn set_offer(&self, n: u64, word: u64) {
        let at = self.layout.slot(self.me, n);
        self.word64(at + 32).store(word, Ordering::Relaxed);
        [40, 48, 56].iter().for_each(|word| self.word64(at + word).store(0, Ordering::Relaxed));
    }
    pub fn offer(&self, rank: usize, n: u64) -> u64 {
        self.word64(self.layout.slot(rank, n) + 32).load(Ordering::Relaxed)
    }
    pub fn set_offered(&self, n: u64, index: usize, words: [u64; 2]) {
        for (at, word) in words.into_iter().enumerate() {
            self.offered_word(self.me, n, index + at).store(word, Ordering::Relaxed);
        }
    }
    pub fn offered(&self, rank: usize, n: u64, index: usize) -> [u64; 2] {
        [index, index + 1].map(|index| self.offered_word(rank, n, index).load(Ordering::Relaxed))
    }
    fn offered_word(&self, rank: usize, n: u64, index: usize) -> &AtomicU64 {
        assert!(index < SLOT_BYTES / 8, "sagellm: word {index} of an offer in a slot");
        self.word64(self.layout.slot(rank, n) + 64 + index * 8)
    }

    /// Publishes the identity of this process's arena. The thread that drives the group calls this once. The size is
    /// stored last (release), and readers load it first (acquire).
    pub fn set_arena(&self, arena: Identity) {
        let at = self.layout.control_word(self.me, QUESTION) + 64;
        self.word64(at + 8).store(arena.inode, Ordering::Relaxed);
        self.word64(at + 16).store(arena.descriptor, Ordering::Relaxed);
        self.word64(at).store(arena.bytes, Ordering::Release);
    }
    pub fn arena(&self, rank: usize) -> Option<Identity> {
        let at = self.layout.control_word(rank, QUESTION) + 64;
        let bytes = self.word64(at).load(Ordering::Acquire);
        let [inode, descriptor] = [8, 16].map(|word| self.word64(at + word).load(Ordering::Relaxed));
        (bytes != 0).then_some(Identity { descriptor, inode, bytes })
    }

    /// Returns the address of a slot's payload of `bytes` bytes. A payload that fits into the header line is there, a
    /// longer one behind that line.
    pub fn payload(&self, rank: usize, n: u64, bytes: usize) -> *mut u8 {
        assert!(bytes <= SLOT_BYTES, "sagellm: a slot payload of {bytes} bytes");
        let at = self.layout.slot(rank, n);
        self.segment.ptr(if bytes <= INLINE_BYTES { at + 32 } else { at + 64 }, bytes)
    }

    /// Word `at` of a list of tensors. The list begins at the end of the slot and grows towards the slot's data.
    /// Written before the tag (relaxed), read after the tag was acquired.
    pub fn list_word(&self, rank: usize, n: u64, at: usize) -> &AtomicU64 {
        assert!(at < SLOT_BYTES / 8, "sagellm: tensor {at} of a list in a slot");
        self.word64(self.layout.slot(rank, n) + 64 + SLOT_BYTES - (at + 1) * 8)
    }

    pub fn stage(&self, rank: usize, round: u64, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset + bytes <= self.layout.stage_bytes, "sagellm: {offset} + {bytes} bytes of a stage buffer");
        self.segment.ptr(self.layout.stage(rank, round) + offset, bytes)
    }

    pub fn result(&self, rank: usize, round: u64, bytes: usize) -> *mut u8 {
        assert!(bytes <= self.layout.result_bytes, "sagellm: {bytes} bytes of a result buffer");
        self.segment.ptr(self.layout.result(rank, round), bytes)
    }

    // Words of ordered pairs, see `p2p`.

    pub fn pair_word(&self, from: usize, to: usize, index: usize) -> &AtomicU64 {
        self.word64(self.layout.pair_word(from, to, index))
    }
    pub fn grant(&self, from: usize, to: usize, index: u64) -> &AtomicU64 {
        self.word64(self.layout.grant(from, to, index))
    }
    pub fn envelope_word(&self, from: usize, to: usize, number: u64, index: usize) -> &AtomicU64 {
        self.word64(self.layout.envelope(from, to, number) + index * 8)
    }
    pub fn envelope_data(&self, from: usize, to: usize, number: u64, bytes: usize) -> *mut u8 {
        assert!(bytes <= self.layout.eager_bytes, "sagellm: an eager message of {bytes} bytes");
        self.segment.ptr(self.layout.envelope(from, to, number) + self.layout.payload_offset(bytes), bytes)
    }
    pub fn body(&self, to: usize, channel: usize, round: u64, bytes: usize) -> *mut u8 {
        assert!(bytes <= self.layout.body_bytes, "sagellm: a body part of {bytes} bytes");
        assert!(channel < self.layout.channels, "sagellm: channel {channel} of {}", self.layout.channels);
        self.segment.ptr(self.layout.body(to, channel, round), bytes)
    }

    // Leaving and faults.

    /// Highest operation number that `rank` has published, for stall reports.
    pub fn issued(&self, rank: usize) -> u64 {
        (0..self.layout.depth).map(|n| self.load(Word::Tag { rank, n })).max().unwrap_or(0)
    }
    /// Publishes that this rank leaves in order (shutdown or exit), with a release store after everything else that it
    /// published. Wakes the other ranks.
    pub fn leave(&self) {
        fault_points::reached(FaultPoint::Leaving);
        self.word64(self.layout.control_word(self.me, LIFE)).store(1, Ordering::Release);
        self.word64(self.layout.group_word(LEAVERS)).fetch_add(1, Ordering::Release);
        crate::os::event_count::announce(self, self.ranks);
    }
    /// True if any rank left; `left` says which.
    pub fn has_leavers(&self) -> bool {
        self.word64(self.layout.group_word(LEAVERS)).load(Ordering::Relaxed) != 0
    }
    pub fn left(&self, rank: usize) -> bool {
        self.word64(self.layout.control_word(rank, LIFE)).load(Ordering::Acquire) != 0
    }

    /// Records the last device operation that this rank launched: its number, kind and signature. Called by one thread
    /// of the rank at a time, with consecutive numbers.
    pub fn set_launched(&self, number: u64, signed: Signed) {
        let (signature, lists) = self.launch_words(self.me, number);
        // Release: a reader that sees these values also sees the number of the previous launch. From that number the
        // reader can tell that these words may have been reused.
        signature.store(signed.signature, Ordering::Release);
        lists.store(signed.lists, Ordering::Release);
        let word = number << 8 | u64::from(signature::kind_code(signed.signature));
        // Release: the signature is visible before the number that refers to it.
        self.word64(self.layout.control_word(self.me, LIFE) + 16).store(word, Ordering::Release);
    }
    pub fn launched(&self, rank: usize) -> (u64, u8) {
        let word = self.word64(self.layout.control_word(rank, LIFE) + 16).load(Ordering::Acquire);
        (word >> 8, word as u8)
    }
    /// What `rank` signed for launch `number`. `None` before that launch, and when a later launch may have overwritten
    /// the values.
    pub fn signed(&self, rank: usize, number: u64) -> Option<Signed> {
        if self.launched(rank).0 < number {
            return None;
        }
        let (signature, lists) = self.launch_words(rank, number);
        let signed = Signed { signature: signature.load(Ordering::Acquire), lists: lists.load(Ordering::Acquire) };
        // Launch `number + LAUNCHES_KEPT` overwrites this place after launch `number + LAUNCHES_KEPT - 1` was
        // published. If the latter is not published yet, the values read above were not overwritten.
        (self.launched(rank).0 < number + LAUNCHES_KEPT - 1).then_some(signed)
    }
    /// The two words of a launch. The 32-bit word is in the second half of the pair of cache lines that `LIFE` begins.
    fn launch_words(&self, rank: usize, number: u64) -> (&AtomicU64, &AtomicU32) {
        let at = (number % LAUNCHES_KEPT) as usize;
        let lists = self.layout.control_word(rank, LIFE) + 64 + at * 4;
        (self.word64(self.layout.control_word(rank, LAUNCHES) + at * 8), self.word32(lists))
    }

    /// Publishes the sizes of this rank's last all_to_all on a device, for the error of a mismatch. Only groups of up
    /// to `MOST_SIZED` ranks have room for them: the sizes sent are behind the outcomes of monitored barriers, the
    /// sizes received behind the number of questions. If a size does not fit into 32 bits, the largest 32-bit number is
    /// stored instead, which readers ignore. This is a seqlock: the number is 0 while the sizes change, and a reader
    /// accepts sizes only if it read the same number before and after. Called by one thread of the rank at a time.
    pub fn set_block_sizes(&self, number: u64, sizes: &BlockSizes<'_>) {
        if self.ranks > MOST_SIZED {
            return;
        }
        let known = self.sized_number(self.me);
        known.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        for peer in 0..self.ranks {
            let words = self.size_words(self.me, peer);
            for (word, bytes) in words.into_iter().zip(sizes.with(peer)) {
                word.store(u32::try_from(bytes).unwrap_or(u32::MAX), Ordering::Relaxed);
            }
        }
        known.store(number, Ordering::Release);
    }
    /// How many bytes `rank` sends to `peer` and how many it expects from `peer`, if the last all_to_all of `rank` has
    /// this number.
    pub fn block_sizes(&self, rank: usize, number: u64, peer: usize) -> Option<[u64; 2]> {
        if self.ranks > MOST_SIZED || self.sized_number(rank).load(Ordering::Acquire) != number {
            return None;
        }
        let sizes = self.size_words(rank, peer).map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let still = self.sized_number(rank).load(Ordering::Relaxed) == number;
        (still && !sizes.contains(&u32::MAX)).then(|| sizes.map(u64::from))
    }
    /// Number of the all_to_all whose sizes are in `size_words`.
    fn sized_number(&self, rank: usize) -> &AtomicU64 {
        self.word64(self.layout.control_word(rank, MONITOR) + 72)
    }
    fn size_words(&self, rank: usize, peer: usize) -> [&AtomicU32; 2] {
        let sent = self.layout.control_word(rank, MONITOR) + 80;
        let received = self.layout.control_word(rank, QUESTION) + 8;
        [sent, received].map(|first| self.word32(first + peer * 4))
    }

    /// Records the core on which this rank last waited for long, for `Driven::shares_core`. Relaxed: a hint.
    pub fn set_cpu(&self, cpu: u32) {
        self.word64(self.layout.control_word(self.me, LIFE) + 8).store(u64::from(cpu) + 1, Ordering::Relaxed);
    }
    pub fn cpu(&self, rank: usize) -> Option<u32> {
        let word = self.word64(self.layout.control_word(rank, LIFE) + 8).load(Ordering::Relaxed);
        word.checked_sub(1).and_then(|cpu| u32::try_from(cpu).ok())
    }

    /// Number of the last monitored barrier that `rank` has entered. `monitor_outcome` has the last eight outcomes;
    /// they are in rank 0's cache lines.
    pub fn monitor(&self, rank: usize) -> &AtomicU64 {
        self.word64(self.layout.control_word(rank, MONITOR))
    }
    pub fn monitor_outcome(&self, index: u64) -> &AtomicU64 {
        self.word64(self.layout.control_word(0, MONITOR) + 8 + (index % 8) as usize * 8)
    }

    /// Number of questions to `rank`. Asking ranks increment it (release). The answering thread of `rank` reads it
    /// (acquire) and sleeps on it.
    pub fn question_word(&self, rank: usize) -> &AtomicU32 {
        self.word32(self.layout.control_word(rank, QUESTION))
    }

    /// Writes this rank's answer; if it is too long, it is cut. Only this rank's answering thread calls this. This is a
    /// seqlock: the first word is odd while the answer changes, and a reader accepts an answer only if it read the same
    /// even value before and after. Length and answer are atomic words too (relaxed); the fences on both sides order
    /// them.
    pub fn write_answer(&self, answer: &[u8]) {
        let at = self.layout.answer(self.me);
        let version = self.word64(at).load(Ordering::Relaxed) | 1;
        self.word64(at).store(version, Ordering::Relaxed);
        fence(Ordering::Release);
        let answer = &answer[..answer.len().min(ANSWER_BYTES - 16)];
        self.word64(at + 8).store(answer.len() as u64, Ordering::Relaxed);
        for (i, bytes) in answer.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.word64(at + 16 + i * 8).store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        self.word64(at).store(version.wrapping_add(1), Ordering::Release);
    }

    /// The last answer of `rank`. Empty before its first answer, and if the answer keeps changing.
    pub fn read_answer(&self, rank: usize) -> Vec<u8> {
        let at = self.layout.answer(rank);
        for _ in 0..100 {
            let version = self.word64(at).load(Ordering::Acquire);
            let bytes = (self.word64(at + 8).load(Ordering::Relaxed) as usize).min(ANSWER_BYTES - 16);
            let words = (0..bytes.div_ceil(8)).map(|i| self.word64(at + 16 + i * 8).load(Ordering::Relaxed));
            let mut answer: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
            answer.truncate(bytes);
            fence(Ordering::Acquire);
            if version.is_multiple_of(2) && self.word64(at).load(Ordering::Relaxed) == version {
                return answer;
            }
            std::thread::yield_now();
        }
        Vec::new()
    }

    /// Poisons the group for all ranks. The first fault wins.
    pub fn poison(&self, fault: &Error) {
        const ROOM: usize = super::layout::FAULT_BYTES - 8;
        let bytes = fault.encode(ROOM);
        let at = self.layout.fault_text(self.me);
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: within the bounds that `ptr` checks. Volatile, because a peer may read while this rank writes a
            // second time.
            unsafe { self.segment.ptr(at + 8 + i, 1).write_volatile(*byte) };
        }
        self.word64(at).store(bytes.len() as u64, Ordering::Relaxed);
        let word = self.me as u64 + 1;
        // Release: the fault is visible before the word that refers to it. If several ranks do this, only the first
        // succeeds.
        let _ =
            self.word64(self.layout.group_word(ABORT)).compare_exchange(0, word, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The group's fault, and the rank that reported it.
    pub fn fault(&self) -> Option<(usize, Error)> {
        let word = self.word64(self.layout.group_word(ABORT)).load(Ordering::Acquire);
        if word == 0 {
            return None;
        }
        let overwritten = || Error::bug("the group's control page was overwritten");
        let Some(rank) = (word as usize).checked_sub(1).filter(|rank| *rank < self.ranks) else {
            return Some((self.me, overwritten()));
        };
        let at = self.layout.fault_text(rank);
        let bytes = (self.word64(at).load(Ordering::Relaxed) as usize).min(super::layout::FAULT_BYTES - 8);
        let fault: Vec<u8> = (0..bytes)
            // SAFETY: within the bounds that `ptr` checks.
            .map(|i| unsafe { self.segment.ptr(at + 8 + i, 1).read_volatile() })
            .collect();
        Some((rank, Error::decode(&fault).unwrap_or_else(overwritten)))
    }

    pub fn is_poisoned(&self) -> bool {
        self.word64(self.layout.group_word(ABORT)).load(Ordering::Relaxed) != 0
    }

    pub fn segment(&self) -> &Segment {
        &self.segment
    }
}

impl Words for Area {
    #[inline]
    fn load(&self, word: Word) -> u64 {
        self.at(word).load(Ordering::Acquire)
    }
    #[inline]
    fn store(&self, word: Word, value: u64) {
        self.at(word).store(value, Ordering::Release);
    }
}

impl Mail for Area {
    fn add(&self, to: usize, word: usize, bit: u64) {
        self.word64(self.layout.control_word(to, MAIL) + word * 8).fetch_or(bit, Ordering::Release);
    }
    fn take(&self, word: usize) -> u64 {
        let word = self.word64(self.layout.control_word(self.me, MAIL) + word * 8);
        if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::Acquire) }
    }
}

impl WakeWords for Area {
    fn wake_count(&self, rank: usize) -> u32 {
        self.futex_word(rank).load(Ordering::Acquire)
    }
    fn wake(&self, rank: usize) {
        self.futex_word(rank).fetch_add(1, Ordering::Release);
        crate::os::futex::wake_all(self.futex_word(rank));
    }
    fn asleep(&self, rank: usize) -> u32 {
        self.asleep_word(rank).load(Ordering::Relaxed)
    }
    fn sleepers(&self) -> u32 {
        self.word32(self.layout.group_word(SLEEPERS)).load(Ordering::Relaxed)
    }
    fn count_sleeper(&self, me: usize, more: bool) {
        let delta = if more { 1 } else { u32::MAX };
        self.asleep_word(me).fetch_add(delta, Ordering::Relaxed);
        self.word32(self.layout.group_word(SLEEPERS)).fetch_add(delta, Ordering::Relaxed);
    }
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks on one segment.
    fn two() -> [Area; 2] {
        let layout = Layout::within(2, 1, usize::MAX).unwrap();
        let segment = Arc::new(Segment::anonymous(layout.total()).unwrap());
        [0, 1].map(|me| Area::new(Arc::clone(&segment), layout, me, Nodes::none()))
    }

    fn signed(number: u64) -> Signed {
        Signed { signature: 3 << 59 | number, lists: !number as u32 }
    }

    #[test]
    fn what_the_last_launches_signed_is_kept_and_what_has_gone_is_not_taken_for_another() {
        let [own, other] = two();
        assert_eq!((other.launched(0), other.signed(0, 1)), ((0, 0), None));
        for last in 1..=3 * LAUNCHES_KEPT {
            own.set_launched(last, signed(last));
            assert_eq!(other.launched(0), (last, 3));
            for number in 1..=last + 2 {
                let kept = number <= last && number + LAUNCHES_KEPT - 1 > last;
                assert_eq!(other.signed(0, number), kept.then(|| signed(number)), "{number} after {last}");
            }
        }
        assert_eq!(other.signed(1, 1), None);
    }

    #[test]
    fn the_sizes_of_the_last_all_to_all_are_kept_and_never_mixed_with_those_of_another() {
        const LAST: u64 = 100_000;
        let [own, other] = two();
        assert_eq!(other.block_sizes(0, 1, 1), None);
        let set = |number: u64| {
            let blocks = [number as usize, 2 * number as usize];
            own.set_block_sizes(number, &BlockSizes { rank: 0, ranks: 2, sent: (&blocks, 0), received: (&[], 8) });
        };
        set(7);
        assert_eq!([6, 7, 8].map(|number| other.block_sizes(0, number, 1)), [None, Some([14, 4]), None]);
        set(1 << 31);
        assert_eq!(other.block_sizes(0, 1 << 31, 1), None, "it does not fit");
        assert_eq!(other.block_sizes(0, 1 << 31, 0), Some([1 << 31, 4]));
        std::thread::scope(|scope| {
            scope.spawn(|| (1..=LAST).for_each(set));
            for number in (1..=LAST).step_by(7) {
                let found = other.block_sizes(0, number, 1);
                assert!(found.is_none_or(|found| found == [2 * number, 4]), "{number}: {found:?}");
            }
        });
    }

    #[test]
    fn a_reader_never_sees_a_signature_of_another_number() {
        const LAST: u64 = 200_000;
        let [own, other] = two();
        std::thread::scope(|scope| {
            scope.spawn(|| (1..=LAST).for_each(|number| own.set_launched(number, signed(number))));
            let mut seen = 0;
            while seen < LAST {
                seen = other.launched(0).0;
                for number in seen.saturating_sub(LAUNCHES_KEPT).max(1)..=seen {
                    let found = other.signed(0, number);
                    assert!(found.is_none_or(|found| found == signed(number)), "{number}: {found:?}");
                }
            }
        });
    }
}
