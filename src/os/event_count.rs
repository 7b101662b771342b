//! Falling asleep without missing a wake: an event count per rank, with a Dekker handshake.
//!
//! A sleeper says that it sleeps, fences, and looks once more at what it waits for; a publisher publishes, fences, and
//! looks who sleeps. One of the two must see the other. The door's value makes the sleep itself atomic: the kernel puts
//! the thread to sleep only while the door still has the value that was read before the last look.
//!
//! Generic over [`Bell`] so that `tests/loom.rs` runs the same code on loom's atomics.

/// The words behind the handshake.
pub trait Bell {
    /// How often `rank` was rung: the futex word. Acquire.
    fn door(&self, rank: usize) -> u32;
    /// Counts a ring at `rank` (release) and wakes its threads that sleep on the door.
    fn ring(&self, rank: usize);
    /// Threads of `rank` that sleep or are about to. Relaxed: the fences order it.
    fn asleep(&self, rank: usize) -> u32;
    /// Threads of all ranks that sleep: lets a publisher look at one line that rarely changes. Relaxed.
    fn sleepers(&self) -> u32;
    /// Adds one sleeping thread to `me`, and to the sum, or takes it away again. Relaxed.
    fn count_sleeper(&self, me: usize, more: bool);
    /// Sequentially consistent.
    fn fence(&self);
}

/// To be called after something was published that a peer, or another thread of this rank, may wait for.
#[inline]
pub fn announce<B: Bell + ?Sized>(bell: &B, ranks: usize) {
    bell.fence(); // pairs with the fence in `prepare_wait`
    if bell.sleepers() != 0 {
        for rank in 0..ranks {
            ring_if_asleep(bell, rank);
        }
    }
}

/// Wakes `rank` if it sleeps. A fence must stand between the news and this call.
pub fn ring_if_asleep<B: Bell + ?Sized>(bell: &B, rank: usize) {
    if bell.asleep(rank) != 0 {
        bell.ring(rank);
    }
}

/// First half of a sleep: after it, look once more at what you wait for, and sleep only while the door has the value
/// that this returns. `finish_wait` must follow.
pub fn prepare_wait<B: Bell + ?Sized>(bell: &B, me: usize) -> u32 {
    bell.count_sleeper(me, true);
    let value = bell.door(me);
    bell.fence(); // pairs with the fence in `announce`
    value
}

pub fn finish_wait<B: Bell + ?Sized>(bell: &B, me: usize) {
    bell.count_sleeper(me, false);
}

/// Registers a thread of `me` as a sleeper until it is dropped: every ring wakes the thread meanwhile. After `new`, check
/// once more what you wait for, and sleep only while the door has `value`.
pub struct Listening<'a, B: Bell + ?Sized> {
    pub bell: &'a B,
    me: usize,
    pub value: u32,
}

impl<'a, B: Bell + ?Sized> Listening<'a, B> {
    pub fn new(bell: &'a B, me: usize) -> Listening<'a, B> {
        Listening { bell, me, value: prepare_wait(bell, me) }
    }
}

impl<B: Bell + ?Sized> Drop for Listening<'_, B> {
    fn drop(&mut self) {
        finish_wait(self.bell, self.me);
    }
}
