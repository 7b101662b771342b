//! The part of the contract between C++ and Rust for tensors that peers can reach (`engine::shm::memory::arena`), which
//! needs no group. The rules of `bridge` hold here too.

use std::ptr::NonNull;

use super::convert::guarded;
use crate::engine::shm::memory::arena;

#[cxx::bridge(namespace = "sagellm")]
pub mod ffi {
    /// `arena::Usage`.
    #[derive(Default)]
    struct SharedUsage {
        limit: u64,
        used: u64,
        cached: u64,
        extents: u64,
        refused: u64,
        taken_out: u64,
    }

    extern "Rust" {
        /// The address of memory for a tensor, at the begin of a page and not set to anything; 0 where there is none.
        fn shared_allocate(bytes: usize) -> usize;
        /// Frees what `shared_allocate` gave.
        ///
        /// # Safety
        /// It was not freed before, and nobody uses it any more.
        unsafe fn shared_free(at: usize);
        /// Whether `shared_allocate` gives addresses like this one, freed or not.
        fn shared_owns(at: usize) -> bool;
        /// `arena::reaches`.
        fn shared_reaches(at: usize) -> bool;
        fn shared_usage() -> SharedUsage;
        /// Why this process cannot have such memory at all, once that is known, or empty.
        fn shared_why_not() -> String;
    }
}

fn shared_allocate(bytes: usize) -> usize {
    let found = guarded(|| Ok(arena::allocate(bytes)));
    found.ok().flatten().map_or(0, |at| at.as_ptr() as usize)
}

/// # Safety
/// As the bridge says.
unsafe fn shared_free(at: usize) {
    let Some(at) = NonNull::new(at as *mut u8) else { return };
    let _ = guarded(|| {
        // SAFETY: the caller's promise is that of `arena::free`.
        unsafe { arena::free(at) };
        Ok(())
    });
}

fn shared_owns(at: usize) -> bool {
    arena::owns(at as *const u8)
}

fn shared_reaches(at: usize) -> bool {
    guarded(|| Ok(arena::reaches(at as *const u8))).unwrap_or_default()
}

fn shared_usage() -> ffi::SharedUsage {
    let found = guarded(|| Ok(arena::usage())).unwrap_or_default();
    ffi::SharedUsage {
        limit: found.limit,
        used: found.used,
        cached: found.cached,
        extents: found.extents,
        refused: found.refused,
        taken_out: found.taken_out,
    }
}

fn shared_why_not() -> String {
    guarded(|| Ok(arena::why_not())).ok().flatten().unwrap_or_default()
}
