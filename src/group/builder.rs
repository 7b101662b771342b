//! Builds a whole group from the decision of its ranks: the one place that knows the engines by name. It also builds
//! groups whose ranks are threads of one process, for tests and tools.

use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, Weak};

use std::time::Duration;

use super::counters::Counters;
use super::extensions::{Extensions, Timeouts};
use super::external::Externals;
use super::faults::{Faults, Peer};
use super::lanes::LaneReport;
use super::launches::Launches;
use super::role::Role;
use super::{Group, Inner};
use crate::config;
use crate::config::{Config, Settings};
use crate::engine::delegate::Delegate;
use crate::engine::local;
use crate::engine::multihost::host_map::HostMap;
use crate::engine::multihost::link::Link;
use crate::engine::multihost::{HostGroup, MultiHost, Opened};
use crate::engine::shm::Shm;
use crate::engine::shm::memory::area::Area;
use crate::engine::solo::Solo;
use crate::engine::{Engine, Report};
use crate::error::{Error, Result};
use crate::fusion::planner::LANES;
use crate::hang;
use crate::hang::channel::Member;
use crate::hang::responder::Responder;
use crate::hang::shm_channel::ShmChannel;
use crate::hang::{Subject, Watch, Who};
use crate::host::{Host, NoSignals, Store};
use crate::os::watch::Alive;
use crate::os::{topology, watch};
use crate::progress::domain::{Domain, Driven, SpinPolicy};
use crate::rendezvous::{Decision, Hosts, Rendezvous};
use crate::select::Policy;
use crate::stats::Stats;

/// The parts of a group besides its engine.
struct Parts {
    config: Config,
    /// As `Group::id`.
    id: [u8; 16],
    policy: Arc<Policy>,
    /// The number of `Group::domain`.
    domain: u64,
    spin_policy: SpinPolicy,
    peers: Vec<Peer>,
    /// The other ranks of this host, with their processes, in a group over several hosts.
    mates: Vec<(usize, i32)>,
    role: Role,
    host: Arc<dyn Host>,
}

impl Group {
    /// Meets the other ranks and builds the group, without a link to other hosts.
    pub fn connect(config: Config, store: &dyn Store, host: Arc<dyn Host>) -> Result<Arc<Group>> {
        Group::build(Rendezvous::new(config, store, host)?, None)
    }

    /// Builds the group that its ranks have decided on. Where it spans hosts, all ranks must call this, because they
    /// measure `link` together.
    pub fn build(rendezvous: Rendezvous, link: Option<Arc<dyn Link>>) -> Result<Arc<Group>> {
        Group::build_as(rendezvous, link, Role::Program)
    }

