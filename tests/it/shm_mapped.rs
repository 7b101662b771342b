//! Collectives on tensors that peers can reach: the same bits as the reference, whoever has such tensors, and no copy on the
//! way where all have them. Ranks are threads; `tests/py/fault/test_reachable.py` stops and kills processes.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Random, Spec, on_ranks};
use sagellm::group::Group;
use sagellm::types::{Dtype, Kind, ReduceOp};

fn groups(ranks: usize) -> Vec<Arc<Group>> {
    Group::local(ranks, Duration::from_secs(60)).unwrap()
}

/// The algorithm of the last collective of this rank.
fn last_path(group: &Group) -> String {
    let past = group.explain_number(group.sequence()).expect("a collective was called").past.expect("it has ended");
    past.choice.expect("it has ended").path.to_string()
}

fn spec(kind: Kind, count: usize, seed: u64, ranks: usize) -> Spec {
    Spec {
        kind,
        dtype: if seed.is_multiple_of(4) { Dtype::Bf16 } else { Dtype::F32 },
        op: if seed.is_multiple_of(3) && !seed.is_multiple_of(4) { ReduceOp::Max } else { ReduceOp::Sum },
        root: seed as usize % ranks,
        count,
        skew: [0, 37][seed as usize % 2],
        in_place: seed.is_multiple_of(2),
        pieces: 1 + seed as usize % 3,
        seed,
    }
}

#[test]
fn rule_17_every_kind_has_the_bits_of_the_reference_and_is_mapped() {
    const MOVING: [Kind; 8] = [
        Kind::AllReduce,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::AllGather,
        Kind::Gather,
        Kind::Scatter,
        Kind::ReduceScatter,
        Kind::AllToAll,
    ];
    for ranks in [2, 3, 4, 5, 9] {
        let groups = groups(ranks);
        on_ranks(ranks, |me| {
            // The ranks learn from the headers of the first call where the arena lies.
            let mut seed = 1000;
            for count in [9000, 9001, 65_536, 300_001] {
                if ranks > 4 && count > 70_000 {
                    continue;
                }
                for kind in MOVING {
                    seed += 1;
                    let spec = spec(kind, count, seed, ranks);
                    let mut buffers = spec.buffers(me, ranks).in_arena();
                    let request = spec.request(&mut buffers);
                    groups[me].run(request, None).unwrap_or_else(|error| panic!("rank {me}: {spec:?}: {error}"));
                    spec.check(&buffers, me, ranks);
                    assert!(seed == 1001 || last_path(&groups[me]) == "mapped", "{spec:?}: {}", last_path(&groups[me]));
                }
            }
        });
    }
}

#[test]
fn ranks_with_ordinary_tensors_take_part_and_all_decide_alike() {
    for ranks in [2, 3, 5] {
        let groups = groups(ranks);
        on_ranks(ranks, |me| {
            let (mut common, mut own) = (Random::new(7), Random::new(100 + me as u64));
            let mut mapped = 0;
            for turn in 0..400 {
                let kind = common.pick(&Kind::COLLECTIVES);
                let count = common.pick(&[0, 3, 900, 5000, 20_000, 90_000]);
                let spec = spec(kind, count, common.next() | 1, ranks);
                let buffers = spec.buffers(me, ranks);
                // In half of the calls every rank has such tensors, in the others it is left to chance.
                let shared = common.below(2) == 0 || own.below(3) > 0;
                let mut buffers = if shared { buffers.in_arena() } else { buffers };
                if own.below(40) == 0 {
                    std::thread::sleep(Duration::from_micros(300));
                }
                let request = spec.request(&mut buffers);
                if common.below(3) == 0 {
                    groups[me].issue(request, None).unwrap().wait(None).unwrap();
                } else {
                    groups[me].run(request, None).unwrap_or_else(|error| panic!("rank {me}: {turn} {spec:?}: {error}"));
                }
                spec.check(&buffers, me, ranks);
                mapped += usize::from(last_path(&groups[me]) == "mapped");
            }
            assert!((20..380).contains(&mapped), "{mapped} of 400");
        });
    }
}

#[test]
fn several_are_under_way_at_once() {
    let ranks = 3;
    let groups = groups(ranks);
    on_ranks(ranks, |me| {
        for turn in 0..20 {
            let specs: Vec<Spec> = (0..6)
                .map(|at| spec(Kind::AllReduce, [20_000, 5000, 300][at % 3], turn * 10 + at as u64, ranks))
                .collect();
            let mut all: Vec<_> = specs.iter().map(|spec| spec.buffers(me, ranks).in_arena()).collect();
            let ops: Vec<_> = specs
                .iter()
                .zip(&mut all)
                .map(|(spec, buffers)| groups[me].issue(spec.request(buffers), None).unwrap())
                .collect();
            ops.iter().for_each(|op| op.wait(None).unwrap());
            specs.iter().zip(&all).for_each(|(spec, buffers)| spec.check(buffers, me, ranks));
        }
    });
}

#[test]
fn two_groups_may_use_one_tensor_one_after_the_other() {
    let (one, two) = (groups(2), groups(2));
    on_ranks(2, |me| {
        let spec = Spec { in_place: false, pieces: 1, ..spec(Kind::AllReduce, 30_000, 5, 2) };
        let mut buffers = spec.buffers(me, 2).in_arena();
        for turn in 0..10 {
            let group = [&one, &two][turn % 2];
            group[me].run(spec.request(&mut buffers), None).unwrap();
            spec.check(&buffers, me, 2);
            assert!(turn < 2 || last_path(&group[me]) == "mapped");
        }
    });
}
