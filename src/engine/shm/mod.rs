//! Runs collectives and messages between the processes of one host, over one shared-memory segment per group.
//!
//! `Shm` is one rank's engine. It has a queue of operations in the order of their numbers; each is a state machine that
//! advances without blocking. `submit` enqueues, publishes and advances; `poll` publishes and advances. Operations are
//! published strictly in order and may end in any order, because each has its own slot. Large operations run in rounds,
//! one operation after another. Messages are outside that order, but a message waits for an earlier operation on the
//! same memory, and an operation waits for an earlier message on the same memory. The caller holds the group's lock, so
//! `Shm` is plain single-threaded code.
//!
//! | file | |
//! | --- | --- |
//! | `memory/layout` | offsets of everything in the segment |
//! | `protocol` | which rank may write which word, and when (generic: loom runs it) |
//! | `memory/area` | typed access to the segment |
//! | `small`, `bulk`, `mapped`, `p2p` | the four ways to move data |
//! | `headers` | what each rank called, and the errors if they differ |
//! | `table` | the sizes of the blocks of an all_to_all |
//! | `nodes` | which ranks share a NUMA node or a last-level cache |
//! | `results` | compares the ranks' results, if the group asks for it |
//! | `memory/arena`, `memory/extents` | this process's tensors that peers can reach; which of their pages are in use |
//! | `memory/reach` | the peers' arenas, mapped into this process |
//! | `memory/forks` | keeps a forked child from writing its parent's tensors |
//! | `rank_set` | sets of ranks |
//! | `memory/presence` | memory that is populated at its first use |
//! | `memory/segment` | the memory itself |
//! | `engine` | the queue: `Shm`, the group's `Engine` |
//! | `control` | what any thread may use without the group's lock |

pub mod bulk;
mod control;
mod engine;
mod headers;
pub mod mapped;
pub mod memory;
pub mod nodes;
pub mod p2p;
pub mod protocol;
pub mod rank_set;
mod results;
pub mod small;
mod table;

pub use self::engine::Shm;
