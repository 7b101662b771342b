//! One worker of UCX, which all groups of a process use: its endpoints lead to the workers of other processes.
//!
//! Every call of the library is made under one lock (`calls`), because the worker is serialized, so any build of the
//! library will do. The library calls back only within such calls. A callback only notes what has happened;
//! `progress` returns these notes, and its caller acts on them without the lock.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::api::{self, Api, Status};
use crate::error::{Error, Result};
use crate::types::Span;

/// Size of the header of each message in bytes.
pub const HEAD: usize = 48;
/// The number of our active messages.
const MESSAGE: c_uint = 1;
/// One call of `progress` asks the library this often for more.
const ROUNDS: usize = 16;

/// Who started something, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    pub who: u64,
    pub number: u64,
}

/// What has happened.
pub enum Event {
    /// A message arrived.
    Message { head: [u8; HEAD], data: Data },
    /// What was started under this name has ended; the library no longer uses its memory.
    Ended { name: Name, outcome: std::result::Result<(), String> },
    /// The endpoint of `who` has failed. It must still be closed.
    Failed { who: u64, why: String },
}

/// The data of a message that arrived.
pub enum Data {
    Copied(Vec<u8>),
    /// It must be given to `Worker::receive` or `Worker::release`.
    Held(Held),
}

/// Data that the library keeps for us, or (`is_far`) that the sender keeps until it is received.
pub struct Held {
    address: *mut c_void,
    pub bytes: usize,
    pub is_far: bool,
}

impl Data {
    pub fn bytes(&self) -> usize {
        match self {
            Data::Copied(bytes) => bytes.len(),
            Data::Held(held) => held.bytes,
        }
    }
}

// SAFETY: a pointer that only the library uses, under the worker's lock, or that points to memory which nobody changes
// until it is released.
unsafe impl Send for Held {}

impl Held {
    /// The data, if it is here.
    pub fn bytes(&self) -> &[u8] {
        assert!(!self.is_far, "the data is still at its sender");
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the library keeps the data unchanged until it is released, which consumes this.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.bytes) }
    }
}

/// A way to another process. It must be given to `Worker::close`.
pub struct Endpoint {
    raw: api::Endpoint,
    /// Argument of the error handler; freed when the endpoint is closed.
    aim: *mut Aim,
}

// SAFETY: both pointers are used only under the worker's lock.
unsafe impl Send for Endpoint {}

/// What callbacks write. They run within calls of the library, so under the worker's lock.
struct Notes {
    events: Vec<Event>,
    api: Arc<Api>,
}

struct Aim {
    notes: *mut Notes,
    who: u64,
}

/// What the library uses until a request has ended. Its address is the argument of the request's callback.
struct Flight {
    notes: *mut Notes,
    name: Name,
    head: [u8; HEAD],
    pieces: Vec<api::Piece>,
    /// Freed when an endpoint is closed.
    aim: *mut Aim,
}

/// The pointers, which are used only while this is locked.
struct Calls {
    worker: api::Worker,
    notes: *mut Notes,
}

// SAFETY: whoever holds the lock around this is the only one that uses the pointers.
unsafe impl Send for Calls {}

/// A worker is never destroyed, because it may be using memory, and because a process that ends need not: it has one,
/// as long as it lives. Only tests drop workers.
pub struct Worker {
    api: Arc<Api>,
    calls: Mutex<Calls>,
    /// Becomes readable when something has happened since `is_armed`.
    pub fd: c_int,
    /// What other processes need to make an endpoint to this worker.
    pub address: Vec<u8>,
}

