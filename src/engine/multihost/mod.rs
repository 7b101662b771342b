//! A group whose ranks live on several hosts: batches of operations on two lanes, shared memory inside each host, a link
//! between the hosts.
//!
//! `issue` puts an operation into the queue and never waits. Each lane has a thread that takes the batches of its turn
//! (`fusion`) and carries each one through (`collectives`): a link can only be waited on, so somebody has to wait, and it
//! must not be the caller, who wants to hear of signals and deadlines. A lane has its own shared-memory group inside the
//! host and its own tags on the link, so what one lane does can neither meet nor order what the other does.
//!
//! | file | |
//! | --- | --- |
//! | `place` | who lives where |
//! | `probe` | how long a message takes between hosts |
//! | `queue` | what was issued and has not ended, and which lane has what |
//! | `vector` | the numbers of a batch, and how they are combined |
//! | `travel` | one batch: steps inside a host, schedules between hosts |
//! | `dispatch` | from the requests of a batch to the collective that carries them |
//! | `collectives` | the two put together, one collective after the other |
//! | `columns` | the same for large ones, where several ranks of a host talk to other hosts |

pub mod batch;
mod collectives;
mod dispatch;
pub mod place;
mod probe;
mod queue;
pub mod rails;
pub mod transport;
mod vector;

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::batch::Travel;
pub use self::batch::{Inside, Way};
use self::place::Place;

use self::transport::{Lane, Link, NOBODY, Note};
use crate::config::Settings;
use crate::error::{Error, Result, contained};
use crate::fusion::planner::{Batch, Class, Item, LANES, Limits};
use crate::op;
use crate::op::overlap::Reach;
use crate::op::{Company, Op};
use crate::select::explain;
use crate::select::explain::Explanation;
use crate::select::inter;
use crate::select::inter::{Hosts, HostsChoice, LinkFacts, Menu};
use crate::select::{Asked, Policy, Shape};
use crate::types::{Kind, ReduceOp, Request, Span};

use self::queue::{Entry, State};

/// Whom the lanes tell. Never called with a lock of ours held.
pub trait Report: Send + Sync {
    fn ended(&self, ended: Vec<(Arc<Op>, Result<()>)>);
    /// A lane found a fault; the group passes it on, `Hierarchical::fail` included.
    fn failed(&self, error: Error);
}

/// Bytes and operations of one batch.
const BATCH: Limits = Limits { bytes: 1 << 20, operations: 4096 };
/// Who leaves stays so long, at most, until what it has sent was taken; the others' goodbyes are waited for a moment.
const DELIVERY: Duration = Duration::from_secs(30);
const FAREWELL: Duration = Duration::from_secs(1);
/// A lane's memory beyond this goes back after the batch.
const KEPT: usize = 100 << 20;

struct Shared {
    place: Place,
    link: Arc<dyn Link>,
    insides: Vec<Option<Arc<dyn Inside>>>,
    settings: Settings,
    /// What the choice between hosts needs; the same on every rank.
    hosts: Hosts,
    menu: Menu,
    policy: Arc<Policy>,
    state: Mutex<State>,
    /// Something changed in `state`.
    turn: Condvar,
    /// Whom each lane waits for, for messages. Written by the lanes, read by whoever finds a deadline passed; relaxed,
    /// because it orders nothing.
    waiting: Vec<Arc<AtomicUsize>>,
    /// Ranks of other hosts that this rank has talked to.
    known: Mutex<HashSet<usize>>,
}

pub struct Hierarchical {
    shared: Arc<Shared>,
    report: Arc<dyn Report>,
    /// Until their threads start.
    lanes: Mutex<Vec<Lane>>,
}

/// A batch that a lane has taken.
struct Task {
    batch: Batch,
    ops: Vec<Arc<Op>>,
    note: Note,
    choice: HostsChoice,
}

