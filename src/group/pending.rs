//! A pending operation, whether the engine runs it or not, as the hang diagnosis asks about it.

use std::sync::Arc;
use std::time::Duration;

use super::account::Account;
use super::outside::Outside;
use crate::engine::LastCall;
use crate::op;
use crate::op::Op;
use crate::os::clock;
use crate::types::Kind;

/// A pending operation, of the engine or of another carrier.
#[derive(Clone)]
pub(super) enum Pending {
    Own(Arc<Op>),
    Outside(Outside),
}

impl Pending {
    pub fn kind(&self) -> Kind {
        match self {
            Pending::Own(op) => op.request.kind,
            Pending::Outside(outside) => outside.kind,
        }
    }

    /// The root, or the peer of a message.
    pub fn root(&self) -> u32 {
        match self {
            Pending::Own(op) => op.request.root,
            Pending::Outside(outside) => outside.root,
        }
    }

    pub fn site(&self) -> u32 {
        match self {
            Pending::Own(op) => op.request.note.site,
            Pending::Outside(outside) => outside.site,
        }
    }

    /// Zero: none.
    pub fn timeout(&self) -> Duration {
        match self {
            Pending::Own(op) => op.timeout,
            Pending::Outside(outside) => outside.timeout,
        }
    }

    /// For how long its timeout has run, in nanoseconds.
    pub fn age(&self, now: u64) -> u64 {
        match self {
            Pending::Own(op) => now.saturating_sub(op.deadline.saturating_sub(nanoseconds(op.timeout))),
            Pending::Outside(outside) => clock::stamp().saturating_sub(outside.begun.unwrap_or(u64::MAX)),
        }
    }

    /// The operation as its rank called it, and its number.
    pub fn what(&self) -> String {
        match self {
            Pending::Own(op) => op.what(),
            Pending::Outside(Outside { kind, number, root, tag, bytes, on_device, .. }) => {
                let text = op::words::in_words(*kind, *root, *tag, || match *kind {
                    Kind::Barrier => format!("{kind} number {number}"),
                    _ => format!("{kind}({bytes} bytes) number {number}"),
                });
                if *on_device { format!("{text} on a device") } else { text }
            }
        }
    }

    pub fn on_device(&self) -> bool {
        matches!(self, Pending::Outside(outside) if outside.on_device)
    }

    /// The last collective, in the same sequence of numbers, that a rank reported.
    pub fn last_of(&self, account: &Account) -> Option<LastCall> {
        let number = self.count_of((account.issued, account.launched));
        let text = if self.on_device() { &account.launched_last } else { &account.last };
        // The rank's history may no longer hold it.
        let forgotten = || (number > 0).then(|| format!("number {number}"));
        text.clone().or_else(forgotten).map(|text| LastCall { number, text })
    }

    /// Its number among the collectives.
    pub fn number(&self) -> u64 {
        match self {
            Pending::Own(op) => op.number,
            Pending::Outside(outside) => outside.number,
        }
    }

    /// How many collectives a rank has issued of the sequence that this one belongs to: of `issued`, or of those `launched`
    /// on devices.
    pub fn count_of(&self, (issued, launched): (u64, u64)) -> u64 {
        if self.on_device() { launched } else { issued }
    }

    /// Whether a rank that has issued so many has made the same call; for a collective.
    pub fn is_entered_by(&self, counts: (u64, u64)) -> bool {
        self.count_of(counts) >= self.number()
    }

    /// When ranks are first asked: at the soft limit, but early enough for the deadline.
    pub fn patience(&self, soft: Duration) -> u64 {
        let half = if self.timeout().is_zero() { Duration::MAX } else { self.timeout() / 2 };
        nanoseconds(if soft.is_zero() { half } else { soft.min(half) })
    }
}

pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
