//! Streams and events of one runtime library, which the groups of a process use one after the other. A group that ends
//! returns its streams instead of destroying them: when a stream is destroyed, a runtime may wait for work that never
//! ends, and the process may be ending. So a process has only as many streams as its groups have needed at the same
//! time, however many groups it creates.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use once_cell::sync::Lazy;

use super::runtime::{Event, Runtime, SPARES_CAPTURES, Stream};
use super::{Vendor, lock, open_runtime};
use crate::engine::loader::Hints;
use crate::error::Result;
use crate::os::watch;

pub struct Pool {
    pub runtime: Arc<dyn Runtime>,
    /// Streams that no group uses, by device.
    streams: Mutex<HashMap<i32, Vec<Stream>>>,
    /// Events for which no stream waits any more, by device.
    events: Mutex<HashMap<i32, Vec<Event>>>,
}

/// Identifies a pool: the vendor, the library's file and version, and the process (`watch::generation`).
type Key = (Vendor, String, u32);

static POOLS: Lazy<Mutex<HashMap<Key, Arc<Pool>>>> = Lazy::new(Mutex::default);

impl Pool {
    /// Opens the runtime library of a vendor. Groups that use the same library share a pool.
    pub fn open(vendor: Vendor, hints: &Hints) -> Result<Arc<Pool>> {
        let runtime = open_runtime(vendor, hints)?;
        let key = (vendor, runtime.describe(), watch::generation());
        let pool = || Pool { runtime, streams: Mutex::default(), events: Mutex::default() };
        Ok(Arc::clone(lock(&POOLS).entry(key).or_insert_with(|| Arc::new(pool()))))
    }

    /// A stream of the device that this thread has selected. The caller owns it until `give_back`.
    pub fn stream(&self, device: i32) -> Result<Stream> {
        let mut free = std::mem::take(lock(&self.streams).entry(device).or_default());
        let at = free.iter().position(|stream| self.is_idle(*stream));
        let found = at.map(|at| free.swap_remove(at));
        lock(&self.streams).entry(device).or_default().append(&mut free);
        found.map_or_else(|| self.runtime.stream_create(), Ok)
    }

    /// Whether the stream has no pending work and has not failed. A group that failed may have left work on it that
    /// never ends.
    fn is_idle(&self, stream: Stream) -> bool {
        let idle = || {
            let mode = self.runtime.exchange_capture_mode(SPARES_CAPTURES)?;
            let idle = !self.runtime.capturing(stream)? && self.runtime.stream_idle(stream)?;
            self.runtime.exchange_capture_mode(mode)?;
            Ok::<bool, crate::error::Error>(idle)
        };
        idle().unwrap_or(false)
    }

    pub fn give_back(&self, streams: impl IntoIterator<Item = (i32, Stream)>) {
        let mut free = lock(&self.streams);
        streams.into_iter().for_each(|(device, stream)| free.entry(device).or_default().push(stream));
    }

    /// An event without timing, of the device that this thread has selected.
    pub fn event(&self, device: i32) -> Result<Event> {
        let free = lock(&self.events).get_mut(&device).and_then(Vec::pop);
        free.map_or_else(|| self.runtime.event_create(), Ok)
    }

    /// Takes back events for which no stream waits any more.
    pub fn give_back_events(&self, device: i32, events: &[Event]) {
        lock(&self.events).entry(device).or_default().extend(events);
    }
}
