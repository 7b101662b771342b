//! What the launches on devices sign. A vendor's library compares nothing: where two ranks call different operations as one
//! number it hangs, or gives numbers that mean nothing. So each rank publishes what its last launches signed (`Signed`), in the
//! memory that the ranks share, or in its answers over the store; and the thread that watches a launch compares it with what
//! the others have signed for its number.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::Group;
use crate::engine::device::Agreed;
use crate::engine::{LAUNCHES_KEPT, Signed};
use crate::hang::difference::{Difference, Launch};
use crate::op;

impl Group {
    /// Takes the next number of a launch, and publishes what it signs.
    pub(super) fn sign_launch(&self, signed: Signed) -> u64 {
        let mut kept = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.device_number.fetch_add(1, Ordering::Relaxed) + 1;
        if kept.len() as u64 == LAUNCHES_KEPT {
            kept.pop_front();
        }
        kept.push_back((number, signed));
        self.control.set_launched(number, signed);
        number
    }

    /// The last launches of this rank.
    pub(super) fn own_launches(&self) -> VecDeque<Launch> {
        self.signed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What this rank signed for the numbers of a launch, as far as that is kept.
    fn launches_of(&self, first: u64, last: u64) -> ([Launch; LAUNCHES_KEPT as usize], usize) {
        let (mut found, mut count) = ([Launch::default(); LAUNCHES_KEPT as usize], 0);
        let kept = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        for (place, launch) in found.iter_mut().zip(kept.iter().filter(|(number, _)| (first..=last).contains(number))) {
            *place = *launch;
            count += 1;
        }
        (found, count)
    }

    /// Compares launches of this rank with those of the ranks on its host.
    pub(super) fn compare_launches(&self, first: u64, last: u64) -> Agreed {
        if self.control.inquiry().is_none() {
            return Agreed::WithAll; // nothing of theirs is seen here
        }
        let (own, count) = self.launches_of(first, last);
        let me = self.config.rank;
        let mut agreed = Agreed::WithAll;
        for rank in (0..self.config.size).filter(|rank| *rank != me) {
            if self.control.launched(rank).is_none_or(|(number, _)| number < last) {
                agreed = Agreed::SoFar;
            }
            for (number, signed) in &own[..count] {
                if let Some(other) = self.control.signed(rank, *number).filter(|other| other != signed) {
                    let signed = [*signed, other];
                    let difference = Difference { number: *number, ranks: [me, rank], signed };
                    return Agreed::Not(difference.error(&self.config.name));
                }
            }
        }
        agreed
    }

    /// What a rank of this host has called as a number instead of what this rank called, where they differ.
    pub(super) fn called_instead(&self, rank: usize, number: u64) -> Option<String> {
        let (own, count) = self.launches_of(number, number);
        let (_, signed) = own[..count].first()?;
        let other = self.control.signed(rank, number).filter(|other| other != signed)?;
        Some(format!("has issued {} as number {number} instead", op::describe(other.signature)))
    }
}
