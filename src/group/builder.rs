//! How a group begins: its ranks meet, and the engine that serves them is built. Groups whose ranks are threads of one
//! process, for tests and tools, are built here, too.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use super::{Engine, Group, Inner, Peer, explain};
use crate::config;
use crate::config::{Config, Settings};
use crate::engine::local;
use crate::engine::shm::Shm;
use crate::engine::shm::memory::area::Area;
use crate::engine::shm::memory::layout::{Layout, MAX_RANKS, SLOT_BYTES};
use crate::error::{Error, Result};
use crate::host::{Host, Store};
use crate::os::watch;
use crate::progress::domain::{Domain, Driven, Patience};
use crate::rendezvous;
use crate::rendezvous::Met;
use crate::select;
use crate::select::Policy;
use crate::stats::Stats;

/// What the ranks of a group know alike when it is built.
pub(super) struct Agreed {
    pub(super) cores: usize,
    pub(super) policy: Policy,
    /// As `Group::domain` and `Group::id`.
    pub(super) domain: u64,
    pub(super) id: [u8; 16],
}

impl Agreed {
    /// Of ranks that have no memory in common.
    pub(super) fn on(policy: Policy) -> Agreed {
        Agreed { cores: 1, policy, domain: 0, id: [0; 16] }
    }
}

pub(super) fn local_config(rank: usize, size: usize, timeout: Duration) -> Config {
    Config {
        rank,
        size,
        timeout,
        name: "local".to_string(),
        delegate_reason: None,
        delegate: Config::LINK.to_string(),
        algorithm: String::new(),
        policy: String::new(),
        settings: Settings::default(),
    }
}

pub(super) struct NoHost;
impl Host for NoHost {
    fn interrupted(&self) -> bool {
        false
    }
}

impl Group {
    /// Meets the other ranks and builds the engine that serves them. Nothing is silently slower: rank 0 warns of a delegate
    /// for which nobody asked.
    pub fn connect(config: Config, store: &dyn Store, host: Arc<dyn Host>) -> Result<Arc<Group>> {
        let group = Group::meet(config, store, host)?;
        let config = &group.config;
        if config.rank == 0
            && config.delegate_reason.is_none()
            && let Some(reason) = group.delegate_reason()
        {
            log::warn!("group '{}' of {} ranks is served by a delegate: {reason}", config.name, config.size);
        }
        Ok(group)
    }

    /// As `connect`, for a caller who says himself what a delegate would mean.
    pub(super) fn meet(mut config: Config, store: &dyn Store, host: Arc<dyn Host>) -> Result<Arc<Group>> {
        watch::install();
        if watch::forked() {
            return Err(Error::Invalid(
                "sagellm: this process was forked from one that uses sagellm, whose threads it does not have. Start it \
                 with the 'spawn' or 'forkserver' method, or use sagellm only after the fork"
                    .to_string(),
            ));
        }
        if config.size == 0 || config.rank >= config.size {
            return Err(Error::Invalid(format!("sagellm: rank {} of a group of {} ranks", config.rank, config.size)));
        }
        // The user's rules are refused here, before anything is sent.
        let own = select::file::decide(&config.algorithm, config.size, SLOT_BYTES, config.rank == 0)?;
        if config.size == 1 {
            let engine = config.delegate_reason.clone().map_or(Engine::Solo, Engine::Delegate);
            return Ok(Group::build(config, engine, None, Vec::new(), Agreed::on(own), host));
        }
        if config.size > MAX_RANKS {
            let reason = too_many(config.size);
            return Ok(Group::build(config, Engine::Delegate(reason), None, Vec::new(), Agreed::on(own), host));
        }
        config.policy = own.text();
        let ranks = config.size;
        let fitting = |headroom: usize| layout_within(ranks, headroom).map(|layout| layout.total());
        match rendezvous::meet(&config, store, &*host, &fitting)? {
            rendezvous::Outcome::Delegate { reason, id } => {
                let agreed = Agreed { id, ..Agreed::on(own) };
                Ok(Group::build(config, Engine::Delegate(reason), None, Vec::new(), agreed, host))
            }
            rendezvous::Outcome::Shared(met) => Group::share(config, met, &own, host),
            rendezvous::Outcome::Hosts { reason, id, .. } if config.delegate != Config::LINK => {
                let agreed = Agreed { id, ..Agreed::on(own) };
                Ok(Group::build(config, Engine::Delegate(reason), None, Vec::new(), agreed, host))
            }
            rendezvous::Outcome::Hosts { hosts, id, reason, policy } => {
                let policy = explain::agreed(&config, &own, &policy)?;
                Group::span(config, &hosts, id, (reason, policy), store, host)
            }
        }
    }

    fn share(config: Config, met: Met, own: &Policy, host: Arc<dyn Host>) -> Result<Arc<Group>> {
        let Met { segment, company, local_cores, policy, id } = met;
        let total = segment.len();
        let layout = Layout::of_total(config.size, total)
            .ok_or_else(|| Error::Bug(format!("sagellm: no layout of {} ranks has {total} bytes", config.size)))?;
        let area = Arc::new(Area::new(Arc::new(segment), layout, config.rank));
        // The others have a group by now, and no connection of its own tells them that this rank has not.
        let policy = explain::agreed(&config, own, &policy).inspect_err(|_| area.leave())?;
        let peers = (0..config.size).map(|rank| company.peer(rank).clone());
        let list = peers.map(|peer| Peer { pid: peer.pid, host: peer.host, dead: AtomicBool::new(false) }).collect();
        let fusion = config.settings.fusion;
        let shm = Shm::new(Arc::clone(&area), local_cores, fusion, Arc::new(policy.clone()));
        let agreed = Agreed { cores: local_cores, policy, domain: 0, id };
        let group = Group::build(config, Engine::Shm(Box::new(shm)), Some(area), list, agreed, host);
        let weak = Arc::downgrade(&group);
        let following = company.follow(move |rank, _reason| {
            if let Some(group) = weak.upgrade() {
                group.peer_ended(rank);
            }
        });
        *group.following.lock().unwrap() = Some(following);
        Ok(group)
    }

