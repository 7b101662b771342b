//! A rank's answers on one channel. The rank answers immediately without its place (the source line at which its
//! program is), and again when the place is known.

use super::places::Asked;
use super::status::{Place, Status};

/// A rank that answers questions.
pub trait Speaker {
    /// This rank's status without the place, and the thread whose place is to be added.
    fn status(&self, question: u32) -> (Status, u64);
    /// Requests the place of a thread.
    fn ask(&self, thread: u64) -> Asked;
}

#[derive(Default)]
pub struct Reply {
    /// Number of the last question.
    last: u32,
    /// The pending request for this rank's place, and the number of the question for which it was made. `None` if no
    /// place is owed.
    owed: Option<(u32, Asked)>,
}

impl Reply {
    /// Returns the immediate answer to a question. If the place was requested for an earlier question and is still
    /// unknown, native code holds the interpreter's lock. Then the answer has the number of that earlier question,
    /// which shows the reader how long the lock has been held.
    pub fn at_once(&mut self, speaker: &dyn Speaker, question: u32) -> Status {
        self.last = question;
        let (status, thread) = speaker.status(question);
        let (question, _) = self.owed.get_or_insert_with(|| (question, speaker.ask(thread)));
        Status { question: *question, place: Place::Locked, ..status }
    }

    /// The answer to the last question with the place, if a request is pending and the place is now known.
    pub fn with_place(&mut self, speaker: &dyn Speaker) -> Option<Status> {
        let place = self.owed.as_ref()?.1.place()?;
        self.owed = None;
        let (status, _) = speaker.status(self.last);
        Some(Status { place: place.map_or(Place::Unknown, Place::At), ..status })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A rank whose thread 7 waits, with its requests for places. The test sets the places of some.
    #[derive(Default)]
    struct Rank(RefCell<Vec<(u64, Asked)>>);

    impl Speaker for Rank {
        fn status(&self, question: u32) -> (Status, u64) {
            (Status { question, ..Status::default() }, 7)
        }
        fn ask(&self, thread: u64) -> Asked {
            let asked = Asked::default();
            self.0.borrow_mut().push((thread, asked.clone()));
            asked
        }
    }

    #[test]
    fn a_question_is_answered_at_once_and_again_when_the_place_is_known() {
        let (rank, mut reply) = (Rank::default(), Reply::default());
        assert_eq!(reply.with_place(&rank), None, "nothing was asked");
        for question in [4, 5, 6] {
            let status = reply.at_once(&rank, question);
            assert_eq!((status.question, status.place), (4, Place::Locked), "kept since the first of them");
            assert_eq!(reply.with_place(&rank), None);
        }
        let asked = rank.0.borrow().clone();
        assert_eq!(asked.len(), 1, "one reading serves all of them");
        assert_eq!(asked[0].0, 7);
        asked[0].1.is_at(Some("train.py:3".into()));
        let status = reply.with_place(&rank).unwrap();
        assert_eq!((status.question, status.place), (6, Place::At("train.py:3".into())));
        assert_eq!(reply.with_place(&rank), None, "once");
        assert_eq!(reply.at_once(&rank, 7).question, 7);
        rank.0.borrow()[1].1.is_at(None);
        assert_eq!(reply.with_place(&rank).unwrap().place, Place::Unknown, "a program without places");
    }
}
