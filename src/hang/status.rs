//! A rank's answer to a question (`Status`), and its text form. Each line is one fact, with tabs between its fields. A
//! reader skips lines that it does not understand, because the text may be truncated, or comes from shared memory that
//! another process wrote.

use super::cycle::Edge;
use super::difference::Launch;
use crate::engine::Signed;

/// Largest size of a place or name in an answer, in bytes. A longer text loses its beginning, because the end of a path
/// says more.
const LONGEST: usize = 240;

/// Where a rank is in its program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Place {
    #[default]
    Unknown,
    /// The answering thread waits for the interpreter's lock.
    Locked,
    At(String),
}

/// What a thread of this rank waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    pub group: String,
    /// The operation and its number, as text.
    pub what: String,
    /// Time since the operation was issued.
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
    /// Milliseconds since the rank's last operation in that group ended; `None` if there was none or one is pending.
    pub idle: Option<u64>,
    pub place: Place,
    /// What one of the rank's threads waits for, in any group. Its edges are in the field below.
    pub waits: Option<Waits>,
    /// Which rank waits for which, as far as this rank knows, each with its age in milliseconds. The rank's own waits
    /// come first.
    pub edges: Vec<(Edge, u64)>,
}

impl Status {
    pub fn encode(&self) -> String {
        let mut lines = vec![format!("question\t{}", self.question), format!("issued\t{}", self.issued)];
        lines.extend(self.last.as_ref().map(|last| format!("last\t{}", field(last))));
        lines.push(format!("launched\t{}", self.launched));
        lines.extend(self.launched_last.as_ref().map(|last| format!("launched_last\t{}", field(last))));
        let signed = |(number, Signed { signature, lists }): &Launch| format!("signed\t{number}\t{signature}\t{lists}");
        lines.extend(self.signed.iter().map(signed));
        lines.push(format!("who\t{}", field(&self.who)));
        lines.extend(self.stopped.iter().map(|rank| format!("stopped\t{rank}")));
        lines.extend(self.idle.map(|idle| format!("idle\t{idle}")));
        match &self.place {
            Place::Unknown => (),
            Place::Locked => lines.push("locked".to_string()),
            Place::At(place) => lines.push(format!("at\t{}", field(place))),
        }
        if let Some(Waits { group, what, milliseconds, .. }) = &self.waits {
            lines.push(format!("waits\t{}\t{}\t{milliseconds}", field(group), field(what)));
        }
        for (Edge { from, to, group, what }, age) in &self.edges {
            lines.push(format!("edge\t{from}\t{to}\t{age}\t{}\t{}", field(group), field(what)));
        }
        lines.into_iter().map(|line| line + "\n").collect()
    }

    /// Reads an answer; `None` if the text is not one. A last line without a line end was truncated and is skipped.
    pub fn decode(text: &str) -> Option<Status> {
        let mut status = Status::default();
        let mut answers = false;
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            let fields: Vec<&str> = line.split('\t').collect();
            match fields[..] {
                ["question", number] => {
                    status.question = number.parse().ok()?;
                    answers = true;
                }
                ["issued", number] => status.issued = number.parse().ok()?,
                ["last", call] => status.last = Some(call.to_string()),
                ["launched", number] => status.launched = number.parse().ok()?,
                ["launched_last", call] => status.launched_last = Some(call.to_string()),
                ["signed", number, signature, lists] => {
                    if let (Ok(number), Ok(signature), Ok(lists)) = (number.parse(), signature.parse(), lists.parse()) {
                        status.signed.push((number, Signed { signature, lists }));
                    }
                }
                ["who", process] => status.who = process.to_string(),
                ["stopped", rank] => status.stopped.extend(rank.parse::<usize>().ok()),
                ["idle", time] => status.idle = time.parse().ok(),
                ["locked"] => status.place = Place::Locked,
                ["at", place] => status.place = Place::At(place.to_string()),
                ["waits", group, what, time] => {
                    let (group, what) = (group.to_string(), what.to_string());
                    let milliseconds = time.parse().unwrap_or(0);
                    status.waits = Some(Waits { group, what, milliseconds, edges: Vec::new() });
                }
                ["edge", from, to, age, group, what] => {
                    if let (Ok(from), Ok(to), Ok(age)) = (from.parse(), to.parse(), age.parse()) {
                        let (group, what) = (group.to_string(), what.to_string());
                        status.edges.push((Edge { from, to, group, what }, age));
                    }
                }
                _ => (),
            }
        }
        answers.then_some(status)
    }

    /// Whether this answers `question` or a later one. A rank that waits for the interpreter's lock keeps an older
    /// number, so its answer always counts.
    pub fn answers(&self, question: u32) -> bool {
        self.place == Place::Locked || is_since(self.question, question)
    }
}

/// Whether `question` is `this` or a later one. The numbers wrap around.
pub fn is_since(question: u32, this: u32) -> bool {
    question.wrapping_sub(this) < u32::MAX / 2
}

/// The text as one field: control characters become spaces, and a long text loses its beginning.
fn field(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if clean.len() <= LONGEST {
        return clean;
    }
    let cut = (clean.len() - LONGEST..).find(|at| clean.is_char_boundary(*at)).unwrap_or(clean.len());
    format!("...{}", &clean[cut..])
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
            waits: Some(Waits { group: "dp".into(), what: "recv".into(), milliseconds: 5, edges: Vec::new() }),
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
    fn a_text_that_was_cut_or_is_none_gives_what_is_whole() {
        let text = example().encode();
        for end in 0..text.len() {
            let Some(read) = Status::decode(&text[..end]) else { continue };
            assert!(read.question == 7 && read.edges.iter().all(|edge| example().edges.contains(edge)), "{end}");
        }
        assert_eq!(Status::decode(&text[..text.len() - 1]).unwrap().edges.len(), 1, "the last line was cut");
        for text in ["", "\n", "nonsense", "question\tx\n", "issued\t3\n", "\u{0}\u{0}\t\t\n"] {
            assert_eq!(Status::decode(text), None, "{text:?}");
        }
    }

    #[test]
    fn fields_hold_no_separators_and_keep_their_end() {
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
