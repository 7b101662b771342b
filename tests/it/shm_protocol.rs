//! Tests the protocol of the shared memory with 4 and 8 ranks under random schedules: `protocol.rs`, `p2p/channels.rs`
//! and `event_count.rs` themselves. At each access to one of their words a different rank may run.
//!
//! What this does not show: shuttle runs all accesses in one order, so this test does not find an access that is
//! relaxed but should be a release or an acquire. `tests/loom.rs` has the memory model for 2 and 3 ranks, and Miri runs
//! the engine's own words under that model (`shm_engine.rs`). `shm_engine.rs` tests the whole engine, but switches
//! ranks only at its fault points.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use shuttle::sync::atomic::{AtomicU32 as SharedWord, AtomicU64 as Shared};
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread::yield_now;

use crate::common::schedules::{ranks, under_schedules};
use sagellm::engine::shm::p2p::channels::Channels;
use sagellm::engine::shm::protocol;
use sagellm::engine::shm::protocol::{Mail, Region, Slots, Word, Words};
use sagellm::os::event_count;
use sagellm::os::event_count::WakeWords;

const ORDER: Ordering = Ordering::SeqCst; // the only order that shuttle has

/// A payload: another rank may run in the middle of each access, and accesses that overlap fail the test unless all
/// read.
#[derive(Default)]
struct Cell {
    value: AtomicU64,
    /// Number of ranks that read the payload now, or -1 while a rank writes it.
    users: AtomicI64,
    middle: Shared,
}

impl Cell {
    fn write(&self, value: u64) {
        assert_eq!(self.users.swap(-1, ORDER), 0, "written while another rank uses it");
        self.middle.load(ORDER);
        self.value.store(value, ORDER);
        self.users.store(0, ORDER);
    }

    fn read(&self) -> u64 {
        assert!(self.users.fetch_add(1, ORDER) >= 0, "read while another rank writes it");
        self.middle.load(ORDER);
        let value = self.value.load(ORDER);
        self.users.fetch_sub(1, ORDER);
        value
    }
}

fn made<T: Default>(count: usize) -> Vec<T> {
    (0..count).map(|_| T::default()).collect()
}

struct Memory {
    ranks: usize,
    depth: u64,
    tags: Vec<Shared>,
    moved: Vec<Shared>,
    done: Vec<Shared>,
    counters: Vec<Shared>,
    mail: Vec<Shared>,
    slots: Vec<Cell>,
    stage: Vec<Cell>,
    result: Vec<Cell>,
}

impl Memory {
    fn new(ranks: usize, depth: u64) -> Memory {
        let slots = ranks * depth as usize;
        Memory {
            ranks,
            depth,
            tags: made(slots),
            moved: made(slots),
            done: made(ranks),
            counters: made(ranks * 4),
            mail: made(ranks),
            slots: made(slots),
            stage: made(ranks * 2),
            result: made(ranks * 2),
        }
    }

    fn slot(&self, rank: usize, n: u64) -> usize {
        rank * self.depth as usize + (n % self.depth) as usize
    }

    fn at(&self, word: Word) -> &Shared {
        match word {
            Word::Tag { rank, n } => &self.tags[self.slot(rank, n)],
            Word::Moved { rank, n } => &self.moved[self.slot(rank, n)],
            Word::Folded { rank, .. } => &self.counters[rank * 4],
            Word::Delivered { rank, .. } => &self.counters[rank * 4 + 1],
            Word::Hash { .. } => unreachable!("no program here compares results"),
            Word::Done(rank) => &self.done[rank],
            Word::Ready(Region::Stage, rank) => &self.counters[rank * 4],
            Word::Drained(Region::Stage, rank) => &self.counters[rank * 4 + 1],
            Word::Ready(Region::Result, rank) => &self.counters[rank * 4 + 2],
            Word::Drained(Region::Result, rank) => &self.counters[rank * 4 + 3],
        }
    }

    fn others(&self, me: usize) -> impl Iterator<Item = usize> + Clone {
        (0..self.ranks).filter(move |rank| *rank != me)
    }
}

impl Words for Memory {
    fn load(&self, word: Word) -> u64 {
        self.at(word).load(ORDER)
    }
    fn store(&self, word: Word, value: u64) {
        self.at(word).store(value, ORDER);
    }
}

/// The mail words as rank `.1` uses them.
struct Mailbox<'a>(&'a Memory, usize);

impl Mail for Mailbox<'_> {
    fn add(&self, to: usize, _: usize, bit: u64) {
        self.0.mail[to].fetch_or(bit, ORDER);
    }
    fn take(&self, _: usize) -> u64 {
        self.0.mail[self.1].swap(0, ORDER)
    }
}

fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        yield_now();
    }
}

/// Runs `program(memory, rank)` on each rank of 4 and of 8.
fn with_many_ranks(schedules: u64, depth: u64, program: impl Fn(&Memory, usize) + Send + Sync + Copy + 'static) {
    for count in [4, 8] {
        under_schedules(schedules, move || {
            let memory = Arc::new(Memory::new(count, depth));
            ranks(count, move |me| program(&memory, me));
        });
    }
}

/// Returns what rank `rank` writes for operation or round `n`.
fn payload(rank: usize, n: u64) -> u64 {
    n * 100 + rank as u64
}

/// Writes and publishes the slot of operation `n`.
fn publish(memory: &Memory, slots: &mut Slots, me: usize, n: u64) {
    until(|| slots.may_publish(memory, n));
    memory.slots[memory.slot(me, n)].write(payload(me, n));
    slots.publish(memory, n);
}

/// Reads the slots of operation `n` from these ranks, and retires the operation.
fn finish(memory: &Memory, slots: &mut Slots, n: u64, from: impl Iterator<Item = usize>) {
    for rank in from {
        until(|| Slots::is_published(memory, rank, n));
        assert_eq!(memory.slots[memory.slot(rank, n)].read(), payload(rank, n), "a payload of another operation");
    }
    slots.retire(memory, n);
}

#[test]
fn slots_of_many_ranks_never_mix_operations() {
    with_many_ranks(200, 2, |memory, me| {
        let mut slots = Slots::new(me, memory.ranks, memory.depth);
        for n in 1..=7 {
            publish(memory, &mut slots, me, n);
            // Some operations have a root, which reads nothing and may run ahead as far as the credits allow.
            let root = (n % 3 != 0).then_some((n / 2) as usize % memory.ranks);
            finish(memory, &mut slots, n, memory.others(me).filter(|q| root.is_none_or(|r| r == *q && r != me)));
        }
    });
}

/// Several operations are in flight, and end in a different order from that in which they were published.
#[test]
fn operations_of_many_ranks_that_end_in_any_order_hold_their_slots() {
    with_many_ranks(200, 4, |memory, me| {
        let mut slots = Slots::new(me, memory.ranks, memory.depth);
        for first in [1u64, 4, 7] {
            (first..first + 3).for_each(|n| publish(memory, &mut slots, me, n));
            for n in [[2, 0, 1], [1, 2, 0], [2, 1, 0]][me % 3].map(|more| first + more) {
                finish(memory, &mut slots, n, memory.others(me));
            }
        }
    });
}

/// Rounds of all_reduce: fill a stage buffer, take a slice of all others into the result, collect the others' results.
#[test]
fn rounds_of_many_ranks_never_mix_rounds() {
    with_many_ranks(150, 1, |memory, me| {
        const ROUNDS: u64 = 6;
        let (mut fill, mut take, mut collect) = (0, 0, 0);
        let buffer = |rank: usize, g: u64| rank * 2 + (g % 2) as usize;
        until(|| {
            if fill < ROUNDS && protocol::may_fill(memory, Region::Stage, me, memory.ranks, fill) {
                memory.stage[buffer(me, fill)].write(payload(me, fill));
                protocol::filled(memory, Region::Stage, me, fill);
                fill += 1;
            }
            let stage = |q| protocol::is_ready(memory, Region::Stage, q, take);
            let room = || protocol::may_fill(memory, Region::Result, me, memory.ranks, take);
            if take < fill && memory.others(me).all(stage) && room() {
                for q in memory.others(me) {
                    assert_eq!(memory.stage[buffer(q, take)].read(), payload(q, take), "a part of another round");
                }
                memory.result[buffer(me, take)].write(payload(me, take));
                protocol::drained(memory, Region::Stage, me, take);
                protocol::filled(memory, Region::Result, me, take);
                take += 1;
            }
            if collect < take && memory.others(me).all(|q| protocol::is_ready(memory, Region::Result, q, collect)) {
                for q in memory.others(me) {
                    let found = memory.result[buffer(q, collect)].read();
                    assert_eq!(found, payload(q, collect), "a result of another round");
                }
                protocol::drained(memory, Region::Result, me, collect);
                collect += 1;
            }
            collect == ROUNDS
        });
    });
}

