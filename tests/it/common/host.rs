//! In-memory implementations of the interfaces that a group needs from its program.

use std::collections::HashMap;
use std::sync::Mutex;

use sagellm::error::Result;
use sagellm::host::{Host, Store};

/// A store in the memory of this process.
#[derive(Default)]
pub struct Memory(pub Mutex<HashMap<String, Vec<u8>>>);

impl Store for Memory {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.lock().unwrap().insert(key.into(), value.into());
        Ok(())
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.0.lock().unwrap().get(key).cloned())
    }
}

/// A host without signals.
pub struct Quiet;

impl Host for Quiet {
    fn interrupted(&self) -> bool {
        false
    }
}
