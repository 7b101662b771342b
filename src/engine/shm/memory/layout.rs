//! Computes the offsets of everything in a group's segment. The sizes follow from the number of ranks and the size of
//! the stage buffers, so they are the same on every rank.
//!
//! ```text
//! hello     64 B a rank, rounded up to a page: the handshake that proves the segment is shared (rendezvous)
//! group     abort word, count of sleepers, count of leavers
//! control   per rank: its control words (`area.rs`), each on its own pair of cache lines, the fault text, the answer
//! slots     per rank: `depth` slots of one header line and SLOT_BYTES of payload; the hashes of its last results
//! stage     per rank: 2 buffers that the rank fills for its peers
//! result    per rank: 2 buffers that hold the slice the rank has reduced
//! pairs     per sender, for each peer: words, grants and a few envelopes, each for one message (`p2p`)
//! channels     per receiver: 2 buffers each, through which messages too large for an envelope move (`p2p/channels.rs`)
//! ```
//!
//! **Memory for messages.** Every ordered pair of ranks has its own envelopes, so that an unmatched message blocks no
//! other pair. This memory grows with the square of the number of ranks, so envelopes are smaller in larger groups. A
//! large message needs memory only after a receive has matched it, and from then on it waits only for the copying. So a
//! receiver needs only a few channels, which it lends to one sender after another, and every channel is returned.
//!
//! **Memory that every group uses is populated when the group is created** (`early_ranges`). The rest, which is most of
//! the segment, is divided into parts (`Part`). A part's owner populates it when an operation first needs it, and no
//! rank touches it before (`presence.rs`). Filling shared memory past a memory limit kills the process, so the limits
//! are read first (rule 24).

use std::ops::Range;

use crate::engine::shm::nodes::Nodes;
use crate::select::GroupShape;

/// Bytes of payload in a slot, without the header line.
pub const SLOT_BYTES: usize = 4096;
/// Bytes of payload that fit into the header line, behind tag, signature, chain and aux.
pub const INLINE_BYTES: usize = 32;
/// A mapped operation may have at most this many pieces in its inputs, and at most this many in its outputs.
pub const MOST_PIECES: usize = 16;
/// Bytes in a slot for the offsets and lengths of an operation's pieces. They follow the table of an all_to_all.
pub const OFFER_BYTES: usize = 2 * MOST_PIECES * 16;
/// Size of two cache lines: x86 prefetches lines in pairs, and some aarch64 CPUs have lines of this size.
pub const PAIR_OF_LINES: usize = 128;
/// Number of words of an ordered pair of ranks (`Layout::pair_word`).
const PAIR_WORDS: usize = 10;
/// Number of control words of a rank, each on its own pair of cache lines.
pub const CONTROL_WORDS: usize = 11;
pub const FAULT_BYTES: usize = 1408;
/// Bytes for a rank's answer to another rank's question. Together with the control words and the fault text they fill a
/// page.
pub const ANSWER_BYTES: usize = 1280;
/// Bytes of payload that fit into an envelope's first line, behind tag and size.
pub const SHORT_BYTES: usize = 48;
/// Largest number of ranks per segment: in a slot, the table of an all_to_all has eight bytes per rank, and mail words
/// and `RankSet` have one bit per rank.
pub const MAX_RANKS: usize = 256;
/// Largest segment, unless that leaves less than `RANK_SHARE` per rank.
pub const CEILING: usize = 64 << 20;
pub const RANK_SHARE: usize = 512 << 10;
/// Largest stage buffer. Only ranks with several threads have one of this size, because each thread copies and reduces
/// a part of it.
const LARGEST_STAGE: usize = 4 << 20;

/// For each of its slots, a rank keeps the hashes of this many results.
pub const HASHES: u64 = 4;

const PAGE: usize = 4096;

/// Parts of a rank's memory that are populated only when an operation needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The buffers that the rank fills in large operations.
    Stage,
    /// The buffers into which the rank reduces.
    Result,
    /// For each other rank: the words, grants and envelopes of the messages to it.
    Envelopes,
    /// The buffers of one channel through which the rank receives.
    Channel(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub ranks: usize,
    /// Number of slots of a rank; a power of two.
    pub depth: u64,
    pub stage_bytes: usize,
    pub result_bytes: usize,
    /// Number of envelopes of an ordered pair, and also of grants; a power of two.
    pub envelopes: u64,
    /// Largest message that is sent inside its envelope.
    pub eager_bytes: usize,
    /// From how many senders a rank can receive larger messages at the same time.
    pub channels: usize,
    pub body_bytes: usize,
    group: usize,
    control: usize,
    slots: usize,
    stage: usize,
    result: usize,
    pairs: usize,
    bodies: usize,
    total: usize,
}

