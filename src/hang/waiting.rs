//! A pending operation as plain facts, whether an engine runs it or not: what the diagnosis knows of one.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::status::Status;
use crate::engine::LastCall;
use crate::op::Op;
use crate::types::{ANY_RANK, Kind};

/// Which operation it is.
#[derive(Clone, Debug)]
pub enum Which {
    /// One of the group's engine. Weak: nothing here keeps an operation alive, and no other takes its address meanwhile.
    Engine(Weak<Op>),
    /// One that no engine runs: the id of its record, which another one may have later, and the time of its issue.
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
    /// The root, or the peer of a message.
    pub root: u32,
    /// Its number among the collectives, or the messages of its ordered pair.
    pub number: u64,
    /// The operation as its rank called it, and its number.
    pub what: String,
    /// `CallNote::site`.
    pub site: u32,
    /// Zero: none.
    pub timeout: Duration,
    /// For how long the timeout had run when this was taken, in nanoseconds.
    pub age: u64,
    pub on_device: bool,
}

impl Waiting {
    /// An operation of an engine at the time `now`, on `clock::now`.
    pub fn of(op: &Arc<Op>, now: u64) -> Waiting {
        Waiting {
            which: Which::Engine(Arc::downgrade(op)),
            kind: op.request.kind,
            root: op.request.root,
            number: op.number,
            what: op.what(),
            site: op.request.note.site,
            timeout: op.timeout,
            age: age(op, now),
            on_device: false,
        }
    }

    /// The ranks of `ranks` that a message of rank `me` may come from or go to; none for a collective.
    pub fn peers(&self, ranks: usize, me: usize) -> impl Iterator<Item = usize> + use<> {
        let (is_message, root) = (self.kind.is_p2p(), self.root);
        let others = (0..ranks).filter(move |rank| *rank != me);
        others.filter(move |rank| is_message && (root == ANY_RANK || *rank == root as usize))
    }

    /// The last collective, in the same sequence of numbers, that a rank has reported.
    pub fn last_of(&self, status: &Status) -> Option<LastCall> {
        let number = self.count_of((status.issued, status.launched));
        let text = if self.on_device { &status.launched_last } else { &status.last };
        // The rank's history may no longer hold it.
        let forgotten = || (number > 0).then(|| format!("number {number}"));
        text.clone().or_else(forgotten).map(|text| LastCall { number, text })
    }

    /// How many collectives a rank has issued of the sequence that this one belongs to: of `issued`, or of those `launched`
    /// on devices.
    pub fn count_of(&self, (issued, launched): (u64, u64)) -> u64 {
        if self.on_device { launched } else { issued }
    }

    /// Whether a rank that has issued so many has made the same call; for a collective.
    pub fn is_entered_by(&self, counts: (u64, u64)) -> bool {
        self.count_of(counts) >= self.number
    }
}

/// For how long the timeout of an operation has run, in nanoseconds.
pub fn age(op: &Op, now: u64) -> u64 {
    now.saturating_sub(op.deadline.saturating_sub(nanoseconds(op.timeout)))
}

/// When ranks are first asked about an operation with this timeout: at the soft limit, but early enough for the deadline.
pub fn first_question(timeout: Duration, soft: Duration) -> u64 {
    let half = if timeout.is_zero() { Duration::MAX } else { timeout / 2 };
    nanoseconds(if soft.is_zero() { half } else { soft.min(half) })
}

pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
