//! Marks places in the protocols of shared memory and of the connections, so that a test can end, stop or delay a rank
//! there.
//!
//! The product calls [`reached`] at each place. Without the feature `testing`, which only tests and benchmarks have,
//! the call is empty. With the feature, [`reached`] calls the hooks that a test has set: one for a thread
//! (`on_this_thread`), and one for the whole process (`in_this_process`). A hook may sleep, stop or kill the process,
//! switch to another rank that is a coroutine, or panic. While it runs, the product holds whatever locks it holds at
//! that place.
//!
//! `tests/it/os_fault_points.rs` lets real processes run through every place that is always reached, and fails if one
//! is not reached. A new place needs a row below and its call.

use crate::types::enumeration;

enumeration! {
    /// A place, with its name in the output of tests.
    FaultPoint {
        // Every collective that uses slots, and the headers of all other collectives (`engine/shm/engine.rs`).
        SlotWritten = 0, "before a slot is published";
        SlotPublished = 1, "after a slot is published";
        SlotsSeen = 2, "before slots are read";
        SlotsRead = 3, "before slots are retired";
        SlotsRetired = 4, "after slots are retired";
        // A collective in rounds (`engine/shm/bulk.rs`).
        StageFilled = 5, "before a round is published";
        StagePublished = 6, "after a round is published";
        StageSeen = 7, "before a round is read";
        StageRead = 8, "before a round is released";
        ResultFilled = 9, "before a result is published";
        ResultSeen = 10, "before a result is read";
        ResultRead = 11, "before a result is released";
        // A collective on tensors that peers can reach (`engine/shm/mapped`).
        PartBegun = 12, "before a part is done";
        PartDone = 13, "before a part is published";
        PartPublished = 14, "after a part is published";
        // A sum that is made node by node (`engine/shm/mapped/relay.rs`).
        ChunkFolded = 15, "before the sums of a chunk are published";
        ChunkPublished = 16, "after the sums of a chunk are published";
        ChunkDelivered = 17, "before a chunk of the result is published";
        // Messages on one host (`engine/shm/p2p`).
        EnvelopeWritten = 18, "before an envelope is published";
        EnvelopeSent = 19, "after an envelope is published";
        EnvelopeSeen = 20, "before an envelope is read";
        EnvelopeRead = 21, "before an envelope is released";
        GrantWritten = 22, "before a grant is published";
        GrantSeen = 23, "before a grant is used";
        BodyFilled = 24, "before a part of a message is published";
        BodySeen = 25, "before a part of a message is read";
        BodyRead = 26, "before a part of a message is released";
        // Waiting and leaving on one host (`progress/driver.rs`, `engine/shm/memory/area.rs`).
        Sleeping = 27, "before a thread sleeps";
        Leaving = 28, "before a rank leaves";
        // Messages between reachable tensors (`engine/shm/p2p/shares.rs`).
        HomeSought = 29, "before a sender looks for the output of a message";
        RangeClaimed = 30, "before a claimed range of a message is copied";
        // Connections to other hosts (`engine/multihost/wire`).
        Joining = 31, "before a rank says that it has joined";
        FrameReady = 32, "before frames are written";
        FrameWritten = 33, "after frames are written";
        FrameSeen = 34, "before a frame is handled";
        FrameDone = 35, "after the data of a frame has arrived";
        BodyWanted = 36, "before the receive of a long message is posted";
        BodyAsked = 37, "before a long message is sent";
        Cutting = 38, "before a rank cuts its connections";
        // Connections of several paths (`engine/multihost/wire`).
        SegmentReady = 39, "before a segment is written";
        SegmentWritten = 40, "after a segment is written";
        StreamSeen = 41, "before a frame of the stream is handled";
        StreamDone = 42, "after the data of a frame of the stream has arrived";
    }
}

/// Called by the product when it reaches `point`.
#[cfg(not(feature = "testing"))]
#[inline(always)]
pub fn reached(_point: FaultPoint) {}

#[cfg(feature = "testing")]
pub use self::hooks::{Hook, in_this_process, on_this_thread, reached};

#[cfg(feature = "testing")]
mod hooks {
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, PoisonError, RwLock};

    use super::FaultPoint;

    type OfThread = Rc<dyn Fn(FaultPoint)>;
    type OfProcess = Arc<dyn Fn(FaultPoint) + Send + Sync>;

    /// Number of hooks that are set, in all threads. A thread that sets or removes a hook writes it; `reached` reads
    /// it. Relaxed: a thread that sets a hook sees the hook at its next place, and other threads may see the hook
    /// later.
    static HOOKS: AtomicUsize = AtomicUsize::new(0);
    static OF_PROCESS: RwLock<Option<OfProcess>> = RwLock::new(None);

    thread_local! {
        static OF_THREAD: RefCell<Option<OfThread>> = const { RefCell::new(None) };
    }

    /// Called by the product when it reaches `point`.
    #[inline]
    pub fn reached(point: FaultPoint) {
        if HOOKS.load(Ordering::Relaxed) != 0 {
            call(point);
        }
    }

    #[cold]
    fn call(point: FaultPoint) {
        // Cloned, so that nothing is borrowed or locked while a hook runs, because the hook may switch to another
        // coroutine of this thread. A thread that is ending has no hook.
        let own = OF_THREAD.try_with(|hook| hook.borrow().clone()).ok().flatten();
        if let Some(own) = own {
            own(point);
        }
        let common = OF_PROCESS.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(common) = common {
            common(point);
        }
    }

    /// The hook is set until this is dropped.
    pub struct Hook {
        of_thread: bool,
    }

    /// Sets the hook of this thread, which must have none.
    pub fn on_this_thread(hook: impl Fn(FaultPoint) + 'static) -> Hook {
        let before = OF_THREAD.with(|own| own.borrow_mut().replace(Rc::new(hook)));
        assert!(before.is_none(), "this thread has a hook already");
        HOOKS.fetch_add(1, Ordering::Relaxed);
        Hook { of_thread: true }
    }

    /// Sets the hook of all threads of this process, which must have none.
    pub fn in_this_process(hook: impl Fn(FaultPoint) + Send + Sync + 'static) -> Hook {
        let before = OF_PROCESS.write().unwrap_or_else(PoisonError::into_inner).replace(Arc::new(hook));
        assert!(before.is_none(), "this process has a hook already");
        HOOKS.fetch_add(1, Ordering::Relaxed);
        Hook { of_thread: false }
    }

    impl Drop for Hook {
        fn drop(&mut self) {
            HOOKS.fetch_sub(1, Ordering::Relaxed);
            match self.of_thread {
                true => drop(OF_THREAD.with(|own| own.borrow_mut().take())),
                false => drop(OF_PROCESS.write().unwrap_or_else(PoisonError::into_inner).take()),
            }
        }
    }
}
