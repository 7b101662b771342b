//! Falling asleep without missing a wake: an event count per rank, with a Dekker handshake.
//!
//! A sleeper says that it sleeps, fences, and looks once more at what it waits for; a publisher publishes, fences, and
//! looks who sleeps. One of the two must see the other. The wake_count's value makes the sleep itself atomic: the kernel puts
//! the thread to sleep only while the wake_count still has the value that was read before the last look.
//!
//! Generic over [`WakeWords`] so that `tests/loom.rs` runs the same code on loom's atomics.

/// The words behind the handshake.
pub trait WakeWords {
    /// How often `rank` was rung: the futex word. Acquire.
    fn wake_count(&self, rank: usize) -> u32;
    /// Counts a ring at `rank` (release) and wakes its threads that sleep on the wake_count.
    fn wake(&self, rank: usize);
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
pub fn announce<B: WakeWords + ?Sized>(words: &B, ranks: usize) {
    words.fence(); // pairs with the fence in `prepare_wait`
    if words.sleepers() != 0 {
        for rank in 0..ranks {
            wake_if_asleep(words, rank);
        }
    }
}

/// Wakes `rank` if it sleeps. A fence must stand between the news and this call.
pub fn wake_if_asleep<B: WakeWords + ?Sized>(words: &B, rank: usize) {
    if words.asleep(rank) != 0 {
        words.wake(rank);
    }
}

/// First half of a sleep: after it, look once more at what you wait for, and sleep only while the wake_count has the value
/// that this returns. `finish_wait` must follow.
pub fn prepare_wait<B: WakeWords + ?Sized>(words: &B, me: usize) -> u32 {
    words.count_sleeper(me, true);
    let value = words.wake_count(me);
    words.fence(); // pairs with the fence in `announce`
    value
}

pub fn finish_wait<B: WakeWords + ?Sized>(words: &B, me: usize) {
    words.count_sleeper(me, false);
}

/// Registers a thread of `me` as a sleeper until it is dropped: every ring wakes the thread meanwhile. After `new`, check
/// once more what you wait for, and sleep only while the wake_count has `value`.
pub struct Listening<'a, B: WakeWords + ?Sized> {
    pub words: &'a B,
    me: usize,
    pub value: u32,
}

impl<'a, B: WakeWords + ?Sized> Listening<'a, B> {
    pub fn new(words: &'a B, me: usize) -> Listening<'a, B> {
        Listening { words, me, value: prepare_wait(words, me) }
    }
}

impl<B: WakeWords + ?Sized> Drop for Listening<'_, B> {
    fn drop(&mut self) {
        finish_wait(self.words, self.me);
    }
}
