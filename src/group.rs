//! One process group: numbers, signatures, deadlines; what happens when something goes wrong; its beginning and end.
//!
//! `issue` gives an operation the group's next number and hands it to the engine, under the group's lock, which is also
//! the token of whoever drives it (`driver`). Operations end outside that lock, because their owners queue work of their
//! own. The first fault poisons the group, here and on the peers: everything pending and later fails with it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::driver::{self, Driven, Outcome, Patience};
use crate::engine::shm::area::Area;
use crate::engine::shm::layout::{Layout, MAX_RANKS};
use crate::engine::shm::meet::{self, Met};
use crate::engine::shm::p2p::Ended;
use crate::engine::shm::{Shm, signal};
use crate::engine::{local, solo};
use crate::error::{Error, Result};
pub use crate::host::{Completion, Host, Store};
pub use crate::op::Op as CoreOp;
use crate::op::{self};
use crate::reduce::{self, Kernel};
use crate::types::{ANY_RANK, Dtype, Kind, Request, Span};
use crate::{clock, watch};

/// Memory of one group's segment, at most.
const SEGMENT_CEILING: usize = 64 << 20;

enum Engine {
    Solo,
    Shm(Box<Shm>),
    /// Another backend serves the whole group; the reason.
    Delegate(String),
}

/// What the lock protects.
struct Inner {
    engine: Engine,
    /// Number of the last collective.
    number: u64,
    /// Messages to and receives from each rank.
    sent: Vec<u64>,
    received: Vec<u64>,
}

struct Peer {
    pid: i32,
    host: String,
    /// Set by the watch thread when the process has ended (release), read by drivers (acquire).
    dead: AtomicBool,
}

pub struct Group {
    config: Config,
    domain: u64,
    /// The process (by forks since the first group) that made this group: no other may touch it.
    generation: u32,
    patience: Patience,
    area: Option<Arc<Area>>,
    host: Arc<dyn Host>,
    peers: Vec<Peer>,
    /// Some peer is dead: one relaxed load on the way of every pass. Set after the peer's own flag.
    any_dead: AtomicBool,
    inner: Mutex<Inner>,
    /// Operations that have not ended. Changed under `inner`; read by anyone as a hint.
    pending: AtomicUsize,
    /// Last number issued, for readers that do not want the lock.
    last_number: AtomicU64,
    timeout_ms: AtomicU64,
    fault: OnceLock<Error>,
    closed: AtomicBool,
    monitored: Mutex<u64>,
    watch: Mutex<Option<watch::WatchGuard>>,
    /// Itself, for the operations it hands out.
    this: Weak<Group>,
}

/// An operation together with the group it belongs to: what a caller holds.
pub struct Op {
    core: Arc<CoreOp>,
    group: Arc<Group>,
}

struct NoHost;
impl Host for NoHost {
    fn interrupted(&self) -> bool {
        false
    }
}

impl Group {
    /// Meets the other ranks and builds the engine that serves them.
    pub fn connect(config: Config, store: &dyn Store, host: Arc<dyn Host>) -> Result<Arc<Group>> {
        watch::install();
        if watch::forked() {
            return Err(Error::Invalid(
                "sagellm: this process was forked from one that uses sagellm, whose threads it does not have. Start it \
                 with the 'spawn' or 'forkserver' method, or use sagellm only after the fork"
                    .to_string(),
            ));
        }
        if config.size == 0 || config.rank >= config.size {
            return Err(Error::Invalid(format!("sagellm: rank {} of a group of {} ranks", config.rank, config.size)));
        }
        if config.size == 1 {
            let engine = config.delegate_reason.clone().map_or(Engine::Solo, Engine::Delegate);
            return Ok(Group::build(config, engine, None, Vec::new(), 1, 0, host));
        }
        if config.size > MAX_RANKS {
            let reason = format!("{} ranks; the shared-memory engine serves up to {MAX_RANKS}", config.size);
            return Ok(Group::build(config, Engine::Delegate(reason), None, Vec::new(), 1, 0, host));
        }
        let ranks = config.size;
        let fitting =
            |headroom: usize| Layout::new(ranks, SEGMENT_CEILING.min(headroom / 4)).map_or(0, |layout| layout.total());
        match meet::meet(&config, store, &*host, &fitting)? {
            meet::Outcome::Delegate(reason) => {
                Ok(Group::build(config, Engine::Delegate(reason), None, Vec::new(), 1, 0, host))
            }
            meet::Outcome::Shared(met) => Group::share(config, met, host),
        }
    }

