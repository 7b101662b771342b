//! Allocates tensors that peers can reach. Each process has one memory file, which its peers map (`reach.rs`), so that
//! a collective can read and write the tensors directly (`mapped`).
//!
//! The file has a fixed size but no pages at first; a page is allocated at its first access. The file is sealed against
//! shrinking and growing, so an access of a peer cannot fault. A tensor is a range of whole pages (`extents.rs`), and
//! nothing else is on these pages.
//!
//! **Late writes.** In an all_reduce, reduce, broadcast, scatter or gather, peers write into outputs of this process
//! (`mapped`). A peer that was stopped may continue after the operation has failed here, when the program uses the
//! memory again. So before the program receives the error, [`Lease::take_out`] makes the pages of the outputs private.
//! It moves a private mapping of the same file pages over them, and writes each page once, so that the kernel copies
//! it. The tensor keeps its address and contents, and late writes go to file pages that nothing reads. Meanwhile,
//! threads of this process may access the memory, and none of their writes is lost. The range of the file is never
//! reused.
//!
//! **Forks.** In a child the mapping is replaced by a private one of the same file (`forks.rs`). The child allocates
//! nothing here, and when it frees a tensor, nothing happens, because it shares the file with its parent.

#![allow(unsafe_code)] // maps memory and returns addresses in it

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use once_cell::sync::OnceCell;

use super::extents::Extents;
use super::{forks, segment};
use crate::config;
use crate::json;
use crate::os::topology;
use crate::types::Span;

/// At most this many bytes in filled pages of freed tensors are kept for reuse. A small arena keeps less.
const KEPT: usize = 1 << 30;
/// This many bytes are made private at a time, so at most this much is in memory twice.
const STEP: usize = 32 << 20;

struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    file: OwnedFd,
    inode: u64,
    extents: Mutex<Extents>,
}

// SAFETY: this is an address range that is never unmapped. It is changed only under the lock of `extents`.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

/// Set by the thread that makes the arena; `MAKER` elects that thread. A forked child does not wait for this value,
/// because that thread may exist only in the parent.
static ARENA: OnceCell<Result<Arena, String>> = OnceCell::new();

/// The process whose thread makes or has made the arena; 0 before that. Relaxed: the arena itself is read from `ARENA`.
static MAKER: AtomicU32 = AtomicU32::new(0);
/// Counters of this process (relaxed): allocations that were refused, and bytes that were made private.
static REFUSED: AtomicU64 = AtomicU64::new(0);
static TAKEN_OUT: AtomicU64 = AtomicU64::new(0);

/// How much of the arena is used. Sizes are in bytes. All zero before the first allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub limit: u64,
    pub used: u64,
    /// Filled pages of freed tensors, kept for reuse.
    pub cached: u64,
    /// Number of ranges in use.
    pub extents: u64,
    /// Number of allocations for which the arena had no room.
    pub refused: u64,
    /// Bytes that were made private after an operation had failed.
    pub taken_out: u64,
}

impl Usage {
    /// JSON: `SharedUsage` of `_C.pyi`. `why_not`: why there is no arena, if that is known.
    pub fn json(&self, why_not: Option<&str>) -> String {
        json::text(|to| {
            to.number("limit", self.limit).number("used", self.used).number("cached", self.cached);
            to.number("extents", self.extents).number("refused", self.refused).number("taken_out", self.taken_out);
            to.string("why_not", why_not.unwrap_or(""));
        })
    }
}

/// The descriptor, inode and size by which a peer opens and recognises this process's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub descriptor: u64,
    pub inode: u64,
    pub bytes: u64,
}

/// Allocates a tensor's memory in whole pages; their contents are undefined. None if there is no room, if the arena
/// could not be made (`why_not`), or in a forked child.
pub fn allocate(bytes: usize) -> Option<NonNull<u8>> {
    if forks::is_child() {
        return None;
    }
    let at = arena().and_then(|arena| Some((arena, arena.extents().take(bytes)?)));
    let Some((arena, offset)) = at else {
        REFUSED.fetch_add(1, Ordering::Relaxed);
        return None;
    };
    // SAFETY: the range is within the mapping.
    Some(unsafe { arena.base.add(offset) })
}

