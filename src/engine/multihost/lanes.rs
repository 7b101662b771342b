//! The two threads that run the batches of a group over several hosts.

use std::collections::HashSet;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use once_cell::sync::OnceCell;
use std::time::{Duration, Instant};

use super::batch::{BatchRun, ChosenAlgorithm, HostGroup, Task};
use super::dispatch::dispatch;
use super::frames::{FrameHeader, tell_fault};
use super::host_map::HostMap;
use super::link::Link;
use super::queue::State;
use super::results;
use super::results::Ledger;
use super::transport::Transport;
use crate::config::Settings;
use crate::engine::{Control, Ended, Monitor, Polled, Report, Told};
use crate::error::{Error, Result, contained};
use crate::fusion::planner::{Batch, FusionKey, Item, LANES};
use crate::op::{FusedWith, Op};
use crate::select::inter;
use crate::select::inter::{Hosts, HostsChoice, Menu};
use crate::select::{OpDesc, Policy};
use crate::types::{Kind, ReduceOp, Request, Span};

/// A rank that leaves waits at most this long until its peers have received what it sent.
const DELIVERY: Duration = Duration::from_secs(30);
/// After that, a rank that leaves waits at most this long for its peers' goodbyes.
const FAREWELL: Duration = Duration::from_secs(1);
/// A rank that leaves a failed group waits until its peers' operating systems have its report of the fault, but at most
/// this long after it sent the report. A report queues behind data that a peer has not read, and would be lost if this
/// process ended.
const REPORT: Duration = Duration::from_millis(500);
/// Scratch memory larger than this is freed after the batch.
const KEPT: usize = 100 << 20;

/// State shared by the two lanes and the engine.
pub(super) struct Lanes {
    pub host_map: HostMap,
    pub link: Arc<dyn Link>,
    pub insides: Vec<Option<Arc<dyn HostGroup>>>,
    pub settings: Settings,
    /// The facts from which the algorithm between hosts is chosen; the same on every rank.
    pub hosts: Hosts,
    pub menu: Menu,
    pub policy: Arc<Policy>,
    pub state: Mutex<State>,
    /// Notified when `state` changes.
    pub turn: Condvar,
    /// For each lane: the rank for which it waits, for error texts. The lanes write this. A thread that finds that a
    /// deadline has passed reads it. Relaxed, because it orders nothing.
    pub waiting: Vec<Arc<AtomicUsize>>,
    /// When this rank sent its peers the fault of its group.
    pub told: Mutex<Option<Instant>>,
    /// Ranks of other hosts to which a fault is sent: from the start the ranks that have this rank's local rank, and
    /// later also the ranks with which the lanes have exchanged messages.
    pub contacted: Mutex<HashSet<usize>>,
    /// Ranks that had not received all data of this rank's last calls when a lane left.
    pub not_taken: Mutex<HashSet<usize>>,
    /// Set when the engine is created, before the engine is used.
    pub home: OnceCell<Home>,
    /// Compares results. None if the group does not ask for it.
    pub ledger: Option<Mutex<Ledger>>,
}

/// What the link's callbacks need.
pub(super) struct Home {
    pub this: Weak<Lanes>,
    pub report: Arc<dyn Report>,
}

impl Lanes {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn home(&self) -> &Home {
        self.home.get().expect("set when the engine was made")
    }

    /// Returns the planner's input for a request. It depends only on values that are equal on all ranks.
    pub fn item(&self, request: &Request) -> Item {
        let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
        let (bytes, key) = match request.kind {
            Kind::AllReduce if !matches!(request.op, ReduceOp::PremulSum(_)) => {
                (sum(request.inputs()), Some(FusionKey { kind: Kind::AllReduce, op: request.op.code() }))
            }
            Kind::AllGather if request.out_blocks.is_empty() => {
                (sum(request.inputs()), Some(FusionKey { kind: Kind::AllGather, op: 0 }))
            }
            Kind::Broadcast => (sum(request.inputs()).max(sum(request.outputs())), None),
            _ => (sum(request.inputs()), None),
        };
        let key = key.filter(|_| bytes as u64 <= inter::SMALL);
        let cut = matches!(request.kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast) && key.is_none();
        let alone = || self.choice(OpDesc::of(request, self.host_map.ranks()), false);
        let segments = if cut { alone().segments } else { 1 };
        Item { key, bytes, segments }
    }

    /// Chooses the algorithm of one operation or of a batch of several. The choice depends only on values that are
    /// equal on all ranks.
    pub fn choice(&self, desc: OpDesc, batched: bool) -> HostsChoice {
        inter::between_hosts(desc, batched, &self.hosts, &self.menu, &self.policy)
    }

