//! The rendezvous on every rank except 0. Publishes a record and follows the decision.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::messages::{Answer, DecisionMessage, Hello, Mode, Nonce, Offer, Reason, Record};
use super::peers::{GroupPeers, Process};
use super::{DECISION_KEY, Met, Outcome, Session, WAITS, answer_key, hello_bytes, record_key, unix_socket};
use super::{acquaint, has_signed, make_ready, rank_list, seconds, sign};
use crate::engine::shm::memory::area::Area;
use crate::engine::shm::memory::layout::Layout;
use crate::engine::shm::memory::segment::Segment;
use crate::engine::shm::nodes::Nodes;
use crate::error::{Error, ErrorKind, Result, laid_out, relaid};

/// The outcome of connecting to rank 0's socket.
enum Joined {
    Met(Box<Met>),
    /// Rank 0 closed the connection and will publish another decision.
    Dropped,
    /// Sharing is impossible, for the given reason.
    Impossible(Reason),
}

pub(super) fn join(session: &mut Session) -> Result<Outcome> {
    session.publish_record()?;
    let mut published = Instant::now();
    let mut done_with: Option<Nonce> = None;
    loop {
        if !session.backoff.pause(session.mailbox.iter())? {
            return Err(timeout(session));
        }
        match next_decision(session)? {
            Some(decision) => match decision.mode {
                Mode::Delegate => {
                    let DecisionMessage { id, text, network, .. } = decision;
                    return Ok(Outcome::Delegate { reason: text, id, network });
                }
                Mode::Hosts => {
                    let (hosts, DecisionMessage { id, text, policy, network, .. }) = (decision.hosts(), decision);
                    return Ok(Outcome::Hosts { hosts, id, reason: text, policy, network });
                }
                Mode::Failed => return Err(told(&decision.text)),
                Mode::Ask if done_with != Some(decision.id) => {
                    answer(session, decision.id, None)?;
                    done_with = Some(decision.id);
                    session.backoff.refresh();
                }
                Mode::Share if done_with != Some(decision.id) => {
                    done_with = Some(decision.id);
                    match visit(session, &decision)? {
                        Joined::Met(met) => return Ok(Outcome::Shared(*met)),
                        Joined::Dropped => {}
                        Joined::Impossible(reason) => answer(session, decision.id, Some(reason))?,
                    }
                    session.backoff.refresh();
                }
                _ => {}
            },
            // A late process of an earlier incarnation may have overwritten this rank's record.
            None if published.elapsed() > Duration::from_millis(250) => {
                session.publish_record()?;
                published = Instant::now();
            }
            None => {}
        }
    }
}

/// Returns the latest decision that names this rank: the last one in the mailbox or, if the mailbox has none, the one
/// in the store. If this rank finds an older decision in the store, it answers that decision, and later also the newer
/// one.
fn next_decision(session: &Session) -> Result<Option<DecisionMessage>> {
    // Rank 0 sends fewer mails than this. If a stranger floods the mailbox, this rank only sleeps less.
    const MOST: usize = 16;
    let messages =
        session.mailbox.iter().flat_map(|mailbox| (0..MOST).map_while(|_| unix_socket::receive(mailbox).ok()));
    let received = messages
        .filter_map(|(bytes, _)| DecisionMessage::read(&bytes))
        .filter(|decision| names(decision, session))
        .last();
    if received.is_some() {
        return Ok(received);
    }
    let stored = session.store.try_get(DECISION_KEY)?.and_then(|bytes| DecisionMessage::read(&bytes));
    Ok(stored.filter(|decision| names(decision, session)))
}

fn names(decision: &DecisionMessage, session: &Session) -> bool {
    decision.nonces.len() == session.config.size && decision.nonces[session.config.rank] == session.own.nonce
}

fn answer(session: &Session, id: Nonce, reason: Option<Reason>) -> Result<()> {
    session.store.set(&answer_key(session.config.rank), &Answer { id, reason }.write())
}

