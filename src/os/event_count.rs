//! Sleeping without missing a wake-up: an event count per rank, with a Dekker handshake.
//!
//! A sleeper counts itself, fences, and checks its condition once more; a publisher publishes, fences, and reads the
//! count of sleepers. One of the two must see the other. The wake count makes the sleep itself atomic: the kernel puts
//! the thread to sleep only while the count still has the value that was read before the last check.
//!
//! Generic over [`WakeWords`] so that `tests/loom.rs` runs the same code on loom's atomics.

/// The words of the handshake.
pub trait WakeWords {
    /// Number of wake-ups of `rank`: the futex word. Acquire.
    fn wake_count(&self, rank: usize) -> u32;
    /// Increments the wake count of `rank` (release) and wakes its threads that sleep on it.
    fn wake(&self, rank: usize);
    /// Threads of `rank` that sleep or are about to. Relaxed: the fences order it.
    fn asleep(&self, rank: usize) -> u32;
    /// Sleeping threads of all ranks: lets a publisher read one cache line that rarely changes. Relaxed.
    fn sleepers(&self) -> u32;
    /// Adds or subtracts one sleeping thread, for `me` and in the sum. Relaxed.
    fn count_sleeper(&self, me: usize, more: bool);
    /// Sequentially consistent.
    fn fence(&self);
}

/// Call it after publishing something that a peer, or another thread of this rank, may wait for.
#[inline]
pub fn announce<B: WakeWords + ?Sized>(words: &B, ranks: usize) {
    words.fence(); // pairs with the fence in `prepare_wait`
    if words.sleepers() != 0 {
        for rank in 0..ranks {
            wake_if_asleep(words, rank);
        }
    }
}

/// Wakes `rank` if it sleeps. A fence must stand between publishing and this call.
pub fn wake_if_asleep<B: WakeWords + ?Sized>(words: &B, rank: usize) {
    if words.asleep(rank) != 0 {
        words.wake(rank);
    }
}

/// First half of a sleep. After it, check the condition once more, and sleep only while the wake count has the returned
/// value. `finish_wait` must follow.
pub fn prepare_wait<B: WakeWords + ?Sized>(words: &B, me: usize) -> u32 {
    words.count_sleeper(me, true);
    let value = words.wake_count(me);
    words.fence(); // pairs with the fence in `announce`
    value
}

pub fn finish_wait<B: WakeWords + ?Sized>(words: &B, me: usize) {
    words.count_sleeper(me, false);
}

/// Counts a thread of `me` as a sleeper until it is dropped, so that every wake-up reaches it. After `new`, check the
/// condition once more, and sleep only while the wake count has `value`.
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
