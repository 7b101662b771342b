//! Distributes the memory on rank 0. A rank that connects receives the descriptors if the decision names it, and signs
//! the memory. After all ranks have signed, rank 0 sends "go".

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use super::coordinator::{Coordinator, MemoryToShare, Step};
use super::messages::{Answer, Hello, Mode, Nonce, Offer, Reason, Record};
use super::peers::{GroupPeers, Process};
use super::{Met, acquaint, has_signed, make_ready, sign, unix_socket};
use crate::error::Result;
use crate::os::random;
use crate::os::topology;

/// Process descriptors are passed only in groups of at most this size, because their number grows with the square of
/// the number of ranks.
const MAX_PASSED: usize = 128;

/// A rank that has connected.
struct Participant {
    socket: OwnedFd,
    pid: i32,
    pidfd: Option<OwnedFd>,
    /// How many messages of the offer were sent. `usize::MAX` if all were.
    parts_sent: usize,
    mapped: bool,
}

/// The connections of the ranks while the memory is distributed.
struct Serving {
    listener: OwnedFd,
    /// Connections that have not identified themselves.
    strangers: Vec<OwnedFd>,
    /// For each rank: its connection. `None` for rank 0 and for ranks without a connection.
    participants: Vec<Option<Participant>>,
    /// For each rank: whether it has ever connected.
    came: Vec<bool>,
    /// Whether rank 0 has populated its own part of the memory.
    ready: bool,
}

impl Serving {
    fn new(listener: OwnedFd, size: usize) -> Serving {
        let participants = (0..size).map(|_| None).collect();
        Serving { listener, strangers: Vec::new(), participants, came: vec![false; size], ready: false }
    }

    fn all_came(&self) -> bool {
        self.participants[1..].iter().all(Option::is_some)
    }

    /// Returns the ranks that have not signed the memory yet.
    fn unfinished(&self) -> Vec<usize> {
        let signed = |rank: &usize| self.participants[*rank].as_ref().is_some_and(|participant| participant.mapped);
        (1..self.participants.len()).filter(|rank| !signed(rank)).collect()
    }

    /// Returns the sockets on which rank 0 waits: the listener, connections that have not identified themselves, and
    /// connections of ranks that have not mapped the memory.
    fn sockets(&self) -> impl Iterator<Item = &OwnedFd> {
        let open = self.participants.iter().flatten().filter(|participant| !participant.mapped);
        self.strangers.iter().chain(open.map(|participant| &participant.socket)).chain([&self.listener])
    }
}

impl Coordinator<'_, '_> {
    /// Publishes the socket, and serves the ranks that connect until all have signed the memory.
    pub(super) fn share(&mut self, id: Nonce, to_share: MemoryToShare) -> Result<Step> {
        let name: Vec<u8> = format!("sagellm-{:032x}", u128::from_le_bytes(random()?)).into_bytes();
        let listener = match unix_socket::listen(&name, self.size()) {
            Ok(listener) => listener,
            Err(error) => {
                let text = format!("rank 0 cannot open a unix socket ({error})");
                return Ok(Step::Impossible(Reason::of(&error, text)));
            }
        };
        sign(&to_share.segment, 0, &self.nonce(0), &id);
        let mut serving = Serving::new(listener, self.size());
        let mut decision = self.decision(id, Mode::Share, "", &name);
        if let Some(group_peers) = &to_share.group_peers {
            decision.known = (group_peers.id(), group_peers.places().iter().map(|place| *place as u32).collect());
        }
        let mut stored = !self.post(&decision);
        if stored {
            self.store(&decision)?;
        }
        // Ranks that start together have connected long before the first check of the store.
        self.looked = Instant::now();
        loop {
            if let Err(reason) = self.serve(id, &to_share, &mut serving) {
                return Ok(Step::Impossible(reason));
            }
            let unfinished = serving.unfinished();
            if unfinished.is_empty() {
                return self.conclude(id, to_share, serving.participants);
            }
            if self.due() {
                // A rank is late: its mail was lost, the rank was replaced, or it is slow.
                if !std::mem::replace(&mut stored, true) {
                    self.store(&decision)?;
                }
                if let Some(step) = self.refused_or_replaced(id, &unfinished)? {
                    return Ok(step);
                }
                // Restart the interval only now, after the two store requests per rank: if there are many ranks, most
                // of the time must be left for the connections.
                self.looked = Instant::now();
            }
            let (missing, waits) = late_ranks(&serving.participants, &serving.came);
            self.pause(&missing, waits, serving.sockets())?;
        }
    }