fn up(value: usize, to: usize) -> usize {
    value.div_ceil(to) * to
}

/// The sizes that follow from the number of ranks alone.
struct Sizes {
    depth: u64,
    /// Largest stage buffer of a rank with one thread.
    largest_stage: usize,
    envelopes: u64,
    eager_bytes: usize,
    channels: usize,
    body_bytes: usize,
}

impl Sizes {
    fn of(ranks: usize) -> Sizes {
        let (depth, largest_stage, envelopes, eager_bytes, channels, body_bytes) = match ranks {
            0..=4 => (64, 512 << 10, 32, 4096, ranks.max(2) - 1, 128 << 10),
            5..=8 => (32, 256 << 10, 8, 2048, 2, 64 << 10),
            9..=16 => (32, 256 << 10, 8, 1024, 4, 32 << 10),
            17..=64 => (16, 256 << 10, 8, 256, 4, 16 << 10),
            _ => (16, 256 << 10, 4, SHORT_BYTES, 4, 16 << 10),
        };
        Sizes { depth, largest_stage, envelopes, eager_bytes, channels, body_bytes }
    }
}

impl Layout {
    /// Returns the layout for `ranks` ranks with `threads` threads each: the largest suitable one of at most `budget`
    /// bytes. `None` if even the smallest layout does not fit.
    pub fn new(ranks: usize, threads: usize, budget: usize) -> Option<Layout> {
        let wanted = Sizes::of(ranks).largest_stage * threads.max(1);
        Layout::possible(ranks).find(|layout| layout.stage_bytes <= wanted && layout.total <= budget)
    }

    /// Like `new`. The budget is a quarter of `headroom`, which is the free memory in bytes, but at most `CEILING` or
    /// `RANK_SHARE` per rank, whichever is more.
    pub fn within(ranks: usize, threads: usize, headroom: usize) -> Option<Layout> {
        (1..=MAX_RANKS)
            .contains(&ranks)
            .then(|| Layout::new(ranks, threads, CEILING.max(ranks * RANK_SHARE).min(headroom / 4)))?
    }

    /// Size of the smallest layout in bytes.
    pub fn smallest(ranks: usize) -> usize {
        Layout::possible(ranks).map(|layout| layout.total).min().unwrap_or(0)
    }

    /// The layout whose segment has exactly `total` bytes. Peers derive from the segment's size which layout was
    /// chosen.
    pub fn of_total(ranks: usize, total: usize) -> Option<Layout> {
        Layout::possible(ranks).find(|layout| layout.total == total)
    }

    /// All layouts, the largest first.
    fn possible(ranks: usize) -> impl Iterator<Item = Layout> {
        let stages = std::iter::successors(Some(LARGEST_STAGE), |stage| Some(stage / 2));
        stages.take_while(|stage| *stage >= 32 << 10).map(move |stage| Layout::with(ranks, stage))
    }

    fn with(ranks: usize, stage_bytes: usize) -> Layout {
        let Sizes { depth, envelopes, eager_bytes, channels, body_bytes, .. } = Sizes::of(ranks);
        // A slice is a rank's share of a chunk, rounded up to cache lines (`bulk.rs`).
        let result_bytes = up(stage_bytes.div_ceil(ranks) + 64, PAGE);
        let mut layout = Layout {
            ranks,
            depth,
            stage_bytes,
            result_bytes,
            envelopes,
            eager_bytes,
            channels,
            body_bytes,
            group: up(64 * ranks, PAGE),
            control: 0,
            slots: 0,
            stage: 0,
            result: 0,
            pairs: 0,
            bodies: 0,
            total: 0,
        };
        layout.control = layout.group + PAGE;
        layout.slots = layout.control + ranks * layout.control_bytes();
        layout.stage = layout.slots + ranks * layout.slots_bytes();
        layout.result = layout.stage + ranks * 2 * stage_bytes;
        layout.pairs = layout.result + ranks * 2 * result_bytes;
        layout.bodies = layout.pairs + ranks * layout.row_bytes();
        layout.total = layout.bodies + ranks * layout.channels_bytes();
        layout
    }

