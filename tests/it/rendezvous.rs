//! Tests of `rendezvous`: the ranks of a group meet, agree, map shared memory, and learn when a peer ends. Ranks are
//! threads of one process if that suffices, else processes that run this test binary again in a role.

use std::collections::HashMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::common::host::{Files, Memory, Quiet, config};
use crate::common::test_name;
use proptest::prelude::*;
use sagellm::config::{Config, Threads};
use sagellm::engine::shm::memory::segment::Backing;
use sagellm::engine::shm::nodes::Level;
use sagellm::error::{ErrorKind, Result};
use sagellm::fields::cleaned;
use sagellm::host::{Host, Store};
use sagellm::os::watch;
use sagellm::os::watch::{End, Source};
use sagellm::rendezvous::addresses::{Addresses, Network, Way};
use sagellm::rendezvous::messages::{
    Answer, Body, DecisionMessage, Hello, Identity, Mode, Offer, PROTOCOL, Reason, Record,
};
use sagellm::rendezvous::peers::Following;
use sagellm::rendezvous::unix_socket;
use sagellm::rendezvous::{Met, Outcome, hello_bytes, meet, meet_as};

const GENEROUS: Duration = Duration::from_secs(30);

fn bytes(size: usize) -> impl Fn(usize, usize) -> std::result::Result<usize, String> {
    move |_, _| Ok(hello_bytes(size) + 4096)
}

/// What a test changes in one rank of `run`; `late` is the time that the rank sleeps before it meets its peers.
struct Rank {
    config: Config,
    identity: Identity,
    late: Duration,
}

