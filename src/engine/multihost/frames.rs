//! The frames of a lane: the header (the frame's batch, and what the sender has issued), its encoding, and the error
//! for two headers that differ. Some frames only say that the sender's group has failed, that the sender has left the
//! group, or that the sender still waits.

use std::time::{Duration, Instant};

use super::link::Link;
use super::names::Names;
use crate::error::{Error, SAME_CALLS, laid_out};
use crate::op::lists;
use crate::op::signature;
use crate::op::words::{Called, MOVED, different};
use crate::select::inter::SHORT_BYTES;

/// Longest frame.
pub const FRAME: usize = 16 << 10;
/// Size of a frame's header in bytes.
pub const HEADER: usize = 8 + FrameHeader::BYTES;
/// The largest amount of data that fits into a frame.
pub const INLINE: usize = FRAME - HEADER;
const _: () = assert!(INLINE == SHORT_BYTES);
/// A line of the error text for two ranks that run the same operation, but not the same batch.
pub const DIFFERED_BEFORE: &str = "what was agreed before it differs";

/// The header of every frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameHeader {
    /// Signature of the batch's first operation. `lists` is the hash of its list (`Op::lists`).
    pub signature: u64,
    pub lists: u64,
    /// Hash of all batches so far, including this one.
    pub chain: u64,
    /// Number of the batch's first operation.
    pub number: u64,
    /// Operations up to this number are issued and may be fused (`State::promised`). The minimum of the sender's own
    /// number and the numbers that the sender has received in this batch.
    pub issued: u64,
    /// The sender's factor of PREMUL_SUM. In other operations a word of `results` (0 if there is none), or the bits of
    /// 1.0 if results are not compared.
    pub factor: u64,
    /// The sender's last operation before the batch. Not sent: only for this rank's error texts.
    pub before: Step,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Word {
    Data = 1,
    /// The sender's group failed; the encoded fault follows.
    Fault = 2,
    /// The sender has left the group in order.
    Bye = 3,
    /// The sender has waited for some time for a frame from the receiver. The header is that of the sender's batch.
    Question = 4,
}

/// Identifies the first operation of a batch by its signature and number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step(pub u64, pub u64);

impl Step {
    /// Describes what a rank in this operation does, for error texts.
    pub fn during(self) -> String {
        match self {
            Step(0, _) => "meets the other hosts".to_string(), // the messages that measure the link
            Step(signature, number) => format!("is in {} number {number}", signature::describe(signature)),
        }
    }
}

impl FrameHeader {
    pub const BYTES: usize = 48;

    pub fn write(&self) -> [u8; FrameHeader::BYTES] {
        let FrameHeader { signature, lists, chain, number, issued, factor, before: _ } = *self;
        let mut out = [0; FrameHeader::BYTES];
        for (at, word) in out.chunks_exact_mut(8).zip([signature, chain, number, issued, factor, lists]) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    pub fn read(bytes: &[u8; FrameHeader::BYTES]) -> FrameHeader {
        let word = |at: usize| u64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().expect("eight bytes"));
        let [signature, chain, number, issued, factor, lists] = std::array::from_fn(word);
        FrameHeader { signature, lists, chain, number, issued, factor, before: Step::default() }
    }

    pub fn step(&self) -> Step {
        Step(self.signature, self.number)
    }

    /// Describes what the sending rank was doing, for error texts.
    pub fn during(&self) -> String {
        self.step().during()
    }

    /// Returns the call of the rank that sent this header.
    pub fn called_by(&self, rank: usize) -> Called {
        Called { rank, signature: self.signature, number: self.number }
    }

    /// Returns the error for two ranks that agree about the first operation of a batch, but not about the rest of it.
    pub fn differs_in_part(&self, me: usize, peer: usize, came: String) -> Error {
        let (call, number) = (signature::describe(self.signature), self.number);
        let head = format!(
            "rank {me} and rank {peer} agree about {call} number {number} of their group, but not about all of it"
        );
        let what =
            "its list of sizes, an operation before it, one that travels with it, or the options of the group differ";
        let before = match self.before {
            Step(0, _) => String::new(),
            Step(signature, number) => {
                format!("before it rank {me} called {} number {number}", signature::describe(signature))
            }
        };
        Error::mismatch(laid_out(&head, &[what.to_string(), came, before, MOVED.to_string()], SAME_CALLS))
    }

