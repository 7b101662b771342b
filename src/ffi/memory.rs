//! The part of the bridge for tensors that peers can reach (`engine::shm::memory::arena`). It needs no group. The rules
//! of `bridge` apply here too.

use std::ptr::NonNull;

use super::convert::guarded;
use crate::engine::shm::memory::arena;

#[cxx::bridge(namespace = "sagellm")]
pub mod ffi {
    /// The size of the memory, and how many bytes of it are in use. Zeros before the first tensor is allocated.
    struct SharedRoom {
        limit: u64,
        used: u64,
    }

    extern "Rust" {
        /// Allocates uninitialised memory for a tensor and returns its address, which is page-aligned. 0 if it cannot
        /// be allocated.
        fn shared_allocate(bytes: usize) -> usize;
        /// Frees memory that `shared_allocate` returned.
        ///
        /// # Safety
        /// The memory must not have been freed before, and no code may use it any more.
        unsafe fn shared_free(at: usize);
        /// Whether the address is in the memory from which `shared_allocate` allocates, allocated or not.
        fn shared_owns(at: usize) -> bool;
        /// See `arena::reaches`.
        fn shared_reaches(at: usize) -> bool;
        fn shared_room() -> SharedRoom;
        /// `arena::Usage` as JSON.
        fn shared_usage() -> String;
    }
}

fn shared_allocate(bytes: usize) -> usize {
    let found = guarded(|| Ok(arena::allocate(bytes)));
    found.ok().flatten().map_or(0, |at| at.as_ptr() as usize)
}

/// # Safety
/// The requirements are in the bridge.
unsafe fn shared_free(at: usize) {
    let Some(at) = NonNull::new(at as *mut u8) else { return };
    let _ = guarded(|| {
        // SAFETY: the caller guarantees what `arena::free` requires.
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

fn shared_room() -> ffi::SharedRoom {
    let usage = guarded(|| Ok(arena::usage())).unwrap_or_default();
    ffi::SharedRoom { limit: usage.limit, used: usage.used }
}

fn shared_usage() -> String {
    let usage = guarded(|| Ok(arena::usage())).unwrap_or_default();
    let why_not = guarded(|| Ok(arena::why_not())).ok().flatten();
    usage.json(why_not.as_deref())
}
