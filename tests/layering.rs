//! Holds the direction of the arrows: a file uses only what stands below it, and the floor (docs/design.md).

use std::path::{Path, PathBuf};

/// From top to bottom; a module may use modules with a larger number. Modules of one number are one layer.
const LAYERS: [(&str, u32); 17] = [
    ("lib", 0),
    ("ffi", 1),
    ("group", 2),
    ("rendezvous", 3),
    ("progress", 4),
    ("engine", 5),
    ("fusion", 6),
    ("select", 6),
    ("algorithms", 7),
    ("reduce", 7),
    ("stats", 8),
    ("op", 9),
    ("config", 10),
    ("host", 10),
    ("os", 10),
    ("error", 11),
    ("types", 11),
];

fn layer(module: &str) -> u32 {
    LAYERS
        .iter()
        .find(|(name, _)| *name == module)
        .unwrap_or_else(|| panic!("module {module} has no layer: add it to tests/layering.rs and docs/design.md"))
        .1
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The modules that `text` names as `crate::<module>`, also inside `use crate::{a, b::c}`; tests at the end are left out.
fn uses(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]").next().unwrap();
    let text: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for part in text.split("crate::").skip(1) {
        if let Some(list) = part.strip_prefix('{') {
            let mut depth = 0;
            let mut item = String::new();
            for c in list.chars() {
                match c {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => {
                        found.push(std::mem::take(&mut item));
                        continue;
                    }
                    _ => (),
                }
                item.push(c);
            }
            found.push(item);
        } else {
            found.push(part.to_string());
        }
    }
    found
        .iter()
        .map(|item| item.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>())
        .filter(|name| !name.is_empty())
        .collect()
}

#[test]
fn no_module_uses_one_above_it() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    files(&src, &mut all);
    assert!(all.len() > 20, "the sources were not found");
    let mut wrong = Vec::new();
    for file in all {
        let inside = file.strip_prefix(&src).unwrap();
        let module = inside.components().next().unwrap().as_os_str().to_str().unwrap().trim_end_matches(".rs");
        for used in uses(&std::fs::read_to_string(&file).unwrap()) {
            if used != module && layer(&used) <= layer(module) {
                wrong.push(format!("{} uses crate::{used}", inside.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "upward arrows:\n{}", wrong.join("\n"));
}

#[test]
fn unsafe_code_stays_where_it_may_be() {
    const MAY: [&str; 6] = ["engine/shm/", "engine/device/", "rendezvous/", "reduce/", "ffi/", "os/"];
    // Local copies, and calls that ask the kernel for facts: each with its SAFETY note, and nowhere near shared memory.
    const FEW: [&str; 2] = ["engine/solo.rs", "engine/multihost/vector.rs"];
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    files(&src, &mut all);
    for file in all {
        let inside = file.strip_prefix(&src).unwrap().to_str().unwrap().to_string();
        if MAY.iter().any(|place| inside.starts_with(place)) || FEW.contains(&inside.as_str()) {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for line in lines {
            assert!(!line.contains("unsafe "), "{inside}: {line}");
        }
    }
}

/// Words that name a vendor or something of its own.
const NAMES: [&str; 9] = ["nccl", "hccl", "cncl", "cuda", "cambricon", "nvidia", "npu", "mlu", "ascend"];
/// The last ones are beginnings of other words, too.
const WHOLE: [&str; 3] = ["npu", "mlu", "ascend"];

/// Where such a word may stand outside of `engine/device` and `cpp/compat.hpp`, and what for.
const NAMED: [(&str, &str); 11] = [
    ("src/engine/shm/small.rs", "a source"),
    ("src/algorithms/ring.rs", "a source"),
    ("src/algorithms/direct.rs", "a source"),
    ("src/algorithms/double_tree.rs", "a source"),
    ("src/stats/mod.rs", "a benchmark whose way to count is followed"),
    ("src/stats/tests.rs", "a benchmark whose way to count is followed"),
    ("torch_ext/sagellm/observe/stats.py", "a benchmark whose way to count is followed"),
    ("src/config.rs", "what a variable switches on"),
    ("src/os/topology.rs", "where a driver lists its cards, for the name of a machine"),
    ("torch_ext/sagellm/_register.py", "the values of the option, and a variable of torch"),
    ("torch_ext/sagellm/_C.pyi", "the values of the option"),
];

fn names_a_vendor(text: &str) -> Option<&str> {
    let words = text.split(|c: char| !c.is_alphanumeric());
    let named = |word: &&str| {
        let word = word.to_lowercase();
        NAMES.iter().any(|name| word.starts_with(name) && (word == *name || !WHOLE.contains(name)))
    };
    words.filter(|word| !word.is_empty()).find(named)
}

#[test]
fn vendors_are_named_where_their_code_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = vec![root.join("setup.py"), root.join("build.rs")];
    for folder in ["src", "cpp", "torch_ext/sagellm"] {
        let mut pending = vec![root.join(folder)];
        while let Some(folder) = pending.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    pending.push(path);
                } else if path
                    .extension()
                    .is_some_and(|end| ["rs", "cpp", "hpp", "py", "pyi"].iter().any(|e| end == *e))
                {
                    all.push(path);
                }
            }
        }
    }
    let mut found = Vec::new();
    for path in all {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_string();
        if name.starts_with("src/engine/device/") || ["cpp/compat.hpp", "torch_ext/sagellm/_build.py"].contains(&&*name)
        {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let allowed = NAMED.iter().any(|(file, _)| *file == name);
        match names_a_vendor(&text) {
            Some(word) if !allowed => found.push(format!("{name} names {word:?}")),
            None if allowed => found.push(format!("{name} names no vendor, and is listed")),
            _ => {}
        }
    }
    assert!(found.is_empty(), "outside of engine/device, or to be listed with a reason: {found:#?}");
}
