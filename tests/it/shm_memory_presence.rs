//! Shared memory gets its pages when an operation first needs them. Tests which parts are present after which
//! operation, that no rank touches other parts, and the error on all ranks if there is too little memory (rule 24).

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Memory, cut, on_memory, on_ranks, plain};
use sagellm::engine::local;
use sagellm::engine::shm::memory::area::Area;
use sagellm::engine::shm::memory::layout::{Layout, Part};
use sagellm::engine::shm::memory::segment::{Segment, page_size};
use sagellm::engine::shm::nodes::{Level, Nodes};
use sagellm::error::Result;
use sagellm::group::Group;
use sagellm::types::{ANY_RANK, Kind};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a collective of `bytes` ones on every rank. Returns each rank's outcome and memory.
fn collective(groups: &[Arc<Group>], kind: Kind, root: u32, bytes: usize) -> Vec<(Result<()>, Vec<u8>)> {
    on_ranks(groups.len(), |me| {
        let mut memory = vec![1; bytes];
        let here = me == root as usize;
        let (reads, writes) = match kind {
            Kind::Broadcast => (here, !here),
            Kind::Reduce => (true, here),
            _ => (true, true),
        };
        let mut spans = |wanted| if wanted { cut(&mut memory, 1, 1) } else { Vec::new() };
        let request = match kind {
            Kind::Broadcast | Kind::Reduce => plain(kind, root, spans(reads), spans(writes)),
            _ => on_memory(kind, root, &mut memory),
        };
        let outcome = groups[me].run(request, None);
        (outcome, memory)
    })
}

/// Sends a message from `from` to `to`. If `named`, the receiver passes the sender's rank, else `ANY_RANK`.
fn message(groups: &[Arc<Group>], (from, to): (usize, usize), named: bool, bytes: usize) -> Vec<Result<()>> {
    let root = if named { from as u32 } else { ANY_RANK };
    on_ranks(groups.len(), |me| {
        let mut memory = vec![me as u8; bytes];
        if me == from {
            return groups[me].run(on_memory(Kind::Send, to as u32, &mut memory), None);
        }
        if me == to {
            groups[me].run(on_memory(Kind::Recv, root, &mut memory), None)?;
            assert!(memory.iter().all(|byte| *byte == from as u8));
        }
        Ok(())
    })
}

/// Returns the parts that are present, with the rank of each. A part must be present completely or not at all: single
/// pages would mean that a rank touched a part without need.
fn present(areas: &[Arc<Area>]) -> Vec<(usize, Part)> {
    let (segment, layout) = (areas[0].segment(), &areas[0].layout);
    let mut pages = vec![0u8; segment.len().div_ceil(page_size())];
    let start = segment.ptr(0, segment.len());
    // SAFETY: the range is a live mapping, and `pages` has a byte for each of its pages.
    assert_eq!(unsafe { libc::mincore(start.cast(), segment.len(), pages.as_mut_ptr()) }, 0);
    let all = (0..areas.len()).flat_map(|rank| layout.parts().map(move |part| (rank, part)));
    all.filter(|(rank, part)| {
        let range = layout.part(*rank, *part);
        let own = &pages[range.start / page_size()..range.end.div_ceil(page_size())];
        let there = own.iter().filter(|page| **page & 1 == 1).count();
        assert!(there == 0 || there == own.len(), "{there} of {} pages of {part:?} of rank {rank}", own.len());
        there > 0
    })
    .collect()
}

fn all_of(ranks: usize, parts: &[Part]) -> Vec<(usize, Part)> {
    (0..ranks).flat_map(|rank| parts.iter().map(move |part| (rank, *part))).collect()
}