    fn share(config: Config, mut met: Met, host: Arc<dyn Host>) -> Result<Arc<Group>> {
        let ends = met.take_ends();
        let Met { segment, peers, local_cores, .. } = met;
        let total = segment.len();
        let layout = Layout::of_total(config.size, total)
            .ok_or_else(|| Error::Bug(format!("sagellm: no layout of {} ranks has {total} bytes", config.size)))?;
        for (start, bytes) in layout.own_ranges(config.rank) {
            segment.populate(start..start + bytes)?;
        }
        let area = Arc::new(Area::new(Arc::new(segment), layout, config.rank));
        let list = peers
            .into_iter()
            .map(|peer| Peer { pid: peer.pid, host: peer.host, dead: AtomicBool::new(false) })
            .collect();
        let engine = Engine::Shm(Box::new(Shm::new(Arc::clone(&area), local_cores)));
        let group = Group::build(config, engine, Some(area), list, local_cores, 0, host);
        let weak = Arc::downgrade(&group);
        let guard = watch::watch(ends, move |rank, _reason| {
            if let Some(group) = weak.upgrade() {
                group.peer_ended(rank);
            }
        })?;
        *group.watch.lock().unwrap() = Some(guard);
        Ok(group)
    }

    /// `ranks` groups of one process, one for each rank that is a thread.
    pub fn local(ranks: usize, timeout: Duration) -> Result<Vec<Arc<Group>>> {
        Ok(Group::over(local::areas(ranks)?, timeout))
    }

    /// As `local`, over areas that the caller made, and may look into.
    pub fn over(areas: Vec<Arc<Area>>, timeout: Duration) -> Vec<Arc<Group>> {
        let (ranks, cores) = (areas.len(), crate::topology::usable_cores());
        let groups = areas.into_iter().enumerate().map(|(rank, area)| {
            let config = Config { rank, size: ranks, timeout, name: "local".to_string(), delegate_reason: None };
            let peers = (0..ranks)
                .map(|_| Peer { pid: 0, host: "this process".to_string(), dead: AtomicBool::new(false) })
                .collect();
            let engine =
                if ranks == 1 { Engine::Solo } else { Engine::Shm(Box::new(Shm::new(Arc::clone(&area), cores))) };
            // A rank's groups belong together, as they would in a process of its own.
            Group::build(config, engine, Some(area), peers, cores, rank as u64 + 1, Arc::new(NoHost))
        });
        groups.collect()
    }

