//! Rank 0's part of the rendezvous. Gathers the records, decides what they allow, and publishes the decision.
//! `serve.rs` distributes the memory.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::addresses::{self, Network};
use super::messages::{Answer, Body, DecisionMessage, Mode, Nonce, PROTOCOL, Reason, Record};
use super::peers::GroupPeers;
use super::{
    DECISION_KEY, Met, Outcome, SegmentBytes, Session, WAITS, answer_key, hello_bytes, record_key, unix_socket,
};
use crate::config::Config;
use crate::engine::shm::memory::segment::Segment;
use crate::engine::shm::nodes::Nodes;
use crate::error::{Error, Result};
use crate::fields::clip;
use crate::host::first_time;
use crate::os::random;
use crate::os::topology;
use crate::threads;
use crate::threads::Wish;

/// The outcome of one attempt to share memory.
pub(super) enum Step {
    Met(Box<Met>),
    /// A rank has a new nonce. Its record was replaced.
    Changed,
    /// Sharing is impossible, for the given reason.
    Impossible(Reason),
}

pub(super) struct Coordinator<'t, 'a> {
    pub(super) session: &'t mut Session<'a>,
    pub(super) records: Vec<Option<Record>>,
    /// The missing ranks that were last published under `WAITS`. None if nothing was published since a rank's nonce
    /// last changed.
    told_waits: Option<Vec<usize>>,
    /// When the current interval between checks of the store began (`LOOK`).
    pub(super) looked: Instant,
}

/// At this interval, rank 0 checks the store for missing ranks and new nonces. Each check makes a few store requests
/// per rank.
const LOOK: Duration = Duration::from_millis(50);

/// The memory that rank 0 has made, and what the other ranks need to use it.
pub(super) struct MemoryToShare {
    pub(super) segment: Segment,
    pub(super) memory: OwnedFd,
    pub(super) local_cores: usize,
    pub(super) threads: usize,
    pub(super) nodes: Nodes,
    /// Some if all ranks were in an earlier group.
    pub(super) group_peers: Option<GroupPeers>,
}

pub(super) fn coordinate(session: &mut Session, segment_bytes: &SegmentBytes) -> Result<Outcome> {
    let mut records = vec![None; session.config.size];
    records[0] = Some(session.own.clone());
    let mut lead = Coordinator { session, records, told_waits: None, looked: Instant::now() };
    let result = lead.run(segment_bytes);
    if let Err(error) = &result {
        // If rank 0 has failed, the other ranks must not wait for it. If this message is lost, their own deadlines end
        // their waits.
        let text = format!("{}{}", error.code(), error.text());
        let decision = lead.decision([0; 16], Mode::Failed, &text, &[]);
        let _ = lead.publish(&decision);
    }
    result
}

impl Coordinator<'_, '_> {
    fn run(&mut self, segment_bytes: &SegmentBytes) -> Result<Outcome> {
        self.session.publish_record()?;
        self.gather()?;
        let mut forced: Option<Reason> = None;
        loop {
            let id: Nonce = random()?;
            let to_share = match forced.clone() {
                Some(reason) => Err(reason),
                None => self.memory_to_share(segment_bytes)?,
            };
            let step = match to_share {
                Err(reason) => {
                    let hosts = if forced.is_none() { hosts(&self.records) } else { None };
                    if self.all_confirm(id, reason.text())? {
                        return self.decide_without_memory(id, reason, hosts);
                    }
                    Step::Changed
                }
                Ok(to_share) => self.share(id, to_share)?,
            };
            self.session.backoff.refresh();
            match step {
                Step::Met(met) => return Ok(Outcome::Shared(*met)),
                // The failure may be over with the rank's new process, so the next attempt starts without this reason.
                Step::Changed => forced = None,
                Step::Impossible(reason) => forced = Some(reason),
            }
        }
    }

    pub(super) fn size(&self) -> usize {
        self.session.config.size
    }

    pub(super) fn nonce(&self, rank: usize) -> Nonce {
        self.records[rank].as_ref().map_or([0; 16], |record| record.nonce)
    }

    pub(super) fn decision(&self, id: Nonce, mode: Mode, text: &str, detail: &[u8]) -> DecisionMessage {
        let nonces = (0..self.size()).map(|rank| self.nonce(rank)).collect();
        let policy =
            if matches!(mode, Mode::Share | Mode::Hosts) { self.session.config.policy.clone() } else { String::new() };
        DecisionMessage {
            id,
            nonces,
            mode,
            text: text.into(),
            detail: detail.into(),
            policy,
            known: Default::default(),
            network: None,
        }
    }

