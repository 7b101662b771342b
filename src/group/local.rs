//! Groups whose ranks are threads of one process. Only for tests and benchmarks (feature `testing`).

use std::sync::Arc;
use std::time::Duration;

use super::Group;
use super::builder::{Parts, over_hosts};
use super::faults::Peer;
use super::role::Role;
use crate::config::{Config, Settings, Verify};
use crate::engine::local;
use crate::engine::multihost::host_map::HostMap;
use crate::engine::multihost::link::Link;
use crate::engine::shm::Shm;
use crate::engine::shm::memory::area::Area;
use crate::engine::solo::Solo;
use crate::error::Result;
use crate::fusion::planner::LANES;
use crate::host::{Host, NoSignals};
use crate::os::topology;
use crate::progress::domain::SpinPolicy;
use crate::select::Policy;

impl Group {
    /// Makes one group for each of `ranks` ranks, which are threads of this process.
    pub fn local(ranks: usize, timeout: Duration) -> Result<Vec<Arc<Group>>> {
        Ok(Group::over(local::areas(ranks)?, timeout))
    }

    /// Like `local`, over areas that the caller made and may inspect.
    pub fn over(areas: Vec<Arc<Area>>, timeout: Duration) -> Vec<Arc<Group>> {
        Group::over_with(areas, timeout, |_| Policy::default())
    }

    /// Like `over`, with a policy for each rank. The policies must be equal, except in tests of what happens if they
    /// are not.
    pub fn over_with(areas: Vec<Arc<Area>>, timeout: Duration, policy: impl Fn(usize) -> Policy) -> Vec<Arc<Group>> {
        let domains: Vec<u64> = (1..=areas.len() as u64).collect();
        over_in(areas, &domains, (timeout, &Role::Program), policy, |parts| parts)
    }

    /// Makes one group for each of these hosts, whose threads copy and combine: at most `threads` for each rank, which
    /// acts as if it had `own_cores` cores.
    pub fn local_with_threads(
        hosts: Vec<Arc<dyn Host>>,
        timeout: Duration,
        threads: usize,
        own_cores: usize,
    ) -> Result<Vec<Arc<Group>>> {
        let domains: Vec<u64> = (1..=hosts.len() as u64).collect();
        let adapt = |parts: Parts| {
            let host = Arc::clone(&hosts[parts.config.rank]);
            Parts { host, threads, own_cores, ..parts }
        };
        Ok(over_in(local::areas(hosts.len())?, &domains, (timeout, &Role::Program), |_| Policy::default(), adapt))
    }

    /// Makes groups for ranks that are threads of this process and act as ranks on several hosts. `host_of` has the
    /// host of each rank; hosts are numbered without gaps.
    pub fn local_hosts(
        host_of: &[usize],
        timeout: Duration,
        settings: Settings,
        links: Vec<Arc<dyn Link>>,
    ) -> Result<Vec<Arc<Group>>> {
        Group::local_hosts_with(host_of, timeout, settings, links, &Policy::default())
    }

    /// Makes the group of rank `me` of `ranks`, each of which acts as the only rank of its host. All ranks must call
    /// this; they may be processes.
    pub fn of_one_host(me: usize, ranks: usize, timeout: Duration, link: Arc<dyn Link>) -> Result<Arc<Group>> {
        let parts = local_parts((me, ranks), timeout, Policy::default(), me as u64 + 1);
        let host_map = HostMap::new((0..ranks).collect(), me);
        over_hosts(parts, host_map, vec![None; LANES], "a simulation of hosts".to_string(), link)
    }

    /// Like `local_hosts`, with a policy.
    pub fn local_hosts_with(
        host_of: &[usize],
        timeout: Duration,
        settings: Settings,
        links: Vec<Arc<dyn Link>>,
        policy: &Policy,
    ) -> Result<Vec<Arc<Group>>> {
        let host_map = HostMap::new(host_of.to_vec(), 0);
        // Verification is off inside a host, as in a real group, which compares results only between the ranks of all
        // hosts.
        let inner = Policy { verify: Verify::default(), ..policy.clone() };
        let mut insides: Vec<Vec<Option<Arc<Group>>>> = vec![vec![None; LANES]; host_of.len()];
        for ranks in host_map.hosts.iter().filter(|ranks| ranks.len() > 1) {
            let domains: Vec<u64> = ranks.iter().map(|rank| *rank as u64 + 1).collect();
            ranks.iter().for_each(|rank| insides[*rank].clear());
            let role = Role::Inside(ranks.clone());
            for _lane in 0..LANES {
                let groups =
                    over_in(local::areas(ranks.len())?, &domains, (timeout, &role), |_| inner.clone(), |parts| parts);
                ranks.iter().zip(groups).for_each(|(rank, group)| insides[*rank].push(Some(group)));
            }
        }
        // The groups are built in parallel, because the ranks measure the link with each other.
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

/// Makes one group per rank over these areas, each in the given domain. The groups of one rank share a domain, as in a
/// process.
fn over_in(
    areas: Vec<Arc<Area>>,
    domains: &[u64],
    (timeout, role): (Duration, &Role),
    policy: impl Fn(usize) -> Policy,
    adapt: impl Fn(Parts) -> Parts,
) -> Vec<Arc<Group>> {
    let (ranks, cores) = (areas.len(), topology::usable_cores());
    let groups = areas.into_iter().enumerate().map(|(rank, area)| {
        let parts = local_parts((rank, ranks), timeout, policy(rank), domains[rank]);
        let peers = (0..ranks).map(|_| Peer::new(0, "this process".to_string())).collect();
        let theirs = Arc::clone(&parts.policy);
        let (role, spin_policy) = (role.clone(), SpinPolicy::for_ranks(ranks, cores));
        let parts = adapt(Parts { spin_policy, peers, role, ..parts });
        parts.group(|_| match ranks {
            1 => Box::new(Solo::new(theirs)),
            _ => {
                let (pids, shape) = (vec![std::process::id() as i32; ranks], area.layout.shape(cores, 1));
                Box::new(Shm::new(area, pids, shape, true, theirs))
            }
        })
    });
    groups.collect()
}

fn local_parts((rank, size): (usize, usize), timeout: Duration, policy: Policy, domain: u64) -> Parts {
    let config = Config { name: "local".to_string(), ..Config::without_options(rank, size, timeout) };
    let (policy, host) = (Arc::new(policy), Arc::new(NoSignals));
    let (spin_policy, peers, mates) = (SpinPolicy::none(), Vec::new(), Vec::new());
    let keys = Vec::new();
    Parts {
        config,
        id: [0; 16],
        policy,
        keys,
        domain,
        spin_policy,
        threads: 1,
        own_cores: 1,
        peers,
        mates,
        role: Role::Program,
        host,
    }
}
