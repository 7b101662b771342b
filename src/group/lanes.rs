//! The functions that the lanes (the threads of a group over several hosts) call: in the group inside this host, to run
//! operations, and in the group over several hosts, to report their results.

use std::sync::{Arc, Weak};

use super::Group;
use crate::engine::multihost::HostGroup;
use crate::engine::{Ended, Report, Told};
use crate::error::{Error, Result};
use crate::os::clock;
use crate::progress::domain::Domain;
use crate::types::Request;

/// A group inside a host, as a lane of a group over several hosts uses it.
impl HostGroup for Group {
    fn run(&self, request: Request) -> Result<()> {
        Group::run(self, request, None)
    }
    fn abort(&self, error: &Error) {
        self.poison(error.clone());
    }
    fn leave(&self) {
        self.shutdown();
    }
    fn watched(&self) -> Vec<(usize, bool)> {
        Group::watched(self)
    }
    fn reported(&self) -> Option<Told> {
        self.control.reported()
    }
    fn process(&self, index: usize) -> String {
        self.faults.process(index)
    }
}

/// Passes the reports of the lanes' threads to the group. The reference is weak, because the group owns the engine,
/// which owns this.
pub(super) struct LaneReport {
    pub group: Weak<Group>,
    pub domain: Arc<Domain>,
}

impl Report for LaneReport {
    fn ended(&self, ended: Ended) {
        match self.group.upgrade() {
            Some(group) => group.finish(ended),
            None => {
                self.domain.remove_pending(ended.len());
                ended.into_iter().for_each(|(op, outcome)| op.end(outcome, clock::stamp()));
            }
        }
    }
    fn failed(&self, error: Error) {
        if let Some(group) = self.group.upgrade() {
            group.poison(error);
        }
    }
    fn changed(&self) {
        self.domain.announce_work();
    }
}
