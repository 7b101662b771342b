//! What ties a group to its process, and to the processes of its peers.

use std::sync::{Mutex, PoisonError};

use crate::os::watch;
use crate::os::watch::Alive;
use crate::rendezvous::peers::Following;

pub(super) struct Ties {
    /// Number of forks of the process before the group was made. In a forked child the current number differs, and the
    /// child must not use the group.
    generation: u32,
    held: Mutex<Held>,
}

/// Empty after the group was shut down.
#[derive(Default)]
struct Held {
    /// Reports peers whose process has ended.
    following: Option<Following>,
    /// While it is set, a child that the process forks counts as orphaned (`os::watch::orphaned`).
    _alive: Option<Alive>,
}

impl Ties {
    pub fn new() -> Ties {
        let held = Held { following: None, _alive: Some(Alive::default()) };
        Ties { generation: watch::generation(), held: Mutex::new(held) }
    }

    /// Whether this process is a forked child that inherited the group.
    #[inline]
    pub fn is_inherited(&self) -> bool {
        watch::generation() != self.generation
    }

    /// Keeps `following`, which reports the ends of peers.
    pub fn follow(&self, following: Following) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).following = Some(following);
    }

    /// Called when the group is shut down.
    pub fn let_go(&self) {
        // Dropped without any lock: dropping the last group of a set of processes stops watching these processes.
        drop(std::mem::take(&mut *self.held.lock().unwrap_or_else(PoisonError::into_inner)));
    }
}
