//! Monitored barrier: a channel of its own, no number, no poison.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Group;
use crate::error::{Error, Result};
use crate::os::event_count;
use crate::progress::driver;
use crate::progress::driver::Outcome;

impl Group {
    /// Rank 0 waits for all and names who is missing; the others wait for rank 0's word.
    pub fn monitored_barrier(&self, timeout: Option<Duration>, all: bool) -> Result<()> {
        self.usable("monitored_barrier")?;
        let timeout = timeout.unwrap_or_else(|| Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed)));
        let (Some(area), true) = (&self.area, self.config.size > 1) else { return Ok(()) };
        let turn = self.monitored.fetch_add(1, Ordering::Relaxed) + 1;
        area.monitor(area.me).store(turn, Ordering::Release);
        event_count::announce(&**area, area.ranks);
        let until = Some(Instant::now() + timeout);
        let dead = || self.any_dead.load(Ordering::Acquire) || self.fault.get().is_some() || area.is_poisoned();
        let here = |rank: usize| area.monitor(rank).load(Ordering::Acquire) >= turn;
        if area.me != 0 {
            let told = || area.monitor_outcome(turn).load(Ordering::Acquire) >> 1 >= turn;
            let outcome = driver::wait_until(self, &*self.host, until, || told() || dead());
            let word = area.monitor_outcome(turn).load(Ordering::Acquire);
            return match outcome {
                Outcome::Done if word == turn << 1 => Ok(()),
                Outcome::Interrupted => {
                    Err(Error::Interrupted("sagellm: monitored_barrier was interrupted".to_string()))
                }
                Outcome::Done if word >> 1 < turn => Err(self.fault().unwrap_or_else(|| {
                    self.dead_ranks().next().map_or_else(
                        || {
                            self.reported(None)
                                .unwrap_or_else(|| Error::Aborted("sagellm: the group failed".to_string()))
                        },
                        |rank| self.death_of(rank, "is in monitored_barrier"),
                    )
                })),
                Outcome::Done => Err(Error::Timeout(format!(
                    "sagellm: Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv \
                     from rank 0: another rank is missing or came too late, and rank 0 reports which",
                    area.me
                ))),
                Outcome::Elapsed => Err(Error::Timeout(format!(
                    "sagellm: Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv \
                     from rank 0: it did not come within {} ms",
                    area.me,
                    timeout.as_millis()
                ))),
            };
        }
        let outcome = driver::wait_until(self, &*self.host, until, || (1..area.ranks).all(here) || dead());
        let missing: Vec<String> = (1..area.ranks).filter(|rank| !here(*rank)).map(|rank| rank.to_string()).collect();
        let failed = u64::from(!missing.is_empty());
        area.monitor_outcome(turn).store(turn << 1 | failed, Ordering::Release);
        event_count::announce(&**area, area.ranks);
        match (outcome, &missing[..]) {
            (_, []) => Ok(()),
            (Outcome::Interrupted, _) => {
                Err(Error::Interrupted("sagellm: monitored_barrier was interrupted".to_string()))
            }
            (_, [first, rest @ ..]) => {
                let ms = timeout.as_millis();
                let who = if all && !rest.is_empty() {
                    format!("Ranks {}", missing.join(", "))
                } else {
                    format!("Rank {first}")
                };
                Err(Error::Timeout(format!(
                    "sagellm: {who} failed to pass monitoredBarrier in {ms} ms. Rank 0 timed out in monitoredBarrier"
                )))
            }
        }
    }
}