    pub fn total(&self) -> usize {
        self.total
    }

    /// Returns what the choice of algorithms needs to know of a group with this layout on one host. `cores` and
    /// `threads` are as in `GroupShape`.
    pub fn shape(&self, cores: usize, threads: usize) -> GroupShape {
        let (slot_bytes, stage_bytes) = (SLOT_BYTES, self.stage_bytes);
        GroupShape { ranks: self.ranks, hosts: 1, cores, threads, slot_bytes, stage_bytes }
    }

    fn control_bytes(&self) -> usize {
        up(CONTROL_WORDS * PAIR_OF_LINES + FAULT_BYTES + ANSWER_BYTES, PAGE)
    }
    fn slot_stride(&self) -> usize {
        64 + SLOT_BYTES
    }
    fn slots_bytes(&self) -> usize {
        up(self.depth as usize * self.slot_stride() + self.hashes() as usize * 8, PAGE)
    }
    /// Size of an envelope. A payload of up to `SHORT_BYTES` fits into the first line, behind tag and size.
    fn envelope_stride(&self) -> usize {
        64 + if self.eager_bytes <= SHORT_BYTES { 0 } else { up(self.eager_bytes, 64) }
    }
    fn grants_offset(&self) -> usize {
        2 * self.side_bytes()
    }
    fn envelopes_offset(&self) -> usize {
        self.grants_offset() + up(self.envelopes as usize * 8, 64)
    }
    fn pair_bytes(&self) -> usize {
        up(self.envelopes_offset() + self.envelopes as usize * self.envelope_stride(), PAIR_OF_LINES)
    }
    /// Bytes of a sender's words, grants and envelopes for all peers.
    fn row_bytes(&self) -> usize {
        up((self.ranks - 1) * self.pair_bytes(), PAGE)
    }
    /// Bytes of all channels of a receiver.
    fn channels_bytes(&self) -> usize {
        self.channels * 2 * self.body_bytes
    }
    /// With few ranks, each word of a pair of ranks has two cache lines to itself. With many, the words of one writer
    /// share two cache lines.
    fn word_stride(&self) -> usize {
        if self.ranks <= 16 { PAIR_OF_LINES } else { 8 }
    }
    /// Bytes of the five words that the sender writes; the receiver's five words have the same size.
    fn side_bytes(&self) -> usize {
        up(PAIR_WORDS / 2 * self.word_stride(), PAIR_OF_LINES)
    }

    pub fn group_word(&self, index: usize) -> usize {
        self.group + index * PAIR_OF_LINES
    }
    pub fn control_word(&self, rank: usize, index: usize) -> usize {
        debug_assert!(rank < self.ranks && index < CONTROL_WORDS);
        self.control + rank * self.control_bytes() + index * PAIR_OF_LINES
    }
    pub fn fault_text(&self, rank: usize) -> usize {
        self.control + rank * self.control_bytes() + CONTROL_WORDS * PAIR_OF_LINES
    }
    pub fn answer(&self, rank: usize) -> usize {
        self.fault_text(rank) + FAULT_BYTES
    }
    /// Offset of a slot's header line. The payload follows 64 bytes later.
    pub fn slot(&self, rank: usize, n: u64) -> usize {
        debug_assert!(rank < self.ranks);
        self.slots + rank * self.slots_bytes() + (n % self.depth) as usize * self.slot_stride()
    }
    /// Number of hashes that a rank keeps.
    pub fn hashes(&self) -> u64 {
        HASHES * self.depth
    }
    /// Offset of the word with the hash of the result of operation `n`.
    pub fn hash_word(&self, rank: usize, n: u64) -> usize {
        debug_assert!(rank < self.ranks);
        let slots = self.depth as usize * self.slot_stride();
        self.slots + rank * self.slots_bytes() + slots + (n % self.hashes()) as usize * 8
    }
    pub fn stage(&self, rank: usize, round: u64) -> usize {
        debug_assert!(rank < self.ranks);
        self.stage + (rank * 2 + (round % 2) as usize) * self.stage_bytes
    }
    pub fn result(&self, rank: usize, round: u64) -> usize {
        debug_assert!(rank < self.ranks);
        self.result + (rank * 2 + (round % 2) as usize) * self.result_bytes
    }

