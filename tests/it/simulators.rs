//! Checks that Rust tests can build and open the ABI simulators. `tests/simulators` tests their behaviour.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;

fn open(path: &Path) -> *mut c_void {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string; the initialisers of the simulators do nothing.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{path:?} cannot be opened");
    library
}

fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: `library` is open and never closed.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

#[test]
fn every_library_opens_and_answers() {
    let built = crate::common::simulators::simulators();
    for (name, known) in [
        ("cuda", c"cuInit"),
        ("nccl", c"ncclCommInitRankConfig"),
        ("acl", c"aclInit"),
        ("hccl", c"HcclGroupStart"),
        ("hccl_two", c"HcclGroupStart"), // found in a library that `hccl_two` is linked to
        ("cncl", c"cnclInitComms"),
        ("cnrt", c"cnrtSetDevice"),
    ] {
        assert!(!symbol(open(&built[name]), known).is_null(), "{name} has no {known:?}");
    }
    assert!(symbol(open(&built["nccl_bare"]), c"ncclCommInitRankConfig").is_null());
    let nccl = open(&built["nccl"]);
    // SAFETY: the function types match nccl.h.
    let (version, text) = unsafe {
        let get: extern "C" fn(*mut i32) -> i32 = std::mem::transmute(symbol(nccl, c"ncclGetVersion"));
        let text: extern "C" fn(i32) -> *const c_char = std::mem::transmute(symbol(nccl, c"ncclGetErrorString"));
        let mut version = 0;
        assert_eq!(get(&mut version), 0);
        (version, CStr::from_ptr(text(5)).to_str().unwrap())
    };
    assert_eq!((version, text), (23_007, "invalid usage (simulated NCCL)"));
}

#[test]
fn names_can_be_left_out() {
    let library = open(&crate::common::simulators::without("hccl", "^HcclAllGatherV$"));
    assert!(symbol(library, c"HcclAllGatherV").is_null());
    assert!(!symbol(library, c"HcclReduceScatterV").is_null());
}
