//! The interface to every vendor's library: [`Api`] for an open library, [`Communicator`] for one rank on one device,
//! [`Call`] for an operation. All calls only put work on a stream; none waits for a device.

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use super::lowering::Capabilities;
use super::runtime::{Runtime, Stream};
use crate::error::{Error, Result};
use crate::os::watch;
use crate::select::Policy;
use crate::types::{Dtype, Kind, ReduceOp};

/// An open vendor library.
pub trait Api: Send + Sync {
    fn capabilities(&self) -> &Capabilities;
    /// "NCCL 2.30.7 (/path/libnccl.so.2)"
    fn describe(&self) -> String;
    /// The id that rank 0 makes and all ranks need, `capabilities().id_bytes` long. Never of another length. The thread
    /// has chosen its device (`Runtime::set_device`): HCCL puts the device's address into the id.
    fn unique_id(&self) -> Result<Vec<u8>>;
    /// Joins the communicator of `setup.id`: returns when all its ranks have called, or at the deadline.
    fn create(self: Arc<Self>, setup: Setup) -> Result<Arc<dyn Communicator>>;
    /// A result code of the library in words.
    fn describe_error(&self, code: i32) -> String;

    // How a library learns the group's rules for algorithms, and how we learn which algorithm it chose. The default
    // implementations serve a library that takes no rules and reports no choice.

    /// The value of `Setup::algorithm`, where the policy names one algorithm for all operations of a communicator.
    fn algorithm(&self, _policy: &Policy) -> &'static str {
        ""
    }
    /// Lets the library ask the policy about each operation of the communicator of this name, as long as the returned
    /// object lives. Called before the communicator is made; no other communicator has its name.
    fn steer(&self, _name: &str, _policy: &Arc<Policy>) -> Option<Box<dyn Steering>> {
        None
    }
    /// Whether the library asks us for the algorithm that follows from a topology given by the user.
    fn takes_topologies(&self) -> bool {
        false
    }
    /// The algorithm that the library reported last for operations of this kind and about this size, in communicators
    /// of that name.
    fn ran(&self, _name: &str, _kind: Kind, _bytes: u64) -> Option<String> {
        None
    }
}

/// A communicator whose algorithms the library asks us for.
pub trait Steering: Send + Sync {
    /// Called when the communicator was made: why the library does not ask us, although it should.
    fn problem(&self) -> Option<String>;
}

/// Called repeatedly by a thread that waits for a library; an error of it ends the wait with that error. So a signal,
/// or the failure of the group, ends a wait long before its deadline.
pub type GoOn = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// The `GoOn` of waits that only their deadline ends.
pub fn always() -> Result<()> {
    Ok(())
}

/// The arguments with which one rank joins a communicator.
#[derive(Clone)]
pub struct Setup {
    pub id: Vec<u8>,
    pub rank: u32,
    pub ranks: u32,
    /// Number of the device in this process.
    pub device: i32,
    /// The time within which all ranks must come; also the limit of a call that blocks inside the library, where the
    /// library takes one.
    pub deadline: Duration,
    pub go_on: GoOn,
    /// For the library's own messages and tools; at most `NAME_BYTES` of it are used.
    pub name: String,
    /// Algorithm for every operation of this communicator, as the library spells it; "" lets the library choose.
    pub algorithm: String,
    /// Selects the device on a thread that we started.
    pub runtime: Arc<dyn Runtime>,
}

/// Longest name of a communicator.
pub const NAME_BYTES: usize = 127;

/// Which ranks of a communicator form a new one. All ranks of the old communicator make this call, whether or not they
/// are members of the new one, with equal values.
#[derive(Clone)]
pub struct Split {
    /// Ranks in the old communicator, in the order of their ranks in the new one.
    pub members: Vec<u32>,
    /// Different for each of the communicators that are made by one call; below 2^31.
    pub number: u32,
    pub deadline: Duration,
    /// The next three are as in `Setup`.
    pub go_on: GoOn,
    pub name: String,
    pub algorithm: String,
}

