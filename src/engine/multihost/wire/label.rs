//! The header of a message by which UCX carries a frame: whose frame it is, its number, and the frame's own header.

use super::frame::{Frame, HEAD as FRAME_HEAD};
use crate::engine::multihost::ucx::HEAD;

/// Stands in place of a frame's number if the message has no frame. Such a message tells the receiver that the sender's
/// endpoint is connected to the receiver.
const NO_FRAME: u64 = u64::MAX;

/// Returns the header of a message with the frame of this number. `who` is the receiver's number for the connection.
pub fn of_frame(who: u64, number: u64, frame: &[u8; FRAME_HEAD]) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&who.to_le_bytes());
    head[8..16].copy_from_slice(&number.to_le_bytes());
    head[16..].copy_from_slice(frame);
    head
}

/// Returns the header of a message without a frame.
pub fn of_none(who: u64) -> [u8; HEAD] {
    of_frame(who, NO_FRAME, &[0; FRAME_HEAD])
}

/// This process's number for the connection.
pub fn who(head: &[u8; HEAD]) -> u64 {
    u64::from_le_bytes(head[..8].try_into().expect("eight bytes"))
}

/// Returns the frame's number. None if the message has no frame.
pub fn number(head: &[u8; HEAD]) -> Option<u64> {
    let number = u64::from_le_bytes(head[8..16].try_into().expect("eight bytes"));
    (number != NO_FRAME).then_some(number)
}

/// Returns the frame. None if the peer does not speak this protocol.
pub fn frame(head: &[u8; HEAD]) -> Option<Frame> {
    Frame::read(head.last_chunk().expect("the frame's header"))
}