/// Frees memory that `allocate` returned. Does nothing in a forked child.
///
/// # Safety
/// `at` must come from `allocate`, must not have been freed since, and must no longer be used.
pub unsafe fn free(at: NonNull<u8>) {
    let Some(arena) = made() else { return };
    if forks::is_child() {
        return;
    }
    let offset = at.as_ptr() as usize - arena.base.as_ptr() as usize;
    let mut extents = arena.extents();
    let Some(extent) = extents.release(offset) else {
        log::warn!("memory at {at:?} was freed that is not in use: this is a bug of sagellm");
        return;
    };
    if extent.is_taken_out() {
        arena.retire(offset, extent.bytes);
    }
    while let Some((offset, bytes)) = extents.to_give_back(KEPT.min(arena.bytes / 4)) {
        arena.give_back(offset, bytes);
    }
}

/// Whether this address is in this process's arena.
pub fn owns(at: *const u8) -> bool {
    forks::owns(at as usize)
}

/// Whether peers can reach the tensor at this address: it is in the arena, no page of it was made private, and this
/// process is not a forked child.
pub fn reaches(at: *const u8) -> bool {
    let Some(arena) = made().filter(|_| owns(at) && !forks::is_child()) else { return false };
    arena
        .extents()
        .holding(at as usize - arena.base.as_ptr() as usize, 1)
        .is_some_and(|(_, extent)| !extent.is_taken_out())
}

/// Why the arena could not be made, if that is known.
pub fn why_not() -> Option<String> {
    ARENA.get().and_then(|made| made.as_ref().err().cloned())
}

pub fn usage() -> Usage {
    let mut usage = Usage { refused: REFUSED.load(Ordering::Relaxed), ..Usage::default() };
    if let Some(arena) = made().filter(|_| !forks::is_child()) {
        let extents = arena.extents();
        usage.limit = arena.bytes as u64;
        usage.used = extents.bytes_used() as u64;
        usage.cached = extents.bytes_filled() as u64;
        usage.extents = extents.count() as u64;
        usage.taken_out = TAKEN_OUT.load(Ordering::Relaxed);
    }
    usage
}

/// The identity by which peers find this process's file. None before the first allocation and in a forked child.
pub fn identity() -> Option<Identity> {
    let arena = made().filter(|_| !forks::is_child())?;
    let descriptor = arena.file.as_raw_fd() as u64;
    Some(Identity { descriptor, inode: arena.inode, bytes: arena.bytes as u64 })
}

/// Memory that peers may access for one operation. While it exists, no other group can lease the same tensor.
#[derive(Debug)]
pub struct Lease {
    /// Offset of the piece in the file.
    pub offset: usize,
    pub bytes: usize,
    /// Offset of the range that contains the piece.
    start: usize,
}

/// Leases `span` for an operation of `group`. None if the memory is not in the arena, if pages of its tensor were made
/// private (`Lease::take_out`), or if an operation of another group uses it. (If one of the two groups failed, it would
/// make pages private that the peers of the other group must reach.) Also None in a forked child, and if too many
/// ranges are private.
pub fn lease(group: u64, span: Span) -> Option<Lease> {
    if !owns(span.addr as *const u8) || forks::is_child() {
        return None;
    }
    let arena = made()?;
    let offset = span.addr - arena.base.as_ptr() as usize;
    let mut extents = arena.extents();
    let (start, extent) = extents.holding(offset, span.bytes)?;
    if extent.is_taken_out() || !forks::has_room_for_private() {
        return None;
    }
    extent.holder = match extent.holder {
        None => Some((group, 1)),
        Some((holder, count)) if holder == group => Some((group, count + 1)),
        Some(_) => return None,
    };
    Some(Lease { offset, bytes: span.bytes, start })
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(arena) = made() else { return };
        if forks::is_child() {
            return; // a thread that the child does not have may hold the lock
        }
        if let Some(extent) = arena.extents().starting_at(self.start) {
            extent.holder = extent.holder.and_then(|(group, count)| (count > 1).then(|| (group, count - 1)));
        }
    }
}