/// One rank's part in a group of ranks with one device each.
pub trait Communicator: Send + Sync {
    fn api(&self) -> Arc<dyn Api>;
    fn rank(&self) -> u32;
    fn ranks(&self) -> u32;
    fn device(&self) -> i32;
    /// Puts one call on the stream. The caller keeps the returned memory until the stream has passed the call.
    fn call(&self, call: &Call<'_>, stream: Stream) -> Result<Kept>;
    /// As `call`, with the factor of its PREMUL_SUM in memory of the device, in the type of the numbers, read when the
    /// stream comes to it. Only where the library has PREMUL_SUM by itself.
    fn call_by_factor(&self, call: &Call<'_>, _factor: usize, stream: Stream) -> Result<Kept> {
        self.call(call, stream)
    }
    /// Calls of this thread until `group_end` are one launch. Does nothing where the library has no groups
    /// (`Capabilities`).
    fn group_start(&self) -> Result<()>;
    fn group_end(&self) -> Result<()>;
    /// Whether `split` can make a communicator of these ranks.
    fn can_split(&self, members: &[u32]) -> bool;
    /// A communicator of some of the ranks; `None` for a rank that is no member. An error where the library cannot.
    fn split(&self, split: &Split) -> Result<Option<Arc<dyn Communicator>>>;
    /// A communicator without the ranks in `exclude`, which do not call; pending operations are aborted first.
    fn shrink(&self, exclude: &[u32], deadline: Duration, go_on: GoOn, name: &str) -> Result<Arc<dyn Communicator>>;
    /// An error of the network or the device since the communicator was made. Never waits.
    fn poll(&self) -> Result<()>;
    /// Ends it even while operations hang; these end, and their results are undefined. May be called by any thread,
    /// more than once.
    fn abort(&self) -> Result<()>;
    /// Ends it when its operations are done; all ranks call it. Where that lasts beyond the deadline, this returns and
    /// a background thread goes on waiting.
    fn close(&self, deadline: Duration) -> Result<()>;
}

/// Host memory that a call refers to.
pub type Kept = Option<Box<dyn Any + Send>>;

/// A message to or from one peer. Its bytes lie on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub peer: u32,
    pub sends: bool,
    pub addr: usize,
    pub bytes: usize,
}

/// One operation, in counts of elements of `dtype`. Addresses are of the communicator's device.
#[derive(Clone, Copy, Debug)]
pub enum Call<'a> {
    AllReduce {
        send: usize,
        recv: usize,
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
    },
    /// In place, from the root's to the others' memory.
    Broadcast {
        buffer: usize,
        count: usize,
        dtype: Dtype,
        root: u32,
    },
    /// Off the root `recv` is `send`.
    Reduce {
        send: usize,
        recv: usize,
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
        root: u32,
    },
    /// `count` is of one rank's block.
    AllGather {
        send: usize,
        recv: usize,
        count: usize,
        dtype: Dtype,
    },
    ReduceScatter {
        send: usize,
        recv: usize,
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
    },
    /// `recv` is read at the root only.
    Gather {
        send: usize,
        recv: usize,
        count: usize,
        dtype: Dtype,
        root: u32,
    },
    /// `send` is read at the root only.
    Scatter {
        send: usize,
        recv: usize,
        count: usize,
        dtype: Dtype,
        root: u32,
    },
    /// One count for each rank; blocks lie behind each other.
    AllToAllV {
        send: usize,
        recv: usize,
        send_counts: &'a [u64],
        recv_counts: &'a [u64],
        dtype: Dtype,
    },
    /// All messages are under way together; those from one rank to another match in the order of the list. A rank sends
    /// none to itself.
    Exchange(&'a [Message]),
    /// Inside the device, by its runtime.
    Copy {
        from: usize,
        to: usize,
        bytes: usize,
    },
}

impl Call<'_> {
    pub fn name(&self) -> &'static str {
        match self {
            Call::AllReduce { .. } => "all_reduce",
            Call::Broadcast { .. } => "broadcast",
            Call::Reduce { .. } => "reduce",
            Call::AllGather { .. } => "all_gather",
            Call::ReduceScatter { .. } => "reduce_scatter",
            Call::Gather { .. } => "gather",
            Call::Scatter { .. } => "scatter",
            Call::AllToAllV { .. } => "all_to_all",
            Call::Exchange(_) => "exchange",
            Call::Copy { .. } => "copy",
        }
    }
}

/// A text of a vendor library, which stays valid; empty for null.
#[allow(unsafe_code)] // reads what the library returned
pub(super) fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: vendor libraries return static texts that end in a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The words for joining in error texts.
pub(super) fn joining(able: &Capabilities, setup: &Setup) -> String {
    let Setup { rank, ranks, device, .. } = setup;
    format!("{}: to join as rank {rank} of {ranks} with device {device}", able.name)
}

pub(super) fn wrong_id(able: &Capabilities, setup: &Setup) -> Error {
    Error::bug(format!(
        "sagellm: {}: an id has {} bytes, and {} came; do all ranks use the same library?",
        able.name,
        able.id_bytes,
        setup.id.len()
    ))
}