/// After each operation, exactly those parts are present that this operation and the earlier ones needed.
#[test]
fn a_part_is_present_when_an_operation_has_needed_it_and_no_rank_touches_it_before() {
    for ranks in [2, 3, 17] {
        let areas = local::areas(ranks).unwrap();
        let groups = Group::over(areas.clone(), TIMEOUT);
        let layout = areas[0].layout;
        let mut expected = Vec::new();
        let mut check = |what: &str, more: &[(usize, Part)]| {
            expected.extend_from_slice(more);
            expected.sort_by_key(|(rank, part)| (*rank, layout.part(*rank, *part).start));
            assert_eq!(present(&areas), expected, "{ranks} ranks, after {what}");
        };
        let fine =
            |outcomes: Vec<(Result<()>, Vec<u8>)>| outcomes.into_iter().for_each(|(outcome, _)| outcome.unwrap());
        for kind in [Kind::Barrier, Kind::AllReduce, Kind::Broadcast, Kind::Reduce] {
            fine(collective(&groups, kind, 0, if kind == Kind::Barrier { 0 } else { 100 }));
        }
        check("small collectives", &[]);

        // A thread waits for a receive whose message has not been sent, and checks whether peers have died.
        let last = ranks - 1;
        let mut room = [vec![0; 3 * layout.body_bytes], vec![0; 10]];
        let (large, small) = room.split_at_mut(1);
        let receives = [(0, &mut large[0]), (ANY_RANK, &mut small[0])];
        let receives =
            receives.map(|(from, memory)| groups[last].issue(on_memory(Kind::Recv, from, memory), None).unwrap());
        assert!(receives[0].wait(Some(Duration::from_millis(50))).unwrap_err().is_elapsed_wait());
        fine(collective(&groups, Kind::Barrier, 0, 0));
        check("receives without a message", &[]);
        for bytes in [3 * layout.body_bytes, 10] {
            let mut memory = vec![7; bytes];
            groups[0].run(on_memory(Kind::Send, last as u32, &mut memory), None).unwrap();
            let more = [(0, Part::Envelopes), (last, Part::Channel(0))];
            check("the messages", if bytes == 10 { &[] } else { &more });
        }
        receives.iter().for_each(|receive| receive.wait(None).unwrap());
        assert!(room.iter().flatten().all(|byte| *byte == 7));

        fine(collective(&groups, Kind::Broadcast, 1, 4 * layout.stage_bytes + 5));
        check("a large broadcast", &[(1, Part::Stage)]);
        message(&groups, (1, 0), false, layout.eager_bytes).into_iter().for_each(Result::unwrap);
        check("a message to rank 0", &[(1, Part::Envelopes)]);
        fine(collective(&groups, Kind::AllReduce, 0, 3 * layout.stage_bytes + 5));
        let rest: Vec<_> =
            all_of(ranks, &[Part::Stage, Part::Result]).into_iter().filter(|one| *one != (1, Part::Stage)).collect();
        check("a large all_reduce", &rest);
    }
}

/// Areas of all ranks for which rank 1 reports `headroom` as its memory left, and the other ranks report no limit.
fn with_little_on_rank_1(ranks: usize, headroom: fn() -> Option<u64>) -> Vec<Arc<Area>> {
    with_little_on(ranks, &Nodes::none(), headroom)
}

fn with_little_on(ranks: usize, nodes: &Nodes, headroom: fn() -> Option<u64>) -> Vec<Arc<Area>> {
    let layout = Layout::within(ranks, 1, usize::MAX).unwrap();
    let segment = Arc::new(Segment::anonymous(layout.total()).unwrap());
    let area = |me: usize| {
        let area = Area::new(Arc::clone(&segment), layout, me, nodes.clone()).with_headroom(|| None);
        Arc::new(if me == 1 { area.with_headroom(headroom) } else { area })
    };
    (0..ranks).map(area).collect()
}

fn assert_told(what: &str, outcomes: impl IntoIterator<Item = Result<()>>) {
    for (me, outcome) in outcomes.into_iter().enumerate() {
        let text = outcome.expect_err(what).to_string();
        for word in ["rank 1 has too little memory", "3 ranks", "of the 200 KiB", "Raise the limit"] {
            assert!(text.contains(word), "{what}, on rank {me}: {text}");
        }
        assert_eq!(me != 1, text.contains("reported by rank 1"), "{what}, on rank {me}: {text}");
    }
}

