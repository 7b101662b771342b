//! A group that another backend serves: the core only numbers and records its operations.

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
    /// `name`: the backend that serves the group; `reason`: why none of our engines does.
    pub fn new(name: String, reason: String, ranks: usize, policy: Arc<Policy>) -> Delegate {
        Delegate { name, reason, ranks, policy }
    }
}

/// The other backend deals with peers.
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
        Err(Error::Bug("sagellm: an operation reached the engine of a group that another backend serves".to_string()))
    }

    fn explain(&self, desc: OpDesc, _batched: bool) -> Explanation {
        explain::delegated(desc, &GroupShape::without_memory(self.ranks), &self.policy, (&self.name, &self.reason))
    }
}
