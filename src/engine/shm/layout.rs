//! Where everything lies in a group's segment. Pure arithmetic from the rank count; the same on every rank.
//!
//! ```text
//! hello     64 B a rank, rounded up to a page: the handshake that proves the segment is shared (meet.rs)
//! group     abort word, count of sleepers
//! control   per rank: the words of `protocol::Word`, each on its own pair of cache lines, and the fault text
//! slots     per rank: `depth` slots of one header line and SLOT_BYTES of payload
//! stage     per rank: 2 buffers that the rank fills for its peers
//! result    per rank: 2 buffers that hold the slice the rank has reduced
//! pairs     per ordered pair: envelopes, grants, 2 body buffers (p2p.rs)
//! ```

use crate::select::Shape;

/// Payload of a slot beyond the header line.
pub const SLOT_BYTES: usize = 4096;
/// Payload that fits into the header line itself, behind tag, signature, chain and aux.
pub const INLINE_BYTES: usize = 32;
/// Two cache lines: x86 prefetches them in pairs, and aarch64 has lines of this size.
pub const PAIR_OF_LINES: usize = 128;
/// Control words of a rank, each on its own pair of lines.
pub const CONTROL_WORDS: usize = 8;
pub const FAULT_BYTES: usize = 1024;
/// Envelopes in flight per ordered pair of ranks, and grants.
pub const ENVELOPES: usize = 32;
/// Most ranks that one segment serves: slot tables hold eight bytes a rank.
pub const MAX_RANKS: usize = 256;

const PAGE: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub ranks: usize,
    /// Slots of a rank; a power of two.
    pub depth: u64,
    pub stage_bytes: usize,
    pub result_bytes: usize,
    /// Largest message that travels inside its envelope.
    pub eager_bytes: usize,
    pub body_bytes: usize,
    group: usize,
    control: usize,
    slots: usize,
    stage: usize,
    result: usize,
    pairs: usize,
    total: usize,
}

fn up(value: usize, to: usize) -> usize {
    value.div_ceil(to) * to
}

impl Layout {
    /// The layout for `ranks` ranks with at most `budget` bytes, or `None` if the smallest one does not fit.
    pub fn new(ranks: usize, budget: usize) -> Option<Layout> {
        let (depth, eager, body) = match ranks {
            0..=4 => (64, 4096, 128 << 10),
            5..=8 => (32, 4096, 64 << 10),
            9..=16 => (32, 1024, 32 << 10),
            _ => (16, 512, 16 << 10),
        };
        let largest = if ranks <= 4 { 512 << 10 } else { 256 << 10 };
        [largest, 256 << 10, 128 << 10, 64 << 10, 32 << 10]
            .into_iter()
            .filter(|stage| *stage <= largest)
            .map(|stage| Layout::with(ranks, depth, stage, eager, body))
            .find(|layout| layout.total <= budget)
    }

    /// The layout whose segment has exactly `total` bytes: how the ranks agree on the one that was built.
    pub fn of_total(ranks: usize, total: usize) -> Option<Layout> {
        Layout::new(ranks, total).filter(|layout| layout.total == total)
    }

    fn with(ranks: usize, depth: u64, stage_bytes: usize, eager_bytes: usize, body_bytes: usize) -> Layout {
        // A slice is a rank's share of a chunk, rounded up to lines; see bulk.rs.
        let result_bytes = up(stage_bytes.div_ceil(ranks) + 64, PAGE);
        let mut layout = Layout {
            ranks,
            depth,
            stage_bytes,
            result_bytes,
            eager_bytes,
            body_bytes,
            group: up(64 * ranks, PAGE),
            control: 0,
            slots: 0,
            stage: 0,
            result: 0,
            pairs: 0,
            total: 0,
        };
        layout.control = layout.group + PAGE;
        layout.slots = layout.control + ranks * layout.control_bytes();
        layout.stage = layout.slots + ranks * layout.slots_bytes();
        layout.result = layout.stage + ranks * 2 * stage_bytes;
        layout.pairs = layout.result + ranks * 2 * result_bytes;
        layout.total = layout.pairs + ranks * ranks * layout.pair_bytes();
        layout
    }

    pub fn total(&self) -> usize {
        self.total
    }

    /// What the choice needs to know of a group of this layout on one host whose ranks use `cores` cores together.
    pub fn shape(&self, cores: usize) -> Shape {
        Shape { ranks: self.ranks, hosts: 1, cores, slot_bytes: SLOT_BYTES, stage_bytes: self.stage_bytes }
    }

