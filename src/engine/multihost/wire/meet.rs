//! Makes the connection between two processes, and the channel of a group.
//!
//! Each rank puts its process's address and identity, a random number, into the group's store. If two processes have no
//! connection, the one with the lower number connects. It sends the other process's number, which it can know only from
//! the store, and then its own number; the accepting process answers with its own. A process that sends anything else
//! is disconnected. Then each process sends Hello on each connection, which says that it has joined the group's
//! channel. A rank continues when it has received Hello from all others. So no rank uses a group that another rank does
//! not have, and nothing is sent to a rank that does not know the channel.
//!
//! If both processes want several TCP connections, the connecting process opens as many as the shorter of their two
//! lists has addresses. Each TCP connection leads from an address in the connecting process's list to the address at
//! the same place in the other list. The first one creates the connection between the two processes, under a number
//! that the connecting process chooses. The later ones name this number and are added to the connection when they
//! arrive (`several`). A TCP connection that cannot be opened is left out with a warning.
//!
//! Other threads may create or end other groups of the process at the same time. While a group is being created
//! (`Joining`), the end of another group closes neither the listening sockets nor what has come through them. If the
//! end of a group closes a connection that is still needed, it is opened again. If several groups are being created,
//! only one thread connects to a given process, for all of them (`Calling`): if there were two connections, the two
//! processes might choose different ones.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::channel::Channel;
use super::driving::Counted;
use super::link::WireLink;
use super::path::MOST_PATHS;
use super::sockets::socket_address;
use super::{ProcessId, Wire, sockets};
use crate::error::{Error, Result};
use crate::fields::cleaned;
use crate::host::Store;
use crate::os::topology;

/// Interval between two reads of the store.
const PAUSE: Duration = Duration::from_millis(1);

/// One rank's place in a group that is being created.
pub struct Place<'a> {
    pub store: &'a dyn Store,
    /// Equal on all ranks, unique to this attempt.
    pub id: [u8; 16],
    pub rank: usize,
    pub size: usize,
    /// The address of this host at which the other ranks reach this process.
    pub address: &'a str,
    /// The addresses of this host for several connections to each process, in order; an address may occur more than
    /// once. If there are fewer than two, each process gets one connection, at `address`.
    pub paths: &'a [String],
    pub timeout: Duration,
}

/// A group that this process is joining in `join`. Keeps the listening sockets open, because the other ranks connect to
/// them.
struct Joining<'a> {
    wire: &'a Arc<Wire>,
    channel: u64,
}

impl<'a> Joining<'a> {
    fn new(wire: &'a Arc<Wire>, channel: u64) -> Joining<'a> {
        wire.doors().begin_joining();
        Joining { wire, channel }
    }
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        self.wire.doors().end_joining();
        self.wire.channels().forget_early(self.channel); // not needed any more if the channel was not created
        self.wire.close_unused();
    }
}

/// Ranks to which this thread is still connecting, each with its process. No other thread connects to these processes.
pub(super) struct Calling<'a> {
    wire: &'a Wire,
    pub(super) left: Vec<(usize, ProcessId)>,
}

impl<'a> Calling<'a> {
    /// Selects the ranks that have no connection and to which this process must connect, except those to which a thread
    /// is already connecting.
    fn new(wire: &'a Wire, channel: &Channel) -> Calling<'a> {
        // A thread that has connected passes the connection to all channels before it removes the process from
        // `called`. So `missing`, which is called under the lock of `called`, knows the connection.
        let left = wire.doors().begin_calls(|called| to_call(wire, called, channel));
        Calling { wire, left }
    }

    /// Lets other threads connect to the process of this rank, to which this thread has connected.
    pub(super) fn made(&mut self, rank: usize) {
        let made = self.left.extract_if(.., |(known, _)| *known == rank);
        self.wire.doors().end_calls(made.map(|(_, process)| process));
    }
}

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        if self.left.is_empty() {
            return;
        }
        self.wire.doors().end_calls(self.left.iter().map(|(_, process)| *process));
        self.wire.driving().ring(); // another group may need one of them after all
    }
}

/// Another rank, as read from the store.
#[derive(Clone)]
pub(super) struct Other {
    pub(super) process: ProcessId,
    pub(super) address: SocketAddr,
    /// Where it listens for each of several connections. Empty if it wants only one.
    pub(super) paths: Vec<SocketAddr>,
    /// "pid 7, host b", for error texts. Empty if the store does not have it.
    who: String,
    /// What carries its frames.
    link: String,
}

/// Returns the key in the store under which a rank says where it listens. No rank reads it after all have joined the
/// group.
pub fn key(id: &[u8; 16], rank: usize) -> String {
    format!("wire/{:032x}/{rank}", u128::from_be_bytes(*id))
}

