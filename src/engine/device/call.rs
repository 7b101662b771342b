//! Puts the calls of one launch on a raw stream of a device, checks whether they have ended, and reports how the
//! library ran them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use super::communicators::{DeviceComm, patience};
use super::engine::DeviceEngine;
use super::first_use;
use super::group::{Agreed, Counted, Watched};
use super::lowered::{Lowered, Placed};
use super::parts::Parts;
use super::runtime::{SPARES_CAPTURES, Stream};
use super::watchdog::{Found, Library, Passed, Seen, fault_or_death_in};
use crate::error::{Error, ErrorKind, GO_ON, Result, in_one_line, laid_out};
use crate::json;
use crate::types::Few;

/// The calls of one launch, from their check to their end.
pub struct DeviceCall {
    pub(super) engine: Arc<DeviceEngine>,
    pub(super) device: i32,
    pub(super) stream_key: i32,
    /// `None` for a barrier (`DeviceEngine::behind`) if the communicator of all ranks was closed: all operations of
    /// that communicator are complete then.
    pub(super) communicator: Option<Arc<DeviceComm>>,
    pub(super) watched: Watched,
    /// Kept until the device has completed the calls. Shared with the thread that runs a first launch.
    pub(super) parts: Arc<Parts>,
    pub(super) notes: Few<Box<dyn Counted>>,
    pub(super) numbers: Numbers,
    pub(super) stage: Stage,
    /// Whether this launch connected ranks. The launching thread writes it before it passes the call to the threads
    /// that read it. Relaxed, because the passing of the call orders the accesses.
    pub(super) connects: AtomicBool,
    /// `polled`: when the call was first polled. `passed`: when a poll first found that the device had passed it.
    pub(super) polled: OnceCell<Instant>,
    pub(super) passed: OnceCell<Instant>,
}

/// State of a call. Written by the thread that begins and launches the call, and later by the threads that record its
/// end or drop it. Relaxed, because the passing of the call between these threads orders their accesses. The thread
/// that watches a running launch also reads it, as a hint.
pub(super) struct Stage(AtomicU8);

impl Stage {
    /// The call has taken its number, or is a message for which the peer waits. It has not been launched.
    const BEGUN: u8 = 0;
    const LAUNCHED: u8 = 1;
    /// Nothing needs to be done when the call ends or is dropped.
    const SETTLED: u8 = 2;

    pub(super) fn begun() -> Stage {
        Stage(AtomicU8::new(Stage::BEGUN))
    }

    pub(super) fn nothing_to_launch() -> Stage {
        Stage(AtomicU8::new(Stage::SETTLED))
    }

    fn is_under_way(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Stage::LAUNCHED
    }
}

/// The numbers of a launch, and whether the other ranks called the same operations under these numbers.
#[derive(Default)]
pub(super) struct Numbers {
    /// Zero if the launch has no numbers.
    pub(super) first: u64,
    pub(super) last: u64,
    /// Whether all ranks with visible signatures called the same operations. Written and read by the threads that poll
    /// the call. Relaxed, because it guards no other data.
    agreed: AtomicBool,
}

impl Numbers {
    pub(super) fn add(&mut self, number: u64) {
        if self.first == 0 {
            self.first = number;
        }
        self.last = self.last.max(number);
    }
}

/// How one call was run, for `explain`.
pub struct Carried {
    /// torch's name of the operation.
    pub name: String,
    pub bytes: u64,
    pub ranks: usize,
    pub number: u64,
    /// The library's name, version and file.
    pub library: String,
    pub why: String,
    /// The algorithm that the library reported; empty if it reports none.
    pub ran: String,
}

impl Carried {
    /// JSON of the type `Carried` in `_C.pyi`.
    pub fn json(&self) -> String {
        json::text(|to| {
            to.string("kind", &self.name).number("bytes", self.bytes).number("ranks", self.ranks);
            to.number("number", self.number).string("library", &self.library);
            to.string("decided", &self.why).string("ran", &self.ran);
        })
    }
}

