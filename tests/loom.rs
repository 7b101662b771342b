//! Every interleaving of the shared-memory protocol, on loom's atomics: the code of `protocol.rs` and `signal.rs` itself.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release --test loom`. Payloads are loom cells, so a slot or a buffer that
//! is overwritten while somebody may still read it is reported as a data race.
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use sagellm::engine::shm::protocol::{self, Region, Slots, Word, Words};
use sagellm::engine::shm::signal::{self, Bell};

struct Memory {
    ranks: usize,
    depth: u64,
    tags: Vec<AtomicU64>,
    done: Vec<AtomicU64>,
    counters: Vec<AtomicU64>,
    slots: Vec<UnsafeCell<u64>>,
    stage: Vec<UnsafeCell<u64>>,
}

impl Memory {
    fn new(ranks: usize, depth: u64) -> Memory {
        let words = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect();
        let cells = |n: usize| (0..n).map(|_| UnsafeCell::new(0)).collect();
        Memory {
            ranks,
            depth,
            tags: words(ranks * depth as usize),
            done: words(ranks),
            counters: words(ranks * 4),
            slots: cells(ranks * depth as usize),
            stage: cells(ranks * 2),
        }
    }
    fn wait(&self, condition: impl FnMut() -> bool) -> bool {
        if self.ranks == 2 { until(condition) } else { a_few_times(condition) }
    }
    fn slot(&self, rank: usize, n: u64) -> &UnsafeCell<u64> {
        &self.slots[rank * self.depth as usize + (n % self.depth) as usize]
    }
    fn buffer(&self, rank: usize, g: u64) -> &UnsafeCell<u64> {
        &self.stage[rank * 2 + (g % 2) as usize]
    }
    fn at(&self, word: Word) -> &AtomicU64 {
        match word {
            Word::Tag { rank, n } => &self.tags[rank * self.depth as usize + (n % self.depth) as usize],
            Word::Done(rank) => &self.done[rank],
            Word::Ready(Region::Stage, rank) => &self.counters[rank * 4],
            Word::Drained(Region::Stage, rank) => &self.counters[rank * 4 + 1],
            Word::Ready(Region::Result, rank) => &self.counters[rank * 4 + 2],
            Word::Drained(Region::Result, rank) => &self.counters[rank * 4 + 3],
        }
    }
}

impl Words for Memory {
    fn load(&self, word: Word) -> u64 {
        self.at(word).load(Acquire)
    }
    fn store(&self, word: Word, value: u64) {
        self.at(word).store(value, Release);
    }
}

/// Waits as long as it takes. Only for two ranks: loom cannot tell three that spin from a livelock.
fn until(mut condition: impl FnMut() -> bool) -> bool {
    while !condition() {
        thread::yield_now();
    }
    true
}

/// Looks a few times and gives up, and the rank with it: what it did so far must be safe in every interleaving.
fn a_few_times(mut condition: impl FnMut() -> bool) -> bool {
    (0..3).any(|_| {
        let met = condition();
        if !met {
            thread::yield_now();
        }
        met
    })
}

fn write(cell: &UnsafeCell<u64>, value: u64) {
    // SAFETY: the protocol says that nobody else accesses the cell now; loom checks exactly that.
    cell.with_mut(|p| unsafe { *p = value });
}

fn read(cell: &UnsafeCell<u64>) -> u64 {
    // SAFETY: as above, for a read.
    cell.with(|p| unsafe { *p })
}

/// What a rank does in operation `n`: all exchange, or rank 0 only writes (a broadcast).
fn slots_program(memory: &Memory, me: usize, rooted: &[bool]) {
    let mut slots = Slots::new(me, memory.ranks, memory.depth);
    for (i, rooted) in rooted.iter().enumerate() {
        let n = i as u64 + 1;
        if !memory.wait(|| slots.may_publish(memory, n)) {
            return;
        }
        write(memory.slot(me, n), n * 10 + me as u64);
        slots.publish(memory, n);
        for q in (0..memory.ranks).filter(|q| *q != me && (!*rooted || *q == 0)) {
            if *rooted && me == 0 {
                continue;
            }
            if !memory.wait(|| Slots::is_published(memory, q, n)) {
                return;
            }
            assert_eq!(read(memory.slot(q, n)), n * 10 + q as u64, "a payload of another generation");
        }
        slots.retire(memory, n);
    }
}

