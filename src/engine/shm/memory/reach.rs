//! Maps the arenas of other processes (`arena.rs`) into this process, each only once for all groups.
//!
//! A peer publishes its pid, and the descriptor, inode and size of its file. This process opens the peer's file
//! through /proc, which requires only that both have the same user, so ranks exchange no descriptors. A peer's memory
//! cannot be reached if the peer is in another pid namespace or is not dumpable, or if there is no /proc; then
//! operations are staged.

#![allow(unsafe_code)] // maps the memory of peers

use std::collections::HashMap;
use std::fs;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::arena::Identity;
use super::segment;
use crate::os::watch;
use crate::os::watch::PerProcess;

/// The mapping of one process's arena.
#[derive(Debug)]
pub struct Reach {
    base: NonNull<u8>,
    bytes: usize,
    /// `watch::generation` of the process that mapped it: a forked child does not have the mapping.
    generation: u32,
}

// SAFETY: this is an address range that stays mapped as long as the object lives. `mapped` orders the accesses.
unsafe impl Send for Reach {}
// SAFETY: as above.
unsafe impl Sync for Reach {}

type Mapped = HashMap<(i32, u64), Weak<Reach>>;

/// The arenas that this process has mapped, by pid and inode. Weak, because the groups own them.
static MAPPED: PerProcess<Mutex<Mapped>> = PerProcess::new();

impl Reach {
    /// Maps the arena `identity` of process `pid`, unless it is already mapped. The error is a text for the log.
    pub fn new(pid: i32, identity: Identity) -> Result<Arc<Reach>, String> {
        let mut mapped = MAPPED.get().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = mapped.get(&(pid, identity.inode)).and_then(Weak::upgrade) {
            return Ok(known);
        }
        // If ranks are threads of one process, this maps the process's own file a second time. Pages of a tensor that
        // are made private are private only at the tensor's own address, so late writes through this mapping do not
        // reach the tensor.
        let reach = Arc::new(Reach::map(pid, identity)?);
        mapped.retain(|_, weak| weak.strong_count() > 0);
        mapped.insert((pid, identity.inode), Arc::downgrade(&reach));
        Ok(reach)
    }

    fn map(pid: i32, identity: Identity) -> Result<Reach, String> {
        if pid <= 0 {
            return Err("its process is in another pid namespace".to_string());
        }
        let path = format!("/proc/{pid}/fd/{}", identity.descriptor);
        // Checked before the file is opened, because opening something that is not a regular file may have side
        // effects.
        let found = fs::metadata(&path).map_err(|error| format!("{path}: {error}"))?;
        if (found.ino(), found.len()) != (identity.inode, identity.bytes) {
            return Err(format!("{path} is another file"));
        }
        let file = File::options().read(true).write(true).open(&path).map_err(|error| format!("{path}: {error}"))?;
        let found = segment::inode_and_size(&file).map_err(|error| format!("{path}: {error}"))?;
        if found != (identity.inode, identity.bytes) || !segment::is_sealed(&file) {
            return Err(format!("{path} is another file"));
        }
        let bytes = identity.bytes as usize;
        let base = segment::map_pages(bytes, libc::MAP_SHARED | libc::MAP_NORESERVE, file.as_raw_fd())
            .map_err(|error| format!("cannot map {bytes} bytes of process {pid}: {error}"))?;
        for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            // SAFETY: the whole of our new mapping. A forked child runs no operation of an inherited group.
            unsafe { libc::madvise(base.as_ptr().cast(), bytes, advice) };
        }
        Ok(Reach { base, bytes, generation: watch::generation() })
    }

    /// The address of a piece of that process's memory. None if the piece is not inside the mapping.
    pub fn at(&self, offset: usize, bytes: usize) -> Option<usize> {
        let inside = offset <= self.bytes && bytes <= self.bytes - offset;
        inside.then(|| self.base.as_ptr() as usize + offset)
    }
}

impl Drop for Reach {
    fn drop(&mut self) {
        if self.generation == watch::generation() {
            // SAFETY: our own mapping. Users of its addresses keep the `Reach` alive.
            unsafe { segment::unmap(self.base, self.bytes) };
        }
    }
}