    /// Publishes a decision, in the mailboxes of the ranks on this host and, for all ranks, in the store.
    pub(super) fn publish(&self, decision: &DecisionMessage) -> Result<()> {
        self.post(decision);
        self.store(decision)
    }

    pub(super) fn store(&self, decision: &DecisionMessage) -> Result<()> {
        self.session.store.set(DECISION_KEY, &decision.write())
    }

    /// Sends a decision to the mailboxes of the ranks on this host. Returns true if all ranks were reached.
    pub(super) fn post(&self, decision: &DecisionMessage) -> bool {
        let bytes = decision.write();
        let here = self.session.identity();
        let mut reached = true;
        for record in &self.records[1..] {
            let body = record.as_ref().and_then(|record| record.body.as_ref()).filter(|body| {
                let there = &body.identity;
                (&there.boot_id, there.netns) == (&here.boot_id, here.netns) && !body.mailbox.is_empty()
            });
            reached &= body.is_some_and(|body| unix_socket::post(&body.mailbox, &bytes).is_ok());
        }
        reached
    }

    /// Whether to check the store now for each missing rank. True at intervals, and shortly before the deadline.
    pub(super) fn due(&mut self) -> bool {
        let due = self.looked.elapsed() >= LOOK || self.session.backoff.ends();
        if due {
            self.looked = Instant::now();
        }
        due
    }

    /// Reads a rank's record. Returns true if it is new. If a record cannot be parsed or its group has a different
    /// size, an earlier job left it, and it is ignored.
    pub(super) fn look(&mut self, rank: usize) -> Result<bool> {
        let size = self.size() as u32;
        let found = self.session.store.try_get(&record_key(rank))?.and_then(|bytes| Record::read(&bytes));
        let Some(found) = found.filter(|record| record.body.as_ref().is_none_or(|body| body.size == size)) else {
            return Ok(false);
        };
        let new = self.records[rank].as_ref().is_none_or(|known| known.nonce != found.nonce);
        self.records[rank] = Some(found);
        if new {
            self.told_waits = None;
        }
        Ok(new)
    }