/// The tensor of a rank is one cell, which every other rank reads to compute its part.
#[test]
fn parts_of_many_ranks_never_overlap_the_next_operation() {
    with_many_ranks(150, 2, |memory, me| {
        let mut slots = Slots::new(me, memory.ranks, memory.depth);
        for n in 1..=4 {
            // The tensor of this rank changes as soon as its operation has ended: no peer may still read it.
            memory.stage[me].write(payload(me, n));
            until(|| slots.may_publish(memory, n));
            memory.at(Word::Moved { rank: me, n }).store(0, ORDER);
            slots.publish(memory, n);
            until(|| memory.others(me).all(|q| Slots::is_published(memory, q, n)));
            for q in memory.others(me) {
                assert_eq!(memory.stage[q].read(), payload(q, n), "a tensor of another operation");
            }
            protocol::moved(memory, me, n);
            until(|| memory.others(me).all(|q| protocol::has_moved(memory, q, n)));
            slots.retire(memory, n);
        }
    });
}

/// A sum that is made node by node, with two ranks on each node. Each rank adds to five chunks from the stage of the rank
/// before it. It writes the sums into its own stage or, on the last node, into its output, whose chunks are cells of its
/// slots. Then it copies the result from the output of the rank after it into its own.
#[test]
fn chunks_of_a_relay_of_many_ranks_are_never_mixed() {
    const CHUNKS: u64 = 5;
    with_many_ranks(400, CHUNKS, |memory, me| {
        let (before, after) = (me.checked_sub(2), (me + 2 < memory.ranks).then_some(me + 2));
        let expected = |rank: usize, c: u64| (0..=rank / 2).map(|node| (node as u64 + 1) * 1000 + c).sum::<u64>();
        let [mut folded, mut delivered] = [0, 0];
        until(|| {
            if folded < CHUNKS && protocol::fold_waits_for(memory, before, after, 1, folded).is_none() {
                let c = folded;
                let sum = before.map_or(0, |rank| memory.stage[rank * 2 + (c % 2) as usize].read());
                let sum = sum + (me as u64 / 2 + 1) * 1000 + c;
                assert_eq!(sum, expected(me, c), "rank {me}: the sums of another chunk");
                match after {
                    Some(_) => memory.stage[me * 2 + (c % 2) as usize].write(sum),
                    None => memory.slots[memory.slot(me, c)].write(sum),
                }
                protocol::folded(memory, me, 1, c);
                if after.is_none() {
                    protocol::delivered(memory, me, 1, c);
                    delivered += 1;
                }
                folded += 1;
            } else if let Some(after) =
                after.filter(|rank| delivered < CHUNKS && protocol::has_delivered(memory, *rank, 1, delivered))
            {
                let result = memory.slots[memory.slot(after, delivered)].read();
                assert_eq!(result, expected(memory.ranks - 1, delivered), "rank {me}: another result");
                memory.slots[memory.slot(me, delivered)].write(result);
                protocol::delivered(memory, me, 1, delivered);
                delivered += 1;
            }
            folded == CHUNKS && delivered == CHUNKS
        });
    });
}

/// If a rank ends at any moment, the others see only whole payloads: they finish all operations that it has published,
/// and wait in vain only for later ones.
#[test]
fn a_rank_that_ends_leaves_whole_payloads() {
    for count in [4, 8] {
        under_schedules(150, move || {
            let memory = Arc::new(Memory::new(count, 2));
            let last = Arc::new(AtomicU64::new(0));
            let ended = ranks(count, move |me| {
                let mut slots = Slots::new(me, count, 2);
                for n in 1..=6 {
                    // The last rank ends before it publishes operation 4. Operations up to 3 end everywhere. There are
                    // two slots, so the others can publish 4 and 5, but not 6.
                    if me == count - 1 && n == 4 {
                        last.store(1, ORDER);
                        return n - 1;
                    }
                    let over = || {
                        last.load(ORDER) == 1 && {
                            let gone = count - 1;
                            !Slots::is_published(&*memory, gone, n) && n >= 4
                        }
                    };
                    until(|| slots.may_publish(&*memory, n) || over());
                    if !slots.may_publish(&*memory, n) {
                        return n - 1;
                    }
                    memory.slots[memory.slot(me, n)].write(payload(me, n));
                    slots.publish(&*memory, n);
                    for q in memory.others(me) {
                        until(|| Slots::is_published(&*memory, q, n) || over());
                        if !Slots::is_published(&*memory, q, n) {
                            return n - 1;
                        }
                        assert_eq!(memory.slots[memory.slot(q, n)].read(), payload(q, n));
                    }
                    slots.retire(&*memory, n);
                }
                unreachable!("operation 4 lacks a rank");
            });
            assert_eq!(ended, vec![3; count]);
        });
    }
}

