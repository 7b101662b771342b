//! Groups whose ranks are on several hosts, played by threads. Every collective is compared with a one-threaded
//! reference, with and without fusion, in strict mode bit for bit. Also tests how a fault on one host affects ranks on
//! the others.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Buffers, Random, Spec, on_ranks};
use sagellm::algorithms::Algorithm;
use sagellm::config::{Settings, Verify};
use sagellm::engine::local;
use sagellm::group::{Group, Op};
use sagellm::select::Policy;
use sagellm::select::rules::Rules;
use sagellm::types::{Dtype, Kind, ReduceOp};

/// The host of each rank: one rank per host, equal and uneven hosts, ranks dealt round-robin, and a number of hosts
/// that is no power of two.
const PLACES: [&[usize]; 8] = [
    &[0, 1],
    &[0, 0, 1, 1],
    &[0, 1, 0, 1],
    &[0, 0, 0, 1],
    &[0, 1, 2],
    &[0, 1, 2, 0, 1],
    &[0, 1, 2, 3],
    &[0, 1, 2, 2, 3, 4, 0],
];

fn groups(place: &[usize], settings: Settings, timeout: Duration) -> Vec<Arc<Group>> {
    Group::local_hosts(place, timeout, settings, local::links(place.len())).unwrap()
}

const LONG: Duration = Duration::from_secs(60);

/// Checks a result. Without strict mode, sums of f32 and bf16 may round at other points and differ a little from the
/// reference. All other results are exact.
fn check(spec: &Spec, buffers: &Buffers, me: usize, ranks: usize, strict: bool) {
    if strict || !spec.kind.reduces() || spec.dtype == Dtype::I32 || spec.op == ReduceOp::Max {
        return spec.check(buffers, me, ranks);
    }
    let (found, expected) = (buffers.result(), spec.expected(me, ranks));
    let (size, slack) = if spec.dtype == Dtype::F32 { (4, 1e-5) } else { (2, 0.02) };
    let value = |bytes: &[u8]| match size {
        4 => f32::from_le_bytes(bytes.try_into().unwrap()),
        _ => f32::from_bits(u32::from(u16::from_le_bytes(bytes.try_into().unwrap())) << 16),
    };
    for (a, b) in found.chunks_exact(size).zip(expected.chunks_exact(size)) {
        let (a, b) = (value(a), value(b));
        assert!((a - b).abs() <= slack * 370.0 * ranks as f32, "rank {me} of {ranks}: {spec:?}: {a} for {b}");
    }
}

fn spec(kind: Kind, dtype: Dtype, op: ReduceOp, count: usize, seed: u64, ranks: usize) -> Spec {
    Spec {
        kind,
        dtype,
        op,
        root: seed as usize % ranks,
        count,
        skew: [0, 3][seed as usize % 2],
        in_place: seed.is_multiple_of(3),
        pieces: 1 + seed as usize % 3,
        seed,
    }
}

#[test]
fn rule_18_every_kind_on_every_layout_and_strict_gives_the_bits_of_one_host() {
    // 4,082 floats fit into a frame. 300,001 floats are more than 64 KiB, so several leaders share them. 1,100,003
    // floats take three segments.
    let counts = [0, 1, 3, 1000, 4082, 4083, 300_001, 1_100_003];
    for place in PLACES {
        let ranks = place.len();
        for strict in [false, true] {
            let groups = groups(place, Settings { strict, ..Settings::default() }, LONG);
            on_ranks(ranks, |me| {
                let mut seed = 0;
                for kind in Kind::COLLECTIVES {
                    for count in counts {
                        for (dtype, op) in
                            [(Dtype::F32, ReduceOp::Sum), (Dtype::Bf16, ReduceOp::Sum), (Dtype::I32, ReduceOp::Max)]
                        {
                            seed += 1;
                            let large = count > 5000;
                            if large && (dtype != Dtype::F32 || ranks > 5) || ranks > 4 && dtype == Dtype::I32 {
                                continue; // the same code path as f32; keeps the test short
                            }
                            if count > 1_000_000 && !matches!(kind, Kind::AllReduce | Kind::Broadcast | Kind::Reduce) {
                                continue; // only these kinds are cut into segments
                            }
                            let spec = spec(kind, dtype, op, count, seed, ranks);
                            let mut buffers = spec.buffers(me, ranks);
                            let request = spec.request(&mut buffers);
                            groups[me].run(request, None).unwrap_or_else(|e| panic!("rank {me}: {spec:?}: {e}"));
                            check(&spec, &buffers, me, ranks, strict);
                        }
                    }
                }
            });
            on_ranks(ranks, |me| groups[me].shutdown()); // all ranks together, because each waits until its peers leave
        }
    }
}

