//! The interface that every vendor's library implements: [`Api`] for an open library, [`Communicator`] for one rank on
//! one device, [`Call`] for an operation. A call only puts work on a stream; no call waits for a device.

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
    /// The library's name, version and file, for instance "NCCL 2.30.7 (/path/libnccl.so.2)".
    fn describe(&self) -> String;
    /// Makes an id, which has `capabilities().id_bytes` bytes. Rank 0 calls this, and all ranks pass the id to
    /// `create`. The calling thread must have selected its device (`Runtime::set_device`), because HCCL puts the
    /// device's address into the id.
    fn unique_id(&self) -> Result<Vec<u8>>;
    /// Joins the communicator with the id `setup.id`. Returns when all its ranks have called, or fails at the deadline.
    fn create(self: Arc<Self>, setup: Setup) -> Result<Arc<dyn Communicator>>;
    /// The library's text for one of its result codes.
    fn describe_error(&self, code: i32) -> String;

    // The functions below pass the group's rules for algorithms to the library, and read back which algorithm the
    // library chose. The default implementations are for a library that accepts no rules and does not report its
    // choice.

    /// The value for `Setup::algorithm`, if the policy names one algorithm for all operations of a communicator;
    /// otherwise "".
    fn algorithm(&self, _policy: &Policy) -> &'static str {
        ""
    }
    /// As long as the returned object lives, the library asks the policy about each operation of the communicator with
    /// this name. Called before the communicator is made. No other communicator may have this name.
    fn steer(&self, _name: &str, _policy: &Arc<Policy>) -> Option<Box<dyn Steering>> {
        None
    }
    /// Whether `steer` works for a communicator if the user has set a topology.
    fn takes_topologies(&self) -> bool {
        false
    }
    /// Returns the algorithm that the library last reported for an operation of this kind and about this size, in a
    /// communicator of this name.
    fn ran(&self, _name: &str, _kind: Kind, _bytes: u64) -> Option<String> {
        None
    }
}

/// A communicator for which the library asks us to choose the algorithms.
pub trait Steering: Send + Sync {
    /// Called after the communicator was made. Returns why the library does not ask us although it should; `None` if it
    /// asks.
    fn problem(&self) -> Option<String>;
}

/// A thread that waits for a library calls this function repeatedly. If it returns an error, the wait ends with that
/// error. So a signal or a failure of the group can end a wait long before the wait's deadline.
pub type GoOn = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// A `GoOn` for waits that end only at their deadline.
pub fn always() -> Result<()> {
    Ok(())
}

/// The arguments with which one rank joins a communicator.
#[derive(Clone)]
pub struct Setup {
    pub id: Vec<u8>,
    pub rank: u32,
    pub ranks: u32,
    /// Index of the device in this process.
    pub device: i32,
    /// The time within which all ranks must join. If the library accepts a time limit for calls that block inside it,
    /// this is also that limit.
    pub deadline: Duration,
    pub go_on: GoOn,
    /// Name for the library's messages and tools. Only the first `NAME_BYTES` bytes are used.
    pub name: String,
    /// Algorithm for every operation of this communicator, in the library's spelling; "" lets the library choose.
    pub algorithm: String,
    /// Used to select the device on a thread that we started.
    pub runtime: Arc<dyn Runtime>,
}

/// Longest name of a communicator, in bytes.
pub const NAME_BYTES: usize = 127;

/// The ranks of a communicator that form a new communicator. All ranks of the old communicator call `split`, even if
/// they are not members of the new one. The members of the same new communicator pass equal values.
#[derive(Clone)]
pub struct Split {
    /// The members' ranks in the old communicator, in the order of their ranks in the new one.
    pub members: Vec<u32>,
    /// Distinguishes the communicators that one collective `split` makes; below 2^31.
    pub number: u32,
    pub deadline: Duration,
    /// The next three fields have the same meaning as in `Setup`.
    pub go_on: GoOn,
    pub name: String,
    pub algorithm: String,
}

