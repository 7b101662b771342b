//! The connections of this process. All its groups share them. A pass reads and writes the connections that are ready.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use super::carrier::Carrier;
use super::channel::Channel;
use super::channels::Channels;
use super::connection::Connection;
use super::doors::{Doors, Stranger};
use super::driving::{Counted, Driving};
use super::over::Over;
use super::path::{MOST_PATHS, Socket};
use super::receiver::{Origin, Turn};
use super::sockets::{Epoll, Ready};
use super::transfer::{Event, Events};
use super::{ProcessId, locked, sockets, stripes};
use crate::engine::Polled;
use crate::engine::multihost::ucx;
use crate::error::{Error, Result};
use crate::os::watch::PerProcess;
use crate::os::{clock, random, watch};

/// How long an unused connection waits for the peer to shut down its side.
const LINGER: Duration = Duration::from_secs(5);

const TOKEN_KICK: u64 = 0;
const TOKEN_UCX: u64 = 1;

pub struct Wire {
    pub id: ProcessId,
    /// `os::watch::generation` when this wire was created. If the current value differs, this process is a forked
    /// child.
    generation: u32,
    driving: Arc<Driving>,
    /// Set if UCX carries the frames.
    carrier: Option<Carrier>,
    channels: Channels,
    connections: Mutex<HashMap<ProcessId, Arc<Connection>>>,
    by_token: RwLock<HashMap<u64, Arc<Connection>>>,
    tokens: AtomicU64,
    doors: Doors,
    closing: Mutex<Vec<Closing>>,
    /// Whether a connection may consist of several TCP connections. Written under the lock of `connections`; the driver
    /// reads it in each pass (relaxed: a pass that misses it ends after `NAP`).
    of_several: AtomicBool,
    /// Time (`clock::stamp`) at which paths were last checked. Only the driver uses it (relaxed).
    looked: AtomicU64,
    this: Weak<Wire>,
}

/// A connection that no channel uses any more. It stays open until the peer has read everything that was sent.
struct Closing {
    connection: Arc<Connection>,
    since: Instant,
    /// Whether its sending side is shut down.
    shut: bool,
    _counted: Counted,
}

impl Wire {
    /// Returns the wire of this process. The first call creates it.
    pub fn of_process(over: &Over) -> Result<Arc<Wire>> {
        static OVER_TCP: PerProcess<OnceCell<Arc<Wire>>> = PerProcess::new();
        static OVER_UCX: PerProcess<OnceCell<Arc<Wire>>> = PerProcess::new();
        watch::install();
        let wire = match over {
            Over::Tcp => &OVER_TCP,
            Over::Ucx(_) => &OVER_UCX,
        };
        wire.get().get_or_try_init(|| Wire::new(over)).cloned()
    }

    pub fn new(over: &Over) -> Result<Arc<Wire>> {
        let worker = match over {
            Over::Tcp => None,
            Over::Ucx(wanted) => Some(ucx::open(wanted)?),
        };
        let id = u128::from_le_bytes(random()?);
        let make = || -> io::Result<Driving> {
            let epoll = Epoll::new()?;
            worker.as_ref().map_or(Ok(()), |worker| epoll.add(worker.fd, TOKEN_UCX))?;
            Driving::new(epoll, TOKEN_KICK)
        };
        let driving = make()
            .map_err(|error| Error::system(format!("sagellm: the system refuses what connections need: {error}")))?;
        let driving = Arc::new(driving);
        Ok(Arc::new_cyclic(|this| Wire {
            id,
            generation: watch::generation(),
            carrier: worker.map(|worker| Carrier::new(worker, &driving)),
            driving,
            channels: Channels::default(),
            connections: Mutex::default(),
            by_token: RwLock::default(),
            tokens: AtomicU64::new(TOKEN_UCX + 1),
            doors: Doors::default(),
            closing: Mutex::default(),
            of_several: AtomicBool::new(false),
            looked: AtomicU64::new(0),
            this: Weak::clone(this),
        }))
    }

    /// Whether this process is a forked child that inherited the wire. The child must not touch it, because threads of
    /// the parent may have held its locks.
    pub fn is_inherited(&self) -> bool {
        self.generation != watch::generation()
    }

    /// Returns the groups' channels.
    pub fn channels(&self) -> &Channels {
        &self.channels
    }

