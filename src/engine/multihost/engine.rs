//! The engine of a group over several hosts: opens the link, accepts operations and leaves.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

use once_cell::sync::OnceCell;

use super::batch::HostGroup;
use super::host_map::HostMap;
use super::lanes::{Home, Lanes};
use super::link::Link;
use super::messages::Messages;
use super::names::Names;
use super::post::Inbox;
use super::probe::{Opening, probe};
use super::queue::State;
use super::results::Ledger;
use super::transport::{NOBODY, Transport};
use crate::config::Settings;
use crate::engine::{Blockers, Control, Ended, Engine, Report};
use crate::error::{Error, Result};
use crate::fusion::planner::{LANES, Limits};
use crate::host::Host;
use crate::op::Op;
use crate::os::watch;
use crate::reduce::Kernel;
use crate::select::explain;
use crate::select::explain::Explanation;
use crate::select::inter::{Hosts, LinkFacts, Menu};
use crate::select::{Choice, GroupShape, OpDesc, Policy};

/// The largest numbers of bytes and operations in one batch.
const BATCH: Limits = Limits { bytes: 1 << 20, operations: 4096 };
/// If the link's latency is at most this, the memory of a receive of more than `LONGEST_EARLY` bytes is passed to the
/// link only after the message was announced (`ready`). Passing the memory earlier would save one round trip, which is
/// short compared with the message. But with memory passed earlier, messages of 1 MiB took 300 us instead of 230
/// (2-core EPYC, network namespaces without a limit, 2026-11-25).
const FAST_LINK_NS: u64 = 60_000;
const LONGEST_EARLY: usize = 512 << 10;
/// An open link that the hosts have measured together, and the groups inside this host. A `MultiHost` is made from an
/// `Opened`.
pub struct Opened {
    lanes: Lanes,
    transports: Vec<Transport>,
    reason: String,
}

impl Opened {
    /// `insides` has one group of this host's ranks for each lane, or None if this rank is alone on its host. `group`
    /// is the group's name; `reason` says why the ranks count as several hosts. This exchanges messages with the other
    /// hosts, so every rank must call it. It takes at most `timeout`.
    pub fn new(
        host_map: HostMap,
        link: Arc<dyn Link>,
        insides: Vec<Option<Arc<dyn HostGroup>>>,
        (settings, group, reason): (Settings, String, String),
        policy: Arc<Policy>,
        timeout: Duration,
    ) -> Result<Opened> {
        assert_eq!(insides.len(), LANES, "one group a lane");
        let names = Arc::new(names(group, &host_map, &*link, insides.first().and_then(Option::as_deref)));
        let waiting: Vec<Arc<AtomicUsize>> = (0..LANES).map(|_| Arc::new(AtomicUsize::new(NOBODY))).collect();
        let each = waiting.iter().enumerate();
        let mut transports: Vec<Transport> = each
            .map(|(lane, waiting)| Transport::new(Arc::clone(&link), Arc::clone(&names), lane, Arc::clone(waiting)))
            .collect();
        let chain = policy.hash() ^ (u64::from(settings.fusion) | u64::from(settings.strict) << 1);
        let others = host_map.leaders(0).into_iter().filter(|rank| *rank != host_map.me);
        let processes: Vec<String> = others.map(|rank| names.processes[rank].clone()).collect();
        let all_known = processes.iter().all(|process| !process.is_empty());
        let processes = if all_known { processes } else { Vec::new() };
        let opening = Opening { chain, measures: policy.measure_link, processes, timeout };
        let facts = probe(&host_map, &mut transports[0], insides[0].as_ref(), opening)?;
        let limits = if settings.fusion { BATCH } else { Limits { operations: 1, ..BATCH } };
        let longest_early = if facts.alpha_ns > FAST_LINK_NS { usize::MAX } else { LONGEST_EARLY };
        let ledger = policy.verify.is_on().then(|| Mutex::new(Ledger::new(policy.verify, Arc::clone(&names))));
        transports.iter_mut().for_each(|transport| transport.heard = ledger.as_ref().map(|_| Vec::new()));
        let state = State::new(limits, chain, Messages::new(host_map.ranks(), names, longest_early));
        // The ranks of other hosts that have this rank's local rank. A fault is sent to them even if the lanes never
        // exchange messages with them.
        let far = host_map.hosts.iter().enumerate().filter(|(host, _)| *host != host_map.host);
        let contacted = far.filter_map(|(_, ranks)| ranks.get(host_map.local_rank)).copied().collect();
        let lanes = Lanes {
            hosts: Hosts {
                hosts: host_map.hosts.len(),
                ranks: host_map.ranks(),
                least_ranks: host_map.min_local_size(),
                link: facts,
                strict: settings.strict,
            },
            menu: Menu::new(host_map.hosts.len()),
            policy,
            host_map,
            link,
            insides,
            settings,
            state: Mutex::new(state),
            turn: Condvar::new(),
            waiting,
            told: Mutex::default(),
            contacted: Mutex::new(contacted),
            not_taken: Mutex::default(),
            home: OnceCell::new(),
            ledger,
        };
        Ok(Opened { lanes, transports, reason })
    }

