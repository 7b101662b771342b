//! The meeting as every rank but 0 lives it: say that I am here, do what the verdict says.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::messages::{Answer, Hello, Mode, Nonce, Offer, Record, Verdict};
use super::peers::{GroupPeers, Process};
use super::{Met, Outcome, Session, VERDICT, WAITS, answer_key, hello_bytes, record_key, unix_socket};
use super::{acquaint, has_signed, make_ready, rank_list, seconds, sign};
use crate::engine::shm::memory::area::Area;
use crate::engine::shm::memory::layout::Layout;
use crate::engine::shm::memory::segment::Segment;
use crate::error::{Error, Result};

/// How coming to rank 0's socket ended.
enum Joined {
    Met(Box<Met>),
    /// Rank 0 closed the connection: it will publish another verdict.
    Dropped,
    /// It is impossible, for this reason.
    Impossible(String),
}

pub(super) fn join(session: &mut Session) -> Result<Outcome> {
    session.publish_record()?;
    let mut published = Instant::now();
    let mut done_with: Option<Nonce> = None;
    loop {
        if !session.backoff.pause(session.mailbox.iter())? {
            return Err(timeout(session));
        }
        match next_verdict(session)? {
            Some(verdict) => match verdict.mode {
                Mode::Delegate => {
                    return Ok(match verdict.hosts() {
                        Some(hosts) => {
                            Outcome::Hosts { hosts, id: verdict.id, reason: verdict.text, policy: verdict.policy }
                        }
                        None => Outcome::Delegate { reason: verdict.text, id: verdict.id },
                    });
                }
                Mode::Failed => return Err(told(&verdict.text)),
                Mode::Ask if done_with != Some(verdict.id) => {
                    answer(session, verdict.id, "")?;
                    done_with = Some(verdict.id);
                    session.backoff.refresh();
                }
                Mode::Share if done_with != Some(verdict.id) => {
                    done_with = Some(verdict.id);
                    match visit(session, &verdict)? {
                        Joined::Met(met) => return Ok(Outcome::Shared(*met)),
                        Joined::Dropped => {}
                        Joined::Impossible(reason) => answer(session, verdict.id, &reason)?,
                    }
                    session.backoff.refresh();
                }
                _ => {}
            },
            // A straggler of an earlier incarnation may have overwritten our record after we set it.
            None if published.elapsed() > Duration::from_millis(250) => {
                session.publish_record()?;
                published = Instant::now();
            }
            None => {}
        }
    }
}

/// A verdict that names this rank: the last one in the mailbox, or else the one in the store. An older one than was seen
/// in the store does no harm: it is answered, and then the newer one is, again.
fn next_verdict(session: &Session) -> Result<Option<Verdict>> {
    // Rank 0 sends fewer than these. A process that floods the mailbox costs this rank sleep and nothing else.
    const MOST: usize = 16;
    let messages =
        session.mailbox.iter().flat_map(|mailbox| (0..MOST).map_while(|_| unix_socket::receive(mailbox).ok()));
    let received =
        messages.filter_map(|(bytes, _)| Verdict::read(&bytes)).filter(|verdict| names(verdict, session)).last();
    if received.is_some() {
        return Ok(received);
    }
    let stored = session.store.try_get(VERDICT)?.and_then(|bytes| Verdict::read(&bytes));
    Ok(stored.filter(|verdict| names(verdict, session)))
}

fn names(verdict: &Verdict, session: &Session) -> bool {
    verdict.nonces.len() == session.config.size && verdict.nonces[session.config.rank] == session.own.nonce
}

fn answer(session: &Session, id: Nonce, reason: &str) -> Result<()> {
    session.store.set(&answer_key(session.config.rank), &Answer { id, reason: reason.into() }.write())
}

/// The error that rank 0 ended with, as it reaches the others: its code letter, then its text.
fn told(text: &str) -> Error {
    let mut letters = text.chars();
    match letters.next() {
        Some('T') => Error::Timeout(letters.as_str().into()),
        Some('V') => Error::Invalid(letters.as_str().into()),
        Some(_) => Error::System(letters.as_str().into()),
        None => Error::System("sagellm: rank 0 gave up without saying why".into()),
    }
}

fn timeout(session: &Session) -> Error {
    let (config, rank) = (session.config, session.config.rank);
    let read = |key: &str| session.store.try_get(key).ok().flatten();
    if let Some(waits) = read(WAITS).and_then(|bytes| Verdict::read(&bytes)).filter(|waits| names(waits, session)) {
        return told(&waits.text);
    }
    // Rank 0 has told this rank nothing, so all there is to go by are the records. Old ones look like new ones.
    let came = |other: usize| read(&record_key(other)).is_some_and(|bytes| Record::read(&bytes).is_some());
    let missing: Vec<usize> = (0..config.size).filter(|other| *other != rank && !came(*other)).collect();
    if !missing.is_empty() {
        return Error::Timeout(
            session.missing_text(&missing, &format!("rank {rank} waits for rank 0 to gather all records")),
        );
    }
    Error::Timeout(format!(
        "sagellm: group '{}' of {} ranks: rank 0 has not answered {} within {} (there is a record of every rank in \
         the store, perhaps from an earlier run). Check that rank 0 is running and uses the same store.",
        config.name,
        config.size,
        rank_list(&[rank]),
        seconds(config.timeout),
    ))
}

/// The next message from rank 0; `None` when it has closed the connection.
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

