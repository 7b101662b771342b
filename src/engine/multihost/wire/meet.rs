//! Makes the connection between two processes, and the channel of a group.
//!
//! Each rank puts its process's address and identity, a random number, into the group's store. If two processes have no
//! connection, the one with the lower number connects. It sends the other process's number, which it can know only from
//! the store, and then its own number; the accepting process answers with its own. A process that sends anything else
//! is disconnected. Then each process sends Hello on each connection, which says that it has joined the group's
//! channel. A rank continues when it has received Hello from all others. So no rank uses a group that another rank does
//! not have, and nothing is sent to a rank that does not know the channel.
//!
//! If both processes want several TCP connections, the connecting process opens as many as the process that wants
//! fewer; each leads from an address in its list to the address at the same place in the other's list. With the first
//! one, the connection between the two processes exists; the connecting process chooses its number. The others name
//! this number and are added to it when they arrive (`several`). If one cannot be opened, it is left out with a
//! warning.
//!
//! Other threads may create or end other groups of the process at the same time. While a group is being created
//! (`Joining`), the end of another group closes neither the listening sockets nor what has come through them. If the
//! end of a group closes a connection that is still needed, it is opened again. If several groups are being created,
//! only one thread connects to a given process, for all of them (`Calling`): if there were two connections, the two
//! processes might choose different ones.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, SocketAddrV6, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::channel::Channel;
use super::connection::Connection;
use super::link::WireLink;
use super::path::Socket;
use super::{Counted, ProcessId, Wire, locked, sockets};
use crate::error::{Error, Result};
use crate::fields::cleaned;
use crate::host::Store;
use crate::os::topology;

pub(super) const MAGIC: &[u8; 8] = b"sagewir1";
/// Length of what a connecting process sends: the magic number, the number of the process it wants, its own number.
const CALL: usize = 8 + 16 + 16;
/// The same for a process that opens several connections. Two numbers follow, eight bytes each: that of the connection
/// between the processes, and the place of this TCP connection in it.
pub(super) const MAGIC_OF_SEVERAL: &[u8; 8] = b"sagewirn";
const CALL_OF_SEVERAL: usize = CALL + 8 + 8;
/// Largest number of TCP connections between two processes.
pub const MOST_PATHS: usize = 16;
/// Length of the answer: the magic number, the number of the answering process.
pub(super) const ANSWER: usize = 8 + 16;
/// How long an accepted process may take to identify itself.
const PATIENCE: Duration = Duration::from_secs(10);
/// At most this many accepted connections may be unidentified. If there are more, the oldest is closed.
const MOST: usize = 1024;
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

/// The listening sockets of this process, and accepted connections that have not identified themselves.
#[derive(Default)]
pub struct Doors {
    listening: Vec<(String, u64, TcpListener)>,
    strangers: HashMap<u64, Stranger>,
    /// Number of groups that this process is joining.
    joining: usize,
    /// The processes to which a thread is connecting.
    called: HashSet<ProcessId>,
}

/// A group that this process is joining in `join`. Keeps the listening sockets open, because the other ranks connect to
/// them.
struct Joining<'a> {
    wire: &'a Arc<Wire>,
    channel: u64,
}

impl<'a> Joining<'a> {
    fn new(wire: &'a Arc<Wire>, channel: u64) -> Joining<'a> {
        locked(&wire.doors).joining += 1;
        Joining { wire, channel }
    }
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        locked(&self.wire.doors).joining -= 1;
        locked(&self.wire.early).remove(&self.channel); // not needed any more if the channel was not created
        self.wire.close_unused();
    }
}

/// Ranks to which this thread is still connecting, each with its process. No other thread connects to these processes.
pub(super) struct Calling<'a> {
    wire: &'a Wire,
    pub(super) left: Vec<(usize, ProcessId)>,
}

