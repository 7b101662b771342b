//! Assigns the sequence numbers of a group's operations.

use crate::types::Kind;

/// Collectives are counted in the group, and messages for each ordered pair of ranks. Protected by the group's lock.
/// Launches on devices are numbered separately (`launches`).
pub(super) struct Counters {
    /// Number of the last collective.
    collectives: u64,
    /// Number of messages sent to each rank, and received from each rank.
    sent: Vec<u64>,
    received: Vec<u64>,
}

impl Counters {
    pub fn new(ranks: usize) -> Counters {
        Counters { collectives: 0, sent: vec![0; ranks], received: vec![0; ranks] }
    }

    pub fn collectives(&self) -> u64 {
        self.collectives
    }

    /// The counter for an operation of this kind. A receive from any rank names no rank, so it has no counter.
    fn of(&mut self, kind: Kind, root: u32) -> Option<&mut u64> {
        match kind {
            Kind::Send => self.sent.get_mut(root as usize),
            Kind::Recv => self.received.get_mut(root as usize),
            _ => Some(&mut self.collectives),
        }
    }

    /// The next number for an operation of this kind; 0 if it has no counter.
    pub fn next(&mut self, kind: Kind, root: u32) -> u64 {
        self.of(kind, root).map_or(0, |counter| {
            *counter += 1;
            *counter
        })
    }

    /// Makes a number available again, if it is the last number that its counter gave out.
    pub fn take_back(&mut self, kind: Kind, root: u32, number: u64) {
        if let Some(counter) = self.of(kind, root).filter(|counter| **counter == number) {
            *counter -= 1;
        }
    }
}