/// Runs `size` ranks as threads that meet through one store. Returns their outcomes by rank.
fn run(store: &(dyn Store + Sync), size: usize, change: impl Fn(&mut Rank) + Sync) -> Vec<Result<Outcome>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let change = &change;
                scope.spawn(move || {
                    let mut rank =
                        Rank { config: config(rank, size, GENEROUS), identity: Identity::here(), late: Duration::ZERO };
                    change(&mut rank);
                    std::thread::sleep(rank.late);
                    meet_as(&rank.config, rank.identity, store, &Quiet, &bytes(size))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn shared(outcome: Result<Outcome>) -> Met {
    match outcome.unwrap() {
        Outcome::Shared(met) => met,
        Outcome::Delegate { reason, .. } | Outcome::Hosts { reason, .. } => panic!("not shared: {reason}"),
    }
}

fn reasons(outcomes: Vec<Result<Outcome>>) -> Vec<String> {
    let reason = |outcome: Result<Outcome>| match outcome.unwrap() {
        Outcome::Delegate { reason, .. } | Outcome::Hosts { reason, .. } => reason,
        Outcome::Shared(_) => panic!("shared"),
    };
    outcomes.into_iter().map(reason).collect()
}

fn word(met: &Met, size: usize, rank: usize) -> &AtomicU32 {
    // SAFETY: `ptr` checks that the word is inside the segment; it is aligned and every access to it is atomic.
    unsafe { AtomicU32::from_ptr(met.segment.ptr(hello_bytes(size) + 4 * rank, 4).cast()) }
}

/// Checks that, after every rank has written a word, every rank reads the words of all ranks.
fn assert_one_memory(met: &[Met]) {
    let size = met.len();
    for (rank, one) in met.iter().enumerate() {
        word(one, size, rank).store(100 + rank as u32, Ordering::Relaxed);
    }
    for one in met {
        let seen: Vec<u32> = (0..size).map(|rank| word(one, size, rank).load(Ordering::Relaxed)).collect();
        assert_eq!(seen, (0..size).map(|rank| 100 + rank as u32).collect::<Vec<u32>>());
        assert_eq!(one.group_peers.places().len(), size);
        assert_eq!((one.local_cores, one.threads), (met[0].local_cores, met[0].threads));
        assert_eq!(one.policy, "rank 0's");
    }
}

#[test]
fn ranks_meet_and_see_one_memory() {
    for size in [2, 3, 5, 17] {
        let met: Vec<Met> = run(&Memory::default(), size, |_| ()).into_iter().map(shared).collect();
        assert_one_memory(&met);
        for one in &met {
            assert!((0..size).all(|rank| one.group_peers.peer(rank).pid == std::process::id() as i32));
        }
    }
}

#[test]
fn rule_23_keys_of_an_earlier_incarnation_do_no_harm() {
    let store = Memory::default();
    for _ in 0..3 {
        let met: Vec<Met> = run(&store, 3, |_| ()).into_iter().map(shared).collect();
        assert_one_memory(&met);
    }
    // Ranks 1 and 2 arrive after rank 0 has read their records of the earlier run and published a decision that names
    // those records.
    for late in [1, 2] {
        let outcomes = run(&store, 3, |rank| {
            if rank.config.rank >= late {
                rank.late = Duration::from_millis(60 * rank.config.rank as u64);
            }
        });
        assert_one_memory(&outcomes.into_iter().map(shared).collect::<Vec<_>>());
    }
    // Rank 0 arrives last. The only answers that it finds are those to its decisions of an earlier run.
    let outcomes = run(&store, 3, |rank| rank.late = Duration::from_millis(40 * (2 - rank.config.rank as u64)));
    assert_one_memory(&outcomes.into_iter().map(shared).collect::<Vec<_>>());
}

#[test]
fn rule_23_an_old_wish_to_delegate_does_not_bind_the_new_ranks() {
    let store = Memory::default();
    let first = run(&store, 3, |rank| rank.config.delegate_reason = Some("an earlier run wanted it".into()));
    assert_eq!(reasons(first), ["an earlier run wanted it"; 3]);
    let second = run(&store, 3, |rank| {
        if rank.config.rank > 0 {
            rank.late = Duration::from_millis(80);
        }
    });
    assert_one_memory(&second.into_iter().map(shared).collect::<Vec<_>>());
    let third = run(&store, 3, |rank| {
        if rank.config.rank == 2 {
            rank.late = Duration::from_millis(50);
            rank.config.delegate_reason = Some("now rank 2 does".into());
        }
    });
    assert_eq!(reasons(third), ["rank 2 asked for it: now rank 2 does"; 3]);
}

#[test]
fn garbage_in_the_store_does_no_harm() {
    let used = Memory::default();
    run(&used, 3, |_| ()).into_iter().for_each(|outcome| drop(shared(outcome)));
    run(&used, 2, |_| ()).into_iter().for_each(|outcome| drop(shared(outcome))); // records of another world size
    let old = used.0.into_inner().unwrap();
    type Damage = fn(&[u8]) -> Vec<u8>;
    let damages: [Damage; 4] = [
        |value| value[..value.len() / 2].to_vec(),
        |_| Vec::new(),
        |_| vec![0xff; 300],
        |value| value.iter().chain(b"more").copied().collect(),
    ];
    for damage in damages {
        let store = Memory::default();
        for (key, value) in &old {
            store.set(key, &damage(value)).unwrap();
        }
        let met: Vec<Met> = run(&store, 3, |rank| rank.late = Duration::from_millis(20 * rank.config.rank as u64))
            .into_iter()
            .map(shared)
            .collect();
        assert_one_memory(&met);
    }
}

/// Waits until `came` returns true.
fn until(what: &str, came: impl Fn() -> bool) {
    let began = Instant::now();
    while !came() {
        assert!(began.elapsed() < GENEROUS, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs rank 0 and the ranks `others` of a group of `size` ranks; rank 0 gives up after `timeout`. Returns the text of
/// each rank's error. Rank 0 starts when the store has new records of the others, so that its timeout does not include
/// their start. The others have more time, so that rank 0's error ends their waits.
fn texts_without_all(store: &Memory, timeout: Duration, others: &[usize], size: usize) -> Vec<String> {
    let record = |rank: &usize| store.try_get(&format!("r/{rank}")).unwrap();
    let old: Vec<_> = others.iter().map(record).collect();
    std::thread::scope(|scope| {
        let meets =
            |rank, timeout| move || timeout_text(meet(&config(rank, size, timeout), store, &Quiet, &bytes(size)));
        let threads: Vec<_> = others.iter().map(|rank| scope.spawn(meets(*rank, GENEROUS))).collect();
        until("the records of the others", || others.iter().zip(&old).all(|(rank, old)| record(rank) != *old));
        let began = Instant::now();
        let text = meets(0, timeout)();
        assert!(began.elapsed() >= timeout, "{text}");
        [text].into_iter().chain(threads.into_iter().map(|thread| thread.join().unwrap())).collect()
    })
}

/// Timeouts of rank 0. A test tries the next one if a rank came late that should not be missing, as on a busy machine.
const TIMEOUTS: [Duration; 3] = [Duration::from_millis(400), Duration::from_millis(1600), Duration::from_millis(6400)];

#[test]
fn a_missing_rank_is_named_on_every_rank_that_came() {
    for timeout in TIMEOUTS {
        let texts = texts_without_all(&Memory::default(), timeout, &[1, 3], 4);
        if texts[0].contains("rank 3") && timeout != TIMEOUTS[2] {
            continue;
        }
        for text in texts {
            let expected = format!("rank 2 has not come within {:.1} s", timeout.as_secs_f64());
            assert!(text.contains(&format!("group 'test' of 4 ranks: {expected}")), "{text}");
            assert!(!text.contains("rank 3") && text.contains("Check that it was started"), "{text}");
        }
        return;
    }
}

/// Before rank 0 has given up, it says in the store for which ranks it waits. A rank that gives up earlier reports this
/// text, if the text comes from a rank 0 that has read this rank's record.
#[test]
fn a_rank_that_gives_up_first_says_for_whom_rank_zero_waits() {
    struct Waits(Memory, bool);
    impl Store for Waits {
        fn set(&self, key: &str, value: &[u8]) -> Result<()> {
            let nonce = Record::read(value).filter(|_| self.1).map_or([7; 16], |record| record.nonce);
            let waits = DecisionMessage {
                id: [0; 16],
                nonces: vec![[1; 16], nonce, [0; 16]],
                mode: Mode::Failed,
                text: "Trank 0 waits for another".into(),
                detail: Vec::new(),
                policy: String::new(),
                known: Default::default(),
                network: None,
            };
            self.0.set("waits", &waits.write())?;
            self.0.set(key, value)
        }
        fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
            self.0.try_get(key)
        }
    }
    for (known, expected) in [(true, "rank 0 waits for another"), (false, "rank 0, rank 2 have not come within 0.1 s")]
    {
        let store = Waits(Memory::default(), known);
        let text = timeout_text(meet(&config(1, 3, Duration::from_millis(100)), &store, &Quiet, &bytes(3)));
        assert!(text.contains(expected), "{text}");
    }
}

fn timeout_text<T>(outcome: Result<T>) -> String {
    let error = outcome.err().expect("a rank is missing");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
    error.text()
}

#[test]
fn a_missing_rank_zero_is_named() {
    let text = timeout_text(meet(&config(1, 2, Duration::from_millis(100)), &Memory::default(), &Quiet, &bytes(2)));
    assert!(text.contains("rank 0 has not come within 0.1 s"), "{text}");
}

#[test]
fn a_rank_whose_old_record_is_there_but_which_never_comes_is_named() {
    for timeout in TIMEOUTS {
        let store = Memory::default();
        run(&store, 3, |_| ()).into_iter().for_each(|outcome| drop(shared(outcome)));
        let texts = texts_without_all(&store, timeout, &[1], 3);
        if texts[0].contains("rank 1,") && timeout != TIMEOUTS[2] {
            continue;
        }
        for text in texts {
            assert!(text.contains("rank 2 has not come") && !text.contains("rank 1,"), "{text}");
        }
        return;
    }
}

#[test]
fn ranks_that_cannot_share_delegate_for_one_reason() {
    type Change = fn(&mut Identity);
    let changes: [(Change, &str); 3] = [
        (
            |identity| (identity.boot_id, identity.hostname) = ("x".into(), "b".into()),
            "rank 2 runs on host b, rank 0 on",
        ),
        (|identity| identity.uid = 1001, "rank 2 runs as uid 1001"),
        (|identity| identity.netns = 7, "in another network namespace"),
    ];
    for (change, expected) in changes {
        let reasons = reasons(run(&Memory::default(), 3, |rank| {
            if rank.config.rank == 2 {
                change(&mut rank.identity);
            }
        }));
        assert!(reasons[0].contains(expected), "{}", reasons[0]);
        assert!(reasons.iter().all(|reason| *reason == reasons[0]), "{reasons:?}");
    }
}

#[test]
fn a_reason_that_is_too_long_is_cut_alike_everywhere() {
    let reasons = reasons(run(&Memory::default(), 2, |rank| rank.config.delegate_reason = Some("grün ".repeat(500))));
    assert!(reasons[0].len() > 1000 && reasons[0] == reasons[1], "{reasons:?}");
}

#[test]
fn ranks_that_would_go_to_different_delegates_are_told_so_on_every_rank() {
    let outcomes = run(&Memory::default(), 3, |rank| {
        rank.config.delegate_reason = Some("a test".into());
        rank.config.delegate = if rank.config.rank == 1 { "mpi" } else { "gloo" }.to_string();
    });
    for outcome in outcomes {
        let error = outcome.expect_err("an error");
        assert!(error.kind() == ErrorKind::Invalid, "{error:?}");
        assert!(error.text().contains("'gloo' on rank 0 and 'mpi' on rank 1"), "{error}");
    }
    // If no rank needs a delegate, the ranks may name different delegates.
    assert_one_memory(
        &run(&Memory::default(), 2, |rank| rank.config.delegate = rank.config.rank.to_string())
            .into_iter()
            .map(shared)
            .collect::<Vec<Met>>(),
    );
}

/// Replaces the socket name in rank 2's copy of the decision by a name on which no process listens.
struct Misleading {
    store: Memory,
    /// The id of rank 2's thread.
    thread: std::thread::ThreadId,
    /// Rank 2 answers that it has no descriptor left.
    without_files: bool,
}

impl Store for Misleading {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        // Also removes the mailbox from rank 2's record, so that rank 2 can read the decision only from this store.
        match Record::read(value) {
            Some(Record { body: Some(body), .. }) if std::thread::current().id() == self.thread => {
                let body = Some(Body { mailbox: Vec::new(), ..body });
                self.store.set(key, &Record { body, ..Record::read(value).unwrap() }.write())
            }
            _ => match Answer::read(value) {
                Some(Answer { id, reason: Some(reason) }) if self.without_files => {
                    let reason = Some(Reason::OpenFiles(reason.text().to_string()));
                    self.store.set(key, &Answer { id, reason }.write())
                }
                _ => self.store.set(key, value),
            },
        }
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let value = self.store.try_get(key)?;
        let decision = value.as_deref().and_then(DecisionMessage::read).filter(|decision| decision.mode == Mode::Share);
        match decision {
            Some(decision) if std::thread::current().id() == self.thread => {
                Ok(Some(DecisionMessage { detail: b"sagellm nobody".into(), ..decision }.write()))
            }
            _ => Ok(value),
        }
    }
}

/// Before the ranks read rank 0's decision, a process of another user connects to the socket that the decision names.
/// It claims to be rank 1 and presents rank 1's nonce, which it has read in the decision. The records name no mailbox,
/// so the decision reaches the ranks through the store only.
struct Eavesdropped(Memory);

impl Store for Eavesdropped {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        if let Some(Record { body: Some(body), .. }) = Record::read(value) {
            let body = Some(Body { mailbox: Vec::new(), ..body });
            return self.0.set(key, &Record { body, ..Record::read(value).unwrap() }.write());
        }
        if let Some(decision) = DecisionMessage::read(value).filter(|decision| decision.mode == Mode::Share) {
            let stranger = move || {
                const NOBODY: libc::c_long = 65534;
                // SAFETY: the system call changes the user of this thread alone, which ends soon.
                assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) }, 0);
                let socket = unix_socket::connect(&decision.detail).unwrap();
                let hello = Hello { id: decision.id, nonce: decision.nonces[1], rank: 1 };
                unix_socket::send(&socket, &hello.write(), &[]).unwrap();
            };
            std::thread::spawn(stranger).join().unwrap();
        }
        self.0.set(key, value)
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.0.try_get(key)
    }
}

