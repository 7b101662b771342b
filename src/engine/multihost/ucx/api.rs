//! The functions of UCX that `worker` calls, with the types that they take.
//!
//! The declarations are ours. They follow UCX's documented interface: `ucp/api/ucp.h` and `ucp/api/ucp_def.h` (contexts,
//! workers, endpoints, active messages), `ucs/type/status.h` (results), and `ucs/debug/log_def.h` (messages). They were
//! compared with the headers of 1.13 and 1.22. A structure that the library reads begins with a mask of the fields that
//! are set, so later versions, which have more fields, accept it.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::engine::loader::{Hints, Known, Library};
use crate::error::Result;

/// UCX, and how to get it.
pub static UCX: Known = Known {
    key: "UCX",
    title: "UCX",
    names: &["libucp.so.0"],
    package: "libucx/lib",
    companion: None,
    fix: "Install UCX on every host (Debian: libucx0; pip: libucx-cu12), or unset SAGELLM_LINK on all ranks.",
};

/// A result. C declares it as an enumeration that is packed into one byte.
pub type Status = i8;
pub const OK: Status = 0;
pub const IN_PROGRESS: Status = 1;
pub const BUSY: Status = -15;
/// The lowest status. A `Started` from this value to 0 is a status, not a pointer.
const LAST: isize = -100;

/// What a call returns if it may take longer: a request, null, or a status.
pub type Started = *mut c_void;

/// Returns the status in a `Started`, or None if it is a request.
pub fn status_of(started: Started) -> Option<Status> {
    let number = started as isize;
    (LAST..=0).contains(&number).then_some(number as Status)
}

pub type Context = *mut c_void;
pub type Config = *mut c_void;
pub type Worker = *mut c_void;
pub type Endpoint = *mut c_void;

pub const API_MAJOR: c_uint = 1;
/// Minor version of the interface that has everything declared here.
pub const API_MINOR: c_uint = 13;

pub const PARAM_FEATURES: u64 = 1;
pub const FEATURE_WAKEUP: u64 = 1 << 4;
pub const FEATURE_AM: u64 = 1 << 6;

/// `ucp_params_t`.
#[repr(C)]
pub struct Params {
    pub mask: u64,
    pub features: u64,
    /// The fields that we never set.
    pub rest: [u64; 16],
}

pub const WORKER_THREAD_MODE: u64 = 1;
pub const SERIALIZED: c_uint = 1;

/// `ucp_worker_params_t`.
#[repr(C)]
pub struct WorkerParams {
    pub mask: u64,
    pub thread_mode: c_uint,
    pub rest: [u64; 160],
}

pub const EP_REMOTE_ADDRESS: u64 = 1;
pub const EP_ERROR_MODE: u64 = 1 << 1;
pub const EP_ERROR_HANDLER: u64 = 1 << 2;
/// Each request ends, with an error if the peer is gone.
pub const MODE_PEER: c_uint = 1;

pub type OnError = unsafe extern "C" fn(argument: *mut c_void, endpoint: Endpoint, status: Status);

/// `ucp_ep_params_t`.
#[repr(C)]
pub struct EndpointParams {
    pub mask: u64,
    pub address: *const c_void,
    pub error_mode: c_uint,
    pub on_error: Option<OnError>,
    pub argument: *mut c_void,
    pub rest: [u64; 32],
}

pub const AM_ID: u64 = 1;
pub const AM_FLAGS: u64 = 1 << 1;
pub const AM_CALLBACK: u64 = 1 << 2;
pub const AM_ARGUMENT: u64 = 1 << 3;
/// The handler is called when the whole message is there, not for its first fragment.
pub const WHOLE_MESSAGE: u32 = 1;

/// `ucp_am_recv_param_t`.
#[repr(C)]
pub struct Arrived {
    pub attributes: u64,
    pub reply: Endpoint,
}
/// The data may be kept after the handler has returned.
pub const MAY_KEEP: u64 = 1 << 16;
/// The data is still at the sender, and the handler gets a descriptor of it.
pub const RENDEZVOUS: u64 = 1 << 17;

pub type OnMessage = unsafe extern "C" fn(
    argument: *mut c_void,
    head: *const c_void,
    head_bytes: usize,
    data: *mut c_void,
    bytes: usize,
    param: *const Arrived,
) -> Status;

/// `ucp_am_handler_param_t`.
#[repr(C)]
pub struct Handler {
    pub mask: u64,
    pub id: c_uint,
    pub flags: u32,
    pub callback: Option<OnMessage>,
    pub argument: *mut c_void,
}

pub const OP_CALLBACK: u32 = 1 << 1;
pub const OP_USER_DATA: u32 = 1 << 2;
pub const OP_DATATYPE: u32 = 1 << 3;
pub const OP_FLAGS: u32 = 1 << 4;
pub const OP_MEMORY_TYPE: u32 = 1 << 6;
/// Close without waiting for the peer; requests in flight end with an error.
pub const CLOSE_FORCE: u32 = 1;
/// The data is sent with the header and not when the receiver asks for it.
pub const SEND_EAGER: u32 = 1 << 1;
/// One contiguous buffer.
pub const CONTIGUOUS: u64 = 1 << 3;
/// A list of `Piece`s.
pub const PIECES: u64 = 2;