pub(super) fn no_type(name: &str, dtype: Dtype) -> Error {
    Error::bug(format!("sagellm: {name} has no number for {}, which the recipe should have known", dtype.name()))
}

pub(super) fn no_op(name: &str, op: ReduceOp) -> Error {
    let op = ReduceOp::name_of(op.code());
    Error::bug(format!("sagellm: {name} has no number for {op}, which the recipe should have known"))
}

pub(super) fn no_call(able: &Capabilities, call: &Call<'_>) -> Error {
    Error::bug(format!("sagellm: {} has no {}, which the recipe should have known", able.name, call.name()))
}

pub(super) fn no_split(able: &Capabilities) -> Error {
    Error::invalid(format!(
        "sagellm: {} makes no communicator out of another: make the new one from an id of its own",
        able.name
    ))
}

/// Start of a list of counts in the elements before it.
pub fn displacements(counts: &[u64]) -> Vec<u64> {
    counts
        .iter()
        .scan(0, |next, count| {
            let start = *next;
            *next += count;
            Some(start)
        })
        .collect()
}

/// Messages in an order that cannot deadlock where each waits for its partner: all ranks go through all pairs in one
/// order (round by round of a tournament, in each pair the lower rank's sends first) and leave out pairs without
/// messages.
pub fn without_deadlock(messages: &[Message], me: u32, ranks: u32) -> Vec<Message> {
    let mut sorted = messages.to_vec();
    sorted.sort_by_key(|message| {
        let (low, high) = (me.min(message.peer), me.max(message.peer));
        let lower_sends = message.sends == (me == low);
        ((low + high) % ranks.max(1), low, high, !lower_sends)
    });
    sorted
}

/// The interval between two calls of `GoOn` during a wait.
const LOOK: Duration = Duration::from_millis(50);

/// Runs `work` on a new thread and waits for its result until `deadline`, or until `go_on` returns an error. A result
/// that comes later is dropped by that thread, so its type must clean up on drop.
pub fn within<T: Send + 'static>(
    deadline: Duration,
    what: &str,
    go_on: &dyn Fn() -> Result<()>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (done, result) = mpsc::sync_channel(1);
    let started = watch::spawn("sagellm-vendor", move || {
        let _ = done.send(work()); // the receiver is gone where the deadline has passed: the result is dropped here
    });
    started.map_err(|error| Error::system(format!("sagellm: no thread for {what}: {error}")))?;
    let begin = Instant::now();
    loop {
        let left = deadline.saturating_sub(begin.elapsed());
        match result.recv_timeout(left.min(LOOK)) {
            Ok(result) => return result,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Error::bug(format!("sagellm: {what} panicked")));
            }
            Err(mpsc::RecvTimeoutError::Timeout) if left > LOOK => go_on()?,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                return Err(Error::timeout(format!(
                    "sagellm: {what} did not end within {} ms; the thread that called the library is left behind. Is \
                     every rank there, each with a device of its own, and can they reach one another?",
                    deadline.as_millis()
                )));
            }
        }
    }
}

/// A communicator's handle and the count of calls that use it. A call enters and leaves. The thread that ends the
/// communicator shuts the guard first, so that no further call enters, and waits a short time for the calls inside.
#[derive(Debug)]
pub struct HandleGuard {
    handle: usize,
    /// Set once, by the thread that ends it; read by every call after it has counted itself. Both are sequentially
    /// consistent: either the call sees it shut, or that thread sees the call.
    shut: AtomicBool,
    inside: AtomicUsize,
    /// How it was ended, for later calls.
    why: Mutex<&'static str>,
}

impl HandleGuard {
    pub fn new(handle: usize) -> HandleGuard {
        HandleGuard { handle, shut: AtomicBool::new(false), inside: AtomicUsize::new(0), why: Mutex::new("") }
    }

    /// Runs `body` with the handle unless the communicator has ended.
    pub fn enter<T>(&self, what: &str, body: impl FnOnce(usize) -> Result<T>) -> Result<T> {
        struct Inside<'a>(&'a AtomicUsize);
        impl Drop for Inside<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.inside.fetch_add(1, Ordering::SeqCst);
        let _inside = Inside(&self.inside);
        if self.shut.load(Ordering::SeqCst) {
            let why = *self.why.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            return Err(Error::aborted(format!("sagellm: {what}: the communicator was {why}")));
        }
        body(self.handle)
    }

    /// The handle for the thread that ends the communicator, when no call is inside or after `grace`; `None` if it was
    /// ended before.
    pub fn shut(&self, why: &'static str, grace: Duration) -> Option<usize> {
        {
            let mut own = self.why.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if self.shut.swap(true, Ordering::SeqCst) {
                return None;
            }
            *own = why;
        }
        let end = Instant::now() + grace;
        while self.inside.load(Ordering::SeqCst) > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(200));
        }
        Some(self.handle)
    }
}

