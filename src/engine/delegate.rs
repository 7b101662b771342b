//! The engine of a group that another backend serves: the core only numbers and records the operations.

use std::sync::Arc;

use super::{Control, Ended, Engine};
use crate::error::{Error, Result};
use crate::op::Op;
use crate::reduce::Kernel;
use crate::select::explain::Explanation;
use crate::select::{GroupShape, OpDesc, Policy, explain};

pub struct Delegate {
    name: String,
    reason: String,
    ranks: usize,
    policy: Arc<Policy>,
}

impl Delegate {
    /// `name` is the backend that serves the group, `reason` says why none of our engines does.
    pub fn new(name: String, reason: String, ranks: usize, policy: Arc<Policy>) -> Delegate {
        Delegate { name, reason, ranks, policy }
    }
}

/// The other backend handles the peers.
struct NoPeers;

impl Control for NoPeers {}

impl Engine for Delegate {
    fn control(&self) -> Arc<dyn Control> {
        Arc::new(NoPeers)
    }

    fn describe(&self) -> String {
        format!("served by {}: {}", self.name, self.reason)
    }

    fn delegate_reason(&self) -> Option<&str> {
        Some(&self.reason)
    }

    fn submit(&mut self, _: Arc<Op>, _: Option<Kernel>, _: &mut Ended) -> Result<()> {
        Err(Error::bug("sagellm: an operation reached the engine of a group that another backend serves"))
    }

    fn explain(&self, desc: OpDesc, _batched: bool) -> Explanation {
        explain::delegated(desc, &GroupShape::without_memory(self.ranks), &self.policy, (&self.name, &self.reason))
    }
}

/// The cause of a delegate's error, read from its text, because gloo has no error codes. No other code parses these
/// texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Says {
    TimedOut,
    /// A connection broke.
    LostAPeer,
    Other,
}

impl Says {
    pub fn of(words: &str) -> Says {
        let first = words.lines().next().unwrap_or_default().to_lowercase();
        let has = |signs: &[&str]| signs.iter().any(|sign| first.contains(sign));
        match () {
            () if has(&["timed out"]) => Says::TimedOut,
            () if has(&["connection", "broken pipe", "by peer"]) => Says::LostAPeer,
            () => Says::Other,
        }
    }
}
