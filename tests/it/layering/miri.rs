//! The filters in `.ci/miri`. Cargo does not report a filter that matches no test, so Miri would silently skip
//! the tests of a module that was moved.

use std::path::Path;

use super::files;

/// Returns the words of the list `name=(...)` in a script of bash.
fn list<'a>(script: &'a str, name: &str) -> Vec<&'a str> {
    let list = script.split(&format!("\n{name}=(")).nth(1).and_then(|rest| rest.split(')').next());
    list.unwrap_or_else(|| panic!("the script has no list {name}")).split_whitespace().collect()
}

/// Returns the names of the tests in a folder: the path of the module and the name of the function. Tests in a module
/// `tests` have that name in their path.
fn tests(folder: &Path, module: &str) -> Vec<String> {
    let mut all = Vec::new();
    files(folder, &mut all);
    let mut found = Vec::new();
    for file in all {
        let text = std::fs::read_to_string(&file).unwrap();
        let inside = file.strip_prefix(folder).unwrap().with_extension("");
        let path: Vec<&str> = inside.iter().map(|name| name.to_str().unwrap()).filter(|name| *name != "mod").collect();
        for test in text.split("#[test]").skip(1) {
            let name = test.split("fn ").nth(1).and_then(|rest| rest.split('(').next()).unwrap();
            found.push(format!("{}::{module}{name}", path.join("::")).replace("::tests::tests::", "::tests::"));
        }
    }
    found
}

#[test]
fn each_filter_for_miri_matches_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let script = std::fs::read_to_string(root.join(".ci/miri")).unwrap();
    for (name, folder, module) in [("inside", "src", "tests::"), ("programs", "tests/it", "")] {
        let (filters, tests) = (list(&script, name), tests(&root.join(folder), module));
        assert!(!filters.is_empty() && tests.len() > 100, "{name}: {} filters, {} tests", filters.len(), tests.len());
        let dead: Vec<_> = filters.iter().filter(|filter| !tests.iter().any(|test| test.contains(**filter))).collect();
        assert!(dead.is_empty(), "filters of the list `{name}` of .ci/miri that match no test: {dead:?}");
    }
}