/// What a rank took from rank 0's offer.
struct Accepted {
    segment: Segment,
    local_cores: usize,
    /// By rank; empty where the ranks are known peers.
    peers: Vec<(Process, Option<OwnedFd>)>,
}

/// The known peers that the verdict names; `None` inside when the ranks meet for the first time. The error is what is
/// wrong with them.
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
        .ok_or_else(|| "rank 0 named known_peers of an earlier group that this rank has not".to_string())
}

fn visit(session: &mut Session, verdict: &Verdict) -> Result<Joined> {
    let rank = session.config.rank;
    let group_peers = match group_peers(session, &verdict.known) {
        Ok(group_peers) => group_peers,
        Err(what) => return Ok(Joined::Impossible(format!("rank {rank}: {what}"))),
    };
    let socket = loop {
        match unix_socket::connect(&verdict.detail) {
            Ok(socket) => break socket,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !session.backoff.pause(std::iter::empty())? {
                    return Err(timeout(session));
                }
            }
            Err(error) => {
                return Ok(Joined::Impossible(format!(
                    "rank {rank} cannot connect to rank 0's socket ({error}), though both seem to be on one host"
                )));
            }
        }
    };
    match introduce(session, verdict, &socket, group_peers.as_ref())? {
        Err(visit) => Ok(visit),
        Ok(accepted) => await_go(session, verdict, socket, accepted, group_peers),
    }
}

/// Says who we are, takes the offer and signs the memory. The error side is an early end of the visit.
fn introduce(
    session: &mut Session,
    verdict: &Verdict,
    socket: &OwnedFd,
    group_peers: Option<&GroupPeers>,
) -> Result<std::result::Result<Accepted, Joined>> {
    let rank = session.config.rank;
    let impossible = |what: String| Ok(Err(Joined::Impossible(format!("rank {rank}: {what}"))));
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
    let hello = Hello { id: verdict.id, nonce: session.own.nonce, rank: rank as u32 };
    if unix_socket::send(socket, &hello.write(), &[]).is_err() {
        return Ok(Err(Joined::Dropped));
    }
    let mut parts: Vec<(Offer, Vec<OwnedFd>)> = Vec::new();
    loop {
        let (message, descriptors) = match next_message(session, socket)? {
            Ok(Some(received)) => received,
            Ok(None) => return Ok(Err(Joined::Dropped)),
            Err(error) => return impossible(format!("descriptors cannot be received ({error})")),
        };
        session.backoff.refresh();
        let Some(offer) = Offer::read(&message).filter(|offer| offer.id == verdict.id) else {
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
    match accept(session, verdict, parts, group_peers.is_some()) {
        Ok(accepted) => Ok(Ok(accepted)),
        Err(Error::System(text)) => impossible(text),
        Err(error) => Err(error),
    }
}

/// Maps what was offered and signs it.
fn accept(session: &Session, verdict: &Verdict, parts: Vec<(Offer, Vec<OwnedFd>)>, known: bool) -> Result<Accepted> {
    let (size, rank) = (session.config.size, session.config.rank);
    let wrong = |what: &str| Error::System(format!("rank 0's offer is wrong: {what}"));
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
    let segment = Segment::map(memory.as_fd(), len, offer.backing)?;
    if !has_signed(&segment, 0, &verdict.nonces[0], &verdict.id) {
        return Err(Error::System("rank 0's signature is not in the shared memory".into()));
    }
    make_ready(&segment, size, rank)?;
    sign(&segment, rank, &session.own.nonce, &verdict.id);
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
        // Big groups do not pass these; the signature proved a moment ago that the process lives.
        let pidfd = pidfd.or_else(|| (pid > 0).then(|| unix_socket::pidfd_open(pid).ok()).flatten());
        (Process { pid, host }, pidfd)
    });
    Ok(Accepted { peers: peers.collect(), segment, local_cores: offer.local_cores.max(1) as usize })
}

/// The pid in our own pid namespace; 0 when the process is in one that we cannot see.
fn pid_of(pidfd: &OwnedFd) -> i32 {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).unwrap_or_default();
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
    pid.unwrap_or(0).max(0)
}

fn await_go(
    session: &mut Session,
    verdict: &Verdict,
    socket: OwnedFd,
    accepted: Accepted,
    group_peers: Option<GroupPeers>,
) -> Result<Joined> {
    if unix_socket::send(&socket, &Answer { id: verdict.id, reason: String::new() }.write(), &[]).is_err() {
        return Ok(Joined::Dropped);
    }
    let answer = next_message(session, &socket);
    match answer {
        Ok(Ok(Some((message, _)))) if Answer::read(&message).is_some_and(|answer| answer.id == verdict.id) => {
            let Accepted { segment, local_cores, peers } = accepted;
            let group_peers = match group_peers {
                Some(group_peers) => group_peers,
                None => acquaint(verdict.id, session.config.rank, peers, vec![(0, socket)])?,
            };
            let (policy, id) = (verdict.policy.clone(), verdict.id);
            Ok(Joined::Met(Box::new(Met { segment, group_peers, local_cores, policy, id })))
        }
        other => {
            // Rank 0 may have said "go" a moment ago: then the others have a group that this rank is not in.
            if let Some(layout) = Layout::of_total(session.config.size, accepted.segment.len()) {
                Area::new(Arc::new(accepted.segment), layout, session.config.rank).leave();
            }
            other.map(|_| Joined::Dropped)
        }
    }
}
