//! Falling asleep without missing a wake: an event count per rank, with a Dekker handshake.
//!
//! A sleeper says that it sleeps, fences, and looks once more at what it waits for; a publisher publishes, fences, and
//! looks who sleeps. One of the two must see the other. The door's value makes the sleep itself atomic: the kernel puts
//! the thread to sleep only while the door still has the value that was read before the last look.
//!
//! Generic over [`Bell`] so that `tests/loom.rs` runs the same code on loom's atomics.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

pub trait Bell {
    /// Counts the rings at `rank`. Written by whoever rings (fetch_add), read by the rank's threads before they sleep;
    /// also the futex word.
    fn door(&self, rank: usize) -> &AtomicU32;
    /// How many threads of `rank` sleep or are about to. Written by them, read by publishers after their fence.
    fn asleep(&self, rank: usize) -> &AtomicU32;
    /// How many threads of all ranks sleep: lets a publisher look at one line that rarely changes.
    fn sleepers(&self) -> &AtomicU32;
    fn fence(&self);
    /// Wakes the threads that sleep on the rank's door.
    fn wake(&self, rank: usize);
}

/// To be called after something was published that a peer, or another thread of this rank, may wait for.
#[inline]
pub fn announce<B: Bell>(bell: &B, ranks: usize) {
    bell.fence(); // pairs with the fence in `lie_down`
    if bell.sleepers().load(Ordering::Relaxed) != 0 {
        for rank in 0..ranks {
            ring_if_asleep(bell, rank);
        }
    }
}

pub fn ring_if_asleep<B: Bell>(bell: &B, rank: usize) {
    if bell.asleep(rank).load(Ordering::Relaxed) != 0 {
        bell.door(rank).fetch_add(1, Ordering::Release);
        bell.wake(rank);
    }
}

/// First half of a sleep: after it, look once more at what you wait for, and sleep only while the door has the value
/// that this returns. `get_up` must follow.
pub fn lie_down<B: Bell>(bell: &B, me: usize) -> u32 {
    bell.asleep(me).fetch_add(1, Ordering::Relaxed);
    bell.sleepers().fetch_add(1, Ordering::Relaxed);
    let value = bell.door(me).load(Ordering::Acquire);
    bell.fence(); // pairs with the fence in `announce`
    value
}

pub fn get_up<B: Bell>(bell: &B, me: usize) {
    bell.asleep(me).fetch_sub(1, Ordering::Relaxed);
    bell.sleepers().fetch_sub(1, Ordering::Relaxed);
}
