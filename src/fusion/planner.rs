//! Decides which operations are sent as one batch between hosts. Pure.
//!
//! On one host there is nothing to decide: every operation is published immediately, and a reader handles all that are
//! published (`engine/shm`). Between hosts a message costs a latency, so small operations that must wait anyway are
//! sent in one batch. All ranks must make the same batches, and no rank may wait for an operation that another rank has
//! not issued (rules 13 and 15):
//!
//! - Every batch carries a number in addition to its data. Each rank contributes the number up to which it has issued
//!   operations that do not wait for each other's memory; the batch carries the minimum. A rank that has finished batch
//!   j knows that all ranks have issued the operations up to that number.
//! - Batch j + 2 ends at the number that was agreed in batch j, or earlier because of the limits of bytes and count or
//!   because keys differ. If no operation is left, the batch is the next single operation, which is sent at issue as if
//!   there were no fusion. There is no timer and no waiting.
//! - Two batches are in flight at a time, one on each lane. A lane is strictly sequential.
//!
//! A large all_reduce, reduce or broadcast is cut into segments (`select/inter.rs`), each of which counts as a batch.
//! So the two lanes work on the operation in turn: one moves data between hosts while the other combines inside the
//! host.
//!
//! Source: Horovod's coordinator, which collects one "ready" bit per rank. Here there is no coordinator and no cycle
//! time, because the batch before the previous one carries the agreement.

use std::collections::VecDeque;

use crate::types::Kind;

/// Number of batches that may be in progress at the same time, one on each lane.
pub const LANES: usize = 2;

/// Operations may share a batch if their keys are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusionKey {
    pub kind: Kind,
    /// `ReduceOp::code`.
    pub op: u8,
}

/// What the planner needs to know of an operation. Equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    /// `None` if the operation cannot share a batch.
    pub key: Option<FusionKey>,
    /// Bytes that one rank contributes.
    pub bytes: usize,
    /// Number of segments into which the operation is cut; 1 if it is not cut.
    pub segments: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The largest number of bytes in a batch. A single operation may be larger.
    pub bytes: usize,
    pub operations: usize,
}

/// Operations `first..=last`, or one segment of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Number of the batch in the group, counted from 0.
    pub index: u64,
    pub first: u64,
    pub last: u64,
    pub segment: usize,
    pub segments: usize,
}

impl Batch {
    pub fn lane(&self) -> usize {
        (self.index % LANES as u64) as usize
    }
}

/// Cuts the stream of a group's operations into batches. Every rank has one planner, and all give equal results.
#[derive(Debug)]
pub struct Planner {
    limits: Limits,
    /// Number of the first operation that is not completely in batches.
    next: u64,
    /// How many segments of operation `next` are already in batches.
    segment: usize,
    /// The issued operations, beginning with `next`.
    items: VecDeque<Item>,
    planned: u64,
    agreed: [u64; LANES],
}

impl Planner {
    /// `limits.operations` of 1 turns fusion off. The first operation has number 1.
    pub fn new(limits: Limits) -> Planner {
        Planner { limits, next: 1, segment: 0, items: VecDeque::new(), planned: 0, agreed: [0; LANES] }
    }

    /// Adds the next operation that was issued on this rank.
    pub fn push(&mut self, item: Item) {
        self.items.push_back(item);
    }

    /// The lane of the next batch.
    pub fn lane(&self) -> usize {
        (self.planned % LANES as u64) as usize
    }

    /// Records that `batch` has ended, and that every rank had issued the operations up to `highest` (0 if the batch
    /// agreed on nothing). Must be called before the next batch of the same lane is requested.
    pub fn agree(&mut self, batch: &Batch, highest: u64) {
        self.agreed[batch.lane()] = highest;
    }

    /// Plans and returns the next batch. None if this rank has not issued the batch's first operation yet.
    pub fn next_batch(&mut self) -> Option<Batch> {
        let first = *self.items.front()?;
        let mut batch = Batch {
            index: self.planned,
            first: self.next,
            last: self.next,
            segment: 0,
            segments: first.segments.max(1),
        };
        self.planned += 1;
        if batch.segments > 1 {
            batch.segment = self.segment;
            self.segment += 1;
            if self.segment == batch.segments {
                self.segment = 0;
                self.take(1);
            }
            return Some(batch);
        }
        let count = self.alike(self.agreed[batch.lane()]);
        batch.last = batch.first + count as u64 - 1;
        self.take(count);
        Some(batch)
    }

    /// How many operations, beginning with the next one, form the next batch if all ranks have issued the operations up
    /// to `agreed`.
    fn alike(&self, agreed: u64) -> usize {
        let first = self.items[0];
        let mut bytes = first.bytes;
        let mut count = 1;
        while first.key.is_some() && count < self.limits.operations && self.next + (count as u64) <= agreed {
            let Some(item) = self.items.get(count) else { break };
            bytes = bytes.saturating_add(item.bytes);
            if item.key != first.key || item.segments > 1 || bytes > self.limits.bytes {
                break;
            }
            count += 1;
        }
        count
    }

