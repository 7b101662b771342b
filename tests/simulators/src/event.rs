//! Events. A record takes a number, and is complete when the stream's thread reaches it. A wait is for the last number
//! at the time when the wait was issued, so a later record does not change the meaning of an earlier wait.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::capture::Capture;
use crate::settings;
use crate::stream::Stream;
use crate::table::Table;

#[derive(Default)]
struct Inner {
    recorded: u64,
    complete: u64,
    at: Option<Instant>,
    /// The capture in which the event was recorded last, and the address of the stream.
    capture: Option<(Arc<Capture>, usize)>,
    /// Number of waits that were issued and have not ended.
    waiting: usize,
    /// True if it was recorded and not reset since.
    armed: bool,
}

pub struct Event {
    pub device: i32,
    pub flags: u32,
    /// If true, a wait for an event that has no record waits for the next record. If false, it waits for nothing.
    pub patient: bool,
    inner: Mutex<Inner>,
    changed: Condvar,
}

pub static EVENTS: Table<Event> = Table::new(2);

impl Event {
    pub fn new(device: i32, flags: u32, patient: bool) -> Arc<Event> {
        Arc::new(Event { device, flags, patient, inner: Mutex::default(), changed: Condvar::new() })
    }

    /// Records the event on the stream, bypassing the host queue. `Stream::record` respects that queue.
    pub fn record_on(self: &Arc<Event>, stream: &Stream) {
        let mut inner = self.inner.lock().unwrap();
        inner.capture = stream.capture().map(|capture| (capture, std::ptr::from_ref(stream) as usize));
        if inner.capture.is_some() {
            return;
        }
        inner.recorded += 1;
        inner.armed = true;
        let number = inner.recorded;
        let event = Arc::clone(self);
        // The lock is held, so that records of two threads on one stream complete in the order of their numbers.
        stream.push_always(Box::new(move || {
            let mut inner = event.inner.lock().unwrap();
            if inner.complete < number {
                inner.complete = number;
                inner.at = Some(Instant::now());
            }
            event.changed.notify_all();
            None
        }));
    }

    /// Makes later work of the stream wait for the last record. False if the wait mixes a capture with work outside of
    /// it.
    pub fn wait_on(self: &Arc<Event>, stream: &Arc<Stream>) -> bool {
        let mut inner = self.inner.lock().unwrap();
        match (&inner.capture, stream.capture()) {
            (Some((capture, from)), None) if capture.active() => {
                capture.join(stream, *from);
                return true;
            }
            (Some((capture, from)), Some(other)) if Arc::ptr_eq(capture, &other) => {
                capture.join(stream, *from);
                return true;
            }
            (None, Some(_)) if inner.recorded == 0 => return true,
            (_, Some(other)) => {
                other.invalidate();
                return false;
            }
            _ => (),
        }
        let target = inner.recorded + u64::from(self.patient && !inner.armed);
        if inner.complete >= target {
            return true;
        }
        inner.waiting += 1;
        let event = Arc::clone(self);
        drop(inner);
        stream.push_always(Box::new(move || {
            event.until(target, settings::get().ceiling);
            event.inner.lock().unwrap().waiting -= 1;
            None
        }));
        true
    }

    fn until(&self, target: u64, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut inner = self.inner.lock().unwrap();
        while inner.complete < target {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            inner = self.changed.wait_timeout(inner, left).unwrap().0;
        }
        true
    }

    /// True if the event was recorded and not reset since.
    pub fn recorded(&self) -> bool {
        self.inner.lock().unwrap().armed
    }

    /// True if the last record is complete, or if there is none.
    pub fn complete(&self) -> bool {
        let inner = self.inner.lock().unwrap();
        inner.complete >= inner.recorded
    }

    pub fn waited_for(&self) -> bool {
        self.inner.lock().unwrap().waiting > 0
    }

    pub fn captured(&self) -> bool {
        self.inner.lock().unwrap().capture.as_ref().is_some_and(|(capture, _)| capture.active())
    }

    /// From now on, waits are for the next record.
    pub fn reset(&self) {
        self.inner.lock().unwrap().armed = false;
    }

    pub fn synchronize(&self, limit: Duration) -> bool {
        let target = self.inner.lock().unwrap().recorded;
        self.until(target, limit)
    }

    /// Milliseconds from this event to `end`; `None` while one of them is not complete or was never recorded.
    pub fn elapsed(&self, end: &Event) -> Option<f32> {
        let at = |event: &Event| {
            let inner = event.inner.lock().unwrap();
            inner.at.filter(|_| inner.complete >= inner.recorded)
        };
        let (start, end) = (at(self)?, at(end)?);
        Some(match end.checked_duration_since(start) {
            Some(time) => time.as_secs_f32() * 1e3,
            None => -(start - end).as_secs_f32() * 1e3,
        })
    }
}