    /// `ranks` groups of one process, one for each rank that is a thread.
    pub fn local(ranks: usize, timeout: Duration) -> Result<Vec<Arc<Group>>> {
        Ok(Group::over(local::areas(ranks)?, timeout))
    }

    /// As `local`, over areas that the caller made, and may look into.
    pub fn over(areas: Vec<Arc<Area>>, timeout: Duration) -> Vec<Arc<Group>> {
        let domains: Vec<u64> = (1..=areas.len() as u64).collect();
        Group::over_in(areas, &domains, timeout, |_| Policy::default())
    }

    /// As `over`, with a policy for every rank, which must be the same one unless a test wants to see what happens.
    pub fn over_with(areas: Vec<Arc<Area>>, timeout: Duration, policy: impl Fn(usize) -> Policy) -> Vec<Arc<Group>> {
        let domains: Vec<u64> = (1..=areas.len() as u64).collect();
        Group::over_in(areas, &domains, timeout, policy)
    }

    /// As `over_with`, each in a domain that is given.
    pub(super) fn over_in(
        areas: Vec<Arc<Area>>,
        domains: &[u64],
        timeout: Duration,
        policy: impl Fn(usize) -> Policy,
    ) -> Vec<Arc<Group>> {
        let (ranks, cores) = (areas.len(), crate::os::topology::usable_cores());
        let groups = areas.into_iter().enumerate().map(|(rank, area)| {
            let (config, policy) = (local_config(rank, ranks, timeout), policy(rank));
            let peers = (0..ranks)
                .map(|_| Peer { pid: 0, host: "this process".to_string(), dead: AtomicBool::new(false) })
                .collect();
            let shm = || Shm::new(Arc::clone(&area), cores, true, Arc::new(policy.clone()));
            let engine = if ranks == 1 { Engine::Solo } else { Engine::Shm(Box::new(shm())) };
            // A rank's groups belong together, as they would in a process of its own.
            let agreed = Agreed { cores, domain: domains[rank], ..Agreed::on(policy) };
            Group::build(config, engine, Some(area), peers, agreed, Arc::new(NoHost))
        });
        groups.collect()
    }

    pub(super) fn build(
        config: Config,
        engine: Engine,
        area: Option<Arc<Area>>,
        peers: Vec<Peer>,
        Agreed { cores, policy, domain, id }: Agreed,
        host: Arc<dyn Host>,
    ) -> Arc<Group> {
        let ranks = config.size;
        let group = Arc::new_cyclic(|this| Group {
            domain: Domain::numbered(domain),
            id,
            generation: watch::generation(),
            patience: if matches!(engine, Engine::Hosts(_)) {
                Patience::none()
            } else {
                Patience::for_ranks(ranks, cores)
            },
            area,
            policy: Arc::new(policy),
            cores,
            lanes: OnceLock::new(),
            host,
            peers,
            any_dead: AtomicBool::new(false),
            inner: Mutex::new(Inner {
                engine,
                number: 0,
                sent: vec![0; ranks],
                received: vec![0; ranks],
                stats: Stats::new(ranks, config::ring()),
            }),
            pending: AtomicUsize::new(0),
            last_number: AtomicU64::new(0),
            device_number: AtomicU64::new(0),
            timeout_ms: AtomicU64::new(config.timeout.as_millis() as u64),
            fault: OnceLock::new(),
            members: OnceLock::new(),
            closed: AtomicBool::new(false),
            monitored: AtomicU64::new(0),
            following: Mutex::new(None),
            this: Weak::clone(this),
            config,
        });
        let driven: Arc<dyn Driven> = Arc::<Group>::clone(&group);
        group.domain.register(&driven);
        log::info!("{}", group.describe());
        group
    }
}

/// The layout of a group's segment where `headroom` bytes of memory are left, or why there is none.
pub(super) fn layout_within(ranks: usize, headroom: usize) -> std::result::Result<Layout, String> {
    if ranks > MAX_RANKS {
        return Err(too_many(ranks));
    }
    Layout::within(ranks, headroom).ok_or_else(|| {
        format!(
            "{ranks} ranks need {} MiB of shared memory at least, and may use a quarter of the {} MiB of memory that are left",
            Layout::smallest(ranks).div_ceil(1 << 20),
            headroom >> 20
        )
    })
}

fn too_many(ranks: usize) -> String {
    format!("{ranks} ranks; the shared-memory engine serves up to {MAX_RANKS}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_every_number_of_ranks_or_the_true_reason() {
        for ranks in 2..=MAX_RANKS {
            assert_eq!(layout_within(ranks, usize::MAX).map(|layout| layout.ranks), Ok(ranks));
        }
        let reason = |ranks: usize, mebibytes: usize| layout_within(ranks, mebibytes << 20).unwrap_err();
        assert_eq!(reason(MAX_RANKS + 1, 1 << 40), "257 ranks; the shared-memory engine serves up to 256");
        assert_eq!(
            reason(64, 100),
            "64 ranks need 29 MiB of shared memory at least, and may use a quarter of the 100 MiB of memory that are left"
        );
        assert!(layout_within(64, (29 * 4) << 20).is_ok());
    }
}
