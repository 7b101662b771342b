//! Tests the engine of one host with 4 and 8 ranks under random schedules: `Shm` itself over its real memory, without
//! the group above it. The ranks are coroutines of one thread. At each fault point, and between two passes, a different
//! rank may run. A rank may also end at a fault point, as a killed process does, or leave.
//!
//! What this does not test: no other rank runs between two fault points of a rank (`shm_protocol.rs` switches ranks at
//! each access, but runs the protocol alone), and there is one order of all accesses. Ranks poll, so sleeping and the
//! kernel are left out. In `random_programs_of_ranks_that_poll_on_threads_give_the_reference` ranks are threads, and
//! `make miri` runs this test under the memory model of the language. Under Miri it fails if a store that should be a
//! release is not one; no schedule and no x86 processor shows that.

use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};
use shuttle::thread::yield_now;

use crate::common::schedules::{rank_now, ranks, under_schedules};
use crate::common::{Buffers, Random, Spec, areas_on, on_memory, on_ranks};
use sagellm::engine::shm::Shm;
use sagellm::engine::shm::memory::area::Area;
use sagellm::engine::{Ended, Engine};
use sagellm::error::Error;
use sagellm::op::Op;
use sagellm::op::signature;
use sagellm::os::fault_points;
use sagellm::os::fault_points::FaultPoint;
use sagellm::reduce;
use sagellm::select::Policy;
use sagellm::select::rules::Rules;
use sagellm::types::{Dtype, Kind, ReduceOp};

/// One call of a program that is the same on all ranks.
#[derive(Clone, Debug)]
enum Call {
    /// The operation, and whether its tensors are in memory that peers can reach.
    Collective(Spec, bool),
    /// From, to, bytes, seed.
    Message(usize, usize, usize, u64),
}

/// A call of this rank that has not ended, with its memory.
enum Pending {
    Collective(Spec, Buffers),
    Sent(#[allow(dead_code, reason = "the engine reads it")] Vec<u8>),
    Received(Vec<u8>, Vec<u8>),
}

fn message(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..bytes).map(|_| random.next() as u8).collect()
}

/// Sizes of messages and of collectives in elements.
struct Sizes {
    messages: &'static [usize],
    elements: &'static [usize],
    /// Sizes of collectives on tensors that peers can reach. Small tensors are never mapped.
    reachable: &'static [usize],
}

const SIZES: Sizes = Sizes {
    messages: &[0, 8, 1000, 3000, 140_000],
    elements: &[0, 1, 2, 100, 100, 700, 700, 3000, 9000],
    reachable: &[3000, 9000, 20_000],
};

/// Returns a program, and whether it is a burst. In a burst nearly all calls are messages between two ranks, more than
/// fit into the envelopes or grants of this pair.
fn program(random: &mut Random, count: usize, calls: usize, sizes: &Sizes) -> (Vec<Call>, bool) {
    let burst = random.below(4) == 0;
    let lengths: &[usize] = random.pick(&[&[8, 100], &[8, 3000, 5000], &[5000]]);
    let call = |_| {
        if burst && random.below(20) > 0 {
            let from = random.below(8) / 7;
            return Call::Message(from, 1 - from, random.pick(lengths), random.next());
        }
        if random.below(3) == 0 {
            let from = random.below(count);
            let to = (from + 1 + random.below(count - 1)) % count;
            return Call::Message(from, to, random.pick(sizes.messages), random.next());
        }
        let kind = random.pick(&Kind::COLLECTIVES);
        let reachable = !sizes.reachable.is_empty() && random.below(3) == 0;
        let counts = if reachable { sizes.reachable } else { sizes.elements };
        let spec = Spec {
            kind,
            dtype: random.pick(&[Dtype::I32, Dtype::F32, Dtype::Bf16]),
            op: random.pick(&[ReduceOp::Sum, ReduceOp::Max]),
            root: random.below(count),
            count: random.pick(counts),
            skew: random.pick(&[0, 0, 3]),
            in_place: random.below(2) == 0,
            pieces: 1 + random.below(2),
            seed: random.next(),
        };
        Call::Collective(spec, reachable)
    };
    ((0..calls).map(call).collect(), burst)
}

/// One rank: its engine, and the calls that it has issued.
struct Rank {
    me: usize,
    ranks: usize,
    engine: Shm,
    numbers: u64,
    pending: HashMap<*const Op, Pending>,
    ended: Ended,
}

