//! Writes lines about calls to the file of `SAGELLM_SIM_TRACE`, and keeps the text of the last error.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::Mutex;

use once_cell::sync::Lazy;

use crate::settings;

static FILE: Lazy<Option<Mutex<File>>> = Lazy::new(|| {
    let path = format!("{}.{}", settings::get().trace.as_ref()?, std::process::id());
    let file = OpenOptions::new().create(true).append(true).open(&path);
    file.inspect_err(|error| eprintln!("sagellm simulator: cannot write {path}: {error}")).ok().map(Mutex::new)
});

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Writes one line: the vendor's name of the call, then `key=value` pairs. The text is made only if the trace is on.
pub fn call(line: impl FnOnce() -> String) {
    if let Some(file) = FILE.as_ref() {
        let line = line() + "\n";
        let _ = file.lock().unwrap().write_all(line.as_bytes());
    }
}

/// Records why a call on this thread is rejected.
pub fn refuse(text: impl Into<String>) {
    let text = text.into();
    call(|| format!("error {text}"));
    LAST.with(|last| *last.borrow_mut() = text);
}

pub fn last() -> String {
    LAST.with(|last| last.borrow().clone())
}
