//! A group's devices of one type: its communicators over the vendor's library, the raw streams and events through which
//! torch's streams and the library's work wait for one another, and what is known when such work does not end.
//!
//! Operations on devices have numbers of their own, because those of the engine index memory that all ranks share and
//! may have no gaps; c10d sees the sum of both. Nothing here waits for a device. Whoever makes or ends a communicator waits for
//! its other ranks.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use super::Group;
use crate::config;
use crate::engine::device::libs::nccl::{profiler, tuner};
use crate::engine::device::lowering::Capabilities;
use crate::engine::device::pairs::Pairs;
use crate::engine::device::{
    Api, Asked, Call, Communicator, Event, GoOn, Hints, Job, Launched, Message, Recipe, Runtime, SPARES_CAPTURES,
    Setup, Split, Stream, Vendor, launch, open, open_runtime, recipe,
};
use crate::error::{Error, Result};
use crate::host::Counting;
use crate::os::watch;
use crate::select::rules::Way;
use crate::types::{Kind, Span};

pub struct Devices {
    group: Arc<Group>,
    /// torch's name of the device type.
    device_type: String,
    vendor: Vendor,
    api: Arc<dyn Api>,
    runtime: Arc<dyn Runtime>,
    /// Raw streams of ours by device and lane, where torch hides its own.
    streams: Mutex<HashMap<(i32, i32), Stream>>,
    /// Events that nobody uses now, by device.
    events: Mutex<HashMap<i32, Vec<Event>>>,
    /// How many communicators of each kind ("all", "0-1") were made so far, for their names.
    made: Mutex<HashMap<String, u32>>,
    /// Who makes a communicator for messages with whom, from the first on.
    pairs: Mutex<Option<Pairs>>,
}

