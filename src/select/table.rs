//! The decision table: the fastest algorithm for each size, measured on one machine with one number of ranks. It is a
//! text file in the user's cache directory; there is one for each machine and number of ranks. `torch-sagellm tune`
//! writes it, and rank 0 of a group reads it when the group is created.
//!
//! ```text
//! # what it is
//! format 1
//! version 0.1.0
//! machine AMD EPYC; 2 cores; L1 48K; L2 1024K; L3 32768K
//! ranks 2
//! made 2026-11-21, A/A spread 4 %
//! all_reduce:0-4KiB=slots 3040 ns; start 3040 ns
//! all_reduce:4097-32KiB=rounds(64KiB) 4700 ns; start 5200 ns
//! sum 0123456789abcdef
//! ```
//!
//! A line is a rule, the median time of the rule's algorithm, and the median time of the default at the same size. The
//! last line is a checksum of everything above it. A file with any other contents is refused with a reason, because a
//! table decides how every operation runs.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use super::rules::{Rule, Rules};
use crate::cache_file::{self, VARIABLE, directory, hash, one_line};
use crate::error::{Error, Result as Outcome};
use crate::os::topology;

const FORMAT: &str = "1";
const HEAD: &str =
    "# sagellm decision table: the algorithm of each operation, as measured on this machine by `torch-sagellm tune`.";
/// Longest table in bytes that is read, written or sent to the other ranks.
pub const MAX_BYTES: usize = 16 << 10;

/// The machine, version and number of ranks for which a table was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    pub version: String,
    /// `topology::fingerprint`.
    pub machine: String,
    pub ranks: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub rule: Rule,
    /// Median time of this algorithm.
    pub nanoseconds: u64,
    /// Median time of the default at the same size, in the same run.
    pub start_nanoseconds: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub key: Key,
    /// Date and quality of the measurement, for display.
    pub made: String,
    pub lines: Vec<Line>,
}

impl Table {
    /// The first line that fits an operation. None if no line does.
    pub fn find(&self, kind: crate::types::Kind, bytes: u64) -> Option<&Line> {
        self.lines.iter().find(|line| line.rule.fits(kind, bytes))
    }

    pub fn text(&self) -> String {
        let Key { version, machine, ranks } = &self.key;
        let mut text = format!(
            "{HEAD}\nformat {FORMAT}\nversion {version}\nmachine {}\nranks {ranks}\nmade {}\n",
            one_line(machine),
            one_line(&self.made)
        );
        for Line { rule, nanoseconds, start_nanoseconds } in &self.lines {
            let _ = writeln!(text, "{rule} {nanoseconds} ns; start {start_nanoseconds} ns");
        }
        cache_file::sealed(text)
    }

    /// Parses a table, but does not check for which key it was made. The error is a clause: "it is damaged: ...".
    pub fn parse(bytes: &[u8]) -> Result<Table, String> {
        let body = cache_file::opened(bytes, MAX_BYTES)?;
        let mut lines = body.lines();
        let mut next = |name: &str| {
            let line = lines.next().unwrap_or_default();
            let value = line.strip_prefix(name).and_then(|rest| rest.strip_prefix(' '));
            value.ok_or_else(|| format!("it is damaged: {line:?} was read where '{name}' was expected"))
        };
        next("# sagellm decision table:")?;
        let format = next("format")?;
        if format != FORMAT {
            return Err(format!("it is written in format {format}, this version reads format {FORMAT}"));
        }
        let version = next("version")?.to_string();
        let machine = next("machine")?.to_string();
        let ranks = next("ranks")?;
        let ranks = ranks.parse().map_err(|_| format!("it is damaged: {ranks:?} ranks"))?;
        let made = next("made")?.to_string();
        let lines = lines.map(Line::parse).collect::<Result<Vec<Line>, String>>()?;
        Ok(Table { key: Key { version, machine, ranks }, made, lines })
    }

    /// Refuses a table that was made for another key. The error is a clause, like that of `parse`.
    pub fn serves(&self, wanted: &Key) -> Result<(), String> {
        if self.key.version != wanted.version {
            return Err(format!(
                "it is stale: sagellm {} made it, this is {}; run `torch-sagellm tune` again",
                self.key.version, wanted.version
            ));
        }
        if self.key.machine != wanted.machine {
            return Err(format!("it is of another machine ({}; this is {})", self.key.machine, wanted.machine));
        }
        if self.key.ranks != wanted.ranks {
            return Err(format!("it is for {} ranks and this group has {}", self.key.ranks, wanted.ranks));
        }
        Ok(())
    }

