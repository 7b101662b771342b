//! Runs schedules on numbers: ranks are threads, messages pass through channels, results are compared with a plain
//! one-threaded reference. The symbolic proofs are in `algorithms.rs`; this test shows that the description in
//! `src/algorithms/mod.rs` suffices to write an executor.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};

use sagellm::algorithms::{Algorithm, How, Recv, Schedule, part_range};
use sagellm::types::Kind;

/// The element types that are summed: integers are exact, floats are added in the order of the schedule.
trait Number: Copy + Default + PartialEq + std::fmt::Debug + std::marker::Send + 'static {
    fn plus(self, other: Self) -> Self;
    fn any(seed: u64) -> Self;
    fn near(self, exact: f64) -> bool;
    fn wide(self) -> f64;
}

impl Number for i64 {
    fn plus(self, other: i64) -> i64 {
        self.wrapping_add(other)
    }
    fn any(seed: u64) -> i64 {
        (mix(seed) >> 24) as i64 - (1 << 39)
    }
    fn near(self, exact: f64) -> bool {
        self as f64 == exact // below 2^53
    }
    fn wide(self) -> f64 {
        self as f64
    }
}

impl Number for f32 {
    fn plus(self, other: f32) -> f32 {
        self + other
    }
    fn any(seed: u64) -> f32 {
        (mix(seed) >> 40) as f32 / 1e6 - 8.0
    }
    fn near(self, exact: f64) -> bool {
        (f64::from(self) - exact).abs() <= 1e-3
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
}

fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb)
}

/// Returns the range of elements of each part; the ranges are adjacent. If each part is one rank's block and `uneven`
/// is set, the sizes differ.
fn layout(s: &Schedule, elements: usize, uneven: bool) -> Vec<Range<usize>> {
    if !matches!(s.kind, Kind::AllGather | Kind::ReduceScatter | Kind::Gather | Kind::Scatter | Kind::AllToAll) {
        return (0..s.parts()).map(|part| part_range(elements, s.parts(), part)).collect();
    }
    let mut start = 0;
    let sizes = (0..s.parts()).map(|part| if uneven { (elements + 3 * part) % 5 } else { elements });
    sizes
        .map(|size| {
            start += size;
            start - size..start
        })
        .collect()
}

fn pieces<'a>(layout: &'a [Range<usize>], parts: &'a [Range<usize>]) -> impl Iterator<Item = usize> + 'a {
    parts.iter().cloned().flatten().flat_map(|part| layout[part].clone())
}

/// Executes the schedule on one rank.
fn run<T: Number>(
    s: &Schedule,
    rank: usize,
    layout: &[Range<usize>],
    data: &mut [T],
    to: &[Sender<Vec<T>>],
    from: &[Receiver<Vec<T>>],
) {
    for k in 0..s.steps() {
        let step = s.step(rank, k);
        for send in &step.sends {
            to[send.peer].send(pieces(layout, &send.parts).map(|i| data[i]).collect()).unwrap();
        }
        let come: Vec<(&Recv, Vec<T>)> =
            step.recvs.iter().map(|recv| (recv, from[recv.peer].recv().unwrap())).collect();
        if step.recvs.first().is_some_and(|recv| recv.how == How::InRankOrder) {
            for (at, i) in pieces(layout, &step.recvs[0].parts).enumerate() {
                let mut values: Vec<(usize, T)> = come.iter().map(|(recv, theirs)| (recv.peer, theirs[at])).collect();
                values.push((rank, data[i]));
                values.sort_by_key(|(rank, _)| *rank);
                data[i] = values.into_iter().map(|(_, value)| value).reduce(T::plus).unwrap();
            }
            continue;
        }
        for (recv, theirs) in come {
            let places: Vec<usize> = pieces(layout, &recv.parts).collect();
            assert_eq!(places.len(), theirs.len(), "{s:?}: both sides name the same parts");
            for (i, value) in places.into_iter().zip(theirs) {
                data[i] = match recv.how {
                    How::Copy => value,
                    How::ReduceAfter => data[i].plus(value),
                    How::ReduceBefore => value.plus(data[i]),
                    How::InRankOrder => unreachable!("never beside others"),
                };
            }
        }
    }
}

/// Returns whether part `part` is an input of `rank`. The rank may use the memory of all other parts as scratch.
fn holds(s: &Schedule, rank: usize, part: usize) -> bool {
    match s.kind {
        Kind::Broadcast | Kind::Scatter => rank == s.root,
        Kind::AllGather | Kind::Gather => rank == part,
        Kind::AllToAll => rank == part / s.ranks,
        _ => true,
    }
}

fn gets(s: &Schedule, rank: usize, part: usize) -> bool {
    match s.kind {
        Kind::Reduce | Kind::Gather => rank == s.root,
        Kind::Scatter | Kind::ReduceScatter => rank == part,
        Kind::AllToAll => rank == part % s.ranks,
        _ => true,
    }
}

