//! Lets threads sleep without missing a wake-up: an event count for each rank, with a Dekker handshake.
//!
//! A sleeper counts itself, fences, and checks its condition once more. A publisher publishes, fences, and reads the
//! count of sleepers. So either the sleeper sees the published data, or the publisher sees the sleeper. The wake count
//! makes the sleep itself atomic: the kernel puts the thread to sleep only if the count still has the value that was
//! read before the last check.
//!
//! The code is generic over [`WakeWords`], so that `tests/loom.rs` runs it on loom's atomics.

/// The words of the handshake.
pub trait WakeWords {
    /// Returns the number of wake-ups of `rank`: the futex word (acquire).
    fn wake_count(&self, rank: usize) -> u32;
    /// Increments the wake count of `rank` (release) and wakes its threads that sleep on it.
    fn wake(&self, rank: usize);
    /// Returns the number of threads of `rank` that sleep or are about to sleep. Relaxed: the fences order it.
    fn asleep(&self, rank: usize) -> u32;
    /// Returns the number of sleeping threads of all ranks. A publisher needs to read only this cache line, which
    /// rarely changes. Relaxed.
    fn sleepers(&self) -> u32;
    /// Adds or subtracts one sleeping thread, in the number of `me` and in the sum. Relaxed.
    fn count_sleeper(&self, me: usize, more: bool);
    /// Issues a sequentially consistent fence.
    fn fence(&self);
}

/// Wakes sleepers. Must be called after something was published for which a peer or another thread of this rank may
/// wait.
#[inline]
pub fn announce<B: WakeWords + ?Sized>(words: &B, ranks: usize) {
    words.fence(); // pairs with the fence in `prepare_wait`
    if words.sleepers() != 0 {
        for rank in 0..ranks {
            wake_if_asleep(words, rank);
        }
    }
}

/// Wakes `rank` if it sleeps. There must be a fence between publishing and this call.
pub fn wake_if_asleep<B: WakeWords + ?Sized>(words: &B, rank: usize) {
    if words.asleep(rank) != 0 {
        words.wake(rank);
    }
}

/// Does the first half of a sleep. The caller must then check its condition once more, sleep only while the wake count
/// has the returned value, and finally call `finish_wait`.
pub fn prepare_wait<B: WakeWords + ?Sized>(words: &B, me: usize) -> u32 {
    words.count_sleeper(me, true);
    let value = words.wake_count(me);
    words.fence(); // pairs with the fence in `announce`
    value
}

pub fn finish_wait<B: WakeWords + ?Sized>(words: &B, me: usize) {
    words.count_sleeper(me, false);
}

/// Counts a thread of `me` as a sleeper until it is dropped, so that every wake-up reaches the thread. After `new`, the
/// caller must check its condition once more, and sleep only while the wake count has `value`.
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
