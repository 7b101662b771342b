//! Detects failures outside this thread: peers that ended, processes that are stopped, and that this process is a fork
//! of the one that made the groups. It calls nothing above it except registered callbacks.

#![allow(unsafe_code)] // system calls, and a list that a forked child must be able to leave alone

mod death;

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

pub use self::death::{End, Source, WatchGuard, stop, watch};

/// Forks between the process that first used this module and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static INSTALL: Once = Once::new();

/// Runs in the child between fork and its first own instruction: only atomics and nothing that may hold a lock.
extern "C" fn in_forked_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    self::death::forget_after_fork();
}

/// Must have run before a fork for [`generation`] to count it. Cheap to repeat; `watch` and the rendezvous call it.
pub fn install() {
    INSTALL.call_once(|| {
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
    GENERATION.load(Ordering::Relaxed)
}

/// True in a child that was forked after this module was first used.
#[inline]
pub fn forked() -> bool {
    generation() != 0
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
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    thread
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