impl Rank {
    fn new(areas: &[Arc<Area>], me: usize, policy: &Arc<Policy>) -> Rank {
        let (ranks, policy) = (areas.len(), Arc::clone(policy));
        let pids = vec![std::process::id() as i32; ranks];
        let shape = areas[me].layout.shape(ranks, 1);
        let engine = Shm::new(Arc::clone(&areas[me]), pids, shape, true, policy);
        Rank { me, ranks, engine, numbers: 0, pending: HashMap::new(), ended: Ended::new() }
    }

    fn issue(&mut self, call: &Call) {
        let (me, ranks) = (self.me, self.ranks);
        let (request, pending) = match call {
            Call::Collective(spec, reachable) => {
                let buffers = spec.buffers(me, ranks);
                let mut buffers = if *reachable { buffers.in_arena() } else { buffers };
                (spec.request(&mut buffers), Pending::Collective(spec.clone(), buffers))
            }
            Call::Message(from, to, bytes, seed) if me == *from => {
                let mut data = message(*bytes, *seed);
                (on_memory(Kind::Send, *to as u32, &mut data), Pending::Sent(data))
            }
            Call::Message(from, to, bytes, seed) if me == *to => {
                let mut room = vec![0; *bytes];
                let request = on_memory(Kind::Recv, *from as u32, &mut room);
                (request, Pending::Received(room, message(*bytes, *seed)))
            }
            Call::Message(..) => return,
        };
        self.numbers += u64::from(!request.kind.is_p2p());
        let kernel = request.kind.reduces().then(|| reduce::kernel(request.dtype, request.op, ranks).unwrap());
        let signature = signature::of(&request, ranks);
        let op = Arc::new(Op::new(request, self.numbers, signature, Duration::from_secs(3600), None));
        self.pending.insert(Arc::as_ptr(&op), pending);
        let outcome = self.engine.submit(op, kernel, &mut self.ended);
        outcome.unwrap_or_else(|error| panic!("rank {me}: {call:?}: {error}"));
        self.check();
    }

    /// Makes one pass. Returns true if something moved.
    fn poll(&mut self) -> bool {
        let moved = self.engine.poll(&mut self.ended).unwrap_or_else(|error| panic!("rank {}: {error}", self.me));
        self.check();
        moved
    }

    /// Compares the results of the calls that have ended.
    fn check(&mut self) {
        for (op, outcome) in self.ended.drain(..) {
            outcome.unwrap_or_else(|error| panic!("rank {}: {error}", self.me));
            match self.pending.remove(&Arc::as_ptr(&op)).expect("each call ends once") {
                Pending::Collective(spec, buffers) => spec.check(&buffers, self.me, self.ranks),
                Pending::Sent(_) => (),
                Pending::Received(found, expected) => assert!(found == expected, "a message to rank {}", self.me),
            }
        }
    }
}

/// Returns the default rules, or rules by which a call of some KiB takes several rounds.
fn policy(short_rounds: bool) -> Arc<Policy> {
    let rules = if short_rounds { "*:2KiB-=rounds(1KiB)" } else { "" };
    Arc::new(Policy { rules: Rules::parse(rules).unwrap(), ..Policy::default() })
}

/// Ends a rank at a fault point.
struct Killed;

/// Which rank ends, and how many fault points it passes before its end.
#[derive(Clone, Copy)]
struct Death {
    rank: usize,
    after: u64,
}

/// The state that all ranks of one schedule share.
struct House {
    /// The rank that has ended, plus 1.
    dead: AtomicUsize,
    /// Counts what moved, in all ranks.
    moves: AtomicU64,
    /// For each rank: the value of `moves` plus 1 at the moment when the rank last found nothing to move.
    quiet: Vec<AtomicU64>,
}

impl House {
    fn new(count: usize) -> House {
        let quiet = (0..count).map(|_| AtomicU64::new(0)).collect();
        House { dead: AtomicUsize::new(0), moves: AtomicU64::new(0), quiet }
    }
}

thread_local! {
    /// How often each fault point was reached in this test.
    static REACHED: RefCell<HashMap<FaultPoint, u64>> = RefCell::default();
    /// The ranks of the schedule that have ended.
    static KEPT: RefCell<Vec<Rank>> = RefCell::default();
}