    /// Chooses the algorithm of a batch, and records the choice and the batch in each operation.
    fn choose_for_batch(&self, batch: &Batch, ops: &[Arc<Op>]) -> HostsChoice {
        let ranks = self.host_map.ranks();
        let desc =
            OpDesc::together(ops.iter().map(|op| OpDesc::of(&op.request, ranks))).expect("a batch holds one or more");
        let choice = self.choice(desc, ops.len() > 1);
        if batch.segment == 0 {
            for op in ops {
                op.record_load(desc.load());
                op.set_fused_with(FusedWith::new(op.number, (batch.first, batch.last), ops.len()));
                op.record_choice(choice.choice().code());
            }
        }
        choice
    }

    /// Waits for the next batch of this lane and returns it. None when the group ends.
    fn next(&self, lane: usize) -> Option<Task> {
        let mut state = self.lock();
        loop {
            if state.stopping || state.fault.is_some() {
                return None;
            }
            if state.planner.lane() == lane
                && let Some(batch) = state.planner.next_batch()
            {
                return self.begin(lane, state, batch);
            }
            // Sends of an ended batch may still be in progress, for example a root's. This thread no longer advances
            // them.
            self.link.hand_over();
            state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Marks a batch as started, waits for its memory, and makes its header.
    fn begin(&self, lane: usize, mut state: MutexGuard<'_, State>, batch: Batch) -> Option<Task> {
        let ops: Vec<Arc<Op>> = (batch.first..=batch.last).map(|number| state.acquire(lane, number)).collect();
        let (chain, before) = state.extend_chain(&ops, batch.segment);
        self.turn.notify_all(); // it may be the other lane's turn
        let state = self.wait_for_memory(state, &batch);
        let factor = match ops[0].request.op {
            ReduceOp::PremulSum(factor) => factor.to_bits(),
            _ => self.ledger().map_or(1f64.to_bits(), |mut ledger| ledger.next_word(batch.index)),
        };
        let header = FrameHeader {
            signature: ops[0].signature,
            lists: ops[0].lists,
            chain,
            number: batch.first,
            issued: state.promised.max(batch.last),
            factor,
            before,
        };
        drop(state);
        self.settle(); // a send that continues from a copy may unblock others
        let choice = self.choose_for_batch(&batch, &ops);
        Some(Task { batch, ops, header, choice })
    }

    /// Waits until earlier operations on the memory of a batch have ended, or the group has failed.
    fn wait_for_memory<'s>(&self, mut state: MutexGuard<'s, State>, batch: &Batch) -> MutexGuard<'s, State> {
        state.memory_awaited += 1;
        while (batch.first..=batch.last).any(|number| state.must_follow(number)) && state.fault.is_none() {
            state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.memory_awaited -= 1;
        state
    }

    /// Runs a lane's thread. If the thread panics, which is our own bug, the group fails and the lane's operations end:
    /// a panic must not become a hang.
    pub fn work(&self, lane: usize, mut transport: Transport, report: &dyn Report) {
        let mut scratch = Vec::new();
        while let Some(task) = self.take(lane, report) {
            let outcome = contained(|| self.carry(lane, &mut transport, &mut scratch, &task))
                .and_then(|agreed| contained(|| self.finish(lane, &mut transport, &task, agreed)));
            if scratch.len() > KEPT {
                scratch = Vec::new();
            }
            self.contacted.lock().unwrap_or_else(PoisonError::into_inner).extend(transport.peers());
            match outcome {
                Ok(ended) => {
                    ended.into_iter().for_each(|together| report.ended(together));
                    self.settle(); // messages may have waited for the memory of these operations
                }
                Err(error) => {
                    self.give_up(lane, error, report);
                    break;
                }
            }
        }
        let orderly = self.lock().fault.is_none();
        if orderly {
            let left = contained(|| {
                let peers = transport.bye(DELIVERY, FAREWELL);
                let mut known = self.not_taken.lock().unwrap_or_else(PoisonError::into_inner);
                for peer in peers.into_iter().filter(|peer| known.insert(*peer)) {
                    log::warn!("{}", transport.names.not_taken(peer, DELIVERY));
                }
                Ok(())
            });
            left.unwrap_or_else(|error| log::error!("{error}"));
        }
        drop(transport); // the link's last reference must not drop while the process exits
        self.lock().running -= 1;
        self.turn.notify_all();
    }

    /// Returns the next batch of this lane, or None when the lane must end. A panic in `next` fails the group.
    fn take(&self, lane: usize, report: &dyn Report) -> Option<Task> {
        contained(|| Ok(self.next(lane))).unwrap_or_else(|error| {
            self.give_up(lane, error, report);
            None
        })
    }

    /// Marks a batch as ended. Returns a list of the operations that the batch ended, and a separate list for each
    /// barrier that waited for them.
    fn finish(&self, lane: usize, transport: &mut Transport, task: &Task, agreed: u64) -> Result<Vec<Ended>> {
        let mut state = self.lock();
        state.planner.agree(&task.batch, agreed);
        let complete = state.finish_segment(&task.ops);
        drop(state);
        self.compare(&complete, transport, task)?;
        complete.iter().for_each(|op| op.store_back());
        let mut state = self.lock();
        let ended = state.end_batch(lane, &task.ops);
        // Each barrier gets a separate list, because it was not part of the batch.
        let barriers = state.take_barriers().into_iter().map(|op| vec![(op, Ok(()))]);
        let ended = std::iter::once(ended).chain(barriers).collect();
        state.extend_promise();
        drop(state);
        self.turn.notify_all();
        Ok(ended)
    }

    fn ledger(&self) -> Option<MutexGuard<'_, Ledger>> {
        Some(self.ledger.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Hashes the results of the operations that a batch has completed, and compares this rank's hashes with those that
    /// came in the headers of this batch or earlier. If results differ and it is not known whose is wrong, this rank
    /// first gives other ranks time to report whose result is wrong, because they may have the hashes of more ranks.
    fn compare(&self, complete: &[Arc<Op>], transport: &mut Transport, task: &Task) -> Result<()> {
        let Some(mut ledger) = self.ledger() else { return Ok(()) };
        let heard = transport.heard.as_mut().map(std::mem::take).unwrap_or_default();
        if !matches!(task.ops[0].request.op, ReduceOp::PremulSum(_)) {
            heard.into_iter().for_each(|(rank, word)| ledger.hear(rank, word));
        }
        if !complete.is_empty() {
            drop(ledger);
            let hash = results::hash(self.policy.verify.part, complete);
            ledger = self.ledger().expect("as above");
            // The segments of an operation are batches with consecutive numbers, and end in any order.
            ledger.ended(task.batch.index - task.batch.segment as u64, &complete[0], hash);
        }
        let Some(error) = ledger.difference() else { return Ok(()) };
        drop(ledger);
        let until = Instant::now() + results::PATIENCE;
        while error.rank().is_none() && Instant::now() < until {
            if let Some(fault) = self.lock().fault.clone() {
                return Err(fault);
            }
            if let Some((rank, fault)) = self.reported() {
                return Err(fault.as_told().reported_by(rank));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(error)
    }

    /// Fails the group with `error` and ends this lane's operations. If the other lane still runs a segment of such an
    /// operation, the other lane ends the operation.
    fn give_up(&self, lane: usize, error: Error, report: &dyn Report) {
        report.failed(error.clone());
        let mut state = self.lock();
        let error = state.fault.clone().unwrap_or(error);
        let left = state.release_all(lane);
        drop(state);
        report.ended(left.into_iter().map(|op| (op, Err(error.clone()))).collect());
    }

    /// Ends all waits of the lanes on the link and inside this host.
    pub fn break_off(&self, error: &Error) {
        self.link.cut();
        self.insides.iter().flatten().for_each(|inside| inside.abort(error));
    }

    /// Sends the group's fault to the other hosts, on both lanes and by mail. Takes a short time; delivery is not
    /// guaranteed.
    pub fn tell(&self, error: &Error) {
        let mailed = self.tell_by_mail(error);
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        let peers: Vec<usize> = self.contacted.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        tell_fault(&*self.link, LANES, &peers, error);
        if mailed && peers.is_empty() {
            std::thread::sleep(Duration::from_millis(20)); // time to send the mail; `tell_fault` waits as long
        }
    }

    /// Runs one batch. Returns the number up to which all ranks have issued operations, or 0 if this batch does not
    /// tell that number.
    fn carry(&self, lane: usize, transport: &mut Transport, scratch: &mut Vec<u8>, task: &Task) -> Result<u64> {
        let first = &task.ops[0].request;
        self.prepare(task)?;
        let HostsChoice { algorithm, leaders, .. } = task.choice;
        let chosen = ChosenAlgorithm { algorithm, leaders: leaders.into(), strict: self.settings.strict };
        let mut factors = vec![1.0; self.host_map.ranks()];
        factors[self.host_map.me] = f64::from_bits(task.header.factor);
        let mut run = BatchRun {
            host_map: &self.host_map,
            inside: self.insides[lane].as_deref(),
            transport,
            header: task.header,
            factors,
            deadline: task.ops.iter().map(|op| op.deadline).min().unwrap_or(0),
            chosen,
            // The lanes take turns, so from segment `LANES` on this lane has ended an earlier segment of the operation.
            // An all_reduce ends only after this rank has heard from all ranks and compared their headers with its own.
            compared: task.batch.segment >= LANES,
            scratch,
        };
        run.compare_inside()?;
        dispatch(&mut run, task)?;
        let agrees =
            task.batch.segments == 1 && matches!(first.kind, Kind::AllReduce | Kind::AllGather | Kind::Barrier);
        Ok(if agrees { run.header.issued } else { 0 })
    }

    /// Copies strided inputs to contiguous memory, once for all segments. Fails with the group's fault if the group has
    /// failed since the lane took the batch.
    fn prepare(&self, task: &Task) -> Result<()> {
        let fault = |state: &State| state.fault.clone().map_or(Ok(()), Err);
        fault(&self.lock())?;
        if task.batch.segment == 0 {
            task.ops.iter().for_each(|op| op.prepare());
        }
        let mut state = self.lock();
        for op in &task.ops {
            while task.batch.segment > 0 && !state.entry(op.number).prepared {
                fault(&state)?;
                state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.entry(op.number).prepared = true;
        }
        drop(state);
        if task.batch.segments > 1 {
            self.turn.notify_all();
        }
        Ok(())
    }
}

impl Control for Lanes {
    /// Sends the fault to the peers, and ends all waits on the link and inside the host.
    fn announce(&self, fault: &Error) {
        let mut state = self.lock();
        state.fault.get_or_insert_with(|| fault.clone());
        let stopping = state.stopping;
        drop(state);
        self.turn.notify_all();
        if !stopping {
            self.tell(fault);
            self.break_off(fault);
        }
    }

    /// First delivers what was sent. Then the lanes exchange goodbyes with the hosts to which they talked, and end.
    /// Then this rank says goodbye to all ranks by mail.
    fn leave(&self, error: &Error, interrupted: &dyn Fn() -> bool) {
        let mut state = self.lock();
        let busy = state.entries.iter().any(|entry| entry.active > 0);
        let failed = busy || state.fault.is_some();
        state.stopping = true;
        if busy {
            state.fault.get_or_insert_with(|| error.clone());
        }
        drop(state);
        self.turn.notify_all();
        if busy {
            // The callers' memory must not be used after this call, so operations in progress are aborted.
            self.break_off(error);
        }
        let until = Instant::now() + DELIVERY + FAREWELL;
        let mut broken_off = failed;
        loop {
            let state = self.lock();
            if state.running == 0 || Instant::now() >= until {
                break;
            }
            drop(self.turn.wait_timeout(state, Duration::from_millis(50)));
            if interrupted() {
                self.link.cut();
                broken_off = true;
                break;
            }
        }
        if !broken_off {
            self.say_goodbye(until, interrupted);
        }
        let mut state = self.lock();
        let flying = !state.messages.bodies.is_empty();
        if flying {
            state.fault.get_or_insert_with(|| error.clone());
        }
        drop(state);
        if flying {
            self.link.cut();
            self.await_bodies();
        }
        let told = *self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(told) = told {
            self.link.await_delivery(told + REPORT);
        }
        self.link.close();
        self.insides.iter().flatten().for_each(|inside| inside.leave());
    }

    /// Returns a fault that a rank of this host reported. Faults of other hosts arrive in frames and by mail (`tell`).
    fn reported(&self) -> Option<Told> {
        let (place, fault) = self.insides.iter().flatten().find_map(|inside| inside.reported())?;
        Some((*self.host_map.local_ranks().get(place)?, fault))
    }

    fn watched(&self) -> Vec<(usize, bool)> {
        // The groups of all lanes watch the same processes.
        let inside = self.insides.iter().flatten().next().map(|inside| inside.watched()).unwrap_or_default();
        inside.into_iter().map(|(place, gone)| (self.host_map.local_ranks()[place], gone)).collect()
    }

    fn has_threads(&self) -> bool {
        true
    }

    fn polls(&self) -> bool {
        let state = self.lock();
        state.has_messages() || state.talk.is_awaited()
    }

    fn poll(&self, sleep: Duration) -> Polled {
        // A thread that slept in the link would keep the lanes of a collective from driving it.
        let lanes_drive = || !self.lock().entries.is_empty();
        if !self.polls() || !sleep.is_zero() && lanes_drive() {
            return Polled::Elsewhere;
        }
        self.link.poll(sleep)
    }

    fn monitor(&self) -> Option<&dyn Monitor> {
        Some(self)
    }
}
