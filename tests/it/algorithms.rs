//! Proves the schedules. Executes each schedule symbolically, for 1 to 64 ranks, every kind, and several roots and
//! segment counts, and checks all that `src/algorithms/mod.rs` promises. The right ranks have the right contributions,
//! each exactly once and in the order of summation that the algorithm's header states. Every send has its receive. No
//! schedule deadlocks if each rank has posted only the receives of its current step. Steps and volumes match the
//! formulas.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use proptest::prelude::*;
use sagellm::algorithms::{Algorithm, How, Schedule, Step, Volume, count, part_range};
use sagellm::types::Kind;

/// Hash-consed expressions: each distinct expression has one number, so two values are equal if their numbers are
/// equal.
struct Expressions {
    combined: HashMap<(usize, usize), usize>,
    operands: Vec<(usize, usize)>,
}

/// Numbers below this stand for inputs: number r is the input of rank r. For kinds that only move data, number r is
/// data from rank r.
const LEAVES: usize = 64;

impl Expressions {
    fn new() -> Expressions {
        Expressions { combined: HashMap::new(), operands: Vec::new() }
    }

    fn op(&mut self, left: usize, right: usize) -> usize {
        let operands = &mut self.operands;
        *self.combined.entry((left, right)).or_insert_with(|| {
            operands.push((left, right));
            LEAVES + operands.len() - 1
        })
    }

    fn fold(&mut self, values: impl IntoIterator<Item = usize>) -> usize {
        let mut values = values.into_iter();
        let first = values.next().unwrap();
        values.fold(first, |left, right| self.op(left, right))
    }

    /// The ranks whose inputs an expression contains, from left to right.
    fn leaves(&self, value: usize, into: &mut Vec<usize>) {
        if value < LEAVES {
            into.push(value);
        } else {
            let (left, right) = self.operands[value - LEAVES];
            self.leaves(left, into);
            self.leaves(right, into);
        }
    }

    /// Adds consecutive values in a tree. The left subtree takes the first p values, where p is the largest power of
    /// two below the number of values. Each subtree is divided in the same way.
    fn tree(&mut self, values: &[usize]) -> usize {
        if values.len() == 1 {
            return values[0];
        }
        let half = values.len().next_power_of_two() / 2;
        let (left, right) = (self.tree(&values[..half]), self.tree(&values[half..]));
        self.op(left, right)
    }
}

fn numbers(parts: &[Range<usize>]) -> impl Iterator<Item = usize> + '_ {
    parts.iter().cloned().flatten()
}

/// Returns the rank whose input this part is. For kinds that only move data.
fn origin(s: &Schedule, part: usize) -> usize {
    match s.kind {
        Kind::AllGather | Kind::Gather => part,
        Kind::AllToAll => part / s.ranks,
        _ => s.root,
    }
}

fn initial(s: &Schedule, rank: usize) -> Vec<Option<usize>> {
    (0..s.parts())
        .map(|part| if s.kind.reduces() { Some(rank) } else { Some(rank).filter(|_| origin(s, part) == rank) })
        .collect()
}

/// Returns whether `rank` must hold the result of `part` at the end.
fn wanted(s: &Schedule, rank: usize, part: usize) -> bool {
    match s.kind {
        Kind::AllReduce | Kind::Broadcast | Kind::AllGather => true,
        Kind::Reduce | Kind::Gather => rank == s.root,
        Kind::Scatter | Kind::ReduceScatter => part == rank,
        Kind::AllToAll => part % s.ranks == rank,
        _ => false,
    }
}