    fn control_bytes(&self) -> usize {
        up(CONTROL_WORDS * PAIR_OF_LINES + FAULT_BYTES, PAGE)
    }
    fn slot_stride(&self) -> usize {
        64 + SLOT_BYTES
    }
    fn slots_bytes(&self) -> usize {
        up(self.depth as usize * self.slot_stride(), PAGE)
    }
    fn envelope_stride(&self) -> usize {
        64 + up(self.eager_bytes, 64)
    }
    fn pair_bytes(&self) -> usize {
        up(6 * PAIR_OF_LINES + ENVELOPES * 8 + ENVELOPES * self.envelope_stride(), PAGE) + 2 * self.body_bytes
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
    /// Header line of a slot; the payload follows 64 bytes later.
    pub fn slot(&self, rank: usize, n: u64) -> usize {
        debug_assert!(rank < self.ranks);
        self.slots + rank * self.slots_bytes() + (n % self.depth) as usize * self.slot_stride()
    }
    pub fn stage(&self, rank: usize, round: u64) -> usize {
        debug_assert!(rank < self.ranks);
        self.stage + (rank * 2 + (round % 2) as usize) * self.stage_bytes
    }
    pub fn result(&self, rank: usize, round: u64) -> usize {
        debug_assert!(rank < self.ranks);
        self.result + (rank * 2 + (round % 2) as usize) * self.result_bytes
    }

    fn pair(&self, from: usize, to: usize) -> usize {
        debug_assert!(from < self.ranks && to < self.ranks);
        self.pairs + (from * self.ranks + to) * self.pair_bytes()
    }
    pub fn pair_word(&self, from: usize, to: usize, index: usize) -> usize {
        debug_assert!(index < 6);
        self.pair(from, to) + index * PAIR_OF_LINES
    }
    pub fn grant(&self, from: usize, to: usize, index: u64) -> usize {
        self.pair(from, to) + 6 * PAIR_OF_LINES + (index % ENVELOPES as u64) as usize * 8
    }
    pub fn envelope(&self, from: usize, to: usize, number: u64) -> usize {
        self.pair(from, to)
            + 6 * PAIR_OF_LINES
            + ENVELOPES * 8
            + (number % ENVELOPES as u64) as usize * self.envelope_stride()
    }
    pub fn body(&self, from: usize, to: usize, round: u64) -> usize {
        self.pair(from, to) + self.pair_bytes() - 2 * self.body_bytes + (round % 2) as usize * self.body_bytes
    }

    /// The ranges that `rank` writes and therefore populates: first touch puts them on its NUMA node.
    pub fn own_ranges(&self, rank: usize) -> Vec<(usize, usize)> {
        let mut ranges = vec![
            (self.control + rank * self.control_bytes(), self.control_bytes()),
            (self.slots + rank * self.slots_bytes(), self.slots_bytes()),
            (self.stage + rank * 2 * self.stage_bytes, 2 * self.stage_bytes),
            (self.result + rank * 2 * self.result_bytes, 2 * self.result_bytes),
        ];
        // Pair areas grow with the square of the ranks: beyond a few they are left to be touched when used.
        if self.ranks <= 4 {
            for to in (0..self.ranks).filter(|to| *to != rank) {
                ranges.push((self.pair(rank, to), self.pair_bytes()));
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_do_not_overlap_and_end_at_total() {
        for ranks in [2, 3, 4, 5, 8, 9, 16, 17, 64, MAX_RANKS] {
            let l = Layout::new(ranks, usize::MAX).unwrap();
            let mut areas = vec![(l.group, PAGE)];
            for r in 0..ranks {
                areas.push((l.control_word(r, 0), l.control_bytes()));
                for n in 0..l.depth {
                    areas.push((l.slot(r, n), 64 + SLOT_BYTES));
                }
                for round in 0..2 {
                    areas.push((l.stage(r, round), l.stage_bytes));
                    areas.push((l.result(r, round), l.result_bytes));
                }
            }
            for from in 0..ranks.min(5) {
                for to in 0..ranks {
                    for i in 0..6 {
                        areas.push((l.pair_word(from, to, i), 8));
                    }
                    for i in 0..ENVELOPES as u64 {
                        areas.push((l.grant(from, to, i), 8));
                        areas.push((l.envelope(from, to, i), 64 + l.eager_bytes));
                    }
                    areas.push((l.body(from, to, 0), l.body_bytes));
                    areas.push((l.body(from, to, 1), l.body_bytes));
                }
            }
            areas.sort();
            assert!(areas[0].0 >= 64 * ranks, "the hello area comes first");
            for pair in areas.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{ranks} ranks: {pair:?}");
            }
            let end = areas.last().map(|a| a.0 + a.1).unwrap();
            assert!(end <= l.total());
        }
    }

    #[test]
    fn two_ranks_stay_below_eight_mebibytes() {
        assert!(Layout::new(2, usize::MAX).unwrap().total() < 8 << 20);
    }

    #[test]
    fn a_small_budget_shrinks_the_stage_and_a_tiny_one_is_refused() {
        let full = Layout::new(2, usize::MAX).unwrap();
        let small = Layout::new(2, full.total() - 1).unwrap();
        assert!(small.stage_bytes < full.stage_bytes);
        assert_eq!(Layout::new(2, 1 << 20), None);
    }
}