#[test]
fn rule_24_where_no_room_is_left_the_operation_fails_on_every_rank_before_anything_is_written() {
    let little = || Some(200 << 10);
    let new = || {
        let areas = with_little_on_rank_1(3, little);
        let groups = Group::over(areas.clone(), TIMEOUT);
        for (outcome, memory) in collective(&groups, Kind::AllReduce, 0, 100) {
            outcome.unwrap();
            assert_eq!(memory, [3; 100]);
        }
        (areas, groups)
    };
    let of_rank_1 = |areas: &[Arc<Area>]| present(areas).into_iter().filter(|(rank, _)| *rank == 1).count();

    let (areas, groups) = new();
    let outcomes = collective(&groups, Kind::AllReduce, 0, 5 << 20);
    assert!(outcomes.iter().all(|(_, memory)| memory.iter().all(|byte| *byte == 1)), "the tensors are as they were");
    assert_told("a large all_reduce", outcomes.into_iter().map(|(outcome, _)| outcome));
    assert_eq!(of_rank_1(&areas), 0);

    // The sender lacks memory for its envelopes, or the receiver lacks memory for a channel. Rank 2 gets the error in
    // its next call.
    for (from, to, bytes) in [(1, 0, 10), (0, 1, 1 << 20)] {
        let (areas, groups) = new();
        let mut outcomes = message(&groups, (from, to), from == 1, bytes);
        outcomes[2] = collective(&groups[2..], Kind::Barrier, 0, 0).remove(0).0;
        assert_told(&format!("a message of {bytes} bytes"), outcomes);
        assert_eq!(of_rank_1(&areas), 0);
    }
}

/// A rank that has no memory for sums that another node continues fails the operation before any rank writes a result.
#[test]
fn rule_24_no_rank_writes_a_sum_of_several_nodes_if_another_rank_has_no_room_for_its_sums() {
    let areas = with_little_on(4, &Nodes::of_list(Level::Numa, &[0, 0, 1, 1]).unwrap(), || Some(200 << 10));
    let groups = Group::over(areas, TIMEOUT);
    on_ranks(4, |me| {
        // Two broadcasts by rank 0 map the ranks' arenas for each other. They use no buffer of rank 1.
        for _ in 0..2 {
            let mut memory = Memory::shared(&vec![me as u8; 4 << 20]);
            let span = cut(&mut memory, 1, 1);
            let (reads, writes) = if me == 0 { (span, Vec::new()) } else { (Vec::new(), span) };
            groups[me].run(plain(Kind::Broadcast, 0, reads, writes), None).unwrap();
            assert!(memory.iter().all(|byte| *byte == 0));
        }
        let mut memory = Memory::shared(&vec![1; 4 << 20]);
        let request = plain(Kind::AllReduce, 0, cut(&mut memory, 1, 1), cut(&mut memory, 1, 1));
        let text = groups[me].run(request, None).expect_err("rank 1 has no room").to_string();
        assert!(text.contains("rank 1 has too little memory"), "on rank {me}: {text}");
        assert!(memory.iter().all(|byte| *byte == 1), "rank {me}: a result was written");
    });
}

#[test]
fn a_part_that_is_present_needs_no_room() {
    use std::sync::atomic::{AtomicU64, Ordering};
    static LEFT: AtomicU64 = AtomicU64::new(u64::MAX);
    let groups = Group::over(with_little_on_rank_1(2, || Some(LEFT.load(Ordering::Relaxed))), TIMEOUT);
    for _ in 0..2 {
        for (outcome, memory) in collective(&groups, Kind::AllReduce, 0, 5 << 20) {
            outcome.unwrap();
            assert!(memory.iter().all(|byte| *byte == 2));
        }
        for (from, to) in [(0, 1), (1, 0)] {
            message(&groups, (from, to), true, 1 << 20).into_iter().for_each(Result::unwrap);
        }
        LEFT.store(0, Ordering::Relaxed);
    }
}
