//! Gives out the statistics of a group: copies for callers, and a file when the group fails. Takes in operations that
//! the core does not run itself.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::Group;
use crate::os::clock;
use crate::select::Choice;
use crate::stats::Stats;
use crate::stats::export;
use crate::stats::export::{Moment, Names};
use crate::stats::history::{History, Record, State};
use crate::types::{ANY_RANK, CallNote, Kind};
use crate::{config, select};

/// The names of codes, for turning records into text.
pub const NAMES: Names = Names { path: select::path_name, reason: select::reason_name };

impl Moment {
    fn now() -> Moment {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Moment { now: clock::stamp(), wall: wall.as_nanos() as u64 }
    }
}

/// The carrier of an operation that the engines do not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    Delegate,
    /// The shim composes it from several operations.
    Composed,
    /// The library of a device's vendor (`devices`).
    Device,
}

/// An operation that the core does not run itself, until it ends; dropping it counts as a failure.
pub struct ExternalOp {
    group: Arc<Group>,
    record: Record,
    ended: AtomicBool,
}

impl ExternalOp {
    /// Marks it as ended; a second call does nothing. `timed` is false where only its issue was seen.
    pub fn end(&self, well: bool, timed: bool) {
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        let state = if well { State::Done } else { State::Failed };
        let record = Record { state, timed, ended: clock::stamp(), ..self.record };
        self.group.lock().stats.external_ended(record);
    }
}

impl Drop for ExternalOp {
    fn drop(&mut self) {
        self.end(false, false);
    }
}

impl Group {
    /// Records an operation that `carrier` runs. `root` as in a request; `bytes` are read and written.
    pub fn external_op(
        &self,
        kind: Kind,
        carrier: Carrier,
        (root, tag): (u32, u32),
        (read, written): (u64, u64),
        note: CallNote,
    ) -> ExternalOp {
        let mut inner = self.lock();
        let whole = inner.engine.delegate_reason().is_some();
        let number = match kind {
            _ if carrier == Carrier::Composed => inner.number + 1, // that of its first operation, which follows
            _ if carrier == Carrier::Device => self.device_number.load(Ordering::Relaxed), // taken before
            Kind::Send | Kind::Recv if root as usize >= self.config.size && root != ANY_RANK => 0,
            Kind::Send | Kind::Recv => inner.number_for(kind, root),
            _ if whole => inner.number_for(kind, root),
            _ => inner.number, // our engine's numbers have no gaps
        };
        let choice = match carrier {
            Carrier::Delegate => Choice::DELEGATE,
            Carrier::Composed => Choice::COMPOSED,
            Carrier::Device => Choice::DEVICE,
        };
        let choice = choice.code();
        let mut record = Record { read, written, ..Record::external_op(kind, choice, number, (root, tag), note) };
        record.id = inner.stats.external_issued(record);
        let group = self.this.upgrade().expect("a group that is used is alive");
        ExternalOp { group, record, ended: AtomicBool::new(false) }
    }

    /// Counts, times and waits, and the time at which they were read. The lock is held only for a copy.
    pub fn stats(&self) -> (Stats, Moment) {
        let stats = self.lock().stats.counts();
        (stats, Moment::now())
    }

    /// The last operations.
    pub fn records(&self) -> History {
        self.lock().stats.history().clone()
    }

    pub fn rank(&self) -> usize {
        self.config.rank
    }

    pub fn size(&self) -> usize {
        self.config.size
    }

    /// Resets all counts.
    pub fn reset_stats(&self) {
        self.lock().stats.reset();
    }

    /// The ranks of the default group that these ranks are; for records only. Only the first call counts.
    pub fn set_members(&self, members: Vec<u32>) {
        let _ = self.members.set(members);
    }

    /// Writes the records of a group that has just failed into the folder named by the environment, if any.
    pub(super) fn dump_records(&self) {
        let Some(folder) = config::dump_folder() else { return };
        let (rank, name) = (self.config.rank, &self.config.name);
        // The groups inside a host of a larger group have none, because no program made them.
        let Some(members) = self.members.get() else { return };
        let fault = self.fault().map(|error| error.text().to_string()).unwrap_or_default();
        let text = export::dump(name, &fault, (rank, members), Moment::now(), self.records().iter(), NAMES);
        let safe: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let whose = members.get(rank).copied().unwrap_or(rank as u32);
        let path = PathBuf::from(folder).join(format!("sagellm-{safe}-{whose}.json"));
        if let Err(error) = std::fs::write(&path, text) {
            log::warn!("group '{name}' rank {rank}: cannot write its last operations to {}: {error}", path.display());
        }
    }
}
