//! Errors. There are two classes: errors of the caller or of the system (all kinds except `Bug`), and our own bugs. The
//! texts are golden files (`tests/golden`); each says which rank or call failed, what was expected, what was found, and
//! what to do. [`laid_out`] lays out the texts about a group in lines. [`Error::encode`] encodes an error for another
//! rank.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::fields::{Reader, Writer, cleaned};

/// An error as facts: its kind, the rank that it is about, the rank that reported it, what a rank was doing, and
/// further text. The facts become one text only where the error is shown ([`Error::text`]), and no code parses that
/// text. Ranks are numbered as in the group that failed; a group inside a host uses the numbers of the whole group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(Box<Facts>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Facts {
    kind: ErrorKind,
    /// True if only a `wait(t)` has elapsed and the operation is still pending. The flag is for tests; programs see
    /// only the text.
    #[cfg(feature = "testing")]
    goes_on: bool,
    /// The rank whose process ended, that left the group, or whose result is wrong.
    rank: Option<usize>,
    /// The rank that found the error, if it is not this rank.
    reporter: Option<usize>,
    /// A rank, and what it was doing meanwhile as text, such as "is in all_reduce(...) number 3".
    operation: Option<(usize, String)>,
    text: Text,
}

/// The class of an error, by which C++ chooses the exception. Its number is a letter, which precedes the error's text
/// outside the core: over the C++ bridge, and in the encoding for other ranks (`Error::encode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ErrorKind {
    /// The call itself is wrong. Nothing was sent and no sequence number was used.
    Invalid = b'V',
    /// The operation's own deadline passed, which poisons the group; or `wait(t)` elapsed, which does not.
    Timeout = b'T',
    /// A peer's process ended.
    RankFailed = b'D',
    /// Ranks called different operations under one sequence number.
    Mismatch = b'M',
    /// Results that are equal on all ranks by contract differ, so a processor, memory or kernel is faulty.
    Corrupt = b'C',
    /// The program called abort, or the group was shut down.
    Aborted = b'A',
    /// A Python signal handler raised an exception while the caller was waiting.
    Interrupted = b'P',
    /// The operating system refused a request of the engine.
    System = b'S',
    /// An assumption of our code is violated. The text contains the expected and the actual value.
    Bug = b'B',
}

impl ErrorKind {
    const ALL: [ErrorKind; 9] = [
        ErrorKind::Invalid,
        ErrorKind::Timeout,
        ErrorKind::RankFailed,
        ErrorKind::Mismatch,
        ErrorKind::Corrupt,
        ErrorKind::Aborted,
        ErrorKind::Interrupted,
        ErrorKind::System,
        ErrorKind::Bug,
    ];
}

impl Error {
    fn new(kind: ErrorKind, text: impl Into<Text>) -> Error {
        let (rank, reporter, operation) = (None, None, None);
        let facts = Facts {
            kind,
            #[cfg(feature = "testing")]
            goes_on: false,
            rank,
            reporter,
            operation,
            text: text.into(),
        };
        Error(Box::new(facts))
    }
    pub fn invalid(text: impl Into<Text>) -> Error {
        Error::new(ErrorKind::Invalid, text)
    }
    pub fn timeout(text: impl Into<Text>) -> Error {
        Error::new(ErrorKind::Timeout, text)
    }
    /// `wait(t)` elapsed; the operation is still pending.
    pub fn wait_elapsed(text: impl Into<Text>) -> Error {
        let error = Error::timeout(text);
        #[cfg(feature = "testing")]
        let error = Error(Box::new(Facts { goes_on: true, ..*error.0 }));
        error
    }
    /// The process of `rank` ended, or the rank left the group.
    pub fn rank_failed(rank: usize, text: impl Into<Text>) -> Error {
        let mut error = Error::new(ErrorKind::RankFailed, text);
        error.0.rank = Some(rank);
        error
    }
    pub fn mismatch(text: impl Into<Text>) -> Error {
        Error::new(ErrorKind::Mismatch, text)
    }
    /// The results of the ranks differ. `rank`: the rank whose result is wrong, if that is known.
    pub fn corrupt(rank: Option<usize>, text: impl Into<Text>) -> Error {
        let mut error = Error::new(ErrorKind::Corrupt, text);
        error.0.rank = rank;
        error
    }
    pub fn aborted(text: impl Into<Text>) -> Error {
        Error::new(ErrorKind::Aborted, text)
    }
    pub fn interrupted(text: impl Into<Text>) -> Error {
        Error::new(ErrorKind::Interrupted, text)
    }
    pub fn system(text: impl Into<Text>) -> Error {
        Error::new(ErrorKind::System, text)
    }
    pub fn bug(text: impl Into<Text>) -> Error {
        Error::new(ErrorKind::Bug, text)
    }

