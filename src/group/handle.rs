//! An operation as its caller holds it, together with the group in which the caller waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{CoreOp, Group};
use crate::error::{Error, Result, contained};
use crate::progress::driver;
use crate::progress::driver::Outcome;

pub struct Op {
    pub(super) core: Arc<CoreOp>,
    pub(super) group: Arc<Group>,
}

impl Op {
    pub fn is_done(&self) -> bool {
        self.core.is_done()
    }

    /// Waits until the operation ends or `timeout` passes. After a timeout the operation is still pending.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        if self.core.is_done() {
            return self.core.outcome();
        }
        let group = &self.group;
        group.not_forked()?;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let waited = contained(|| Ok(driver::wait_until(&**group, &*group.host, until, || self.core.is_done())));
        match waited.inspect_err(|bug| group.poison(bug.clone()))? {
            Outcome::Done => self.core.outcome(),
            Outcome::Elapsed => Err(Error::wait_elapsed(format!(
                "sagellm: wait({:.3} s) elapsed before {} number {} of group '{}' ended on rank {}; it is still running",
                timeout.unwrap_or_default().as_secs_f64(),
                self.core.request.kind,
                self.core.number,
                group.config.name,
                group.config.rank
            ))),
            Outcome::Interrupted => Err(Error::interrupted("sagellm: the wait was interrupted")),
        }
    }

    pub fn error(&self) -> Option<&Error> {
        self.core.error()
    }
    pub fn number(&self) -> u64 {
        self.core.number
    }
    pub fn source(&self) -> i32 {
        self.core.source()
    }
    pub fn duration(&self) -> Duration {
        self.core.duration()
    }
    pub fn timeout(&self) -> Duration {
        self.core.timeout
    }
}