/// One rank of a communicator. Each rank has one device.
pub trait Communicator: Send + Sync {
    fn api(&self) -> Arc<dyn Api>;
    fn rank(&self) -> u32;
    fn ranks(&self) -> u32;
    fn device(&self) -> i32;
    /// Puts one call on the stream. The caller keeps the returned memory until the stream has completed the call.
    fn call(&self, call: &Call<'_>, stream: Stream) -> Result<Kept>;
    /// Like `call`, for a PREMUL_SUM whose factor is in device memory at address `_factor`, in the call's dtype. The
    /// device reads the factor when the stream reaches the call. Only for libraries that themselves have PREMUL_SUM.
    fn call_by_factor(&self, call: &Call<'_>, _factor: usize, stream: Stream) -> Result<Kept> {
        self.call(call, stream)
    }
    /// From here until `group_end`, this thread's calls form one launch. Does nothing if the library has no groups
    /// (`Capabilities`).
    fn group_start(&self) -> Result<()>;
    fn group_end(&self) -> Result<()>;
    /// Whether `split` can make a communicator of these ranks.
    fn can_split(&self, members: &[u32]) -> bool;
    /// Makes a communicator of some of the ranks; `None` on a rank that is not a member. Fails if the library cannot
    /// split.
    fn split(&self, split: &Split) -> Result<Option<Arc<dyn Communicator>>>;
    /// Makes a communicator without the ranks in `exclude`. These ranks do not call this. Pending operations are
    /// aborted first.
    fn shrink(&self, exclude: &[u32], deadline: Duration, go_on: GoOn, name: &str) -> Result<Arc<dyn Communicator>>;
    /// Returns the error of the network or the device, if one occurred since the communicator was made. Never waits.
    fn poll(&self) -> Result<()>;
    /// Ends the communicator even while operations hang; those operations end too, with undefined results. Any thread
    /// may call this, and more than once.
    fn abort(&self) -> Result<()>;
    /// Waits until the communicator's operations are complete, then ends the communicator. All ranks call this. After
    /// the deadline, this returns, and a background thread continues to wait.
    fn close(&self, deadline: Duration) -> Result<()>;
}

/// Host memory that the library reads until the call has completed; `None` if it reads none.
pub type Kept = Option<Box<dyn Any + Send>>;

/// A message to or from one peer. Its bytes are in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub peer: u32,
    pub sends: bool,
    pub addr: usize,
    pub bytes: usize,
}

