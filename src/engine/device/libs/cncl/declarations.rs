//! The part of CNCL's C interface that we use (cncl.h 1.25). Enums are integers. The interface differs from NCCL's:
//! communicators are made from arrays, out-parameters come first, and `cnclGetCommAsyncError` returns the
//! communicator's state as its result.

use std::ffi::{c_char, c_int, c_void};

use crate::engine::loader::symbols;

pub type Comm = *mut c_void;
pub type Code = c_int;

pub const SUCCESS: Code = 0;
/// Work is in progress; not an error.
pub const ASYNC_IN_PROGRESS: Code = 0x06;

/// Values of cnclDataType_t.
pub const FLOAT16: c_int = 0x10;
pub const BFLOAT16: c_int = 0x11;
pub const FLOAT32: c_int = 0x12;
pub const INT8: c_int = 0x20;
pub const INT16: c_int = 0x21;
pub const INT32: c_int = 0x22;
pub const INT64: c_int = 0x23;
pub const UINT8: c_int = 0x30;
pub const UINT16: c_int = 0x31;
pub const UINT32: c_int = 0x32;
pub const UINT64: c_int = 0x33;

/// Values of cnclReduceOp_t.
pub const SUM: c_int = 0;
pub const PROD: c_int = 1;
pub const MAX: c_int = 2;
pub const MIN: c_int = 3;

pub const ID_BYTES: usize = 136;

/// The struct cnclCliqueId.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CliqueId {
    pub data: [u8; 128],
    pub hash: u64,
}
const _: () = assert!(size_of::<CliqueId>() == ID_BYTES && align_of::<CliqueId>() == 8);
const _: () = assert!(std::mem::offset_of!(CliqueId, hash) == 128);

symbols! {
    /// Counts are in elements; queues are pointers.
    Table {
        get_clique_id = "cnclGetCliqueId"(*mut CliqueId) -> Code;
        init_comms = "cnclInitComms"(*mut Comm, c_int, *const c_int, *const c_int, c_int, *const CliqueId) -> Code;
        destroy_comms = "cnclDestroyComms"(*mut Comm, c_int) -> Code;
        abort_comm = "cnclAbortComm"(Comm) -> Code;
        get_comm_async_error = "cnclGetCommAsyncError"(Comm) -> Code;
        get_error_str = "cnclGetErrorStr"(Code) -> *const c_char;
        get_lib_version = "cnclGetLibVersion"(*mut c_int, *mut c_int, *mut c_int) -> Code;
        bcast = "cnclBcast"(*mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        all_reduce = "cnclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        reduce = "cnclReduce"(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, *mut c_void) -> Code;
        reduce_scatter = "cnclReduceScatter"(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        all_gather = "cnclAllGather"(*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> Code;
        send = "cnclSend"(*mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        recv = "cnclRecv"(*mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        group_start = "cnclGroupStart"() -> Code;
        group_end = "cnclGroupEnd"() -> Code;
    }
}
