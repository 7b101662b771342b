//! Splits, shrinks and ends a group's communicators. When a group is split or shrunk, the library makes the new groups'
//! communicators out of the old group's communicators.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::communicators::{DeviceComm, Ranks, patience};
use super::engine::DeviceEngine;
use super::lock;
use crate::error::{Error, Result};
use crate::os::watch;

impl DeviceEngine {
    /// The communicator of all ranks for a device, if it was made and has not ended.
    fn living(&self, device: i32) -> Option<Arc<DeviceComm>> {
        self.communicators.find(device, Ranks::All).filter(|own| !own.ended.load(Ordering::Acquire))
    }

    /// Whether the library can make a communicator of these ranks out of the group's communicator for a device.
    pub fn can_split(&self, device: i32, members: &[u32]) -> bool {
        self.living(device).is_some_and(|own| own.communicator.can_split(members))
    }

    /// Splits the group's communicator, and makes the communicator of `child`, which is the engine of the group of
    /// `members`. `child` is `None` on a rank that is in no new group. All ranks of this group call this together. The
    /// new groups have no rank in common.
    pub fn split(&self, child: Option<&DeviceEngine>, device: i32, members: &[u32]) -> Result<()> {
        let own = self
            .living(device)
            .ok_or_else(|| Error::aborted("sagellm split: the communicator of the group was aborted"))?;
        self.runtime.set_device(device)?;
        let Some(child) = child else {
            let (deadline, go_on) = (patience(self.group.timeout()), self.joining("", Ranks::All));
            let parted = own.part(members, deadline, Arc::clone(&go_on), (String::new(), String::new()));
            return parted.map(drop).map_err(|error| self.cause_of(error, &|| go_on().err()));
        };
        let made = child.named("all", device, |name, algorithm| {
            let (deadline, go_on) = (patience(child.group.timeout()), self.joining(&name, Ranks::All));
            let part = own.part(members, deadline, Arc::clone(&go_on), (name, algorithm));
            let part = part.map_err(|error| self.cause_of(error, &|| go_on().err()))?;
            part.ok_or_else(|| Error::bug("sagellm: a member got no part of a communicator"))
        })?;
        child.communicators.add(device, Ranks::All, made);
        Ok(())
    }

    /// Takes the communicator of all ranks out of use, because the group is about to shrink. The communicator ends when
    /// the returned object is dropped. `drained`: no operation is pending in the communicator.
    pub fn retire(self: &Arc<Self>, device: i32, drained: bool) -> Retired {
        let own = self.living(device).filter(|own| {
            own.drained.fetch_or(drained, Ordering::Relaxed);
            !own.ended.swap(true, Ordering::AcqRel)
        });
        Retired { engine: Arc::clone(self), device, communicator: own }
    }

    /// Ends all communicators, which unblocks hanging operations. No operation can be issued afterwards. Returns when
    /// all communicators have ended. A library may need long for each communicator, so they are ended in parallel. If
    /// the group has failed, this first waits until the other ranks can read why, so that they know the reason when
    /// they see a communicator end.
    pub fn abort(&self) {
        self.group.await_report();
        let mut all: Vec<Arc<DeviceComm>> = lock(&self.communicators.known).values().cloned().collect();
        let last = all.pop();
        let beside = all.into_iter().filter_map(|each| {
            let (other, name) = (Arc::clone(&each), "sagellm-abort");
            watch::spawn(name, move || other.abort()).inspect_err(|_| each.abort()).ok()
        });
        let beside: Vec<_> = beside.collect();
        if let Some(last) = last {
            last.abort();
        }
        for each in beside {
            let _ = each.join(); // a panic is in the log, and the communicator is already marked as ended
        }
    }

    /// Ends all communicators together with the other ranks. Waits at most the timeout (zero: no limit) while all ranks
    /// live, and only briefly if a rank is gone. If a communicator does not end in time, it is aborted or left to a
    /// background thread that continues to wait. `drained`: no operation is pending; if false, all communicators are
    /// aborted immediately. Returns false if a signal handler raised an exception meanwhile.
    pub fn close(&self, timeout: Duration, drained: bool) -> bool {
        let begin = Instant::now();
        if !drained || !self.whole("the end of the group") {
            self.abort();
        }
        let all = std::mem::take(&mut *lock(&self.communicators.known));
        // The order is the same on all ranks, so that ranks do not wait for each other in a circle.
        let mut interrupted = false;
        for each in all.values() {
            if interrupted {
                each.abort();
            } else if !each.ended.swap(true, Ordering::AcqRel) {
                let left = patience(timeout).saturating_sub(begin.elapsed()).max(Duration::from_millis(1));
                interrupted = !each.close(&*self.group, left);
            }
        }
        !interrupted
    }

    /// Returns true if no rank has died and the group has not failed; otherwise fails the group and returns false. If a
    /// rank left in order, the group does not fail, because the remaining ranks may still have messages for each other.
    fn whole(&self, what: &str) -> bool {
        let died = || self.group.dead_ranks().into_iter().find(|rank| !self.group.left(*rank));
        let death = |rank| self.group.death_of(rank, &format!("waits for {what}"));
        match self.group.fault().or_else(|| died().map(death)) {
            Some(error) => {
                self.group.fail(error);
                false
            }
            None => true,
        }
    }
}

/// The communicator of a group that shrinks. No other code can use or end it any more.
pub struct Retired {
    engine: Arc<DeviceEngine>,
    device: i32,
    communicator: Option<Arc<DeviceComm>>,
}

impl Retired {
    /// Whether the communicator exists and the library can shrink it without a call by the excluded ranks.
    pub fn can_shrink(&self) -> bool {
        self.communicator.is_some() && self.engine.capabilities().shrink
    }

    /// Makes the communicator of `child`, which is the engine of a group of all ranks except `excluded`. All ranks of
    /// that group call this together. Operations that are pending in the old communicator are aborted.
    pub fn shrink(&self, child: &DeviceEngine, excluded: &[u32]) -> Result<()> {
        let own = self.communicator.as_ref().ok_or_else(|| Error::bug("sagellm: nothing to shrink"))?;
        let made = child.named("all", self.device, |name, _| {
            let (deadline, go_on) = (patience(child.group.timeout()), child.joining(&name, Ranks::All));
            let made = own.communicator.shrink(excluded, deadline, Arc::clone(&go_on), &name);
            made.map_err(|error| child.cause_of(error, &|| go_on().err()))
        })?;
        child.communicators.add(self.device, Ranks::All, made);
        Ok(())
    }
}

impl Drop for Retired {
    fn drop(&mut self) {
        if let Some(own) = &self.communicator {
            own.end();
        }
    }
}