impl Lease {
    /// Makes the pages of this memory private: their address and contents stay, and no other process can change them
    /// any more. Other threads of this process may access the pages during the call. Fails if the system refuses.
    pub fn take_out(&self) -> io::Result<()> {
        let Some(arena) = made() else { return Ok(()) };
        let mut extents = arena.extents();
        let Some(extent) = extents.starting_at(self.start) else { return Ok(()) };
        let page = segment::page_size();
        let pages = self.offset / page * page..(self.offset + self.bytes).next_multiple_of(page);
        // A page that two pieces share was made private for the first piece, and the file no longer has its contents.
        for pages in extent.not_private(pages) {
            for from in pages.clone().step_by(STEP) {
                let part = from..pages.end.min(from + STEP);
                arena.make_private(part.clone())?;
                TAKEN_OUT.fetch_add(part.len() as u64, Ordering::Relaxed);
                extent.private.push(part);
            }
        }
        Ok(())
    }
}

/// Returns the arena. The first call makes it.
fn arena() -> Option<&'static Arena> {
    if ARENA.get().is_some() {
        return made();
    }
    let me = std::process::id();
    if MAKER.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        let arena = Arena::new();
        if let Err(why) = &arena {
            log::warn!("tensors are ordinary memory, which peers cannot reach: {why}");
        }
        // This thread was elected, so no other thread sets `ARENA`.
        let _ = ARENA.set(arena);
    }
    while ARENA.get().is_none() && MAKER.load(Ordering::Relaxed) == me {
        std::thread::yield_now(); // another thread makes a few system calls
    }
    made()
}

fn made() -> Option<&'static Arena> {
    ARENA.get().and_then(|made| made.as_ref().ok())
}

/// Returns the size of the file. Its pages count against the same limits as the rest of the process's memory, so the
/// size only bounds how much memory is allocated here instead of elsewhere.
fn size() -> Result<usize, String> {
    let bytes = match config::shared_bytes() {
        Some(bytes) => bytes,
        None => topology::memory_headroom().map_or(1 << 30, |free| free as usize / 2),
    };
    let page = segment::page_size();
    let bytes = bytes / page * page;
    if bytes == 0 {
        return Err("SAGELLM_SHARED_BYTES is 0".to_string());
    }
    match segment::largest_file() {
        // The system would kill a process that writes beyond this limit.
        Some(largest) if largest < bytes as u64 => Err(format!(
            "{bytes} bytes are more than the largest file that this process may write ({largest}, ulimit -f)"
        )),
        _ => Ok(bytes),
    }
}

impl Arena {
    fn new() -> Result<Arena, String> {
        let bytes = size()?;
        let denied = |what: &str, error: io::Error| format!("{what} {bytes} bytes: {error}");
        let file = segment::sealed_memfd(bytes).map_err(|error| denied("no file in memory of", error))?;
        let (inode, _) = segment::inode_and_size(&file).map_err(|error| denied("no file in memory of", error))?;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let base = segment::map_pages(bytes, flags, file.as_raw_fd()).map_err(|error| denied("cannot map", error))?;
        if let Err(error) = forks::register(base.as_ptr() as usize, bytes, file.as_raw_fd()) {
            // SAFETY: just mapped and unused.
            unsafe { segment::unmap(base, bytes) };
            return Err(format!(
                "pthread_atfork failed ({error}); a forked child could write the tensors of its parent"
            ));
        }
        Ok(Arena { base, bytes, file, inode, extents: Mutex::new(Extents::new(bytes, segment::page_size())) })
    }

    fn extents(&self) -> MutexGuard<'_, Extents> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        // SAFETY: offsets of ranges are within the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Whether the descriptor still refers to the file: a program may have closed it and opened another.
    fn has_its_file(&self) -> bool {
        segment::inode_and_size(&self.file).is_ok_and(|found| found == (self.inode, self.bytes as u64))
    }

