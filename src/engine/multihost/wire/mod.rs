//! The connections from this process to the processes of its groups on other hosts. There is one connection to each
//! process, which all groups share.
//!
//! A group has a *channel* (`channel.rs`), whose frames carry the channel's number. A thread that waits for a message
//! drives the wire: it reads from all connections, for all groups, while other waiting threads sleep. If no thread
//! waits and something is pending, the wire's background thread drives. So if a thread waits for a message, no switch
//! to another thread is needed.
//!
//! | file | |
//! | --- | --- |
//! | `frame` | the header of a frame |
//! | `memory` | the memory from which data is sent and into which it is received |
//! | `transfer` | the end of a transfer: its result, its callback |
//! | `connection` | one connection: writes frames, reads them |
//! | `channel` | one group: its messages, mail and bodies |
//! | `peer` | those in flight between a rank of a group and one peer |
//! | `link` | a group's channel as its engine holds it; implements `Link` and `Mail` |
//! | `lane` | the transfers of a lane |
//! | `several` | one connection that consists of several TCP connections, the paths |
//! | `path` | one of them |
//! | `segment` | the parts of the stream of frames that paths carry |
//! | `stripes` | the sending side: which segment is sent on which path, and sent again |
//! | `trust` | the sending side: which path is suspected to be dead |
//! | `assembly` | the receiving side: puts the segments together |
//! | `parser` | the receiving side: handles the frames |
//! | `meet` | listens, proves the identity of processes; makes a group's channel |
//! | `calls` | connects to the processes of a group |
//! | `sockets` | system calls |
//! | `tests` | a race of frames with a channel that is being added |
//!
//! Lock order within one thread: the driver's, `connections`, `closing`, a connection's reading side, `doors`,
//! `channels`, `early`, a channel's state, a connection's writing side. Threads only try the driver's lock and never
//! block on it. While a callback outside this module runs, none of these locks is held except the driver's.

mod assembly;
mod calls;
mod channel;
mod connection;
mod frame;
mod lane;
mod link;
mod meet;
mod memory;
mod parser;
mod path;
mod peer;
mod segment;
mod several;
mod sockets;
mod stripes;
mod transfer;
mod trust;

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError, Weak};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use self::channel::Channel;
use self::connection::{Connection, Incoming, Receiver, Turn};
use self::frame::{Frame, Kind};
pub use self::link::WireLink;
use self::meet::Doors;
pub use self::meet::{Place, join, key};
use self::path::Socket;
use self::sockets::{Epoll, Kick, Ready};
use self::transfer::{Event, Events};
use crate::error::{Error, Result};
use crate::os::event_count::WakeWords;
use crate::os::random;
use crate::os::watch::PerProcess;
use crate::os::yielding::Yielding;
use crate::os::{clock, event_count, futex, watch};

/// Random number that identifies a process. Only processes that can read the store of one of its groups know it.
pub type ProcessId = u128;

/// How long a waiting thread polls, yielding its core between polls, before it sleeps.
const EAGER: Duration = Duration::from_micros(100);
/// A waiting thread sleeps at most this long and then checks its deadline.
const NAP: Duration = Duration::from_millis(50);
/// How long an unused connection waits for the peer to shut down its side.
const LINGER: Duration = Duration::from_secs(5);

const TOKEN_KICK: u64 = 0;