    /// Whether a receiver finds every message by its mail words (`protocol::post`). With few ranks, only the first
    /// message of each sender sets them; after that the receiver polls.
    pub fn has_mail(&self) -> bool {
        self.ranks > 16
    }

    fn pair(&self, from: usize, to: usize) -> usize {
        debug_assert!(from < self.ranks && to < self.ranks && from != to);
        self.pairs + from * self.row_bytes() + (to - usize::from(to > from)) * self.pair_bytes()
    }
    /// Words with even numbers are written by the sender, words with odd numbers by the receiver.
    pub fn pair_word(&self, from: usize, to: usize, index: usize) -> usize {
        debug_assert!(index < PAIR_WORDS);
        self.pair(from, to) + index % 2 * self.side_bytes() + index / 2 * self.word_stride()
    }
    pub fn grant(&self, from: usize, to: usize, index: u64) -> usize {
        self.pair(from, to) + self.grants_offset() + (index & (self.envelopes - 1)) as usize * 8
    }
    /// Offset of an envelope. It begins with tag and size of the message; the payload is at `payload_offset`.
    pub fn envelope(&self, from: usize, to: usize, number: u64) -> usize {
        let index = (number & (self.envelopes - 1)) as usize;
        self.pair(from, to) + self.envelopes_offset() + index * self.envelope_stride()
    }
    /// Offset of a payload of `bytes` in its envelope.
    pub fn payload_offset(&self, bytes: usize) -> usize {
        if bytes <= SHORT_BYTES { 64 - SHORT_BYTES } else { 64 }
    }
    pub fn body(&self, to: usize, channel: usize, round: u64) -> usize {
        debug_assert!(to < self.ranks && channel < self.channels);
        self.bodies + to * self.channels_bytes() + (channel * 2 + (round % 2) as usize) * self.body_bytes
    }

    /// The ranges that `rank` populates when the group is created: its words and slots, and on rank 0 the group's
    /// words.
    pub fn early_ranges(&self, rank: usize) -> Vec<Range<usize>> {
        let own = |area: usize, bytes: usize| area + rank * bytes..area + (rank + 1) * bytes;
        let mut ranges = vec![own(self.control, self.control_bytes()), own(self.slots, self.slots_bytes())];
        if rank == 0 {
            ranges.push(self.group..self.group + PAGE);
        }
        ranges
    }

    /// Returns the range of a part of `rank`. That rank populates the part, which places the pages on its NUMA node. It
    /// is also the rank that writes the part; only a channel belongs to the rank that reads it, because the senders
    /// change.
    pub fn part(&self, rank: usize, part: Part) -> Range<usize> {
        let (start, bytes) = match part {
            Part::Stage => (self.stage(rank, 0), 2 * self.stage_bytes),
            Part::Result => (self.result(rank, 0), 2 * self.result_bytes),
            Part::Envelopes => (self.pairs + rank * self.row_bytes(), self.row_bytes()),
            Part::Channel(channel) => (self.body(rank, channel, 0), 2 * self.body_bytes),
        };
        start..start + bytes
    }

    /// Cuts the stage buffers of `rank` among the NUMA nodes of the ranks that read them in a staged sum: in a whole round,
    /// each rank reads an equal slice, in the order of the ranks. Empty if nodes make no difference or are caches.
    pub fn readers(&self, rank: usize, nodes: &Nodes) -> Vec<(Range<usize>, u32)> {
        let mut ranges: Vec<(Range<usize>, u32)> = Vec::new();
        for buffer in [self.stage(rank, 0), self.stage(rank, 1)] {
            for (reader, &node) in nodes.numa().iter().enumerate() {
                let cut = |at: usize| buffer + at * self.stage_bytes / self.ranks / PAGE * PAGE;
                let slice = cut(reader)..cut(reader + 1);
                match ranges.last_mut() {
                    Some((last, its)) if *its == node && last.end == slice.start => last.end = slice.end,
                    _ => ranges.push((slice, node)),
                }
            }
        }
        ranges
    }

