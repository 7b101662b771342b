//! UCX in a process with CPU tensors that peers can reach. UCX may replace the system calls that change mappings.

#![allow(unsafe_code)] // moves a mapping

use std::process::Command;
use std::ptr;

use crate::common::this_program;

/// Runs a test of this file in a separate process. The test loads UCX if it is installed.
fn with_ucx(test: &str, change: impl FnOnce(&mut Command)) {
    let mut child = this_program(module_path!(), test);
    child.env_remove("UCX_MEM_EVENTS");
    change(&mut child);
    assert!(child.status().unwrap().success(), "{test}");
}

fn load() -> bool {
    crate::multihost_wire::carriers().len() > 1
}

/// UCX 1.13 leaves out the last argument of `mremap`, so a mapping would not go where it should.
#[test]
fn mappings_that_change_go_where_they_should_although_ucx_is_loaded() {
    with_ucx("moves_a_mapping", |_| ());
}

#[test]
#[ignore = "another test runs it as a separate process"]
fn moves_a_mapping() {
    if !load() {
        return;
    }
    assert_eq!(std::env::var("UCX_MEM_EVENTS").unwrap(), "n");
    let (bytes, access, flags) = (4096, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: both mappings are made here and used by nothing else.
    unsafe {
        let from = libc::mmap(ptr::null_mut(), bytes, access, flags, -1, 0);
        let to = libc::mmap(ptr::null_mut(), bytes, access, flags, -1, 0);
        assert!(from != libc::MAP_FAILED && to != libc::MAP_FAILED);
        let moved = libc::mremap(from, bytes, bytes, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, to);
        assert_eq!(moved, to);
    }
}

#[test]
fn memory_becomes_private_although_the_user_lets_ucx_replace_calls() {
    with_ucx("becomes_private", |child| {
        child.env("UCX_MEM_EVENTS", "y");
    });
}

#[test]
#[ignore = "another test runs it as a separate process"]
fn becomes_private() {
    load();
    crate::shm_p2p_in_place::rule_36_a_sender_that_copies_late_changes_nothing_after_the_receive_has_failed();
}
