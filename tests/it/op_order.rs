//! Disagreements between ranks, and the order of one rank's own operations: a barrier ends last, signatures cover lists
//! of sizes, and messages and collectives on the same memory run in the order of issue (rules 4, 5, 33).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{cut, for_each_layout, on_ranks, plain};
use sagellm::config::Settings;
use sagellm::engine::local;
use sagellm::error::ErrorKind;
use sagellm::group::{Group, Op};
use sagellm::types::{ANY_RANK, Dtype, Kind, Listed, Request};

const LIMIT: Duration = Duration::from_secs(30);

fn groups(ranks: usize) -> Vec<Arc<Group>> {
    Group::local(ranks, LIMIT).unwrap()
}

/// Groups over several hosts, with ranks that are threads. `place`: the number of each rank's host.
fn on_hosts(place: &[usize]) -> Vec<Arc<Group>> {
    Group::local_hosts(place, LIMIT, Settings::default(), local::links(place.len())).unwrap()
}

fn call(kind: Kind, root: u32, inputs: &mut [u8], outputs: &mut [u8]) -> Request {
    plain(kind, root, cut(inputs, 1, 1), cut(outputs, 1, 1))
}

fn all_reduce(memory: &mut [u8]) -> Request {
    let spans = cut(memory, 1, 1);
    plain(Kind::AllReduce, 0, spans.clone(), spans)
}

fn tagged(tag: u32, mut request: Request) -> Request {
    request.tag = tag;
    request
}

fn barrier() -> Request {
    call(Kind::Barrier, 0, &mut [], &mut [])
}

fn issue(group: &Group, request: Request) -> Arc<Op> {
    group.issue(request, None).unwrap()
}

/// Issues sixteen all_reduces and drops their handles immediately, then issues a barrier. After the barrier all results
/// must be complete.
fn barrier_ends_last(groups: &[Arc<Group>], bytes: usize, sync: bool) {
    let ranks = groups.len();
    on_ranks(ranks, |me| {
        for turn in 0..10 {
            let mut all: Vec<Vec<u8>> = (0..16).map(|i| vec![i + turn; bytes]).collect();
            for memory in &mut all {
                drop(issue(&groups[me], all_reduce(memory)));
            }
            if sync {
                groups[me].run(barrier(), None).unwrap();
            } else {
                issue(&groups[me], barrier()).wait(None).unwrap();
            }
            for (i, memory) in (0..).zip(&all) {
                let sum = (i + turn) * ranks as u8;
                assert!(memory.iter().all(|byte| *byte == sum), "rank {me}, turn {turn}: operation {i} had not ended");
            }
        }
    });
}

#[test]
fn rule_33_a_barrier_ends_behind_every_earlier_collective() {
    for bytes in [10, 40_000, 1 << 20] {
        for sync in [true, false] {
            barrier_ends_last(&groups(3), bytes, sync);
        }
    }
}

#[test]
fn rule_33_a_barrier_ends_behind_every_earlier_collective_over_hosts() {
    for bytes in [10, 40_000, 3 << 20] {
        let groups = on_hosts(&[0, 0, 1]);
        barrier_ends_last(&groups, bytes, bytes < 1 << 20);
        on_ranks(groups.len(), |me| groups[me].shutdown());
    }
}

/// A barrier that must wait for an earlier collective fails with it.
#[test]
fn rule_33_a_barrier_fails_with_the_collective_before_it() {
    for groups in [groups(2), on_hosts(&[0, 1])] {
        let mut memory = vec![1u8; 3 << 20];
        let first = issue(&groups[0], all_reduce(&mut memory));
        let second = issue(&groups[0], barrier());
        groups[0].abort("the test says so");
        assert!(second.wait(None).is_err() && first.wait(None).is_err());
    }
}

