//! Streams. Each stream has a thread that does its work in order, so the work that a call issues may still be pending
//! when the call returns.
//!
//! The event records of a stream may pass through a host queue, which all streams share; torch_npu's streams have such
//! a queue. A call then only queues the record. Another thread issues it later, or a query of the stream's state does.
//! Other work on the same stream issues the queued records first, so only other streams see the delay: a wait for an
//! event whose record is still in the queue waits for nothing.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use once_cell::sync::Lazy;

use crate::capture::Capture;
use crate::device::Runtime;
use crate::event::Event;
use crate::settings;
use crate::table::Table;

/// Work for the stream's thread. A returned number is the runtime's error; after an error, only work with `always`
/// runs.
pub type Task = Box<dyn FnOnce() -> Option<i32> + Send>;

/// Work as it is pushed to a stream. A capture keeps it and issues it again with each launch of the graph.
pub trait Work: Send + Sync {
    fn issue(&self) -> Task;
}

/// Work that does the same each time.
pub struct Again<F>(Arc<F>);

impl<F: Fn() + Send + Sync + 'static> Again<F> {
    pub fn of(body: F) -> Arc<dyn Work> {
        Arc::new(Again(Arc::new(body)))
    }
}

impl<F: Fn() + Send + Sync + 'static> Work for Again<F> {
    fn issue(&self) -> Task {
        let body = Arc::clone(&self.0);
        Box::new(move || {
            body();
            None
        })
    }
}

struct Issued {
    task: Task,
    /// True if this work also runs on a stream that has failed, because other streams wait for it.
    always: bool,
}

#[derive(Default)]
struct Inner {
    queue: VecDeque<Issued>,
    running: bool,
    closed: bool,
    capture: Option<Arc<Capture>>,
}

pub struct Stream {
    pub runtime: Runtime,
    pub device: i32,
    pub flags: u32,
    pub priority: i32,
    inner: Mutex<Inner>,
    changed: Condvar,
    /// The runtime's error, or 0. Written by the stream's thread (release), read by callers (acquire).
    fault: AtomicI32,
    /// Delay of this stream's records in the host queue, in microseconds; 0 if they are issued immediately. Callers set
    /// and read it (relaxed: it orders no other memory access).
    host_queue: AtomicU64,
}

pub static STREAMS: Table<Stream> = Table::new(1);

/// A stream that exists without being created: this thread's own if `own`, else the one that all threads share on a
/// device.
pub fn default_stream(runtime: Runtime, device: i32, own: bool) -> Option<Arc<Stream>> {
    type Key = (Runtime, i32, Option<ThreadId>);
    static DEFAULTS: Mutex<Option<HashMap<Key, Arc<Stream>>>> = Mutex::new(None);
    let key = (runtime, device, own.then(|| std::thread::current().id()));
    let mut defaults = DEFAULTS.lock().unwrap();
    Some(match defaults.get_or_insert_default().entry(key) {
        Entry::Occupied(entry) => Arc::clone(entry.get()),
        Entry::Vacant(entry) => Arc::clone(entry.insert(Stream::create(runtime, device, 0, 0)?)),
    })
}

impl Stream {
    pub fn create(runtime: Runtime, device: i32, flags: u32, priority: i32) -> Option<Arc<Stream>> {
        let stream = Arc::new(Stream {
            runtime,
            device,
            flags,
            priority,
            inner: Mutex::default(),
            changed: Condvar::new(),
            fault: AtomicI32::new(0),
            host_queue: AtomicU64::new(settings::get().host_queue.as_micros() as u64),
        });
        let worker = Arc::clone(&stream);
        sagellm::os::watch::spawn("sim-stream", move || worker.work()).ok()?;
        Some(stream)
    }

    fn work(&self) {
        // Work on this thread uses the stream's device as its current device.
        self.runtime.choose(Some(self.device));
        let mut inner = self.inner.lock().unwrap();
        loop {
            while inner.queue.is_empty() {
                if inner.closed {
                    return;
                }
                inner = self.changed.wait(inner).unwrap();
            }
            let Some(entry) = inner.queue.pop_front() else { continue };
            inner.running = true;
            drop(inner);
            if (entry.always || self.fault() == 0)
                && let Some(fault) = (entry.task)()
            {
                let _ = self.fault.compare_exchange(0, fault, Ordering::AcqRel, Ordering::Acquire);
            }
            inner = self.inner.lock().unwrap();
            inner.running = false;
            self.changed.notify_all();
        }
    }

