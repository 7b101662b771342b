//! The choice of algorithms in running groups: the results are the same under any rules, every rank chooses the same
//! algorithm, and the explanation computed afterwards equals the record.

use std::time::Duration;

use crate::common::{Random, Spec, on_ranks};
use sagellm::algorithms::Algorithm;
use sagellm::config::Settings;
use sagellm::engine::local;
use sagellm::group::Group;
use sagellm::select::rules::Rules;
use sagellm::select::start::Topology;
use sagellm::select::table::{Key, Line, Table};
use sagellm::select::{Path, Policy, Reason};
use sagellm::types::{Dtype, Kind, ReduceOp};

const TIMEOUT: Duration = Duration::from_secs(60);

fn spec(random: &mut Random, ranks: usize) -> Spec {
    let (dtype, op) = random.pick(&[(Dtype::F32, ReduceOp::Sum), (Dtype::Bf16, ReduceOp::Sum)]);
    let most = random.pick(&[20, 2000, 100_000]);
    Spec {
        kind: random.pick(&Kind::COLLECTIVES),
        dtype,
        op,
        root: random.below(ranks),
        count: random.below(most),
        skew: random.below(2) * random.below(50),
        in_place: random.below(2) == 0,
        pieces: 1 + random.below(3),
        seed: random.next(),
    }
}

fn policy(rules: &str, lines: &[&str]) -> Policy {
    let key = Key { version: "0".into(), machine: "here".into(), ranks: 2 };
    let lines: Vec<Line> = lines.iter().map(|line| Line::parse(line).unwrap()).collect();
    let table = (!lines.is_empty()).then_some(Table { key, made: "now".into(), lines });
    Policy { rules: Rules::parse(rules).unwrap(), table, ..Policy::default() }
}

#[test]
fn rule_17_bits_and_explanations_hold_under_every_policy() {
    let policies = [
        policy("", &[]),
        policy("*:0-=rounds(1KiB)", &[]),
        policy("*:0-100=rounds(1088);all_to_all:0-=rounds(4KiB);*:5000-=rounds(1GiB)", &[]),
        policy("broadcast:0-=start", &["*:0-=rounds(8KiB) 10 ns; start 20 ns"]),
    ];
    for (seed, policy) in (1..).zip(&policies) {
        for ranks in [2, 3, 5] {
            let groups = Group::over_with(local::areas(ranks).unwrap(), TIMEOUT, |_| policy.clone());
            let mut random = Random::new(seed * 100 + ranks as u64);
            let program: Vec<Spec> = (0..60).map(|_| spec(&mut random, ranks)).collect();
            let codes = on_ranks(ranks, |me| {
                let run = program.iter().map(|spec| {
                    let mut buffers = spec.buffers(me, ranks);
                    let op = groups[me].issue(spec.request(&mut buffers), None).unwrap();
                    op.wait(None).unwrap_or_else(|error| panic!("rank {me}: {spec:?}: {error}"));
                    spec.check(&buffers, me, ranks);
                    let explained = op.explain();
                    assert_eq!(explained.choice, op.choice(), "{spec:?}");
                    assert_ne!(explained.choice.reason, Reason::Unknown);
                    let again = groups[me].explain(spec.kind, explained.desc.bytes, spec.dtype);
                    assert_eq!(again.choice, op.choice(), "asked for without the operation: {spec:?}");
                    op.choice().code()
                });
                run.collect::<Vec<u64>>()
            });
            assert!(codes.windows(2).all(|pair| pair[0] == pair[1]), "all ranks take the same ways");
        }
    }
}

#[test]
fn ranks_with_different_policies_find_out_before_data_moves() {
    for (ours, theirs) in [("", "*:0-=rounds(1KiB)"), ("*:1GiB-=rounds(1KiB)", "*:1GiB-=rounds(2KiB)")] {
        let groups = Group::over_with(local::areas(2).unwrap(), TIMEOUT, |rank| policy([ours, theirs][rank], &[]));
        let one = Spec {
            kind: Kind::AllReduce,
            dtype: Dtype::F32,
            op: ReduceOp::Sum,
            root: 0,
            count: 16,
            skew: 0,
            in_place: false,
            pieces: 1,
            seed: 5,
        };
        let errors = on_ranks(2, |me| {
            let mut buffers = one.buffers(me, 2);
            let error = groups[me].run(one.request(&mut buffers), None).unwrap_err();
            assert!(buffers.output.iter().all(|byte| *byte == buffers.output[0]), "no data was written");
            error
        });
        assert!(errors.iter().any(|error| error.text().contains("different tables or rules")), "{errors:?}");
    }
}