#[test]
fn a_stranger_who_knows_a_nonce_does_not_keep_the_ranks_from_sharing_memory() {
    // SAFETY: no memory is touched.
    if unsafe { libc::geteuid() } != 0 {
        println!("not tested: only root may become another user");
        return;
    }
    let outcomes = run(&Eavesdropped(Memory::default()), 2, |_| ());
    assert_one_memory(&outcomes.into_iter().map(shared).collect::<Vec<Met>>());
}

fn misled(without_files: bool) -> Vec<Result<Outcome>> {
    let (tell, told) = channel();
    let shared: Arc<Mutex<Option<Arc<Misleading>>>> = Arc::default();
    let start = Barrier::new(3);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|rank| {
                let (tell, shared, start) = (tell.clone(), Arc::clone(&shared), &start);
                scope.spawn(move || {
                    tell.send((rank, std::thread::current().id())).unwrap();
                    start.wait();
                    let store = loop {
                        if let Some(store) = shared.lock().unwrap().clone() {
                            break store;
                        }
                        std::thread::yield_now();
                    };
                    meet(&config(rank, 3, GENEROUS), &*store, &Quiet, &bytes(3))
                })
            })
            .collect();
        let ids: HashMap<_, _> = (0..3).map(|_| told.recv().unwrap()).collect();
        *shared.lock().unwrap() =
            Some(Arc::new(Misleading { store: Memory::default(), thread: ids[&2], without_files }));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_without_descriptors_has_the_group_refused_on_all() {
    let errors = misled(true).into_iter().map(|outcome| outcome.expect_err("gloo would need more of them"));
    let texts: Vec<String> = errors.map(|error| error.text()).collect();
    let expected = ["group 'test' cannot be made: rank 2 cannot connect to rank 0's socket", "ulimit -n"];
    assert!(expected.iter().all(|part| texts[0].contains(part)), "{}", texts[0]);
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
}