impl<'a> Calling<'a> {
    /// The ranks without a connection to which this process is to connect and to which no thread is connecting.
    fn new(wire: &'a Wire, channel: &Channel) -> Calling<'a> {
        // A thread that has connected passes the connection to all channels before it removes the process from
        // `called`. So `missing`, which is called under the lock of `called`, knows the connection.
        let mut doors = locked(&wire.doors);
        let left: Vec<_> = wire.to_call(&doors, channel).collect();
        doors.called.extend(left.iter().map(|(_, process)| process));
        Calling { wire, left }
    }

    /// Lets other threads connect to the process of this rank, to which this thread has connected.
    pub(super) fn made(&mut self, rank: usize) {
        let mut doors = locked(&self.wire.doors);
        for (_, process) in self.left.extract_if(.., |(known, _)| *known == rank) {
            doors.called.remove(&process);
        }
    }
}

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        if self.left.is_empty() {
            return;
        }
        let mut doors = locked(&self.wire.doors);
        doors.called.retain(|process| !self.left.iter().any(|(_, left)| left == process));
        drop(doors);
        self.wire.changed.ring(); // another group may need one of them after all
    }
}

struct Stranger {
    stream: TcpStream,
    said: Vec<u8>,
    since: Instant,
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
}

/// The key in the store under which a rank says where it listens. No rank reads it after all have joined the group.
pub fn key(id: &[u8; 16], rank: usize) -> String {
    format!("wire/{:032x}/{rank}", u128::from_be_bytes(*id))
}

/// Makes a group's channel after all its ranks have called this. Blocks for at most the timeout.
pub fn join(wire: &Arc<Wire>, place: &Place) -> Result<WireLink> {
    let deadline = Instant::now().checked_add(place.timeout);
    let until = || deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
    let number = u64::from_le_bytes(place.id[..8].try_into().expect("eight bytes"));
    let _joining = Joining::new(wire, number);
    let port =
        wire.listen(place.address).map_err(|error| failed(&format!("cannot listen at {}: {error}", place.address)))?;
    let paths = wire.listen_at(&place.paths[..place.paths.len().min(MOST_PATHS)])?;
    wire.start()?;
    let _driven = Counted::new(wire); // other ranks connect while this one reads the store
    wire.wake_for_pending();
    let key = |rank: usize| key(&place.id, rank);
    let (pid, host) = (std::process::id(), topology::hostname());
    let own = format!("{:032x} {port} {} {pid} {host}{paths}", wire.id, place.address);
    place.store.set(&key(place.rank), own.as_bytes())?;
    let mut others = Vec::new();
    for rank in 0..place.size {
        if rank == place.rank {
            let address = SocketAddr::new(IpAddr::from([0, 0, 0, 0]), 0);
            others.push(Other { process: wire.id, address, paths: Vec::new(), who: String::new() });
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
        others.push(other.ok_or_else(|| failed(&format!("the store has no address of rank {rank}")))?);
    }
    let processes: Vec<ProcessId> = others.iter().map(|other| other.process).collect();
    let who = others.iter().map(|other| other.who.clone()).collect();
    let link = WireLink(Channel::new(wire, number, place.rank, &processes, who));
    let channel = &link.0;
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
            wire.call(calling, place.paths, &others, until())?;
        }
        let before = missing.len();
        let needs_call = || wire.to_call(&locked(&wire.doors), channel).next().is_some();
        wire.wait(|| channel.missing().len() != before || needs_call(), until().min(PAUSE * 50));
    }
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
        Some(Other { process, address, paths, who })
    }
}

/// The address of another host, with the interface of `own` if it is link-local.
fn reachable(address: SocketAddr, own: &str) -> SocketAddr {
    match address {
        SocketAddr::V6(far) if far.ip().segments()[0] & 0xffc0 == 0xfe80 => {
            let interface = own.split_once('%').and_then(|(_, name)| sockets::interface(name)).unwrap_or(0);
            SocketAddr::V6(SocketAddrV6::new(*far.ip(), far.port(), 0, interface))
        }
        other => other,
    }
}