    /// Makes one pass over the connections: sends the memory to ranks that have connected, and reads their answers. The
    /// error is a reason not to share memory.
    fn serve(&mut self, id: Nonce, to_share: &MemoryToShare, serving: &mut Serving) -> std::result::Result<(), Reason> {
        self.welcome((id, to_share.group_peers.as_ref()), serving)?;
        // Ranks that meet for the first time receive the descriptors of all other processes, so all must have
        // connected. Known peers receive only the memory.
        let all_came = serving.all_came();
        if all_came || to_share.group_peers.is_some() {
            self.offer(id, to_share, &mut serving.participants)?;
        }
        // Rank 0 populates its part at the same time as the other ranks.
        if all_came && !serving.ready {
            make_ready(&to_share.segment, self.size(), 0).map_err(|error| Reason::Other(error.reason()))?;
            serving.ready = true;
        }
        hear(id, &mut serving.participants)?;
        for (came, participant) in serving.came.iter_mut().zip(&serving.participants) {
            *came |= participant.is_some();
        }
        Ok(())
    }

    /// Checks in the store whether an unfinished rank has a new nonce or cannot share memory.
    fn refused_or_replaced(&mut self, id: Nonce, unfinished: &[usize]) -> Result<Option<Step>> {
        for rank in unfinished {
            if self.look(*rank)? {
                return Ok(Some(Step::Changed));
            }
            if let Some(reason) = self.answered(*rank, id)?.flatten() {
                return Ok(Some(Step::Impossible(reason)));
            }
        }
        Ok(None)
    }