impl Hierarchical {
    /// `insides`: one group of this host's ranks a lane, or none where this rank is alone. Measures the link with the
    /// other hosts, so every rank must come here; at most `timeout`.
    pub fn open(
        place: Place,
        link: Arc<dyn Link>,
        insides: Vec<Option<Arc<dyn Inside>>>,
        settings: Settings,
        policy: Arc<Policy>,
        report: Arc<dyn Report>,
        timeout: Duration,
    ) -> Result<Hierarchical> {
        assert_eq!(insides.len(), LANES, "one group a lane");
        let waiting: Vec<Arc<AtomicUsize>> = (0..LANES).map(|_| Arc::new(AtomicUsize::new(NOBODY))).collect();
        let each = waiting.iter().enumerate();
        let mut lanes: Vec<Lane> =
            each.map(|(lane, waiting)| Lane::new(Arc::clone(&link), place.me, lane, Arc::clone(waiting))).collect();
        let chain = policy.hash() ^ (u64::from(settings.fusion) | u64::from(settings.strict) << 1);
        let facts = self::probe::probe(&place, &mut lanes[0], insides[0].as_ref(), chain, timeout)?;
        let limits = if settings.fusion { BATCH } else { Limits { operations: 1, ..BATCH } };
        let state = State::new(limits, chain);
        // Whom a fault concerns first: those that lead at this rank's position.
        let far = place.hosts.iter().enumerate().filter(|(host, _)| *host != place.host);
        let known = far.filter_map(|(_, ranks)| ranks.get(place.index)).copied().collect();
        let shared = Shared {
            hosts: Hosts {
                hosts: place.hosts.len(),
                ranks: place.ranks(),
                least_ranks: place.fewest(),
                link: facts,
                strict: settings.strict,
            },
            menu: Menu::new(place.hosts.len()),
            policy,
            place,
            link,
            insides,
            settings,
            state: Mutex::new(state),
            turn: Condvar::new(),
            waiting,
            known: Mutex::new(known),
        };
        Ok(Hierarchical { shared: Arc::new(shared), report, lanes: Mutex::new(lanes) })
    }

    /// Takes an operation that was validated and numbered.
    pub fn issue(&self, op: Arc<Op>) -> Result<()> {
        let shared = &self.shared;
        let item = shared.item(&op.request);
        // Its way is chosen when its batch is made.
        op.loads(Asked::of(&op.request, shared.place.ranks()).load());
        let mut state = shared.lock();
        if !std::mem::replace(&mut state.started, true) {
            self.start(&mut state)?;
        }
        if let Some(fault) = &state.fault {
            return Err(fault.clone());
        }
        if state.stopping {
            return Err(Error::Aborted("sagellm: the group was destroyed".to_string()));
        }
        state.issued = op.number;
        state.entries.push_back(Entry { op, left: item.segments, active: 0, prepared: false, done: false });
        state.planner.push(item);
        state.promise();
        drop(state);
        shared.turn.notify_all();
        Ok(())
    }

    /// How an operation goes alone, or a batch.
    pub fn explain(&self, asked: Asked, batched: bool, shape: &Shape) -> Explanation {
        let shared = &self.shared;
        explain::between(asked, batched, shape, &shared.hosts, &shared.menu, &shared.policy)
    }

    /// The operation with this number, if it has not ended.
    pub fn collective(&self, number: u64) -> Option<Arc<Op>> {
        let state = self.shared.lock();
        let at = number.checked_sub(state.base)?;
        let entry = state.entries.get(usize::try_from(at).ok()?)?;
        (!entry.done).then(|| Arc::clone(&entry.op))
    }

    /// An operation that has not ended and that must come before whatever touches `reach`.
    pub fn using(&self, reach: &Reach) -> Option<Arc<Op>> {
        let state = self.shared.lock();
        let found = state.entries.iter().find(|entry| !entry.done && entry.op.reach().meets(reach));
        found.map(|entry| Arc::clone(&entry.op))
    }

    fn start(&self, state: &mut State) -> Result<()> {
        let lanes = std::mem::take(&mut *self.lanes.lock().unwrap_or_else(PoisonError::into_inner));
        for (lane, wires) in lanes.into_iter().enumerate() {
            let (shared, report) = (Arc::clone(&self.shared), Arc::clone(&self.report));
            crate::os::watch::spawn(&format!("sagellm-lane-{lane}"), move || shared.work(lane, wires, &*report))
                .map_err(|error| Error::System(format!("sagellm: cannot start a thread for lane {lane}: {error}")))?;
            state.running += 1;
        }
        Ok(())
    }