/// Parses an address, with the interface of a link-local one.
pub(super) fn socket_address(text: &str, port: u16) -> Option<SocketAddr> {
    let (address, interface) = text.split_once('%').map_or((text, None), |(address, name)| (address, Some(name)));
    match address.parse().ok()? {
        IpAddr::V4(address) => Some(SocketAddr::new(IpAddr::V4(address), port)),
        IpAddr::V6(address) => {
            let scope = interface.and_then(sockets::interface).unwrap_or(0);
            Some(SocketAddr::V6(SocketAddrV6::new(address, port, 0, scope)))
        }
    }
}

impl Wire {
    /// Listens at this address unless the process already does. Returns the port.
    fn listen(&self, address: &str) -> io::Result<u16> {
        let mut doors = locked(&self.doors);
        if let Some((_, _, listener)) = doors.listening.iter().find(|(known, ..)| known == address) {
            return Ok(listener.local_addr()?.port());
        }
        let at = socket_address(address, 0).ok_or_else(|| io::Error::other("this is no address"))?;
        let listener = TcpListener::bind(at)?;
        listener.set_nonblocking(true)?;
        let (token, port) = (self.token(), listener.local_addr()?.port());
        sockets::close_in_children(listener.as_raw_fd(), true);
        self.epoll.add(listener.as_raw_fd(), token)?;
        doors.listening.push((address.to_string(), token, listener));
        Ok(port)
    }

    /// Listens at these addresses. Returns the line of the store's entry that lists them; an empty text if there are
    /// fewer than two.
    fn listen_at(&self, paths: &[String]) -> Result<String> {
        if paths.len() < 2 {
            return Ok(String::new());
        }
        let mut line = "\n".to_string();
        for path in paths {
            let port = self.listen(path).map_err(|error| failed(&format!("cannot listen at {path}: {error}")))?;
            line += &format!("{path}/{port} ");
        }
        Ok(line)
    }

    pub(super) fn is_joining(&self) -> bool {
        locked(&self.doors).joining > 0
    }

    /// The ranks to which this process must connect, if no thread is already connecting to them. Each with its process.
    fn to_call(&self, doors: &Doors, channel: &Channel) -> impl Iterator<Item = (usize, ProcessId)> {
        let missing = channel.missing().into_iter();
        let ours = missing.filter(|(_, process, connected)| !connected && self.id < *process);
        ours.filter(|(_, process, _)| !doors.called.contains(process)).map(|(rank, process, _)| (rank, process))
    }

    /// Closes the listening sockets if there is no group left that needs a process to connect.
    pub(super) fn close_doors(&self) {
        let mut doors = locked(&self.doors);
        if doors.joining > 0 || !self.all_channels().is_empty() {
            return;
        }
        for (_, _, listener) in doors.listening.drain(..) {
            self.epoll.remove(listener.as_raw_fd());
            sockets::close_in_children(listener.as_raw_fd(), false);
        }
        for (_, stranger) in doors.strangers.drain() {
            self.epoll.remove(stranger.stream.as_raw_fd());
        }
    }

    /// Accepts a connection, or reads what an accepted process has sent. Returns true if something advanced.
    pub(super) fn at_the_door(&self, token: u64) -> bool {
        let mut doors = locked(&self.doors);
        if let Some((_, _, listener)) = doors.listening.iter().find(|(_, known, _)| *known == token) {
            let Ok((stream, from)) = listener.accept() else { return false };
            log::debug!("a connection from {from}");
            return self.let_in(&mut doors, stream).is_ok();
        }
        let Some(mut stranger) = doors.strangers.remove(&token) else { return false };
        drop(doors);
        match stranger.listen() {
            Ok(false) => {
                let mut doors = locked(&self.doors);
                if doors.listening.is_empty() {
                    self.epoll.remove(stranger.stream.as_raw_fd()); // the doors were closed meanwhile
                } else {
                    doors.strangers.insert(token, stranger);
                }
            }
            Ok(true) => {
                if let Err(error) = self.welcome(token, stranger) {
                    log::debug!("a connection was turned away: {error}");
                }
            }
            Err(error) => {
                self.epoll.remove(stranger.stream.as_raw_fd());
                log::debug!("a connection was turned away: {error}");
            }
        }
        true
    }

