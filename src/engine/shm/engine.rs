//! The engine of one rank of a shared-memory group: queues its operations and advances them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::bulk::{Bases, Bulk, Rounds, Step};
use super::mapped::{Arenas, Context, Mapped, Outcome};
use super::memory::area;
use super::memory::area::Area;
use super::memory::layout::SLOT_BYTES;
use super::p2p::P2p;
use super::protocol::Slots;
use super::results::Results;
use super::{headers, small, table};
use crate::engine::order::{Order, copy_inputs, has_left_its_memory};
use crate::engine::{Blockers, Control, Ended, Engine, LastCall, PeerProgress};
use crate::error::{Error, Result};
use crate::op::Op;
use crate::op::signature;
use crate::os::event_count;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::reduce::Kernel;
use crate::select;
use crate::select::explain;
use crate::select::explain::Explanation;
use crate::select::{Choice, GroupShape, OpDesc, Path, Policy};
use crate::types::{ANY_RANK, Kind};

enum Phase {
    /// Not published yet, for one of three reasons. A peer may still read the slot that the operation needs, an earlier
    /// operation uses the same memory, or the group does not fuse and an earlier collective has not ended.
    Queued,
    /// Published in its slot. The headers of ranks below this number have been checked.
    Slots(usize),
    /// Its header is published; its data is copied in rounds.
    Rounds(Rounds),
    /// Its header is published and offers its tensors. If a rank offers none, the data is copied in rounds.
    Mapped(Box<Mapped>),
    /// Used only if results are compared: the result is in the caller's memory, and its hash is published.
    Hashed,
}

struct Entry {
    op: Arc<Op>,
    kernel: Option<Kernel>,
    path: Path,
    phase: Phase,
    /// Its position among all operations that this rank issued in this group.
    turn: u64,
    /// Earlier operations on the same memory, which must end first. Set when this operation is the next one to be
    /// published, or when a message is issued after it.
    predecessors: Option<Vec<Arc<Op>>>,
}

/// The chunk size of an operation that runs in rounds.
fn chunk_of(path: Path) -> usize {
    match path {
        Path::Rounds { chunk } => chunk,
        _ => unreachable!("only operations in rounds offer their tensors"),
    }
}

pub struct Shm {
    area: Arc<Area>,
    shape: GroupShape,
    policy: Arc<Policy>,
    slots: Slots,
    /// Collectives that have not ended, in order of number. The queued ones are at the back.
    entries: VecDeque<Entry>,
    queued: usize,
    bases: Bases,
    arenas: Arenas,
    /// Hash of the policy and of all signatures published so far.
    chain: u64,
    p2p: P2p,
    /// Records which operations a message must follow, and which operations must follow a message.
    order: Order,
    /// Number of operations issued so far, messages included.
    turns: u64,
    /// Pending collectives up to this turn are in `order`, because a message was issued after them.
    ordered: u64,
    scratch: Vec<u8>,
    /// None if results are not compared.
    results: Option<Box<Results>>,
    /// If false, a collective is published only after the previous one has ended, so that collectives are never fused.
    fusion: bool,
}

impl Shm {
    /// `pids` has the ranks' processes, 0 if unknown. `shape` comes from `Layout::shape`. All arguments except `area`
    /// are equal on every rank.
    pub fn new(area: Arc<Area>, pids: Vec<i32>, shape: GroupShape, fusion: bool, policy: Arc<Policy>) -> Shm {
        let layout = area.layout;
        Shm {
            slots: Slots::new(area.me, area.ranks, layout.depth),
            p2p: P2p::new(&layout),
            order: Order::default(),
            turns: 0,
            ordered: 0,
            entries: VecDeque::new(),
            queued: 0,
            bases: Bases::default(),
            results: policy.verify.is_on().then(|| Box::new(Results::new(policy.verify, &layout, pids.clone()))),
            arenas: Arenas::new(pids, Arc::as_ptr(&area) as u64, shape.oversubscribed()),
            chain: policy.hash(),
            scratch: Vec::new(),
            fusion,
            area,
            shape,
            policy,
        }
    }

