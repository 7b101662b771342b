//! The answers of a rank on one channel: at once without the place that its program is at, and again when that is known.

use super::places::Asked;
use super::status::{Place, Status};

/// The rank that answers.
pub trait Speaker {
    /// What this rank says about itself without the place, and the thread of the program whose place belongs to it.
    fn status(&self, question: u32) -> (Status, u64);
    /// Asks for the place that a thread is at.
    fn ask(&self, thread: u64) -> Asked;
}

#[derive(Default)]
pub struct Reply {
    /// The last question.
    last: u32,
    /// The first question since the place was asked for.
    owed: Option<(u32, Asked)>,
}

impl Reply {
    /// The answer to a question that has come. Where the place was asked for before and is not known, because native code
    /// keeps the interpreter's lock, it carries the number of the question from that time: this tells the reader since when.
    pub fn at_once(&mut self, speaker: &dyn Speaker, question: u32) -> Status {
        self.last = question;
        let (status, thread) = speaker.status(question);
        let (question, _) = self.owed.get_or_insert_with(|| (question, speaker.ask(thread)));
        Status { question: *question, place: Place::Locked, ..status }
    }

    /// The answer to the last question with the place, if that is owed and known now.
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

    /// Its thread 7 waits; the places that it was asked for, of which the test makes some known.
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
