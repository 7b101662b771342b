//! Where decision tables lie: one file a machine and number of ranks, in the user's cache directory. Read when a group is
//! made, by its rank 0 alone; written by `sagellm tune`.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::policy::Policy;
use super::rules;
use super::rules::Rules;
use super::table;
use super::table::{Key, Line, Table};
use crate::error::{Error, Result};
use crate::os::topology;

/// Names the directory itself; without it `$XDG_CACHE_HOME/sagellm` or `~/.cache/sagellm`.
pub const VARIABLE: &str = "SAGELLM_CACHE_DIR";
/// Rules for every group of the process, after those of its option.
pub const RULES_VARIABLE: &str = "SAGELLM_ALGORITHM";

/// What a table must be for to hold here.
pub fn key(ranks: usize) -> Key {
    Key { version: env!("CARGO_PKG_VERSION").into(), machine: topology::fingerprint().into(), ranks }
}

/// The cache directory of this user, if one can be named.
pub fn directory() -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named(VARIABLE)
        .or_else(|| named("XDG_CACHE_HOME").map(|path| path.join("sagellm")))
        .or_else(|| named("HOME").map(|path| path.join(".cache").join("sagellm")))
}

/// The file of one machine and number of ranks: machines that share a home directory do not meet in it.
pub fn path(directory: &Path, key: &Key) -> PathBuf {
    directory.join(format!("table-{:016x}-{}.txt", table::hash(key.machine.as_bytes()), key.ranks))
}

/// What was found: a table and where it lies, or why there is none.
pub enum Found {
    Table(Table, PathBuf),
    /// There is none, which is the usual case.
    Missing(String),
    /// There is one that must not be used.
    Refused(String),
}

/// What this rank would have its group do: the user's rules, and on rank 0 (`leads`) the table of this machine. The other
/// ranks' is only compared with rank 0's, so no file is read for it.
pub fn decide(option: &str, ranks: usize, slot_bytes: usize, leads: bool) -> Result<Policy> {
    let environment = std::env::var(RULES_VARIABLE).unwrap_or_default();
    let read = |name: &str, text: &str| {
        Rules::parse(text)
            .and_then(|rules| rules.check(slot_bytes).map(|()| rules))
            .map_err(|what| Error::Invalid(format!("sagellm: {name}: {what}")))
    };
    let mut rules = read("the option algorithm", option)?;
    rules.0.extend(read(RULES_VARIABLE, &environment)?.0);
    if rules.to_string().len() > rules::MAX_BYTES {
        return Err(Error::Invalid(format!(
            "sagellm: the rules of the option algorithm and of {RULES_VARIABLE} together are more than {} bytes",
            rules::MAX_BYTES
        )));
    }
    let mut policy = Policy { rules, ..Policy::default() };
    if !leads || ranks < 2 {
        return Ok(policy);
    }
    policy.cache_bytes = topology::last_level_cache().unwrap_or(super::DEFAULT_CACHE_BYTES);
    (policy.table, policy.note) = match directory() {
        None => (None, format!("there is none: neither {VARIABLE} nor HOME names a directory")),
        Some(directory) => match load(&directory, &key(ranks), slot_bytes) {
            Found::Table(table, path) => (Some(table), path.display().to_string()),
            Found::Missing(why) => (None, why),
            Found::Refused(why) => {
                warn_once(&why);
                (None, why)
            }
        },
    };
    Ok(policy)
}

/// A bad table is one problem, however many groups a process makes.
fn warn_once(why: &str) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !TOLD.swap(true, Ordering::Relaxed) {
        log::warn!("the decision table {why}");
    }
}

/// The table for `key` in `directory`, if it is whole and made for exactly that.
pub fn load(directory: &Path, key: &Key, slot_bytes: usize) -> Found {
    let path = path(directory, key);
    let mut bytes = Vec::new();
    // One byte more than a table may have shows that the file is too long, however long it is.
    match File::open(&path).and_then(|file| file.take(table::MAX_BYTES as u64 + 1).read_to_end(&mut bytes)) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Found::Missing(format!(
                "there is none for {} ranks on this machine; `sagellm tune` makes one",
                key.ranks
            ));
        }
        Err(error) => return Found::Refused(format!("{} cannot be read: {error}", path.display())),
    }
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

/// Writes a table so that a reader finds the old one or the new one, whole.
pub fn save(directory: &Path, table: &Table) -> io::Result<PathBuf> {
    let text = table.text();
    if text.len() > table::MAX_BYTES {
        return Err(io::Error::other(format!("a table of {} bytes is more than {}", text.len(), table::MAX_BYTES)));
    }
    fs::create_dir_all(directory)?;
    let path = path(directory, &table.key);
    let draft = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = File::create(&draft).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(&draft, &path)).inspect_err(|_| {
        let _ = fs::remove_file(&draft);
    })?;
    Ok(path)
}

/// Makes the table of this machine for `ranks` ranks from `lines`, each a `table::Line`, and writes it. Its path.
pub fn make(ranks: usize, made: &str, lines: &str) -> Result<String> {
    let lines: std::result::Result<Vec<Line>, String> = lines.lines().map(Line::parse).collect();
    let lines = lines.map_err(|what| Error::Invalid(format!("sagellm: the new table cannot be used: {what}")))?;
    let directory = directory().ok_or_else(|| {
        Error::Invalid(format!(
            "sagellm: there is no directory for the table: {VARIABLE}, XDG_CACHE_HOME and HOME are not set"
        ))
    })?;
    let path = save(&directory, &Table { key: key(ranks), made: made.into(), lines }).map_err(|error| {
        Error::System(format!("sagellm: the table cannot be written into {}: {error}", directory.display()))
    })?;
    Ok(path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::table::tests::example;

    #[test]
    fn a_table_is_saved_found_and_refused_when_it_is_not_ours() {
        let directory = std::env::temp_dir().join(format!("sagellm-table-{}", std::process::id()));
        let table = example();
        let look = |key: &Key| load(&directory, key, 4096);
        assert!(matches!(look(&table.key), Found::Missing(text) if text.contains("sagellm tune")));
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
