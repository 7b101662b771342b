//! Collectives and messages between the processes of one host, over one shared segment per group.
//!
//! `Shm` is one rank's side: a queue of operations in the order of their numbers, each a state machine that `poll`
//! advances without ever waiting. Operations publish strictly in order; they may end in any order, because each has its
//! own slot; large ones use the rounds one after the other. Messages go beside that order, but one that touches the memory
//! of an earlier operation, or a later one of a message, waits for it. The caller holds the group's lock, so `Shm` is
//! plain single-threaded code.
//!
//! | file | |
//! | --- | --- |
//! | `layout` | where everything lies in the segment |
//! | `protocol` | who may write what, and when (generic: loom runs it) |
//! | `area` | typed access to the segment |
//! | `small`, `bulk`, `p2p` | the three ways data moves |
//! | `lanes`, `rank_set` | which sender has which buffers of a receiver; sets of ranks |
//! | `presence` | memory that becomes present when it is first needed |
//! | `segment` | the memory itself |
//! | `engine` | the queue: `Shm`, the group's `Engine` |
//! | `control` | what is asked and told without the group's lock |

pub mod bulk;
mod control;
mod engine;
pub mod lanes;
pub mod memory;
pub mod p2p;
pub mod protocol;
pub mod rank_set;
pub mod small;

pub use self::engine::Shm;