    /// Returns the error if two ranks passed different lists of tensors to the first operation of the batch. None if
    /// the lists agree.
    fn other_list(&self, me: usize, peer: usize, theirs: u64) -> Option<Error> {
        let differ = theirs != self.lists && (lists::is_of_tensors(theirs) || lists::is_of_tensors(self.lists));
        let call = || signature::describe(self.signature);
        differ.then(|| lists::differ(&call(), self.number, (me, self.lists), (peer, theirs), (None, MOVED)))
    }

    /// Returns the error if `peer` does not run the batch of `self`, which is this rank's header. If the ranks agree
    /// about the first operation only, the text has the line `came`.
    pub fn disagreement(&self, me: usize, peer: usize, theirs: &FrameHeader, came: &str) -> Option<Error> {
        if theirs.signature != self.signature || theirs.number != self.number {
            return Some(different(self.called_by(me), theirs.called_by(peer), MOVED));
        }
        let in_part = || self.differs_in_part(me, peer, came.to_string());
        self.other_list(me, peer, theirs.lists).or_else(|| (theirs.chain != self.chain).then(in_part))
    }

    /// Returns the tag of a data message of this batch. Bit 30 marks a data message. Bits 28 and 29 are the lane, bits
    /// 26 and 27 distinguish consecutive messages, and the rest is a hash of the batch and of the message's size.
    pub fn data_tag(&self, lane: u32, bytes: usize, count: u32) -> u32 {
        let mixed = (self.chain ^ bytes as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        1 << 30 | lane << 28 | (count & 3) << 26 | (mixed >> 38) as u32
    }
}

/// Returns the header of a frame that has `bytes` bytes of data.
pub fn frame(word: Word, header: &FrameHeader, bytes: usize) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    out[..8].copy_from_slice(&((word as u64) << 56 | bytes as u64).to_le_bytes());
    out[8..].copy_from_slice(&header.write());
    out
}

/// Returns the word of a frame, the size of its data, and its header.
pub fn unframe(frame: &[u8]) -> (u64, usize, FrameHeader) {
    let (first, rest) = frame.split_first_chunk().expect("eight bytes");
    let header = FrameHeader::read(rest.first_chunk().expect("a header"));
    let first = u64::from_le_bytes(*first);
    (first >> 56, (first & ((1 << 56) - 1)) as usize, header)
}

/// Returns the error for a Fault or Bye frame of `peer`. None for any other frame. `own`: the header of this rank's
/// batch.
pub fn refusal(names: &Names, peer: usize, own: &FrameHeader, frame: &[u8]) -> Option<Error> {
    let (word, length, _) = unframe(frame);
    if word == Word::Fault as u64 {
        return Some(told(frame, length));
    }
    (word == Word::Bye as u64).then(|| names.left(peer, &own.during()))
}

/// Returns the fault that a peer sent, as this rank's error.
fn told(frame: &[u8], length: usize) -> Error {
    let fault = Error::decode(&frame[HEADER..HEADER + length.min(INLINE)]);
    fault.map_or_else(|| Error::aborted("sagellm: the group failed on another host"), Error::as_told)
}

/// Sends this rank's fault to `peers` on all lanes. Takes a short time; delivery is not guaranteed, because a lane may
/// be in the middle of a message or the peer may be gone.
pub fn tell_fault(link: &dyn Link, lanes: usize, peers: &[usize], error: &Error) {
    let text = error.encode(INLINE);
    let mut telling = Vec::new();
    for lane in 0..lanes as u32 {
        for peer in peers {
            let mut buffer = frame(Word::Fault, &FrameHeader::default(), text.len()).to_vec();
            buffer.extend(&text);
            let bytes = buffer.len();
            telling.extend(link.send(*peer, lane, buffer, bytes));
        }
    }
    // A message that the system does not accept in this time is lost.
    let until = Instant::now() + Duration::from_millis(20);
    for transfer in telling {
        let _ = transfer.wait(until.saturating_duration_since(Instant::now()));
    }
}