impl DeviceCall {
    pub fn number(&self) -> u64 {
        self.watched.number
    }

    /// Zero: no timeout.
    pub fn timeout(&self) -> Duration {
        self.watched.timeout
    }

    /// Key of the engine's stream that runs the call. Calls that may wait for different peers use different streams, so
    /// that no call waits for another. Collectives use stream 0.
    pub fn stream_key(&self) -> i32 {
        self.stream_key
    }

    pub fn calls(&self) -> &[Lowered] {
        &self.parts.calls
    }

    /// Puts the calls on a raw stream. Several calls become one launch. Host memory that was passed to the library is
    /// kept until `self` is dropped.
    pub fn launch(&self, placed: &[Placed], stream: Stream) -> Result<()> {
        self.put(placed, stream)?;
        self.engine.under_way.fetch_add(1, Ordering::Relaxed);
        self.stage.0.store(Stage::LAUNCHED, Ordering::Relaxed);
        Ok(())
    }

    /// Fails the group on all ranks, because the caller could not launch the calls or could not complete their launch.
    /// The other ranks may have launched their calls. The library does not compare calls, so it would match the other
    /// ranks' calls with this rank's next calls. The caller reports the error to the program and then ends the
    /// communicators.
    pub fn failed_here(&self, why: &str) {
        let done = match self.stage.0.swap(Stage::SETTLED, Ordering::Relaxed) {
            Stage::SETTLED => return,
            Stage::LAUNCHED => {
                self.engine.under_way.fetch_sub(1, Ordering::Relaxed);
                "was launched and failed on this rank"
            }
            _ => "could not be launched on this rank",
        };
        let group = &self.engine.group;
        let head = format!("rank {} of group '{}': {} {done}", group.rank(), group.name(), self.watched.what());
        let lines = [in_one_line(why), "the other ranks may have launched theirs, so the group has failed".to_string()];
        group.fail(Error::system(laid_out(&head, &lines, GO_ON)));
    }

