//! Memory that all ranks of a group map. It has no name, so nothing is left behind when processes are killed. If the
//! system allows it, the memory is sealed, so that no peer can shrink it (`Backing`).

#![allow(unsafe_code)] // maps the memory and takes references into it

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};

use crate::error::{Error, Result};
use crate::os::numa;

/// `MADV_POPULATE_WRITE` (Linux 5.14).
const MADV_POPULATE_WRITE: i32 = 23;

/// The source of the memory, which decides whether it can be sealed. Sent to the peers as one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    Sealed,
    /// memfd_create was denied: a nameless file in /dev/shm, which cannot be sealed. Peers run as the same user and are
    /// trusted not to truncate it.
    Unsealed,
    /// No descriptor: the ranks are threads of one process.
    Anonymous,
}

/// A shared mapping, unmapped on drop. In a forked child its addresses map private memory (`Mapped`). So whatever the
/// child does with inherited objects, it cannot write the memory that the parent shares with the parent's peers.
#[derive(Debug)]
pub struct Segment {
    base: NonNull<u8>,
    len: usize,
    backing: Backing,
    entry: &'static Mapped,
}

/// An entry of the list of mapped segments, which the fork handler reads. Entries are never freed, because the handler
/// must not acquire a lock. When a segment is dropped, its entry can be reused.
#[derive(Debug)]
struct Mapped {
    /// Address of the mapping; 0 while unused. Written by the thread that makes a segment (release, after `len`) or
    /// drops it. A forked child, which has no other threads, reads it.
    base: AtomicUsize,
    len: AtomicUsize,
    next: AtomicPtr<Mapped>,
}

/// The list of all mappings of this process.
struct Mappings {
    /// The first entry of the list, which only grows. A thread that makes a segment reads this pointer (acquire) and
    /// may push a new entry (release). A forked child reads it too (acquire).
    first: AtomicPtr<Mapped>,
    /// Installs the fork handler.
    installed: Once,
}

static MAPPINGS: Mappings = Mappings { first: AtomicPtr::new(std::ptr::null_mut()), installed: Once::new() };
/// Value of `base` while an entry is being filled in. No mapping starts at this address.
const TAKEN: usize = 1;

/// Every entry of the list.
fn mapped() -> impl Iterator<Item = &'static Mapped> {
    // SAFETY: entries are leaked boxes, so a pointer that was pushed stays valid.
    let entry = |at: *mut Mapped| unsafe { at.as_ref() };
    std::iter::successors(entry(MAPPINGS.first.load(Ordering::Acquire)), move |one| {
        entry(one.next.load(Ordering::Acquire))
    })
}

/// Registers a mapping, so that a forked child replaces it.
fn enter(base: NonNull<u8>, len: usize) -> &'static Mapped {
    MAPPINGS.installed.call_once(|| {
        // SAFETY: the handler is a plain function that is never unloaded.
        let rc = unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) };
        if rc != 0 {
            log::warn!("pthread_atfork failed ({rc}); a forked child could write the shared memory of its parent");
        }
    });
    let free = |one: &&Mapped| one.base.compare_exchange(0, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok();
    let entry = mapped().find(free).unwrap_or_else(|| {
        let new = Box::leak(Box::new(Mapped { base: TAKEN.into(), len: 0.into(), next: AtomicPtr::default() }));
        let mut first = MAPPINGS.first.load(Ordering::Relaxed);
        loop {
            new.next.store(first, Ordering::Relaxed);
            // Release: the entry is visible before the pointer to it.
            match MAPPINGS.first.compare_exchange_weak(first, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return new,
                Err(other) => first = other,
            }
        }
    });
    entry.len.store(len, Ordering::Relaxed);
    entry.base.store(base.as_ptr() as usize, Ordering::Release);
    entry
}

/// Runs in the child before the child's first own instruction, and replaces every segment by private, empty memory.
/// Uses only atomics and system calls, because a thread that the child does not have may hold a lock.
extern "C" fn in_forked_child() {
    for one in mapped() {
        let (base, len) = (one.base.load(Ordering::Acquire), one.len.load(Ordering::Relaxed));
        if base <= TAKEN {
            continue;
        }
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the range is our own mapping, of which the child has its own copy. Later accesses read zeros.
        unsafe {
            if libc::mmap(base as *mut _, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) == libc::MAP_FAILED {
                libc::munmap(base as *mut _, len);
            }
        }
    }
}

