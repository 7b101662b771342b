//! Keeps the communicators of a group, by device and ranks. `making` makes them; `lifetime` splits, shrinks and ends
//! them. The thread that ends a communicator first sets `ended`; from then on no new call uses the communicator.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use super::communicator::{Communicator, GoOn, Split, Steering};
use super::first_use::Connected;
use super::group::DeviceGroup;
use super::lock;
use super::pairs::Pairs;
use super::watchdog::Library;
use crate::error::Result;
use crate::host::Counting;
use crate::os::watch;

/// Which ranks a communicator connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ranks {
    All,
    /// Messages between two ranks, in one direction.
    OneDirection {
        from: u32,
        to: u32,
    },
}

impl Ranks {
    pub fn count(self, size: usize) -> usize {
        if self == Ranks::All { size } else { 2 }
    }

    pub(super) fn contain(self, rank: usize) -> bool {
        match self {
            Ranks::All => true,
            Ranks::OneDirection { from, to } => rank == from as usize || rank == to as usize,
        }
    }

    /// Returns a text that is equal on all ranks of the communicator. Each communicator of a group has a different
    /// text.
    pub(super) fn words(self) -> String {
        match self {
            Ranks::All => "all".to_string(),
            Ranks::OneDirection { from, to } => format!("{from}-{to}"),
        }
    }
}

/// How the ranks of a communicator reach each other before it exists. The CPU side of the group implements this.
pub trait Exchange {
    /// Sends the id from the first of the communicator's ranks to the other ranks. The error at the deadline names the
    /// missing rank.
    fn share(&self, id: &mut [u8], ranks: Ranks) -> Result<()>;
    /// The store in which the ranks met.
    fn store(&self) -> Arc<dyn Counting + Send + Sync>;
}

/// One communicator of a group.
pub struct DeviceComm {
    pub(super) communicator: Arc<dyn Communicator>,
    pub(super) name: String,
    /// How many times this communicator was split. All its ranks split it together, so the number is equal on all of
    /// them.
    pub(super) parts: AtomicU32,
    /// Set once, by the thread that ends the communicator (release). Every other thread reads it (acquire), and then
    /// sees `drained`.
    pub(super) ended: AtomicBool,
    /// No operation was pending when the communicator ended, so if the device has passed a call, the call succeeded.
    /// Written before `ended`.
    pub(super) drained: AtomicBool,
    pub(super) connected: Connected,
    /// As long as this object lives, the library asks our rules for its algorithms. `None` if the library does not ask.
    pub(super) _steering: Option<Box<dyn Steering>>,
}

/// The communicators of one group.
#[derive(Default)]
pub(super) struct Communicators {
    pub(super) known: Mutex<BTreeMap<(i32, Ranks), Arc<DeviceComm>>>,
    /// Locked while a communicator is made. `None` until the first communicator for messages is made.
    pub(super) making: Mutex<Option<Pairs>>,
    /// How many communicators of each kind ("all", "0-1") were made so far. The number becomes part of a communicator's
    /// name.
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

    /// Returns the ranks with which this rank has communicators for both directions on a device.
    pub fn partners(&self, device: i32, me: u32) -> Vec<u32> {
        let known = lock(&self.known);
        let both = |(on, ranks): &(i32, Ranks)| match *ranks {
            Ranks::OneDirection { from, to } if *on == device && from == me => {
                known.contains_key(&(device, Ranks::OneDirection { from: to, to: me })).then_some(to)
            }
            _ => None,
        };
        known.keys().filter_map(both).collect()
    }
}

/// The time within which a communicator must be made: the timeout, or one year if there is none (zero).
pub(super) fn patience(timeout: Duration) -> Duration {
    if timeout.is_zero() { Duration::from_secs(365 * 24 * 3600) } else { timeout }
}

impl DeviceComm {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn library(&self) -> &dyn Communicator {
        &*self.communicator
    }

    /// Whether the communicator lives, and if so, the error that the library reports. Never waits.
    pub(super) fn state(&self) -> Library {
        if self.ended.load(Ordering::Acquire) {
            return Library::Ended { drained: self.drained.load(Ordering::Relaxed) };
        }
        Library::Lives(self.communicator.poll())
    }

    /// Makes a communicator of some of the ranks; `None` on a rank that is not a member.
    pub(super) fn part(
        &self,
        members: &[u32],
        deadline: Duration,
        go_on: GoOn,
        (name, algorithm): (String, String),
    ) -> Result<Option<Arc<dyn Communicator>>> {
        // The number is unique: groups that one call makes differ in their lowest member, and different calls differ in
        // `turn`.
        let turn = self.parts.fetch_add(1, Ordering::Relaxed);
        let first = members.iter().min().copied().unwrap_or(0);
        let number = turn.wrapping_mul(self.communicator.ranks()).wrapping_add(first) & (i32::MAX as u32);
        let members = members.to_vec();
        self.communicator.split(&Split { members, number, deadline, go_on, name, algorithm })
    }

    /// Ends the communicator even while operations hang. Does nothing if it has already ended.
    pub(super) fn abort(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.end();
        }
    }

    pub(super) fn end(&self) {
        if let Err(error) = self.communicator.abort() {
            log::warn!("{}: {error}", self.name);
        }
    }

    /// Ends the communicator together with its other ranks, when its operations are complete. Waits at most until the
    /// deadline, or at most `ALONE` if a rank is gone or the group has failed; after that a background thread continues
    /// to wait. Returns false if a signal handler raised an exception meanwhile.
    pub(super) fn close(&self, group: &dyn DeviceGroup, deadline: Duration) -> bool {
        const ALONE: Duration = Duration::from_secs(5);
        const LOOK: Duration = Duration::from_millis(50);
        let communicator = Arc::clone(&self.communicator);
        let (done, result) = mpsc::channel();
        let started = watch::spawn("sagellm-close", move || {
            let _ = done.send(communicator.close(deadline)); // the receiver is gone if the caller no longer waits
        });
        if let Err(error) = started {
            log::warn!("{}: no thread to end it: {error}", self.name);
            return true;
        }
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
