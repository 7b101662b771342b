//! Send and receive between hosts, played by threads. Random programs of messages and collectives on the same memory
//! are compared with a one-threaded reference, bit for bit. Also tests ranks that leave, are lost, fail or abort in the
//! middle (rules 4, 20, 21). `shm_p2p.rs` and `op_order.rs` test what also holds on one host.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::host::Memory;
use crate::common::{Random, cut, on_memory, on_ranks, plain};
use sagellm::config::Settings;
use sagellm::engine::local;
use sagellm::engine::multihost::link::Link;
use sagellm::engine::multihost::wire::{Over, Place, Wire, join};
use sagellm::error::ErrorKind;
use sagellm::group::{Group, Op};
use sagellm::types::{ANY_RANK, Kind, Request};

const LONG: Duration = Duration::from_secs(60);
/// Limit for waits that take milliseconds.
const SOON: Duration = Duration::from_secs(8);

fn groups(place: &[usize]) -> Vec<Arc<Group>> {
    Group::local_hosts(place, LONG, Settings::default(), local::links(place.len())).unwrap()
}

fn message(kind: Kind, peer: u32, tag: u32, memory: &mut [u8]) -> Request {
    let mut request = on_memory(kind, peer, memory);
    request.tag = tag;
    request
}

fn send(group: &Group, to: u32, tag: u32, memory: &mut [u8]) -> Arc<Op> {
    group.issue(message(Kind::Send, to, tag, memory), None).unwrap()
}

fn recv(group: &Group, from: u32, tag: u32, memory: &mut [u8]) -> Arc<Op> {
    group.issue(message(Kind::Recv, from, tag, memory), None).unwrap()
}

