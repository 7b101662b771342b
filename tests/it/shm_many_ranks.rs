//! Many ranks on one host: every collective, messages between all pairs, and more senders than a receiver has channels.
//! Ranks are threads, far more than the machine has cores. `SAGELLM_TEST_RANKS` sets their number (default 40).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Random, cut, on_ranks, plain};
use sagellm::config::Config;
use sagellm::engine::shm::memory::layout::{Layout, MAX_RANKS};
use sagellm::error::Result;
use sagellm::group::{Group, Op};
use sagellm::host::{Host, Store};
use sagellm::types::{ANY_RANK, Dtype, Kind, Request};

fn ranks() -> usize {
    std::env::var("SAGELLM_TEST_RANKS").map_or(40, |text| text.parse().expect("a number of ranks"))
}

fn groups(ranks: usize) -> Vec<Arc<Group>> {
    Group::local(ranks, Duration::from_secs(300)).unwrap()
}

/// A rank's memory as 32-bit numbers. A formula gives each number, so that any rank can check it alone.
struct Numbers(Vec<u8>);

impl Numbers {
    fn of(count: usize, value: impl Fn(usize) -> i32) -> Numbers {
        Numbers((0..count).flat_map(|i| value(i).to_le_bytes()).collect())
    }
    fn room(count: usize) -> Numbers {
        Numbers(vec![0xee; 4 * count])
    }
    fn check(&self, what: &str, value: impl Fn(usize) -> i32) {
        for (i, four) in self.0.chunks_exact(4).enumerate() {
            let found = i32::from_le_bytes(four.try_into().unwrap());
            assert_eq!(found, value(i), "{what}: number {i}");
        }
    }
}

fn request(kind: Kind, root: usize, input: &mut Numbers, output: &mut Numbers) -> Request {
    let dtype = if kind.reduces() { Dtype::I32 } else { Dtype::Bytes };
    let mut request = plain(kind, root as u32, cut(&mut input.0, 1, 4), cut(&mut output.0, 1, 4));
    request.dtype = dtype;
    request
}

/// Runs one collective on one rank. `count` is the number of elements of the tensor, or of each block if the kind has
/// blocks.
fn collective(group: &Group, kind: Kind, (me, ranks, root): (usize, usize, usize), count: usize) {
    let part = |from: usize, to: usize, i: usize| (from * 1000 + to * 7 + i) as i32;
    let sum = |to: usize, i: usize| (0..ranks).map(|q| part(q, to, i)).fold(0, i32::wrapping_add);
    // The sum over ranks as a formula, because a loop over the ranks for every number would be slow.
    let (base, each) = (sum(0, 0), ranks as i32);
    let summed = |to: usize, i: usize| base.wrapping_add(each.wrapping_mul((to * 7 + i) as i32));
    assert_eq!(summed(3, 5), sum(3, 5));
    let at_root = me == root;
    let blocks = |present: bool| if present { count * ranks } else { 0 };
    let own = |i: usize| part(me, 0, i);
    let for_each = |i: usize| part(me, i / count, i % count);
    let (mut input, mut output) = match kind {
        Kind::AllReduce => (Numbers::of(count, own), Numbers::room(count)),
        Kind::Reduce => (Numbers::of(count, own), Numbers::room(if at_root { count } else { 0 })),
        Kind::Broadcast if at_root => (Numbers::of(count, own), Numbers::room(0)),
        Kind::Broadcast => (Numbers::room(0), Numbers::room(count)),
        Kind::AllGather => (Numbers::of(count, own), Numbers::room(count * ranks)),
        Kind::Gather => (Numbers::of(count, own), Numbers::room(blocks(at_root))),
        Kind::Scatter => (Numbers::of(blocks(at_root), for_each), Numbers::room(count)),
        Kind::ReduceScatter => (Numbers::of(count * ranks, for_each), Numbers::room(count)),
        Kind::AllToAll => (Numbers::of(count * ranks, for_each), Numbers::room(count * ranks)),
        _ => (Numbers::room(0), Numbers::room(0)),
    };
    let what = format!("{kind} of {count} on rank {me} of {ranks}");
    group.run(request(kind, root, &mut input, &mut output), None).unwrap_or_else(|e| panic!("{what}: {e}"));
    output.check(&what, |i| match kind {
        Kind::AllReduce | Kind::Reduce => summed(0, i),
        Kind::Broadcast => part(root, 0, i),
        Kind::AllGather | Kind::Gather => part(i / count, 0, i % count),
        Kind::Scatter => part(root, me, i),
        Kind::ReduceScatter => summed(me, i),
        _ => part(i / count, me, i % count),
    });
}