/// All ranks send to rank 0, which has fewer channels than senders, in rounds through the channels that it lends.
#[test]
fn channels_pass_among_many_senders_without_mixing_messages() {
    const ROUNDS: u64 = 3;
    const MESSAGES: u64 = 2;
    for count in [4, 8] {
        under_schedules(150, move || {
            struct Pair {
                grants: Shared,
                channel: Shared,
                ready: Shared,
                drained: Shared,
            }
            let zero = || Shared::new(0);
            let pairs: Vec<Pair> =
                (0..count).map(|_| Pair { grants: zero(), channel: zero(), ready: zero(), drained: zero() }).collect();
            let bodies: Vec<Cell> = made(2 * 2);
            let memory = Memory::new(count, 1);
            ranks(count, move |me| {
                if me != 0 {
                    protocol::post(&Mailbox(&memory, me), 0, me);
                    for message in 0..MESSAGES {
                        until(|| pairs[me].grants.load(ORDER) > message);
                        let channel = pairs[me].channel.load(ORDER) as usize;
                        for g in message * ROUNDS..(message + 1) * ROUNDS {
                            until(|| protocol::may_fill_body(g, pairs[me].drained.load(ORDER)));
                            bodies[channel * 2 + (g % 2) as usize].write(payload(me, g));
                            pairs[me].ready.store(g + 1, ORDER);
                        }
                    }
                    return;
                }
                let mut channels = Channels::new(2, count);
                let mut known = vec![false; count];
                let (mut granted, mut round) = (vec![0u64; count], vec![0u64; count]);
                until(|| {
                    protocol::collect(&Mailbox(&memory, 0), count).iter().for_each(|sender| known[sender] = true);
                    for q in (1..count).filter(|q| known[*q]) {
                        // Grants one message at a time, so that the sender finds the channel of the grant.
                        let next = granted[q] < MESSAGES && granted[q] * ROUNDS == round[q];
                        if next && let Some(channel) = channels.lend(q) {
                            pairs[q].channel.store(channel as u64, ORDER);
                            granted[q] += 1;
                            pairs[q].grants.store(granted[q], ORDER);
                        }
                        let g = round[q];
                        if pairs[q].ready.load(ORDER) > g {
                            let channel = channels.of(q).expect("it was lent");
                            assert_eq!(bodies[channel * 2 + (g % 2) as usize].read(), payload(q, g), "another message");
                            round[q] += 1;
                            pairs[q].drained.store(round[q], ORDER);
                            if round[q].is_multiple_of(ROUNDS) {
                                channels.give_back(q);
                            }
                        }
                    }
                    round[1..].iter().all(|rounds| *rounds == MESSAGES * ROUNDS)
                });
            });
        });
    }
}

/// The wake words of all ranks. A lock and a condition variable take the place of the kernel's futex.
struct Doors {
    news: Vec<Shared>,
    wakes: Vec<SharedWord>,
    asleep: Vec<SharedWord>,
    sleepers: SharedWord,
    kernel: Mutex<()>,
    queue: Condvar,
}

impl WakeWords for Doors {
    fn wake_count(&self, rank: usize) -> u32 {
        self.wakes[rank].load(ORDER)
    }
    fn wake(&self, rank: usize) {
        self.wakes[rank].fetch_add(1, ORDER);
        let _kernel = self.kernel.lock().unwrap();
        self.queue.notify_all();
    }
    fn asleep(&self, rank: usize) -> u32 {
        self.asleep[rank].load(ORDER)
    }
    fn sleepers(&self) -> u32 {
        self.sleepers.load(ORDER)
    }
    fn count_sleeper(&self, me: usize, more: bool) {
        let delta = if more { 1 } else { u32::MAX };
        self.asleep[me].fetch_add(delta, ORDER);
        self.sleepers.fetch_add(delta, ORDER);
    }
    fn fence(&self) {}
}

/// A sleep has no timeout here: if a wake is missed, all ranks sleep, which shuttle reports.
#[test]
fn many_sleepers_miss_no_news() {
    for count in [4, 8] {
        under_schedules(150, move || {
            let doors = Arc::new(Doors {
                news: made(count),
                wakes: made(count),
                asleep: made(count),
                sleepers: SharedWord::new(0),
                kernel: Mutex::new(()),
                queue: Condvar::new(),
            });
            ranks(count, move |me| {
                for n in 1..=3 {
                    doors.news[me].store(n, ORDER);
                    event_count::announce(&*doors, count);
                    let all = || doors.news.iter().all(|news| news.load(ORDER) >= n);
                    while !all() {
                        let value = event_count::prepare_wait(&*doors, me);
                        if !all() {
                            let mut kernel = doors.kernel.lock().unwrap();
                            while doors.wakes[me].load(ORDER) == value {
                                kernel = doors.queue.wait(kernel).unwrap();
                            }
                        }
                        event_count::finish_wait(&*doors, me);
                    }
                }
            });
        });
    }
}
