//! Send and receive: tags, order, sizes, wildcards (rules 1, 3, 20), and the error that every rank gets after a
//! failure.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Random, cut, for_each_layout, on_memory, on_ranks, plain};
use sagellm::error::ErrorKind;
use sagellm::group::{Group, Op};
use sagellm::types::{ANY_RANK, Kind, Request};

/// Limit for waits that take milliseconds. It is four seconds, because other programs may share the cores.
const SOON: Duration = Duration::from_secs(4);

/// Waits until another rank has set the flag.
fn until(flag: &AtomicBool) {
    let begin = Instant::now();
    while !flag.load(Ordering::Acquire) {
        assert!(begin.elapsed() < 10 * SOON, "the other rank never came so far");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn groups(ranks: usize, seconds: u64) -> Vec<Arc<Group>> {
    Group::local(ranks, Duration::from_secs(seconds)).unwrap()
}

fn request(kind: Kind, peer: u32, tag: u32, memory: &mut [u8]) -> Request {
    let mut request = on_memory(kind, peer, memory);
    request.tag = tag;
    request
}

fn send(group: &Group, to: u32, tag: u32, memory: &mut [u8]) -> Arc<Op> {
    group.issue(request(Kind::Send, to, tag, memory), None).unwrap()
}

fn recv(group: &Group, from: u32, tag: u32, memory: &mut [u8]) -> Arc<Op> {
    group.issue(request(Kind::Recv, from, tag, memory), None).unwrap()
}

fn bytes(n: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..n).map(|_| random.next() as u8).collect()
}

#[test]
fn rule_20_a_tag_without_a_receive_blocks_no_later_message() {
    for_each_layout(2, Duration::from_secs(30), |groups, me| {
        if me == 0 {
            let (mut big, mut small) = (bytes(16 << 20, 1), bytes(8, 2));
            let first = send(&groups[0], 1, 1, &mut big);
            let second = send(&groups[0], 1, 2, &mut small);
            second.wait(None).unwrap();
            first.wait(None).unwrap();
        } else {
            let (mut big, mut small) = (vec![0; 16 << 20], vec![0; 8]);
            recv(&groups[1], 0, 2, &mut small).wait(None).unwrap();
            assert_eq!(small, bytes(8, 2));
            recv(&groups[1], 0, 1, &mut big).wait(None).unwrap();
            assert_eq!(big, bytes(16 << 20, 1));
        }
    });
}

#[test]
fn rule_20_many_messages_of_every_size_arrive_in_order_per_tag() {
    let sizes = [0usize, 1, 40, 4096, 4097, 131_072, 131_073, 400_000];
    for_each_layout(3, Duration::from_secs(60), |groups, me| {
        let mut keep = Vec::new();
        for to in (0..3u32).filter(|to| *to as usize != me) {
            for (i, size) in sizes.iter().cycle().take(60).enumerate() {
                let mut memory = bytes(*size, (me * 100 + i) as u64);
                let op = send(&groups[me], to, (i % 3) as u32, &mut memory);
                keep.push((op, memory));
            }
        }
        for from in (0..3u32).filter(|from| *from as usize != me) {
            // Receives one tag after the other, so that most messages wait in the private list or at the sender.
            for tag in 0..3usize {
                for (i, size) in sizes.iter().cycle().take(60).enumerate().filter(|(i, _)| i % 3 == tag) {
                    let mut memory = vec![0; *size];
                    let op = recv(&groups[me], from, tag as u32, &mut memory);
                    op.wait(None).unwrap();
                    assert_eq!(memory, bytes(*size, (from as usize * 100 + i) as u64), "message {i} from {from}");
                    assert_eq!(op.source(), from as i32);
                }
            }
        }
        keep.iter().for_each(|(op, _)| op.wait(None).unwrap());
    });
}

#[test]
fn rule_20_wildcards_and_specific_receives_match_in_post_order() {
    for_each_layout(3, Duration::from_secs(30), |groups, me| match me {
        0 => {
            let mut memory = vec![vec![0u8; 8]; 4];
            let (one, rest) = memory.split_at_mut(1);
            let (two, rest) = rest.split_at_mut(1);
            let (three, four) = rest.split_at_mut(1);
            let ops = [
                recv(&groups[0], 2, 7, &mut one[0]),
                recv(&groups[0], 1, 7, &mut two[0]),
                recv(&groups[0], ANY_RANK, 7, &mut three[0]),
                recv(&groups[0], ANY_RANK, 7, &mut four[0]),
            ];
            ops.iter().for_each(|op| op.wait(None).unwrap());
            assert_eq!((ops[0].source(), ops[1].source()), (2, 1));
            assert_eq!(memory[0], bytes(8, 20), "the first message of rank 2");
            assert_eq!(memory[1], bytes(8, 10), "the first message of rank 1");
            let mut rest: Vec<(i32, Vec<u8>)> = (2..4).map(|i| (ops[i].source(), memory[i].clone())).collect();
            rest.sort();
            assert_eq!(rest, vec![(1, bytes(8, 11)), (2, bytes(8, 21))]);
        }
        _ => {
            for i in 0..2 {
                let mut memory = bytes(8, (me * 10 + i) as u64);
                send(&groups[me], 0, 7, &mut memory).wait(None).unwrap();
            }
        }
    });
}

#[test]
fn rule_01_messages_and_collectives_count_apart() {
    for_each_layout(2, Duration::from_secs(30), |groups, me| {
        let mut memory = vec![1u8; 4];
        let group = &groups[me];
        for n in 1..=3u64 {
            let op = if me == 0 { send(group, 1, 0, &mut memory) } else { recv(group, 0, 0, &mut memory) };
            assert_eq!(op.number(), n);
            op.wait(None).unwrap();
        }
        assert_eq!(group.sequence(), 0);
        group.run(request(Kind::Barrier, 0, 0, &mut []), None).unwrap();
        assert_eq!(group.sequence(), 1);
    });
}

#[test]
fn rule_02_a_rejected_call_uses_no_number() {
    for_each_layout(2, Duration::from_secs(30), |groups, me| {
        let group = &groups[me];
        let mut memory = vec![1u8; 4];
        let wrong = plain(Kind::AllReduce, 0, cut(&mut memory, 1, 1), cut(&mut memory[..3], 1, 1));
        let error = group.run(wrong, None).unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid, "{error:?}");
        assert_eq!(group.sequence(), 0);
        group.run(request(Kind::AllReduce, 0, 0, &mut memory), None).unwrap();
        assert_eq!((group.sequence(), &memory[..]), (1, &[2u8; 4][..]));
    });
}