#[test]
fn every_collective_small_and_large_with_many_ranks() {
    let ranks = ranks();
    let groups = groups(ranks);
    let stage = Layout::within(ranks, 1, usize::MAX).unwrap().stage_bytes / 4;
    let all = [
        (Kind::Barrier, 0),
        (Kind::AllReduce, 2 * stage + 100),
        (Kind::Broadcast, 2 * stage + 100),
        (Kind::Reduce, 2 * stage + 100),
        (Kind::AllGather, 1100),
        (Kind::Gather, 1100),
        (Kind::Scatter, 1100),
        (Kind::ReduceScatter, 1100),
        (Kind::AllToAll, 1100),
    ];
    on_ranks(ranks, |me| {
        for (i, (kind, large)) in all.into_iter().enumerate() {
            for count in [2, large] {
                collective(&groups[me], kind, (me, ranks, i * 5 % ranks), count);
            }
        }
    });
}

fn message(from: usize, to: usize, count: usize) -> Numbers {
    Numbers::of(count, |i| (from * 1000 + to * 7 + i) as i32)
}

fn send(group: &Group, to: usize, tag: u32, memory: &mut Numbers) -> Arc<Op> {
    let mut request = request(Kind::Send, to, memory, &mut Numbers(Vec::new()));
    request.tag = tag;
    group.issue(request, None).unwrap()
}

fn receive(group: &Group, from: u32, tag: u32, memory: &mut Numbers) -> Arc<Op> {
    let mut request = request(Kind::Recv, 0, &mut Numbers(Vec::new()), memory);
    (request.root, request.tag) = (from, tag);
    group.issue(request, None).unwrap()
}

#[test]
fn every_pair_of_many_ranks_exchanges_a_message() {
    let ranks = ranks();
    let groups = groups(ranks);
    // These sizes travel in a line, in an envelope, and through a channel.
    let of = |from: usize, to: usize| [2, 12, 13, 200][(from + to) % 4];
    on_ranks(ranks, |me| {
        let mut sent: Vec<(Arc<Op>, Numbers)> = Vec::new();
        for step in 1..ranks {
            let (to, from) = ((me + step) % ranks, (me + ranks - step) % ranks);
            let mut memory = message(me, to, of(me, to));
            sent.push((send(&groups[me], to, 0, &mut memory), memory));
            if step % 16 == 0 || step == ranks - 1 {
                // Receives the messages of up to sixteen steps, the latest first.
                for back in (step - (step - 1) % 16..=step).rev() {
                    let from = (from + step - back) % ranks;
                    let mut memory = Numbers::room(of(from, me));
                    receive(&groups[me], from as u32, 0, &mut memory).wait(None).unwrap();
                    memory.check(&format!("{from} to {me}"), |i| (from * 1000 + me * 7 + i) as i32);
                }
            }
        }
        sent.iter().for_each(|(op, _)| op.wait(None).unwrap());
    });
}

/// All ranks except rank 0 send several large messages to rank 0, which has fewer channels than senders. Rank 0 posts
/// one receive for each named rank, the last rank first, and receives from `ANY_RANK` in between.
#[test]
fn more_senders_than_channels_all_get_through() {
    const EACH: usize = 3;
    const NAMED: u32 = 8;
    const ANY: u32 = 7;
    let ranks = ranks();
    let groups = groups(ranks);
    let layout = Layout::within(ranks, 1, usize::MAX).unwrap();
    assert!(layout.channels < ranks - 1);
    let count = layout.body_bytes / 4 * 3 + 11;
    on_ranks(ranks, |me| {
        if me != 0 {
            let mut memory = message(me, 0, count);
            let tags = [ANY, NAMED, ANY];
            let ops = tags.map(|tag| send(&groups[me], 0, tag, &mut memory));
            return ops.iter().for_each(|op| op.wait(None).unwrap());
        }
        let mut memory: Vec<Numbers> = (0..EACH * (ranks - 1)).map(|_| Numbers::room(count)).collect();
        let post = |(i, memory): (usize, &mut Numbers)| match i % EACH {
            0 => receive(&groups[0], (ranks - 1 - i / EACH) as u32, NAMED, memory),
            _ => receive(&groups[0], ANY_RANK, ANY, memory),
        };
        let ops: Vec<_> = memory.iter_mut().enumerate().map(post).collect();
        let mut messages = vec![0; ranks];
        for (op, memory) in ops.iter().zip(&memory) {
            op.wait(None).unwrap();
            let from = op.source() as usize;
            messages[from] += 1;
            memory.check(&format!("{from} to 0"), |i| (from * 1000 + i) as i32);
        }
        assert!(messages[1..].iter().all(|count| *count == EACH), "{messages:?}");
    });
}

