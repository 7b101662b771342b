//! Detects what happens to processes: whether peers have ended, whether a process is stopped, and whether this process
//! was forked from the one that created the groups. It calls no higher layer except registered callbacks.

#![allow(unsafe_code)] // system calls, and state that a forked child must be able to abandon

mod death;

use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::thread::JoinHandle;

use self::death::Watcher;
pub use self::death::{End, Source, WatchGuard, stop, watch};

/// State that a forked child must reset.
struct Process {
    /// Number of forks between the process that first used this module and this process. Only `in_forked_child` writes
    /// it, while the process has only one thread (relaxed).
    generation: AtomicU32,
    /// Used to install the fork handler once.
    installed: Once,
    /// Number of groups that live or are being created. Any thread changes it; `in_forked_child` reads it (relaxed: the
    /// child has a snapshot of the memory).
    alive: AtomicU32,
    /// Whether a group of an ancestor lived when this process was forked from it. Only `in_forked_child` writes it
    /// (relaxed).
    orphaned: AtomicBool,
    /// The watcher, or null; see `Watcher::get`. Published with release, read with acquire.
    watcher: AtomicPtr<Watcher>,
}

static PROCESS: Process = Process {
    generation: AtomicU32::new(0),
    installed: Once::new(),
    alive: AtomicU32::new(0),
    orphaned: AtomicBool::new(false),
    watcher: AtomicPtr::new(ptr::null_mut()),
};

/// Runs in the child before its first own instruction. Uses only atomics and nothing that may hold a lock.
///
/// The child does not have the watcher's thread, and must not use the locks that this thread may have held. So the
/// first watch in the child makes a new watcher. The epoll instance is shared with the parent and must not be changed;
/// it is not even closed before the process ends.
extern "C" fn in_forked_child() {
    PROCESS.generation.fetch_add(1, Ordering::Relaxed);
    if PROCESS.alive.swap(0, Ordering::Relaxed) > 0 {
        PROCESS.orphaned.store(true, Ordering::Relaxed);
    }
    PROCESS.watcher.store(ptr::null_mut(), Ordering::Release);
}

/// Installs the fork handler. Must be called before any fork that [`generation`] must count. Cheap to repeat; `watch`
/// and the rendezvous call it.
pub fn install() {
    PROCESS.installed.call_once(|| {
        // SAFETY: the handler is a plain function that is never unloaded, and touches only atomics.
        let rc = unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) };
        if rc != 0 {
            log::warn!("pthread_atfork failed ({rc}); groups used in forked children are not refused");
        }
    });
}

/// Returns the number of forks that led to this process. If an object (thread, group, watch) was made under a different
/// number, it belongs to the parent and must not be used here: its threads do not run, and its shared memory must not
/// be written.
#[inline]
pub fn generation() -> u32 {
    PROCESS.generation.load(Ordering::Relaxed)
}

/// Whether a group lived when this process, or an ancestor of it, was forked. If so, the process has a copy of that
/// group's memory but none of its threads. If no group lived, a child makes its own state ([`PerProcess`]).
pub fn orphaned() -> bool {
    PROCESS.orphaned.load(Ordering::Relaxed)
}

/// While this exists, a child that is forked is `orphaned`.
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
        // A forked child has not counted the objects of its parent.
        if self.generation == generation() {
            PROCESS.alive.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A value of the process. A forked child does not inherit it, because another thread of the parent may have been
/// changing it at the fork, and the child does not have that thread. Each process starts with the default value. In a
/// child, the parent's value is left unchanged and leaked.
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
        // SAFETY: null, or a value that was published below (release there, acquire here) and is never freed.
        match unsafe { current.as_ref() } {
            Some(made) if made.generation == generation() => &made.value,
            _ => self.make(current),
        }
    }

    #[cold]
    fn make(&self, current: *mut Made<T>) -> &'static T {
        let new = Box::into_raw(Box::new(Made { generation: generation(), value: T::default() }));
        match self.0.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: it is published, and so never freed.
            Ok(_) => unsafe { &(*new).value },
            Err(other) => {
                // SAFETY: `new` was made above, and no other thread has it. Another thread of this process published
                // `other`, which is never freed.
                unsafe {
                    drop(Box::from_raw(new));
                    &(*other).value
                }
            }
        }
    }
}

/// Starts a thread that receives no signals, because signals belong to the program.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    // SAFETY: all-zero signal sets are valid. `all` is filled before it is used, `before` before it is read. The new
    // thread inherits the blocking mask, so it never receives a signal.
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

/// Returns the number of this thread, which Python also uses (`threading.get_ident`).
pub fn this_thread() -> u64 {
    // SAFETY: returns a number and touches no memory.
    unsafe { libc::pthread_self() as u64 }
}

/// Returns the letter that `ps` shows for the state of a process ('R' running, 'S' sleeping, 'T' stopped, 'Z' ended),
/// for error texts.
pub fn process_state(pid: i32) -> Option<char> {
    if pid <= 0 {
        return None;
    }
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The process name in parentheses may contain parentheses, so the state follows the last one.
    let after = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(after + 2).map(|byte| *byte as char)
}
