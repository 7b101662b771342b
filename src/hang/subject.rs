//! What the diagnosis needs of a group, and nothing else of it: what it has pending, what that waits for, how far it has come.

use std::collections::BTreeMap;
use std::time::Duration;

use super::difference::Launch;
use super::waiting::{Waiting, Which};
use crate::engine::Blockers;
use crate::error::Error;

/// A group, as its watch sees it. Called without the group's lock; the calls take it for a moment.
pub trait Subject: Send + Sync {
    /// The operation that no engine runs and whose deadline is the next.
    fn next_external(&self) -> Option<Waiting>;
    /// The operation of the engine whose deadline is the next.
    fn next_of_engine(&self) -> Option<Waiting>;
    /// An operation as it stands now; None once it has ended.
    fn waiting(&self, which: &Which) -> Option<Waiting>;
    /// The operation that no engine runs with this id.
    fn external(&self, id: u64) -> Option<Waiting>;
    /// What an operation waits for, as far as this rank sees without asking.
    fn blockers(&self, waiting: &Waiting) -> Blockers;
    fn progress(&self) -> Progress;
    /// How many milliseconds ago the collective with this number ended on this rank.
    fn ended_ago(&self, number: u64, on_device: bool) -> Option<u64>;
    /// Of operations that name none.
    fn timeout(&self) -> Duration;
    /// Why the group has failed.
    fn fault(&self) -> Option<Error>;
    /// It has failed, or was destroyed.
    fn has_ended(&self) -> bool;
    /// Fails the group.
    fn fail(&self, error: Error);
}

/// What a rank has done in a group so far.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Number of the last collective, and it in words while the history holds it.
    pub issued: u64,
    pub last: Option<String>,
    /// The same on devices, which have numbers of their own, and what the last of them signed.
    pub launched: u64,
    pub launched_last: Option<String>,
    pub signed: Vec<Launch>,
    /// Milliseconds since the last operation ended; None if there was none, or one is pending.
    pub idle: Option<u64>,
}

/// What never changes about a group's rank.
#[derive(Clone, Debug, Default)]
pub struct Who {
    pub rank: usize,
    pub ranks: usize,
    pub name: String,
    /// What carries operations that the engine does not, in texts.
    pub delegate: String,
    /// The processes of ranks on this host, where they are known.
    pub processes: BTreeMap<usize, i32>,
    /// A process that is not among them is on another host.
    pub spans_hosts: bool,
    /// A group inside a host of a larger one: that one asks.
    pub is_inside: bool,
    /// The option `soft_timeout`; zero: no line.
    pub soft: Duration,
}
