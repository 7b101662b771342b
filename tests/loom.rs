//! Every interleaving of the shared-memory protocol, on loom's atomics: the code of `protocol.rs` and `event_count.rs`
//! itself.
//!
//! Run with `cargo test --test loom`. Payloads are loom cells, so a slot or a buffer that is overwritten while a rank
//! may still read it is reported as a data race.

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use sagellm::engine::shm::p2p::channels::Channels;
use sagellm::engine::shm::protocol;
use sagellm::engine::shm::protocol::{Ends, Mail, Region, Slots, Word, Words};
use sagellm::os::event_count;
use sagellm::os::event_count::WakeWords;

struct Memory {
    ranks: usize,
    depth: u64,
    tags: Vec<AtomicU64>,
    done: Vec<AtomicU64>,
    hashes: Vec<AtomicU64>,
    moved: Vec<AtomicU64>,
    folded: Vec<AtomicU64>,
    delivered: Vec<AtomicU64>,
    over: AtomicU64,
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
            hashes: words(ranks * depth as usize * 4),
            moved: words(ranks * depth as usize),
            folded: words(ranks),
            delivered: words(ranks),
            over: AtomicU64::new(0),
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
            Word::Moved { rank, n } => &self.moved[rank * self.depth as usize + (n % self.depth) as usize],
            Word::Folded { rank, .. } => &self.folded[rank],
            Word::Delivered { rank, .. } => &self.delivered[rank],
            Word::Hash { rank, n } => {
                let kept = self.depth as usize * 4;
                &self.hashes[rank * kept + n as usize % kept]
            }
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

impl Ends for Memory {
    fn is_over(&self) -> bool {
        self.over.load(Relaxed) != 0
    }
    fn fence(&self) {
        fence(Acquire);
    }
}

/// Waits as long as it takes. Only for two ranks, because loom cannot tell three spinning ranks from a livelock.
fn until(mut condition: impl FnMut() -> bool) -> bool {
    while !condition() {
        thread::yield_now();
    }
    true
}

/// Checks the condition a few times, then gives up. The calling rank then gives up too: what it did so far must be safe
/// in every interleaving.
fn a_few_times(condition: impl FnMut() -> bool) -> bool {
    some_times(3, condition)
}

fn some_times(times: usize, mut condition: impl FnMut() -> bool) -> bool {
    (0..times).any(|_| {
        let met = condition();
        if !met {
            thread::yield_now();
        }
        met
    })
}

fn write(cell: &UnsafeCell<u64>, value: u64) {
    // SAFETY: the protocol says that no other thread accesses the cell now; loom checks exactly that.
    cell.with_mut(|p| unsafe { *p = value });
}

fn read(cell: &UnsafeCell<u64>) -> u64 {
    // SAFETY: as above, for a read.
    cell.with(|p| unsafe { *p })
}

/// Runs a rank's part of the operations, one for each element of `rooted`: all ranks exchange data or, if it is true,
/// rank 0 only writes (a broadcast).
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

/// Runs two operations of two ranks on each other's tensors. A tensor of rank `q` is two cells, `2 q` and `2 q + 1`.
/// The slice of rank `r` is cell `r` of each tensor: it reads both cells and writes both.
fn parts_program(memory: &Memory, me: usize) {
    let mut slots = Slots::new(me, 2, memory.depth);
    for n in 1..=2 {
        for slice in 0..2 {
            write(&memory.stage[2 * me + slice], n * 10 + me as u64);
        }
        until(|| slots.may_publish(memory, n));
        memory.moved[me * memory.depth as usize + (n % memory.depth) as usize].store(0, Relaxed);
        slots.publish(memory, n);
        until(|| Slots::is_published(memory, 1 - me, n));
        let sum = read(&memory.stage[me]) + read(&memory.stage[2 + me]);
        (0..2).for_each(|q| write(&memory.stage[2 * q + me], sum));
        assert!(protocol::was_whole(memory));
        protocol::moved(memory, me, n);
        until(|| protocol::has_moved(memory, 1 - me, n));
        slots.retire(memory, n);
        for slice in 0..2 {
            assert_eq!(read(&memory.stage[2 * me + slice]), n * 20 + 1, "a result of another operation");
        }
    }
}

#[test]
fn parts_of_two_ranks_never_overlap_the_next_operation() {
    run(2, 2, 2, parts_program);
}

/// One operation of two ranks on two nodes, in as many chunks as a rank has slots, with one chunk more than the stage has
/// buffers. Rank 0 combines each chunk into its stage, rank 1 continues from there into its output (slot `c` of rank 1),
/// and rank 0 copies the result into its own output.
fn relay_program(memory: &Memory, me: usize) {
    let (n, chunks) = (1, memory.depth);
    let [mut folded, mut delivered] = [0, 0];
    let mut fold = |c: u64| {
        if me == 0 {
            write(memory.buffer(0, c), 10 + c);
        } else {
            let sum = read(memory.buffer(0, c)) + 100;
            write(memory.slot(1, c), sum);
        }
        protocol::folded(memory, me, n, c);
        if me == 1 {
            protocol::delivered(memory, 1, n, c);
        }
    };
    let links = if me == 0 { (None, Some(1)) } else { (Some(0), None) };
    until(|| {
        if folded < chunks && protocol::fold_waits_for(memory, links.0, links.1, n, folded).is_none() {
            fold(folded);
            folded += 1;
        } else if me == 0 && delivered < chunks && protocol::has_delivered(memory, 1, n, delivered) {
            let result = read(memory.slot(1, delivered));
            assert_eq!(result, 110 + delivered, "a chunk of another round");
            write(memory.slot(0, delivered), result);
            delivered += 1;
        }
        folded == chunks && (me == 1 || delivered == chunks)
    });
}

#[test]
fn chunks_of_a_relay_are_read_before_their_buffer_is_filled_again() {
    run(2, 3, 3, relay_program);
}

/// Rank 1 gives up after its part was done, as at a deadline, and then its program changes the tensor. Rank 0 may come
/// at any time. Its operation either does not end or has read the unchanged tensor.
#[test]
fn a_tensor_that_a_rank_changed_after_it_gave_up_is_never_taken_for_its_input() {
    run(2, 2, 3, |memory, me| {
        // The accesses to these cells race by design, so the cells are atomic words.
        let tensor = &memory.counters[0];
        if me == 1 {
            tensor.store(7, Relaxed);
            protocol::moved(memory, 1, 1);
            memory.over.store(1, Release);
            fence(SeqCst);
            tensor.store(8, Relaxed);
            return;
        }
        if a_few_times(|| protocol::has_moved(memory, 1, 1)) {
            let found = tensor.load(Relaxed);
            if protocol::was_whole(memory) {
                assert_eq!(found, 7, "what rank 1 wrote after it had given up");
            }
        }
    });
}

/// Rank 0 sends two messages that rank 1 reads in place, and gives the second one up at any time. Rank 0 changes the
/// tensor when rank 1 has drained the round, or after rank 0 gave up; in the second case rank 1 finds out that rank 0
/// gave up.
#[test]
fn a_message_read_in_place_ends_before_its_tensor_changes() {
    run(2, 2, 3, |memory, me| {
        let (ready, drained) = (Word::Ready(Region::Stage, 0), Word::Drained(Region::Stage, 1));
        // The tensor is an atomic word, because the accesses race if rank 0 gives up.
        let tensor = &memory.tags[0];
        if me == 0 {
            tensor.store(7, Relaxed);
            memory.store(ready, 1);
            until(|| memory.load(drained) >= 1);
            tensor.store(8, Relaxed);
            memory.store(ready, 2);
            if !a_few_times(|| memory.load(drained) >= 2) {
                memory.over.store(1, Release);
                fence(SeqCst);
            }
            tensor.store(9, Relaxed);
            return;
        }
        for round in 1..=2 {
            until(|| memory.load(ready) >= round);
            let found = tensor.load(Relaxed);
            if !protocol::was_whole(memory) {
                return;
            }
            assert_eq!(found, 6 + round, "what rank 0 wrote after the message");
            memory.store(drained, round);
        }
    });
}

/// Both ranks copy a message of two ranges from rank 0's tensor into rank 1's output (`p2p/shares.rs`). Nobody copies a
/// range twice. When the receive ends, the output is complete; when the send ends, nobody reads the tensor.
#[test]
fn a_message_that_both_ranks_copy_is_complete_when_it_ends() {
    const RANGES: u64 = 2;
    run(2, 2, 3, |memory, me| {
        let (ready, drained) = (Word::Ready(Region::Stage, 0), Word::Drained(Region::Stage, 1));
        // The tensor has the cells of rank 0, the output those of rank 1.
        let (claimed, home, sent) = (&memory.tags[0], &memory.tags[1], &memory.tags[2]);
        let copy = || {
            let range = claimed.fetch_add(1, Relaxed);
            if range >= RANGES {
                return false;
            }
            let value = read(memory.buffer(0, range));
            write(memory.buffer(1, range), value);
            true
        };
        let mut copied = 0;
        if me == 0 {
            for range in 0..RANGES {
                write(memory.buffer(0, range), 7 + range);
            }
            memory.store(ready, 1);
            if a_few_times(|| home.load(Acquire) != 0) {
                while copy() {
                    copied += 1;
                    sent.store(copied, Release);
                }
            }
            until(|| memory.load(drained) >= 1);
            for range in 0..RANGES {
                write(memory.buffer(0, range), 9);
            }
            return;
        }
        for range in 0..RANGES {
            write(memory.buffer(1, range), 1);
        }
        until(|| memory.load(ready) >= 1);
        home.store(1, Release);
        while copy() {
            copied += 1;
        }
        until(|| copied + sent.load(Acquire) >= RANGES);
        memory.store(drained, 1);
        for range in 0..RANGES {
            assert_eq!(read(memory.buffer(1, range)), 7 + range);
        }
    });
}

#[test]
fn slots_of_two_ranks_never_mix_generations() {
    run(2, 2, 2, |memory, me| slots_program(memory, me, &[false, false, false, false]));
}

/// Each rank publishes its hash of an operation before it retires the operation. Before a rank uses a slot again, it
/// reads the peer's hash of the operation that used the slot before; this hash must be there.
#[test]
fn the_hash_of_an_operation_is_there_before_its_slot_is_used_again_and_is_not_overwritten() {
    run(2, 1, 2, |memory, me| {
        let mut slots = Slots::new(me, 2, 1);
        for n in 1..=6u64 {
            until(|| slots.may_publish(memory, n));
            if n > 1 {
                assert_eq!(memory.load(Word::Hash { rank: 1 - me, n: n - 1 }), n - 1, "the hash of another operation");
            }
            slots.publish(memory, n);
            until(|| Slots::is_published(memory, 1 - me, n));
            memory.store(Word::Hash { rank: me, n }, n);
            slots.retire(memory, n);
        }
    });
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

/// The wake words. A lock and a condition variable take the place of the kernel's futex, which compares and sleeps in
/// one step.
struct House {
    news: AtomicU64,
    wake_count: AtomicU32,
    asleep: AtomicU32,
    sleepers: AtomicU32,
    kernel: Mutex<()>,
    queue: Condvar,
}

impl WakeWords for House {
    fn wake_count(&self, _: usize) -> u32 {
        self.wake_count.load(Acquire)
    }
    fn wake(&self, _: usize) {
        self.wake_count.fetch_add(1, Release);
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
        while self.wake_count.load(Relaxed) == value {
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
            wake_count: AtomicU32::new(0),
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
                    event_count::announce(&*house, 1);
                }
            })
        };
        for n in 1..=2 {
            while house.news.load(Acquire) < n {
                let value = event_count::prepare_wait(&*house, 0);
                if house.news.load(Acquire) < n {
                    house.futex_wait(value);
                }
                event_count::finish_wait(&*house, 0);
            }
        }
        publisher.join().unwrap();
        assert_eq!(house.sleepers.load(Relaxed), 0);
    });
}

