//! The choice inside live groups: whatever the rules say, the results stay the same, every rank takes the same way, and
//! the explanation worked out afterwards is what was recorded.

mod common;

use std::time::Duration;

use common::{Random, Spec, on_ranks};
use sagellm::engine::local;
use sagellm::error::Error;
use sagellm::group::Group;
use sagellm::select::rules::Rules;
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
        assert!(
            errors
                .iter()
                .any(|error| matches!(error, Error::Mismatch(text) if text.contains("different tables or rules"))),
            "{errors:?}"
        );
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
