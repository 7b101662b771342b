//! What the launches on devices sign. A vendor's library compares nothing: where two ranks call different operations as one
//! number it hangs, or gives numbers that mean nothing. So each rank publishes what its last launches signed (`Signed`), in the
//! memory that the ranks share, or in its answers over the store; and the thread that watches a launch compares it with what
//! the others have signed for its number.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::engine::device::Agreed;
use crate::engine::{Control, LAUNCHES_KEPT, Signed};
use crate::hang::difference::{Difference, Launch};
use crate::op;

/// Of this rank in one group.
pub(super) struct Launches {
    rank: usize,
    ranks: usize,
    /// The group's.
    name: String,
    control: Arc<dyn Control>,
    /// How many there were; they have numbers of their own. Written under `signed`, read without it (relaxed: nothing else is
    /// read by it).
    number: AtomicU64,
    /// What the last of them signed, the newest last. Its lock is held while one takes its number, so that the numbers are
    /// published in their order.
    signed: Mutex<VecDeque<Launch>>,
}

impl Launches {
    pub fn new((rank, ranks): (usize, usize), name: String, control: Arc<dyn Control>) -> Launches {
        Launches { rank, ranks, name, control, number: AtomicU64::new(0), signed: Mutex::default() }
    }

    /// The number of the last one.
    pub fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }

    /// Takes the next number of a launch, and publishes what it signs.
    pub fn sign(&self, signed: Signed) -> u64 {
        let mut kept = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.number.fetch_add(1, Ordering::Relaxed) + 1;
        if kept.len() as u64 == LAUNCHES_KEPT {
            kept.pop_front();
        }
        kept.push_back((number, signed));
        self.control.set_launched(number, signed);
        number
    }

    /// The last launches of this rank.
    pub fn own(&self) -> VecDeque<Launch> {
        self.signed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What this rank signed for the numbers of a launch, as far as that is kept.
    fn of(&self, first: u64, last: u64) -> ([Launch; LAUNCHES_KEPT as usize], usize) {
        let (mut found, mut count) = ([Launch::default(); LAUNCHES_KEPT as usize], 0);
        let kept = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        for (place, launch) in found.iter_mut().zip(kept.iter().filter(|(number, _)| (first..=last).contains(number))) {
            *place = *launch;
            count += 1;
        }
        (found, count)
    }

    /// Compares launches of this rank with those of the ranks on its host.
    pub fn compare(&self, first: u64, last: u64) -> Agreed {
        if self.control.inquiry().is_none() {
            return Agreed::WithAll; // nothing of theirs is seen here
        }
        let (own, count) = self.of(first, last);
        let me = self.rank;
        let mut agreed = Agreed::WithAll;
        for rank in (0..self.ranks).filter(|rank| *rank != me) {
            if self.control.launched(rank).is_none_or(|(number, _)| number < last) {
                agreed = Agreed::SoFar;
            }
            for (number, signed) in &own[..count] {
                if let Some(other) = self.control.signed(rank, *number).filter(|other| other != signed) {
                    let signed = [*signed, other];
                    let difference = Difference { number: *number, ranks: [me, rank], signed };
                    return Agreed::Not(difference.error(&self.name));
                }
            }
        }
        agreed
    }

    /// What a rank of this host has called as a number instead of what this rank called, where they differ.
    pub fn called_instead(&self, rank: usize, number: u64) -> Option<String> {
        let (own, count) = self.of(number, number);
        let (_, signed) = own[..count].first()?;
        let other = self.control.signed(rank, number).filter(|other| other != signed)?;
        Some(format!("has issued {} as number {number} instead", op::describe(other.signature)))
    }
}
