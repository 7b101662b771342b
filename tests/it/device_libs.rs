//! The communicators and runtimes of all vendors, end to end: two or three processes, each one rank with its own
//! device, use the ABI simulators of `tests/simulators`. Tests every collective of every vendor, and HCCL in its three
//! forms. Also tests a dead peer, a hang, an error that the library reports late, and an initialisation that never
//! ends.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::common::device::{Case, OPS, local, spans, synchronize};
use crate::common::reference::is_defined;
use crate::common::this_program;
use sagellm::engine::device::{
    Api, Communicator, Hints, Job, Local, LoweringInput, Message, Runtime, SPARES_CAPTURES, Setup, Split, Stream,
    Vendor, always, calls, launch, lower, open, open_runtime,
};
use sagellm::error::{Error, ErrorKind, Result};
use sagellm::types::{Dtype, Kind, ReduceOp, Span};

/// Upper limit of each wait of these tests; a passing test ends in seconds.
const MINUTE: Duration = Duration::from_secs(60);

/// One vendor's libraries under test; `library` and `runtime` are names in `tests/simulators/build.py`.
#[derive(Clone, Copy, Debug)]
struct Form {
    vendor: Vendor,
    library: &'static str,
    runtime: &'static str,
}

const FORMS: [Form; 7] = [
    Form { vendor: Vendor::Nccl, library: "nccl", runtime: "cuda" },
    Form { vendor: Vendor::Nccl, library: "nccl_bare", runtime: "cuda" },
    Form { vendor: Vendor::Hccl, library: "hccl", runtime: "acl" },
    Form { vendor: Vendor::Hccl, library: "hccl_two", runtime: "acl" },
    Form { vendor: Vendor::Hccl, library: "hccl_bare", runtime: "acl_bare" },
    Form { vendor: Vendor::Cncl, library: "cncl", runtime: "cnrt" },
    Form { vendor: Vendor::Cncl, library: "cncl_bare", runtime: "cnrt" },
];
const WHOLE: [Form; 3] = [FORMS[0], FORMS[2], FORMS[5]];

// ---- the parent ----

/// Builds the simulators once per process. All processes share the files, and a build of unchanged sources takes no
/// time.
fn simulators() -> &'static HashMap<String, PathBuf> {
    static BUILT: OnceLock<HashMap<String, PathBuf>> = OnceLock::new();
    BUILT.get_or_init(crate::common::simulators::simulators)
}

/// The process of one rank, which is killed on drop.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill(); // fails if the process has ended
        let _ = self.0.wait();
    }
}