    /// What was measured between the hosts.
    pub fn link(&self) -> LinkFacts {
        self.shared.hosts.link
    }

    /// The operation whose deadline comes first, among those that have not ended.
    pub fn next_deadline(&self) -> Option<Arc<Op>> {
        let state = self.shared.lock();
        let pending = state.entries.iter().filter(|entry| !entry.done);
        pending.min_by_key(|entry| entry.op.deadline).map(|entry| Arc::clone(&entry.op))
    }

    /// The text of a deadline that passed.
    pub fn stall(&self, op: &Op, group: &str) -> Error {
        let waiting: Vec<usize> = self
            .shared
            .waiting
            .iter()
            .map(|lane| lane.load(Ordering::Relaxed))
            .filter(|rank| *rank != NOBODY)
            .collect();
        let whom = match &waiting[..] {
            [] => "no answer from ranks of its own host".to_string(),
            ranks => {
                let ranks: Vec<String> = ranks.iter().map(|rank| format!("rank {rank}")).collect();
                format!("no answer from {} on another host", ranks.join(" and "))
            }
        };
        Error::Timeout(format!(
            "sagellm: rank {} of group '{group}' Timed out after {:.1} s in {} number {}: {whom}: it has not entered it, or cannot \
             be reached. Every rank must call the same operations in the same order; where a rank needs longer, \
             pass a larger timeout",
            self.shared.place.me,
            op.timeout.as_secs_f64(),
            op::describe(op.signature),
            op.number
        ))
    }

    /// Everything fails: peers are told, lanes end. Gives back the operations that no lane has; a lane ends its own.
    pub fn fail(&self, error: &Error) -> Vec<Arc<Op>> {
        let shared = &self.shared;
        let mut state = shared.lock();
        let first = state.fault.is_none() && !state.stopping;
        if state.fault.is_none() {
            state.fault = Some(error.clone());
        }
        let free = state.take_free();
        drop(state);
        shared.turn.notify_all();
        if first {
            shared.tell(error);
            shared.link.cut();
            shared.insides.iter().flatten().for_each(|inside| inside.abort(error));
        }
        free
    }

