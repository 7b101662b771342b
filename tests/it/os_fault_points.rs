//! Tests every fault point in real processes: this program is started again for each of three ranks, over shared memory
//! or over connections. At the point, rank 1 is killed, or is stopped and continued, or each rank is delayed. Then
//! every rank must end, either with the reference's bits or with an error that names rank 1 and its process.

#![allow(unsafe_code)] // signals, and the state of a child

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::host::{Files, Quiet, config};
use crate::common::{Memory, Spec, on_memory, this_program};
use sagellm::engine::multihost::wire::{Over as Carrier, Place, Wire, join};
use sagellm::error::Error;
use sagellm::group::Group;
use sagellm::os::fault_points;
use sagellm::os::fault_points::FaultPoint;
use sagellm::types::{Dtype, Kind, ReduceOp};

const RANKS: usize = 3;
/// The rank that is killed or stopped.
const VICTIM: usize = 1;
/// The deadline of every operation, and of the test's own waits. Nothing in a passing test takes nearly as long.
const PATIENT: Duration = Duration::from_secs(60);
/// How long ranks wait for a peer that was killed while it joined.
const JOINING: Duration = Duration::from_secs(4);
/// Number of turns of a program.
const TURNS: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    SharedMemory,
    Connections,
    /// Connections that consist of several TCP connections.
    Paths,
}

impl Over {
    const ALL: [Over; 3] = [Over::SharedMemory, Over::Connections, Over::Paths];

    fn points(self) -> impl Iterator<Item = FaultPoint> {
        FaultPoint::ALL.into_iter().filter(move |point| match self {
            // Chunks of a sum go from node to node only if many ranks are bound to NUMA nodes; `shm_engine` tests these
            // places, and tests/py/fault/test_reachable.py such processes.
            Over::SharedMemory if (FaultPoint::ChunkFolded..=FaultPoint::ChunkDelivered).contains(point) => false,
            // A sender looks for the output (`HomeSought`) only if the receiver has not copied everything by then. This
            // may never happen here. `shm_p2p_in_place` forces it.
            Over::SharedMemory => *point < FaultPoint::Joining && *point != FaultPoint::HomeSought,
            Over::Connections => (FaultPoint::Joining..=FaultPoint::Cutting).contains(point),
            Over::Paths => {
                *point >= FaultPoint::Joining && !(FaultPoint::FrameReady..=FaultPoint::FrameDone).contains(point)
            }
        })
    }
}

// ------------------------------------------------------------------------------------------------------------ a rank

/// Runs calls of each sort, and compares each result with the reference.
fn turn(group: &Group, me: usize, over: Over, turn: usize) -> Result<(), Error> {
    if me == 0 {
        std::thread::sleep(Duration::from_millis(3)); // so that the others sleep
    }
    let sizes = [(100, false), (200_000, false), (60_000, true)];
    for (at, (count, reachable)) in sizes.into_iter().enumerate() {
        let spec = Spec {
            kind: Kind::AllReduce,
            // Between hosts the order of a large sum depends on the measured link, but sums of integers are the same in
            // any order.
            dtype: Dtype::I32,
            op: ReduceOp::Sum,
            root: 0,
            count,
            skew: 0,
            in_place: turn.is_multiple_of(2),
            pieces: 1,
            seed: (turn * 10 + at) as u64,
        };
        let buffers = spec.buffers(me, RANKS);
        let mut buffers = if reachable && over == Over::SharedMemory { buffers.in_arena() } else { buffers };
        group.run(spec.request(&mut buffers), None)?;
        spec.check(&buffers, me, RANKS);
    }
    // A ring in which each rank sends a short and two long messages and receives all.
    let data = |from: usize, bytes: usize| -> Vec<u8> { (0..bytes).map(|at| (at * 7 + from + turn) as u8).collect() };
    for (bytes, reachable) in [(64, false), (400_000, false), (400_000, true)] {
        let (to, from) = ((me + 1) % RANKS, (me + RANKS - 1) % RANKS);
        let memory = |bytes: Vec<u8>| match reachable && over == Over::SharedMemory {
            true => Memory::shared(&bytes),
            false => Memory::Own(bytes),
        };
        let (mut sent, mut received) = (memory(data(me, bytes)), memory(vec![0; bytes]));
        let send = group.issue(on_memory(Kind::Send, to as u32, &mut sent), None)?;
        let receive = group.issue(on_memory(Kind::Recv, from as u32, &mut received), None)?;
        let (received_well, sent_well) = (receive.wait(None), send.wait(None));
        received_well.and(sent_well)?;
        assert!(received[..] == data(from, bytes)[..], "the message of {bytes} bytes from rank {from}");
    }
    group.run(on_memory(Kind::Barrier, 0, &mut []), None)
}