    /// Removes the call from the engine's count of running calls (`under_way`), if it is still counted.
    fn leave(&self) {
        let left = self.stage.0.compare_exchange(Stage::LAUNCHED, Stage::SETTLED, Ordering::Relaxed, Ordering::Relaxed);
        if left.is_ok() {
            self.engine.under_way.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn put(&self, placed: &[Placed], stream: Stream) -> Result<()> {
        let communicator = self.communicator.as_ref().ok_or_else(|| Error::bug("sagellm: nothing to launch"))?;
        let (calls, parts) = (self.parts.calls.len(), placed.len());
        if parts != calls {
            return Err(Error::bug(format!("sagellm: {calls} calls are launched, and {parts} were prepared")));
        }
        let library = communicator.library();
        let missing = communicator.connected.missing(&self.parts.calls, placed, (library.rank(), library.ranks()));
        let put = if missing.is_empty() {
            self.parts.put(&self.engine, communicator, placed, stream)
        } else {
            self.first_launch(communicator, placed, stream)
                .inspect(|()| communicator.connected.add(missing, library.ranks()))
        };
        // If the watchdog ended the launch while it waited, the group's fault has the reason; the library's error does
        // not.
        put.map_err(|error| self.fault().unwrap_or(error))
    }

    /// Returns the fault of the group. If only a peer has reported the fault so far, fails the group with it on this
    /// rank too, before the caller reports it. Other calls of this rank learn of a failure only from the group (rule
    /// 34).
    fn fault(&self) -> Option<Error> {
        let fault = self.engine.group.fault()?;
        self.engine.group.fail(fault.clone());
        Some(fault)
    }

    /// Runs a launch for which the library must connect ranks. Runs it on a new thread, and waits for that thread as
    /// long as the call may wait.
    fn first_launch(&self, communicator: &Arc<DeviceComm>, placed: &[Placed], stream: Stream) -> Result<()> {
        self.connects.store(true, Ordering::Relaxed);
        let (engine, own) = (Arc::clone(&self.engine), Arc::clone(communicator));
        let (parts, placed) = (Arc::clone(&self.parts), placed.to_vec());
        let launched = first_use::watched(
            &format!("the launch of {}", self.watched.what()),
            patience(self.watched.timeout),
            &|| self.may_wait(),
            move || parts.put(&engine, &own, &placed, stream),
        );
        let group = &*self.engine.group;
        let launched =
            launched.map_err(|error| self.engine.cause_of(error, &|| fault_or_death_in(group, &self.watched)));
        // If a signal ended the wait, the group fails, because the other ranks would wait for this rank in vain. If
        // another rank is gone, the group fails with an error that names that rank, not with the error that the library
        // reported. The caller ends the communicators.
        launched.inspect_err(|error| {
            if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::RankFailed) {
                group.fail(error.clone());
            }
        })?;
        self.met_a_launch_that_was_let_go().map_or(Ok(()), Err)
    }

    /// If these calls connected ranks, returns the fault of the group. When a signal or the deadline ends such a launch
    /// on another rank, the launch's caller returns, but the library continues until the abort. Until then the library
    /// uses memory that the caller may already write again. If this rank launches later, its launch can match the
    /// abandoned one and receive wrong data. The caller on the other rank returns only after the group has failed, so
    /// the fault tells this rank not to trust its own result.
    fn met_a_launch_that_was_let_go(&self) -> Option<Error> {
        if self.connects.load(Ordering::Relaxed) { self.fault() } else { None }
    }

    /// Fails if a launch must stop waiting for other ranks.
    fn may_wait(&self) -> Result<()> {
        let group = &self.engine.group;
        if group.interrupted() {
            return Err(Error::interrupted(format!(
                "sagellm: rank {} of group '{}': interrupted in the launch of {}, before the other ranks came to theirs",
                group.rank(),
                group.name(),
                self.watched.what()
            )));
        }
        self.look_at_launch().map_or(Ok(()), Err)
    }

    /// Returns why a launch that has not returned must end: its deadline has passed, the group has failed, a peer has
    /// died, ranks called different operations, or the communicator has ended. Returns `None` if the launch may
    /// continue. Except if only the communicator has ended, the group has then failed with the returned error. The
    /// caller ends the communicators (`abort`), which makes a launch that waits in the library return.
    pub fn look_at_launch(&self) -> Option<Error> {
        match self.look(self.seen()) {
            Found::Failed(error) => Some(error),
            Found::Nothing | Found::Undecided => None,
        }
    }

    /// Returns the state that the watchdog checks while the device has not completed the calls.
    fn seen(&self) -> Seen {
        // `under_way` includes this call, unless it is a barrier, which launches nothing.
        let own = u64::from(self.stage.is_under_way());
        let engine = &self.engine;
        let among_others = engine.under_way.load(Ordering::Relaxed) > own;
        Seen { passed: None, among_others, hangs_when_failed: engine.capabilities().abort }
    }

    fn look(&self, seen: Seen) -> Found {
        let engine = &self.engine;
        if let Some(error) = self.disagreement() {
            engine.group.fail(error.clone());
            return Found::Failed(error);
        }
        let library = match &self.communicator {
            None => Library::Ended { drained: true },
            Some(communicator) => communicator.state(),
        };
        engine.watchdog.look(&*engine.group, &self.watched, library, seen, Instant::now())
    }

    /// Returns an error if ranks called different operations under one of these numbers.
    fn disagreement(&self) -> Option<Error> {
        let Numbers { first, last, agreed } = &self.numbers;
        if *first == 0 || agreed.load(Ordering::Relaxed) {
            return None;
        }
        match self.engine.group.compare(*first, *last) {
            Agreed::Not(error) => return Some(error),
            Agreed::WithAll => agreed.store(true, Ordering::Relaxed),
            Agreed::SoFar => (),
        }
        None
    }

    /// Between this call and `poll`, this thread's device queries do not invalidate a graph capture of another thread.
    /// The caller passes the returned mode to `poll`.
    pub fn before_poll(&self) -> Result<u32> {
        self.engine.runtime.set_device(self.device)?;
        self.engine.runtime.exchange_capture_mode(SPARES_CAPTURES)
    }

    /// Checks whether the calls have failed or will not complete. `passed`: the device has executed them. After
    /// `Failed` the caller reports the error to the program and then ends the communicators (`abort`), which unblocks
    /// hanging calls.
    pub fn poll(&self, passed: bool, mode: u32) -> Result<Found> {
        self.engine.runtime.exchange_capture_mode(mode)?;
        if passed && let Some(error) = self.met_a_launch_that_was_let_go() {
            return Ok(Found::Failed(error));
        }
        let polled = *self.polled.get_or_init(Instant::now);
        let passed = passed.then(|| *self.passed.get_or_init(Instant::now));
        let passed = passed.map(|at| Passed { at, after: at.saturating_duration_since(polled) });
        Ok(self.look(Seen { passed, ..self.seen() }))
    }

    /// Whether the library reads host memory that `self` keeps. If it does, and a graph has captured the calls, every
    /// replay needs that memory.
    pub fn keeps_memory(&self) -> bool {
        self.parts.keeps_memory()
    }

    /// Like `poll`, for replays of these captured calls; the host does not see when a replay begins or ends. Reports a
    /// failure if a replay would hang because a rank is gone, the group has failed, or the library reports an error.
    pub fn look_at_replays(&self) -> Result<Found> {
        let Some(communicator) = &self.communicator else { return Ok(Found::Nothing) };
        self.engine.runtime.set_device(self.device)?;
        let library = match communicator.state() {
            Library::Ended { .. } => return Ok(Found::Nothing),
            lives @ Library::Lives(_) => lives,
        };
        let (op, now) = (format!("a replay of {}", self.watched.op).into(), Instant::now());
        let watched = Watched { op, issued: now, timeout: Duration::ZERO, ..self.watched.clone() };
        let seen = Seen { passed: None, among_others: false, hangs_when_failed: true };
        let engine = &self.engine;
        Ok(engine.watchdog.look(&*engine.group, &watched, library, seen, now))
    }

    /// Ends all communicators of the group, which unblocks hanging calls.
    pub fn abort(&self) {
        self.engine.abort();
    }

    /// Records the end of the calls in the statistics. `well`: they succeeded. `timed`: they ended at this moment.
    pub fn ended(&self, well: bool, timed: bool) {
        self.leave();
        self.notes.iter().for_each(|note| note.end(well, timed));
    }

    /// Says how each call is run.
    pub fn explain(&self) -> Vec<Carried> {
        let several = self.parts.calls.len();
        self.parts
            .calls
            .iter()
            .map(|call| {
                let mut why = call.lowering.why.clone();
                if why.is_empty() {
                    why = "one call of the library, which chooses the algorithm".to_string();
                }
                if call.tensors > 1 {
                    why += &format!("; {} tensors in one call", call.tensors);
                }
                if several > 1 {
                    why += &format!("; one of {several} calls issued together");
                }
                let api = &self.engine.api;
                let ran = self.communicator.as_ref().and_then(|own| api.ran(own.name(), call.kind, call.bytes));
                Carried {
                    name: call.name.to_string(),
                    bytes: call.bytes,
                    ranks: self.engine.group.size(),
                    number: self.watched.number,
                    library: self.engine.describe(),
                    why,
                    ran: ran.unwrap_or_default(),
                }
            })
            .collect()
    }
}

impl Drop for DeviceCall {
    fn drop(&mut self) {
        if self.stage.0.load(Ordering::Relaxed) == Stage::BEGUN {
            self.failed_here("it was dropped before");
            self.engine.abort();
        }
        self.leave();
    }
}