    /// Adds what `rank` was doing. It becomes the first line after the head.
    #[must_use]
    pub fn while_rank(mut self, rank: usize, does: &str) -> Error {
        self.0.operation = Some((rank, does.to_string()));
        self
    }

    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether only a `wait(t)` has elapsed, and the operation is still pending.
    #[cfg(feature = "testing")]
    pub fn is_elapsed_wait(&self) -> bool {
        self.0.goes_on
    }

    /// The rank that the error is about.
    pub fn rank(&self) -> Option<usize> {
        self.0.rank
    }

    /// The rank whose activity the error describes, which is the rank that found the error. Known only on that rank,
    /// because `encode` turns the activity into text.
    pub fn found_by(&self) -> Option<usize> {
        self.0.operation.as_ref().map(|(rank, _)| *rank)
    }

    /// The rank that found the error, if it is not this rank.
    pub fn reporter(&self) -> Option<usize> {
        self.0.reporter
    }

    /// The letter of the error's kind.
    pub fn code(&self) -> char {
        self.kind() as u8 as char
    }

    /// Converts an error of another rank to an error of this rank. It becomes an abort, unless it is about a failed
    /// rank, a deadline, mismatched calls or different results.
    #[must_use]
    pub fn as_told(mut self) -> Error {
        use ErrorKind::{Corrupt, Mismatch, RankFailed, Timeout};
        if !matches!(self.0.kind, Timeout | RankFailed | Mismatch | Corrupt) {
            self.0.kind = ErrorKind::Aborted;
        }
        self
    }

    /// Adds that rank `by` reported the error, unless the error already names the rank that reported it first.
    #[must_use]
    pub fn reported_by(mut self, by: usize) -> Error {
        self.0.reporter.get_or_insert(by);
        self
    }

    /// Encodes the error for another rank (`decode`), in at most `room` bytes: the kind's letter, the numbers of the
    /// rank and of the reporter plus one (0: none), and the text without its layout, shortened if it does not fit.
    pub fn encode(&self, room: usize) -> Vec<u8> {
        let number = |rank: Option<usize>| rank.map_or(0, |rank| rank as u32 + 1);
        let begin = Writer::default().u8(self.kind() as u8).u32(number(self.0.rank)).u32(number(self.0.reporter));
        let room = room.saturating_sub(begin.0.len());
        begin.raw(self.whole_text().joined(room).as_bytes()).0
    }

    /// Decodes an error that another rank has encoded. `None` if the bytes are not an error. The bytes may have been
    /// changed on the way.
    pub fn decode(bytes: &[u8]) -> Option<Error> {
        let mut from = Reader(bytes);
        let code = from.u8()?;
        let kind = ErrorKind::ALL.into_iter().find(|kind| *kind as u8 == code)?;
        let mut number = || Some(from.u32()?.checked_sub(1).map(|rank| rank as usize));
        let (rank, reporter) = (number()?, number()?);
        let mut error = Error::new(kind, Text::from_elsewhere(&String::from_utf8_lossy(from.0)));
        (error.0.rank, error.0.reporter) = (rank, reporter);
        Some(error)
    }

    /// The text that is shown, except for the reporter. What a rank was doing is one of the lines.
    fn whole_text(&self) -> Text {
        let mut text = self.0.text.clone();
        text.lines.splice(0..0, self.0.operation.iter().map(|(rank, does)| format!("rank {rank} {does}")));
        text
    }

    /// The text that is shown.
    pub fn text(&self) -> String {
        self.to_string()
    }

    /// The text that is shown, without the prefix, for use inside another sentence of the package.
    pub fn reason(&self) -> String {
        let text = self.to_string();
        text.strip_prefix(PREFIX).map_or(text.clone(), str::to_string)
    }

    /// The text that is shown, as one line for a log. Without the prefix, because the log names its logger.
    pub fn in_one_line(&self) -> String {
        in_one_line(&self.to_string())
    }
}

const PREFIX: &str = "sagellm: ";

/// A text for people: what happened, one line for each fact, and what to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Text {
    head: String,
    lines: Vec<String>,
    advice: String,
}

impl From<String> for Text {
    fn from(head: String) -> Text {
        Text { head, ..Text::default() }
    }
}