#[test]
fn a_rank_that_cannot_connect_makes_all_delegate() {
    let reasons = reasons(misled(false));
    assert!(reasons[0].contains("rank 2 cannot connect to rank 0's socket"), "{}", reasons[0]);
    assert!(reasons.iter().all(|reason| *reason == reasons[0]), "{reasons:?}");
}

/// A store in which no rank finds a decision, so that decisions can arrive only in mailboxes.
struct Mute(Memory);

impl Store for Mute {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        if key == "verdict" { Ok(None) } else { self.0.try_get(key) }
    }
}

#[test]
fn ranks_of_one_host_find_verdicts_in_their_mailboxes() {
    let met: Vec<Met> = run(&Mute(Memory::default()), 4, |_| ()).into_iter().map(shared).collect();
    assert_one_memory(&met);
    let wish = |rank: &mut Rank| rank.config.delegate_reason = Some("a wish".into());
    assert_eq!(reasons(run(&Mute(Memory::default()), 3, wish)), ["a wish"; 3]);
}

#[test]
fn a_foreign_owner_of_the_socket_makes_all_delegate() {
    // All ranks claim a uid that differs from the one the kernel reports for the socket's peer.
    let reasons = reasons(run(&Memory::default(), 3, |rank| rank.identity.uid = 4242));
    assert!(reasons[0].contains("uid"), "{}", reasons[0]);
    assert!(reasons.iter().all(|reason| *reason == reasons[0]), "{reasons:?}");
}

#[test]
fn rule_24_too_little_memory_delegates_with_the_amount() {
    let store = Memory::default();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        [0, 1]
            .map(|rank| {
                let store = &store;
                scope.spawn(move || {
                    let mut identity = Identity::here();
                    identity.headroom = Some((3 + rank as u64) << 20);
                    let little = |_, headroom: usize| match headroom >> 20 {
                        left @ ..4 => Err(format!("{left} MiB are too little")),
                        _ => Ok(1 << 20),
                    };
                    meet_as(&config(rank, 2, GENEROUS), identity, store, &Quiet, &little)
                })
            })
            .map(|thread| thread.join().unwrap())
            .into_iter()
            .collect()
    });
    assert_eq!(reasons(outcomes), ["3 MiB are too little"; 2]);
}

#[test]
fn an_interrupt_ends_the_wait_and_tells_the_others() {
    struct Pressed(AtomicBool);
    impl Host for Pressed {
        fn interrupted(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }
    /// A store that knows whether rank 0 has read the record of rank 1. Rank 0 sends its error only to ranks whose
    /// record it has read.
    #[derive(Default)]
    struct Observed(Memory, AtomicBool);
    impl Store for Observed {
        fn set(&self, key: &str, value: &[u8]) -> Result<()> {
            self.0.set(key, value)
        }
        fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
            let value = self.0.try_get(key)?;
            self.1.fetch_or(key == "r/1" && value.is_some(), Ordering::Relaxed);
            Ok(value)
        }
    }
    let (store, pressed) = (Observed::default(), Pressed(AtomicBool::new(false)));
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| meet(&config(0, 3, GENEROUS), &store, &pressed, &bytes(3)));
        let one = scope.spawn(|| meet(&config(1, 3, GENEROUS), &store, &Quiet, &bytes(3)));
        until("rank 0 reads the record of rank 1", || store.1.load(Ordering::Relaxed));
        pressed.0.store(true, Ordering::Relaxed);
        assert!(matches!(zero.join().unwrap(), Err(ref error) if error.kind() == ErrorKind::Interrupted));
        let text = one.join().unwrap().unwrap_err();
        assert!(text.kind() == ErrorKind::System && text.text().contains("interrupted"), "{text:?}");
    });
}

// ---------------------------------------------------------------------------------------------------- processes

/// Starts this test binary again as one rank of a group that meets through the files in `dir`.
fn process(role: &str, dir: &Path, rank: usize, size: usize) -> Child {
    process_under(&[], role, dir, rank, size)
}

