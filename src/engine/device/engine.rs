//! A group's devices of one type: its communicators over the vendor's library, its calls on them from their first check
//! to their end, and the raw streams and events through which torch's streams and the library's work wait for one
//! another. The group itself is known here as a trait alone ([`DeviceGroup`]).
//!
//! A call comes by three times: [`DeviceEngine::begin`] says what must be done to its tensors beside the library and
//! takes its number, [`DeviceCall::launch`] puts it on a raw stream, [`DeviceCall::poll`] says how it stands.
//!
//! Operations on devices have numbers of their own, because those of the CPU's engine index memory that all ranks share
//! and may have no gaps; c10d sees the sum of both. Nothing here waits for a device. Who makes or ends a communicator
//! waits for its other ranks.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::call::{DeviceCall, Lowered};
use super::communicator::Api;
use super::communicators::{Communicators, Exchange, Ranks};
use super::libs::loader::Hints;
use super::libs::nccl::tuner;
use super::lowering::{Capabilities, LoweringInput, recipe};
use super::runtime::{Event, Runtime, Stream};
use super::watchdog::{Watchdog, Watched, gone};
use super::{Vendor, open, open_runtime};
use crate::error::{Error, Result};
use crate::select::Policy;
use crate::select::rules::AlgorithmChoice;
use crate::types::{CallNote, Kind};

/// What the engine asks of the group whose devices it serves.
pub trait DeviceGroup: Send + Sync {
    fn name(&self) -> &str;
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    /// Keeps the group's keys in the store apart from those of any other attempt to make it; `None` where the ranks have
    /// not met.
    fn id(&self) -> Option<String>;
    fn policy(&self) -> &Arc<Policy>;
    /// An error where no operation may start.
    fn usable(&self, what: &str) -> Result<()>;
    /// Why the group has failed, here or on a peer that said so.
    fn fault(&self) -> Option<Error>;
    /// Fails it, on all ranks; the first error counts.
    fn fail(&self, error: Error);
    /// True when a signal handler of the program raised.
    fn interrupted(&self) -> bool;
    /// Ranks whose process has ended.
    fn dead_ranks(&self) -> Vec<usize>;
    /// Whether a rank has left the group in order.
    fn left(&self, rank: usize) -> bool;
    fn death_of(&self, rank: usize, during: &str) -> Error;
    /// Takes the next number of a collective on a device, and tells the peers on this host.
    fn next_number(&self, kind: Kind) -> u64;
    /// The peers on this host.
    fn neighbours(&self) -> Vec<Neighbour>;
    /// Enters a call into the statistics, after its number was taken.
    fn count(&self, call: &DeviceRequest<'_>) -> Box<dyn Counted>;
}

/// How far a peer on this host has come: its last collective on a device.
#[derive(Clone, Copy, Debug)]
pub struct Neighbour {
    pub rank: usize,
    pub pid: i32,
    pub number: u64,
    pub kind: u8,
}

/// A call in the statistics; dropped before its end, it failed.
pub trait Counted: Send + Sync {
    /// `timed`: this is the moment in which it ended.
    fn end(&self, well: bool, timed: bool);
}

/// A call as its caller has it.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRequest<'a> {
    /// The operation's name in messages.
    pub name: &'a str,
    /// `ranks` is filled in by the engine.
    pub asked: LoweringInput,
    /// Root, or the peer of a message.
    pub root: u32,
    pub tag: u32,
    /// Bytes of the inputs and of the outputs.
    pub read: u64,
    pub written: u64,
    pub note: CallNote,
}

/// How the calls of one launch are made.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub device: i32,
    /// A coalescing region: all ranks know of its calls, messages among them, so these need no communicator of their own.
    pub region: bool,
    /// The caller's stream is being captured into a graph.
    pub capturing: bool,
    /// Zero: none. Of the calls, and of the making of a communicator.
    pub timeout: Duration,
    pub join_timeout: Duration,
}

