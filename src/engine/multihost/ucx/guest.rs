//! Keeps UCX from changing the program in which it runs.
//!
//! When it is loaded, UCX installs handlers for signals such as SIGSEGV and SIGHUP; we restore the program's handlers.
//! It starts a thread; we block all signals there. It prints messages to the standard output; we redirect them to our
//! log. It replaces system calls such as `mmap` and `mremap`, and its `mremap` behaves differently; we forbid that by a
//! variable (`UCX_MEM_EVENTS`). A forked child does not have UCX's thread, so it cannot use UCX.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::api::{Api, LOG_ERROR, LOG_STOP, LOG_WARN};
use super::worker::Worker;
use crate::engine::loader::Hints;
use crate::error::{Error, Result};
use crate::os::{environment, watch};

/// What the user wants of UCX.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Where the library may be.
    pub hints: Hints,
    /// Values of variables of UCX, named without `UCX_`. A variable that the user has set keeps its value.
    pub settings: Vec<(String, String)>,
}

/// The opened library, and the `watch::generation` of the process that opened it.
static OPENED: Mutex<Option<(u32, Arc<Api>)>> = Mutex::new(None);

/// Opens the library, if this process has not done so, and makes a worker.
pub fn open(wanted: &Wanted) -> Result<Worker> {
    watch::install();
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if opened.as_ref().is_some_and(|(generation, _)| *generation != watch::generation()) {
        return Err(Error::system(
            "sagellm: SAGELLM_LINK=ucx: this process was forked from one that had used UCX, whose threads it has not \
             got; start it with the method spawn or forkserver, or unset SAGELLM_LINK on all ranks",
        ));
    }
    let _quiet = Quiet::new();
    let _kept = Handlers::keep();
    let api = match &*opened {
        Some((_, api)) => Arc::clone(api),
        None => {
            environment::add(c"UCX_MEM_EVENTS", c"n"); // read when the library is loaded
            let api = Arc::new(Api::open(&wanted.hints)?);
            // SAFETY: the function has the declared type and is never unloaded.
            unsafe { (api.push_log)(on_log) };
            *opened = Some((watch::generation(), Arc::clone(&api)));
            api
        }
    };
    let made = Worker::new(api, &wanted.settings);
    log_messages();
    made
}

/// Blocks all signals of this thread, so that a thread which the library starts has them blocked.
struct Quiet(libc::sigset_t);

impl Quiet {
    fn new() -> Quiet {
        // SAFETY: all-zero sets are valid. `all` is filled before it is used, `before` by the call.
        unsafe {
            let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Quiet(before)
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // SAFETY: restores the mask of this thread.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// The program's signal handlers. `drop` restores those that UCX has replaced.
struct Handlers(Vec<(c_int, libc::sigaction)>);

impl Handlers {
    fn keep() -> Handlers {
        Handlers((1..=31).filter_map(|signal| Some((signal, handler(signal)?))).collect())
    }
}

impl Drop for Handlers {
    fn drop(&mut self) {
        for (signal, before) in &self.0 {
            if handler(*signal).is_some_and(|now| now.sa_sigaction != before.sa_sigaction) {
                // SAFETY: puts back a handler that was installed before.
                unsafe { libc::sigaction(*signal, before, ptr::null_mut()) };
            }
        }
    }
}

fn handler(signal: c_int) -> Option<libc::sigaction> {
    // SAFETY: all zeros are a valid structure, which the call fills.
    unsafe {
        let mut found: libc::sigaction = mem::zeroed();
        (libc::sigaction(signal, ptr::null(), &raw mut found) == 0).then_some(found)
    }
}

/// Messages of the library that are not logged yet. They are kept because both the library and our caller may hold
/// locks when the library writes a message.
static MESSAGES: Mutex<Vec<(c_int, String)>> = Mutex::new(Vec::new());
/// Whether `MESSAGES` has any. Written under the lock of `MESSAGES`, but read without it (relaxed: a hint).
static HAS_MESSAGES: AtomicBool = AtomicBool::new(false);
const MOST_MESSAGES: usize = 100;

unsafe extern "C" {
    fn vsnprintf(buffer: *mut c_char, bytes: usize, format: *const c_char, arguments: *mut c_void) -> c_int;
}

unsafe extern "C" fn on_log(
    _file: *const c_char,
    _line: c_uint,
    _function: *const c_char,
    level: c_int,
    _component: *const c_void,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    let mut buffer = [0 as c_char; 512];
    // SAFETY: the library passes a format and its arguments. The text is cut to the buffer and ends in a zero byte.
    let text = unsafe {
        vsnprintf(buffer.as_mut_ptr(), buffer.len(), format, arguments);
        CStr::from_ptr(buffer.as_ptr())
    };
    let mut messages = MESSAGES.lock().unwrap_or_else(PoisonError::into_inner);
    if messages.len() < MOST_MESSAGES {
        messages.push((level, text.to_string_lossy().trim().to_string()));
    }
    HAS_MESSAGES.store(true, Ordering::Relaxed);
    LOG_STOP
}

/// Logs the library's messages. Must be called without locks. A failure that concerns a group is reported by the group,
/// so these lines are only for a diagnosis.
pub fn log_messages() {
    if !HAS_MESSAGES.load(Ordering::Relaxed) {
        return;
    }
    let mut messages = MESSAGES.lock().unwrap_or_else(PoisonError::into_inner);
    let taken = mem::take(&mut *messages);
    HAS_MESSAGES.store(false, Ordering::Relaxed);
    drop(messages);
    for (level, text) in taken {
        match level {
            ..LOG_ERROR => log::error!("UCX: {text}"),
            LOG_ERROR..=LOG_WARN => log::info!("UCX: {text}"),
            _ => log::debug!("UCX: {text}"),
        }
    }
}