/// Like `process`, but the test binary is started by another program, such as `unshare`.
fn process_under(starter: &[&str], role: &str, dir: &Path, rank: usize, size: usize) -> Child {
    let exe = std::env::current_exe().unwrap();
    let mut line: Vec<&str> = starter.to_vec();
    line.push(exe.to_str().unwrap());
    let name = test_name(module_path!(), "as_another_process");
    Command::new(line[0])
        .args(&line[1..])
        .args(["--exact", &name, "--ignored", "--nocapture", "--test-threads=1"])
        .env("SAGELLM_TEST_ROLE", role)
        .env("SAGELLM_TEST_DIR", dir)
        .env("SAGELLM_TEST_RANK", format!("{rank} {size}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Open sockets and pidfds of this process, without the standard streams.
fn own_descriptors() -> Vec<(i32, String)> {
    let each = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        let entry = entry.unwrap();
        let fd: i32 = entry.file_name().to_str()?.parse().ok()?;
        Some((fd, fs::read_link(entry.path()).ok()?.to_str()?.to_string()))
    });
    each.filter(|(fd, name)| *fd > 2 && (name.contains("socket") || name.contains("pidfd"))).collect()
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
#[ignore = "other tests run it as a separate process"]
fn as_another_process() {
    let Ok(role) = std::env::var("SAGELLM_TEST_ROLE") else { return };
    let store = Files(std::env::var("SAGELLM_TEST_DIR").unwrap().into());
    let numbers = std::env::var("SAGELLM_TEST_RANK").unwrap();
    let numbers: Vec<usize> = numbers.split(' ').map(|word| word.parse().unwrap()).collect();
    let (rank, size) = (numbers[0], numbers[1]);
    match role.as_str() {
        "sleep" => {
            let met = shared(meet(&config(rank, size, GENEROUS), &store, &Quiet, &bytes(size)));
            word(&met, size, rank).store(std::process::id(), Ordering::Relaxed);
            std::thread::sleep(GENEROUS);
        }
        "impatient" => {
            let met = shared(meet(&config(rank, size, IMPATIENT), &store, &Quiet, &bytes(size)));
            word(&met, size, rank).store(std::process::id(), Ordering::Relaxed);
            std::thread::sleep(GENEROUS);
        }
        "leave" => {
            let met = shared(meet(&config(rank, size, GENEROUS), &store, &Quiet, &bytes(size)));
            word(&met, size, rank).store(std::process::id(), Ordering::Relaxed);
            drop(met);
            std::thread::sleep(GENEROUS);
        }
        "inherited" => {
            let of_others = own_descriptors(); // inherited
            let _met: Vec<Met> = run(&Memory::default(), 3, |_| ()).into_iter().map(shared).collect();
            let mut ours = own_descriptors();
            ours.retain(|one| !of_others.contains(one));
            assert!(ours.len() >= 4);
            for (fd, name) in ours {
                let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap();
                let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
                let flags = i32::from_str_radix(flags.trim(), 8).unwrap();
                assert_ne!(flags & libc::O_CLOEXEC, 0, "descriptor {fd}, {name}: {info}");
            }
            watch::stop();
        }
        "descriptors" => {
            let one_group = || {
                let met: Vec<Met> = run(&Memory::default(), 4, |_| ()).into_iter().map(shared).collect();
                let guards: Vec<_> = met.iter().map(|met| met.group_peers.follow(|_, _| ())).collect();
                drop(guards);
                run(&Memory::default(), 2, |rank| rank.config.delegate_reason = Some("no".into()));
            };
            one_group(); // The watch's descriptors stay open after the first group.
            let before = open_descriptors();
            (0..10).for_each(|_| one_group());
            assert_eq!(open_descriptors(), before);
            watch::stop();
        }
        "known_peers" => known_peers(&store, rank, size),
        "denied" => {
            deny_new_calls();
            let report = sagellm::os::topology::report();
            for name in ["memfd", "pidfd", "SO_PEERPIDFD"] {
                let told = report.iter().any(|(found, value)| found == name && value.starts_with("not available: "));
                assert!(told, "{report:?}");
            }
            let mut met: Vec<Met> = run(&Memory::default(), 3, |_| ()).into_iter().map(shared).collect();
            assert_one_memory(&met);
            assert_eq!(met[1].segment.backing(), Backing::Unsealed);
            assert!(!own_descriptors().iter().any(|(_, name)| name.contains("pidfd")));
            let (_guard, told) = deaths(&met[0]);
            drop(met.pop());
            let (rank, reason, _) = told.recv_timeout(GENEROUS).unwrap();
            assert_eq!((rank, reason), (2, "its connection closed"));
        }
        other => panic!("no role {other}"),
    }
}

/// One of three processes that create many groups of the same three processes.
fn known_peers(files: &Files, rank: usize, size: usize) {
    let group = |name: &str, rank: usize, size: usize| {
        let store = Files(files.0.join(name));
        fs::create_dir_all(&store.0).unwrap();
        shared(meet(&config(rank, size, GENEROUS), &store, &Quiet, &bytes(size)))
    };
    let first = group("first", rank, size);
    let id = first.group_peers.id();
    let before = open_descriptors();
    // First, groups with the same processes in every rotation of the ranks. Then two groups at a time, from two threads
    // that start with different groups.
    let mut groups: Vec<Met> = Vec::new();
    for turn in 0..20 {
        let member = (rank + turn) % size;
        let met = group(&format!("turned-{turn}"), member, size);
        assert_eq!(met.group_peers.peer(member).pid, std::process::id() as i32);
        let places: Vec<usize> = (0..size).map(|other| (other + size - turn % size) % size).collect();
        assert_eq!(met.group_peers.places(), places);
        groups.push(met);
    }
    for turn in 0..10 {
        let make = |name: &str| {
            if (rank == 0) == (name == "a") {
                std::thread::sleep(Duration::from_millis(3));
            }
            group(&format!("{name}-{turn}"), rank, size)
        };
        let both = std::thread::scope(|scope| {
            ["a", "b"].map(|name| scope.spawn(move || make(name))).map(|t| t.join().unwrap())
        });
        groups.extend(both);
    }
    // A group of two of the three processes, whose rank 0 is not rank 0 of the first group.
    if rank > 0 {
        groups.push(group("part", size - 1 - rank, size - 1));
    }
    assert!(groups.iter().all(|met| met.group_peers.id() == id), "met anew");
    assert_eq!(open_descriptors(), before);
    // The first group ends. The known peers that it created stay, because later groups use them.
    drop(first);
    groups.push(group("later", rank, size));
    assert_eq!((groups.last().unwrap().group_peers.id(), open_descriptors()), (id, before));
    // Rank 1 leaves all its groups and therefore has no known peers any more. So the next group must not use known
    // peers that only the other ranks have.
    if rank == 1 {
        groups.clear();
        assert!(open_descriptors() < before);
    }
    let anew = group("anew", rank, size);
    assert_ne!(anew.group_peers.id(), id);
    // If the processes have several sets of known peers in common, the group uses the oldest set.
    let again = group("again", rank, size);
    assert_eq!(again.group_peers.id(), anew.group_peers.id());
    // No process exits before all are done, because its exit would be reported as the death of a known peer.
    let done = |other: usize| files.0.join(format!("done-{other}"));
    fs::write(done(rank), "").unwrap();
    let began = Instant::now();
    while !(0..size).all(|other| done(other).exists()) && began.elapsed() < GENEROUS {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn rule_25_further_groups_of_the_same_processes_cost_no_descriptor() {
    let store = Files::new();
    let ranks: Vec<Killed> = (0..3).map(|rank| Killed(process("known_peers", &store.0, rank, 3))).collect();
    for (rank, mut process) in ranks.into_iter().enumerate() {
        assert!(process.0.wait().unwrap().success(), "rank {rank} says why above");
    }
    fs::remove_dir_all(&store.0).unwrap();
}

/// Makes the kernel refuse memfds and pidfds to this thread and to all threads that it starts, as in some containers.
fn deny_new_calls() {
    let instruction = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |offset: u32| instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0);
    let equal = |value: u32, jt: u8, jf: u8| instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, jt, jf);
    let answer = |action: u32| instruction(libc::BPF_RET | libc::BPF_K, action, 0, 0);
    // Offsets in struct seccomp_data: the number of the system call at 0, its third argument at 32.
    let mut filter = [
        load(0),
        equal(libc::SYS_memfd_create as u32, 5, 0),
        equal(libc::SYS_pidfd_open as u32, 4, 0),
        equal(libc::SYS_getsockopt as u32, 0, 2),
        load(32),
        equal(77, 1, 0), // SO_PEERPIDFD
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program outlives the call, which copies it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
    }
}

#[test]
fn rule_26_ranks_meet_where_the_kernel_denies_memfd_and_pidfd() {
    let store = Files::new();
    assert!(process("denied", &store.0, 0, 1).wait().unwrap().success());
    fs::remove_dir_all(&store.0).unwrap();
}

/// A child process that is killed on drop, so that a failing test leaves no process behind.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn deaths(met: &Met) -> (Following, Receiver<(usize, &'static str, Instant)>) {
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    // The receiver is gone when the test has ended, so a failed `send` is ignored.
    let following = met.group_peers.follow(move |rank, reason| {
        let _ = tell.lock().unwrap().send((rank, reason, Instant::now()));
    });
    (following, told)
}

fn await_word(met: &Met, size: usize, rank: usize) -> u32 {
    let began = Instant::now();
    while began.elapsed() < GENEROUS {
        match word(met, size, rank).load(Ordering::Relaxed) {
            0 => std::thread::sleep(Duration::from_millis(1)),
            value => return value,
        }
    }
    panic!("rank {rank} never wrote its word");
}

#[test]
fn processes_meet_and_a_killed_one_is_told_of() {
    let store = Files::new();
    for killed in [1, 2] {
        let mut others: Vec<Killed> = (1..3).map(|rank| Killed(process("sleep", &store.0, rank, 3))).collect();
        let met = shared(meet(&config(0, 3, GENEROUS), &store, &Quiet, &bytes(3)));
        for rank in 1..3 {
            assert_eq!(await_word(&met, 3, rank), others[rank - 1].0.id());
            assert_eq!(met.group_peers.peer(rank).pid as u32, others[rank - 1].0.id());
            assert_eq!(
                watch::process_state(met.group_peers.peer(rank).pid).map(|state| "RSD".contains(state)),
                Some(true)
            );
        }
        let (_guard, told) = deaths(&met);
        let began = Instant::now();
        others[killed - 1].0.kill().unwrap();
        let (rank, reason, when) = told.recv_timeout(GENEROUS).unwrap();
        eprintln!("rank {rank} was reported {:?} after kill", when - began);
        assert_eq!((rank, reason), (killed, "its process ended"));
        // Takes less than a second on an idle machine.
        assert!(when - began < Duration::from_secs(4), "{:?}", when - began);
        // Each death is reported once, and the living rank is not reported.
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err());
    }
    fs::remove_dir_all(&store.0).unwrap();
}