/// A group's devices of one type.
pub struct DeviceEngine {
    pub(super) group: Arc<dyn DeviceGroup>,
    /// torch's name of the device type.
    pub(super) device_type: String,
    pub(super) vendor: Vendor,
    pub(super) api: Arc<dyn Api>,
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) communicators: Communicators,
    /// Raw streams of ours by device and lane, where torch hides its own.
    streams: Mutex<HashMap<(i32, i32), Stream>>,
    /// Events that nobody uses now, by device.
    events: Mutex<HashMap<i32, Vec<Event>>>,
    /// Of the last call, for messages. Written by `begin`, read by `behind`; relaxed, because nothing is ordered by it.
    last_number: AtomicU64,
    pub(super) watchdog: Watchdog,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DeviceEngine {
    /// Opens the libraries for tensors on devices of this type. `vendor` is "auto" or a vendor's name. An error says why
    /// there are none, and what to do.
    pub fn open(group: Arc<dyn DeviceGroup>, device_type: &str, vendor: &str, hints: &Hints) -> Result<DeviceEngine> {
        let known = || Vendor::ALL.map(|vendor| vendor.device()).join(", ");
        let vendor = match vendor {
            "auto" => Vendor::of_device(device_type).ok_or_else(|| {
                let known = known();
                Error::System(format!(
                    "sagellm: no vendor library is known for {device_type} tensors, only for {known}"
                ))
            }),
            name => Vendor::from_name(name).ok_or_else(|| {
                let known = Vendor::ALL.map(Vendor::name).join(", ");
                Error::Invalid(format!("sagellm: the option vendor is {name:?}, expected auto, host or one of {known}"))
            }),
        }?;
        let api = open(vendor, hints)?;
        // A path names the library of communicators; that of streams is found by its own variable or name.
        let runtime = open_runtime(vendor, &Hints { path: None, ..hints.clone() })?;
        let name = group.name();
        log::info!("group '{name}': {device_type} tensors by {}, {}", api.describe(), runtime.describe());
        Ok(DeviceEngine {
            group,
            device_type: device_type.to_string(),
            vendor,
            api,
            runtime,
            communicators: Communicators::default(),
            streams: Mutex::new(HashMap::new()),
            events: Mutex::new(HashMap::new()),
            last_number: AtomicU64::new(0),
            watchdog: Watchdog::default(),
        })
    }

    /// The library, its version and file.
    pub fn describe(&self) -> String {
        self.api.describe()
    }

    pub fn capabilities(&self) -> &Capabilities {
        self.api.capabilities()
    }

    /// Checks and lowers calls that are one launch, finds their communicator, and takes their numbers. Never waits for a
    /// peer, but for the first call that needs a communicator, which is made when all its ranks are there. After an error
    /// nothing was sent.
    pub fn begin(
        self: &Arc<Self>,
        calls: &[DeviceRequest<'_>],
        terms: &Terms,
        exchange: &dyn Exchange,
    ) -> Result<DeviceCall> {
        let first = calls.first().ok_or_else(|| Error::Bug("sagellm: a launch of no calls".into()))?;
        self.check(calls, terms)?;
        let ranks = self.ranks_of(first, terms.region);
        let lowered = calls.iter().map(|call| self.lower(call, ranks)).collect::<Result<Vec<Lowered>>>()?;
        if terms.capturing && !self.communicators.has(terms.device, ranks) {
            return Err(Error::Invalid(format!(
                "sagellm {}: the current stream of {} is being captured into a graph, and the group has no communicator \
                 for it yet; make one such call before the capture",
                first.name,
                self.place(terms.device)
            )));
        }
        let communicator = self.communicator(terms.device, ranks, exchange, terms.join_timeout)?;
        let (number, notes) = self.count(calls)?;
        let watched = Watched {
            op: first.name.to_string(),
            number,
            device: self.place(terms.device),
            peer: first.asked.kind.is_p2p().then_some(first.root),
            with_peer_alone: ranks != Ranks::All,
            issued: Instant::now(),
            timeout: terms.timeout,
        };
        let launched = Mutex::new(Vec::new());
        let (engine, device, communicator) = (Arc::clone(self), terms.device, Some(communicator));
        Ok(DeviceCall { engine, device, communicator, watched, calls: lowered, notes, launched })
    }

    /// What comes behind all collectives that were put on the streams of a device: it has no call of the library, and is
    /// watched until they have ended.
    pub fn behind(self: &Arc<Self>, device: i32, timeout: Duration) -> DeviceCall {
        DeviceCall {
            engine: Arc::clone(self),
            device,
            communicator: self.communicators.find(device, Ranks::All),
            watched: Watched {
                op: "barrier behind the collectives".to_string(),
                number: self.last_number.load(Ordering::Relaxed),
                device: self.place(device),
                peer: None,
                with_peer_alone: false,
                issued: Instant::now(),
                timeout,
            },
            calls: Vec::new(),
            notes: Vec::new(),
            launched: Mutex::new(Vec::new()),
        }
    }

    /// "npu:0"
    fn place(&self, device: i32) -> String {
        format!("{}:{device}", self.device_type)
    }

    /// A single message has a communicator for its direction, so that two ranks that both send first do not lock up.
    fn ranks_of(&self, first: &DeviceRequest<'_>, region: bool) -> Ranks {
        let me = self.group.rank() as u32;
        match first.asked.kind {
            Kind::Send if !region => Ranks::Way { from: me, to: first.root },
            Kind::Recv if !region => Ranks::Way { from: first.root, to: me },
            _ => Ranks::All,
        }
    }

    /// Refuses what no rank shall be sent.
    fn check(&self, calls: &[DeviceRequest<'_>], terms: &Terms) -> Result<()> {
        let first = &calls[0];
        if terms.capturing && first.asked.kind == Kind::Barrier {
            return Err(Error::Invalid(format!(
                "sagellm {}: the current stream of {} is being captured into a graph, which cannot hold a barrier: the host \
                 waits for it; call it outside of the capture",
                first.name,
                self.place(terms.device)
            )));
        }
        if !terms.region {
            return Ok(());
        }
        let me = self.group.rank();
        let own = |kind: Kind| {
            let own = calls.iter().filter(move |call| call.asked.kind == kind && call.root as usize == me);
            own.map(move |call| if kind == Kind::Send { call.read } else { call.written }).collect::<Vec<u64>>()
        };
        let (sent, received) = (own(Kind::Send), own(Kind::Recv));
        if sent == received {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "sagellm batch_isend_irecv: rank {me} sends itself messages of {sent:?} bytes, and receives {received:?} from \
             itself in the same batch; expected equal lists"
        )))
    }

    /// What the library is asked for a call, or the reason why it cannot be done.
    fn lower(&self, call: &DeviceRequest<'_>, ranks: Ranks) -> Result<Lowered> {
        let (me, size) = (self.group.rank() as u32, self.group.size());
        let asked = LoweringInput { ranks: ranks.count(size), ..call.asked };
        let mut recipe = recipe(&asked, self.capabilities()).map_err(Error::Invalid)?;
        if let Some(AlgorithmChoice::Hosts { algorithm, .. }) = tuner::said(self.group.policy(), asked.kind, call.read)
            && recipe.why.is_empty()
        {
            recipe.why = format!("one call of the library; a rule or line names {}", algorithm.name());
        }
        // In a pair the lower rank is 0.
        let root = if ranks == Ranks::All { call.root } else { u32::from(call.root > me) };
        Ok(Lowered {
            name: call.name.to_string(),
            kind: asked.kind,
            root,
            peer: call.root,
            tensors: call.note.tensors,
            bytes: call.read.max(call.written),
            recipe,
        })
    }

    /// Takes the numbers of the calls and enters them into the statistics. Messages have none.
    fn count(&self, calls: &[DeviceRequest<'_>]) -> Result<(u64, Vec<Box<dyn Counted>>)> {
        let mut number = 0;
        let mut notes = Vec::with_capacity(calls.len());
        for call in calls {
            let kind = call.asked.kind;
            if call.note.counts || number == 0 {
                self.group.usable(kind.name())?;
                number = if kind.is_p2p() { 0 } else { self.group.next_number(kind) };
            }
            notes.push(self.group.count(call));
        }
        if number != 0 {
            self.last_number.store(number, Ordering::Relaxed);
        }
        Ok((number, notes))
    }

    // What the shim's streams need.

    /// True while what is put on a raw stream is captured for a graph.
    pub fn capturing(&self, device: i32, stream: Stream) -> Result<bool> {
        self.runtime.set_device(device)?;
        self.runtime.capturing(stream)
    }

    /// Our raw stream on a device, made when first asked for, behind an event. `told` are events of `mark` that nobody
    /// waits for any more.
    pub fn stream_behind(&self, device: i32, lane: i32, event: Event, told: &[Event]) -> Result<Stream> {
        self.runtime.set_device(device)?;
        lock(&self.events).entry(device).or_default().extend(told);
        let stream = {
            let mut streams = lock(&self.streams);
            match streams.get(&(device, lane)) {
                Some(stream) => *stream,
                None => *streams.entry((device, lane)).or_insert(self.runtime.stream_create()?),
            }
        };
        self.runtime.event_wait(stream, event)?;
        Ok(stream)
    }

    /// An event behind all that is on the stream of `stream_behind` now, on the same thread; the caller's until it hands it to `stream_behind` as told.
    pub fn mark(&self, device: i32, stream: Stream) -> Result<Event> {
        let free = lock(&self.events).get_mut(&device).and_then(Vec::pop);
        let event = free.map_or_else(|| self.runtime.event_create(false), Ok)?;
        self.runtime.event_record(event, stream)?;
        Ok(event)
    }

    /// True while nobody is gone and the group has not failed; with an error it fails.
    pub(super) fn whole(&self, what: &str) -> bool {
        match gone(&*self.group, what, None) {
            Some(error) => {
                self.group.fail(error);
                false
            }
            None => true,
        }
    }
}
