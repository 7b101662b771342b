//! UCX, a library that carries messages over what a machine has: InfiniBand, RoCE, shared memory, TCP. It is opened at
//! run time, and only if the user asks for it (`SAGELLM_LINK=ucx`).
//!
//! | file | |
//! | --- | --- |
//! | `api` | the functions of the library, and their types |
//! | `events` | what the library reports by callbacks |
//! | `worker` | one worker: endpoints and messages |
//! | `guest` | keeps the library from changing the program in which it runs: signals, messages |
//!
//! This module knows nothing of groups, ranks or frames; `wire/carrier` and the files below it use it.

#![allow(unsafe_code)] // calls functions of a library, which are looked up at run time

mod api;
mod events;
mod guest;
mod worker;

pub use self::events::{Data, Event, HEAD, What};
pub use self::guest::{Wanted, log_messages, open};
pub use self::worker::{Endpoint, Worker};
