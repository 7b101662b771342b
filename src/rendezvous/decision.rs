//! The decision that a group's ranks make before the group is built: which engine serves it. It includes the resources
//! that each rank has opened for that engine. If a decision is dropped before the group is built, the peers are
//! notified that this rank leaves.
//!
//! If the ranks are on several hosts, the ranks of each host run a second rendezvous for the shared memory there. Then
//! all ranks learn which hosts have shared memory.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::addresses::Network;
use super::messages::Nonce;
use super::peers::GroupPeers;
use super::{Met, Outcome, meet};
use crate::config::Config;
use crate::engine::multihost::host_map::HostMap;
use crate::engine::shm::memory::area::Area;
use crate::engine::shm::memory::layout::{Layout, MAX_RANKS, SLOT_BYTES};
use crate::error::{Error, Result};
use crate::fields::cleaned;
use crate::fusion::planner::LANES;
use crate::host::{Host, Store, first_time};
use crate::os::watch::Alive;
use crate::os::{topology, watch};
use crate::select;
use crate::select::start::Topology;
use crate::select::{GroupShape, Policy};

/// The engine that serves a group. Equal on all its ranks.
pub enum Decision {
    /// A group of one rank.
    Alone,
    /// Another backend serves the group, for this reason.
    Delegate(String),
    SharedMemory(SharedMemory),
    /// Shared memory inside each host, and a link between the hosts, which the caller must provide.
    Hosts(Hosts),
}

/// The mapped memory of a group's ranks, and their processes. If this value is dropped before a group is built from it,
/// the peers are notified that this rank has left.
pub struct SharedMemory {
    parts: Option<(Arc<Area>, GroupPeers)>,
    /// How many cores the ranks may use together. Equal on every rank.
    pub cores: usize,
    /// How many threads each rank may use to copy and combine. Equal on every rank.
    pub threads: usize,
}

impl SharedMemory {
    /// Returns the parts for building a group. From then on the group must notify the peers when this rank leaves.
    pub fn into_parts(mut self) -> (Arc<Area>, GroupPeers) {
        self.parts.take().expect("taken once, by value")
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if let Some((area, _)) = &self.parts {
            // The other ranks may have built their groups by now. This call notifies them that this rank will not build
            // one.
            area.leave();
        }
    }
}

/// A finished rendezvous; `Group::build` makes the group from it.
pub struct Rendezvous {
    pub config: Config,
    pub decision: Decision,
    /// Equal on all ranks and unique to this attempt to create the group. All zeros if the ranks exchanged no records.
    pub id: Nonce,
    /// The policy that chooses algorithms: rank 0's if the ranks exchanged it, otherwise this rank's own.
    pub policy: Policy,
    /// How the ranks reach each other. It is Some if the group needs a delegate or a link and the ranks have listed
    /// their addresses.
    pub network: Option<Network>,
    pub host: Arc<dyn Host>,
    /// Kept until the group is created.
    pub alive: Alive,
}

impl Rendezvous {
    /// Meets the other ranks; this takes at most the timeout. Rank 0 warns if a delegate serves the group although the
    /// options do not ask for it.
    pub fn new(config: Config, store: &dyn Store, host: Arc<dyn Host>) -> Result<Rendezvous> {
        let made = Rendezvous::without_warning(config, store, host)?;
        let config = &made.config;
        if config.rank == 0
            && config.delegate_reason.is_none()
            && let Some(reason) = made.delegate_reason()
        {
            log::warn!(
                "group '{}' of {} ranks is served by {}: {reason}",
                config.name,
                config.size,
                config.served_by()
            );
        }
        Ok(made)
    }

    /// Like `new`, without the warning, for a caller that reports the consequences itself.
    pub(super) fn without_warning(config: Config, store: &dyn Store, host: Arc<dyn Host>) -> Result<Rendezvous> {
        watch::install();
        let alive = Alive::default(); // before any lock is acquired
        if watch::orphaned() {
            return Err(Error::invalid(
                "sagellm: this process was forked from one that had a process group, whose threads it does not have. Start \
                 it with the 'spawn' or 'forkserver' method, or destroy the groups before the fork"
                    .to_string(),
            ));
        }
        if config.size == 0 || config.rank >= config.size {
            return Err(Error::invalid(format!("sagellm: rank {} of a group of {} ranks", config.rank, config.size)));
        }
        // If the user's rules are invalid, they are refused here, before anything is sent to the store.
        let said = (&*config.algorithm, &*config.topology, config.settings.measure_link);
        let own = select::policy::decide(said, config.size, SLOT_BYTES, config.rank == 0)?;
        let own = Policy { verify: config.settings.verify, ..own };
        Rendezvous::with_policy(config, (own, alive), store, host)
    }

