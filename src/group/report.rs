//! Exports the statistics of a group: copies for callers, and a file when the group fails.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use super::Group;
use crate::os::clock;
use crate::stats::Stats;
use crate::stats::export;
use crate::stats::export::{Moment, Names};
use crate::stats::history::History;
use crate::{config, select};

/// Functions that return the names of codes in records.
pub const NAMES: Names = Names { path: select::path_name, reason: select::reason_name };

impl Moment {
    fn now() -> Moment {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Moment { now: clock::stamp(), wall: wall.as_nanos() as u64 }
    }
}

impl Group {
    /// Counters, times and waits, and the time at which they were read. This function holds the lock only while it
    /// copies them.
    pub fn stats(&self) -> (Stats, Moment) {
        let stats = self.lock().stats.counts();
        (stats, Moment::now())
    }

    /// A copy of the history of the last operations.
    pub fn records(&self) -> History {
        self.lock().stats.history().clone()
    }

    pub fn rank(&self) -> usize {
        self.config.rank
    }

    pub fn size(&self) -> usize {
        self.config.size
    }

    /// Resets all counters.
    pub fn reset_stats(&self) {
        self.lock().stats.reset();
    }

    /// For each rank of the group, its rank in the default group; only for records. Only the first call has an effect.
    pub fn set_members(&self, members: Vec<u32>) {
        self.watch.set_members(members);
    }

    /// Writes the records of a group that has just failed to the folder that the environment names, if any.
    pub(super) fn dump_records(&self) {
        let Some(folder) = config::dump_folder() else { return };
        let (rank, name) = (self.config.rank, &self.config.name);
        if self.faults.role().is_inside() {
            return; // the program has not made this group
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