/// Builds the expression for the order of summation that the header of the algorithm's file states.
fn documented(s: &Schedule, part: usize, e: &mut Expressions) -> usize {
    let p = s.ranks;
    let from_root: Vec<usize> = (0..p).map(|place| (s.root + place) % p).collect();
    match s.algorithm {
        Algorithm::Ring if s.kind == Kind::Reduce => {
            from_root.iter().rev().copied().reduce(|right, left| e.op(left, right)).unwrap()
        }
        Algorithm::Ring => e.fold((1..=p).map(|k| (part + k) % p)),
        Algorithm::Binomial => e.tree(&from_root),
        Algorithm::Doubling | Algorithm::Halving => {
            let extra = p - (1 << p.ilog2());
            let mut values: Vec<usize> = (0..extra).map(|i| e.op(2 * i, 2 * i + 1)).collect();
            values.extend(2 * extra..p);
            e.tree(&values)
        }
        Algorithm::Direct | Algorithm::TwoStep => e.fold(0..p),
        Algorithm::Torus => {
            let rows = (1..=p).rev().find(|rows| p.is_multiple_of(*rows) && rows * rows <= p).unwrap();
            let columns = p / rows;
            // An all_reduce numbers its parts column by column, other kinds row by row.
            let (row, column) =
                if s.kind == Kind::AllReduce { (part % rows, part / rows) } else { (part / columns, part % columns) };
            let sums: Vec<usize> = (1..=rows)
                .map(|i| (row + i) % rows)
                .map(|r| e.fold((1..=columns).map(|j| r * columns + (column + j) % columns)))
                .collect();
            e.fold(sums)
        }
        Algorithm::DoubleTree if p == 1 => 0,
        Algorithm::DoubleTree => {
            let second = part >= s.segments;
            let n = p - 1;
            // Converts labels of the in-order tree to places. The second tree is mirrored (even `n`) or shifted (odd
            // `n`).
            let place = |label: usize| match (second, n % 2) {
                (false, _) => label,
                (true, 0) => n + 1 - label,
                (true, _) => (1..=n).find(|place| place % n + 1 == label).unwrap(),
            };
            let top = in_order(1, n, &place, &from_root, e);
            e.op(from_root[0], top)
        }
        Algorithm::Bruck | Algorithm::Dissemination => unreachable!("these sum nothing"),
    }
}

/// Adds the values of the labels `first..=last` in the in-order tree. The tree's top is the label with the most
/// trailing zeros.
fn in_order(
    first: usize,
    last: usize,
    place: &dyn Fn(usize) -> usize,
    from_root: &[usize],
    e: &mut Expressions,
) -> usize {
    let top = (first..=last).max_by_key(|label| label.trailing_zeros()).unwrap();
    let mut value = from_root[place(top)];
    let mut children: Vec<(usize, usize)> = Vec::new();
    let mut child = |from: usize, to: usize, e: &mut Expressions| {
        if from <= to {
            let below = (from..=to).max_by_key(|label| label.trailing_zeros()).unwrap();
            children.push((place(below), in_order(from, to, place, from_root, e)));
        }
    };
    child(first, top - 1, e);
    child(top + 1, last, e);
    children.sort();
    for (at, sum) in children {
        value = if at < place(top) { e.op(sum, value) } else { e.op(value, sum) };
    }
    value
}

/// Checks the conditions that every step of every rank must meet.
fn check_shape(s: &Schedule, rank: usize, step: &Step) {
    let parts = s.parts();
    let well_formed = |ranges: &[Range<usize>]| {
        let mut seen = HashSet::new();
        ranges.iter().all(|range| range.start < range.end && range.end <= parts)
            && numbers(ranges).all(|q| seen.insert(q))
    };
    for peers in [step.sends.iter().map(|x| x.peer).collect::<Vec<_>>(), step.recvs.iter().map(|x| x.peer).collect()] {
        assert!(peers.iter().all(|peer| *peer < s.ranks && *peer != rank), "{s:?}: {step:?}");
        assert_eq!(peers.iter().collect::<HashSet<_>>().len(), peers.len(), "two messages of one pair: {s:?} {step:?}");
    }
    let empty = s.kind == Kind::Barrier;
    for ranges in step.sends.iter().map(|x| &x.parts).chain(step.recvs.iter().map(|x| &x.parts)) {
        assert!(well_formed(ranges) && ranges.is_empty() == empty, "{s:?} rank {rank}: {step:?}");
    }
    let sent: HashSet<usize> = step.sends.iter().flat_map(|x| numbers(&x.parts)).collect();
    for recv in &step.recvs {
        if recv.how == How::Copy {
            assert!(numbers(&recv.parts).all(|q| !sent.contains(&q)), "sent and overwritten: {s:?} {rank} {step:?}");
        } else {
            assert!(s.kind.reduces(), "{s:?}");
        }
    }
    if step.recvs.iter().any(|x| x.how == How::InRankOrder) {
        assert!(step.recvs.iter().all(|x| x.how == How::InRankOrder && x.parts == step.recvs[0].parts), "{s:?}");
    }
}

