//! The rendezvous: the ranks of a group find each other, agree whether they share a host, and map one shared memory.
//!
//! They exchange messages through the group's store, which may still have keys of an earlier incarnation (torchrun has
//! restarted a process, or the same group was created twice). So every attempt has a random nonce, and a record counts
//! only after rank 0 has named its nonce in a decision:
//!
//! 1. Each rank sets `r/<rank>`: its nonce and its identity (`messages.rs`).
//! 2. Rank 0 waits for all records and publishes a decision. It says either "connect to my socket, or answer why you
//!    cannot", or "shared memory is impossible, confirm". In the second case, after all have confirmed, a last decision
//!    says whether the group spans hosts or a delegate serves it. If the decision does not name a rank's present nonce,
//!    that rank keeps waiting. Rank 0 keeps reading the records of ranks that do not react, and publishes a new
//!    decision when a nonce has changed.
//! 3. Sharing is proven, never inferred. The other ranks connect, receive the memory's descriptor, find rank 0's nonce
//!    in the first page and write theirs into it. After rank 0 has read all nonces, it sends "go". Any failure before
//!    that becomes the reason why shared memory is impossible. All ranks confirm this, and then a delegate serves them.
//!    Before a rank writes its nonce, and therefore before any rank has the group, it populates the memory that every
//!    group uses.
//! 4. Records name the known peers that a rank has from earlier groups (`peers.rs`). If all ranks name the same known
//!    peers, the decision says so. Then only the memory's descriptor is sent, and the connections are closed
//!    afterwards.
//!
//! A rank that waits for a decision sleeps on a mailbox whose name is in its record. Rank 0 also posts every decision
//! there, so that ranks on its host do not have to poll the store at short intervals. If all ranks have a mailbox, the
//! decision to connect is written to the store only if a rank is late. Neither a mail nor a key in the store is trusted
//! by itself: both must name this rank's nonce, which only readers of the store know.
//!
//! The keys `r/`, `a/`, `verdict` and `waits` stay after the group has ended: two for each rank and two more, all
//! small, under a prefix that only this group has. They are not deleted, because a later attempt may use the same
//! names, and would stop if its keys disappeared. Keys with an attempt's id in their names (`inside/`, `hosts/`) are
//! removed (`Hosts::keys`).
//!
//! `coordinator.rs` and `serve.rs` are rank 0's part, `participant.rs` is the other ranks' part. `decision.rs` has the
//! result: one decision, equal on all ranks, and the resources that this rank has opened for it. No rank has a group
//! before that.

pub mod addresses;
pub mod coordinator;
pub mod decision;
pub mod messages;
pub mod participant;
pub mod peers;
mod serve;
pub mod unix_socket;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use self::addresses::{Addresses, Network};
pub use self::decision::{Decision, Hosts, Rendezvous};
use self::messages::{Body, Identity, Nonce, PROTOCOL, Record};
use self::peers::{GroupPeers, KnownPeers, Process};
use crate::config::Config;
use crate::engine::shm::memory::layout::Layout;
use crate::engine::shm::memory::segment::Segment;
use crate::engine::shm::nodes::Nodes;
use crate::error::{Error, Result, Text, laid_out};
use crate::host::{Host, Store};
use crate::os::random;
use crate::os::watch::{End, Source};

/// The parts of a group over shared memory.
#[derive(Debug)]
pub struct Met {
    pub segment: Segment,
    /// The processes of the ranks, and the descriptors that report their end.
    pub group_peers: GroupPeers,
    /// Number of cores that the ranks can use together. Equal on every rank.
    pub local_cores: usize,
    /// Number of threads that each rank may use to copy and combine. Equal on every rank.
    pub threads: usize,
    /// The NUMA nodes or last-level caches of the ranks. Equal on every rank.
    pub nodes: Nodes,
    /// `Config::policy` of rank 0.
    pub policy: String,
    /// Same as in `Outcome::Hosts`.
    pub id: Nonce,
}

