//! Errors, in two classes: the fault of the caller or of the system (every variant but one), and our own bugs. The
//! texts are golden files (`tests/golden`): who, what was expected, what came, what to do. [`laid_out`] gives those about a
//! group their lines; whatever reads or changes such a text stands here, too.

use std::borrow::Cow;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The call itself is wrong; nothing was sent and no sequence number was used.
    Invalid(String),
    /// The operation's own deadline passed. Poisons the group.
    Timeout(String),
    /// `wait(t)` elapsed; the operation continues.
    WaitElapsed(String),
    /// A peer's process ended.
    RankFailed { rank: usize, text: String },
    /// Ranks called different operations under one sequence number.
    Mismatch(String),
    /// Someone called abort, or the group was shut down.
    Aborted(String),
    /// A Python signal handler raised while the caller was waiting.
    Interrupted(String),
    /// The operating system refused something the engine needs.
    System(String),
    /// A broken assumption of ours; the text carries both values.
    Bug(String),
}

/// The class of an error, from which C++ picks the exception. The number is the letter in front of an error's text
/// where it leaves the core: over the C++ bridge, in shared memory and in frames between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ErrorKind {
    Invalid = b'V',
    Timeout = b'T',
    RankFailed = b'D',
    Mismatch = b'M',
    Aborted = b'A',
    Interrupted = b'P',
    System = b'S',
    Bug = b'B',
}

impl Error {
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Invalid(_) => ErrorKind::Invalid,
            Error::Timeout(_) | Error::WaitElapsed(_) => ErrorKind::Timeout,
            Error::RankFailed { .. } => ErrorKind::RankFailed,
            Error::Mismatch(_) => ErrorKind::Mismatch,
            Error::Aborted(_) => ErrorKind::Aborted,
            Error::Interrupted(_) => ErrorKind::Interrupted,
            Error::System(_) => ErrorKind::System,
            Error::Bug(_) => ErrorKind::Bug,
        }
    }

    /// The letter of its kind.
    pub fn code(&self) -> char {
        self.kind() as u8 as char
    }

    /// The error that another rank reported, by the letter of its kind. For the receiving rank it is an abort, unless
    /// it names a failed rank, a deadline or mismatched calls. The text came from elsewhere (`relaid`).
    pub fn told(code: char, rank: usize, text: &str) -> Error {
        let text = relaid(text);
        match u8::try_from(code) {
            Ok(code) if code == ErrorKind::Timeout as u8 => Error::Timeout(text),
            Ok(code) if code == ErrorKind::RankFailed as u8 => Error::RankFailed { rank, text },
            Ok(code) if code == ErrorKind::Mismatch as u8 => Error::Mismatch(text),
            _ => Error::Aborted(text),
        }
    }

    pub fn text(&self) -> &str {
        match self {
            Error::Invalid(t)
            | Error::Timeout(t)
            | Error::WaitElapsed(t)
            | Error::RankFailed { text: t, .. }
            | Error::Mismatch(t)
            | Error::Aborted(t)
            | Error::Interrupted(t)
            | Error::System(t)
            | Error::Bug(t) => t,
        }
    }
}

/// A text that came from elsewhere (the store, to which anyone may write who reaches it), without characters that a
/// terminal obeys or a log line ends at. Characters of `kept` stay.
pub fn cleaned(text: &str, kept: &[char]) -> String {
    let clean = |c: char| match c {
        _ if kept.contains(&c) => c,
        '\n' | '\t' => ' ',
        _ if c.is_control() => '?',
        _ => c,
    };
    text.chars().map(clean).collect()
}

/// What to do where a group has failed and its ranks can go on without those that are gone.
pub const GO_ON: &str = "To go on: torch_sagellm.recover() on all ranks that are left, or a new group";
/// What a rank did that is gone and told so.
pub const LEFT: &str = "left the group (destroy_process_group or the end of its program)";
/// What to do about calls that differ.
pub const SAME_CALLS: &str = "Every rank must call the same collectives in the same order with the same sizes";

/// The text of an error about a group, for eyes: what happened, then a line for each fact, and what to do. An empty line is
/// left out.
pub fn laid_out(head: &str, lines: &[String], advice: &str) -> String {
    let rest = lines.iter().map(String::as_str).chain([advice]).filter(|line| !line.is_empty());
    rest.fold(format!("sagellm: {head}"), |text, line| text + "\n  " + line)
}

/// Such a text as one line, for a log, which names its logger.
pub fn in_one_line(text: &str) -> String {
    text.trim_start_matches("sagellm: ").lines().map(str::trim).collect::<Vec<_>>().join("; ")
}

/// Such a text that came from elsewhere: nothing in it steers a terminal, and no line of it but the first looks like one of
/// its own.
pub fn relaid(text: &str) -> String {
    cleaned(text, &['\n']).lines().map(str::trim).collect::<Vec<_>>().join("\n  ")
}