    /// `own` is this rank's policy. `alive` is stored in the result.
    fn with_policy(
        mut config: Config,
        (own, alive): (Policy, Alive),
        store: &dyn Store,
        host: Arc<dyn Host>,
    ) -> Result<Rendezvous> {
        let unmet = |decision, policy| Ok((decision, [0; 16], policy, None));
        let (decision, id, policy, network) = if config.size == 1 {
            unmet(config.delegate_reason.clone().map_or(Decision::Alone, Decision::Delegate), own)
        } else if config.size > MAX_RANKS {
            unmet(Decision::Delegate(too_many(config.size)), not_exchanged(&config, own))
        } else {
            config.policy = own.text();
            decide(&config, own, store, &host)
        }?;
        Ok(Rendezvous { config, decision, id, policy, network, host, alive })
    }

    /// Returns why another backend must serve the whole group. None if the group needs no other backend.
    pub fn delegate_reason(&self) -> Option<&str> {
        match &self.decision {
            Decision::Delegate(reason) => Some(reason),
            _ => None,
        }
    }

    /// Whether the group needs a link between hosts.
    pub fn spans_hosts(&self) -> bool {
        matches!(self.decision, Decision::Hosts(_))
    }

    /// Returns `id` as text, for keys in a store.
    pub fn id(&self) -> String {
        self.id.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Meets the other ranks and decides with them.
fn decide(
    config: &Config,
    own: Policy,
    store: &dyn Store,
    host: &Arc<dyn Host>,
) -> Result<(Decision, Nonce, Policy, Option<Network>)> {
    let fitting =
        |threads: usize, headroom: usize| layout_within(config.size, threads, headroom).map(|layout| layout.total());
    match meet(config, store, &**host, &fitting)? {
        Outcome::Delegate { reason, id, network } => {
            Ok((Decision::Delegate(reason), id, not_exchanged(config, own), network))
        }
        Outcome::Shared(Met { segment, group_peers, local_cores, threads, nodes, policy, id }) => {
            let total = segment.len();
            let layout = Layout::of_total(config.size, total)
                .ok_or_else(|| Error::bug(format!("sagellm: no layout of {} ranks has {total} bytes", config.size)))?;
            let area = Arc::new(Area::new(Arc::new(segment), layout, config.rank, nodes));
            let shared = SharedMemory { parts: Some((area, group_peers)), cores: local_cores, threads };
            Ok((Decision::SharedMemory(shared), id, agreed(config, &own, &policy)?, None))
        }
        Outcome::Hosts { reason, id, network, .. } if config.delegate != Config::LINK => {
            Ok((Decision::Delegate(reason), id, not_exchanged(config, own), network))
        }
        Outcome::Hosts { hosts, id, reason, policy, network } => {
            let policy = agreed(config, &own, &policy)?;
            let hosts = Hosts::decide(config, &policy, &hosts, (id, reason), store, host)?;
            Ok((Decision::Hosts(hosts), id, policy, network))
        }
    }
}

/// The hosts of a group over several hosts, and the shared memory of this rank's host.
pub struct Hosts {
    pub host_map: HostMap,
    /// For each lane, one rendezvous of this host's ranks. None if this rank is alone on its host.
    pub insides: Vec<Option<Rendezvous>>,
    /// Why the ranks count as several hosts.
    pub reason: String,
    /// The keys that this rank has set in the store under the id of this attempt. No rank reads them after all ranks
    /// have joined the group.
    pub keys: BTreeSet<String>,
}

/// A store that adds a prefix to its keys. A group inside one host uses it within the store of the whole group.
struct Prefixed<'a> {
    store: &'a dyn Store,
    prefix: String,
    /// Collects the keys that are set.
    set: &'a RefCell<BTreeSet<String>>,
}

impl Store for Prefixed<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let key = format!("{}/{key}", self.prefix);
        self.store.set(&key, value)?;
        self.set.borrow_mut().insert(key);
        Ok(())
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.store.try_get(&format!("{}/{key}", self.prefix))
    }
}