    fn build(
        config: Config,
        engine: Engine,
        area: Option<Arc<Area>>,
        peers: Vec<Peer>,
        cores: usize,
        domain: u64,
        host: Arc<dyn Host>,
    ) -> Arc<Group> {
        let ranks = config.size;
        let group = Arc::new_cyclic(|this| Group {
            domain,
            generation: watch::generation(),
            patience: Patience::for_ranks(ranks, cores),
            area,
            host,
            peers,
            any_dead: AtomicBool::new(false),
            inner: Mutex::new(Inner { engine, number: 0, sent: vec![0; ranks], received: vec![0; ranks] }),
            pending: AtomicUsize::new(0),
            last_number: AtomicU64::new(0),
            timeout_ms: AtomicU64::new(config.timeout.as_millis() as u64),
            fault: OnceLock::new(),
            closed: AtomicBool::new(false),
            monitored: Mutex::new(0),
            watch: Mutex::new(None),
            this: Weak::clone(this),
            config,
        });
        let driven: Arc<dyn Driven> = Arc::<Group>::clone(&group);
        driver::register(&driven);
        log::info!("{}", group.describe());
        group
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic under the lock is a bug that was already reported; the group goes on as well as it can.
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn delegate_reason(&self) -> Option<String> {
        match &self.lock().engine {
            Engine::Delegate(reason) => Some(reason.clone()),
            _ => None,
        }
    }

    pub fn describe(&self) -> String {
        let (rank, size, name) = (self.config.rank, self.config.size, &self.config.name);
        match (&self.lock().engine, &self.area) {
            (Engine::Solo, _) => {
                format!("group '{name}' rank {rank} of {size}: alone, every operation is a local copy")
            }
            (Engine::Delegate(why), _) => format!("group '{name}' rank {rank} of {size}: served by a delegate: {why}"),
            (Engine::Shm(_), area) => {
                let area = area.as_ref().expect("a shared engine has an area");
                format!(
                    "group '{name}' rank {rank} of {size}: shared memory, segment of {} KiB, slots of {} bytes x {}, stage \
                     of {} KiB, patience {:?}",
                    area.layout.total() >> 10,
                    crate::engine::shm::layout::SLOT_BYTES,
                    area.layout.depth,
                    area.layout.stage_bytes >> 10,
                    self.patience
                )
            }
        }
    }

    /// Starts an operation; never waits for a peer.
    pub fn issue(&self, request: Request, completion: Option<Box<dyn Completion>>) -> Result<Arc<Op>> {
        let sync = request.sync;
        let core = self.start(request, completion)?;
        if !sync && !core.is_done() {
            driver::start_progress();
        }
        Ok(Arc::new(Op { core, group: self.this.upgrade().expect("a group that is used is alive") }))
    }

    /// Starts an operation and finishes it on this thread.
    pub fn run(&self, request: Request, completion: Option<Box<dyn Completion>>) -> Result<()> {
        let core = self.start(request, completion)?;
        match driver::wait_until(self, &*self.host, None, || core.is_done()) {
            Outcome::Done => core.outcome(),
            _ => {
                // The caller gets an exception and may free the tensors: the group cannot go on with this operation.
                let text = format!(
                    "sagellm: rank {} was interrupted in {} number {} of group '{}'",
                    self.config.rank, core.request.kind, core.number, self.config.name
                );
                self.poison(Error::Interrupted(text.clone()));
                Err(Error::Interrupted(text))
            }
        }
    }

    fn start(&self, request: Request, completion: Option<Box<dyn Completion>>) -> Result<Arc<CoreOp>> {
        self.usable(request.kind.name())?;
        let kernel = self.validate(&request)?;
        let timeout =
            Duration::from_millis(request.timeout_ms.unwrap_or_else(|| self.timeout_ms.load(Ordering::Relaxed)));
        let signature = op::signature(&request, self.config.size);
        let mut ended = Ended::new();
        let mut inner = self.lock();
        self.standing()?; // a fault may have come while we waited for the lock
        let number = inner.number_for(&request);
        let op = Arc::new(CoreOp::new(request, number, signature, timeout, completion));
        if !op.request.kind.is_p2p() {
            self.last_number.store(number, Ordering::Relaxed);
        }
        self.pending.fetch_add(1, Ordering::Relaxed);
        driver::PENDING.fetch_add(1, Ordering::Relaxed);
        let fault = match &mut inner.engine {
            Engine::Solo => {
                ended.push((Arc::clone(&op), solo::run(&op, kernel.as_ref())));
                None
            }
            Engine::Shm(shm) => {
                shm.issue(Arc::clone(&op), kernel, &mut ended);
                shm.poll(&mut ended).err()
            }
            Engine::Delegate(_) => Some(Error::Bug("sagellm: an operation reached a delegated group".to_string())),
        };
        drop(inner);
        self.settle(ended);
        if let Some(fault) = fault {
            self.poison(fault);
        }
        Ok(op)
    }

    /// Tells the owners of operations that ended. Never under the lock.
    fn settle(&self, ended: Ended) {
        if ended.is_empty() {
            return;
        }
        for (op, outcome) in ended {
            self.pending.fetch_sub(1, Ordering::Relaxed);
            driver::PENDING.fetch_sub(1, Ordering::Relaxed);
            op.end(outcome);
        }
        // Other threads of this rank may sleep, waiting for one of them.
        if let Some(area) = &self.area {
            signal::Bell::fence(&**area);
            signal::ring_if_asleep(&**area, area.me);
        }
    }

    /// What this rank knows already. Takes no lock.
    fn standing(&self) -> Result<()> {
        if let Some(fault) = self.fault.get() {
            return Err(fault.clone());
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Aborted(format!("sagellm: group '{}' was destroyed", self.config.name)));
        }
        Ok(())
    }

