//! The part of NCCL's C interface that sagellm uses, and a table of its functions that is filled at run time. So no
//! library is linked, and the build needs no header. `tests/header.rs` compares these declarations with an installed
//! `nccl.h` (last: 2.30.7): sizes, offsets, values, and how each argument is passed. Enums are integers, because a
//! library may return numbers that these declarations do not know.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

pub type Comm = *mut c_void;
pub type Code = c_int;

pub const SUCCESS: Code = 0;
pub const IN_PROGRESS: Code = 7;

/// Values of ncclDataType_t.
pub const INT8: c_int = 0;
pub const UINT8: c_int = 1;
pub const INT32: c_int = 2;
pub const UINT32: c_int = 3;
pub const INT64: c_int = 4;
pub const UINT64: c_int = 5;
pub const FLOAT16: c_int = 6;
pub const FLOAT32: c_int = 7;
pub const FLOAT64: c_int = 8;
pub const BFLOAT16: c_int = 9;
pub const FLOAT8E4M3: c_int = 10;
pub const FLOAT8E5M2: c_int = 11;

/// Values of ncclRedOp_t. ncclRedOpCreatePreMulSum returns larger numbers.
pub const SUM: c_int = 0;
pub const PROD: c_int = 1;
pub const MAX: c_int = 2;
pub const MIN: c_int = 3;
pub const AVG: c_int = 4;

/// ncclScalarDevice: the scalar is in device memory, and is read when the operation runs. ncclScalarHostImmediate: the
/// scalar is in host memory, and is read before the call returns.
pub const SCALAR_DEVICE: c_int = 0;
pub const SCALAR_HOST: c_int = 1;
pub const NO_COLOR: c_int = -1;
pub const SHRINK_ABORT: c_int = 1;

pub const ID_BYTES: usize = 128;

/// The struct ncclUniqueId. It is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; ID_BYTES]);
const _: () = assert!(size_of::<UniqueId>() == 128 && align_of::<UniqueId>() == 1);

/// The struct ncclConfig_t as of 2.27. `version` must be the version of this layout: then a newer library itself fills
/// in the fields that it has after these. `version` must never be the library's own version, or the library would read
/// fields that this struct does not have.
#[repr(C)]
pub struct Config {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
    pub traffic_class: c_int,
    pub comm_name: *const c_char,
    pub collnet_enable: c_int,
    pub cta_policy: c_int,
    pub shrink_share: c_int,
    pub nvls_ctas: c_int,
}

/// The values that NCCL_CONFIG_INITIALIZER writes.
pub const CONFIG_MAGIC: u32 = 0xcafe_beef;
const CONFIG_VERSION: u32 = 22700;
pub const UNDEFINED: c_int = c_int::MIN;

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Config>() == 72); // no padding at the end: every byte belongs to a field
    assert!(offset_of!(Config, magic) == 8 && offset_of!(Config, version) == 12 && offset_of!(Config, blocking) == 16);
    assert!(offset_of!(Config, net_name) == 32 && offset_of!(Config, split_share) == 40);
    assert!(offset_of!(Config, comm_name) == 48 && offset_of!(Config, collnet_enable) == 56);
    assert!(offset_of!(Config, shrink_share) == 64 && offset_of!(Config, nvls_ctas) == 68);
};

impl Config {
    /// Returns the config of a blocking communicator with this name. The communicator shares no resources with its
    /// parent. All other fields have the library's defaults. The name must live as long as the communicator, because
    /// the library keeps the pointer and does not copy the name.
    pub fn blocking(name: &CStr) -> Config {
        Config {
            size: size_of::<Config>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: 0,
            traffic_class: UNDEFINED,
            comm_name: name.as_ptr(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
        }
    }
}

/// A function that the library may lack.
#[derive(Clone, Copy, Debug)]
pub struct Symbol<F> {
    pub function: Option<F>,
    pub name: &'static str,
}

impl<F: Copy> Symbol<F> {
    pub fn there(&self) -> bool {
        self.function.is_some()
    }

