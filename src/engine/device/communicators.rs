//! The communicators of a group by device and ranks, the parts that are made out of them, and their ends (`making` is how
//! they are made). Who ends one sets `ended` first; nobody uses it from then on.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use super::communicator::{Communicator, Split};
use super::engine::{DeviceEngine, lock};
use super::libs::nccl::tuner;
use super::pairs::Pairs;
use super::watchdog::Library;
use crate::error::{Error, Result};
use crate::host::Counting;
use crate::os::watch;

/// Which ranks a communicator joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ranks {
    All,
    /// Messages between two, one way.
    Way {
        from: u32,
        to: u32,
    },
}

impl Ranks {
    pub fn count(self, size: usize) -> usize {
        if self == Ranks::All { size } else { 2 }
    }

    /// Words that are the same on all of its ranks, and on no others of the group.
    pub(super) fn words(self) -> String {
        match self {
            Ranks::All => "all".to_string(),
            Ranks::Way { from, to } => format!("{from}-{to}"),
        }
    }
}

/// How the ranks of a communicator reach each other before they have it; answered by the group's CPU side.
pub trait Exchange {
    /// Hands the id from the first of its ranks to the others. A rank that does not come is named at the deadline.
    fn share(&self, id: &mut [u8], ranks: Ranks) -> Result<()>;
    /// The store that the group met in.
    fn store(&self) -> Arc<dyn Counting + Send + Sync>;
}

/// One communicator of a group.
pub struct DeviceComm {
    pub(super) communicator: Arc<dyn Communicator>,
    pub(super) name: String,
    /// How often communicators were made out of it; the same on all its ranks, which do that together.
    pub(super) parts: AtomicU32,
    /// Set once, by the one who ends it; read by everyone. Acquire and release: who sees it sees `drained`.
    pub(super) ended: AtomicBool,
    /// It ended when nothing was under way in it: what the device has passed is well. Written before `ended`.
    pub(super) drained: AtomicBool,
    /// A library that asks which algorithm to take is told by our rules while this lives.
    pub(super) _steered: tuner::Steered,
}

/// Those of one group.
#[derive(Default)]
pub(super) struct Communicators {
    known: Mutex<BTreeMap<(i32, Ranks), Arc<DeviceComm>>>,
    /// Held while one is made. Present from the first communicator for messages on.
    pub(super) making: Mutex<Option<Pairs>>,
    /// How many of each kind ("all", "0-1") were made so far, for their names.
    pub(super) made: Mutex<HashMap<String, u32>>,
}

impl Communicators {
    pub fn has(&self, device: i32, ranks: Ranks) -> bool {
        lock(&self.known).contains_key(&(device, ranks))
    }

    pub fn find(&self, device: i32, ranks: Ranks) -> Option<Arc<DeviceComm>> {
        lock(&self.known).get(&(device, ranks)).cloned()
    }

    pub fn add(&self, device: i32, ranks: Ranks, made: DeviceComm) {
        lock(&self.known).entry((device, ranks)).or_insert(Arc::new(made));
    }

    /// The ranks with which there are both ways on a device.
    pub fn partners(&self, device: i32, me: u32) -> Vec<u32> {
        let known = lock(&self.known);
        let both = |(on, ranks): &(i32, Ranks)| match *ranks {
            Ranks::Way { from, to } if *on == device && from == me => {
                known.contains_key(&(device, Ranks::Way { from: to, to: me })).then_some(to)
            }
            _ => None,
        };
        known.keys().filter_map(both).collect()
    }
}

/// For the making of a communicator. None at all is one of a year: somebody has to look in between.
pub(super) fn patience(timeout: Duration) -> Duration {
    if timeout.is_zero() { Duration::from_secs(365 * 24 * 3600) } else { timeout }
}

impl DeviceEngine {
    /// The communicator of all ranks for a device, if it was made and has not ended.
    fn living(&self, device: i32) -> Option<Arc<DeviceComm>> {
        self.communicators.find(device, Ranks::All).filter(|own| !own.ended.load(Ordering::Acquire))
    }

    /// Whether the library can make the communicator of these of its ranks out of the group's for a device.
    pub fn can_split(&self, device: i32, members: &[u32]) -> bool {
        self.living(device).is_some_and(|own| own.communicator.can_split(members))
    }

    /// Makes it, for the group of `members`, whose devices are `child`; `None` on a rank that is in no new group. All ranks
    /// of this group call at once; the groups that they make have no rank in common.
    pub fn split(&self, child: Option<&DeviceEngine>, device: i32, members: &[u32], timeout: Duration) -> Result<()> {
        let own = self
            .living(device)
            .ok_or_else(|| Error::Aborted("sagellm split: the communicator of the group was aborted".to_string()))?;
        self.runtime.set_device(device)?;
        let Some(child) = child else {
            return own.part(self, members, timeout, (String::new(), String::new())).map(drop);
        };
        let made = child.named("all", device, |name, algorithm| {
            let part = own.part(self, members, timeout, (name, algorithm))?;
            part.ok_or_else(|| Error::Bug("sagellm: a member got no part of a communicator".into()))
        })?;
        child.communicators.add(device, Ranks::All, made);
        Ok(())
    }