    /// Whether a new operation may start. Never under the lock: a fault that is noticed here is dealt with here.
    fn usable(&self, what: &str) -> Result<()> {
        if watch::generation() != self.generation {
            return Err(Error::Invalid(
                "sagellm: a forked child cannot use its parent's process group. Start the child with the 'spawn' method"
                    .to_string(),
            ));
        }
        self.standing()?;
        if self.area.as_ref().is_some_and(|area| area.is_poisoned()) {
            // A peer found a fault in an operation that had ended legally here.
            let fault = self.reported(None).unwrap_or_else(|| Error::Aborted("sagellm: the group failed".to_string()));
            self.poison(fault.clone());
            return Err(fault);
        }
        if self.any_dead.load(Ordering::Acquire) {
            // A peer that died without leaving in order fails every later operation, whoever it concerns.
            if let (Some(rank), Some(area)) = (self.dead_ranks().next(), &self.area)
                && !area.left(rank)
                && self.pending.load(Ordering::Relaxed) == 0
            {
                let fault = self.death_of(rank, &format!("calls {what}"));
                self.poison(fault.clone());
                return Err(fault);
            }
        }
        Ok(())
    }

    /// Checks what the memory safety of the engine rests on, and finds the kernel. torch's own rules were checked before.
    fn validate(&self, request: &Request) -> Result<Option<Kernel>> {
        let (kind, ranks, me) = (request.kind, self.config.size, self.config.rank);
        let wrong = |text: String| Err(Error::Invalid(format!("sagellm {kind}: {text}")));
        let peer = request.root as usize;
        if kind.rooted() && peer >= ranks {
            return wrong(format!("root {peer} of a group of {ranks} ranks; ranks count from 0"));
        }
        if kind.is_p2p() && (peer == me || peer >= ranks) && !(kind == Kind::Recv && request.root == ANY_RANK) {
            return wrong(format!("peer {peer} for rank {me} of a group of {ranks} ranks"));
        }
        for blocks in [&request.in_blocks, &request.out_blocks] {
            if !blocks.is_empty() && blocks.len() != ranks {
                return wrong(format!("{} block sizes for {ranks} ranks", blocks.len()));
            }
        }
        let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
        let (bytes_in, bytes_out) = (sum(&request.inputs), sum(&request.outputs));
        let blocks = |list: &Vec<usize>, total: usize| match list.is_empty() {
            true => total.is_multiple_of(ranks),
            false => list.iter().sum::<usize>() == total,
        };
        let own = |list: &Vec<usize>, total: usize| if list.is_empty() { total / ranks } else { list[me] };
        let root = peer == me;
        let fits = match kind {
            Kind::AllReduce => bytes_in == bytes_out,
            Kind::Reduce => bytes_out == if root { bytes_in } else { 0 },
            Kind::Broadcast => {
                if root {
                    bytes_out == 0
                } else {
                    bytes_in == 0
                }
            }
            Kind::AllGather => {
                blocks(&request.out_blocks, bytes_out) && own(&request.out_blocks, bytes_out) == bytes_in
            }
            Kind::Gather => bytes_out == if root { bytes_in * ranks } else { 0 },
            Kind::Scatter => bytes_in == if root { bytes_out * ranks } else { 0 },
            Kind::ReduceScatter => {
                blocks(&request.in_blocks, bytes_in) && own(&request.in_blocks, bytes_in) == bytes_out
            }
            Kind::AllToAll => {
                blocks(&request.in_blocks, bytes_in)
                    && blocks(&request.out_blocks, bytes_out)
                    && own(&request.in_blocks, bytes_in) == own(&request.out_blocks, bytes_out)
            }
            Kind::Barrier => bytes_in + bytes_out == 0,
            Kind::Send => bytes_out == 0,
            Kind::Recv => bytes_in == 0,
        };
        if !fits {
            return wrong(format!(
                "{bytes_in} bytes in, {bytes_out} bytes out, blocks {:?} and {:?} do not fit together for rank {me} of \
                 {ranks}",
                request.in_blocks, request.out_blocks
            ));
        }
        if !kind.reduces() {
            return Ok(None);
        }
        if request.dtype == Dtype::Bytes || request.inputs.iter().any(|span| span.bytes % request.dtype.size() != 0) {
            return wrong(format!("{bytes_in} bytes are no whole number of {} elements", request.dtype.name()));
        }
        match reduce::kernel(request.dtype, request.op, ranks) {
            Ok(kernel) => Ok(Some(kernel)),
            Err(error) => wrong(error.text().to_string()),
        }
    }