    /// Chooses the path of a collective and queues the collective. `publish` publishes it later.
    fn enqueue(&mut self, op: Arc<Op>, kernel: Option<Kernel>) {
        self.turns += 1;
        let desc = OpDesc::of(&op.request, self.area.ranks);
        let choice = select::choose(desc, &self.shape, &self.policy);
        op.record_load(desc.load());
        op.record_choice(choice.code());
        let (path, turn) = (choice.path, self.turns);
        self.entries.push_back(Entry { op, kernel, path, phase: Phase::Queued, turn, predecessors: None });
        self.queued += 1;
    }

    /// Passes a message to `p2p`, or holds it until the operations that it must follow have ended.
    fn enqueue_message(&mut self, op: &Arc<Op>, ended: &mut Ended) -> Result<()> {
        self.order_collectives();
        self.turns += 1;
        op.record_load(OpDesc::of(&op.request, self.area.ranks).load());
        op.record_choice(Choice::MESSAGE.code());
        let mut predecessors = self.order.before(op);
        self.continue_from_copies(&mut predecessors);
        match self.order.hold(op, self.turns, predecessors) {
            true => Ok(()),
            false => self.p2p.issue(&self.area, &mut self.arenas, Arc::clone(op), ended),
        }
    }

    /// Called before a message is issued. Adds all older collectives to `order`, and determines the operations that
    /// each must follow.
    fn order_collectives(&mut self) {
        let from = self.entries.partition_point(|entry| entry.turn <= self.ordered);
        for entry in self.entries.range_mut(from..) {
            if matches!(entry.phase, Phase::Queued) && entry.predecessors.is_none() {
                entry.predecessors = Some(self.order.before(&entry.op));
            }
            self.order.add(&entry.op);
        }
        self.ordered = self.turns;
    }

    /// Removes the predecessors for which the operation need not wait. One of these is a send that `p2p` has accepted:
    /// it continues from a copy of its data. To wait for it could be a deadlock, because its peer may post the receive
    /// only after the operation that would wait here. If the peer is already reading the send's tensor, the send
    /// remains a predecessor, because the peer will finish reading even while it waits for other operations.
    fn continue_from_copies(&mut self, predecessors: &mut Vec<Arc<Op>>) {
        predecessors.retain(|earlier| {
            let sends =
                earlier.request.kind == Kind::Send && !earlier.is_released() && self.order.find(earlier).is_none();
            if sends && !self.p2p.is_lent(earlier) {
                copy_inputs(earlier);
                self.order.released(earlier);
            }
            !earlier.is_released()
        });
    }