/// Runs one schedule: all ranks run a random program with some calls in flight, then leave. With `death`, one rank ends
/// in the middle; the others run until nothing moves any more.
fn schedule(count: usize, calls: usize, death: bool) {
    let areas = sagellm::engine::local::areas(count).unwrap();
    schedule_over(areas, calls, &SIZES, death);
}

/// Like `schedule`, for ranks that act as if they were bound to NUMA nodes, with small stage buffers.
fn schedule_on(nodes: &[u32], calls: usize, death: bool) {
    let sizes = Sizes { reachable: &[5000, 20_000, 60_000], ..SIZES };
    schedule_over(areas_on(nodes), calls, &sizes, death);
}

fn schedule_over(areas: Vec<Arc<Area>>, calls: usize, sizes: &Sizes, death: bool) {
    let mut random = Random::new(thread_rng().r#gen());
    let (program, burst) = program(&mut random, areas.len(), calls, sizes);
    schedule_of(areas, (program, burst), random, death);
}

fn schedule_of(areas: Vec<Arc<Area>>, (program, burst): (Vec<Call>, bool), mut random: Random, death: bool) {
    let (count, calls) = (areas.len(), program.len());
    let death = death.then(|| Death { rank: random.below(count), after: random.below(40 * calls / 10) as u64 });
    // The number of calls that a rank has in flight: some ranks wait for each call, some issue the whole program.
    let window = |_| if burst { calls } else { random.pick(&[1, 3, 8, calls]) };
    let windows: Vec<usize> = (0..count).map(window).collect();
    let policy = policy(random.below(2) == 0);
    let house = Arc::new(House::new(count));
    let (points, switch) = (AtomicU64::new(0), shuttle::sync::atomic::AtomicU64::new(0));
    let hook = fault_points::on_this_thread(move |point| {
        REACHED.with(|reached| *reached.borrow_mut().entry(point).or_default() += 1);
        if let Some(death) = death
            && rank_now() == Some(death.rank)
            && points.fetch_add(1, Relaxed) == death.after
        {
            resume_unwind(Box::new(Killed)); // prints nothing
        }
        switch.load(Relaxed); // another rank may run here
    });
    ranks(count, move |me| {
        let mut rank = Rank::new(&areas, me, &policy);
        let window = windows[me];
        let whole = || {
            run(&mut rank, &program, window, &house, &yield_now);
            rank.engine.control().leave(&Error::bug("left".to_string()), &|| false);
        };
        match catch_unwind(AssertUnwindSafe(whole)) {
            Ok(()) => (),
            Err(panic) if panic.is::<Killed>() => {
                house.moves.fetch_add(1, Relaxed);
                house.dead.store(me + 1, Relaxed);
            }
            Err(panic) => resume_unwind(panic),
        }
        // Nothing of a killed process is dropped, and the memory that it shares with its peers stays.
        KEPT.with(|kept| kept.borrow_mut().push(rank));
    });
    KEPT.with(|kept| kept.borrow_mut().clear());
    drop(hook);
}

/// Runs the program of one rank. Returns when all its calls have ended, or when a rank has ended and nothing moves any
/// more.
fn run(rank: &mut Rank, program: &[Call], window: usize, house: &House, pause: &dyn Fn()) {
    let mut calls = program.iter();
    // Calls that were found to need the dead rank; these must not end.
    let mut lost: Vec<*const Op> = Vec::new();
    let mut left = true;
    while left || !rank.pending.is_empty() {
        let mut moved = false;
        while left && rank.pending.len() < window {
            match calls.next() {
                Some(call) => {
                    rank.issue(call);
                    moved = true;
                }
                None => left = false,
            }
        }
        moved |= rank.poll();
        assert!(lost.iter().all(|op| rank.pending.contains_key(op)), "a call ended although it needed a dead rank");
        if moved {
            house.moves.fetch_add(1, Relaxed);
        } else if let Some(dead) = house.dead.load(Relaxed).checked_sub(1) {
            let moves = house.moves.load(Relaxed);
            house.quiet[rank.me].store(moves + 1, Relaxed);
            if let Some(op) = rank.engine.needs(dead, &|rank| rank == dead) {
                lost.push(Arc::as_ptr(&op));
            }
            let all = (0..rank.ranks).filter(|q| *q != dead).all(|q| house.quiet[q].load(Relaxed) > moves);
            if all && house.moves.load(Relaxed) == moves {
                // No rank can move anything. So each pending call waits for the dead rank, or for a rank or a call that
                // directly or indirectly waits for it.
                check_reasons(rank, dead);
                return;
            }
        }
        pause();
    }
    house.quiet[rank.me].store(u64::MAX, Relaxed);
}

/// Checks that each pending call of a rank names what it waits for: the dead rank, another rank, or an earlier call.
fn check_reasons(rank: &Rank, dead: usize) {
    let gone = |q| q == dead;
    let waits_for_others = (0..rank.ranks).any(|q| q != rank.me && rank.engine.needs(q, &gone).is_some());
    assert!(rank.pending.is_empty() || waits_for_others, "rank {}: calls that wait for nobody", rank.me);
}

/// Runs random programs on threads, without hooks: natively, and under Miri, which checks every access and the memory
/// model.
#[test]
fn random_programs_of_ranks_that_poll_on_threads_give_the_reference() {
    const SMALL: Sizes = Sizes { messages: &[0, 8, 5000], elements: &[0, 1, 100, 600], reachable: &[] };
    let (seeds, calls) = if cfg!(miri) { (2, 8) } else { (20, 60) };
    for seed in 0..seeds {
        let count = 2 + seed as usize % 3;
        let (program, _) = program(&mut Random::new(seed), count, calls, &SMALL);
        let house = House::new(count);
        // These areas do not ask the system how much memory is free, because Miri warns about that.
        let areas = sagellm::engine::local::areas(count).unwrap().into_iter();
        let areas: Vec<_> = areas.map(|area| Arc::new(Arc::into_inner(area).unwrap().with_headroom(|| None))).collect();
        let policy = policy(seed % 2 == 0);
        let kept = on_ranks(count, |me| {
            let mut rank = Rank::new(&areas, me, &policy);
            run(&mut rank, &program, 1 + me * 3, &house, &std::thread::yield_now);
            rank.engine
        });
        drop(kept);
    }
}

fn reached() -> Vec<FaultPoint> {
    REACHED.with(|reached| reached.borrow().keys().copied().collect())
}

#[test]
fn random_programs_of_many_ranks_give_the_reference_under_random_schedules() {
    under_schedules(50, || schedule(4, 90, false));
    under_schedules(40, || schedule(8, 50, false));
    under_schedules(25, || schedule_on(&[0, 0, 1, 1], 50, false));
    under_schedules(20, || schedule_on(&[4, 4, 0, 0, 1, 1], 40, false));
    under_schedules(4, || schedule(18, 40, false)); // with so many ranks, senders mark their messages at the receiver
    for (_, point) in FaultPoint::ALL.into_iter().enumerate().filter(|(at, _)| *at < FaultPoint::Sleeping as usize) {
        assert!(reached().contains(&point), "{} was never reached", point.name());
    }
}

/// The root of a broadcast continues when its data is staged. The sums of its next operation must not overwrite what a
/// peer still reads.
#[test]
fn sums_that_go_from_node_to_node_use_no_stage_that_a_peer_still_reads() {
    under_schedules(60, || {
        let mut random = Random::new(thread_rng().r#gen());
        let call = |at: usize| {
            let (kind, count, reachable) =
                if at.is_multiple_of(2) { (Kind::Broadcast, 9000, false) } else { (Kind::AllReduce, 20_000, true) };
            let (dtype, op, seed) = (Dtype::F32, ReduceOp::Sum, at as u64);
            let spec = Spec { kind, dtype, op, root: at % 3, count, skew: 0, in_place: true, pieces: 1, seed };
            Call::Collective(spec, reachable)
        };
        let program: Vec<Call> = (0..8).map(call).collect();
        let burst = random.below(2) == 0; // each rank issues the whole program
        schedule_of(areas_on(&[0, 0, 1, 1]), (program, burst), random, false);
    });
}

#[test]
fn rule_21_a_rank_that_ends_at_a_fault_point_leaves_whole_results_and_all_that_wait_know_for_whom() {
    under_schedules(100, || schedule(4, 30, true));
    under_schedules(60, || schedule(8, 25, true));
    under_schedules(60, || schedule_on(&[0, 0, 1, 1], 25, true));
    under_schedules(40, || schedule_on(&[0, 0, 1, 1, 2, 2], 20, true));
}