#[test]
fn rule_20_a_message_of_another_size_fails_both_sides_and_nothing_else() {
    for_each_layout(2, Duration::from_secs(30), |groups, me| {
        let group = &groups[me];
        let mut memory = vec![0u8; if me == 0 { 200_000 } else { 50 }]; // longer than a letter between hosts
        let op = if me == 0 { send(group, 1, 0, &mut memory) } else { recv(group, 0, 0, &mut memory) };
        let error = op.wait(None).unwrap_err();
        assert!(error.text().contains("200000 bytes"), "{error}");
        group.run(request(Kind::Barrier, 0, 0, &mut []), None).unwrap();
    });
}

#[test]
fn rule_05_different_calls_are_shown_to_both_ranks_before_data_moves() {
    let groups = groups(2, 30);
    let texts = on_ranks(2, |me| {
        let mut memory = vec![7u8; if me == 0 { 16 } else { 100_000 }];
        let error = groups[me].run(request(Kind::AllReduce, 0, 0, &mut memory), None).unwrap_err();
        assert!(memory.iter().all(|b| *b == 7), "data was touched");
        assert!(error.kind() == ErrorKind::Mismatch, "{error:?}");
        // Rule 5: the group is poisoned, even for a rank that could have finished.
        assert!(groups[me].run(request(Kind::Barrier, 0, 0, &mut []), None).is_err());
        error.text().to_string()
    });
    for text in texts {
        assert!(text.contains("all_reduce(16 bytes, uint8, SUM)"), "{text}");
        assert!(text.contains("all_reduce(100000 bytes, uint8, SUM)"), "{text}");
    }
}