    /// Starts the held messages that no longer have to wait. Returns whether there was one.
    fn hand_over_held(&mut self, ended: &mut Ended) -> Result<bool> {
        let mut moved = false;
        while let Some(op) = self.order.next_ready() {
            self.p2p.issue(&self.area, &mut self.arenas, Arc::clone(&op), ended)?;
            if has_left_its_memory(&op) {
                op.release();
            } else if op.request.kind == Kind::Send && !op.is_released() && self.order.is_awaited(&op) {
                copy_inputs(&op);
            }
            if op.is_released() {
                self.order.released(&op);
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Advances the published operation at `at`. Returns its step, and whether it is large (in phase `Rounds` or
    /// `Mapped`). Only one large operation runs at a time, because operations in rounds use the same stage. `large`: an
    /// earlier operation is large.
    fn step(&mut self, at: usize, large: bool) -> Result<(Step, bool)> {
        let area = &*self.area;
        let Entry { op, kernel, path, phase, .. } = &mut self.entries[at];
        match phase {
            Phase::Queued => Ok((Step::Blocked, false)),
            Phase::Hashed => Ok((Step::Done, false)),
            Phase::Slots(seen) => {
                *seen = headers::look(area, op, *seen, |q| small::reads_from(&op.request, area.me, q))?;
                if *seen < area.ranks {
                    op.timing.set_late(*seen);
                    return Ok((Step::Blocked, false));
                }
                // A barrier ends after every earlier collective of this rank, so that the program may use the
                // collectives' memory after the barrier. The peers do not wait for that, because this rank's slot of
                // the barrier is already published.
                if op.request.kind == Kind::Barrier && at > 0 {
                    return Ok((Step::Blocked, false));
                }
                fault_points::reached(FaultPoint::SlotsSeen);
                small::finish(area, op, kernel.as_ref(), &mut self.scratch)?;
                Ok((Step::Done, false))
            }
            Phase::Rounds(_) | Phase::Mapped(_) if large => Ok((Step::Blocked, true)),
            Phase::Rounds(rounds) => {
                let mut bulk = Bulk { area, op, kernel: kernel.as_ref(), scratch: &mut self.scratch };
                let step = bulk.step(rounds, &mut self.bases)?;
                if let Some(results) = &mut self.results {
                    results.follow(op, rounds.complete());
                }
                Ok((step, true))
            }
            Phase::Mapped(mapped) => {
                let (kernel, arenas) = (kernel.as_ref(), &self.arenas);
                match mapped.step(&Context { area, op, kernel, arenas, round: self.bases.stage })? {
                    Outcome::Step(step) => Ok((step, true)),
                    Outcome::Staged => {
                        *phase = Phase::Rounds(Rounds::new(op, chunk_of(*path)));
                        Ok((Step::Moved, true))
                    }
                }
            }
        }
    }

    /// Publishes queued operations in order, as far as free slots, the use of memory and `fusion` allow. Returns
    /// whether one was published.
    fn publish(&mut self) -> bool {
        let mut moved = false;
        while self.queued > 0 {
            let at = self.entries.len() - self.queued;
            let n = self.entries[at].op.number;
            if !self.slots.may_publish(&*self.area, n) || self.must_wait(at) || !self.fusion && at > 0 {
                break;
            }
            let area = &*self.area;
            let Entry { op, path, phase, .. } = &mut self.entries[at];
            op.prepare();
            self.chain = area::chain(self.chain, op);
            let chain = self.chain;
            *phase = match *path {
                Path::Rounds { chunk } => {
                    if op.request.kind == Kind::AllToAll {
                        table::write(area, op, chain);
                    } else {
                        headers::write(area, op, chain);
                    }
                    let offer = self.arenas.offer(area, op);
                    Arenas::write(area, op, offer.as_ref());
                    match offer {
                        Some(offer) => Phase::Mapped(Box::new(Mapped::new(op, offer))),
                        None => Phase::Rounds(Rounds::new(op, chunk)),
                    }
                }
                // `Path::Slots`: for a collective of several ranks on one host, `choose` returns no path except those
                // handled here.
                _ => {
                    small::write(area, op, chain);
                    Phase::Slots(0)
                }
            };
            fault_points::reached(FaultPoint::SlotWritten);
            self.slots.publish(area, n);
            fault_points::reached(FaultPoint::SlotPublished);
            self.queued -= 1;
            moved = true;
        }
        if moved {
            event_count::announce(&*self.area, self.area.ranks);
        }
        moved
    }

    /// Advances the published operations and the messages as far as the peers' data allows. Returns true if something
    /// moved.
    fn advance(&mut self, ended: &mut Ended) -> Result<bool> {
        let (mut moved, mut large) = (false, false);
        let mut at = 0;
        while at < self.entries.len() - self.queued {
            let (mut step, is_large) = self.step(at, large)?;
            if step == Step::Done && self.results.is_some() {
                step = self.compare(at)?;
            }
            if step == Step::Done {
                // Store back while the operation is still in the list, so that `take_pending` finds it if the copy
                // panics.
                self.entries[at].op.store_back();
                let entry = self.entries.remove(at).expect("in range");
                fault_points::reached(FaultPoint::SlotsRead);
                self.slots.retire(&*self.area, entry.op.number);
                fault_points::reached(FaultPoint::SlotsRetired);
                entry.op.release();
                self.order.released(&entry.op);
                ended.push((entry.op, Ok(())));
            } else {
                large |= is_large;
                at += 1;
            }
            moved |= step != Step::Blocked;
        }
        if self.order.holds_some() {
            moved |= self.hand_over_held(ended)?;
        }
        let before = ended.len();
        moved |= self.p2p.poll(&self.area, &mut self.arenas, ended)?;
        ended[before..].iter().for_each(|(op, _)| self.order.released(op));
        if moved {
            event_count::announce(&*self.area, self.area.ranks);
        }
        Ok(moved)
    }

    /// Publishes the hash of the result of the operation at `at`, whose data is complete, and compares earlier results
    /// with those of the next rank. Returns the step with which the operation continues.
    fn compare(&mut self, at: usize) -> Result<Step> {
        let Some(results) = &mut self.results else { return Ok(Step::Done) };
        let Entry { op, phase, .. } = &mut self.entries[at];
        if !matches!(phase, Phase::Hashed) {
            if !results.publish(&self.area, op) {
                return Ok(Step::Moved);
            }
            *phase = Phase::Hashed;
        }
        Ok(if results.compare(&self.area, op, self.slots.done())? { Step::Done } else { Step::Blocked })
    }

    /// Whether the operation at `at` uses memory that an earlier operation still has to read or write. If it were
    /// published now, it would read stale data.
    fn must_wait(&mut self, at: usize) -> bool {
        if at == 0 && self.order.is_empty() {
            return false;
        }
        let mut predecessors = match self.entries[at].predecessors.take() {
            Some(predecessors) => predecessors,
            None => {
                let op = &self.entries[at].op;
                let earlier =
                    self.entries.range(..at).map(|entry| &entry.op).filter(|earlier| op.conflicts_with(earlier));
                earlier.cloned().chain(self.order.before(op)).collect()
            }
        };
        self.continue_from_copies(&mut predecessors);
        let waits = !predecessors.is_empty();
        self.entries[at].predecessors = Some(predecessors);
        waits
    }

    /// Returns the operations that cannot end before `peer` makes further progress. Checks the conditions under which
    /// operations advance. `gone` selects the ranks that will make no further progress.
    fn blocked_by(&self, peer: usize, gone: &dyn Fn(usize) -> bool) -> impl Iterator<Item = &Arc<Op>> {
        let area = &*self.area;
        let collectives = self.entries.iter().filter(move |entry| match &entry.phase {
            // A queued operation waits for earlier operations, which are checked separately, or for its slot.
            Phase::Queued => self.slots.lacks_credit(area, peer, entry.op.number),
            Phase::Slots(_) => small::needs(area, &entry.op, peer),
            Phase::Rounds(rounds) => rounds.needs(area, &entry.op, peer),
            Phase::Mapped(mapped) => mapped.needs(area, &entry.op, peer),
            Phase::Hashed => false,
        });
        collectives.map(|entry| &entry.op).chain(self.p2p.blocked_by(area, peer, gone))
    }

    /// The earlier operation of this rank for which `op` waits.
    fn predecessor_of(&self, op: &Op) -> Option<&Arc<Op>> {
        if let Some(held) = self.order.find(op) {
            return held.predecessors.iter().find(|earlier| !earlier.is_released());
        }
        let at = self.entries.iter().position(|entry| std::ptr::eq(&*entry.op, op))?;
        let entry = &self.entries[at];
        let queued = matches!(entry.phase, Phase::Queued);
        let first = entry.predecessors.as_ref().filter(|_| queued).and_then(|predecessors| predecessors.first());
        // A queued operation and a barrier follow all collectives issued before them.
        first.or_else(|| (at > 0 && (queued || op.request.kind == Kind::Barrier)).then(|| &self.entries[0].op))
    }

    /// All operations that have not ended.
    fn operations(&self) -> impl Iterator<Item = &Arc<Op>> {
        self.entries.iter().map(|entry| &entry.op).chain(self.order.held()).chain(self.p2p.pending())
    }

    /// The last call of `peer` as text, with its number, for error texts.
    fn last_call(&self, peer: usize) -> (u64, Option<String>) {
        let n = self.area.issued(peer);
        let call = || format!("{} number {n}", signature::describe(self.area.read_header(peer, n).signature));
        (n, (n > 0).then(call))
    }
}

impl Engine for Shm {
    fn control(&self) -> Arc<dyn Control> {
        Arc::<Area>::clone(&self.area)
    }

    fn describe(&self) -> String {
        let layout = &self.area.layout;
        format!(
            "shared memory, segment of {} KiB, slots of {SLOT_BYTES} bytes x {}, stage of {} KiB{}{}",
            layout.total() >> 10,
            layout.depth,
            layout.stage_bytes >> 10,
            match (self.area.nodes.count(), self.area.nodes.level()) {
                (0, _) => String::new(),
                (nodes, level) => format!(", large sums and broadcasts node by node on {nodes} {}", level.plural()),
            },
            self.policy.verify.described(),
        )
    }

    fn submit(&mut self, op: Arc<Op>, kernel: Option<Kernel>, ended: &mut Ended) -> Result<()> {
        if !op.request.kind.is_p2p() {
            self.enqueue(op, kernel);
            self.publish();
            return self.advance(ended).map(drop);
        }
        self.enqueue_message(&op, ended)?;
        self.publish();
        self.advance(ended)?;
        if has_left_its_memory(&op) && self.order.find(&op).is_none() {
            op.release();
        }
        if !op.is_released() && self.order.find(&op).is_none() {
            self.order.add(&op);
        }
        Ok(())
    }

    fn holds(&self, op: &Arc<Op>) -> bool {
        self.operations().any(|held| Arc::ptr_eq(held, op))
    }

    fn poll(&mut self, ended: &mut Ended) -> Result<bool> {
        let published = self.publish();
        Ok(self.advance(ended)? || published)
    }

    fn has_pending(&self) -> bool {
        !self.entries.is_empty() || self.order.holds_some() || self.p2p.active() > 0
    }

    fn needs(&self, rank: usize, gone: &dyn Fn(usize) -> bool) -> Option<Arc<Op>> {
        self.blocked_by(rank, gone).next().cloned()
    }

    fn next_deadline(&self) -> Option<Arc<Op>> {
        self.operations().min_by_key(|op| op.deadline).cloned()
    }

    fn blockers(&self, op: &Op) -> Blockers {
        let mut ranks = Vec::new();
        for rank in (0..self.area.ranks).filter(|rank| *rank != self.area.me) {
            // A receive from `ANY_RANK` waits for every rank. Treat all ranks as gone, so that the receive counts as
            // blocked by each of them.
            let anyone = op.request.root == ANY_RANK;
            if !self.blocked_by(rank, &|_| anyone).any(|blocked| std::ptr::eq(&**blocked, op)) {
                continue;
            }
            let (last, call) = self.last_call(rank);
            ranks.push(match op.request.kind.is_p2p() {
                true => (rank, PeerProgress::NotInMessage(call)),
                false if last >= op.number => (rank, PeerProgress::Entered),
                false => (rank, PeerProgress::NotEntered(call.map(|text| LastCall { number: last, text }))),
            });
        }
        match self.predecessor_of(op) {
            _ if !ranks.is_empty() => Blockers::Ranks(ranks),
            Some(first) => Blockers::Earlier(Arc::clone(first)),
            None => Blockers::Unknown(Some("every rank entered it".to_string())),
        }
    }

    fn collective(&self, number: u64) -> Option<Arc<Op>> {
        self.entries.iter().map(|entry| &entry.op).find(|op| op.number == number).cloned()
    }

    fn take_pending(&mut self, error: &Error) -> Vec<Arc<Op>> {
        self.queued = 0;
        let mapped = self.entries.iter().any(|entry| matches!(entry.phase, Phase::Mapped(_)));
        let exposed = mapped || self.p2p.exposes_some();
        if exposed && !self.area.is_poisoned() && !self.area.left(self.area.me) {
            // If another thread of this rank has found the fault, that thread may not have stored it yet. The peers
            // must be able to see the fault before the program changes a tensor (`mapped`). Both threads store the same
            // text.
            self.area.poison(error);
        }
        if exposed {
            // This rank has stored the fault (`poison`) or its departure (`leave`). Later writes of the program must
            // not be ordered before that store.
            fence(Ordering::SeqCst);
        }
        let collectives = self.entries.drain(..).map(|entry| {
            if let Phase::Mapped(mapped) = entry.phase {
                mapped.withdraw();
            }
            entry.op
        });
        collectives.chain(self.order.take()).chain(self.p2p.take_pending()).collect()
    }

    fn explain(&self, desc: OpDesc, _batched: bool) -> Explanation {
        explain::explain(desc, &self.shape, &self.policy)
    }
}
