//! The code of the product: the sources without comments and without what only tests have.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Module, files};

/// The attributes of items that the product is compiled without.
const FOR_TESTS: [&str; 4] =
    ["#[cfg(test)]", "#[cfg(doctest)]", "#[cfg(feature = \"testing\")]", "#[cfg(any(test, feature = \"testing\"))]"];

/// Returns the lines of a file without comments and without each item, field or statement that only tests have. Such an
/// item ends at the next line that has the same indentation and closes a block or a statement.
pub(super) fn product(text: &str) -> String {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut code = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if FOR_TESTS.contains(&line.trim()) {
            let ends = |end: &&str| indent(end) == indent(line) && end.ends_with([';', '}', ',']);
            lines.by_ref().find(ends).expect("an item ends");
        } else if !line.trim_start().starts_with("//") {
            code += line;
            code.push('\n');
        }
    }
    code
}

/// Returns each file of `src/` that the product has, with its code.
pub(super) fn products() -> BTreeMap<Module, String> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    files(&src, &mut all);
    let read = |file: &std::path::PathBuf| -> (Module, String) {
        let inside = file.strip_prefix(&src).unwrap().with_extension("");
        let names = inside.components().map(|part| part.as_os_str().to_str().unwrap().to_string());
        (names.filter(|name| name != "mod").collect(), product(&std::fs::read_to_string(file).unwrap()))
    };
    let all: BTreeMap<Module, String> = all.iter().map(read).collect();
    assert!(all.len() > 100, "the sources were not found");
    // A file that no `mod` of the product declares is for tests alone.
    let is_declared = |me: &Module| {
        let Some((name, parent)) = me.split_last() else { return true };
        let parent = if parent.is_empty() { &["lib".to_string()][..] } else { parent };
        name == "lib" || all.get(parent).is_some_and(|text| text.contains(&format!("mod {name};")))
    };
    all.iter().filter(|(me, _)| is_declared(me)).map(|(me, text)| (me.clone(), text.clone())).collect()
}

#[test]
fn what_only_tests_have_is_left_out_and_what_follows_it_is_not() {
    let text = "use a;\n// b\nstruct C {\n    #[cfg(test)]\n    d: u8,\n    e: u8,\n}\n#[cfg(test)]\nfn f(\n    g: u8,\n) {\n\
        }\nfn h() {}\n#[cfg(feature = \"testing\")]\nmod i;\nmod j;\n";
    assert_eq!(product(text), "use a;\nstruct C {\n    e: u8,\n}\nfn h() {}\nmod j;\n");
    let all = products();
    let has = |path: &str, what: &str| {
        all.get(&path.split('/').map(str::to_string).collect::<Module>()).is_some_and(|text| text.contains(what))
    };
    assert!(has("types", "pub struct Request") && has("group", "mod builder;") && !has("group/local", ""));
}