/// Parses an error of rank 0: a code letter followed by the text. It is the error that ended rank 0 (`Mode::Failed`)
/// or, under the key `WAITS`, the one that rank 0 will report if the missing ranks do not come in time.
fn told(text: &str) -> Error {
    let mut letters = text.chars();
    let code = letters.next();
    let text = relaid(letters.as_str());
    match code {
        Some('T') => Error::timeout(text),
        Some('V') => Error::invalid(text),
        Some(_) => Error::system(text),
        None => Error::system("sagellm: rank 0 gave up without a reason"),
    }
}

fn timeout(session: &Session) -> Error {
    let (config, rank) = (session.config, session.config.rank);
    let read = |key: &str| session.store.try_get(key).ok().flatten();
    if let Some(waits) =
        read(WAITS).and_then(|bytes| DecisionMessage::read(&bytes)).filter(|waits| names(waits, session))
    {
        return told(&waits.text);
    }
    // Rank 0 has sent nothing to this rank, so only the records show which ranks are missing. Old records cannot be
    // distinguished from new ones.
    let came = |other: usize| read(&record_key(other)).is_some_and(|bytes| Record::read(&bytes).is_some());
    let missing: Vec<usize> = (0..config.size).filter(|other| *other != rank && !came(*other)).collect();
    if !missing.is_empty() {
        return Error::timeout(
            session.missing_text(&missing, &format!("rank {rank} waits for rank 0 to gather all records")),
        );
    }
    let (name, size, time) = (&config.name, config.size, seconds(config.timeout));
    let head = format!("group '{name}' of {size} ranks: rank 0 has not answered {} within {time}", rank_list(&[rank]));
    let records = "there is a record of every rank in the store, perhaps from an earlier run".to_string();
    Error::timeout(laid_out(&head, &[records], "Check that rank 0 is running and uses the same store"))
}

/// Waits for the next message from rank 0. Returns `None` if rank 0 has closed the connection.
fn next_message(session: &mut Session, socket: &OwnedFd) -> Result<io::Result<Option<unix_socket::Message>>> {
    loop {
        match unix_socket::receive(socket) {
            Ok((message, _)) if message.is_empty() => return Ok(Ok(None)),
            Ok(received) => return Ok(Ok(Some(received))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(Ok(None)),
            Err(error) => return Ok(Err(error)),
        }
        if !session.backoff.pause([socket].into_iter())? {
            return Err(timeout(session));
        }
    }
}

/// What this rank accepted from rank 0's offer.
struct Accepted {
    segment: Segment,
    local_cores: usize,
    threads: usize,
    nodes: Nodes,
    /// The process of each rank. Empty if the ranks are known peers.
    peers: Vec<(Process, Option<OwnedFd>)>,
}

/// Returns the known peers that the decision names. `Ok(None)` if the ranks meet for the first time. Fails if this rank
/// does not have the known peers that are named.
fn group_peers(session: &Session, (id, places): &(Nonce, Vec<u32>)) -> std::result::Result<Option<GroupPeers>, String> {
    if places.is_empty() {
        return Ok(None);
    }
    let named = session.known_peers.iter().find(|known_peers| known_peers.id() == *id);
    let places = places.iter().map(|place| *place as usize).collect::<Vec<_>>();
    let group_peers = named.filter(|_| places.len() == session.config.size);
    let group_peers = group_peers.and_then(|known_peers| GroupPeers::new(known_peers, places, session.config.rank));
    group_peers
        .map(Some)
        .ok_or_else(|| "rank 0 named known peers of an earlier group that this rank does not have".to_string())
}

fn visit(session: &mut Session, decision: &DecisionMessage) -> Result<Joined> {
    let rank = session.config.rank;
    let group_peers = match group_peers(session, &decision.known) {
        Ok(group_peers) => group_peers,
        Err(what) => return Ok(Joined::Impossible(format!("rank {rank}: {what}").into())),
    };
    let socket = loop {
        match unix_socket::connect(&decision.detail) {
            Ok(socket) => break socket,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !session.backoff.pause(std::iter::empty())? {
                    return Err(timeout(session));
                }
            }
            Err(error) => {
                let text = format!(
                    "rank {rank} cannot connect to rank 0's socket ({error}), though both seem to be on one host"
                );
                return Ok(Joined::Impossible(Reason::of(&error, text)));
            }
        }
    };
    match introduce(session, decision, &socket, group_peers.as_ref())? {
        Err(visit) => Ok(visit),
        Ok(accepted) => await_go(session, decision, socket, accepted, group_peers),
    }
}