pub struct Wire {
    pub id: ProcessId,
    /// `os::watch::generation` when this wire was created. If the current value differs, this process is a forked
    /// child.
    generation: u32,
    epoll: Epoll,
    kick: Kick,
    /// Held by the thread that drives, with its list of ready descriptors. Threads only try this lock.
    driver: Mutex<Vec<Ready>>,
    channels: RwLock<HashMap<u64, Arc<Channel>>>,
    connections: Mutex<HashMap<ProcessId, Arc<Connection>>>,
    by_token: RwLock<HashMap<u64, Arc<Connection>>>,
    tokens: AtomicU64,
    /// Peers that joined a channel before this rank did, by channel. Locked while `channels` is locked, so that a frame
    /// either finds the channel or is recorded here before the channel reads this list.
    early: Mutex<HashMap<u64, Vec<Early>>>,
    doors: Mutex<Doors>,
    closing: Mutex<Vec<Closing>>,
    /// Rung when a transfer has ended or a thread has stopped driving.
    changed: Bell,
    /// Number of threads in `wait`, which change it themselves. The background thread and a thread that leaves `wait`
    /// read it (relaxed: it is a hint, and sleeping threads check again after at most `NAP`).
    waiting: AtomicUsize,
    /// Number of things that must be driven even if no thread waits (`Counted`). Relaxed: a hint like `waiting`.
    pending: AtomicUsize,
    deferred: Mutex<Vec<(Event, Counted)>>,
    /// Rung when the background thread may be needed.
    background: Bell,
    /// Whether the background thread drives now. That thread writes it; a thread that finds the driver's lock held
    /// reads it (relaxed: a hint).
    in_background: AtomicBool,
    /// Time (`clock::stamp`) of the last `poll` by a thread of the program, or the end of its sleep in `poll`. The
    /// polling threads write it, the background thread reads it (relaxed: a hint).
    polled: AtomicU64,
    started: AtomicBool,
    /// Whether a connection may consist of several TCP connections. Written under the lock of `connections`; the driver
    /// reads it in each pass (relaxed: a pass that misses it ends after `NAP`).
    of_several: AtomicBool,
    /// Time (`clock::stamp`) at which the paths of such connections were last checked. Only the driver uses it
    /// (relaxed).
    looked: AtomicU64,
    /// Decides whether a waiting thread yields its core or sleeps.
    yielding: Yielding,
    this: Weak<Wire>,
}

/// A peer that joined a channel before this rank did.
struct Early {
    peer: ProcessId,
    /// The connection on which its Hello came.
    token: u64,
    /// Whether it has left the channel since.
    left: bool,
}

/// A connection that no channel uses any more. It stays open until the peer has read everything that was sent.
struct Closing {
    connection: Arc<Connection>,
    since: Instant,
    /// Whether its sending side is shut down.
    shut: bool,
    _counted: Counted,
}

/// One thing that the wire still has to do. While a `Counted` exists and no thread of the program waits, the background
/// thread drives the wire.
pub struct Counted(Arc<Wire>);

