//! Questions between ranks that wait for each other.
//!
//! Ranks that disagree about an operation, for example about its root, may all wait for data, and then no frame shows
//! the mismatch. So a rank that has waited `ASK_AFTER` for a frame sends its own header in a Question to the peer of
//! that frame. While a rank waits, and before it sends, it looks for Questions and compares them with its own batch. If
//! all ranks come in time, no Question is sent.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{NOBODY, Transport};
use crate::engine::multihost::frames::{FrameHeader, HEADER, Word, frame, unframe};
use crate::engine::multihost::peer::Peer;
use crate::error::{Error, Result};
use crate::os::clock;

/// A rank that has waited for a frame this long sends a Question. From then on it looks for Questions of all ranks at
/// this interval.
const ASK_AFTER: Duration = Duration::from_millis(100);

impl Transport {
    /// Waits for the next frame of `peer` that is no Question. In a long wait, sends Questions, each after twice the
    /// time of the one before.
    pub(super) fn await_frame(&mut self, peer: usize, own: &FrameHeader, deadline: u64) -> Result<Vec<u8>> {
        let mut looks = 0u32;
        loop {
            self.expect(peer)?;
            let transfer = self.peers.get_mut(&peer).and_then(Peer::next_frame).expect("posted above");
            self.waiting_for.store(peer, Ordering::Relaxed);
            while clock::now() < deadline && !transfer.ends_within(ASK_AFTER) {
                looks += 1;
                // The Question is repeated, because the peer drops one about an operation that it has not reached yet.
                if looks.is_power_of_two() {
                    self.ask(peer, own);
                }
                let others = self.questions_of_others(peer, own);
                if others.is_err() {
                    self.waiting_for.store(NOBODY, Ordering::Relaxed);
                }
                others?;
            }
            let frame = self.finish(peer, transfer, deadline)?;
            self.expect(peer)?; // one is still posted; this posts another
            if unframe(&frame).0 != Word::Question as u64 {
                return Ok(frame);
            }
            self.other_call(peer, own, &frame).map_or(Ok(()), Err)?;
            self.spare.give_back(frame);
        }
    }

    /// Removes the Questions of `peer` that are next in the queue. Returns the error, if one of them or the frame behind
    /// them contradicts this batch. Called for each send too, so that the Questions of a peer from which nothing is
    /// received do not pile up.
    pub(super) fn questions(&mut self, peer: usize, own: &FrameHeader) -> Option<Error> {
        loop {
            let frame = self.peers.get_mut(&peer)?.arrived_frame()?;
            let contradiction = self.other_call(peer, own, &frame);
            if unframe(&frame).0 != Word::Question as u64 {
                self.peers.get_mut(&peer)?.put_back(frame);
                return contradiction;
            }
            self.spare.give_back(frame);
            if contradiction.is_some() {
                return contradiction;
            }
            let _ = self.expect(peer); // the peer may have left, which matters only to a rank that still needs it
        }
    }

    /// Like `questions`, for all ranks except `peer` and this rank, including those from which this rank expects
    /// nothing.
    fn questions_of_others(&mut self, peer: usize, own: &FrameHeader) -> Result<()> {
        let (ranks, me) = (self.names.processes.len(), self.names.me);
        for other in (0..ranks).filter(|other| *other != peer && *other != me) {
            if !self.peers.contains_key(&other) {
                if !self.link.has_unread(other, self.frame_tag()) {
                    continue;
                }
                let _ = self.expect(other);
            }
            self.questions(other, own).map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// Returns the error if a frame of `peer` says that `peer` runs another operation under the same number. An earlier
    /// or a later operation is no mismatch: the data for which the peer waits may be on its way, and this rank may
    /// still reach the peer's operation. Chains are not compared, because the segments of an operation have different
    /// ones.
    fn other_call(&self, peer: usize, own: &FrameHeader, frame: &[u8]) -> Option<Error> {
        let (word, _, theirs) = unframe(frame);
        let is_call = [Word::Data as u64, Word::Question as u64].contains(&word);
        // The messages that measure the link have numbers of their own and the signature 0.
        let compares = theirs.number == own.number && theirs.signature != 0 && own.signature != 0;
        let theirs = FrameHeader { chain: own.chain, ..theirs };
        if is_call && compares { own.disagreement(self.names.me, peer, &theirs, "") } else { None }
    }

    /// Sends a Question to `peer`. If the connection is broken, the wait for the frame ends with that error.
    fn ask(&mut self, peer: usize, own: &FrameHeader) {
        let question = frame(Word::Question, own, 0).to_vec();
        let _ = self.link.send(peer, self.frame_tag(), question, HEADER); // nobody waits for its end
    }
}