/// Identifies this rank, receives the offer and signs the memory. The inner error, a `Joined`, ends the attempt early.
fn introduce(
    session: &mut Session,
    decision: &DecisionMessage,
    socket: &OwnedFd,
    group_peers: Option<&GroupPeers>,
) -> Result<std::result::Result<Accepted, Joined>> {
    let rank = session.config.rank;
    let impossible = |what: String| Ok(Err(Joined::Impossible(format!("rank {rank}: {what}").into())));
    match unix_socket::peer(socket) {
        Ok((uid, pid)) if uid == session.identity().uid => {
            if let Some(group_peers) = group_peers.filter(|group_peers| !group_peers.may_be(0, pid)) {
                let before = group_peers.peer(0).pid;
                return impossible(format!("rank 0 is process {pid}, and was process {before} in an earlier group"));
            }
        }
        Ok((uid, _)) => return impossible(format!("rank 0's socket belongs to uid {uid}")),
        Err(error) => return impossible(format!("cannot tell who owns rank 0's socket ({error})")),
    }
    let hello = Hello { id: decision.id, nonce: session.own.nonce, rank: rank as u32 };
    if unix_socket::send(socket, &hello.write(), &[]).is_err() {
        return Ok(Err(Joined::Dropped));
    }
    let mut parts: Vec<(Offer, Vec<OwnedFd>)> = Vec::new();
    loop {
        let (message, descriptors) = match next_message(session, socket)? {
            Ok(Some(received)) => received,
            Ok(None) => return Ok(Err(Joined::Dropped)),
            Err(error) => {
                let text = format!("rank {rank}: descriptors cannot be received ({error})");
                return Ok(Err(Joined::Impossible(Reason::of(&error, text))));
            }
        };
        session.backoff.refresh();
        let Some(offer) = Offer::read(&message).filter(|offer| offer.id == decision.id) else {
            return impossible("what came from rank 0 is not an offer".into());
        };
        if offer.part as usize != parts.len() || offer.parts == 0 || offer.part >= offer.parts {
            return impossible(format!("part {} of rank 0's offer came as number {}", offer.part, parts.len()));
        }
        let complete = offer.part + 1 == offer.parts;
        parts.push((offer, descriptors));
        if complete {
            break;
        }
    }
    match accept(session, decision, parts, group_peers.is_some()) {
        Ok(accepted) => Ok(Ok(accepted)),
        Err(error) if error.kind() == ErrorKind::System => impossible(error.text()),
        Err(error) => Err(error),
    }
}