    fn build_as(rendezvous: Rendezvous, link: Option<Arc<dyn Link>>, role: Role) -> Result<Arc<Group>> {
        let Rendezvous { config, decision, id, policy, host, alive: _alive, .. } = rendezvous;
        let (policy, ranks) = (Arc::new(policy), config.size);
        let theirs = Arc::clone(&policy);
        let (spin_policy, peers, mates) = (SpinPolicy::none(), Vec::new(), Vec::new());
        let parts = Parts { config, id, policy, domain: 0, spin_policy, peers, mates, role, host };
        match (decision, link) {
            (Decision::Alone, None) => Ok(parts.group(|_| Box::new(Solo::new(theirs)))),
            (Decision::Delegate(reason), None) => {
                let name = parts.config.served_by().to_string();
                Ok(parts.group(|_| Box::new(Delegate::new(name, reason, ranks, theirs))))
            }
            (Decision::SharedMemory(shared), None) => {
                let cores = shared.cores;
                let (area, group_peers) = shared.into_parts();
                let peers: Vec<_> = (0..ranks).map(|rank| group_peers.peer(rank).clone()).collect();
                let pids = peers.iter().map(|peer| peer.pid).collect();
                let peers = peers.into_iter().map(|peer| Peer::new(peer.pid, peer.host)).collect();
                let shm = Shm::new(area, pids, cores, parts.config.settings.fusion, theirs);
                let parts = Parts { spin_policy: SpinPolicy::for_ranks(ranks, cores), peers, ..parts };
                let group = parts.group(|_| Box::new(shm));
                let weak = Arc::downgrade(&group);
                let following = group_peers.follow(move |rank, _reason| {
                    if let Some(group) = weak.upgrade() {
                        group.peer_ended(rank);
                    }
                });
                *group.following.lock().unwrap() = Some(following);
                if !group.watch.who.is_inside {
                    hang::start(group.watch.responder());
                }
                Ok(group)
            }
            (Decision::Hosts(hosts), Some(link)) => {
                let Hosts { host_map, insides, reason } = hosts;
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

    /// `ranks` groups of one process, one for each rank that is a thread.
    pub fn local(ranks: usize, timeout: Duration) -> Result<Vec<Arc<Group>>> {
        Ok(Group::over(local::areas(ranks)?, timeout))
    }

    /// As `local`, over areas that the caller made and may inspect.
    pub fn over(areas: Vec<Arc<Area>>, timeout: Duration) -> Vec<Arc<Group>> {
        Group::over_with(areas, timeout, |_| Policy::default())
    }

    /// As `over`, with a policy for every rank; all must be equal, unless a test checks what happens otherwise.
    pub fn over_with(areas: Vec<Arc<Area>>, timeout: Duration, policy: impl Fn(usize) -> Policy) -> Vec<Arc<Group>> {
        let domains: Vec<u64> = (1..=areas.len() as u64).collect();
        over_in(areas, &domains, (timeout, &Role::Program), policy)
    }

    /// Groups for ranks that are threads of one process and act as ranks on several hosts: `host_of` numbers hosts
    /// without gaps.
    pub fn local_hosts(
        host_of: &[usize],
        timeout: Duration,
        settings: Settings,
        links: Vec<Arc<dyn Link>>,
    ) -> Result<Vec<Arc<Group>>> {
        Group::local_hosts_with(host_of, timeout, settings, links, &Policy::default())
    }

    /// As `local_hosts`, with a policy.
    pub fn local_hosts_with(
        host_of: &[usize],
        timeout: Duration,
        settings: Settings,
        links: Vec<Arc<dyn Link>>,
        policy: &Policy,
    ) -> Result<Vec<Arc<Group>>> {
        let host_map = HostMap::new(host_of.to_vec(), 0);
        let mut insides: Vec<Vec<Option<Arc<Group>>>> = vec![vec![None; LANES]; host_of.len()];
        for ranks in host_map.hosts.iter().filter(|ranks| ranks.len() > 1) {
            let domains: Vec<u64> = ranks.iter().map(|rank| *rank as u64 + 1).collect();
            ranks.iter().for_each(|rank| insides[*rank].clear());
            let role = Role::Inside(ranks.clone());
            for _lane in 0..LANES {
                let groups = over_in(local::areas(ranks.len())?, &domains, (timeout, &role), |_| policy.clone());
                ranks.iter().zip(groups).for_each(|(rank, group)| insides[*rank].push(Some(group)));
            }
        }
        // In parallel, because they measure the link with each other.
        std::thread::scope(|scope| {
            let ranks = insides.into_iter().zip(links).enumerate();
            let building: Vec<_> = ranks
                .map(|(rank, (insides, link))| {
                    let host_map = HostMap::new(host_of.to_vec(), rank);
                    let mut parts = local_parts((rank, host_of.len()), timeout, policy.clone(), rank as u64 + 1);
                    parts.config.settings = settings;
                    scope.spawn(move || over_hosts(parts, host_map, insides, "a simulation of hosts".to_string(), link))
                })
                .collect();
            building.into_iter().map(|one| one.join().expect("building a group does not panic")).collect()
        })
    }
}

/// Groups over these areas, one per rank, each in the given domain: the groups of one rank share a domain, as in a
/// process.
fn over_in(
    areas: Vec<Arc<Area>>,
    domains: &[u64],
    (timeout, role): (Duration, &Role),
    policy: impl Fn(usize) -> Policy,
) -> Vec<Arc<Group>> {
    let (ranks, cores) = (areas.len(), topology::usable_cores());
    let groups = areas.into_iter().enumerate().map(|(rank, area)| {
        let parts = local_parts((rank, ranks), timeout, policy(rank), domains[rank]);
        let peers = (0..ranks).map(|_| Peer::new(0, "this process".to_string())).collect();
        let theirs = Arc::clone(&parts.policy);
        let (role, spin_policy) = (role.clone(), SpinPolicy::for_ranks(ranks, cores));
        let parts = Parts { spin_policy, peers, role, ..parts };
        parts.group(|_| match ranks {
            1 => Box::new(Solo::new(theirs)),
            _ => Box::new(Shm::new(area, vec![std::process::id() as i32; ranks], cores, true, theirs)),
        })
    });
    groups.collect()
}

fn local_parts((rank, size): (usize, usize), timeout: Duration, policy: Policy, domain: u64) -> Parts {
    let config = Config {
        rank,
        size,
        timeout,
        name: "local".to_string(),
        delegate_reason: None,
        delegate: Config::LINK.to_string(),
        algorithm: String::new(),
        topology: String::new(),
        policy: String::new(),
        settings: Settings::default(),
        soft_timeout: None,
        addresses: String::new(),
    };
    let (policy, host) = (Arc::new(policy), Arc::new(NoSignals));
    let (spin_policy, peers, mates) = (SpinPolicy::none(), Vec::new(), Vec::new());
    Parts { config, id: [0; 16], policy, domain, spin_policy, peers, mates, role: Role::Program, host }
}

/// Opens the link and builds the group from it and the groups inside this host. If that fails, these leave.
fn over_hosts(
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
    /// The group, with the engine that `engine` makes; the engine's threads call the given `Report`.
    fn group(self, engine: impl FnOnce(Arc<dyn Report>) -> Box<dyn Engine>) -> Arc<Group> {
        let Parts { config, id, policy, domain: number, spin_policy, peers, mates, role, host } = self;
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
                generation: watch::generation(),
                spin_policy,
                has_threads: control.has_threads(),
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
                following: Mutex::new(None),
                alive: Mutex::new(Some(Alive::default())),
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