    /// Like `new`, but runs on a separate thread: a signal must interrupt the calling thread, and it cannot interrupt a
    /// wait on the link.
    pub fn interruptible(
        host_map: HostMap,
        link: Arc<dyn Link>,
        insides: Vec<Option<Arc<dyn HostGroup>>>,
        named: (Settings, String, String),
        policy: Arc<Policy>,
        timeout: Duration,
        host: &dyn Host,
    ) -> Result<Opened> {
        let (done, opened) = std::sync::mpsc::channel();
        let theirs = Arc::clone(&link);
        let opening = move || {
            let _ = done.send(Opened::new(host_map, theirs, insides, named, policy, timeout));
        };
        watch::spawn("sagellm-probe", opening)
            .map_err(|error| Error::system(format!("sagellm: cannot start a thread to open the link: {error}")))?;
        loop {
            match opened.recv_timeout(Duration::from_millis(50)) {
                Ok(opened) => return opened,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::bug("sagellm: the thread that opens the link ended without a result"));
                }
                Err(RecvTimeoutError::Timeout) if host.interrupted() => {
                    link.cut();
                    return Err(Error::interrupted("sagellm: interrupted while the group was being made"));
                }
                Err(RecvTimeoutError::Timeout) => (),
            }
        }
    }

    /// Returns the measured latency and bandwidth between hosts.
    pub fn link(&self) -> LinkFacts {
        self.lanes.hosts.link
    }
}

/// `inside` is a group of this host's ranks.
fn names(group: String, host_map: &HostMap, link: &dyn Link, inside: Option<&dyn HostGroup>) -> Names {
    let mates = host_map.local_ranks().to_vec();
    let process = |rank: usize| match (mates.iter().position(|mate| *mate == rank), inside) {
        (Some(place), Some(inside)) => inside.process(place),
        _ => link.process(rank),
    };
    Names { group, me: host_map.me, processes: (0..host_map.ranks()).map(process).collect(), mates }
}

/// The group's `Engine`: passes collectives to the lanes' threads and messages to the link.
pub struct MultiHost {
    lanes: Arc<Lanes>,
    report: Arc<dyn Report>,
    /// The lanes' transports. Empty after the first collective has started the lanes' threads.
    transports: Vec<Transport>,
    /// Why the ranks count as several hosts.
    reason: String,
}

impl MultiHost {
    pub fn new(opened: Opened, report: Arc<dyn Report>) -> MultiHost {
        let Opened { lanes, transports, reason } = opened;
        let lanes = Arc::new_cyclic(|this| {
            let home = OnceCell::with_value(Home { this: Weak::clone(this), report: Arc::clone(&report) });
            Lanes { home, ..lanes }
        });
        lanes.link.open_mailbox(Arc::new(Inbox(Arc::downgrade(&lanes))));
        MultiHost { lanes, report, transports, reason }
    }

    fn submit_message(&mut self, op: Arc<Op>, ended: &mut Ended) -> Result<()> {
        let lanes = &self.lanes;
        op.record_load(OpDesc::of(&op.request, lanes.host_map.ranks()).load());
        op.record_choice(Choice::MESSAGE.code());
        let mut state = lanes.lock();
        state.accepts()?;
        state.enter_message(&op);
        drop(state);
        let (over, failure) = lanes.run_errands();
        ended.extend(over);
        failure.map_or(Ok(()), Err)
    }

    fn start(&mut self) -> Result<()> {
        for (lane, transport) in std::mem::take(&mut self.transports).into_iter().enumerate() {
            let (lanes, report) = (Arc::clone(&self.lanes), Arc::clone(&self.report));
            self.lanes.lock().running += 1; // before the thread can end and decrement
            let work = move || lanes.work(lane, transport, &*report);
            watch::spawn(&format!("sagellm-lane-{lane}"), work).map_err(|error| {
                self.lanes.lock().running -= 1;
                Error::system(format!("sagellm: cannot start a thread for lane {lane}: {error}"))
            })?;
        }
        Ok(())
    }
}