// SAFETY: a segment is an address range that stays mapped as long as the object lives. Its methods return only raw
// pointers; the protocol orders the accesses, whichever thread makes them.
unsafe impl Send for Segment {}
// SAFETY: as above; no method changes the segment itself.
unsafe impl Sync for Segment {}

fn refused(what: &str, error: io::Error) -> Error {
    Error::system(format!("sagellm: {what}: {error}"))
}

fn descriptor(rc: i64) -> io::Result<OwnedFd> {
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor, so only this process owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(rc as i32) })
}

fn checked(rc: i32) -> io::Result<()> {
    if rc == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn memfd() -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // Kernels before 6.3 do not know MFD_NOEXEC_SEAL. Newer kernels can be configured to refuse calls without it.
    let mut result = Err(io::Error::from_raw_os_error(libc::EINVAL));
    for flags in [flags | libc::MFD_NOEXEC_SEAL, flags] {
        // SAFETY: the name ends in NUL; the flags are plain numbers.
        result = descriptor(unsafe { libc::syscall(libc::SYS_memfd_create, c"sagellm".as_ptr(), flags) });
        if !matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EINVAL)) {
            break;
        }
    }
    result
}

/// Creates a file in memory that has `len` zero bytes and whose size cannot change.
pub fn sealed_memfd(len: usize) -> io::Result<OwnedFd> {
    let fd = memfd()?;
    // SAFETY: plain numbers on our own descriptor.
    unsafe {
        checked(libc::ftruncate(fd.as_raw_fd(), len as libc::off_t))?;
        checked(libc::fcntl(
            fd.as_raw_fd(),
            libc::F_ADD_SEALS,
            libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
        ))?;
    }
    Ok(fd)
}

/// Creates a file in /dev/shm that never has a name. Reserves its pages, so that a full /dev/shm is an error here and
/// not a SIGBUS at the first access.
fn nameless_file(len: usize) -> io::Result<OwnedFd> {
    let flags = libc::O_TMPFILE | libc::O_EXCL | libc::O_RDWR | libc::O_CLOEXEC;
    // SAFETY: the path ends in NUL; the rest are plain numbers.
    let fd = descriptor(unsafe { libc::open(c"/dev/shm".as_ptr(), flags, 0o600) }.into())?;
    loop {
        // SAFETY: plain numbers on our own descriptor.
        match checked(unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, len as libc::off_t) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            result => return result.map(|()| fd),
        }
    }
}

impl Segment {
    /// Makes a segment of `len` zero bytes, and the descriptor by which peers map it. The String is the error's text.
    pub fn create(len: usize) -> std::result::Result<(Segment, OwnedFd), (io::Error, String)> {
        let (fd, backing) = match sealed_memfd(len) {
            Ok(fd) => (fd, Backing::Sealed),
            Err(denied) => {
                log::warn!("memfd is not available ({denied}); using a nameless file in /dev/shm");
                let fd = nameless_file(len).map_err(|error| {
                    let text = format!(
                        "no shared memory of {len} bytes: memfd failed ({denied}) and /dev/shm too ({error}). Allow \
                         memfd_create in the seccomp profile, or enlarge /dev/shm."
                    );
                    (error, text)
                })?;
                (fd, Backing::Unsealed)
            }
        };
        let base = map_pages(len, libc::MAP_SHARED, fd.as_raw_fd()).map_err(|error| {
            let text = format!("cannot map {len} bytes of shared memory: {error}");
            (error, text)
        })?;
        Ok((Segment { base, len, backing, entry: enter(base, len) }, fd))
    }

    /// Maps a segment that another rank made. The segment must have the announced length and must be sealed. An
    /// unsealed descriptor is accepted only if that rank announced one (`backing`).
    pub fn map(fd: BorrowedFd<'_>, expected_len: usize, backing: Backing) -> Result<Segment> {
        if backing == Backing::Sealed && !is_sealed(&fd) {
            return Err(Error::system("sagellm: the shared memory that rank 0 sent is not sealed against shrinking"));
        }
        let (_, found) = inode_and_size(&fd).map_err(|error| refused("fstat on shared memory", error))?;
        if usize::try_from(found) != Ok(expected_len) {
            return Err(Error::system(format!(
                "sagellm: the shared memory that rank 0 sent has {found} bytes, {expected_len} were announced"
            )));
        }
        let base = map_pages(expected_len, libc::MAP_SHARED, fd.as_raw_fd())
            .map_err(|error| refused(&format!("cannot map {expected_len} bytes of shared memory"), error))?;
        Ok(Segment { base, len: expected_len, backing, entry: enter(base, expected_len) })
    }

