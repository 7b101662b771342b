//! Which ranks an operation waits for, and what they do: asked while it waits, answered for this rank, said in a log line after
//! the soft limit and in the error at the deadline. Nothing here runs for an operation that ends before the first look at
//! deadlines (`progress::driver`).
//!
//! A group has one [`Watch`] and is a [`Subject`], which is all that this layer knows of it. `monitor` says when to ask and when
//! to log, and keeps what is known (pure; `waiting`: an operation as facts). A `channel` carries questions and answers: through
//! shared memory (`shm_channel`) or through the store (`store_channel`; `queries`: who asks and who collects; `store_keys`: the
//! keys). `report` is what is known, as data and then as text, with the `cycle` of ranks that wait for each other. `answer` is
//! what a watch says to others (`status`: an answer; `reply`: in two steps).
//!
//! The groups of a process share the `responder` and its threads: one answers questions in shared memory (`answering`), one looks
//! into each store (`store_threads`), one reads where the program is (`places`). So a store that is silent, or an interpreter's
//! lock that is held, delays no answer in another group. `difference`: ranks that launched different operations on their devices.
//!
//! Lock order: the lock of a watch before the lock of its group, so a group holds no lock when it calls its watch.

mod answer;
mod answering;
pub mod channel;
pub mod cycle;
pub mod difference;
pub mod monitor;
pub mod places;
pub mod queries;
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

/// At most this many ranks are asked and described; further ones are listed by number.
pub const MOST: usize = 6;
/// The interval between two questions to one rank is clamped to these limits.
pub const SHORTEST: Duration = Duration::from_millis(250);
pub const LONGEST: Duration = Duration::from_secs(10);
/// All ranks are asked a last time this long before the deadline, or a tenth of the timeout if that is less.
pub const LAST: Duration = Duration::from_millis(500);
/// A rank that has not answered for this long is reported as silent.
pub const SILENCE: Duration = Duration::from_secs(1);
/// Edges of the wait graph are used up to this age. With each question they travel one rank further.
const YOUNG: Duration = Duration::from_secs(30);
/// After a failure of a device's library: how long the fault of another rank, which may be its cause, takes to be seen in
/// shared memory, where it stands before that rank ends its communicators, or to be read from the store.
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