    /// Accepts connections and identifies them. Any process on this host may connect, so a process is accepted only if
    /// it sends a nonce that the decision names. The error is a reason not to share memory.
    fn welcome(
        &mut self,
        (id, group_peers): (Nonce, Option<&GroupPeers>),
        serving: &mut Serving,
    ) -> std::result::Result<(), Reason> {
        let Serving { listener, strangers, participants, .. } = serving;
        while let Some(socket) = unix_socket::accept(listener)
            .map_err(|error| Reason::of(&error, format!("rank 0 cannot accept connections ({error})")))?
        {
            // If connections stay silent, they must not exhaust this process's descriptors.
            if strangers.len() > 2 * participants.len() + 64 {
                strangers.remove(0);
            }
            strangers.push(socket);
        }
        let mut waiting = Vec::new();
        for socket in strangers.drain(..) {
            let message = match unix_socket::receive(&socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    waiting.push(socket);
                    continue;
                }
                Err(_) => continue,
                Ok((message, _)) => message,
            };
            let Some(hello) = Hello::read(&message).filter(|hello| hello.id == id) else { continue };
            let rank = hello.rank as usize;
            if rank == 0 || rank >= participants.len() || self.nonce(rank) != hello.nonce {
                continue;
            }
            if let Some(participant) = self.participant(rank, socket, group_peers)? {
                self.session.backoff.refresh();
                participants[rank] = Some(participant);
            }
        }
        *strangers = waiting;
        Ok(())
    }

    /// Returns the participant at the other end. None if the user differs: then the process is not the rank, but
    /// another one that has read the nonce in the store. If the user or the namespaces of a rank prevent sharing, the
    /// rank itself detects that before it sends its hello, and answers why.
    fn participant(
        &self,
        rank: usize,
        socket: OwnedFd,
        group_peers: Option<&GroupPeers>,
    ) -> std::result::Result<Option<Participant>, Reason> {
        let (uid, pid) = unix_socket::peer(&socket)
            .map_err(|error| format!("rank {rank}'s connection does not say who it is ({error})"))?;
        let own = self.session.identity().uid;
        if uid != own {
            log::warn!(
                "group '{}': a process of uid {uid} said that it is rank {rank}, which runs as uid {own}; its connection was closed",
                self.session.config.name
            );
            return Ok(None);
        }
        if let Some(group_peers) = group_peers.filter(|group_peers| !group_peers.may_be(rank, pid)) {
            let before = group_peers.peer(rank).pid;
            return Err(format!("rank {rank} is process {pid}, and was process {before} in an earlier group").into());
        }
        let pidfd = match topology::peer_pidfd(&socket) {
            _ if group_peers.is_some() => None,
            Ok(pidfd) => Some(pidfd),
            Err(_) if pid > 0 => unix_socket::pidfd_open(pid).ok(),
            Err(_) => None,
        };
        Ok(Some(Participant { socket, pid, pidfd, parts_sent: 0, mapped: false }))
    }

    /// Sends the memory and the process descriptors to every rank, as far as the sockets now accept data.
    fn offer(
        &mut self,
        id: Nonce,
        to_share: &MemoryToShare,
        participants: &mut [Option<Participant>],
    ) -> std::result::Result<(), Reason> {
        if participants.iter().flatten().all(|participant| participant.parts_sent == usize::MAX) {
            return Ok(());
        }
        // Known peers already have each other's process descriptors.
        let passed = to_share.group_peers.is_none() && participants.len() <= MAX_PASSED;
        let own_process = passed.then(|| unix_socket::pidfd_open(std::process::id() as i32).ok()).flatten();
        let hosts = self.records.iter().filter(|_| to_share.group_peers.is_none()).map(hostname);
        let ranks: Vec<(i32, String)> = participants
            .iter()
            .zip(hosts)
            .map(|(participant, host)| {
                (participant.as_ref().map_or(std::process::id() as i32, |participant| participant.pid), host)
            })
            .collect();
        for rank in 1..participants.len() {
            if participants[rank].as_ref().is_none_or(|participant| participant.parts_sent == usize::MAX) {
                continue;
            }
            let processes: Vec<(u32, BorrowedFd)> = (0..participants.len())
                .filter(|other| passed && *other != rank)
                .filter_map(|other| {
                    let pidfd = participants[other]
                        .as_ref()
                        .map_or(own_process.as_ref(), |participant| participant.pidfd.as_ref());
                    Some((other as u32, pidfd?.as_fd()))
                })
                .collect();
            let messages = offers(id, to_share, &ranks, self.session.identity().pidns, &processes);
            let Some(participant) = &participants[rank] else { continue };
            let mut sent = participant.parts_sent;
            while let Some((message, descriptors)) = messages.get(sent) {
                match unix_socket::send(&participant.socket, message, descriptors) {
                    Ok(()) => sent += 1,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // The connection is closed. `hear` will find that.
                    Err(error)
                        if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
                    {
                        break;
                    }
                    Err(error) => {
                        let text = format!("rank 0 cannot pass descriptors to rank {rank} ({error})");
                        return Err(Reason::of(&error, text));
                    }
                }
            }
            let complete = sent == messages.len();
            if let Some(participant) = &mut participants[rank] {
                participant.parts_sent = if complete { usize::MAX } else { sent };
            }
        }
        Ok(())
    }

    /// Called when all ranks have signed. Checks the signatures and sends "go".
    fn conclude(&self, id: Nonce, to_share: MemoryToShare, participants: Vec<Option<Participant>>) -> Result<Step> {
        for rank in 1..self.size() {
            if !has_signed(&to_share.segment, rank, &self.nonce(rank), &id) {
                let text = format!("rank {rank} does not see the same memory as rank 0");
                return Ok(Step::Impossible(text.into()));
            }
        }
        let go = Answer { id, reason: None }.write();
        let mut peers = Vec::new();
        let mut sockets = Vec::new();
        for (rank, (participant, record)) in participants.into_iter().zip(&self.records).enumerate() {
            let host = hostname(record);
            let Some(participant) = participant else {
                peers.push((Process { pid: std::process::id() as i32, host }, None));
                continue;
            };
            // If this fails, the rank has just ended, and the watch on its socket and process will report it.
            let _ = unix_socket::send(&participant.socket, &go, &[]);
            peers.push((Process { pid: participant.pid, host }, participant.pidfd));
            sockets.push((rank, participant.socket));
        }
        let group_peers = match to_share.group_peers {
            Some(group_peers) => group_peers,
            None => acquaint(id, 0, peers, sockets)?,
        };
        let policy = self.session.config.policy.clone();
        let MemoryToShare { segment, local_cores, threads, nodes, .. } = to_share;
        Ok(Step::Met(Box::new(Met { segment, group_peers, local_cores, threads, nodes, policy, id })))
    }
}

fn hostname(record: &Option<Record>) -> String {
    record
        .as_ref()
        .and_then(|record| record.body.as_ref())
        .map_or_else(String::new, |body| body.identity.hostname.clone())
}

