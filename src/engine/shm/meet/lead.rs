//! Rank 0's part of the meeting: gather the records, publish the verdict, hand out the memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::record::{Answer, Body, Hello, Mode, Nonce, Offer, PROTOCOL, Record, Verdict};
use super::{Met, Outcome, Peer, Talk, VERDICT, WAITS, answer_key, has_signed, hello_bytes, record_key, sign, socket};
use crate::engine::shm::segment::{Segment, random};
use crate::error::{Error, Result};
use crate::topology;

/// More ranks on one host than this would not fit into the messages below, nor make sense.
const MAX_SHARED: usize = 1024;
/// Up to here the processes' descriptors are passed around; that is the square of the ranks in descriptors.
const MAX_PASSED: usize = 128;
/// Ranks that come together finish within this; only later does rank 0 ask the store about those who are missing.
const PROMPT: Duration = Duration::from_millis(5);

/// How one verdict ended.
enum Step {
    Met(Box<Met>),
    Delegated,
    /// A rank has a new nonce; its record was replaced.
    Changed,
    /// Sharing is impossible, for this reason.
    Impossible(String),
}

struct Lead<'t, 'a> {
    talk: &'t mut Talk<'a>,
    records: Vec<Option<Record>>,
    /// The missing ranks as the others were last told them, under the nonces that are known now.
    told_waits: Option<Vec<usize>>,
}

/// What all records together allow.
struct Plan {
    segment: Segment,
    memory: OwnedFd,
    local_cores: usize,
}

/// A rank that came to the socket.
struct Guest {
    socket: OwnedFd,
    pid: i32,
    pidfd: Option<OwnedFd>,
    /// Messages of the offer that went out; `usize::MAX` when all did.
    parts_sent: usize,
    mapped: bool,
}

pub(super) fn lead(talk: &mut Talk, segment_bytes: &dyn Fn(usize) -> usize) -> Result<Outcome> {
    let mut records = vec![None; talk.config.size];
    records[0] = Some(talk.own.clone());
    let mut lead = Lead { talk, records, told_waits: None };
    let result = lead.run(segment_bytes);
    if let Err(error) = &result {
        // The others must not wait for a rank 0 that has gone; where even this fails, their own deadline ends them.
        let text = format!("{}{}", error.code(), error.text());
        let verdict = lead.verdict([0; 16], Mode::Failed, &text, &[]);
        let _ = lead.talk.store.set(VERDICT, &verdict.write());
    }
    result
}

impl Lead<'_, '_> {
    fn run(&mut self, segment_bytes: &dyn Fn(usize) -> usize) -> Result<Outcome> {
        self.talk.publish_record()?;
        self.gather()?;
        let mut forced: Option<String> = None;
        loop {
            let id: Nonce = random()?;
            let plan = match forced.clone() {
                Some(reason) => Err(reason),
                None => self.plan(segment_bytes)?,
            };
            let step = match plan {
                Err(reason) => match self.ask(id, &reason)? {
                    Step::Delegated => return Ok(Outcome::Delegate(reason)),
                    step => step,
                },
                Ok(plan) => self.share(id, plan)?,
            };
            self.talk.patience.refresh();
            match step {
                Step::Met(met) => return Ok(Outcome::Shared(*met)),
                // With another process on that rank it may work, so that is tried afresh.
                Step::Changed | Step::Delegated => forced = None,
                Step::Impossible(reason) => forced = Some(reason),
            }
        }
    }

    fn size(&self) -> usize {
        self.talk.config.size
    }

    fn nonce(&self, rank: usize) -> Nonce {
        self.records[rank].as_ref().map_or([0; 16], |record| record.nonce)
    }

    fn verdict(&self, id: Nonce, mode: Mode, text: &str, socket: &[u8]) -> Verdict {
        let nonces = (0..self.size()).map(|rank| self.nonce(rank)).collect();
        Verdict { id, nonces, mode, text: text.into(), socket: socket.into() }
    }