/// Waits until `came` returns true, but at most for `LONG`. If `came` is still false then, the assertions of the test
/// fail.
fn until(came: impl Fn() -> bool) {
    let begin = Instant::now();
    while !came() && begin.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// One step of a program, the same for all ranks.
#[derive(Clone, Debug)]
enum Step {
    /// All ranks sum this part of their memory.
    Sum(Range<usize>),
    Barrier,
    /// Sender and its part, receiver and its part. If `anyone` is set, the receiver passes `ANY_RANK`, else the
    /// sender's rank.
    Message {
        from: (usize, Range<usize>),
        to: (usize, Range<usize>),
        tag: u32,
        anyone: bool,
        pieces: usize,
    },
}

const MEMORY: usize = 4 << 20;

fn draw(random: &mut Random, ranks: usize, steps: usize) -> Vec<Step> {
    let size = |random: &mut Random| match random.below(12) {
        0 => 0,
        1..=5 => 1 + random.below(200),
        6 if random.below(2) == 0 => (64 << 10) - 2 + random.below(5),
        6 => (16 << 10) - 2 + random.below(5),
        7 | 8 => random.below(40_000),
        9 | 10 => random.below(300_000),
        _ => random.below(3 << 20),
    };
    // Two of three parts start at one of four offsets, so that operations overlap.
    let part = |random: &mut Random, bytes: usize| {
        let start = if random.below(3) > 0 { random.below(4) * 1000 } else { random.below(MEMORY - bytes) };
        start.min(MEMORY - bytes)..start.min(MEMORY - bytes) + bytes
    };
    let step = |at: usize, random: &mut Random| match random.below(8) {
        0 => {
            let bytes = size(random).min(100_000);
            Step::Sum(part(random, bytes))
        }
        1 if random.below(4) == 0 => Step::Barrier,
        _ => {
            let bytes = size(random);
            let from = random.below(ranks);
            let to = (from + 1 + random.below(ranks - 1)) % ranks;
            let anyone = random.below(4) == 0;
            // If two messages for receives from `ANY_RANK` had one tag, either could match first. So each such message
            // has its own tag.
            let tag = if anyone { 1000 + at as u32 } else { random.below(3) as u32 };
            let (from, to) = ((from, part(random, bytes)), (to, part(random, bytes)));
            Step::Message { from, to, tag, anyone, pieces: 1 + random.below(3) }
        }
    };
    (0..steps).map(|at| step(at, random)).collect()
}

fn start_memory(seed: u64, rank: usize) -> Vec<u8> {
    let mut random = Random::new(seed ^ (rank as u64) << 40);
    (0..MEMORY / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// Returns the expected memory of all ranks after the steps, computed step by step.
fn expected(seed: u64, ranks: usize, steps: &[Step]) -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = (0..ranks).map(|rank| start_memory(seed, rank)).collect();
    for step in steps {
        match step {
            Step::Sum(part) => {
                for at in part.clone() {
                    let sum = all.iter().fold(0u8, |sum, memory| sum.wrapping_add(memory[at]));
                    all.iter_mut().for_each(|memory| memory[at] = sum);
                }
            }
            Step::Message { from: (from, sent), to: (to, received), .. } => {
                let data = all[*from][sent.clone()].to_vec();
                all[*to][received.clone()].copy_from_slice(&data);
            }
            Step::Barrier => (),
        }
    }
    all
}

/// Returns the call of rank `me` in a step, or None if the rank takes no part in it.
fn request(step: &Step, me: usize, memory: &mut [u8]) -> Option<Request> {
    match step {
        Step::Sum(part) => {
            let spans = cut(&mut memory[part.clone()], 1, 1);
            Some(plain(Kind::AllReduce, 0, spans.clone(), spans))
        }
        Step::Barrier => Some(on_memory(Kind::Barrier, 0, &mut [])),
        Step::Message { from: (from, sent), to: (to, received), tag, anyone, pieces } => {
            let mut request = if *from == me {
                plain(Kind::Send, *to as u32, cut(&mut memory[sent.clone()], *pieces, 1), Vec::new())
            } else if *to == me {
                let source = if *anyone { ANY_RANK } else { *from as u32 };
                plain(Kind::Recv, source, Vec::new(), cut(&mut memory[received.clone()], *pieces, 1))
            } else {
                return None;
            };
            request.tag = *tag;
            Some(request)
        }
    }
}

const PLACES: [&[usize]; 5] = [&[0, 1], &[0, 0, 1], &[0, 1, 2], &[0, 1, 0, 1], &[0, 1, 2, 0, 1]];

/// Links over the loopback interface: each rank is a thread with its own wire.
fn wire_links(ranks: usize) -> Vec<Arc<dyn Link>> {
    links_over(&Over::Tcp, ranks)
}

fn links_over(over: &Over, ranks: usize) -> Vec<Arc<dyn Link>> {
    let store = Memory::default();
    on_ranks(ranks, |rank| {
        let place =
            Place { store: &store, id: [7; 16], rank, size: ranks, address: "127.0.0.1", paths: &[], timeout: LONG };
        Arc::new(join(&Wire::new(over).unwrap(), &place).unwrap()) as Arc<dyn Link>
    })
}

fn program(seed: u64, count: usize, carriers: &[Over]) {
    let mut random = Random::new(seed);
    let place = PLACES[random.below(PLACES.len())];
    let ranks = place.len();
    let steps = draw(&mut random, ranks, count);
    let settings = Settings { fusion: !seed.is_multiple_of(3), ..Settings::default() };
    let over = carriers.get(seed as usize % (carriers.len() + 1));
    let links = over.map_or_else(|| local::links(ranks), |over| links_over(over, ranks));
    let groups = Group::local_hosts(place, LONG, settings, links).unwrap();
    let expected = expected(seed, ranks, &steps);
    on_ranks(ranks, |me| {
        let mut random = Random::new(seed ^ (me as u64 + 1) << 32);
        let mut memory = start_memory(seed, me);
        let mut pending: Vec<(usize, Arc<Op>)> = Vec::new();
        let finish = |(at, op): (usize, Arc<Op>)| {
            op.wait(None).unwrap_or_else(|e| panic!("seed {seed} rank {me}: step {at}, {:?}: {e}", steps[at]));
            if let Step::Message { from: (from, _), to: (to, _), .. } = &steps[at]
                && *to == me
            {
                assert_eq!(op.source(), *from as i32);
            }
        };
        for (at, step) in steps.iter().enumerate() {
            let Some(request) = request(step, me, &mut memory) else { continue };
            if random.below(12) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(2000) as u64));
            }
            match random.below(6) {
                0 => groups[me].run(request, None).unwrap_or_else(|e| panic!("seed {seed} rank {me}: {step:?}: {e}")),
                1 => drop(groups[me].issue(request, None).unwrap()),
                _ => pending.push((at, groups[me].issue(request, None).unwrap())),
            }
            while pending.len() > random.below(100) {
                finish(pending.swap_remove(random.below(pending.len())));
            }
        }
        pending.into_iter().for_each(finish);
        // After this collective, operations whose handles were dropped have ended too, because the collective uses
        // their memory.
        let spans = cut(&mut memory, 1, 1);
        groups[me].run(plain(Kind::AllReduce, 0, spans.clone(), spans), None).unwrap();
        let sums = expected[0]
            .iter()
            .enumerate()
            .map(|(at, _)| expected.iter().fold(0u8, |sum, memory| sum.wrapping_add(memory[at])));
        let differs = memory.iter().zip(sums).position(|(found, expected)| *found != expected);
        assert_eq!(differs, None, "seed {seed} rank {me} of {ranks}: the first byte that differs");
    });
    on_ranks(ranks, |me| groups[me].shutdown());
}