    /// Returns what carries the frames, as users name it (`SAGELLM_LINK`).
    pub fn link_name(&self) -> &'static str {
        if self.carrier.is_some() { "ucx" } else { "tcp" }
    }

    /// Whether a connection may consist of several TCP connections.
    pub fn may_have_paths(&self) -> bool {
        self.carrier.is_none()
    }

    /// Returns the state that decides which thread drives.
    pub fn driving(&self) -> &Arc<Driving> {
        &self.driving
    }

    /// Returns the listening sockets.
    pub fn doors(&self) -> &Doors {
        &self.doors
    }

    /// Listens at this address unless the process already does. Returns the port.
    pub fn listen(&self, address: &str) -> io::Result<u16> {
        self.doors.listen(self.epoll(), || self.token(), address)
    }

    fn epoll(&self) -> &Epoll {
        self.driving.epoll()
    }

    fn owned(&self) -> Arc<Wire> {
        self.this.upgrade().expect("a wire that is used is alive")
    }

    /// Returns how many connections groups use.
    #[cfg(feature = "testing")]
    pub fn open_connections(&self) -> usize {
        locked(&self.connections).len()
    }

    pub fn token(&self) -> u64 {
        self.tokens.fetch_add(1, Ordering::Relaxed)
    }

    // -------------------------------------------------------------------------------------------------------- driving

    /// Drives the wire until `done` returns true. Returns false if the deadline passes first.
    pub fn wait(&self, done: impl Fn() -> bool, timeout: Duration) -> bool {
        self.driving.wait(|ready, sleep| self.pass(ready, sleep), done, timeout)
    }

    /// Makes one pass, unless another thread drives. If nothing is ready, the pass sleeps for at most `sleep`.
    pub fn poll(&self, sleep: Duration) -> Polled {
        self.driving.poll(|ready, sleep| self.pass(ready, sleep), sleep)
    }

    /// Starts the background thread, unless it already runs.
    pub fn start(self: &Arc<Wire>) -> Result<()> {
        let wire = Arc::clone(self);
        self.driving.start(move || wire.driving.run(|ready, sleep| wire.pass(ready, sleep)))
    }

    /// Handles the connections that are ready, after a sleep of at most `sleep`. Returns true if something advanced.
    fn pass(&self, ready: &mut Vec<Ready>, sleep: Duration) -> bool {
        let looks = self.of_several.load(Ordering::Relaxed);
        let mut sleep = if looks { sleep.min(stripes::LOOK) } else { sleep };
        let mut events = Events::default();
        let mut moved = false;
        if let Some(carrier) = &self.carrier {
            moved = self.advance(carrier, &mut events);
            sleep = if moved { Duration::ZERO } else { carrier.longest_sleep(sleep) };
        }
        self.epoll().wait(sleep.as_micros().div_ceil(1000) as i32, ready);
        if looks {
            self.look(&mut events);
        }
        for one in ready.iter() {
            if one.token == TOKEN_KICK {
                self.driving.clear_kick();
                moved = true;
                continue;
            }
            if let (TOKEN_UCX, Some(carrier)) = (one.token, &self.carrier) {
                moved |= self.advance(carrier, &mut events);
                continue;
            }
            let Some(connection) = self.by_token(one.token) else {
                moved |= self.at_the_door(one.token);
                continue;
            };
            if one.writable {
                connection.flush(&self.driving, one.token, &mut events);
                moved = true;
            }
            if one.readable {
                match connection.read(&self.driving, &self.channels, one.token, &mut events) {
                    Turn::Nothing => (),
                    Turn::Moved => moved = true,
                    Turn::Without(socket) => {
                        moved = true;
                        self.forget_socket(socket.fd(), socket.token);
                    }
                    Turn::Broken(why) => {
                        moved = true;
                        self.drop_connection(&connection, &why, &mut events);
                    }
                }
            }
        }
        self.linger();
        let deferred = self.driving.take_deferred();
        moved |= !deferred.is_empty();
        let ended = events.ended;
        Events { list: deferred, ended: false }.run();
        events.run();
        if ended {
            self.driving.ring();
        }
        moved
    }

    fn by_token(&self, token: u64) -> Option<Arc<Connection>> {
        self.by_token.read().unwrap_or_else(PoisonError::into_inner).get(&token).cloned()
    }

    /// Advances UCX. Returns true if something advanced.
    fn advance(&self, carrier: &Carrier, events: &mut Events) -> bool {
        let mut gone = Vec::new();
        let moved = carrier.pass(&self.channels, events, &mut gone);
        for (token, why) in gone {
            if let Some(connection) = self.by_token(token) {
                self.drop_connection(&connection, &why, events);
            }
        }
        moved
    }

    /// If a connection consists of several paths, checks from time to time which paths advance.
    fn look(&self, events: &mut Events) {
        let now = clock::stamp();
        if now.saturating_sub(self.looked.load(Ordering::Relaxed)) < stripes::LOOK.as_nanos() as u64 {
            return;
        }
        self.looked.store(now, Ordering::Relaxed);
        let connections = locked(&self.connections);
        let mut all: Vec<_> = connections.values().map(|one| (Arc::clone(one), false)).collect();
        all.extend(locked(&self.closing).iter().map(|one| (Arc::clone(&one.connection), true)));
        all.retain(|(connection, _)| connection.several().is_some());
        self.of_several.store(!all.is_empty(), Ordering::Relaxed);
        drop(connections);
        for (connection, is_closing) in all {
            let gone = connection.several().and_then(|several| several.look(&self.driving, Instant::now(), is_closing));
            if let Some(why) = gone {
                self.drop_connection(&connection, &why, events);
            }
        }
    }

    // ---------------------------------------------------------------------------------------------------- connections

    /// Accepts a connection, or reads what an accepted process has sent. Returns true if something advanced.
    fn at_the_door(&self, token: u64) -> bool {
        self.doors.arrived(self.epoll(), token, || self.token(), |stranger| self.welcome(token, stranger))
    }

    /// Answers a process that has named this one, and adds the connection.
    fn welcome(&self, token: u64, stranger: Stranger) -> io::Result<()> {
        self.epoll().remove(stranger.fd());
        let said = stranger.introduction();
        if !said.is_ours || said.wanted != self.id || said.who == self.id {
            return Err(io::Error::other("it did not name this process"));
        }
        let first = match said.path {
            Some((connection, at)) if at > 0 => {
                let known = locked(&self.connections).get(&said.who).cloned();
                let known = known.filter(|one| one.several().is_some_and(|several| several.number == connection));
                let known = known.filter(|_| at < MOST_PATHS as u64);
                Some(known.ok_or_else(|| io::Error::other("it belongs to no connection"))?)
            }
            _ => None,
        };
        let stream = stranger.answer(self.id)?;
        let Some((number, at)) = said.path else {
            return self.add_connection(self.connection(Origin { peer: said.who, token }, stream.into(), false));
        };
        let socket = Socket::new(token, stream.into());
        match first {
            Some(connection) => self.add_path(&connection, at as usize, &socket),
            None => self.add_connection(Arc::new(Connection::of_several(&self.driving, said.who, number, &socket))),
        }
    }

    /// Makes a connection of one TCP connection, on which the two processes have named each other. `is_first`: whether
    /// this process has called the other.
    pub fn connection(&self, from: Origin, fd: OwnedFd, is_first: bool) -> Arc<Connection> {
        Arc::new(match &self.carrier {
            Some(carrier) => Connection::by_ucx(from, carrier.carry(from, fd, is_first)),
            None => Connection::new(from.token, from.peer, fd),
        })
    }

    /// Adds a connection whose peer has proved its identity. If there is an earlier connection to the same process, the
    /// peer has given it up, and the new connection replaces it.
    pub fn add_connection(&self, connection: Arc<Connection>) -> io::Result<()> {
        let mut connections = locked(&self.connections);
        self.by_token.write().unwrap_or_else(PoisonError::into_inner).insert(connection.token, Arc::clone(&connection));
        connections.insert(connection.peer, Arc::clone(&connection));
        for channel in self.channels.all() {
            channel.connect(&connection);
        }
        if connection.several().is_some() {
            self.of_several.store(true, Ordering::Relaxed);
        }
        // This comes last, because nothing may be read before the channels know the connection.
        connection.introduce()?;
        connection.sockets().into_iter().try_for_each(|(fd, token)| self.epoll().add(fd, token))
    }

    /// Adds a path to a connection that consists of several.
    pub fn add_path(&self, connection: &Arc<Connection>, number: usize, socket: &Arc<Socket>) -> io::Result<()> {
        let connections = locked(&self.connections);
        let lives = connections.get(&connection.peer).is_some_and(|known| known.token == connection.token);
        let Some(several) = connection.several().filter(|several| lives && !several.had(number)) else {
            return Err(io::Error::other("it belongs to no connection"));
        };
        self.epoll().add(socket.fd(), socket.token)?;
        self.by_token.write().unwrap_or_else(PoisonError::into_inner).insert(socket.token, Arc::clone(connection));
        several.attach(&self.driving, number, socket);
        Ok(())
    }

    /// Stops reading from a socket of a connection.
    fn forget_socket(&self, fd: i32, token: u64) {
        self.epoll().remove(fd);
        self.by_token.write().unwrap_or_else(PoisonError::into_inner).remove(&token);
    }

    /// Stops using a connection. Its transfers fail in an event that runs after the mail which has already arrived
    /// (`Channel::lose`).
    fn drop_connection(&self, connection: &Arc<Connection>, why: &str, events: &mut Events) {
        // This comes first, so that no path is added to the connection any more.
        let mut connections = locked(&self.connections);
        if connections.get(&connection.peer).is_some_and(|known| known.token == connection.token) {
            connections.remove(&connection.peer);
        }
        drop(connections);
        connection.sockets().into_iter().for_each(|(fd, token)| self.forget_socket(fd, token));
        let (wire, connection, why) = (self.owned(), Arc::clone(connection), why.to_string());
        events.list.push(Event::Call(Box::new(move || {
            let mut events = Events::default();
            connection.fail(&wire.driving, &why, &mut events);
            events.run();
            wire.channels.all().iter().for_each(|channel| channel.lose_connection(&connection, &why));
        })));
        events.ended = true;
    }

    /// Adds a channel, whose frames are handled from now on.
    pub fn add_channel(&self, channel: &Arc<Channel>) {
        let connections = locked(&self.connections);
        self.channels.add(channel, connections.values());
    }

    /// Removes a channel that its group has left, and closes the connections that no other channel uses.
    pub fn close(self: &Arc<Wire>, channel: &Arc<Channel>) {
        let mut connections = locked(&self.connections);
        if !self.channels.remove(channel.id) {
            return; // it was closed before
        }
        self.begin_closing(&mut connections, channel.connections());
        drop(connections);
        self.close_unused();
    }

    /// Closes the connections and listening sockets that no group uses. While a group is being created, all stay open,
    /// because the group's channel, which would use them, may not exist yet.
    pub fn close_unused(self: &Arc<Wire>) {
        let mut connections = locked(&self.connections);
        if !self.doors.is_joining() {
            let all = connections.values().cloned().collect();
            self.begin_closing(&mut connections, all);
        }
        drop(connections);
        self.doors.close(self.epoll(), || self.channels.all().is_empty());
        self.linger();
        self.driving.wake_for_pending();
    }

    /// Begins to close those of `these` connections that no channel uses. `known` are the connections of this process.
    fn begin_closing(self: &Arc<Wire>, known: &mut HashMap<ProcessId, Arc<Connection>>, these: Vec<Arc<Connection>>) {
        let used: HashSet<u64> =
            self.channels.all().iter().flat_map(|one| one.connections()).map(|connection| connection.token).collect();
        let mut closing = locked(&self.closing);
        for connection in these {
            if used.contains(&connection.token) || connection.broken().is_some() {
                continue;
            }
            if known.get(&connection.peer).is_some_and(|known| known.token == connection.token) {
                known.remove(&connection.peer);
            }
            let since = Instant::now();
            closing.push(Closing { connection, since, shut: false, _counted: Counted::new(&self.driving) });
        }
    }

    /// Ends connections that are no longer used. First the queued frames are sent, then the sending side is shut down.
    /// The connection is closed when the peer has shut down its side too, or after `LINGER`. If a socket that has
    /// unread data were closed earlier, the connection would be reset, and data that the peer has not read yet would be
    /// lost.
    fn linger(&self) {
        let mut closing = locked(&self.closing);
        closing.retain_mut(|one| {
            if one.connection.broken().is_some() {
                return false;
            }
            if !one.shut && one.connection.is_flushed() {
                one.shut = true;
                one.connection.conclude();
                one.connection.sockets().into_iter().for_each(|(fd, _)| sockets::shut(fd));
            }
            if one.since.elapsed() < LINGER {
                return true;
            }
            one.connection.sockets().into_iter().for_each(|(fd, token)| self.forget_socket(fd, token));
            let mut events = Events::default();
            one.connection.fail(&self.driving, "it was closed", &mut events); // no transfer is in flight on it
            false
        });
    }
}
