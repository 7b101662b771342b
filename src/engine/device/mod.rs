//! Uses accelerators through their vendors' libraries. This module loads each library with dlopen at run time, so the
//! build needs no vendor header and links no vendor library.
//!
//! ```no_run
//! use sagellm::engine::device::{LoweringInput, always, Hints, Job, Setup, Vendor, launch, lower, open, open_runtime};
//! # use sagellm::types::{Dtype, Kind, ReduceOp, Span};
//! # fn main() -> sagellm::error::Result<()> {
//! # let (rank, ranks, address, minute) = (0, 1, 0x7000_0000, std::time::Duration::from_secs(60));
//! let vendor = Vendor::of_device("cuda").expect("torch's name of a device type");
//! let runtime = open_runtime(vendor, &Hints::default())?; // streams and events
//! let api = open(vendor, &Hints::default())?; //             communicators
//! runtime.set_device(0)?; // the device is selected per thread
//! let id = api.unique_id()?; // on rank 0; the other ranks get these bytes through the group's store
//! let setup = Setup {
//!     id,
//!     rank,
//!     ranks,
//!     device: 0,
//!     deadline: minute,
//!     go_on: std::sync::Arc::new(always), // or a function that looks for signals
//!     name: "sagellm:default".into(),
//!     algorithm: String::new(),
//!     runtime: runtime.clone(),
//! };
//! let communicator = api.clone().create(setup)?; // returns when all ranks have called it
//! // What torch asks for, and how this library carries it out; the error says why the library cannot:
//! let asked = LoweringInput { kind: Kind::AllReduce, dtype: Dtype::F32, op: ReduceOp::Avg, ranks: ranks as usize, equal_counts: true, dense: true };
//! let lowering = lower(&asked, api.capabilities()).map_err(sagellm::error::Error::invalid)?;
//! // The caller runs `lowering.before` and `lowering.after` in torch; here they are empty.
//! let memory = [Span { addr: address, bytes: 4096 }];
//! let stream = runtime.stream_create()?; // or the raw handle of a torch stream, as a number
//! let job = Job { factor: 0, lowering: &lowering, rank, ranks, root: 0, send: &memory, recv: &memory };
//! let launched = launch(&*communicator, &*runtime, &job, stream)?; // does not wait for the device
//! communicator.poll()?; // asynchronous errors; when a deadline passes: `communicator.abort()`
//! while !runtime.stream_idle(stream)? {}
//! drop(launched); // not earlier: the device may still read this memory
//! communicator.close(minute)
//! # }
//! ```
//!
//! | file | |
//! | --- | --- |
//! | `communicator`, `runtime` | the interface that every vendor's library implements |
//! | `lowering` | pure: what a library lacks, how it is composed from other calls, or why it is refused |
//! | `launch` | pure except for its last step: turns a lowered operation into calls |
//! | `layout` | pure: which memory is passed to the library, and which temporaries that needs |
//! | `group` | the interface between the engine and its group |
//! | `engine`, `begin`, `call`, `parts`, `lowered` | a group's devices of one type, and its calls on them |
//! | `communicators`, `making`, `pairs` | cache of communicators; how one is made; in which order ranks make pairs |
//! | `lifetime` | how communicators are split, shrunk and ended |
//! | `pool` | streams and events, which the groups of a process use one after the other |
//! | `first_use` | which ranks of a communicator are connected, and the launches that wait for other ranks |
//! | `rules` | pure: how a group's rules and decision table are passed to a library |
//! | `watchdog` | whether a call will complete |
//! | `libs/common` | what the communicators of all libraries share |
//! | `libs/nccl`, `hccl`, `cncl` | each library: `declarations` (NCCL's are the crate `nccl-sys`), `communicator`, `runtime` (streams and events) |
//! | `libs/nccl/tuner`, `profiler` | NCCL's plugins: the tuner, which NCCL asks for an algorithm, and the profiler, to which NCCL reports the algorithm that ran |
//!
//! `CONTRIBUTING.md` says how to add a vendor.

mod begin;
mod call;
pub mod communicator;
mod communicators;
mod engine;
mod first_use;
mod group;
mod launch;
mod layout;
pub mod libs;
mod lifetime;
mod lowered;
pub mod lowering;
mod making;
pub mod pairs;
mod parts;
mod pool;
mod rules;
mod runtime;
mod watchdog;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use self::call::{Carried, DeviceCall};
pub use self::communicator::{Api, Call, Communicator, GoOn, Message, Setup, Split, always};
pub use self::communicators::{Exchange, Ranks};
pub use self::engine::DeviceEngine;
pub use self::group::{Agreed, Counted, DeviceGroup, DeviceRequest, Terms, Watched};
pub use self::launch::{Job, Launched, calls, launch};
pub use self::layout::{Buffers, Layout};
pub use self::lifetime::Retired;
pub use self::lowered::{Lowered, Placed};
pub use self::lowering::{Capabilities, Local, Lowering, LoweringInput, Method, lower};
pub use self::runtime::{Event, Runtime, SPARES_CAPTURES, Stream};
pub use self::watchdog::Found;
pub use crate::engine::loader::Hints;

use crate::error::{Error, Result};
use crate::types::enumeration;

/// Locks the mutex even if a thread panicked while holding it, because no statement leaves a protected value half
/// written.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

