//! The threads that look for questions, and for answers, in the stores of groups whose ranks share no memory: one for
//! each connection to a store, because a store that is stopped or slow keeps its caller for minutes. The words in shared
//! memory (`inquiry`) and the other stores do not wait for it. No thread waits for these.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::domain::Domain;
use crate::error::contained;
use crate::os::{futex, watch};

/// Starts the thread of a connection, unless it runs. Called when a group of the domain has begun to use it.
pub fn start(domain: &Arc<Domain>, connection: usize) {
    let mut readers = domain.readers.lock().unwrap_or_else(PoisonError::into_inner);
    domain.silent.store(false, Ordering::Release);
    if !readers.iter().any(|(known, _)| *known == connection) {
        let theirs = Arc::clone(domain);
        match watch::spawn("sagellm-store", move || look(&theirs, connection)) {
            Ok(thread) => readers.push((connection, thread)),
            Err(error) => log::warn!("cannot start the thread that looks for questions in a store: {error}"),
        }
    }
    drop(readers);
    domain.look_again(); // the thread may have looked before the group used the connection
}

/// The threads, which end when `silent` is set and they are woken. One that waits for its store is left behind.
pub fn stop(domain: &Domain) -> Vec<JoinHandle<()>> {
    let mut readers = domain.readers.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::take(&mut *readers).into_iter().map(|(_, thread)| thread).collect()
}

fn look(domain: &Domain, connection: usize) {
    loop {
        let changed = domain.stores_changed.word().load(Ordering::Acquire);
        if domain.silent.load(Ordering::Acquire) {
            return;
        }
        let mut pause = Duration::from_secs(3600);
        // Weak: the memory of a group that ends meanwhile must not wait for the store of another one.
        let groups = domain.groups();
        let users: Vec<_> =
            groups.iter().filter(|group| group.store() == Some(connection)).map(Arc::downgrade).collect();
        drop(groups);
        for group in users.iter().filter_map(Weak::upgrade) {
            let looked = contained(|| Ok(group.look_at_board()));
            let next = looked.unwrap_or_else(|bug| {
                log::error!("{bug}");
                Some(Duration::from_secs(1))
            });
            pause = next.map_or(pause, |next| next.min(pause));
        }
        if users.is_empty() && leaves(domain, connection) {
            return;
        }
        futex::wait(&[(domain.stores_changed.word(), changed)], pause);
    }
}

/// Whether the thread of a connection that no group used may end. Under the lock under which a group starts it.
fn leaves(domain: &Domain, connection: usize) -> bool {
    let mut readers = domain.readers.lock().unwrap_or_else(PoisonError::into_inner);
    if domain.groups().iter().any(|group| group.store() == Some(connection)) {
        return false;
    }
    readers.retain(|(known, _)| *known != connection);
    true
}
