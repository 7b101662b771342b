//! # ABI simulators of accelerator libraries
//!
//! One core implements streams, events, devices and communicators. Six modules export the C functions of the vendors on
//! top of it: [`cuda`] and [`nccl`], [`acl`] and [`hccl`], [`cnrt`] and [`cncl`]. Data moves between processes over the
//! shared memory of the project's own engine, so the numbers are the engine's. Device memory is host memory.
//!
//! The functions are exported here as `sim_<vendor's name>`. `build.py` makes the libraries that the tests open. Each
//! library is a list of jumps from vendor names to this core, which all libraries share. So a library can leave out a
//! name, and two libraries can share one interface, without compiling anything twice.
//!
//! | module | |
//! | --- | --- |
//! | `settings`, `trace` | the variables that change behaviour; the trace of calls |
//! | `table`, `pointers`, `memory` | handles that can be checked, arguments from C, device memory |
//! | `device`, `stream`, `event`, `capture` | the runtime, with a thread for each stream |
//! | `bootstrap` | finds the store in which ranks meet, from the bytes of an id |
//! | `call`, `comm`, `batch` | one operation, one communicator, group calls |
//! | `connect` | the first use of a communicator |

mod acl;
mod batch;
mod bootstrap;
mod call;
mod capture;
mod cncl;
mod cnrt;
mod comm;
mod connect;
mod cuda;
mod device;
mod event;
mod extra;
mod float8;
mod hccl;
mod memory;
mod nccl;
mod pointers;
mod settings;
mod stream;
mod table;
mod trace;