    /// All parts of a rank.
    pub fn parts(&self) -> impl Iterator<Item = Part> + use<> {
        [Part::Stage, Part::Result, Part::Envelopes].into_iter().chain((0..self.channels).map(Part::Channel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::shm::nodes::Level;

    /// Start and length of every area of layout `l`, except the hello area.
    fn areas(l: &Layout, senders: &[usize]) -> Vec<(usize, usize)> {
        let mut areas: Vec<(usize, usize)> = (0..3).map(|i| (l.group_word(i), 8)).collect();
        for r in 0..l.ranks {
            areas.extend((0..CONTROL_WORDS).map(|i| (l.control_word(r, i), PAIR_OF_LINES)));
            areas.push((l.fault_text(r), FAULT_BYTES));
            areas.push((l.answer(r), ANSWER_BYTES));
            areas.extend((0..l.depth).map(|n| (l.slot(r, n), 64 + SLOT_BYTES)));
            areas.extend((0..l.hashes()).map(|n| (l.hash_word(r, n), 8)));
            for round in 0..2 {
                areas.push((l.stage(r, round), l.stage_bytes));
                areas.push((l.result(r, round), l.result_bytes));
                areas.extend((0..l.channels).map(|channel| (l.body(r, channel, round), l.body_bytes)));
            }
        }
        for from in senders.iter().copied().filter(|from| *from < l.ranks) {
            for to in (0..l.ranks).filter(|to| *to != from) {
                areas.extend((0..PAIR_WORDS).map(|i| (l.pair_word(from, to, i), 8)));
                for i in 0..l.envelopes {
                    areas.push((l.grant(from, to, i), 8));
                    areas.push((l.envelope(from, to, i), l.payload_offset(l.eager_bytes) + l.eager_bytes));
                }
            }
        }
        areas
    }

    #[test]
    fn areas_do_not_overlap_and_end_at_total_for_every_number_of_ranks() {
        for ranks in 2..=if cfg!(miri) { 9 } else { MAX_RANKS } {
            let l = Layout::within(ranks, 1, usize::MAX).unwrap();
            let mut areas = areas(&l, &[0, 1, ranks / 2, ranks - 1]);
            areas.sort_unstable();
            areas.dedup(); // a sender that is named twice
            assert!(areas[0].0 >= 64 * ranks, "the hello area comes first");
            for pair in areas.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{ranks} ranks: {pair:?}");
            }
            let end = areas.last().map(|a| a.0 + a.1).unwrap();
            assert!(end <= l.total());
            assert!(l.envelopes.is_power_of_two() && l.depth.is_power_of_two());
            assert!(areas.iter().all(|area| area.0 % 8 == 0));
        }
    }

    #[test]
    fn words_of_different_writers_share_no_pair_of_lines() {
        for ranks in [2, 16, 17, MAX_RANKS] {
            let l = Layout::within(ranks, 1, usize::MAX).unwrap();
            let line = |index| l.pair_word(0, 1, index) / PAIR_OF_LINES;
            assert_ne!(line(0), line(1));
            assert_eq!((line(0), line(1)) == (line(8), line(9)), ranks > 16);
            assert_ne!(line(0), l.envelope(0, 1, 0) / PAIR_OF_LINES);
        }
    }

    /// Every page that an operation touches must have been populated under the limits: touching an unpopulated page
    /// could kill the process.
    #[test]
    fn the_ranges_that_ranks_populate_are_the_whole_segment() {
        for ranks in 2..=if cfg!(miri) { 9 } else { MAX_RANKS } {
            let l = Layout::within(ranks, 1, usize::MAX).unwrap();
            let of = |rank| l.early_ranges(rank).into_iter().chain(l.parts().map(move |part| l.part(rank, part)));
            let mut ranges: Vec<Range<usize>> = (0..ranks).flat_map(of).collect();
            ranges.sort_unstable_by_key(|range| range.start);
            assert_eq!(ranges[0].start, l.group, "the hello area before it is touched while the ranks meet");
            assert!(ranges.windows(2).all(|two| two[0].end == two[1].start), "{ranks} ranks");
            assert_eq!(ranges.last().map(|last| last.end), Some(l.total()));
            assert!(ranges.iter().all(|range| range.start % PAGE == 0 && range.len() % PAGE == 0));
        }
    }

    /// Every page of a stage buffer is placed once, on the node of the rank that reads it.
    #[test]
    fn slices_of_the_stage_belong_to_the_nodes_of_their_readers() {
        for (ranks, each) in [(16, 8), (16, 4), (14, 7), (24, 3), (18, 1)] {
            let l = Layout::within(ranks, 1, usize::MAX).unwrap();
            let of: Vec<u32> = (0..ranks).map(|rank| (rank / each) as u32).collect();
            let nodes = Nodes::of_list(Level::Numa, &of).unwrap();
            for rank in [0, ranks - 1] {
                let found = l.readers(rank, &nodes);
                assert_eq!(found.len(), 2 * ranks / each, "one range for each node in each buffer");
                assert_eq!(
                    (found[0].0.start, found.last().unwrap().0.end),
                    (l.stage(rank, 0), l.part(rank, Part::Stage).end)
                );
                for ((range, node), next) in found.iter().zip(found.iter().skip(1)) {
                    assert_eq!(range.end, next.0.start);
                    let middle = (range.start + range.end) / 2 - l.stage(rank, 0);
                    let reader = middle % l.stage_bytes * ranks / l.stage_bytes;
                    assert_eq!(*node, nodes.list()[reader], "{ranks} ranks, {range:?}");
                }
            }
            for nodes in [Nodes::none(), Nodes::of_list(Level::Cache, &of).unwrap()] {
                assert!(l.readers(0, &nodes).is_empty(), "memory belongs to no cache");
            }
        }
    }

    /// A group needs as much memory as docs/design.md states.
    #[test]
    fn memory_is_bounded_per_rank_and_in_all() {
        for ranks in 2..=if cfg!(miri) { 9 } else { MAX_RANKS } {
            let l = Layout::within(ranks, 1, usize::MAX).unwrap_or_else(|| panic!("{ranks} ranks do not fit"));
            let each = l.total() / ranks;
            let most = match ranks {
                2..=4 => 2724 << 10,
                5..=16 => 1120 << 10,
                17..=64 => 920 << 10,
                65..=128 => 780 << 10,
                _ => 500 << 10,
            };
            assert!(each <= most, "{ranks} ranks: {} KiB each", each >> 10);
            assert!(l.total() <= CEILING.max(ranks * RANK_SHARE));
            assert!(l.stage_bytes >= 64 << 10, "{ranks} ranks");
            assert!(Layout::smallest(ranks) <= l.total());
            assert_eq!(Layout::of_total(ranks, l.total()), Some(l));
        }
        assert!(Layout::within(2, 1, usize::MAX).unwrap().total() < 8 << 20);
    }

    /// Ranks with several threads have larger stages, within the same ceiling.
    #[test]
    fn the_stage_grows_with_the_threads() {
        let stage = |ranks, threads| Layout::within(ranks, threads, usize::MAX).unwrap().stage_bytes;
        assert_eq!([1, 2, 3, 8, 64].map(|threads| stage(2, threads)), [512 << 10, 1 << 20, 1 << 20, 4 << 20, 4 << 20]);
        assert_eq!([1, 2, 4].map(|threads| stage(8, threads)), [256 << 10, 512 << 10, 1 << 20]);
        for (ranks, threads) in
            (2..=MAX_RANKS).step_by(if cfg!(miri) { 100 } else { 1 }).zip([2, 4, 16].into_iter().cycle())
        {
            let l = Layout::within(ranks, threads, usize::MAX).unwrap();
            assert!(l.total() <= CEILING.max(ranks * RANK_SHARE), "{ranks} ranks of {threads} threads");
            assert_eq!(Layout::of_total(ranks, l.total()), Some(l));
        }
    }

    #[test]
    fn a_small_budget_shrinks_the_stage_and_a_tiny_one_is_refused() {
        for ranks in [2, 40, MAX_RANKS] {
            let full = Layout::new(ranks, 1, usize::MAX).unwrap();
            let small = Layout::new(ranks, 1, full.total() - 1).unwrap();
            assert!(small.stage_bytes < full.stage_bytes);
            assert_eq!(Layout::new(ranks, 1, Layout::smallest(ranks)).unwrap().total(), Layout::smallest(ranks));
            assert_eq!(Layout::new(ranks, 1, Layout::smallest(ranks) - 1), None);
        }
    }
}
