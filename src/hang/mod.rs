//! Finds which ranks an operation waits for, and what they do. A rank asks while its operation waits, answers when
//! other ranks ask, and reports what it knows in a log line after the soft limit and in the error at the deadline. No
//! code here runs for an operation that completes before the first check of deadlines (`progress::driver`).
//!
//! A group has one [`Watch`] and implements [`Subject`], which is all that this layer knows of it. `monitor` decides
//! when to ask and when to log, and keeps what is known (it is pure); `waiting` describes an operation. A `channel`
//! carries questions and answers, through shared memory (`shm_channel`) or through the store (`store_channel`). For the
//! store, `queries` decides which rank asks and which collects, `query` is one question, and `store_keys` has the keys.
//! `report` holds what is known as data and formats it as text; this includes the `cycle` of ranks that wait for each
//! other. `answer` makes a rank's answers; `status` is one answer, and `reply` gives it in two steps.
//!
//! The groups of a process share the `responder` and its threads. One thread answers questions in shared memory
//! (`answering`), one reads each store (`store_threads`), and one finds where the program is (`places`). So if one
//! store does not respond, or native code holds the interpreter's lock, the answers of other groups are not delayed.
//! `difference` finds ranks that launched different operations on their devices.
//!
//! Lock order: a watch's lock before its group's lock. So a group holds no lock when it calls its watch.

mod answer;
mod answering;
pub mod channel;
pub mod cycle;
pub mod difference;
pub mod monitor;
pub mod places;
pub mod queries;
pub mod query;
pub mod reply;
pub mod report;
pub mod responder;
pub mod shm_channel;
pub mod status;
pub mod store_channel;
pub mod store_keys;
pub mod store_threads;
pub mod subject;
pub mod waiting;
pub mod watch;

use std::time::Duration;

pub use self::answering::{start, stop};
pub use self::subject::{Progress, Subject, Who};
pub use self::watch::Watch;

/// At most this many ranks are asked and described. For the remaining ranks only their numbers are listed.
pub const MOST: usize = 6;
/// Limits of the interval between two questions to one rank.
pub const SHORTEST: Duration = Duration::from_millis(250);
pub const LONGEST: Duration = Duration::from_secs(10);
/// All ranks are asked a last time before the deadline: this long before it, or a tenth of the timeout if that is less.
pub const LAST: Duration = Duration::from_millis(500);
/// A rank that has not answered for this long is reported as silent.
pub const SILENCE: Duration = Duration::from_secs(1);
/// Edges of the wait graph are used up to this age. Each question spreads them by one more rank.
const YOUNG: Duration = Duration::from_secs(30);
/// How long this rank, after a vendor's library has failed on a device, looks for a fault of another rank that may be
/// the cause. In shared memory the fault is published before that rank ends its communicators, so it is seen soon
/// (`FAULT_SEEN`). In the store it must first be read (`FAULT_READ`).
const FAULT_SEEN: Duration = Duration::from_millis(250);
const FAULT_READ: Duration = Duration::from_secs(1);

pub fn timed_out(after: Duration) -> String {
    format!("Timed out after {}", in_seconds(after))
}

fn in_seconds(time: Duration) -> String {
    seconds(time.as_millis() as u64)
}

fn seconds(milliseconds: u64) -> String {
    format!("{:.1} s", milliseconds as f64 / 1e3)
}