    /// Waits until every rank has a record.
    fn gather(&mut self) -> Result<()> {
        loop {
            let before = self.missing();
            let due = self.due();
            for rank in &before {
                // Unless a full check is due, stop at the first rank without a record, to save store requests.
                if !self.look(*rank)? && !due {
                    break;
                }
            }
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(());
            }
            if missing.len() < before.len() {
                self.session.backoff.refresh();
            }
            self.pause(&missing, "rank 0 waits for the record in the store", [].into_iter())?;
        }
    }

    fn missing(&self) -> Vec<usize> {
        (1..self.size()).filter(|rank| self.records[*rank].is_none()).collect()
    }

    /// Pauses, and publishes which ranks are missing. Fails at the deadline, with an error that names them.
    pub(super) fn pause<'s>(
        &mut self,
        missing: &[usize],
        waits: &str,
        sockets: impl Iterator<Item = &'s OwnedFd>,
    ) -> Result<()> {
        let informing = Duration::from_secs(1).min(self.session.config.timeout / 4);
        if self.session.backoff.elapsed() > informing && self.told_waits.as_deref() != Some(missing) {
            let text = format!("T{}", self.session.missing_text(missing, waits));
            self.session.store.set(WAITS, &self.decision([0; 16], Mode::Failed, &text, &[]).write())?;
            self.told_waits = Some(missing.to_vec());
        }
        if self.session.backoff.pause(sockets)? {
            return Ok(());
        }
        Err(Error::timeout(self.session.missing_text(missing, waits)))
    }

    /// Makes the memory to share, or returns the reason why there is none.
    fn memory_to_share(&self, segment_bytes: &SegmentBytes) -> Result<std::result::Result<MemoryToShare, Reason>> {
        let bodies = match agreeable(&self.records) {
            Ok(bodies) => bodies,
            Err(reason) => return Ok(Err(reason.into())),
        };
        let headroom = bodies.iter().filter_map(|body| body.identity.headroom).min();
        let headroom = headroom.map_or(usize::MAX, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        let masks: Vec<Vec<u64>> = bodies.iter().map(|body| body.identity.affinity.clone()).collect();
        let quota = bodies.iter().filter_map(|body| body.identity.quota_millicores).min();
        let local_cores = topology::agreed_cores(&masks, quota);
        let wishes: Vec<Wish> = bodies.iter().map(|body| wish_of(body)).collect();
        let threads = threads::agreed(&wishes, local_cores);
        let nodes = self.nodes(&bodies);
        let bytes = match segment_bytes(threads, headroom) {
            Ok(bytes) => bytes,
            Err(reason) => return Ok(Err(reason.into())),
        };
        if bytes < hello_bytes(self.size()) {
            return Err(Error::bug(format!("sagellm: a segment of {bytes} bytes for {} ranks", self.size())));
        }
        Ok(match Segment::create(bytes) {
            Ok((segment, memory)) => {
                let group_peers = self.group_peers();
                Ok(MemoryToShare { segment, memory, local_cores, threads, nodes, group_peers })
            }
            Err((error, text)) => Err(Reason::of(&error, text)),
        })
    }

    /// The NUMA nodes or caches of the ranks, if the option asks for them.
    fn nodes(&self, bodies: &[&Body]) -> Nodes {
        let config = self.session.config;
        if !config.settings.numa {
            return Nodes::none();
        }
        let places = bodies.iter().map(|body| (body.identity.node, body.identity.cache));
        Nodes::of_group(&places.collect::<Vec<_>>()).unwrap_or_else(|(level, reason)| {
            // Subgroups inherit the option, and a group over several hosts has several groups inside each.
            let key = if level == log::Level::Warn { "a warning about numa" } else { "news about numa" };
            if first_time(key) {
                log::log!(level, "the option numa has no effect in group '{}': {reason}", config.name);
            }
            Nodes::none()
        })
    }

    /// Returns the oldest of this rank's sets of known peers (`KnownPeers`) that has every rank of the group, all of
    /// them alive.
    fn group_peers(&self) -> Option<GroupPeers> {
        let place = |record: &Option<Record>, id: Nonce| {
            let known = &record.as_ref()?.body.as_ref()?.known;
            known.iter().find(|(other, _)| *other == id).map(|(_, place)| *place as usize)
        };
        self.session.known_peers.iter().find_map(|known_peers| {
            let places: Option<Vec<usize>> =
                self.records.iter().map(|record| place(record, known_peers.id())).collect();
            GroupPeers::new(known_peers, places?, 0).filter(GroupPeers::lives)
        })
    }

    /// Publishes that shared memory is impossible, and waits until every rank has confirmed this under its present
    /// nonce. The confirmation is needed because the record that rules out shared memory may come from an earlier
    /// incarnation. Returns false if a rank has a new nonce.
    fn all_confirm(&mut self, id: Nonce, reason: &str) -> Result<bool> {
        self.publish(&self.decision(id, Mode::Ask, reason, &[]))?;
        let mut missing: Vec<usize> = (1..self.size()).collect();
        loop {
            let before = missing.len();
            let due = self.due();
            for rank in std::mem::take(&mut missing) {
                // Stop at the first rank without an answer, like `gather`.
                if (!missing.is_empty() && !due) || self.answered(rank, id)?.is_none() {
                    missing.push(rank);
                }
            }
            if missing.is_empty() {
                return Ok(true);
            }
            if missing.len() < before {
                self.session.backoff.refresh();
            }
            for rank in missing.iter().filter(|_| due) {
                if self.look(*rank)? {
                    return Ok(false);
                }
            }
            self.pause(&missing, "rank 0 waits for the answer in the store", [].into_iter())?;
        }
    }

    /// Makes the final decision for ranks that cannot share memory: the group spans `hosts`, or a delegate serves it.
    fn decide_without_memory(&self, id: Nonce, reason: Reason, hosts: Option<Vec<usize>>) -> Result<Outcome> {
        one_delegate(&self.records)?; // the option also decides which engine serves a group over several hosts
        // gloo would need more descriptors. Its thread ends the process if it cannot accept a connection (observed).
        if let Reason::OpenFiles(reason) = &reason {
            return Err(Error::system(format!(
                "sagellm: group '{}' cannot be made: {reason}. Raise the limit of open files of every rank (ulimit -n); gloo \
                 would need more of them than shared memory does",
                self.session.config.name
            )));
        }
        // All ranks report the same reason, so it is cut to what fits into the message.
        let reason = clip(reason.text()).to_string();
        let network = self.network(&reason)?;
        match hosts {
            Some(hosts) => {
                let detail: Vec<u8> = hosts.iter().flat_map(|host| (*host as u16).to_le_bytes()).collect();
                self.publish(&DecisionMessage { network, ..self.decision(id, Mode::Hosts, &reason, &detail) })?;
                Ok(Outcome::Hosts { hosts, id, reason, policy: self.session.config.policy.clone(), network })
            }
            None => {
                self.publish(&DecisionMessage { network, ..self.decision(id, Mode::Delegate, &reason, &[]) })?;
                Ok(Outcome::Delegate { reason, id, network })
            }
        }
    }

    /// Returns how the ranks reach each other if gloo or our own link connects them. None if another backend connects
    /// them, or if a rank lists no addresses. If the ranks have no common `Way`, fails with one text for all of them.
    /// If this check were missing, each rank would later fail alone, or wait for the others until its timeout.
    fn network(&self, reason: &str) -> Result<Option<Network>> {
        let config = self.session.config;
        let bodies: Option<Vec<&Body>> =
            self.records.iter().map(|record| record.as_ref().and_then(|record| record.body.as_ref())).collect();
        let Some(bodies) = bodies.filter(|_| config.delegate == Config::LINK) else { return Ok(None) };
        let ranks: Vec<addresses::Rank> = bodies.iter().map(|body| body.reached()).collect();
        addresses::common(&ranks).map_err(|what| {
            Error::system(format!(
                "sagellm: group '{}' of {} ranks needs connections between them ({reason}), and {what}",
                config.name, config.size
            ))
        })
    }

    /// Returns a rank's answer to decision `id` in the store. None if there is no answer yet.
    pub(super) fn answered(&self, rank: usize, id: Nonce) -> Result<Option<Option<Reason>>> {
        let answer = self.session.store.try_get(&answer_key(rank))?.and_then(|bytes| Answer::read(&bytes));
        Ok(answer.filter(|answer| answer.id == id).map(|answer| answer.reason))
    }
}