// Which thread drives, and which event wakes which thread: `roles.rs` and `event_count.rs` as `driver.rs` calls them.
// There are two groups, each with a peer that publishes one piece of news; threads that wait; and the progress thread.

use sagellm::os::event_count::Listening;
use sagellm::progress::roles;
use sagellm::progress::roles::Driving;

/// The kernel's futexes: a sleep on several words ends when one of them changes.
struct Kernel {
    lock: Mutex<()>,
    queue: Condvar,
}

/// An event count: `WakeWords` with a kernel that all share.
struct Count {
    word: AtomicU32,
    sleepers: AtomicU32,
    kernel: Arc<Kernel>,
}

impl Count {
    fn new(kernel: &Arc<Kernel>) -> Count {
        Count { word: AtomicU32::new(0), sleepers: AtomicU32::new(0), kernel: kernel.clone() }
    }
}

impl WakeWords for Count {
    fn wake_count(&self, _: usize) -> u32 {
        self.word.load(Acquire)
    }
    fn wake(&self, _: usize) {
        self.word.fetch_add(1, Release);
        let _kernel = self.kernel.lock.lock().unwrap();
        self.kernel.queue.notify_all();
    }
    fn asleep(&self, _: usize) -> u32 {
        self.sleepers.load(Relaxed)
    }
    fn sleepers(&self) -> u32 {
        self.sleepers.load(Relaxed)
    }
    fn count_sleeper(&self, _: usize, more: bool) {
        self.sleepers.fetch_add(if more { 1 } else { u32::MAX }, Relaxed);
    }
    fn fence(&self) {
        fence(SeqCst);
    }
}

