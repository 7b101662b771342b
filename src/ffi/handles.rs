//! The core's objects that C++ holds. Their functions are in `calls`, `devices` and `simulate`.

use std::sync::{Arc, Mutex};

use crate::engine::device::{DeviceCall, DeviceEngine, Retired};
use crate::engine::multihost::wire::WireLink;
use crate::group;
use crate::group::{Group, Op};
use crate::host::Counting;
use crate::rendezvous::Rendezvous;

/// The store in which the ranks meet. Its connection lives as long as a clone of this. Later groups that use the same
/// store of the user share the connection.
pub(super) type SharedStore = Arc<dyn Counting + Send + Sync>;

/// Namespace of the functions that need no group.
pub struct Core;

/// The ranks' decisions, kept until the group is built, and the ranks' numbers in the default group.
pub struct RustRendezvous {
    pub(super) decided: Rendezvous,
    pub(super) store: SharedStore,
    pub(super) members: Vec<u32>,
    /// The link to the other ranks of a group that spans hosts; `None` until they are connected.
    pub(super) link: Mutex<Option<WireLink>>,
}

pub struct RustGroup {
    pub(super) group: Arc<Group>,
    pub(super) store: SharedStore,
}

pub struct RustOp(pub(super) Arc<Op>);
pub struct RustExternalOp(pub(super) group::ExternalOp);

pub struct RustDevices {
    pub(super) engine: Arc<DeviceEngine>,
    pub(super) store: SharedStore,
}

pub struct RustCall {
    pub(super) call: DeviceCall,
    pub(super) captured: bool,
}
pub struct RustRetired(pub(super) Retired);

/// A range of bytes that is split among torch's intra-op threads. C++ borrows it during `run_parallel`.
pub struct ParallelPart<'a>(pub(super) &'a (dyn Fn(usize) + Sync));

impl ParallelPart<'_> {
    /// Does part `number`. Never panics, because `threads` catches the panics of a part.
    pub(super) fn run(&self, number: usize) {
        (self.0)(number);
    }
}
