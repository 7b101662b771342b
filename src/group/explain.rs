//! What a group and an operation say about the ways they choose.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Engine, Group, Op, layout_within};
use crate::config::Config;
use crate::engine::shm::layout::{MAX_RANKS, SLOT_BYTES};
use crate::error::{Error, Result};
use crate::select::explain::{self, Explanation};
use crate::select::{self, Asked, Choice, Class, Policy, Shape};
use crate::topology;
use crate::types::{Dtype, Kind};

/// Rank 0's policy as it came, which decides for all. A rank that was told other rules says so once.
pub(super) fn agreed(config: &Config, own: &Policy, sent: &str) -> Result<Policy> {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let policy =
        Policy::parse(sent).map_err(|what| Error::System(format!("sagellm: group '{}': {what}", config.name)))?;
    if policy.rules != own.rules && !TOLD.swap(true, Ordering::Relaxed) {
        log::warn!(
            "rank {} of group '{}' has the rules \"{}\" (option algorithm, SAGELLM_ALGORITHM) and rank 0 has \"{}\": rank 0's \
             decide for the group. Give every rank the same",
            config.rank,
            config.name,
            own.rules,
            policy.rules
        );
    }
    Ok(policy)
}

/// Shape and policy of a group of `ranks` ranks on this host, were it made now by a rank 0 here.
fn without_group(ranks: usize, algorithm: &str) -> Result<(Shape, Policy)> {
    let policy = select::file::decide(algorithm, ranks, SLOT_BYTES, true)?;
    let cores = topology::usable_cores();
    if ranks == 1 {
        return Ok((Shape { ranks, hosts: 1, cores, slot_bytes: 0, stage_bytes: 0 }, policy));
    }
    let headroom = topology::memory_headroom().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
    match layout_within(ranks, headroom) {
        Some(layout) => Ok((layout.shape(cores), policy)),
        None => Err(Error::Invalid(format!(
            "sagellm: {ranks} ranks do not fit into shared memory here: 1 to {MAX_RANKS} do, as far as memory is left"
        ))),
    }
}

/// As `Group::explain`, for such a group.
pub fn explain_without_group(
    kind: Kind,
    bytes: u64,
    dtype: Dtype,
    ranks: usize,
    algorithm: &str,
) -> Result<Explanation> {
    let (shape, policy) = without_group(ranks, algorithm)?;
    let asked = Asked { kind, bytes, class: Class::of(kind, dtype) }.normal();
    Ok(explain::explain(asked, &shape, &policy))
}

/// All choices of such a group, as lines.
pub fn table_without_group(ranks: usize, algorithm: &str) -> Result<String> {
    let (shape, policy) = without_group(ranks, algorithm)?;
    Ok(explain::table_lines(&shape, &policy))
}

impl Group {
    /// How an operation would travel. `bytes` are those that one rank gives: its block of an all_gather or gather, the
    /// whole input of a scatter or reduce_scatter.
    pub fn explain(&self, kind: Kind, bytes: u64, dtype: Dtype) -> Explanation {
        self.explain_asked(Asked { kind, bytes, class: Class::of(kind, dtype) }.normal())
    }

    fn explain_asked(&self, asked: Asked) -> Explanation {
        match &self.lock().engine {
            Engine::Hosts(_) => match self.lanes.get() {
                Some(lanes) if !asked.kind.is_p2p() => lanes.explain(asked, &self.shape()),
                _ => {
                    let why = "the ranks live on several hosts, where messages travel by the delegate";
                    explain::delegated(asked, &self.shape(), &self.policy, why)
                }
            },
            Engine::Delegate(why) => explain::delegated(asked, &self.shape(), &self.policy, why),
            _ => explain::explain(asked, &self.shape(), &self.policy),
        }
    }

    fn shape(&self) -> Shape {
        match &self.area {
            Some(area) => area.layout.shape(self.cores),
            None => Shape { ranks: self.config.size, hosts: 1, cores: self.cores, slot_bytes: 0, stage_bytes: 0 },
        }
    }
}

impl Op {
    /// How it travels or travelled, worked out anew from what it asked for.
    pub fn explain(&self) -> Explanation {
        let found = self.group.explain_asked(Asked::of(&self.core.request, self.group.config.size));
        Explanation { sequence: self.core.number, ..found }
    }

    /// What was recorded when it was issued.
    pub fn choice(&self) -> Choice {
        Choice::from_code(self.core.choice())
    }
}