impl Hosts {
    /// Meets the ranks of this host. Every rank learns which hosts can share memory. If a host cannot, each of its
    /// ranks counts as a separate host. `id` is new for every attempt, so keys of an earlier attempt are never read.
    /// `policy` is that of the whole group.
    pub fn decide(
        config: &Config,
        policy: &Policy,
        host_of: &[usize],
        (id, reason): (Nonce, String),
        store: &dyn Store,
        host: &Arc<dyn Host>,
    ) -> Result<Hosts> {
        let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        let host_map = HostMap::new(host_of.to_vec(), config.rank);
        let mut insides: Vec<Option<Rendezvous>> = (0..LANES).map(|_| None).collect();
        let (mut problem, set) = (String::new(), RefCell::default());
        if host_map.local_ranks().len() > 1 {
            for (lane, inside) in insides.iter_mut().enumerate() {
                let inner = Config {
                    rank: host_map.local_rank,
                    size: host_map.local_ranks().len(),
                    name: format!("{}, host {}, lane {lane}", config.name, host_map.host),
                    delegate_reason: None,
                    ..config.clone()
                };
                // The rules of the whole group, which were already compared, replace those of this host's ranks. The
                // decision table is this host's own. The topology is left out, because it does not describe the inside
                // of a host; `verify` is left out, because the whole group compares results.
                let (size, leads) = (inner.size, inner.rank == 0);
                let tabled = select::policy::decide(("", "", policy.measure_link), size, SLOT_BYTES, leads)?;
                let own = Policy { rules: policy.rules.clone(), ..tabled };
                let keys = Prefixed { store, prefix: format!("inside/{id}/{}/{lane}", host_map.host), set: &set };
                let met = Rendezvous::with_policy(inner, (own, Alive::default()), &keys, Arc::clone(host))?;
                match &met.decision {
                    Decision::Delegate(reason) => problem.clone_from(reason),
                    _ => *inside = Some(met),
                }
            }
        }
        let keys = Prefixed { store, prefix: format!("hosts/{id}"), set: &set };
        let shares = sharing_hosts(config, &host_map, &problem, &keys, &**host)?;
        let host_map = HostMap::new(HostMap::split_hosts(host_of, |host| shares[host]), config.rank);
        if host_map.local_ranks().len() == 1 {
            insides = (0..LANES).map(|_| None).collect();
        }
        Ok(Hosts { host_map, insides, reason, keys: set.into_inner() })
    }
}

