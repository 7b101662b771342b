//! The interface to a device through its vendor's runtime: its streams and events, its captures into graphs, and
//! copies. If torch's streams expose no raw handle, the engine has raw streams of its own, and raw events order them
//! with torch's streams.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::error::Result;

/// A vendor's stream (cudaStream_t, aclrtStream, cnrtQueue_t) as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub usize);

/// A vendor's event (cudaEvent_t, aclrtEvent, cnrtNotifier_t) as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub usize);

/// In this capture mode, a thread may query streams and events, and captures on other threads stay valid. CUDA calls
/// the mode relaxed.
pub const SPARES_CAPTURES: u32 = 2;

/// The calls of a device runtime that the engine needs. Every thread must call `set_device` before any other function.
pub trait Runtime: Send + Sync {
    fn describe(&self) -> String;
    /// Selects the device of the calling thread. In every runtime the current device belongs to a thread, and a new
    /// thread does not inherit it.
    fn set_device(&self, device: i32) -> Result<()>;
    /// Creates a stream that runs concurrently with all other streams of the device.
    fn stream_create(&self) -> Result<Stream>;
    /// Whether all work on the stream is complete. Never waits.
    fn stream_idle(&self, stream: Stream) -> Result<bool>;
    /// Whether the stream is being captured into a graph. A stream or event must not be queried while it is captured.
    fn capturing(&self, _stream: Stream) -> Result<bool> {
        Ok(false)
    }
    /// Sets this thread's capture mode, which decides how the thread's queries affect captures on other threads.
    /// Returns the previous mode. In mode `SPARES_CAPTURES`, queries invalidate no capture.
    fn exchange_capture_mode(&self, mode: u32) -> Result<u32> {
        Ok(mode)
    }
    /// Creates an event that orders streams and records no time, which is cheaper.
    fn event_create(&self) -> Result<Event>;
    /// Records the event behind all work that is now on the stream. An event may be recorded again.
    fn event_record(&self, event: Event, stream: Stream) -> Result<()>;
    /// Makes later work on the stream wait for the event. The host does not wait.
    fn event_wait(&self, stream: Stream, event: Event) -> Result<()>;
    /// Copies `bytes` bytes within the device, in stream order.
    fn copy(&self, to: usize, from: usize, bytes: usize, stream: Stream) -> Result<()>;
    /// Address of a small block of device memory for messages that only connect ranks; its contents do not matter.
    /// Allocated on first use and never freed, because a runtime that frees device memory waits for all work of the
    /// device.
    fn spare(&self, device: i32) -> Result<usize>;
}

/// The addresses that `Runtime::spare` returns, by device.
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