fn make(over: Over, me: usize, store: &Files, timeout: Duration) -> Result<Arc<Group>, Error> {
    if over == Over::SharedMemory {
        return Group::connect(config(me, RANKS, timeout), store, Arc::new(Quiet));
    }
    let address = "127.0.0.1";
    let paths = vec![address.to_string(); if over == Over::Paths { 3 } else { 0 }];
    let place = Place { store, id: [7; 16], rank: me, size: RANKS, address, paths: &paths, timeout };
    let link = join(&Wire::of_process(&Carrier::Tcp)?, &place)?;
    Group::of_one_host(me, RANKS, PATIENT, Arc::new(link))
}

fn signal_self(signal: i32) {
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::kill(libc::getpid(), signal) }, 0);
}

/// The program's current turn, which `delay` reads.
static TURN: AtomicUsize = AtomicUsize::new(0);

/// Returns the hook that acts at the points. `kill N` acts when point N is reached for the second time, so that there
/// are calls before and after it; if a point is reached only once, it acts at that time. `stop` acts once at each
/// point. `delay` acts at one point in each turn.
fn set_hook(act: &str, over: Over) -> fault_points::Hook {
    let (act, at) = act.split_once(' ').unwrap_or((act, "0"));
    let (act, at) = (act.to_string(), at.parse::<usize>().unwrap());
    let (seen, stopped) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let points: Vec<FaultPoint> = over.points().collect();
    fault_points::in_this_process(move |point| match &*act {
        "kill" if point as usize == at => {
            let once = matches!(point, FaultPoint::Leaving | FaultPoint::Joining | FaultPoint::Cutting);
            if seen.fetch_add(1, Relaxed) == u64::from(!once) {
                signal_self(libc::SIGKILL);
            }
        }
        "stop" if points.contains(&point) => {
            let mut stopped = stopped.lock().unwrap();
            if !stopped.contains(&point) {
                stopped.push(point);
                drop(stopped);
                signal_self(libc::SIGSTOP);
                println!("stopped {}", point.name());
            }
        }
        "delay" if points.get(TURN.load(Relaxed)) == Some(&point) => {
            if seen.fetch_add(1, Relaxed) < 40 * (TURN.load(Relaxed) as u64 + 1) {
                std::thread::sleep(Duration::from_millis(1));
            }
            println!("delayed {}", point.name());
        }
        _ => (),
    })
}

fn variable(name: &str) -> String {
    std::env::var(format!("SAGELLM_TEST_{name}")).unwrap_or_default()
}

fn print_outcome(outcome: Result<(), Error>) {
    match outcome {
        Ok(()) => println!("done"),
        Err(error) => println!("failed {:?} {}", error.kind(), error.text().replace('\n', " | ")),
    }
}

