//! What a forked child does with the memory for tensors (`arena.rs`): before its first own instruction it replaces the mapping
//! by a private one of the same file, so what it writes, nobody else sees. Ranges that are private already stay.
//!
//! The handler runs between fork and the child's first instruction, where any lock may be held by a thread that the child does
//! not have. So all it needs lies in atomics, and it makes system calls only.

#![allow(unsafe_code)] // replaces mappings, and registers the handler

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// So many private ranges are known to the handler; if there are more, a child finds zeros in the rest.
const MOST_PRIVATE: usize = 1024;

struct Record {
    /// This process is a child of the one that made the arena. Written by the handler (relaxed: the child has one thread
    /// then), read before each use of the arena.
    is_child: AtomicBool,
    /// A thread changes the mapping. Taken with the arena's lock held (acquire, release), and by `fork`, which must not copy a
    /// mapping in between.
    changing: AtomicBool,
    /// Where the arena lies, 0 while there is none. Written once by the thread that made it (release, after `bytes` and
    /// `file`), read by anyone (acquire).
    base: AtomicUsize,
    bytes: AtomicUsize,
    file: AtomicUsize,
    /// Address and length of the private ranges. Written under the arena's lock, the count last (release); read by the handler
    /// (acquire).
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

/// Registers the handler and says where the arena lies. Called once a process; the error says that the system refused.
pub fn register(base: usize, bytes: usize, file: RawFd) -> io::Result<()> {
    // SAFETY: the handlers are plain functions that live for ever.
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

/// Whether this address lies in the arena.
pub fn owns(address: usize) -> bool {
    let base = RECORD.base.load(Ordering::Acquire);
    base != 0 && address.wrapping_sub(base) < RECORD.bytes.load(Ordering::Relaxed)
}

/// False from half of the ranges on. There are no further leases then, which leaves the other half for operations under way.
pub fn has_room_for_private() -> bool {
    RECORD.private_count.load(Ordering::Relaxed) < MOST_PRIVATE / 2
}

/// This range is private from now on. Called under the arena's lock.
pub fn add_private(address: usize, bytes: usize) {
    let count = RECORD.private_count.load(Ordering::Relaxed);
    if let Some((at, length)) = RECORD.private.get(count) {
        at.store(address, Ordering::Relaxed);
        length.store(bytes, Ordering::Relaxed);
        RECORD.private_count.store(count + 1, Ordering::Release);
    }
}

/// While it lives no fork copies the mapping.
pub struct Changing;

impl Changing {
    pub fn begin() -> Changing {
        while RECORD.changing.swap(true, Ordering::Acquire) {
            std::thread::yield_now(); // a fork is under way
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
        return; // a child of a child has a private mapping already
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
    // SAFETY: replaces the child's own mapping of the same pages. If the system refuses, the child must not keep the memory
    // of its parent, so an access of it faults.
    unsafe {
        if libc::mmap(address as *mut _, bytes, access, flags, file, offset as libc::off_t) == libc::MAP_FAILED {
            libc::munmap(address as *mut _, bytes);
        }
    }
}
