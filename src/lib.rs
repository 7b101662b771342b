//! # sagellm: the life of one all_reduce
//!
//! A `torch.distributed` backend. This crate is its core; `cpp/` is the `c10d::Backend` around it, `torch_ext/` the Python
//! package. Four calls, each followed from top to bottom:
//!
//! **A CPU tensor, one host.** `cpp/c10d/collectives.cpp` describes the call, `cpp/c10d/dispatch.cpp` decides who carries
//! it, `cpp/lower/` checks it and turns its tensors into pieces of memory. `ffi/calls.rs` hands it over as a
//! [`crate::types::Request`]; no panic crosses there. [`group`] gives it its sequence number, signature and deadline and submits it
//! to the group's [`crate::engine::Engine`]. [`crate::engine::shm`] asks [`select`] whether it goes through slots or in rounds, publishes
//! it in shared memory (`small.rs`, `bulk.rs`, messages in `p2p.rs`) and combines the ranks' numbers with [`reduce`], in
//! the order of the ranks. Where a peer has not come yet, [`progress`] moves the groups of this process forward: the thread
//! that waits does, or the progress thread when nobody waits.
//!
//! **A tensor on a device.** `dispatch.cpp` makes the same description into addresses on the device.
//! [`crate::engine::device`] checks it, numbers it, finds or makes the communicator and says what the vendor's library is
//! asked for (`begin`); C++ prepares the tensors on torch's stream; the library is called (`launch`); a thread asks whether
//! the call has ended or never will (`poll`); the statistics hear of it (`ended`). Without a library, copies in host memory
//! take the tensors' places in the description, which then goes as above.
//!
//! **A fused batch between hosts.** [`crate::engine::multihost`] queues the operation and tells [`fusion`] its size. A lane
//! takes the next batch, asks [`select`] for its algorithm, combines inside the host by operations of a group in shared
//! memory, and runs a schedule of [`algorithms`] with the other hosts over its transport.
//!
//! **The making of a group.** In [`rendezvous`] the ranks find each other through the store, prove that they share a host, and
//! decide once what serves the group: nothing (one rank), shared memory, several hosts, or a delegate. The caller opens the
//! link or delegate that the decision asks for, and `group/builder.rs` makes the group, whole.
//!
//! ## Layers
//!
//! A file uses only what stands below it. This is the only list; `tests/layering.rs` reads it.
//!
//! ```text
//! ffi           the contract with C++ (feature `torch`)
//! group         numbers, signatures, deadlines, faults; builder
//! rendezvous    who is where, and one decision
//! progress      who moves the groups of a process forward, and who wakes whom
//! engine        what carries operations: solo, delegate, shm, multihost, device; they know nothing of each other
//! fusion        what travels together: lists, batches (pure)
//! select        which algorithm, and why (pure but for the file of a measured table)
//! algorithms    who talks to whom at which step, as data (pure)
//! reduce        the arithmetic
//! stats         what happened
//! op            an operation from issue to end; which memory it uses
//! config host   settings; what the core asks of its caller (store, signals, completions)
//! os            dead processes, cores and caches, clock, futex
//! error types   the floor
//! ```
//!
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
