//! One call of a launch, with the library call that runs it and the memory that is passed.

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

/// Addresses of the temporaries that the layout of one call needs; 0 if it needs none. The local steps before the call
/// have filled them.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Address of the factor, if the library itself has PREMUL_SUM.
    pub factor: usize,
    pub send: usize,
    pub recv: usize,
}

impl Lowered {
    /// The memory from which the library sends, and the memory into which it receives.
    pub(super) fn memory(&self, place: &Placed) -> (Cow<'_, [Span]>, Cow<'_, [Span]>) {
        (self.layout.send.at(place.send), self.layout.received(place.send, place.recv))
    }

    /// Whether the library itself scales by a factor (its PREMUL_SUM). If so, the launch must pass the factor.
    pub fn is_premul(&self) -> bool {
        matches!(self.lowering.op, ReduceOp::PremulSum(_))
    }
}
