//! Errors, in two classes: the fault of the caller or of the system (every variant but one), and our own bugs. The
//! texts are golden files (`tests/golden`): who, what was expected, what came, what to do.

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
    /// it names a failed rank, a deadline or mismatched calls.
    pub fn told(code: char, rank: usize, text: String) -> Error {
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
