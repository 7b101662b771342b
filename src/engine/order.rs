//! Orders a rank's messages among its other operations (rule 4): decides for which operations a message must wait, and
//! when it may start.
//!
//! A message that must wait is *held*. It waits for each earlier operation on its memory until the engine no longer
//! uses that operation's memory. It also waits for each earlier held message that it must not overtake, until that
//! message starts. Each held message has a count of the operations for which it waits, and each of these has a list of
//! its followers. So the time to post or start a message does not depend on how many messages wait.

#![allow(unsafe_code)] // copies the memory of a send

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::pieces::Pieces;
use crate::op::Op;
use crate::op::pending::{PendingOps, key};
use crate::types::{ANY_RANK, Kind};

pub struct Held {
    pub op: Arc<Op>,
    /// Position of `op` in this rank's order of issue.
    turn: u64,
    /// Earlier operations whose memory overlaps the memory of `op`.
    pub predecessors: Vec<Arc<Op>>,
    /// Number of predecessors whose memory the engine still uses, plus the number of earlier held messages that have
    /// not started and must not be overtaken by `op`.
    waits_for: usize,
    /// Later held messages that must not overtake this one.
    followers: Vec<usize>,
}

/// The last held messages in one direction (send or receive) with one tag.
#[derive(Default)]
struct Line {
    /// For each peer: key of the last held message with that peer. Only messages issued after `from_anyone` are listed.
    with: HashMap<u32, usize>,
    from_anyone: Option<usize>,
}

/// Operations are identified by `pending::key`.
#[derive(Default)]
pub struct Order {
    /// Operations whose memory the engine uses or will use: all messages, and the collectives that the engine has added
    /// (`add`).
    in_use: PendingOps,
    held: HashMap<usize, Held>,
    /// For each operation: the held messages that wait for its memory.
    followers: HashMap<usize, Vec<usize>>,
    lines: HashMap<(Kind, u32), Line>,
    /// Held messages that no longer wait for anything, by turn.
    ready: BTreeSet<(u64, usize)>,
}

impl Order {
    /// Whether no operation is recorded. If so, a new operation has nothing to follow.
    pub fn is_empty(&self) -> bool {
        self.in_use.is_empty() && self.held.is_empty()
    }

    /// Returns the operations that were added, are not released yet, and use memory of `op`.
    pub fn before(&self, op: &Op) -> Vec<Arc<Op>> {
        self.in_use.before(op)
    }

    /// Makes later operations on the same memory follow this one, until it is released.
    pub fn add(&mut self, op: &Arc<Op>) {
        self.in_use.add(Arc::clone(op));
    }

    /// Called when the engine no longer uses the memory of `op`.
    pub fn released(&mut self, op: &Op) {
        if self.is_empty() {
            return;
        }
        self.in_use.remove(op);
        for follower in self.followers.remove(&key(op)).unwrap_or_default() {
            self.let_on(follower);
        }
    }

    /// Whether a held message waits for the memory of this operation.
    pub fn is_awaited(&self, op: &Op) -> bool {
        self.followers.contains_key(&key(op))
    }

    /// Holds a message if it has predecessors or must not overtake a held message. Returns whether it is held.
    pub fn hold(&mut self, op: &Arc<Op>, turn: u64, predecessors: Vec<Arc<Op>>) -> bool {
        let ahead = self.ahead_of(op);
        if predecessors.is_empty() && ahead.is_empty() {
            return false;
        }
        let name = key(op);
        for earlier in &predecessors {
            self.followers.entry(key(earlier)).or_default().push(name);
        }
        for earlier in &ahead {
            self.held.get_mut(earlier).expect("it is held").followers.push(name);
        }
        let line = self.lines.entry((op.request.kind, op.request.tag)).or_default();
        if op.request.root == ANY_RANK {
            // A receive from `ANY_RANK` follows all earlier messages of its line, so later messages only need to follow
            // this receive.
            *line = Line { with: HashMap::new(), from_anyone: Some(name) };
        } else {
            line.with.insert(op.request.root, name);
        }
        let waits_for = predecessors.len() + ahead.len();
        self.held.insert(name, Held { op: Arc::clone(op), turn, predecessors, waits_for, followers: Vec::new() });
        self.in_use.add(Arc::clone(op));
        true
    }

    /// Returns the held messages that `op` must not overtake. A message is left out if another message in the result
    /// already follows it. Within one tag, sends to the same rank keep their order, and so do receives that may match
    /// the same message. Any other message may overtake an earlier one, because the peer may need the later message
    /// before it completes the operation for which the earlier message waits.
    fn ahead_of(&self, op: &Op) -> Vec<usize> {
        if self.lines.is_empty() {
            return Vec::new();
        }
        let Some(line) = self.lines.get(&(op.request.kind, op.request.tag)) else { return Vec::new() };
        if op.request.root == ANY_RANK {
            return line.with.values().copied().chain(line.from_anyone).collect();
        }
        line.with.get(&op.request.root).copied().into_iter().chain(line.from_anyone).collect()
    }

    /// Removes and returns the first held message that no longer waits. The caller starts it.
    pub fn next_ready(&mut self) -> Option<Arc<Op>> {
        let (_, name) = self.ready.pop_first()?;
        let held = self.held.remove(&name).expect("it is held");
        let (root, line) = (held.op.request.root, (held.op.request.kind, held.op.request.tag));
        if let Some(last) = self.lines.get_mut(&line) {
            if last.with.get(&root) == Some(&name) {
                last.with.remove(&root);
            }
            last.from_anyone = last.from_anyone.filter(|last| *last != name);
            if last.with.is_empty() && last.from_anyone.is_none() {
                self.lines.remove(&line);
            }
        }
        held.followers.into_iter().for_each(|follower| self.let_on(follower));
        Some(held.op)
    }

    /// Records that one operation for which this held message waited has been released or started. After the last one
    /// the message is ready.
    fn let_on(&mut self, name: usize) {
        let Some(held) = self.held.get_mut(&name) else { return };
        held.waits_for -= 1;
        if held.waits_for == 0 {
            self.ready.insert((held.turn, name));
        }
    }

    pub fn find(&self, op: &Op) -> Option<&Held> {
        self.held.get(&key(op))
    }

    pub fn held(&self) -> impl Iterator<Item = &Arc<Op>> {
        self.held.values().map(|held| &held.op)
    }

    pub fn holds_some(&self) -> bool {
        !self.held.is_empty()
    }

    /// Removes everything. Returns the held messages in order of issue.
    pub fn take(&mut self) -> Vec<Arc<Op>> {
        let mut held: Vec<_> = std::mem::take(self).held.into_iter().collect();
        held.sort_unstable_by_key(|(_, held)| held.turn);
        held.into_iter().map(|(_, held)| held.op).collect()
    }
}

/// Whether a send already reads from a copy, because its tensor is strided.
pub fn has_left_its_memory(op: &Op) -> bool {
    op.request.kind == Kind::Send && !op.request.also_touched.is_empty()
}

/// Copies the inputs of a send, which then continues from the copy.
pub fn copy_inputs(send: &Op) {
    let inputs = Pieces(send.request.inputs());
    let mut copy = vec![0u8; inputs.bytes()];
    // SAFETY: the inputs belong to the caller and live until the send ends. The copy has the size of the inputs.
    unsafe { inputs.read(0, copy.as_mut_ptr(), copy.len()) };
    send.send_copy(copy);
}
