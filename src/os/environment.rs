//! Sets environment variables for a library while other threads may read the environment.
//!
//! `setenv` moves the array of variables when it grows, and frees the old array. torch, gloo and vendors' libraries
//! call `getenv` at any time on any thread, without a lock. A thread that still reads the old array crashes with
//! SIGSEGV. So [`add`] makes a new array that has one more variable, and replaces the old array by a single store. The
//! old array is never freed.

#![allow(unsafe_code)] // reads and replaces the C library's array of variables

use std::ffi::{CStr, CString, c_char};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

unsafe extern "C" {
    /// The C library's array of variables, "NAME=value" each, terminated by null. Written here (release, so that a
    /// reader of the new array sees its contents) and by `setenv`. `getenv` reads it on any thread, and this file reads
    /// it too (acquire).
    static environ: AtomicPtr<*mut c_char>;
}

/// The addresses of all arrays that were made here. Readers may still use an earlier one, so none is freed. Locked by a
/// thread that replaces the array.
static ARRAYS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Sets a variable, unless it is already set. A concurrent `setenv` of another thread may undo the change, like any other
/// change. Each call keeps one more array.
pub fn add(name: &CStr, value: &CStr) {
    let mut arrays = ARRAYS.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the text is zero-terminated, and the result is only compared.
    if !unsafe { libc::getenv(name.as_ptr()) }.is_null() {
        return;
    }
    let text = [name.to_bytes(), b"=", value.to_bytes()].concat();
    let Ok(entry) = CString::new(text) else { return }; // parts of C strings contain no zero
    let mut entries = vec![entry.into_raw()];
    // SAFETY: `environ` has the declared type, and the array ends with null.
    unsafe {
        let mut at = environ.load(Ordering::Acquire);
        while !at.is_null() && !(*at).is_null() {
            entries.push(*at);
            at = at.add(1);
        }
        entries.push(ptr::null_mut());
        let array = entries.leak().as_mut_ptr();
        arrays.push(array as usize);
        environ.store(array, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn found(name: &CStr) -> Option<&'static CStr> {
        // SAFETY: a variable that was found stays, because nothing in this process changes or removes variables.
        unsafe { libc::getenv(name.as_ptr()).as_ref().map(|text| CStr::from_ptr(text)) }
    }

    #[test]
    fn threads_may_read_the_environment_while_it_grows() {
        let names: Vec<CString> =
            (0..500).map(|number| CString::new(format!("SAGELLM_TEST_VARIABLE_{number}")).unwrap()).collect();
        let stop = AtomicBool::new(false);
        let read: Vec<bool> = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let mut right = true;
                        while !stop.load(Ordering::Relaxed) {
                            right &= found(c"SAGELLM_TEST_VARIABLE_NEVER").is_none();
                            right &= found(c"PATH").is_some();
                        }
                        right
                    })
                })
                .collect();
            names.iter().for_each(|name| add(name, name));
            stop.store(true, Ordering::Relaxed);
            readers.into_iter().map(|reader| reader.join().unwrap()).collect()
        });
        assert_eq!(read, [true; 3]);
        assert!(names.iter().all(|name| found(name) == Some(name)));
        assert_eq!(std::env::var("SAGELLM_TEST_VARIABLE_7").unwrap(), "SAGELLM_TEST_VARIABLE_7");
        add(&names[7], c"another");
        assert_eq!(found(&names[7]), Some(names[7].as_c_str()), "what is set stays");
    }
}