fn run(ranks: usize, depth: u64, preemptions: usize, program: impl Fn(&Memory, usize) + Send + Sync + Copy + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_branches = 20_000; // waiting is spinning here
    model.check(move || {
        let memory = Arc::new(Memory::new(ranks, depth));
        let handles: Vec<_> = (1..ranks)
            .map(|rank| {
                let memory = memory.clone();
                thread::spawn(move || program(&memory, rank))
            })
            .collect();
        program(&memory, 0);
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
}

#[test]
fn slots_of_two_ranks_never_mix_generations() {
    run(2, 2, 2, |memory, me| slots_program(memory, me, &[false, false, false, false]));
}

#[test]
fn a_root_never_laps_its_reader() {
    run(2, 2, 3, |memory, me| slots_program(memory, me, &[true, true, true, false]));
}

#[test]
fn a_root_and_two_readers_never_mix_generations() {
    run(3, 1, 2, |memory, me| slots_program(memory, me, &[true, true]));
}

#[test]
fn operations_retired_out_of_order_hold_their_slots() {
    run(2, 2, 2, |memory, me| {
        let mut slots = Slots::new(me, 2, 2);
        for n in 1..=2u64 {
            write(memory.slot(me, n), n);
            slots.publish(memory, n);
        }
        for n in [2u64, 1] {
            until(|| Slots::is_published(memory, 1 - me, n));
            assert_eq!(read(memory.slot(1 - me, n)), n);
            slots.retire(memory, n);
        }
        until(|| slots.may_publish(memory, 3));
        write(memory.slot(me, 3), 3);
        slots.publish(memory, 3);
        until(|| Slots::is_published(memory, 1 - me, 3));
        assert_eq!(read(memory.slot(1 - me, 3)), 3);
        slots.retire(memory, 3);
    });
}

/// Rounds with two buffers: both fill and take, or only rank 0 fills.
fn rounds_program(memory: &Memory, me: usize, only_root: bool, rounds: u64) {
    let (mut fill, mut take) = (0, 0);
    let fills = !only_root || me == 0;
    let takes = !only_root || me != 0;
    if !takes {
        protocol::drained(memory, Region::Stage, me, rounds - 1);
    }
    memory.wait(|| {
        if fills && fill < rounds && protocol::may_fill(memory, Region::Stage, me, memory.ranks, fill) {
            write(memory.buffer(me, fill), fill * 10 + me as u64);
            protocol::filled(memory, Region::Stage, me, fill);
            fill += 1;
        }
        if takes && take < rounds && (!fills || fill > take) {
            let from = |q: usize| q != me && (!only_root || q == 0);
            if (0..memory.ranks).all(|q| !from(q) || protocol::is_ready(memory, Region::Stage, q, take)) {
                for q in (0..memory.ranks).filter(|q| from(*q)) {
                    assert_eq!(read(memory.buffer(q, take)), take * 10 + q as u64, "a round of another generation");
                }
                protocol::drained(memory, Region::Stage, me, take);
                take += 1;
            }
        }
        (!fills || fill == rounds) && (!takes || take == rounds)
    });
}

#[test]
fn rounds_of_two_ranks_never_mix_generations() {
    run(2, 1, 3, |memory, me| rounds_program(memory, me, false, 4));
}

#[test]
fn rounds_filled_by_a_root_never_overtake_the_reader() {
    run(2, 1, 3, |memory, me| rounds_program(memory, me, true, 4));
}

#[test]
fn rounds_of_three_ranks() {
    run(3, 1, 2, |memory, me| rounds_program(memory, me, true, 3));
}

/// The doors, with the kernel's futex as a lock and a condition variable: it compares and sleeps in one step.
struct House {
    news: AtomicU64,
    door: AtomicU32,
    asleep: AtomicU32,
    sleepers: AtomicU32,
    kernel: Mutex<()>,
    queue: Condvar,
}

impl Bell for House {
    fn door(&self, _: usize) -> u32 {
        self.door.load(Acquire)
    }
    fn ring(&self, _: usize) {
        self.door.fetch_add(1, Release);
        let _kernel = self.kernel.lock().unwrap();
        self.queue.notify_all();
    }
    fn asleep(&self, _: usize) -> u32 {
        self.asleep.load(Relaxed)
    }
    fn sleepers(&self) -> u32 {
        self.sleepers.load(Relaxed)
    }
    fn count_sleeper(&self, _: usize, more: bool) {
        let delta = if more { 1 } else { u32::MAX };
        self.asleep.fetch_add(delta, Relaxed);
        self.sleepers.fetch_add(delta, Relaxed);
    }
    fn fence(&self) {
        fence(SeqCst);
    }
}

impl House {
    /// Sleeps without a timeout: a missed wake is a deadlock, which loom reports.
    fn futex_wait(&self, value: u32) {
        let mut kernel = self.kernel.lock().unwrap();
        while self.door.load(Relaxed) == value {
            kernel = self.queue.wait(kernel).unwrap();
        }
    }
}

#[test]
fn a_sleeper_never_misses_the_news() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let house = Arc::new(House {
            news: AtomicU64::new(0),
            door: AtomicU32::new(0),
            asleep: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            kernel: Mutex::new(()),
            queue: Condvar::new(),
        });
        let publisher = {
            let house = house.clone();
            thread::spawn(move || {
                for n in 1..=2 {
                    house.news.store(n, Release);
                    signal::announce(&*house, 1);
                }
            })
        };
        for n in 1..=2 {
            while house.news.load(Acquire) < n {
                let value = signal::lie_down(&*house, 0);
                if house.news.load(Acquire) < n {
                    house.futex_wait(value);
                }
                signal::get_up(&*house, 0);
            }
        }
        publisher.join().unwrap();
        assert_eq!(house.sleepers.load(Relaxed), 0);
    });
}
