//! One call of a launch: how the library is called for it, and with which memory.

use std::borrow::Cow;

use super::layout::Layout;
use super::lowering::Lowering;
use crate::types::{Kind, ReduceOp, Span};

/// One call of a launch.
pub struct Lowered {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// In the communicator.
    pub(super) root: u32,
    /// As the program's group counts ranks.
    pub(super) peer: u32,
    pub(super) tensors: u32,
    pub(super) bytes: u64,
    pub lowering: Lowering,
    pub layout: Layout,
}

/// Addresses of the temporaries that the layout of one call asks for, once the local steps before the call have filled
/// them; 0 where it asks for none.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Address of the factor, where the library itself has PREMUL_SUM.
    pub factor: usize,
    pub send: usize,
    pub recv: usize,
}

impl Lowered {
    /// Where the library sends from and receives to.
    pub(super) fn memory(&self, place: &Placed) -> (Cow<'_, [Span]>, Cow<'_, [Span]>) {
        (self.layout.send.at(place.send), self.layout.received(place.send, place.recv))
    }

    /// The library itself scales by a factor (its PREMUL_SUM), which the launch must pass.
    pub fn is_premul(&self) -> bool {
        matches!(self.lowering.op, ReduceOp::PremulSum(_))
    }
}