/// Rank 0 sends a large message to every rank, and each rank receives only after the next higher rank has received. No
/// message that waits for its receive may hold a channel that another message needs (rule 20).
#[test]
fn rule_20_large_messages_without_a_receive_hold_up_no_others() {
    let ranks = ranks();
    let groups = groups(ranks);
    let count = 20_000;
    on_ranks(ranks, |me| {
        let group = &groups[me];
        if me == 0 {
            let mut memory: Vec<Numbers> = (1..ranks).map(|to| message(0, to, count)).collect();
            let ops: Vec<_> = memory.iter_mut().zip(1..).map(|(memory, to)| send(group, to, 1, memory)).collect();
            return ops.iter().for_each(|op| op.wait(None).unwrap());
        }
        let mut token = Numbers::room(1);
        if me + 1 < ranks {
            receive(group, me as u32 + 1, 2, &mut token).wait(None).unwrap();
        }
        let mut memory = Numbers::room(count);
        receive(group, 0, 1, &mut memory).wait(None).unwrap();
        memory.check(&format!("0 to {me}"), |i| (me * 7 + i) as i32);
        if me > 1 {
            send(group, me - 1, 2, &mut token).wait(None).unwrap();
        }
    });
}

#[test]
fn random_messages_of_every_size_keep_their_order() {
    let ranks = ranks();
    let groups = groups(ranks);
    // The plan, which all ranks know: sender, receiver and size of each message, in order.
    let mut random = Random::new(20);
    let plan: Vec<(usize, usize, usize)> = (0..10 * ranks)
        .map(|_| {
            let from = random.below(ranks);
            let to = (from + 1 + random.below(ranks - 1)) % ranks;
            (from, to, random.pick(&[0, 1, 12, 13, 64, 65, 300, 5000, 20_000]))
        })
        .collect();
    on_ranks(ranks, |me| {
        let mut sent = Vec::new();
        let mut received = Vec::new();
        for (from, to, count) in plan.iter().copied() {
            if from == me {
                let mut memory = message(from, to, count);
                sent.push((send(&groups[me], to, 0, &mut memory), memory));
            } else if to == me {
                let mut memory = Numbers::room(count);
                received.push((receive(&groups[me], from as u32, 0, &mut memory), memory, from));
            }
        }
        for (op, memory, from) in &received {
            op.wait(None).unwrap();
            memory.check(&format!("{from} to {me}"), |i| (from * 1000 + me * 7 + i) as i32);
        }
        sent.iter().for_each(|(op, _)| op.wait(None).unwrap());
    });
}

/// A logger that keeps warnings and errors.
struct Kept(Mutex<Vec<String>>);

impl log::Log for Kept {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }
    fn log(&self, record: &log::Record) {
        if record.level() <= log::Level::Warn {
            self.0.lock().unwrap().push(record.args().to_string());
        }
    }
    fn flush(&self) {}
}

/// A store in which no other rank publishes anything.
struct Alone;

impl Store for Alone {
    fn set(&self, _: &str, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn try_get(&self, _: &str) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }
}

impl Host for Alone {
    fn interrupted(&self) -> bool {
        false
    }
}

#[test]
fn rank_0_warns_of_a_delegate_that_no_option_asked_for() {
    static WARNINGS: Kept = Kept(Mutex::new(Vec::new()));
    log::set_logger(&WARNINGS).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    for (rank, asked) in [(0, None), (1, None), (0, Some("the test asks for it".to_string()))] {
        let config = Config {
            name: format!("of rank {rank}"),
            delegate_reason: asked,
            ..Config::without_options(rank, MAX_RANKS + 1, Duration::from_secs(5))
        };
        let group = Group::connect(config, &Alone, Arc::new(Alone)).unwrap();
        assert!(group.delegate_reason().unwrap().contains("serves up to 256"));
    }
    let warnings = WARNINGS.0.lock().unwrap();
    let ours: Vec<_> = warnings.iter().filter(|text| text.contains("'of rank")).collect();
    assert_eq!(
        ours,
        ["group 'of rank 0' of 257 ranks is served by gloo: 257 ranks; the shared-memory engine serves up to 256"]
    );
}
