//! Watches peers: one thread per process sleeps until a watched peer ends.
//!
//! There are two signs. A pidfd becomes readable when the process has ended, and a socket reports end of file when its
//! other end was closed. The pidfd has priority, because forked helpers of a peer may keep the peer's socket open. If
//! there is no pidfd (because of another pid namespace on an old kernel, or because pidfds are denied), only the socket
//! is used. The kernel closes a dying process's sockets just before its pidfd becomes readable, so the report of a
//! closed socket is delayed by [`GRACE`], in which the pidfd can report first.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use super::PROCESS;
use crate::error::{Error, Result};

const GRACE: Duration = Duration::from_millis(10);
const PROCESS_ENDED: &str = "its process ended";
const CONNECTION_CLOSED: &str = "its connection closed";

/// The kind of descriptor that reports a rank's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A pidfd.
    Process,
    /// A connected socket on which nothing more is sent.
    Connection,
}

/// A descriptor that reports the end of a rank.
#[derive(Debug)]
pub struct End {
    pub rank: usize,
    pub fd: OwnedFd,
    pub source: Source,
}

type Callback = Arc<dyn Fn(usize, &'static str) + Send + Sync>;

struct Watched {
    ends: Vec<End>,
    callback: Callback,
    reported: HashSet<usize>,
}

#[derive(Default)]
struct State {
    watched: HashMap<u32, Watched>,
    next_id: u32,
    /// Closed sockets of ranks whose pidfds have reported nothing yet. For each: the time at which to report it, the
    /// watch, and the rank.
    closed: Vec<(Instant, u32, usize)>,
    /// The watch whose callback is running.
    running: Option<u32>,
    thread: Option<JoinHandle<()>>,
    thread_id: Option<ThreadId>,
    stopping: bool,
}

/// State of the watch thread. Never freed, because a forked child may appear at any moment; the child makes its own.
pub(super) struct Watcher {
    epoll: OwnedFd,
    /// An eventfd that wakes the thread.
    wakeup: OwnedFd,
    state: Mutex<State>,
    /// Notified whenever a callback has returned.
    idle: Condvar,
}

/// Token of the wakeup descriptor. Other tokens consist of watch id and index.
const WAKEUP: u64 = u64::MAX;
fn refused(what: &str) -> Error {
    Error::system(format!("sagellm: {what}: {}", io::Error::last_os_error()))
}

fn descriptor(rc: i32, what: &str) -> Result<OwnedFd> {
    if rc < 0 {
        return Err(refused(what));
    }
    // SAFETY: the kernel just returned this descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(rc) })
}

impl Watcher {
    /// Returns the process's watcher. The first call makes it.
    fn get() -> Result<&'static Watcher> {
        let present = PROCESS.watcher.load(Ordering::Acquire);
        if !present.is_null() {
            // SAFETY: a watcher that was stored in the pointer is never freed.
            return Ok(unsafe { &*present });
        }
        let made = Box::into_raw(Box::new(Watcher::new()?));
        match PROCESS.watcher.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: just published, and never freed from now on.
            Ok(_) => Ok(unsafe { &*made }),
            Err(winner) => {
                // SAFETY: no other thread saw `made`, so this thread may free it. `winner` is never freed.
                unsafe {
                    drop(Box::from_raw(made));
                    Ok(&*winner)
                }
            }
        }
    }

    fn new() -> Result<Watcher> {
        // SAFETY: plain numbers in, descriptors or -1 out.
        let (epoll, wakeup) = unsafe {
            (
                descriptor(libc::epoll_create1(libc::EPOLL_CLOEXEC), "epoll_create1")?,
                descriptor(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK), "eventfd")?,
            )
        };
        let watcher = Watcher { epoll, wakeup, state: Mutex::default(), idle: Condvar::new() };
        watcher.add(watcher.wakeup.as_raw_fd(), libc::EPOLLIN, WAKEUP)?;
        Ok(watcher)
    }

    /// Ignores poisoning: a panic in one callback must not end the watches of other groups.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, fd: i32, events: i32, token: u64) -> Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: both descriptors are open; the event outlives the call.
        let rc = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) };
        if rc == 0 { Ok(()) } else { Err(refused("epoll_ctl")) }
    }

    /// Stops watching a descriptor, because one report of an end is enough.
    fn forget(&self, end: &End) {
        // SAFETY: both descriptors are open. For a descriptor that is not in the set the call fails without effect.
        unsafe {
            libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, end.fd.as_raw_fd(), ptr::null_mut());
        }
    }

    fn wake(&self) {
        let one = 1u64;
        // SAFETY: writes the eight bytes of a number that outlives the call. A full counter wakes the thread too.
        unsafe { libc::write(self.wakeup.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Starts the thread, unless it is already running.
    fn ensure_thread(&'static self, state: &mut State) -> Result<()> {
        if state.thread.is_some() {
            return Ok(());
        }
        let thread = super::spawn("sagellm-watch", move || self.run())
            .map_err(|error| Error::system(format!("sagellm: cannot start the watch thread: {error}")))?;
        state.thread_id = Some(thread.thread().id());
        state.thread = Some(thread);
        Ok(())
    }

    fn run(&self) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        loop {
            let timeout = {
                let state = self.lock();
                if state.stopping {
                    return;
                }
                match state.closed.iter().map(|(due, ..)| due.saturating_duration_since(Instant::now())).min() {
                    Some(left) => left.as_millis() as i32 + 1,
                    None => -1,
                }
            };
            // SAFETY: the pointer and count describe `events`.
            let count = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), 64, timeout) };
            // Pidfds are handled first, so that the pidfd's reason is reported if both signs of a death arrive
            // together.
            let (mut sockets, mut ended) = (Vec::new(), Vec::new());
            for event in &events[..count.max(0) as usize] {
                match event.u64 {
                    WAKEUP => self.silence_bell(),
                    token => self.sort(token, &mut ended, &mut sockets),
                }
            }
            for (id, rank) in ended {
                self.report(id, rank, PROCESS_ENDED);
            }
            for (id, rank) in sockets {
                self.socket_closed(id, rank);
            }
            let now = Instant::now();
            let due: Vec<_> = {
                let mut state = self.lock();
                let (due, later) = state.closed.drain(..).partition(|(when, ..)| *when <= now);
                state.closed = later;
                due
            };
            for (_, id, rank) in due {
                self.report(id, rank, CONNECTION_CLOSED);
            }
        }
    }

    fn silence_bell(&self) {
        let mut count = 0u64;
        // SAFETY: reads eight bytes into a number that outlives the call.
        unsafe { libc::read(self.wakeup.as_raw_fd(), (&raw mut count).cast(), 8) };
    }

    /// Classifies an event, and stops watching its descriptor if it reports an end.
    fn sort(&self, token: u64, ended: &mut Vec<(u32, usize)>, closed: &mut Vec<(u32, usize)>) {
        let (id, index) = ((token >> 32) as u32, (token & 0xffff_ffff) as usize);
        let state = self.lock();
        // The watch may have been dropped after the event was fetched.
        let Some(end) = state.watched.get(&id).and_then(|watched| watched.ends.get(index)) else { return };
        match end.source {
            Source::Process => ended.push((id, end.rank)),
            Source::Connection if has_closed(&end.fd) => closed.push((id, end.rank)),
            Source::Connection => return,
        }
        self.forget(end);
    }

    fn socket_closed(&self, id: u32, rank: usize) {
        let mut state = self.lock();
        let Some(watched) = state.watched.get(&id) else { return };
        if watched.ends.iter().any(|end| end.rank == rank && end.source == Source::Process) {
            state.closed.push((Instant::now() + GRACE, id, rank));
        } else {
            drop(state);
            self.report(id, rank, CONNECTION_CLOSED);
        }
    }

    /// Calls the callback, once per rank, with no lock held.
    fn report(&self, id: u32, rank: usize, reason: &'static str) {
        let callback = {
            let mut state = self.lock();
            let Some(watched) = state.watched.get_mut(&id) else { return };
            if !watched.reported.insert(rank) {
                return;
            }
            let callback = Arc::clone(&watched.callback);
            state.running = Some(id);
            callback
        };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| callback(rank, reason))).is_err() {
            log::error!("internal error, please report it: the callback for the end of rank {rank} panicked");
        }
        // Dropped before `running` is cleared, because a thread that waits until `running` is cleared may then free
        // what the callback refers to.
        drop(callback);
        self.lock().running = None;
        self.idle.notify_all();
    }
}