/// Runs the scenario of `a_rank` on `ranks` ranks. Ranks in `leaves` may exit with any status.
fn run(scenario: &str, form: Form, ranks: usize, variables: &[(&str, &str)], leaves: &[usize]) {
    static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("ranks-{}-{number}", std::process::id());
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let library = |name: &str| simulators().get(name).unwrap_or_else(|| panic!("no simulator is called {name}"));
    let start = |rank: usize| {
        let mut command = this_program(module_path!(), "a_rank");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("SAGELLM_TEST_SCENARIO", scenario).env("SAGELLM_TEST_FOLDER", &folder);
        command.env("SAGELLM_TEST_VENDOR", form.vendor.name()).env("SAGELLM_TEST_FORM", form.library);
        command.env("SAGELLM_TEST_RANK", rank.to_string()).env("SAGELLM_TEST_RANKS", ranks.to_string());
        command.env("SAGELLM_TEST_LIBRARY", library(form.library)).env("SAGELLM_TEST_RUNTIME", library(form.runtime));
        variables.iter().for_each(|(name, value)| _ = command.env(name, value));
        Rank(command.spawn().unwrap())
    };
    let children: Vec<Rank> = (0..ranks).map(start).collect();
    let end = Instant::now() + 2 * MINUTE;
    for (rank, mut child) in children.into_iter().enumerate() {
        let what = format!("{scenario} on {}, rank {rank} of {ranks}", form.library);
        while child.0.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "{what} hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut text = String::new();
        use std::io::Read;
        child.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        child.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        let done = child.0.wait().unwrap().success() && text.contains("1 passed");
        assert!(done || leaves.contains(&rank), "{what}:\n{text}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn every_collective_on_every_library() {
    for form in FORMS {
        for ranks in [2, 3] {
            run("collectives", form, ranks, &[], &[]);
        }
    }
    run("collectives", FORMS[5], 2, &[("SAGELLM_DOUBLE_AS_FLOAT", "1"), ("SAGELLM_SIM_CNRT_PENDING", "notready")], &[]);
}

#[test]
fn lists_and_crossing_messages_and_streams() {
    for form in FORMS {
        run("messages", form, 3, &[], &[]);
        run("streams", form, 2, &[("SAGELLM_SIM_SLOW_US", "20000")], &[]);
    }
}

#[test]
fn communicators_out_of_communicators() {
    for form in [FORMS[0], FORMS[2], FORMS[3], FORMS[5]] {
        run("split", form, 3, &[], &[]);
    }
}

#[test]
fn an_initialisation_that_never_ends_is_a_timeout() {
    for form in WHOLE {
        run("init", form, 2, &[("SAGELLM_SIM_INIT", "hang")], &[]);
    }
}

#[test]
fn a_hang_is_found_by_its_deadline_and_ended_by_abort() {
    for form in WHOLE {
        run("hang", form, 2, &[("SAGELLM_SIM_HANG_AT", "2")], &[]);
    }
}

#[test]
fn an_error_that_comes_late_is_polled() {
    for form in WHOLE {
        run("error", form, 2, &[("SAGELLM_SIM_ERROR_AT", "1")], &[]);
    }
}

#[test]
fn a_dead_peer_does_not_hold_the_others() {
    for form in WHOLE {
        // `eager` connects the ranks at initialisation, so that the operation hangs on its stream and not in the
        // launch.
        run("dead", form, 2, &[("SAGELLM_SIM_CONNECT", "eager")], &[1]);
    }
}

// ---- one rank ----

struct World {
    rank: u32,
    ranks: u32,
    api: Arc<dyn Api>,
    runtime: Arc<dyn Runtime>,
    folder: PathBuf,
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: started by the tests above"))
}

impl World {
    fn new() -> World {
        let vendor = Vendor::from_name(&variable("SAGELLM_TEST_VENDOR")).unwrap();
        let hints = |name: &str| Hints { path: Some(variable(name).into()), ..Hints::default() };
        World {
            rank: variable("SAGELLM_TEST_RANK").parse().unwrap(),
            ranks: variable("SAGELLM_TEST_RANKS").parse().unwrap(),
            api: open(vendor, &hints("SAGELLM_TEST_LIBRARY")).unwrap(),
            runtime: open_runtime(vendor, &hints("SAGELLM_TEST_RUNTIME")).unwrap(),
            folder: variable("SAGELLM_TEST_FOLDER").into(),
        }
    }

    /// Plays the group's store: rank 0 publishes bytes, which the other ranks read.
    fn shared(&self, name: &str, make: impl FnOnce() -> Vec<u8>) -> Vec<u8> {
        let file = self.folder.join(name);
        if self.rank == 0 {
            let bytes = make();
            std::fs::write(file.with_extension("new"), &bytes).unwrap();
            std::fs::rename(file.with_extension("new"), &file).unwrap();
            return bytes;
        }
        self.wait_for(&file);
        std::fs::read(&file).unwrap()
    }

    fn wait_for(&self, file: &Path) {
        let end = Instant::now() + MINUTE;
        while !file.exists() {
            assert!(Instant::now() < end, "no rank wrote {}", file.display());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn join(&self, deadline: Duration) -> Result<Arc<dyn Communicator>> {
        self.runtime.set_device(self.rank as i32).unwrap();
        let setup = Setup {
            id: self.shared("id", || self.api.unique_id().unwrap()),
            rank: self.rank,
            ranks: self.ranks,
            device: self.rank as i32,
            deadline,
            go_on: Arc::new(always),
            name: "sagellm:test".into(),
            algorithm: "level0:NA;level1:ring".into(),
            runtime: self.runtime.clone(),
        };
        self.api.clone().create(setup)
    }

    fn stream(&self) -> Stream {
        self.runtime.stream_create().unwrap()
    }

    /// Runs one operation in the steps of the shim. Returns its result.
    fn one(&self, communicator: &dyn Communicator, case: &Case, stream: Stream) -> Option<Vec<u8>> {
        let LoweringInput { kind, dtype, ranks, equal_counts, .. } = case.asked;
        let lowering = lower(&case.asked, self.api.capabilities()).ok()?;
        let me = communicator.rank() as usize;
        let mut sent = dtype;
        let mut input = lowering.before.iter().fold(case.input(me), |data, step| local(*step, &mut sent, data, ranks));
        let folds = matches!(lowering.after.first(), Some(Local::Fold(_)));
        let scaled = |bytes: usize| bytes / dtype.size() * sent.size();
        let root = kind == Kind::Broadcast && me == case.root;
        let out = if root { 0 } else { scaled(case.expected(me).len()) * if folds { ranks } else { 1 } };
        let mut output = vec![0; out];
        if kind == Kind::Barrier {
            (input, output) = (vec![0; 4], vec![0; 4]);
        }
        let before = input.clone();
        let blocks =
            |sends| (!equal_counts).then(|| case.blocks(me, sends).into_iter().map(scaled).collect::<Vec<_>>());
        let by_send = matches!(kind, Kind::ReduceScatter | Kind::AllToAll).then(|| blocks(true)).flatten();
        let by_recv = matches!(kind, Kind::AllGather | Kind::AllToAll).then(|| blocks(false)).flatten();
        let (send, recv) = (spans(&mut input, by_send), spans(&mut output, by_recv));
        let (rank, root_rank) = (me as u32, case.root as u32);
        let job = Job {
            factor: 0,
            lowering: &lowering,
            rank,
            ranks: ranks as u32,
            root: root_rank,
            send: &send,
            recv: &recv,
        };
        let launched = launch(communicator, &*self.runtime, &job, stream);
        let launched = launched.unwrap_or_else(|error| panic!("{error}\n{:?}\n{lowering:?}", case.asked));
        synchronize(&*self.runtime, stream, MINUTE).unwrap();
        drop(launched);
        communicator.poll().unwrap();
        if !lowering.clobbers_input && !matches!(kind, Kind::Reduce | Kind::Barrier) {
            assert!(root || input == before, "an input was changed: {:?} {lowering:?}", case.asked);
        }
        if kind == Kind::Barrier {
            return Some(Vec::new());
        }
        let came = if root { input } else { output };
        Some(lowering.after.iter().fold(came, |data, step| local(*step, &mut sent, data, ranks)))
    }
}

fn asked(kind: Kind, dtype: Dtype, op: ReduceOp, ranks: u32) -> LoweringInput {
    LoweringInput { kind, dtype, op, ranks: ranks as usize, equal_counts: true, dense: true }
}

#[test]
#[ignore = "one rank: started by the other tests as a process"]
fn a_rank() {
    match variable("SAGELLM_TEST_SCENARIO").as_str() {
        "collectives" => collectives(),
        "messages" => messages(),
        "streams" => streams(),
        "split" => split(),
        "init" => init(),
        "hang" => hang(),
        "error" => error(),
        "dead" => dead(),
        other => panic!("no scenario {other}"),
    }
}

fn collectives() {
    let world = World::new();
    let communicator = world.join(MINUTE).unwrap();
    assert_eq!((communicator.rank(), communicator.ranks()), (world.rank, world.ranks));
    let stream = world.stream();
    let able = world.api.capabilities();
    let types = [
        Dtype::Bool,
        Dtype::U8,
        Dtype::I16,
        Dtype::I32,
        Dtype::U64,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::F32,
        Dtype::F64,
        Dtype::C64,
    ];
    let (mut done, mut refused) = (0, 0);
    for kind in Kind::COLLECTIVES {
        for dtype in types {
            for op in if kind.reduces() { &OPS[..] } else { &OPS[..1] } {
                for equal_counts in [true, false] {
                    let root = world.ranks as usize - 1;
                    let case =
                        Case { asked: LoweringInput { equal_counts, ..asked(kind, dtype, *op, world.ranks) }, root };
                    let Some(result) = world.one(&*communicator, &case, stream) else {
                        assert!(kind.reduces() && !is_defined(dtype, *op) || dtype == Dtype::F64, "{:?}", case.asked);
                        refused += 1;
                        continue;
                    };
                    let expected = case.expected_by(world.rank as usize, able);
                    let made = lower(&case.asked, able);
                    if !(kind == Kind::Reduce && world.rank as usize != root) {
                        assert_eq!(result, expected, "{:?} on {}: {made:?}", case.asked, able.name);
                    }
                    done += 1;
                }
            }
        }
    }
    assert!(done > 400 && refused > 50, "{done} done, {refused} refused");
    communicator.close(MINUTE).unwrap();
    let after = communicator.poll().unwrap_err();
    assert_eq!(after, Error::aborted("sagellm: poll: the communicator was closed"));
}

/// Every rank posts its sends before its receives, several operations share one launch, and all vendors get the same
/// list of operations.
fn messages() {
    let world = World::new();
    let communicator = world.join(MINUTE).unwrap();
    let stream = world.stream();
    let (me, ranks) = (world.rank, world.ranks);
    let others: Vec<u32> = (0..ranks).filter(|rank| *rank != me).collect();
    let sent: Vec<Vec<u8>> = (0..ranks).map(|to| vec![(me * 10 + to) as u8; 1000]).collect();
    let mut received = vec![vec![0u8; 1000]; ranks as usize];
    let message = |sends, peer, addr: usize| Message { peer, sends, addr, bytes: 1000 };
    let mut list: Vec<Message> =
        others.iter().map(|to| message(true, *to, sent[*to as usize].as_ptr() as usize)).collect();
    for from in &others {
        list.push(message(false, *from, received[*from as usize].as_mut_ptr() as usize));
    }
    let kept = communicator.call(&sagellm::engine::device::Call::Exchange(&list), stream).unwrap();
    synchronize(&*world.runtime, stream, MINUTE).unwrap();
    drop(kept);
    others.iter().for_each(|from| assert_eq!(received[*from as usize], vec![(from * 10 + me) as u8; 1000]));

    let able = world.api.capabilities();
    let sum = lower(&asked(Kind::AllReduce, Dtype::F32, ReduceOp::Sum, ranks), able).unwrap();
    let mut tensors = [vec![1f32; 5], vec![me as f32; 300], vec![2.0; 1]];
    communicator.group_start().unwrap();
    let launched: Vec<_> = tensors
        .iter_mut()
        .map(|tensor| {
            let memory = [Span { addr: tensor.as_mut_ptr() as usize, bytes: tensor.len() * 4 }];
            let job = Job { factor: 0, lowering: &sum, rank: me, ranks, root: 0, send: &memory, recv: &memory };
            launch(&*communicator, &*world.runtime, &job, stream).unwrap()
        })
        .collect();
    communicator.group_end().unwrap();
    synchronize(&*world.runtime, stream, MINUTE).unwrap();
    drop(launched);
    assert_eq!(tensors, [vec![3.0; 5], vec![3.0; 300], vec![6.0; 1]]);
    // A single message, from rank 0 to the last rank.
    let (kind, root) = if me == 0 { (Kind::Send, ranks - 1) } else { (Kind::Recv, 0) };
    if me == 0 || me == ranks - 1 {
        let single = lower(&asked(kind, Dtype::F32, ReduceOp::Sum, ranks), able).unwrap();
        let mut data = vec![me as f32 + 7.0; 4];
        let memory = [Span { addr: data.as_mut_ptr() as usize, bytes: 16 }];
        let (send, recv) = if me == 0 { (&memory[..], &[][..]) } else { (&[][..], &memory[..]) };
        let job = Job { factor: 0, lowering: &single, rank: me, ranks, root, send, recv };
        let launched = launch(&*communicator, &*world.runtime, &job, stream).unwrap();
        synchronize(&*world.runtime, stream, MINUTE).unwrap();
        drop(launched);
        assert_eq!(data, vec![7.0; 4]);
    }
    communicator.close(MINUTE).unwrap();
}

/// Two streams that wait for each other by events; each turn records the same events again. Every operation of the
/// library takes 20 ms, so that a wrong order gives wrong numbers.
fn streams() {
    let world = World::new();
    let communicator = world.join(MINUTE).unwrap();
    let (first, second) = (world.stream(), world.stream());
    let runtime = &*world.runtime;
    assert!(!runtime.describe().is_empty());
    let sum = asked(Kind::AllReduce, Dtype::F32, ReduceOp::Sum, world.ranks);
    let sum = lower(&sum, world.api.capabilities()).unwrap();
    let mut data = vec![1f32; 8];
    let memory = [Span { addr: data.as_mut_ptr() as usize, bytes: 32 }];
    let job =
        Job { factor: 0, lowering: &sum, rank: world.rank, ranks: world.ranks, root: 0, send: &memory, recv: &memory };
    let mut copy = vec![0f32; 8];
    let (done, read) = (runtime.event_create().unwrap(), runtime.event_create().unwrap());
    let mut expected = 1.0;
    for turn in 0..4 {
        // In the last turn rank 1 launches after rank 0 has seen that its stream is busy, however slow the machine is.
        // Not in the first turn, because a first launch may wait for the other ranks.
        let checks = turn == 3;
        if checks && world.rank == 1 {
            world.shared("launched", Vec::new);
        }
        let launched = launch(&*communicator, runtime, &job, first).unwrap();
        runtime.event_record(done, first).unwrap();
        if checks && world.rank == 0 {
            assert!(!runtime.stream_idle(first).unwrap(), "rank 1 has not launched the operation");
            world.shared("launched", Vec::new);
        }
        // The second stream copies the result after `done`. The first stream continues after `read`, when the copy has
        // ended.
        runtime.event_wait(second, done).unwrap();
        runtime.copy(copy.as_mut_ptr() as usize, memory[0].addr, 32, second).unwrap();
        runtime.event_record(read, second).unwrap();
        runtime.event_wait(first, read).unwrap();
        synchronize(runtime, first, MINUTE).unwrap();
        drop(launched);
        expected *= world.ranks as f32;
        assert_eq!(copy, vec![expected; 8]);
    }
    // The copies have ended, but the second stream may still be ending the record of its last event.
    synchronize(runtime, second, MINUTE).unwrap();
    assert!(!runtime.capturing(first).unwrap());
    let before = runtime.exchange_capture_mode(SPARES_CAPTURES).unwrap();
    assert_eq!(runtime.exchange_capture_mode(before).unwrap(), SPARES_CAPTURES);
    // A new thread has no current device until it selects one.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            runtime.set_device(world.rank as i32).unwrap();
            assert!(runtime.stream_idle(second).unwrap());
        });
    });
    communicator.close(MINUTE).unwrap();
}

