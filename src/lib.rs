//! # sagellm: the life of one all_reduce
//!
//! A `torch.distributed` backend. This crate is its core; `cpp/` is a thin `c10d::Backend` around it, `torch_ext/` the
//! Python package. Follow one `dist.all_reduce(t)` from the top of this list to its bottom and you have read the crate:
//!
//! 1. `cpp/c10d/backend.cpp` turns the c10d call into one plain [`crate::types::Request`]; it decides nothing.
//! 2. [`bridge`](self) (feature `torch`) is the contract between C++ and Rust: no logic, no panic crosses it.
//! 3. [`group`] gives the operation its sequence number, signature and deadline, and hands it to the engine.
//!    [`driver`] is who makes progress: the thread that waits, or the progress thread when nobody waits; [`domain`] are the
//!    groups that they drive together, [`roles`] who wakes whom.
//! 4. [`engine`] does it, behind one trait: [`crate::engine::shm`] over shared memory between the processes of one host
//!    (`small.rs` slots, `bulk.rs` rounds, `p2p.rs` send and receive, `protocol.rs` the rules of who may write when);
//!    [`crate::engine::multihost`] where ranks live on several hosts, in batches that [`fusion`] cuts, over an [`crate::engine::multihost::transport`].
//!    [`crate::engine::device`] knows the libraries of accelerators, and what to make of an op that one of them lacks.
//! 5. [`select`] tells the engine how, and why: slots or rounds, and in which chunks; which schedule between hosts. Pure,
//!    but for the file of a table (`select/table.rs`).
//! 6. [`reduce`] adds the numbers in the group's fixed rank order.
//!
//! Beside them [`watch`] learns of dead peers, [`stats`] counts and remembers, and [`schedule`] says who talks to whom at
//! which step, as data, wherever messages are exchanged one by one. The floor: [`types`], [`op`], [`reach`], [`error`],
//! [`clock`], [`config`], [`host`], [`topology`]. A file uses only what stands below it in this list, and the floor; `tests/layering.rs` holds that.
//! The words are defined in `docs/words.md`, the rules by number in `docs/design.md`.

// Rooms that touch bytes or call the system allow it, each with a sentence why; `tests/layering.rs` has the list.
#![deny(unsafe_code)]

pub mod algorithms;
pub mod engine;
#[cfg(feature = "torch")]
mod ffi;
pub mod fusion;
pub mod group;
pub mod os;
pub mod progress;
pub mod reduce;
pub mod rendezvous;
pub mod select;
pub mod stats;

pub mod config;
pub mod error;
pub mod host;
pub mod op;
pub mod types;
