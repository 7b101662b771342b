//! A panic inside the core is a bug of ours. It fails the group, ends every operation, and no pointer to the caller's
//! memory stays in use. The tests use a hook that panics when the core calls it. The core calls a hook to copy staged
//! tensors, with the core's lock held, and after the operation's end, without the lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::common::on_memory;
use sagellm::error::{Error, ErrorKind};
use sagellm::group::{Completion, Group, Op};
use sagellm::types::{Kind, Request};

/// Which function of the hook panics.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Prepare,
    StoreBack,
    Ended,
    Nowhere,
}

struct Hook {
    at: At,
    ended: Arc<AtomicU32>,
}

impl Completion for Hook {
    fn prepare(&self) {
        assert!(self.at != At::Prepare, "a panic that a test planted");
    }
    fn store_back(&self) {
        assert!(self.at != At::StoreBack, "a panic that a test planted");
    }
    fn ended(&self, _: Option<&Error>) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        assert!(self.at != At::Ended, "a panic that a test planted");
    }
}

fn all_reduce(memory: &mut [u8]) -> Request {
    on_memory(Kind::AllReduce, 0, memory)
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Rank 0 issues three operations, the middle one with a hook that panics; rank 1 issues the same.
fn a_panic(at: At, bytes: usize) {
    let groups = Group::local(2, Duration::from_secs(30)).unwrap();
    let ended = Arc::new(AtomicU32::new(0));
    let mut memory = vec![vec![1u8; bytes]; 6];
    let (own, theirs) = memory.split_at_mut(3);
    let issue = |group: &Group, memory: &mut Vec<u8>, at: At| -> Result<Arc<Op>, Error> {
        group.issue(all_reduce(memory), Some(Box::new(Hook { at, ended: Arc::clone(&ended) })))
    };
    let planted = [At::Nowhere, at, At::Nowhere];
    let ops: Vec<_> = own.iter_mut().zip(planted).map(|(memory, at)| issue(&groups[0], memory, at)).collect();
    let others: Vec<_> = theirs.iter_mut().map(|memory| issue(&groups[1], memory, At::Nowhere)).collect();
    let all: Vec<Arc<Op>> = ops.iter().chain(&others).filter_map(|op| op.clone().ok()).collect();
    // No thread waits, so the progress threads end all operations, including the one whose hook panicked and the later
    // ones.
    until(&format!("{at:?} with {bytes} bytes: an operation never ended"), || all.iter().all(|op| op.is_done()));
    let issued = all.len() as u32;
    until("an owner was never told", || ended.load(Ordering::Relaxed) >= issued);
    if at != At::Ended {
        let failed = ops[1].as_ref().map_or_else(Clone::clone, |op| op.error().expect("its hook panicked").clone());
        assert!(failed.kind() == ErrorKind::Bug && failed.text().contains("planted"), "{failed:?}");
        // The peer may have ended all of its operations before the panic. Then its next call returns the error.
        let told = groups[1].issue(all_reduce(&mut [0u8; 8]), None).map(|_| ());
        assert!(told.is_err(), "the peer was not told");
        let refused = groups[0].issue(all_reduce(&mut [0u8; 8]), None).map(|_| ());
        assert!(matches!(refused, Err(ref error) if error.kind() == ErrorKind::Bug), "{refused:?}");
    }
    // No operation can still use the memory, so it may be freed.
    drop(memory);
    let other = Group::local(2, Duration::from_secs(30)).unwrap();
    let mut numbers = [[1u8; 8], [2u8; 8]];
    std::thread::scope(|scope| {
        for (group, numbers) in other.iter().zip(&mut numbers) {
            scope.spawn(move || group.run(all_reduce(numbers), None).unwrap());
        }
    });
    assert_eq!(numbers, [[3u8; 8]; 2]);
}

#[test]
fn a_panic_ends_every_operation_and_fails_the_group() {
    for at in [At::Prepare, At::StoreBack, At::Ended] {
        for bytes in [64, 3 << 20] {
            a_panic(at, bytes);
        }
    }
}

#[test]
fn a_panic_in_a_call_that_waits_is_its_error_and_frees_its_memory() {
    let groups = Group::local(2, Duration::from_secs(30)).unwrap();
    let told = Arc::new(AtomicU32::new(0));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut memory = vec![1u8; 100];
            let peer = groups[1].run(all_reduce(&mut memory), None);
            assert!(
                !peer.as_ref().is_err_and(|error| !matches!(error.kind(), ErrorKind::Aborted | ErrorKind::Bug)),
                "{peer:?}"
            );
            over.store(true, Ordering::Relaxed);
        });
        let mut memory = vec![1u8; 100];
        let hook = Hook { at: At::StoreBack, ended: Arc::clone(&told) };
        let outcome = groups[0].run(all_reduce(&mut memory), Some(Box::new(hook)));
        assert!(
            outcome.as_ref().is_err_and(|bug| bug.kind() == ErrorKind::Bug && bug.text().contains("planted")),
            "{outcome:?}"
        );
        assert_eq!(told.load(Ordering::Relaxed), 1);
    });
    assert!(over.load(Ordering::Relaxed));
}
