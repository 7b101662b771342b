//! Compares the results of ranks on several hosts (`engine::verify`), if the group has the option `verify`.
//!
//! Each rank hashes into one word the results of all operations that a batch completes. It sends the word in the header
//! of a later batch, in a field that only PREMUL_SUM needs (`FrameHeader::factor`). So no message becomes longer. The
//! header reaches all ranks of the host, and the ranks of other hosts with which the schedule exchanges frames. As soon
//! as a rank has its own word and another rank's word of the same batch, it compares all words of that batch that it
//! has.
//!
//! A word consists of the low bits of the batch's number, which is equal on all ranks, and the upper bits of the hash.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::names::Names;
use crate::config::{Part, Verify};
use crate::engine::verify;
use crate::engine::verify::Hashing;
use crate::error::Error;
use crate::op::Op;
use crate::op::signature;

/// A rank waits at most this long for another rank that knows whose result is wrong.
pub const PATIENCE: Duration = Duration::from_millis(500);
/// The bits of a word that hold the low bits of the batch's number.
const BATCH: u64 = 0xffff;
/// The words of this many batches are kept.
const KEPT: u64 = 512;
/// At most this many words of this rank wait to be sent. If most operations are PREMUL_SUM, there would be more; then
/// the oldest are dropped.
const WAITING: usize = 64;
/// All ranks have sent their words of a batch at most this many batches later: a rank sends a word with each batch that
/// it begins, and two batches are in flight.
const EXPECTED: usize = 4;
/// If differences do not fail the group, at most this many are logged.
const MOST_WARNINGS: u64 = 20;

/// Returns the hash of the results of these operations, in order.
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
    /// This rank's words that were not sent yet.
    waiting: VecDeque<u64>,
    /// Words of other ranks: for each, the last batch that this rank had begun when the word came, the rank, and the
    /// word.
    heard: VecDeque<(u64, usize, u64)>,
    /// How many batches have ended since a difference was found for which no majority is known.
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

    /// Returns the word for the header of the batch that begins; 0 if there is none. Also removes old words, before
    /// their batch bits can be mistaken for those of a newer batch.
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

    /// Records the hash of a batch's results. `first` is the batch's first operation.
    pub fn ended(&mut self, batch: u64, first: &Op, hash: Option<u64>) {
        let Some(hash) = hash else { return };
        let word = hash & !BATCH | batch & BATCH;
        self.own.push_back(Own { batch, word, signature: first.signature, number: first.number });
        if self.waiting.len() == WAITING {
            self.waiting.pop_front();
        }
        self.waiting.push_back(word);
    }

    /// Records the word that came in a header of `rank`.
    pub fn hear(&mut self, rank: usize, word: u64) {
        let is_known = || self.heard.iter().rev().any(|heard| (heard.1, heard.2) == (rank, word));
        if word != 0 && rank != self.names.me && !is_known() {
            self.heard.push_back((self.begun, rank, word));
        }
    }

    /// Called after each batch. If another rank's word differs from this rank's word of the same batch, returns an
    /// error as soon as it is known whose result is wrong, or when no more words of that batch are expected. Then
    /// forgets that batch. If differences do not fail the group, logs the error instead.
    pub fn difference(&mut self) -> Option<Error> {
        let differs = |(_, _, word): &(u64, usize, u64), own: u64| same_batch(own, *word) && own != *word;
        let at = self.own.iter().position(|own| self.heard.iter().any(|heard| differs(heard, own.word)))?;
        let Own { word: own, signature, number, .. } = self.own[at];
        let mut votes = vec![None; self.names.processes.len()];
        votes[self.names.me] = Some(own & !BATCH);
        for (_, rank, word) in self.heard.iter().filter(|heard| same_batch(own, heard.2)) {
            votes[*rank] = Some(word & !BATCH);
        }
        let what = format!("{} number {number}", signature::describe(signature));
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
