//! A group whose ranks live on several hosts: batches of operations on two lanes, shared memory inside each host, a link
//! between the hosts.
//!
//! `issue` puts an operation into the queue and never waits. Each lane has a thread that takes the batches of its turn
//! (`fusion`) and carries each one through (`collectives`): a link can only be waited on, so somebody has to wait, and it
//! must not be the caller, who wants to hear of signals and deadlines. A lane has its own shared-memory group inside the
//! host and its own tags on the link, so what one lane does can neither meet nor order what the other does.
//!
//! | file | |
//! | --- | --- |
//! | `place` | who lives where |
//! | `probe` | how long a message takes between hosts |
//! | `engine` | the group's `Engine`: opening the link, taking operations, the end |
//! | `lanes` | the two threads that carry batches |
//! | `queue` | what was issued and has not ended, and which lane has what |
//! | `vector` | the numbers of a batch, and how they are combined |
//! | `batch` | one batch: steps inside a host, schedules between hosts |
//! | `dispatch` | from the requests of a batch to the collective that carries them |
//! | `collectives` | the two put together, one collective after the other |
//! | `rails` | the same for large ones, where several ranks of a host talk to other hosts |

pub mod batch;
mod collectives;
mod dispatch;
mod engine;
mod lanes;
pub mod place;
mod probe;
mod queue;
pub mod rails;
pub mod transport;
mod vector;

pub use self::batch::{ChosenAlgorithm, HostGroup};
pub use self::engine::{MultiHost, Opened};
