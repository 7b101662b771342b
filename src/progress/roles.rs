//! Decides which thread drives the groups of a rank, and which event wakes which thread. A thread that waits drives;
//! the progress thread drives while operations are pending and no thread waits. This code does not sleep and knows no
//! groups. It is generic over the shared words, so that `tests/loom.rs` can run it on loom's atomics, which try every
//! interleaving.
//!
//! | event | woken threads | by |
//! | --- | --- | --- |
//! | an operation that does not end at once is issued | every sleeping driver, or the progress thread if it is in `await_work` | `issued` |
//! | the last driver leaves with operations pending | the progress thread | `Driving`'s drop |
//! | an operation ends or fails | sleeping threads that wait for operations | `event_count::announce` on `ended` |
//! | a peer publishes | every thread that sleeps on this rank's wake word | `event_count::announce` on the segment |
//!
//! All four use the same handshake (`event_count`). The sleeper counts itself, fences and checks once more. The
//! publisher publishes, fences and reads the number of sleepers. So either the sleeper sees what was published, or the
//! publisher sees the sleeper.

use crate::os::event_count;
use crate::os::event_count::{Listening, WakeWords};

/// The shared words of one rank. Reads and writes are relaxed; `fence` and the fences of `event_count` order them.
pub trait Words {
    type Work: WakeWords;
    /// Returns the event count that is signalled for drivers and for the progress thread.
    fn work(&self) -> &Self::Work;
    /// Returns the number of operations of all groups that have not ended. It is incremented before an operation is
    /// passed to its engine.
    fn pending(&self) -> usize;
    /// Returns the number of threads that wait and therefore drive.
    fn drivers(&self) -> usize;
    fn count_driver(&self, more: bool);
    /// Whether the progress thread must end, because the process ends.
    fn stopping(&self) -> bool;
}

/// Must be called after an operation was issued that did not end immediately.
pub fn issued<W: Words>(words: &W) {
    event_count::announce(words.work(), 1);
}

/// Whether only the progress thread can advance the pending operations.
pub fn needs_progress<W: Words>(words: &W) -> bool {
    words.pending() > 0 && words.drivers() == 0 && !words.stopping()
}

/// Held by a thread while it waits and therefore drives. Dropping it wakes the progress thread if operations are
/// pending, even if the wait ends in a panic.
pub struct Driving<'a, W: Words>(&'a W);

impl<'a, W: Words> Driving<'a, W> {
    pub fn new(words: &'a W) -> Driving<'a, W> {
        words.count_driver(true);
        Driving(words)
    }

    /// Runs `body`. Meanwhile this thread does not count as a driver.
    pub fn pause<T>(&self, body: impl FnOnce() -> T) -> T {
        let pause = Pause::new(self.0);
        let value = body();
        drop(pause);
        value
    }

    fn leave(words: &W) {
        words.count_driver(false);
        words.work().fence(); // pairs with the fence in `event_count::prepare_wait`, called by `await_work`
        if needs_progress(words) {
            event_count::wake_if_asleep(words.work(), 0);
        }
    }
}

impl<W: Words> Drop for Driving<'_, W> {
    fn drop(&mut self) {
        Self::leave(self.0);
    }
}

struct Pause<'a, W: Words>(&'a W);

impl<'a, W: Words> Pause<'a, W> {
    fn new(words: &'a W) -> Pause<'a, W> {
        Driving::leave(words);
        Pause(words)
    }
}

impl<W: Words> Drop for Pause<'_, W> {
    fn drop(&mut self) {
        self.0.count_driver(true);
    }
}

/// Called by the progress thread. Waits until that thread is needed (returns true) or must end (returns false). `sleep`
/// sleeps as long as the word of `work` has the value that is passed to it, and may return spuriously.
pub fn await_work<W: Words>(words: &W, sleep: impl Fn(u32)) -> bool {
    loop {
        let listening = Listening::new(words.work(), 0);
        if words.stopping() {
            return false;
        }
        if needs_progress(words) {
            return true;
        }
        sleep(listening.value);
    }
}
