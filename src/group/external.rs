//! External operations, which no engine runs: operations of a delegate, operations on devices, and operations that the
//! shim composes of several other operations. The group records all of them. It keeps a list of the pending ones,
//! except composed ones, so that its watch can report what a slow operation waits for.

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
    /// The shim composes the operation of several other operations.
    Composed,
    /// A vendor's library, on a device (`devices`).
    Device,
}

/// A pending operation of a delegate or on a device.
#[derive(Clone, Debug)]
pub(super) struct External {
    /// Id of the operation's record.
    pub id: u64,
    pub kind: Kind,
    pub number: u64,
    /// Rank of the root, or the peer of a message.
    pub root: u32,
    pub tag: u32,
    pub bytes: u64,
    pub site: u32,
    pub on_device: bool,
    /// Time of issue, on `clock::stamp`.
    pub issued: u64,
    /// Time at which the timeout began, on `clock::stamp`. This is the time of issue, except for a delegate's message:
    /// there it is when a thread began to wait for the message, and `None` while no thread waits.
    pub begun: Option<u64>,
    /// Zero: no timeout.
    pub timeout: Duration,
}

impl External {
    /// The `id` of an `External` that has no record. It is created only for the text about an operation that has
    /// already ended.
    pub const NO_RECORD: u64 = u64::MAX;

    /// The operation as called on this rank, and its number, as text.
    fn what(&self) -> String {
        let External { kind, number, root, tag, bytes, on_device, .. } = self;
        let text = op::words::in_words(*kind, *root, *tag, || match *kind {
            Kind::Barrier => format!("{kind} number {number}"),
            _ => format!("{kind}({bytes} bytes) number {number}"),
        });
        if *on_device { format!("{text} on a device") } else { text }
    }

    /// The operation in the form that the diagnosis of hangs uses.
    pub fn waiting(&self) -> Waiting {
        let External { id, kind, number, root, site, on_device, issued, begun, timeout, .. } = *self;
        let which = Which::External { id, issued };
        let age = clock::stamp().saturating_sub(begun.unwrap_or(u64::MAX));
        Waiting { which, kind, root, number, signature: None, what: self.what(), site, timeout, age, on_device }
    }

    fn deadline(&self) -> u64 {
        let timeout = if self.timeout.is_zero() { u64::MAX } else { self.timeout.as_nanos() as u64 };
        self.begun.unwrap_or(u64::MAX).saturating_add(timeout)
    }
}

/// The pending external operations of a group, in the order of their issue. Protected by the group's lock.
#[derive(Default)]
pub(super) struct Externals {
    pending: VecDeque<External>,
}

impl Externals {
    pub fn get(&self, id: u64) -> Option<&External> {
        self.pending.iter().find(|external| external.id == id)
    }

    fn remove(&mut self, id: u64) -> Option<External> {
        // Operations end roughly in the order of their issue, so the search and the removal touch few entries.
        let at = self.pending.iter().position(|external| external.id == id)?;
        self.pending.remove(at)
    }

    /// The operation with the earliest deadline.
    pub fn next_deadline(&self) -> Option<&External> {
        self.pending.iter().filter(|external| external.begun.is_some()).min_by_key(|external| external.deadline())
    }

    /// The device operation with this number or, if `peer` is given, the message with this peer.
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

/// An external operation, until it ends. If this is dropped before the operation has ended, the operation counts as
/// failed.
pub struct ExternalOp {
    group: Arc<Group>,
    record: Record,
    carrier: Carrier,
    /// Whether `number` was taken from the group's counters for this operation.
    numbered: bool,
    /// Set under the group's lock by the thread that ends the operation. Read without the lock as a hint (relaxed). The
    /// results of the end are protected by that lock, or they are in `failure`.
    ended: AtomicBool,
    /// The error to report, if the group knows more than the carrier. Made by the first thread that learns of the
    /// failure; other threads wait for it.
    failure: OnceCell<Option<Error>>,
}

impl ExternalOp {
    /// Marks the operation as ended; a second call does nothing. `well`: the operation succeeded. `timed` is false if
    /// its end was not observed.
    pub fn end(&self, well: bool, timed: bool) {
        if !self.ended.load(Ordering::Relaxed) {
            self.end_with(well, timed);
        }
    }

    /// Marks the operation as failed with the carrier's error text `words`. If the group knows what the operation
    /// waited for, returns the error to report instead of `words`; every call returns the same error.
    pub fn fail(&self, words: &str) -> Option<Error> {
        // In a forked child, a thread of the parent may hold the lock for ever.
        if self.group.not_forked().is_err() {
            return None;
        }
        let failure = self.failure.get_or_init(|| self.group.failed_external(&self.record, words));
        self.end_with(false, true);
        failure.clone()
    }

    /// Removes the record of an operation that the carrier refused without sending anything, as if the core had refused
    /// it. If another thread has meanwhile issued an operation with the next number, the refused operation's number
    /// stays used.
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

    /// Records that a thread of the program begins (`more`) or stops waiting for the operation.
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
    /// The error of a delegate's operation that failed with the text `words`; `None` if the ranks know nothing more
    /// about it.
    fn failed_external(&self, record: &Record, words: &str) -> Option<Error> {
        self.faults.standing().ok()?; // an abort also ends operations
        let which = Which::External { id: record.id, issued: record.issued };
        let waiting = Subject::waiting(self, &which)?;
        self.watch.failed_delegate(self, &waiting, words)
    }

    /// Records an operation that `carrier` runs. `root` has the meaning of `Request::root`. Without a `timeout`, the
    /// group's timeout applies.
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
        // A delegate applies its own timeouts, so ephemeral timeouts do not extend them.
        let extends = carrier == Carrier::Device && self.timeouts.extends();
        if extends {
            timeout = self.timeouts.extended(&mut inner.extensions, |id| inner.external.get(id).is_some(), timeout);
        }
        let numbered = carrier == Carrier::Delegate && (kind.is_p2p() || inner.engine.delegate_reason().is_some());
        let number = match carrier {
            Carrier::Composed => inner.counters.collectives() + 1, // its first operation is issued next and takes this number
            Carrier::Device => self.launches.number(),             // taken before the call
            Carrier::Delegate if numbered => inner.counters.next(kind, root),
            Carrier::Delegate => inner.counters.collectives(), // engine numbers must have no gaps
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