#[test]
fn rule_05_two_roots_of_one_broadcast_are_found_at_the_next_call() {
    let groups = groups(2, 30);
    on_ranks(2, |me| {
        let mut memory = bytes(64, me as u64);
        let broadcast = plain(Kind::Broadcast, me as u32, cut(&mut memory, 1, 1), Vec::new());
        groups[me].run(broadcast, None).unwrap(); // both ranks only send, so neither sees the mismatch in this call
        let error = groups[me].run(request(Kind::Barrier, 0, 0, &mut []), None).unwrap_err();
        assert!(error.kind() == ErrorKind::Mismatch, "{error:?}");
        let text = error.text();
        assert!(text.contains("broadcast(64 bytes, root 0)") && text.contains("broadcast(64 bytes, root 1)"), "{text}");
    });
}

#[test]
fn rule_05_a_rank_that_leaves_after_a_fault_does_not_hide_it() {
    let groups = groups(3, 30);
    on_ranks(3, |me| {
        if me == 2 {
            // Ranks 0 and 1 disagree and leave while this rank does something else.
            std::thread::sleep(Duration::from_millis(150));
            let error = groups[2].run(request(Kind::Barrier, 0, 0, &mut []), None).unwrap_err();
            assert!(error.kind() == ErrorKind::Mismatch, "{error:?}");
            return;
        }
        let mut memory = vec![7u8; 16 + me];
        groups[me].run(request(Kind::AllReduce, 0, 0, &mut memory), None).unwrap_err();
        groups[me].shutdown();
    });
}

#[test]
fn rule_11_an_elapsed_wait_leaves_the_operation_running() {
    let groups = groups(2, 30);
    let elapsed = AtomicBool::new(false);
    on_ranks(2, |me| {
        let mut memory = vec![1u8; 64];
        if me == 1 {
            until(&elapsed);
        }
        let op = groups[me].issue(request(Kind::AllReduce, 0, 0, &mut memory), None).unwrap();
        if me == 0 {
            let error = op.wait(Some(Duration::from_millis(30))).unwrap_err();
            assert!(error.is_elapsed_wait(), "{error:?}");
            elapsed.store(true, Ordering::Release);
        }
        op.wait(None).unwrap();
        assert_eq!(memory, vec![2u8; 64]);
    });
}

#[test]
fn rule_11_a_deadline_names_the_missing_rank_and_its_last_call() {
    let groups = groups(3, 30);
    let entered = AtomicBool::new(false);
    let texts = on_ranks(3, |me| {
        let mut memory = vec![1u8; 64];
        groups[me].run(request(Kind::AllReduce, 0, 0, &mut memory), None).unwrap();
        let mut request = request(Kind::AllReduce, 0, 0, &mut memory);
        match me {
            0 => {
                // Rank 1 must have entered, because the error may name rank 2 alone. Rank 1 has the group's 30 s, so
                // that only the deadline of this rank can end the operation.
                until(&entered);
                request.timeout_ms = Some(200);
                let begin = Instant::now();
                let error = groups[0].run(request, None).unwrap_err();
                assert!(begin.elapsed() >= Duration::from_millis(150), "too early");
                Some(error)
            }
            1 => {
                let op = groups[1].issue(request, None).unwrap();
                entered.store(true, Ordering::Release);
                Some(op.wait(None).unwrap_err())
            }
            _ => None,
        }
    });
    for error in texts.into_iter().flatten() {
        let text = error.text();
        assert!(error.kind() == ErrorKind::Timeout, "{error:?}");
        assert!(text.contains("rank 2") && text.contains("has not entered it"), "{text}");
        assert!(text.contains("all_reduce(64 bytes, uint8, SUM) number 1"), "{text}");
    }
}

