//! The protocol of the shared memory: which rank may write which word, and when. This file does not access memory
//! itself: it loads and stores through [`Words`].
//!
//! Everything here is generic over `Words`, so the same code runs on the mapped segment and, in `tests/loom.rs`, on
//! loom's atomics, which try every interleaving.
//!
//! **Slots.** Operation `n` of a group uses slot `n mod depth` of each rank. A rank writes the payload, then stores the
//! tag `n` (release). A peer that loads the tag `n` (acquire) may read the payload. When a rank no longer reads any
//! slot of operations up to `n`, it stores `Done = n` (release). Before a rank overwrites the slot of operation
//! `n - depth`, it must have loaded (acquire) `Done >= n - depth` from every peer. The peers' reads then happen before
//! the overwrite, so no trailing barrier is needed and payload accesses are plain.
//!
//! **Rounds.** Large operations are cut into rounds. Rounds are numbered consecutively over all operations of the
//! group. For each region (stage, result) a rank has two buffers and two counters. `Ready = g + 1` means that the rank
//! has filled its buffer for round `g`. `Drained = g + 1` means that the rank no longer reads any peer's buffer of
//! rounds up to `g`. A rank may fill round `g` when `Drained >= g - 1` for every peer: then no peer reads round `g -
//! 2`, the last round that used the same buffer.
//!
//! **Messages.** A message that does not fit into an envelope is copied through the two buffers of a channel of the
//! receiver (`p2p/channels.rs`). Rounds are numbered consecutively over all such messages of an ordered pair: the
//! sender may fill round `g` when the receiver has drained round `g - 2`. A channel passes to another sender only by a
//! grant, which the receiver stores (release) after it has read all earlier data of the channel. If the receiver reads
//! the sender's tensor in place, the first round has only the tensor's offset. Both ranks may copy (`p2p/shares.rs`).
//! When everything is copied, the receiver stores that it has drained that round (release). The sender's send ends only
//! after the sender has loaded this value (acquire).
//!
//! **Parts.** If ranks access each other's tensors (`mapped`), each rank has a part of the operation. When its part is
//! done, it stores `Moved = n` in its slot (release). A rank that loads this value from every slot (acquire) knows that
//! no rank reads its inputs any more and that its outputs are complete; then its operation ends. The word is 0 before
//! the slot is published.
//!
//! **Relays.** A sum that is made node by node (`mapped/relay.rs`) goes from a rank to the rank after it in chunks, through
//! the two stage buffers of the earlier one. `Folded = c + 1` in the slot of the operation means that the rank has
//! combined chunk `c` of its node, and no longer reads what the rank before it had in its buffer. A rank may fill its
//! buffer with chunk `c` when the rank after it has `Folded >= c - 1`. `Delivered = c + 1` means that chunk `c` of the result
//! is in the outputs of the rank's node. Both words are 0 before the slot is published.
//!
//! **Hashes.** If results are compared (`results`), a rank whose result of operation `n` is complete stores the hash
//! (release) before `Done = n`. The words of the last `4 * depth` operations are kept. Before a rank publishes
//! operation `n + depth`, it has loaded `Done >= n` from every peer, so from then on it finds each peer's hash of `n`.
//! A peer does not overwrite that hash before this rank has stored `Done >= n + 3 * depth`.
//!
//! **Mail.** With many ranks, a sender marks each message at the receiver: after the message is visible, it sets its
//! bit in the receiver's mail words (release). The receiver clears the bits (acquire) before it reads the envelopes of
//! their senders, so a later message sets its bit again. With few ranks, only a sender's first message to a rank sets a
//! bit; after that the receiver polls that sender.
//!
//! Of the words that this file handles, each has only one writer, except the mail words. No function here blocks: each
//! returns whether a step is possible yet.

use super::rank_set::RankSet;