/// Returns the ranks for which all others wait, and a text that says what is missing. Leaves out ranks that have
/// connected and wait for the rest, and ranks whose own deadline has just passed.
fn late_ranks(participants: &[Option<Participant>], came: &[bool]) -> (Vec<usize>, &'static str) {
    let others = 1..participants.len();
    let absent: Vec<usize> = others.clone().filter(|rank| !came[*rank]).collect();
    if !absent.is_empty() {
        return (absent, "rank 0 waits for the connection to its socket");
    }
    let left: Vec<usize> = others.clone().filter(|rank| participants[*rank].is_none()).collect();
    if !left.is_empty() {
        return (left, "the connection to rank 0's socket was closed again");
    }
    let unmapped = others.filter(|rank| participants[*rank].as_ref().is_some_and(|participant| !participant.mapped));
    (unmapped.collect(), "rank 0 waits for the word that the shared memory is mapped")
}

/// Reads the participants' answers: "mapped", or why they cannot map the memory. A rank whose connection was closed
/// counts as missing again.
fn hear(id: Nonce, participants: &mut [Option<Participant>]) -> std::result::Result<(), Reason> {
    for place in participants.iter_mut() {
        let Some(participant) = place.as_mut().filter(|participant| !participant.mapped) else { continue };
        match unix_socket::receive(&participant.socket) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok((message, _)) if !message.is_empty() => {
                if let Some(answer) = Answer::read(&message).filter(|answer| answer.id == id) {
                    if let Some(reason) = answer.reason {
                        return Err(reason);
                    }
                    participant.mapped = true;
                }
            }
            _ => *place = None,
        }
    }
    Ok(())
}

/// Returns the messages of one offer, each with its descriptors.
fn offers<'f>(
    id: Nonce,
    to_share: &'f MemoryToShare,
    ranks: &[(i32, String)],
    pidns: u64,
    processes: &[(u32, BorrowedFd<'f>)],
) -> Vec<(Vec<u8>, Vec<BorrowedFd<'f>>)> {
    let first = processes.len().min(unix_socket::MAX_DESCRIPTORS - 1);
    let mut groups = vec![&processes[..first]];
    groups.extend(processes[first..].chunks(unix_socket::MAX_DESCRIPTORS));
    let parts = groups.len() as u32;
    let message = |(part, group): (usize, &[(u32, BorrowedFd<'f>)])| {
        let offer = Offer {
            id,
            part: part as u32,
            parts,
            segment_len: to_share.segment.len() as u64,
            backing: to_share.segment.backing(),
            local_cores: to_share.local_cores as u32,
            threads: to_share.threads as u32,
            nodes: if part == 0 { to_share.nodes.list().to_vec() } else { Vec::new() },
            level: to_share.nodes.level(),
            pidns,
            ranks: if part == 0 { ranks.to_vec() } else { Vec::new() },
            process_of: group.iter().map(|(rank, _)| *rank).collect(),
        };
        let memory = (part == 0).then(|| to_share.memory.as_fd());
        (offer.write(), memory.into_iter().chain(group.iter().map(|(_, fd)| *fd)).collect())
    };
    groups.into_iter().enumerate().map(message).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::shm::memory::segment::Segment;
    use crate::engine::shm::nodes::Nodes;

    #[test]
    fn a_long_offer_is_split_and_loses_nothing() {
        let (segment, memory) = Segment::create(4096).unwrap();
        let to_share =
            MemoryToShare { segment, memory, local_cores: 3, threads: 1, nodes: Nodes::none(), group_peers: None };
        let processes: Vec<(u32, BorrowedFd)> = (0..600).map(|rank| (rank, to_share.memory.as_fd())).collect();
        let messages = offers([7; 16], &to_share, &[(5, "host".into())], 9, &processes);
        let mut ranks = Vec::new();
        for (part, (bytes, descriptors)) in messages.iter().enumerate() {
            let offer = Offer::read(bytes).unwrap();
            assert_eq!((offer.part as usize, offer.parts as usize), (part, messages.len()));
            assert_eq!(descriptors.len(), offer.process_of.len() + usize::from(part == 0));
            assert!(descriptors.len() <= unix_socket::MAX_DESCRIPTORS);
            assert_eq!(offer.ranks.is_empty(), part != 0);
            ranks.extend(offer.process_of);
        }
        assert_eq!(ranks, (0..600).collect::<Vec<u32>>());
    }
}