/// Runs `specs` and returns each rank's results as whole buffers. Results that the reference can compute are compared
/// with it.
fn results(place: &[usize], rules: &str, specs: &[Spec]) -> Vec<Vec<Vec<u8>>> {
    let policy = Policy { rules: Rules::parse(rules).unwrap(), ..Policy::default() };
    let ranks = place.len();
    let groups = Group::local_hosts_with(place, LONG, Settings::default(), local::links(ranks), &policy)
        .expect("groups of threads");
    let found = on_ranks(ranks, |me| {
        let run = |spec: &Spec| {
            let mut buffers = spec.buffers(me, ranks);
            let request = spec.request(&mut buffers);
            groups[me].run(request, None).unwrap_or_else(|e| panic!("rank {me}: {spec:?}: {e}"));
            // The reference has no AVG and no PREMUL_SUM.
            if !matches!(spec.op, ReduceOp::Avg | ReduceOp::PremulSum(_)) {
                check(spec, &buffers, me, ranks, false);
            }
            buffers.result().to_vec()
        };
        specs.iter().map(run).collect()
    });
    on_ranks(ranks, |me| groups[me].shutdown());
    found
}

#[test]
fn columns_give_the_bits_of_one_leader() {
    let numbers = [
        (Dtype::F32, ReduceOp::Sum),
        (Dtype::F32, ReduceOp::Avg),
        (Dtype::F32, ReduceOp::PremulSum(0.3)),
        (Dtype::Bf16, ReduceOp::Sum),
        (Dtype::I32, ReduceOp::Max),
    ];
    // The first two layouts have three hosts, because sums over two hosts have only one order. The last one has more
    // ranks on one host than there are columns.
    for place in [&[0, 0, 1, 1, 2, 2][..], &[0, 1, 2, 2, 1, 0], &[0, 0, 0, 1, 1]] {
        let ranks = place.len();
        let mut specs = Vec::new();
        for kind in [Kind::AllGather, Kind::ReduceScatter, Kind::Broadcast] {
            for count in [0, 1, 2, 7, 1000] {
                for (dtype, op) in numbers {
                    let roots = if kind == Kind::Broadcast { ranks } else { 2 };
                    for root in 0..roots {
                        let seed = specs.len() as u64;
                        specs.push(Spec { root, ..spec(kind, dtype, op, count, seed, ranks) });
                    }
                }
            }
        }
        for algorithm in ["direct", "ring"] {
            let by = |leaders: u8| results(place, &format!("*:0-={algorithm}(leaders={leaders})"), &specs);
            let (one, columns) = (by(1), by(255));
            for (me, (columns, one)) in columns.iter().zip(&one).enumerate() {
                for (spec, (columns, one)) in specs.iter().zip(columns.iter().zip(one)) {
                    assert!(columns == one, "rank {me} of {place:?}, {algorithm}: {spec:?}");
                }
            }
        }
    }
}

/// Sizes of messages that fit into a frame, that are one segment, and that are several segments.
const SUMS: [usize; 6] = [1, 1000, 4083, 70_000, 300_001, 1_100_003];

/// Returns a sum. A large all_reduce is in place and in one piece, so that the engine works in the tensor's own memory.
fn sum(kind: Kind, dtype: Dtype, count: usize, seed: u64, ranks: usize) -> Spec {
    let spec = spec(kind, dtype, ReduceOp::Sum, count, seed, ranks);
    if kind == Kind::AllReduce && count > 1_000_000 { Spec { in_place: true, pieces: 1, ..spec } } else { spec }
}