/// `ucp_dt_iov_t`.
#[repr(C)]
pub struct Piece {
    pub address: *mut c_void,
    pub bytes: usize,
}

pub type OnSent = unsafe extern "C" fn(request: *mut c_void, status: Status, argument: *mut c_void);
pub type OnReceived = unsafe extern "C" fn(request: *mut c_void, status: Status, bytes: usize, argument: *mut c_void);

/// The member of `ucp_request_param_t` that has the callback.
#[repr(C)]
pub union Callback {
    pub sent: OnSent,
    pub received: OnReceived,
}

/// `ucp_request_param_t`.
#[repr(C)]
pub struct Request {
    pub mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub callback: Callback,
    pub datatype: u64,
    pub argument: *mut c_void,
    pub reply_buffer: *mut c_void,
    /// 0: memory of the host.
    pub memory_type: c_uint,
    pub received: *mut c_void,
    pub handle: *mut c_void,
}

/// Gets a message of the library, as a format for `vprintf` and its arguments. `arguments` is a `va_list`, which all
/// systems that UCX supports pass as an address.
pub type OnLog = unsafe extern "C" fn(
    file: *const c_char,
    line: c_uint,
    function: *const c_char,
    level: c_int,
    component: *const c_void,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int;
/// `OnLog` returns this so that no other handler gets the message.
pub const LOG_STOP: c_int = 0;
/// Levels of messages: higher numbers are less urgent.
pub const LOG_ERROR: c_int = 1;
pub const LOG_WARN: c_int = 2;

macro_rules! functions {
    ($($field:ident = $name:literal ($($argument:ty),* $(,)?) -> $result:ty;)*) => {
        /// The functions of the library. `load` fails if the library lacks one.
        pub struct Api {
            library: Library,
            $(pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }
        impl Api {
            fn load(library: Library) -> Result<Api> {
                // SAFETY: each declaration matches the library's, as the top of this file says.
                $(let $field = unsafe { library.symbol::<unsafe extern "C" fn($($argument),*) -> $result>($name) };)*
                $(let $field = $field.of(&library)?;)*
                Ok(Api { library, $($field,)* })
            }
        }
    };
}

functions! {
    version = "ucp_get_version"(*mut c_uint, *mut c_uint, *mut c_uint) -> ();
    config_read = "ucp_config_read"(*const c_char, *const c_char, *mut Config) -> Status;
    config_modify = "ucp_config_modify"(Config, *const c_char, *const c_char) -> Status;
    config_release = "ucp_config_release"(Config) -> ();
    init = "ucp_init_version"(c_uint, c_uint, *const Params, Config, *mut Context) -> Status;
    worker_create = "ucp_worker_create"(Context, *const WorkerParams, *mut Worker) -> Status;
    worker_address = "ucp_worker_get_address"(Worker, *mut *mut c_void, *mut usize) -> Status;
    address_release = "ucp_worker_release_address"(Worker, *mut c_void) -> ();
    worker_efd = "ucp_worker_get_efd"(Worker, *mut c_int) -> Status;
    worker_arm = "ucp_worker_arm"(Worker) -> Status;
    progress = "ucp_worker_progress"(Worker) -> c_uint;
    set_handler = "ucp_worker_set_am_recv_handler"(Worker, *const Handler) -> Status;
    ep_create = "ucp_ep_create"(Worker, *const EndpointParams, *mut Endpoint) -> Status;
    ep_close = "ucp_ep_close_nbx"(Endpoint, *const Request) -> Started;
    ep_flush = "ucp_ep_flush_nbx"(Endpoint, *const Request) -> Started;
    send = "ucp_am_send_nbx"(Endpoint, c_uint, *const c_void, usize, *const c_void, usize, *const Request) -> Started;
    receive = "ucp_am_recv_data_nbx"(Worker, *mut c_void, *mut c_void, usize, *const Request) -> Started;
    release = "ucp_am_data_release"(Worker, *mut c_void) -> ();
    request_free = "ucp_request_free"(*mut c_void) -> ();
    status_text = "ucs_status_string"(Status) -> *const c_char;
    push_log = "ucs_log_push_handler"(OnLog) -> ();
}

impl Api {
    /// Opens the library. The error says where the library was searched for, and what to do.
    pub fn open(hints: &Hints) -> Result<Api> {
        Api::load(Library::open(&UCX, hints)?)
    }

    /// Returns the library's file.
    pub fn path(&self) -> &str {
        &self.library.path
    }

    /// Returns the library's text for a status.
    pub fn text(&self, status: Status) -> String {
        // SAFETY: the function accepts any number and returns a text that is never freed.
        unsafe { CStr::from_ptr((self.status_text)(status)) }.to_string_lossy().into_owned()
    }
}
