//! External operations, which no engine runs: a delegate's operations, operations on devices, and operations that the shim
//! composes from several. The group counts them and knows which are pending, so that `hang` can say what a slow one waits for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use once_cell::sync::OnceCell;

use super::extensions::Owner;
use super::{Group, Inner};
use crate::error::Error;
use crate::os::{clock, watch};
use crate::progress::domain::LongWait;
use crate::select::Choice;
use crate::stats::history::{Record, State};
use crate::types::{CallNote, Kind};

/// What runs an external operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    Delegate,
    /// The shim composes it from several operations.
    Composed,
    /// The library of a device's vendor (`devices`).
    Device,
}

/// A pending operation of a delegate or on a device.
#[derive(Clone, Debug)]
pub(super) struct Outside {
    /// Its record's id.
    pub id: u64,
    pub kind: Kind,
    pub number: u64,
    /// The root, or the peer of a message.
    pub root: u32,
    pub tag: u32,
    pub bytes: u64,
    pub site: u32,
    pub on_device: bool,
    /// When its timeout began, on `clock::stamp`: at its issue. A delegate's message has `None` until a thread waits for it.
    pub begun: Option<u64>,
    /// Zero means none.
    pub timeout: Duration,
}

impl Outside {
    /// Without a record: for texts about an operation that has ended meanwhile.
    pub const NO_RECORD: u64 = u64::MAX;

    fn deadline(&self) -> u64 {
        let timeout = if self.timeout.is_zero() { u64::MAX } else { self.timeout.as_nanos() as u64 };
        self.begun.unwrap_or(u64::MAX).saturating_add(timeout)
    }
}

/// The pending external operations of a group, in the order of their issue. Used under the group's lock.
#[derive(Default)]
pub(super) struct Outsiders {
    pending: VecDeque<Outside>,
}

impl Outsiders {
    pub fn get(&self, id: u64) -> Option<&Outside> {
        self.pending.iter().find(|outside| outside.id == id)
    }

    fn remove(&mut self, id: u64) -> Option<Outside> {
        // Operations end roughly in the order of their issue, so few are looked at and few are moved.
        let at = self.pending.iter().position(|outside| outside.id == id)?;
        self.pending.remove(at)
    }

    /// The operation with the earliest deadline.
    pub fn most_urgent(&self) -> Option<&Outside> {
        self.pending.iter().filter(|outside| outside.begun.is_some()).min_by_key(|outside| outside.deadline())
    }

    /// The operation on a device with this number, or the message with this peer.
    pub fn on_device(&self, number: u64, peer: Option<u32>) -> Option<&Outside> {
        let is_meant = |outside: &&Outside| {
            outside.on_device
                && match peer {
                    Some(peer) => outside.kind.is_p2p() && outside.root == peer,
                    None => !outside.kind.is_p2p() && outside.number == number,
                }
        };
        self.pending.iter().find(is_meant)
    }
}

/// An external operation, until it ends. If it is dropped before that, it counts as failed.
pub struct ExternalOp {
    group: Arc<Group>,
    record: Record,
    carrier: Carrier,
    /// Whether it took the number of its record from the group.
    numbered: bool,
    /// Set under the group's lock by the thread that ends it; its results are under that lock, or in `failure`. Read
    /// without the lock as a hint (relaxed).
    ended: AtomicBool,
    /// The error to report, if the group knows more than the carrier.
    failure: OnceCell<Error>,
}

impl ExternalOp {
    /// Marks it as ended; a second call does nothing. `timed` is false if only its issue was seen.
    pub fn end(&self, well: bool, timed: bool) {
        if !self.ended.load(Ordering::Relaxed) {
            self.end_with(well, timed, |_, _| None);
        }
    }

    /// Marks it as failed, with the carrier's error text. If the group knows what it waited for, returns the error to report
    /// instead, which is the same in every call.
    pub fn fail(&self, words: &str) -> Option<Error> {
        self.end_with(false, true, |inner, outside| self.group.failure_outside(inner, outside, words));
        self.failure.get().cloned()
    }

