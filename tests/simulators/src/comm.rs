//! One communicator: a group of the project's engine, and the order in which its operations run.
//!
//! The operations of a communicator run one after the other, in the order in which they were issued, whatever their
//! streams are. Each runs on the thread of its stream. If one fails, the communicator has an asynchronous error. What
//! then happens on the stream differs. Under NCCL and CNCL the operation hangs until the communicator is aborted. HCCL
//! has no abort, so the stream has an error. Nothing hangs for longer than the simulators' own limit.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use sagellm::config::{Config, Settings};
use sagellm::error::{Error, ErrorKind, Result};
use sagellm::group::{Group, Host};
use sagellm::types::{Kind, Request};

use crate::bootstrap::{NAME, Name, Place, server};
use crate::call::{Call, Running, span};
use crate::device::Runtime;
use crate::settings;
use crate::trace;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Vendor {
    Nccl = 0,
    Hccl = 1,
    Cncl = 2,
}

impl Vendor {
    pub fn runtime(self) -> Runtime {
        match self {
            Vendor::Nccl => Runtime::Cuda,
            Vendor::Hccl => Runtime::Acl,
            Vendor::Cncl => Runtime::Cnrt,
        }
    }

    fn can_abort(self) -> bool {
        self != Vendor::Hccl
    }
}

/// Why operations fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Fault {
    None = 0,
    /// A peer died, left or aborted.
    Remote = 1,
    Aborted = 2,
    /// `SAGELLM_SIM_ERROR_AT` has requested it.
    Injected = 3,
    Timeout = 4,
    /// Ranks called different operations.
    Mismatch = 5,
    /// The simulator itself failed.
    System = 6,
}

impl Fault {
    fn from_u8(number: u8) -> Fault {
        use Fault::*;
        [None, Remote, Aborted, Injected, Timeout, Mismatch, System][usize::from(number.min(6))]
    }

    pub fn of(error: &Error) -> Fault {
        match error.kind() {
            ErrorKind::RankFailed | ErrorKind::Aborted | ErrorKind::Interrupted => Fault::Remote,
            ErrorKind::Timeout => Fault::Timeout,
            ErrorKind::Mismatch => Fault::Mismatch,
            _ => Fault::System,
        }
    }
}

/// The record that each rank sends to the others when they meet.
#[derive(Clone, Copy)]
pub struct Peer {
    pub server: Name,
    pub physical: u64,
}

enum Setup {
    Running,
    Ready(Arc<Group>, Vec<Peer>),
    Failed(Error),
}

#[derive(Default)]
struct Turns {
    issued: u64,
    next: u64,
}

pub struct Comm {
    pub vendor: Vendor,
    pub rank: u32,
    pub size: u32,
    pub device: i32,
    pub place: Place,
    pub name: String,
    pub blocking: bool,
    setup: Mutex<Setup>,
    turns: Mutex<Turns>,
    turned: Condvar,
    /// A `Fault`; the first one stays. Written by streams, by an abort, and by the background launch of calls that do
    /// not block (release); read by any thread (acquire).
    fault: AtomicU8,
    aborted: AtomicBool,
    /// Number of operations and exchanges that were issued and have not ended. Callers increment it; `pass_turn`
    /// decrements it, mostly on the thread of a stream.
    running: AtomicUsize,
    /// Number of calls that were reported to the caller as in progress.
    pub in_progress: AtomicUsize,
    /// Numbers of communicators made from this one, by splits and by shrinks. The two are counted separately, because
    /// not all ranks take part in a shrink.
    children: [AtomicUsize; 2],
    collectives: AtomicU64,
    /// Keys of the connections that are made (module `connect`).
    pub connected: Mutex<HashSet<String>>,
    /// Factors of reductions, by NCCL's number of the reduction.
    pub factors: Mutex<HashMap<i32, crate::nccl::Factor>>,
    /// Sessions of plug-ins.
    pub plugins: Mutex<Option<Arc<crate::nccl::plugins::Sessions>>>,
}

/// Interval at which a wait checks for an abort.
const LOOK: Duration = Duration::from_millis(5);

struct Interrupt(Weak<Comm>);