/// Registers ranks that met for the first time as known peers. `peers` has an entry for this rank too. `sockets` are
/// the connections between rank 0 and the other ranks; end of file on one means that its rank has ended.
fn acquaint(
    id: Nonce,
    rank: usize,
    peers: Vec<(Process, Option<OwnedFd>)>,
    sockets: Vec<(usize, OwnedFd)>,
) -> Result<GroupPeers> {
    let (processes, pidfds): (Vec<Process>, Vec<Option<OwnedFd>>) = peers.into_iter().unzip();
    let pidfds = pidfds.into_iter().enumerate();
    let ended = pidfds.filter_map(|(rank, fd)| fd.map(|fd| End { rank, fd, source: Source::Process }));
    let closed = sockets.into_iter().map(|(rank, fd)| End { rank, fd, source: Source::Connection });
    Ok(GroupPeers::of_all(KnownPeers::new(id, rank, processes, ended.chain(closed).collect())?))
}

#[derive(Debug)]
pub enum Outcome {
    Shared(Met),
    /// The ranks cannot share memory. Equal reason and `id` on every rank.
    Delegate {
        reason: String,
        id: Nonce,
        network: Option<Network>,
    },
    /// The ranks are on several hosts. `hosts` has each rank's host, numbered from 0 in the order of the ranks. The
    /// list and the reason are equal on every rank, and so is `id`, which is unique to this attempt.
    Hosts {
        hosts: Vec<usize>,
        id: Nonce,
        reason: String,
        /// `Config::policy` of rank 0.
        policy: String,
        network: Option<Network>,
    },
}

/// Returns the number of bytes at the start of a segment in which the ranks prove that they map the same memory.
pub fn hello_bytes(ranks: usize) -> usize {
    (ranks * HELLO_STRIDE).next_multiple_of(4096)
}

const HELLO_STRIDE: usize = 64;

/// Returns the size of a segment, which is at least `hello_bytes`. The arguments are the number of threads of each rank
/// and the number of free bytes. If these bytes are too few, returns the reason.
pub type SegmentBytes<'a> = dyn Fn(usize, usize) -> std::result::Result<usize, String> + 'a;

/// Meets the other ranks of a group of at least two. All ranks get the same outcome. Rank 0 calls `segment_bytes` with
/// the number of threads on which the ranks agree, and the smallest amount of free memory that a rank has.
pub fn meet(config: &Config, store: &dyn Store, host: &dyn Host, segment_bytes: &SegmentBytes) -> Result<Outcome> {
    meet_as(config, Identity::here(), store, host, segment_bytes)
}

/// Like [`meet`], with an identity that the caller chooses and that may be false. For tests and simulations.
pub fn meet_as(
    config: &Config,
    identity: Identity,
    store: &dyn Store,
    host: &dyn Host,
    segment_bytes: &SegmentBytes,
) -> Result<Outcome> {
    if config.size < 2 || config.rank >= config.size {
        return Err(Error::bug(format!("sagellm: rank {} of {} ranks cannot meet anyone", config.rank, config.size)));
    }
    crate::os::watch::install();
    let known_peers = KnownPeers::known();
    let (mailbox, address) = if config.rank == 0 { (None, Vec::new()) } else { mailbox()? };
    let body = Body {
        size: config.size as u32,
        identity,
        wish: config.delegate_reason.clone().unwrap_or_default(),
        delegate: config.delegate.clone(),
        known: known_peers.iter().map(|one| (one.id(), one.place() as u32)).collect(),
        mailbox: address,
        addresses: Addresses::parse(&config.addresses)
            .ok_or_else(|| Error::bug(format!("sagellm: no list of addresses: {:?}", config.addresses)))?,
        threads: config.threads,
    };
    let own =
        Record { nonce: random()?, protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").into(), body: Some(body) };
    // A rank that has a mailbox polls the store too, because rank 0 may be on another host, or a mail may have been
    // lost.
    let first_pause = if mailbox.is_some() { FIRST_PAUSE * 20 } else { FIRST_PAUSE };
    let backoff = Backoff::new(host, config.timeout, config.size, first_pause);
    let mut session = Session { config, store, own, known_peers, mailbox, backoff };
    let outcome = if config.rank == 0 {
        self::coordinator::coordinate(&mut session, segment_bytes)
    } else {
        self::participant::join(&mut session)
    }?;
    match &outcome {
        Outcome::Shared(met) => log::debug!(
            "group '{}': rank {} of {} shares {} bytes, {} cores, {}, in {:?}",
            config.name,
            config.rank,
            config.size,
            met.segment.len(),
            met.local_cores,
            if session.known_peers.iter().any(|one| one.id() == met.group_peers.id()) {
                "met among known peers"
            } else {
                "met for the first time"
            },
            session.backoff.start.elapsed()
        ),
        Outcome::Delegate { reason, .. } => {
            log::debug!("group '{}' is served by {}: {reason}", config.name, config.served_by())
        }
        Outcome::Hosts { reason, .. } => log::debug!("group '{}' spans hosts: {reason}", config.name),
    }
    Ok(outcome)
}

/// The state of one rank during the rendezvous.
struct Session<'a> {
    config: &'a Config,
    store: &'a dyn Store,
    own: Record,
    /// The known peers that this rank's record names, kept alive until the end of the rendezvous.
    known_peers: Vec<Arc<KnownPeers>>,
    /// Receives rank 0's decisions, in addition to the store. None on rank 0, and if sockets are denied.
    mailbox: Option<OwnedFd>,
    backoff: Backoff<'a>,
}

