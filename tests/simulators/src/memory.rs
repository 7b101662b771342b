//! Device memory, which is host memory: allocation, and the copies that streams make.

use std::alloc::Layout;
use std::collections::HashMap;
use std::sync::Mutex;

/// Alignment of allocations. Vendors align at least this much.
const ALIGNMENT: usize = 512;

static ALLOCATED: Mutex<Option<HashMap<usize, Layout>>> = Mutex::new(None);

pub fn allocate(bytes: usize) -> Option<usize> {
    let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()?;
    // SAFETY: the layout has a size above zero.
    let memory = unsafe { std::alloc::alloc(layout) } as usize;
    if memory == 0 {
        return None;
    }
    ALLOCATED.lock().unwrap().get_or_insert_default().insert(memory, layout);
    Some(memory)
}

/// False if the memory is not an allocation of ours.
pub fn free(memory: usize) -> bool {
    let Some(layout) = ALLOCATED.lock().unwrap().as_mut().and_then(|all| all.remove(&memory)) else { return false };
    // SAFETY: allocated with this layout, and just removed, so freed once.
    unsafe { std::alloc::dealloc(memory as *mut u8, layout) };
    true
}

/// Like `memmove`. The caller of the vendor's function guarantees that both ranges are valid.
pub fn copy(to: usize, from: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the C caller's promise, which the vendor's function would trust as well.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    }
}

pub fn set(to: usize, value: u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the C caller's promise, which the vendor's function would trust as well.
        unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes) };
    }
}

pub fn read(from: usize, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    copy(data.as_mut_ptr() as usize, from, bytes);
    data
}

pub fn write(to: usize, data: &[u8]) {
    copy(to, data.as_ptr() as usize, data.len());
}