#[test]
#[ignore = "the other tests of this file run it as a separate process"]
fn as_a_rank() {
    let act = variable("ACT");
    if act.is_empty() {
        return;
    }
    let (store, me) = (Files(variable("DIR").into()), variable("RANK").parse::<usize>().unwrap());
    let over = Over::ALL.into_iter().find(|over| format!("{over:?}") == variable("OVER")).unwrap();
    let delays = act == "delay";
    let joins = act == format!("kill {}", FaultPoint::Joining as usize);
    let mut hook = None;
    let mut set = || hook = (delays || me == VICTIM).then(|| set_hook(&act, over));
    let mut kept = None;
    let mut run = || {
        // Frames are also written while the ranks join, but a kill at that time has a different outcome.
        let late = act.starts_with("kill") && !joins;
        if !late {
            set();
        }
        let group = make(over, me, &store, if joins { JOINING } else { PATIENT })?;
        kept = Some(Arc::clone(&group));
        if late {
            set();
        }
        let turns = if delays { over.points().count() } else { TURNS };
        for at in 0..turns {
            // The fault points of leaving are reached after the last turn.
            TURN.store(at, Relaxed);
            turn(&group, me, over, at)?;
        }
        let last = over.points().position(|point| matches!(point, FaultPoint::Leaving | FaultPoint::Cutting));
        TURN.store(last.unwrap(), Relaxed);
        group.shutdown();
        Ok::<(), Error>(())
    };
    print_outcome(run());
    if act.starts_with("kill") {
        // If this rank or its group ended first, the other rank might name this rank instead of rank 1.
        let end = Instant::now() + PATIENT;
        std::fs::write(store.0.join(format!("over-{me}")), "").unwrap();
        while !store.0.join(format!("over-{}", RANKS - 1 - me)).exists() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    drop(kept);
    sagellm::group::at_exit();
    drop(hook);
}

/// Rank 0 is stopped while rank 2 sends it more than the connection holds. Rank 1 kills itself, so rank 2 fails and
/// ends. Then rank 0 is continued and answers some of the messages, so data arrives for a process that has ended. If
/// `ACT` is "both", rank 0 sends the same amount to rank 2.
#[test]
#[ignore = "the other tests of this file run it as a separate process"]
fn as_a_rank_that_reads_late() {
    const BYTES: usize = 500_000;
    const COUNT: usize = 120;
    let act = variable("ACT");
    if act.is_empty() {
        return;
    }
    let (store, me) = (Files(variable("DIR").into()), variable("RANK").parse::<usize>().unwrap());
    let over = if variable("OVER") == "Paths" { Over::Paths } else { Over::Connections };
    let group = make(over, me, &store, PATIENT).unwrap();
    group.run(on_memory(Kind::Barrier, 0, &mut []), None).unwrap();
    let (mut out, mut back) = (vec![0; COUNT * BYTES], vec![0; if act == "both" { COUNT * BYTES } else { 0 }]);
    let issue = |kind: Kind, peer: u32, memory: &mut [u8]| -> Vec<_> {
        memory.chunks_mut(BYTES).map(|one| group.issue(on_memory(kind, peer, one), None)).collect()
    };
    let outcome = match me {
        0 => {
            let receives = issue(Kind::Recv, 2, &mut out);
            let _sends = issue(Kind::Send, 2, &mut back);
            signal_self(libc::SIGSTOP);
            // Messages of which rank 2 had sent a part may still arrive.
            let received = receives.into_iter().try_for_each(|one| one?.wait(None));
            received.and_then(|()| group.run(on_memory(Kind::Barrier, 0, &mut []), None))
        }
        VICTIM => {
            std::thread::sleep(Duration::from_millis(100));
            signal_self(libc::SIGKILL);
            unreachable!()
        }
        _ => {
            let _receives = issue(Kind::Recv, 0, &mut back);
            std::thread::sleep(Duration::from_millis(50)); // rank 0 is stopped
            let _sends = issue(Kind::Send, 0, &mut out);
            group.run(on_memory(Kind::Recv, VICTIM as u32, &mut [0; 8]), None)
        }
    };
    print_outcome(outcome);
    group.shutdown(); // as the shim does before it drops a group
    drop(group);
    sagellm::group::at_exit();
}

/// A logger that writes nothing and takes long, so that a thread that has found a fault tells the peers late.
struct Slow;

impl log::Log for Slow {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        if record.args().to_string().contains(" failed: ") {
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    fn flush(&self) {}
}

/// Rank 0 waits for rank 2. Rank 1 kills itself. A thread of rank 2 detects the death. The program of rank 2 sees the
/// fault immediately and leaves.
#[test]
#[ignore = "the other tests of this file run it as a separate process"]
fn as_a_rank_that_leaves_at_once() {
    if variable("ACT").is_empty() {
        return;
    }
    let (store, me) = (Files(variable("DIR").into()), variable("RANK").parse::<usize>().unwrap());
    let group = make(Over::Connections, me, &store, PATIENT).unwrap();
    group.run(on_memory(Kind::Barrier, 0, &mut []), None).unwrap();
    let outcome = match me {
        0 => group.run(on_memory(Kind::Recv, 2, &mut [0; 8]), None),
        VICTIM => {
            std::thread::sleep(Duration::from_millis(100));
            signal_self(libc::SIGKILL);
            unreachable!()
        }
        _ => {
            log::set_logger(&Slow).unwrap();
            log::set_max_level(log::LevelFilter::Debug);
            let mut never = [0; 8];
            let _receive = group.issue(on_memory(Kind::Recv, VICTIM as u32, &mut never), None).unwrap();
            while group.fault().is_none() {
                std::thread::sleep(Duration::from_micros(50));
            }
            Err(group.fault().expect("just seen"))
        }
    };
    print_outcome(outcome);
    group.shutdown();
    drop(group);
    sagellm::group::at_exit();
}

// --------------------------------------------------------------------------------------------------------- the tests

struct Ranks {
    store: Files,
    children: Vec<Child>,
    /// How long a rank that stops stays stopped.
    stopped: Duration,
}

impl Ranks {
    fn start(over: Over, act: &str) -> Ranks {
        Ranks::of(over, act, "as_a_rank")
    }

    /// Starts this test as the program of each rank.
    fn of(over: Over, act: &str, test: &str) -> Ranks {
        let store = Files::new();
        let child = |rank: usize| {
            let mut command: Command = this_program(module_path!(), test);
            command.env("SAGELLM_TEST_DIR", &store.0).env("SAGELLM_TEST_RANK", rank.to_string());
            command.env("SAGELLM_TEST_ACT", act).env("SAGELLM_TEST_OVER", format!("{over:?}"));
            command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
        };
        let children = (0..RANKS).map(child).collect();
        Ranks { store, children, stopped: Duration::from_millis(30) }
    }

    /// Waits until all ranks have ended, and continues ranks that stop. Returns what each rank printed, and the signal
    /// that ended it.
    fn end(mut self) -> Vec<(String, Option<i32>)> {
        let until = Instant::now() + PATIENT * 2;
        let mut ended: Vec<Option<i32>> = vec![None; RANKS];
        while ended.iter().any(Option::is_none) {
            for (rank, child) in
                self.children.iter().enumerate().filter(|(rank, _)| ended[*rank].is_none()).collect::<Vec<_>>()
            {
                let (pid, mut status) = (child.id() as i32, 0);
                // SAFETY: the call writes only the status; the child is this test's own, and no other code waits for
                // it.
                if unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG | libc::WUNTRACED) } != pid {
                    continue;
                }
                if libc::WIFSTOPPED(status) {
                    std::thread::sleep(self.stopped); // until the other ranks wait for it
                    // SAFETY: passes no pointers; the child is stopped, so it exists.
                    assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
                } else {
                    ended[rank] = Some(status);
                }
            }
            assert!(Instant::now() < until, "these ranks have not ended: {ended:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
        let outputs = self.children.iter_mut().map(|child| {
            let mut text = String::new();
            child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            text
        });
        let outputs: Vec<String> = outputs.collect();
        let signals = ended.iter().map(|status| std::process::ExitStatus::from_raw(status.unwrap()).signal());
        outputs.into_iter().zip(signals).collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
        }
        let _ = std::fs::remove_dir_all(&self.store.0);
    }
}

/// Kills rank 1 at `point`. Returns what is wrong with how the ranks end, if anything.
fn killed_at(over: Over, point: FaultPoint) -> Option<String> {
    let ranks = Ranks::start(over, &format!("kill {}", point as usize));
    let pid = ranks.children[VICTIM].id();
    let ends = ranks.end();
    let wrong = |what: &str| Some(format!("{over:?}, {}: {what}: {ends:#?}", point.name()));
    if ends[VICTIM].1 != Some(libc::SIGKILL) {
        return wrong("rank 1 was not there");
    }
    for (_, (text, signal)) in ends.iter().enumerate().filter(|(rank, _)| *rank != VICTIM) {
        let finds = |what: &str| text.contains(what);
        let right = match point {
            // All calls had ended.
            FaultPoint::Leaving | FaultPoint::Cutting => finds("done\n"),
            // A rank that cannot reach rank 1 stops joining, so the third rank may name this rank and not rank 1.
            FaultPoint::Joining => {
                let named = |text: &str| {
                    text.contains("failed System rank 1 at 127.0.0.1:")
                        || text.contains("failed Timeout") && text.contains("no answer from rank 1 at")
                };
                finds("failed ") && ends.iter().any(|(text, _)| named(text))
            }
            _ => finds("failed RankFailed") && finds("rank 1") && finds(&format!("pid {pid}")),
        };
        if signal.is_some() || !right {
            return wrong("not what the others should say");
        }
    }
    None
}

/// Runs `body` for each point on a few threads.
fn each(body: impl Fn(Over, FaultPoint) -> Option<String> + Sync) {
    let points: Vec<_> = Over::ALL.into_iter().flat_map(|over| over.points().map(move |point| (over, point))).collect();
    let (points, wrong) = (Mutex::new(points), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some((over, point)) = points.lock().unwrap().pop() else { return };
                    wrong.lock().unwrap().extend(body(over, point));
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Rules 5 and 21.
#[test]
fn a_rank_that_is_killed_at_any_point_is_named_by_all_others() {
    each(killed_at);
}

/// Runs three ranks, of which rank 1 kills itself. The other two must name it.
fn others_name_the_killed_rank(over: Over, act: &str, test: &str, stopped: Duration) {
    let mut ranks = Ranks::of(over, act, test);
    ranks.stopped = stopped;
    let pid = ranks.children[VICTIM].id();
    let ends = ranks.end();
    let named = |text: &str| text.contains("failed RankFailed") && text.contains(&format!("rank 1 (pid {pid}"));
    assert!(named(&ends[0].0) && named(&ends[2].0), "{over:?}, {act}: {ends:#?}");
}

/// Rules 5 and 21. Rank 2 fails because rank 1 was killed, and ends while rank 0 is stopped and has read nothing. Rank
/// 0 must still get rank 2's report: otherwise it sees that both ranks have ended, and may name the wrong one.
#[test]
fn the_report_of_a_rank_that_ends_reaches_a_peer_that_reads_late() {
    for over in [Over::Connections, Over::Paths] {
        for act in ["one", "both", "one", "both"] {
            others_name_the_killed_rank(over, act, "as_a_rank_that_reads_late", Duration::from_millis(300));
        }
    }
}

/// Rules 5 and 21. As above, but rank 2's program leaves before the thread that found the fault has reported it.
#[test]
fn a_rank_that_leaves_at_once_has_reported_the_fault() {
    for _ in 0..3 {
        others_name_the_killed_rank(Over::Connections, "leave", "as_a_rank_that_leaves_at_once", Duration::ZERO);
    }
}

/// Checks that each rank ends without an error, and that rank 1 reports the action at each point.
fn all_end_well_with(act: &str, done: &str) {
    for over in Over::ALL {
        let ends = Ranks::start(over, act).end();
        assert!(ends.iter().all(|(text, signal)| text.contains("done\n") && signal.is_none()), "{over:?}: {ends:#?}");
        for point in over.points() {
            // The ranks join before the first turn, so joining is never delayed.
            let expected = act == "stop" || point != FaultPoint::Joining;
            let happened = ends[VICTIM].0.lines().any(|line| line.ends_with(&format!("{done} {}", point.name())));
            assert!(happened || !expected, "{} was not reached: {ends:#?}", point.name());
        }
    }
}

/// Rule 22, and the bits of rule 17.
#[test]
fn a_rank_that_is_stopped_at_any_point_and_goes_on_changes_no_result() {
    all_end_well_with("stop", "stopped");
}

#[test]
fn ranks_that_are_slow_at_any_point_change_no_result() {
    all_end_well_with("delay", "delayed");
}
