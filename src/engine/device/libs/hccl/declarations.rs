//! The part of HCCL's C interface that we use (hccl.h, hccl_types.h, hccl_comm.h of CANN; CANN 9 splits it into libhccl
//! and libhcomm). Enums are integers.

use std::ffi::{c_char, c_int, c_void};

use crate::engine::loader::symbols;

pub type Comm = *mut c_void;
pub type Code = c_int;

pub const SUCCESS: Code = 0;
pub const NOT_SUPPORT: Code = 5;
pub const AGAIN: Code = 20;

/// Values of HcclDataType.
pub const INT8: c_int = 0;
pub const INT16: c_int = 1;
pub const INT32: c_int = 2;
pub const FP16: c_int = 3;
pub const FP32: c_int = 4;
pub const INT64: c_int = 5;
pub const BFP16: c_int = 11;

/// Values of HcclReduceOp.
pub const SUM: c_int = 0;
pub const PROD: c_int = 1;
pub const MAX: c_int = 2;
pub const MIN: c_int = 3;

/// Values of HcclSendRecvType.
pub const SEND: c_int = 0;
pub const RECV: c_int = 1;

pub const ID_BYTES: usize = 4108;

/// The struct HcclRootInfo. Its alignment is 1, and its size is not a multiple of 8.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RootInfo(pub [u8; ID_BYTES]);
const _: () = assert!(size_of::<RootInfo>() == 4108 && align_of::<RootInfo>() == 1);

/// The struct HcclSendRecvItem.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SendRecvItem {
    pub kind: c_int,
    pub buffer: *mut c_void,
    pub count: u64,
    pub dtype: c_int,
    pub peer: u32,
}
// SAFETY: the pointers are addresses of device memory, which this process never dereferences.
unsafe impl Send for SendRecvItem {}
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<SendRecvItem>() == 32 && offset_of!(SendRecvItem, buffer) == 8);
    assert!(offset_of!(SendRecvItem, count) == 16 && offset_of!(SendRecvItem, dtype) == 24);
    assert!(offset_of!(SendRecvItem, peer) == 28);
};

pub const NAME_BYTES: usize = 128;
const ALGORITHM_BYTES: usize = 1600;
const CONFIG_MAGIC: u32 = 0xf0f0_f0f0;
const NOT_SET: u32 = u32::MAX;

/// The struct HcclCommConfig as of version 8. We pass version 2, which ends after the name, unless an algorithm is set;
/// then we pass version 8. We never pass version 10, because two different layouts have that number.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    reserved: u64,
    buffer_size: u32,
    deterministic: u32,
    name: [u8; NAME_BYTES],
    udi: [u8; NAME_BYTES],
    expansion_mode: u32,
    traffic_class: u32,
    service_level: u32,
    world_rank: u32,
    job: u64,
    graph_zero_copy: u8,
    exec_timeout: c_int,
    algorithm: [u8; ALGORITHM_BYTES],
    retry_enable: [u8; 50],
    retry_params: [u8; 128],
}
const VERSION_2_BYTES: usize = std::mem::offset_of!(Config, udi);
const VERSION_8_BYTES: usize = size_of::<Config>();
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(Config, magic) == 8 && offset_of!(Config, version) == 12 && offset_of!(Config, reserved) == 16);
    assert!(offset_of!(Config, buffer_size) == 24 && offset_of!(Config, deterministic) == 28);
    assert!(offset_of!(Config, name) == 32 && offset_of!(Config, udi) == 160);
    assert!(offset_of!(Config, expansion_mode) == 288 && offset_of!(Config, traffic_class) == 292);
    assert!(offset_of!(Config, world_rank) == 300 && offset_of!(Config, job) == 304);
    assert!(offset_of!(Config, graph_zero_copy) == 312 && offset_of!(Config, exec_timeout) == 316);
    assert!(offset_of!(Config, algorithm) == 320 && offset_of!(Config, retry_enable) == 1920);
    assert!(offset_of!(Config, retry_params) == 1970);
    assert!(VERSION_2_BYTES == 160 && VERSION_8_BYTES == 2104);
};