fn wish_of(body: &Body) -> Wish {
    let cores = topology::count_mask(&body.identity.affinity).max(1);
    Wish { threads: body.threads.most as usize, named: body.threads.named, cores }
}

/// Returns the bodies of all records, if these ranks may share memory. Otherwise the reason why they may not, which
/// names the first rank that differs from rank 0. Pure.
fn agreeable(records: &[Option<Record>]) -> std::result::Result<Vec<&Body>, String> {
    let own = records[0].as_ref().expect("rank 0 has its own record");
    let mut bodies: Vec<&Body> = Vec::new();
    for (rank, record) in records.iter().enumerate() {
        let record = record.as_ref().ok_or_else(|| format!("there is no record of rank {rank}"))?;
        if record.protocol != PROTOCOL || record.version != own.version {
            return Err(format!("rank {rank} runs sagellm {}, rank 0 runs {}", record.version, own.version));
        }
        bodies.push(record.body.as_ref().ok_or_else(|| format!("the record of rank {rank} is empty"))?);
    }
    if let Some(rank) = bodies.iter().position(|body| !body.wish.is_empty()) {
        let wish = &bodies[rank].wish;
        let unanimous = bodies.iter().all(|body| body.wish == *wish);
        return Err(if unanimous { wish.clone() } else { format!("rank {rank} asked for it: {wish}") });
    }
    let here = &bodies[0].identity;
    for (rank, body) in bodies.iter().enumerate() {
        let there = &body.identity;
        let (host, own_host) = (&there.hostname, &here.hostname);
        if there.boot_id != here.boot_id || there.boot_id.is_empty() {
            return Err(format!("rank {rank} runs on host {host}, rank 0 on host {own_host} (their boot ids differ)"));
        }
        if there.uid != here.uid {
            return Err(format!("rank {rank} runs as uid {}, rank 0 as uid {}", there.uid, here.uid));
        }
        if there.netns != here.netns {
            return Err(format!("rank {rank} ({host}) is in another network namespace than rank 0 ({own_host})"));
        }
    }
    Ok(bodies)
}