/// The state of a rank during the execution: its current step, the values that it held when the step began, and the
/// number of transfers of the step that are still open.
struct Rank {
    held: Vec<Option<usize>>,
    /// For barriers: bit mask of the ranks of which this rank knows that they have entered.
    heard: u64,
    at: usize,
    step: Step,
    open: usize,
    messages: HashMap<usize, (Vec<Option<usize>>, u64)>,
}

/// Runs all ranks without any buffering: a message is transferred only while its sender and its receiver are both in
/// the step that lists it. Returns the final state of every rank.
fn execute(s: &Schedule, e: &mut Expressions) -> Vec<Rank> {
    let mut ranks: Vec<Rank> = (0..s.ranks)
        .map(|rank| Rank {
            held: initial(s, rank),
            heard: 1 << rank,
            at: 0,
            step: Step::default(),
            open: 0,
            messages: HashMap::new(),
        })
        .collect();
    let (mut sent, mut received) = (vec![0; s.ranks], vec![0; s.ranks]);
    let mut last = 0;
    // Ranks that have just entered a step and may be able to transfer messages.
    let mut ready: Vec<usize> = (0..s.ranks).collect();
    for rank in 0..s.ranks {
        enter(s, rank, &mut ranks[rank]);
    }
    while let Some(rank) = ready.pop() {
        for i in 0..ranks[rank].step.sends.len() {
            let peer = ranks[rank].step.sends[i].peer;
            pass(s, &mut ranks, rank, peer);
        }
        for i in 0..ranks[rank].step.recvs.len() {
            let peer = ranks[rank].step.recvs[i].peer;
            pass(s, &mut ranks, peer, rank);
        }
        let touched: Vec<usize> = std::iter::once(rank)
            .chain(ranks[rank].step.sends.iter().map(|x| x.peer))
            .chain(ranks[rank].step.recvs.iter().map(|x| x.peer))
            .collect();
        for other in touched {
            let state = &mut ranks[other];
            if state.at < s.steps() && state.open == 0 {
                last = last.max(state.at + 1);
                sent[other] += state.step.sends.iter().map(|x| count(&x.parts)).sum::<usize>();
                received[other] += state.step.recvs.iter().map(|x| count(&x.parts)).sum::<usize>();
                complete(s, other, state, e);
                state.at += 1;
                enter(s, other, state);
                ready.push(other);
            }
        }
    }
    for (rank, state) in ranks.iter().enumerate() {
        assert_eq!(state.at, s.steps(), "{s:?}: rank {rank} waits for ever in {:?}", state.step);
    }
    assert_eq!(last, s.steps(), "{s:?}: no rank does anything in the last step");
    let volume = Volume { sent: *sent.iter().max().unwrap(), received: *received.iter().max().unwrap() };
    assert_eq!(volume, s.volume(), "{s:?}");
    ranks
}

/// Moves the rank to the next step in which it sends or receives.
fn enter(s: &Schedule, rank: usize, state: &mut Rank) {
    state.step = Step::default();
    while state.at < s.steps() {
        state.step = s.step(rank, state.at);
        if !state.step.is_empty() {
            check_shape(s, rank, &state.step);
            break;
        }
        state.at += 1;
    }
    state.open = state.step.sends.len() + state.step.recvs.len();
}

