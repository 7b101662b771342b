//! Builds a complete group from the decision of its ranks. Only this file and `local` know the engines by name.

use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, Weak};

use super::counters::Counters;
use super::extensions::{Extensions, Timeouts};
use super::external::Externals;
use super::faults::{Faults, Peer};
use super::lanes::LaneReport;
use super::launches::Launches;
use super::role::Role;
use super::ties::Ties;
use super::waiters::Waiters;
use super::{Group, Inner};
use crate::config;
use crate::config::Config;
use crate::engine::delegate::Delegate;
use crate::engine::multihost::host_map::HostMap;
use crate::engine::multihost::link::Link;
use crate::engine::multihost::{HostGroup, MultiHost, Opened, wire};
use crate::engine::shm::Shm;
use crate::engine::solo::Solo;
use crate::engine::{Engine, Report};
use crate::error::{Error, Result};
use crate::hang;
use crate::hang::channel::Member;
use crate::hang::responder::Responder;
use crate::hang::shm_channel::ShmChannel;
use crate::hang::{Subject, Watch, Who};
use crate::host::{Host, Store, first_time};
use crate::os::topology;
use crate::os::yielding::Eagerness;
use crate::progress::domain::{Domain, Driven, SpinPolicy};
use crate::rendezvous::{Decision, Hosts, Rendezvous};
use crate::select::Policy;
use crate::stats::Stats;
use crate::threads;
use crate::threads::Helpers;

/// All parts of a group except its engine.
pub(super) struct Parts {
    pub config: Config,
    /// See `Group::id`.
    pub id: [u8; 16],
    pub policy: Arc<Policy>,
    /// See `Who::keys`.
    pub keys: Vec<String>,
    /// Number of the group's domain (`Group::domain`).
    pub domain: u64,
    pub spin_policy: SpinPolicy,
    /// `GroupShape::threads`.
    pub threads: usize,
    /// Number of cores of this rank (`threads::own_cores`).
    pub own_cores: usize,
    pub peers: Vec<Peer>,
    /// For a group over several hosts: the other ranks on this host, with their process ids.
    pub mates: Vec<(usize, i32)>,
    pub role: Role,
    pub host: Arc<dyn Host>,
}

impl Group {
    /// Meets the other ranks and builds the group, without a link to other hosts.
    pub fn connect(config: Config, store: &dyn Store, host: Arc<dyn Host>) -> Result<Arc<Group>> {
        Group::build(Rendezvous::new(config, store, host)?, None)
    }

    /// Builds the group that its ranks have decided on. If the group spans hosts, all ranks must call this, because
    /// they measure `link` together.
    pub fn build(rendezvous: Rendezvous, link: Option<Arc<dyn Link>>) -> Result<Arc<Group>> {
        Group::build_as(rendezvous, link, Role::Program)
    }

    fn build_as(rendezvous: Rendezvous, link: Option<Arc<dyn Link>>, role: Role) -> Result<Arc<Group>> {
        let Rendezvous { config, decision, id, policy, host, alive: _alive, .. } = rendezvous;
        let (policy, ranks) = (Arc::new(policy), config.size);
        let theirs = Arc::clone(&policy);
        let (spin_policy, peers, mates) = (SpinPolicy::none(), Vec::new(), Vec::new());
        let keys = Vec::new();
        let (threads, own_cores) = (1, 1);
        let parts =
            Parts { config, id, policy, keys, domain: 0, spin_policy, threads, own_cores, peers, mates, role, host };
        match (decision, link) {
            (Decision::Alone, None) => Ok(parts.group(|_| Box::new(Solo::new(theirs)))),
            (Decision::Delegate(reason), None) => {
                let name = parts.config.served_by().to_string();
                if parts.config.settings.verify.is_on() && first_time("results that a delegate does not compare") {
                    let group = &parts.config.name;
                    log::warn!("group '{group}' is served by {name}, whose results are not compared (option verify)");
                }
                Ok(parts.group(|_| Box::new(Delegate::new(name, reason, ranks, theirs))))
            }
            (Decision::SharedMemory(shared), None) => {
                // If this group consists of the ranks of one host of a larger group, lanes drive it, and lanes have no
                // helpers.
                let (cores, threads) = (shared.cores, if parts.role.is_inside() { 1 } else { shared.threads });
                // Every rank of the host needs cores, also the ranks that are not in this group.
                let most_ranks = Domain::numbered(parts.domain).note_ranks(ranks);
                let own_cpus = topology::count_mask(&topology::affinity_mask());
                let own_cores = threads::own_cores(own_cpus, cores, topology::cpus_per_core(), (ranks, most_ranks));
                let (area, group_peers) = shared.into_parts();
                let peers: Vec<_> = (0..ranks).map(|rank| group_peers.peer(rank).clone()).collect();
                let pids = peers.iter().map(|peer| peer.pid).collect();
                let peers = peers.into_iter().map(|peer| Peer::new(peer.pid, peer.host)).collect();
                let shape = area.layout.shape(cores, threads);
                let shm = Shm::new(area, pids, shape, parts.config.settings.fusion, theirs);
                let parts =
                    Parts { spin_policy: SpinPolicy::for_ranks(ranks, cores), threads, own_cores, peers, ..parts };
                let group = parts.group(|_| Box::new(shm));
                let weak = Arc::downgrade(&group);
                let following = group_peers.follow(move |rank, _reason| {
                    if let Some(group) = weak.upgrade() {
                        group.peer_ended(rank);
                    }
                });
                group.ties.follow(following);
                if !group.watch.who.is_inside {
                    hang::start(group.watch.responder());
                }
                Ok(group)
            }
            (Decision::Hosts(hosts), Some(link)) => {
                let Hosts { host_map, insides, reason, keys } = hosts;
                let keys = keys.into_iter().chain([wire::key(&parts.id, parts.config.rank)]).collect();
                let parts = Parts { keys, ..parts };
                let role = Role::Inside(host_map.local_ranks().to_vec());
                let build = |met| Group::build_as(met, None, role.clone());
                let insides = insides.into_iter().map(|inside| inside.map(build).transpose());
                over_hosts(parts, host_map, insides.collect::<Result<_>>()?, reason, link)
            }
            (Decision::Hosts(_), None) => Err(Error::invalid(format!(
                "sagellm: the ranks of group '{}' live on several hosts, and no link between them was given",
                parts.config.name
            ))),
            (_, Some(_)) => Err(Error::invalid(format!(
                "sagellm: group '{}' has no ranks of its own engine on other hosts and takes no link",
                parts.config.name
            ))),
        }
    }
}