/// Fails if the ranks name different delegates, because such ranks would wait for each other forever.
fn one_delegate(records: &[Option<Record>]) -> Result<()> {
    let named = |record: &Option<Record>| Some(record.as_ref()?.body.as_ref()?.delegate.clone());
    let own = named(&records[0]);
    // If a rank has another version, its delegate is unknown. The version mismatch is a separate error.
    match records
        .iter()
        .enumerate()
        .find_map(|(rank, record)| named(record).filter(|it| Some(it) != own.as_ref()).map(|it| (rank, it)))
    {
        Some((rank, other)) => Err(Error::invalid(format!(
            "sagellm: the option delegate is '{}' on rank 0 and '{other}' on rank {rank}; all ranks of a group need the \
             same one",
            own.unwrap_or_default()
        ))),
        None => Ok(()),
    }
}

/// Returns the number of each rank's host, counted in the order of the ranks. Ranks of one machine that have different
/// users or network namespaces count as ranks on different hosts. None if all ranks are on one host, or if something
/// else keeps a rank from sharing memory, for instance another version, its own wish or an unknown boot id.
fn hosts(records: &[Option<Record>]) -> Option<Vec<usize>> {
    let own = records[0].as_ref()?;
    let mut seen: Vec<(&str, u32, u64)> = Vec::new();
    let mut hosts = Vec::new();
    for record in records {
        let record = record.as_ref().filter(|it| it.protocol == PROTOCOL && it.version == own.version)?;
        let body = record.body.as_ref().filter(|body| body.wish.is_empty() && !body.identity.boot_id.is_empty())?;
        let place = (body.identity.boot_id.as_str(), body.identity.uid, body.identity.netns);
        let host = seen.iter().position(|known| *known == place).unwrap_or_else(|| {
            seen.push(place);
            seen.len() - 1
        });
        hosts.push(host);
    }
    (seen.len() > 1 && seen.len() <= usize::from(u16::MAX)).then_some(hosts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::messages::Identity;

    fn record(change: impl FnOnce(&mut Record, &mut Body)) -> Option<Record> {
        let mut body = Body {
            size: 2,
            identity: Identity::here(),
            wish: String::new(),
            delegate: "gloo".into(),
            known: Vec::new(),
            mailbox: Vec::new(),
            addresses: Default::default(),
            threads: Default::default(),
        };
        let mut record = Record { nonce: [1; 16], protocol: PROTOCOL, version: "1".into(), body: None };
        change(&mut record, &mut body);
        Some(Record { body: Some(body), ..record })
    }

    #[test]
    fn the_first_rank_that_differs_is_named() {
        let same = || record(|_, _| ());
        assert_eq!(agreeable(&[same(), same()]).unwrap().len(), 2);
        let cases: [(Option<Record>, &str); 5] = [
            (record(|_, body| body.identity.boot_id = "other".into()), "rank 2 runs on host"),
            (record(|_, body| body.identity.uid += 1), "rank 2 runs as uid"),
            (record(|_, body| body.identity.netns += 1), "another network namespace"),
            (record(|record, _| record.version = "2".into()), "rank 2 runs sagellm 2, rank 0 runs 1"),
            (record(|_, body| body.wish = "slow".into()), "rank 2 asked for it: slow"),
        ];
        for (other, expected) in cases {
            let reason = agreeable(&[same(), same(), other]).unwrap_err();
            assert!(reason.contains(expected), "{reason}");
        }
        let wishes = [record(|_, body| body.wish = "all".into()), record(|_, body| body.wish = "all".into())];
        assert_eq!(agreeable(&wishes).unwrap_err(), "all");
        let far = || record(|_, body| body.identity.boot_id = "far".into());
        assert_eq!(hosts(&[same(), far(), same(), far()]), Some(vec![0, 1, 0, 1]));
        assert_eq!(hosts(&[same(), same()]), None, "one host");
        assert_eq!(hosts(&[same(), far(), record(|_, body| body.wish = "no".into())]), None, "somebody refuses");
        assert_eq!(one_delegate(&[same(), far(), None]), Ok(()));
        let text = one_delegate(&[same(), far(), record(|_, body| body.delegate = "mpi".into())]).unwrap_err();
        assert!(text.text().contains("'gloo' on rank 0 and 'mpi' on rank 2"), "{text}");
        // An unknown boot id proves nothing, even if both ranks' are unknown.
        let unknown = || record(|_, body| body.identity.boot_id.clear());
        assert!(agreeable(&[unknown(), unknown()]).is_err());
    }
}
