//! Compares the results of ranks on several hosts (`engine::verify`). Only a group with the option `verify` has it.
//!
//! Each rank hashes the results of the operations that a batch completes into one word, and sends it in the header of a
//! later batch, where only PREMUL_SUM needs the place (`FrameHeader::factor`). So no message becomes longer. The header
//! reaches all ranks of the host, and the ranks of other hosts with which the schedule exchanges frames. A rank compares
//! each word with its own of the same batch, as soon as it has both, and with all others that it has heard.
//!
//! A word has the low bits of the batch's number, which is equal on all ranks, and the upper bits of the hash.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::names::Names;
use crate::config::{Part, Verify};
use crate::engine::verify;
use crate::engine::verify::Hashing;
use crate::error::Error;
use crate::op;
use crate::op::Op;

/// Longest wait for a rank that can say whose result is wrong.
pub const PATIENCE: Duration = Duration::from_millis(500);
/// Bits of a word with the low bits of the batch's number.
const BATCH: u64 = 0xffff;
/// Words of so many batches are kept.
const KEPT: u64 = 512;
/// Most own words that wait to be sent. More of them wait only if most operations are PREMUL_SUM; the oldest are then
/// never sent.
const WAITING: usize = 64;
/// In so many batches all ranks send their words of one batch: a rank takes a word when it begins a batch, and two are in
/// flight.
const EXPECTED: usize = 4;
/// Most differences of a group that are logged, if they do not fail it.
const MOST_WARNINGS: u64 = 20;

/// The hash of the results of these operations, in order.
pub fn hash(part: Part, ops: &[Arc<Op>]) -> Option<u64> {
    let mut all = None;
    for op in ops {
        let Some(result) = verify::result(&op.request) else { continue };
        let mut hashing = Hashing::new(part, op.number, result);
        hashing.advance(result, usize::MAX);
        all = Some(match all {
            None => hashing.value(),
            Some(before) => u64::wrapping_add(before, hashing.value()).rotate_left(1),
        });
    }
    all
}

/// A word of this rank.
struct Own {
    /// The batch.
    batch: u64,
    word: u64,
    /// The first operation of the batch, for texts.
    signature: u64,
    number: u64,
}

/// The words of the last batches.
pub struct Ledger {
    verify: Verify,
    names: Arc<Names>,
    /// The last batch that this rank has begun. Batches are numbered alike on all ranks.
    begun: u64,
    own: VecDeque<Own>,
    /// Own words that were not sent.
    waiting: VecDeque<u64>,
    /// Words of other ranks: the batch in which each came, rank, word.
    heard: VecDeque<(u64, usize, u64)>,
    /// Number of batches since a difference was found for which no majority is known.
    undecided: usize,
    warned: u64,
}

fn same_batch(one: u64, other: u64) -> bool {
    one & BATCH == other & BATCH
}

impl Ledger {
    pub fn new(verify: Verify, names: Arc<Names>) -> Ledger {
        let (own, waiting, heard) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        Ledger { verify, names, begun: 0, own, waiting, heard, undecided: 0, warned: 0 }
    }

    /// The word for the header of the batch that begins. 0 if there is none. Forgets words that are so old that their low
    /// bits might soon stand for another batch.
    pub fn next_word(&mut self, batch: u64) -> u64 {
        self.begun = self.begun.max(batch);
        let oldest = self.begun.saturating_sub(KEPT);
        while self.own.front().is_some_and(|own| own.batch < oldest) {
            self.own.pop_front();
        }
        while self.heard.front().is_some_and(|heard| heard.0 < oldest) {
            self.heard.pop_front();
        }
        self.waiting.pop_front().unwrap_or(0)
    }

    /// Records the hash of a batch's results. `first` is its first operation.
    pub fn ended(&mut self, batch: u64, first: &Op, hash: Option<u64>) {
        let Some(hash) = hash else { return };
        let word = hash & !BATCH | batch & BATCH;
        self.own.push_back(Own { batch, word, signature: first.signature, number: first.number });
        if self.waiting.len() == WAITING {
            self.waiting.pop_front();
        }
        self.waiting.push_back(word);
    }

    /// Records the word that a header of `rank` had.
    pub fn hear(&mut self, rank: usize, word: u64) {
        let is_known = || self.heard.iter().rev().any(|heard| (heard.1, heard.2) == (rank, word));
        if word != 0 && rank != self.names.me && !is_known() {
            self.heard.push_back((self.begun, rank, word));
        }
    }

    /// Called after each batch. The error if some rank's word differs from this rank's of the same batch, and it is known
    /// whose result is wrong or no more words of that batch are expected. Afterwards that batch is forgotten.
    pub fn difference(&mut self) -> Option<Error> {
        let differs = |(_, _, word): &(u64, usize, u64), own: u64| same_batch(own, *word) && own != *word;
        let at = self.own.iter().position(|own| self.heard.iter().any(|heard| differs(heard, own.word)))?;
        let Own { word: own, signature, number, .. } = self.own[at];
        let mut votes = vec![None; self.names.processes.len()];
        votes[self.names.me] = Some(own & !BATCH);
        for (_, rank, word) in self.heard.iter().filter(|heard| same_batch(own, heard.2)) {
            votes[*rank] = Some(word & !BATCH);
        }
        let what = format!("{} number {number}", op::describe(signature));
        let process = |rank: usize| self.names.processes[rank].clone();
        let error = verify::verdict(&what, self.verify.part, &votes, process)?;
        self.undecided += 1;
        if error.rank().is_none() && votes.iter().any(Option::is_none) && self.undecided < EXPECTED {
            return None;
        }
        self.undecided = 0;
        self.own.remove(at);
        self.heard.retain(|heard| !same_batch(own, heard.2));
        if !self.verify.warns {
            return Some(error);
        }
        self.warned += 1;
        if self.warned <= MOST_WARNINGS {
            log::warn!("{}", error.in_one_line());
        }
        None
    }
}