/// The library takes an algorithm if HcclGetCommConfigCapability returns a number larger than this.
pub const CAN_TAKE_ALGORITHM: u32 = 9;

impl Config {
    /// Makes a config. Texts are truncated to fit with a terminating zero.
    pub fn new(name: &str, algorithm: &str) -> Box<Config> {
        let (version, size) = if algorithm.is_empty() { (2, VERSION_2_BYTES) } else { (8, VERSION_8_BYTES) };
        let mut config = Box::new(Config {
            size,
            magic: CONFIG_MAGIC,
            version,
            reserved: 0,
            buffer_size: NOT_SET,
            deterministic: NOT_SET,
            name: [0; NAME_BYTES],
            udi: [0; NAME_BYTES],
            expansion_mode: 0,
            traffic_class: NOT_SET,
            service_level: NOT_SET,
            world_rank: 0,
            job: 0,
            graph_zero_copy: 0,
            exec_timeout: -1,
            algorithm: [0; ALGORITHM_BYTES],
            retry_enable: [0; 50],
            retry_params: [0; 128],
        });
        put(&mut config.name, name);
        put(&mut config.algorithm, algorithm);
        config
    }
}

fn put(field: &mut [u8], text: &str) {
    let bytes = text.bytes().filter(|byte| *byte != 0).take(field.len() - 1);
    field.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte);
}

symbols! {
    /// Buffers are `void*`, streams are `aclrtStream`, and counts are 64-bit numbers of elements.
    Table {
        get_root_info = "HcclGetRootInfo"(*mut RootInfo) -> Code;
        init_config = "HcclCommInitRootInfoConfig"(u32, *const RootInfo, u32, *const Config, *mut Comm) -> Code;
        init = "HcclCommInitRootInfo"(u32, *const RootInfo, u32, *mut Comm) -> Code;
        create_sub = "HcclCreateSubCommConfig"(*mut Comm, u32, *mut u32, u64, u32, *mut Config, *mut Comm) -> Code;
        destroy = "HcclCommDestroy"(Comm) -> Code;
        get_async_error = "HcclGetCommAsyncError"(Comm, *mut Code) -> Code;
        get_error_string = "HcclGetErrorString"(Code) -> *const c_char;
        config_capability = "HcclGetCommConfigCapability"() -> u32;
        version_of = "aclsysGetVersionNum"(*const c_char, *mut c_int) -> Code;
        all_reduce = "HcclAllReduce"(*mut c_void, *mut c_void, u64, c_int, c_int, Comm, *mut c_void) -> Code;
        broadcast = "HcclBroadcast"(*mut c_void, u64, c_int, u32, Comm, *mut c_void) -> Code;
        reduce = "HcclReduce"(*mut c_void, *mut c_void, u64, c_int, c_int, u32, Comm, *mut c_void) -> Code;
        reduce_scatter = "HcclReduceScatter"(*mut c_void, *mut c_void, u64, c_int, c_int, Comm, *mut c_void) -> Code;
        all_gather = "HcclAllGather"(*mut c_void, *mut c_void, u64, c_int, Comm, *mut c_void) -> Code;
        scatter = "HcclScatter"(*mut c_void, *mut c_void, u64, c_int, u32, Comm, *mut c_void) -> Code;
        send = "HcclSend"(*mut c_void, u64, c_int, u32, Comm, *mut c_void) -> Code;
        recv = "HcclRecv"(*mut c_void, u64, c_int, u32, Comm, *mut c_void) -> Code;
        all_to_all_v = "HcclAlltoAllV"(
            *const c_void, *const c_void, *const c_void, c_int,
            *const c_void, *const c_void, *const c_void, c_int, Comm, *mut c_void,
        ) -> Code;
        batch_send_recv = "HcclBatchSendRecv"(*mut SendRecvItem, u32, Comm, *mut c_void) -> Code;
    }
}