    fn take(&mut self, count: usize) {
        self.items.drain(..count);
        self.next += count as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIKE: Option<FusionKey> = Some(FusionKey { kind: Kind::AllReduce, op: 0 });

    fn item(bytes: usize) -> Item {
        Item { key: LIKE, bytes, segments: 1 }
    }

    #[test]
    fn rule_15_a_lone_operation_is_its_own_batch_at_once() {
        let mut planner = Planner::new(Limits { bytes: 100, operations: 10 });
        assert_eq!(planner.next_batch(), None);
        planner.push(item(8));
        let batch = planner.next_batch().unwrap();
        assert_eq!((batch.first, batch.last, batch.lane()), (1, 1, 0));
        assert_eq!(planner.next_batch(), None);
    }

    #[test]
    fn rule_15_a_batch_ends_at_what_was_agreed_two_batches_before() {
        let mut planner = Planner::new(Limits { bytes: 100, operations: 10 });
        (0..8).for_each(|_| planner.push(item(8)));
        let (a, b) = (planner.next_batch().unwrap(), planner.next_batch().unwrap());
        assert_eq!((a.first, a.last, b.first, b.last), (1, 1, 2, 2));
        planner.agree(&a, 6);
        let c = planner.next_batch().unwrap();
        assert_eq!((c.first, c.last), (3, 6));
        planner.agree(&b, 8);
        let d = planner.next_batch().unwrap();
        assert_eq!((d.first, d.last), (7, 8));
    }

    #[test]
    fn limits_kinds_and_segments_end_a_batch() {
        let mut planner = Planner::new(Limits { bytes: 20, operations: 3 });
        let lone = Item { key: None, bytes: 1, segments: 1 };
        let cut = Item { key: LIKE, bytes: 1000, segments: 3 };
        for next in [item(8), item(8), item(8), item(1), item(1), item(1), item(1), lone, item(1), cut, item(1)] {
            planner.push(next);
        }
        let mut ranges = Vec::new();
        while let Some(batch) = planner.next_batch() {
            planner.agree(&batch, 100);
            ranges.push((batch.first, batch.last, batch.segment));
        }
        // Nothing is agreed for the first two batches. Then come three operations, which is the limit, two of one kind,
        // the operation without a key alone, and the large operation in its segments.
        let expected = [(1, 1, 0), (2, 2, 0), (3, 5, 0), (6, 7, 0), (8, 8, 0), (9, 9, 0)];
        assert_eq!(ranges[..6], expected);
        assert_eq!(ranges[6..], [(10, 10, 0), (10, 10, 1), (10, 10, 2), (11, 11, 0)]);
    }

    #[test]
    fn bytes_end_a_batch() {
        let mut planner = Planner::new(Limits { bytes: 20, operations: 10 });
        (0..6).for_each(|_| planner.push(item(8)));
        let mut ranges = Vec::new();
        while let Some(batch) = planner.next_batch() {
            planner.agree(&batch, 100);
            ranges.push((batch.first, batch.last));
        }
        assert_eq!(ranges, [(1, 1), (2, 2), (3, 4), (5, 6)]);
    }

    proptest! {
        /// Ranks issue at random moments, and some wait for each operation before they issue the next. All ranks must
        /// make the same batches, every operation must be in exactly one batch, and no rank may wait for an operation
        /// that was not issued.
        #[test]
        fn rule_13_and_15_all_ranks_cut_alike_and_no_rank_waits_for_the_unissued(
            ranks in 1usize..5, sizes in prop::collection::vec((1usize..60, 0u8..5), 1..40),
            waits in prop::collection::vec(any::<bool>(), 5), order in prop::collection::vec(0usize..1000, 400),
        ) {
            let items: Vec<Item> = sizes.iter().map(|(bytes, what)| match what {
                0 => Item { key: None, bytes: *bytes, segments: 1 },
                1 => Item { key: LIKE, bytes: *bytes, segments: 3 },
                2 => Item { key: Some(FusionKey { kind: Kind::AllReduce, op: 4 }), bytes: *bytes, segments: 1 },
                _ => item(*bytes),
            }).collect();
            let total = items.len() as u64;
            let mut planners: Vec<Planner> = (0..ranks).map(|_| Planner::new(Limits { bytes: 150, operations: 6 })).collect();
            let mut issued = vec![0u64; ranks];
            let mut ended = 0u64; // ended on all ranks: batches end in step here
            let mut seen: Vec<Batch> = Vec::new();
            let mut turns = order.iter().cycle();
            while ended < total {
                // A random rank issues an operation if it may.
                let rank = turns.next().unwrap() % ranks;
                if issued[rank] < total && (!waits[rank] || ended >= issued[rank]) {
                    planners[rank].push(items[issued[rank] as usize]);
                    issued[rank] += 1;
                }
                // A batch runs as soon as every rank has issued the batch's first operation.
                if planners.iter().all(|planner| !planner.items.is_empty()) {
                    let batches: Vec<Batch> = planners.iter_mut().map(|planner| planner.next_batch().unwrap()).collect();
                    prop_assert!(batches.iter().all(|batch| *batch == batches[0]), "ranks cut differently: {:?}", batches);
                    prop_assert!(issued.iter().all(|highest| *highest >= batches[0].last), "a batch holds an unissued op");
                    let agreed = *issued.iter().min().unwrap();
                    for (planner, batch) in planners.iter_mut().zip(&batches) {
                        planner.agree(batch, agreed);
                    }
                    if batches[0].segment + 1 == batches[0].segments {
                        prop_assert_eq!(batches[0].first, ended + 1);
                        ended = batches[0].last;
                    }
                    seen.push(batches[0]);
                }
            }
            prop_assert_eq!(seen.last().unwrap().last, total);
        }
    }
}