/// Runs a collective in which each rank passes its own list of sizes. Every rank must get a mismatch error, and no rank
/// may have written data of a peer to its output.
fn lists_must_agree(groups: &[Arc<Group>], kind: Kind, lists: &[Vec<usize>]) {
    let ranks = groups.len();
    let sync = std::sync::Barrier::new(ranks);
    let errors = on_ranks(ranks, |me| {
        let list = &lists[me];
        let (own, total) = (list[me], list.iter().sum());
        let gathers = kind == Kind::AllGather;
        let (mut input, mut output) =
            if gathers { (vec![1u8; own], vec![9u8; total]) } else { (vec![1u8; total], vec![9u8; own]) };
        let mut request = call(kind, 0, &mut input, &mut output);
        if list.iter().any(|bytes| *bytes != own) {
            *(if gathers { &mut request.out_blocks } else { &mut request.in_blocks }) = list.clone();
        }
        let error = groups[me].run(request, None).unwrap_err();
        assert!(error.kind() == ErrorKind::Mismatch, "rank {me} of {lists:?}: {error:?}");
        let start: usize = list[..me].iter().sum();
        let foreign = |at: usize| gathers.then_some(at).is_none_or(|at| at < start || at >= start + own);
        let written = output.iter().enumerate().find(|(at, byte)| foreign(*at) && **byte != 9);
        assert!(written.is_none(), "rank {me} of {lists:?}: byte {written:?} was written");
        sync.wait();
        assert!(groups[me].run(barrier(), None).is_err(), "the group goes on");
        error.text().to_string()
    });
    for error in &errors {
        assert!(error.contains("list of sizes") || error.contains("lists of sizes"), "{lists:?}: {error}");
    }
}

#[test]
fn rule_05_lists_of_sizes_that_differ_are_found_at_every_size() {
    for kind in [Kind::AllGather, Kind::ReduceScatter] {
        for unit in [4usize, 100, 1 << 19] {
            // Lists with equal sums: different longest blocks; the same longest block at another rank; blocks of equal
            // size on one rank only.
            for lists in [
                [vec![2 * unit, 2 * unit], vec![unit, 3 * unit]],
                [vec![unit, 2 * unit], vec![2 * unit, unit]],
                [vec![3 * unit, unit], vec![2 * unit, 2 * unit]],
            ] {
                lists_must_agree(&groups(2), kind, &lists);
            }
            // Ranks 0 and 1 pass the same list. Rank 2 passes another list, but its own size in it is the size that
            // ranks 0 and 1 expect.
            let right = vec![unit, 2 * unit, unit];
            lists_must_agree(&groups(3), kind, &[right.clone(), right, vec![2 * unit, unit, unit]]);
        }
    }
}

#[test]
fn rule_05_lists_of_sizes_that_differ_are_found_over_hosts() {
    for kind in [Kind::AllGather, Kind::ReduceScatter] {
        for unit in [4usize, 1 << 19] {
            for place in [&[0, 1][..], &[0, 0, 1]] {
                let mut lists = vec![vec![unit; place.len()]; place.len()];
                lists.iter_mut().for_each(|list| list[1] = 2 * unit);
                let last = lists.last_mut().unwrap();
                last.swap(0, 1);
                lists_must_agree(&on_hosts(place), kind, &lists);
            }
        }
    }
}

/// Runs one call with a list of tensors per rank; `lists` has their sizes, and all lists have equal sums. A list of one
/// tensor is passed as a call without a list. Returns each rank's error text.
fn tensors_must_agree(groups: &[Arc<Group>], kind: Kind, lists: &[Vec<usize>]) -> Vec<String> {
    let ranks = groups.len();
    let sync = std::sync::Barrier::new(ranks);
    on_ranks(ranks, |me| {
        let total = lists[me].iter().sum::<usize>();
        let (bytes_in, bytes_out) = match kind {
            Kind::AllReduce => (total, total),
            Kind::AllGather => (total, total * ranks),
            _ => (total * ranks, total),
        };
        let (mut input, mut output) = (vec![1u8; bytes_in], vec![9u8; bytes_out]);
        let mut request = call(kind, 0, &mut input, &mut output);
        let dtype = if kind.reduces() { Dtype::F32 } else { Dtype::Bytes };
        request.dtype = dtype;
        if lists[me].len() > 1 {
            request.list = lists[me].iter().map(|&bytes| Listed { dtype, bytes }).collect();
        }
        let error = groups[me].run(request, None).unwrap_err();
        assert!(error.kind() == ErrorKind::Mismatch, "rank {me} of {lists:?}: {error:?}");
        let own = if kind == Kind::AllGather { me * total..(me + 1) * total } else { 0..0 };
        let written = output.iter().enumerate().any(|(at, byte)| *byte != 9 && !own.contains(&at));
        assert!(!written, "rank {me} of {lists:?}: the output was written");
        sync.wait();
        assert!(groups[me].run(barrier(), None).is_err(), "the group goes on");
        error.text().to_string()
    })
}

