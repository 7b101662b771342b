//! The tests record operations directly, and the counts must match the recorded operations exactly.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::error::Error;
use crate::types::{ANY_RANK, CallNote, Dtype, Request, Span};

#[allow(unsafe_code)] // memory that no operation uses
fn request(kind: Kind, read: usize, written: usize) -> Request {
    let spans = |bytes| if bytes == 0 { Vec::new() } else { vec![Span { addr: 64, bytes }] };
    // SAFETY: nothing accesses the memory, because no operation of this file reaches an engine.
    let mut request = unsafe { Request::new(kind, spans(read), spans(written)) };
    request.dtype = Dtype::F32;
    request
}

fn noted(note: CallNote, mut request: Request) -> Request {
    request.note = note;
    request
}

fn issue(stats: &mut Stats, request: Request, number: u64) -> Arc<Op> {
    let op = Arc::new(Op::new(request, number, 0, Duration::from_secs(1), None));
    stats.issued(&op);
    op
}

#[test]
fn size_classes_are_powers_of_two() {
    let classes: Vec<u8> = [0, 1, 2, 3, 4, 5, 8, 9, 4096, 4097].into_iter().map(class).collect();
    assert_eq!(classes, [0, 1, 2, 3, 3, 4, 4, 5, 13, 14]);
    assert_eq!(usize::from(class(u64::MAX)), CLASSES - 1);
}

#[test]
fn a_wait_is_charged_to_the_rank_that_came_last() {
    let mut stats = Stats::new(3, 4);
    let op = issue(&mut stats, request(Kind::AllReduce, 8, 8), 1);
    op.timing.set_blocked();
    op.timing.set_late(1);
    op.timing.set_late(2);
    op.record_choice(1 | 7 << 8 | 3 << 32);
    let at = op.issued + 10_000;
    stats.ended(&[(Arc::clone(&op), Ok(()))], at);
    let totals: Vec<u64> = stats.counts().waits().iter().map(|wait| wait.total).collect();
    assert_eq!(totals, [0, 0, 10_000]);
    let record = stats.history().collective(1).unwrap();
    assert_eq!((record.path(), record.reason(), record.late(), record.waiting()), (1, 7, Some(2), 10_000));
    assert_eq!((record.state, record.ended - record.issued), (State::Done, 10_000));
    assert_eq!((stats.counts().cells()[0].waiting, stats.counts().cells()[0].longest), (10_000, 10_000));
}

#[test]
fn copying_and_reducing_are_no_waiting() {
    let mut stats = Stats::new(2, 4);
    let op = issue(&mut stats, request(Kind::AllReduce, 8, 8), 1);
    op.timing.set_blocked();
    op.timing.set_late(1);
    crate::op::OpTiming::spend(&op.timing.copying, 300);
    crate::op::OpTiming::spend(&op.timing.copying, 200);
    crate::op::OpTiming::spend(&op.timing.reducing, 100);
    stats.ended(&[(Arc::clone(&op), Ok(()))], op.issued + 1000);
    let counts = stats.counts();
    let cell = &counts.cells()[0];
    assert_eq!((cell.copying, cell.reducing, cell.waiting, cell.took), (500, 100, 400, 1000));
    assert_eq!(stats.counts().waits()[1].total, 400);
}

#[test]
fn several_in_one_pass_are_one_batch_and_a_list_is_one_too() {
    let mut stats = Stats::new(2, 8);
    let ops: Vec<_> = (1..=3).map(|n| issue(&mut stats, request(Kind::Barrier, 0, 0), n)).collect();
    let at = clock::stamp();
    stats.ended(&[(Arc::clone(&ops[0]), Ok(()))], at);
    assert_eq!(stats.fused().batches, 0);
    let failed = (Arc::clone(&ops[1]), Err(Error::aborted("over")));
    stats.ended(&[failed, (Arc::clone(&ops[2]), Ok(()))], at);
    assert_eq!(stats.fused().batches, 0, "an operation that failed was fused with no other");
    let list = noted(CallNote { tensors: 5, ..CallNote::default() }, request(Kind::AllReduce, 8, 8));
    let list = issue(&mut stats, list, 4);
    let more = issue(&mut stats, request(Kind::AllReduce, 8, 8), 5);
    stats.ended(&[(list, Ok(())), (more, Ok(()))], at);
    let fused = stats.fused();
    assert_eq!((fused.batches, fused.ops, fused.largest), (1, 6, 6));
    let counts = stats.counts();
    let barrier = counts.cells().iter().find(|cell| cell.kind == Kind::Barrier).unwrap();
    assert_eq!((barrier.count, barrier.failed), (2, 1));
}

#[test]
fn each_operation_knows_with_whom_it_ended() {
    let mut stats = Stats::new(2, 8);
    let ops: Vec<_> = (1..=5).map(|n| issue(&mut stats, request(Kind::AllReduce, 8, 8), n)).collect();
    let message = issue(&mut stats, request(Kind::Send, 8, 0), 9);
    // Between hosts the batch is recorded before the end; `ended` must not replace it.
    ops[4].set_fused_with(FusedWith::new(5, (2, 5), 4));
    let failed = (Arc::clone(&ops[0]), Err(Error::aborted("over")));
    let well = [2, 3, 4].map(|at: usize| (Arc::clone(&ops[at]), Ok(())));
    let ended: Vec<_> = well.into_iter().chain([failed, (message, Ok(()))]).collect();
    stats.ended(&ended, clock::stamp());
    let fused_with =
        |record: &Record| (record.route.fused_with.count(), record.route.fused_with.numbers(record.number));
    let of = |number| fused_with(stats.history().collective(number).unwrap());
    assert_eq!((of(3), of(4), of(5)), ((4, (3, 5)), (4, (3, 5)), (4, (2, 5))));
    assert_eq!((of(1).0, of(2).0), (1, 1), "one that failed, and one that is pending");
    assert_eq!(fused_with(stats.history().iter().last().unwrap()), (4, (9, 9)), "a message counts apart");
}

