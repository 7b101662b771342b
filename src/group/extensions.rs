//! Timeouts of operations that name none, and time that is added to the timeouts of new operations for a while (c10d's ephemeral
//! timeouts): to all that are issued from the addition on until the first of them has ended, which owns it. Several additions add
//! up, each with an owner.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::CoreOp;

/// What any thread may read without the group's lock.
pub(super) struct Timeouts {
    /// Written and read by any thread (relaxed: nothing else is read by it).
    milliseconds: AtomicU64,
    /// Timeouts are extended for a while. Written under the group's lock, read without it as a hint (relaxed): an operation that
    /// is issued while another thread extends them may go either way.
    extends: AtomicBool,
}

impl Timeouts {
    pub fn new(timeout: Duration) -> Timeouts {
        Timeouts { milliseconds: AtomicU64::new(timeout.as_millis() as u64), extends: AtomicBool::new(false) }
    }

    /// The timeout of operations that name none.
    pub fn milliseconds(&self) -> u64 {
        self.milliseconds.load(Ordering::Relaxed)
    }

    pub fn usual(&self) -> Duration {
        Duration::from_millis(self.milliseconds())
    }

    pub fn set(&self, timeout: Duration) {
        self.milliseconds.store(timeout.as_millis() as u64, Ordering::Relaxed);
    }

    pub fn extends(&self) -> bool {
        self.extends.load(Ordering::Relaxed)
    }

    /// Adds to the timeouts of operations that are issued from now on, until the first of them has ended.
    pub fn extend(&self, extensions: &mut Extensions, more: Duration) {
        extensions.unowned += more;
        self.extends.store(true, Ordering::Relaxed);
    }

    /// The timeout of an operation that is issued now, with what is added to it; `extends` was true. Zero is no timeout, and
    /// stays that. `is_pending`: whether an operation on a device has not ended.
    #[cold]
    pub fn extended(
        &self,
        extensions: &mut Extensions,
        is_pending: impl Fn(u64) -> bool,
        timeout: Duration,
    ) -> Duration {
        let more = extensions.sum(is_pending);
        self.extends.store(!more.is_zero(), Ordering::Relaxed);
        if timeout.is_zero() { timeout } else { timeout.saturating_add(more) }
    }
}

/// The operation whose end ends an addition.
pub(super) enum Owner {
    Op(Weak<CoreOp>),
    /// On a device, by the id of its record.
    External(u64),
}

/// Used under the group's lock.
#[derive(Default)]
pub(super) struct Extensions {
    /// What was added since the last operation was issued.
    unowned: Duration,
    owned: Vec<(Owner, Duration)>,
}

impl Extensions {
    /// What is added to the timeout of an operation that is issued now.
    fn sum(&mut self, is_pending: impl Fn(u64) -> bool) -> Duration {
        self.owned.retain(|(owner, _)| match owner {
            Owner::Op(op) => op.upgrade().is_some_and(|op| !op.is_done()),
            Owner::External(id) => is_pending(*id),
        });
        self.owned.iter().map(|(_, more)| *more).sum::<Duration>() + self.unowned
    }

    /// The operation that was issued first after an addition owns it.
    pub fn own(&mut self, owner: Owner) {
        let unowned = std::mem::take(&mut self.unowned);
        if !unowned.is_zero() {
            self.owned.push((owner, unowned));
        }
    }
}