    /// Frees the pages of a range of the file. A process that reads the range afterwards finds zeros.
    fn give_back(&self, offset: usize, bytes: usize) {
        if !self.has_its_file() {
            return;
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: plain numbers on our own descriptor. No tensor uses the range.
        let rc = unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset as libc::off_t, bytes as libc::off_t) };
        if rc != 0 {
            log::debug!("cannot give back {bytes} bytes of shared memory: {}", io::Error::last_os_error());
        }
    }

    /// Makes pages private, as the head of this file describes. Called with the lock held, for pages that are not
    /// private. If the system refuses, nothing has changed.
    fn make_private(&self, pages: Range<usize>) -> io::Result<()> {
        if !self.has_its_file() {
            return Err(io::Error::other("the program has closed the descriptor of the file"));
        }
        let (address, bytes) = (self.at(pages.start), pages.len());
        let private = segment::map_pages_at(bytes, libc::MAP_PRIVATE, self.file.as_raw_fd(), pages.start)?;
        let _changing = forks::Changing::begin();
        // SAFETY: moves an unused mapping over our own pages, which have the same contents. The kernel does this in one
        // step for all threads: each access finds either the old mapping or the new one. This is the bare system call,
        // because UCX, which a program may have loaded, replaces `mremap` by a function that leaves out the last
        // argument.
        let moved = unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            libc::syscall(libc::SYS_mremap, private.as_ptr(), bytes, bytes, flags, address)
        };
        if moved == -1 {
            let error = io::Error::last_os_error();
            // SAFETY: just mapped and unused.
            unsafe { segment::unmap(private, bytes) };
            return Err(error);
        }
        for page in (0..bytes).step_by(segment::page_size()) {
            // SAFETY: within the range.
            segment::write_in_place(unsafe { AtomicU8::from_ptr(address.add(page)) });
        }
        forks::add_private(address as usize, bytes);
        // Now every page of the mapping is a copy. If peers still write, they fill new file pages, until the tensor is
        // freed.
        self.give_back(pages.start, bytes);
        Ok(())
    }

    /// Frees the memory of a freed tensor that had private pages. Its addresses stay reserved.
    fn retire(&self, offset: usize, bytes: usize) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: the range was freed, so nothing uses it. If the system refuses, its pages stay, which is harmless.
        unsafe { libc::mmap(self.at(offset).cast(), bytes, libc::PROT_NONE, flags, -1, 0) };
        self.give_back(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::super::reach::Reach;
    use super::*;

    const MIB: usize = 1 << 20;

    /// A tensor in the arena, and a second mapping of it, like a peer's.
    struct Tensor {
        own: usize,
        bytes: usize,
        _mapping: Arc<Reach>,
        theirs: usize,
    }

    fn tensor(bytes: usize) -> Tensor {
        let own = allocate(bytes).unwrap().as_ptr() as usize;
        let offset = own - made().unwrap().base.as_ptr() as usize;
        let mapping = Reach::new(std::process::id() as i32, identity().unwrap()).unwrap();
        let theirs = mapping.at(offset, bytes).unwrap();
        assert_ne!(own, theirs);
        Tensor { own, bytes, _mapping: mapping, theirs }
    }

    impl Tensor {
        fn lease(&self, group: u64, from: usize, bytes: usize) -> Option<Lease> {
            lease(group, Span { addr: self.own + from, bytes })
        }
        /// A byte of a mapping as an atomic, for racing threads.
        fn byte(at: usize, index: usize) -> &'static AtomicU8 {
            // SAFETY: tests free a tensor only after its threads have ended.
            unsafe { AtomicU8::from_ptr((at + index) as *mut u8) }
        }
        fn free(self) {
            // SAFETY: `allocate` returned it.
            unsafe { free(NonNull::new(self.own as *mut u8).unwrap()) };
        }
    }

    #[test]
    fn what_is_taken_out_keeps_its_contents_and_no_late_write_arrives() {
        let one = tensor(4 * MIB);
        for page in (0..one.bytes).step_by(4096) {
            Tensor::byte(one.own, page).store(7, Ordering::Relaxed);
        }
        assert_eq!(Tensor::byte(one.theirs, 8192).load(Ordering::Relaxed), 7);
        let lease = one.lease(1, 10, 2 * MIB).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // A peer that writes continuously.
            scope.spawn(|| {
                for value in (8..200u8).cycle() {
                    (64..one.bytes)
                        .step_by(4096)
                        .for_each(|at| Tensor::byte(one.theirs, at).store(value, Ordering::Relaxed));
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
            // A thread of this process that counts in the same pages. No count may be lost.
            let counted = scope.spawn(|| {
                let mut turns = 0u8;
                while !stop.load(Ordering::Relaxed) {
                    (128..one.bytes).step_by(4096).for_each(|at| {
                        Tensor::byte(one.own, at).fetch_add(1, Ordering::Relaxed);
                    });
                    turns = turns.wrapping_add(1);
                }
                turns
            });
            let read = |from: usize, to: usize| -> Vec<u8> {
                (from..to).step_by(4096).map(|at| Tensor::byte(one.own, at).load(Ordering::Relaxed)).collect()
            };
            std::thread::sleep(std::time::Duration::from_millis(20));
            let outcome = lease.take_out();
            let seen = read(64, 2 * MIB);
            std::thread::sleep(std::time::Duration::from_millis(50));
            let later = read(64, 2 * MIB);
            stop.store(true, Ordering::Relaxed);
            // Asserted only after both threads have ended.
            let turns = counted.join().unwrap();
            outcome.unwrap();
            let changed = seen.iter().zip(&later).filter(|(before, after)| before != after).count();
            assert_eq!(changed, 0, "late writes arrived");
            let wrong = read(128, one.bytes).iter().filter(|count| **count != turns).count();
            assert_eq!(wrong, 0, "writes of this process were lost");
        });
        assert!((0..one.bytes).step_by(4096).all(|at| Tensor::byte(one.own, at).load(Ordering::Relaxed) == 7));
        drop(lease);
        assert!(one.lease(1, 3 * MIB, 8).is_none(), "the rest of the tensor is not reachable either");
        let before = usage();
        let (own, bytes) = (one.own, one.bytes);
        one.free();
        let again = allocate(bytes).unwrap();
        assert_ne!(again.as_ptr() as usize, own, "the range is not used again");
        assert!(before.taken_out >= 2 * MIB as u64);
        // SAFETY: just allocated.
        unsafe { free(again) };
    }

    #[test]
    fn pieces_that_share_a_page_keep_what_is_on_it_and_so_do_their_neighbours() {
        let one = tensor(MIB);
        (0..one.bytes).for_each(|at| Tensor::byte(one.own, at).store((at % 251) as u8, Ordering::Relaxed));
        let leases = [(100, 5000), (5100, 9000), (14_200, 20), (14_220, 4000)];
        let leases = leases.map(|(from, bytes)| one.lease(1, from, bytes).unwrap());
        leases.iter().for_each(|lease| lease.take_out().unwrap());
        (0..one.bytes).for_each(|at| Tensor::byte(one.theirs, at).store(0, Ordering::Relaxed));
        let last = 14_220 + 4000;
        let found = |at: usize| Tensor::byte(one.own, at).load(Ordering::Relaxed);
        assert!((0..last).all(|at| found(at) == (at % 251) as u8), "a page was taken out twice");
        drop(leases);
        one.free();
    }

    #[test]
    fn a_tensor_is_lent_to_one_group_at_a_time() {
        let one = tensor(MIB);
        let first = one.lease(1, 0, 100).unwrap();
        let second = one.lease(1, 5000, 100).unwrap();
        assert!(one.lease(2, 0, 100).is_none());
        drop(first);
        assert!(one.lease(2, 0, 100).is_none());
        drop(second);
        assert!(one.lease(2, 0, 100).is_some());
        assert!(one.lease(3, 0, MIB + 1).is_none(), "beyond its end");
        assert!(lease(1, Span { addr: &raw const one as usize, bytes: 1 }).is_none(), "ordinary memory");
        one.free();
    }

    #[test]
    fn a_forked_child_reads_what_its_parent_wrote_and_writes_for_itself() {
        let one = tensor(MIB);
        let lease = one.lease(1, 0, 4096).unwrap();
        Tensor::byte(one.own, 5).store(1, Ordering::Relaxed);
        Tensor::byte(one.own, 9000).store(2, Ordering::Relaxed);
        lease.take_out().unwrap();
        // SAFETY: the child calls nothing that may need a lock.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let found = [5, 9000].map(|at| Tensor::byte(one.own, at).load(Ordering::Relaxed));
            [5, 9000].iter().for_each(|at| Tensor::byte(one.own, *at).store(77, Ordering::Relaxed));
            let refuses = allocate(100).is_none();
            // SAFETY: ends the child.
            unsafe { libc::_exit(if found == [1, 2] && refuses { 17 } else { 18 }) };
        }
        let mut status = 0;
        // SAFETY: waits for our child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 17));
        assert_eq!([5, 9000].map(|at| Tensor::byte(one.own, at).load(Ordering::Relaxed)), [1, 2]);
        drop(lease);
        one.free();
    }
}
