//! Finds ranks whose results differ although they must be equal by contract. Such a difference means that a processor,
//! memory or a kernel has silently corrupted data. The option `verify` turns this on.
//!
//! Each rank hashes its result of an all_reduce, broadcast or all_gather before the program learns that the operation
//! has ended, because the program may then change the result. Ranks exchange and compare the hashes of an operation
//! while later operations run, so comparing needs no extra message and no wait. If hashes differ, each rank's hash is a
//! vote: with at least three ranks, a majority shows whose result is wrong. Results of other kinds differ between ranks
//! by contract and are not compared.
//!
//! **Part.** `Part::All` hashes whole results. `Part::Sample` hashes one of `SHARE` parts of each result. The
//! operation's number selects the part, so that all ranks hash the same bytes. A part consists of runs that are spread
//! over the whole result. Among `SHARE` operations with consecutive numbers, starting at a multiple of `SHARE`, each
//! part has one turn. The order of the turns changes from one such sequence to the next. With a fixed order, a training
//! step of `SHARE` operations would hash the same part of each tensor in every step. Results of up to `WHOLE` bytes are
//! hashed whole.
//!
//! This file has no state and knows no engine. Each engine decides how ranks exchange hashes (`shm/results.rs`,
//! `multihost/results.rs`).

#![allow(unsafe_code)] // reads results in the caller's memory

use std::ops::Range;

use super::pieces::Pieces;
use crate::config::Part;
use crate::error::{Error, laid_out};
use crate::reduce::hash::{CELL, Hash, SPARE};
use crate::types::{Kind, Request, Span};

/// `Part::Sample` divides a result into this many parts and hashes one.
pub const SHARE: u64 = 16;
/// Results of up to this many bytes are always hashed whole.
const WHOLE: usize = 512;
/// Longest run of a part.
const RUN: usize = 4096;
/// This many bytes are hashed at a time, so that a waiting thread soon checks signals and deadlines again.
pub const STEP: usize = 256 << 20;

/// The memory of an operation's result: the outputs, or on the root of a broadcast the inputs. None if the result may
/// differ between ranks by contract. Also None on a rank whose outputs of an all_gather share memory, because there a
/// later block overwrites an earlier one.
pub fn result(request: &Request) -> Option<&[Span]> {
    match request.kind {
        Kind::AllReduce => Some(request.outputs()),
        Kind::AllGather => Some(request.outputs()).filter(|outputs| !share_memory(outputs)),
        Kind::Broadcast if request.outputs().is_empty() => Some(request.inputs()),
        Kind::Broadcast => Some(request.outputs()),
        _ => None,
    }
}

fn share_memory(spans: &[Span]) -> bool {
    let touch = |spans: &[Span]| spans.windows(2).any(|two| two[0].addr + two[0].bytes > two[1].addr);
    if !touch(spans) {
        return false; // in order, as usual
    }
    let mut sorted: Vec<Span> = spans.iter().copied().filter(|span| span.bytes > 0).collect();
    sorted.sort_unstable_by_key(|span| span.addr);
    touch(&sorted)
}

/// Selects the runs of a result that are hashed: every run whose number modulo `of` is `turn`.
#[derive(Clone, Copy, Debug)]
struct Runs {
    length: usize,
    turn: usize,
    of: usize,
}

impl Runs {
    fn new(part: Part, number: u64, bytes: usize) -> Runs {
        if part != Part::Sample || bytes <= WHOLE {
            return Runs { length: usize::MAX, turn: 0, of: 1 };
        }
        let length = (bytes / SHARE as usize).next_multiple_of(CELL).clamp(CELL, RUN);
        Runs { length, turn: turn(number) as usize, of: SHARE as usize }
    }
}

/// The part that operation `number` hashes. `SHARE` consecutive numbers, starting at a multiple of `SHARE`, give all
/// parts in a random order.
fn turn(number: u64) -> u64 {
    let mut mixed = (number / SHARE).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^= mixed >> 31;
    (number.wrapping_mul(mixed | 1).wrapping_add(mixed >> 32)) % SHARE
}