#[test]
fn rules_04_and_20_random_programs_of_messages_and_collectives_give_the_reference() {
    let programs: u64 = std::env::var("SAGELLM_TEST_MESSAGE_PROGRAMS").ok().and_then(|n| n.parse().ok()).unwrap_or(10);
    let carriers = crate::multihost_wire::carriers();
    for seed in 1..=programs {
        crate::common::progress("programs of messages over hosts", seed, programs);
        program(seed, 120, &carriers);
    }
}

#[test]
fn rule_01_to_post_a_message_takes_as_long_however_many_wait() {
    const COUNT: usize = 20_000;
    let groups = groups(&[0, 1]);
    on_ranks(2, |me| {
        let group = &groups[me];
        let mut memory = vec![me as u8; COUNT];
        let post = |(at, byte): (usize, &mut [u8])| match me {
            0 => send(group, 1, (COUNT - at) as u32, byte),
            _ => recv(group, if at % 2 == 0 { 0 } else { ANY_RANK }, at as u32 + 1, byte),
        };
        let begin = Instant::now();
        let ops: Vec<_> = memory.chunks_mut(1).enumerate().map(post).collect();
        ops.iter().for_each(|op| op.wait(None).unwrap());
        assert!(memory.iter().all(|byte| *byte == 0));
        assert!(begin.elapsed() < LONG / 2, "{:?} for {COUNT} messages", begin.elapsed());
    });
    on_ranks(2, |me| groups[me].shutdown());
}

#[test]
fn rule_10_a_message_whose_handle_was_dropped_arrives() {
    for bytes in [8, 100_000] {
        let groups = groups(&[0, 1, 1]);
        on_ranks(3, |me| {
            let group = &groups[me];
            let mut memory = vec![me as u8; bytes];
            match me {
                1 => drop(recv(group, 0, 0, &mut memory)),
                0 => drop(send(group, 1, 0, &mut memory)),
                _ => (),
            }
            let mut sum = [1u8];
            group.run(on_memory(Kind::AllReduce, 0, &mut sum), None).unwrap();
            // This sum must wait for the message, because it uses the same memory.
            group.run(on_memory(Kind::AllReduce, 0, &mut memory), None).unwrap();
            assert_eq!(memory[0], 2, "of 0, 0 and 2");
        });
        on_ranks(3, |me| groups[me].shutdown());
    }
}

/// The root of a short broadcast returns before its peers call broadcast. Its connections must then be read although
/// none of its threads waits in a call. An earlier version delayed the data, because a thread slept for a second
/// instead.
#[test]
fn a_broadcast_arrives_although_its_root_calls_nothing_more() {
    const TURNS: usize = 6;
    let groups = Group::local_hosts(&[0, 1, 2], LONG, Settings::default(), wire_links(3)).unwrap();
    let mut late = Duration::ZERO;
    for turn in 0..TURNS {
        let mut memory: Vec<Vec<u8>> =
            (0..3).map(|rank| vec![if rank == 0 { turn as u8 + 1 } else { 0 }; 64 << 10]).collect();
        let mut requests = memory.iter_mut().enumerate().map(|(rank, memory)| {
            let (tensor, none) = (cut(memory, 1, 1), Vec::new());
            let (inputs, outputs) = if rank == 0 { (tensor, none) } else { (none, tensor) };
            plain(Kind::Broadcast, 0, inputs, outputs)
        });
        groups[0].run(requests.next().unwrap(), None).unwrap();
        std::thread::sleep(Duration::from_millis(60)); // until the root's threads sleep
        let began = Instant::now();
        let others: Vec<_> = requests.zip(&groups[1..]).map(|(request, group)| group.issue(request, None)).collect();
        others.into_iter().for_each(|op| op.unwrap().wait(None).unwrap());
        late += began.elapsed();
        assert!(memory.iter().flatten().all(|byte| *byte == turn as u8 + 1));
    }
    assert!(late < Duration::from_millis(500) * TURNS as u32, "{TURNS} broadcasts took {late:?}");
    on_ranks(3, |me| groups[me].shutdown());
}

