//! A group's devices of one type: its communicators over the vendor's library, its calls on them from their first check
//! to their end, and the raw streams and events by which torch's streams and the library's work wait for one another.
//! This layer knows the group only as a trait ([`DeviceGroup`]).
//!
//! [`DeviceEngine::begin`] says what the shim must do to the tensors of a call before and after the library's call, and
//! takes the call's number; `DeviceCall::launch` puts it on a raw stream, `before_poll` and `poll` say whether it
//! failed, while C++ asks the device whether it has passed; `ended` tells the statistics.
//!
//! Operations on devices are numbered separately, because the numbers of the CPU's engine index shared memory and may
//! have no gaps; c10d sees the sum of both. Nothing here waits for a device. Making or ending a communicator waits for
//! its other ranks.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use super::communicator::Api;
use super::communicators::Communicators;
use super::group::DeviceGroup;
use super::libs::loader::Hints;
use super::lowering::Capabilities;
use super::runtime::{Event, Runtime, Stream};
use super::watchdog::Watchdog;
use super::{Vendor, lock, open, open_runtime};
use crate::error::{Error, Result};

/// A group's devices of one type.
pub struct DeviceEngine {
    pub(super) group: Arc<dyn DeviceGroup>,
    /// torch's name of the device type.
    pub(super) device_type: String,
    pub(super) api: Arc<dyn Api>,
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) communicators: Communicators,
    /// Raw streams of ours by device and stream key, where torch hides its own.
    streams: Mutex<HashMap<(i32, i32), Stream>>,
    /// Events that are free for reuse, by device.
    events: Mutex<HashMap<i32, Vec<Event>>>,
    /// Number of the last call, for error texts. Written by `begin`, read by `behind`; relaxed, because nothing is
    /// ordered by it.
    pub(super) last_number: AtomicU64,
    /// Calls that were launched and have not ended. Written by the threads that launch calls and see their ends, read by
    /// the latter; relaxed, because nothing is ordered by it.
    pub(super) under_way: AtomicU64,
    pub(super) watchdog: Watchdog,
}

impl DeviceEngine {
    /// Opens the libraries for tensors on devices of this type. `vendor` is "auto" or a vendor's name. An error says why
    /// there are none, and what to do.
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
        // A path names the library of communicators; that of streams is found by its own variable or name.
        let runtime = open_runtime(vendor, &Hints { path: None, ..hints.clone() })?;
        let name = group.name();
        log::info!("group '{name}': {device_type} tensors by {}, {}", api.describe(), runtime.describe());
        Ok(DeviceEngine {
            group,
            device_type: device_type.to_string(),
            api,
            runtime,
            communicators: Communicators::default(),
            streams: Mutex::new(HashMap::new()),
            events: Mutex::new(HashMap::new()),
            last_number: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            watchdog: Watchdog::default(),
        })
    }

    /// The library, its version and file.
    pub fn describe(&self) -> String {
        self.api.describe()
    }

    pub fn capabilities(&self) -> &Capabilities {
        self.api.capabilities()
    }

    /// "npu:0"
    pub(super) fn place(&self, device: i32) -> String {
        format!("{}:{device}", self.device_type)
    }

    // The functions that the shim's streams call.

    /// True while what is put on a raw stream is captured for a graph.
    pub fn capturing(&self, device: i32, stream: Stream) -> Result<bool> {
        self.runtime.set_device(device)?;
        self.runtime.capturing(stream)
    }

    /// Our raw stream on a device, made when first asked for, behind an event. `told` are events of `mark` for which no
    /// stream waits any more.
    pub fn stream_behind(&self, device: i32, stream_key: i32, event: Event, told: &[Event]) -> Result<Stream> {
        self.runtime.set_device(device)?;
        lock(&self.events).entry(device).or_default().extend(told);
        let stream = self.own_stream(device, stream_key)?;
        self.runtime.event_wait(stream, event)?;
        Ok(stream)
    }

    /// Our raw stream on the device of this thread, made when first asked for.
    pub(super) fn own_stream(&self, device: i32, stream_key: i32) -> Result<Stream> {
        let mut streams = lock(&self.streams);
        match streams.get(&(device, stream_key)) {
            Some(stream) => Ok(*stream),
            None => Ok(*streams.entry((device, stream_key)).or_insert(self.runtime.stream_create()?)),
        }
    }

    /// An event after all work that is now on the stream that `stream_behind` gave to this thread. It belongs to the
    /// caller until `stream_behind` gets it back in `told`.
    pub fn mark(&self, device: i32, stream: Stream) -> Result<Event> {
        let free = lock(&self.events).get_mut(&device).and_then(Vec::pop);
        let event = free.map_or_else(|| self.runtime.event_create(false), Ok)?;
        self.runtime.event_record(event, stream)?;
        Ok(event)
    }
}
