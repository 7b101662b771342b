//! A group whose ranks live on several hosts: the groups inside this host, the link to the others, and what the lanes
//! between them tell.

use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::builder::{Agreed, NoHost, local_config};
use super::{Engine, Group};
use crate::config::{Config, Settings};
use crate::engine::local;
use crate::engine::multihost::place::Place;
use crate::engine::multihost::transport::Link;
use crate::engine::multihost::{Hierarchical, Inside, Report};
use crate::error::{Error, Result};
use crate::fusion::planner::LANES;
use crate::host::{Host, Store};
use crate::op::Op;
use crate::op::overlap::Reach;
use crate::os::clock;
use crate::progress::domain::Domain;
use crate::progress::driver;
use crate::progress::driver::Outcome;
use crate::select::Policy;
use crate::types::{Request, Span};

impl Group {
    /// Who lives where, in a group over several hosts that its own engine serves.
    pub(super) fn place(&self) -> Option<Place> {
        match &self.lock().engine {
            Engine::Hosts(setup) => Some(setup.place.clone()),
            _ => None,
        }
    }
}

/// What is known before the link is there.
pub(super) struct Setup {
    place: Place,
    insides: Vec<Option<Arc<Group>>>,
    reason: String,
    settings: Settings,
}

impl Setup {
    pub(super) fn describe(&self) -> String {
        let hosts: Vec<String> = self.place.hosts.iter().map(|ranks| ranks.len().to_string()).collect();
        format!(
            "{} hosts with {} ranks, shared memory inside, a link between them, fusion {}, {} ({})",
            hosts.len(),
            hosts.join(" + "),
            if self.settings.fusion { "on" } else { "off" },
            if self.settings.strict { "strict" } else { "not strict" },
            self.reason
        )
    }
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

impl Inside for Group {
    fn run(&self, request: Request) -> Result<()> {
        Group::run(self, request, None)
    }
    fn abort(&self, error: &Error) {
        self.poison(error.clone());
    }
    fn process(&self, index: usize) -> String {
        self.peers.get(index).map_or_else(String::new, |peer| format!("pid {}, host {}", peer.pid, peer.host))
    }
}

/// The lanes' way to the group. Weak: the group owns the lanes.
struct Reporter(Weak<Group>, Arc<Domain>);

impl Report for Reporter {
    fn ended(&self, ended: Vec<(Arc<Op>, Result<()>)>) {
        match self.0.upgrade() {
            Some(group) => group.finish(ended),
            None => {
                self.1.remove_pending(ended.len());
                ended.into_iter().for_each(|(op, outcome)| op.end(outcome, clock::stamp()));
            }
        }
    }
    fn failed(&self, error: Error) {
        if let Some(group) = self.0.upgrade() {
            group.poison(error);
        }
    }
}

impl Group {
    /// Builds the groups inside the hosts. Every rank learns which hosts can share memory; the ranks of one that cannot
    /// count as hosts of their own. `nonce` is new for every attempt, so nothing an earlier one left in the store is read.
    pub(super) fn span(
        config: Config,
        host_of: &[usize],
        nonce: [u8; 16],
        (reason, policy): (String, Policy),
        store: &dyn Store,
        host: Arc<dyn Host>,
    ) -> Result<Arc<Group>> {
        let id: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
        let place = Place::new(host_of.to_vec(), config.rank);
        let mut insides = vec![None; LANES];
        let mut problem = String::new();
        if place.neighbours().len() > 1 {
            for (lane, inside) in insides.iter_mut().enumerate() {
                let name = format!("{}, host {}, lane {lane}", config.name, place.host);
                let inner = Config {
                    rank: place.index,
                    size: place.neighbours().len(),
                    name,
                    delegate_reason: None,
                    ..config.clone()
                };
                let keys = Prefixed { store, prefix: format!("inside/{id}/{}/{lane}", place.host) };
                let group = Group::meet(inner, &keys, Arc::clone(&host))?;
                problem = group.delegate_reason().unwrap_or(problem);
                *inside = Some(group);
            }
        }
        let shares = Group::sharing_hosts(
            &config,
            &place,
            &problem,
            &Prefixed { store, prefix: format!("hosts/{id}") },
            &*host,
        )?;
        let place = Place::new(Place::apart(host_of, |host| shares[host]), config.rank);
        if place.neighbours().len() == 1 {
            insides = vec![None; LANES];
        }
        let setup = Setup { place, insides, reason, settings: config.settings };
        Ok(Group::build(
            config,
            Engine::Hosts(setup),
            None,
            Vec::new(),
            Agreed { id: nonce, ..Agreed::on(policy) },
            host,
        ))
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

    /// Waits until no collective that was issued before reads or writes `memory` in a way that a message which is about to
    /// be handed to the delegate must follow. How those collectives end is told by their own handles.
    pub fn wait_for_memory(&self, memory: Span, writes: bool) -> Result<()> {
        let Some(lanes) = self.lanes.get() else { return Ok(()) };
        let reach = Reach::of_one(memory, writes);
        while let Some(op) = lanes.using(&reach) {
            if driver::wait_until(self, &*self.host, None, || op.is_done()) != Outcome::Done {
                return Err(Error::Interrupted("sagellm: interrupted while a message waited for its memory".into()));
            }
        }
        Ok(())
    }

    /// True where the group needs a link, and a delegate for its messages.
    pub fn spans_hosts(&self) -> bool {
        matches!(self.lock().engine, Engine::Hosts(_))
    }

    /// The way to the other hosts is there: measures it together with them. Operations may come when it returns.
    pub fn open_link(&self, link: Arc<dyn Link>) -> Result<()> {
        let inner = self.lock();
        let Engine::Hosts(setup) = &inner.engine else {
            return Err(Error::Invalid("sagellm: this group lives on one host and takes no link".to_string()));
        };
        let insides = setup.insides.iter().map(|group| group.clone().map(|group| group as Arc<dyn Inside>)).collect();
        let (place, settings) = (setup.place.clone(), setup.settings);
        drop(inner);
        let report = Arc::new(Reporter(self.this.clone(), Arc::clone(&self.domain)));
        let (policy, timeout) = (Arc::clone(&self.policy), self.config.timeout);
        // On a thread of its own: a link can only be waited on, and this thread must hear of signals.
        let (done, opened) = std::sync::mpsc::channel();
        let theirs = Arc::clone(&link);
        let opening = move || {
            let _ = done.send(Hierarchical::open(place, theirs, insides, settings, policy, report, timeout));
        };
        crate::os::watch::spawn("sagellm-probe", opening)
            .map_err(|error| Error::System(format!("sagellm: cannot start a thread to open the link: {error}")))?;
        let lanes = loop {
            match opened.recv_timeout(Duration::from_millis(50)) {
                Ok(lanes) => break lanes?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Bug("sagellm: the thread that opens the link ended without a word".to_string()));
                }
                Err(RecvTimeoutError::Timeout) if self.host.interrupted() => {
                    link.cut();
                    return Err(Error::Interrupted("sagellm: interrupted while the group was being made".to_string()));
                }
                Err(RecvTimeoutError::Timeout) => (),
            }
        };
        log::info!("group '{}' rank {}: between hosts {}", self.config.name, self.config.rank, lanes.link());
        self.lanes.set(lanes).map_err(|_| Error::Invalid("sagellm: this group has its link already".to_string()))
    }

