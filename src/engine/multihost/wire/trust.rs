//! Decides whether a path is suspected to be dead, from what the system says about its progress.

use std::time::{Duration, Instant};

use super::path::Progress;

/// If a path owes acknowledgements for longer than this, other paths take over. The kernel sends again after 200 ms at
/// the earliest.
const STALL: Duration = Duration::from_millis(95);
/// If the peer suspects the path too, the usual time is divided by this.
const CONFIRMED: u32 = 6;
/// `PATIENT`: the largest `patience` of a path that was suspected wrongly. `FORGIVEN`: after this long without a new
/// suspicion, the path has the patience `STALL` again.
const PATIENT: Duration = Duration::from_secs(2);
const FORGIVEN: Duration = Duration::from_secs(30);
/// A suspected path that has delivered this much is used again, even if it still has more to deliver.
const ADVANCE: u64 = 256 << 10;

pub struct Trust {
    suspect: bool,
    /// `acked`, `owes`: the progress at the last check. `since`: the first check at which the path owed
    /// acknowledgements and after which it made no progress.
    acked: u64,
    owes: bool,
    since: Instant,
    /// The value of `acked` when the path was suspected, and whether the peer suspected it then.
    suspected_at: u64,
    confirmed: bool,
    /// How long the path may owe acknowledgements.
    patience: Duration,
    /// When the path was last used again after a suspicion.
    forgiven: Instant,
}

/// A path has become suspected, or is no longer suspected.
pub struct Turned {
    pub suspect: bool,
    /// Whether the change is logged. If a path is suspected again and again, only the first suspicion and its end are
    /// logged.
    pub first: bool,
}

impl Trust {
    pub fn new(now: Instant) -> Trust {
        let (suspect, owes, confirmed) = (false, false, false);
        Trust { suspect, acked: 0, owes, since: now, suspected_at: 0, confirmed, patience: STALL, forgiven: now }
    }

    pub fn is_suspect(&self) -> bool {
        self.suspect
    }

    /// Checks the progress. `confirmed`: the peer suspects this path. `paused`: this process was stopped, so nothing
    /// follows from the time that has passed.
    pub fn look(&mut self, progress: &Progress, now: Instant, confirmed: bool, paused: bool) -> Option<Turned> {
        let first = self.patience == STALL;
        let patience = if confirmed { self.patience / CONFIRMED } else { self.patience }.max(progress.round_trip * 4);
        let owed = std::mem::replace(&mut self.owes, progress.owes);
        if progress.acked != self.acked || !progress.owes {
            (self.acked, self.since) = (progress.acked, now);
            if self.suspect && (!progress.owes || progress.acked - self.suspected_at >= ADVANCE) {
                (self.suspect, self.forgiven) = (false, now);
                if !self.confirmed {
                    self.patience = (self.patience * 2).min(PATIENT);
                }
                return Some(Turned { suspect: false, first });
            }
            if !self.suspect && now.duration_since(self.forgiven) >= FORGIVEN {
                self.patience = STALL;
            }
        } else if paused || !owed {
            self.since = now;
        } else if !self.suspect && now.duration_since(self.since) >= patience {
            (self.suspect, self.suspected_at, self.confirmed) = (true, progress.acked, confirmed);
            return Some(Turned { suspect: true, first });
        }
        None
    }
}