/// Makes this rank's mailbox. Returns it with its name.
fn mailbox() -> Result<(Option<OwnedFd>, Vec<u8>)> {
    let name = format!("sagellm-mail-{:032x}", u128::from_le_bytes(random()?)).into_bytes();
    Ok(match self::unix_socket::mailbox(&name) {
        Ok(mailbox) => (Some(mailbox), name),
        Err(error) => {
            log::debug!("no mailbox ({error}): the store is asked for decisions instead");
            (None, Vec::new())
        }
    })
}

const DECISION_KEY: &str = "verdict";
/// Key under which rank 0 names the ranks for which it waits, so that other ranks' errors can name them too. The value
/// is a `DecisionMessage`, but decides nothing.
const WAITS: &str = "waits";

fn record_key(rank: usize) -> String {
    format!("r/{rank}")
}

fn answer_key(rank: usize) -> String {
    format!("a/{rank}")
}

impl Session<'_> {
    fn identity(&self) -> &Identity {
        &self.own.body.as_ref().expect("a rank knows its own record").identity
    }

    fn publish_record(&self) -> Result<()> {
        self.store.set(&record_key(self.config.rank), &self.own.write())
    }

    /// "group 'g' of 3 ranks: rank 2 has not come within 60 s". `waits` says what this rank waits for.
    fn missing_text(&self, missing: &[usize], waits: &str) -> Text {
        let one = missing.len() == 1;
        let (verb, them, their) = if one { ("has", "it was", "its") } else { ("have", "they were", "their") };
        let (name, size, time) = (&self.config.name, self.config.size, seconds(self.config.timeout));
        let head = format!("group '{name}' of {size} ranks: {} {verb} not come within {time}", rank_list(missing));
        let advice = format!(
            "Check that {them} started with the same master address, port and world size, and that {their} own log shows no \
             earlier error"
        );
        laid_out(&head, &[waits.to_string()], &advice)
    }
}

/// "rank 1, rank 2 and 5 more". Every rank is written as "rank N", so that a text search finds the line.
fn rank_list(ranks: &[usize]) -> String {
    const SHOWN: usize = 16;
    let mut text = ranks.iter().take(SHOWN).map(|rank| format!("rank {rank}")).collect::<Vec<_>>().join(", ");
    if ranks.len() > SHOWN {
        text.push_str(&format!(" and {} more", ranks.len() - SHOWN));
    }
    text
}

fn seconds(time: Duration) -> String {
    if time.subsec_millis() == 0 { format!("{} s", time.as_secs()) } else { format!("{:.1} s", time.as_secs_f64()) }
}