impl Host for Interrupt {
    fn interrupted(&self) -> bool {
        self.0.upgrade().is_none_or(|comm| comm.is_aborted())
    }
}

impl Comm {
    pub fn new(
        vendor: Vendor,
        place: Place,
        (size, rank): (u32, u32),
        device: i32,
        name: &str,
        blocking: bool,
    ) -> Comm {
        let name = if name.is_empty() { format!("sim_{:016x}", place.number()) } else { name.to_string() };
        Comm {
            vendor,
            rank,
            size,
            device,
            place,
            name,
            blocking,
            setup: Mutex::new(Setup::Running),
            turns: Mutex::default(),
            turned: Condvar::new(),
            fault: AtomicU8::new(Fault::None as u8),
            aborted: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            in_progress: AtomicUsize::new(0),
            children: Default::default(),
            collectives: AtomicU64::new(0),
            connected: Mutex::default(),
            factors: Mutex::default(),
            plugins: Mutex::default(),
        }
    }

    /// Meets the other ranks; waits for them for at most `patience`.
    pub fn set_up(self: &Arc<Comm>, patience: Duration) -> Result<()> {
        let outcome = self.meet(patience.min(settings::get().ceiling));
        let mut setup = self.setup.lock().unwrap();
        match outcome {
            Ok((group, peers)) => {
                *setup = Setup::Ready(group, peers);
                Ok(())
            }
            Err(error) => {
                trace::refuse(error.text());
                *setup = Setup::Failed(error.clone());
                Err(error)
            }
        }
    }

    fn meet(self: &Arc<Comm>, patience: Duration) -> Result<(Arc<Group>, Vec<Peer>)> {
        if settings::get().init_hangs {
            self.hang(patience);
            return Err(Error::timeout("simulator: the set-up hangs, as SAGELLM_SIM_INIT asks for"));
        }
        if settings::get().init_refused {
            return Err(Error::system("simulator: the set-up is refused, as SAGELLM_SIM_INIT asks for"));
        }
        let config = Config {
            rank: self.rank as usize,
            size: self.size as usize,
            timeout: patience,
            name: self.name.clone(),
            delegate_reason: None,
            delegate: String::new(),
            algorithm: String::new(),
            topology: String::new(),
            addresses: String::new(),
            policy: String::new(),
            settings: Settings::default(),
            threads: Default::default(),
            soft_timeout: None,
        };
        let host = Arc::new(Interrupt(Arc::downgrade(self)));
        let group = Group::connect(config, &self.place.connect()?, host)?;
        if let Some(reason) = group.delegate_reason() {
            return Err(Error::system(format!("simulator: the ranks do not share memory: {reason}")));
        }
        let physical = self.vendor.runtime().physical(self.device);
        let own = [&server().map_err(Error::system)?[..], &physical.to_le_bytes()].concat();
        let peers = exchange(&group, self.size, &own)?
            .iter()
            .map(|peer| Peer {
                server: peer[..NAME].try_into().expect("as long as what was sent"),
                physical: u64::from_le_bytes(peer[NAME..].try_into().expect("as long as what was sent")),
            })
            .collect();
        let limit = match self.vendor {
            Vendor::Hccl => settings::get().hccl_exec.min(settings::get().ceiling),
            _ => settings::get().ceiling,
        };
        group.set_timeout(limit);
        Ok((group, peers))
    }

    /// True if the other ranks were met; an error if that failed.
    pub fn ready(&self) -> Result<bool> {
        match &*self.setup.lock().unwrap() {
            Setup::Running => Ok(false),
            Setup::Ready(..) => Ok(true),
            Setup::Failed(error) => Err(error.clone()),
        }
    }

    fn group(&self) -> Result<Arc<Group>> {
        match &*self.setup.lock().unwrap() {
            Setup::Ready(group, _) => Ok(Arc::clone(group)),
            Setup::Failed(error) => Err(error.clone()),
            Setup::Running => Err(Error::invalid("simulator: the communicator is not set up yet")),
        }
    }

    pub fn peers(&self) -> Vec<Peer> {
        match &*self.setup.lock().unwrap() {
            Setup::Ready(_, peers) => peers.clone(),
            _ => Vec::new(),
        }
    }