    pub fn sequence(&self) -> u64 {
        self.last_number.load(Ordering::Relaxed)
    }

    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout_ms.store(timeout.as_millis() as u64, Ordering::Relaxed);
    }

    /// Why the group is unusable, if it is.
    pub fn fault(&self) -> Option<Error> {
        self.fault.get().cloned()
    }

    /// Fails everything pending here and on the peers.
    pub fn abort(&self, reason: &str) {
        let reason = if reason.is_empty() { "abort was called" } else { reason };
        self.poison(Error::Aborted(format!(
            "sagellm: rank {} aborted group '{}': {reason}",
            self.config.rank, self.config.name
        )));
    }

    /// Leaves in order: what was published stays readable for the peers, what is pending fails.
    pub fn shutdown(&self) {
        if watch::generation() != self.generation || self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(area) = &self.area {
            area.set_left();
            signal::announce(&**area, area.ranks);
        }
        self.fail_all(&Error::Aborted(format!(
            "sagellm: group '{}' was destroyed on rank {} while the operation was pending",
            self.config.name, self.config.rank
        )));
        if let Some(driven) = self.this.upgrade() {
            let driven: Arc<dyn Driven> = driven;
            driver::unregister(&driven);
        }
        // Outside of any lock: the guard waits for a callback that is running.
        let guard = self.watch.lock().unwrap().take();
        drop(guard);
    }

    fn fail_all(&self, error: &Error) {
        let ended: Ended = match &mut self.lock().engine {
            Engine::Shm(shm) => shm.drain().into_iter().map(|op| (op, Err(error.clone()))).collect(),
            _ => Ended::new(),
        };
        self.settle(ended);
    }

    /// The first fault wins; it is told to the peers and to everything pending.
    fn poison(&self, error: Error) {
        if self.fault.set(error.clone()).is_ok() {
            log::debug!("group '{}' rank {} failed: {error}", self.config.name, self.config.rank);
            if let Some(area) = &self.area {
                area.poison(error.code(), error.text());
                signal::announce(&**area, area.ranks);
            }
        }
        // Another thread may have been first: everything pending ends with what it found.
        self.fail_all(self.fault.get().unwrap_or(&error));
    }

    // Peers.

    /// Called by the watch thread.
    fn peer_ended(&self, rank: usize) {
        if let Some(peer) = self.peers.get(rank) {
            peer.dead.store(true, Ordering::Release);
            self.any_dead.store(true, Ordering::Release);
            if let Some(area) = &self.area {
                signal::Bell::fence(&**area);
                signal::ring_if_asleep(&**area, area.me);
            }
        }
    }

    fn dead_ranks(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.peers.len()).filter(|rank| self.peers[*rank].dead.load(Ordering::Acquire))
    }

    fn death_of(&self, rank: usize, during: &str) -> Error {
        let peer = &self.peers[rank];
        let left = self.area.as_ref().is_some_and(|area| area.left(rank));
        let how = if left {
            "left the group (destroy_process_group or the end of its program)"
        } else {
            "ended (killed, crashed, or exited without leaving its group)"
        };
        Error::RankFailed {
            rank,
            text: format!(
                "sagellm: rank {rank} (pid {}, host {}) of group '{}' {how}: rank {} {during}. Make a new group without it \
                 to go on",
                peer.pid, peer.host, self.config.name, self.config.rank
            ),
        }
    }

    /// What this rank was doing when a peer was missed.
    fn within(op: Option<&Arc<CoreOp>>) -> String {
        op.map_or_else(
            || "had nothing pending".to_string(),
            |op| format!("is in {} number {}", op.request.kind, op.number),
        )
    }

    /// With the lock held and nothing movable: fails the group if a rank that ended is still needed.
    fn check_ended_peers(&self, shm: &mut Shm, ended: &mut Ended) -> Option<Error> {
        let area = self.area.as_ref()?;
        for rank in (0..area.ranks).filter(|rank| *rank != area.me) {
            let dead = self.peers[rank].dead.load(Ordering::Acquire);
            if !dead && !area.left(rank) {
                continue;
            }
            // Its last words may have come after our last look: complete what they satisfy. They fit into the segment,
            // so a bounded number of passes takes them in.
            for _ in 0..1024 {
                match shm.poll(ended) {
                    Ok(true) => (),
                    Ok(false) => break,
                    Err(error) => return Some(error),
                }
            }
            if let Some(op) = shm.needs(rank) {
                let op = Arc::clone(op);
                return Some(self.death_of(rank, &Group::within(Some(&op))));
            }
        }
        None
    }

    /// The text of a deadline that passed: who is missing and what they did last.
    fn stall(&self, shm: &Shm, op: &CoreOp) -> Error {
        let Some(area) = &self.area else { return Error::Bug("sagellm: a stall without peers".to_string()) };
        let mut missing = Vec::new();
        for rank in (0..area.ranks).filter(|rank| *rank != area.me) {
            if !shm.needs(rank).is_some_and(|needing| std::ptr::eq(&**needing, op)) {
                continue;
            }
            let (last, call) = shm.last_call(rank);
            let entered = !op.request.kind.is_p2p() && last >= op.number;
            let state = match watch::process_state(self.peers[rank].pid) {
                Some('T' | 't') => ", its process is stopped",
                _ => "",
            };
            let pid = self.peers[rank].pid;
            missing.push(if entered {
                format!("rank {rank} (pid {pid}{state}) entered it and stopped on the way")
            } else if op.request.kind.is_p2p() {
                format!("rank {rank} (pid {pid}{state}) did not answer, its last collective is {call}")
            } else {
                format!("rank {rank} (pid {pid}{state}) has not entered it, its last operation is {call}")
            });
        }
        if missing.is_empty() {
            missing.push("every rank entered it".to_string());
        }
        let what = match op.request.kind {
            Kind::Send => format!("send to rank {} with tag {}", op.request.root, op.request.tag),
            Kind::Recv if op.request.root == ANY_RANK => format!("recv from any rank with tag {}", op.request.tag),
            Kind::Recv => format!("recv from rank {} with tag {}", op.request.root, op.request.tag),
            _ => format!("{} number {}", op::describe(op.signature), op.number),
        };
        Error::Timeout(format!(
            "sagellm: rank {} of group '{}' Timed out after {:.1} s in {what}: {}. Every rank must call the same operations in the \
             same order; where a rank needs longer, pass a larger timeout",
            self.config.rank,
            self.config.name,
            op.timeout.as_secs_f64(),
            missing.join("; ")
        ))
    }

    /// The fault that a peer reported, as this rank's error; `shm` tells what of this rank it ends.
    fn reported(&self, shm: Option<&Shm>) -> Option<Error> {
        let (rank, code, text) = self.area.as_ref()?.fault()?;
        if let Some(own) = self.fault.get() {
            return Some(own.clone()); // another thread of this rank found it
        }
        // A death that this rank saw itself is closer than hearsay.
        if let Some(dead) = self.dead_ranks().find(|dead| !self.area.as_ref().is_some_and(|area| area.left(*dead))) {
            let op = shm.and_then(|shm| shm.needs(dead).or_else(|| shm.next_deadline()));
            return Some(self.death_of(dead, &Group::within(op)));
        }
        let text = format!("{text} (reported by rank {rank})");
        Some(match code {
            'M' => Error::Mismatch(text),
            'T' => Error::Timeout(text),
            'D' => Error::RankFailed { rank, text },
            _ => Error::Aborted(text),
        })
    }

    // Monitored barrier: a channel of its own, no number, no poison.

    /// Rank 0 waits for all and names who is missing; the others wait for rank 0's word.
    pub fn monitored_barrier(&self, timeout: Option<Duration>, all: bool) -> Result<()> {
        self.usable("monitored_barrier")?;
        let timeout = timeout.unwrap_or_else(|| Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed)));
        let (Some(area), true) = (&self.area, self.config.size > 1) else { return Ok(()) };
        let mut count = self.monitored.lock().unwrap();
        *count += 1;
        let turn = *count;
        area.monitor(area.me).store(turn, Ordering::Release);
        signal::announce(&**area, area.ranks);
        let until = Some(Instant::now() + timeout);
        let dead = || self.any_dead.load(Ordering::Acquire) || self.fault.get().is_some() || area.is_poisoned();
        let here = |rank: usize| area.monitor(rank).load(Ordering::Acquire) >= turn;
        if area.me != 0 {
            let told = || area.monitor_outcome(turn).load(Ordering::Acquire) >> 1 >= turn;
            let outcome = driver::wait_until(self, &*self.host, until, || told() || dead());
            let word = area.monitor_outcome(turn).load(Ordering::Acquire);
            return match outcome {
                Outcome::Done if word == turn << 1 => Ok(()),
                Outcome::Interrupted => {
                    Err(Error::Interrupted("sagellm: monitored_barrier was interrupted".to_string()))
                }
                Outcome::Done if word >> 1 < turn => Err(self.fault().unwrap_or_else(|| {
                    self.dead_ranks().next().map_or_else(
                        || {
                            self.reported(None)
                                .unwrap_or_else(|| Error::Aborted("sagellm: the group failed".to_string()))
                        },
                        |rank| self.death_of(rank, "is in monitored_barrier"),
                    )
                })),
                Outcome::Done => Err(Error::Timeout(format!(
                    "sagellm: Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv \
                     from rank 0: another rank is missing or came too late, and rank 0 reports which",
                    area.me
                ))),
                Outcome::Elapsed => Err(Error::Timeout(format!(
                    "sagellm: Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv \
                     from rank 0: it did not come within {} ms",
                    area.me,
                    timeout.as_millis()
                ))),
            };
        }
        let outcome = driver::wait_until(self, &*self.host, until, || (1..area.ranks).all(here) || dead());
        let missing: Vec<String> = (1..area.ranks).filter(|rank| !here(*rank)).map(|rank| rank.to_string()).collect();
        let failed = u64::from(!missing.is_empty());
        area.monitor_outcome(turn).store(turn << 1 | failed, Ordering::Release);
        signal::announce(&**area, area.ranks);
        match (outcome, &missing[..]) {
            (_, []) => Ok(()),
            (Outcome::Interrupted, _) => {
                Err(Error::Interrupted("sagellm: monitored_barrier was interrupted".to_string()))
            }
            (_, [first, rest @ ..]) => {
                let ms = timeout.as_millis();
                let who = if all && !rest.is_empty() {
                    format!("Ranks {}", missing.join(", "))
                } else {
                    format!("Rank {first}")
                };
                Err(Error::Timeout(format!(
                    "sagellm: {who} failed to pass monitoredBarrier in {ms} ms. Rank 0 timed out in monitoredBarrier"
                )))
            }
        }
    }
}

