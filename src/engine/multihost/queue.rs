//! Holds, under one lock, the unfinished operations of a group over several hosts: the collectives in order of issue, and
//! the messages. One `Order` covers both, so an operation that uses the memory of an earlier one follows it, whatever
//! their kinds (rule 4). A message that must wait for an earlier operation is held. A collective that must wait is not
//! run, and this rank does not promise it to its peers (rule 15).

use std::collections::VecDeque;
use std::sync::Arc;

use super::frames::Step;
use super::messages::Messages;
use super::talk::Talk;
use crate::engine::Ended;
use crate::engine::order::{Order, copy_inputs, has_left_its_memory};
use crate::error::{Error, Result};
use crate::fusion::planner::{LANES, Limits, Planner};
use crate::op::Op;
use crate::types::Kind;

pub(super) struct Entry {
    pub op: Arc<Op>,
    /// In how many batches the operation still has to run: one for each remaining segment, or 1 if it has no segments.
    pub left: usize,
    /// Number of lanes that work on the operation now. While it is not 0, the operation's memory is in use.
    pub active: usize,
    /// Whether strided inputs have been copied to contiguous memory. The lane that has the first segment copies; the
    /// other lane waits.
    pub prepared: bool,
    pub done: bool,
    /// Earlier operations on the same memory that may still use it.
    pub predecessors: Vec<Arc<Op>>,
}

impl Entry {
    /// Whether the lanes have run all batches of the operation.
    pub fn carried(&self) -> bool {
        self.left == 0 && self.active == 0
    }
}

pub(super) struct State {
    pub planner: Planner,
    /// The collectives by number, starting with `base`. A collective that has ended stays until all earlier ones have
    /// ended.
    pub entries: VecDeque<Entry>,
    pub base: u64,
    /// Highest number issued on this rank.
    pub issued: u64,
    /// All operations up to this number were issued, and none of them must wait for the memory of an earlier one. This
    /// rank may tell its peers that it can run them (rules 4 and 15).
    pub promised: u64,
    /// Hash of all batches so far, with the group's options.
    pub chain: u64,
    /// The last operation in `chain`, and the operation before it.
    last: Step,
    before: Step,
    pub fault: Option<Error>,
    pub stopping: bool,
    /// Number of lanes that wait until earlier operations have released the memory of their batch.
    pub memory_awaited: usize,
    /// Number of running lane threads, which start with the first collective.
    pub running: usize,
    /// Orders all operations by the memory they use.
    order: Order,
    /// Number of operations issued so far, messages included.
    turns: u64,
    pub messages: Messages,
    pub talk: Talk,
    /// For each lane: the numbers of the operations on which it works; a number occurs once for each count in `active`.
    taken: [Vec<u64>; LANES],
}

impl State {
    pub fn new(limits: Limits, chain: u64, messages: Messages) -> State {
        State {
            planner: Planner::new(limits),
            entries: VecDeque::new(),
            base: 1,
            issued: 0,
            promised: 0,
            chain,
            last: Step::default(),
            before: Step::default(),
            fault: None,
            stopping: false,
            memory_awaited: 0,
            running: 0,
            order: Order::default(),
            turns: 0,
            messages,
            talk: Talk::default(),
            taken: Default::default(),
        }
    }

