//! Devices: their number, and the device that a thread has set. Every thread must set its own.

use std::cell::Cell;

use crate::settings;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Runtime {
    Cuda,
    Acl,
    Cnrt,
}

thread_local! {
    static CURRENT: [Cell<Option<i32>>; 3] = const { [Cell::new(None), Cell::new(None), Cell::new(None)] };
}

impl Runtime {
    fn visible(self) -> Option<Vec<u64>> {
        let name = match self {
            Runtime::Cuda => "CUDA_VISIBLE_DEVICES",
            Runtime::Acl => "ASCEND_RT_VISIBLE_DEVICES",
            Runtime::Cnrt => "MLU_VISIBLE_DEVICES",
        };
        let list = std::env::var(name).ok()?;
        // The list ends at the first invalid entry, as for the vendors.
        Some(list.split(',').map_while(|entry| entry.trim().parse().ok()).collect())
    }

    pub fn count(self) -> usize {
        self.visible().map_or(settings::get().devices, |list| list.len())
    }

    /// The physical number of the device, which is the same in all processes of a machine.
    pub fn physical(self, device: i32) -> u64 {
        let index = device.max(0) as usize;
        self.visible().and_then(|list| list.get(index).copied()).unwrap_or(index as u64)
    }

    pub fn exists(self, device: i32) -> bool {
        usize::try_from(device).is_ok_and(|device| device < self.count())
    }

    pub fn choose(self, device: Option<i32>) {
        CURRENT.with(|all| all[self as usize].set(device));
    }

    /// The device that this thread has set, if any.
    pub fn current(self) -> Option<i32> {
        CURRENT.with(|all| all[self as usize].get())
    }
}