/// Pauses of growing length until the deadline. They end early if the caller is interrupted.
struct Backoff<'a> {
    host: &'a dyn Host,
    start: Instant,
    deadline: Instant,
    asked: Instant,
    /// The first pause after an event. `pause` is the next one.
    first: Duration,
    pause: Duration,
    longest: Duration,
}

const FIRST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);
/// All ranks poll the same store, so in larger groups each rank polls less often.
const EAGER_RANKS: u32 = 32;

impl<'a> Backoff<'a> {
    fn new(host: &'a dyn Host, timeout: Duration, ranks: usize, first: Duration) -> Backoff<'a> {
        let start = Instant::now();
        let far = Duration::from_secs(365 * 24 * 3600);
        let longest = LONGEST_PAUSE * (ranks as u32).div_ceil(EAGER_RANKS).min(8);
        Backoff { host, start, deadline: start + timeout.min(far), asked: start, first, pause: first, longest }
    }

    /// After an event, makes the next pause short again.
    fn refresh(&mut self) {
        self.pause = self.first;
    }

    /// Whether the next pause may be the last one before the deadline.
    fn ends(&self) -> bool {
        self.deadline.saturating_duration_since(Instant::now()) <= LONGEST_PAUSE
    }

    fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Pauses until the pause is over or one of the sockets is readable. False if the deadline has passed.
    fn pause<'s>(&mut self, sockets: impl Iterator<Item = &'s OwnedFd>) -> Result<bool> {
        let before = Instant::now();
        if before >= self.deadline {
            return Ok(false);
        }
        if before - self.asked >= Duration::from_millis(50) {
            self.asked = before;
            if self.host.interrupted() {
                return Err(Error::interrupted("sagellm: interrupted while the group was being made"));
            }
        }
        let pause = self.pause.min(self.deadline - before);
        self::unix_socket::wait_readable(sockets, pause);
        // If the sleep took far longer, this process or the machine was stopped. The other ranks could not reach this
        // rank during that time, so the time does not count.
        let overslept = before.elapsed().saturating_sub(pause);
        if overslept > Duration::from_millis(500) {
            self.deadline += overslept;
        }
        self.pause = (self.pause * 3 / 2).min(self.longest);
        Ok(true)
    }
}

/// Returns a rank's words in the segment's hello area.
#[allow(unsafe_code)] // takes references into the mapped memory
fn hello_words(segment: &Segment, rank: usize) -> [&AtomicU64; 4] {
    let base = segment.ptr(rank * HELLO_STRIDE, 32).cast::<u64>();
    // SAFETY: `ptr` checked that all four words are in the mapping, which lives as long as the borrow of the segment.
    // Mappings are page aligned, so the words are aligned. Every rank accesses them only as atomics.
    [0, 1, 2, 3].map(|at| unsafe { AtomicU64::from_ptr(base.add(at)) })
}

/// Populates the part of a rank's memory that every group uses. Enough memory was free before the segment was made. If
/// no layout has the segment's size, a test is running the rendezvous alone, and nothing is populated.
fn make_ready(segment: &Segment, ranks: usize, rank: usize) -> Result<()> {
    let layout = Layout::of_total(ranks, segment.len());
    let mut ranges = layout.iter().flat_map(|layout| layout.early_ranges(rank));
    ranges.try_for_each(|range| segment.populate(range))
}

/// Writes the proof that this rank maps this memory in this attempt: its nonce and the attempt's id.
fn sign(segment: &Segment, rank: usize, nonce: &Nonce, id: &Nonce) {
    for (word, value) in hello_words(segment, rank).into_iter().zip(words(nonce).into_iter().chain(words(id))) {
        word.store(value, Ordering::Release);
    }
}

fn has_signed(segment: &Segment, rank: usize, nonce: &Nonce, id: &Nonce) -> bool {
    hello_words(segment, rank)
        .into_iter()
        .zip(words(nonce).into_iter().chain(words(id)))
        .all(|(word, value)| word.load(Ordering::Acquire) == value)
}

fn words(nonce: &Nonce) -> [u64; 2] {
    let number = u128::from_le_bytes(*nonce);
    [number as u64, (number >> 64) as u64]
}
