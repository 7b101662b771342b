//! One worker of UCX, which all groups of a process use: its endpoints lead to the workers of other processes.
//!
//! Every call of the library is made under one lock (`calls`), because the worker is created in serialized mode, which
//! every build of the library supports. `progress` returns the events that the library's callbacks have noted, and its
//! caller handles them without the lock.

use std::ffi::{CString, c_int, c_uint};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::api::{self, Api, Status};
use super::events::{Aim, Event, Flight, HEAD, Held, Notes, What, on_error, on_message};
use crate::error::{Error, Result};
use crate::types::Span;

/// The id of our active messages.
const MESSAGE: c_uint = 1;
/// `Worker::progress` calls the library's `progress` at most this many times.
const ROUNDS: usize = 16;

/// An endpoint to another process's worker. It must be passed to `Worker::close`.
pub struct Endpoint {
    raw: api::Endpoint,
    who: u64,
    /// Argument of the error handler; freed when the endpoint is closed.
    aim: *mut Aim,
}

// SAFETY: both pointers are used only under the worker's lock.
unsafe impl Send for Endpoint {}

/// The pointers, which are used only while this is locked.
struct Calls {
    worker: api::Worker,
    notes: *mut Notes,
}

// SAFETY: a lock protects this object, so only one thread at a time uses the pointers.
unsafe impl Send for Calls {}

/// UCX's worker is never destroyed: it may still be using memory, and a process keeps its only worker until it ends.
/// Only tests drop a `Worker`.
pub struct Worker {
    api: Arc<Api>,
    calls: Mutex<Calls>,
    /// Becomes readable at the first event after `is_armed` returned true.
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
        let notes = Notes::forever(&api);
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

    /// Advances what can advance, and appends the new events. Returns true if something advanced.
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

    /// Makes an endpoint to the worker with this address. The endpoint's events carry `who`.
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
        Ok(Endpoint { raw, who, aim })
    }

    /// Closes an endpoint by force: what is in flight on it ends with an error. Returns true if it is closed now, and
    /// false if a `What::Close` event will report that.
    pub fn close(&self, endpoint: Endpoint) -> bool {
        let calls = self.lock();
        let flight = Flight::new(calls.notes, endpoint.who, What::Close, endpoint.aim);
        let mut request = flight.request();
        request.mask |= api::OP_FLAGS;
        request.flags = api::CLOSE_FORCE;
        // SAFETY: the endpoint is live, and is used no more.
        let started = unsafe { (self.api.ep_close)(endpoint.raw, &raw const request) };
        self.begun(started, flight).unwrap_or(true)
    }

    // ------------------------------------------------------------------------------------------------------- messages

    /// Sends a message. If `is_eager`, the data is sent immediately, and not when the receiver asks for it. Returns
    /// true if the memory is already free again; otherwise a `What::Send` event with this number will report that.
    ///
    /// # Safety
    /// The memory of `pieces` must be valid, and not written, until it is free again.
    pub unsafe fn send(
        &self,
        to: &Endpoint,
        number: u64,
        head: [u8; HEAD],
        pieces: &[Span],
        is_eager: bool,
    ) -> std::result::Result<bool, String> {
        let calls = self.lock();
        let flight = Flight::with(calls.notes, to.who, What::Send(number), head, pieces);
        let (address, count, datatype) = flight.memory();
        let mut request = flight.request();
        request.mask |= api::OP_DATATYPE | api::OP_MEMORY_TYPE | api::OP_FLAGS;
        request.flags = if is_eager { api::SEND_EAGER } else { 0 };
        request.datatype = datatype;
        // SAFETY: the endpoint is live. Header and pieces are in `flight`, which lives until the request has ended; the
        // caller vouches for the memory.
        let started = unsafe {
            let head = flight.head.as_ptr().cast();
            (self.api.send)(to.raw, MESSAGE, head, HEAD, address, count, &raw const request)
        };
        self.begun(started, flight)
    }

    /// Receives data that is still at the sender. Returns true if the receive has already ended; otherwise a
    /// `What::Receive` event with `who` and this number will report its end.
    ///
    /// # Safety
    /// The memory of `pieces` must have the size of the data, and be valid and unused by others until the receive has
    /// ended.
    pub unsafe fn receive(
        &self,
        from: Held,
        who: u64,
        number: u64,
        pieces: &[Span],
    ) -> std::result::Result<bool, String> {
        assert!(from.is_far(), "the data is here");
        let calls = self.lock();
        let flight = Flight::with(calls.notes, who, What::Receive(number), [0; HEAD], pieces);
        let (address, count, datatype) = flight.memory();
        let mut request = flight.request();
        request.mask |= api::OP_DATATYPE | api::OP_MEMORY_TYPE;
        request.datatype = datatype;
        // SAFETY: the data is held and used once. The caller vouches for the memory; the pieces are in `flight`.
        let started = unsafe {
            let into = address.cast_mut();
            (self.api.receive)(calls.worker, from.address, into, count, &raw const request)
        };
        self.begun(started, flight)
    }

    /// Gives the library back data that is no longer needed. If it is still at the sender, the sender's request ends.
    pub fn release(&self, held: Held) {
        let calls = self.lock();
        // SAFETY: the data is held and used once.
        unsafe { (self.api.release)(calls.worker, held.address) };
    }

    /// Starts a flush: it ends when the system, or the device, has everything that was sent to an endpoint. Returns
    /// true if it has already ended; otherwise a `What::Flush` event will report its end.
    pub fn flush(&self, to: &Endpoint) -> std::result::Result<bool, String> {
        let calls = self.lock();
        let flight = Flight::new(calls.notes, to.who, What::Flush, ptr::null_mut());
        let request = flight.request();
        // SAFETY: the endpoint is live.
        let started = unsafe { (self.api.ep_flush)(to.raw, &raw const request) };
        self.begun(started, flight)
    }

    /// Gives the flight to the library if the request is still in progress. Returns true if the request has ended.
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