#[test]
fn parts_of_one_call_count_once_with_all_their_bytes() {
    let mut stats = Stats::new(2, 8);
    let first = issue(&mut stats, request(Kind::AllReduce, 8, 8), 1);
    let second = noted(CallNote { counts: false, ..CallNote::default() }, request(Kind::AllReduce, 16, 16));
    let inner = CallNote { counts: false, tensors: 0, ..CallNote::default() };
    let inner = issue(&mut stats, noted(inner, request(Kind::AllReduce, 32, 32)), 3);
    stats.ended(&[(inner, Ok(()))], clock::stamp());
    let second = issue(&mut stats, second, 2);
    stats.ended(&[(first, Ok(())), (second, Ok(()))], clock::stamp());
    let counts = stats.counts();
    let sum = |of: fn(&Cell) -> u64| counts.cells().iter().map(of).sum::<u64>();
    assert_eq!((sum(|cell| cell.count), sum(|cell| cell.bytes), sum(|cell| cell.tensors)), (1, 24, 2));
}

#[test]
fn whole_sizes_are_those_of_nccl_tests() {
    let mut stats = Stats::new(4, 8);
    for (kind, read, written, expected) in [
        (Kind::AllGather, 8, 32, 32),
        (Kind::ReduceScatter, 32, 8, 32),
        (Kind::Gather, 8, 0, 32),
        (Kind::Scatter, 0, 8, 32),
        (Kind::Broadcast, 0, 8, 8),
        (Kind::AllToAll, 32, 32, 32),
    ] {
        stats.reset();
        let op = issue(&mut stats, request(kind, read, written), 1);
        stats.ended(&[(op, Ok(()))], clock::stamp());
        assert_eq!(stats.counts().cells()[0].whole, expected, "{kind}");
        assert_eq!(stats.counts().cells()[0].bytes, read.max(written) as u64, "{kind}");
    }
}

#[test]
fn what_the_core_does_not_carry_out_is_counted_too() {
    let mut stats = Stats::new(2, 4);
    for (well, timed) in [(true, true), (true, false), (false, true)] {
        let mut record = Record::external_op(Kind::Gather, 5, 1, (0, 0), CallNote::default());
        (record.read, record.id) = (8, stats.external_issued(record));
        record.state = if well { State::Done } else { State::Failed };
        (record.timed, record.ended) = (timed, record.issued + 7);
        stats.external_ended(record);
    }
    let counts = stats.counts();
    let cell = &counts.cells()[0];
    assert_eq!((cell.count, cell.failed, cell.bytes, cell.whole, cell.took), (2, 1, 16, 16, 7));
    assert_eq!(
        stats.history().iter().map(|record| record.state).collect::<Vec<_>>(),
        [State::Done, State::Done, State::Failed]
    );
}

#[test]
fn a_reset_forgets_the_counts_and_keeps_the_ring() {
    let mut stats = Stats::new(2, 8);
    let op = issue(&mut stats, request(Kind::Recv, 0, 8), 0);
    stats.ended(&[(op, Ok(()))], clock::stamp());
    let mut from_anyone = request(Kind::Recv, 0, 4);
    from_anyone.root = ANY_RANK;
    let pending = issue(&mut stats, from_anyone, 0);
    stats.reset();
    assert!(stats.counts().cells().is_empty());
    assert_eq!(stats.history().iter().count(), 2);
    stats.ended(&[(pending, Ok(()))], clock::stamp());
    assert_eq!(stats.counts().cells()[0].bytes, 4);
    assert_eq!(stats.history().iter().filter(|record| record.state == State::Done).count(), 2);
}

proptest! {
    /// Even if there are more combinations than entries, memory stays bounded and the sums of a kind stay exact.
    #[test]
    fn sums_are_exact_and_memory_is_bounded(
        calls in prop::collection::vec((0usize..11, 0u8..40, 0u32..47, any::<bool>()), 0..400)
    ) {
        let mut stats = Stats::new(2, 16);
        let mut expected = [(0u64, 0u64, 0u64); KINDS];
        for (number, (kind, path, bits, well)) in calls.into_iter().enumerate() {
            let kind = Kind::ALL[kind];
            let bytes = 1usize << bits;
            let op = issue(&mut stats, request(kind, bytes, 0), number as u64 + 1);
            op.record_choice(u64::from(path));
            let outcome = if well { Ok(()) } else { Err(Error::aborted(String::new())) };
            stats.ended(&[(op, outcome)], clock::stamp());
            let sums = &mut expected[kind as usize];
            if well {
                sums.0 += 1;
                sums.1 += bytes as u64;
            } else {
                sums.2 += 1;
            }
        }
        let counts = stats.counts();
        prop_assert!(counts.cells().len() <= CELLS);
        for kind in Kind::ALL {
            let of = || counts.cells().iter().filter(move |cell| cell.kind == kind);
            let sums = (
                of().map(|cell| cell.count).sum::<u64>(),
                of().map(|cell| cell.bytes).sum::<u64>(),
                of().map(|cell| cell.failed).sum::<u64>(),
            );
            prop_assert_eq!(sums, expected[kind as usize]);
            for cell in of() {
                prop_assert_eq!(cell.times.filled().map(|(_, count)| count).sum::<u64>(), cell.count);
            }
        }
    }
}