/// One communicator of a group: of all its ranks, or of two that exchange messages.
pub struct Member {
    devices: Arc<Devices>,
    communicator: Arc<dyn Communicator>,
    name: String,
    /// How often communicators were made out of it; the same on all its ranks, which do that together.
    parts: AtomicU32,
    /// A library that asks which algorithm to take is told by our rules while this lives.
    _steered: tuner::Steered,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Devices {
    /// Opens the libraries for tensors on devices of this type. `vendor` is "auto" or a vendor's name. An error says why
    /// there are none, and what to do.
    pub fn open(group: &Arc<Group>, device_type: &str, vendor: &str, hints: &Hints) -> Result<Devices> {
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
        log::info!(
            "group '{}': {device_type} tensors by {}, {}",
            group.config.name,
            api.describe(),
            runtime.describe()
        );
        Ok(Devices {
            group: Arc::clone(group),
            device_type: device_type.to_string(),
            vendor,
            api,
            runtime,
            streams: Mutex::new(HashMap::new()),
            events: Mutex::new(HashMap::new()),
            made: Mutex::new(HashMap::new()),
            pairs: Mutex::new(None),
        })
    }

    pub fn describe(&self) -> String {
        self.api.describe()
    }

    pub fn capabilities(&self) -> &Capabilities {
        self.api.capabilities()
    }

    /// On the rank that the others get it from.
    pub fn unique_id(&self) -> Result<Vec<u8>> {
        self.api.unique_id()
    }

    /// What the library is asked for an operation of so many bytes, or the reason why it cannot be done.
    pub fn recipe(&self, asked: &Asked, bytes: u64) -> Result<Recipe> {
        let whole = recipe(asked, self.capabilities()).map_err(Error::Invalid)?;
        match tuner::said(&self.group.policy, asked.kind, bytes) {
            Some(Way::Hosts { algorithm, .. }) if whole.why.is_empty() => {
                let why = format!("one call of the library; a rule or line names {}", algorithm.name());
                Ok(Recipe { why, ..whole })
            }
            _ => Ok(whole),
        }
    }

    /// Joins the communicator of `id` as rank `rank` of `ranks`; returns when all are there. `whose`: the same words on all
    /// of these ranks, and on no others of the group.
    pub fn join(
        self: &Arc<Self>,
        whose: &str,
        id: &[u8],
        device: i32,
        (rank, ranks): (u32, u32),
        deadline: Duration,
    ) -> Result<Member> {
        self.member(whose, device, |name, algorithm| {
            Arc::clone(&self.api).create(Setup {
                id: id.to_vec(),
                rank,
                ranks,
                device,
                deadline,
                go_on: self.joining(whose),
                name,
                algorithm,
                runtime: Arc::clone(&self.runtime),
            })
        })
    }

    /// Makes a communicator by a name that tells whose rules hold for it.
    fn member(
        self: &Arc<Self>,
        whose: &str,
        device: i32,
        make: impl FnOnce(String, String) -> Result<Arc<dyn Communicator>>,
    ) -> Result<Member> {
        // Some libraries want the same name from all its ranks. They make theirs in one order, but not those of others.
        let count = lock(&self.made).entry(whose.to_string()).and_modify(|count| *count += 1).or_insert(0).to_owned();
        let group = &self.group.config.name;
        let name = format!("sagellm:{group}:{whose}:{count}");
        let policy = Arc::clone(&self.group.policy);
        let algorithm = tuner::algorithm_of_all(&policy).to_string();
        let plugged = self.vendor == Vendor::Nccl && (tuner::steers(&policy) || config::explains_devices());
        let steered = tuner::steer(&name, policy);
        if plugged {
            tuner::announce();
        }
        self.runtime.set_device(device)?;
        let communicator = make(name.clone(), algorithm).inspect_err(|error| {
            // Nobody knows which ranks are in the library still.
            if matches!(error, Error::Timeout(_) | Error::Interrupted(_)) {
                self.group.poison(error.clone());
            }
        })?;
        if plugged && !tuner::was_told_of(&name) {
            log::warn!(
                "group '{group}': its rules, and SAGELLM_EXPLAIN=1, come too late for NCCL, which looks for plugins with \
                 the first communicator of a process, or the variable NCCL_PROFILER_PLUGIN names another: set \
                 NCCL_TUNER_PLUGIN and NCCL_PROFILER_PLUGIN to {} before the program starts",
                tuner::file()
            );
        }
        let (rank, ranks) = (communicator.rank(), communicator.ranks());
        log::info!("group '{group}': {} {device} is rank {rank} of {ranks} in '{name}'", self.device_type);
        let (devices, parts) = (Arc::clone(self), AtomicU32::new(0));
        Ok(Member { devices, communicator, name, parts, _steered: steered })
    }

    /// Ends a wait for the other ranks of a communicator when a signal came or the group has failed.
    fn joining(&self, whose: &str) -> GoOn {
        let (group, whose) = (Arc::downgrade(&self.group), whose.to_string());
        Arc::new(move || {
            let Some(group) = group.upgrade() else { return Ok(()) };
            if let Some(fault) = group.reported(None).or_else(|| group.fault()) {
                return Err(fault);
            }
            if group.host.interrupted() {
                let (rank, name) = (group.config.rank, &group.config.name);
                return Err(Error::Interrupted(format!(
                    "sagellm: rank {rank} of group '{name}': interrupted while it joined the communicator '{whose}'"
                )));
            }
            Ok(())
        })
    }

    /// The rank with which this one shall make the communicators of messages now, which the other is about to do as well:
    /// `peer`, or first another one that waits for this rank, after which to ask again, with the time that has `passed`.
    /// `known` are those with whom this device has them. `store` is asked for in the first call of a group.
    pub fn next_pair(
        &self,
        peer: u32,
        known: &[u32],
        (passed, deadline): (Duration, Duration),
        store: impl FnOnce() -> Box<dyn Counting + Send>,
    ) -> Result<u32> {
        if self.group.id == [0; 16] {
            return Ok(peer); // a group too large to have met: nothing keeps its keys apart from those of an earlier one
        }
        let mut pairs = lock(&self.pairs);
        let pairs = pairs.get_or_insert_with(|| {
            let place = format!("pairs/{}/{}", self.device_type, self.group.id());
            Pairs::new(store(), place, self.group.config.rank)
        });
        let begin = Instant::now();
        let may_wait = || self.may_wait_for(peer as usize, passed + begin.elapsed(), deadline);
        let mut pause = Duration::from_micros(200);
        let next = pairs.next(peer as usize, known, &mut || {
            may_wait()?;
            std::thread::sleep(pause);
            pause = (pause * 3 / 2).min(Duration::from_millis(20));
            Ok(())
        });
        match next {
            Ok(next) => Ok(next as u32),
            Err(error @ Error::System(_)) => {
                // The store may have gone with the rank that served it, of whose end the kernel tells a moment later.
                for _ in 0..50 {
                    may_wait()?;
                    std::thread::sleep(Duration::from_millis(5));
                }
                self.group.poison(error.clone());
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    /// An error where a wait for the other rank of a pair shall end.
    fn may_wait_for(&self, peer: usize, waited: Duration, deadline: Duration) -> Result<()> {
        let group = &self.group;
        let (rank, name) = (group.config.rank, &group.config.name);
        if let Some(fault) = group.reported(None).or_else(|| group.fault()) {
            return Err(fault);
        }
        if group.control.left(peer) || group.dead_ranks().any(|dead| dead == peer) {
            let error = group.death_of(peer, "waits for its first message with it");
            group.poison(error.clone());
            return Err(error);
        }
        if group.host.interrupted() {
            return Err(Error::Interrupted(format!(
                "sagellm: rank {rank} of group '{name}': interrupted in its first message with rank {peer}"
            )));
        }
        if !deadline.is_zero() && waited >= deadline {
            let error = Error::Timeout(format!(
                "sagellm: rank {rank} of group '{name}' Timed out after {:.1} s in its first message with rank {peer} on \
                 {}: rank {peer} has not begun one with rank {rank}, or waits for another rank itself. Each send needs \
                 the receive of its peer",
                deadline.as_secs_f64(),
                self.device_type
            ));
            group.poison(error.clone());
            return Err(error);
        }
        Ok(())
    }

    // What the shim's streams need.

    pub fn set_device(&self, device: i32) -> Result<()> {
        self.runtime.set_device(device)
    }

    /// True while what is put on a raw stream is captured for a graph.
    pub fn capturing(&self, stream: Stream) -> Result<bool> {
        self.runtime.capturing(stream)
    }

    /// Makes this thread ask its device without breaking another thread's capture; what to hand to `capture_as_before`.
    pub fn spare_captures(&self, device: i32) -> Result<u32> {
        self.runtime.set_device(device)?;
        self.runtime.exchange_capture_mode(SPARES_CAPTURES)
    }

    pub fn capture_as_before(&self, mode: u32) -> Result<()> {
        self.runtime.exchange_capture_mode(mode).map(drop)
    }

    /// Our raw stream on this device, which is current on this thread.
    pub fn stream(&self, device: i32, lane: i32) -> Result<Stream> {
        let mut streams = lock(&self.streams);
        if let Some(stream) = streams.get(&(device, lane)) {
            return Ok(*stream);
        }
        let stream = self.runtime.stream_create()?;
        streams.insert((device, lane), stream);
        Ok(stream)
    }

    pub fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.runtime.event_wait(stream, event)
    }

    /// An event behind all that is on the stream now, the caller's until `release`.
    pub fn record(&self, device: i32, stream: Stream) -> Result<Event> {
        let free = lock(&self.events).get_mut(&device).and_then(Vec::pop);
        let event = free.map_or_else(|| self.runtime.event_create(false), Ok)?;
        self.runtime.event_record(event, stream)?;
        Ok(event)
    }

    pub fn release(&self, device: i32, event: Event) {
        lock(&self.events).entry(device).or_default().push(event);
    }

    /// The library told of a failure: the group has failed, on all ranks.
    pub fn fail(&self, text: &str) {
        self.group.poison(Error::System(text.to_string()));
    }

    /// Why work on a device that is under way will not end: the group failed, or a peer is gone. `None` while all is well.
    /// Where it needs `only` one other rank, the others may leave the group meanwhile.
    pub fn trouble(&self, what: &str, only: Option<usize>) -> Option<Error> {
        let group = &self.group;
        if let Some(fault) = group.reported(None).or_else(|| group.fault()) {
            return Some(fault);
        }
        let left = |rank| group.control.left(rank);
        let rank = group.dead_ranks().find(|rank| only.is_none_or(|only| only == *rank) || !left(*rank))?;
        let error = group.death_of(rank, &format!("waits for {what}"));
        group.poison(error.clone());
        Some(error)
    }

    /// The deadline of an operation passed: who has come how far, as far as this host can see. Poisons the group.
    pub fn stall(&self, what: &str, number: u64, after: Duration) -> Error {
        let group = &self.group;
        let mut others = Vec::new();
        for rank in (0..group.peers.len()).filter(|rank| *rank != group.config.rank) {
            if let Some((last, kind)) = group.control.launched(rank) {
                let pid = group.peers[rank].pid;
                let kind = Kind::from_u8(kind).map_or("nothing", Kind::name);
                others.push(if last < number {
                    format!("rank {rank} (pid {pid}) has not issued it, its last on a device is {kind} number {last}")
                } else {
                    format!("rank {rank} (pid {pid}) has issued it")
                });
            }
        }
        if others.is_empty() {
            others.push("how far the others have come is not known, they are on other hosts".to_string());
        }
        let (rank, name) = (group.config.rank, &group.config.name);
        let error = Error::Timeout(format!(
            "sagellm: rank {rank} of group '{name}' Timed out after {:.1} s in {what}: {}. Every rank must call the same \
             operations in the same order; where a rank needs longer, pass a larger timeout",
            after.as_secs_f64(),
            others.join("; ")
        ));
        group.poison(error.clone());
        error
    }

    /// The number of an operation that is about to be launched, which the peers on this host are told. An error if the
    /// group cannot be used; then no number is taken. Messages have none.
    pub fn next_number(&self, kind: Kind) -> Result<u64> {
        self.group.usable(kind.name())?;
        if kind.is_p2p() {
            return Ok(0);
        }
        let number = self.group.device_number.fetch_add(1, Ordering::Relaxed) + 1;
        self.group.control.set_launched(number, kind as u8);
        Ok(number)
    }
}

impl Member {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn rank(&self) -> u32 {
        self.communicator.rank()
    }

    pub fn ranks(&self) -> u32 {
        self.communicator.ranks()
    }

    /// Whether the library can make the communicator of these of its ranks out of it.
    pub fn can_split(&self, members: &[u32]) -> bool {
        self.communicator.can_split(members)
    }

    /// The communicator of the group of `members`, some of its ranks, whose devices are `child`. All its ranks call this or
    /// `stay_out` at once; the groups that they make have no rank in common.
    pub fn split(&self, child: &Arc<Devices>, members: &[u32], deadline: Duration) -> Result<Member> {
        child.member("all", self.communicator.device(), |name, algorithm| {
            let made = self.part(members, deadline, name, algorithm)?;
            made.ok_or_else(|| Error::Bug("sagellm: a member got no part of a communicator".into()))
        })
    }

    /// `split` by a rank that is in none of the groups. `members`: those of any.
    pub fn stay_out(&self, members: &[u32], deadline: Duration) -> Result<()> {
        self.part(members, deadline, String::new(), String::new()).map(drop)
    }

    fn part(
        &self,
        members: &[u32],
        deadline: Duration,
        name: String,
        algorithm: String,
    ) -> Result<Option<Arc<dyn Communicator>>> {
        // No other group that is made by this call has the same first member, and no earlier call the same turn.
        let turn = self.parts.fetch_add(1, Ordering::Relaxed);
        let first = members.iter().min().copied().unwrap_or(0);
        let number = turn.wrapping_mul(self.ranks()).wrapping_add(first) & (i32::MAX as u32);
        let go_on = self.devices.joining(&name);
        self.communicator.split(&Split { members: members.to_vec(), number, deadline, go_on, name, algorithm })
    }

    pub fn can_shrink(&self) -> bool {
        self.devices.capabilities().shrink
    }

    /// The communicator of a group of all its ranks but `exclude`, which do not call. What is under way in it is aborted.
    pub fn shrink(&self, child: &Arc<Devices>, exclude: &[u32], deadline: Duration) -> Result<Member> {
        child.member("all", self.communicator.device(), |name, _| {
            self.communicator.shrink(exclude, deadline, child.joining(&name), &name)
        })
    }

    /// Puts an operation on a raw stream; `root` is a rank of this communicator, `factor` as in `Job`. What it returns must
    /// stay until the stream has passed the operation.
    pub fn launch(
        &self,
        recipe: &Recipe,
        (root, factor): (u32, usize),
        (send, recv): (&[Span], &[Span]),
        stream: Stream,
    ) -> Result<Launched> {
        let job = Job { recipe, rank: self.rank(), ranks: self.ranks(), root, factor, send, recv };
        launch(&*self.communicator, &*self.devices.runtime, &job, stream)
    }

    /// Puts messages on a raw stream, all under way together.
    pub fn exchange(&self, messages: &[Message], stream: Stream) -> Result<Launched> {
        if messages.is_empty() {
            return Ok(Launched::default());
        }
        self.communicator.call(&Call::Exchange(messages), stream).map(Launched::of)
    }

    /// Launches of this thread from here to `end_group` are one.
    pub fn start_group(&self) -> Result<()> {
        self.communicator.group_start()
    }

    pub fn end_group(&self) -> Result<()> {
        self.communicator.group_end()
    }

    /// What the library says that ran last for collectives of this kind and size; empty where it does not say.
    pub fn ran(&self, kind: Kind, bytes: u64) -> String {
        profiler::ran(&self.name, kind, bytes).map_or_else(String::new, |ran| {
            let (algorithm, protocol) = (ran.algorithm.text(), ran.protocol.text());
            format!("{algorithm}, protocol {protocol}, {} channels", ran.channels)
        })
    }

    /// An error that came up since. Never waits.
    pub fn poll(&self) -> Result<()> {
        self.communicator.poll()
    }

    /// Ends it although operations hang.
    pub fn abort(&self) {
        if let Err(error) = self.communicator.abort() {
            log::warn!("{}: {error}", self.name);
        }
    }

    /// Ends it together with its other ranks, when its operations are done. They are waited for as long as they live, at
    /// most until the deadline, and no longer than `ALONE` once one is gone; what has not ended then is left behind on its
    /// thread. False where a signal handler raised meanwhile.
    pub fn close(&self, deadline: Duration) -> bool {
        const ALONE: Duration = Duration::from_secs(5);
        const LOOK: Duration = Duration::from_millis(50);
        let communicator = Arc::clone(&self.communicator);
        let (done, result) = mpsc::channel();
        let started = watch::spawn("sagellm-close", move || {
            let _ = done.send(communicator.close(deadline)); // nobody there: it was left behind
        });
        if let Err(error) = started {
            log::warn!("{}: no thread to end it: {error}", self.name);
            return true;
        }
        let group = &self.devices.group;
        let begin = Instant::now();
        let mut patience = deadline;
        loop {
            match result.recv_timeout(LOOK.min(patience)) {
                Ok(Err(error)) => log::info!("{}: {error}", self.name),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if group.host.interrupted() {
                        return false;
                    }
                    let waited = begin.elapsed();
                    if group.fault().is_some() || group.dead_ranks().next().is_some() {
                        patience = patience.min(waited + ALONE);
                    }
                    if waited < patience {
                        continue;
                    }
                    log::info!("{}: its end was not waited for any longer: a rank is gone, or late", self.name);
                }
                Ok(Ok(())) | Err(mpsc::RecvTimeoutError::Disconnected) => {}
            }
            return true;
        }
    }
}
