//! The core's interfaces to its caller (`host`, `multihost::transport`), implemented by the shim's classes of
//! `cpp/host/host.hpp`.

use std::time::Duration;

use super::bridge::ffi;
use super::convert::coded;
use crate::engine::multihost::link;
use crate::error::{Error, Result};
use crate::group;
use crate::host::Counting;

pub(super) struct StoreHook(pub(super) cxx::SharedPtr<ffi::Store>);

impl group::Store for StoreHook {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value).map_err(|e| Error::System(format!("the store refused to set {key}: {e}")))
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let mut value = Vec::new();
        match self.0.try_get(key, &mut value) {
            Ok(true) => Ok(Some(value)),
            Ok(false) => Ok(None),
            Err(e) => Err(Error::System(format!("the store refused to get {key}: {e}"))),
        }
    }
}

impl Counting for StoreHook {
    fn add(&self, key: &str, by: i64) -> Result<i64> {
        self.0.add(key, by).map_err(|e| Error::System(format!("the store refused to add to {key}: {e}")))
    }
    fn remove(&self, key: &str) -> Result<()> {
        self.0.remove(key).map_err(|e| Error::System(format!("the store refused to delete {key}: {e}")))
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
            self.inner.reached(ffi::Moment::kBegins, "");
        }
    }
    fn store_back(&self) {
        if self.staged {
            self.inner.reached(ffi::Moment::kHasResults, "");
        }
    }
    fn ended(&self, error: Option<&Error>) {
        self.inner.reached(ffi::Moment::kEnded, &error.map(coded).unwrap_or_default());
    }
}

pub(super) struct LinkHook(pub(super) cxx::SharedPtr<ffi::Link>);

/// A transfer and the memory it works on, which is freed after it.
struct TransferHook {
    transfer: cxx::UniquePtr<ffi::InFlight>,
    buffer: Vec<u8>,
}

impl link::Link for LinkHook {
    fn receive(&self, peer: usize, tag: u32, mut buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn link::Transfer>> {
        assert!(bytes <= buffer.len(), "a receive of {bytes} bytes into {}", buffer.len());
        // SAFETY: the buffer holds `bytes` and lives, unmoved on the heap, as long as the transfer beside it.
        let transfer = unsafe { self.0.transfer(false, peer as u32, tag, buffer.as_mut_ptr(), bytes) };
        Ok(Box::new(TransferHook { transfer: transfer.map_err(|e| lost(peer, &e))?, buffer }))
    }

    fn send(&self, peer: usize, tag: u32, mut buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn link::Transfer>> {
        assert!(bytes <= buffer.len(), "a send of {bytes} bytes from {}", buffer.len());
        // SAFETY: as above.
        let transfer = unsafe { self.0.transfer(true, peer as u32, tag, buffer.as_mut_ptr(), bytes) };
        Ok(Box::new(TransferHook { transfer: transfer.map_err(|e| lost(peer, &e))?, buffer }))
    }

    fn cut(&self) {
        self.0.cut();
    }
}

fn lost(peer: usize, error: &cxx::Exception) -> Error {
    let first = error.what().lines().next().unwrap_or_default().to_string();
    let text = format!(
        "sagellm: the connection to rank {peer} on another host is gone; its process ended, or the network between them \
         failed. Make a new group to go on ({first})"
    );
    Error::RankFailed { rank: peer, text }
}

impl link::Transfer for TransferHook {
    fn wait(mut self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, String> {
        let waited = self.transfer.pin_mut().wait(timeout.as_millis().min(u128::from(u64::MAX)) as u64);
        waited.map_err(|error| error.what().to_string())?;
        let TransferHook { transfer, buffer } = *self;
        drop(transfer);
        Ok(buffer)
    }
}

pub(super) struct PythonHook;

impl group::Host for PythonHook {
    fn interrupted(&self) -> bool {
        ffi::check_interrupt()
    }
    fn place(&self, thread: u64) -> Option<String> {
        Some(ffi::python_place(thread, 0)).filter(|place| !place.is_empty())
    }
    fn call_site(&self, site: u32) -> Option<String> {
        (site != 0).then(|| ffi::python_place(0, site)).filter(|place| !place.is_empty())
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