/// Transfers the message between two ranks, if both are in the step that lists it and it has not been transferred yet.
fn pass(s: &Schedule, ranks: &mut [Rank], from: usize, to: usize) {
    let (a, b) = (&ranks[from], &ranks[to]);
    if a.at != b.at || a.at >= s.steps() || b.messages.contains_key(&from) {
        return;
    }
    let send = a
        .step
        .sends
        .iter()
        .find(|x| x.peer == to)
        .unwrap_or_else(|| panic!("{s:?}: {to} expects {from}: {:?}", b.step));
    let recv = b
        .step
        .recvs
        .iter()
        .find(|x| x.peer == from)
        .unwrap_or_else(|| panic!("{s:?}: {from} sends {to}: {:?}", a.step));
    assert_eq!(send.parts, recv.parts, "{s:?} step {}: from {from} to {to}", a.at);
    let cargo = numbers(&send.parts).map(|q| a.held[q]).collect();
    let message = (cargo, a.heard);
    ranks[to].messages.insert(from, message);
    ranks[to].open -= 1;
    ranks[from].open -= 1;
}

/// Applies the messages received in a step, in the order in which the step lists its receives.
fn complete(s: &Schedule, rank: usize, state: &mut Rank, e: &mut Expressions) {
    let mut in_order: Vec<(usize, Vec<Option<usize>>)> = Vec::new();
    for recv in &state.step.recvs {
        let (values, heard) = state.messages.remove(&recv.peer).unwrap();
        state.heard |= heard;
        if recv.how == How::InRankOrder {
            in_order.push((recv.peer, values));
            continue;
        }
        for (q, theirs) in numbers(&recv.parts).zip(values) {
            let theirs = theirs.unwrap_or_else(|| panic!("{s:?}: rank {} sends part {q} that it lacks", recv.peer));
            state.held[q] = Some(match (recv.how, state.held[q]) {
                (How::Copy, _) => theirs,
                (How::ReduceAfter, Some(own)) => e.op(own, theirs),
                (How::ReduceBefore, Some(own)) => e.op(theirs, own),
                _ => panic!("{s:?}: rank {rank} combines part {q} that it lacks"),
            });
        }
    }
    assert!(state.messages.is_empty());
    if in_order.is_empty() {
        return;
    }
    for (at, q) in numbers(&state.step.recvs[0].parts).enumerate() {
        let mut values: Vec<(usize, usize)> =
            in_order.iter().map(|(peer, values)| (*peer, values[at].unwrap())).collect();
        values.push((rank, state.held[q].unwrap()));
        values.sort();
        state.held[q] = Some(e.fold(values.into_iter().map(|(_, value)| value)));
    }
}

fn prove(s: &Schedule) {
    let mut e = Expressions::new();
    let ranks = execute(s, &mut e);
    if s.kind == Kind::Barrier {
        let all = u64::MAX >> (64 - s.ranks);
        assert!(ranks.iter().all(|state| state.heard == all), "{s:?}: a rank leaves before another has come");
        return;
    }
    let mut first = None;
    for part in 0..s.parts() {
        let right = if s.kind.reduces() { documented(s, part, &mut e) } else { origin(s, part) };
        if s.kind.reduces() {
            let mut leaves = Vec::new();
            e.leaves(right, &mut leaves);
            leaves.sort();
            assert_eq!(leaves, (0..s.ranks).collect::<Vec<_>>(), "{s:?}: the documented order counts each rank once");
            let same = *first.get_or_insert(right) == right;
            assert!(
                same || !s.algorithm.one_order(),
                "{s:?}: part {part} is added in another order, which batches rely on"
            );
        }
        for (rank, state) in ranks.iter().enumerate() {
            if wanted(s, rank, part) {
                assert_eq!(state.held[part], Some(right), "{s:?}: part {part} at rank {rank}");
            }
        }
    }
}

fn roots(kind: Kind, ranks: usize) -> Vec<usize> {
    let mut roots = if kind.rooted() { vec![0, 1, ranks / 2, ranks - 1] } else { vec![0] };
    roots.retain(|root| *root < ranks);
    roots.dedup();
    roots
}

