//! Checks of the folders and files of `cpp/`.

use std::path::{Path, PathBuf};

use super::files_that_end;

/// Folders of `cpp/`, from top to bottom. A file may include headers of its own folder and of the folders below it.
/// Every folder may include `compat.hpp`, which has the conditions on torch's version.
const CPP_LAYERS: [&str; 6] = ["python", "c10d", "device", "work", "lower", "host"];

#[test]
fn the_folders_of_the_cpp_half_include_only_those_below_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("cpp");
    let layer = |name: &str| {
        let folder = name.split('/').next().unwrap();
        CPP_LAYERS.iter().position(|one| *one == folder).unwrap_or_else(|| panic!("cpp/{folder} has no layer"))
    };
    let mut wrong = Vec::new();
    for folder in CPP_LAYERS {
        for entry in std::fs::read_dir(root.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let name = format!("{folder}/{}", path.file_name().unwrap().to_str().unwrap());
            let text = std::fs::read_to_string(&path).unwrap();
            let included = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
            for header in included.filter(|header| {
                header.contains('/') && !["sagellm/", "rust/"].iter().any(|made| header.starts_with(made))
            }) {
                if layer(header) < layer(&name) {
                    wrong.push(format!("cpp/{name} includes {header}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "upward includes:\n{}", wrong.join("\n"));
}

/// Files of more than 300 lines, and why they are not split.
const LONG: [(&str, &str); 5] = [
    ("c10d/backend.hpp", "the calls of c10d::Backend, each declared once, and what they share"),
    ("device/vendor.cpp", "the way of a call onto a stream and back, in order"),
    ("lower/checks.cpp", "one check after another"),
    ("lower/plan.cpp", "how tensors become spans of memory, by the kinds of layout"),
    ("work/work.cpp", "the states of one Work, which share its mutex"),
];

#[test]
fn long_files_of_the_cpp_half_say_why() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("cpp");
    let mut all: Vec<PathBuf> = Vec::new();
    files_that_end(&root, &["cpp", "hpp"], &mut all);
    let is_long = |path: &PathBuf| std::fs::read_to_string(path).unwrap().lines().count() > 300;
    let mut long: Vec<PathBuf> = all.into_iter().filter(is_long).collect();
    long.sort();
    let found: Vec<&str> = long.iter().map(|path| path.strip_prefix(&root).unwrap().to_str().unwrap()).collect();
    let listed: Vec<&str> = LONG.iter().map(|(file, _)| *file).collect();
    assert_eq!(found, listed, "files of more than 300 lines, found and listed");
}