#[test]
fn every_rank_learns_of_every_death_not_only_rank_zero() {
    let store = Files::new();
    // This process is rank 1. It has no connection to rank 2; rank 0 sent it the descriptor that reports rank 2's end.
    let mut others: Vec<Killed> = [0, 2].map(|rank| Killed(process("sleep", &store.0, rank, 3))).into_iter().collect();
    let met = shared(meet(&config(1, 3, GENEROUS), &store, &Quiet, &bytes(3)));
    assert_eq!(await_word(&met, 3, 2) as i32, met.group_peers.peer(2).pid);
    let (_guard, told) = deaths(&met);
    for (index, rank) in [(1, 2), (0, 0)] {
        others[index].0.kill().unwrap();
        let (found, reason, _) = told.recv_timeout(GENEROUS).unwrap();
        assert_eq!((found, reason), (rank, "its process ended"));
    }
    fs::remove_dir_all(&store.0).unwrap();
}

#[test]
fn a_rank_that_leaves_but_lives_is_told_of_by_its_connection() {
    let store = Files::new();
    let _other = Killed(process("leave", &store.0, 1, 2));
    let met = shared(meet(&config(0, 2, GENEROUS), &store, &Quiet, &bytes(2)));
    let (_guard, told) = deaths(&met);
    let (rank, reason, _) = told.recv_timeout(GENEROUS).unwrap();
    assert_eq!((rank, reason), (1, "its connection closed"));
    fs::remove_dir_all(&store.0).unwrap();
}