/// The hash of one result while it is being computed. The result's bytes are added in order. If the engine reports
/// which bytes are complete, they are added while they are still in the cache.
#[derive(Clone, Debug)]
pub struct Hashing {
    runs: Runs,
    bytes: usize,
    at: usize,
    hash: Hash,
}

impl Hashing {
    /// Starts the hash of the result of operation `number`.
    pub fn new(part: Part, number: u64, result: &[Span]) -> Hashing {
        let bytes = Pieces(result).bytes();
        Hashing { runs: Runs::new(part, number, bytes), bytes, at: 0, hash: Hash::default() }
    }

    /// Number of bytes that were not handled yet.
    pub fn left(&self) -> usize {
        self.bytes - self.at
    }

    /// Adds the bytes of the result up to `end`, or up to the last whole cell before `end`. The bytes before `end` must
    /// be complete.
    pub fn advance(&mut self, result: &[Span], end: usize) {
        let end = if end >= self.bytes { self.bytes } else { end / CELL * CELL };
        if end <= self.at {
            return;
        }
        #[cfg(feature = "testing")]
        flips::apply(result, self.at..end);
        let Runs { length, turn, of } = self.runs;
        if of == 1 {
            add(&mut self.hash, result, self.at..end);
        } else {
            let first = self.at / length;
            let mut run = first + (turn + of - first % of) % of;
            while run * length < end {
                add(&mut self.hash, result, (run * length).max(self.at)..((run + 1) * length).min(end));
                run += of;
            }
        }
        self.at = end;
    }

    pub fn value(&self) -> u64 {
        self.hash.value()
    }
}

/// Adds a range of a result. The range begins at a cell. The hash does not depend on how the result is cut into pieces.
fn add(hash: &mut Hash, result: &[Span], range: Range<usize>) {
    let pieces = Pieces(result);
    if let Some(from) = pieces.contiguous(range.start, range.len()) {
        // SAFETY: within a piece of the result, which the caller of the operation keeps until it ends.
        return unsafe { hash.add(range.start, from, range.len()) };
    }
    let (mut cell, mut held, mut at) = ([0; CELL], 0, range.start);
    pieces.walk(range.start, range.len(), |from, _, bytes| {
        let mut done = 0;
        while done < bytes {
            let whole = (bytes - done) / CELL * CELL;
            if held == 0 && whole > 0 {
                // SAFETY: within the piece that `walk` gave.
                unsafe { hash.add(at, from.add(done), whole) };
                (at, done) = (at + whole, done + whole);
                continue;
            }
            let more = (CELL - held).min(bytes - done);
            // SAFETY: within the piece and within the cell.
            unsafe { cell.as_mut_ptr().add(held).copy_from_nonoverlapping(from.add(done), more) };
            (held, done) = (held + more, done + more);
            if held == CELL {
                hash.add_cell((at / CELL) as u64, &cell);
                (held, at) = (0, at + CELL);
            }
        }
    });
    if held > 0 {
        cell[held..].fill(0);
        hash.add_cell((at / CELL) as u64, &cell);
    }
}

/// Groups the ranks by their hash of one operation, the largest group first. Ranks whose hash is not known are in no
/// group.
fn sides(votes: &[Option<u64>]) -> Vec<(u64, Vec<usize>)> {
    let mut sides: Vec<(u64, Vec<usize>)> = Vec::new();
    for (rank, hash) in votes.iter().enumerate().filter_map(|(rank, hash)| Some((rank, (*hash)?))) {
        match sides.iter_mut().find(|side| side.0 == hash) {
            Some(side) => side.1.push(rank),
            None => sides.push((hash, vec![rank])),
        }
    }
    sides.sort_by_key(|side| std::cmp::Reverse(side.1.len()));
    sides
}