/// Lists of equal sums: two sizes swapped, two tensors merged into one, an empty tensor moved, and a call without a
/// list. Depending on the unit, the calls use slots or rounds.
#[test]
fn rule_05_lists_of_tensors_that_differ_are_found_with_the_place() {
    for kind in [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter] {
        for unit in [4usize, 400, 1 << 18] {
            for (right, other, words) in [
                (vec![1, 1, 3], vec![1, 3, 1], ["passed 3 tensors", "tensor 1 has"]),
                (vec![1, 1, 2], vec![2, 2], ["passed 3 tensors", "passed 2 tensors"]),
                (vec![0, 4], vec![4, 0], ["tensor 0 has", "0 bytes"]),
                (vec![4], vec![1, 3], ["passed one tensor and no list", "passed 2 tensors"]),
            ] {
                for ranks in [2, 3] {
                    let mut lists = vec![right.iter().map(|size| size * unit).collect::<Vec<_>>(); ranks];
                    lists[ranks - 1] = other.iter().map(|size| size * unit).collect();
                    let texts = tensors_must_agree(&groups(ranks), kind, &lists);
                    // One rank detects the mismatch first. The other ranks may report that rank's text.
                    assert!(texts.iter().any(|text| words.iter().all(|word| text.contains(word))), "{texts:?}");
                }
            }
        }
    }
    // If a slot has no room for the sizes of all tensors, the error names only how many tensors each rank passed.
    let mut lists = vec![vec![8usize; 2000]; 2];
    lists[1][1999] = 4;
    lists[1].push(4);
    let texts = tensors_must_agree(&groups(2), Kind::AllReduce, &lists);
    assert!(texts.iter().all(|text| text.contains("passed 2000 tensors") && text.contains("passed 2001")), "{texts:?}");
}

#[test]
fn rule_05_lists_of_tensors_that_differ_are_found_over_hosts() {
    for kind in [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter] {
        for unit in [4usize, 1 << 20] {
            for place in [&[0, 1][..], &[0, 0, 1], &[0, 1, 1]] {
                let mut lists = vec![vec![unit, 3 * unit]; place.len()];
                *lists.last_mut().unwrap() = vec![3 * unit, unit];
                for text in tensors_must_agree(&on_hosts(place), kind, &lists) {
                    assert!(text.contains("different lists of tensors") && text.contains("passed 2 tensors"), "{text}");
                }
            }
        }
    }
}

/// Two ranks each call a large broadcast with themselves as the root, with different sizes. Neither waits for data of
/// the other, and the data of the larger broadcast would never be read to its end.
#[test]
fn rule_05_two_roots_of_a_large_broadcast_learn_it_at_once() {
    let groups = groups(2);
    on_ranks(2, |me| {
        let mut memory = vec![me as u8; [1 << 20, 32 << 20][me]];
        let begin = std::time::Instant::now();
        let first = groups[me].run(call(Kind::Broadcast, me as u32, &mut memory, &mut []), None);
        let error = first.and_then(|()| groups[me].run(barrier(), None)).unwrap_err();
        assert!(error.kind() == ErrorKind::Mismatch, "{error:?}");
        assert!(begin.elapsed() < Duration::from_secs(10), "only the deadline told it");
    });
}

