//! Arguments from C. A null pointer is detected. Any other pointer is trusted to be what the vendor's header says,
//! because a C function cannot check more. Only this file relies on that.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;

/// `const T*`
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct In<T>(*const T);

/// `T*` to memory that is written.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Out<T>(*mut T);

impl<T: Copy> In<T> {
    /// A pointer that was passed as a number, in a structure or a list.
    pub fn at(address: usize) -> In<T> {
        In(address as *const T)
    }

    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub fn get(self) -> Option<T> {
        // SAFETY: not null, so the C caller vouches for a readable T; it need not be aligned.
        (!self.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }

    /// Reads `count` elements. `None` for a null pointer, unless `count` is 0.
    pub fn list(self, count: usize) -> Option<Vec<T>> {
        if count > 0 && self.is_null() {
            return None;
        }
        // SAFETY: not null, so the C caller vouches for `count` readable elements; they need not be aligned.
        Some((0..count).map(|at| unsafe { self.0.add(at).read_unaligned() }).collect())
    }

    /// Reads the first `bytes` bytes behind the pointer.
    pub fn bytes(self, bytes: usize) -> Option<Vec<u8>> {
        In(self.0.cast::<u8>()).list(bytes)
    }
}

impl In<c_char> {
    pub fn text(self) -> Option<String> {
        // SAFETY: not null, so the C caller vouches for a string that ends with a zero byte.
        (!self.is_null()).then(|| unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

impl<T: Copy> Out<T> {
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// A pointer that was kept as a number, for use on another thread.
    pub fn of(address: usize) -> Out<T> {
        Out(address as *mut T)
    }

    pub fn address(self) -> usize {
        self.0 as usize
    }

    /// Pointer to element `index` of a list that is written.
    pub fn at(self, index: usize) -> Out<T> {
        Out(self.0.wrapping_add(index))
    }

    /// Returns false for a null pointer.
    pub fn set(self, value: T) -> bool {
        self.set_at(0, value)
    }

    pub fn set_at(self, at: usize, value: T) -> bool {
        if self.is_null() {
            return false;
        }
        // SAFETY: not null, so the C caller vouches for writable memory, aligned or not.
        unsafe { self.0.add(at).write_unaligned(value) };
        true
    }

    pub fn list(self, count: usize) -> Option<Vec<T>> {
        In(self.0.cast_const()).list(count)
    }

    /// Writes the bytes one by one.
    pub fn fill(self, bytes: &[u8]) -> bool {
        if self.is_null() {
            return false;
        }
        let to = self.0.cast::<MaybeUninit<u8>>();
        for (at, byte) in bytes.iter().enumerate() {
            // SAFETY: not null, so the C caller vouches for as many writable bytes as the vendor's type has.
            unsafe { to.add(at).write(MaybeUninit::new(*byte)) };
        }
        true
    }
}

/// Text that a function returns as `const char*`. It is never freed, and equal texts are kept only once.
pub fn forever(text: &str) -> *const c_char {
    use std::collections::HashMap;
    use std::ffi::CString;
    use std::sync::Mutex;
    static KEPT: Mutex<Option<HashMap<String, &'static CStr>>> = Mutex::new(None);
    let mut kept = KEPT.lock().unwrap();
    let entry = kept.get_or_insert_default().entry(text.to_string());
    entry
        .or_insert_with(|| Box::leak(CString::new(text.replace('\0', " ")).unwrap_or_default().into_boxed_c_str()))
        .as_ptr()
}