    /// The carrier refused the call and sent nothing: it leaves no trace, like a call that the core refuses. If another thread
    /// has issued an operation meanwhile, with the next number, the number stays used.
    pub fn refused(&self) {
        if self.group.not_forked().is_err() {
            return;
        }
        let mut inner = self.group.lock();
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        let Record { id, kind, root, number, .. } = self.record;
        inner.outside.remove(id);
        inner.watched_outside.forget_outside(id);
        inner.stats.take_back(id);
        if let Some(counter) = inner.counter(kind, root).filter(|counter| self.numbered && **counter == number) {
            *counter -= 1;
        }
    }

    fn end_with(&self, well: bool, timed: bool, failure: impl FnOnce(&Inner, &Outside) -> Option<Error>) {
        // In a forked child the lock may be held for ever by a thread of the parent.
        if self.group.not_forked().is_err() {
            return;
        }
        let mut inner = self.group.lock();
        // Under the lock, so that a second thread finds the failure.
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        if !well && self.carrier == Carrier::Delegate {
            self.group.delegate_failed.store(true, Ordering::Relaxed);
        }
        let state = if well { State::Done } else { State::Failed };
        let record = Record { state, timed, ended: clock::stamp(), ..self.record };
        inner.stats.external_ended(record);
        let outside = inner.outside.remove(record.id);
        if let Some(error) = outside.and_then(|outside| failure(&inner, &outside)) {
            let _ = self.failure.set(error);
        }
    }

    /// A thread of the program begins (`more`) or stops waiting for it.
    pub fn awaited(&self, more: bool) {
        if self.group.not_forked().is_err() || more && self.ended.load(Ordering::Relaxed) {
            return;
        }
        let id = self.record.id;
        let group = Arc::as_ptr(&self.group).cast::<()>() as usize;
        let wait = LongWait { thread: watch::this_thread(), group, outside: Some(id) };
        self.group.domain.count_long_wait(wait, more);
        if self.record.kind.is_p2p() {
            let begun = more.then(clock::stamp);
            let mut inner = self.group.lock();
            if let Some(outside) = inner.outside.pending.iter_mut().find(|outside| outside.id == id) {
                outside.begun = begun;
            }
        }
    }
}

impl Drop for ExternalOp {
    fn drop(&mut self) {
        self.end(false, false);
    }
}

impl Group {
    /// Records an operation that `carrier` runs. `root` is that of a request, `bytes` are those read and written; without a
    /// `timeout` the group's is used.
    pub fn external_op(
        &self,
        kind: Kind,
        carrier: Carrier,
        (root, tag): (u32, u32),
        (read, written): (u64, u64),
        note: CallNote,
        timeout: Option<Duration>,
    ) -> ExternalOp {
        let mut timeout = timeout.unwrap_or_else(|| Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed)));
        let mut inner = self.lock();
        // A delegate applies its own timeouts.
        let extends = carrier == Carrier::Device && self.extends.load(Ordering::Relaxed);
        if extends {
            timeout = self.extended(&mut inner, timeout);
        }
        let numbered = carrier == Carrier::Delegate && (kind.is_p2p() || inner.engine.delegate_reason().is_some());
        let number = match carrier {
            Carrier::Composed => inner.number + 1, // its first operation is issued next and takes this number
            Carrier::Device => self.device_number.load(Ordering::Relaxed), // taken before
            Carrier::Delegate if numbered => inner.number_for(kind, root),
            Carrier::Delegate => inner.number, // our engine's numbers have no gaps
        };
        let choice = match carrier {
            Carrier::Delegate => Choice::DELEGATE,
            Carrier::Composed => Choice::COMPOSED,
            Carrier::Device => Choice::DEVICE,
        };
        let choice = choice.code();
        let mut record = Record { read, written, ..Record::external_op(kind, choice, number, (root, tag), note) };
        record.id = inner.stats.external_issued(record);
        if carrier != Carrier::Composed {
            let on_device = carrier == Carrier::Device;
            let waits_later = kind.is_p2p() && !on_device;
            let begun = (!waits_later).then_some(record.issued);
            let (id, bytes, site) = (record.id, record.bytes(), note.site);
            let outside = Outside { id, kind, number, root, tag, bytes, site, on_device, begun, timeout };
            inner.outside.pending.push_back(outside);
            if extends {
                inner.own_extension(Owner::Outside(id));
            }
        }
        let group = self.this.upgrade().expect("a group that is used is alive");
        let (ended, failure) = (AtomicBool::new(false), OnceCell::new());
        ExternalOp { group, record, carrier, numbered, ended, failure }
    }
}
