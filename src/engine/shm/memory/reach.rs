//! The arenas of other processes (`arena.rs`), mapped into this one: each once, for all groups.
//!
//! A peer names its file by process, descriptor and inode. It is opened by way of /proc, which asks for the same user and no
//! more, so that ranks without such tensors exchange nothing. Another pid namespace, a process that is not dumpable or a
//! missing /proc are reasons why a peer's memory cannot be reached; operations are staged then.

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
    /// Of the process that mapped it: a forked child has no such mapping.
    generation: u32,
}

// SAFETY: an address range that stays mapped for its lifetime; `mapped` orders the accesses.
unsafe impl Send for Reach {}
// SAFETY: as above.
unsafe impl Sync for Reach {}

type Mapped = HashMap<(i32, u64), Weak<Reach>>;

/// The mapped arenas of this process, by pid and inode. Weak: the groups own them.
static MAPPED: PerProcess<Mutex<Mapped>> = PerProcess::new();

impl Reach {
    /// The arena that process `pid` described; the error is a reason for a log.
    pub fn new(pid: i32, identity: Identity) -> Result<Arc<Reach>, String> {
        let mut mapped = MAPPED.get().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = mapped.get(&(pid, identity.inode)).and_then(Weak::upgrade) {
            return Ok(known);
        }
        // Ranks that are threads of one process map it as well: a tensor that was taken out is at its old address only.
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
        // Looked at first: opening what is no file may have an effect.
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

    /// The address of a piece of that process's memory, if it lies inside.
    pub fn at(&self, offset: usize, bytes: usize) -> Option<usize> {
        let inside = offset <= self.bytes && bytes <= self.bytes - offset;
        inside.then(|| self.base.as_ptr() as usize + offset)
    }
}

impl Drop for Reach {
    fn drop(&mut self) {
        if self.generation == watch::generation() {
            // SAFETY: our mapping; who uses an address of it keeps the `Reach`.
            unsafe { segment::unmap(self.base, self.bytes) };
        }
    }
}
