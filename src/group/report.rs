//! Gives out the statistics of a group: copies for callers, and a file when the group fails.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use super::Group;
use crate::os::clock;
use crate::stats::Stats;
use crate::stats::export;
use crate::stats::export::{Moment, Names};
use crate::stats::history::History;
use crate::{config, select};

/// The names of codes, for turning records into text.
pub const NAMES: Names = Names { path: select::path_name, reason: select::reason_name };

impl Moment {
    fn now() -> Moment {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Moment { now: clock::stamp(), wall: wall.as_nanos() as u64 }
    }
}

impl Group {
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
        self.watch.set_members(members);
    }

    /// Writes the records of a group that has just failed into the folder named by the environment, if any.
    pub(super) fn dump_records(&self) {
        let Some(folder) = config::dump_folder() else { return };
        let (rank, name) = (self.config.rank, &self.config.name);
        if self.faults.role().is_inside() {
            return; // no program has made it
        }
        let members = self.watch.members().map_or_else(|| (0..self.config.size as u32).collect(), <[u32]>::to_vec);
        let fault = self.fault().map(|error| error.text().to_string()).unwrap_or_default();
        let text = export::dump(name, &fault, (rank, &members), Moment::now(), self.records().iter(), NAMES);
        let safe: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let whose = members.get(rank).copied().unwrap_or(rank as u32);
        let path = PathBuf::from(folder).join(format!("sagellm-{safe}-{whose}.json"));
        if let Err(error) = std::fs::write(&path, text) {
            log::warn!("group '{name}' rank {rank}: cannot write its last operations to {}: {error}", path.display());
        }
    }
}
