//! Stream capture and graphs. A graph is one list of work in the order of the capture. A stream joins a capture by
//! waiting for an event of the capture. A launch runs the list on one stream in that order, which is one of the orders
//! that the graph allows.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::stream::{Stream, Work};
use crate::table::Table;

pub const GLOBAL: u32 = 0;
pub const RELAXED: u32 = 2;

pub struct Capture {
    pub id: u64,
    pub mode: u32,
    /// The stream on which the capture began, and on which it must end.
    origin: Arc<Stream>,
    /// Cleared when the capture has ended (release); read by a stream that joins (acquire).
    active: AtomicBool,
    /// Set by a forbidden call (release), read when the capture ends (acquire).
    invalid: AtomicBool,
    works: Mutex<Vec<Arc<dyn Work>>>,
    /// Streams that joined the capture.
    joined: Mutex<Vec<Arc<Stream>>>,
    /// Addresses of the joined streams that have work for which the origin does not wait yet.
    astray: Mutex<HashSet<usize>>,
}

#[derive(Clone)]
pub struct Graph(Vec<Arc<dyn Work>>);

pub static GRAPHS: Table<Graph> = Table::new(3);
pub static EXECUTABLE: Table<Graph> = Table::new(4);

/// Number of captures that forbid unsafe calls on every thread.
static STRICT: AtomicUsize = AtomicUsize::new(0);
/// The captures in progress, so that a forbidden call can invalidate them.
static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Sets the mode of this thread, and returns the previous one.
pub fn exchange_mode(mode: u32) -> u32 {
    MODE.with(|own| own.replace(mode))
}

/// Reports a call that is unsafe during a capture. True if a capture forbids it; that capture is invalid from then on.
pub fn forbidden() -> bool {
    if STRICT.load(Ordering::Acquire) == 0 || MODE.with(Cell::get) == RELAXED {
        return false;
    }
    ACTIVE.lock().unwrap().iter().filter(|capture| capture.mode == GLOBAL).for_each(|capture| capture.invalidate());
    true
}

impl Capture {
    pub fn begin(stream: &Arc<Stream>, mode: u32) -> bool {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if stream.capture().is_some() {
            return false;
        }
        let capture = Arc::new(Capture {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            mode,
            origin: Arc::clone(stream),
            active: AtomicBool::new(true),
            invalid: AtomicBool::new(false),
            works: Mutex::default(),
            joined: Mutex::default(),
            astray: Mutex::default(),
        });
        if mode == GLOBAL {
            STRICT.fetch_add(1, Ordering::AcqRel);
        }
        ACTIVE.lock().unwrap().push(Arc::clone(&capture));
        stream.set_capture(Some(capture));
        true
    }

    /// Returns the graph, or the vendor's error number that says why there is none.
    pub fn end(stream: &Arc<Stream>) -> Result<Graph, i32> {
        const INVALIDATED: i32 = 901;
        const UNMATCHED: i32 = 903;
        const UNJOINED: i32 = 904;
        const NOT_CAPTURING: i32 = 401;
        let capture = stream.capture().ok_or(NOT_CAPTURING)?;
        if !Arc::ptr_eq(&capture.origin, stream) {
            return Err(UNMATCHED);
        }
        capture.active.store(false, Ordering::Release);
        if capture.mode == GLOBAL {
            STRICT.fetch_sub(1, Ordering::AcqRel);
        }
        ACTIVE.lock().unwrap().retain(|other| !Arc::ptr_eq(other, &capture));
        stream.set_capture(None);
        capture.joined.lock().unwrap().drain(..).for_each(|other| other.set_capture(None));
        if capture.invalid.load(Ordering::Acquire) {
            return Err(INVALIDATED);
        }
        if !capture.astray.lock().unwrap().is_empty() {
            return Err(UNJOINED);
        }
        Ok(Graph(capture.works.lock().unwrap().clone()))
    }

    pub fn active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    pub fn valid(&self) -> bool {
        !self.invalid.load(Ordering::Acquire)
    }

    pub fn invalidate(&self) {
        self.invalid.store(true, Ordering::Release);
    }

    pub fn add(self: &Arc<Capture>, stream: *const Stream, work: Arc<dyn Work>) {
        self.works.lock().unwrap().push(work);
        self.strays(stream);
    }

    fn strays(&self, stream: *const Stream) {
        if !std::ptr::eq(Arc::as_ptr(&self.origin), stream) {
            self.astray.lock().unwrap().insert(stream as usize);
        }
    }

    /// Makes `stream` part of the capture, because it waits for an event that another stream of the capture recorded.
    pub fn join(self: &Arc<Capture>, stream: &Arc<Stream>, recorded_on: usize) {
        if stream.capture().is_none() {
            stream.set_capture(Some(Arc::clone(self)));
            self.joined.lock().unwrap().push(Arc::clone(stream));
        }
        self.astray.lock().unwrap().remove(&recorded_on);
        self.strays(Arc::as_ptr(stream));
    }
}

impl Graph {
    pub fn launch(&self, stream: &Stream) {
        self.0.iter().for_each(|work| stream.push(work));
    }
}
