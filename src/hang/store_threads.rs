//! The threads that read questions and answers in the stores of groups whose ranks share no memory. Each connection has
//! its own thread, because a store that is stopped or slow blocks its caller for minutes. So such a store delays
//! neither the answering thread (`answering`) nor the reads of other stores. Only the end of the process waits for
//! these threads, and only for a limited time.
//!
//! The thread also removes the keys of groups that this rank has left, some time after their end and only while another
//! group uses the connection (`responder`).

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::channel::Member;
use super::responder::{KEYS_STAY, Responder};
use crate::error::contained;
use crate::os::{futex, watch};

/// Starts the thread of a connection, unless it already runs. Called after a group of the rank has begun to use the
/// connection.
pub fn start(responder: &Arc<Responder>, connection: usize) {
    let mut threads = responder.store_threads.lock().unwrap_or_else(PoisonError::into_inner);
    responder.stopping.store(false, Ordering::Release);
    if !threads.iter().any(|(known, _)| *known == connection) {
        let theirs = Arc::clone(responder);
        match watch::spawn("sagellm-store", move || look(&theirs, connection)) {
            Ok(thread) => threads.push((connection, thread)),
            Err(error) => log::warn!("cannot start the thread that looks for questions in a store: {error}"),
        }
    }
    drop(threads);
    responder.look_again(); // the thread may have listed the groups before this one used the connection
}

/// Returns the threads. Each ends when `stopping` is set and the thread is woken. If a thread is still waiting for its
/// store, the caller leaves it behind.
pub fn stop(responder: &Responder) -> Vec<JoinHandle<()>> {
    let mut threads = responder.store_threads.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::take(&mut *threads).into_iter().map(|(_, thread)| thread).collect()
}

fn look(responder: &Responder, connection: usize) {
    loop {
        let changed = responder.stores_changed.word().load(Ordering::Acquire);
        if responder.stopping.load(Ordering::Acquire) {
            return;
        }
        let mut pause = Duration::from_secs(3600);
        // Weak references: while this thread waits for one group's store, it must not keep the memory of another group
        // that ends.
        let members = responder.members();
        let uses = |group: &&Arc<dyn Member>| group.connection() == Some(connection);
        let users: Vec<_> = members.iter().filter(uses).map(Arc::downgrade).collect();
        drop(members);
        for group in users.iter().filter_map(Weak::upgrade) {
            let looked = contained(|| Ok(group.channel().and_then(|channel| channel.store()?.look(&*group))));
            let next = looked.unwrap_or_else(|bug| {
                log::error!("{bug}");
                Some(Duration::from_secs(1))
            });
            pause = next.map_or(pause, |next| next.min(pause));
        }
        if users.is_empty() && leaves(responder, connection) {
            drop(responder.take_left(connection, Duration::ZERO));
            return;
        }
        let (left, next) = responder.take_left(connection, KEYS_STAY);
        for group in left {
            let removed = contained(|| {
                if let Some(store) = group.channel.store() {
                    store.leave(group.ranks);
                }
                Ok(())
            });
            removed.unwrap_or_else(|bug| log::error!("{bug}"));
        }
        pause = next.map_or(pause, |next| next.min(pause));
        futex::wait(&[(responder.stores_changed.word(), changed)], pause);
    }
}

/// Removes the thread of a connection, if no group uses the connection. Holds the lock under which `start` starts
/// threads, so a group that is added later finds no thread and starts one.
fn leaves(responder: &Responder, connection: usize) -> bool {
    let mut threads = responder.store_threads.lock().unwrap_or_else(PoisonError::into_inner);
    if responder.members().iter().any(|group| group.connection() == Some(connection)) {
        return false;
    }
    threads.retain(|(known, _)| *known != connection);
    true
}