/// Returns an error if the ranks' hashes of the result of the operation `what` differ. `votes` has each rank's hash,
/// and `process` describes the process of a rank. None if all known hashes are equal.
pub fn verdict(what: &str, part: Part, votes: &[Option<u64>], process: impl Fn(usize) -> String) -> Option<Error> {
    let sides = sides(votes);
    let [first, others @ ..] = &sides[..] else { return None };
    if others.is_empty() {
        return None;
    }
    let known: usize = sides.iter().map(|side| side.1.len()).sum();
    let decided = first.1.len() >= 2 && 2 * first.1.len() > known;
    let blamed: Vec<usize> = others.iter().flat_map(|side| side.1.iter().copied()).collect();
    let each = sides.iter().enumerate().map(|(at, (hash, ranks))| {
        let shown = if decided && at == 0 {
            listed(ranks)
        } else {
            let named: Vec<String> = ranks.iter().map(|rank| format!("rank {rank} ({})", process(*rank))).collect();
            named.join(", ")
        };
        format!("{shown} {} {:#018x}", if ranks.len() == 1 { "has" } else { "have" }, hash & !SPARE)
    });
    let mut lines: Vec<String> = each.collect();
    lines.push(match decided {
        true => format!("so the processor, the memory or a kernel of {} changed it", listed(&blamed)),
        false => "no side has a majority, so nothing says whose processor, memory or kernel changed it".to_string(),
    });
    if part == Part::Sample {
        lines.push(format!("compared was one part in {SHARE} of it (verify=\"sampled\")"));
    }
    let missing: Vec<usize> = (0..votes.len()).filter(|rank| votes[*rank].is_none()).collect();
    if !missing.is_empty() {
        lines.push(format!("that of {} is not known", listed(&missing)));
    }
    let advice = if decided {
        "Test that machine, and go on without it from a checkpoint that is older than this operation"
    } else {
        "Test these machines, and go on from a checkpoint that is older than this operation"
    };
    let head = format!("the result of {what} is not the same on all ranks");
    Some(Error::corrupt(blamed.first().copied().filter(|_| decided), laid_out(&head, &lines, advice)))
}

/// `rank 1`, `ranks 0 and 2`, `ranks 0, 2 and 3`.
fn listed(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match &numbers[..] {
        [one] => format!("rank {one}"),
        [most @ .., last] => format!("ranks {} and {last}", most.join(", ")),
        [] => "no rank".to_string(),
    }
}

