//! A pending operation as plain data, in the form that the diagnosis uses, whether or not an engine runs it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::status::Status;
use crate::engine::LastCall;
use crate::op::Op;
use crate::types::{ANY_RANK, Kind};

/// Identifies an operation.
#[derive(Clone, Debug)]
pub enum Which {
    /// An operation of the group's engine. A weak reference does not keep the operation alive, but keeps its address
    /// from being reused.
    Engine(Weak<Op>),
    /// An operation that no engine runs: the id of its record, which may be reused later, and the time of its issue.
    External { id: u64, issued: u64 },
}

impl PartialEq for Which {
    fn eq(&self, other: &Which) -> bool {
        match (self, other) {
            (Which::Engine(one), Which::Engine(other)) => Weak::ptr_eq(one, other),
            (Which::External { id, issued }, Which::External { id: other, issued: at }) => (id, issued) == (other, at),
            _ => false,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Waiting {
    pub which: Which,
    pub kind: Kind,
    /// Rank of the root, or the peer of a message.
    pub root: u32,
    /// Sequence number among the collectives, or among the messages of its ordered pair of ranks.
    pub number: u64,
    /// The signature by which an engine compares the operation between ranks. None if no engine runs it.
    pub signature: Option<u64>,
    /// The operation as called on this rank, and its number, as text.
    pub what: String,
    /// See `CallNote::site`.
    pub site: u32,
    /// Zero: no timeout.
    pub timeout: Duration,
    /// How long the timeout had been running when this was created, in nanoseconds.
    pub age: u64,
    pub on_device: bool,
}

impl Waiting {
    /// An operation of an engine, at time `now` of `clock::now`.
    pub fn of(op: &Arc<Op>, now: u64) -> Waiting {
        Waiting {
            which: Which::Engine(Arc::downgrade(op)),
            kind: op.request.kind,
            root: op.request.root,
            number: op.number,
            signature: Some(op.signature),
            what: op.what(),
            site: op.request.note.site,
            timeout: op.timeout,
            age: age(op, now),
            on_device: false,
        }
    }

    /// The ranks below `ranks` that may be the other end of a message which rank `me` sends or receives. None for a
    /// collective.
    pub fn peers(&self, ranks: usize, me: usize) -> impl Iterator<Item = usize> + use<> {
        let (is_message, root) = (self.kind.is_p2p(), self.root);
        let others = (0..ranks).filter(move |rank| *rank != me);
        others.filter(move |rank| is_message && (root == ANY_RANK || *rank == root as usize))
    }

    /// The last collective that a rank has reported, in the same sequence of numbers as this operation.
    pub fn last_of(&self, status: &Status) -> Option<LastCall> {
        let number = self.count_of((status.issued, status.launched));
        let text = if self.on_device { &status.launched_last } else { &status.last };
        // The rank's history may no longer contain that collective.
        let forgotten = || (number > 0).then(|| format!("number {number}"));
        text.clone().or_else(forgotten).map(|text| LastCall { number, text })
    }

    /// How many collectives a rank has issued in the sequence of this operation: `issued` for the CPU, `launched` for
    /// devices.
    pub fn count_of(&self, (issued, launched): (u64, u64)) -> u64 {
        if self.on_device { launched } else { issued }
    }

    /// Whether a rank with these counts has also made this call; only for collectives.
    pub fn is_entered_by(&self, counts: (u64, u64)) -> bool {
        self.count_of(counts) >= self.number
    }
}

/// How long the timeout of an operation has been running, in nanoseconds.
pub fn age(op: &Op, now: u64) -> u64 {
    now.saturating_sub(op.deadline.saturating_sub(nanoseconds(op.timeout)))
}

/// The age of an operation, in nanoseconds, at which ranks are first asked about it: the soft limit, but at most half
/// the timeout.
pub fn first_question(timeout: Duration, soft: Duration) -> u64 {
    let half = if timeout.is_zero() { Duration::MAX } else { timeout / 2 };
    nanoseconds(if soft.is_zero() { half } else { soft.min(half) })
}

pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
