//! The product contains nothing that only tests use: the feature `testing`, the functions that only tests call, and the
//! actions of the fault points.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::sources::products;
use super::{files, files_that_end};
use sagellm::os::fault_points::FaultPoint;

/// The files of `src/` that have code for tests. The product is compiled without that code.
const WITH_THE_FEATURE: [&str; 9] = [
    "config.rs",
    "engine/mod.rs",
    "engine/multihost/wire/process.rs",
    "engine/shm/memory/area.rs",
    "engine/shm/memory/segment.rs",
    "engine/verify.rs",
    "error.rs",
    "group/mod.rs",
    "os/fault_points.rs",
];

fn sources() -> Vec<(String, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    files(&src, &mut all);
    let read = |file: PathBuf| {
        let inside = file.strip_prefix(&src).unwrap().to_str().unwrap().to_string();
        (inside, std::fs::read_to_string(file).unwrap())
    };
    all.into_iter().map(read).collect()
}

#[test]
fn what_only_tests_use_is_not_in_the_product() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    let mut found: Vec<String> = sources()
        .into_iter()
        .filter(|(_, text)| text.contains("feature = \"testing\""))
        .map(|(file, _)| file)
        .collect();
    found.sort();
    assert_eq!(found, WITH_THE_FEATURE, "files with code for tests, found and listed");

    let manifest = text("Cargo.toml");
    let (product, tests) = manifest.split_once("[dev-dependencies]").expect("the tests have dependencies");
    assert!(product.contains("\ntesting = []\n"), "the feature switches on nothing else");
    assert!(!product.contains("\ndefault = "), "no feature is on by itself");
    assert!(tests.contains("sagellm = { path = \".\", features = [\"testing\"] }"));

    // Each file that compiles the product names the features that it enables.
    let mut builders = vec![root.join("setup.py"), root.join("build.rs"), root.join("Makefile")];
    let scripts = std::fs::read_dir(root.join(".ci")).unwrap().map(|entry| entry.unwrap().path());
    builders.extend(scripts.filter(|path| path.is_file()));
    let mut python = Vec::new();
    files_that_end(&root.join("torch_ext"), &["py"], &mut python);
    for path in builders.into_iter().chain(python) {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let wants = text.lines().find(|line| line.contains("features") && line.contains("testing"));
        assert!(wants.is_none(), "{} builds with the feature for tests: {wants:?}", path.display());
    }
}

/// Returns whether the product calls a function of this name or passes it to another one. A field of the same name,
/// such as the symbol of a vendor's library, does not count, because no bracket follows it.
fn is_used(name: &str, code: &str) -> bool {
    code.match_indices(name).any(|(at, _)| {
        let (before, after) = (&code[..at], &code[at + name.len()..]);
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let is_whole = !before.ends_with(is_part) && !after.starts_with(is_part);
        let is_passed = before.ends_with("::") || after.starts_with([',', ')']);
        is_whole && !before.ends_with("fn ") && (is_passed || after.starts_with('(') || after.starts_with("::<"))
    })
}

/// Finds public functions, and functions that traits declare, that only tests call; the compiler reports private ones.
/// Misses a function if the product calls another function of the same name, such as `new`.
#[test]
fn each_function_is_called_by_the_product() {
    let products = products();
    let code: String = products.values().map(String::as_str).collect();
    let mut unused = Vec::new();
    // C++ calls what is in `ffi`.
    for (file, text) in products.iter().filter(|(file, _)| file[0] != "ffi") {
        let mut of_trait = false;
        for line in text.lines() {
            if line.starts_with("impl") || line.starts_with("unsafe impl") {
                of_trait = line.contains(" for "); // called through the trait
            } else if line == "}" {
                of_trait = false;
            }
            let declared = line.trim_start().split_once("fn ").filter(|(words, _)| {
                words.split(' ').all(|word| ["", "const", "unsafe"].contains(&word) || word.starts_with("pub"))
            });
            let name = declared.and_then(|(_, rest)| rest.split(['(', '<']).next());
            if let Some(name) = name.filter(|name| !of_trait && !is_used(name, &code)) {
                unused.push(format!("{}: {name}", file.join("/")));
            }
        }
    }
    assert!(unused.is_empty(), "only tests call them: remove them, or compile them for tests alone: {unused:#?}");
}

/// A fault point that no code calls is never reached, and a fault point that several places call identifies none of
/// them.
#[test]
fn each_fault_point_is_one_place() {
    let mut calls: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (file, text) in sources().into_iter().filter(|(file, _)| file != "os/fault_points.rs") {
        for part in text.split("fault_points::reached(FaultPoint::").skip(1) {
            let name = part.split(')').next().unwrap().to_string();
            calls.entry(name).or_default().push(file.clone());
        }
    }
    let named: Vec<String> = FaultPoint::ALL.iter().map(|point| format!("{point:?}")).collect();
    let wrong: Vec<_> = named.iter().filter(|name| calls.get(*name).is_none_or(|files| files.len() != 1)).collect();
    assert!(wrong.is_empty(), "not exactly one call each: {wrong:?} of {calls:?}");
    assert_eq!(calls.len(), named.len());
}