    /// Issues work, or adds it to the capture of which the stream is part.
    pub fn push(&self, work: &Arc<dyn Work>) {
        self.flush();
        let mut inner = self.inner.lock().unwrap();
        match &inner.capture {
            Some(capture) => capture.add(self, Arc::clone(work)),
            None => {
                inner.queue.push_back(Issued { task: work.issue(), always: false });
                self.changed.notify_all();
            }
        }
    }

    /// Issues work for which other streams wait. It bypasses the host queue and is never captured.
    pub fn push_always(&self, task: Task) {
        let mut inner = self.inner.lock().unwrap();
        inner.queue.push_back(Issued { task, always: true });
        self.changed.notify_all();
    }

    pub fn fault(&self) -> i32 {
        self.fault.load(Ordering::Acquire)
    }

    /// True if no work is left. Empties the host queue first.
    pub fn idle(&self) -> bool {
        self.flush();
        let inner = self.inner.lock().unwrap();
        inner.queue.is_empty() && !inner.running
    }

    /// Waits until no work is left. Returns false if that takes longer than `limit`.
    pub fn synchronize(&self, limit: Duration) -> bool {
        self.flush();
        let deadline = Instant::now() + limit;
        let mut inner = self.inner.lock().unwrap();
        while inner.running || !inner.queue.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            inner = self.changed.wait_timeout(inner, left).unwrap().0;
        }
        true
    }

    /// Ends the stream. Work that was issued is still done.
    pub fn close(&self) {
        self.flush();
        self.inner.lock().unwrap().closed = true;
        self.changed.notify_all();
    }

    /// Drops work that was issued and has not begun.
    pub fn discard(&self) {
        self.inner.lock().unwrap().queue.retain(|entry| entry.always);
        self.changed.notify_all();
    }

    pub fn capture(&self) -> Option<Arc<Capture>> {
        self.inner.lock().unwrap().capture.clone()
    }

    pub fn set_capture(&self, capture: Option<Arc<Capture>>) {
        self.inner.lock().unwrap().capture = capture;
    }

    pub fn set_host_queue(&self, delay: Duration) {
        self.host_queue.store(delay.as_micros() as u64, Ordering::Relaxed);
    }

    /// Records `event` behind all work that was issued: now, or after the delay of the host queue.
    pub fn record(self: &Arc<Stream>, event: &Arc<Event>) {
        match self.host_queue.load(Ordering::Relaxed) {
            0 => event.record_on(self),
            late => HOST_QUEUE.add(Duration::from_micros(late), self, event),
        }
    }

    /// Issues the records in the host queue that are for this stream.
    fn flush(&self) {
        if self.host_queue.load(Ordering::Relaxed) > 0 {
            HOST_QUEUE.issue(|record| std::ptr::eq(&*record.stream, self));
        }
    }
}

struct Record {
    due: Instant,
    stream: Arc<Stream>,
    event: Arc<Event>,
}

/// Records of all streams that were requested and have not been issued.
struct HostQueue {
    records: Mutex<VecDeque<Record>>,
    more: Condvar,
}

static HOST_QUEUE: Lazy<&'static HostQueue> = Lazy::new(|| {
    let queue: &HostQueue = Box::leak(Box::new(HostQueue { records: Mutex::default(), more: Condvar::new() }));
    let _ = sagellm::os::watch::spawn("sim-host-queue", || queue.work());
    queue
});

impl HostQueue {
    fn add(&self, late: Duration, stream: &Arc<Stream>, event: &Arc<Event>) {
        let record = Record { due: Instant::now() + late, stream: Arc::clone(stream), event: Arc::clone(event) };
        self.records.lock().unwrap().push_back(record);
        self.more.notify_all();
    }

    /// Holds the lock while it issues, so that the records of a stream keep their order.
    fn issue(&self, which: impl Fn(&Record) -> bool) {
        self.records.lock().unwrap().retain(|record| {
            let now = which(record);
            if now {
                record.event.record_on(&record.stream);
            }
            !now
        });
    }

    fn work(&self) {
        loop {
            let now = Instant::now();
            self.issue(|record| record.due <= now);
            let records = self.records.lock().unwrap();
            let next = records.iter().map(|record| record.due).min();
            let nap = next.map_or(Duration::from_secs(3600), |due| due.saturating_duration_since(Instant::now()));
            let _ = self.more.wait_timeout(records, nap.max(Duration::from_micros(20)));
        }
    }
}
