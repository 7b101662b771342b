//! The calls of one launch on a device: puts them on a raw stream, asks whether they have ended, and reports how the
//! library ran them.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::communicator::{Call, Message};
use super::communicators::DeviceComm;
use super::engine::DeviceEngine;
use super::group::{Counted, Watched};
use super::launch::{Job, Launched, launch};
use super::layout::Layout;
use super::lock;
use super::lowering::Lowering;
use super::runtime::{SPARES_CAPTURES, Stream};
use super::watchdog::{Found, Library, Seen};
use crate::error::{Error, Result};
use crate::types::{Kind, ReduceOp, Span};

/// The calls of one launch, from their check to their end.
pub struct DeviceCall {
    pub(super) engine: Arc<DeviceEngine>,
    pub(super) device: i32,
    pub(super) stream_key: i32,
    /// `None` for a barrier (`behind`) where the communicator of all ranks has ended in order, after all its
    /// operations.
    pub(super) communicator: Option<Arc<DeviceComm>>,
    pub(super) watched: Watched,
    pub(super) calls: Vec<Lowered>,
    pub(super) notes: Vec<Box<dyn Counted>>,
    /// Host memory that the library was given; it stays until the device has passed the calls.
    pub(super) launched: Mutex<Vec<Launched>>,
    pub(super) stage: Stage,
}

/// How far a call has come. Written by the thread that begins and launches it, read by the thread that drops it, to
/// which it was handed over; relaxed, because nothing is ordered by it.
pub(super) struct Stage(AtomicU8);

impl Stage {
    /// It has its number, or its peer waits for its message.
    const BEGUN: u8 = 0;
    const LAUNCHED: u8 = 1;
    /// Nothing follows from its end.
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

/// How one call travelled, for `explain`.
pub struct Carried {
    /// torch's name of the operation.
    pub name: String,
    pub bytes: u64,
    pub ranks: usize,
    pub number: u64,
    /// The library, its version and file.
    pub library: String,
    pub why: String,
    /// The algorithm that the library reports; empty where it reports none.
    pub ran: String,
}

/// One call of a launch.
pub struct Lowered {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// In the communicator.
    pub(super) root: u32,
    /// As the program's group counts ranks.
    pub(super) peer: u32,
    pub(super) tensors: u32,
    pub(super) bytes: u64,
    pub lowering: Lowering,
    pub layout: Layout,
}

/// Addresses of the temporaries that the layout of one call asks for, once the local steps before the call have filled
/// them; 0 where it asks for none.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Address of the factor, where the library itself has PREMUL_SUM.
    pub factor: usize,
    pub send: usize,
    pub recv: usize,
}

impl DeviceCall {
    pub fn number(&self) -> u64 {
        self.watched.number
    }

    /// Zero: no timeout.
    pub fn timeout(&self) -> Duration {
        self.watched.timeout
    }

    /// Which of the engine's streams of a device runs it. Calls that may wait for different peers have different
    /// streams, so that they do not wait for one another. 0 is the stream of the collectives.
    pub fn stream_key(&self) -> i32 {
        self.stream_key
    }

    pub fn calls(&self) -> &[Lowered] {
        &self.calls
    }

    /// Puts the calls on a raw stream, as one launch where there are several. Host memory that the library was given is
    /// kept until this is dropped.
    pub fn launch(&self, placed: &[Placed], stream: Stream) -> Result<()> {
        self.put(placed, stream)?;
        self.engine.under_way.fetch_add(1, Ordering::Relaxed);
        self.stage.0.store(Stage::LAUNCHED, Ordering::Relaxed);
        Ok(())
    }