impl Inner {
    /// Collectives count in the group, messages per ordered pair; a receive from anyone has no number.
    fn number_for(&mut self, request: &Request) -> u64 {
        let counter = match request.kind {
            Kind::Recv if request.root == ANY_RANK => return 0,
            Kind::Send => &mut self.sent[request.root as usize],
            Kind::Recv => &mut self.received[request.root as usize],
            _ => &mut self.number,
        };
        *counter += 1;
        *counter
    }
}

impl Driven for Group {
    fn drive(&self) -> bool {
        // Taken: another thread is driving, or issuing, and will be through in one pass.
        let Ok(mut inner) = self.inner.try_lock() else { return false };
        let Engine::Shm(shm) = &mut inner.engine else { return false };
        if shm.pending() == 0 {
            return false;
        }
        let mut ended = Ended::new();
        let mut fault = None;
        let mut moved = match shm.poll(&mut ended) {
            Ok(moved) => moved,
            Err(error) => {
                fault = Some(error);
                true
            }
        };
        // What a peer reported comes first: whoever leaves after it leaves because of it.
        let poisoned = !moved && self.area.as_ref().is_some_and(|area| area.is_poisoned());
        if !moved && !poisoned && self.any_dead.load(Ordering::Acquire) {
            fault = self.check_ended_peers(shm, &mut ended);
            moved = fault.is_some() || !ended.is_empty();
        }
        if poisoned {
            fault = self.reported(Some(shm));
            moved = true;
        }
        drop(inner);
        self.settle(ended);
        if let Some(fault) = fault {
            self.poison(fault);
        }
        moved
    }