enumeration! {
    /// The libraries this engine knows, in the order of `ROWS`.
    Vendor {
        Nccl = 0, "nccl";
        Hccl = 1, "hccl";
        Cncl = 2, "cncl";
    }
}

struct Row {
    vendor: Vendor,
    /// torch's name of the device type.
    device: &'static str,
    open: fn(&Hints) -> Result<Arc<dyn Api>>,
    open_runtime: fn(&Hints) -> Result<Arc<dyn Runtime>>,
    capabilities: fn() -> Capabilities,
    /// The functions that are looked up in the library for communicators (`symbols`) and in the library for streams and
    /// events (`runtime_symbols`).
    symbols: &'static [&'static str],
    runtime_symbols: &'static [&'static str],
}

const ROWS: [Row; Vendor::ALL.len()] = [
    Row {
        vendor: Vendor::Nccl,
        device: "cuda",
        open: self::libs::nccl::communicator::Nccl::open,
        open_runtime: self::libs::nccl::runtime::Cuda::open,
        capabilities: self::libs::nccl::communicator::capabilities,
        symbols: nccl_sys::Table::NAMES,
        runtime_symbols: self::libs::nccl::runtime::Table::NAMES,
    },
    Row {
        vendor: Vendor::Hccl,
        device: "npu",
        open: self::libs::hccl::communicator::Hccl::open,
        open_runtime: self::libs::hccl::runtime::Acl::open,
        capabilities: self::libs::hccl::communicator::capabilities,
        symbols: self::libs::hccl::declarations::Table::NAMES,
        runtime_symbols: self::libs::hccl::runtime::Table::NAMES,
    },
    Row {
        vendor: Vendor::Cncl,
        device: "mlu",
        open: self::libs::cncl::communicator::Cncl::open,
        open_runtime: self::libs::cncl::runtime::Cnrt::open,
        capabilities: self::libs::cncl::communicator::capabilities,
        symbols: self::libs::cncl::declarations::Table::NAMES,
        runtime_symbols: self::libs::cncl::runtime::Table::NAMES,
    },
];

impl Vendor {
    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    pub fn device(self) -> &'static str {
        self.row().device
    }

    pub fn from_name(name: &str) -> Option<Vendor> {
        Vendor::ALL.into_iter().find(|vendor| vendor.name() == name)
    }

    /// Checks the option vendor. Valid values are "auto", "host", and a vendor's name, optionally followed by ":" and
    /// the path of its library.
    pub fn check_option(option: &str) -> Result<()> {
        let (name, file) = option.split_once(':').map_or((option, None), |(name, file)| (name, Some(file)));
        let is_vendor = Vendor::from_name(name).is_some();
        if is_vendor || file.is_none() && ["auto", "host"].contains(&name) {
            return Ok(());
        }
        let names = Vendor::ALL.map(Vendor::name);
        Err(Error::invalid(format!(
            "sagellm: the option vendor is {option:?}, expected auto, host or one of {}, or one of these with the file of its \
             library (\"{}:/path/to/the/library.so\")",
            names.join(", "),
            names[0]
        )))
    }

    /// The vendor for torch's name of a device type.
    pub fn of_device(device: &str) -> Option<Vendor> {
        ROWS.iter().find(|row| row.device == device).map(|row| row.vendor)
    }

    /// The capabilities of a current version of the library. `Api::capabilities` returns those of the library that was
    /// opened.
    pub fn capabilities(self) -> Capabilities {
        (self.row().capabilities)()
    }

    /// The functions that are looked up: first those in the library for communicators, then those in the library for
    /// streams and events.
    pub fn symbols(self) -> [&'static [&'static str]; 2] {
        [self.row().symbols, self.row().runtime_symbols]
    }
}

/// Opens the library for communicators. The error says what was tried and what to do. If the library is already open,
/// this is cheap.
pub fn open(vendor: Vendor, hints: &Hints) -> Result<Arc<dyn Api>> {
    (vendor.row().open)(hints)
}

/// Opens the library for streams and events.
pub fn open_runtime(vendor: Vendor, hints: &Hints) -> Result<Arc<dyn Runtime>> {
    (vendor.row().open_runtime)(hints)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vendor_has_its_row() {
        for vendor in Vendor::ALL {
            assert_eq!(vendor.row().vendor, vendor);
            assert_eq!(Vendor::from_name(vendor.name()), Some(vendor));
            assert_eq!(Vendor::of_device(vendor.device()), Some(vendor));
        }
        assert_eq!(Vendor::of_device("cpu"), None);
        assert_eq!(Vendor::ALL.map(|vendor| vendor.capabilities().id_bytes), [128, 4108, 136]);
    }

    #[test]
    fn the_option_names_a_vendor_or_none() {
        for good in ["auto", "host", "nccl", "hccl", "cncl:/opt/libcncl.so", "nccl:"] {
            assert_eq!(Vendor::check_option(good), Ok(()), "{good}");
        }
        for bad in ["", "rccl", "auto:/opt/libnccl.so", "host:", "nccl /opt/libnccl.so", "NCCL"] {
            let text = Vendor::check_option(bad).unwrap_err().to_string();
            assert!(text.contains(bad) && text.contains("auto, host or one of nccl, hccl, cncl"), "{text}");
        }
    }
}
