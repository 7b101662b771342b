//! Handles: numbers that look like pointers to their user, but that we can check. A handle that was never handed out,
//! or was destroyed, is rejected instead of followed. No handle is handed out twice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

pub struct Table<T: ?Sized> {
    base: usize,
    inner: Mutex<Inner<T>>,
}

struct Inner<T: ?Sized> {
    next: usize,
    entries: Option<HashMap<usize, Arc<T>>>,
}

impl<T: ?Sized> Table<T> {
    /// `kind` separates the handles of different tables.
    pub const fn new(kind: usize) -> Table<T> {
        Table { base: 0x5a6e_0000_0000_0000 | kind << 40, inner: Mutex::new(Inner { next: 0, entries: None }) }
    }

    pub fn add(&self, entry: Arc<T>) -> usize {
        let mut inner = self.inner.lock().unwrap();
        inner.next += 64;
        let handle = self.base + inner.next;
        inner.entries.get_or_insert_default().insert(handle, entry);
        handle
    }

    pub fn get(&self, handle: usize) -> Option<Arc<T>> {
        self.inner.lock().unwrap().entries.as_ref()?.get(&handle).cloned()
    }

    pub fn remove(&self, handle: usize) -> Option<Arc<T>> {
        self.inner.lock().unwrap().entries.as_mut()?.remove(&handle)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        self.inner.lock().unwrap().entries.iter().flat_map(|all| all.values().cloned()).collect()
    }
}
