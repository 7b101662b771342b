//! A group whose ranks are on several hosts: batches of collectives on two lanes, shared memory inside each host, a link
//! between the hosts; and messages between any two ranks, which the link carries without a lane.
//!
//! `submit` queues a collective and never waits. Each lane has a thread that takes the batches of its turn (`fusion`)
//! and runs them (`collectives`). A link has only blocking waits, and the caller must not block in one, because it has
//! to notice signals and deadlines. A lane has its own shared-memory group inside the host and its own tags on the
//! link, so the two lanes never match or order each other's messages.
//!
//! | file | |
//! | --- | --- |
//! | `host_map` | which rank is on which host |
//! | `probe` | how long a message takes between hosts |
//! | `engine` | the group's `Engine`: opens the link, takes operations, leaves |
//! | `lanes` | the two threads that run batches |
//! | `queue` | the operations that have not ended, in what order, and which lane has them |
//! | `messages` | send and receive: which message goes to which receive |
//! | `post`, `letters`, `talk` | the mail of a rank: who carries it out, what it says, what it has said |
//! | `vector` | the numbers of a batch, and how they are combined |
//! | `batch` | one batch: steps inside a host, schedules between hosts |
//! | `dispatch` | maps the requests of a batch to the collective that runs it |
//! | `collectives` | each collective: steps inside the hosts and a schedule between them |
//! | `rails` | the same for large ones, where several ranks of a host talk to other hosts |
//! | `transport` | the steps of a schedule as frames on the link |
//! | `link` | what carries bytes between hosts |
//! | `names` | what error texts call the ranks, and the texts of ranks that are gone |

pub mod batch;
mod collectives;
mod dispatch;
mod engine;
pub mod host_map;
mod lanes;
mod letters;
pub mod link;
mod messages;
mod names;
mod post;
mod probe;
mod queue;
pub mod rails;
mod talk;
pub mod transport;
mod vector;
pub mod wire;

pub use self::batch::{ChosenAlgorithm, HostGroup};
pub use self::engine::{MultiHost, Opened};
