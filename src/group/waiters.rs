//! How threads wait for a group's operations: how they spin, and which threads copy and combine meanwhile.

use std::time::Duration;

use crate::engine::Control;
use crate::os::yielding::Eagerness;
use crate::progress::domain::SpinPolicy;
use crate::threads;
use crate::threads::Helpers;

pub(super) struct Waiters {
    pub spin_policy: SpinPolicy,
    /// The threads that copy and combine for a thread that waits for this group, or for the progress thread. If `None`,
    /// each thread does this alone.
    pub helpers: Option<Helpers>,
    /// Cached `Control::has_threads`: threads of the engine run its operations.
    pub has_threads: bool,
    /// Decides for how long a wait for messages from other hosts yields.
    pub eagerness: Eagerness,
}

impl Waiters {
    /// The longest time for which such a wait yields.
    const YIELDS: Duration = Duration::from_micros(200);

    /// Returns how a thread spins that begins to wait now.
    #[inline]
    pub fn spins(&self, control: &dyn Control) -> SpinPolicy {
        if self.has_threads && control.polls() {
            return SpinPolicy::yielding(self.eagerness.budget(Self::YIELDS));
        }
        self.spin_policy
    }

    /// Records how long a wait for a message took.
    pub fn waited(&self, took: Duration) {
        self.eagerness.waited(took, Self::YIELDS);
    }

    pub fn describe(&self, control: &dyn Control) -> String {
        let spins = control.wake_address().map(|_| format!(", {}", self.spin_policy));
        let helps = self.helpers.as_ref().map(|helpers| {
            let (waiting, beside) = (helpers.threads(), helpers.beside_the_program().count());
            let beside = if beside > 1 { format!(" ({beside} beside the program)") } else { String::new() };
            format!(", {waiting} threads copy and combine from {} KiB on{beside}", (2 * threads::LEAST_BYTES) >> 10)
        });
        spins.unwrap_or_default() + &helps.unwrap_or_default()
    }
}