/// A group with one operation: issued here, published by a peer, advanced by the driving thread.
struct Party {
    wake_count: Count,
    issued: AtomicU32,
    published: AtomicU32,
    done: AtomicU32,
}

struct Rank {
    kernel: Arc<Kernel>,
    work: Count,
    ended: Count,
    pending: AtomicU32,
    drivers: AtomicU32,
    stopping: AtomicU32,
    groups: Vec<Party>,
}

impl roles::Words for Rank {
    type Work = Count;
    fn work(&self) -> &Count {
        &self.work
    }
    fn pending(&self) -> usize {
        self.pending.load(Relaxed) as usize
    }
    fn drivers(&self) -> usize {
        self.drivers.load(Relaxed) as usize
    }
    fn count_driver(&self, more: bool) {
        self.drivers.fetch_add(if more { 1 } else { u32::MAX }, Relaxed);
    }
    fn stopping(&self) -> bool {
        self.stopping.load(Relaxed) != 0
    }
}

impl Rank {
    fn new(groups: usize) -> Arc<Rank> {
        let kernel = Arc::new(Kernel { lock: Mutex::new(()), queue: Condvar::new() });
        let party = |_| Party {
            wake_count: Count::new(&kernel),
            issued: AtomicU32::new(0),
            published: AtomicU32::new(0),
            done: AtomicU32::new(0),
        };
        Arc::new(Rank {
            work: Count::new(&kernel),
            ended: Count::new(&kernel),
            pending: AtomicU32::new(0),
            drivers: AtomicU32::new(0),
            stopping: AtomicU32::new(0),
            groups: (0..groups).map(party).collect(),
            kernel,
        })
    }