    /// The caller could not launch the calls, or not complete their launch. The other ranks may have launched theirs, and
    /// the library has no signature by which it would notice that they then meet this rank's next ones: so the group
    /// fails, on all ranks. The caller then ends the communicators, when the program has been told.
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
        group.fail(Error::System(format!(
            "sagellm: rank {} of group '{}': {} {done}: {why}. The other ranks may have launched theirs, so the group \
             has failed; make a new one to go on",
            group.rank(),
            group.name(),
            self.watched.what()
        )));
    }

    /// It is not under way any more.
    fn leave(&self) {
        let left = self.stage.0.compare_exchange(Stage::LAUNCHED, Stage::SETTLED, Ordering::Relaxed, Ordering::Relaxed);
        if left.is_ok() {
            self.engine.under_way.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn put(&self, placed: &[Placed], stream: Stream) -> Result<()> {
        let communicator = self.communicator.as_ref().ok_or_else(|| Error::Bug("sagellm: nothing to launch".into()))?;
        if placed.len() != self.calls.len() {
            let (calls, placed) = (self.calls.len(), placed.len());
            return Err(Error::Bug(format!("sagellm: {calls} calls are launched, and {placed} were prepared")));
        }
        self.engine.runtime.set_device(self.device)?;
        if let ([call], [place]) = (&self.calls[..], placed) {
            lock(&self.launched).push(self.one(communicator, call, place, stream)?);
            return Ok(());
        }
        communicator.library().group_start()?;
        let launched = self.several(communicator, placed, stream);
        // Also after an error: a group that stays open swallows whatever this thread calls next.
        let ended = communicator.library().group_end();
        launched.and(ended)
    }

    fn one(&self, communicator: &DeviceComm, call: &Lowered, place: &Placed, stream: Stream) -> Result<Launched> {
        let library = communicator.library();
        let (send, recv) = call.memory(place);
        let (lowering, root, factor) = (&call.lowering, call.root, place.factor);
        let job =
            Job { lowering, rank: library.rank(), ranks: library.ranks(), root, factor, send: &send, recv: &recv };
        launch(library, &*self.engine.runtime, &job, stream)
    }

    fn several(&self, communicator: &DeviceComm, placed: &[Placed], stream: Stream) -> Result<()> {
        let me = self.engine.group.rank() as u32;
        let mut messages = Vec::new();
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for (call, place) in self.calls.iter().zip(placed) {
            if !call.kind.is_p2p() {
                lock(&self.launched).push(self.one(communicator, call, place, stream)?);
                continue;
            }
            let (send, recv) = call.memory(place);
            let own = call.peer == me;
            for (sends, span) in send.iter().map(|span| (true, span)).chain(recv.iter().map(|span| (false, span))) {
                match (own, sends) {
                    _ if span.bytes == 0 => {}
                    (false, _) => messages.push(Message { peer: call.root, sends, addr: span.addr, bytes: span.bytes }),
                    (true, true) => sent.push(*span),
                    (true, false) => received.push(*span),
                }
            }
        }
        // Messages of a rank to itself do not go through the library. The first send matches the first receive, as
        // `begin` checked.
        for (from, to) in sent.iter().zip(&received) {
            self.engine.runtime.copy(to.addr, from.addr, from.bytes, stream)?;
        }
        // Messages under way together cannot wait for one another, whatever their order on the ranks.
        if !messages.is_empty() {
            let kept = communicator.library().call(&Call::Exchange(&messages), stream)?;
            lock(&self.launched).push(Launched::of(kept));
        }
        Ok(())
    }

    /// From here until `poll`, which takes the returned value, this thread's queries to its device break no capture of
    /// another thread.
    pub fn before_poll(&self) -> Result<u32> {
        self.engine.runtime.set_device(self.device)?;
        self.engine.runtime.exchange_capture_mode(SPARES_CAPTURES)
    }

    /// Why the calls will not end, or ended badly. `passed`: the device has executed them. After `Failed` the caller
    /// ends the communicators (`abort`), which unblocks calls that hang, when the program has been told.
    pub fn poll(&self, passed: bool, mode: u32) -> Result<Found> {
        self.engine.runtime.exchange_capture_mode(mode)?;
        let engine = &self.engine;
        let library = match &self.communicator {
            None => Library::Ended { drained: true },
            Some(communicator) => communicator.state(),
        };
        // This one is among them, unless it is a barrier, which launches nothing.
        let own = u64::from(self.stage.is_under_way());
        let seen = Seen {
            passed,
            among_others: engine.under_way.load(Ordering::Relaxed) > own,
            hangs_when_failed: engine.capabilities().abort,
        };
        Ok(engine.watchdog.look(&*engine.group, &self.watched, library, seen, Instant::now()))
    }

    /// Whether the library reads host memory that this keeps: then it is needed as often as a graph with the calls is
    /// replayed.
    pub fn keeps_memory(&self) -> bool {
        lock(&self.launched).iter().any(|launched| !launched.is_empty())
    }

    /// As `poll`, for replays of these captured calls, of which nobody knows when they begin and end: whether one would
    /// not end, because a rank is gone, the group has failed, or the library reports an error.
    pub fn look_at_replays(&self) -> Result<Found> {
        let Some(communicator) = &self.communicator else { return Ok(Found::Nothing) };
        self.engine.runtime.set_device(self.device)?;
        let library = match communicator.state() {
            Library::Ended { .. } => return Ok(Found::Nothing),
            lives @ Library::Lives(_) => lives,
        };
        let (op, now) = (format!("a replay of {}", self.watched.op), Instant::now());
        let watched = Watched { op, issued: now, timeout: Duration::ZERO, ..self.watched.clone() };
        let seen = Seen { passed: false, among_others: false, hangs_when_failed: true };
        let engine = &self.engine;
        Ok(engine.watchdog.look(&*engine.group, &watched, library, seen, now))
    }

    /// Ends all communicators of the group, which unblocks calls that hang.
    pub fn abort(&self) {
        self.engine.abort();
    }

    /// For the statistics. `timed`: this is the moment of its end.
    pub fn ended(&self, well: bool, timed: bool) {
        self.leave();
        self.notes.iter().for_each(|note| note.end(well, timed));
    }

    /// How each call travels.
    pub fn explain(&self) -> Vec<Carried> {
        let several = self.calls.len();
        self.calls
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
                    name: call.name.clone(),
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

impl Lowered {
    /// Where the library sends from and receives to.
    fn memory(&self, place: &Placed) -> (Cow<'_, [Span]>, Cow<'_, [Span]>) {
        (self.layout.send.at(place.send), self.layout.received(place.send, place.recv))
    }

    /// The library itself scales by a factor (its PREMUL_SUM), which the launch must pass.
    pub fn is_premul(&self) -> bool {
        matches!(self.lowering.op, ReduceOp::PremulSum(_))
    }
}
