//! Collectives on tensors that peers can map have the bits of the reference, whichever ranks have such tensors. The
//! algorithm is `mapped` if all ranks have them. Ranks are threads; `tests/py/fault/test_reachable.py` stops and kills
//! processes.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::common::reference::{is_defined, reference_all};
use crate::common::{Memory, Random, Spec, areas_on, cut, on_ranks, plain};
use sagellm::engine::shm::nodes::{Level, Nodes};
use sagellm::group::Group;
use sagellm::os::fault_points;
use sagellm::os::fault_points::FaultPoint;
use sagellm::os::topology;
use sagellm::types::{Dtype, Kind, ReduceOp};

fn groups(ranks: usize) -> Vec<Arc<Group>> {
    Group::local(ranks, Duration::from_secs(60)).unwrap()
}

/// Returns the algorithm of the last collective of this rank.
fn last_path(group: &Group) -> String {
    let past = group.explain_number(group.sequence()).expect("a collective was called").past.expect("it has ended");
    past.choice.expect("it has ended").path.to_string()
}

/// Returns whether the explanation of this rank's last collective says what was recorded.
fn explains_its_record(group: &Group) -> bool {
    let found = group.explain_number(group.sequence()).expect("a collective was called");
    Some(found.choice) == found.past.expect("it has ended").choice
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
fn rule_36_every_kind_has_the_bits_of_the_reference_and_is_mapped() {
    const ROOTED: [Kind; 3] = [Kind::Broadcast, Kind::Scatter, Kind::Gather];
    for ranks in [2, 3, 4, 5, 9] {
        let groups = groups(ranks);
        on_ranks(ranks, |me| {
            // In the first call (seed 1001) each rank publishes the identity of its arena. The call is mapped only if
            // every rank has published it before any rank looks.
            let mut seed = 1000;
            for count in [9000, 9001, 65_536, 600_001] {
                if ranks > 4 && count > 70_000 {
                    continue;
                }
                for kind in Kind::COLLECTIVES {
                    seed += 1;
                    let spec = spec(kind, count, seed, ranks);
                    let mut buffers = spec.buffers(me, ranks).in_arena();
                    let request = spec.request(&mut buffers);
                    groups[me].run(request, None).unwrap_or_else(|error| panic!("rank {me}: {spec:?}: {error}"));
                    spec.check(&buffers, me, ranks);
                    let rooted = ROOTED.contains(&kind);
                    let crowded = ranks > topology::usable_cores() && kind != Kind::Scatter;
                    let large = !rooted || count * spec.dtype.size() >= if crowded { 2 << 20 } else { 1 << 20 };
                    let mapped = kind != Kind::Barrier && large;
                    let path = last_path(&groups[me]);
                    assert!((path == "mapped") == mapped || seed == 1001, "{spec:?}: {path}");
                    assert!(explains_its_record(&groups[me]), "{spec:?}");
                }
            }
        });
    }
}

#[test]
fn rule_36_ranks_with_ordinary_tensors_take_part_and_all_decide_alike() {
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
                // In half of the calls every rank has reachable tensors. In the other half each rank has them in two of
                // three cases.
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

/// Runs operations until every rank knows the arenas of its peers.
fn acquaint(group: &Group, me: usize, ranks: usize) {
    for _ in 0..2 {
        let spec = spec(Kind::AllReduce, 20_000, 5, ranks);
        let mut buffers = spec.buffers(me, ranks).in_arena();
        group.run(spec.request(&mut buffers), None).unwrap();
    }
    assert_eq!(last_path(group), "mapped");
}

#[test]
fn blocks_that_lie_in_the_slot_are_not_overwritten_by_an_offer() {
    // Rank 0 sends so little that its blocks fit into its slot, and receives much more.
    let sizes = [[501, 503], [19_507, 20_011]];
    let value = |from: usize, to: usize, at: usize| (from * 100 + to * 50 + at % 47) as u8;
    let groups = groups(2);
    on_ranks(2, |me| {
        acquaint(&groups[me], me, 2);
        for ordinary in [[false, false], [false, true], [true, false]] {
            let blocks = (0..2).flat_map(|to| (0..sizes[me][to]).map(move |at| value(me, to, at)));
            let bytes: Vec<u8> = blocks.collect();
            let in_memory = |bytes: Vec<u8>| if ordinary[me] { Memory::Own(bytes) } else { Memory::shared(&bytes) };
            let mut input = in_memory(bytes);
            let mut output = in_memory(vec![0; sizes[0][me] + sizes[1][me]]);
            let mut request = plain(Kind::AllToAll, 0, cut(&mut input, 1, 1), cut(&mut output, 1, 1));
            request.in_blocks = sizes[me].to_vec();
            request.out_blocks = vec![sizes[0][me], sizes[1][me]];
            groups[me].run(request, None).unwrap();
            let expected: Vec<u8> =
                (0..2).flat_map(|from| (0..sizes[from][me]).map(move |at| value(from, me, at))).collect();
            assert!(output[..] == expected[..], "rank {me}, ordinary: {ordinary:?}");
        }
    });
}

#[test]
fn the_root_of_a_broadcast_that_fits_the_stage_goes_on_when_its_data_are_staged() {
    let groups = groups(2);
    let gone_on = std::sync::Barrier::new(2);
    on_ranks(2, |me| {
        acquaint(&groups[me], me, 2);
        let spec = Spec { root: 0, ..spec(Kind::Broadcast, 20_000, 5, 2) };
        let mut buffers = spec.buffers(me, 2).in_arena();
        let request = spec.request(&mut buffers);
        if me == 1 {
            gone_on.wait();
        }
        groups[me].run(request, None).unwrap();
        if me == 0 {
            gone_on.wait();
        }
        spec.check(&buffers, me, 2);
    });
}

/// In each turn another rank aborts the group at another time and overwrites its tensor, while the other ranks have issued
/// the operation and may be writing their parts.
fn abort_in_the_middle(turns: u64, bytes: usize, new: impl Fn() -> Vec<Arc<Group>>) {
    for turn in 0..turns {
        let groups = new();
        let ranks = groups.len();
        on_ranks(ranks, |me| {
            acquaint(&groups[me], me, ranks);
            let mut memory = Memory::shared(&vec![1; bytes]);
            let request = plain(Kind::AllReduce, 0, cut(&mut memory, 1, 1), cut(&mut memory, 1, 1));
            let Ok(op) = groups[me].issue(request, None) else { return }; // another rank has already aborted
            if me == turn as usize % ranks {
                std::thread::sleep(Duration::from_micros(turn * 50));
                groups[me].abort("the test gives up");
                if op.wait(None).is_err() {
                    memory.fill(9);
                    std::thread::sleep(Duration::from_millis(20));
                    assert!(memory.iter().all(|byte| *byte == 9), "a late write arrived");
                }
            } else if op.wait(None).is_ok() {
                assert!(memory.iter().all(|byte| usize::from(*byte) == ranks), "a success with wrong numbers");
            }
        });
    }
}

#[test]
fn a_rank_that_goes_on_after_the_operation_has_failed_changes_nothing() {
    abort_in_the_middle(30, 8 << 20, || groups(2));
}

#[test]
fn a_rank_of_a_relay_that_goes_on_after_the_operation_has_failed_changes_nothing() {
    abort_in_the_middle(20, 4 << 20, || groups_on(&[0, 0, 1, 1]));
}

fn groups_on(nodes: &[u32]) -> Vec<Arc<Group>> {
    Group::over(areas_on(nodes), Duration::from_secs(60))
}

/// Nodes on which a sum is made node by node, and some on which it is not: nodes with different numbers of ranks, and
/// ranks in no order.
const NODES: [&[u32]; 8] = [
    &[0, 1],
    &[0, 0, 1, 1],
    &[0, 1, 2],
    &[5, 5, 2, 2, 7, 7],
    &[0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
    &[0, 0, 1],
    &[0, 1, 0, 1],
    &[3, 0, 0, 0],
];

/// Like `Spec::expected`, for every dtype and reduction.
fn expected(spec: &Spec, me: usize, ranks: usize) -> Vec<u8> {
    let reduced = |to: usize, bytes: usize| {
        let inputs: Vec<Vec<u8>> = (0..ranks).map(|q| spec.data(q, to, bytes)).collect();
        let factors = match spec.op {
            ReduceOp::PremulSum(factor) => (0..ranks).map(|rank| factor + rank as f64).collect(),
            _ => Vec::new(),
        };
        reference_all(spec.dtype, spec.op, &inputs, &factors)
    };
    match spec.kind {
        Kind::AllReduce => reduced(0, spec.block(0, 0)),
        Kind::Reduce if me == spec.root => reduced(0, spec.block(0, 0)),
        Kind::ReduceScatter => reduced(me, spec.block(0, me)),
        _ => spec.expected(me, ranks),
    }
}

#[test]
fn rule_17_sums_that_are_made_node_by_node_have_the_same_bits() {
    const OPS: [ReduceOp; 6] =
        [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Bor, ReduceOp::PremulSum(3.0)];
    const DTYPES: [Dtype; 11] = [
        Dtype::F32,
        Dtype::Bf16,
        Dtype::F16,
        Dtype::F64,
        Dtype::I32,
        Dtype::I64,
        Dtype::U8,
        Dtype::Bool,
        Dtype::C32,
        Dtype::C64,
        Dtype::C128,
    ];
    const TURNS: usize = 40;
    for nodes in NODES {
        let sizes = [4200, 17_000, 40_001, if nodes.len() > 4 { 60_000 } else { 300_000 }];
        let (ranks, groups) = (nodes.len(), groups_on(nodes));
        on_ranks(ranks, |me| {
            let (mut common, mut own) = (Random::new(ranks as u64), Random::new(900 + me as u64));
            let (mut mapped, chunks) = (0, Rc::new(Cell::new(0)));
            let counted = Rc::clone(&chunks);
            let _hook = fault_points::on_this_thread(move |point| {
                counted.set(counted.get() + usize::from(point == FaultPoint::ChunkFolded));
            });
            for turn in 0..TURNS {
                let (dtype, op) = (common.pick(&DTYPES), common.pick(&OPS));
                let kind = common.pick(&[
                    Kind::AllReduce,
                    Kind::AllReduce,
                    Kind::Reduce,
                    Kind::Broadcast,
                    Kind::ReduceScatter,
                ]);
                let spec = Spec {
                    dtype,
                    op: if is_defined(dtype, op) { op } else { ReduceOp::Sum },
                    pieces: 1 + common.below(2),
                    ..spec(kind, common.pick(&sizes), common.next(), ranks)
                };
                // Operations whose data is staged use the same stage buffers.
                let shared = common.below(4) > 0;
                let buffers = spec.buffers(me, ranks);
                let mut buffers = if shared { buffers.in_arena() } else { buffers };
                if own.below(30) == 0 {
                    std::thread::sleep(Duration::from_micros(300));
                }
                let mut request = spec.request(&mut buffers);
                if let ReduceOp::PremulSum(factor) = request.op {
                    request.op = ReduceOp::PremulSum(factor + me as f64); // each rank has its own
                }
                if common.below(3) == 0 {
                    groups[me].issue(request, None).unwrap().wait(None).unwrap();
                } else {
                    groups[me].run(request, None).unwrap_or_else(|error| panic!("rank {me}: {turn} {spec:?}: {error}"));
                }
                let (found, expected) = (buffers.result(), expected(&spec, me, ranks));
                assert!(found[..expected.len()] == expected[..], "rank {me} on {nodes:?}: {turn} {spec:?}");
                mapped += usize::from(last_path(&groups[me]) == "mapped");
            }
            assert!(mapped > TURNS / 3, "{mapped} of {TURNS} on {nodes:?}");
            // This thread may also have run chunks of another test, so nothing is said about the other nodes.
            assert!(
                chunks.get() > 0 || Nodes::of_list(Level::Numa, nodes).is_none(),
                "no sum was made node by node on {nodes:?}"
            );
        });
    }
}

#[test]
fn several_sums_node_by_node_are_under_way_at_once() {
    let nodes = [0, 0, 1, 1];
    let groups = groups_on(&nodes);
    on_ranks(4, |me| {
        for turn in 0..20 {
            let specs: Vec<Spec> =
                (0..6).map(|at| spec(Kind::AllReduce, [70_000, 5000, 300][at % 3], turn * 10 + at as u64, 4)).collect();
            let mut all: Vec<_> = specs
                .iter()
                .enumerate()
                .map(|(at, spec)| {
                    let buffers = spec.buffers(me, 4);
                    if at == 3 { buffers } else { buffers.in_arena() }
                })
                .collect();
            let ops: Vec<_> = specs
                .iter()
                .zip(&mut all)
                .map(|(spec, buffers)| groups[me].issue(spec.request(buffers), None).unwrap())
                .collect();
            ops.iter().for_each(|op| op.wait(None).unwrap());
            specs.iter().zip(&all).for_each(|(spec, buffers)| spec.check(buffers, me, 4));
        }
    });
}
