//! External operations, which no engine runs: a delegate's operations, operations on devices, and operations that the shim
//! composes from several. The group counts them and knows which are pending, so that its watch can say what a slow one waits for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use once_cell::sync::OnceCell;

use super::Group;
use super::extensions::Owner;
use crate::error::Error;
use crate::hang::Subject;
use crate::hang::waiting::{Waiting, Which};
use crate::op;
use crate::os::{clock, watch};
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
pub(super) struct External {
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
    /// On `clock::stamp`.
    pub issued: u64,
    /// When its timeout began, on `clock::stamp`: at its issue. A delegate's message has `None` until a thread waits for it.
    pub begun: Option<u64>,
    /// Zero means none.
    pub timeout: Duration,
}

impl External {
    /// Without a record: for texts about an operation that has ended meanwhile.
    pub const NO_RECORD: u64 = u64::MAX;

    /// The operation as its rank called it, and its number.
    fn what(&self) -> String {
        let External { kind, number, root, tag, bytes, on_device, .. } = self;
        let text = op::words::in_words(*kind, *root, *tag, || match *kind {
            Kind::Barrier => format!("{kind} number {number}"),
            _ => format!("{kind}({bytes} bytes) number {number}"),
        });
        if *on_device { format!("{text} on a device") } else { text }
    }

    /// As the diagnosis of a hang knows it.
    pub fn waiting(&self) -> Waiting {
        let External { id, kind, number, root, site, on_device, issued, begun, timeout, .. } = *self;
        let which = Which::External { id, issued };
        let age = clock::stamp().saturating_sub(begun.unwrap_or(u64::MAX));
        Waiting { which, kind, root, number, what: self.what(), site, timeout, age, on_device }
    }

    fn deadline(&self) -> u64 {
        let timeout = if self.timeout.is_zero() { u64::MAX } else { self.timeout.as_nanos() as u64 };
        self.begun.unwrap_or(u64::MAX).saturating_add(timeout)
    }
}

/// The pending external operations of a group, in the order of their issue. Used under the group's lock.
#[derive(Default)]
pub(super) struct Externals {
    pending: VecDeque<External>,
}

impl Externals {
    pub fn get(&self, id: u64) -> Option<&External> {
        self.pending.iter().find(|external| external.id == id)
    }

    fn remove(&mut self, id: u64) -> Option<External> {
        // Operations end roughly in the order of their issue, so few are looked at and few are moved.
        let at = self.pending.iter().position(|external| external.id == id)?;
        self.pending.remove(at)
    }

    /// The operation with the earliest deadline.
    pub fn next_deadline(&self) -> Option<&External> {
        self.pending.iter().filter(|external| external.begun.is_some()).min_by_key(|external| external.deadline())
    }

    /// The operation on a device with this number, or the message with this peer.
    pub fn on_device(&self, number: u64, peer: Option<u32>) -> Option<&External> {
        let is_meant = |external: &&External| {
            external.on_device
                && match peer {
                    Some(peer) => external.kind.is_p2p() && external.root == peer,
                    None => !external.kind.is_p2p() && external.number == number,
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
    /// The error to report, if the group knows more than the carrier. Made by the first thread that learns of the failure; others
    /// wait for it.
    failure: OnceCell<Option<Error>>,
}

impl ExternalOp {
    /// Marks it as ended; a second call does nothing. `timed` is false if only its issue was seen.
    pub fn end(&self, well: bool, timed: bool) {
        if !self.ended.load(Ordering::Relaxed) {
            self.end_with(well, timed);
        }
    }

    /// Marks it as failed, with the carrier's error text. If the group knows what it waited for, returns the error to report
    /// instead, which is the same in every call.
    pub fn fail(&self, words: &str) -> Option<Error> {
        // In a forked child the lock may be held for ever by a thread of the parent.
        if self.group.not_forked().is_err() {
            return None;
        }
        let failure = self.failure.get_or_init(|| self.group.failed_external(&self.record, words));
        self.end_with(false, true);
        failure.clone()
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
        inner.external.remove(id);
        inner.stats.take_back(id);
        if self.numbered {
            inner.counters.take_back(kind, root, number);
        }
    }

    fn end_with(&self, well: bool, timed: bool) {
        if self.group.not_forked().is_err() {
            return;
        }
        let mut inner = self.group.lock();
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        if !well && self.carrier == Carrier::Delegate {
            self.group.faults.set_delegate_failed();
        }
        let state = if well { State::Done } else { State::Failed };
        let record = Record { state, timed, ended: clock::stamp(), ..self.record };
        inner.stats.external_ended(record);
        inner.external.remove(record.id);
    }

    /// A thread of the program begins (`more`) or stops waiting for it.
    pub fn awaited(&self, more: bool) {
        if self.group.not_forked().is_err() || more && self.ended.load(Ordering::Relaxed) {
            return;
        }
        let id = self.record.id;
        self.group.watch.count_long_wait(watch::this_thread(), Some(id), more);
        if self.record.kind.is_p2p() {
            let begun = more.then(clock::stamp);
            let mut inner = self.group.lock();
            if let Some(external) = inner.external.pending.iter_mut().find(|external| external.id == id) {
                external.begun = begun;
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
    /// The error of a delegate's operation that failed with `words`; None if the ranks know nothing more about it.
    fn failed_external(&self, record: &Record, words: &str) -> Option<Error> {
        self.faults.standing().ok()?; // an abort ends operations, too
        let which = Which::External { id: record.id, issued: record.issued };
        let waiting = Subject::waiting(self, &which)?;
        self.watch.failed_delegate(self, &waiting, words)
    }

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
        let mut timeout = timeout.unwrap_or_else(|| self.timeouts.usual());
        let inner = &mut *self.lock();
        // A delegate applies its own timeouts.
        let extends = carrier == Carrier::Device && self.timeouts.extends();
        if extends {
            timeout = self.timeouts.extended(&mut inner.extensions, |id| inner.external.get(id).is_some(), timeout);
        }
        let numbered = carrier == Carrier::Delegate && (kind.is_p2p() || inner.engine.delegate_reason().is_some());
        let number = match carrier {
            Carrier::Composed => inner.counters.collectives() + 1, // its first operation is issued next and takes this number
            Carrier::Device => self.launches.number(),             // taken before
            Carrier::Delegate if numbered => inner.counters.next(kind, root),
            Carrier::Delegate => inner.counters.collectives(), // our engine's numbers have no gaps
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
            let (id, bytes, site, issued) = (record.id, record.bytes(), note.site, record.issued);
            let external = External { id, kind, number, root, tag, bytes, site, on_device, issued, begun, timeout };
            inner.external.pending.push_back(external);
            if extends {
                inner.extensions.own(Owner::External(id));
            }
        }
        let group = self.this.upgrade().expect("a group that is used is alive");
        let (ended, failure) = (AtomicBool::new(false), OnceCell::new());
        ExternalOp { group, record, carrier, numbered, ended, failure }
    }
}