impl Engine for MultiHost {
    fn control(&self) -> Arc<dyn Control> {
        Arc::<Lanes>::clone(&self.lanes)
    }

    fn describe(&self) -> String {
        let Lanes { host_map, settings, policy, .. } = &*self.lanes;
        let hosts: Vec<String> = host_map.hosts.iter().map(|ranks| ranks.len().to_string()).collect();
        format!(
            "{} hosts with {} ranks, shared memory inside, a link between them, fusion {}, {}{} ({})",
            hosts.len(),
            hosts.join(" + "),
            if settings.fusion { "on" } else { "off" },
            if settings.strict { "strict" } else { "not strict" },
            policy.verify.described(),
            self.reason
        )
    }

    fn submit(&mut self, op: Arc<Op>, _kernel: Option<Kernel>, ended: &mut Ended) -> Result<()> {
        if op.request.kind.is_p2p() {
            return self.submit_message(op, ended);
        }
        self.start()?;
        let lanes = &self.lanes;
        let item = lanes.item(&op.request);
        // The algorithm is chosen later, when the batch is made.
        op.record_load(OpDesc::of(&op.request, lanes.host_map.ranks()).load());
        let mut state = lanes.lock();
        state.accepts()?;
        state.enter_collective(op, item.segments);
        state.planner.push(item);
        state.extend_promise();
        drop(state);
        lanes.turn.notify_all();
        // A send that now continues from a copy may unblock other operations.
        let (over, failure) = lanes.run_errands();
        ended.extend(over);
        failure.map_or(Ok(()), Err)
    }

    fn holds(&self, op: &Arc<Op>) -> bool {
        let state = self.lanes.lock();
        let mut collectives = state.entries.iter().filter(|entry| !entry.done).map(|entry| &entry.op);
        collectives.any(|held| Arc::ptr_eq(held, op)) || state.pending_messages().any(|held| Arc::ptr_eq(held, op))
    }

    fn next_deadline(&self) -> Option<Arc<Op>> {
        let state = self.lanes.lock();
        let collectives = state.entries.iter().filter(|entry| !entry.done).map(|entry| &entry.op);
        collectives.chain(state.pending_messages()).min_by_key(|op| op.deadline).cloned()
    }

    fn blockers(&self, op: &Op) -> Blockers {
        let state = self.lanes.lock();
        if let Some(earlier) = state.predecessor_of(op) {
            return Blockers::Earlier(Arc::clone(earlier));
        }
        drop(state);
        if op.request.kind.is_p2p() {
            let text = "no answer from the other rank: it has not come to it, or cannot be reached";
            return Blockers::Unknown(Some(text.to_string()));
        }
        let each = self.lanes.waiting.iter().map(|lane| lane.load(Ordering::Relaxed));
        let waiting: Vec<String> = each.filter(|rank| *rank != NOBODY).map(|rank| format!("rank {rank}")).collect();
        let missing = match &waiting[..] {
            [] => "no answer from ranks of its own host".to_string(),
            ranks => format!("no answer from {} on another host", ranks.join(" and ")),
        };
        Blockers::Unknown(Some(format!("{missing}: it has not entered it, or cannot be reached")))
    }

    fn collective(&self, number: u64) -> Option<Arc<Op>> {
        let state = self.lanes.lock();
        let at = number.checked_sub(state.base)?;
        let entry = state.entries.get(usize::try_from(at).ok()?)?;
        (!entry.done).then(|| Arc::clone(&entry.op))
    }

    /// Returns the operations on which no lane works. A lane ends the operations on which it works.
    fn take_pending(&mut self, error: &Error) -> Vec<Arc<Op>> {
        let mut state = self.lanes.lock();
        // The fault is set first, so that no lane takes an operation that is returned here.
        state.fault.get_or_insert_with(|| error.clone());
        let free = state.take_idle();
        self.lanes.await_letters(&mut state);
        drop(state);
        self.lanes.turn.notify_all();
        free
    }

    fn explain(&self, desc: OpDesc, batched: bool) -> Explanation {
        let Lanes { host_map, hosts, menu, policy, .. } = &*self.lanes;
        let shape = GroupShape::without_memory(host_map.ranks());
        if desc.kind.is_p2p() {
            return explain::explain(desc, &shape, policy);
        }
        explain::between(desc, batched, &shape, hosts, menu, policy)
    }
}