/// Messages of 16 to 128 KiB are sent as letters, of which a receiver stores at most 256 KiB for each sender.
#[test]
fn a_sender_waits_once_a_window_of_its_letters_awaits_receives() {
    const BYTES: usize = 64 << 10;
    for links in [local::links(2), wire_links(2)] {
        let groups = Group::local_hosts(&[0, 1], LONG, Settings::default(), links).unwrap();
        let content = |at: usize| vec![at as u8 + 1; BYTES];
        let mut sent: Vec<_> = (0..10).map(content).collect();
        let sends: Vec<_> = sent.iter_mut().map(|memory| send(&groups[0], 1, 7, memory)).collect();
        let ended = || sends.iter().map(|op| op.is_done()).collect::<Vec<_>>();
        assert_eq!(ended(), [[true; 4].as_slice(), &[false; 6]].concat());
        // A message of 16 KiB needs no space in the window.
        let mut short = vec![9u8; 16 << 10];
        assert!(send(&groups[0], 1, 8, &mut short).is_done());
        let mut received = vec![vec![0u8; BYTES]; 10];
        let receives: Vec<_> = received.iter_mut().map(|memory| recv(&groups[1], 0, 7, memory)).collect();
        sends.iter().chain(&receives).for_each(|op| op.wait(Some(SOON)).unwrap());
        assert!((0..10).all(|at| received[at] == content(at)));
        // A message to the sender acknowledges that all letters were received, so the next sends complete immediately
        // again.
        let (mut back, mut came) = (vec![1u8; 8], vec![0u8; 8]);
        send(&groups[1], 0, 1, &mut back).wait(Some(SOON)).unwrap();
        recv(&groups[0], 1, 1, &mut came).wait(Some(SOON)).unwrap();
        let again: Vec<_> = sent.iter_mut().take(5).map(|memory| send(&groups[0], 1, 7, memory)).collect();
        assert_eq!(again.iter().map(|op| op.is_done()).collect::<Vec<_>>(), [true, true, true, true, false]);
        for memory in received.iter_mut().take(5) {
            recv(&groups[1], 0, 7, memory).wait(Some(SOON)).unwrap();
        }
        recv(&groups[1], 0, 8, &mut vec![0u8; 16 << 10]).wait(Some(SOON)).unwrap();
        again[4].wait(Some(SOON)).unwrap();
        on_ranks(2, |me| groups[me].shutdown());
    }
}

#[test]
fn rule_21_who_leaves_in_order_has_still_sent_its_letters() {
    let groups = groups(&[0, 1, 1]);
    let looked = AtomicBool::new(false);
    on_ranks(3, |me| {
        let group = &groups[me];
        let mut memory = [me as u8; 100];
        if me > 0 {
            send(group, 0, 0, &mut memory).wait(None).unwrap();
            let mut large = vec![7; 150_000];
            let kept = send(group, 0, 9, &mut large);
            if me == 2 {
                // This rank stays until rank 0 has looked, so rank 0's receive from `ANY_RANK` still has a possible
                // sender.
                until(|| looked.load(Ordering::Relaxed));
            }
            group.shutdown();
            assert!(
                matches!(kept.wait(None), Err(ref error) if error.kind() == ErrorKind::Aborted),
                "pending, and nobody asked for it"
            );
            return;
        }
        let mut got = [0; 8];
        let anyone = recv(group, ANY_RANK, 5, &mut got);
        std::thread::sleep(Duration::from_millis(100));
        assert!(!anyone.is_done(), "rank 2 may still send");
        looked.store(true, Ordering::Relaxed);
        let begin = Instant::now();
        assert!(anyone.wait(None).unwrap_err().kind() == ErrorKind::RankFailed);
        assert!(begin.elapsed() < SOON);
        let error = group.fault().expect("a receive had nobody to come from");
        assert!(error.text().contains("left the group"), "{error}");
    });
}