fn prove_all(algorithm: Algorithm) {
    let mut proved = 0;
    for kind in Kind::COLLECTIVES.into_iter().filter(|kind| algorithm.serves(*kind)) {
        let segments: &[usize] = if algorithm.pipelines(kind) { &[1, 2, 3, 8] } else { &[1] };
        for ranks in 1..=64 {
            for root in roots(kind, ranks) {
                for segments in segments {
                    prove(&Schedule::new(algorithm, kind, ranks, root, *segments).unwrap());
                    proved += 1;
                }
            }
        }
    }
    assert!(proved >= 64);
}

/// Tests each algorithm in its own thread. A failure names the schedule.
#[test]
fn every_algorithm_does_what_its_header_says() {
    std::thread::scope(|scope| {
        for algorithm in Algorithm::ALL {
            scope.spawn(move || prove_all(algorithm));
        }
    });
}

#[test]
fn names_and_codes_lead_back() {
    for algorithm in Algorithm::ALL {
        assert_eq!(Algorithm::from_name(algorithm.name()), Some(algorithm));
        assert_eq!(Algorithm::from_code(algorithm.code()), Some(algorithm));
    }
    assert_eq!(Algorithm::from_name("bubble"), None);
    assert_eq!(Algorithm::from_code(0), None);
}

#[test]
fn what_cannot_be_is_no_schedule() {
    assert_eq!(Schedule::new(Algorithm::Ring, Kind::Barrier, 4, 0, 1), None);
    assert_eq!(Schedule::new(Algorithm::Ring, Kind::Broadcast, 4, 4, 1), None);
    assert_eq!(Schedule::new(Algorithm::Ring, Kind::Broadcast, 0, 0, 1), None);
    assert_eq!(Schedule::new(Algorithm::Direct, Kind::Send, 2, 0, 1), None);
    // `new` normalises parameters that have no effect for the algorithm, so equal schedules compare equal.
    let plain = Schedule::new(Algorithm::Ring, Kind::AllReduce, 4, 0, 1);
    assert_eq!(Schedule::new(Algorithm::Ring, Kind::AllReduce, 4, 3, 7), plain);
}

proptest! {
    #[test]
    fn parts_cover_any_count_once(elements in 0usize..100_000, parts in 1usize..300) {
        let mut next = 0;
        for part in 0..parts {
            let range = part_range(elements, parts, part);
            prop_assert_eq!(range.start, next);
            prop_assert!(range.len() == elements / parts || range.len() == elements.div_ceil(parts));
            next = range.end;
        }
        prop_assert_eq!(next, elements);
    }
}

/// Checks the examples in the table of docs/internals/algorithms.md: 8 and 6 ranks, 4 segments for the algorithms that
/// use segments.
#[test]
fn the_table_in_the_docs_is_right() {
    let page = include_str!("../../docs/internals/algorithms.md");
    let mut rows = 0;
    for kind in Kind::COLLECTIVES {
        for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| algorithm.serves(kind)) {
            let figures = [8, 6].map(|ranks| {
                let s = Schedule::new(algorithm, kind, ranks, 0, 4).unwrap();
                let parts = if kind == Kind::AllToAll { ranks } else { s.parts().max(1) } as f64;
                let Volume { sent, received } = s.volume();
                format!("{}; {:.2}, {:.2}", s.steps(), sent as f64 / parts, received as f64 / parts)
            });
            rows += 1;
            let row = page.lines().find(|line| line.starts_with(&format!("| {kind} | {} |", algorithm.name())));
            let wanted = format!("| {} | {} |", figures[0], figures[1]);
            assert!(
                row.is_some_and(|row| row.ends_with(&wanted)),
                "{kind} by {}: {row:?}, not {wanted}",
                algorithm.name()
            );
        }
    }
    let in_page = page
        .lines()
        .filter(|line| Kind::COLLECTIVES.iter().any(|kind| line.starts_with(&format!("| {kind} |"))))
        .count();
    assert_eq!(in_page, rows, "a row of the table is of no algorithm");
}