#[test]
fn abort_unblocks_every_rank() {
    let groups = groups(2, 30);
    on_ranks(2, |me| {
        if me == 1 {
            std::thread::sleep(Duration::from_millis(100));
            groups[1].abort("the test says so");
            return;
        }
        let mut memory = vec![1u8; 64];
        let begin = Instant::now();
        let error = groups[0].run(request(Kind::AllReduce, 0, 0, &mut memory), None).unwrap_err();
        assert!(begin.elapsed() < SOON);
        assert!(error.text().contains("the test says so"), "{error}");
    });
}

#[test]
fn rule_21_who_leaves_in_order_has_still_given_what_it_published() {
    let groups = groups(2, 30);
    on_ranks(2, |me| {
        let mut memory = bytes(200_000, 3);
        if me == 0 {
            let root = plain(Kind::Broadcast, 0, cut(&mut memory, 1, 1), Vec::new());
            groups[0].run(root, None).unwrap_or_else(|e| panic!("{e}"));
            groups[0].shutdown();
            let late = groups[0].run(request(Kind::Barrier, 0, 0, &mut []), None).unwrap_err();
            assert!(late.kind() == ErrorKind::Aborted, "{late:?}");
        } else {
            std::thread::sleep(Duration::from_millis(200));
            let mut memory = vec![0; 200_000];
            let leaf = plain(Kind::Broadcast, 0, Vec::new(), cut(&mut memory, 1, 1));
            groups[1].run(leaf, None).unwrap();
            assert_eq!(memory, bytes(200_000, 3));
            let begin = Instant::now();
            let error = groups[1].run(request(Kind::Barrier, 0, 0, &mut []), None).unwrap_err();
            assert!(begin.elapsed() < SOON, "found out late");
            assert!(error.rank() == Some(0), "{error:?}");
            assert!(error.text().contains("left the group"), "{error}");
        }
    });
}

#[test]
fn monitored_barrier_names_who_is_missing_and_poisons_nothing() {
    let told = AtomicBool::new(false);
    for_each_layout(3, Duration::from_secs(30), |groups, me| {
        let group = &groups[me];
        told.store(false, Ordering::Release);
        group.monitored_barrier(None, false).unwrap();
        if me == 0 {
            let error = group.monitored_barrier(Some(Duration::from_millis(200)), true).unwrap_err();
            assert!(error.text().contains("Ranks 1, 2 failed to pass monitoredBarrier in 200 ms"), "{error}");
            told.store(true, Ordering::Release);
        } else {
            until(&told);
            assert!(group.monitored_barrier(Some(Duration::from_millis(200)), true).is_err());
        }
        group.run(request(Kind::Barrier, 0, 0, &mut []), None).unwrap();
        group.monitored_barrier(None, false).unwrap();
        assert_eq!(group.sequence(), 1);
    });
}

#[test]
fn rule_11_waits_that_elapse_again_and_again_do_not_hide_the_deadline() {
    let groups = groups(2, 1);
    let mut memory = vec![0u8; 8];
    let op = recv(&groups[0], 1, 0, &mut memory);
    let begin = Instant::now();
    let error = loop {
        match op.wait(Some(Duration::from_millis(10))) {
            Err(error) if error.is_elapsed_wait() => {
                assert!(begin.elapsed() < Duration::from_secs(20), "no deadline after 20 s")
            }
            ended => break ended,
        }
    };
    assert!(matches!(error, Err(ref error) if error.kind() == ErrorKind::Timeout), "{error:?}");
}
