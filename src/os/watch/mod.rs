//! Detects failures outside this thread: peers that ended, processes that are stopped, and that this process is a fork
//! of the one that made the groups. It calls nothing above it except registered callbacks.

#![allow(unsafe_code)] // system calls, and a list that a forked child must be able to leave alone

mod death;

use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::thread::JoinHandle;

use self::death::Watcher;
pub use self::death::{End, Source, WatchGuard, stop, watch};

/// The state by which a process differs from its parent after a fork.
struct Process {
    /// Forks between the process that first used this module and this one. Written by `in_forked_child` alone, when the
    /// process has one thread (relaxed).
    generation: AtomicU32,
    /// Installs the handler that counts forks.
    installed: Once,
    /// Groups that live or are being made. Raised and lowered by any thread, read by `in_forked_child` (relaxed: the child
    /// has the memory of one moment).
    alive: AtomicU32,
    /// A group of an ancestor lived when this process was forked from it. Written by `in_forked_child` alone (relaxed).
    orphaned: AtomicBool,
    /// The thread that watches, or null; see `Watcher::get`. Published with release, read with acquire.
    watcher: AtomicPtr<Watcher>,
}

static PROCESS: Process = Process {
    generation: AtomicU32::new(0),
    installed: Once::new(),
    alive: AtomicU32::new(0),
    orphaned: AtomicBool::new(false),
    watcher: AtomicPtr::new(ptr::null_mut()),
};

/// Runs in the child between fork and its first own instruction: only atomics and nothing that may hold a lock.
///
/// The child has neither the watcher's thread nor a right to the locks it may have held; a watch made there starts anew.
/// The epoll instance is shared with the parent and must not be changed, so even closing it is left to the process's end.
extern "C" fn in_forked_child() {
    PROCESS.generation.fetch_add(1, Ordering::Relaxed);
    if PROCESS.alive.swap(0, Ordering::Relaxed) > 0 {
        PROCESS.orphaned.store(true, Ordering::Relaxed);
    }
    PROCESS.watcher.store(ptr::null_mut(), Ordering::Release);
}

/// Must have run before a fork for [`generation`] to count it. Cheap to repeat; `watch` and the rendezvous call it.
pub fn install() {
    PROCESS.installed.call_once(|| {
        // SAFETY: the handler is a plain function that lives for ever and touches only atomics.
        let rc = unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) };
        if rc != 0 {
            log::warn!("pthread_atfork failed ({rc}); groups used in forked children are not refused");
        }
    });
}

/// Number of forks that led to this process. Objects made under another number (threads, groups, watches) belong to the
/// parent and must not be touched here: their threads are not running and their shared memory must not be written.
#[inline]
pub fn generation() -> u32 {
    PROCESS.generation.load(Ordering::Relaxed)
}

/// True in a child that was forked, by whatever number of forks, while a group lived: it has a copy of that group's memory,
/// and none of its threads. Where no group lived, what the child lacks is made anew ([`PerProcess`]).
pub fn orphaned() -> bool {
    PROCESS.orphaned.load(Ordering::Relaxed)
}

/// While it exists, a child that is forked is `orphaned`.
pub struct Alive {
    generation: u32,
}

impl Default for Alive {
    fn default() -> Alive {
        PROCESS.alive.fetch_add(1, Ordering::Relaxed);
        Alive { generation: generation() }
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        // A forked child does not count those of its parent.
        if self.generation == generation() {
            PROCESS.alive.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A value of the process that a forked child does not inherit, because a thread that the child does not have may have
/// been changing it: each process begins with the default. The parent's is left as it was, and leaked.
pub struct PerProcess<T>(AtomicPtr<Made<T>>);

struct Made<T> {
    generation: u32,
    value: T,
}

impl<T: Default + Send + Sync + 'static> PerProcess<T> {
    #[allow(clippy::new_without_default)] // it is for statics
    pub const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(ptr::null_mut()))
    }

    pub fn get(&self) -> &'static T {
        let current = self.0.load(Ordering::Acquire);
        // SAFETY: null, or a value that was published below (release, acquire here) and is never freed.
        match unsafe { current.as_ref() } {
            Some(made) if made.generation == generation() => &made.value,
            _ => self.make(current),
        }
    }

    #[cold]
    fn make(&self, current: *mut Made<T>) -> &'static T {
        let new = Box::into_raw(Box::new(Made { generation: generation(), value: T::default() }));
        match self.0.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: published, and so never freed.
            Ok(_) => unsafe { &(*new).value },
            Err(other) => {
                // SAFETY: `new` was made above, and nobody else has it. Another thread of this process published `other`,
                // which is never freed.
                unsafe {
                    drop(Box::from_raw(new));
                    &(*other).value
                }
            }
        }
    }
}

/// Starts a thread that takes no signals: those belong to the program.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    // SAFETY: all zero bytes are valid signal sets; `all` is filled before it is used, `before` before it is read. The
    // new thread inherits the blocking mask, so it never takes a signal.
    let before = unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    };
    let thread = std::thread::Builder::new().name(name.into()).spawn(body);
    // SAFETY: restores the previous mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut()) };
    thread
}

/// The number by which Python knows this thread, too.
pub fn this_thread() -> u64 {
    // SAFETY: asks for a number and touches no memory.
    unsafe { libc::pthread_self() as u64 }
}

/// State letter of a process as `ps` shows it ('R' running, 'S' sleeping, 'T' stopped, 'Z' ended), for error texts.
pub fn process_state(pid: i32) -> Option<char> {
    if pid <= 0 {
        return None;
    }
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain parentheses: the state follows the last one.
    let after = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(after + 2).map(|byte| *byte as char)
}
