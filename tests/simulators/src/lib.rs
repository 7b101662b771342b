//! # ABI simulators of accelerator libraries
//!
//! One core that knows streams, events, devices and communicators, and six faces that give it the C functions of a
//! vendor: [`cuda`] and [`nccl`], [`acl`] and [`hccl`], [`cnrt`] and [`cncl`]. Data moves between processes over the
//! shared memory of the project's own engine, so the numbers are the engine's. Device memory is host memory.
//!
//! The functions are exported here as `sim_<vendor's name>`. `build.py` makes the libraries that the tests open: each
//! is a list of jumps from vendor names to this core, which all of them share, so a name can be left out and an
//! interface be cut into two libraries without compiling anything twice.
//!
//! | module | |
//! | --- | --- |
//! | `settings`, `trace` | the variables that change behaviour; who called what |
//! | `table`, `pointers`, `memory` | handles that can be checked, arguments from C, device memory |
//! | `device`, `stream`, `event`, `capture` | the runtime: a thread per stream |
//! | `bootstrap` | from the bytes of an id to the store in which ranks meet |
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