#[test]
fn rule_18_direct_exchange_adds_in_rank_order_so_one_rank_a_host_has_the_bits_of_one_host() {
    for place in [&[0, 1][..], &[0, 1, 2], &[0, 1, 2, 3]] {
        let ranks = place.len();
        for algorithm in [Algorithm::Direct, Algorithm::TwoStep] {
            let mut specs = Vec::new();
            let kinds = [Kind::AllReduce, Kind::ReduceScatter, Kind::Reduce];
            for kind in kinds.into_iter().filter(|kind| algorithm.serves(*kind)) {
                for dtype in [Dtype::F32, Dtype::Bf16] {
                    for count in SUMS {
                        specs.push(sum(kind, dtype, count, specs.len() as u64, ranks));
                    }
                }
            }
            let algorithm = algorithm.name();
            for (me, found) in results(place, &format!("*:0-={algorithm}"), &specs).iter().enumerate() {
                for (spec, found) in specs.iter().zip(found) {
                    let result = spec.kind != Kind::Reduce || me == spec.root; // other ranks have no result
                    assert!(!result || *found == spec.expected(me, ranks), "rank {me}, {algorithm}: {spec:?}");
                }
            }
        }
    }
}

#[test]
fn rule_18_a_sum_has_the_same_bits_on_all_ranks_by_every_algorithm() {
    for place in PLACES {
        let ranks = place.len();
        let specs: Vec<Spec> =
            SUMS.iter().map(|count| sum(Kind::AllReduce, Dtype::F32, *count, *count as u64, ranks)).collect();
        for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| algorithm.serves(Kind::AllReduce)) {
            let found = results(place, &format!("*:0-={}", algorithm.name()), &specs);
            for (me, own) in found.iter().enumerate() {
                for (spec, (own, first)) in specs.iter().zip(own.iter().zip(&found[0])) {
                    assert!(own == first, "ranks 0 and {me} of {place:?}, {}: {spec:?}", algorithm.name());
                }
            }
        }
    }
}

/// Runs a random program like that of `shm_collectives.rs`, on several hosts, with more small operations, which form
/// batches.
fn program(seed: u64, ops: usize, fusion: bool) {
    let mut random = Random::new(seed);
    let place = PLACES[random.below(PLACES.len())];
    let ranks = place.len();
    let settings = Settings { fusion, strict: true, ..Settings::default() };
    // In two of three programs, the ranks compare their results, which must find no difference.
    let verify = Verify::parse(["off", "all", "sampled"][seed as usize % 3]).unwrap();
    let policy = Policy { verify, ..Policy::default() };
    let made = |_| Group::local_hosts_with(place, LONG, settings, local::links(ranks), &policy).unwrap();
    let all: Vec<Vec<Arc<Group>>> = (0..1 + random.below(2)).map(made).collect();
    let plan: Vec<(usize, Spec)> = (0..ops)
        .map(|_| {
            let kind = if random.below(3) > 0 {
                random.pick(&[Kind::AllReduce, Kind::AllGather])
            } else {
                random.pick(&Kind::COLLECTIVES)
            };
            let (dtype, op) = random.pick(&[
                (Dtype::F32, ReduceOp::Sum),
                (Dtype::F32, ReduceOp::Sum),
                (Dtype::Bf16, ReduceOp::Sum),
                (Dtype::I32, ReduceOp::Bxor),
            ]);
            let count = match random.below(20) {
                0 => 0,
                1 => random.below(40_000),
                _ => random.below(700),
            };
            let mut spec = spec(kind, dtype, op, count, random.next(), ranks);
            spec.skew = if random.below(4) == 0 { random.below(20) } else { 0 };
            (random.below(all.len()), spec)
        })
        .collect();
    on_ranks(ranks, |me| {
        let mut random = Random::new(seed ^ (me as u64 + 1) << 32);
        let mut pending: Vec<(Arc<Op>, Spec, Buffers)> = Vec::new();
        let finish = |(op, spec, buffers): (Arc<Op>, Spec, Buffers)| {
            op.wait(None).unwrap_or_else(|e| panic!("seed {seed} rank {me}: {spec:?}: {e}"));
            check(&spec, &buffers, me, ranks, true);
        };
        for (group, spec) in &plan {
            if random.below(20) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(1500) as u64));
            }
            let mut buffers = spec.buffers(me, ranks);
            let request = spec.request(&mut buffers);
            let op = all[*group][me].issue(request, None).unwrap();
            pending.push((op, spec.clone(), buffers));
            let waits_for_all = random.below(6) == 0;
            while waits_for_all && !pending.is_empty() || pending.len() > random.below(400) {
                finish(pending.swap_remove(random.below(pending.len())));
            }
        }
        pending.into_iter().for_each(finish);
    });
    on_ranks(ranks, |me| all.iter().for_each(|groups| groups[me].shutdown()));
}

