//! Implementations of the interfaces that a group needs from its program, in memory or in files.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sagellm::config::Config;
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

/// A store that processes share, with a file for each key.
pub struct Files(pub PathBuf);

impl Files {
    pub fn new() -> Files {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("sagellm-store-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        Files(dir)
    }
    fn path(&self, key: &str) -> PathBuf {
        self.0.join(key.replace('/', "-"))
    }
}

impl Store for Files {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let unfinished = self.0.join(format!("new-{}-{}", key.replace('/', "-"), std::process::id()));
        fs::write(&unfinished, value).and_then(|()| fs::rename(&unfinished, self.path(key))).unwrap();
        Ok(())
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(fs::read(self.path(key)).ok())
    }
}

/// Returns the configuration of a group without options.
pub fn config(rank: usize, size: usize, timeout: Duration) -> Config {
    Config { policy: format!("rank {rank}'s"), ..Config::without_options(rank, size, timeout) }
}