/// Maps the offered memory, populates this rank's part and signs the memory.
fn accept(
    session: &Session,
    decision: &DecisionMessage,
    parts: Vec<(Offer, Vec<OwnedFd>)>,
    known: bool,
) -> Result<Accepted> {
    let (size, rank) = (session.config.size, session.config.rank);
    let wrong = |what: &str| Error::system(format!("rank 0's offer is wrong: {what}"));
    let mut pidfds: Vec<Option<OwnedFd>> = (0..size).map(|_| None).collect();
    let mut first: Option<(Offer, OwnedFd)> = None;
    for (offer, descriptors) in parts {
        let mut descriptors = descriptors.into_iter();
        if first.is_none() {
            let memory = descriptors.next().ok_or_else(|| wrong("no descriptor came"))?;
            first = Some((offer.clone(), memory));
        }
        if descriptors.len() != offer.process_of.len() {
            return Err(wrong("the number of descriptors"));
        }
        for (of, fd) in offer.process_of.iter().zip(descriptors) {
            *pidfds.get_mut(*of as usize).ok_or_else(|| wrong("a rank"))? = Some(fd);
        }
    }
    let (offer, memory) = first.ok_or_else(|| wrong("it is empty"))?;
    let len = usize::try_from(offer.segment_len).map_err(|_| wrong("the length"))?;
    if len < hello_bytes(size) || offer.ranks.len() != if known { 0 } else { size } {
        return Err(wrong("the length"));
    }
    let nodes = match &offer.nodes[..] {
        [] => Some(Nodes::none()),
        list => Nodes::of_list(offer.level, list).filter(|_| list.len() == size),
    };
    let nodes = nodes.ok_or_else(|| wrong("the NUMA nodes or caches"))?;
    let segment = Segment::map(memory.as_fd(), len, offer.backing)?;
    if !has_signed(&segment, 0, &decision.nonces[0], &decision.id) {
        return Err(Error::system("rank 0's signature is not in the shared memory"));
    }
    make_ready(&segment, size, rank)?;
    sign(&segment, rank, &session.own.nonce, &decision.id);
    let same_pids = offer.pidns == session.identity().pidns;
    let peers = offer.ranks.into_iter().zip(pidfds).enumerate().map(|(other, ((pid, host), pidfd))| {
        if other == rank {
            return (Process { pid: std::process::id() as i32, host }, None);
        }
        let pid = match &pidfd {
            _ if same_pids => pid,
            Some(pidfd) => pid_of(pidfd),
            None => 0,
        };
        // Rank 0 passes no pidfds in large groups (`serve.rs`). It has just seen the pid on its connection to the
        // process, so the pid still belongs to that process.
        let pidfd = pidfd.or_else(|| (pid > 0).then(|| unix_socket::pidfd_open(pid).ok()).flatten());
        (Process { pid, host }, pidfd)
    });
    let peers = peers.collect();
    let (local_cores, threads) = (offer.local_cores.max(1) as usize, offer.threads.max(1) as usize);
    Ok(Accepted { peers, segment, local_cores, threads, nodes })
}

/// Returns the pid of another process in this process's pid namespace. 0 if the other process is in a namespace that
/// this process cannot see.
fn pid_of(pidfd: &OwnedFd) -> i32 {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).unwrap_or_default();
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
    pid.unwrap_or(0).max(0)
}

fn await_go(
    session: &mut Session,
    decision: &DecisionMessage,
    socket: OwnedFd,
    accepted: Accepted,
    group_peers: Option<GroupPeers>,
) -> Result<Joined> {
    if unix_socket::send(&socket, &Answer { id: decision.id, reason: None }.write(), &[]).is_err() {
        return Ok(Joined::Dropped);
    }
    let answer = next_message(session, &socket);
    match answer {
        Ok(Ok(Some((message, _)))) if Answer::read(&message).is_some_and(|answer| answer.id == decision.id) => {
            let Accepted { segment, local_cores, threads, nodes, peers } = accepted;
            let group_peers = match group_peers {
                Some(group_peers) => group_peers,
                None => acquaint(decision.id, session.config.rank, peers, vec![(0, socket)])?,
            };
            let (policy, id) = (decision.policy.clone(), decision.id);
            Ok(Joined::Met(Box::new(Met { segment, group_peers, local_cores, threads, nodes, policy, id })))
        }
        other => {
            // Rank 0 may have sent "go" just before. Then the other ranks have a group that includes this rank, and
            // this call tells them that this rank left.
            if let Some(layout) = Layout::of_total(session.config.size, accepted.segment.len()) {
                Area::new(Arc::new(accepted.segment), layout, session.config.rank, accepted.nodes).leave();
            }
            other.map(|_| Joined::Dropped)
        }
    }
}
