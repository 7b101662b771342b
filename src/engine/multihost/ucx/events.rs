//! The events that UCX reports by callbacks, and the data that it passes to these callbacks.
//!
//! The library calls back only within our calls, which the worker makes under one lock. A callback only notes what has
//! happened.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::api::{self, Api, Status};
use crate::types::Span;

/// Size of the header of each message in bytes.
pub const HEAD: usize = 48;

/// An event. `who` is the number that the caller passed to `Worker::connect` or `Worker::receive`.
pub enum Event {
    /// A message arrived.
    Message { head: [u8; HEAD], data: Data },
    /// The operation `what` has ended; the library no longer uses its memory.
    Ended { who: u64, what: What, outcome: Result<(), String> },
    /// The endpoint has failed. It must still be closed.
    Failed { who: u64, why: String },
}

/// An operation of the library. The caller numbers its sends and receives.
#[derive(Clone, Copy, Debug)]
pub enum What {
    Send(u64),
    Receive(u64),
    Flush,
    Close,
}

/// The data of a message that arrived.
pub enum Data {
    Copied(Vec<u8>),
    /// It must be given to `Worker::receive` or `Worker::release`.
    Held(Held),
}

impl Data {
    pub fn bytes(&self) -> usize {
        match self {
            Data::Copied(bytes) => bytes.len(),
            Data::Held(held) => held.bytes,
        }
    }

    /// Whether the data is still at the sender.
    pub fn is_far(&self) -> bool {
        matches!(self, Data::Held(held) if held.is_far)
    }
}

/// Data that the library keeps for us, or (`is_far`) that the sender keeps until it is received.
pub struct Held {
    pub(super) address: *mut c_void,
    bytes: usize,
    is_far: bool,
}

// SAFETY: a pointer that only the library uses, under the worker's lock, or that points to memory which nobody changes
// until it is released.
unsafe impl Send for Held {}

impl Held {
    pub fn is_far(&self) -> bool {
        self.is_far
    }

    /// Returns the data, which must be here and not at the sender.
    pub fn bytes(&self) -> &[u8] {
        assert!(!self.is_far, "the data is still at its sender");
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the library keeps the data unchanged until it is released, which consumes this.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.bytes) }
    }
}

/// What callbacks write. Callbacks run within calls of the library, so under the worker's lock.
pub struct Notes {
    pub events: Vec<Event>,
    api: Arc<Api>,
}

impl Notes {
    /// Makes the notes of a worker. They are never freed, because a worker lives as long as the process.
    pub fn forever(api: &Arc<Api>) -> *mut Notes {
        Box::into_raw(Box::new(Notes { events: Vec::new(), api: Arc::clone(api) }))
    }
}

/// The argument of an endpoint's error handler.
pub struct Aim {
    pub notes: *mut Notes,
    pub who: u64,
}

/// What the library uses until a request has ended. Its address is the argument of the request's callback.
pub struct Flight {
    notes: *mut Notes,
    who: u64,
    what: What,
    pub head: [u8; HEAD],
    pieces: Vec<api::Piece>,
    /// If this request closes an endpoint: the endpoint's aim, which is freed afterwards. Otherwise null.
    aim: *mut Aim,
}

impl Flight {
    /// Makes a request of `who` without memory. `aim` is the aim of the endpoint that the request closes, otherwise
    /// null.
    pub fn new(notes: *mut Notes, who: u64, what: What, aim: *mut Aim) -> Box<Flight> {
        Box::new(Flight { notes, who, what, head: [0; HEAD], pieces: Vec::new(), aim })
    }

    /// Makes a request of `who` with a header and memory.
    pub fn with(notes: *mut Notes, who: u64, what: What, head: [u8; HEAD], spans: &[Span]) -> Box<Flight> {
        let piece = |span: &Span| api::Piece { address: span.addr as *mut c_void, bytes: span.bytes };
        let pieces = spans.iter().filter(|span| span.bytes > 0).map(piece).collect();
        Box::new(Flight { notes, who, what, head, pieces, aim: ptr::null_mut() })
    }