    fn tick(&self) {
        let now = clock::now();
        let mut inner = self.lock();
        let Engine::Shm(shm) = &mut inner.engine else { return };
        let mut ended = Ended::new();
        let mut fault = None;
        if !self.area.as_ref().is_some_and(|area| area.is_poisoned()) {
            fault = self.check_ended_peers(shm, &mut ended); // a reported fault is left to `drive`
        }
        if fault.is_none()
            && let Some(op) = shm.next_deadline().filter(|op| now >= op.deadline)
        {
            let op = Arc::clone(op);
            fault = Some(self.stall(shm, &op));
        }
        drop(inner);
        self.settle(ended);
        if let Some(fault) = fault {
            self.poison(fault);
        }
    }

    fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }
    fn area(&self) -> Option<&Area> {
        self.area.as_deref()
    }
    fn domain(&self) -> u64 {
        self.domain
    }
    fn patience(&self) -> Patience {
        self.patience
    }
    fn shares_core(&self) -> bool {
        let (Some(area), Some(cpu)) = (&self.area, crate::topology::current_cpu()) else { return false };
        area.set_cpu(cpu);
        (0..area.me).any(|rank| area.cpu(rank) == Some(cpu))
    }
    fn leave(&self) {
        self.shutdown();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if watch::generation() == self.generation
            && !self.closed.load(Ordering::Acquire)
            && let Some(area) = &self.area
        {
            area.set_left();
            signal::announce(&**area, area.ranks);
        }
    }
}

