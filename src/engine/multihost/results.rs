//! Compares the results of ranks on several hosts (`engine::verify`). Only a group with the option `verify` has it.
//!
//! Each rank hashes the results of the operations that a batch completes into one word, and sends it in the header of a
//! later batch, where only PREMUL_SUM needs the place (`FrameHeader::factor`). So no message becomes longer. The header
//! reaches all ranks of the host, and the ranks of other hosts with which the schedule exchanges frames. A rank compares
//! each word with its own of the same batch, as soon as it has both, and with all others that it has heard.
//!
//! A word has the low bits of the number of the batch's first operation, and the upper bits of the hash.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::names::Names;
use crate::config::{Part, Verify};
use crate::engine::verify;
use crate::engine::verify::Hashing;
use crate::error::Error;
use crate::op::Op;

/// Longest wait for a rank that can say whose result is wrong.
pub const PATIENCE: Duration = Duration::from_millis(500);
const NUMBER: u64 = 0xffff;
/// Number of own words that are kept.
const KEPT: usize = 256;
/// Most own words that wait to be sent. More of them wait only if most operations are PREMUL_SUM; the oldest are then
/// never sent.
const WAITING: usize = 64;
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

/// The words of the last batches.
pub struct Ledger {
    verify: Verify,
    names: Arc<Names>,
    /// This rank's words, with what was called.
    own: VecDeque<(u64, String)>,
    /// Own words that were not sent.
    waiting: VecDeque<u64>,
    /// Words of other ranks.
    heard: VecDeque<(usize, u64)>,
    warned: u64,
}

impl Ledger {
    pub fn new(verify: Verify, names: Arc<Names>) -> Ledger {
        let (own, waiting, heard) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        Ledger { verify, names, own, waiting, heard, warned: 0 }
    }

    /// The word for the header of the next batch. 0 if there is none.
    pub fn next_word(&mut self) -> u64 {
        self.waiting.pop_front().unwrap_or(0)
    }

    /// Records the hash of a batch's results. `first` is its first operation.
    pub fn ended(&mut self, first: &Op, hash: Option<u64>) {
        let Some(hash) = hash else { return };
        let word = hash & !NUMBER | first.number & NUMBER;
        if self.own.len() == KEPT {
            self.own.pop_front();
        }
        self.own.push_back((word, first.what()));
        if self.waiting.len() == WAITING {
            self.waiting.pop_front();
        }
        self.waiting.push_back(word);
    }

    /// Records the word that a header of `rank` had.
    pub fn hear(&mut self, rank: usize, word: u64) {
        if word == 0 || rank == self.names.me || self.heard.contains(&(rank, word)) {
            return;
        }
        if self.heard.len() >= KEPT * self.names.processes.len().max(1) {
            self.heard.pop_front();
        }
        self.heard.push_back((rank, word));
    }

    /// The error if some rank's word differs from this rank's of the same batch. Afterwards that batch is forgotten.
    pub fn difference(&mut self, ranks: usize, me: usize) -> Option<Error> {
        let same = |one: u64, other: u64| one & NUMBER == other & NUMBER;
        let at =
            self.own.iter().position(|(own, _)| self.heard.iter().any(|(_, word)| same(*own, *word) && own != word))?;
        let (own, what) = self.own.remove(at).expect("just found");
        let mut votes = vec![None; ranks];
        votes[me] = Some(own & !NUMBER);
        for (rank, word) in self.heard.iter().filter(|(_, word)| same(own, *word)) {
            votes[*rank] = Some(word & !NUMBER);
        }
        self.heard.retain(|(_, word)| !same(own, *word));
        let error = verify::verdict(&what, self.verify.part, &votes, |rank| self.names.processes[rank].clone())?;
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