/// One operation. Counts are in elements of `dtype`; addresses are on the communicator's device.
#[derive(Clone, Copy, Debug)]
pub enum Call<'a> {
    AllReduce {
        send: usize,
        recv: usize,
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
    },
    /// In place: copies the root's buffer to the buffers of all other ranks.
    Broadcast {
        buffer: usize,
        count: usize,
        dtype: Dtype,
        root: u32,
    },
    /// On ranks other than the root, `recv` equals `send`.
    Reduce {
        send: usize,
        recv: usize,
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
        root: u32,
    },
    /// `count` is the number of elements in one rank's block.
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
    /// Only the root uses `recv`.
    Gather {
        send: usize,
        recv: usize,
        count: usize,
        dtype: Dtype,
        root: u32,
    },
    /// Only the root uses `send`.
    Scatter {
        send: usize,
        recv: usize,
        count: usize,
        dtype: Dtype,
        root: u32,
    },
    /// One count for each rank. The blocks are contiguous, in the order of the ranks.
    AllToAllV {
        send: usize,
        recv: usize,
        send_counts: &'a [u64],
        recv_counts: &'a [u64],
        dtype: Dtype,
    },
    /// All messages are in flight at the same time. Messages from one rank to another match in the order of the list.
    /// No rank sends a message to itself.
    Exchange(&'a [Message]),
    /// A copy inside the device, by the vendor's runtime.
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

/// Copies a static text of a vendor library; null becomes an empty text.
#[allow(unsafe_code)] // reads what the library returned
pub(super) fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: vendor libraries return static texts that end in a zero byte.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Describes the attempt to join, for error texts.
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

/// Returns, for each count, the sum of the counts before it: the index of the element at which the count's block
/// begins.
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

/// Sorts messages so that the ranks cannot deadlock even if each send waits for its receive. All ranks handle the pairs
/// in the same order and skip pairs that have no messages. The order is that of a round-robin tournament, round by
/// round; within a pair, the lower rank's sends come first.
pub fn without_deadlock(messages: &[Message], me: u32, ranks: u32) -> Vec<Message> {
    let mut sorted = messages.to_vec();
    sorted.sort_by_key(|message| {
        let (low, high) = (me.min(message.peer), me.max(message.peer));
        let lower_sends = message.sends == (me == low);
        ((low + high) % ranks.max(1), low, high, !lower_sends)
    });
    sorted
}

/// Interval between two calls of `GoOn` during a wait.
const LOOK: Duration = Duration::from_millis(50);

/// Runs `work` on a new thread. Waits for the result until `deadline`, or until `go_on` returns an error. If the result
/// comes later, the new thread drops it, so the result's type must clean up on drop.
pub fn within<T: Send + 'static>(
    deadline: Duration,
    what: &str,
    go_on: &dyn Fn() -> Result<()>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (done, result) = mpsc::sync_channel(1);
    let started = watch::spawn("sagellm-vendor", move || {
        let _ = done.send(work()); // after the deadline the receiver is gone, and the result is dropped here
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
            // Called at the deadline too, because an earlier error of the group says more than the timeout error.
            Err(mpsc::RecvTimeoutError::Timeout) => go_on()?,
        }
        if left <= LOOK {
            return Err(Error::timeout(format!(
                "sagellm: {what} did not end within {} ms; the thread that called the library is left behind. Is every \
                 rank there, each with a device of its own, and can they reach one another?",
                deadline.as_millis()
            )));
        }
    }
}

/// A communicator's handle, and the number of calls that are using it. A call enters before it uses the handle and
/// leaves afterwards. The thread that ends the communicator first shuts the guard, so that no further call enters, and
/// then waits a short time for the calls inside.
#[derive(Debug)]
pub struct HandleGuard {
    handle: usize,
    /// Set once, by the thread that ends the communicator. Every call reads it after the call has incremented `inside`.
    /// All these accesses are sequentially consistent, so either the call sees `shut`, or the ending thread sees the
    /// call in `inside`.
    shut: AtomicBool,
    inside: AtomicUsize,
    /// How the communicator was ended, for the errors of later calls.
    why: Mutex<&'static str>,
}

impl HandleGuard {
    pub fn new(handle: usize) -> HandleGuard {
        HandleGuard { handle, shut: AtomicBool::new(false), inside: AtomicUsize::new(0), why: Mutex::new("") }
    }

    /// Runs `body` with the handle. Fails if the communicator has ended.
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

    /// Called by the thread that ends the communicator. Shuts the guard and returns the handle. Waits until no call is
    /// inside, but at most `grace`. Returns `None` if the guard was shut before.
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

/// An abort waits this long for running calls to return. If a call takes longer, it is assumed to hang and is aborted.
pub const GRACE: Duration = Duration::from_millis(50);
/// If it takes longer than this to end a communicator, the thread that does so is left behind.
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
            // The call hangs, so the thread that ends the communicator continues after the grace period.
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

    #[test]
    fn at_the_deadline_an_earlier_error_of_the_group_is_kept() {
        for deadline in [Duration::ZERO, Duration::from_millis(20), LOOK + Duration::from_millis(20)] {
            let (go, wait) = mpsc::channel::<()>();
            let begin = Instant::now();
            let late = || if begin.elapsed() >= deadline { Err(Error::aborted("the group failed")) } else { Ok(()) };
            let ended = within(deadline, "to join", &late, move || Ok(wait.recv().is_ok()));
            assert_eq!(ended, Err(Error::aborted("the group failed")), "{deadline:?}");
            go.send(()).unwrap();
        }
    }

    /// Every rank executes its list in order, and each send waits for its receive. All lists must run to their ends.
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
