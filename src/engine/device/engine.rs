//! The engine for a group's devices of one type. It owns the communicators of the vendor's library, the calls on them
//! from first check to end, and the raw streams and events that order torch's streams and the library's work. This
//! layer knows the group only as a trait ([`DeviceGroup`]).
//!
//! [`DeviceEngine::begin`] takes the number of a call and returns what the shim must do to the call's tensors before
//! and after the library's call. `DeviceCall::launch` puts the call on a raw stream. C++ queries the device to see
//! whether the call has completed, and `before_poll` and `poll` report whether it failed. `ended` records the end in
//! the statistics.
//!
//! Operations on devices have their own sequence of numbers, because the numbers of the CPU's engine index shared
//! memory and must have no gaps. c10d sees the sum of both numbers. No function here waits for a device. A function
//! that makes or ends a communicator waits for the communicator's other ranks, and so does a launch for which the
//! library must connect ranks (`first_use`).

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use super::communicator::Api;
use super::communicators::Communicators;
use super::group::{DeviceGroup, Place};
use super::lowering::Capabilities;
use super::pool::Pool;
use super::runtime::{Event, Runtime, Stream};
use super::watchdog::Watchdog;
use super::{Vendor, lock, open};
use crate::engine::loader::Hints;
use crate::error::{Error, Result};

/// A group's devices of one type.
pub struct DeviceEngine {
    pub(super) group: Arc<dyn DeviceGroup>,
    /// torch's name of the device type.
    pub(super) device_type: Arc<str>,
    pub(super) api: Arc<dyn Api>,
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) communicators: Communicators,
    /// The engine's raw streams by device and stream key, for device types whose torch streams expose no raw handle.
    streams: Mutex<HashMap<(i32, i32), Stream>>,
    pool: Arc<Pool>,
    /// Number of the last collective, for error texts. Written by `begin`, read by `behind`. Relaxed, because it orders
    /// nothing.
    pub(super) last_number: AtomicU64,
    /// Number of calls that were launched and have not ended. Threads that launch calls write it; threads that see
    /// calls end write and read it. Relaxed, because it orders nothing.
    pub(super) under_way: AtomicU64,
    pub(super) watchdog: Watchdog,
}

impl DeviceEngine {
    /// Opens the libraries for tensors on devices of this type. `vendor` is "auto" or a vendor's name. If no library
    /// can be opened, the error says why and what to do.
    pub fn open(group: Arc<dyn DeviceGroup>, device_type: &str, vendor: &str, hints: &Hints) -> Result<DeviceEngine> {
        let known = || Vendor::ALL.map(|vendor| vendor.device()).join(", ");
        let vendor = match vendor {
            "auto" => Vendor::of_device(device_type).ok_or_else(|| {
                let known = known();
                Error::system(format!(
                    "sagellm: no vendor library is known for {device_type} tensors, only for {known}"
                ))
            }),
            name => Vendor::from_name(name).ok_or_else(|| {
                let known = Vendor::ALL.map(Vendor::name).join(", ");
                Error::invalid(format!("sagellm: the option vendor is {name:?}, expected auto, host or one of {known}"))
            }),
        }?;
        let api = open(vendor, hints)?;
        // The path in `hints` names the library for communicators. The library for streams is found by its own variable
        // or name.
        let pool = Pool::open(vendor, &Hints { path: None, ..hints.clone() })?;
        let runtime = Arc::clone(&pool.runtime);
        let name = group.name();
        log::info!("group '{name}': {device_type} tensors by {}, {}", api.describe(), runtime.describe());
        Ok(DeviceEngine {
            group,
            device_type: device_type.into(),
            api,
            runtime,
            communicators: Communicators::default(),
            streams: Mutex::new(HashMap::new()),
            pool,
            last_number: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            watchdog: Watchdog::default(),
        })
    }

    /// The library's name, version and file.
    pub fn describe(&self) -> String {
        self.api.describe()
    }

    pub fn capabilities(&self) -> &Capabilities {
        self.api.capabilities()
    }

    /// Returns the device as error texts name it.
    pub(super) fn place(&self, device: i32) -> Place {
        Place { device_type: Arc::clone(&self.device_type), index: device }
    }

    // The functions below are called by the shim's streams.

    /// Whether the stream is being captured into a graph.
    pub fn capturing(&self, device: i32, stream: Stream) -> Result<bool> {
        self.runtime.set_device(device)?;
        self.runtime.capturing(stream)
    }

    /// Makes the engine's raw stream on a device wait for an event, and returns the stream. The first call takes the
    /// stream from the pool. `told` are events from `mark` for which no stream waits any more; they are reused.
    pub fn stream_behind(&self, device: i32, stream_key: i32, event: Event, told: &[Event]) -> Result<Stream> {
        self.runtime.set_device(device)?;
        self.pool.give_back_events(device, told);
        let stream = self.own_stream(device, stream_key)?;
        self.runtime.event_wait(stream, event)?;
        Ok(stream)
    }

    /// Returns the engine's raw stream on the device that this thread has selected. The first call takes it from the
    /// pool.
    pub(super) fn own_stream(&self, device: i32, stream_key: i32) -> Result<Stream> {
        let mut streams = lock(&self.streams);
        match streams.get(&(device, stream_key)) {
            Some(stream) => Ok(*stream),
            None => Ok(*streams.entry((device, stream_key)).or_insert(self.pool.stream(device)?)),
        }
    }

    /// Records an event behind all work that is now on `stream`, which `stream_behind` returned to this thread. The
    /// caller owns the event until it passes the event to `stream_behind` in `told`.
    pub fn mark(&self, device: i32, stream: Stream) -> Result<Event> {
        let event = self.pool.event(device)?;
        self.runtime.event_record(event, stream)?;
        Ok(event)
    }
}

impl Drop for DeviceEngine {
    /// Runs only after every call (`DeviceCall`) and every launching thread has dropped its reference to the engine, so
    /// nothing of this group uses the streams any more.
    fn drop(&mut self) {
        let streams = std::mem::take(self.streams.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.pool.give_back(streams.into_iter().map(|((device, _), stream)| (device, stream)));
    }
}
