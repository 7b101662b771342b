//! Whether a path is suspected to be dead, by what the system says about its progress.

use std::time::{Duration, Instant};

use super::path::Progress;

/// How long a path may owe acknowledgements before others take over. The kernel sends again after 200 ms at the
/// earliest.
const STALL: Duration = Duration::from_millis(110);
/// Longest time before a path that was suspected wrongly is suspected again, and how long it keeps that time.
const PATIENT: Duration = Duration::from_secs(2);
const FORGIVEN: Duration = Duration::from_secs(30);
/// A suspected path that has delivered this much is used again, even if it has more.
const ADVANCE: u64 = 256 << 10;

pub struct Trust {
    suspect: bool,
    /// The last progress that was seen, and when.
    acked: u64,
    since: Instant,
    /// The progress when it was suspected.
    suspected_at: u64,
    /// How long it may owe acknowledgements.
    patience: Duration,
    /// When it was last used again.
    forgiven: Instant,
}

/// A path is suspected from now on, or no more.
pub struct Turned {
    pub suspect: bool,
    /// Whether the log says so: of a path that is suspected again and again, only the first time.
    pub first: bool,
}

impl Trust {
    pub fn new(now: Instant) -> Trust {
        Trust { suspect: false, acked: 0, since: now, suspected_at: 0, patience: STALL, forgiven: now }
    }

    pub fn is_suspect(&self) -> bool {
        self.suspect
    }

    /// Takes note of the progress. `paused`: this process was stopped, so the time that has passed says nothing.
    pub fn look(&mut self, progress: &Progress, now: Instant, paused: bool) -> Option<Turned> {
        let first = self.patience == STALL;
        if progress.acked != self.acked || !progress.owes {
            (self.acked, self.since) = (progress.acked, now);
            if self.suspect && (!progress.owes || progress.acked - self.suspected_at >= ADVANCE) {
                (self.suspect, self.forgiven) = (false, now);
                self.patience = (self.patience * 2).min(PATIENT);
                return Some(Turned { suspect: false, first });
            }
            if !self.suspect && now.duration_since(self.forgiven) >= FORGIVEN {
                self.patience = STALL;
            }
        } else if paused {
            self.since = now;
        } else if !self.suspect && now.duration_since(self.since) >= self.patience.max(progress.round_trip * 4) {
            (self.suspect, self.suspected_at) = (true, progress.acked);
            return Some(Turned { suspect: true, first });
        }
        None
    }
}