impl Counted {
    pub fn new(wire: &Arc<Wire>) -> Counted {
        wire.pending.fetch_add(1, Ordering::Relaxed);
        Counted(Arc::clone(wire))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.pending.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An event count of this process.
#[derive(Default)]
struct Bell {
    /// Futex word. A thread that rings increments it (release); a thread that is about to sleep reads it first
    /// (acquire).
    word: AtomicU32,
    /// Number of threads that sleep on `word` or are about to. Relaxed, ordered by the fences of `event_count`.
    sleepers: AtomicU32,
}

impl Bell {
    fn ring(&self) {
        event_count::announce(self, 1);
    }

    /// Sleeps until the bell rings, for at most `longest`. Returns at once if `ready` returns true.
    fn sleep(&self, longest: Duration, ready: impl Fn() -> bool) {
        let listening = event_count::Listening::new(self, 0);
        if !ready() {
            futex::wait(&[(&self.word, listening.value)], longest);
        }
    }
}

impl WakeWords for Bell {
    fn wake_count(&self, _: usize) -> u32 {
        self.word.load(Ordering::Acquire)
    }
    fn wake(&self, _: usize) {
        self.word.fetch_add(1, Ordering::Release);
        futex::wake_all(&self.word);
    }
    fn asleep(&self, _: usize) -> u32 {
        self.sleepers.load(Ordering::Relaxed)
    }
    fn sleepers(&self) -> u32 {
        self.sleepers.load(Ordering::Relaxed)
    }
    fn count_sleeper(&self, _: usize, more: bool) {
        self.sleepers.fetch_add(if more { 1 } else { u32::MAX }, Ordering::Relaxed);
    }
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wire {
    /// Returns the wire of this process. The first call creates it.
    pub fn of_process() -> Result<Arc<Wire>> {
        static WIRE: PerProcess<OnceCell<Arc<Wire>>> = PerProcess::new();
        watch::install();
        WIRE.get().get_or_try_init(Wire::new).cloned()
    }

    pub fn new() -> Result<Arc<Wire>> {
        let id = u128::from_le_bytes(random()?);
        let make = || -> io::Result<(Epoll, Kick)> {
            let (epoll, kick) = (Epoll::new()?, Kick::new()?);
            epoll.add(std::os::fd::AsRawFd::as_raw_fd(&kick), TOKEN_KICK)?;
            Ok((epoll, kick))
        };
        let (epoll, kick) = make()
            .map_err(|error| Error::system(format!("sagellm: the system refuses what connections need: {error}")))?;
        Ok(Arc::new_cyclic(|this| Wire {
            id,
            generation: watch::generation(),
            epoll,
            kick,
            driver: Mutex::default(),
            channels: RwLock::default(),
            connections: Mutex::default(),
            by_token: RwLock::default(),
            tokens: AtomicU64::new(TOKEN_KICK + 1),
            early: Mutex::default(),
            doors: Mutex::default(),
            closing: Mutex::default(),
            changed: Bell::default(),
            waiting: AtomicUsize::new(0),
            pending: AtomicUsize::new(0),
            deferred: Mutex::default(),
            background: Bell::default(),
            in_background: AtomicBool::new(false),
            polled: AtomicU64::new(0),
            started: AtomicBool::new(false),
            of_several: AtomicBool::new(false),
            looked: AtomicU64::new(0),
            yielding: Yielding::default(),
            this: Weak::clone(this),
        }))
    }

    /// Whether this process is a forked child that inherited the wire. The child must not touch it, because threads of
    /// the parent may have held its locks.
    fn is_inherited(&self) -> bool {
        self.generation != watch::generation()
    }

    fn owned(&self) -> Arc<Wire> {
        self.this.upgrade().expect("a wire that is used is alive")
    }

    /// How many connections groups use.
    pub fn open_connections(&self) -> usize {
        locked(&self.connections).len()
    }

    fn token(&self) -> u64 {
        self.tokens.fetch_add(1, Ordering::Relaxed)
    }

    fn channel(&self, id: u64) -> Option<Arc<Channel>> {
        self.channels.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    fn receiver(&self, channel: u64) -> Option<Arc<dyn Receiver>> {
        self.channel(channel).map(|channel| channel as Arc<dyn Receiver>)
    }

    fn all_channels(&self) -> Vec<Arc<Channel>> {
        self.channels.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    fn watch_output(&self, connection: &Connection, watch: bool) {
        match watch {
            true => self.pending.fetch_add(1, Ordering::Relaxed),
            false => self.pending.fetch_sub(1, Ordering::Relaxed),
        };
        let _ = self.epoll.watch_output(connection.fd(), connection.token, watch); // reading finds closed ones
        if watch {
            self.wake_for_pending();
        }
    }

    // -------------------------------------------------------------------------------------------------------- driving

    /// Drives the wire until `done` returns true. Returns false if the deadline passes first.
    fn wait(&self, done: impl Fn() -> bool, timeout: Duration) -> bool {
        // This clock excludes the time in which the process was stopped.
        let deadline = clock::now().saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        let mut quiet = Instant::now();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let ended = loop {
            if done() {
                break true;
            }
            let left = Duration::from_nanos(deadline.saturating_sub(clock::now()));
            if left.is_zero() {
                break false;
            }
            match self.driver.try_lock() {
                Ok(mut ready) => {
                    let eager = quiet.elapsed() < EAGER && self.yielding.pays();
                    let sleep = if eager { Duration::ZERO } else { left.min(NAP) };
                    let moved = self.pass(&mut ready, sleep);
                    drop(ready);
                    if moved {
                        quiet = Instant::now();
                    } else if eager {
                        self.yielding.yield_now();
                    }
                }
                Err(TryLockError::Poisoned(_)) => self.driver.clear_poison(),
                Err(TryLockError::WouldBlock) => {
                    self.take_over();
                    self.changed.sleep(left.min(NAP), || done() || self.driver.try_lock().is_ok());
                }
            }
        };
        let others = self.waiting.fetch_sub(1, Ordering::Relaxed) - 1;
        if others > 0 {
            self.changed.ring(); // a waiting thread drives from now on
        } else {
            self.wake_for_pending();
        }
        ended
    }

    /// Makes the background thread stop driving, so that a waiting thread can drive.
    fn take_over(&self) {
        // Interrupts each pass at most once, because a thread that polls while the pass ends would otherwise write
        // again and again.
        if self.in_background.load(Ordering::Relaxed) && self.in_background.swap(false, Ordering::Relaxed) {
            self.kick.kick();
        }
    }

    /// Makes one pass. If nothing is ready, the pass sleeps for at most `sleep`. Returns true if something advanced.
    /// Does nothing if another thread drives.
    fn poll(&self, sleep: Duration) -> bool {
        match self.driver.try_lock() {
            Ok(mut ready) => {
                let until = clock::stamp().saturating_add(sleep.as_nanos() as u64);
                self.polled.store(until, Ordering::Relaxed);
                let moved = self.pass(&mut ready, sleep);
                drop(ready);
                self.changed.ring();
                moved
            }
            Err(TryLockError::Poisoned(_)) => {
                self.driver.clear_poison();
                false
            }
            Err(TryLockError::WouldBlock) => {
                self.polled.store(clock::stamp(), Ordering::Relaxed);
                self.take_over();
                false
            }
        }
    }

    /// Handles the connections that are ready, after a sleep of at most `sleep`. Returns true if something advanced.
    fn pass(&self, ready: &mut Vec<Ready>, sleep: Duration) -> bool {
        let looks = self.of_several.load(Ordering::Relaxed);
        let sleep = if looks { sleep.min(stripes::LOOK) } else { sleep };
        self.epoll.wait(sleep.as_micros().div_ceil(1000) as i32, ready);
        let mut events = Events::default();
        if looks {
            self.look(&mut events);
        }
        let mut moved = false;
        for one in ready.iter() {
            if one.token == TOKEN_KICK {
                self.kick.clear();
                moved = true;
                continue;
            }
            let connection =
                self.by_token.read().unwrap_or_else(PoisonError::into_inner).get(&one.token).map(Arc::clone);
            let Some(connection) = connection else {
                moved |= self.at_the_door(one.token);
                continue;
            };
            if one.writable {
                connection.flush(self, one.token, &mut events);
                moved = true;
            }
            if one.readable {
                match connection.read(self, one.token, &mut events) {
                    Turn::Nothing => (),
                    Turn::Moved => moved = true,
                    Turn::Broken(why) => {
                        moved = true;
                        self.drop_connection(&connection, &why, &mut events);
                    }
                }
            }
        }
        self.linger();
        let deferred = std::mem::take(&mut *locked(&self.deferred));
        moved |= !deferred.is_empty();
        let ended = events.ended;
        Events { list: deferred.into_iter().map(|(event, _)| event).collect(), ended: false }.run();
        events.run();
        if ended {
            self.changed.ring();
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
            let gone = connection.several().and_then(|several| several.look(self, Instant::now(), is_closing));
            if let Some(why) = gone {
                self.drop_connection(&connection, &why, events);
            }
        }
    }

    /// Queues events for the thread that drives, because the caller may hold locks under which events must not run.
    fn defer(self: &Arc<Wire>, events: Events) {
        if events.ended {
            self.changed.ring();
        }
        if events.list.is_empty() && !events.ended {
            return;
        }
        locked(&self.deferred).extend(events.list.into_iter().map(|event| (event, Counted::new(self))));
        self.kick.kick(); // the driver may be asleep, and the transfer that it waits for may have ended
        self.wake_for_pending();
    }

    /// Wakes the background thread if it is needed.
    fn wake_for_pending(&self) {
        if self.is_needed() {
            self.background.ring();
        }
    }

    /// Whether something is pending and no thread waits.
    fn is_needed(&self) -> bool {
        self.pending.load(Ordering::Relaxed) > 0 && self.waiting.load(Ordering::Relaxed) == 0
    }

    /// Starts the background thread, unless it already runs.
    fn start(self: &Arc<Wire>) -> Result<()> {
        if self.started.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let wire = Arc::clone(self);
        let work = move || wire.drive_in_background();
        watch::spawn("sagellm-wire", work).map_err(|error| {
            self.started.store(false, Ordering::Relaxed);
            Error::system(format!("sagellm: cannot start a thread for the connections: {error}"))
        })?;
        Ok(())
    }

    fn drive_in_background(&self) {
        const ASLEEP: Duration = Duration::from_secs(1);
        /// A thread that has begun a transfer usually waits for it at once, and then that thread drives.
        const GRACE: Duration = Duration::from_micros(50);
        loop {
            if !self.is_needed() {
                self.background.sleep(ASLEEP, || self.is_needed());
                std::thread::sleep(GRACE);
                continue;
            }
            let polled = Duration::from_nanos(self.polled.load(Ordering::Relaxed)) + EAGER;
            let left = polled.saturating_sub(Duration::from_nanos(clock::stamp()));
            if !left.is_zero() {
                std::thread::sleep(left); // a thread of the program drives
                continue;
            }
            match self.driver.try_lock() {
                Ok(mut ready) => {
                    self.in_background.store(true, Ordering::Relaxed);
                    self.pass(&mut ready, NAP);
                    self.in_background.store(false, Ordering::Relaxed);
                    drop(ready);
                    self.changed.ring(); // a waiting thread drives from now on
                }
                Err(TryLockError::Poisoned(_)) => self.driver.clear_poison(),
                Err(TryLockError::WouldBlock) => std::thread::sleep(EAGER),
            }
        }
    }

    // ---------------------------------------------------------------------------------------------------- connections

    /// Adds a connection whose peer has proved its identity. If there is an earlier connection to the same process, the
    /// peer has given it up, and the new connection replaces it.
    fn add_connection(&self, connection: Arc<Connection>) -> io::Result<()> {
        let mut connections = locked(&self.connections);
        self.by_token.write().unwrap_or_else(PoisonError::into_inner).insert(connection.token, Arc::clone(&connection));
        connections.insert(connection.peer, Arc::clone(&connection));
        for channel in self.all_channels() {
            channel.connect(&connection);
        }
        if connection.several().is_some() {
            self.of_several.store(true, Ordering::Relaxed);
        }
        // This comes last, because nothing may be read before the channels know the connection.
        connection.sockets().into_iter().try_for_each(|(fd, token)| self.epoll.add(fd, token))
    }

    /// Adds a path to a connection of several.
    fn add_path(&self, connection: &Arc<Connection>, number: usize, socket: &Arc<Socket>) -> io::Result<()> {
        let connections = locked(&self.connections);
        let lives = connections.get(&connection.peer).is_some_and(|known| known.token == connection.token);
        let Some(several) = connection.several().filter(|several| lives && !several.had(number)) else {
            return Err(io::Error::other("it belongs to no connection"));
        };
        self.epoll.add(socket.fd(), socket.token)?;
        self.by_token.write().unwrap_or_else(PoisonError::into_inner).insert(socket.token, Arc::clone(connection));
        several.attach(self, number, socket);
        Ok(())
    }

    /// Stops reading from a socket of a connection.
    fn forget_socket(&self, fd: i32, token: u64) {
        self.epoll.remove(fd);
        self.by_token.write().unwrap_or_else(PoisonError::into_inner).remove(&token);
    }

    fn drop_connection(&self, connection: &Arc<Connection>, why: &str, events: &mut Events) {
        // This comes first, so that no path is added to the connection any more.
        let mut connections = locked(&self.connections);
        if connections.get(&connection.peer).is_some_and(|known| known.token == connection.token) {
            connections.remove(&connection.peer);
        }
        drop(connections);
        connection.sockets().into_iter().for_each(|(fd, token)| self.forget_socket(fd, token));
        connection.fail(self, why, events);
        for channel in self.all_channels() {
            channel.lose_connection(connection, why, events);
        }
    }

    /// Handles a frame without data whose channel was not found, because this rank has not joined the channel yet or
    /// has left it.
    fn of_no_channel(&self, from: &Connection, frame: Frame, events: &mut Events) -> std::result::Result<(), String> {
        const MOST: usize = 1 << 16; // beyond this number, entries are of groups that failed
        let channels = self.channels.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = channels.get(&frame.channel).cloned() {
            drop(channels);
            return known.control(self, from, frame, events); // this rank has joined it meanwhile
        }
        let mut early = locked(&self.early);
        match frame.kind {
            Kind::Hello => {
                if early.len() >= MOST {
                    early.clear();
                }
                let one = Early { peer: from.peer, token: from.token, left: false };
                early.entry(frame.channel).or_default().push(one);
            }
            Kind::Cut => {
                let said = early.get_mut(&frame.channel).into_iter().flatten();
                said.filter(|one| one.token == from.token).for_each(|one| one.left = true);
            }
            _ => (), // the group has ended here
        }
        Ok(())
    }

    /// Adds a channel, whose frames are handled from now on.
    fn add_channel(&self, channel: &Arc<Channel>) {
        let connections = locked(&self.connections);
        // The write lock keeps other threads from finding the channel before it has its connections and knows who was
        // early. `connect` sends Hello to each peer, so every frame that a peer sends in answer finds the channel. A
        // peer that was early may answer with everything that it has to send, leave, and close its connection.
        let mut channels = self.channels.write().unwrap_or_else(PoisonError::into_inner);
        channels.insert(channel.id, Arc::clone(channel));
        connections.values().for_each(|connection| channel.connect(connection));
        let early = locked(&self.early).remove(&channel.id).unwrap_or_default();
        early.iter().for_each(|one| channel.was_early(one));
    }

    /// Removes a channel that its group has left, and closes the connections that no other channel uses.
    fn close(self: &Arc<Wire>, channel: &Arc<Channel>) {
        let mut connections = locked(&self.connections);
        if self.channels.write().unwrap_or_else(PoisonError::into_inner).remove(&channel.id).is_none() {
            return; // it was closed before
        }
        self.begin_closing(&mut connections, channel.connections());
        drop(connections);
        self.close_unused();
    }

    /// Closes the connections and listening sockets that no group uses. While a group is being created, all stay open,
    /// because the group's channel, which would use them, may not exist yet.
    fn close_unused(self: &Arc<Wire>) {
        let mut connections = locked(&self.connections);
        if !self.is_joining() {
            let all = connections.values().cloned().collect();
            self.begin_closing(&mut connections, all);
        }
        drop(connections);
        self.close_doors();
        self.linger();
        self.wake_for_pending();
    }

    /// Begins to close those of `these` connections that no channel uses. `known` are the connections of this process.
    fn begin_closing(self: &Arc<Wire>, known: &mut HashMap<ProcessId, Arc<Connection>>, these: Vec<Arc<Connection>>) {
        let used: HashSet<u64> =
            self.all_channels().iter().flat_map(|one| one.connections()).map(|connection| connection.token).collect();
        let mut closing = locked(&self.closing);
        for connection in these {
            if used.contains(&connection.token) || connection.broken().is_some() {
                continue;
            }
            if known.get(&connection.peer).is_some_and(|known| known.token == connection.token) {
                known.remove(&connection.peer);
            }
            let since = Instant::now();
            closing.push(Closing { connection, since, shut: false, _counted: Counted::new(self) });
        }
    }

    /// Ends connections that are no longer used. First the queued frames are sent, then the sending side is shut down.
    /// The connection is closed when the peer has shut down its side too, or after `LINGER`: if a socket that has
    /// unread data were closed, the connection would be reset, and data that the peer has not read yet would be lost.
    fn linger(&self) {
        let mut closing = locked(&self.closing);
        closing.retain_mut(|one| {
            if one.connection.broken().is_some() {
                return false;
            }
            if !one.shut && one.connection.is_flushed() {
                one.shut = true;
                one.connection.sockets().into_iter().for_each(|(fd, _)| sockets::shut(fd));
            }
            if one.since.elapsed() < LINGER {
                return true;
            }
            one.connection.sockets().into_iter().for_each(|(fd, token)| self.forget_socket(fd, token));
            let mut events = Events::default();
            one.connection.fail(self, "it was closed", &mut events); // no transfer is in flight on it
            false
        });
    }
}
