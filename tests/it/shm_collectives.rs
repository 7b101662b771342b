//! Compares every collective of the shared-memory engine with a one-threaded reference, bit for bit, on every rank.
//! Ranks are threads that are late at random, sizes are at and next to every limit, and memory is passed in pieces.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Buffers, Random, Spec, on_ranks};
use sagellm::config::Verify;
use sagellm::engine::local;
use sagellm::group::{Group, Op};
use sagellm::select::Policy;
use sagellm::types::{Dtype, Kind, ReduceOp};

fn groups(ranks: usize) -> Vec<Arc<Group>> {
    Group::local(ranks, Duration::from_secs(60)).unwrap()
}

#[test]
fn rule_17_every_kind_at_every_boundary() {
    // Limits: 8 four-byte elements fit into the header line, 1024 into a slot, 131072 into a stage buffer.
    for ranks in [1, 2, 3, 4, 5] {
        let groups = groups(ranks);
        let counts = [0, 1, 3, 8, 9, 255, 1023, 1024, 1025, 4099, 131_071, 131_073, 300_001];
        on_ranks(ranks, |me| {
            let mut seed = 0;
            for kind in Kind::COLLECTIVES {
                for count in counts {
                    for (dtype, op) in
                        [(Dtype::F32, ReduceOp::Sum), (Dtype::Bf16, ReduceOp::Sum), (Dtype::I32, ReduceOp::Max)]
                    {
                        seed += 1;
                        if count > 5000 && (dtype == Dtype::Bf16 || ranks == 5) {
                            continue; // the same code path as f32; keeps the test short
                        }
                        let spec = Spec {
                            kind,
                            dtype,
                            op,
                            root: seed as usize % ranks,
                            count,
                            skew: [0, 3][seed as usize % 2],
                            in_place: seed % 3 == 0,
                            pieces: 1 + seed as usize % 3,
                            seed,
                        };
                        let mut buffers = spec.buffers(me, ranks);
                        let request = spec.request(&mut buffers);
                        groups[me].run(request, None).unwrap_or_else(|e| panic!("rank {me}: {spec:?}: {e}"));
                        spec.check(&buffers, me, ranks);
                    }
                }
            }
        });
    }
}

fn random_spec(random: &mut Random, ranks: usize) -> Spec {
    let (dtype, op) = random.pick(&[
        (Dtype::F32, ReduceOp::Sum),
        (Dtype::F32, ReduceOp::Max),
        (Dtype::Bf16, ReduceOp::Sum),
        (Dtype::I32, ReduceOp::Sum),
        (Dtype::I32, ReduceOp::Bxor),
    ]);
    let count = match random.below(10) {
        0 => 0,
        1..=5 => random.below(64),
        6 | 7 => random.below(2000),
        8 => random.below(20_000),
        _ => random.below(200_000),
    };
    Spec {
        kind: random.pick(&Kind::COLLECTIVES),
        dtype,
        op,
        root: random.below(ranks),
        count,
        skew: random.below(3) * random.below(50),
        in_place: random.below(2) == 0,
        pieces: 1 + random.below(4),
        seed: random.next(),
    }
}

fn verified(ranks: usize, verify: Verify) -> Vec<Arc<Group>> {
    let policy = |_| Policy { verify, ..Policy::default() };
    Group::over_with(local::areas(ranks).unwrap(), Duration::from_secs(60), policy)
}

/// Runs a random program: every rank issues the same operations in the same order, in several groups. Each rank issues
/// some of them without waiting and pauses at random.
fn program(seed: u64, ranks: usize, ops: usize, verify: Verify) {
    let mut random = Random::new(seed);
    let how_many = 1 + random.below(3);
    let all: Vec<Vec<Arc<Group>>> = (0..how_many).map(|_| verified(ranks, verify)).collect();
    let plan: Vec<(usize, Spec)> =
        (0..ops).map(|_| (random.below(how_many), random_spec(&mut random, ranks))).collect();
    on_ranks(ranks, |me| {
        let mut random = Random::new(seed ^ (me as u64 + 1) << 32);
        let mut pending: Vec<(Arc<Op>, Spec, Buffers)> = Vec::new();
        let finish = |(op, spec, buffers): (Arc<Op>, Spec, Buffers)| {
            op.wait(None).unwrap_or_else(|e| panic!("seed {seed} rank {me}: {spec:?}: {e}"));
            spec.check(&buffers, me, ranks);
        };
        for (group, spec) in &plan {
            if random.below(20) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(800) as u64));
            }
            let mut buffers = spec.buffers(me, ranks);
            let request = spec.request(&mut buffers);
            // Rule 7: each rank chooses for itself whether the call is synchronous.
            if random.below(3) == 0 {
                all[*group][me].run(request, None).unwrap_or_else(|e| panic!("seed {seed} rank {me}: {spec:?}: {e}"));
                spec.check(&buffers, me, ranks);
            } else {
                let op = all[*group][me].issue(request, None).unwrap();
                pending.push((op, spec.clone(), buffers));
            }
            while pending.len() > random.below(200) {
                let at = random.below(pending.len());
                finish(pending.swap_remove(at));
            }
        }
        pending.into_iter().for_each(finish);
    });
}