/// A word of the segment that one rank writes and others read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    /// Tag of the slot that operation `n` uses at `rank`: the operation's number, 0 before the first. Written by `rank`
    /// after the payload (release), read by its peers (acquire).
    Tag { rank: usize, n: u64 },
    /// The highest `n` for which `rank` no longer reads any slot of operations up to `n`. Written by `rank` after its
    /// last such read (release), read by its peers before they overwrite their slots (acquire).
    Done(usize),
    /// In the slot of operation `n`: `n` when `rank` has done its part, 0 before. Written after the last access to a
    /// peer's tensor (release), read before the tensors are used again (acquire).
    Moved { rank: usize, n: u64 },
    /// In the slot of operation `n`: the number of chunks that `rank` has combined for the rank after it. Written after
    /// the chunk (release), read before the chunk is read and before the buffer is filled again (acquire).
    Folded { rank: usize, n: u64 },
    /// In the slot of operation `n`: the number of chunks of the result that `rank` has written. Written after the
    /// result (release), read before it is copied (acquire).
    Delivered { rank: usize, n: u64 },
    /// The hash of `rank`'s result of operation `n`, with a mark that distinguishes `n` from other operations that use
    /// the same word. Written when the result is complete on `rank` (release), read by peers later (acquire).
    Hash { rank: usize, n: u64 },
    /// For a region, the number of rounds that `rank` has filled. Written after filling (release), read before reading
    /// the buffer (acquire).
    Ready(Region, usize),
    /// For a region, the number of rounds that `rank` no longer reads. Written after reading (release), read before
    /// overwriting (acquire).
    Drained(Region, usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    Stage,
    Result,
}

/// Access to the words. `load` is an acquire load, `store` a release store.
pub trait Words {
    fn load(&self, word: Word) -> u64;
    fn store(&self, word: Word, value: u64);
}

/// One rank's view of the slots.
pub struct Slots {
    me: usize,
    ranks: usize,
    depth: u64,
    /// The last known `Done` of each peer. It is a lower bound, which is refreshed only when it is too low.
    known: Vec<u64>,
    /// This rank's `Done`.
    done: u64,
    /// Operations above `done` whose slots this rank no longer reads: bit `i` is operation `done + 1 + i`.
    finished: u128,
}

impl Slots {
    pub fn new(me: usize, ranks: usize, depth: u64) -> Slots {
        assert!(depth <= 128, "finished holds one bit an operation in flight");
        Slots { me, ranks, depth, known: vec![0; ranks], done: 0, finished: 0 }
    }

    /// True when this rank may write its slot for operation `n`.
    pub fn may_publish<W: Words>(&mut self, words: &W, n: u64) -> bool {
        let Some(last_user) = n.checked_sub(self.depth) else { return true };
        if self.done < last_user {
            return false;
        }
        for q in (0..self.ranks).filter(|q| *q != self.me) {
            if self.known[q] < last_user {
                self.known[q] = words.load(Word::Done(q));
                if self.known[q] < last_user {
                    return false;
                }
            }
        }
        true
    }

    /// True while `peer` prevents this rank from writing its slot for operation `n`.
    pub fn lacks_credit<W: Words>(&self, words: &W, peer: usize, n: u64) -> bool {
        n.checked_sub(self.depth).is_some_and(|last_user| words.load(Word::Done(peer)) < last_user)
    }

    /// Makes the slot visible to the peers. Payload and header must have been written before.
    pub fn publish<W: Words>(&self, words: &W, n: u64) {
        words.store(Word::Tag { rank: self.me, n }, n);
    }

    /// True when `rank` has published operation `n`, whose slot may then be read until `retire(n)`.
    pub fn is_published<W: Words>(words: &W, rank: usize, n: u64) -> bool {
        words.load(Word::Tag { rank, n }) == n
    }

    /// Returns the number up to which this rank has finished reading the slots of all operations.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Records that this rank no longer reads any slot of operation `n`.
    pub fn retire<W: Words>(&mut self, words: &W, n: u64) {
        debug_assert!(n > self.done && n - self.done <= 128);
        self.finished |= 1 << (n - self.done - 1);
        let run = self.finished.trailing_ones();
        if run > 0 {
            self.finished = self.finished.checked_shr(run).unwrap_or(0);
            self.done += u64::from(run);
            words.store(Word::Done(self.me), self.done);
        }
    }
}

/// Publishes that `me` has done its part of operation `n`.
pub fn moved<W: Words>(words: &W, me: usize, n: u64) {
    words.store(Word::Moved { rank: me, n }, n);
}

/// Whether `rank`, which has published operation `n`, has done its part of it.
pub fn has_moved<W: Words>(words: &W, rank: usize, n: u64) -> bool {
    words.load(Word::Moved { rank, n }) == n
}