impl Op {
    pub fn is_done(&self) -> bool {
        self.core.is_done()
    }

    /// Waits until it ends, or `timeout` passes, which leaves it running.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        if self.core.is_done() {
            return self.core.outcome();
        }
        let group = &self.group;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        match driver::wait_until(&**group, &*group.host, until, || self.core.is_done()) {
            Outcome::Done => self.core.outcome(),
            Outcome::Elapsed => Err(Error::WaitElapsed(format!(
                "sagellm: wait({:.3} s) elapsed before {} number {} of group '{}' ended on rank {}; it is still running",
                timeout.unwrap_or_default().as_secs_f64(),
                self.core.request.kind,
                self.core.number,
                group.config.name,
                group.config.rank
            ))),
            Outcome::Interrupted => Err(Error::Interrupted("sagellm: the wait was interrupted".to_string())),
        }
    }

    pub fn error(&self) -> Option<&Error> {
        self.core.error()
    }
    pub fn number(&self) -> u64 {
        self.core.number
    }
    pub fn source(&self) -> i32 {
        self.core.source()
    }
    pub fn duration(&self) -> Duration {
        self.core.duration()
    }
    pub fn timeout(&self) -> Duration {
        self.core.timeout
    }

    /// Ends it if it is pending. Its peers may have read or may wait for it, so the group fails with it.
    pub fn cancel(&self) {
        if !self.core.is_done() {
            self.group.abort(&format!("{} number {} was aborted", self.core.request.kind, self.core.number));
        }
    }
}

/// Stops this process's threads of ours; groups that are still open count as left in order.
pub fn at_exit() {
    if watch::forked() {
        return; // groups and threads are the parent's
    }
    driver::for_each(|group| group.leave());
    driver::stop_progress();
    watch::stop();
}
