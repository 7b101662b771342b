//! A rank's answer to a question (`Status`), and its form as bytes. A reader keeps the fields before the first field
//! that it cannot read, because an answer in shared memory is cut if it is too long.

use std::borrow::Cow;

use super::cycle::Edge;
use super::difference::Launch;
use crate::engine::Signed;
use crate::fields::{Reader, Writer};

/// Largest size of a place or name in an answer, in bytes. A longer text loses its beginning, because the end of a path
/// says more.
const LONGEST: usize = 240;

/// Where a rank is in its program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Place {
    #[default]
    Unknown,
    /// Not known yet: the thread that reads the place (`places`) waits for the interpreter's lock.
    Locked,
    At(String),
}

/// What a thread or a device of this rank waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    pub group: String,
    /// The operation and its number, as text.
    pub what: String,
    /// The operation's signature, if an engine runs it (`Waiting::signature`), and its number.
    pub called: (Option<u64>, u64),
    /// How long the operation's timeout has been running (`Waiting::age`).
    pub milliseconds: u64,
    /// One edge for each rank that has yet to make its call.
    pub edges: Vec<Edge>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Number of the question that this answers.
    pub question: u32,
    /// Number of the last collective that the rank issued in the group of the question.
    pub issued: u64,
    /// That collective as text; `None` if the history no longer contains it.
    pub last: Option<String>,
    /// `launched`: number of the last collective that the rank launched on a device; these are numbered separately.
    /// `launched_last`: that collective as text.
    pub launched: u64,
    pub launched_last: Option<String>,
    /// Signatures of the last collectives on devices; empty if the ranks read them from shared memory.
    pub signed: Vec<Launch>,
    /// The rank's process and host, as text.
    pub who: String,
    /// Ranks on its host whose processes are stopped.
    pub stopped: Vec<usize>,
    /// Milliseconds since the rank's last operation in the group of the question ended; `None` if there was none or one
    /// is pending.
    pub idle: Option<u64>,
    pub place: Place,
    /// What one of the rank's threads or devices waits for, in any group. Its field `edges` is empty here: these edges
    /// are in `Status::edges`.
    pub waits: Option<Waits>,
    /// Which rank waits for which, as far as this rank knows, each with its age in milliseconds. The rank's own waits
    /// come first.
    pub edges: Vec<(Edge, u64)>,
}

impl Status {
    pub fn encode(&self) -> Vec<u8> {
        let text = |to: Writer, text: &String| to.text(&shortened(text));
        let to = Writer::default().u32(self.question).u64(self.issued).list(&self.last, text);
        let to = to.u64(self.launched).list(&self.launched_last, text);
        let to = to.list(&self.signed, |to, (number, Signed { signature, lists })| {
            to.u64(*number).u64(*signature).u32(*lists)
        });
        let to = text(to, &self.who).list(&self.stopped, |to, rank| to.u32(*rank as u32));
        let to = to.list(&self.idle, |to, time| to.u64(*time));
        let to = match &self.place {
            Place::Unknown => to.u8(0),
            Place::Locked => to.u8(1),
            Place::At(place) => text(to.u8(2), place),
        };
        let to = to.list(&self.waits, |to, waits| {
            let (signature, number) = waits.called;
            let to = text(text(to, &waits.group), &waits.what).u64(waits.milliseconds);
            to.list(&signature, |to, signature| to.u64(*signature)).u64(number)
        });
        self.edges
            .iter()
            .fold(to, |to, (edge, age)| {
                let to = to.u32(edge.from).u32(edge.to).u32(u32::try_from(*age).unwrap_or(u32::MAX));
                text(text(to, &edge.group), &edge.what)
            })
            .0
    }

    /// Reads an answer; `None` if the bytes are not one.
    pub fn decode(bytes: &[u8]) -> Option<Status> {
        let mut from = Reader(bytes);
        let mut status = Status { question: from.u32()?, ..Status::default() };
        let _ = status.read(&mut from);
        Some(status)
    }

    /// Reads fields until one is missing.
    fn read(&mut self, from: &mut Reader) -> Option<()> {
        self.issued = from.u64()?;
        self.last = from.list(Reader::text)?.pop();
        self.launched = from.u64()?;
        self.launched_last = from.list(Reader::text)?.pop();
        let signed = |from: &mut Reader| Some(Signed { signature: from.u64()?, lists: from.u32()? });
        self.signed = from.list(|from| Some((from.u64()?, signed(from)?)))?;
        self.who = from.text()?;
        self.stopped = from.list(|from| Some(from.u32()? as usize))?;
        self.idle = from.list(Reader::u64)?.pop();
        self.place = match from.u8()? {
            1 => Place::Locked,
            2 => Place::At(from.text()?),
            _ => Place::Unknown,
        };
        let waits = |from: &mut Reader| {
            let (group, what, milliseconds) = (from.text()?, from.text()?, from.u64()?);
            let called = (from.list(Reader::u64)?.pop(), from.u64()?);
            Some(Waits { group, what, called, milliseconds, edges: Vec::new() })
        };
        self.waits = from.list(waits)?.pop();
        loop {
            let (rank, to, age) = (from.u32()?, from.u32()?, from.u32()?);
            self.edges.push((Edge { from: rank, to, group: from.text()?, what: from.text()? }, age.into()));
        }
    }