    fn let_in(&self, doors: &mut Doors, stream: TcpStream) -> io::Result<()> {
        doors.strangers.retain(|_, stranger| stranger.since.elapsed() < PATIENCE);
        if doors.strangers.len() >= MOST
            && let Some(oldest) = doors.strangers.iter().min_by_key(|(_, one)| one.since).map(|(token, _)| *token)
        {
            doors.strangers.remove(&oldest);
        }
        stream.set_nonblocking(true)?;
        let token = self.token();
        self.epoll.add(stream.as_raw_fd(), token)?;
        doors.strangers.insert(token, Stranger { stream, said: Vec::new(), since: Instant::now() });
        Ok(())
    }

    /// Answers a process that has named this one, and adds the connection.
    fn welcome(&self, token: u64, mut stranger: Stranger) -> io::Result<()> {
        let fd = stranger.stream.as_raw_fd();
        self.epoll.remove(fd);
        let number = |at: usize| u128::from_le_bytes(stranger.said[at..at + 16].try_into().expect("sixteen bytes"));
        let short = |at: usize| u64::from_le_bytes(stranger.said[at..at + 8].try_into().expect("eight bytes"));
        let (wanted, who) = (number(8), number(24));
        let path = stranger.is_of_several().then(|| (short(CALL), short(CALL + 8)));
        let is_ours = path.is_some() || &stranger.said[..8] == MAGIC;
        if !is_ours || wanted != self.id || who == self.id {
            return Err(io::Error::other("it did not name this process"));
        }
        let first = match path {
            Some((connection, at)) if at > 0 => {
                let known = locked(&self.connections).get(&who).cloned();
                let known = known.filter(|one| one.several().is_some_and(|several| several.number == connection));
                let known = known.filter(|_| at < MOST_PATHS as u64);
                Some(known.ok_or_else(|| io::Error::other("it belongs to no connection"))?)
            }
            _ => None,
        };
        let mut answer = MAGIC.to_vec();
        answer.extend(self.id.to_le_bytes());
        stranger.stream.write_all(&answer)?; // a fresh connection has room for it
        sockets::set_up(fd);
        let Some((number, at)) = path else {
            return self.add_connection(Arc::new(Connection::new(token, who, stranger.stream.into())));
        };
        let socket = Socket::new(token, stranger.stream.into());
        match first {
            Some(connection) => self.add_path(&connection, at as usize, &socket),
            None => self.add_connection(Arc::new(Connection::of_several(&self.owned(), who, number, &socket))),
        }
    }
}

impl Stranger {
    /// Returns true when the process has sent everything.
    fn listen(&mut self) -> io::Result<bool> {
        let said = read_up_to(&mut self.stream, &mut self.said, CALL)?;
        if said && self.is_of_several() {
            return read_up_to(&mut self.stream, &mut self.said, CALL_OF_SEVERAL);
        }
        Ok(said)
    }

    /// Whether the bytes received so far say that this is one of several connections.
    fn is_of_several(&self) -> bool {
        self.said.starts_with(MAGIC_OF_SEVERAL)
    }
}

/// Reads what has arrived, until `said` has this length. Returns true when it has.
pub(super) fn read_up_to(stream: &mut TcpStream, said: &mut Vec<u8>, length: usize) -> io::Result<bool> {
    let mut buffer = [0; 64];
    while said.len() < length {
        match stream.read(&mut buffer[..length - said.len()]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => said.extend_from_slice(&buffer[..got]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}