/// One broadcast has two roots, and perhaps no rank detects this in that call. The next broadcast must not deliver the
/// data of the first one: a rank either gets the right data or an error.
#[test]
fn rule_05_a_disagreement_between_two_roots_never_shifts_a_later_operation() {
    let groups = groups(3);
    on_ranks(3, |me| {
        let mut memory = vec![me as u8; 1 << 20];
        // Rank 1 passes itself as the root. Ranks 0 and 2 pass rank 0.
        let root = if me == 1 { 1 } else { 0 };
        let request = if me == root as usize {
            call(Kind::Broadcast, root, &mut memory, &mut [])
        } else {
            call(Kind::Broadcast, root, &mut [], &mut memory)
        };
        let first = groups[me].run(request, None);
        let mut later = vec![9u8; 4 << 20];
        if me == 0 {
            later.fill(5);
        }
        let request = if me == 0 {
            call(Kind::Broadcast, 0, &mut later, &mut [])
        } else {
            call(Kind::Broadcast, 0, &mut [], &mut later)
        };
        let second = first.and_then(|()| groups[me].run(request, None));
        let right = later.iter().all(|byte| *byte == 5);
        assert!(
            right || later.iter().all(|byte| *byte == 9) || me == 2 && second.is_err(),
            "rank {me} took wrong data"
        );
        assert!(second.is_err() || me != 1, "rank 1 was not told");
        assert!(second.is_ok() && right || groups[me].run(barrier(), None).is_err());
    });
}

fn send(group: &Group, to: u32, tag: u32, memory: &mut [u8]) -> Arc<Op> {
    issue(group, tagged(tag, call(Kind::Send, to, memory, &mut [])))
}

fn recv(group: &Group, from: u32, tag: u32, memory: &mut [u8]) -> Arc<Op> {
    issue(group, tagged(tag, call(Kind::Recv, from, &mut [], memory)))
}

const SIZES: [usize; 2] = [8, 300_000];

/// Delays rank 1, so that all operations of rank 0 are pending at the same time.
fn late(me: usize) {
    if me == 1 {
        std::thread::sleep(Duration::from_millis(60));
    }
}

#[test]
fn rule_04_a_message_sends_what_an_earlier_collective_wrote() {
    for bytes in SIZES {
        for_each_layout(2, LIMIT, |groups, me| {
            late(me);
            let mut memory = vec![1u8; bytes];
            let sum = issue(&groups[me], all_reduce(&mut memory));
            if me == 0 {
                send(&groups[0], 1, 0, &mut memory).wait(None).unwrap();
            } else {
                let mut got = vec![0u8; bytes];
                recv(&groups[1], 0, 0, &mut got).wait(None).unwrap();
                assert_eq!(got, vec![2u8; bytes]);
            }
            sum.wait(None).unwrap();
        });
    }
}

#[test]
fn rule_04_a_collective_reads_what_an_earlier_message_brought() {
    for bytes in SIZES {
        for source in [1, ANY_RANK] {
            for_each_layout(2, LIMIT, |groups, me| {
                late(me);
                let mut memory = vec![me as u8; bytes];
                if me == 0 {
                    let got = recv(&groups[0], source, 0, &mut memory);
                    issue(&groups[0], call(Kind::Broadcast, 0, &mut memory, &mut [])).wait(None).unwrap();
                    got.wait(None).unwrap();
                } else {
                    send(&groups[1], 0, 0, &mut vec![5u8; bytes]).wait(None).unwrap();
                    issue(&groups[1], call(Kind::Broadcast, 0, &mut [], &mut memory)).wait(None).unwrap();
                    assert_eq!(memory, vec![5u8; bytes]);
                }
            });
        }
    }
}

#[test]
fn rule_04_messages_on_the_same_memory_run_in_order() {
    for bytes in SIZES {
        for_each_layout(3, LIMIT, |groups, me| {
            let mut memory = vec![me as u8 + 1; bytes];
            match me {
                // Rank 0 issues both its receive from rank 1 and its send to rank 2 before rank 1 has sent. The send
                // must wait for the receive.
                0 => {
                    let got = recv(&groups[0], 1, 0, &mut memory);
                    send(&groups[0], 2, 0, &mut memory).wait(None).unwrap();
                    got.wait(None).unwrap();
                }
                1 => {
                    late(me);
                    send(&groups[1], 0, 0, &mut memory).wait(None).unwrap();
                }
                _ => {
                    recv(&groups[2], 0, 0, &mut memory).wait(None).unwrap();
                    assert_eq!(memory, vec![2u8; bytes]);
                }
            }
        });
    }
}