#[test]
fn ranks_in_different_pid_namespaces_meet_and_watch_each_other() {
    let starter = ["unshare", "--pid", "--fork", "--kill-child"];
    let permitted = Command::new(starter[0]).args(&starter[1..]).arg("true").stderr(Stdio::null()).status();
    if !permitted.is_ok_and(|status| status.success()) {
        eprintln!("skipped: this user may not make a pid namespace");
        return;
    }
    for own in [0, 1] {
        let store = Files::new();
        let mut other = Killed(process_under(&starter, "sleep", &store.0, 1 - own, 2));
        let met = shared(meet(&config(own, 2, GENEROUS), &store, &Quiet, &bytes(2)));
        // The peer's pid in its namespace differs from its pid in the namespace of this process.
        assert_ne!(met.group_peers.peer(1 - own).pid as u32, await_word(&met, 2, 1 - own));
        assert_eq!(
            watch::process_state(met.group_peers.peer(1 - own).pid).map(|state| "RSD".contains(state)),
            Some(true)
        );
        let (_guard, told) = deaths(&met);
        other.0.kill().unwrap();
        let (rank, reason, _) = told.recv_timeout(GENEROUS).unwrap();
        assert_eq!((rank, reason), (1 - own, "its process ended"));
        fs::remove_dir_all(&store.0).unwrap();
    }
}

const IMPATIENT: Duration = Duration::from_millis(1500);

fn signal(child: &Killed, signal: i32) {
    // SAFETY: passes no pointers. The child has not been waited for, so its number belongs to no other process.
    assert_eq!(unsafe { libc::kill(child.0.id() as i32, signal) }, 0);
}

#[test]
fn rule_22_time_spent_stopped_does_not_count() {
    let first = Instant::now();
    let (store, other) = loop {
        let (store, began) = (Files::new(), Instant::now());
        let other = Killed(process("impatient", &store.0, 1, 2));
        until("the record of rank 1", || store.try_get("r/1").unwrap().is_some());
        signal(&other, libc::SIGSTOP);
        // If the machine is busy, rank 1 may have used up its time before it was stopped. Then the test starts again.
        if began.elapsed() < IMPATIENT / 2 || first.elapsed() > GENEROUS {
            break (store, other);
        }
        fs::remove_dir_all(&store.0).unwrap();
    };
    std::thread::sleep(IMPATIENT + Duration::from_millis(500));
    let met = std::thread::scope(|scope| {
        let zero = scope.spawn(|| shared(meet(&config(0, 2, GENEROUS), &store, &Quiet, &bytes(2))));
        // Once rank 1 continues, its time counts again. So it continues only when nothing is left but to read the
        // decision.
        until("the decision", || store.try_get("verdict").unwrap().is_some());
        signal(&other, libc::SIGCONT);
        zero.join().unwrap()
    });
    assert_eq!(await_word(&met, 2, 1), other.0.id());
    fs::remove_dir_all(&store.0).unwrap();
}

#[test]
fn a_stopped_process_is_seen_as_stopped() {
    let child = Killed(Command::new("sleep").arg("30").spawn().unwrap());
    let pid = child.0.id() as i32;
    signal(&child, libc::SIGSTOP);
    until("a stopped process", || watch::process_state(pid) == Some('T'));
    assert_eq!(watch::process_state(0), None);
}

#[test]
fn meeting_and_watching_leak_no_descriptor() {
    let store = Files::new();
    assert!(process("descriptors", &store.0, 0, 1).wait().unwrap().success());
    fs::remove_dir_all(&store.0).unwrap();
}

#[test]
fn nothing_is_inherited_by_programs_that_are_started() {
    let store = Files::new();
    // Runs in a child, because in this process a third-party library (UCX) may open sockets meanwhile.
    assert!(process("inherited", &store.0, 0, 1).wait().unwrap().success());
    fs::remove_dir_all(&store.0).unwrap();
}

// -------------------------------------------------------------------------------------------------------- watch

fn connection(rank: usize) -> (UnixStream, End) {
    let (far, near) = UnixStream::pair().unwrap();
    (far, End { rank, fd: near.into(), source: Source::Connection })
}

#[test]
fn after_its_guard_is_dropped_a_callback_does_not_run() {
    for _ in 0..200 {
        let alive = Arc::new(AtomicBool::new(true));
        let (far, end) = connection(3);
        let guard = {
            let alive = Arc::clone(&alive);
            watch::watch(vec![end], move |_, _| assert!(alive.load(Ordering::SeqCst))).unwrap()
        };
        drop(far);
        std::thread::sleep(Duration::from_micros(50));
        drop(guard);
        // After the guard is dropped, the callback must not run and must not still be running.
        alive.store(false, Ordering::SeqCst);
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}

#[test]
fn a_guard_may_be_dropped_by_its_own_callback_and_a_panic_harms_no_other() {
    let place: Arc<Mutex<Option<watch::WatchGuard>>> = Arc::default();
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let (far, end) = connection(1);
    let guard = {
        let place = Arc::clone(&place);
        watch::watch(vec![end], move |rank, _| {
            let guard = place.lock().unwrap().take();
            drop(guard);
            tell.lock().unwrap().send(rank).unwrap();
            panic!("a callback that panics, on purpose");
        })
    };
    *place.lock().unwrap() = Some(guard.unwrap());
    drop(far);
    assert_eq!(told.recv_timeout(GENEROUS).unwrap(), 1);
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let (far, end) = connection(2);
    let _guard = watch::watch(vec![end], move |rank, reason| tell.lock().unwrap().send((rank, reason)).unwrap());
    drop(far);
    assert_eq!(told.recv_timeout(GENEROUS).unwrap(), (2, "its connection closed"));
}

#[test]
fn rule_26_a_forked_child_knows_that_it_is_one() {
    let (_far, end) = connection(1);
    let guard = watch::watch(vec![end], |_, _| ()).unwrap();
    let here = watch::generation();
    let _alive = watch::Alive::default(); // a group lives
    assert!(!watch::orphaned());
    // SAFETY: the child only reads atomics, drops a guard whose drop does nothing in a child, and exits without
    // unwinding.
    let status = unsafe {
        let child = libc::fork();
        if child == 0 {
            let known = watch::orphaned() && watch::generation() == here + 1;
            drop(guard);
            libc::_exit(if known { 7 } else { 8 });
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        status
    };
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7));
    assert_eq!(watch::generation(), here);
}