fn split() {
    let world = World::new();
    let communicator = world.join(MINUTE).unwrap();
    let stream = world.stream();
    let split = Split {
        members: vec![0, 2],
        number: 1,
        deadline: MINUTE,
        go_on: Arc::new(always),
        name: "sagellm:part".into(),
        algorithm: String::new(),
    };
    let able = world.api.capabilities();
    if !able.split {
        let text = communicator.split(&split).err().unwrap().to_string();
        assert!(text.contains("from an id of its own"), "{text}");
        assert!(communicator.shrink(&[1], MINUTE, Arc::new(always), "").is_err());
        return communicator.close(MINUTE).unwrap();
    }
    let check = |part: &dyn Communicator| {
        assert_eq!((part.rank(), part.ranks(), part.device()), (world.rank / 2, 2, world.rank as i32));
        let case = Case { asked: asked(Kind::AllReduce, Dtype::I32, ReduceOp::Sum, 2), root: 0 };
        assert_eq!(world.one(part, &case, stream).unwrap(), case.expected(part.rank() as usize));
    };
    let part = communicator.split(&split).unwrap();
    assert_eq!(part.is_some(), world.rank != 1);
    if let Some(part) = part {
        check(&*part);
        part.close(MINUTE).unwrap();
    }
    if able.shrink && world.rank != 1 {
        let part = communicator.shrink(&[1], MINUTE, Arc::new(always), "sagellm:rest").unwrap();
        check(&*part);
        part.close(MINUTE).unwrap();
    }
    // All ranks abort at the same time, when no rank uses the communicator `part` any more. Rank 1 waits too, although
    // it is not a member.
    std::fs::write(world.folder.join(format!("done-{}", world.rank)), "").unwrap();
    (0..world.ranks).for_each(|rank| world.wait_for(&world.folder.join(format!("done-{rank}"))));
    communicator.abort().unwrap();
}