#[test]
fn rule_21_what_arrived_before_its_sender_left_is_received() {
    let groups = groups(&[0, 1, 2]);
    on_ranks(3, |me| {
        let group = &groups[me];
        if me == 1 {
            for tag in 0..10 {
                send(group, 0, tag, &mut [tag as u8; 50]).wait(None).unwrap();
            }
            return group.shutdown();
        }
        std::thread::sleep(Duration::from_millis(200));
        if me == 0 {
            for tag in (0..10).rev() {
                let mut got = [0; 50];
                recv(group, if tag % 2 == 0 { 1 } else { ANY_RANK }, tag, &mut got).wait(None).unwrap();
                assert_eq!(got, [tag as u8; 50]);
            }
            // A short send completes without a receiver, as on one host. A long send fails, because the receiver would
            // have to request the data.
            send(group, 1, 0, &mut [1]).wait(None).unwrap();
            send(group, 2, 0, &mut [1]).wait(None).unwrap();
            // Rank 2 sends this in its last call. That call must end before the fault below, which would fail it.
            recv(group, 2, 1, &mut [0]).wait(None).unwrap();
            let error = send(group, 1, 0, &mut [1; 100_000]).wait(None).unwrap_err();
            assert!(error.rank() == Some(1) && error.text().contains("left the group"), "{error}");
        } else {
            recv(group, 0, 0, &mut [0]).wait(None).unwrap();
            send(group, 0, 1, &mut [1]).wait(None).unwrap();
        }
    });
}

#[test]
fn rule_21_a_lost_rank_fails_what_needs_it_and_nothing_else() {
    let links = local::links(3);
    let lost = Arc::clone(&links[2]);
    let groups = Group::local_hosts(&[0, 1, 2], LONG, Settings::default(), links).unwrap();
    on_ranks(3, |me| {
        let group = &groups[me];
        let mut memory = vec![me as u8; 100_000];
        if me == 2 {
            send(group, 0, 0, &mut [3; 8]).wait(None).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            return lost.cut();
        }
        std::thread::sleep(Duration::from_millis(300));
        // Ranks 0 and 1 continue to run, and rank 0 receives what rank 2 sent before it was lost.
        if me == 0 {
            let mut got = [0; 8];
            recv(group, 2, 0, &mut got).wait(None).unwrap();
            assert_eq!(got, [3; 8]);
            recv(group, ANY_RANK, 1, &mut memory).wait(None).unwrap();
            assert_eq!(memory, vec![1; 100_000]);
        } else {
            send(group, 0, 1, &mut memory).wait(None).unwrap();
            // Blocks until rank 0 has failed the group.
            group.run(message(Kind::Recv, 0, 2, &mut [0]), None).unwrap_err();
            return;
        }
        let begin = Instant::now();
        let error = recv(group, 2, 7, &mut memory).wait(None).unwrap_err();
        assert!(begin.elapsed() < SOON, "found out late");
        assert!(error.rank() == Some(2), "{error:?}");
        assert!(error.text().contains("rank 0 lost the connection to rank 2 on another host"), "{error}");
        assert!(error.text().contains("recv from rank 2 with tag 7"), "{error}");
    });
}

#[test]
fn a_deadline_names_the_message_and_a_message_of_another_size_fails_both_sides() {
    let groups = groups(&[0, 1]);
    on_ranks(2, |me| {
        let group = &groups[me];
        let mut memory = vec![0u8; if me == 0 { 200_000 } else { 100_000 }];
        let op = if me == 0 { send(group, 1, 4, &mut memory) } else { recv(group, 0, 4, &mut memory) };
        let error = op.wait(None).unwrap_err();
        assert!(error.kind() == ErrorKind::Mismatch, "{error:?}");
        assert!(error.text().contains("200000 bytes") && error.text().contains("tag 4"), "{error}");
        group.run(on_memory(Kind::Barrier, 0, &mut []), None).unwrap();
        if me == 1 {
            return;
        }
        let mut request = message(Kind::Recv, 1, 8, &mut memory);
        request.timeout_ms = Some(200);
        let begin = Instant::now();
        let error = group.run(request, None).unwrap_err();
        assert!(begin.elapsed() >= Duration::from_millis(150) && begin.elapsed() < SOON);
        assert!(error.kind() == ErrorKind::Timeout && error.text().contains("recv from rank 1 with tag 8"), "{error}");
    });
}