    /// As `Group::issue`: counts the operation before it issues it, and announces it afterwards.
    fn issue(&self, group: usize, announce: bool) {
        self.pending.fetch_add(1, Relaxed);
        self.groups[group].issued.store(1, Release);
        if announce {
            roles::issued(self);
        }
    }

    /// Plays the part of a peer.
    fn publish(&self, group: usize) {
        self.groups[group].published.store(1, Release);
        event_count::announce(&self.groups[group].wake_count, 1);
    }

    /// As `Group::drive`: ends a group's operation if this rank has issued it and the peer has published it.
    fn drive(&self, group: usize) -> bool {
        let party = &self.groups[group];
        let ready = party.issued.load(Acquire) == 1 && party.published.load(Acquire) == 1;
        if !ready || party.done.compare_exchange(0, 1, Release, Relaxed).is_err() {
            return false;
        }
        self.pending.fetch_sub(1, Relaxed);
        event_count::announce(&self.ended, 1);
        true
    }

    /// As `driver::sleep`. There is no timeout: a wake that is missed is a deadlock, which loom reports.
    fn sleep(&self, waits: bool, stop: impl Fn() -> bool) {
        let work = Listening::new(&self.work, 0);
        let ended = waits.then(|| Listening::new(&self.ended, 0));
        let busy: Vec<usize> = (0..self.groups.len()).filter(|g| self.groups[*g].issued.load(Acquire) == 1).collect();
        let doors: Vec<_> = busy.iter().map(|g| Listening::new(&self.groups[*g].wake_count, 0)).collect();
        let mut moved = stop();
        for group in &busy {
            moved |= self.drive(*group);
        }
        if moved || stop() {
            return;
        }
        let listening = || [&work].into_iter().chain(&ended).chain(&doors);
        let mut kernel = self.kernel.lock.lock().unwrap();
        while listening().all(|one| one.words.word.load(Relaxed) == one.value) {
            kernel = self.kernel.queue.wait(kernel).unwrap();
        }
    }

