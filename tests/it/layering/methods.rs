//! Cycles that need no `use`: the methods of one type are in several files of a folder, and call each other through
//! `self`. Here, naming the type does not count as a dependency, because a file with methods of a type must name the
//! type.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::products;
use super::{Module, reached};

/// Files that call each other's methods of one type on purpose.
const ONE_TYPE_IN_TWO_FILES: [(&[&str], &str); 3] = [
    (
        &["engine/multihost/collectives", "engine/multihost/rails"],
        "`BatchRun`: a batch, and its parts over several leaders",
    ),
    (&["engine/multihost/lanes", "engine/multihost/post"], "`Lanes`: the threads, and what they do about messages"),
    (&["rendezvous/coordinator", "rendezvous/serve"], "`Coordinator`: the decision, and handing over the memory"),
];

/// Returns the types for which a file has `impl` blocks, each with the code of the block.
fn impls(text: &str) -> Vec<(&str, &str)> {
    let blocks = text.split("\nimpl").skip(1).filter_map(|rest| rest.split_once(" {\n"));
    let named = blocks.map(|(head, rest)| {
        let of = head.rsplit(" for ").next().unwrap().trim_start_matches(|c| c != ' ').trim();
        let name = of.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap();
        (name, rest.split("\n}\n").next().unwrap())
    });
    named.collect()
}

/// Returns the words in `code` that follow one of `before` and are followed by `end`.
fn words<'a>(code: &'a str, before: &[&str], end: char) -> BTreeSet<&'a str> {
    let follow = before.iter().flat_map(|before| code.split(before).skip(1));
    let word = |rest: &'a str| {
        let end_at = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
        rest[end_at..].starts_with([end, '<']).then(|| &rest[..end_at])
    };
    follow.filter_map(word).collect()
}

#[test]
fn no_files_of_a_folder_call_each_others_methods_in_a_circle() {
    let products = products();
    // A file and the `mod.rs` of its folder may call each other.
    let is_folder = |file: &Module| products.keys().any(|other| other.len() > file.len() && other.starts_with(file));
    let codes: BTreeMap<Module, String> = products
        .iter()
        .filter(|(file, _)| !is_folder(file))
        .map(|(file, code)| (file.clone(), format!("\n{code}")))
        .collect();
    // For each folder, type and method: the files that define the method.
    let mut defined: BTreeMap<(&[String], &str, &str), BTreeSet<&Module>> = BTreeMap::new();
    for (file, code) in &codes {
        for (of, inside) in impls(code) {
            for name in words(inside, &["fn "], '(') {
                defined.entry((&file[..file.len() - 1], of, name)).or_default().insert(file);
            }
        }
    }
    assert!(defined.len() > 500, "the methods were not found");
    let mut uses: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    for (file, code) in &codes {
        for (of, inside) in impls(code) {
            for name in words(inside, &["self.", "Self::"], '(') {
                let places = defined.get(&(&file[..file.len() - 1], of, name)).filter(|all| !all.contains(file));
                uses.entry(file.clone()).or_default().extend(places.into_iter().flatten().copied().cloned());
            }
        }
    }
    let round: BTreeSet<String> =
        reached(&uses).into_iter().filter(|(me, found)| found.contains(me)).map(|(me, _)| me.join("/")).collect();
    let listed: BTreeSet<String> =
        ONE_TYPE_IN_TWO_FILES.iter().flat_map(|(files, _)| files.iter().map(ToString::to_string)).collect();
    assert_eq!(round, listed, "files that call each other's methods in a circle, found and listed");
}