// ------------------------------------------------------------------------------------------------------ records

fn identity() -> impl Strategy<Value = Identity> {
    (any::<(String, u32, u64, u64, String)>(), any::<Vec<u64>>(), any::<Option<u32>>(), any::<Option<u32>>()).prop_map(
        |((boot_id, uid, netns, pidns, hostname), affinity, quota, headroom)| Identity {
            node: quota.map(|quota| quota / 2),
            cache: headroom.map(|headroom| headroom / 2),
            boot_id: cleaned(&boot_id, &[]),
            uid,
            netns,
            pidns,
            hostname: cleaned(&hostname, &[]),
            affinity,
            quota_millicores: quota.map(u64::from),
            headroom: headroom.map(u64::from),
        },
    )
}

/// Reads the bytes as each kind of message. Any process that can reach the store may have written them.
fn read_all(bytes: &[u8]) {
    let mut texts = Vec::new();
    if let Some(Record { version, body, .. }) = Record::read(bytes) {
        texts.push(version);
        if let Some(Body { identity, wish, delegate, addresses, .. }) = body {
            texts.extend([identity.boot_id, identity.hostname, wish, delegate, addresses.problem]);
            texts.extend(addresses.ways.into_iter().flat_map(|(_, places)| places));
        }
    }
    texts.extend(DecisionMessage::read(bytes).map(|decision| decision.text));
    texts.extend(Answer::read(bytes).and_then(|answer| answer.reason).map(|reason| reason.text().to_string()));
    texts.extend(Offer::read(bytes).into_iter().flat_map(|offer| offer.ranks).map(|(_, host)| host));
    let _ = Hello::read(bytes);
    assert!(texts.iter().all(|text| !text.contains(char::is_control)), "{texts:?}");
}

const MAGICS: [&[u8]; 6] = [b"", b"sgllmREC", b"sgllmVRD", b"sgllmANS", b"sgllmHLO", b"sgllmOFR"];

proptest! {
    #[test]
    fn reading_garbage_never_panics(magic in 0..6usize, rest in any::<Vec<u8>>()) {
        read_all(&[MAGICS[magic], &rest].concat());
    }

    #[test]
    fn what_is_written_is_read_back(identity in identity(), nonce in any::<[u8; 16]>(), size in any::<u32>(), wish in any::<String>(), cut in any::<prop::sample::Index>()) {
        let wish = cleaned(&wish, &[]);
        let record = Record { nonce, protocol: PROTOCOL, version: "0.1".into(), body: Some(Body { size, identity, delegate: wish.clone(), wish, known: vec![(nonce, 3), ([1; 16], size)], mailbox: nonce.to_vec(), addresses: Addresses::parse("4 10.0.0.1 10.1.0.1\n14 127.0.0.1").unwrap(), threads: Threads { most: 5, named: true } }) };
        let bytes = record.write();
        prop_assert_eq!(Record::read(&bytes), Some(record));
        // Every shorter prefix is refused.
        prop_assert_eq!(Record::read(&bytes[..cut.index(bytes.len())]), None);
    }

    #[test]
    fn damaged_messages_are_read_without_panic(id in any::<[u8; 16]>(), ranks in 1..9usize, at in any::<prop::sample::Index>(), value in any::<u8>()) {
        let decision = DecisionMessage { id, nonces: vec![id; ranks], mode: Mode::Share, text: "t".into(), detail: b"name".into(), policy: "p\nq".into(), known: (id, vec![2, 0, 1]), network: Some(Network { way: Way::V6, places: 2 }) };
        let offer = Offer {
            id, part: 0, parts: 1, segment_len: 1 << 20, backing: Backing::Sealed, local_cores: 2, threads: 7, nodes: vec![0, 1], level: Level::Cache, pidns: 4,
            ranks: vec![(1, "host".into()); ranks], process_of: vec![1, 2],
        };
        let hello = Hello { id, nonce: id, rank: 3 };
        let answer = Answer { id, reason: Some(Reason::OpenFiles("because".into())) };
        let hostile = Answer { id, reason: Some(Reason::Other("\u{1b}[2J\n\u{7}".into())) };
        prop_assert_eq!(Answer::read(&hostile.write()).unwrap().reason, Some(Reason::Other("?[2J ?".into())));
        prop_assert_eq!(DecisionMessage::read(&decision.write()), Some(decision.clone()));
        prop_assert_eq!(Offer::read(&offer.write()), Some(offer.clone()));
        prop_assert_eq!(Hello::read(&hello.write()), Some(hello.clone()));
        prop_assert_eq!(Answer::read(&answer.write()), Some(answer.clone()));
        for mut bytes in [decision.write(), offer.write(), hello.write(), answer.write()] {
            let at = at.index(bytes.len());
            bytes[at] = value;
            read_all(&bytes);
            bytes.truncate(at);
            read_all(&bytes);
        }
    }

    #[test]
    fn another_protocol_is_known_by_its_version_only(protocol in 2..u32::MAX, rest in any::<Vec<u8>>()) {
        let head = Record { nonce: [3; 16], protocol, version: "9.9".into(), body: None };
        let found = Record::read(&[head.write(), rest].concat());
        prop_assert_eq!(found, Some(head));
    }
}