#[test]
fn rules_13_to_18_random_programs_give_the_reference_fused_and_unfused() {
    let programs: u64 = std::env::var("SAGELLM_TEST_HOST_PROGRAMS").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    for seed in 1..=programs {
        crate::common::progress("programs over hosts", seed, programs);
        program(seed, 80, seed % 4 != 0);
    }
}

#[test]
fn rule_04_operations_on_the_same_memory_run_in_order_over_hosts() {
    let place = [0, 1, 0];
    let groups = groups(&place, Settings::default(), LONG);
    on_ranks(place.len(), |me| {
        let spec = Spec {
            kind: Kind::AllReduce,
            dtype: Dtype::I32,
            op: ReduceOp::Sum,
            root: 0,
            count: 5,
            skew: 0,
            in_place: true,
            pieces: 1,
            seed: 0,
        };
        let mut buffers = spec.buffers(me, place.len());
        buffers.input.fill(0);
        buffers.input[0] = 1;
        let ops: Vec<_> = (0..10).map(|_| groups[me].issue(spec.request(&mut buffers), None).unwrap()).collect();
        ops.iter().for_each(|op| op.wait(None).unwrap());
        assert_eq!(i32::from_le_bytes(buffers.input[..4].try_into().unwrap()), 3i32.pow(10));
    });
}

#[test]
fn different_calls_on_two_hosts_are_an_error_that_shows_both() {
    let place = [0, 0, 1, 1];
    let groups = groups(&place, Settings::default(), Duration::from_secs(20));
    let errors = on_ranks(place.len(), |me| {
        let count = if me < 2 { 100 } else { 101 };
        let spec = spec(Kind::AllReduce, Dtype::F32, ReduceOp::Sum, count, 1, place.len());
        let mut buffers = spec.buffers(me, place.len());
        let request = spec.request(&mut buffers);
        groups[me].run(request, None).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("all_reduce(400 bytes") && error.contains("all_reduce(404 bytes"), "{error}");
    }
}

/// Every rank passes itself as the root of a gather, or another rank as the root of a broadcast. All of them then wait
/// and none sends data, so only a Question shows the mismatch before the deadline. A rank that has given its data to
/// another rank of its host may get the error in its next call.
#[test]
fn rule_05_ranks_that_wait_for_each_other_because_their_roots_differ_get_both_calls_at_once() {
    for (place, ranks) in [(&[0, 1][..], 2), (&[0, 0, 1, 1], 4), (&[0, 1, 2, 3], 4)] {
        for kind in [Kind::Broadcast, Kind::Scatter, Kind::Reduce, Kind::Gather] {
            for count in [10, 20_000, 200_000] {
                let groups = groups(place, Settings::default(), LONG);
                let errors = on_ranks(ranks, |me| {
                    let (first, second) = (0, ranks - 1);
                    let collects = matches!(kind, Kind::Reduce | Kind::Gather);
                    let root = if (place[me] == 0) == collects { first } else { second };
                    let spec = Spec { root, ..spec(kind, Dtype::F32, ReduceOp::Sum, count, 0, ranks) };
                    let mut buffers = spec.buffers(me, ranks);
                    let call = groups[me].run(spec.request(&mut buffers), None);
                    let barrier = Spec { kind: Kind::Barrier, ..spec };
                    let mut nothing = barrier.buffers(me, ranks);
                    let next = call.and_then(|()| groups[me].run(barrier.request(&mut nothing), None));
                    next.unwrap_err().to_string()
                });
                let shows = |error: &String| error.contains("root 0") && error.contains(&format!("root {}", ranks - 1));
                let known = |error: &String| shows(error) || error.contains("lost the connection to rank");
                let is_right = errors.iter().any(shows) && errors.iter().all(known);
                assert!(is_right, "{kind:?} of {count} over {place:?}: {errors:#?}");
            }
        }
    }
}

