//! Ranks that live on several hosts: those of each host meet once more among themselves, and all learn which hosts can
//! share memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::decision::{Decision, Rendezvous};
use super::messages::Nonce;
use crate::config::Config;
use crate::engine::multihost::place::Place;
use crate::error::{Error, Result};
use crate::fusion::planner::LANES;
use crate::host::{Host, Store};

/// Where the ranks of a group over several hosts live, and what this one shares with those of its host.
pub struct Hosts {
    pub place: Place,
    /// One meeting of this host's ranks for each lane; none where this rank is alone.
    pub insides: Vec<Option<Rendezvous>>,
    /// Why they count as several hosts.
    pub reason: String,
}

/// The keys of a group inside one host, within the store of the whole group.
struct Prefixed<'a> {
    store: &'a dyn Store,
    prefix: String,
}

impl Store for Prefixed<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&format!("{}/{key}", self.prefix), value)
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.store.try_get(&format!("{}/{key}", self.prefix))
    }
}

impl Hosts {
    /// Meets the ranks of this host. Every rank learns which hosts can share memory; the ranks of one that cannot count as
    /// hosts of their own. `id` is new for every attempt, so nothing an earlier one left in the store is read.
    pub fn decide(
        config: &Config,
        host_of: &[usize],
        (id, reason): (Nonce, String),
        store: &dyn Store,
        host: &Arc<dyn Host>,
    ) -> Result<Hosts> {
        let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        let place = Place::new(host_of.to_vec(), config.rank);
        let mut insides: Vec<Option<Rendezvous>> = (0..LANES).map(|_| None).collect();
        let mut problem = String::new();
        if place.neighbours().len() > 1 {
            for (lane, inside) in insides.iter_mut().enumerate() {
                let inner = Config {
                    rank: place.index,
                    size: place.neighbours().len(),
                    name: format!("{}, host {}, lane {lane}", config.name, place.host),
                    delegate_reason: None,
                    ..config.clone()
                };
                let keys = Prefixed { store, prefix: format!("inside/{id}/{}/{lane}", place.host) };
                let met = Rendezvous::quiet(inner, &keys, Arc::clone(host))?;
                match &met.decision {
                    Decision::Delegate(reason) => problem.clone_from(reason),
                    _ => *inside = Some(met),
                }
            }
        }
        let shares =
            sharing_hosts(config, &place, &problem, &Prefixed { store, prefix: format!("hosts/{id}") }, &**host)?;
        let place = Place::new(Place::apart(host_of, |host| shares[host]), config.rank);
        if place.neighbours().len() == 1 {
            insides = (0..LANES).map(|_| None).collect();
        }
        Ok(Hosts { place, insides, reason })
    }
}

/// Which hosts can share memory: the first rank of each says so in the store, and all read it.
fn sharing_hosts(
    config: &Config,
    place: &Place,
    problem: &str,
    store: &dyn Store,
    host: &dyn Host,
) -> Result<Vec<bool>> {
    if place.index == 0 {
        store.set(&place.host.to_string(), problem.as_bytes())?;
    }
    let until = Instant::now() + config.timeout;
    let mut shares = Vec::new();
    while shares.len() < place.hosts.len() {
        let number = shares.len();
        match store.try_get(&number.to_string())? {
            Some(said) => {
                if !said.is_empty() {
                    // Once a group, at the rank whose output is read first, and on the host itself.
                    let level = match config.rank == 0 || place.me == place.hosts[number][0] {
                        true => log::Level::Warn,
                        false => log::Level::Info,
                    };
                    log::log!(
                        level,
                        "group '{}': the {} ranks of host {number} do not share memory, so each of them counts as a host \
                         of its own, and all of their traffic goes over the link: {}",
                        config.name,
                        place.hosts[number].len(),
                        String::from_utf8_lossy(&said)
                    );
                }
                shares.push(said.is_empty());
            }
            None if Instant::now() > until => {
                return Err(Error::Timeout(format!(
                    "sagellm: group '{}': rank {} on another host has not built its host's shared memory within {:.0} s. \
                     Check its log",
                    config.name,
                    place.hosts[number][0],
                    config.timeout.as_secs_f64()
                )));
            }
            None if host.interrupted() => {
                return Err(Error::Interrupted("sagellm: interrupted while the group was being made".into()));
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    Ok(shares)
}