    /// Maps memory for ranks that are threads of one process.
    #[cfg(feature = "testing")]
    pub fn anonymous(len: usize) -> Result<Segment> {
        // Miri supports neither mappings that processes share nor pages.
        let shared = if cfg!(miri) { libc::MAP_PRIVATE } else { libc::MAP_SHARED };
        let base = map_pages(len, shared | libc::MAP_ANONYMOUS, -1)
            .map_err(|error| refused(&format!("cannot map {len} bytes of memory"), error))?;
        Ok(Segment { base, len, backing: Backing::Anonymous, entry: enter(base, len) })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Address of `bytes` bytes at `offset`. Panics if they are not all inside the segment. Offsets come from the
    /// group's layout, never unchecked from shared memory, so a panic here is our own bug.
    #[inline]
    pub fn ptr(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(
            offset <= self.len && bytes <= self.len - offset,
            "bytes {offset}..+{bytes} are outside the segment of {} bytes",
            self.len
        );
        // SAFETY: the offset is at most the length of the mapping, as just checked.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Asks the kernel to place the whole pages of a range on a NUMA node when they are populated (`numa::prefer`).
    pub fn prefer(&self, range: Range<usize>, node: u32) -> io::Result<()> {
        let page = page_size();
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if start >= end || cfg!(miri) {
            return Ok(());
        }
        // SAFETY: the range is in whole pages of our mapping.
        unsafe { numa::prefer(self.ptr(start, end - start), end - start, node) }
    }

    /// Makes the pages of a range present and writable now. Peers may write to the range at the same time, because
    /// populating does not change the contents.
    pub fn populate(&self, range: Range<usize>) -> Result<()> {
        let page = page_size();
        let start = range.start / page * page;
        let end = range.end.div_ceil(page).saturating_mul(page).min(self.len.div_ceil(page) * page);
        if range.start >= range.end || cfg!(miri) {
            return Ok(());
        }
        let first = self.ptr(start, range.end - start);
        loop {
            // SAFETY: the range is in whole pages of our mapping. Populating changes no contents.
            let rc = unsafe { libc::madvise(first.cast(), end - start, MADV_POPULATE_WRITE) };
            let error = match checked(rc) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => continue,
                Some(libc::EINVAL | libc::ENOSYS | libc::EPERM) => break,
                _ => return Err(refused(&format!("cannot populate {} bytes of shared memory", end - start), error)),
            }
        }
        // The kernel does not support MADV_POPULATE_WRITE, or forbids it.
        for offset in (start..range.end).step_by(page) {
            // SAFETY: the byte is inside the mapping, and one byte has no alignment.
            write_in_place(unsafe { AtomicU8::from_ptr(self.ptr(offset, 1)) });
        }
        Ok(())
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.entry.base.store(0, Ordering::Release);
        // SAFETY: `base` and `len` are what mmap returned, and nothing can use them after the drop.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

pub fn map_pages(len: usize, flags: i32, fd: i32) -> io::Result<NonNull<u8>> {
    map_pages_at(len, flags, fd, 0)
}

/// Maps `len` bytes of a file, beginning at `offset`.
pub fn map_pages_at(len: usize, flags: i32, fd: i32, offset: usize) -> io::Result<NonNull<u8>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses touches none of our memory.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd, offset as libc::off_t) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Writes a byte's current value to the byte, so that the kernel makes the page present and writable. No concurrent
/// write is lost. A fetch_add of 0 would not suffice, because compilers turn it into a load.
pub fn write_in_place(byte: &AtomicU8) {
    let mut value = byte.load(Ordering::Relaxed);
    while let Err(now) = byte.compare_exchange(value, value, Ordering::SeqCst, Ordering::Relaxed) {
        value = now;
    }
}

/// Unmaps a mapping.
///
/// # Safety
/// `map_pages` must have returned it, and nothing may use it.
pub unsafe fn unmap(base: NonNull<u8>, len: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { libc::munmap(base.as_ptr().cast(), len) };
}

/// Inode and size of an open file.
pub fn inode_and_size(fd: &impl AsRawFd) -> io::Result<(u64, u64)> {
    // SAFETY: an all-zero stat is valid, and the call fills it.
    let stat = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        checked(libc::fstat(fd.as_raw_fd(), &mut stat))?;
        stat
    };
    Ok((stat.st_ino, u64::try_from(stat.st_size).unwrap_or(0)))
}

/// Whether an open file is sealed against shrinking.
pub fn is_sealed(fd: &impl AsRawFd) -> bool {
    // SAFETY: a query on an open descriptor.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    seals != -1 && seals & libc::F_SEAL_SHRINK != 0
}

/// The largest file that this process may write, if there is a limit.
pub fn largest_file() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the call fills the struct.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    (rc == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

pub fn page_size() -> usize {
    // SAFETY: takes a plain number.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn two_mappings_see_one_memory() {
        let (one, fd) = Segment::create(3 * 4096).unwrap();
        let two = Segment::map(fd.as_fd(), 3 * 4096, one.backing()).unwrap();
        one.populate(0..3 * 4096).unwrap();
        // SAFETY: both pointers are inside live mappings, and this is the only thread that uses them.
        unsafe {
            one.ptr(5000, 1).write(42);
            assert_eq!(two.ptr(5000, 1).read(), 42);
        }
    }

    #[test]
    fn the_size_cannot_change() {
        let (segment, fd) = Segment::create(8192).unwrap();
        assert_eq!(segment.backing(), Backing::Sealed);
        for size in [0, 4096, 16384] {
            // SAFETY: plain numbers on our own descriptor.
            let rc = unsafe { libc::ftruncate(fd.as_raw_fd(), size) };
            assert_eq!((rc, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EPERM)));
        }
    }