    /// Ranks that are threads of one process and play ranks on several hosts: `host_of` numbers them without gaps.
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
        let place = Place::new(host_of.to_vec(), 0);
        let mut insides: Vec<Vec<Option<Arc<Group>>>> = vec![vec![None; LANES]; host_of.len()];
        for ranks in place.hosts.iter().filter(|ranks| ranks.len() > 1) {
            let domains: Vec<u64> = ranks.iter().map(|rank| *rank as u64 + 1).collect();
            ranks.iter().for_each(|rank| insides[*rank].clear());
            for _lane in 0..LANES {
                let groups = Group::over_in(local::areas(ranks.len())?, &domains, timeout, |_| policy.clone());
                ranks.iter().zip(groups).for_each(|(rank, group)| insides[*rank].push(Some(group)));
            }
        }
        let groups = insides.into_iter().enumerate().map(|(rank, insides)| {
            let place = Place::new(host_of.to_vec(), rank);
            let setup = Setup { place, insides, reason: "a simulation of hosts".to_string(), settings };
            let config = Config { settings, ..local_config(rank, host_of.len(), timeout) };
            let agreed = Agreed { domain: rank as u64 + 1, ..Agreed::on(policy.clone()) };
            Group::build(config, Engine::Hosts(setup), None, Vec::new(), agreed, Arc::new(NoHost))
        });
        let groups: Vec<Arc<Group>> = groups.collect();
        // Together: they measure the link with each other.
        std::thread::scope(|scope| {
            let opening: Vec<_> =
                groups.iter().zip(links).map(|(group, link)| scope.spawn(move || group.open_link(link))).collect();
            opening.into_iter().try_for_each(|one| one.join().expect("opening a link does not panic"))
        })?;
        Ok(groups)
    }

    pub(super) fn fail_lanes(&self, error: &Error) {
        if let Some(lanes) = self.lanes.get() {
            self.finish(lanes.fail(error).into_iter().map(|op| (op, Err(error.clone()))).collect());
        }
    }

    pub(super) fn close_lanes(&self, error: &Error) {
        if let Some(lanes) = self.lanes.get() {
            self.finish(
                lanes.close(error, || self.host.interrupted()).into_iter().map(|op| (op, Err(error.clone()))).collect(),
            );
        }
        let insides: Vec<Arc<Group>> = match &self.lock().engine {
            Engine::Hosts(setup) => setup.insides.iter().flatten().cloned().collect(),
            _ => Vec::new(),
        };
        insides.iter().for_each(|group| group.shutdown());
    }

    pub(super) fn tick_lanes(&self, now: u64) {
        let Some(lanes) = self.lanes.get() else { return };
        if let Some(op) = lanes.next_deadline().filter(|op| now >= op.deadline) {
            self.poison(lanes.stall(&op, &self.config.name));
        }
    }
}
