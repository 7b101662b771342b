//! If results are compared (`verify`), bits that flip in one rank's results are found and, from three ranks on,
//! attributed to that rank. Ranks are threads; a bit flips in the caller's memory right before the engine hashes it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Buffers, Random, Spec, on_ranks, plain};
use sagellm::config::Verify;
use sagellm::engine::local;
use sagellm::engine::verify::flips;
use sagellm::error::{Error, ErrorKind};
use sagellm::group::Group;
use sagellm::select::Policy;
use sagellm::types::{Dtype, Kind, ReduceOp};

/// The kinds whose results are equal on all ranks.
const EQUAL: [Kind; 3] = [Kind::AllReduce, Kind::Broadcast, Kind::AllGather];

fn groups(ranks: usize, verify: &str) -> Vec<Arc<Group>> {
    let policy = |_| Policy { verify: Verify::parse(verify).unwrap(), ..Policy::default() };
    Group::over_with(local::areas(ranks).unwrap(), Duration::from_secs(60), policy)
}

fn spec(random: &mut Random, ranks: usize, largest: usize) -> Spec {
    let (dtype, op) = random.pick(&[
        (Dtype::F32, ReduceOp::Sum),
        (Dtype::F64, ReduceOp::Sum),
        (Dtype::Bf16, ReduceOp::Sum),
        (Dtype::I32, ReduceOp::Max),
        (Dtype::U8, ReduceOp::Sum),
    ]);
    let counts = [1, 2, 9, 40, 200, 1000, 1025, 5000, 20_000, 70_000, 300_000];
    let counts: Vec<usize> = counts.into_iter().filter(|count| *count <= largest).collect();
    Spec {
        kind: random.pick(&EQUAL),
        dtype,
        op,
        root: random.below(ranks),
        count: random.pick(&counts),
        skew: random.below(2) * random.below(30),
        in_place: false,
        pieces: 1 + random.below(3),
        seed: random.next(),
    }
}

/// Returns the memory of a rank's result.
fn result<'a>(spec: &Spec, buffers: &'a Buffers, me: usize) -> &'a [u8] {
    if spec.kind == Kind::Broadcast && me == spec.root { &buffers.input } else { buffers.result() }
}

/// Runs operations on each rank until the group fails, but at most `most` of them. Returns the smallest number of
/// operations that a rank has run, and the error of each rank.
fn until_found(
    groups: &[Arc<Group>],
    spec: &Spec,
    victim: usize,
    arena: bool,
    most: usize,
    at: u64,
) -> (usize, Vec<Error>) {
    let ranks = groups.len();
    let found = on_ranks(ranks, |me| {
        let group = &groups[me];
        let mut buffers = spec.buffers(me, ranks);
        if arena {
            buffers = buffers.in_arena();
        }
        // Other operations come first, as in a program; their number differs between cases.
        for _ in 0..at % 5 {
            group.run(plain(Kind::Barrier, 0, Vec::new(), Vec::new()), None).unwrap();
        }
        let bytes = result(spec, &buffers, me);
        let address = bytes.as_ptr() as usize + (at as usize / 8) % bytes.len();
        if me == victim {
            flips::start(address, 1 << (at % 8));
        }
        let mut error = None;
        let mut done = 0;
        while error.is_none() && done < most {
            let request = spec.request(&mut buffers);
            error = match at.is_multiple_of(3) {
                true => group.issue(request, None).and_then(|op| op.wait(None)).err(),
                false => group.run(request, None).err(),
            };
            done += 1;
        }
        if me == victim {
            flips::stop(address);
        }
        for _ in 0..3 {
            let barrier = || group.run(plain(Kind::Barrier, 0, Vec::new(), Vec::new()), None);
            error = error.or_else(|| barrier().err());
        }
        (done, error.unwrap_or_else(|| panic!("rank {me} of {ranks}: not found: {spec:?}, bit {at} of rank {victim}")))
    });
    let (done, errors): (Vec<usize>, Vec<Error>) = found.into_iter().unzip();
    (done.into_iter().min().unwrap(), errors)
}

fn check(errors: &[Error], victim: usize, spec: &Spec) {
    let ranks = errors.len();
    for (me, error) in errors.iter().enumerate() {
        let blamed = (ranks > 2).then_some(victim);
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Corrupt, blamed), "rank {me}, {spec:?}: {error}");
    }
}

#[test]
fn every_flipped_bit_of_a_result_is_found_and_attributed() {
    let flips: u64 = std::env::var("SAGELLM_TEST_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(120);
    for trial in 0..flips {
        crate::common::progress("flipped bits", trial, flips);
        let mut random = Random::new(trial + 77);
        let ranks = 2 + trial as usize % 3;
        let spec = spec(&mut random, ranks, 300_000);
        let victim = random.below(ranks);
        let groups = groups(ranks, "all");
        let (_, errors) = until_found(&groups, &spec, victim, random.below(2) == 0, 1, random.next() >> 8);
        check(&errors, victim, &spec);
    }
}

#[test]
fn a_bit_that_flips_again_and_again_is_found_within_64_operations_by_samples() {
    let flips: u64 = std::env::var("SAGELLM_TEST_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(120);
    let mut needed: BTreeMap<usize, u64> = BTreeMap::new();
    for trial in 0..flips {
        crate::common::progress("flipped bits in samples", trial, flips);
        let mut random = Random::new(trial + 7777);
        let ranks = 2 + trial as usize % 3;
        let spec = spec(&mut random, ranks, 70_000);
        let victim = random.below(ranks);
        let groups = groups(ranks, "sampled");
        let (done, errors) = until_found(&groups, &spec, victim, random.below(2) == 0, 64, random.next() >> 8);
        check(&errors, victim, &spec);
        *needed.entry(done.div_ceil(8) * 8).or_default() += 1;
    }
    println!("operations until it was found, in steps of 8: {needed:?}");
}

#[test]
fn a_difference_is_only_logged_if_so_asked() {
    let groups = groups(3, "all:warn");
    on_ranks(3, |me| {
        let mut memory = vec![1u8; 4000];
        let address = memory.as_ptr() as usize + 77;
        if me == 1 {
            flips::start(address, 4);
        }
        for _ in 0..40 {
            let spans = crate::common::cut(&mut memory, 1, 1);
            groups[me].run(plain(Kind::AllReduce, 0, spans.clone(), spans), None).unwrap();
        }
        flips::stop(address);
    });
}

#[test]
fn results_that_differ_by_contract_are_not_compared() {
    let groups = groups(3, "all");
    on_ranks(3, |me| {
        for seed in 0..60 {
            let kind =
                [Kind::Reduce, Kind::ReduceScatter, Kind::Gather, Kind::Scatter, Kind::AllToAll][seed as usize % 5];
            let count = [3, 900, 40_000][seed as usize % 3];
            let (dtype, op) = (Dtype::F32, ReduceOp::Sum);
            let spec = Spec { kind, dtype, op, root: 1, count, skew: 0, in_place: false, pieces: 1, seed };
            let mut buffers = spec.buffers(me, 3);
            groups[me].run(spec.request(&mut buffers), None).unwrap();
            spec.check(&buffers, me, 3);
        }
    });
}

#[test]
fn a_rank_that_compares_and_one_that_does_not_get_an_error() {
    let policy = |rank| Policy { verify: Verify::parse(["off", "all"][rank]).unwrap(), ..Policy::default() };
    let groups = Group::over_with(local::areas(2).unwrap(), Duration::from_secs(60), policy);
    on_ranks(2, |me| {
        let error = groups[me].run(plain(Kind::Barrier, 0, Vec::new(), Vec::new()), None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
    });
}
