//! The monitored barrier. Its ranks communicate through `engine::Monitor`. It uses no sequence number and does not
//! poison the group.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Group;
use crate::engine::Monitor;
use crate::error::{Error, Result};
use crate::progress::driver;
use crate::progress::driver::Outcome;

impl Group {
    /// Rank 0 waits for all ranks and names the missing ones. The other ranks wait for rank 0's decision.
    pub fn monitored_barrier(&self, timeout: Option<Duration>, all: bool) -> Result<()> {
        self.usable("monitored_barrier")?;
        let timeout = timeout.unwrap_or_else(|| self.timeouts.usual());
        let (Some(monitor), true) = (self.control.monitor(), self.config.size > 1) else { return Ok(()) };
        let turn = self.monitored.fetch_add(1, Ordering::Relaxed) + 1;
        monitor.come(turn);
        let outcome = match self.config.rank {
            0 => self.collect(monitor, turn, timeout, all),
            _ => self.hear(monitor, turn, timeout),
        };
        monitor.left_off();
        outcome
    }

    /// Whether the barrier can no longer succeed: a rank has died, the group has failed, or a missing rank cannot enter
    /// it.
    fn is_broken(&self, monitor: &dyn Monitor, turn: u64) -> bool {
        let failed = self.faults.any_dead() || self.faults.first().is_some() || self.control.is_poisoned();
        failed || monitor.hopeless(turn).is_some()
    }

    /// On rank 0: waits for the other ranks, and publishes the decision.
    fn collect(&self, monitor: &dyn Monitor, turn: u64, timeout: Duration, all: bool) -> Result<()> {
        let ranks = self.config.size;
        let here = |rank: usize| monitor.has_come(rank, turn);
        let until = Some(Instant::now() + timeout);
        let outcome =
            driver::wait_until(self, &*self.host, until, || (1..ranks).all(here) || self.is_broken(monitor, turn));
        let missing: Vec<String> = (1..ranks).filter(|rank| !here(*rank)).map(|rank| rank.to_string()).collect();
        monitor.decide(turn, !missing.is_empty());
        match (outcome, &missing[..]) {
            (_, []) => Ok(()),
            (Outcome::Interrupted, _) => Err(Error::interrupted("sagellm: monitored_barrier was interrupted")),
            (_, [first, rest @ ..]) => {
                let ms = timeout.as_millis();
                let who = if all && !rest.is_empty() {
                    format!("Ranks {}", missing.join(", "))
                } else {
                    format!("Rank {first}")
                };
                Err(Error::timeout(format!(
                    "sagellm: {who} failed to pass monitoredBarrier in {ms} ms. Rank 0 timed out in monitoredBarrier"
                )))
            }
        }
    }

    /// On the other ranks: waits for rank 0's decision.
    fn hear(&self, monitor: &dyn Monitor, turn: u64, timeout: Duration) -> Result<()> {
        let me = self.config.rank;
        let told = || monitor.decision(turn).is_some();
        let until = Some(Instant::now() + timeout);
        let outcome = driver::wait_until(self, &*self.host, until, || told() || self.is_broken(monitor, turn));
        let failed = monitor.decision(turn);
        match outcome {
            Outcome::Done if failed == Some(false) => Ok(()),
            Outcome::Interrupted => Err(Error::interrupted("sagellm: monitored_barrier was interrupted")),
            Outcome::Done if failed.is_none() => {
                Err(self.fault().or_else(|| monitor.hopeless(turn)).unwrap_or_else(|| {
                    self.faults.dead_ranks().next().map_or_else(
                        || self.reported(None).unwrap_or_else(|| Error::aborted("sagellm: the group failed")),
                        |rank| self.faults.death_of(rank, "is in monitored_barrier"),
                    )
                }))
            }
            Outcome::Done => Err(Error::timeout(format!(
                "sagellm: Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv \
                 from rank 0: another rank is missing or came too late, and rank 0 reports which"
            ))),
            Outcome::Elapsed => Err(Error::timeout(format!(
                "sagellm: Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv \
                 from rank 0: it did not come within {} ms",
                timeout.as_millis()
            ))),
        }
    }
}
