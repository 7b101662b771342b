//! The signatures of launches on devices. A vendor's library does not compare calls: if two ranks call different
//! operations under one number, it hangs or returns garbage. So each rank publishes the signatures (`Signed`) of its
//! last launches, in the memory that the ranks share or in its answers over the store. The thread that watches a launch
//! compares this rank's signature with the other ranks' signatures for the same number. The sizes of an all_to_all
//! differ between ranks, so each rank signs its share of a sum that must be 0 over all ranks (`BlockSizes::share`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::engine::device::Agreed;
use crate::engine::{BlockSizes, Blockers, Control, LAUNCHES_KEPT, LastCall, PeerProgress, Signed};
use crate::error::Error;
use crate::hang::MOST;
use crate::hang::difference::{Difference, Launch, Misfit, misfit_error};
use crate::hang::waiting::Waiting;
use crate::op::signature;
use crate::types::Kind;

/// The launches of this rank in one group.
pub(super) struct Launches {
    rank: usize,
    ranks: usize,
    /// The group's name.
    name: String,
    control: Arc<dyn Control>,
    /// Number of launches so far. Launches are numbered separately from other operations. Written under the lock of
    /// `signed`, read without it. Relaxed, because it guards no other data.
    number: AtomicU64,
    /// Signatures of the last launches, the newest last. The lock is held while a launch takes its number, so that
    /// numbers are published in order.
    signed: Mutex<VecDeque<Launch>>,
}

impl Launches {
    pub fn new((rank, ranks): (usize, usize), name: String, control: Arc<dyn Control>) -> Launches {
        Launches { rank, ranks, name, control, number: AtomicU64::new(0), signed: Mutex::default() }
    }

    /// Number of the last launch.
    pub fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }

    /// Takes the next number of a launch, and publishes its signature.
    pub fn sign(&self, signed: Signed, sizes: Option<&BlockSizes<'_>>) -> u64 {
        let mut kept = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.number.fetch_add(1, Ordering::Relaxed) + 1;
        if kept.len() as u64 == LAUNCHES_KEPT {
            kept.pop_front();
        }
        kept.push_back((number, signed));
        self.control.set_launched(number, signed, sizes);
        number
    }

    /// The last launches of this rank, with their signatures.
    pub fn own(&self) -> VecDeque<Launch> {
        self.signed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// This rank's signatures for the numbers `first` to `last`, as far as they are kept, and their count.
    fn of(&self, first: u64, last: u64) -> ([Launch; LAUNCHES_KEPT as usize], usize) {
        let (mut found, mut count) = ([Launch::default(); LAUNCHES_KEPT as usize], 0);
        let kept = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        for (place, launch) in found.iter_mut().zip(kept.iter().filter(|(number, _)| (first..=last).contains(number))) {
            *place = *launch;
            count += 1;
        }
        (found, count)
    }

    /// Compares signatures of this rank with those of the ranks on its host.
    pub fn compare(&self, first: u64, last: u64) -> Agreed {
        if self.control.inquiry().is_none() {
            return Agreed::WithAll; // the signatures of other ranks cannot be seen here
        }
        let (own, count) = self.of(first, last);
        let me = self.rank;
        let mut agreed = Agreed::WithAll;
        for rank in (0..self.ranks).filter(|rank| *rank != me) {
            if self.control.launched(rank).is_none_or(|(number, _)| number < last) {
                agreed = Agreed::SoFar;
            }
            for (number, signed) in &own[..count] {
                if let Some(other) = self.control.signed(rank, *number).filter(|other| other.differs(signed)) {
                    let signed = [*signed, other];
                    let difference = Difference { number: *number, ranks: [me, rank], signed };
                    return Agreed::Not(difference.error(&self.name));
                }
            }
        }
        let misfit = own[..count].iter().find(|(number, signed)| signed.has_share() && self.misfit(*number));
        misfit.map_or(agreed, |launch| Agreed::Not(self.misfit_error(launch)))
    }

    /// Returns true if the sizes of an all_to_all are known not to match between the ranks; false if a rank's share
    /// cannot be seen.
    fn misfit(&self, number: u64) -> bool {
        let signed = |rank| self.control.signed(rank, number).filter(Signed::has_share);
        let share = |rank| signed(rank).map(|signed| signed.lists);
        (0..self.ranks).try_fold(0, |sum: u32, rank| Some(sum.wrapping_add(share(rank)?))).is_some_and(|sum| sum != 0)
    }

    /// Returns the error for an all_to_all whose sizes do not match between the ranks. The error names two ranks if
    /// their sizes are still kept.
    fn misfit_error(&self, (number, signed): &Launch) -> Error {
        let size = |rank, peer, which: usize| self.control.block_sizes(rank, *number, peer).map(|sizes| sizes[which]);
        let mut pairs = (0..self.ranks).flat_map(|from| (0..self.ranks).map(move |to| (from, to)));
        let named = pairs.find_map(|(from, to)| {
            let (sent, expected) = (size(from, to, 0)?, size(to, from, 1)?);
            (sent != expected).then_some(Misfit { from, to, sent, expected })
        });
        misfit_error(&self.name, (*number, signed.signature), named)
    }

    /// Returns the ranks that an operation on a device waits for. The shared memory has the number of each rank's last
    /// collective on a device. `Unknown` if the ranks share no memory. `process_of`: a rank's process, for texts.
    pub fn blockers(&self, waiting: &Waiting, process_of: impl Fn(usize) -> String) -> Blockers {
        if self.control.inquiry().is_none() {
            return Blockers::Unknown(None);
        }
        let described = |number: u64, kind: u8| {
            let kind = Kind::from_u8(kind).filter(|_| number > 0);
            kind.map(|kind| format!("{kind} number {number} on a device"))
        };
        let others = (0..self.ranks).filter(|rank| *rank != self.rank);
        let others = others.filter_map(|rank| Some((rank, self.control.launched(rank)?)));
        if waiting.kind.is_p2p() {
            let peers = others.filter(|(rank, _)| *rank == waiting.root as usize);
            let peers = peers.map(|(rank, (number, kind))| (rank, PeerProgress::NotInMessage(described(number, kind))));
            return Blockers::Ranks(peers.collect());
        }
        let (late, entered): (Vec<_>, Vec<_>) = others.partition(|(_, (number, _))| *number < waiting.number);
        if late.is_empty() {
            let each = entered.iter().take(MOST).map(|(rank, _)| {
                let process = process_of(*rank);
                let instead = self.called_instead(*rank, waiting.number);
                format!("rank {rank}{process} {}", instead.as_deref().unwrap_or("has issued it"))
            });
            return Blockers::Unknown((!entered.is_empty()).then(|| each.collect::<Vec<_>>().join("; ")));
        }
        let before = |(rank, (number, kind))| {
            let last = described(number, kind).map(|text| LastCall { number, text });
            (rank, PeerProgress::NotEntered(last))
        };
        Blockers::Ranks(late.into_iter().map(before).collect())
    }

    /// Describes the call that a rank on this host made under this number, if that call differs from this rank's call.
    fn called_instead(&self, rank: usize, number: u64) -> Option<String> {
        let (own, count) = self.of(number, number);
        let (_, signed) = own[..count].first()?;
        let other = self.control.signed(rank, number).filter(|other| other.differs(signed))?;
        Some(format!("has issued {} as number {number} instead", signature::describe(other.signature)))
    }
}