    pub fn optional(&self) -> Option<F> {
        self.function
    }
}

/// How the C ABI passes a value of this type, as text. The test compares it with the header.
pub trait Passed {
    const HOW: &'static str;
}
impl<T> Passed for *mut T {
    const HOW: &'static str = "pointer";
}
impl<T> Passed for *const T {
    const HOW: &'static str = "pointer";
}
impl Passed for c_int {
    const HOW: &'static str = "4 bytes";
}
impl Passed for usize {
    const HOW: &'static str = "8 bytes";
}
impl Passed for UniqueId {
    const HOW: &'static str = "struct of 128 bytes";
}

macro_rules! functions {
    ($(#[$meta:meta])* $table:ident { $($field:ident = $name:literal ($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$meta])*
        pub struct $table { $(pub $field: Symbol<unsafe extern "C" fn($($argument),*) -> $result>,)* }

        impl $table {
            /// Every name that is looked up.
            pub const NAMES: &'static [&'static str] = &[$($name),*];
            /// For each name, how the result and then the arguments are passed.
            pub const SIGNATURES: &'static [(&'static str, &'static [&'static str])] =
                &[$(($name, &[<$result as Passed>::HOW, $(<$argument as Passed>::HOW),*])),*];

            /// Looks up every function with `address`.
            ///
            /// # Safety
            /// `address` must return addresses of functions of one NCCL library, which is never unloaded.
            pub unsafe fn load(mut address: impl FnMut(&'static str) -> Option<NonNull<c_void>>) -> $table {
                $table {
                    $($field: Symbol {
                        name: $name,
                        // SAFETY: the caller guarantees that this is the function's address, and the type is the
                        // header's declaration. Function and data pointers have the same size on every platform that
                        // has dlsym.
                        function: address($name).map(|found| unsafe {
                            std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($argument),*) -> $result>(found)
                        }),
                    },)*
                }
            }
        }
    };
}

functions! {
    /// Streams are pointers; counts are in elements.
    #[derive(Clone, Copy, Debug)]
    Table {
        get_version = "ncclGetVersion"(*mut c_int) -> Code;
        get_unique_id = "ncclGetUniqueId"(*mut UniqueId) -> Code;
        init_rank_config = "ncclCommInitRankConfig"(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Code;
        init_rank = "ncclCommInitRank"(*mut Comm, c_int, UniqueId, c_int) -> Code;
        finalize = "ncclCommFinalize"(Comm) -> Code;
        destroy = "ncclCommDestroy"(Comm) -> Code;
        abort = "ncclCommAbort"(Comm) -> Code;
        split = "ncclCommSplit"(Comm, c_int, c_int, *mut Comm, *mut Config) -> Code;
        shrink = "ncclCommShrink"(Comm, *mut c_int, c_int, *mut Comm, *mut Config, c_int) -> Code;
        get_error_string = "ncclGetErrorString"(Code) -> *const c_char;
        get_last_error = "ncclGetLastError"(Comm) -> *const c_char;
        get_async_error = "ncclCommGetAsyncError"(Comm, *mut Code) -> Code;
        comm_user_rank = "ncclCommUserRank"(Comm, *mut c_int) -> Code;
        comm_count = "ncclCommCount"(Comm, *mut c_int) -> Code;
        create_premul_sum = "ncclRedOpCreatePreMulSum"(*mut c_int, *mut c_void, c_int, c_int, Comm) -> Code;
        destroy_op = "ncclRedOpDestroy"(c_int, Comm) -> Code;
        all_reduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        broadcast = "ncclBroadcast"(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        reduce = "ncclReduce"(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, *mut c_void) -> Code;
        all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> Code;
        reduce_scatter = "ncclReduceScatter"(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        gather = "ncclGather"(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        scatter = "ncclScatter"(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        send = "ncclSend"(*const c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        recv = "ncclRecv"(*mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        group_start = "ncclGroupStart"() -> Code;
        group_end = "ncclGroupEnd"() -> Code;
    }
}