impl Worker {
    /// `settings`: as in `Wanted`.
    pub(super) fn new(api: Arc<Api>, settings: &[(String, String)]) -> Result<Worker> {
        let refused = |what: &str, status: Status| {
            let (text, path) = (api.text(status), api.path());
            Err(Error::system(format!(
                "sagellm: SAGELLM_LINK=ucx: UCX ({path}) cannot {what}: {text}; see the variables UCX_TLS and \
                 UCX_NET_DEVICES, or unset SAGELLM_LINK on all ranks"
            )))
        };
        let notes = Box::into_raw(Box::new(Notes { events: Vec::new(), api: Arc::clone(&api) }));
        let mut made = Calls { worker: ptr::null_mut(), notes };
        let context = match context(&api, settings) {
            Ok(context) => context,
            Err(status) => return refused("be started", status),
        };
        let params = api::WorkerParams { mask: api::WORKER_THREAD_MODE, thread_mode: api::SERIALIZED, rest: [0; 160] };
        // SAFETY: the parameters are valid for the call; the worker is written on success.
        let status = unsafe { (api.worker_create)(context, &raw const params, &raw mut made.worker) };
        if status != api::OK {
            return refused("make a worker", status);
        }
        let handler = api::Handler {
            mask: api::AM_ID | api::AM_FLAGS | api::AM_CALLBACK | api::AM_ARGUMENT,
            id: MESSAGE,
            flags: api::WHOLE_MESSAGE,
            callback: Some(on_message),
            argument: notes.cast(),
        };
        // SAFETY: the handler is copied; `notes` lives as long as the worker.
        let status = unsafe { (api.set_handler)(made.worker, &raw const handler) };
        if status != api::OK {
            return refused("receive messages", status);
        }
        let mut fd = -1;
        // SAFETY: one number is written.
        let status = unsafe { (api.worker_efd)(made.worker, &raw mut fd) };
        if status != api::OK {
            return refused("wake a waiting thread", status);
        }
        let (mut own, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: on success an address of `bytes` bytes is returned, which is copied and then released.
        let address = unsafe {
            let status = (api.worker_address)(made.worker, &raw mut own, &raw mut bytes);
            if status != api::OK {
                return refused("name its address", status);
            }
            let address = std::slice::from_raw_parts(own.cast::<u8>(), bytes).to_vec();
            (api.address_release)(made.worker, own);
            address
        };
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: three numbers are written.
        unsafe { (api.version)(&raw mut major, &raw mut minor, &raw mut patch) };
        log::info!("the link between hosts is UCX {major}.{minor}.{patch} ({})", api.path());
        Ok(Worker { api, calls: Mutex::new(made), fd, address })
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // -------------------------------------------------------------------------------------------------------- driving

    /// Advances what can advance, and appends what has happened. Returns true if something advanced.
    pub fn progress(&self, events: &mut Vec<Event>) -> bool {
        let calls = self.lock();
        let mut moved = false;
        for _ in 0..ROUNDS {
            // SAFETY: the worker is live, and the lock is held.
            if unsafe { (self.api.progress)(calls.worker) } == 0 {
                break;
            }
            moved = true;
        }
        let notes = calls.notes;
        // SAFETY: callbacks write the notes only under the lock.
        let notes = unsafe { &mut (*notes).events };
        moved |= !notes.is_empty();
        events.append(notes);
        moved
    }

    /// Makes `fd` readable at the next event. False if there is one already: then `progress` must be called.
    pub fn is_armed(&self) -> bool {
        let calls = self.lock();
        // SAFETY: the worker is live, and the lock is held.
        unsafe { (*calls.notes).events.is_empty() && (self.api.worker_arm)(calls.worker) != api::BUSY }
    }

    // ------------------------------------------------------------------------------------------------------ endpoints

    /// Makes a way to the worker with this address. `who`: for `Event::Failed`.
    pub fn connect(&self, address: &[u8], who: u64) -> std::result::Result<Endpoint, String> {
        let calls = self.lock();
        let aim = Box::into_raw(Box::new(Aim { notes: calls.notes, who }));
        let params = api::EndpointParams {
            mask: api::EP_REMOTE_ADDRESS | api::EP_ERROR_MODE | api::EP_ERROR_HANDLER,
            address: address.as_ptr().cast(),
            error_mode: api::MODE_PEER,
            on_error: Some(on_error),
            argument: aim.cast(),
            rest: [0; 32],
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the parameters are valid for the call; `aim` lives until the endpoint is closed.
        let status = unsafe { (self.api.ep_create)(calls.worker, &raw const params, &raw mut raw) };
        if status != api::OK {
            // SAFETY: made above, and given to nobody.
            drop(unsafe { Box::from_raw(aim) });
            return Err(format!("UCX cannot reach it: {}", self.api.text(status)));
        }
        Ok(Endpoint { raw, aim })
    }

    /// Closes a way at once. What is in flight on it ends with an error; `name` ends when it is closed. Returns true if
    /// that is now.
    pub fn close(&self, endpoint: Endpoint, name: Name) -> bool {
        let calls = self.lock();
        let flight = calls.flight(name, [0; HEAD], &[], endpoint.aim);
        let mut request = asked(&flight);
        request.mask |= api::OP_FLAGS;
        request.flags = api::CLOSE_FORCE;
        request.callback = api::Callback { sent: on_sent };
        // SAFETY: the endpoint is live, and is used no more.
        let started = unsafe { (self.api.ep_close)(endpoint.raw, &raw const request) };
        self.begun(started, flight).unwrap_or(true)
    }

    // ------------------------------------------------------------------------------------------------------- messages

    /// Sends a message. `is_eager`: at once and not when it is received. Returns true if the memory is free again;
    /// otherwise `name` ends later.
    ///
    /// # Safety
    /// The memory of `pieces` must be valid, and not written, until then.
    pub unsafe fn send(
        &self,
        to: &Endpoint,
        name: Name,
        head: [u8; HEAD],
        pieces: &[Span],
        is_eager: bool,
    ) -> std::result::Result<bool, String> {
        let calls = self.lock();
        let flight = calls.flight(name, head, pieces, ptr::null_mut());
        let (address, count, datatype) = flight.memory();
        let mut request = asked(&flight);
        request.mask |= api::OP_DATATYPE | api::OP_MEMORY_TYPE | api::OP_FLAGS;
        request.flags = if is_eager { api::SEND_EAGER } else { 0 };
        request.callback = api::Callback { sent: on_sent };
        request.datatype = datatype;
        // SAFETY: the endpoint is live. Header and pieces are in `flight`, which lives until the request has ended; the
        // caller vouches for the memory.
        let started = unsafe {
            let head = flight.head.as_ptr().cast();
            (self.api.send)(to.raw, MESSAGE, head, HEAD, address, count, &raw const request)
        };
        self.begun(started, flight)
    }

    /// Receives what the sender keeps. Returns true if that has ended; otherwise `name` ends later.
    ///
    /// # Safety
    /// The memory of `pieces`, of the size of the data, must be valid and unused by others until then.
    pub unsafe fn receive(&self, from: Held, name: Name, pieces: &[Span]) -> std::result::Result<bool, String> {
        assert!(from.is_far, "the data is here");
        let calls = self.lock();
        let flight = calls.flight(name, [0; HEAD], pieces, ptr::null_mut());
        let (address, count, datatype) = flight.memory();
        let mut request = asked(&flight);
        request.mask |= api::OP_DATATYPE | api::OP_MEMORY_TYPE;
        request.callback = api::Callback { received: on_received };
        request.datatype = datatype;
        // SAFETY: the data is held and used once. The caller vouches for the memory; the pieces are in `flight`.
        let started = unsafe {
            let into = address.cast_mut();
            (self.api.receive)(calls.worker, from.address, into, count, &raw const request)
        };
        self.begun(started, flight)
    }

    /// Gives data back that is not needed any more. If it is still at the sender, the sender's request ends.
    pub fn release(&self, held: Held) {
        let calls = self.lock();
        // SAFETY: the data is held and used once.
        unsafe { (self.api.release)(calls.worker, held.address) };
    }

    /// Waits until the system, or the device, has everything that was sent to an endpoint. Returns true if it has now;
    /// otherwise `name` ends then.
    pub fn flush(&self, to: &Endpoint, name: Name) -> std::result::Result<bool, String> {
        let calls = self.lock();
        let flight = calls.flight(name, [0; HEAD], &[], ptr::null_mut());
        let mut request = asked(&flight);
        request.callback = api::Callback { sent: on_sent };
        // SAFETY: the endpoint is live.
        let started = unsafe { (self.api.ep_flush)(to.raw, &raw const request) };
        self.begun(started, flight)
    }

    /// Gives the flight to the library if the request is not over. Returns whether it is.
    fn begun(&self, started: api::Started, flight: Box<Flight>) -> std::result::Result<bool, String> {
        match api::status_of(started) {
            None => {
                let _ = Box::into_raw(flight); // its callback frees it
                Ok(false)
            }
            Some(status) => {
                flight.free();
                if status == api::OK { Ok(true) } else { Err(self.api.text(status)) }
            }
        }
    }
}

impl Calls {
    fn flight(&self, name: Name, head: [u8; HEAD], pieces: &[Span], aim: *mut Aim) -> Box<Flight> {
        let piece = |span: &Span| api::Piece { address: span.addr as *mut c_void, bytes: span.bytes };
        let pieces = pieces.iter().filter(|span| span.bytes > 0).map(piece).collect();
        Box::new(Flight { notes: self.notes, name, head, pieces, aim })
    }
}

impl Flight {
    /// The memory as the library wants it: address, count, datatype.
    fn memory(&self) -> (*const c_void, usize, u64) {
        match &self.pieces[..] {
            [] => (ptr::null(), 0, api::CONTIGUOUS),
            [one] => (one.address, one.bytes, api::CONTIGUOUS),
            several => (several.as_ptr().cast(), several.len(), api::PIECES),
        }
    }

    fn free(self) {
        if !self.aim.is_null() {
            // SAFETY: made in `connect`; the endpoint is closed, so the error handler is called no more.
            drop(unsafe { Box::from_raw(self.aim) });
        }
    }
}

/// A request whose callback gets this flight.
fn asked(flight: &Flight) -> api::Request {
    api::Request {
        mask: api::OP_CALLBACK | api::OP_USER_DATA,
        flags: 0,
        request: ptr::null_mut(),
        callback: api::Callback { none: 0 },
        datatype: api::CONTIGUOUS,
        argument: ptr::from_ref(flight).cast_mut().cast(),
        reply_buffer: ptr::null_mut(),
        memory_type: 0,
        received: ptr::null_mut(),
        handle: ptr::null_mut(),
    }
}

fn context(api: &Api, settings: &[(String, String)]) -> std::result::Result<api::Context, Status> {
    let mut config = ptr::null_mut();
    // SAFETY: reads the environment; on success a configuration is returned, which is released below.
    let status = unsafe { (api.config_read)(ptr::null(), ptr::null(), &raw mut config) };
    if status != api::OK {
        return Err(status);
    }
    for (name, value) in settings {
        if std::env::var_os(format!("UCX_{name}")).is_some() {
            continue;
        }
        if let (Ok(name), Ok(value)) = (CString::new(name.as_str()), CString::new(value.as_str())) {
            // SAFETY: both texts end in a zero byte. A value that the library refuses is reported in its log.
            unsafe { (api.config_modify)(config, name.as_ptr(), value.as_ptr()) };
        }
    }
    let features = api::FEATURE_AM | api::FEATURE_WAKEUP;
    let params = api::Params { mask: api::PARAM_FEATURES, features, rest: [0; 16] };
    let mut context = ptr::null_mut();
    // SAFETY: the parameters are valid for the call; the context is written on success.
    let status = unsafe {
        let status = (api.init)(api::API_MAJOR, api::API_MINOR, &raw const params, config, &raw mut context);
        (api.config_release)(config);
        status
    };
    if status == api::OK { Ok(context) } else { Err(status) }
}

// ---------------------------------------------------------------------------------------------------------- callbacks

/// SAFETY of all callbacks: the library calls them within our calls, so the worker's lock is held, and their arguments
/// are live.
unsafe extern "C" fn on_message(
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
    notes.events.push(Event::Ended { name: flight.name, outcome });
    flight.free();
}

unsafe extern "C" fn on_received(request: *mut c_void, status: Status, _bytes: usize, argument: *mut c_void) {
    // SAFETY: as above.
    unsafe { on_sent(request, status, argument) }
}

unsafe extern "C" fn on_error(argument: *mut c_void, _endpoint: api::Endpoint, status: Status) {
    // SAFETY: as above; the aim is freed when the endpoint is closed.
    let (who, notes) = unsafe {
        let aim = &*argument.cast::<Aim>();
        (aim.who, &mut *aim.notes)
    };
    let why = notes.api.text(status);
    notes.events.push(Event::Failed { who, why });
}