/// How long an abort waits for running calls to return by themselves. Calls that take longer hang, and are aborted.
pub const GRACE: Duration = Duration::from_millis(50);
/// How long the end of a communicator may take before its thread is left behind.
pub const END: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_shut_guard_refuses_new_calls_and_waits_for_running_ones() {
        let guard = HandleGuard::new(7);
        assert_eq!(guard.enter("a", Ok), Ok(7));
        std::thread::scope(|scope| {
            let (entered, leave) = (mpsc::channel(), mpsc::channel::<()>());
            let guard = &guard;
            scope.spawn(move || {
                guard.enter("b", |_| {
                    entered.0.send(()).unwrap();
                    leave.1.recv().unwrap();
                    Ok(())
                })
            });
            entered.1.recv().unwrap();
            // The call hangs: the thread that ends the communicator goes on after the grace.
            assert_eq!(guard.shut("aborted", Duration::from_millis(5)), Some(7));
            assert_eq!(guard.shut("closed", GRACE), None);
            leave.0.send(()).unwrap();
        });
        let error = guard.enter("all_reduce", Ok).unwrap_err();
        assert_eq!(error, Error::aborted("sagellm: all_reduce: the communicator was aborted"));
    }

    #[test]
    fn what_takes_too_long_is_left_behind_with_a_text() {
        let (go, wait) = mpsc::channel::<()>();
        let late = within(Duration::from_millis(20), "to join", &always, move || Ok(wait.recv().is_ok()));
        assert!(late.is_err_and(|late| late.text().contains("to join did not end within 20 ms")));
        go.send(()).unwrap();
        assert_eq!(within(Duration::from_secs(60), "to add", &always, || Ok(1 + 1)), Ok(2));
        let panicked = within::<()>(Duration::from_secs(60), "to fail", &always, || panic!("on purpose"));
        assert!(matches!(panicked, Err(ref error) if error.kind() == ErrorKind::Bug));
    }

    #[test]
    fn a_wait_ends_when_it_shall_not_go_on() {
        let (go, wait) = mpsc::channel::<()>();
        let asked = AtomicUsize::new(0);
        let third_time = || match asked.fetch_add(1, Ordering::Relaxed) {
            2 => Err(Error::interrupted("a signal")),
            _ => Ok(()),
        };
        let begin = Instant::now();
        let ended = within(Duration::from_secs(600), "to join", &third_time, move || Ok(wait.recv().is_ok()));
        assert_eq!(ended, Err(Error::interrupted("a signal")));
        assert!(begin.elapsed() < Duration::from_secs(60), "long before the deadline");
        go.send(()).unwrap();
    }

    /// Every rank executes its list in order, each send waits for its receive: all lists must come to their end.
    #[test]
    fn ordered_messages_meet_whatever_the_pattern() {
        let mut random = 12345u64;
        let mut below = |n: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % n
        };
        for ranks in 2..8u32 {
            for _ in 0..200 {
                let mut lists = vec![Vec::new(); ranks as usize];
                for number in 0..below(30) as usize {
                    let from = below(u64::from(ranks)) as u32;
                    let to = (from + 1 + below(u64::from(ranks - 1)) as u32) % ranks;
                    lists[from as usize].push(Message { peer: to, sends: true, addr: number, bytes: 1 });
                    lists[to as usize].push(Message { peer: from, sends: false, addr: number, bytes: 1 });
                }
                let mut lists: Vec<_> = (0..)
                    .zip(&lists)
                    .map(|(me, list)| without_deadlock(list, me, ranks))
                    .map(|l| l.into_iter())
                    .collect();
                let mut heads: Vec<_> = lists.iter_mut().map(Iterator::next).collect();
                loop {
                    let met = (0..heads.len()).find_map(|me| {
                        let own = heads[me]?;
                        let other = heads[own.peer as usize]?;
                        (other.peer as usize == me && other.sends != own.sends).then_some((me, own, other))
                    });
                    let Some((me, own, other)) = met else { break };
                    assert_eq!(own.addr, other.addr, "messages of a pair stay in their order");
                    heads[me] = lists[me].next();
                    heads[own.peer as usize] = lists[own.peer as usize].next();
                }
                assert!(heads.iter().all(Option::is_none), "deadlock of {ranks} ranks");
            }
        }
    }
}
