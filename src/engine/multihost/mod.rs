//! A group whose ranks are on several hosts. Collectives run in batches on two lanes, which use shared memory inside
//! each host and a link between the hosts. Messages between any two ranks use the link without a lane.
//!
//! `submit` queues a collective and never blocks. Each lane has a thread that takes every second batch (`fusion`) and
//! runs it (`collectives`). A lane needs a thread because it blocks while it waits for the link. The calling thread
//! must not block like this, because it has to notice signals and deadlines. Each lane has its own shared-memory group
//! inside the host and its own tags on the link, so the two lanes never match or order each other's messages.
//!
//! | file | |
//! | --- | --- |
//! | `host_map` | which rank is on which host |
//! | `probe` | how long a message takes between hosts |
//! | `engine` | the group's `Engine`: opens the link, accepts operations, leaves |
//! | `lanes` | the two threads that run batches |
//! | `queue` | the operations that have not ended, in order, and which lanes work on them |
//! | `messages` | send and receive |
//! | `matching` | which message a receive takes |
//! | `ready` | which messages have a receive that was posted before |
//! | `post`, `letters`, `talk` | the mail of a rank: its processing, its format, its state |
//! | `vector` | the elements of a batch, and how they are combined |
//! | `batch` | one batch: steps inside a host, schedules between hosts |
//! | `dispatch` | maps the requests of a batch to the collective that runs it |
//! | `collectives` | each collective: steps inside the hosts and a schedule between them |
//! | `rails` | the same for large operations, in which several ranks of a host talk to other hosts |
//! | `results` | compares the ranks' results, if the group asks for it |
//! | `transport` | the steps of a schedule as frames and data messages on the link |
//! | `frames` | the header of a frame, and the error for two that differ |
//! | `step` | what a rank sends and receives in one step |
//! | `peer` | a lane's transfers to and from one rank |
//! | `buffers` | the buffers that a lane uses again |
//! | `link` | what carries bytes between hosts, as a trait |
//! | `wire` | the link, over TCP connections or by UCX |
//! | `ucx` | UCX, a library that carries messages |
//! | `names` | how error texts name ranks, and the errors of lost ranks |

pub mod batch;
mod buffers;
mod collectives;
mod dispatch;
mod engine;
mod frames;
pub mod host_map;
mod lanes;
mod letters;
pub mod link;
mod matching;
mod messages;
mod names;
mod peer;
mod post;
mod probe;
mod queue;
pub mod rails;
mod ready;
mod results;
mod step;
mod talk;
pub mod transport;
pub mod ucx;
mod vector;
pub mod wire;

pub use self::batch::{ChosenAlgorithm, HostGroup};
pub use self::engine::{MultiHost, Opened};