    /// Reads a rank's record; true when it is a new one. What cannot be read, or is of a group of another size, was
    /// left by somebody else.
    fn look(&mut self, rank: usize) -> Result<bool> {
        let size = self.size() as u32;
        let found = self.talk.store.try_get(&record_key(rank))?.and_then(|bytes| Record::read(&bytes));
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

    /// Waits until there is a record of every rank.
    fn gather(&mut self) -> Result<()> {
        loop {
            let mut missing: Vec<usize> = (1..self.size()).filter(|rank| self.records[*rank].is_none()).collect();
            let before = missing.len();
            for rank in std::mem::take(&mut missing) {
                if !self.look(rank)? {
                    missing.push(rank);
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            if missing.len() < before {
                self.talk.patience.refresh();
            }
            self.pause(&missing, "rank 0 waits for the record in the store", [].into_iter())?;
        }
    }

    /// Pauses, and keeps the others informed of who is missing. At the deadline the error that names them.
    fn pause<'s>(&mut self, missing: &[usize], waits: &str, sockets: impl Iterator<Item = &'s OwnedFd>) -> Result<()> {
        let informing = Duration::from_secs(1).min(self.talk.config.timeout / 4);
        if self.talk.patience.elapsed() > informing && self.told_waits.as_deref() != Some(missing) {
            let text = format!("T{}", self.talk.missing_text(missing, waits));
            self.talk.store.set(WAITS, &self.verdict([0; 16], Mode::Failed, &text, &[]).write())?;
            self.told_waits = Some(missing.to_vec());
        }
        if self.talk.patience.pause(sockets)? {
            return Ok(());
        }
        Err(Error::Timeout(self.talk.missing_text(missing, waits)))
    }

    /// The memory to share, or why there is none.
    fn plan(&self, segment_bytes: &dyn Fn(usize) -> usize) -> Result<std::result::Result<Plan, String>> {
        let bodies = match agreeable(&self.records) {
            Ok(bodies) => bodies,
            Err(reason) => return Ok(Err(reason)),
        };
        let headroom = bodies.iter().filter_map(|body| body.identity.headroom).min();
        let headroom = headroom.map_or(usize::MAX, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        let bytes = segment_bytes(headroom);
        if bytes == 0 {
            return Ok(Err(format!("only {} MiB of memory are left for shared memory", headroom >> 20)));
        }
        if bytes < hello_bytes(self.size()) {
            return Err(Error::Bug(format!("sagellm: a segment of {bytes} bytes for {} ranks", self.size())));
        }
        let masks: Vec<Vec<u64>> = bodies.iter().map(|body| body.identity.affinity.clone()).collect();
        let quota = bodies.iter().filter_map(|body| body.identity.quota_millicores).min();
        Ok(match Segment::create(bytes) {
            Ok((segment, memory)) => Ok(Plan { segment, memory, local_cores: topology::agreed_cores(&masks, quota) }),
            Err(error) => Err(error.text().trim_start_matches("sagellm: ").to_string()),
        })
    }

    /// Shared memory is out of the question. That is final only when every rank has confirmed it under its present
    /// nonce: a record that is the reason may be of an earlier incarnation.
    fn ask(&mut self, id: Nonce, reason: &str) -> Result<Step> {
        self.talk.store.set(VERDICT, &self.verdict(id, Mode::Ask, reason, &[]).write())?;
        let mut missing: Vec<usize> = (1..self.size()).collect();
        loop {
            let before = missing.len();
            for rank in std::mem::take(&mut missing) {
                if self.answered(rank, id)?.is_none() {
                    missing.push(rank);
                }
            }
            if missing.is_empty() {
                self.talk.store.set(VERDICT, &self.verdict(id, Mode::Delegate, reason, &[]).write())?;
                return Ok(Step::Delegated);
            }
            if missing.len() < before {
                self.talk.patience.refresh();
            }
            for rank in &missing {
                if self.look(*rank)? {
                    return Ok(Step::Changed);
                }
            }
            self.pause(&missing, "rank 0 waits for the answer in the store", [].into_iter())?;
        }
    }

    /// A rank's answer to the verdict `id` in the store.
    fn answered(&self, rank: usize, id: Nonce) -> Result<Option<String>> {
        let answer = self.talk.store.try_get(&answer_key(rank))?.and_then(|bytes| Answer::read(&bytes));
        Ok(answer.filter(|answer| answer.id == id).map(|answer| answer.reason))
    }

    /// Publishes the socket and serves those who come, until all have signed the memory.
    fn share(&mut self, id: Nonce, plan: Plan) -> Result<Step> {
        let name: Vec<u8> = format!("sagellm-{:032x}", u128::from_le_bytes(random()?)).into_bytes();
        let listener = match socket::listen(&name, self.size()) {
            Ok(listener) => listener,
            Err(error) => return Ok(Step::Impossible(format!("rank 0 cannot open a unix socket ({error})"))),
        };
        sign(&plan.segment, 0, &self.nonce(0), &id);
        let mut guests: Vec<Option<Guest>> = (0..self.size()).map(|_| None).collect();
        let mut strangers: Vec<OwnedFd> = Vec::new();
        let mut came = vec![false; self.size()];
        self.talk.store.set(VERDICT, &self.verdict(id, Mode::Share, "", &name).write())?;
        let began = Instant::now();
        loop {
            if let Err(reason) = self.welcome(id, &listener, &mut strangers, &mut guests) {
                return Ok(Step::Impossible(reason));
            }
            if guests[1..].iter().all(Option::is_some) {
                if let Err(reason) = self.offer(id, &plan, &mut guests) {
                    return Ok(Step::Impossible(reason));
                }
            }
            if let Err(reason) = hear(id, &mut guests) {
                return Ok(Step::Impossible(reason));
            }
            for (came, guest) in came.iter_mut().zip(&guests) {
                *came |= guest.is_some();
            }
            let unfinished: Vec<usize> =
                (1..self.size()).filter(|rank| guests[*rank].as_ref().is_none_or(|guest| !guest.mapped)).collect();
            if unfinished.is_empty() {
                return Ok(self.conclude(id, plan, guests));
            }
            if began.elapsed() > PROMPT {
                for rank in &unfinished {
                    if self.look(*rank)? {
                        return Ok(Step::Changed);
                    }
                    if let Some(reason) = self.answered(*rank, id)?.filter(|reason| !reason.is_empty()) {
                        return Ok(Step::Impossible(reason));
                    }
                }
            }
            let open = guests.iter().flatten().filter(|guest| !guest.mapped).map(|guest| &guest.socket);
            let sockets = strangers.iter().chain(open).chain([&listener]);
            let (missing, waits) = behind(&guests, &came);
            self.pause(&missing, waits, sockets)?;
        }
    }

    /// Takes connections and finds out who they are. Anyone on this host may connect, so only a rank that shows the
    /// nonce that the verdict names is let in. The error is a reason not to share.
    fn welcome(
        &mut self,
        id: Nonce,
        listener: &OwnedFd,
        strangers: &mut Vec<OwnedFd>,
        guests: &mut [Option<Guest>],
    ) -> std::result::Result<(), String> {
        while let Some(socket) =
            socket::accept(listener).map_err(|error| format!("rank 0 cannot accept connections ({error})"))?
        {
            // Those who connect and stay silent must not use up our descriptors.
            if strangers.len() > 2 * guests.len() + 64 {
                strangers.remove(0);
            }
            strangers.push(socket);
        }
        let mut waiting = Vec::new();
        for socket in strangers.drain(..) {
            let message = match socket::receive(&socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    waiting.push(socket);
                    continue;
                }
                Err(_) => continue,
                Ok((message, _)) => message,
            };
            let Some(hello) = Hello::read(&message).filter(|hello| hello.id == id) else { continue };
            let rank = hello.rank as usize;
            if rank == 0 || rank >= guests.len() || self.nonce(rank) != hello.nonce {
                continue;
            }
            self.talk.patience.refresh();
            guests[rank] = Some(self.guest(rank, socket)?);
        }
        *strangers = waiting;
        Ok(())
    }

    fn guest(&self, rank: usize, socket: OwnedFd) -> std::result::Result<Guest, String> {
        let (uid, pid) = socket::peer(&socket)
            .map_err(|error| format!("rank {rank}'s connection does not say who it is ({error})"))?;
        let own = self.talk.identity().uid;
        if uid != own {
            return Err(format!("rank {rank} runs as uid {uid}, rank 0 as uid {own} (seen from rank 0)"));
        }
        let pidfd = match topology::peer_pidfd(&socket) {
            Ok(pidfd) => Some(pidfd),
            Err(_) if pid > 0 => socket::pidfd_open(pid).ok(),
            Err(_) => None,
        };
        Ok(Guest { socket, pid, pidfd, parts_sent: 0, mapped: false })
    }

    /// Sends everyone the memory and the others' processes, as far as the sockets take it now.
    fn offer(&mut self, id: Nonce, plan: &Plan, guests: &mut [Option<Guest>]) -> std::result::Result<(), String> {
        if guests.iter().flatten().all(|guest| guest.parts_sent == usize::MAX) {
            return Ok(());
        }
        let own_process = socket::pidfd_open(std::process::id() as i32).ok();
        let hosts: Vec<String> = self.records.iter().map(hostname).collect();
        let ranks: Vec<(i32, String)> = guests
            .iter()
            .zip(hosts)
            .map(|(guest, host)| (guest.as_ref().map_or(std::process::id() as i32, |guest| guest.pid), host))
            .collect();
        let passed = guests.len() <= MAX_PASSED;
        for rank in 1..guests.len() {
            if guests[rank].as_ref().is_none_or(|guest| guest.parts_sent == usize::MAX) {
                continue;
            }
            let processes: Vec<(u32, BorrowedFd)> = (0..guests.len())
                .filter(|other| passed && *other != rank)
                .filter_map(|other| {
                    let pidfd = guests[other].as_ref().map_or(own_process.as_ref(), |guest| guest.pidfd.as_ref());
                    Some((other as u32, pidfd?.as_fd()))
                })
                .collect();
            let messages = offers(id, plan, &ranks, self.talk.identity().pidns, &processes);
            let Some(guest) = &guests[rank] else { continue };
            let mut sent = guest.parts_sent;
            while let Some((message, descriptors)) = messages.get(sent) {
                match socket::send(&guest.socket, message, descriptors) {
                    Ok(()) => sent += 1,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // Its connection is closed: `hear` finds that out.
                    Err(error)
                        if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
                    {
                        break;
                    }
                    Err(error) => {
                        return Err(format!("rank 0 cannot pass descriptors to rank {rank} ({error})"));
                    }
                }
            }
            let complete = sent == messages.len();
            if let Some(guest) = &mut guests[rank] {
                guest.parts_sent = if complete { usize::MAX } else { sent };
            }
        }
        Ok(())
    }

    /// All have signed: looks at the signatures and says "go".
    fn conclude(&self, id: Nonce, plan: Plan, guests: Vec<Option<Guest>>) -> Step {
        for rank in 1..self.size() {
            if !has_signed(&plan.segment, rank, &self.nonce(rank), &id) {
                return Step::Impossible(format!("rank {rank} does not see the same memory as rank 0"));
            }
        }
        let go = Answer { id, reason: String::new() }.write();
        let mut peers = Vec::new();
        let mut sockets = Vec::new();
        for (rank, (guest, record)) in guests.into_iter().zip(&self.records).enumerate() {
            let host = hostname(record);
            let Some(guest) = guest else {
                peers.push(Peer { pid: std::process::id() as i32, pidfd: None, host });
                continue;
            };
            // If this fails, the rank has just ended, and the watch over its socket and process will say so.
            let _ = socket::send(&guest.socket, &go, &[]);
            peers.push(Peer { pid: guest.pid, pidfd: guest.pidfd, host });
            sockets.push((rank, guest.socket));
        }
        Step::Met(Box::new(Met { segment: plan.segment, peers, sockets, local_cores: plan.local_cores }))
    }
}

fn hostname(record: &Option<Record>) -> String {
    record
        .as_ref()
        .and_then(|record| record.body.as_ref())
        .map_or_else(String::new, |body| body.identity.hostname.clone())
}

/// The ranks that all others wait for, and what for. Those who came and wait for the rest are not among them, nor those
/// whose patience ended a moment before ours.
fn behind(guests: &[Option<Guest>], came: &[bool]) -> (Vec<usize>, &'static str) {
    let others = 1..guests.len();
    let absent: Vec<usize> = others.clone().filter(|rank| !came[*rank]).collect();
    if !absent.is_empty() {
        return (absent, "rank 0 waits for the connection to its socket");
    }
    let left: Vec<usize> = others.clone().filter(|rank| guests[*rank].is_none()).collect();
    if !left.is_empty() {
        return (left, "the connection to rank 0's socket was closed again");
    }
    let unmapped = others.filter(|rank| guests[*rank].as_ref().is_some_and(|guest| !guest.mapped));
    (unmapped.collect(), "rank 0 waits for the word that the shared memory is mapped")
}

/// What the guests say: "mapped", or why they cannot. A closed connection makes a rank missing again.
fn hear(id: Nonce, guests: &mut [Option<Guest>]) -> std::result::Result<(), String> {
    for place in guests.iter_mut() {
        let Some(guest) = place.as_mut().filter(|guest| !guest.mapped) else { continue };
        match socket::receive(&guest.socket) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok((message, _)) if !message.is_empty() => {
                if let Some(answer) = Answer::read(&message).filter(|answer| answer.id == id) {
                    if !answer.reason.is_empty() {
                        return Err(answer.reason);
                    }
                    guest.mapped = true;
                }
            }
            _ => *place = None,
        }
    }
    Ok(())
}

/// The messages of one offer, each with its descriptors.
fn offers<'f>(
    id: Nonce,
    plan: &'f Plan,
    ranks: &[(i32, String)],
    pidns: u64,
    processes: &[(u32, BorrowedFd<'f>)],
) -> Vec<(Vec<u8>, Vec<BorrowedFd<'f>>)> {
    let first = processes.len().min(socket::MAX_DESCRIPTORS - 1);
    let mut groups = vec![&processes[..first]];
    groups.extend(processes[first..].chunks(socket::MAX_DESCRIPTORS));
    let parts = groups.len() as u32;
    let message = |(part, group): (usize, &[(u32, BorrowedFd<'f>)])| {
        let offer = Offer {
            id,
            part: part as u32,
            parts,
            segment_len: plan.segment.len() as u64,
            backing: plan.segment.backing(),
            local_cores: plan.local_cores as u32,
            pidns,
            ranks: if part == 0 { ranks.to_vec() } else { Vec::new() },
            process_of: group.iter().map(|(rank, _)| *rank).collect(),
        };
        let memory = (part == 0).then(|| plan.memory.as_fd());
        (offer.write(), memory.into_iter().chain(group.iter().map(|(_, fd)| *fd)).collect())
    };
    groups.into_iter().enumerate().map(message).collect()
}

/// The bodies of all records when these ranks may share memory, else the reason why not. Pure: the first rank that
/// differs from rank 0 is named.
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
    if records.len() > MAX_SHARED {
        return Err(format!("{} ranks on one host are more than {MAX_SHARED}", records.len()));
    }
    Ok(bodies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::shm::meet::record::Identity;

    fn record(change: impl FnOnce(&mut Record, &mut Body)) -> Option<Record> {
        let mut body = Body { size: 2, identity: Identity::here(), wish: String::new() };
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
        // An unknown boot proves nothing, even when it is unknown on both sides.
        let unknown = || record(|_, body| body.identity.boot_id.clear());
        assert!(agreeable(&[unknown(), unknown()]).is_err());
    }

    #[test]
    fn a_long_offer_is_split_and_loses_nothing() {
        let (segment, memory) = Segment::create(4096).unwrap();
        let plan = Plan { segment, memory, local_cores: 3 };
        let processes: Vec<(u32, BorrowedFd)> = (0..600).map(|rank| (rank, plan.memory.as_fd())).collect();
        let messages = offers([7; 16], &plan, &[(5, "host".into())], 9, &processes);
        let mut ranks = Vec::new();
        for (part, (bytes, descriptors)) in messages.iter().enumerate() {
            let offer = Offer::read(bytes).unwrap();
            assert_eq!((offer.part as usize, offer.parts as usize), (part, messages.len()));
            assert_eq!(descriptors.len(), offer.process_of.len() + usize::from(part == 0));
            assert!(descriptors.len() <= socket::MAX_DESCRIPTORS);
            assert_eq!(offer.ranks.is_empty(), part != 0);
            ranks.extend(offer.process_of);
        }
        assert_eq!(ranks, (0..600).collect::<Vec<u32>>());
    }
}
