//! Text files in the user's cache directory: what was measured on this machine, for later processes. A file ends with a
//! sum over everything above it, and is written atomically. A file that cannot be read or has any other contents is
//! refused with a reason.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The variable that names the cache directory. If it is not set, the directory is `$XDG_CACHE_HOME/sagellm` or
/// `~/.cache/sagellm`.
pub const VARIABLE: &str = "SAGELLM_CACHE_DIR";

/// This user's cache directory. None if no variable names a directory.
pub fn directory() -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named(VARIABLE)
        .or_else(|| named("XDG_CACHE_HOME").map(|path| path.join("sagellm")))
        .or_else(|| named("HOME").map(|path| path.join(".cache").join("sagellm")))
}

/// FNV-1a: if any single byte changes, the hash changes. It protects only against accidents; a user who can write the
/// cache directory can do worse than falsify a file.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

pub fn one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// Appends the sum.
pub fn sealed(body: String) -> String {
    let sum = hash(body.as_bytes());
    format!("{body}sum {sum:016x}\n")
}

/// The text above the sum. The error is a clause: "it is damaged: ...".
pub fn opened(bytes: &[u8], most: usize) -> Result<&str, String> {
    if bytes.len() > most {
        return Err(format!("it has {} bytes, more than the {most} of a table", bytes.len()));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| "it is damaged: it is not text".to_string())?;
    let damaged = || "it is damaged: the sum at its end does not match".to_string();
    let body = &text[..text.rfind("sum ").ok_or_else(damaged)?];
    let expected = format!("sum {:016x}\n", hash(body.as_bytes()));
    if body.ends_with('\n') && text[body.len()..] == expected { Ok(body) } else { Err(damaged()) }
}

/// Reads up to one byte more than `most`, so that `opened` notices a file that is too long.
pub fn read(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Writes a file atomically: a reader finds either the old file or the complete new one, and of several writers the last
/// one wins. That holds after a power failure too if `sync` is set. Makes the directory.
pub fn write(path: &Path, text: &str, most: usize, sync: bool) -> io::Result<()> {
    if text.len() > most {
        return Err(io::Error::other(format!("a table of {} bytes is more than {most}", text.len())));
    }
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    // Another process may have the same process id, in another container or on another host that shares the directory.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let draft = path.with_extension(format!("{}-{now}.tmp", std::process::id()));
    let written = File::create_new(&draft).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        if sync { file.sync_all() } else { Ok(()) }
    });
    written.and_then(|()| fs::rename(&draft, path)).inspect_err(|_| {
        let _ = fs::remove_file(&draft);
    })
}
