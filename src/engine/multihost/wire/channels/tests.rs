//! Tests a race between arriving frames and a channel that is being added. Only the lock of `early` can force it.
//! `tests/it/multihost_wire.rs` has the other tests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::super::{Over, Place, Wire, join};
use super::*;
use crate::engine::multihost::link::Link;
use crate::error::Result;
use crate::host::Store;

/// A store that hides the entry of rank 0 until `shows`.
#[derive(Default)]
struct Hiding {
    entries: Mutex<HashMap<String, Vec<u8>>>,
    shows: AtomicBool,
}

impl Store for Hiding {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        locked(&self.entries).insert(key.into(), value.into());
        Ok(())
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let hidden = key.ends_with("/0") && !self.shows.load(Ordering::Relaxed);
        Ok(locked(&self.entries).get(key).filter(|_| !hidden).cloned())
    }
}

fn place(store: &Hiding, group: u8, rank: usize) -> Place<'_> {
    Place { store, id: [group; 16], rank, size: 2, address: "127.0.0.1", paths: &[], timeout: Duration::from_secs(5) }
}

/// Rank 0 says that it has joined before rank 1 has the channel. When rank 1 adds the channel, rank 0's join completes;
/// rank 0 then leaves immediately and closes the connection. Rank 1 must not see that rank 0 leaves before it sees that
/// rank 0 has joined.
#[test]
fn a_rank_that_was_early_and_leaves_at_once_had_joined() {
    let (first, second) = (Wire::new(&Over::Tcp).unwrap(), Wire::new(&Over::Tcp).unwrap());
    let store = Hiding { shows: AtomicBool::new(true), ..Hiding::default() };
    let open = std::thread::scope(|scope| {
        let other = scope.spawn(|| join(&second, &place(&store, 1, 1)).unwrap());
        (join(&first, &place(&store, 1, 0)).unwrap(), other.join().unwrap())
    });
    store.shows.store(false, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| {
            let link = join(&first, &place(&store, 2, 0)).unwrap();
            drop((open.0, link)); // no group is left, so the connection is closed
        });
        let rank_1 = scope.spawn(|| join(&second, &place(&store, 2, 1)));
        let until = Instant::now() + Duration::from_secs(5);
        while locked(&second.channels().early).is_empty() {
            assert!(Instant::now() < until, "rank 0 has not said that it has joined");
            std::thread::sleep(Duration::from_millis(1));
        }
        // Stops rank 1 at the place where it reads which peers were early.
        let early = locked(&second.channels().early);
        store.shows.store(true, Ordering::Relaxed);
        rank_0.join().unwrap();
        std::thread::sleep(Duration::from_millis(50)); // the connections' thread reads what rank 0 said
        drop(early);
        let link = rank_1.join().unwrap().expect("rank 0 had joined");
        let gone = link.receive(0, 0, vec![0; 8], 8).map(|one| one.wait(Duration::from_secs(5)).is_err());
        assert!(gone.unwrap_or(true));
    });
}