    #[test]
    fn a_wrong_length_and_a_missing_seal_are_refused() {
        let (_segment, fd) = Segment::create(8192).unwrap();
        let text = Segment::map(fd.as_fd(), 4096, Backing::Sealed).unwrap_err().to_string();
        assert!(text.contains("8192") && text.contains("4096"), "{text}");
        let unsealed = nameless_file(8192).unwrap();
        let text = Segment::map(unsealed.as_fd(), 8192, Backing::Sealed).unwrap_err().to_string();
        assert!(text.contains("not sealed"), "{text}");
        assert_eq!(Segment::map(unsealed.as_fd(), 8192, Backing::Unsealed).unwrap().len(), 8192);
    }

    #[test]
    fn populate_keeps_what_is_there() {
        let segment = Segment::anonymous(4 * 4096).unwrap();
        // SAFETY: inside the live mapping, one thread.
        unsafe { segment.ptr(4097, 1).write(7) };
        segment.populate(100..3 * 4096 + 1).unwrap();
        segment.populate(5..5).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { segment.ptr(4097, 1).read() }, 7);
    }

    #[test]
    #[should_panic(expected = "outside the segment")]
    fn a_pointer_outside_panics() {
        Segment::anonymous(4096).unwrap().ptr(4090, 7);
    }

    #[test]
    fn a_forked_child_writes_memory_of_its_own() {
        let (dropped, _) = Segment::create(4096).unwrap();
        drop(dropped);
        let (one, fd) = Segment::create(3 * 4096).unwrap();
        let two = Segment::map(fd.as_fd(), 3 * 4096, one.backing()).unwrap();
        let three = Segment::anonymous(4096).unwrap();
        // SAFETY: inside live mappings, which only this thread uses; the child calls nothing that may need a lock.
        unsafe {
            one.ptr(5000, 1).write_volatile(42);
            three.ptr(0, 1).write_volatile(43);
            let child = libc::fork();
            if child == 0 {
                let empty = one.ptr(5000, 1).read_volatile() == 0 && three.ptr(0, 1).read_volatile() == 0;
                one.ptr(5000, 1).write_volatile(1);
                two.ptr(5001, 1).write_volatile(2);
                three.ptr(0, 1).write_volatile(3);
                libc::_exit(if empty { 17 } else { 18 });
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 17));
            let left =
                (one.ptr(5000, 1).read_volatile(), two.ptr(5001, 1).read_volatile(), three.ptr(0, 1).read_volatile());
            assert_eq!(left, (42, 0, 43));
        }
    }
}
