//! The channel through the memory that the ranks of a host share (`engine::Inquiry`).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::LAST;
use super::channel::{Channel, MemoryChannel};
use super::monitor::Watched;
use super::reply::{Reply, Speaker};
use super::status::{Place, Status};
use crate::engine::{Control, Inquiry};

pub struct ShmChannel {
    /// Owns the shared memory, so the memory stays mapped while the answering thread sleeps on a word in it.
    control: Arc<dyn Control>,
    /// Number of the last question that this rank has answered. Used only by the answering thread (relaxed).
    answered: AtomicU32,
    /// Used only by the answering thread. The lock is never contended; it only makes the type `Sync`.
    reply: Mutex<Reply>,
}

impl ShmChannel {
    /// `None` if the engine has no shared memory for questions.
    pub fn over(control: &Arc<dyn Control>) -> Option<Arc<dyn Channel>> {
        control.inquiry()?;
        Some(Arc::new(ShmChannel {
            control: Arc::clone(control),
            answered: AtomicU32::new(0),
            reply: Mutex::default(),
        }))
    }

    fn inquiry(&self) -> &dyn Inquiry {
        self.control.inquiry().expect("seen when this was made")
    }
}

impl Channel for ShmChannel {
    fn has_all(&self, watched: &Watched) -> bool {
        let is_whole = |rank| watched.statuses.get(&rank).is_some_and(|status| status.place != Place::Locked);
        watched.asked.iter().all(|(rank, _)| is_whole(*rank))
    }

    fn takes(&self, timeout: Duration) -> Duration {
        if timeout.is_zero() { LAST } else { LAST.min(timeout / 10) }
    }

    fn memory(&self) -> Option<&dyn MemoryChannel> {
        Some(self)
    }
}

impl MemoryChannel for ShmChannel {
    fn ask(&self, rank: usize) -> u32 {
        self.inquiry().ask(rank)
    }

    fn answer(&self, rank: usize, question: u32) -> Option<Status> {
        Status::decode(&self.inquiry().heard(rank)).filter(|status| status.answers(question))
    }

    fn question(&self) -> &AtomicU32 {
        self.inquiry().question()
    }

    /// Answers with what is known now, and again when the place of the program is known.
    fn reply(&self, me: &dyn Speaker, question: u32) {
        let mut reply = self.reply.lock().unwrap_or_else(PoisonError::into_inner);
        if self.answered.swap(question, Ordering::Relaxed) != question {
            self.inquiry().answer(&reply.at_once(me, question).encode());
        }
        if let Some(status) = reply.with_place(me) {
            self.inquiry().answer(&status.encode());
        }
    }
}
