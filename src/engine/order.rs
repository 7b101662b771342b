//! The order of a rank's messages among its other operations (rule 4): which ones a message must wait for, and when it may
//! go.
//!
//! A message that must wait is *held*. It counts what it waits for: earlier operations on its memory, until the engine no
//! longer uses that, and earlier held messages that it may not overtake, until these go. Each of those lists its
//! followers, so that posting a message and letting it go take about as long however many others wait.

#![allow(unsafe_code)] // copies the memory of a send

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::pieces::Pieces;
use crate::op::Op;
use crate::op::pending::{PendingOps, key};
use crate::types::{ANY_RANK, Kind};

pub struct Held {
    pub op: Arc<Op>,
    /// Its position among all operations of this rank.
    turn: u64,
    /// Earlier operations on its memory.
    pub predecessors: Vec<Arc<Op>>,
    /// Number of predecessors whose memory is in use, plus that of earlier held messages that it may not overtake.
    waits_for: usize,
    /// Later messages that may not overtake it.
    followers: Vec<usize>,
}

/// The last held messages of one direction and tag.
#[derive(Default)]
struct Line {
    /// To or from each rank, since the last receive from anyone.
    with: HashMap<u32, usize>,
    from_anyone: Option<usize>,
}

/// Operations are named by `pending::key`.
#[derive(Default)]
pub struct Order {
    /// Operations whose memory is in use: messages, and collectives that were issued before one of them.
    in_use: PendingOps,
    held: HashMap<usize, Held>,
    /// Held messages that wait for the memory of an operation.
    followers: HashMap<usize, Vec<usize>>,
    lines: HashMap<(Kind, u32), Line>,
    /// Held messages that wait for nothing any more, by turn.
    ready: BTreeSet<(u64, usize)>,
}

impl Order {
    /// True if this holds no operations: a new operation then has none to follow.
    pub fn is_empty(&self) -> bool {
        self.in_use.is_empty() && self.held.is_empty()
    }

    /// Earlier operations whose memory `op` must wait for: all that were added and not released.
    pub fn before(&self, op: &Op) -> Vec<Arc<Op>> {
        self.in_use.before(op)
    }

    /// From now on later operations follow this one, until it is released.
    pub fn add(&mut self, op: &Arc<Op>) {
        self.in_use.add(Arc::clone(op));
    }

    /// The engine no longer uses its memory.
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

    /// Holds a message if it has predecessors or may not overtake a held message. True if it is held.
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
            // Whatever may not overtake those before it may not overtake this one.
            *line = Line { with: HashMap::new(), from_anyone: Some(name) };
        } else {
            line.with.insert(op.request.root, name);
        }
        let waits_for = predecessors.len() + ahead.len();
        self.held.insert(name, Held { op: Arc::clone(op), turn, predecessors, waits_for, followers: Vec::new() });
        self.in_use.add(Arc::clone(op));
        true
    }

    /// The held messages that `op` may not overtake; those that follow one of these are left out. Sends to one rank, and
    /// receives that may match the same message, keep their order within one tag. Other messages go ahead: the peer may
    /// need them before it does what the earlier one waits for.
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

    /// The first held message that waits for nothing any more; the caller hands it over.
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

    /// Removes one of the things that a held message waits for; the message is ready if that was the last.
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

    /// Forgets everything; the held messages, in the order of their issue.
    pub fn take(&mut self) -> Vec<Arc<Op>> {
        let mut held: Vec<_> = std::mem::take(self).held.into_iter().collect();
        held.sort_unstable_by_key(|(_, held)| held.turn);
        held.into_iter().map(|(_, held)| held.op).collect()
    }
}

/// Whether a message's memory is a copy anyway: of a strided tensor.
pub fn has_left_its_memory(op: &Op) -> bool {
    op.request.kind == Kind::Send && !op.request.also_touched.is_empty()
}

/// Copies the inputs of a send, so that it continues from the copy.
pub fn copy_inputs(send: &Op) {
    let inputs = Pieces(send.request.inputs());
    let mut copy = vec![0u8; inputs.bytes()];
    // SAFETY: the inputs are the caller's, alive until the send ends; the copy has as many bytes.
    unsafe { inputs.read(0, copy.as_mut_ptr(), copy.len()) };
    send.send_copy(copy);
}
