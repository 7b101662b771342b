//! Default timeouts of operations, and c10d's ephemeral timeouts. An ephemeral timeout is added to the timeouts of all
//! operations that are issued after the addition, until the first of them has ended. That first operation owns the
//! addition. Several additions accumulate, each with its own owner.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::CoreOp;

/// The part that any thread may read without the group's lock.
pub(super) struct Timeouts {
    /// Default timeout. Written and read by any thread. Relaxed, because it guards no other data.
    milliseconds: AtomicU64,
    /// Whether an ephemeral timeout may apply. Written under the group's lock, read without it as a hint (relaxed). An
    /// operation that is issued while another thread adds an ephemeral timeout may be extended or not.
    extends: AtomicBool,
}

impl Timeouts {
    pub fn new(timeout: Duration) -> Timeouts {
        Timeouts { milliseconds: AtomicU64::new(timeout.as_millis() as u64), extends: AtomicBool::new(false) }
    }

    /// The timeout of operations that name no timeout.
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

    /// Adds `more` to the timeouts of operations issued from now on, until the first of these operations has ended.
    pub fn extend(&self, extensions: &mut Extensions, more: Duration) {
        extensions.unowned += more;
        self.extends.store(true, Ordering::Relaxed);
    }

    /// Returns the timeout of an operation that is issued now, including all ephemeral timeouts. Called only if
    /// `extends` returned true. A zero timeout means no timeout and stays zero. `is_pending`: whether the device
    /// operation with this record id is pending.
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

/// The operation that owns an ephemeral timeout, which applies until this operation has ended.
pub(super) enum Owner {
    Op(Weak<CoreOp>),
    /// An operation on a device, by the id of its record.
    External(u64),
}

/// The ephemeral timeouts that apply now. Protected by the group's lock.
#[derive(Default)]
pub(super) struct Extensions {
    /// Sum of the ephemeral timeouts added since the last operation was issued. The next operation will own them.
    unowned: Duration,
    owned: Vec<(Owner, Duration)>,
}

impl Extensions {
    /// Returns the sum of the ephemeral timeouts that apply to an operation issued now. Drops an ephemeral timeout if
    /// its owner has ended.
    fn sum(&mut self, is_pending: impl Fn(u64) -> bool) -> Duration {
        self.owned.retain(|(owner, _)| match owner {
            Owner::Op(op) => op.upgrade().is_some_and(|op| !op.is_done()),
            Owner::External(id) => is_pending(*id),
        });
        self.owned.iter().map(|(_, more)| *more).sum::<Duration>() + self.unowned
    }

    /// Makes an operation the owner of the ephemeral timeouts that have no owner, because it is the first operation
    /// issued after they were added.
    pub fn own(&mut self, owner: Owner) {
        let unowned = std::mem::take(&mut self.unowned);
        if !unowned.is_zero() {
            self.owned.push((owner, unowned));
        }
    }
}