fn check<T: Number>(s: &Schedule, elements: usize, uneven: bool) {
    let layout = layout(s, elements, uneven);
    let total = layout.last().map_or(0, |part| part.end);
    let inputs: Vec<Vec<T>> = (0..s.ranks)
        .map(|rank| {
            let mut data = vec![T::any(u64::MAX); total];
            for (part, range) in layout.iter().enumerate().filter(|(part, _)| holds(s, rank, *part)) {
                for i in range.clone() {
                    // If the kind sums, each rank has different numbers. Otherwise the numbers depend only on the part,
                    // which one rank owns.
                    let whose = if s.kind.reduces() { rank } else { s.ranks + part };
                    data[i] = T::any((whose * 1_000_003 + i) as u64);
                }
            }
            data
        })
        .collect();

    let mut to: Vec<Vec<Sender<Vec<T>>>> = (0..s.ranks).map(|_| Vec::new()).collect();
    let mut from: Vec<Vec<Receiver<Vec<T>>>> = (0..s.ranks).map(|_| Vec::new()).collect();
    for sender in &mut to {
        for receiver in &mut from {
            let (a, b) = channel();
            sender.push(a);
            receiver.push(b);
        }
    }
    let ends: Vec<_> = to.into_iter().zip(from).collect();
    let outputs: Vec<Vec<T>> = std::thread::scope(|scope| {
        let layout = &layout;
        let threads: Vec<_> = ends
            .into_iter()
            .zip(inputs.clone())
            .enumerate()
            .map(|(rank, ((to, from), mut data))| {
                scope.spawn(move || {
                    run(s, rank, layout, &mut data, &to, &from);
                    data
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });

    for (part, range) in layout.iter().enumerate() {
        let owners: Vec<usize> = (0..s.ranks).filter(|rank| gets(s, *rank, part)).collect();
        for i in range.clone() {
            let first = outputs[owners[0]][i];
            for rank in &owners {
                assert_eq!(outputs[*rank][i], first, "{s:?}: element {i} differs between ranks");
            }
            if s.kind.reduces() {
                let exact: f64 = inputs.iter().map(|input| input[i].wide()).sum();
                assert!(first.near(exact), "{s:?}: element {i} is {first:?}, not {exact}");
                if matches!(s.algorithm, Algorithm::Direct | Algorithm::TwoStep) {
                    let in_order = inputs.iter().map(|input| input[i]).reduce(T::plus).unwrap();
                    assert_eq!(first, in_order, "{s:?}: rank order, bit for bit");
                }
            } else {
                let source = (0..s.ranks).find(|rank| holds(s, *rank, part)).unwrap();
                assert_eq!(first, inputs[source][i], "{s:?}: element {i}");
            }
        }
    }
}

fn check_all<T: Number>() {
    let mut checked = 0;
    for algorithm in Algorithm::ALL {
        for kind in Kind::COLLECTIVES.into_iter().filter(|kind| *kind != Kind::Barrier && algorithm.serves(*kind)) {
            for ranks in [1, 2, 3, 4, 6, 7, 8, 13] {
                for elements in [0, 1, 3, 17, 64, 251] {
                    let segments = 1 + elements % 4;
                    let root = elements % ranks;
                    let s = Schedule::new(algorithm, kind, ranks, root, segments).unwrap();
                    // Bruck's all_to_all requires blocks of equal size, as its header says.
                    let uneven = elements % 2 == 1 && !(algorithm == Algorithm::Bruck && kind == Kind::AllToAll);
                    check::<T>(&s, elements, uneven);
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 1000);
}

#[test]
fn integers_exactly() {
    check_all::<i64>();
}

#[test]
fn floats_with_equal_bits_on_every_rank() {
    check_all::<f32>();
}

/// Batches may use only algorithms in which an element's position does not change its order of summation. The two such
/// algorithms tested here also give the same bits as each other.
#[test]
fn rule_18_doubling_and_halving_add_in_one_order_wherever_an_element_stands() {
    for ranks in [2, 3, 5, 8, 12] {
        let all = |algorithm| Schedule::new(algorithm, Kind::AllReduce, ranks, 0, 1).unwrap();
        // Every element has the same inputs, so a different order anywhere would show as different bits.
        let inputs: Vec<Vec<f32>> =
            (0..ranks).map(|rank| vec![f32::any(rank as u64) * 1.1f32.powi(rank as i32); 100]).collect();
        let results: Vec<Vec<f32>> = [Algorithm::Doubling, Algorithm::Halving]
            .into_iter()
            .map(|algorithm| alone(&all(algorithm), &inputs))
            .collect();
        assert!(results.iter().flatten().all(|value| value.to_bits() == results[0][0].to_bits()), "{ranks} ranks");
    }
}

/// Returns the result of rank 0, computed by one thread that plays all ranks step by step.
fn alone(s: &Schedule, inputs: &[Vec<f32>]) -> Vec<f32> {
    let layout = layout(s, inputs[0].len(), false);
    let mut held = inputs.to_vec();
    for k in 0..s.steps() {
        let before = held.clone();
        for (rank, data) in held.iter_mut().enumerate() {
            for recv in s.step(rank, k).recvs {
                for i in pieces(&layout, &recv.parts) {
                    let theirs = before[recv.peer][i];
                    data[i] = match recv.how {
                        How::Copy => theirs,
                        How::ReduceAfter => data[i] + theirs,
                        How::ReduceBefore => theirs + data[i],
                        How::InRankOrder => unreachable!("not in these two"),
                    };
                }
            }
        }
    }
    held.swap_remove(0)
}