/// Opens the link, and builds the group from the link and from the groups inside this host. If that fails, the groups
/// inside this host leave.
pub(super) fn over_hosts(
    parts: Parts,
    host_map: HostMap,
    insides: Vec<Option<Arc<Group>>>,
    reason: String,
    link: Arc<dyn Link>,
) -> Result<Arc<Group>> {
    let theirs = insides.iter().map(|group| group.clone().map(|group| group as Arc<dyn HostGroup>)).collect();
    let mates = host_map.local_ranks().iter().enumerate().filter_map(|(index, rank)| {
        let pid = insides.first()?.as_ref()?.watch.who.processes.get(&index)?;
        (*rank != parts.config.rank).then_some((*rank, *pid))
    });
    let parts = Parts { mates: mates.collect(), ..parts };
    let Parts { config, policy, host, .. } = &parts;
    let named = (config.settings, config.name.clone(), reason);
    let opened = Opened::interruptible(host_map, link, theirs, named, Arc::clone(policy), config.timeout, &**host)
        .inspect_err(|_| insides.iter().flatten().for_each(|group| group.shutdown()))?;
    log::info!("group '{}' rank {}: between hosts {}", config.name, config.rank, opened.link());
    Ok(parts.group(|report| Box::new(MultiHost::new(opened, report))))
}

impl Parts {
    /// Makes the group with the engine that `engine` returns. The engine's threads call the given `Report`.
    pub fn group(self, engine: impl FnOnce(Arc<dyn Report>) -> Box<dyn Engine>) -> Arc<Group> {
        let Parts {
            config,
            id,
            policy,
            keys,
            domain: number,
            spin_policy,
            threads,
            own_cores,
            peers,
            mates,
            role,
            host,
        } = self;
        let (ranks, domain) = (config.size, Domain::numbered(number));
        let group = Arc::new_cyclic(|this| {
            let engine = engine(Arc::new(LaneReport { group: Weak::clone(this), domain: Arc::clone(&domain) }));
            let control = engine.control();
            let who = Who {
                rank: config.rank,
                ranks,
                name: config.name.clone(),
                delegate: config.served_by().to_string(),
                spans_hosts: control.has_threads() || !mates.is_empty(),
                processes: if peers.is_empty() {
                    mates.into_iter().collect()
                } else {
                    peers.iter().map(|peer| peer.pid).enumerate().collect()
                },
                is_inside: role.is_inside(),
                keys,
                soft: config.soft_timeout.unwrap_or_else(config::soft_timeout),
            };
            let channel = if role.is_inside() { None } else { ShmChannel::over(&control) };
            let subject: Weak<dyn Subject> = Weak::<Group>::clone(this);
            let watch = Watch::new(who, subject, Arc::clone(&host), Responder::numbered(number), channel);
            let (rank, name) = (config.rank, &config.name);
            let launches = Launches::new((rank, ranks), name.clone(), Arc::clone(&control));
            let faults = Faults::new((rank, name.clone(), role), Arc::clone(&control), Arc::clone(&host), peers);
            Group {
                domain,
                id,
                ties: Ties::new(),
                waiters: Waiters {
                    spin_policy,
                    helpers: (threads > 1).then(|| Helpers::new(Arc::clone(&host), threads, own_cores)),
                    has_threads: control.has_threads(),
                    eagerness: Eagerness::default(),
                },
                control,
                policy,
                host,
                faults,
                inner: Mutex::new(Inner {
                    engine,
                    counters: Counters::new(ranks),
                    stats: Stats::new(ranks, config::ring()),
                    external: Externals::default(),
                    extensions: Extensions::default(),
                }),
                pending: AtomicUsize::new(0),
                last_number: AtomicU64::new(0),
                launches,
                timeouts: Timeouts::new(config.timeout),
                monitored: AtomicU64::new(0),
                watch: Arc::new(watch),
                this: Weak::clone(this),
                config,
            }
        });
        let driven: Arc<dyn Driven> = Arc::<Group>::clone(&group);
        group.domain.register(&driven);
        if !group.watch.who.is_inside {
            let member: Arc<dyn Member> = Arc::<Watch>::clone(&group.watch);
            group.watch.responder().add(&member);
        }
        log::info!("{}", group.describe());
        group
    }
}