    /// As `driver::wait_until`.
    fn wait(&self, group: usize) {
        let _driving = Driving::new(self);
        let done = || self.groups[group].done.load(Acquire) == 1;
        while !done() {
            self.sleep(true, done);
        }
    }

    /// As the progress thread, which is told to stop when all have ended.
    fn progress(&self) {
        let sleep = |value| {
            let mut kernel = self.kernel.lock.lock().unwrap();
            while self.work.word.load(Relaxed) == value {
                kernel = self.kernel.queue.wait(kernel).unwrap();
            }
        };
        while roles::await_work(self, sleep) {
            while roles::needs_progress(self) {
                self.sleep(false, || !roles::needs_progress(self));
            }
        }
    }

    fn stop(&self) {
        self.stopping.store(1, Relaxed);
        event_count::announce(&self.work, 1);
    }
}

fn model(groups: usize, body: impl Fn(Arc<Rank>) + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 20_000;
    model.check(move || body(Rank::new(groups)));
}

fn spawn(rank: &Arc<Rank>, body: impl Fn(&Rank) + Send + 'static) -> thread::JoinHandle<()> {
    let rank = rank.clone();
    thread::spawn(move || body(&rank))
}

#[test]
fn an_operation_issued_in_another_group_wakes_a_thread_that_sleeps() {
    // The waiting thread sleeps on group 0 when the other thread issues in group 1 without a wait.
    model(2, |rank| {
        rank.issue(0, false);
        let waiting = spawn(&rank, |rank| rank.wait(0));
        let peer = spawn(&rank, |rank| {
            rank.publish(1);
            // The peer needs the answer in group 1 before it goes on.
            while rank.groups[1].done.load(Acquire) == 0 {
                thread::yield_now();
            }
            rank.publish(0);
        });
        rank.issue(1, true);
        peer.join().unwrap();
        waiting.join().unwrap();
    });
}

#[test]
fn two_threads_that_wait_in_two_groups_both_end() {
    model(2, |rank| {
        rank.issue(0, false);
        rank.issue(1, false);
        let other = spawn(&rank, |rank| rank.wait(1));
        let peer = spawn(&rank, |rank| {
            rank.publish(1);
            rank.publish(0);
        });
        rank.wait(0);
        other.join().unwrap();
        peer.join().unwrap();
    });
}

#[test]
fn the_progress_thread_takes_over_when_the_last_thread_leaves() {
    // A thread waits for group 0 and none for group 1: the last waiting thread hands group 1 over to the progress
    // thread.
    model(2, |rank| {
        let progress = spawn(&rank, Rank::progress);
        rank.issue(1, true);
        rank.issue(0, false);
        rank.publish(0);
        rank.wait(0);
        rank.publish(1);
        while rank.groups[1].done.load(Acquire) == 0 {
            thread::yield_now();
        }
        rank.stop();
        progress.join().unwrap();
    });
}