    /// The next number of a collective, for plug-ins.
    pub fn next_number(&self) -> u64 {
        self.collectives.fetch_add(1, Ordering::Relaxed)
    }

    /// The next number of a child made by a split or, if `shrinks`, by a shrink. Every rank that takes part calls this
    /// equally often.
    pub fn next_child(&self, shrinks: bool) -> usize {
        self.children[usize::from(shrinks)].fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the place at which the ranks `members` of this communicator meet to make a child; `what` names the
    /// child.
    pub fn child_place(&self, members: &[u32], what: &str) -> Option<Place> {
        let leader = self.peers().get(*members.first()? as usize)?.server;
        Some(self.place.derive(leader, format!("{what} {members:?}").as_bytes()))
    }

    /// Exchanges a value of every rank, and returns the values by rank. This is a host call, which waits for its turn.
    pub fn exchange(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let ticket = self.ticket();
        let outcome = match self.wait_turn(ticket) {
            Fault::None => self.group().and_then(|group| exchange(&group, self.size, own)),
            fault => Err(Error::aborted(format!("simulator: the communicator has failed ({fault:?})"))),
        };
        self.pass_turn(ticket);
        outcome
    }

    pub fn fault(&self) -> Fault {
        Fault::from_u8(self.fault.load(Ordering::Acquire))
    }

    pub fn fail(&self, fault: Fault) {
        let _ = self.fault.compare_exchange(0, fault as u8, Ordering::AcqRel, Ordering::Acquire);
    }

    pub fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }

    pub fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Ends the operations that run and those that were issued, without results.
    pub fn abort(&self) {
        std::thread::sleep(settings::get().abort_takes);
        self.aborted.store(true, Ordering::Release);
        self.fail(Fault::Aborted);
        if let Ok(group) = self.group() {
            group.abort("the vendor's abort was called");
            group.shutdown();
        }
        self.turned.notify_all();
        // A running operation sees the abort within `LOOK`. One that waits behind other work of its stream ends when
        // its turn comes.
        let deadline = Instant::now() + 20 * LOOK;
        while self.running() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns true when nothing runs, or false if that takes longer than the limit.
    pub fn drain(&self) -> bool {
        let deadline = Instant::now() + settings::get().ceiling;
        while self.running() > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        true
    }

    /// Leaves the group in order, so that peers still receive what was published.
    pub fn close(&self) {
        if let Ok(group) = self.group() {
            group.shutdown();
        }
    }

    /// Takes the next number in the order of this communicator's operations.
    pub fn ticket(&self) -> u64 {
        self.running.fetch_add(1, Ordering::AcqRel);
        let mut turns = self.turns.lock().unwrap();
        turns.issued += 1;
        turns.issued - 1
    }

    fn wait_turn(&self, ticket: u64) -> Fault {
        let deadline = Instant::now() + 2 * settings::get().ceiling;
        let mut turns = self.turns.lock().unwrap();
        while turns.next != ticket {
            if self.is_aborted() {
                return Fault::Aborted;
            }
            if Instant::now() > deadline {
                return Fault::Timeout;
            }
            turns = self.turned.wait_timeout(turns, LOOK).unwrap().0;
        }
        if self.is_aborted() { Fault::Aborted } else { self.fault() }
    }

    fn pass_turn(&self, ticket: u64) {
        let mut turns = self.turns.lock().unwrap();
        turns.next = turns.next.max(ticket + 1);
        drop(turns);
        self.turned.notify_all();
        self.running.fetch_sub(1, Ordering::AcqRel);
    }

    /// Waits until the communicator is aborted, or until the limit.
    fn hang(&self, limit: Duration) -> Fault {
        let deadline = Instant::now() + limit;
        while !self.is_aborted() {
            if Instant::now() >= deadline {
                return Fault::Timeout;
            }
            std::thread::sleep(LOOK);
        }
        Fault::Aborted
    }

    /// Runs calls together when their turn comes. Called on a stream's thread.
    pub fn perform(&self, ticket: u64, calls: &[Call]) -> Fault {
        let mut fault = self.wait_turn(ticket);
        if fault == Fault::None {
            std::thread::sleep(settings::get().slow);
            fault = self.inject(calls.len());
        }
        if fault == Fault::None
            && let Err(error) = self.group().and_then(|group| self.run(&group, calls))
        {
            trace::call(|| format!("failed {} rank={} {error}", self.name, self.rank));
            let passes = settings::get().peer_abort_passes && error.kind() == ErrorKind::Aborted;
            fault = match self.is_aborted() {
                true => Fault::Aborted,
                false if passes => Fault::None,
                false => Fault::of(&error),
            };
        }
        if fault != Fault::None {
            self.fail(fault);
            // Hangs until the communicator is aborted or the limit passes. After a timeout the limit has already
            // passed.
            if self.vendor.can_abort() && !matches!(fault, Fault::Aborted | Fault::Timeout) {
                self.hang(settings::get().ceiling);
            }
        }
        self.pass_turn(ticket);
        fault
    }

    /// Counts `calls` more operations of this process. Returns the fault that a setting requests for one of them.
    fn inject(&self, calls: usize) -> Fault {
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let first = DONE.fetch_add(calls, Ordering::Relaxed) + 1;
        let asked = |at: usize| (first..first + calls).contains(&at);
        let settings = settings::get();
        if asked(settings.error_at) {
            return Fault::Injected;
        }
        if asked(settings.hang_at) {
            return self.hang(match self.vendor {
                Vendor::Hccl => settings.hccl_exec.min(settings.ceiling),
                _ => settings.ceiling,
            });
        }
        Fault::None
    }

    fn run(&self, group: &Group, calls: &[Call]) -> Result<()> {
        let mut running: Vec<Running> = calls.iter().map(Running::new).collect();
        pair_own_messages(&mut running, self.rank)?;
        let mut outcome = Ok(());
        for call in running.iter_mut().filter(|call| !call.is_own(self.rank)) {
            outcome = call.issue(group);
            if outcome.is_err() {
                group.abort("an operation could not be issued");
                break;
            }
        }
        // After this loop each operation has ended, with or without an error, so none uses its memory any more.
        for op in running.iter().flat_map(Running::ops) {
            let ended = loop {
                match op.wait(Some(LOOK)) {
                    Err(error) if error.is_elapsed_wait() && !self.is_aborted() => (),
                    Err(error)
                        if (error.is_elapsed_wait() || error.kind() == ErrorKind::Interrupted) && !op.is_done() =>
                    {
                        group.abort("the vendor's abort was called");
                    }
                    ended => break ended,
                }
            };
            outcome = outcome.and(ended);
        }
        outcome?;
        running.iter().for_each(Running::store);
        Ok(())
    }
}

/// Carries messages of a rank to itself, which the engine does not carry: sends and receives of one batch, in their
/// order.
fn pair_own_messages(running: &mut [Running], me: u32) -> Result<()> {
    let own = |kind: Kind, list: &[Running]| -> Vec<usize> {
        (0..list.len()).filter(|at| list[*at].is_own(me) && list[*at].kind() == kind).collect()
    };
    let (sends, receives) = (own(Kind::Send, running), own(Kind::Recv, running));
    if sends.len() != receives.len() {
        return Err(Error::mismatch("simulator: a rank sends to itself what it does not receive"));
    }
    for (send, receive) in sends.into_iter().zip(receives) {
        let data = running[send].input().to_vec();
        running[receive].take(&data);
    }
    Ok(())
}

fn exchange(group: &Group, ranks: u32, own: &[u8]) -> Result<Vec<Vec<u8>>> {
    let (mut input, mut all) = (own.to_vec(), vec![0; own.len() * ranks as usize]);
    let spans = [span(input.as_mut_ptr() as usize, input.len()), span(all.as_mut_ptr() as usize, all.len())];
    let [inputs, outputs] = spans;
    // SAFETY: both vectors live until `run` has returned.
    let request = unsafe { Request::new(Kind::AllGather, inputs, outputs) };
    group.run(request, None)?;
    Ok(all.chunks(own.len()).map(<[u8]>::to_vec).collect())
}