fn init() {
    let world = World::new();
    let start = Instant::now();
    let error = world.join(Duration::from_millis(300)).err().unwrap();
    assert!(error.kind() == ErrorKind::Timeout, "{error}");
    let place = format!("to join as rank {} of 2 with device {0}", world.rank);
    assert!(error.text().contains(&place) && error.text().contains("within 300 ms"), "{error}");
    assert!(start.elapsed() < MINUTE);
}

fn launched(world: &World, communicator: &dyn Communicator, data: &mut [f32], stream: Stream) -> Result<()> {
    let sum = asked(Kind::AllReduce, Dtype::F32, ReduceOp::Sum, world.ranks);
    let sum = lower(&sum, world.api.capabilities()).unwrap();
    let memory = [Span { addr: data.as_mut_ptr() as usize, bytes: data.len() * 4 }];
    let job =
        Job { factor: 0, lowering: &sum, rank: world.rank, ranks: world.ranks, root: 0, send: &memory, recv: &memory };
    launch(communicator, &*world.runtime, &job, stream).map(drop)
}

fn hang() {
    let world = World::new();
    let communicator = world.join(MINUTE).unwrap();
    let stream = world.stream();
    let mut data = vec![1f32; 4];
    launched(&world, &*communicator, &mut data, stream).unwrap();
    synchronize(&*world.runtime, stream, MINUTE).unwrap();
    assert_eq!(data, [2.0; 4]);
    let kept = data.leak(); // leaked, because the library may write to it at any later time
    launched(&world, &*communicator, kept, stream).unwrap();
    let error = synchronize(&*world.runtime, stream, Duration::from_millis(200)).unwrap_err();
    assert!(error.text().contains("not done within 200 ms"), "{error}");
    communicator.poll().unwrap(); // no error: the library does not report a hang
    let ended = communicator.abort();
    if world.api.capabilities().abort {
        ended.unwrap();
        // The operation has ended, with whichever result, and the stream is idle.
        let end = Instant::now() + MINUTE;
        while !world.runtime.stream_idle(stream).unwrap_or(true) {
            assert!(Instant::now() < end, "the stream still hangs after abort");
            std::thread::sleep(Duration::from_millis(2));
        }
    } else if let Err(error) = ended {
        // A library without abort may report that it is busy, but the call must return.
        assert!(error.text().contains("HcclCommDestroy"), "{error}");
    }
    communicator.abort().unwrap(); // a second abort does nothing
    let error = launched(&world, &*communicator, &mut [0.0], stream).unwrap_err();
    assert_eq!(error, Error::aborted("sagellm: all_reduce: the communicator was aborted"));
}

