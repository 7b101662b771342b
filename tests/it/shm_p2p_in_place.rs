//! If the receiver can map the sender's tensor, it reads the message in place. The result is the same as that of a
//! staged message, and the receiver notices if the sender fails meanwhile. Ranks are threads;
//! `tests/py/fault/test_reachable.py` stops and kills processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::common::{Memory, Random, on_memory, on_ranks, this_program};
use sagellm::group::{Group, Op};
use sagellm::os::fault_points;
use sagellm::os::fault_points::{FaultPoint, in_this_process, on_this_thread};
use sagellm::select::Choice;
use sagellm::types::{ANY_RANK, Kind};

const LONG: Duration = Duration::from_secs(60);

fn groups(ranks: usize) -> Vec<Arc<Group>> {
    Group::local(ranks, LONG).unwrap()
}

/// Waits until `came` returns true, but at most for `LONG`. Returns whether it did.
fn until(came: impl Fn() -> bool) -> bool {
    let end = Instant::now() + LONG;
    while !came() && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(100));
    }
    came()
}

/// Turns of a test in which one rank gives up while the other copies. If that happened in fewer than `least` of 40
/// turns, the test makes further turns, because on a busy machine many ranks give up too early or too late.
struct Turns {
    turn: u64,
    happened: usize,
    least: usize,
    end: Instant,
}

impl Turns {
    fn new(least: usize) -> Turns {
        Turns { turn: 0, happened: 0, least, end: Instant::now() + LONG }
    }
    fn go_on(&self) -> bool {
        self.turn < 40 || self.happened < self.least && Instant::now() < self.end
    }
    fn count(&mut self, happened: bool) {
        self.turn += 1;
        self.happened += usize::from(happened);
    }
    /// Pauses, in each of 40 turns for longer than in the one before.
    fn pause(&self, step: Duration) {
        std::thread::sleep(step * (self.turn % 40) as u32);
    }
}

fn message(group: &Group, kind: Kind, peer: u32, tag: u32, memory: &mut [u8]) -> Arc<Op> {
    let mut request = on_memory(kind, peer, memory);
    request.tag = tag;
    group.issue(request, None).unwrap()
}