#[test]
fn a_thread_that_asks_for_the_interpreters_lock_holds_up_no_other() {
    // The thread that waits pauses until its own operation has ended: only the progress thread can end it.
    model(1, |rank| {
        let progress = spawn(&rank, Rank::progress);
        rank.issue(0, false);
        {
            let driving = Driving::new(&*rank);
            rank.publish(0);
            driving.pause(|| {
                while rank.groups[0].done.load(Acquire) == 0 {
                    thread::yield_now();
                }
            });
        }
        rank.stop();
        progress.join().unwrap();
    });
}

/// The memory that two senders and a receiver with one channel share. Sender `s` is rank `s + 1`.
struct Letters {
    grants: [AtomicU64; 2],
    ready: [AtomicU64; 2],
    drained: [AtomicU64; 2],
    channel: [UnsafeCell<u64>; 2],
}

/// Rounds of a message: the last one uses the buffer of the first.
const PARTS: u64 = 3;

impl Letters {
    fn send(&self, s: usize) {
        if !a_few_times(|| self.grants[s].load(Acquire) == 1) {
            return;
        }
        for g in 0..PARTS {
            if !a_few_times(|| protocol::may_fill_body(g, self.drained[s].load(Acquire))) {
                return;
            }
            write(&self.channel[(g % 2) as usize], g * 10 + s as u64);
            self.ready[s].store(g + 1, Release);
        }
    }

    fn receive(&self) {
        let mut channels = Channels::new(1, 3);
        let (mut granted, mut round) = ([false; 2], [0; 2]);
        // Often enough for both messages: one part of each a turn.
        some_times(2 * PARTS as usize + 1, || {
            for s in 0..2 {
                if !granted[s] && channels.lend(s + 1).is_some() {
                    granted[s] = true;
                    self.grants[s].store(1, Release);
                }
                let g = round[s];
                if g < PARTS && self.ready[s].load(Acquire) > g {
                    assert_eq!(read(&self.channel[(g % 2) as usize]), g * 10 + s as u64, "a part of another message");
                    round[s] += 1;
                    self.drained[s].store(round[s], Release);
                    if round[s] == PARTS {
                        channels.give_back(s + 1);
                    }
                }
            }
            round == [PARTS; 2]
        });
    }
}

#[test]
fn a_lane_passes_from_sender_to_sender_without_mixing_messages() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 20_000;
    model.check(|| {
        let zeros = || [AtomicU64::new(0), AtomicU64::new(0)];
        let channel = [UnsafeCell::new(0), UnsafeCell::new(0)];
        let letters = Arc::new(Letters { grants: zeros(), ready: zeros(), drained: zeros(), channel });
        let senders: Vec<_> = (0..2)
            .map(|s| {
                let letters = letters.clone();
                thread::spawn(move || letters.send(s))
            })
            .collect();
        letters.receive();
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}

/// The mail words of one receiver, and the messages of two senders.
struct Mailbox {
    bits: AtomicU64,
    sent: [AtomicU64; 2],
}

impl Mail for Mailbox {
    fn add(&self, _: usize, _: usize, bit: u64) {
        self.bits.fetch_or(bit, Release);
    }
    fn take(&self, _: usize) -> u64 {
        if self.bits.load(Relaxed) == 0 { 0 } else { self.bits.swap(0, Acquire) }
    }
}

/// A message whose bit was lost would never be found: the receiver would look for ever, which loom reports.
#[test]
fn what_was_posted_is_found() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 20_000;
    model.check(|| {
        let sent = [AtomicU64::new(0), AtomicU64::new(0)];
        let mailbox = Arc::new(Mailbox { bits: AtomicU64::new(0), sent });
        let sender = {
            let mailbox = mailbox.clone();
            thread::spawn(move || {
                for (n, from) in [(1, 0), (1, 1), (2, 0)] {
                    mailbox.sent[from].store(n, Release);
                    protocol::post(&*mailbox, 2, from);
                }
            })
        };
        let mut found = [0; 2];
        until(|| {
            for from in protocol::collect(&*mailbox, 3).iter() {
                found[from] = mailbox.sent[from].load(Acquire);
            }
            found == [2, 1]
        });
        sender.join().unwrap();
    });
}
