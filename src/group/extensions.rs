//! Time that is added to the timeouts of new operations for a while (c10d's ephemeral timeouts): to all that are issued from
//! the addition on until the first of them has ended, which owns it. Several additions add up, each with an owner.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{CoreOp, Group, Inner};

/// The operation whose end ends an addition.
pub(super) enum Owner {
    Op(Weak<CoreOp>),
    /// On a device, by its id in `Externals`.
    External(u64),
}

/// Used under the group's lock.
#[derive(Default)]
pub(super) struct Extensions {
    /// What was added since the last operation was issued.
    unowned: Duration,
    owned: Vec<(Owner, Duration)>,
}

impl Inner {
    /// What is added to the timeout of an operation that is issued now. Zero is no timeout, and stays that.
    fn extension(&mut self) -> Duration {
        let Inner { extensions, external, .. } = self;
        extensions.owned.retain(|(owner, _)| match owner {
            Owner::Op(op) => op.upgrade().is_some_and(|op| !op.is_done()),
            Owner::External(id) => external.get(*id).is_some(),
        });
        extensions.owned.iter().map(|(_, more)| *more).sum::<Duration>() + extensions.unowned
    }

    /// The operation that was issued first after an addition owns it.
    pub(super) fn own_extension(&mut self, owner: Owner) {
        let unowned = std::mem::take(&mut self.extensions.unowned);
        if !unowned.is_zero() {
            self.extensions.owned.push((owner, unowned));
        }
    }
}

impl Group {
    /// Adds to the timeouts of operations that are issued from now on, until the first of them has ended.
    pub fn add_ephemeral_timeout(&self, more: Duration) {
        self.lock().extensions.unowned += more;
        self.extends.store(true, Ordering::Relaxed);
    }

    /// The timeout of an operation that is issued now, with what is added to it; `extends` was true.
    #[cold]
    pub(super) fn extended(&self, inner: &mut Inner, timeout: Duration) -> Duration {
        let more = inner.extension();
        self.extends.store(!more.is_zero(), Ordering::Relaxed);
        if timeout.is_zero() { timeout } else { timeout.saturating_add(more) }
    }
}
