//! Protects the memory for tensors (`arena.rs`) in a forked child. Before the child's first instruction, a fork handler
//! replaces the mapping by a private one of the same file, so no other process sees what the child writes. Ranges that
//! are already private stay.
//!
//! When the handler runs, a thread that the child does not have may hold any lock. So everything that the handler needs
//! is in atomics, and it makes only system calls.

#![allow(unsafe_code)] // replaces mappings, and registers the handler

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The handler knows at most this many private ranges. If there are more, a child finds zeros in the remaining ones.
const MOST_PRIVATE: usize = 1024;

struct Record {
    /// Whether this process is a forked child of the process that made the arena. The handler writes it (relaxed: the
    /// child has only one thread at that time). Threads read it before each use of the arena.
    is_child: AtomicBool,
    /// A spin lock. A thread that changes the mapping holds it, and acquires the arena's lock before. A thread that
    /// calls `fork` holds it too, so that the mapping is not copied in the middle of a change.
    changing: AtomicBool,
    /// Address of the arena; 0 while there is none. The thread that made the arena writes it once (release, after
    /// `bytes` and `file`); any thread reads it (acquire).
    base: AtomicUsize,
    bytes: AtomicUsize,
    file: AtomicUsize,
    /// Address and length of each private range. Written under the arena's lock, and the count last (release); the
    /// handler reads them (acquire).
    private: [(AtomicUsize, AtomicUsize); MOST_PRIVATE],
    private_count: AtomicUsize,
}

static RECORD: Record = Record {
    is_child: AtomicBool::new(false),
    changing: AtomicBool::new(false),
    base: AtomicUsize::new(0),
    bytes: AtomicUsize::new(0),
    file: AtomicUsize::new(0),
    private: [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; MOST_PRIVATE],
    private_count: AtomicUsize::new(0),
};

/// Registers the handlers and the arena's address. Called once per process. Fails if the system refuses.
pub fn register(base: usize, bytes: usize, file: RawFd) -> io::Result<()> {
    // SAFETY: the handlers are plain functions that are never unloaded.
    let rc = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_forked_child)) };
    if rc != 0 {
        return Err(io::Error::from_raw_os_error(rc));
    }
    RECORD.bytes.store(bytes, Ordering::Relaxed);
    RECORD.file.store(file as usize, Ordering::Relaxed);
    RECORD.base.store(base, Ordering::Release);
    Ok(())
}

pub fn is_child() -> bool {
    RECORD.is_child.load(Ordering::Relaxed)
}

/// Whether this address is in the arena.
pub fn owns(address: usize) -> bool {
    let base = RECORD.base.load(Ordering::Acquire);
    base != 0 && address.wrapping_sub(base) < RECORD.bytes.load(Ordering::Relaxed)
}

/// Returns false when half of the entries of `private` are used. Then `arena::lease` refuses, so the other half is left
/// for operations in flight.
pub fn has_room_for_private() -> bool {
    RECORD.private_count.load(Ordering::Relaxed) < MOST_PRIVATE / 2
}

/// Records that this range is private from now on. Called under the arena's lock.
pub fn add_private(address: usize, bytes: usize) {
    let count = RECORD.private_count.load(Ordering::Relaxed);
    if let Some((at, length)) = RECORD.private.get(count) {
        at.store(address, Ordering::Relaxed);
        length.store(bytes, Ordering::Relaxed);
        RECORD.private_count.store(count + 1, Ordering::Release);
    }
}

/// While it exists, no fork can copy the mapping.
pub struct Changing;

impl Changing {
    pub fn begin() -> Changing {
        while RECORD.changing.swap(true, Ordering::Acquire) {
            std::thread::yield_now(); // a fork is in progress
        }
        Changing
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        RECORD.changing.store(false, Ordering::Release);
    }
}

extern "C" fn before_fork() {
    std::mem::forget(Changing::begin());
}

extern "C" fn after_fork() {
    drop(Changing);
}

extern "C" fn in_forked_child() {
    drop(Changing);
    let base = RECORD.base.load(Ordering::Acquire);
    if base == 0 || RECORD.is_child.swap(true, Ordering::Relaxed) {
        return; // a child of a child already has a private mapping
    }
    let (bytes, file) = (RECORD.bytes.load(Ordering::Relaxed), RECORD.file.load(Ordering::Relaxed) as RawFd);
    let count = RECORD.private_count.load(Ordering::Acquire).min(MOST_PRIVATE);
    let mut private = [(0, 0); MOST_PRIVATE];
    for (to, (at, length)) in private.iter_mut().zip(&RECORD.private[..count]) {
        *to = (at.load(Ordering::Relaxed), length.load(Ordering::Relaxed));
    }
    private[..count].sort_unstable();
    let (mut from, end) = (base, base + bytes);
    for (at, length) in private[..count].iter().copied().chain([(end, 0)]) {
        if at > from {
            map_privately(file, from, at - from, from - base);
        }
        from = from.max(at + length);
    }
}

fn map_privately(file: RawFd, address: usize, bytes: usize, offset: usize) {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE);
    // SAFETY: replaces the child's own mapping of the same pages. If the system refuses, the child must not keep the
    // memory of its parent, so the pages are unmapped and an access faults.
    unsafe {
        if libc::mmap(address as *mut _, bytes, access, flags, file, offset as libc::off_t) == libc::MAP_FAILED {
            libc::munmap(address as *mut _, bytes);
        }
    }
}
