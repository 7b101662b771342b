//! The only interface of a group that the diagnosis uses: its pending operations, what they wait for, and its progress.

use std::collections::BTreeMap;
use std::time::Duration;

use super::difference::Launch;
use super::waiting::{Waiting, Which};
use crate::engine::Blockers;
use crate::error::Error;

/// A group, as its watch sees it. The caller must not hold the group's lock, because the functions acquire it briefly.
pub trait Subject: Send + Sync {
    /// The operation with the next deadline among those that no engine runs.
    fn next_external(&self) -> Option<Waiting>;
    /// The operation of the engine with the next deadline.
    fn next_of_engine(&self) -> Option<Waiting>;
    /// The current state of an operation; `None` after it has ended.
    fn waiting(&self, which: &Which) -> Option<Waiting>;
    /// The operation with this id, among those that no engine runs.
    fn external(&self, id: u64) -> Option<Waiting>;
    /// What an operation waits for, as far as this rank can see without asking.
    fn blockers(&self, waiting: &Waiting) -> Blockers;
    fn progress(&self) -> Progress;
    /// Milliseconds since the collective with this number ended on this rank; `None` if that is unknown.
    fn ended_ago(&self, number: u64, on_device: bool) -> Option<u64>;
    /// The group's timeout, for operations that name no timeout.
    fn timeout(&self) -> Duration;
    /// The fault of the group.
    fn fault(&self) -> Option<Error>;
    /// Whether the group has failed or was destroyed.
    fn has_ended(&self) -> bool;
    /// Fails the group.
    fn fail(&self, error: Error);
}

/// What a rank has issued in a group so far.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Number of the last collective on the CPU, and its text if the history contains it.
    pub issued: u64,
    pub last: Option<String>,
    /// Number and text of the last collective on a device; these are numbered separately. `signed`: the signatures of
    /// the last device collectives.
    pub launched: u64,
    pub launched_last: Option<String>,
    pub signed: Vec<Launch>,
    /// Milliseconds since the last operation ended; `None` if there was none or one is pending.
    pub idle: Option<u64>,
}

/// Facts about a rank of a group that never change.
#[derive(Clone, Debug, Default)]
pub struct Who {
    pub rank: usize,
    pub ranks: usize,
    pub name: String,
    /// The name, in texts, of the backend that runs the operations which the engine cannot run.
    pub delegate: String,
    /// Process ids of the ranks on this host, as far as known.
    pub processes: BTreeMap<usize, i32>,
    /// Whether a rank that is missing in `processes` is on another host.
    pub spans_hosts: bool,
    /// Whether this group consists of the ranks of one host of a larger group. If so, only the larger group asks other
    /// ranks.
    pub is_inside: bool,
    /// The keys in the store that this rank has set while the group was made, and that no rank reads any more.
    pub keys: Vec<String>,
    /// The option `soft_timeout`. If it is zero, no line is logged.
    pub soft: Duration,
}
