//! Streams and events of a device, through the runtime of its vendor. Used where the communication stream is our own:
//! raw streams, and the raw events by which they and torch's streams wait for one another.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// A vendor's stream (cudaStream_t, aclrtStream, cnrtQueue_t) as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub usize);

/// A vendor's event (cudaEvent_t, aclrtEvent, cnrtNotifier_t) as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub usize);

/// The mode in which a thread may query streams and events while others capture; CUDA calls it relaxed.
pub const SPARES_CAPTURES: u32 = 2;

/// The calls of a device runtime that the engine needs. Every thread must have called `set_device` before others.
pub trait Runtime: Send + Sync {
    fn describe(&self) -> String;
    fn device_count(&self) -> Result<u32>;
    /// Selects the device of the calling thread. In every runtime the current device belongs to a thread, and a new
    /// thread does not inherit it.
    fn set_device(&self, device: i32) -> Result<()>;
    /// A stream that runs beside all others of the device.
    fn stream_create(&self) -> Result<Stream>;
    fn stream_destroy(&self, stream: Stream) -> Result<()>;
    /// True when all its work is done. Never waits.
    fn stream_idle(&self, stream: Stream) -> Result<bool>;
    /// True while the stream is being captured into a graph. Nothing may be queried during a capture.
    fn capturing(&self, _stream: Stream) -> Result<bool> {
        Ok(false)
    }
    /// Sets how queries of this thread affect another thread's capture, in the runtime's numbers; returns the value
    /// before. With `SPARES_CAPTURES` they break none.
    fn exchange_capture_mode(&self, mode: u32) -> Result<u32> {
        Ok(mode)
    }
    /// `timed` events can be compared by `elapsed`; others are cheaper.
    fn event_create(&self, timed: bool) -> Result<Event>;
    /// Call it only when the device has passed everything that uses the event.
    fn event_destroy(&self, event: Event) -> Result<()>;
    /// Marks the present end of the stream. An event may be recorded again.
    fn event_record(&self, event: Event, stream: Stream) -> Result<()>;
    /// The stream's later work waits for the event; the host does not.
    fn event_wait(&self, stream: Stream, event: Event) -> Result<()>;
    /// True when the stream has passed it. Never waits.
    fn event_done(&self, event: Event) -> Result<bool>;
    /// Time between two timed events that are done.
    fn elapsed(&self, start: Event, end: Event) -> Result<Duration>;
    /// Copies `bytes` bytes within the device, in stream order.
    fn copy(&self, to: usize, from: usize, bytes: usize, stream: Stream) -> Result<()>;
    /// Address of a small block of device memory whose contents do not matter, for messages that only connect ranks.
    /// Allocated on first use and never freed, because freeing device memory waits for all work of the device.
    fn spare(&self, device: i32) -> Result<usize>;
}

/// The addresses of `Runtime::spare` by device.
#[derive(Default)]
pub(super) struct Spare(Mutex<HashMap<i32, usize>>);

impl Spare {
    pub(super) const BYTES: usize = 512;

    pub(super) fn of(&self, device: i32, make: impl FnOnce() -> Result<usize>) -> Result<usize> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known.get(&device) {
            return Ok(*found);
        }
        Ok(*known.entry(device).or_insert(make()?))
    }
}

/// Waits until the stream's work is done, by polling: the runtimes' own waiting calls take no deadline.
pub fn synchronize(runtime: &dyn Runtime, stream: Stream, deadline: Duration) -> Result<()> {
    let end = Instant::now() + deadline;
    let mut pause = Duration::from_micros(10);
    while !runtime.stream_idle(stream)? {
        if Instant::now() >= end {
            let text = format!("sagellm: a stream was not done within {} ms", deadline.as_millis());
            return Err(Error::timeout(text));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(1));
    }
    Ok(())
}

/// Milliseconds as runtimes measure them.
pub(super) fn milliseconds(time: f32) -> Duration {
    Duration::from_secs_f64(f64::from(time.max(0.0)) / 1000.0)
}
