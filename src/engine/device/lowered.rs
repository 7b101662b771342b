//! One call of a launch: which library call runs it, and with which memory.

use std::borrow::Cow;
use std::sync::Arc;

use super::layout::Layout;
use super::lowering::Lowering;
use crate::types::{Kind, ReduceOp, Span};

/// One call of a launch.
pub struct Lowered {
    pub(super) name: Arc<str>,
    pub(super) kind: Kind,
    /// The root's rank in the communicator.
    pub(super) root: u32,
    /// The peer's rank in the program's group.
    pub(super) peer: u32,
    pub(super) tensors: u32,
    pub(super) bytes: u64,
    pub lowering: Lowering,
    pub layout: Layout,
}

/// Addresses of the temporaries that the layout of one call needs. The local steps before the call have filled them. 0
/// if the layout needs none.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Address of the factor, if the library itself has PREMUL_SUM.
    pub factor: usize,
    pub send: usize,
    pub recv: usize,
}

impl Lowered {
    /// The memory that the library sends from, and the memory that it receives into.
    pub(super) fn memory(&self, place: &Placed) -> (Cow<'_, [Span]>, Cow<'_, [Span]>) {
        (self.layout.send.at(place.send), self.layout.received(place.send, place.recv))
    }

    /// Whether the library itself scales by a factor (its PREMUL_SUM), which the launch must pass.
    pub fn is_premul(&self) -> bool {
        matches!(self.lowering.op, ReduceOp::PremulSum(_))
    }
}