#[test]
fn a_group_of_one_and_messages_have_one_way() {
    let alone = Group::local(1, TIMEOUT).unwrap();
    let barrier = alone[0].explain(Kind::Barrier, 8, Dtype::F32);
    assert_eq!((barrier.choice.path, barrier.desc.bytes), (Path::Alone, 0));
    let pair = Group::local(2, TIMEOUT).unwrap();
    assert_eq!(pair[0].explain(Kind::Send, 1 << 20, Dtype::Bytes).choice.path, Path::Message);
}

/// Runs an all_reduce of `count` numbers on threads as ranks; `place` has the host of each rank. Returns the algorithm
/// between the hosts and the reason, which must be the same on all ranks, and the text that says what decided.
fn between_hosts(place: &[usize], policy: &Policy, count: usize) -> (Algorithm, Reason, String) {
    let ranks = place.len();
    let groups =
        Group::local_hosts_with(place, TIMEOUT, Settings::default(), local::links(ranks), policy).expect("a group");
    let one = Spec {
        kind: Kind::AllReduce,
        dtype: Dtype::F32,
        op: ReduceOp::Max, // its algorithm is chosen like that of a sum, and its result does not depend on the order
        root: 0,
        count,
        skew: 0,
        in_place: true,
        pieces: 1,
        seed: 7,
    };
    let found = on_ranks(ranks, |me| {
        let mut buffers = one.buffers(me, ranks);
        let op = groups[me].issue(one.request(&mut buffers), None).unwrap();
        op.wait(None).unwrap();
        one.check(&buffers, me, ranks);
        let explained = op.explain();
        assert_eq!(explained.choice, op.choice(), "what is worked out again is what was recorded");
        let Path::Hosts { algorithm, .. } = op.choice().path else { panic!("{:?}", op.choice()) };
        (algorithm, op.choice().reason, explained.decided)
    });
    on_ranks(ranks, |me| groups[me].shutdown());
    assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "all ranks take the same way: {found:?}");
    found[0].clone()
}

#[test]
fn a_topology_changes_what_a_live_group_takes_and_a_rule_comes_before_it() {
    const SMALL: usize = 100;
    const LARGE: usize = 1_500_000;
    let given = |full_nvlink, rules: &str| {
        let topology = Some(Topology { hosts: 4, full_nvlink });
        Policy { topology, ..policy(rules, &[]) }
    };
    let place = [0, 0, 1, 2, 3];
    let at = |policy: &Policy, count| between_hosts(&place, policy, count);
    // Without a topology, small sums need one order of summation, and the measurements of the link decide for large
    // sums.
    let small = at(&policy("", &[]), SMALL);
    assert_eq!((small.0, small.1), (Algorithm::Direct, Reason::OneOrder));
    let large = at(&policy("", &[]), LARGE);
    assert_eq!(large.1, Reason::Model);
    for (full_nvlink, count, expected) in [
        (false, SMALL, (Algorithm::Doubling, Reason::FewSteps)),
        (true, SMALL, (Algorithm::Binomial, Reason::FullNvlink)),
        (false, LARGE, (Algorithm::Ring, Reason::FewBytes)),
        (true, LARGE, (Algorithm::Ring, Reason::FewBytes)),
    ] {
        let (algorithm, reason, decided) = at(&given(full_nvlink, ""), count);
        assert_eq!((algorithm, reason), expected);
        let named = format!("says hosts=4,full_nvlink={full_nvlink}");
        assert!(decided.starts_with("start rule hierarchical (") && decided.ends_with(&named), "{decided}");
    }
    for (rules, count, expected) in [
        ("all_reduce:0-=torus", LARGE, Algorithm::Torus),
        ("all_reduce:0-=hierarchical", LARGE, Algorithm::Ring),
        ("all_reduce:0-=hierarchical", SMALL, Algorithm::Binomial),
        ("all_reduce:0-=tree", LARGE, Algorithm::Binomial),
        ("all_reduce:0-=recursive_doubling", LARGE, Algorithm::Doubling),
    ] {
        let (algorithm, reason, _) = at(&given(true, rules), count);
        assert_eq!((algorithm, reason), (expected, Reason::Override), "{rules}");
    }
}
