//! The usual times of the calls of groups on one host, kept in the user's cache directory for later groups and
//! processes. `explain` shows them until a group has made such calls itself. Nothing else uses them, because ranks may
//! read different files. Between hosts nothing is kept: there the model starts from the link, which each group measures.
//!
//! ```text
//! # what it is
//! format 1
//! version 0.1.0
//! machine AMD EPYC; 2 cores; L1 48K; L2 1024K; L3 32768K
//! ranks 2; cores 2; threads 1; policy 0123456789abcdef
//! all_reduce 8 bytes 4210 ns 12000 calls
//! sum 0123456789abcdef
//! ```
//!
//! Rank 0 writes the file when it has left a group that has not failed. If the group has timed enough calls of a size
//! class, their time replaces the line of that class; the other lines stay. If two processes write at the same time,
//! the lines of one may be lost.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::{Typical, class};
use crate::cache_file;
use crate::config;
use crate::os::topology;
use crate::types::Kind;

const HEAD: &str =
    "# sagellm usual times: median of the calls of each operation and size on this machine, from issue to end.";
const FORMAT: &str = "1";
/// Longest file in bytes that is read or written.
const MAX_BYTES: usize = 64 << 10;
/// A size class is kept only if at least this many of its calls were timed.
const ENOUGH: u64 = 100;

/// What identifies the groups on one machine whose calls take the same times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alike {
    pub ranks: usize,
    /// How many cores the ranks may use together.
    pub cores: usize,
    /// Threads that copy and combine, on each rank.
    pub threads: usize,
    /// `Policy::hash`: groups with other rules or another table choose other algorithms.
    pub policy: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kept(Vec<(Kind, Typical)>);

impl Kept {
    /// The usual times of one kind, the smallest size first.
    pub fn of(&self, kind: Kind) -> Vec<Typical> {
        self.0.iter().filter(|(one, _)| *one == kind).map(|(_, typical)| *typical).collect()
    }

    /// Adds what a group has measured.
    fn learn(&mut self, new: Vec<(Kind, Typical)>) {
        let place = |(kind, typical): &(Kind, Typical)| (*kind as u8, class(typical.payload as u64));
        self.0.retain(|old| !new.iter().any(|one| place(one) == place(old)));
        self.0.extend(new);
        self.0.sort_by_key(place);
    }

    fn text(&self, head: &str) -> String {
        let mut text = head.to_string();
        for (kind, Typical { payload, nanoseconds, calls }) in &self.0 {
            let _ = writeln!(text, "{kind} {payload:.0} bytes {nanoseconds:.0} ns {calls} calls");
        }
        cache_file::sealed(text)
    }

    /// Parses a file that must begin with `head`. The error is a clause.
    fn parse(bytes: &[u8], head: &str) -> Result<Kept, String> {
        let body = cache_file::opened(bytes, MAX_BYTES)?;
        let lines = body.strip_prefix(head).ok_or("it is of another version, machine or kind of group")?;
        let line = |text: &str| {
            let [kind, payload, "bytes", time, "ns", calls, "calls"] = text.split(' ').collect::<Vec<_>>()[..] else {
                return None;
            };
            let kind = Kind::ALL.into_iter().find(|one| one.name() == kind)?;
            let (payload, time, calls) = (payload.parse().ok()?, time.parse().ok()?, calls.parse().ok()?);
            let (payload, nanoseconds): (u64, u64) = (payload, time);
            Some((kind, Typical { payload: payload as f64, nanoseconds: nanoseconds as f64, calls }))
        };
        let lines: Option<Vec<_>> = lines.lines().map(line).collect();
        lines.map(Kept).ok_or_else(|| "it is damaged: a line is none of a list of times".to_string())
    }
}

impl Alike {
    fn head(self) -> String {
        let Alike { ranks, cores, threads, policy } = self;
        let (version, machine) = (env!("CARGO_PKG_VERSION"), cache_file::one_line(topology::fingerprint()));
        format!(
            "{HEAD}\nformat {FORMAT}\nversion {version}\nmachine {machine}\nranks {ranks}; cores {cores}; threads {threads}; \
             policy {policy:016x}\n"
        )
    }

