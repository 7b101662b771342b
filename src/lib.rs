//! # sagellm: the life of one all_reduce
//!
//! A `torch.distributed` backend. This crate is its core; `cpp/` is the `c10d::Backend` around it, `torch_ext/` the
//! Python package. The paths of four calls, each from top to bottom:
//!
//! **A CPU tensor, one host.** `cpp/c10d/collectives.cpp` describes the call, `cpp/c10d/dispatch.cpp` decides which
//! engine runs it, and `cpp/lower/` checks it and turns its tensors into spans of memory. `ffi/calls.rs` passes it on
//! as a [`crate::types::Request`] (`ffi/convert.rs`); no panic crosses there. [`group`] refuses inconsistent calls
//! (`group/check.rs`), turns a valid call into an [`op`] with a sequence number, signature and deadline, and submits
//! the op to the group's [`crate::engine::Engine`]. [`crate::engine::shm`] enqueues, publishes and advances it
//! (`engine/shm/engine.rs`): it asks [`select`] whether to use slots or rounds, writes the rank's slot in shared memory
//! (`small.rs`, `bulk.rs`, messages in `p2p`), and reduces the ranks' data with [`reduce`], in the order of the
//! ranks. Finally [`group`] records the op's end in [`stats`] and reports it to its owner (`Op::end`). If a peer has
//! not entered the op yet, [`progress`] drives the groups of this process: on the thread that waits, or on the progress
//! thread if no thread waits. `docs/internals/calls.md` lists the files of this path in order.
//!
//! **A tensor on a device.** `dispatch.cpp` turns the same description into device addresses. [`crate::engine::device`]
//! checks and numbers the call, finds or makes the communicator, and decides what to call in the vendor's library
//! (`begin`). C++ prepares the tensors on torch's stream. Then the library is called (`launch`). A thread checks
//! whether the call has ended or will never end (`poll`), and the statistics record its end (`ended`). If there is no
//! library, the tensors in the description are replaced by copies in host memory, and the call runs like one on CPU
//! tensors.
//!
//! **A fused batch between hosts.** [`crate::engine::multihost`] queues the operation and passes its size to
//! [`fusion`]. A lane takes the next batch and asks [`select`] for its algorithm. It reduces inside the host with
//! operations of a shared-memory group, and runs a schedule of [`algorithms`] with the other hosts over its transport.
//!
//! **Making a group.** In [`rendezvous`] the ranks find each other through the store, prove that they share a host, and
//! decide once what serves the group: nothing (one rank), shared memory, several hosts, or a delegate. The caller opens
//! the link or delegate that the decision requires, and `group/builder.rs` makes the complete group.
//!
//! ## Layers
//!
//! A file uses only the layers below its own. This is the only list of layers; `tests/it/layering.rs` reads it.
//!
//! ```text
//! ffi           the contract with C++ (feature `torch`)
//! group         numbers, signatures, deadlines, faults; builder
//! hang          which ranks an operation waits for, and what they do
//! rendezvous    which rank is on which host, and one decision
//! progress      which thread drives the groups of a process, and which event wakes it
//! engine        what runs operations: solo, delegate, shm, multihost, device; none uses another
//! fusion        what is sent together: lists, batches (pure)
//! select        which algorithm, and why (pure except for the file of a measured table)
//! algorithms    schedules of sends and receives, as data (pure)
//! routing       where the rows of a mixture of experts go (pure)
//! reduce        the arithmetic
//! stats         counts, times and records of operations
//! op            an operation from issue to end; which memory it uses
//! threads       copies and reductions of one thread, split among several
//! config host   settings; what the core needs from its caller (store, signals, completions, threads)
//! cache_file    the text files that keep what was measured on this machine
//! os            watching processes, cores and caches, clock, futex; fault points for tests
//! error types json  used by all
//! fields        the bytes of what ranks tell each other (pure)
//! ```
//!
//! `docs/words.md` defines our words; `docs/design.md` has the rules by number.

// If a module accesses raw memory or calls the system, it allows unsafe code and gives a reason; `tests/it/layering.rs`
// lists these modules.
#![deny(unsafe_code)]

pub mod algorithms;
pub mod engine;
#[cfg(feature = "torch")]
mod ffi;
pub mod fusion;
pub mod group;
pub mod hang;
pub mod os;
pub mod progress;
pub mod reduce;
pub mod rendezvous;
pub mod routing;
pub mod select;
pub mod stats;

pub mod cache_file;
pub mod config;
pub mod error;
pub mod fields;
pub mod host;
pub mod json;
pub mod op;
pub mod threads;
pub mod types;