    /// Refuses algorithms that no group could run.
    pub fn check(&self, slot_bytes: usize) -> Result<(), String> {
        self.lines.iter().map(|line| line.rule).collect::<Rules>().check(slot_bytes)
    }
}

impl Line {
    /// Parses a line such as `all_reduce:0-4KiB=slots 3040 ns; start 3040 ns`.
    pub fn parse(text: &str) -> Result<Line, String> {
        let wrong = || format!("it is damaged: {text:?} is no line of a table");
        let (rule, times) = text.split_once(' ').ok_or_else(wrong)?;
        let (own, start) = times.split_once("; start ").ok_or_else(wrong)?;
        let time = |text: &str| text.strip_suffix(" ns").and_then(|ns| ns.parse().ok()).ok_or_else(wrong);
        let rule = Rule::parse(rule).map_err(|what| format!("it is damaged: {rule:?}: {what}"))?;
        Ok(Line { rule, nanoseconds: time(own)?, start_nanoseconds: time(start)? })
    }
}

/// The key that a table must have to apply on this machine.
pub fn key(ranks: usize) -> Key {
    Key { version: env!("CARGO_PKG_VERSION").into(), machine: topology::fingerprint().into(), ranks }
}

/// The table's file for one machine and number of ranks. Machines that share a home directory use different files.
pub fn path(directory: &Path, key: &Key) -> PathBuf {
    directory.join(format!("table-{:016x}-{}.txt", hash(key.machine.as_bytes()), key.ranks))
}

/// The result of loading a table.
pub enum Found {
    Table(Table, PathBuf),
    /// There is no table, which is the usual case. The text says so.
    Missing(String),
    /// There is a table that must not be used. The text says why.
    Refused(String),
}

/// Loads the table for `key` from `directory`, if it is undamaged and was made for exactly this key.
pub fn load(directory: &Path, key: &Key, slot_bytes: usize) -> Found {
    let path = path(directory, key);
    let bytes = match cache_file::read(&path, MAX_BYTES) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Found::Missing(format!(
                "there is none for {} ranks on this machine; `torch-sagellm tune` makes one",
                key.ranks
            ));
        }
        Err(error) => return Found::Refused(format!("{} cannot be read: {error}", path.display())),
    };
    let read = Table::parse(&bytes).and_then(|table| {
        table.serves(key)?;
        table.check(slot_bytes)?;
        Ok(table)
    });
    match read {
        Ok(table) => Found::Table(table, path),
        Err(reason) => Found::Refused(format!("{} is not used: {reason}", path.display())),
    }
}

/// Writes a table, and returns its path.
pub fn save(directory: &Path, table: &Table) -> io::Result<PathBuf> {
    let path = path(directory, &table.key);
    cache_file::write(&path, &table.text(), MAX_BYTES, true)?;
    Ok(path)
}

/// Makes the table of this machine for `ranks` ranks from `lines`, each of which is a `Line`. Writes the table and
/// returns its path.
pub fn make(ranks: usize, made: &str, lines: &str) -> Outcome<String> {
    let lines: Result<Vec<Line>, String> = lines.lines().map(Line::parse).collect();
    let lines = lines.map_err(|what| Error::invalid(format!("sagellm: the new table cannot be used: {what}")))?;
    let directory = directory().ok_or_else(|| {
        Error::invalid(format!(
            "sagellm: there is no directory for the table: {VARIABLE}, XDG_CACHE_HOME and HOME are not set"
        ))
    })?;
    let path = save(&directory, &Table { key: key(ranks), made: made.into(), lines }).map_err(|error| {
        Error::system(format!("sagellm: the table cannot be written into {}: {error}", directory.display()))
    })?;
    Ok(path.display().to_string())
}

#[cfg(test)]
pub mod tests {
    use std::fs;

    use super::*;

