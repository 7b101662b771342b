//! An event count of this process.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use crate::os::event_count::WakeWords;
use crate::os::{event_count, futex};

#[derive(Default)]
pub struct Bell {
    /// Futex word. A thread that rings increments it (release); a thread that is about to sleep reads it first
    /// (acquire).
    word: AtomicU32,
    /// Number of threads that sleep on `word` or are about to. Relaxed, ordered by the fences of `event_count`.
    sleepers: AtomicU32,
}

impl Bell {
    pub fn ring(&self) {
        event_count::announce(self, 1);
    }

    /// Sleeps until the bell rings, for at most `longest`. Returns immediately if `ready` returns true.
    pub fn sleep(&self, longest: Duration, ready: impl Fn() -> bool) {
        let listening = event_count::Listening::new(self, 0);
        if !ready() {
            futex::wait(&[(&self.word, listening.value)], longest);
        }
    }
}

impl WakeWords for Bell {
    fn wake_count(&self, _: usize) -> u32 {
        self.word.load(Ordering::Acquire)
    }
    fn wake(&self, _: usize) {
        self.word.fetch_add(1, Ordering::Release);
        futex::wake_all(&self.word);
    }
    fn asleep(&self, _: usize) -> u32 {
        self.sleepers.load(Ordering::Relaxed)
    }
    fn sleepers(&self) -> u32 {
        self.sleepers.load(Ordering::Relaxed)
    }
    fn count_sleeper(&self, _: usize, more: bool) {
        self.sleepers.fetch_add(if more { 1 } else { u32::MAX }, Ordering::Relaxed);
    }
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}
