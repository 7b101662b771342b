//! The ABI simulators of `tests/simulators`, built when a test first needs them (tests/simulators/README.md).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the path of each simulator library by name: "nccl", "cuda", "hccl", "hccl_two", ... The first caller builds
/// all of them while the others wait. If no source has changed, this takes a tenth of a second.
///
/// # Panics
/// If the simulators cannot be built; the message contains the compiler's output.
pub fn simulators() -> HashMap<String, PathBuf> {
    listed(&[])
}

/// Builds a variant of the library `form` without the symbols that match the regular expression `missing`.
pub fn without(form: &str, missing: &str) -> PathBuf {
    listed(&["--without", form, missing]).remove("without").expect("it was asked for")
}

fn listed(arguments: &[&str]) -> HashMap<String, PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/simulators/build.py");
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_string());
    let output = Command::new(&python).arg(&script).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("cannot run {python} {}: {error}", script.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("paths that are text");
    let pairs = text.lines().filter_map(|line| line.split_once('\t'));
    pairs.map(|(name, path)| (name.to_string(), PathBuf::from(path))).collect()
}
