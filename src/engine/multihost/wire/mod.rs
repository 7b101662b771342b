//! The connections from this process to the processes of its groups on other hosts. There is one connection to each
//! process, which all groups share. TCP carries it or, if the user asks for it, UCX.
//!
//! A group has a *channel* (`channel.rs`), whose frames carry the channel's number. A thread that waits for a message
//! drives the wire: it reads from all connections, for all groups, while other waiting threads sleep. If no thread
//! waits and something is pending, the wire's background thread drives. So if a thread waits for a message, no switch
//! to another thread is needed.
//!
//! | file | |
//! | --- | --- |
//! | `frame` | the header of a frame |
//! | `memory` | the memory from which data is sent and into which it is received |
//! | `transfer` | the end of a transfer: its result, its callback |
//! | `process` | all connections of this process; a pass reads and writes those that are ready |
//! | `driving`, `bell` | which thread makes the passes |
//! | `connection` | the connection to one process |
//! | `single` | a connection that is one TCP connection: writes frames, reads them |
//! | `receiver` | who handles the frames that were read |
//! | `descriptor` | the descriptor of a socket |
//! | `channels` | the channels of all groups |
//! | `channel` | one group: its messages, mail and bodies |
//! | `peer` | the messages and bodies in flight between a rank of a group and one peer |
//! | `link` | a group's channel as its engine holds it; implements `Link` and `Mail` |
//! | `lane` | the transfers of a lane |
//! | `several` | a connection that consists of several TCP connections, the paths |
//! | `path` | one of these TCP connections |
//! | `segment` | the parts of the stream of frames that paths carry |
//! | `stripes` | the sending side: which segment is sent on which path, and sent again |
//! | `trust` | the sending side: which path is suspected to be dead |
//! | `assembly` | the receiving side: puts the segments together |
//! | `parser` | the receiving side: handles the frames |
//! | `over` | what carries the frames of a wire: TCP or UCX |
//! | `carrier` | the worker of UCX, and its events |
//! | `carried` | a connection whose frames UCX carries |
//! | `departures` | its sending side: the endpoint, and the frames in flight |
//! | `arrivals` | its receiving side: the peer's frames in order |
//! | `expected` | the bodies whose receives were posted and that have not arrived |
//! | `label` | the header of a message by which UCX carries a frame |
//! | `watched` | what these connections share |
//! | `meet` | makes a group's channel |
//! | `doors` | listens, and reads who connects |
//! | `calls` | connects to the processes of a group |
//! | `sockets` | system calls |
//!
//! Lock order within one thread: the driver's, `connections`, `closing`, a connection's reading side, `doors`,
//! `channels`, `early`, a channel's state, a connection's writing side. Threads only try the driver's lock and never
//! block on it. While a callback outside this module runs, none of these locks is held except the driver's.

mod arrivals;
mod assembly;
mod bell;
mod calls;
mod carried;
mod carrier;
mod channel;
mod channels;
mod connection;
mod departures;
mod descriptor;
mod doors;
mod driving;
mod expected;
mod frame;
mod label;
mod lane;
mod link;
mod meet;
mod memory;
mod over;
mod parser;
mod path;
mod peer;
mod process;
mod receiver;
mod segment;
mod several;
mod single;
mod sockets;
mod stripes;
mod transfer;
mod trust;
mod watched;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use self::link::WireLink;
pub use self::meet::{Place, join, key};
pub use self::over::Over;
pub use self::process::Wire;

/// Random number that identifies a process. Only processes that can read the store of one of its groups know it.
pub type ProcessId = u128;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