#[test]
fn random_programs_give_the_reference_on_every_rank() {
    let programs: u64 = std::env::var("SAGELLM_TEST_PROGRAMS").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    for seed in 1..=programs {
        crate::common::progress("programs", seed, programs);
        program(seed, 2 + seed as usize % 4, 60, Verify::default());
    }
}

#[test]
fn results_that_are_compared_raise_no_alarm_in_random_programs() {
    let programs: u64 = std::env::var("SAGELLM_TEST_PROGRAMS").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    for seed in 1..=programs {
        crate::common::progress("programs with compared results", seed, programs);
        let verify = Verify::parse(["all", "sampled"][seed as usize % 2]).unwrap();
        program(seed + 1_000_000, 2 + seed as usize % 4, 80, verify);
    }
}

#[test]
fn rule_04_operations_on_the_same_memory_run_in_order() {
    let ranks = 3;
    let groups = groups(ranks);
    on_ranks(ranks, |me| {
        for count in [5usize, 50_000] {
            let spec = Spec {
                kind: Kind::AllReduce,
                dtype: Dtype::I32,
                op: ReduceOp::Sum,
                root: 0,
                count,
                skew: 0,
                in_place: true,
                pieces: 1,
                seed: 0,
            };
            let mut buffers = spec.buffers(me, ranks);
            buffers.input.fill(0);
            buffers.input[0] = 1;
            // Each sum reads the output of the sum before it. The result is 3^10, or less if a sum read too early.
            let ops: Vec<_> = (0..10).map(|_| groups[me].issue(spec.request(&mut buffers), None).unwrap()).collect();
            ops.iter().for_each(|op| op.wait(None).unwrap());
            assert_eq!(i32::from_le_bytes(buffers.input[..4].try_into().unwrap()), 3i32.pow(10));
        }
    });
}

#[test]
fn rule_03_issue_never_waits_and_a_burst_beyond_the_credits_completes() {
    let ranks = 2;
    let groups = groups(ranks);
    let burst = 1000;
    let (first_done, barrier) = (std::sync::atomic::AtomicBool::new(false), std::sync::Barrier::new(2));
    on_ranks(ranks, |me| {
        let spec = Spec {
            kind: Kind::AllReduce,
            dtype: Dtype::F32,
            op: ReduceOp::Sum,
            root: 0,
            count: 512,
            skew: 0,
            in_place: false,
            pieces: 1,
            seed: 9,
        };
        if me == 1 {
            barrier.wait(); // until rank 0 has issued all of its operations without an answer from any rank
            assert!(first_done.load(std::sync::atomic::Ordering::SeqCst));
        }
        let mut all: Vec<(Arc<Op>, Buffers)> = Vec::new();
        for _ in 0..burst {
            let mut buffers = spec.buffers(me, ranks);
            let op = groups[me].issue(spec.request(&mut buffers), None).unwrap();
            all.push((op, buffers));
        }
        if me == 0 {
            first_done.store(true, std::sync::atomic::Ordering::SeqCst);
            barrier.wait();
        }
        for (op, buffers) in &all {
            op.wait(None).unwrap();
            spec.check(buffers, me, ranks);
        }
    });
}

#[test]
fn rule_06_an_operation_ends_without_anyone_waiting() {
    let groups = groups(2);
    on_ranks(2, |me| {
        let spec = Spec {
            kind: Kind::AllReduce,
            dtype: Dtype::F32,
            op: ReduceOp::Sum,
            root: 0,
            count: 100_000,
            skew: 0,
            in_place: false,
            pieces: 1,
            seed: 1,
        };
        let mut buffers = spec.buffers(me, 2);
        let op = groups[me].issue(spec.request(&mut buffers), None).unwrap();
        let begin = std::time::Instant::now();
        while !op.is_done() {
            assert!(begin.elapsed() < Duration::from_secs(20), "rank {me}: no rank makes progress");
            std::thread::sleep(Duration::from_millis(1));
        }
        spec.check(&buffers, me, 2);
    });
}

#[test]
fn two_groups_issued_in_different_orders_complete_when_async() {
    let (a, b) = (groups(2), groups(2));
    on_ranks(2, |me| {
        let spec = |seed| Spec {
            kind: Kind::AllReduce,
            dtype: Dtype::F32,
            op: ReduceOp::Sum,
            root: 0,
            count: 70_000,
            skew: 0,
            in_place: false,
            pieces: 1,
            seed,
        };
        let order: [(&Vec<Arc<Group>>, u64); 2] = if me == 0 { [(&a, 1), (&b, 2)] } else { [(&b, 2), (&a, 1)] };
        let mut all = Vec::new();
        for (groups, seed) in order {
            let spec = spec(seed);
            let mut buffers = spec.buffers(me, 2);
            let op = groups[me].issue(spec.request(&mut buffers), None).unwrap();
            all.push((op, spec, buffers));
        }
        for (op, spec, buffers) in &all {
            op.wait(None).unwrap();
            spec.check(buffers, me, 2);
        }
    });
}