    /// Takes the communicator of all ranks out of use, for a group that is about to shrink; it ends with what this returns.
    /// `drained`: nothing is under way in it.
    pub fn retire(self: &Arc<Self>, device: i32, drained: bool) -> Retired {
        let own = self.living(device).filter(|own| {
            own.drained.fetch_or(drained, Ordering::Relaxed);
            !own.ended.swap(true, Ordering::AcqRel)
        });
        Retired { engine: Arc::clone(self), device, communicator: own }
    }

    /// Unblocks whatever hangs; nothing can be issued afterwards.
    pub fn abort(&self) {
        let all: Vec<Arc<DeviceComm>> = lock(&self.communicators.known).values().cloned().collect();
        all.iter().for_each(|each| each.abort());
    }

    /// Leaves with the other ranks: within the timeout (zero: none) while all of them live, soon where one is gone. What
    /// does not end is aborted, or left behind with a thread that waits for it. `drained`: nothing is under way. False
    /// where a signal handler raised meanwhile.
    pub fn close(&self, timeout: Duration, drained: bool) -> bool {
        let begin = Instant::now();
        if !drained || !self.whole("the end of the group") {
            self.abort();
        }
        let all = std::mem::take(&mut *lock(&self.communicators.known));
        // In one order on all ranks, so that nobody waits in a circle.
        let mut interrupted = false;
        for each in all.values() {
            if interrupted {
                each.abort();
            } else if !each.ended.swap(true, Ordering::AcqRel) {
                let left = patience(timeout).saturating_sub(begin.elapsed()).max(Duration::from_millis(1));
                interrupted = !each.close(self, left);
            }
        }
        !interrupted
    }
}

/// The communicator of a group that shrinks, which nobody else can use or end any more.
pub struct Retired {
    engine: Arc<DeviceEngine>,
    device: i32,
    communicator: Option<Arc<DeviceComm>>,
}

impl Retired {
    /// Whether there is one, and the library can leave ranks out that do not call.
    pub fn can_shrink(&self) -> bool {
        self.communicator.is_some() && self.engine.capabilities().shrink
    }

    /// Makes the communicator of `child`, a group of all ranks but `excluded`; all ranks of that group call it at once.
    /// What is under way in the old one is aborted.
    pub fn shrink(&self, child: &DeviceEngine, excluded: &[u32], timeout: Duration) -> Result<()> {
        let own = self.communicator.as_ref().ok_or_else(|| Error::Bug("sagellm: nothing to shrink".into()))?;
        let made = child.named("all", self.device, |name, _| {
            own.communicator.shrink(excluded, patience(timeout), child.joining(&name), &name)
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

impl DeviceComm {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn library(&self) -> &dyn Communicator {
        &*self.communicator
    }

    /// How it stands. Never waits.
    pub(super) fn state(&self) -> Library {
        if self.ended.load(Ordering::Acquire) {
            return Library::Ended { drained: self.drained.load(Ordering::Relaxed) };
        }
        Library::Lives(self.communicator.poll())
    }

    fn part(
        &self,
        engine: &DeviceEngine,
        members: &[u32],
        timeout: Duration,
        (name, algorithm): (String, String),
    ) -> Result<Option<Arc<dyn Communicator>>> {
        // No other group that is made by this call has the same first member, and no earlier call the same turn.
        let turn = self.parts.fetch_add(1, Ordering::Relaxed);
        let first = members.iter().min().copied().unwrap_or(0);
        let number = turn.wrapping_mul(self.communicator.ranks()).wrapping_add(first) & (i32::MAX as u32);
        let (members, deadline, go_on) = (members.to_vec(), patience(timeout), engine.joining(&name));
        self.communicator.split(&Split { members, number, deadline, go_on, name, algorithm })
    }

    /// Ends it although operations hang, unless it has ended.
    fn abort(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.end();
        }
    }

    fn end(&self) {
        if let Err(error) = self.communicator.abort() {
            log::warn!("{}: {error}", self.name);
        }
    }

    /// Ends it together with its other ranks, when its operations are done. They are waited for as long as they live, at
    /// most until the deadline, and no longer than `ALONE` once one is gone; what has not ended then is left behind on its
    /// thread. False where a signal handler raised meanwhile.
    fn close(&self, engine: &DeviceEngine, deadline: Duration) -> bool {
        const ALONE: Duration = Duration::from_secs(5);
        const LOOK: Duration = Duration::from_millis(50);
        let communicator = Arc::clone(&self.communicator);
        let (done, result) = mpsc::channel();
        let started = watch::spawn("sagellm-close", move || {
            let _ = done.send(communicator.close(deadline)); // nobody there: it was left behind
        });
        if let Err(error) = started {
            log::warn!("{}: no thread to end it: {error}", self.name);
            return true;
        }
        let group = &engine.group;
        let begin = Instant::now();
        let mut patience = deadline;
        loop {
            match result.recv_timeout(LOOK.min(patience)) {
                Ok(Err(error)) => log::info!("{}: {error}", self.name),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if group.interrupted() {
                        return false;
                    }
                    let waited = begin.elapsed();
                    if group.fault().is_some() || !group.dead_ranks().is_empty() {
                        patience = patience.min(waited + ALONE);
                    }
                    if waited < patience {
                        continue;
                    }
                    log::info!("{}: its end was not waited for any longer: a rank is gone, or late", self.name);
                }
                Ok(Ok(())) | Err(mpsc::RecvTimeoutError::Disconnected) => {}
            }
            return true;
        }
    }
}