/// Makes a group's channel. Returns when all ranks of the group have joined it, and fails after the timeout.
pub fn join(wire: &Arc<Wire>, place: &Place) -> Result<WireLink> {
    let deadline = Instant::now().checked_add(place.timeout);
    let until = || deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
    let number = u64::from_le_bytes(place.id[..8].try_into().expect("eight bytes"));
    let _joining = Joining::new(wire, number);
    let port =
        wire.listen(place.address).map_err(|error| failed(&format!("cannot listen at {}: {error}", place.address)))?;
    let paths = if wire.may_have_paths() { &place.paths[..place.paths.len().min(MOST_PATHS)] } else { &[] };
    let listed = listen_at(wire, paths)?;
    wire.start()?;
    let _driven = Counted::new(wire.driving()); // other ranks connect while this one reads the store
    wire.driving().wake_for_pending();
    let key = |rank: usize| key(&place.id, rank);
    let (pid, host) = (std::process::id(), topology::hostname());
    let own = format!("{:032x} {port} {} {pid} {host} {}{listed}", wire.id, place.address, wire.link_name());
    place.store.set(&key(place.rank), own.as_bytes())?;
    let mut others = Vec::new();
    for rank in 0..place.size {
        if rank == place.rank {
            let address = SocketAddr::new(IpAddr::from([0, 0, 0, 0]), 0);
            let link = wire.link_name().to_string();
            others.push(Other { process: wire.id, address, paths: Vec::new(), who: String::new(), link });
            continue;
        }
        let text = loop {
            if let Some(text) = place.store.try_get(&key(rank))? {
                break text;
            }
            if until().is_zero() {
                return Err(late(place, &format!("rank {rank} has not said where it listens")));
            }
            std::thread::sleep(PAUSE);
        };
        let other = Other::read(&text, place);
        let other = other.ok_or_else(|| failed(&format!("the store has no address of rank {rank}")))?;
        agree(wire, place, rank, &other)?;
        others.push(other);
    }
    let processes: Vec<ProcessId> = others.iter().map(|other| other.process).collect();
    let who = others.iter().map(|other| other.who.clone()).collect();
    let link = WireLink::new(wire, Channel::new(wire.driving(), number, place.rank, &processes, who));
    let channel = link.channel();
    wire.add_channel(channel);
    loop {
        let missing = channel.missing();
        if missing.is_empty() {
            return Ok(link);
        }
        if until().is_zero() {
            let (rank, ..) = missing[0];
            return Err(late(place, &format!("no answer from rank {rank} at {}", others[rank].address)));
        }
        let calling = Calling::new(wire, channel);
        if !calling.left.is_empty() {
            wire.call(calling, paths, &others, until())?;
        }
        let before = missing.len();
        let needs_call = || wire.doors().with_called(|called| !to_call(wire, called, channel).is_empty());
        wire.wait(|| channel.missing().len() != before || needs_call(), until().min(PAUSE * 50));
    }
}

/// Fails if the other rank's frames are carried by something else than this rank's (TCP or UCX).
fn agree(wire: &Wire, place: &Place, rank: usize, other: &Other) -> Result<()> {
    let own = wire.link_name();
    if other.link == own {
        return Ok(());
    }
    let (who, theirs) = (&other.who, cleaned(&other.link, &[]));
    Err(failed(&format!(
        "rank {} has SAGELLM_LINK={own} and rank {rank} ({who}) has {theirs}: set it alike on all ranks",
        place.rank
    )))
}

pub(super) fn failed(what: &str) -> Error {
    Error::system(what.to_string())
}

fn late(place: &Place, what: &str) -> Error {
    Error::timeout(format!("Timed out after {} ms: {what}", place.timeout.as_millis()))
}

impl Other {
    /// Parses a rank's entry in the store. A link-local address gets the interface (scope) of this process's
    /// own address.
    fn read(text: &[u8], own: &Place) -> Option<Other> {
        let text = std::str::from_utf8(text).ok()?;
        let (first, paths) = text.split_once('\n').unwrap_or((text, ""));
        let mut words = first.split(' ');
        let process = ProcessId::from_str_radix(words.next()?, 16).ok()?;
        let port = words.next()?.parse().ok()?;
        let address = reachable(socket_address(words.next()?, port)?, own.address);
        let paths = paths.split_whitespace().take(MOST_PATHS).enumerate().map(|(number, path)| {
            let (address, port) = path.rsplit_once('/')?;
            let from = own.paths.get(number).map_or(own.address, String::as_str);
            Some(reachable(socket_address(address, port.parse().ok()?)?, from))
        });
        let paths = paths.collect::<Option<Vec<_>>>()?;
        let who = match (words.next(), words.next()) {
            (Some(pid), Some(host)) => cleaned(&format!("pid {pid}, host {host}"), &[]),
            _ => String::new(),
        };
        let link = words.next().unwrap_or("tcp").to_string();
        Some(Other { process, address, paths, who, link })
    }
}

/// Returns the address of another host, with the interface of `own` if it is link-local.
fn reachable(address: SocketAddr, own: &str) -> SocketAddr {
    match address {
        SocketAddr::V6(far) if far.ip().segments()[0] & 0xffc0 == 0xfe80 => {
            let interface = own.split_once('%').and_then(|(_, name)| sockets::interface(name)).unwrap_or(0);
            SocketAddr::V6(SocketAddrV6::new(*far.ip(), far.port(), 0, interface))
        }
        other => other,
    }
}

/// Listens at these addresses. Returns the line of the store's entry that lists them; an empty text if there are
/// fewer than two.
fn listen_at(wire: &Wire, paths: &[String]) -> Result<String> {
    if paths.len() < 2 {
        return Ok(String::new());
    }
    let mut line = "\n".to_string();
    for path in paths {
        let port = wire.listen(path).map_err(|error| failed(&format!("cannot listen at {path}: {error}")))?;
        line += &format!("{path}/{port} ");
    }
    Ok(line)
}

/// Returns the ranks to which this process must connect, each with its process, except those to which a thread is
/// already connecting (`called`).
fn to_call(wire: &Wire, called: &HashSet<ProcessId>, channel: &Channel) -> Vec<(usize, ProcessId)> {
    let missing = channel.missing().into_iter();
    let ours = missing.filter(|(_, process, connected)| !connected && wire.id < *process);
    ours.filter(|(_, process, _)| !called.contains(process)).map(|(rank, process, _)| (rank, process)).collect()
}
