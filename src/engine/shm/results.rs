//! Compares the results of the ranks of one host (`engine::verify`), if the group has the option `verify`.
//!
//! Each rank writes the hash of each result into shared memory (`protocol`, **Hashes**) and compares it with the hash
//! of the next rank; the last rank compares with rank 0. So each rank reads the hashes of only one peer, however many
//! ranks there are, and if results differ, at least two ranks find a difference. Eight words share a cache line, so
//! hashes of small operations are compared eight at a time; after a large operation or a barrier all published hashes
//! are compared.
//!
//! A rank that has found a difference reads the words of all ranks. Its operations do not end until every rank has
//! published its hash, because each rank has a vote; but this rank waits at most `PATIENCE`.

use std::time::Duration;

use super::memory::area::Area;
use super::memory::layout::Layout;
use super::protocol::{Word, Words};
use crate::config::{Part, Verify};
use crate::engine::verify;
use crate::engine::verify::Hashing;
use crate::error::Result;
use crate::op::Op;
use crate::op::signature;
use crate::os::{clock, topology};
use crate::reduce::hash::SPARE;
use crate::types::{Kind, Span};

/// An operation with fewer bytes starts a comparison only if at least `TOGETHER` operations have not been compared yet.
const LARGE: u64 = 16 << 10;
const TOGETHER: u64 = 8;
/// After a difference was found, a rank waits at most this long for the hashes of all ranks.
const PATIENCE: Duration = Duration::from_secs(1);
/// If differences do not fail the group, at most this many are logged.
const MOST_WARNINGS: u64 = 20;
/// A bit of a hash word: the operation has a result that is compared.
const COMPARED: u64 = 8;

pub struct Results {
    verify: Verify,
    /// Process of each rank; 0 if unknown.
    pids: Vec<i32>,
    /// Number of words of a rank.
    words: u64,
    /// Signatures of the last operations, for texts. An operation's signature has the same index as its hash word.
    signatures: Vec<u64>,
    /// The number and the partial hash of an operation that is not hashed completely yet. It runs in rounds, or its
    /// result is large.
    running: Option<(u64, Hashing)>,
    /// The hashes of operations up to this number were compared with those of the next rank.
    compared: u64,
    /// The operation whose result differs, and when that was found.
    found: Option<(u64, u64)>,
    warned: u64,
}

impl Results {
    pub fn new(verify: Verify, layout: &Layout, pids: Vec<i32>) -> Results {
        let words = layout.hashes();
        let signatures = vec![0; words as usize];
        Results { verify, pids, words, signatures, running: None, compared: 0, found: None, warned: 0 }
    }

    /// The low bits of the word of operation `n`. They are not 0, and they differ from those of the operations that use
    /// the same word directly before and after `n`.
    fn mark(&self, n: u64) -> u64 {
        n / self.words % 7 + 1
    }

    /// Hashes the complete part of the result of an operation in rounds: its first `bytes` bytes. The newest of them
    /// are still in the cache.
    pub fn follow(&mut self, op: &Op, bytes: usize) {
        let Some(result) = followed(op).filter(|_| bytes > 0) else { return };
        let running =
            self.running.get_or_insert_with(|| (op.number, Hashing::new(self.verify.part, op.number, result)));
        if running.0 == op.number {
            running.1.advance(result, bytes);
        }
    }

    /// Publishes the hash of the result of `op`. The result must be complete. Returns false if a large result is only
    /// partly hashed; then the caller must call again.
    pub fn publish(&mut self, area: &Area, op: &Op) -> bool {
        let n = op.number;
        let mut word = self.mark(n);
        if let Some(result) = verify::result(&op.request) {
            let is_running = self.running.as_ref().is_some_and(|running| running.0 == n);
            let mut hashing = match &mut self.running {
                running @ Some(_) if is_running => running.take().expect("just seen").1,
                _ => Hashing::new(self.verify.part, n, result),
            };
            let reads_all = self.verify.part == Part::All;
            if reads_all && hashing.left() > verify::STEP && self.running.is_none() {
                let before = hashing.left();
                hashing.advance(result, whole(result) - before + verify::STEP);
                self.running = Some((n, hashing));
                return false;
            }
            hashing.advance(result, usize::MAX);
            word |= hashing.value() & !SPARE | COMPARED;
        }
        self.signatures[(n % self.words) as usize] = op.signature;
        area.store(Word::Hash { rank: area.me, n }, word);
        true
    }

    /// Compares the hashes of operations up to number `done`, if this is due. All of these operations have ended on
    /// this rank; `op` is the operation that ends now. Returns false while a difference is known and some ranks still
    /// have to publish their hashes.
    pub fn compare(&mut self, area: &Area, op: &Op, done: u64) -> Result<bool> {
        let is_due =
            op.request.kind == Kind::Barrier || op.payload() >= LARGE || done.saturating_sub(self.compared) >= TOGETHER;
        if self.found.is_none() && is_due {
            self.find(area, done);
        }
        let Some((n, since)) = self.found else { return Ok(true) };
        let words: Vec<u64> = (0..area.ranks).map(|rank| area.load(Word::Hash { rank, n })).collect();
        let is_missing = |word: &u64| word & SPARE & !COMPARED != self.mark(n);
        if words.iter().any(is_missing) && clock::now().saturating_sub(since) < PATIENCE.as_nanos() as u64 {
            return Ok(false);
        }
        let is_vote = |word: &u64| !is_missing(word) && word & COMPARED != 0;
        let votes: Vec<Option<u64>> = words.iter().map(|word| Some(word & !SPARE).filter(|_| is_vote(word))).collect();
        self.found = None;
        let what = format!("{} number {n}", signature::describe(self.signatures[(n % self.words) as usize]));
        let host = topology::hostname();
        let process = |rank: usize| format!("pid {}, host {host}", self.pids[rank]);
        let Some(error) = verify::verdict(&what, self.verify.part, &votes, process) else { return Ok(true) };
        if !self.verify.warns {
            return Err(error);
        }
        self.warned += 1;
        if self.warned <= MOST_WARNINGS {
            log::warn!("{}", error.in_one_line());
        }
        Ok(true)
    }

    /// Compares hashes with those of the next rank, up to the first difference or to the first hash that the next rank
    /// has not published.
    fn find(&mut self, area: &Area, done: u64) {
        let next = (area.me + 1) % area.ranks;
        while self.found.is_none() && self.compared < done {
            let n = self.compared + 1;
            let [own, theirs] = [area.me, next].map(|rank| area.load(Word::Hash { rank, n }));
            if theirs & SPARE & !COMPARED != self.mark(n) {
                return;
            }
            self.compared = n;
            if own & theirs & COMPARED != 0 && own != theirs {
                self.found = Some((n, clock::now()));
            }
        }
    }
}

/// Returns the result of an operation, if the operation's rounds complete it from the beginning on.
fn followed(op: &Op) -> Option<&[Span]> {
    verify::result(&op.request).filter(|_| op.request.kind != Kind::AllGather)
}

fn whole(result: &[Span]) -> usize {
    result.iter().map(|span| span.bytes).sum()
}