/// A send that must wait is delivered before later sends with the same tag. Later sends with another tag may overtake
/// it.
#[test]
fn rule_04_a_message_that_waits_is_overtaken_by_no_other_of_its_tag() {
    for bytes in SIZES {
        for_each_layout(2, LIMIT, |groups, me| {
            let group = &groups[me];
            let mut memory = vec![1u8; bytes];
            if me == 0 {
                let sum = issue(group, all_reduce(&mut memory));
                let (mut second, mut other) = (vec![7u8; bytes], vec![8u8; bytes]);
                let all = [
                    send(group, 1, 1, &mut memory),
                    send(group, 1, 1, &mut second),
                    send(group, 1, 2, &mut other),
                    sum,
                ];
                all.iter().for_each(|op| op.wait(None).unwrap());
            } else {
                let mut got = vec![vec![0u8; bytes]; 3];
                // Receives the message with the other tag first: this rank joins the all_reduce only afterwards, so
                // that message must overtake the two that wait for the all_reduce.
                recv(group, 0, 2, &mut got[2]).wait(None).unwrap();
                group.run(all_reduce(&mut memory), None).unwrap();
                recv(group, 0, 1, &mut got[0]).wait(None).unwrap();
                recv(group, 0, 1, &mut got[1]).wait(None).unwrap();
                assert_eq!(got, [vec![2u8; bytes], vec![7u8; bytes], vec![8u8; bytes]]);
            }
        });
    }
}

/// As the test above, for receives. The receive that was posted first gets the first message, although it must wait for
/// an all_reduce on its memory.
#[test]
fn rule_04_a_receive_that_waits_is_overtaken_by_no_other_of_its_messages() {
    for bytes in SIZES {
        for first in [1, ANY_RANK] {
            for_each_layout(2, LIMIT, |groups, me| {
                let group = &groups[me];
                let mut memory = vec![1u8; bytes];
                if me == 0 {
                    let sum = issue(group, all_reduce(&mut memory));
                    let mut second = vec![0u8; bytes];
                    let all = [recv(group, first, 1, &mut memory), recv(group, 1, 1, &mut second), sum];
                    all.iter().for_each(|op| op.wait(None).unwrap());
                    assert_eq!((memory, second), (vec![7u8; bytes], vec![8u8; bytes]));
                } else {
                    let (mut a, mut b) = (vec![7u8; bytes], vec![8u8; bytes]);
                    let all = [send(group, 0, 1, &mut a), send(group, 0, 1, &mut b)];
                    std::thread::sleep(Duration::from_millis(30));
                    group.run(all_reduce(&mut memory), None).unwrap();
                    all.iter().for_each(|op| op.wait(None).unwrap());
                }
            });
        }
    }
}

/// A pending send must not delay a later operation that writes its memory, because the receiver may wait for that
/// operation before it receives.
#[test]
fn rule_04_a_send_keeps_what_a_later_operation_overwrites() {
    for bytes in SIZES {
        for_each_layout(2, LIMIT, |groups, me| {
            let group = &groups[me];
            let mut memory = vec![me as u8 + 1; bytes];
            // Both ranks send before they receive, with one buffer.
            let all = [send(group, 1 - me as u32, 0, &mut memory), recv(group, 1 - me as u32, 0, &mut memory)];
            all.iter().for_each(|op| op.wait(None).unwrap());
            assert_eq!(memory, vec![2 - me as u8; bytes]);
            // The receiver calls recv only after the collective that overwrites the memory of the send.
            let message = (me == 0).then(|| send(group, 1, 1, &mut memory));
            group.run(all_reduce(&mut memory), None).unwrap();
            assert_eq!(memory, vec![3u8; bytes]);
            match message {
                Some(message) => message.wait(None).unwrap(),
                None => {
                    recv(group, 0, 1, &mut memory).wait(None).unwrap();
                    assert_eq!(memory, vec![2u8; bytes]);
                }
            }
        });
    }
}

