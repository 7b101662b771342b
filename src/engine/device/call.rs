//! Calls on devices that are one launch: onto a raw stream, how they stand, how they travelled.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::communicator::{Call, Message};
use super::communicators::DeviceComm;
use super::engine::{Counted, DeviceEngine, lock};
use super::launch::{Job, Launched, launch};
use super::libs::nccl::profiler;
use super::lowering::Recipe;
use super::runtime::{SPARES_CAPTURES, Stream};
use super::watchdog::{Library, Watched};
use crate::error::{Error, Result};
use crate::types::{Kind, ReduceOp, Span};

/// Calls that are one launch, from their check to their end.
pub struct DeviceCall {
    pub(super) engine: Arc<DeviceEngine>,
    pub(super) device: i32,
    /// `None` where it has ended in order, and its operations before it.
    pub(super) communicator: Option<Arc<DeviceComm>>,
    pub(super) watched: Watched,
    pub(super) calls: Vec<Lowered>,
    pub(super) notes: Vec<Box<dyn Counted>>,
    /// Host memory that the library was given; it stays until the device has passed the calls.
    pub(super) launched: Mutex<Vec<Launched>>,
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
    /// What the library says that it ran; empty where it does not say.
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
    pub recipe: Recipe,
}

/// Where the memory of one call lies, after the local steps before it.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'a> {
    pub factor: usize,
    pub send: &'a [Span],
    pub recv: &'a [Span],
}

impl DeviceCall {
    pub fn number(&self) -> u64 {
        self.watched.number
    }

    pub fn calls(&self) -> &[Lowered] {
        &self.calls
    }

    /// Puts the calls on a raw stream, as one launch where there are several; what the library was given stays until this
    /// is dropped.
    pub fn launch(&self, placed: &[Placed<'_>], stream: Stream) -> Result<()> {
        let communicator = self.communicator.as_ref().ok_or_else(|| Error::Bug("sagellm: nothing to launch".into()))?;
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

    fn one(&self, communicator: &DeviceComm, call: &Lowered, place: &Placed<'_>, stream: Stream) -> Result<Launched> {
        let library = communicator.library();
        let Placed { factor, send, recv } = *place;
        let (recipe, root) = (&call.recipe, call.root);
        let job = Job { recipe, rank: library.rank(), ranks: library.ranks(), root, factor, send, recv };
        launch(library, &*self.engine.runtime, &job, stream)
    }

    fn several(&self, communicator: &DeviceComm, placed: &[Placed<'_>], stream: Stream) -> Result<()> {
        let me = self.engine.group.rank() as u32;
        let mut messages = Vec::new();
        for (call, place) in self.calls.iter().zip(placed) {
            if !call.kind.is_p2p() {
                lock(&self.launched).push(self.one(communicator, call, place, stream)?);
            } else if call.peer != me {
                // One to oneself is a copy, which the shim has made.
                let part = |spans: &[Span], sends: bool| {
                    let message = |span: &Span| Message { peer: call.root, sends, addr: span.addr, bytes: span.bytes };
                    spans.iter().filter(|span| span.bytes > 0).map(message).collect::<Vec<Message>>()
                };
                messages.extend(part(place.send, true));
                messages.extend(part(place.recv, false));
            }
        }
        // Messages under way together cannot wait for one another, whatever their order on the ranks.
        if !messages.is_empty() {
            let kept = communicator.library().call(&Call::Exchange(&messages), stream)?;
            lock(&self.launched).push(Launched::of(kept));
        }
        Ok(())
    }

    /// Makes this thread ask its device without breaking another thread's capture, until `poll` with what this returns.
    pub fn before_poll(&self) -> Result<u32> {
        self.engine.runtime.set_device(self.device)?;
        self.engine.runtime.exchange_capture_mode(SPARES_CAPTURES)
    }

    /// Why the calls will not end, or ended badly; `None` while they run and when they ended well. `passed`: the device
    /// has executed them. On an error all communicators of the group are aborted, which unblocks calls that hang.
    pub fn poll(&self, passed: bool, mode: u32) -> Result<()> {
        self.engine.runtime.exchange_capture_mode(mode)?;
        let engine = &self.engine;
        let library = match &self.communicator {
            None => Library::Ended { drained: true },
            Some(communicator) => communicator.state(),
        };
        match engine.watchdog.look(&*engine.group, &self.watched, library, passed, Instant::now()) {
            Some(error) => {
                engine.abort();
                Err(error)
            }
            None => Ok(()),
        }
    }

    /// For the statistics. `timed`: this is the moment of its end.
    pub fn ended(&self, well: bool, timed: bool) {
        self.notes.iter().for_each(|note| note.end(well, timed));
    }

    /// How each call travels.
    pub fn explain(&self) -> Vec<Carried> {
        let several = self.calls.len();
        self.calls
            .iter()
            .map(|call| {
                let mut why = call.recipe.why.clone();
                if why.is_empty() {
                    why = "one call of the library, which chooses the algorithm".to_string();
                }
                if call.tensors > 1 {
                    why += &format!("; {} tensors in one call", call.tensors);
                }
                if several > 1 {
                    why += &format!("; one of {several} calls issued together");
                }
                let ran = self.communicator.as_ref().and_then(|own| profiler::ran(own.name(), call.kind, call.bytes));
                let ran = ran.map(|ran| {
                    let (algorithm, protocol) = (ran.algorithm.text(), ran.protocol.text());
                    format!("{algorithm}, protocol {protocol}, {} channels", ran.channels)
                });
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

impl Lowered {
    /// The library itself scales by a factor (its PREMUL_SUM), which the launch must pass.
    pub fn is_premul(&self) -> bool {
        matches!(self.recipe.op, ReduceOp::PremulSum(_))
    }
}
