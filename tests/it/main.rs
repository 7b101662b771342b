//! The tests of the core as one program. Every test program links the crate, so 20 programs took four times as long to
//! build as this one. `cargo test --test it rendezvous::` runs the tests of one file. Each file has the name of the
//! module that it tests (CONTRIBUTING.md, "Where a test goes"). `tests/loom.rs` is a separate program, because loom
//! replaces the atomics.

mod common;

mod algorithms;
mod algorithms_run;
mod device_libs;
mod device_lowering;
mod group_builder;
mod group_explain;
mod group_extensions;
mod group_external;
mod group_panics;
mod group_subject;
mod layering;
mod loader;
mod multihost;
mod multihost_messages;
mod multihost_paths;
mod multihost_results;
mod multihost_transport;
mod multihost_ucx;
mod multihost_wire;
mod op_instructions;
mod op_order;
mod os_fault_points;
mod reduce;
mod reduce_int8;
mod rendezvous;
mod select;
mod shm_collectives;
mod shm_engine;
mod shm_fuzz;
mod shm_many_ranks;
mod shm_mapped;
mod shm_memory_presence;
mod shm_p2p;
mod shm_p2p_in_place;
mod shm_protocol;
mod shm_results;
mod shm_threads;
mod simulators;
