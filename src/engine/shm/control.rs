//! The part of the shared-memory engine that any thread may use without the group's lock.

use std::sync::atomic::{AtomicU32, Ordering};

use super::memory::area::Area;
use crate::engine::{BlockSizes, Control, Inquiry, Monitor, Signed, Told, WakeAddress};
use crate::error::Error;
use crate::os::{event_count, futex, topology};

impl Control for Area {
    fn is_poisoned(&self) -> bool {
        Area::is_poisoned(self)
    }

    fn reported(&self) -> Option<Told> {
        self.fault()
    }

    fn announce(&self, fault: &Error) {
        self.poison(fault);
        event_count::announce(self, self.ranks);
    }

    fn leave(&self, _error: &Error, _interrupted: &dyn Fn() -> bool) {
        Area::leave(self);
    }

    fn left(&self, rank: usize) -> bool {
        Area::left(self, rank)
    }

    fn has_leavers(&self) -> bool {
        Area::has_leavers(self)
    }

    fn wake_address(&self) -> Option<WakeAddress<'_>> {
        Some(WakeAddress { words: self, me: self.me, word: self.futex_word(self.me) })
    }

    fn shares_core(&self) -> bool {
        let Some(cpu) = topology::current_cpu() else { return false };
        self.set_cpu(cpu);
        (0..self.me).any(|rank| self.cpu(rank) == Some(cpu))
    }

    fn monitor(&self) -> Option<&dyn Monitor> {
        Some(self)
    }

    fn inquiry(&self) -> Option<&dyn Inquiry> {
        Some(self)
    }

    fn set_launched(&self, number: u64, signed: Signed, sizes: Option<&BlockSizes<'_>>) {
        if let Some(sizes) = sizes {
            self.set_block_sizes(number, sizes);
        }
        Area::set_launched(self, number, signed);
    }

    fn block_sizes(&self, rank: usize, number: u64, peer: usize) -> Option<[u64; 2]> {
        Area::block_sizes(self, rank, number, peer)
    }

    fn launched(&self, rank: usize) -> Option<(u64, u8)> {
        Some(Area::launched(self, rank))
    }

    fn signed(&self, rank: usize, number: u64) -> Option<Signed> {
        Area::signed(self, rank, number)
    }
}

impl Inquiry for Area {
    fn ask(&self, rank: usize) -> u32 {
        let word = self.question_word(rank);
        let number = word.fetch_add(1, Ordering::Release).wrapping_add(1);
        futex::wake_all(word);
        number
    }

    fn question(&self) -> &AtomicU32 {
        self.question_word(self.me)
    }

    fn answer(&self, answer: &[u8]) {
        self.write_answer(answer);
    }

    fn heard(&self, rank: usize) -> Vec<u8> {
        self.read_answer(rank)
    }
}

impl Monitor for Area {
    fn come(&self, turn: u64) {
        Area::monitor(self, self.me).store(turn, Ordering::Release);
        event_count::announce(self, self.ranks);
    }

    fn has_come(&self, rank: usize, turn: u64) -> bool {
        Area::monitor(self, rank).load(Ordering::Acquire) >= turn
    }

    fn decide(&self, turn: u64, failed: bool) {
        self.monitor_outcome(turn).store(turn << 1 | u64::from(failed), Ordering::Release);
        event_count::announce(self, self.ranks);
    }

    fn decision(&self, turn: u64) -> Option<bool> {
        let word = self.monitor_outcome(turn).load(Ordering::Acquire);
        (word >> 1 >= turn).then_some(word != turn << 1)
    }
}