    /// Returns the path of the file. None if the user wants no file, or if no variable names a directory.
    fn path(self) -> Option<PathBuf> {
        if !config::keeps_times() {
            return None;
        }
        let kind = cache_file::hash(self.head().as_bytes());
        Some(cache_file::directory()?.join(format!("times-{kind:016x}-{}.txt", self.ranks)))
    }

    /// What earlier groups have measured; nothing if the file is missing or cannot be used.
    pub fn load(self) -> Kept {
        let Some(path) = self.path() else { return Kept::default() };
        let Ok(bytes) = cache_file::read(&path, MAX_BYTES) else { return Kept::default() };
        Kept::parse(&bytes, &self.head()).unwrap_or_else(|reason| {
            log::debug!("{} is not used: {reason}", path.display());
            Kept::default()
        })
    }

    /// Keeps what a group has measured, if it has made enough calls.
    pub fn save(self, measured: Vec<(Kind, Typical)>) {
        let new: Vec<_> = measured.into_iter().filter(|(_, typical)| typical.calls >= ENOUGH).collect();
        let Some(path) = self.path().filter(|_| !new.is_empty()) else { return };
        let mut kept = self.load();
        kept.learn(new);
        if let Err(error) = cache_file::write(&path, &kept.text(&self.head()), MAX_BYTES, false) {
            log::debug!("the times of calls are not kept in {}: {error}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typical(payload: f64, nanoseconds: f64, calls: u64) -> Typical {
        Typical { payload, nanoseconds, calls }
    }

    fn some() -> Kept {
        let lines = [
            (Kind::AllReduce, typical(8.0, 4210.0, 12_000)),
            (Kind::AllReduce, typical(1048576.0, 118_000.0, 300)),
            (Kind::Barrier, typical(0.0, 3100.0, 150)),
        ];
        let mut kept = Kept::default();
        kept.learn(lines.to_vec());
        kept
    }

    const ALIKE: Alike = Alike { ranks: 2, cores: 2, threads: 1, policy: 7 };

    #[test]
    #[cfg_attr(miri, ignore = "asks the system for this machine's processors")]
    fn times_are_read_as_they_were_written() {
        let (kept, head) = (some(), ALIKE.head());
        assert_eq!(Kept::parse(kept.text(&head).as_bytes(), &head).unwrap(), kept);
        assert_eq!(kept.of(Kind::AllReduce).len(), 2);
        assert_eq!(kept.of(Kind::Broadcast), []);
        let other = Alike { threads: 2, ..ALIKE }.head();
        assert!(Kept::parse(kept.text(&other).as_bytes(), &head).unwrap_err().contains("another"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the system for this machine's processors")]
    fn what_a_group_measured_replaces_older_times_of_the_same_size_class() {
        let mut kept = some();
        kept.learn(vec![(Kind::AllReduce, typical(7.0, 9000.0, 100)), (Kind::Reduce, typical(8.0, 5000.0, 100))]);
        assert_eq!(kept.of(Kind::AllReduce), [typical(7.0, 9000.0, 100), typical(1048576.0, 118_000.0, 300)]);
        assert_eq!(kept.of(Kind::Barrier), some().of(Kind::Barrier));
        assert_eq!(kept.of(Kind::Reduce), [typical(8.0, 5000.0, 100)]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the system for this machine's processors")]
    fn a_damaged_file_is_refused() {
        let head = ALIKE.head();
        let text = some().text(&head);
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 0x15;
            Kept::parse(&bytes, &head).unwrap_err();
            Kept::parse(&text.as_bytes()[..at], &head).unwrap_err();
        }
        for line in ["all_reduce 8 bytes -1 ns 5 calls", "sum_all 8 bytes 1 ns 5 calls", "all_reduce 8 bytes 1 ns"] {
            let text = cache_file::sealed(format!("{head}{line}\n"));
            assert!(Kept::parse(text.as_bytes(), &head).unwrap_err().contains("a line"), "{line}");
        }
    }
}
