//! A group over several hosts as one rank sees it: what it has issued, how it opens its link and how it ends.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::batch::Inside;
use super::lanes::Shared;
use super::place::Place;
use super::probe::probe;
use super::queue::{Entry, State};
use super::transport::{Lane, Link, NOBODY};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::fusion::planner::{LANES, Limits};
use crate::op;
use crate::op::Op;
use crate::op::overlap::Reach;
use crate::select::explain;
use crate::select::explain::Explanation;
use crate::select::hosts::{Hosts, LinkFacts, Menu};
use crate::select::{Asked, Policy, Shape};

/// Whom the lanes tell. Never called with a lock of ours held.
pub trait Report: Send + Sync {
    fn ended(&self, ended: Vec<(Arc<Op>, Result<()>)>);
    /// A lane found a fault; the group passes it on, `Hierarchical::fail` included.
    fn failed(&self, error: Error);
}

/// Bytes and operations of one batch.
const BATCH: Limits = Limits { bytes: 1 << 20, operations: 4096 };
/// Who leaves stays so long, at most, until what it has sent was taken; the others' goodbyes are waited for a moment.
pub(super) const DELIVERY: Duration = Duration::from_secs(30);
pub(super) const FAREWELL: Duration = Duration::from_secs(1);

pub struct Hierarchical {
    shared: Arc<Shared>,
    report: Arc<dyn Report>,
    /// Until their threads start.
    lanes: Mutex<Vec<Lane>>,
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
        let facts = probe(&place, &mut lanes[0], insides[0].as_ref(), chain, timeout)?;
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
                full_nvlink: false,
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