impl From<&str> for Text {
    fn from(head: &str) -> Text {
        head.to_string().into()
    }
}

impl Text {
    /// Joins head, lines and advice, each on its own line, in at most `room` bytes. If they do not fit, the last facts
    /// are omitted first; head and advice are kept as long as they fit.
    fn joined(&self, room: usize) -> String {
        const LEFT_OUT: &str = "\n(more was left out here)";
        let fitting = |text: &str, room: usize| {
            let end = (0..=room.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
            text[..end.unwrap_or(0)].to_string()
        };
        let end = format!("\n{}", self.advice);
        let whole = self.lines.iter().fold(self.head.clone(), |text, line| text + "\n" + line);
        if whole.len() + end.len() <= room {
            return whole + &end;
        }
        let Some(left) = room.checked_sub(LEFT_OUT.len() + end.len()) else { return fitting(&self.head, room) };
        let mut text = fitting(&self.head, left);
        if !self.lines.is_empty() || !self.advice.is_empty() {
            let mut lines = self.lines.iter();
            while let Some(line) = lines.next().filter(|line| text.len() + 1 + line.len() <= left) {
                text = text + "\n" + line;
            }
            text += LEFT_OUT;
        }
        text + &end
    }

    /// Reads a text that `joined` has made on another rank. Removes control characters, so that the text can neither
    /// steer a terminal nor forge a line of the log: all lines except the first are indented when shown.
    fn from_elsewhere(joined: &str) -> Text {
        let text = cleaned(joined, &['\n']);
        let mut lines: Vec<String> = text.split('\n').map(|line| line.trim().to_string()).collect();
        let head = lines.remove(0);
        let advice = lines.pop().unwrap_or_default();
        Text { head, lines, advice }
    }

    /// The text as one line for a log, without `PREFIX`, because the log names its logger.
    pub fn in_one_line(&self) -> String {
        in_one_line(&self.to_string())
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.head)?;
        let mut rest = self.lines.iter().chain([&self.advice]).filter(|line| !line.is_empty());
        rest.try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// Advice for a group that has failed, if the remaining ranks can go on without the lost ones.
pub const GO_ON: &str = "To go on: torch_sagellm.recover() on all ranks that are left, or a new group";
/// Text about a rank that left the group and announced it.
pub const LEFT: &str = "left the group (destroy_process_group or the end of its program)";
/// Advice for ranks that made different calls.
pub const SAME_CALLS: &str = "Every rank must call the same collectives in the same order with the same sizes";

/// Makes the text of an error about a group: what happened, one line for each fact, and what to do. Empty lines are
/// omitted.
pub fn laid_out(head: &str, lines: &[String], advice: &str) -> Text {
    Text { head: format!("{PREFIX}{head}"), lines: lines.to_vec(), advice: advice.to_string() }
}

/// The text as one line for a log. Without the prefix, because the log names its logger.
pub fn in_one_line(text: &str) -> String {
    text.trim_start_matches(PREFIX).lines().map(str::trim).collect::<Vec<_>>().join("; ")
}

/// Cleans a text from outside this process: removes control characters, and indents all lines except the first, so that
/// the text can neither steer a terminal nor forge a line of the log.
pub fn relaid(text: &str) -> String {
    cleaned(text, &['\n']).lines().map(str::trim).collect::<Vec<_>>().join("\n  ")
}

/// Runs `body`. A panic in it is a bug of ours and becomes an error.
pub fn contained<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(Error::bug(format!("sagellm: internal error, please report it: {text}")))
    })
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.whole_text();
        if let Some(reporter) = self.0.reporter {
            let end = text.head.find('\n').unwrap_or(text.head.len());
            text.head.insert_str(end, &format!(" (reported by rank {reporter})"));
        }
        text.fmt(f)
    }
}

impl std::error::Error for Error {}

pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_a_head_a_line_for_each_fact_and_what_to_do() {
        let lines = ["waiting at a.py:3".to_string(), String::new(), "rank 1 has not entered it".to_string()];
        let text = laid_out("rank 0 is late", &lines, "Wait");
        let shown = "sagellm: rank 0 is late\n  waiting at a.py:3\n  rank 1 has not entered it\n  Wait";
        assert_eq!(text.to_string(), shown);
        assert_eq!(text.in_one_line(), "rank 0 is late; waiting at a.py:3; rank 1 has not entered it; Wait");
        assert_eq!(laid_out("rank 0 is late", &[], "").to_string(), "sagellm: rank 0 is late");
        let error = Error::rank_failed(1, text).while_rank(0, "is in barrier number 2");
        assert_eq!(error.found_by(), Some(0));
        assert_eq!(Error::decode(&error.encode(999)).unwrap().found_by(), None, "on another rank");
        assert!(
            error.text().starts_with("sagellm: rank 0 is late\n  rank 0 is in barrier number 2\n  waiting"),
            "{error}"
        );
    }

    #[test]
    fn the_first_line_says_once_who_reported_a_text() {
        let error = Error::timeout(laid_out("rank 2 is late", &["rank 1 is missing".to_string()], "Wait"));
        let told = Error::decode(&error.encode(999)).unwrap().as_told().reported_by(2);
        assert_eq!(told.text(), "sagellm: rank 2 is late (reported by rank 2)\n  rank 1 is missing\n  Wait");
        let passed_on = Error::decode(&told.encode(999)).unwrap().as_told().reported_by(7);
        assert_eq!(passed_on, told, "rank 7 passes it on");
        let bug = Error::decode(&Error::bug("sagellm: wrong").encode(999)).unwrap();
        assert_eq!(bug.as_told().reported_by(3).kind(), ErrorKind::Aborted);
        let died = Error::decode(&Error::rank_failed(5, "sagellm: gone").encode(999)).unwrap().as_told().reported_by(3);
        assert_eq!((died.rank(), died.reporter(), died.kind()), (Some(5), Some(3), ErrorKind::RankFailed));
        assert_eq!(died.text(), "sagellm: gone (reported by rank 3)");
    }

    #[test]
    fn a_text_that_does_not_fit_loses_facts_and_neither_its_head_nor_what_to_do() {
        const BEGIN: usize = 9;
        let lines: Vec<String> = (0..40).map(|rank| format!("rank {rank} has not entered it, größer")).collect();
        let error = Error::timeout(laid_out("rank 0 is late", &lines, "Wait"));
        let whole = error.encode(usize::MAX);
        assert_eq!(Error::decode(&whole).as_ref(), Some(&error));
        for room in (0..whole.len()).step_by(if cfg!(miri) { 97 } else { 1 }) {
            let bytes = error.encode(room);
            assert!(bytes.len() <= room.max(BEGIN), "{room}");
            if room < 80 {
                continue;
            }
            let short = Error::decode(&bytes).unwrap();
            let kept = short.text().lines().count() - 3;
            let expected: Vec<String> =
                lines[..kept].iter().cloned().chain(["(more was left out here)".into()]).collect();
            assert_eq!(short, Error::timeout(laid_out("rank 0 is late", &expected, "Wait")), "{room}");
            assert!(room - bytes.len() < lines[kept].len() + 1, "another line would have fitted into {room}");
        }
        let long = format!("sagellm: {}", "ü".repeat(100));
        let short = |error: &Error, room: usize| Error::decode(&error.encode(room)).unwrap().text();
        assert_eq!(short(&Error::system(long.clone()), BEGIN + 20), "sagellm: üüüüü");
        let text = Text { advice: "Wait".into(), ..long.into() };
        let text = short(&Error::system(text), BEGIN + 60);
        assert!(text.starts_with("sagellm: ü") && text.ends_with("ü\n  (more was left out here)\n  Wait"), "{text}");
    }

    proptest::proptest! {
        #[test]
        fn random_bytes_are_no_error_or_one_that_is_encoded_as_it_was_read(bytes in proptest::prelude::any::<Vec<u8>>()) {
            for bytes in [&bytes[..], &[b"T", &bytes[..]].concat()] {
                let Some(error) = Error::decode(bytes) else { continue };
                proptest::prop_assert_eq!(Error::decode(&error.encode(usize::MAX)), Some(error));
            }
        }
    }

    #[test]
    fn a_text_from_elsewhere_steers_no_terminal_and_forges_no_line() {
        let told = |text: &str| Error::decode(&[b"T\0\0\0\0\0\0\0\0", text.as_bytes()].concat()).unwrap();
        let shown = told("sagellm: late\n\tx\u{1b}[2J\nINFO all is well\r\n  Wait\n").text();
        assert_eq!(shown, "sagellm: late\n  x?[2J\n  INFO all is well?\n  Wait");
        for bytes in [&b""[..], b"T", b"T\0\0\0\0\0\0\0", b"?\0\0\0\0\0\0\0\0text"] {
            assert_eq!(Error::decode(bytes), None, "{bytes:?}");
        }
    }
}
