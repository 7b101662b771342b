//! The numbers of a group's operations.

use crate::types::Kind;

/// Collectives count in the group, messages per ordered pair of ranks. Used under the group's lock. Launches on devices have
/// numbers of their own (`launches`).
pub(super) struct Counters {
    /// Number of the last collective.
    collectives: u64,
    /// Messages to and receives from each rank.
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

    /// What numbers such an operation; one that names no rank, as a receive from anyone, has no number.
    fn of(&mut self, kind: Kind, root: u32) -> Option<&mut u64> {
        match kind {
            Kind::Send => self.sent.get_mut(root as usize),
            Kind::Recv => self.received.get_mut(root as usize),
            _ => Some(&mut self.collectives),
        }
    }

    /// The next number of such an operation, or 0.
    pub fn next(&mut self, kind: Kind, root: u32) -> u64 {
        self.of(kind, root).map_or(0, |counter| {
            *counter += 1;
            *counter
        })
    }

    /// Takes back a number, if it is the last one of its kind.
    pub fn take_back(&mut self, kind: Kind, root: u32, number: u64) {
        if let Some(counter) = self.of(kind, root).filter(|counter| **counter == number) {
            *counter -= 1;
        }
    }
}