    pub fn example() -> Table {
        let lines = [
            "all_reduce:0-4KiB=slots 3040 ns; start 3040 ns",
            "all_reduce:4097-32KiB=rounds(64KiB) 4700 ns; start 5200 ns",
            "broadcast:0-=rounds(16KiB) 9000 ns; start 9400 ns",
        ];
        Table {
            key: Key { version: "0.1.0".into(), machine: "AMD EPYC; 2 cores; L2 1024K".into(), ranks: 2 },
            made: "2026-11-21, A/A spread 4 %".into(),
            lines: lines.iter().map(|line| Line::parse(line).unwrap()).collect(),
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let table = example();
        assert_eq!(Table::parse(table.text().as_bytes()).unwrap(), table);
        table.serves(&table.key).unwrap();
        table.check(4096).unwrap();
        assert!(table.text().contains("all_reduce:4097-32KiB=rounds(64KiB) 4700 ns; start 5200 ns\n"));
    }

    #[test]
    fn any_changed_byte_is_refused() {
        let text = example().text();
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut bytes = text.clone().into_bytes();
                bytes[at] ^= 1 << bit;
                let reason = Table::parse(&bytes).unwrap_err();
                assert!(reason.starts_with("it "), "{reason}");
            }
            let mut shorter = text.clone().into_bytes();
            shorter.remove(at);
            Table::parse(&shorter).unwrap_err();
            Table::parse(&text.as_bytes()[..at]).unwrap_err();
        }
    }

    #[test]
    fn a_right_sum_over_nonsense_is_refused() {
        let good = example().text();
        let body = &good[..good.rfind("sum ").unwrap()];
        for (from, to, expected) in [
            ("format 1", "format 2", "format 2"),
            ("ranks 2", "ranks two", "two"),
            ("version", "vision", "'version' was expected"),
            ("=slots", "=magic", "magic"),
            (" ns; start", " ms; start", "no line of a table"),
            ("3040 ns; start", "-1 ns; start", "no line of a table"),
        ] {
            let body = body.replacen(from, to, 1);
            let text = format!("{body}sum {:016x}\n", hash(body.as_bytes()));
            let reason = Table::parse(text.as_bytes()).unwrap_err();
            assert!(reason.contains(expected), "{reason}");
        }
        assert!(Table::parse(&vec![b'a'; MAX_BYTES + 1]).unwrap_err().contains("more than"));
    }

    #[test]
    fn tables_of_others_are_refused_by_name() {
        let table = example();
        let key = || table.key.clone();
        for (wanted, expected) in [
            (Key { version: "0.2.0".into(), ..key() }, "stale"),
            (Key { machine: "Other; 2 cores".into(), ..key() }, "another machine"),
            (Key { ranks: 4, ..key() }, "for 2 ranks"),
        ] {
            assert!(table.serves(&wanted).unwrap_err().contains(expected));
        }
        let mut table = example();
        table.lines[0].rule.to = 8192;
        assert!(table.check(4096).unwrap_err().contains("all_reduce:0-8KiB=slots"));
    }

    #[test]
    fn a_table_is_saved_found_and_refused_when_it_is_not_ours() {
        let directory = std::env::temp_dir().join(format!("sagellm-table-{}", std::process::id()));
        let table = example();
        let look = |key: &Key| load(&directory, key, 4096);
        assert!(matches!(look(&table.key), Found::Missing(text) if text.contains("torch-sagellm tune")));
        let path = save(&directory, &table).unwrap();
        assert!(matches!(look(&table.key), Found::Table(found, at) if found == table && at == path));
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "no draft is left");

        let refused = |expected: &str| match look(&table.key) {
            Found::Refused(text) => assert!(text.contains(expected) && text.contains("table-"), "{text}"),
            _ => panic!("expected to be refused: {expected}"),
        };
        fs::write(&path, "garbage").unwrap();
        refused("damaged");
        fs::write(&path, vec![0u8; 100_000]).unwrap();
        refused("more than");
        let other = Table { key: Key { version: "0.0.1".into(), ..table.key.clone() }, ..example() };
        fs::write(&path, other.text()).unwrap();
        refused("stale");
        let foreign = Table { key: Key { machine: "elsewhere".into(), ..table.key.clone() }, ..example() };
        fs::write(&path, foreign.text()).unwrap();
        refused("another machine");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refused("cannot be read");
        fs::remove_dir_all(&directory).unwrap();
    }
}
