//! Explanations of past operations: for every operation of a run, the explanation that is recomputed later equals the
//! record. Tests one host and several hosts, single operations and batches. A lookup by number and a lookup by
//! operation give the same explanation.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Buffers, Random, Spec, on_ranks};
use sagellm::config::Settings;
use sagellm::engine::local;
use sagellm::group::{Group, Op};
use sagellm::select::explain::{Batch, Explanation};
use sagellm::select::rules::Rules;
use sagellm::select::start::Topology;
use sagellm::select::{OpDesc, Path, Policy, Reason};
use sagellm::types::{Dtype, Kind, ReduceOp};

const TIMEOUT: Duration = Duration::from_secs(60);
const OPS: usize = 300;

/// Returns a program of mostly small operations of two kinds, which form batches. It also has every other kind, and
/// operations that are cut into segments.
fn program(seed: u64, ranks: usize) -> Vec<Spec> {
    let mut random = Random::new(seed);
    let mut one = |at: usize| {
        let small = !at.is_multiple_of(25);
        let run = [Kind::AllReduce, Kind::AllGather][at / 50 % 2];
        let (dtype, op) =
            random.pick(&[(Dtype::F32, ReduceOp::Sum), (Dtype::F32, ReduceOp::Sum), (Dtype::I32, ReduceOp::Sum)]);
        let most = random.pick(&[1, 2000, 40_000, 1_000_000]);
        Spec {
            kind: if small { run } else { random.pick(&Kind::COLLECTIVES) },
            dtype,
            op,
            root: random.below(ranks),
            count: random.below(if small { 200 } else { most }),
            skew: if small { 0 } else { random.below(2) * 3 },
            in_place: random.below(2) == 0,
            pieces: 1 + random.below(3),
            seed: random.next(),
        }
    };
    (0..OPS).map(&mut one).collect()
}

/// Issues all operations, then waits for all. Returns for each rank the explanations in the order of the numbers.
fn run(groups: &[Arc<Group>], program: &[Spec]) -> Vec<Vec<Explanation>> {
    let ranks = groups.len();
    on_ranks(ranks, |me| {
        let mut issued: Vec<(Arc<Op>, Buffers)> = Vec::new();
        for spec in program {
            let mut buffers = spec.buffers(me, ranks);
            issued.push((groups[me].issue(spec.request(&mut buffers), None).unwrap(), buffers));
            let newest = issued.last().unwrap().0.explain();
            let choice = newest.past.unwrap().choice;
            assert!(choice.is_none_or(|choice| choice == newest.choice), "while it runs: {spec:?}");
        }
        let each = issued.iter_mut().zip(program).map(|((op, buffers), spec)| {
            op.wait(None).unwrap_or_else(|error| panic!("rank {me}: {spec:?}: {error}"));
            let found = groups[me].explain_number(op.number()).unwrap();
            assert_eq!(found, op.explain(), "by number and by the operation: {spec:?}");
            let past = found.past.unwrap();
            assert_eq!(past.number, op.number());
            assert_eq!(past.choice, Some(found.choice), "rank {me} of {ranks}: {spec:?}");
            assert_eq!(op.choice(), found.choice);
            assert_ne!(found.choice.reason, Reason::Unknown);
            let request = spec.request(buffers);
            assert_eq!(found.desc, OpDesc::of(&request, ranks), "{spec:?}");
            let Batch { count, first, last, .. } = past.batch.expect("it is over");
            assert!((first..=last).contains(&past.number) && count >= 1, "{past:?}");
            found
        });
        each.collect()
    })
}

fn batch(found: &Explanation) -> Batch {
    found.past.unwrap().batch.unwrap()
}

/// Checks a run between hosts. Every batch reports all of its operations, is the same on all ranks, and has one path,
/// which was chosen for the total bytes of the batch. Returns the number of operations in the longest batch.
fn check_batches(found: &[Vec<Explanation>]) -> u64 {
    let ways = |rank: &Vec<Explanation>| rank.iter().map(|one| (one.choice, batch(one))).collect::<Vec<_>>();
    assert!(found.windows(2).all(|pair| ways(&pair[0]) == ways(&pair[1])), "the same on all ranks");
    for one in &found[0] {
        let Batch { count, first, last, bytes } = batch(one);
        assert_eq!(last - first + 1, count);
        let whole = |numbers: Range<u64>| numbers.map(|number| &found[0][number as usize - 1]);
        let members: Vec<&Explanation> = whole(first..last + 1).collect();
        assert!(members.iter().all(|member| batch(member) == batch(one) && member.choice == one.choice));
        let sum = members.iter().map(|member| member.desc.bytes).sum::<u64>();
        assert_eq!(bytes, (count > 1).then_some(sum));
        let Path::Hosts { algorithm, .. } = one.choice.path else { panic!("{:?} between hosts", one.choice.path) };
        assert!(algorithm.serves(one.desc.kind));
    }
    found[0].iter().map(|one| batch(one).count).max().unwrap()
}

