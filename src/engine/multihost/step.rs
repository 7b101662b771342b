//! What one rank sends and receives in a step of a schedule.

use std::ops::Range;

use super::frames::FrameHeader;
use crate::types::Span;

/// What a step sends to one peer: the bytes of `pieces`, in order.
pub struct Outgoing {
    pub peer: usize,
    pub pieces: Vec<Span>,
    /// Whether the memory stays unchanged until the exchange has ended. If not, it is copied before anything is
    /// received.
    pub stays: bool,
}

/// What a step receives from one peer.
pub struct Incoming {
    pub peer: usize,
    pub bytes: usize,
    /// The memory for the data. If None, the data is passed to the exchange's [`Take`].
    pub into: Option<Vec<Span>>,
}

/// Data that arrived from one peer: the whole message or a segment of it. Empty if the data went directly to its
/// memory.
pub struct Arrived<'a> {
    pub header: FrameHeader,
    /// Offset of the data in the message.
    pub at: usize,
    pub data: &'a [u8],
}

/// What an exchange calls when data has arrived.
pub enum Take<'a> {
    /// Is called with the index of a receive: for each segment in order, or once with empty data if the receive has
    /// memory.
    Each(&'a mut dyn FnMut(usize, Arrived)),
    /// Is called for each segment in order, with its offset in the messages and this segment of every receive. All
    /// receives must have the same size, and no receive may have memory (`into`).
    Together(&'a mut dyn FnMut(usize, &[&[u8]])),
}

/// Returns the segments of a message of `bytes` bytes, equal on both sides. The last one includes the remainder, so
/// that none is short.
pub fn segments(bytes: usize, segment: usize) -> impl Iterator<Item = Range<usize>> {
    let count = (bytes / segment).max(1);
    (0..count).map(move |at| at * segment..if at + 1 == count { bytes } else { (at + 1) * segment })
}