/// Ranks come late to operations, by more than the time after which the others send Questions.
#[test]
fn ranks_that_come_late_change_nothing() {
    for place in [&[0, 1][..], &[0, 0, 1], &[0, 1, 2]] {
        let ranks = place.len();
        let groups = groups(place, Settings { strict: true, ..Settings::default() }, LONG);
        on_ranks(ranks, |me| {
            for seed in 0..18 {
                if seed as usize % (ranks + 1) == me {
                    std::thread::sleep(Duration::from_millis(150));
                }
                let kind = Kind::COLLECTIVES[seed as usize % Kind::COLLECTIVES.len()];
                let spec = spec(kind, Dtype::F32, ReduceOp::Sum, [10, 5000, 20_000][seed as usize / 6], seed, ranks);
                let mut buffers = spec.buffers(me, ranks);
                groups[me].run(spec.request(&mut buffers), None).unwrap();
                spec.check(&buffers, me, ranks);
            }
            groups[me].shutdown();
        });
    }
}

/// From a certain size on, an all_reduce over three or more hosts with one rank each works in the tensors themselves.
/// Tests sizes below and above this size. Each rank in turn passes a different reduce op from all others.
#[test]
fn rule_05_a_different_call_leaves_the_tensors_of_all_hosts_as_they_were() {
    for (place, count) in [(&[0, 1][..], 600_000), (&[0, 1, 2], 100), (&[0, 1, 2], 600_000), (&[0, 1, 2, 3], 600_000)] {
        for odd in 0..place.len() {
            let groups = groups(place, Settings::default(), Duration::from_secs(20));
            on_ranks(place.len(), |me| {
                std::thread::sleep(Duration::from_millis((me * 7 + odd * 5) as u64 % 13));
                let op = if me == odd { ReduceOp::Max } else { ReduceOp::Sum };
                let spec = Spec { in_place: true, ..spec(Kind::AllReduce, Dtype::I32, op, count, 0, place.len()) };
                let mut buffers = spec.buffers(me, place.len());
                let before = buffers.input.to_vec();
                let error = groups[me].run(spec.request(&mut buffers), None).unwrap_err().to_string();
                assert!(error.contains("MAX") && error.contains("SUM"), "{error}");
                assert!(buffers.input[..] == before[..], "rank {me} of {place:?} with {count} numbers, {odd} differs");
            });
        }
    }
}

#[test]
fn a_rank_that_does_not_come_fails_the_others_at_the_deadline_and_names_somebody() {
    let place = [0, 0, 1, 1];
    let groups = groups(&place, Settings::default(), Duration::from_millis(700));
    let errors = on_ranks(place.len(), |me| {
        if me == 3 {
            return String::new();
        }
        let spec = spec(Kind::AllReduce, Dtype::F32, ReduceOp::Sum, 10, 1, place.len());
        let mut buffers = spec.buffers(me, place.len());
        groups[me].run(spec.request(&mut buffers), None).unwrap_err().to_string()
    });
    for error in &errors[..3] {
        assert!(
            error.contains("Timed out") && error.contains("all_reduce(40 bytes, float32, SUM) number 1"),
            "{error}"
        );
    }
}

#[test]
fn an_abort_ends_everything_on_all_hosts() {
    use std::sync::atomic::Ordering::Relaxed;
    let place = [0, 0, 1, 1];
    let groups = groups(&place, Settings::default(), LONG);
    let ended = std::sync::atomic::AtomicUsize::new(0);
    on_ranks(place.len(), |me| {
        let run = |count: usize| {
            let spec = spec(Kind::AllReduce, Dtype::F32, ReduceOp::Sum, count, 1, place.len());
            let mut buffers = spec.buffers(me, place.len());
            groups[me].run(spec.request(&mut buffers), None)
        };
        run(10).unwrap();
        ended.fetch_add(1, Relaxed);
        if me == 3 {
            // An abort would also fail a rank that is still in its first call, so this rank waits until all first calls
            // have ended.
            let begin = std::time::Instant::now();
            while ended.load(Relaxed) < place.len() && begin.elapsed() < LONG {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(50)); // so that the others usually wait in their second call
            groups[me].abort("the test says so");
            return;
        }
        let error = run(20).unwrap_err().to_string();
        assert!(error.contains("the test says so") || error.contains("lost the connection"), "{error}");
    });
}
