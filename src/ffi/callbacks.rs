//! Implements the core's interfaces to its caller (`host`) by the shim's classes in `cpp/host/host.hpp`.

use super::bridge::ffi;
use super::convert::coded;
use super::handles::ParallelPart;
use crate::error::{Error, Result};
use crate::group;
use crate::host::Counting;

pub(super) struct StoreHook(pub(super) cxx::SharedPtr<ffi::Store>);

impl group::Store for StoreHook {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value).map_err(|e| Error::system(format!("the store refused to set {key}: {e}")))
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let mut value = Vec::new();
        match self.0.try_get(key, &mut value) {
            Ok(true) => Ok(Some(value)),
            Ok(false) => Ok(None),
            Err(e) => Err(Error::system(format!("the store refused to get {key}: {e}"))),
        }
    }
}

impl Counting for StoreHook {
    fn add(&self, key: &str, by: i64) -> Result<i64> {
        self.0.add(key, by).map_err(|e| Error::system(format!("the store refused to add to {key}: {e}")))
    }
    fn remove(&self, key: &str) -> Result<()> {
        self.0.remove(key).map_err(|e| Error::system(format!("the store refused to delete {key}: {e}")))
    }
    fn connection(&self) -> usize {
        self.0.connection()
    }
}

pub(super) struct CompletionHook {
    pub(super) inner: cxx::SharedPtr<ffi::Completion>,
    pub(super) staged: bool,
}

impl group::Completion for CompletionHook {
    fn prepare(&self) {
        if self.staged {
            self.inner.prepare();
        }
    }
    fn store_back(&self) {
        if self.staged {
            self.inner.store_back();
        }
    }
    fn ended(&self, error: Option<&Error>) {
        self.inner.ended(&error.map(coded).unwrap_or_default());
    }
}

pub(super) struct PythonHook;

impl group::Host for PythonHook {
    fn interrupted(&self) -> bool {
        ffi::check_interrupt()
    }
    fn place(&self, thread: u64) -> Option<String> {
        Some(ffi::place_of_thread(thread)).filter(|place| !place.is_empty())
    }
    fn call_site(&self, site: u32) -> Option<String> {
        (site != 0).then(|| ffi::place_of_call(site)).filter(|place| !place.is_empty())
    }
    fn threads(&self) -> usize {
        ffi::intraop_threads()
    }
    fn parallel(&self, parts: usize, part: &(dyn Fn(usize) + Sync)) {
        ffi::run_parallel(parts, &ParallelPart(part));
    }
}

pub(super) struct PythonLog;

impl log::Log for PythonLog {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::max_level()
    }
    fn log(&self, record: &log::Record) {
        if self.enabled(record.metadata()) {
            ffi::log_line(record.level() as u8, &record.args().to_string());
        }
    }
    fn flush(&self) {}
}