/// A rank aborts while the data of long messages is in flight. Every operation ends, and no thread uses the caller's
/// memory afterwards.
#[test]
fn an_abort_in_the_middle_ends_every_message_on_every_rank() {
    for seed in 0..8u64 {
        let place = PLACES[seed as usize % PLACES.len()];
        let ranks = place.len();
        let groups = groups(place);
        on_ranks(ranks, |me| {
            let group = &groups[me];
            let mut random = Random::new(seed << 8 | me as u64);
            let mut memories: Vec<Vec<u8>> = (0..200).map(|_| vec![me as u8; random.below(2_000_000)]).collect();
            let mut ops = Vec::new();
            for (at, memory) in memories.iter_mut().enumerate() {
                // Some receives match a send in size, most have no send.
                let peer = (me + 1 + random.below(ranks - 1)) % ranks;
                let kind = if at % 2 == 0 { Kind::Send } else { Kind::Recv };
                let len = memory.len().min(if at % 4 < 2 { 1_000_000 } else { 2_000_000 });
                match group.issue(message(kind, peer as u32, at as u32 / 2, &mut memory[..len]), None) {
                    Ok(op) => ops.push(op),
                    Err(_) => break,
                }
            }
            if me == 0 {
                std::thread::sleep(Duration::from_micros(random.below(4000) as u64));
                group.abort("the test says so");
            }
            let begin = Instant::now();
            let ends: Vec<_> = ops.iter().map(|op| op.wait(None)).collect();
            assert!(begin.elapsed() < SOON, "seed {seed} rank {me}");
            assert!(ends.iter().any(Result::is_err) || ops.is_empty());
            drop(memories); // a later write to this memory would be reported by valgrind or the address sanitizer
        });
        on_ranks(ranks, |me| groups[me].shutdown());
    }
}

#[test]
fn a_fault_of_one_rank_is_told_to_all_by_mail() {
    let groups = groups(&[0, 1, 2, 2]);
    let issued = AtomicUsize::new(0);
    let errors = on_ranks(4, |me| {
        let group = &groups[me];
        if me == 3 {
            // After the abort no rank can issue its receive.
            until(|| issued.load(Ordering::Relaxed) == 3);
            group.abort("the test says so");
            return String::new();
        }
        // Receives from a rank that sends nothing and is not the rank that fails.
        let mut memory = [0; 8];
        let op = recv(group, (me as u32 + 1) % 3, 0, &mut memory);
        issued.fetch_add(1, Ordering::Relaxed);
        op.wait(None).unwrap_err().to_string()
    });
    for error in &errors[..3] {
        assert!(error.contains("the test says so") && error.contains("reported by rank 3"), "{error}");
    }
}

#[test]
fn a_monitored_barrier_hears_of_a_rank_that_is_gone() {
    let groups = groups(&[0, 1, 1]);
    on_ranks(3, |me| {
        let group = &groups[me];
        group.monitored_barrier(None, false).unwrap();
        let begin = Instant::now();
        match me {
            2 => return group.shutdown(),
            0 => {
                let error = group.monitored_barrier(None, true).unwrap_err();
                // The text may name rank 1 too, if rank 1 has not called yet.
                assert!(error.text().contains("2 failed to pass monitoredBarrier"), "{error}");
            }
            _ => drop(group.monitored_barrier(None, false).unwrap_err()),
        }
        assert!(begin.elapsed() < SOON, "rank {me} found out late");
        assert!(group.fault().is_none(), "it fails nothing else");
        let (kind, peer) = if me == 0 { (Kind::Send, 1) } else { (Kind::Recv, 0) };
        group.run(message(kind, peer, 0, &mut [0; 8]), None).unwrap();
    });
}