/// Such a text where no more than `room` bytes fit: facts are left out, the last ones first, and neither what happened nor
/// what to do, as far as these fit.
pub fn shortened(text: &str, room: usize) -> Cow<'_, str> {
    const LEFT_OUT: &str = "\n  (more was left out here)";
    if text.len() <= room {
        return Cow::Borrowed(text);
    }
    let advice = text.rfind('\n').map_or("", |at| &text[at..]);
    let before = &text[..text.len() - advice.len()];
    let end = |within: &str, room: usize| (0..=room.min(within.len())).rev().find(|at| within.is_char_boundary(*at));
    let Some(left) = room.checked_sub(advice.len() + LEFT_OUT.len()).filter(|_| !advice.is_empty()) else {
        return Cow::Borrowed(&text[..end(text, room).unwrap_or(0)]);
    };
    // A first line that alone is too long is cut in itself.
    let whole = end(before, left).unwrap_or(0);
    let ends_a_line = before[whole..].starts_with('\n');
    let kept = if ends_a_line { whole } else { before[..whole].rfind('\n').unwrap_or(whole) };
    Cow::Owned([&before[..kept], LEFT_OUT, advice].concat())
}

const REPORTED: &str = " (reported by rank ";

/// A text that the rank `by` told, which its first line says then. One that it has from another rank says so already.
pub fn reported(text: &str, by: usize) -> String {
    let (head, rest) = text.split_once('\n').map_or((text, None), |(head, rest)| (head, Some(rest)));
    let told = if head.contains(REPORTED) { head.to_string() } else { format!("{head}{REPORTED}{by})") };
    rest.map_or(told.clone(), |rest| format!("{told}\n{rest}"))
}

/// A text that a rank of a smaller group told, with that rank's number in the whole group.
pub fn renumbered(text: &str, number: impl FnOnce(usize) -> Option<usize>) -> String {
    let found = || {
        let (head, rest) = text.split_once(REPORTED)?;
        let (rank, rest) = rest.split_once(')')?;
        Some(format!("{head}{REPORTED}{}){rest}", number(rank.parse().ok()?)?))
    };
    found().unwrap_or_else(|| text.to_string())
}

/// Runs `body`; a panic in it is a bug of ours and becomes an error.
pub fn contained<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(Error::Bug(format!("sagellm: internal error, please report it: {text}")))
    })
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
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
        assert_eq!(text, "sagellm: rank 0 is late\n  waiting at a.py:3\n  rank 1 has not entered it\n  Wait");
        assert_eq!(in_one_line(&text), "rank 0 is late; waiting at a.py:3; rank 1 has not entered it; Wait");
        assert_eq!(laid_out("rank 0 is late", &[], ""), "sagellm: rank 0 is late");
    }

    #[test]
    fn the_first_line_says_once_who_reported_a_text() {
        let text = laid_out("rank 2 is late", &["rank 1 is missing".to_string()], "Wait");
        let told = reported(&text, 2);
        assert_eq!(told, "sagellm: rank 2 is late (reported by rank 2)\n  rank 1 is missing\n  Wait");
        assert_eq!(reported(&told, 7), told, "rank 7 passes it on");
        assert_eq!(reported("sagellm: late", 3), "sagellm: late (reported by rank 3)");
        assert!(renumbered(&told, |rank| Some(rank + 4)).starts_with("sagellm: rank 2 is late (reported by rank 6)\n"));
        assert_eq!(renumbered(&told, |_| None), told);
        assert_eq!(renumbered(&text, |rank| Some(rank + 4)), text);
    }

    #[test]
    fn a_text_that_does_not_fit_loses_facts_and_neither_its_head_nor_what_to_do() {
        let lines: Vec<String> = (0..40).map(|rank| format!("rank {rank} has not entered it, größer")).collect();
        let text = laid_out("rank 0 is late", &lines, "Wait");
        assert_eq!(shortened(&text, text.len()), text);
        for room in 0..text.len() {
            let short = shortened(&text, room);
            assert!(short.len() <= room, "{room}");
            if room < 80 {
                continue;
            }
            let kept = short.lines().count() - 3;
            let expected: Vec<String> =
                lines[..kept].iter().cloned().chain(["(more was left out here)".into()]).collect();
            assert_eq!(short, laid_out("rank 0 is late", &expected, "Wait"), "{room}");
            let next = lines[kept].len() + "\n  ".len();
            assert!(room - short.len() < next, "another line would have fitted into {room}");
        }
        let long = format!("sagellm: {}", "ü".repeat(100));
        assert_eq!(shortened(&long, 20), "sagellm: üüüüü");
        let short = shortened(&format!("{long}\n  Wait"), 60).into_owned();
        assert!(short.starts_with("sagellm: ü") && short.ends_with("ü\n  (more was left out here)\n  Wait"), "{short}");
    }

    #[test]
    fn a_text_from_elsewhere_steers_no_terminal_and_forges_no_line() {
        let told = Error::told('T', 0, "sagellm: late\n\tx\u{1b}[2J\nINFO all is well\r\n  Wait\n");
        assert_eq!(told, Error::Timeout("sagellm: late\n  x?[2J\n  INFO all is well?\n  Wait".into()));
        let text = laid_out("late", &["here".to_string()], "Wait");
        assert_eq!(Error::told('M', 0, &text), Error::Mismatch(text), "ours stays as it is");
    }
}