    /// Returns the memory as the library wants it: address, count, datatype.
    pub fn memory(&self) -> (*const c_void, usize, u64) {
        match &self.pieces[..] {
            [] => (ptr::null(), 0, api::CONTIGUOUS),
            [one] => (one.address, one.bytes, api::CONTIGUOUS),
            several => (several.as_ptr().cast(), several.len(), api::PIECES),
        }
    }

    /// Makes a request whose callback gets this flight.
    pub fn request(&self) -> api::Request {
        let callback = match self.what {
            What::Receive(_) => api::Callback { received: on_received },
            What::Send(_) | What::Flush | What::Close => api::Callback { sent: on_sent },
        };
        api::Request {
            mask: api::OP_CALLBACK | api::OP_USER_DATA,
            flags: 0,
            request: ptr::null_mut(),
            callback,
            datatype: api::CONTIGUOUS,
            argument: ptr::from_ref(self).cast_mut().cast(),
            reply_buffer: ptr::null_mut(),
            memory_type: 0,
            received: ptr::null_mut(),
            handle: ptr::null_mut(),
        }
    }

    /// Called when the request has ended.
    pub fn free(self) {
        if !self.aim.is_null() {
            // SAFETY: made in `Worker::connect`; the endpoint is closed, so the error handler is called no more.
            drop(unsafe { Box::from_raw(self.aim) });
        }
    }
}

// SAFETY of all callbacks: the library calls them within our calls, so the worker's lock is held, and their arguments
// are live.

pub unsafe extern "C" fn on_message(
    argument: *mut c_void,
    head: *const c_void,
    head_bytes: usize,
    data: *mut c_void,
    bytes: usize,
    param: *const api::Arrived,
) -> Status {
    if head_bytes != HEAD {
        return api::OK; // no message of ours
    }
    // SAFETY: as above; the header has `HEAD` bytes.
    let (notes, head, attributes) =
        unsafe { (&mut *argument.cast::<Notes>(), *head.cast::<[u8; HEAD]>(), (*param).attributes) };
    let is_far = attributes & api::RENDEZVOUS != 0;
    let keeps = is_far || (bytes > 0 && attributes & api::MAY_KEEP != 0);
    let data = if keeps {
        Data::Held(Held { address: data, bytes, is_far })
    } else if bytes == 0 {
        Data::Copied(Vec::new())
    } else {
        // SAFETY: the data is valid during this call.
        Data::Copied(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), bytes) }.to_vec())
    };
    notes.events.push(Event::Message { head, data });
    if keeps { api::IN_PROGRESS } else { api::OK }
}

unsafe extern "C" fn on_sent(request: *mut c_void, status: Status, argument: *mut c_void) {
    // SAFETY: as above; the flight was given to the library when the request began.
    let (flight, notes) = unsafe {
        let flight = Box::from_raw(argument.cast::<Flight>());
        let notes = &mut *flight.notes;
        (notes.api.request_free)(request);
        (flight, notes)
    };
    let outcome = if status == api::OK { Ok(()) } else { Err(notes.api.text(status)) };
    notes.events.push(Event::Ended { who: flight.who, what: flight.what, outcome });
    flight.free();
}

unsafe extern "C" fn on_received(request: *mut c_void, status: Status, _bytes: usize, argument: *mut c_void) {
    // SAFETY: as above.
    unsafe { on_sent(request, status, argument) }
}

pub unsafe extern "C" fn on_error(argument: *mut c_void, _endpoint: api::Endpoint, status: Status) {
    // SAFETY: as above; the aim is freed when the endpoint is closed.
    let (who, notes) = unsafe {
        let aim = &*argument.cast::<Aim>();
        (aim.who, &mut *aim.notes)
    };
    let why = notes.api.text(status);
    notes.events.push(Event::Failed { who, why });
}