/// Lets tests flip bits in results, like a fault would, right before the results are hashed.
#[cfg(feature = "testing")]
pub mod flips {
    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Mutex, PoisonError};

    use crate::engine::pieces::Pieces;
    use crate::types::Span;

    /// Whether a test has ever requested a flip. Set by tests, read by threads that hash. Relaxed: `FLIPS` has the
    /// data.
    static ANY: AtomicBool = AtomicBool::new(false);
    static FLIPS: Mutex<Vec<(usize, u8)>> = Mutex::new(Vec::new());

    /// From now on, until `stop`, the bits of `mask` are flipped in the byte at this address whenever a result that
    /// contains the byte is hashed.
    pub fn start(address: usize, mask: u8) {
        ANY.store(true, Ordering::Relaxed);
        FLIPS.lock().unwrap_or_else(PoisonError::into_inner).push((address, mask));
    }

    pub fn stop(address: usize) {
        FLIPS.lock().unwrap_or_else(PoisonError::into_inner).retain(|flip| flip.0 != address);
    }

    pub(super) fn apply(result: &[Span], range: Range<usize>) {
        if !ANY.load(Ordering::Relaxed) {
            return;
        }
        let flips = FLIPS.lock().unwrap_or_else(PoisonError::into_inner);
        Pieces(result).walk(range.start, range.len(), |from, _, bytes| {
            for (address, mask) in flips.iter().filter(|flip| (from as usize..from as usize + bytes).contains(&flip.0))
            {
                // SAFETY: within a piece of the result, which only this thread uses now.
                unsafe { *(*address as *mut u8) ^= mask };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_has_its_turn_and_the_order_changes() {
        let turns: Vec<u64> = (0..64 * SHARE).map(turn).collect();
        let windows: Vec<&[u64]> = turns.chunks(SHARE as usize).collect();
        for window in &windows {
            let mut sorted = window.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..SHARE).collect::<Vec<_>>());
        }
        for place in 0..SHARE as usize {
            let mut seen: Vec<u64> = windows.iter().map(|window| window[place]).collect();
            seen.sort_unstable();
            seen.dedup();
            assert!(seen.len() as u64 >= SHARE - 2, "place {place} meets {seen:?}");
        }
    }

    fn hash_of(part: Part, number: u64, result: &[Span], steps: &[usize]) -> u64 {
        let mut hashing = Hashing::new(part, number, result);
        steps.iter().for_each(|end| hashing.advance(result, *end));
        hashing.advance(result, usize::MAX);
        assert_eq!(hashing.left(), 0);
        hashing.value()
    }

    #[test]
    fn a_hash_depends_neither_on_pieces_nor_on_steps() {
        let data: Vec<u8> = (0..200_003u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let span = |range: Range<usize>| Span { addr: data.as_ptr() as usize + range.start, bytes: range.len() };
        let whole = [span(0..data.len())];
        let cuts = [0, 1, 70, 71, 5000, 5000, 5064, 66_001, 150_003, data.len()];
        let pieces: Vec<Span> = cuts.windows(2).map(|two| span(two[0]..two[1])).collect();
        for part in [Part::All, Part::Sample] {
            for number in 1..40 {
                let expected = hash_of(part, number, &whole, &[]);
                assert_eq!(hash_of(part, number, &pieces, &[]), expected);
                assert_eq!(hash_of(part, number, &whole, &[100, 64 * 77, 100_000, 100_001, 190_000]), expected);
                assert_eq!(hash_of(part, number, &pieces, &[63, 64, 9000, 128_000]), expected);
            }
        }
    }

    #[test]
    fn each_bit_of_a_result_is_in_one_part() {
        for bytes in [513, 1000, 4096, 66_000, 200_003] {
            let mut data = vec![7u8; bytes];
            let span = |data: &mut Vec<u8>| [Span { addr: data.as_mut_ptr() as usize, bytes }];
            let result = span(&mut data);
            let before: Vec<u64> = (0..SHARE).map(|number| hash_of(Part::Sample, number, &result, &[])).collect();
            for at in (0..bytes).step_by(61).chain([bytes - 1]) {
                data[at] ^= 4;
                let after = (0..SHARE).map(|number| hash_of(Part::Sample, number, &span(&mut data), &[]));
                let changed = after.zip(&before).filter(|(after, before)| after != *before).count();
                assert_eq!(changed, 1, "byte {at} of {bytes}");
                data[at] ^= 4;
            }
        }
    }

    #[test]
    fn outputs_that_share_memory_are_no_result_that_is_compared() {
        let of = |spans: &[(usize, usize)]| {
            let spans = spans.iter().map(|&(addr, bytes)| Span { addr, bytes }).collect();
            result(&Request::of_addresses(Kind::AllGather, Vec::new(), spans)).is_some()
        };
        assert!(of(&[(100, 10), (110, 10)]) && of(&[(110, 10), (100, 10)]) && of(&[(100, 10), (0, 0), (90, 10)]));
        assert!(!of(&[(100, 10), (100, 10)]) && !of(&[(100, 10), (200, 5), (105, 10)]));
    }

    #[test]
    fn a_majority_says_whose_result_is_wrong() {
        let process = |rank: usize| format!("pid {}, host a", 70 + rank);
        let said = |votes: &[Option<u64>]| verdict("all_reduce number 17", Part::All, votes, process);
        assert!(said(&[Some(16), Some(16), None]).is_none());
        let error = said(&[Some(16), Some(16), Some(32), Some(16)]).unwrap();
        assert_eq!((error.kind(), error.rank()), (crate::error::ErrorKind::Corrupt, Some(2)));
        assert_eq!(said(&[Some(16), Some(32)]).unwrap().rank(), None);
        assert_eq!(said(&[Some(16), Some(32), Some(16), Some(32)]).unwrap().rank(), None);
        assert_eq!(said(&[Some(16), Some(32), Some(16), None]).unwrap().rank(), Some(1));
        assert_eq!(listed(&[0, 2, 3]), "ranks 0, 2 and 3");
    }
}