/// As the test above, for a send that itself waited for an earlier collective, which writes the memory of the send.
#[test]
fn rule_04_a_send_that_waited_keeps_what_a_later_operation_overwrites() {
    for bytes in SIZES {
        for later in [Kind::AllReduce, Kind::Recv] {
            for_each_layout(2, LIMIT, |groups, me| {
                late(me);
                let group = &groups[me];
                let (mut memory, mut got) = (vec![1u8; bytes], vec![0u8; bytes]);
                let first = issue(group, all_reduce(&mut memory));
                let message = (me == 0).then(|| send(group, 1, 1, &mut memory));
                // The receiver calls recv only after the operation that overwrites the memory of the send.
                if later == Kind::AllReduce {
                    group.run(all_reduce(&mut memory), None).unwrap();
                    assert_eq!(memory, vec![4u8; bytes]);
                } else if me == 0 {
                    recv(group, 1, 2, &mut memory).wait(None).unwrap();
                    assert_eq!(memory, vec![7u8; bytes]);
                } else {
                    first.wait(None).unwrap();
                    send(group, 0, 2, &mut vec![7u8; bytes]).wait(None).unwrap();
                }
                match message {
                    Some(message) => message.wait(None).unwrap(),
                    None => {
                        recv(group, 0, 1, &mut got).wait(None).unwrap();
                        assert_eq!(got, vec![2u8; bytes]);
                    }
                }
                first.wait(None).unwrap();
            });
        }
    }
}

/// Many messages wait for one collective; then many receives use one buffer.
#[test]
fn rule_04_many_messages_that_wait_go_in_order() {
    const COUNT: usize = 2000;
    for_each_layout(2, LIMIT, |groups, me| {
        late(me);
        let group = &groups[me];
        let mut all = vec![1u8; COUNT];
        let mut one = [0u8; 1];
        let sum = issue(group, all_reduce(&mut all));
        if me == 0 {
            let sends: Vec<_> = all.chunks_mut(1).map(|byte| send(group, 1, 5, byte)).collect();
            sends.iter().for_each(|send| send.wait(None).unwrap());
            for i in 0..COUNT {
                send(group, 1, 6, &mut [i as u8]).wait(None).unwrap();
            }
        } else {
            let mut got = vec![0u8; COUNT];
            let recvs: Vec<_> = got.chunks_mut(1).map(|byte| recv(group, 0, 5, byte)).collect();
            recvs.iter().for_each(|recv| recv.wait(None).unwrap());
            assert!(got.iter().all(|byte| *byte == 2));
            let recvs: Vec<_> = (0..COUNT).map(|i| recv(group, [0, ANY_RANK][i % 2], 6, &mut one)).collect();
            recvs.iter().for_each(|recv| recv.wait(None).unwrap());
            assert_eq!(one[0], (COUNT - 1) as u8);
        }
        sum.wait(None).unwrap();
    });
}

/// A held message counts as pending. It fails when its group fails or when its own deadline passes. Only the send has a
/// short deadline: the sum must not end before the send is issued.
#[test]
fn rule_04_a_message_that_waits_fails_with_what_it_waits_for() {
    for aborts in [true, false] {
        let groups = groups(2); // rank 1 makes no call
        let mut memory = vec![1u8; 8];
        let sum = issue(&groups[0], all_reduce(&mut memory));
        let mut request = call(Kind::Send, 1, &mut memory, &mut []);
        request.timeout_ms = (!aborts).then_some(300);
        let message = issue(&groups[0], request);
        if aborts {
            groups[1].abort("the test says so");
        }
        let begin = Instant::now();
        let error = message.wait(None).unwrap_err();
        let expected = if aborts { ErrorKind::Aborted } else { ErrorKind::Timeout };
        assert!(error.kind() == expected && begin.elapsed() < LIMIT / 2, "{error:?}");
        assert!(sum.wait(None).is_err());
    }
}