/// The rank for which a rank of a relay must wait before it combines chunk `c` of operation `n`, which all ranks have
/// published: the rank before it, if that has not combined the chunk, or the rank after it, if that still reads the
/// buffer.
pub fn fold_waits_for<W: Words>(
    words: &W,
    before: Option<usize>,
    after: Option<usize>,
    n: u64,
    c: u64,
) -> Option<usize> {
    let has_folded = |rank: usize, chunks: u64| words.load(Word::Folded { rank, n }) >= chunks;
    before
        .filter(|rank| !has_folded(*rank, c + 1))
        .or_else(|| after.filter(|rank| !has_folded(*rank, c.saturating_sub(1))))
}

/// Publishes that `me` has combined chunk `c`.
pub fn folded<W: Words>(words: &W, me: usize, n: u64, c: u64) {
    words.store(Word::Folded { rank: me, n }, c + 1);
}

/// Whether chunk `c` of the result may be copied from the output of `rank`.
pub fn has_delivered<W: Words>(words: &W, rank: usize, n: u64, c: u64) -> bool {
    words.load(Word::Delivered { rank, n }) > c
}

/// Publishes that chunk `c` of the result is in the outputs of the node of `me`.
pub fn delivered<W: Words>(words: &W, me: usize, n: u64, c: u64) {
    words.store(Word::Delivered { rank: me, n }, c + 1);
}

/// Access to the words that show whether another rank has given up its operations.
pub trait Ends {
    /// Whether the group has failed or a rank has left it. Relaxed.
    fn is_over(&self) -> bool;
    /// Acquire fence: orders the loads before it before the loads after it.
    fn fence(&self);
}

/// Called after this rank has read peers' tensors. True if no rank had given up its part before those reads. A rank
/// that gives up stores this fact, followed by a fence, before its program changes a tensor. So if this rank has read
/// the change, it sees that store here.
pub fn was_whole<E: Ends>(ends: &E) -> bool {
    ends.fence();
    !ends.is_over()
}

/// Whether `rank` no longer reads the data that the buffer of round `g` held before. If so for all ranks, a peer may
/// fill the buffer.
pub fn has_read<W: Words>(words: &W, region: Region, rank: usize, g: u64) -> bool {
    g < 2 || words.load(Word::Drained(region, rank)) >= g - 1
}

/// True when `me` may fill its buffer for round `g`.
pub fn may_fill<W: Words>(words: &W, region: Region, me: usize, ranks: usize, g: u64) -> bool {
    (0..ranks).all(|q| q == me || has_read(words, region, q, g))
}

/// Publishes that `me` has filled round `g`.
pub fn filled<W: Words>(words: &W, region: Region, me: usize, g: u64) {
    words.store(Word::Ready(region, me), g + 1);
}

/// True when `rank` has filled round `g`, which may then be read until `drained(g)`.
pub fn is_ready<W: Words>(words: &W, region: Region, rank: usize, g: u64) -> bool {
    words.load(Word::Ready(region, rank)) > g
}

/// Publishes that `me` no longer reads any peer's buffer of rounds up to and including `g`.
pub fn drained<W: Words>(words: &W, region: Region, me: usize, g: u64) {
    words.store(Word::Drained(region, me), g + 1);
}

/// Whether a sender may fill the buffer of a channel for round `g` of its pair. `drained` is the pair's DRAINED word.
pub fn may_fill_body(g: u64, drained: u64) -> bool {
    g < 2 || drained >= g - 1
}

/// Access to the mail words.
pub trait Mail {
    /// Sets `bit` in a mail word of rank `to` (release).
    fn add(&self, to: usize, word: usize, bit: u64);
    /// Reads and clears a mail word of this rank (acquire).
    fn take(&self, word: usize) -> u64;
}

/// Sets the bit of `from` in the mail words of `to`. Must be called after the message is visible.
pub fn post<M: Mail>(mail: &M, to: usize, from: usize) {
    mail.add(to, from / 64, 1 << (from % 64));
}

/// Returns the ranks of a group of `ranks` ranks that have sent to this rank since the last call.
pub fn collect<M: Mail>(mail: &M, ranks: usize) -> RankSet {
    let mut senders = RankSet::default();
    for word in 0..ranks.div_ceil(64) {
        senders.add_word(word, mail.take(word));
    }
    senders
}