/// Returns which hosts can share memory. The first rank of each host publishes this in the store, and all ranks read
/// it.
fn sharing_hosts(
    config: &Config,
    host_map: &HostMap,
    problem: &str,
    store: &dyn Store,
    host: &dyn Host,
) -> Result<Vec<bool>> {
    if host_map.local_rank == 0 {
        store.set(&host_map.host.to_string(), problem.as_bytes())?;
    }
    let until = Instant::now() + config.timeout;
    let mut shares = Vec::new();
    while shares.len() < host_map.hosts.len() {
        let number = shares.len();
        match store.try_get(&number.to_string())? {
            Some(said) => {
                if !said.is_empty() {
                    // Warn once per group on rank 0, and once on the host itself.
                    let level = match config.rank == 0 || host_map.me == host_map.hosts[number][0] {
                        true => log::Level::Warn,
                        false => log::Level::Info,
                    };
                    log::log!(
                        level,
                        "group '{}': the {} ranks of host {number} do not share memory, so each of them counts as a host \
                         of its own, and all of their traffic goes over the link: {}",
                        config.name,
                        host_map.hosts[number].len(),
                        cleaned(&String::from_utf8_lossy(&said), &[])
                    );
                }
                shares.push(said.is_empty());
            }
            None if Instant::now() > until => {
                return Err(Error::timeout(format!(
                    "sagellm: group '{}': rank {} on another host has not built its host's shared memory within {:.0} s. \
                     Check its log",
                    config.name,
                    host_map.hosts[number][0],
                    config.timeout.as_secs_f64()
                )));
            }
            None if host.interrupted() => {
                return Err(Error::interrupted("sagellm: interrupted while the group was being made"));
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    Ok(shares)
}

/// Returns this rank's own policy, for a group whose ranks exchange none. Its topology is removed, because each rank
/// may have read a different one on its host. If topologies differed, the ranks would steer a vendor's library
/// differently and wait for each other.
fn not_exchanged(config: &Config, own: Policy) -> Policy {
    if own.topology.is_some() && first_time("a topology that is not used") {
        log::warn!(
            "rank {} of group '{}': the option topology is not used, because {} serves the group and its ranks do \
             not exchange their options; name algorithms by the option algorithm, the same on all ranks",
            config.rank,
            config.name,
            config.served_by()
        );
    }
    Policy { topology: None, ..own }
}

/// Returns rank 0's policy, which decides for all ranks. Warns once if this rank's rules, topology, `measure_link` or
/// `verify` differ from rank 0's.
fn agreed(config: &Config, own: &Policy, sent: &str) -> Result<Policy> {
    let policy =
        Policy::parse(sent).map_err(|what| Error::system(format!("sagellm: group '{}': {what}", config.name)))?;
    if policy.rules != own.rules && first_time("rules unlike those of rank 0") {
        log::warn!(
            "rank {} of group '{}' has the rules \"{}\" (option algorithm, SAGELLM_ALGORITHM) and rank 0 has \"{}\": rank 0's \
             decide for the group. Give every rank the same",
            config.rank,
            config.name,
            own.rules,
            policy.rules
        );
    }
    if policy.topology != own.topology && first_time("a topology unlike that of rank 0") {
        let text = |topology: Option<Topology>| topology.map_or("none".to_string(), |topology| topology.to_string());
        log::warn!(
            "rank {} of group '{}' has the topology {} (option topology) and rank 0 has {}: rank 0's decides for the group. \
             Give every rank the same",
            config.rank,
            config.name,
            text(own.topology),
            text(policy.topology)
        );
    }
    if policy.measure_link != own.measure_link && first_time("another wish about the link than that of rank 0") {
        let text = |measures: bool| if measures { "measures the link" } else { "leaves the link unmeasured" };
        log::warn!(
            "rank {} of group '{}' {} between hosts (option measure_link, SAGELLM_MEASURE_LINK) and rank 0 {}: rank 0's decides \
             for the group. Give every rank the same",
            config.rank,
            config.name,
            text(own.measure_link),
            text(policy.measure_link)
        );
    }
    if policy.verify != own.verify && first_time("another wish about comparing results than that of rank 0") {
        log::warn!(
            "rank {} of group '{}' has verify=\"{}\" (option verify, SAGELLM_VERIFY) and rank 0 has \"{}\": rank 0's decides for \
             the group. Give every rank the same",
            config.rank,
            config.name,
            own.verify,
            policy.verify
        );
    }
    Ok(policy)
}

/// Returns the shape and policy that a group of `ranks` ranks would have if it were created now on this host and this
/// process were rank 0.
pub fn on_this_host(ranks: usize, algorithm: &str) -> Result<(GroupShape, Policy)> {
    let policy = select::policy::decide((algorithm, "", true), ranks, SLOT_BYTES, true)?;
    let cores = topology::usable_cores();
    if ranks == 1 {
        return Ok((GroupShape { cores, ..GroupShape::without_memory(ranks) }, policy));
    }
    let headroom = topology::memory_headroom().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
    match layout_within(ranks, 1, headroom) {
        Ok(layout) => Ok((layout.shape(cores, 1), policy)),
        Err(why) => Err(Error::invalid(format!("sagellm: here gloo would serve such a group: {why}"))),
    }
}

/// Returns the layout of the segment for a group whose ranks have `threads` threads each, if `headroom` bytes of memory
/// are free. If there is none, the reason.
fn layout_within(ranks: usize, threads: usize, headroom: usize) -> std::result::Result<Layout, String> {
    if ranks > MAX_RANKS {
        return Err(too_many(ranks));
    }
    Layout::within(ranks, threads, headroom).ok_or_else(|| {
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
    use crate::host::{Memory, NoSignals};

    /// The keys of `Hosts::keys` are removed after the group has ended.
    #[test]
    #[cfg_attr(miri, ignore = "maps memory that processes share")]
    fn each_key_with_the_id_of_the_attempt_is_known_to_the_rank_that_set_it() {
        let store = Memory::default();
        let host: Arc<dyn Host> = Arc::new(NoSignals);
        let decided = &|rank| {
            let config = Config::without_options(rank, 3, Duration::from_secs(20));
            let policy = select::policy::decide(("", "", false), 3, SLOT_BYTES, false).unwrap();
            Hosts::decide(&config, &policy, &[0, 0, 1], ([7; 16], "two hosts".into()), &store, &host).unwrap().keys
        };
        let keys: Vec<BTreeSet<String>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || decided(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let all: Vec<String> = keys.into_iter().flatten().collect::<BTreeSet<_>>().into_iter().collect();
        assert_eq!(all, store.keys(""));
        assert!(all.iter().all(|key| key.contains("07070707")) && all.len() == 2 + 2 * LANES, "{all:?}");
    }

    #[test]
    fn memory_for_every_number_of_ranks_or_the_true_reason() {
        for ranks in 2..=MAX_RANKS {
            assert_eq!(layout_within(ranks, 1, usize::MAX).map(|layout| layout.ranks), Ok(ranks));
        }
        let reason = |ranks: usize, mebibytes: usize| layout_within(ranks, 1, mebibytes << 20).unwrap_err();
        assert_eq!(reason(MAX_RANKS + 1, 1 << 40), "257 ranks; the shared-memory engine serves up to 256");
        assert_eq!(
            reason(64, 100),
            "64 ranks need 29 MiB of shared memory at least, and may use a quarter of the 100 MiB of memory that are left"
        );
        assert!(layout_within(64, 1, (29 * 4) << 20).is_ok());
    }
}