    /// Whether this answers `question` or a later one. An answer without its place may have an older number
    /// (`Reply::at_once`), so it always counts.
    pub fn answers(&self, question: u32) -> bool {
        self.place == Place::Locked || is_since(self.question, question)
    }
}

/// Whether `question` is `this` or a later one. The numbers wrap around.
pub fn is_since(question: u32, this: u32) -> bool {
    question.wrapping_sub(this) < u32::MAX / 2
}

/// The end of a text that is too long.
fn shortened(text: &str) -> Cow<'_, str> {
    if text.len() <= LONGEST {
        return text.into();
    }
    let cut = (text.len() - LONGEST..).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    format!("...{}", &text[cut..]).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Status {
        let edge = |from, to| (Edge { from, to, group: "tp 1".into(), what: "barrier() number 2".into() }, 70);
        Status {
            question: 7,
            issued: 12,
            last: Some("barrier number 12".into()),
            launched: 3,
            launched_last: Some("all_reduce number 3 on a device".into()),
            signed: vec![(2, Signed { signature: u64::MAX, lists: 0 }), (3, Signed { signature: 7, lists: u32::MAX })],
            who: "pid 5, host a".into(),
            stopped: vec![3, 1],
            idle: Some(3400),
            place: Place::At("/src/train.py:31 in step".into()),
            waits: Some(Waits {
                group: "dp".into(),
                what: "recv".into(),
                called: (Some(u64::MAX), 9),
                milliseconds: 5,
                edges: Vec::new(),
            }),
            edges: vec![edge(1, 0), edge(2, 1)],
        }
    }

    #[test]
    fn it_is_read_as_it_was_written() {
        for place in [Place::Unknown, Place::Locked, example().place] {
            let status = Status { place, ..example() };
            assert_eq!(Status::decode(&status.encode()), Some(status));
        }
        assert_eq!(Status::decode(&Status::default().encode()), Some(Status::default()));
        // The history may no longer contain either call.
        let forgotten = Status { last: None, launched_last: None, ..example() };
        assert_eq!(Status::decode(&forgotten.encode()), Some(forgotten));
    }

    #[test]
    fn an_answer_that_was_cut_gives_what_is_whole() {
        let (whole, bytes) = (example(), example().encode());
        for end in 4..bytes.len() {
            let read = Status::decode(&bytes[..end]).unwrap();
            assert!(read.question == 7 && read.edges.iter().all(|edge| whole.edges.contains(edge)), "{end}");
            assert!(
                [&None, &whole.last].contains(&&read.last) && [&None, &whole.waits].contains(&&read.waits),
                "{end}"
            );
        }
        let edges = whole.edges[..1].to_vec();
        assert_eq!(Status::decode(&bytes[..bytes.len() - 1]), Some(Status { edges, ..whole }), "the last edge was cut");
        assert_eq!(Status::decode(&bytes[..3]), None);
    }

    #[test]
    fn texts_hold_no_control_characters_and_keep_their_end() {
        let long = "ä".repeat(LONGEST) + "/end.py:3";
        let status = Status { place: Place::At(long), ..example() };
        let Some(Place::At(read)) = Status::decode(&status.encode()).map(|status| status.place) else { panic!() };
        assert!(read.starts_with("...") && read.ends_with("/end.py:3") && read.len() <= LONGEST + 3);
        let status = Status { place: Place::At("a\tb\nc".into()), ..example() };
        assert_eq!(Status::decode(&status.encode()).unwrap().place, Place::At("a b c".into()));
    }

    #[test]
    fn an_answer_to_a_later_question_counts_and_an_earlier_one_does_not() {
        let status = |question, place| Status { question, place, ..Status::default() };
        assert!(status(7, Place::Unknown).answers(7) && status(8, Place::Unknown).answers(7));
        assert!(!status(6, Place::Unknown).answers(7) && status(6, Place::Locked).answers(7));
        assert!(status(1, Place::Unknown).answers(u32::MAX), "the count goes round");
    }
}