fn filled(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let first = random.next();
    (0..bytes as u64).map(|at| (first.wrapping_add(at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn memory(bytes: Vec<u8>, shared: bool) -> Memory {
    if shared { Memory::shared(&bytes) } else { Memory::Own(bytes) }
}

/// Returns, for each message of this rank that ended, in the order of issue, whether it was read in place.
fn in_place(group: &Group) -> Vec<bool> {
    let records = group.records();
    let messages = records.iter().filter(|record| record.kind.is_p2p());
    messages.map(|record| Choice::from_code(record.route.choice) == Choice::MAPPED).collect()
}

#[test]
fn rule_36_a_message_is_read_in_place_if_the_senders_tensor_can_be_reached() {
    let groups = groups(2);
    for (shared, bytes, expected) in
        [(true, 3_000_001, true), (true, 64 << 10, true), (true, 60_000, false), (false, 3_000_001, false)]
    {
        on_ranks(2, |me| {
            let mut mine = memory(if me == 0 { filled(bytes, 5) } else { vec![0; bytes] }, shared && me == 0);
            let kind = [Kind::Send, Kind::Recv][me];
            message(&groups[me], kind, 1 - me as u32, 0, &mut mine).wait(None).unwrap();
            assert!(mine[..] == filled(bytes, 5)[..], "rank {me}, {bytes} bytes");
            assert_eq!(in_place(&groups[me]).last(), Some(&expected), "rank {me}, {bytes} bytes, shared: {shared}");
        });
    }
}

#[test]
fn rule_20_staged_messages_and_messages_in_place_keep_their_order() {
    for ranks in [2, 3, 5] {
        let groups = groups(ranks);
        on_ranks(ranks, |me| {
            let mut own = Random::new(me as u64);
            let plan = |from: usize, to: usize| {
                let mut random = Random::new((from * 10 + to) as u64);
                (0..40)
                    .map(|_| (random.pick(&[0usize, 100, 5000, 65_536, 70_001, 400_000, 2_500_000]), random.below(3)))
                    .collect::<Vec<_>>()
            };
            let peers: Vec<usize> = (0..ranks).filter(|peer| *peer != me).collect();
            let mut sent = Vec::new();
            let mut got = Vec::new();
            for at in 0..40 {
                for &peer in &peers {
                    let (bytes, tag) = plan(me, peer)[at];
                    let mut data = memory(filled(bytes, (me * 100 + at) as u64), bytes > 0 && own.below(3) > 0);
                    sent.push((message(&groups[me], Kind::Send, peer as u32, tag as u32, &mut data), data));
                    let (bytes, tag) = plan(peer, me)[at];
                    let mut data = memory(vec![0; bytes], bytes > 0 && own.below(2) > 0);
                    let op = message(&groups[me], Kind::Recv, peer as u32, tag as u32, &mut data);
                    got.push((op, data, filled(bytes, (peer * 100 + at) as u64)));
                }
                if own.below(8) == 0 {
                    std::thread::sleep(Duration::from_micros(300));
                }
            }
            sent.iter().for_each(|(op, _)| op.wait(None).unwrap());
            for (op, data, expected) in &got {
                op.wait(None).unwrap();
                assert!(data[..] == expected[..], "rank {me}");
            }
            let ways = in_place(&groups[me]);
            assert!(ways.contains(&true) && ways.contains(&false), "{ways:?}");
        });
    }
}

/// The send continues from a copy if a later operation needs its tensor before the receiver has matched the message and
/// granted it a channel.
#[test]
fn rule_04_an_operation_after_the_send_does_not_change_the_message() {
    let groups = groups(2);
    for turn in 0..20u64 {
        on_ranks(2, |me| {
            let mut data = Memory::shared(&filled(200_000, turn));
            let mut sum = Memory::shared(&vec![1; 200_000]);
            let (send, peer) = (Kind::Send, 1 - me as u32);
            if me == 0 {
                let sent = message(&groups[0], send, peer, 0, &mut data);
                std::thread::sleep(Duration::from_micros(turn * 40));
                groups[0].run(on_memory(Kind::AllReduce, 0, &mut data), None).unwrap();
                sent.wait(None).unwrap();
            } else {
                // In half of the turns, the receive is posted only after the all_reduce.
                let mut got = vec![0; 200_000];
                let early = turn.is_multiple_of(2).then(|| message(&groups[1], Kind::Recv, peer, 0, &mut got));
                groups[1].run(on_memory(Kind::AllReduce, 0, &mut sum), None).unwrap();
                let op = early.unwrap_or_else(|| message(&groups[1], Kind::Recv, peer, 0, &mut got));
                op.wait(None).unwrap();
                assert!(got == filled(200_000, turn), "turn {turn}");
            }
            let after = if me == 0 { &data } else { &sum };
            assert!(after.iter().zip(filled(200_000, turn)).all(|(now, before)| *now == before.wrapping_add(1)));
        });
    }
}

#[test]
fn rule_20_a_message_in_place_of_another_size_fails_both_sides_and_nothing_else() {
    let groups = groups(2);
    on_ranks(2, |me| {
        let mut data = Memory::shared(&vec![0; if me == 0 { 100_000 } else { 90_000 }]);
        let kind = [Kind::Send, Kind::Recv][me];
        let error = message(&groups[me], kind, 1 - me as u32, 0, &mut data).wait(None).unwrap_err();
        assert!(error.text().contains("100000 bytes"), "{error}");
        groups[me].run(on_memory(Kind::Barrier, 0, &mut []), None).unwrap();
    });
}

#[test]
fn rule_20_a_receive_from_any_rank_reads_in_place() {
    let groups = groups(3);
    on_ranks(3, |me| {
        if me > 0 {
            let mut data = Memory::shared(&filled(300_000, me as u64));
            message(&groups[me], Kind::Send, 0, 4, &mut data).wait(None).unwrap();
            return;
        }
        let mut seen = Vec::new();
        for _ in 0..2 {
            let mut data = vec![0; 300_000];
            let op = message(&groups[0], Kind::Recv, ANY_RANK, 4, &mut data);
            op.wait(None).unwrap();
            assert!(data == filled(300_000, op.source() as u64));
            seen.push(op.source());
        }
        seen.sort_unstable();
        assert_eq!(seen, [1, 2]);
        assert_eq!(in_place(&groups[0]), [true, true]);
    });
}

/// The sender gives up while the receiver copies, and its program overwrites the tensor: the receive fails, or has the
/// data as they were sent.
#[test]
fn rule_36_a_tensor_that_changes_after_its_send_has_failed_is_never_taken_for_the_message() {
    let mut turns = Turns::new(6);
    while turns.go_on() {
        let groups = groups(2);
        let ends = on_ranks(2, |me| {
            let mut data = Memory::shared(&vec![if me == 0 { 7 } else { 0 }; 8 << 20]);
            let kind = [Kind::Send, Kind::Recv][me];
            // The receiver reaches this point before each part that it copies, and then is slow.
            let _slow = on_this_thread(move |point| {
                if me == 1 && point == FaultPoint::BodySeen {
                    std::thread::sleep(Duration::from_micros(100));
                }
            });
            groups[me].run(on_memory(Kind::Barrier, 0, &mut []), None).unwrap();
            let Ok(op) = groups[me].issue(on_memory(kind, 1 - me as u32, &mut data), None) else { return false };
            if me == 0 {
                turns.pause(Duration::from_micros(60));
                match turns.turn % 2 {
                    0 => groups[0].abort("the test gives up"),
                    _ => groups[0].shutdown(),
                }
                let ended = op.wait(None).is_ok();
                data.fill(9);
                return ended;
            }
            let ended = op.wait(None).is_ok();
            assert!(!ended || data.iter().all(|byte| *byte == 7), "a success with other data");
            ended
        });
        turns.count(!ends[1]);
        assert!(!ends[0] || ends[1], "the send has ended, but the message was not received");
    }
    assert!(turns.happened >= turns.least, "only {} of {} were given up in time", turns.happened, turns.turn);
}

/// Counts how often this thread reaches a point, and makes it sleep there for `sleep`.
fn counted(at: FaultPoint, sleep: Duration) -> (fault_points::Hook, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&count);
    let hook = on_this_thread(move |point| {
        if point == at {
            seen.fetch_add(1, Relaxed);
            std::thread::sleep(sleep);
        }
    });
    (hook, count)
}

/// If both tensors can be reached, the sender, which waits, copies what the receiver has not claimed.
#[test]
fn rule_36_both_ranks_copy_a_message_if_both_tensors_can_be_reached() {
    // In its own process, because the hook acts on every thread: a progress thread may drive the receiver.
    let ended = this_program(module_path!(), "as_ranks_that_both_copy").status().unwrap();
    assert!(ended.success(), "{ended}");
}

#[test]
#[ignore = "the test above runs it as a separate process"]
fn as_ranks_that_both_copy() {
    const BYTES: usize = 8 << 20;
    for shared in [true, false] {
        let groups = groups(2);
        let (claimed, in_time) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (seen, senders, before) = (AtomicUsize::new(0), Arc::clone(&claimed), Arc::clone(&in_time));
        let _hook = in_this_process(move |point| {
            // When the receiver comes here for the second time, the sender knows the output, and the receiver has
            // claimed nothing. The receiver waits here, so that the sender's thread finds a range to copy.
            if shared && point == FaultPoint::BodySeen && seen.fetch_add(1, Relaxed) == 1 {
                before.store(until(|| senders.load(Relaxed) > 0), Relaxed);
            }
        });
        on_ranks(2, |me| {
            let mut data = memory(if me == 0 { filled(BYTES, 3) } else { vec![0; BYTES] }, me == 0 || shared);
            // Counts only what rank 0's own thread claims, not what a progress thread claims.
            let claimed = Arc::clone(&claimed);
            let _hook = on_this_thread(move |point| {
                if me == 0 && point == FaultPoint::RangeClaimed {
                    claimed.fetch_add(1, Relaxed);
                }
            });
            groups[me].run(on_memory(Kind::Barrier, 0, &mut []), None).unwrap();
            let kind = [Kind::Send, Kind::Recv][me];
            message(&groups[me], kind, 1 - me as u32, 0, &mut data).wait(None).unwrap();
            assert!(data[..] == filled(BYTES, 3)[..], "rank {me}");
            assert_eq!(in_place(&groups[me]), [true], "rank {me}");
        });
        assert_eq!(in_time.load(Relaxed), shared, "the sender copies if and only if it can reach the output");
        assert!(shared || claimed.load(Relaxed) == 0, "the sender claimed a range of an output that it cannot reach");
    }
}

/// A sender looks for its share when the receiver has already read the sender's message and lent the channel to another
/// rank. The sender must leave that rank's message alone.
#[test]
fn rule_20_a_sender_that_looks_late_takes_no_share_of_another_ranks_message() {
    // In its own process, because the hook acts on every thread: a progress thread may drive a rank.
    let ended = this_program(module_path!(), "as_ranks_of_which_one_looks_late").status().unwrap();
    assert!(ended.success(), "{ended}");
}

#[test]
#[ignore = "the test above runs it as a separate process"]
fn as_ranks_of_which_one_looks_late() {
    const BYTES: usize = 1 << 20;
    /// What has happened, in this order: rank 2 reads rank 0's message; rank 0 looks for its share; rank 2 has the
    /// message; rank 2 reads rank 1's message; rank 0's send has ended.
    #[derive(Default)]
    struct Order([AtomicUsize; 5]);
    impl Order {
        fn come(&self, step: usize) {
            self.0[step].store(1, Relaxed);
        }
        fn has(&self, step: usize) -> bool {
            self.0[step].load(Relaxed) == 1
        }
        fn wait(&self, step: usize) {
            until(|| self.has(step));
        }
    }
    let (order, groups) = (Arc::new(Order::default()), groups(3));
    let theirs = Arc::clone(&order);
    let _hook = in_this_process(move |point| match point {
        FaultPoint::BodySeen if !theirs.has(0) => {
            theirs.come(0);
            theirs.wait(1);
        }
        FaultPoint::HomeSought if theirs.has(0) && !theirs.has(1) => {
            theirs.come(1);
            theirs.wait(3);
        }
        FaultPoint::RangeClaimed if theirs.has(2) && !theirs.has(3) => {
            theirs.come(3);
            theirs.wait(4);
        }
        _ => (),
    });
    on_ranks(3, |me| {
        if me == 1 {
            order.wait(1); // so that rank 0 is the one that looks
        }
        if me < 2 {
            let mut data = Memory::shared(&filled(BYTES, me as u64));
            message(&groups[me], Kind::Send, 2, 0, &mut data).wait(None).unwrap();
            if me == 0 {
                order.come(4);
            }
            return;
        }
        for from in 0..2 {
            let mut data = memory(vec![0; BYTES], from == 1); // only the second output can be reached
            message(&groups[2], Kind::Recv, from, 0, &mut data).wait(None).unwrap();
            assert!(data[..] == filled(BYTES, u64::from(from))[..], "the message of rank {from}");
            order.come(2);
        }
        assert!((0..4).all(|step| order.has(step)), "the ranks did not come in the order of this test");
    });
}

/// The receiver gives up while the sender copies into the receiver's output, and the receiver's program uses the output
/// again. From then on the sender changes nothing there.
#[test]
pub fn rule_36_a_sender_that_copies_late_changes_nothing_after_the_receive_has_failed() {
    let mut turns = Turns::new(4);
    while turns.go_on() {
        let groups = groups(2);
        let parts = on_ranks(2, |me| {
            let mut data = Memory::shared(&vec![if me == 0 { 7 } else { 0 }; 8 << 20]);
            let kind = [Kind::Send, Kind::Recv][me];
            // The sender has claimed a range, and copies it late.
            let sleep = Duration::from_micros(if me == 0 { 500 } else { 0 });
            let (_slow, parts) = counted(FaultPoint::RangeClaimed, sleep);
            groups[me].run(on_memory(Kind::Barrier, 0, &mut []), None).unwrap();
            let Ok(op) = groups[me].issue(on_memory(kind, 1 - me as u32, &mut data), None) else { return 0 };
            if me == 0 {
                let _ = op.wait(None);
                return parts.load(Relaxed);
            }
            let turn = turns.turn;
            turns.pause(Duration::from_micros(30));
            match turn % 2 {
                0 => groups[1].abort("the test gives up"),
                _ => groups[1].shutdown(),
            }
            let ended = op.wait(None).is_ok();
            data.fill(9);
            std::thread::sleep(Duration::from_millis(5));
            assert!(data.iter().all(|byte| *byte == 9), "turn {turn}: the sender has written into the output");
            usize::from(ended)
        });
        turns.count(parts[0] > 0 && parts[1] == 0);
    }
    let Turns { turn, happened, least, .. } = turns;
    assert!(happened >= least, "in only {happened} of {turn} turns the sender copied when the receiver gave up");
}