    /// Leaves in order: what was sent is delivered, lanes say goodbye to the hosts they talked to and end. Gives back what
    /// was pending, which ends with `error`. Returns early when `interrupted` says so.
    pub fn close(&self, error: &Error, interrupted: impl Fn() -> bool) -> Vec<Arc<Op>> {
        let shared = &self.shared;
        let mut state = shared.lock();
        let busy = state.entries.iter().any(|entry| entry.active > 0);
        let mut free = state.take_free();
        state.stopping = true;
        if busy && state.fault.is_none() {
            state.fault = Some(error.clone());
        }
        drop(state);
        shared.turn.notify_all();
        if busy {
            // Nobody may use the callers' memory afterwards, so what is on its way is broken off.
            shared.link.cut();
            shared.insides.iter().flatten().for_each(|inside| inside.abort(error));
        }
        let until = Instant::now() + DELIVERY + FAREWELL;
        loop {
            let state = shared.lock();
            if state.running == 0 || Instant::now() >= until {
                break;
            }
            drop(shared.turn.wait_timeout(state, Duration::from_millis(50)));
            if interrupted() {
                shared.link.cut();
                break;
            }
        }
        free.extend(shared.lock().take_free()); // the rest of what a lane had in part
        free
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the planner needs to know: a function of what all ranks share.
    fn item(&self, request: &Request) -> Item {
        let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
        let (bytes, class) = match request.kind {
            Kind::AllReduce if !matches!(request.op, ReduceOp::PremulSum(_)) => {
                (sum(request.inputs()), Some(Class { kind: Kind::AllReduce, op: request.op.code() }))
            }
            Kind::AllGather if request.out_blocks.is_empty() => {
                (sum(request.inputs()), Some(Class { kind: Kind::AllGather, op: 0 }))
            }
            Kind::Broadcast => (sum(request.inputs()).max(sum(request.outputs())), None),
            _ => (sum(request.inputs()), None),
        };
        let class = class.filter(|_| bytes as u64 <= inter::SMALL);
        let cut = matches!(request.kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast) && class.is_none();
        let alone = || self.choice(Asked::of(request, self.place.ranks()), false);
        let segments = if cut { alone().segments } else { 1 };
        Item { class, bytes, segments }
    }

    /// How one operation goes, or several that go together: a function of what all ranks share.
    fn choice(&self, asked: Asked, batched: bool) -> HostsChoice {
        inter::between_hosts(asked, batched, &self.hosts, &self.menu, &self.policy)
    }

    /// Chooses the way of a batch and notes it, so that each operation knows how and with whom it went.
    fn set_out(&self, batch: &Batch, ops: &[Arc<Op>]) -> HostsChoice {
        let ranks = self.place.ranks();
        let asked =
            Asked::together(ops.iter().map(|op| Asked::of(&op.request, ranks))).expect("a batch holds one or more");
        let choice = self.choice(asked, ops.len() > 1);
        if batch.segment == 0 {
            for op in ops {
                op.loads(asked.load());
                op.travels_with(Company::new(op.number, (batch.first, batch.last), ops.len()));
                op.sets_out(choice.choice().code());
            }
        }
        choice
    }

    /// The next batch of this lane; None when the group ends.
    fn next(&self, lane: usize) -> Option<Task> {
        let mut state = self.lock();
        loop {
            if state.stopping || state.fault.is_some() {
                return None;
            }
            if state.planner.lane() == lane
                && let Some(batch) = state.planner.plan()
            {
                return self.begin(lane, state, batch);
            }
            state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Marks a batch as begun, and waits until earlier operations on the same memory have ended.
    fn begin(&self, lane: usize, mut state: MutexGuard<'_, State>, batch: Batch) -> Option<Task> {
        let mut ops = Vec::new();
        for number in batch.first..=batch.last {
            let op = state.take_up(lane, number);
            let (signature, lists) = (op.signature, op.lists);
            ops.push(op);
            state.chain = mix(mix(state.chain, signature), lists);
        }
        state.chain = mix(state.chain, (ops.len() * 1_000_000 + batch.segment) as u64);
        let chain = state.chain;
        self.turn.notify_all(); // the other lane's turn
        while (batch.first..=batch.last).any(|number| state.must_follow(number)) && state.fault.is_none() {
            state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let factor = match ops[0].request.op {
            ReduceOp::PremulSum(factor) => factor,
            _ => 1.0,
        };
        let note = Note {
            signature: ops[0].signature,
            chain,
            number: batch.first,
            issued: state.ready.max(batch.last),
            factor: factor.to_bits(),
        };
        drop(state);
        let choice = self.set_out(&batch, &ops);
        Some(Task { batch, ops, note, choice })
    }

    /// A lane's thread. A panic is a bug of ours: it fails the group, ends what the lane had, and must not become a hang.
    fn work(&self, lane: usize, mut wires: Lane, report: &dyn Report) {
        let mut scratch = Vec::new();
        while let Some(task) = self.take(lane, report) {
            let outcome = contained(|| self.carry(lane, &mut wires, &mut scratch, &task))
                .and_then(|agreed| contained(|| Ok(self.finish(lane, &task, agreed))));
            if scratch.len() > KEPT {
                scratch = Vec::new();
            }
            self.known.lock().unwrap_or_else(PoisonError::into_inner).extend(wires.peers());
            match outcome {
                Ok(ended) => ended.into_iter().for_each(|together| report.ended(together)),
                Err(error) => {
                    self.give_up(lane, error, report);
                    break;
                }
            }
        }
        let orderly = self.lock().fault.is_none();
        if orderly {
            let left = contained(|| {
                wires.bye(DELIVERY, FAREWELL);
                Ok(())
            });
            left.unwrap_or_else(|error| log::error!("{error}"));
        }
        drop(wires); // the link's last reference must not fall while the process ends
        self.lock().running -= 1;
        self.turn.notify_all();
    }

    /// The next batch of this lane's turn, or none when the lane shall end.
    fn take(&self, lane: usize, report: &dyn Report) -> Option<Task> {
        contained(|| Ok(self.next(lane))).unwrap_or_else(|error| {
            self.give_up(lane, error, report);
            None
        })
    }

    /// Marks a batch as ended; the operations that ended with it, and behind them each barrier that waited for them.
    fn finish(&self, lane: usize, task: &Task, agreed: u64) -> Vec<Vec<(Arc<Op>, Result<()>)>> {
        let mut state = self.lock();
        state.planner.agree(&task.batch, agreed);
        let mut complete = Vec::new();
        for op in &task.ops {
            let entry = state.entry(op.number);
            entry.left -= 1;
            if entry.left == 0 {
                complete.push(Arc::clone(op));
            }
        }
        drop(state);
        complete.iter().for_each(|op| op.store_back());
        let mut state = self.lock();
        let mut ended = Vec::new();
        let fault = state.fault.clone();
        for op in &task.ops {
            let first = op.number == state.base;
            let entry = state.lay_down(lane, op.number);
            let outcome = match &fault {
                _ if entry.carried() && (first || op.request.kind != Kind::Barrier) => Ok(()),
                // Nobody will take its other segments.
                Some(fault) if entry.active == 0 => Err(fault.clone()),
                _ => continue,
            };
            if !std::mem::replace(&mut entry.done, true) {
                ended.push((Arc::clone(op), outcome));
            }
        }
        state.trim();
        // Apart, because they were no part of the batch.
        let barriers = state.take_barriers().into_iter().map(|op| vec![(op, Ok(()))]);
        let ended = std::iter::once(ended).chain(barriers).collect();
        state.promise();
        drop(state);
        self.turn.notify_all();
        ended
    }

    /// The group fails with `error`, and what this lane has taken ends, unless the other lane still works on a segment of
    /// it: then that one ends it.
    fn give_up(&self, lane: usize, error: Error, report: &dyn Report) {
        report.failed(error.clone());
        let mut state = self.lock();
        let error = state.fault.clone().unwrap_or(error);
        let left = state.drop_all(lane);
        drop(state);
        report.ended(left.into_iter().map(|op| (op, Err(error.clone()))).collect());
    }

    /// Tells the other hosts why the group fails, on both lanes, as well as it can be done in a moment.
    fn tell(&self, error: &Error) {
        let peers: Vec<usize> = self.known.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        transport::tell_fault(&*self.link, LANES, &peers, error);
    }

    /// Carries one batch through; the number that all ranks agreed on, or 0.
    fn carry(&self, lane: usize, wires: &mut Lane, scratch: &mut Vec<u8>, task: &Task) -> Result<u64> {
        let first = &task.ops[0].request;
        self.prepare(task)?;
        let HostsChoice { algorithm, leaders, .. } = task.choice;
        let way = Way { algorithm, leaders: leaders.into(), strict: self.settings.strict };
        let mut factors = vec![1.0; self.place.ranks()];
        factors[self.place.me] = f64::from_bits(task.note.factor);
        let mut travel = Travel {
            place: &self.place,
            inside: self.insides[lane].as_deref(),
            lane: wires,
            note: task.note,
            factors,
            deadline: task.ops.iter().map(|op| op.deadline).min().unwrap_or(0),
            way,
            scratch,
        };
        travel.compare_inside()?;
        self.dispatch(&mut travel, task)?;
        let agrees =
            task.batch.segments == 1 && matches!(first.kind, Kind::AllReduce | Kind::AllGather | Kind::Barrier);
        Ok(if agrees { travel.note.issued } else { 0 })
    }

    /// Makes inputs ready to be read, once for all segments. An error is the group's fault, which may have come while the
    /// lane waited for its turn.
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

fn mix(chain: u64, value: u64) -> u64 {
    (chain ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
