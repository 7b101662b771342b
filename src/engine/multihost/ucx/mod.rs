//! UCX, a library that carries messages over what a machine has: InfiniBand, RoCE, shared memory, TCP. It is opened at
//! run time, and only if the user asks for it (`SAGELLM_LINK=ucx`).
//!
//! | file | |
//! | --- | --- |
//! | `api` | the functions of the library, and their types |
//! | `worker` | one worker: endpoints, messages, what has happened |
//! | `guest` | keeps the library from changing the program in which it runs: signals, messages |
//!
//! This module knows nothing of groups, ranks or frames; `wire/carried` and `wire/carrier` use it.

#![allow(unsafe_code)] // calls functions of a library, which are looked up at run time

mod api;
mod guest;
mod worker;

pub use self::guest::{Wanted, log_messages, open};
pub use self::worker::{Data, Endpoint, Event, HEAD, Held, Name, Worker};