/// Whether the other end is closed. If it has sent data, the data is discarded.
fn has_closed(socket: &OwnedFd) -> bool {
    let mut rest = [0u8; 256];
    loop {
        // SAFETY: the pointer and length describe `rest`.
        let got = unsafe { libc::recv(socket.as_raw_fd(), rest.as_mut_ptr().cast(), rest.len(), libc::MSG_DONTWAIT) };
        match got {
            0 => return true,
            1.. => continue,
            _ => match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted => continue,
                io::ErrorKind::WouldBlock => return false,
                _ => return true,
            },
        }
    }
}

/// Keeps a watch alive. After the guard was dropped, the callback is not running and will not run again (unless the
/// callback itself dropped the guard). So a thread that drops the guard must not hold a lock that the callback
/// acquires.
pub struct WatchGuard {
    watcher: &'static Watcher,
    id: u32,
    generation: u32,
}

/// When a descriptor in `ends` reports the end of its rank, calls `on_death(rank, reason)` on the watch thread, at most
/// once per rank. Owns the descriptors, and closes them when the guard is dropped.
pub fn watch(ends: Vec<End>, on_death: impl Fn(usize, &'static str) + Send + Sync + 'static) -> Result<WatchGuard> {
    super::install();
    let watcher = Watcher::get()?;
    let mut state = watcher.lock();
    if state.stopping {
        return Err(Error::system("sagellm: the process is ending, no new group can watch its peers"));
    }
    watcher.ensure_thread(&mut state)?;
    let id = state.next_id;
    // The largest number would collide with the token of the wakeup descriptor.
    state.next_id = (id + 1) % (u32::MAX - 1);
    let raw: Vec<i32> = ends.iter().map(|end| end.fd.as_raw_fd()).collect();
    // Events may arrive immediately, but the thread looks them up under the lock that is held here.
    state.watched.insert(id, Watched { ends, callback: Arc::new(on_death), reported: HashSet::new() });
    let guard = WatchGuard { watcher, id, generation: super::generation() };
    for (index, fd) in raw.into_iter().enumerate() {
        if let Err(error) = watcher.add(fd, libc::EPOLLIN | libc::EPOLLRDHUP, u64::from(id) << 32 | index as u64) {
            drop(state);
            drop(guard);
            return Err(error);
        }
    }
    Ok(guard)
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        if super::generation() != self.generation {
            return; // in a forked child, the watch is the parent's
        }
        let mut state = self.watcher.lock();
        let removed = state.watched.remove(&self.id);
        state.closed.retain(|(_, id, _)| *id != self.id);
        for end in removed.iter().flat_map(|watched| &watched.ends) {
            self.watcher.forget(end);
        }
        if state.thread_id != Some(std::thread::current().id()) {
            while state.running == Some(self.id) {
                state = self.watcher.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        // Closing descriptors and freeing the callback's captures may take time and other locks.
        drop(state);
        drop(removed);
    }
}

/// Ends the thread before the process ends. After that, watches report nothing until a new watch starts the thread
/// again.
pub fn stop() {
    let present = PROCESS.watcher.load(Ordering::Acquire);
    if present.is_null() {
        return;
    }
    // SAFETY: a watcher that was stored in the pointer is never freed.
    let watcher: &'static Watcher = unsafe { &*present };
    let thread = {
        let mut state = watcher.lock();
        if state.thread_id == Some(std::thread::current().id()) {
            return; // a callback cannot wait for the end of its own thread
        }
        state.stopping = true;
        state.thread.take()
    };
    watcher.wake();
    if let Some(thread) = thread {
        // The panic hook has already reported a panic of the thread.
        let _ = thread.join();
    }
    let mut state = watcher.lock();
    state.stopping = false;
    state.thread_id = None;
}