#[test]
fn between_hosts_every_operation_is_explained_by_the_batch_it_was_in() {
    let places: [&[usize]; 4] = [&[0, 1], &[0, 0, 1, 1], &[0, 1, 2], &[0, 1, 0, 2, 2]];
    let rules =
        ["", "*:0-=ring", "all_reduce:0-1KiB=recursive_doubling;all_reduce:0-=double_tree(leaders=2,segment=1MiB)"];
    let (mut longest, topology) = (0, Topology { hosts: 2, full_nvlink: true });
    for (seed, place) in (1..).zip(places) {
        let program = program(seed, place.len());
        let ways = rules.into_iter().map(|text| (false, text, None));
        for (strict, text, topology) in ways.chain([(true, "", None), (false, "", Some(topology))]) {
            let policy = Policy { rules: Rules::parse(text).unwrap(), topology, ..Policy::default() };
            let settings = Settings { strict, ..Settings::default() };
            let links = local::links(place.len());
            let groups = Group::local_hosts_with(place, TIMEOUT, settings, links, &policy).unwrap();
            longest = longest.max(check_batches(&run(&groups, &program)));
            on_ranks(place.len(), |me| groups[me].shutdown());
        }
    }
    assert!(longest > 2, "in {OPS} operations at once, 20 times, none travelled together");
}

#[test]
fn without_fusion_each_is_alone() {
    let settings = Settings { fusion: false, ..Settings::default() };
    let groups = Group::local_hosts(&[0, 1, 1], TIMEOUT, settings, local::links(3)).unwrap();
    assert_eq!(check_batches(&run(&groups, &program(5, 3))), 1);
    on_ranks(3, |me| groups[me].shutdown());
}

/// Checks a run on one host: the size of the batch that an operation reports equals the number of operations that
/// report this batch.
fn check_passes(found: &[Explanation]) {
    for one in found {
        let Batch { count, first, last, bytes } = batch(one);
        assert_eq!(bytes, None, "each goes its own way");
        let alike: Vec<u64> =
            found.iter().filter(|other| batch(other) == batch(one)).map(|other| other.past.unwrap().number).collect();
        assert_eq!((alike.len() as u64, alike[0], *alike.last().unwrap()), (count, first, last));
    }
}

#[test]
fn on_one_host_every_operation_is_explained() {
    for ranks in [1, 2, 3] {
        let groups = Group::local(ranks, TIMEOUT).unwrap();
        let found = run(&groups, &program(9, ranks));
        found.iter().for_each(|rank| check_passes(rank));
        let ways = |rank: &Vec<Explanation>| rank.iter().map(|one| one.choice).collect::<Vec<_>>();
        assert!(found.windows(2).all(|pair| ways(&pair[0]) == ways(&pair[1])), "the same on all ranks");
    }
}

#[test]
fn on_one_host_those_that_end_in_one_pass_know_of_one_another() {
    let groups = Group::local(2, TIMEOUT).unwrap();
    let one = Spec { count: 10, ..program(1, 2)[0].clone() };
    let issue = |me: usize| {
        let mut buffers = one.buffers(me, 2);
        (groups[me].issue(one.request(&mut buffers), None).unwrap(), buffers)
    };
    let pending: Vec<_> = (0..5).map(|_| issue(0)).collect();
    let running = groups[0].explain_number(3).unwrap();
    assert_eq!((running.past.unwrap().choice, running.past.unwrap().batch), (Some(running.choice), None));
    let others: Vec<_> = (0..5).map(|_| issue(1)).collect();
    for (op, _) in pending.iter().chain(&others) {
        op.wait(None).unwrap();
    }
    let all = |me: usize| (1..=5).map(|number| groups[me].explain_number(number).unwrap()).collect::<Vec<_>>();
    check_passes(&all(0));
    assert!(all(1).iter().all(|one| batch(one).count == 1), "rank 1 came last each time");
}

#[test]
fn what_is_forgotten_or_never_was_is_an_error_that_says_so() {
    let groups = Group::local(1, TIMEOUT).unwrap();
    let one = Spec { count: 1, ..program(1, 1)[0].clone() };
    let mut buffers = one.buffers(0, 1);
    for _ in 0..2000 {
        groups[0].run(one.request(&mut buffers), None).unwrap();
    }
    let text = |number| groups[0].explain_number(number).unwrap_err().to_string();
    for never in [0, 2001, u64::MAX] {
        assert!(
            text(never).contains(&format!("has issued 2000 collectives on this rank, and none has number {never}"))
        );
    }
    assert!(text(1).contains("collective 1 of group 'local' is forgotten"), "{}", text(1));
    assert!(text(1).contains("the last 1024 operations are kept, collectives from 977 on"), "{}", text(1));
    assert_eq!(groups[0].explain_number(977).unwrap().choice.path, Path::Alone);
}