    /// Fails if operations may no longer start.
    pub fn accepts(&self) -> Result<()> {
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            None if self.stopping => Err(Error::aborted("sagellm: the group was destroyed")),
            None => Ok(()),
        }
    }

    /// Adds a collective, which the lanes run in `segments` parts.
    pub fn enter_collective(&mut self, op: Arc<Op>, segments: usize) {
        self.turns += 1;
        let predecessors = self.order.before(&op);
        self.order.add(&op);
        self.issued = op.number;
        self.entries.push_back(Entry { op, left: segments, active: 0, prepared: false, done: false, predecessors });
    }

    /// Adds a message. The message starts now or, if it must follow other operations, is held until these have ended.
    pub fn enter_message(&mut self, op: &Arc<Op>) {
        self.turns += 1;
        let mut predecessors = self.order.before(op);
        self.continue_from_copies(&mut predecessors);
        if self.order.hold(op, self.turns, predecessors) {
            return;
        }
        self.messages.issue(Arc::clone(op));
        if has_left_its_memory(op) {
            op.release();
        }
        if !op.is_released() {
            self.order.add(op);
        }
    }

    /// Removes the predecessors for which no operation needs to wait. A send that was not granted continues from a copy
    /// of its data, because its peer might not post the receive before the operation that waits here has run. A granted
    /// send ends without help, so it stays a predecessor.
    fn continue_from_copies(&mut self, predecessors: &mut Vec<Arc<Op>>) {
        predecessors.retain(|earlier| {
            if !earlier.is_released() && self.messages.may_copy(earlier) {
                copy_inputs(earlier);
                self.order.released(earlier);
            }
            !earlier.is_released()
        });
    }

    /// Releases the memory of an operation, so that operations that wait for this memory may start.
    pub fn retire(&mut self, op: &Op) {
        op.release();
        self.order.released(op);
    }

    /// Starts the held messages that no longer have to wait. Returns whether there was one.
    pub fn hand_over_held(&mut self) -> bool {
        let mut moved = false;
        while let Some(op) = self.order.next_ready() {
            self.messages.issue(Arc::clone(&op));
            if has_left_its_memory(&op) {
                op.release();
            } else if !op.is_released() && self.messages.may_copy(&op) && self.order.is_awaited(&op) {
                copy_inputs(&op);
            }
            if op.is_released() {
                self.order.released(&op);
            }
            moved = true;
        }
        moved
    }

    /// Returns the messages that have not ended, including held ones.
    pub fn pending_messages(&self) -> impl Iterator<Item = &Arc<Op>> {
        self.messages.pending().chain(self.order.held())
    }

    pub fn has_messages(&self) -> bool {
        self.messages.has_pending() || self.order.holds_some()
    }

    /// Returns the earlier operation of this rank for which `op` waits.
    pub fn predecessor_of(&self, op: &Op) -> Option<&Arc<Op>> {
        let entry = || self.entries.iter().find(|entry| std::ptr::eq(&*entry.op, op));
        let earlier = match self.order.find(op) {
            Some(held) => &held.predecessors,
            None => &entry()?.predecessors,
        };
        earlier.iter().find(|earlier| !earlier.is_released())
    }

    /// Records that a lane starts to work on an operation.
    pub fn acquire(&mut self, lane: usize, number: u64) -> Arc<Op> {
        let entry = self.entry(number);
        entry.active += 1;
        let op = Arc::clone(&entry.op);
        self.taken[lane].push(number);
        op
    }

    /// Records that a lane has finished its part of an operation.
    pub fn release(&mut self, lane: usize, number: u64) -> &mut Entry {
        self.taken[lane].retain(|taken| *taken != number);
        let entry = self.entry(number);
        entry.active -= 1;
        entry
    }

    /// Adds a batch, or one segment of a large operation, to the hash of all batches. Returns that hash, and the last
    /// operation before these.
    pub fn extend_chain(&mut self, ops: &[Arc<Op>], segment: usize) -> (u64, Step) {
        let mix = |chain: u64, value: u64| (chain ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        let signed = ops.iter().fold(self.chain, |chain, op| mix(mix(chain, op.signature), op.lists));
        self.chain = mix(signed, (ops.len() * 1_000_000 + segment) as u64);
        if let Some(last) = ops.last().map(|op| Step(op.signature, op.number)).filter(|last| *last != self.last) {
            self.before = std::mem::replace(&mut self.last, last);
        }
        (self.chain, self.before)
    }

    /// Records that a lane has run one segment of these operations. Returns the operations for which this was the last
    /// segment.
    pub fn finish_segment(&mut self, ops: &[Arc<Op>]) -> Vec<Arc<Op>> {
        let last = |op: &&Arc<Op>| {
            let entry = self.entry(op.number);
            entry.left -= 1;
            entry.left == 0
        };
        ops.iter().filter(last).cloned().collect()
    }

    /// Records that a lane no longer works on the operations of a finished batch. Returns the operations that this
    /// batch ended. A barrier ends here only if all earlier operations have ended; otherwise `take_barriers` returns it
    /// later.
    pub fn end_batch(&mut self, lane: usize, ops: &[Arc<Op>]) -> Ended {
        let fault = self.fault.clone();
        let mut ended = Vec::new();
        for op in ops {
            let first = op.number == self.base;
            let entry = self.release(lane, op.number);
            let outcome = match &fault {
                _ if entry.carried() && (first || op.request.kind != Kind::Barrier) => Ok(()),
                // No lane will run its other segments.
                Some(fault) if entry.active == 0 => Err(fault.clone()),
                _ => continue,
            };
            if !std::mem::replace(&mut entry.done, true) {
                self.retire(op);
                ended.push((Arc::clone(op), outcome));
            }
        }
        self.trim();
        ended
    }

    /// Called when a lane ends because of an error. Marks the lane's operations on which no other lane works as done,
    /// and returns these operations.
    pub fn release_all(&mut self, lane: usize) -> Vec<Arc<Op>> {
        let mut left = Vec::new();
        for number in std::mem::take(&mut self.taken[lane]) {
            let entry = self.entry(number);
            entry.active -= 1;
            if entry.active == 0 && !std::mem::replace(&mut entry.done, true) {
                let op = Arc::clone(&entry.op);
                self.retire(&op);
                left.push(op);
            }
        }
        left
    }

    pub fn entry(&mut self, number: u64) -> &mut Entry {
        let at = (number - self.base) as usize;
        &mut self.entries[at]
    }

    /// Raises `promised` as far as the use of memory allows.
    pub fn extend_promise(&mut self) {
        while self.promised < self.issued {
            let next = (self.promised + 1).max(self.base);
            if next > self.issued {
                self.promised = self.issued; // all of them have ended
                return;
            }
            if self.must_follow(next) {
                return;
            }
            self.promised = next;
        }
    }

    /// Whether operation `number` uses memory that an earlier operation still has to read or write.
    pub fn must_follow(&mut self, number: u64) -> bool {
        let mut predecessors = std::mem::take(&mut self.entry(number).predecessors);
        self.continue_from_copies(&mut predecessors);
        let waits = !predecessors.is_empty();
        self.entry(number).predecessors = predecessors;
        waits
    }

    /// Removes ended operations from the front of `entries`.
    pub fn trim(&mut self) {
        while self.entries.front().is_some_and(|entry| entry.done) {
            self.entries.pop_front();
            self.base += 1;
        }
    }

    /// Removes and returns the barriers that the lanes have run, if all operations before them have now ended. A
    /// barrier ends after every earlier operation of this rank, but the lanes end batches in any order.
    pub fn take_barriers(&mut self) -> Vec<Arc<Op>> {
        let mut ended = Vec::new();
        while let Some(entry) = self.entries.front_mut().filter(|entry| entry.carried()) {
            entry.done = true;
            let op = Arc::clone(&entry.op);
            self.retire(&op);
            ended.push(op);
            self.trim();
        }
        ended
    }

    /// Called when the group ends. Marks as done the collectives on which no lane works. Returns these collectives, the
    /// held messages, and the messages whose memory the link does not use.
    pub fn take_idle(&mut self) -> Vec<Arc<Op>> {
        let mut free = self.order.take();
        free.extend(self.messages.take_idle());
        for entry in self.entries.iter_mut().filter(|entry| entry.active == 0 && !entry.done) {
            entry.done = true;
            free.push(Arc::clone(&entry.op));
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::types::Request;

    /// Makes a state with operations 1 to `count`, of two segments each.
    fn issued(count: u64) -> State {
        let messages = Messages::new(2, Arc::default(), usize::MAX);
        let mut state = State::new(Limits { bytes: 1 << 20, operations: 8 }, 0, messages);
        for number in 1..=count {
            let request = Request::without_memory(Kind::Barrier);
            let op = Arc::new(Op::new(request, number, 0, Duration::from_secs(1), None));
            state.enter_collective(op, 2);
        }
        state
    }

    fn numbers(ops: &[Arc<Op>]) -> Vec<u64> {
        ops.iter().map(|op| op.number).collect()
    }

    #[test]
    fn each_operation_of_a_lane_that_ends_midway_is_given_back_by_somebody() {
        let mut state = issued(5);
        for number in 1..=3 {
            state.acquire(0, number);
        }
        state.acquire(1, 3);
        state.release(0, 1);
        // Lane 0 panics. Only lane 0 worked on operation 2, both lanes worked on 3, and lane 0 had finished 1.
        assert_eq!(numbers(&state.release_all(0)), [2]);
        assert_eq!(numbers(&state.take_idle()), [1, 4, 5], "what no lane has is the group's to end");
        assert_eq!(numbers(&state.release_all(1)), [3]);
        assert!(state.entries.iter().all(|entry| entry.done && entry.active == 0));
        assert!(state.release_all(0).is_empty() && state.take_idle().is_empty(), "nothing is given back twice");
    }
}
