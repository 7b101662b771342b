//! The thread that reads the source line (the *place*) at which a thread of the program is, for answers to other ranks.
//! It acquires the interpreter's lock, which native code may hold for minutes, so it has no other task. A thread that
//! requests a place does not wait, and is woken when the place is known. The place thread holds no lock of the core
//! while it waits for the interpreter's lock, and no thread waits for the place thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use once_cell::sync::OnceCell;

use crate::error::contained;
use crate::host::Host;
use crate::os::watch;

/// A request for the place of a thread: the source line at which the thread is. All that ask before the place is known
/// share this request.
#[derive(Clone, Default)]
pub struct Asked(Arc<OnceCell<Option<String>>>);

impl Asked {
    /// `None` until the place has been read. Then the place, or `Some(None)` if it could not be read.
    pub fn place(&self) -> Option<Option<String>> {
        self.0.get().cloned()
    }

    /// Sets the place. Only the first call has an effect.
    pub fn is_at(&self, place: Option<String>) {
        let _ = self.0.set(place);
    }
}

/// The pending requests for the places of one rank's threads. The place thread is serving the first one.
#[derive(Default)]
pub struct Places {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone)]
struct Wanted {
    thread: u64,
    host: Arc<dyn Host>,
    asked: Asked,
    /// Wakes the threads that answer questions.
    wake: Arc<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct State {
    wanted: Vec<Wanted>,
    thread: Option<JoinHandle<()>>,
    /// How many times a place thread was stopped. Each place thread remembers the value at its start and ends if the
    /// value has changed, so it never runs in parallel with its successor.
    stopped: u32,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks `host` for the place of a thread; calls `wake` when it is known. All pending requests for the same thread share
/// one reading, because a place answers every question that was asked before the place was read.
pub fn ask(places: &Arc<Places>, thread: u64, host: &Arc<dyn Host>, wake: Arc<dyn Fn() + Send + Sync>) -> Asked {
    let mut state = places.lock();
    if let Some(known) = state.wanted.iter().find(|wanted| wanted.thread == thread) {
        return known.asked.clone();
    }
    let asked = Asked::default();
    if state.thread.is_none() {
        let (theirs, number) = (Arc::clone(places), state.stopped);
        match watch::spawn("sagellm-place", move || read(&theirs, number)) {
            Ok(started) => state.thread = Some(started),
            Err(error) => {
                log::warn!("cannot start the thread that reads where the program is: {error}");
                asked.is_at(None);
                return asked;
            }
        }
    }
    state.wanted.push(Wanted { thread, host: Arc::clone(host), asked: asked.clone(), wake });
    drop(state);
    places.changed.notify_all();
    asked
}

/// Asks the thread to end and returns it. If it waits for the interpreter's lock, it cannot end before it gets the
/// lock.
pub fn stop(places: &Places) -> Option<JoinHandle<()>> {
    let mut state = places.lock();
    state.stopped += 1;
    state.wanted.clear();
    let thread = state.thread.take();
    drop(state);
    places.changed.notify_all();
    thread
}

fn read(places: &Places, number: u32) {
    let mut state = places.lock();
    while state.stopped == number {
        let Some(Wanted { thread, host, asked, wake }) = state.wanted.first().cloned() else {
            state = places.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(state);
        let place = contained(|| Ok(host.place(thread))).unwrap_or_else(|bug| {
            log::error!("{bug}");
            None
        });
        drop(host);
        // Set under the lock, so that every request from now on starts a new reading.
        state = places.lock();
        state.wanted.retain(|other| !Arc::ptr_eq(&other.asked.0, &asked.0));
        asked.is_at(place);
        drop(state);
        wake();
        drop(wake);
        state = places.lock();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use super::*;

    /// A program in which the interpreter's lock is held until `free` is set.
    #[derive(Default)]
    struct Program {
        free: AtomicBool,
        read: AtomicU32,
    }

    impl Host for Program {
        fn interrupted(&self) -> bool {
            false
        }
        fn place(&self, thread: u64) -> Option<String> {
            self.read.fetch_add(1, Ordering::Relaxed);
            while !self.free.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(thread != 3, "a bug in the reading of one thread");
            (thread != 2).then(|| format!("line of thread {thread}"))
        }
    }

    fn wait_for(asked: &Asked) -> Option<String> {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(place) = asked.place() {
                return place;
            }
            assert!(Instant::now() < until, "no place came");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "starts a thread that blocks signals, which Miri lacks")]
    fn who_asks_goes_on_at_once_and_all_who_ask_for_one_thread_share_a_reading() {
        let (places, program) = (Arc::new(Places::default()), Arc::new(Program::default()));
        let host: Arc<dyn Host> = Arc::<Program>::clone(&program);
        let woken = Arc::new(AtomicU32::new(0));
        let theirs = Arc::clone(&woken);
        let wake: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            theirs.fetch_add(1, Ordering::Relaxed);
        });
        let ask = |thread: u64| super::ask(&places, thread, &host, Arc::clone(&wake));
        let asked: Vec<Asked> = [1, 1, 3, 2, 1].map(ask).into();
        assert!(asked.iter().all(|asked| asked.place().is_none()), "the lock is kept");
        program.free.store(true, Ordering::Release);
        let line = Some("line of thread 1".to_string());
        let found: Vec<Option<String>> = asked.iter().map(wait_for).collect();
        assert_eq!(found, [line.clone(), line.clone(), None, None, line]);
        assert_eq!(program.read.load(Ordering::Relaxed), 3, "threads 1, 2 and 3, each once");
        stop(&places).expect("it was started").join().unwrap();
        assert_eq!(woken.load(Ordering::Relaxed), 3, "after each reading");
        assert_eq!(wait_for(&ask(1)), Some("line of thread 1".into()), "it starts again");
        stop(&places);
    }
}