fn error() {
    let world = World::new();
    let communicator = world.join(MINUTE).unwrap();
    let stream = world.stream();
    let data = vec![1f32; 4].leak();
    launched(&world, &*communicator, data, stream).unwrap();
    let end = Instant::now() + MINUTE;
    let error = loop {
        match communicator.poll() {
            Ok(()) => assert!(Instant::now() < end, "the error never came"),
            Err(error) => break error,
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let name = &world.api.capabilities().name;
    assert!(error.text().contains(&format!("{name} failed in an operation that was launched earlier: ")), "{error}");
    let _ = communicator.abort(); // its result does not matter, but it must return
}

fn dead() {
    let world = World::new();
    let communicator = world.join(MINUTE).unwrap();
    if world.rank == 1 {
        std::process::abort();
    }
    let stream = world.stream();
    let data = vec![1f32; 4].leak();
    // Whether or not the library detects the death, no rank waits longer than its deadline, and `abort` does not hang
    // either.
    let noticed = launched(&world, &*communicator, data, stream)
        .and_then(|()| synchronize(&*world.runtime, stream, Duration::from_millis(500)))
        .and_then(|()| communicator.poll());
    assert!(noticed.is_err(), "an all_reduce with a dead peer has succeeded");
    let start = Instant::now();
    let _ = communicator.abort();
    assert!(start.elapsed() < MINUTE);
    let one = lower(&asked(Kind::Barrier, Dtype::F32, ReduceOp::Sum, 2), world.api.capabilities()).unwrap();
    let job = Job { factor: 0, lowering: &one, rank: 0, ranks: 2, root: 0, send: &[], recv: &[] };
    assert!(calls(&job, &mut |_| Ok(())).is_ok());
}
