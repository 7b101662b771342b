//! A bridged function has one meaning: no parameter selects what it does. A bool or an enum is allowed only as plain
//! data. The list below shows this for every bool or enum that crosses the bridge, as a parameter or as a field of a
//! struct that is a parameter: it says what the values mean.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::files;

/// A function or struct of the bridge, its parameters or fields that are bools or enums, and what their values mean.
const FACTS: [(&str, &[&str], &str); 14] = [
    (
        "RustGroup::monitored_barrier",
        &["wait_all_ranks"],
        "c10d's argument: whether the error names all that are missing",
    ),
    ("RustGroup::list_operations", &["kind"], "the operation that the list belongs to"),
    ("RustDevices::list_operations", &["kind"], "the operation that the list belongs to"),
    ("RustDevices::retire", &["drained"], "no operation is under way; the engine decides what follows from it"),
    ("RustDevices::close", &["drained"], "no operation is under way; the engine decides what follows from it"),
    ("Setup", &["fusion", "strict", "measure_link", "numa", "threads_named"], "options of the group"),
    ("Call", &["kind", "dtype", "op"], "the operation"),
    ("Call", &["staged"], "whether tensors are copied"),
    ("CallNote", &["counts", "host_staged"], "what the statistics count, and whether the tensors were on a device"),
    ("Strided", &["written"], "whether the operation writes the memory"),
    ("Listed", &["dtype"], "the type of a tensor"),
    ("ExternalOp", &["kind"], "the operation"),
    ("DeviceRequest", &["dense"], "how its tensors lie in memory"),
    ("DeviceTerms", &["region", "capturing"], "what is around the launch: a region, a capture"),
];

/// Returns the code of all bridges, without comments, with each declaration at the start of a line.
fn code() -> String {
    let mut all = Vec::new();
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ffi"), &mut all);
    let mut code = String::new();
    for text in all.iter().map(|path| std::fs::read_to_string(path).unwrap()) {
        let bridge = text.split("#[cxx::bridge").nth(1).and_then(|rest| rest.split("\n}\n").next());
        let lines = bridge.unwrap_or_default().lines();
        code.extend(
            lines.map(|line| line.split("//").next().unwrap().trim().trim_start_matches("unsafe ").to_string() + "\n"),
        );
    }
    code
}

/// Returns the declarations that start with `word`: for each its name, and the text between `open` and the following
/// `end`.
fn declared<'a>(code: &'a str, word: &str, (open, end): (char, char)) -> Vec<(&'a str, &'a str)> {
    let word = format!("\n{word} ");
    let found = code.split(&*word).skip(1).filter_map(|rest| rest.split_once(open));
    let named = |(name, rest): (&'a str, &'a str)| (name.split(['<', ' ']).next(), rest.split(end).next());
    found.map(named).map(|(name, inside)| (name.unwrap(), inside.unwrap())).collect()
}

/// Returns, for each function, the type that the `Self` attribute before it names, or an empty text.
fn without_receiver(code: &str) -> Vec<&str> {
    let before = code.split("\nfn ").map(|text| text.rsplit('\n').next().unwrap());
    before.map(|line| line.strip_prefix("#[Self = \"").and_then(|rest| rest.split('"').next()).unwrap_or("")).collect()
}

/// Names and types of parameters or fields, without the words before a name.
fn typed(list: &str) -> Vec<(String, String)> {
    let typed = list.split([',', '\n']).filter_map(|item| item.split_once(": "));
    typed.map(|(name, of)| (name.trim().to_string(), of.trim().trim_end_matches(',').to_string())).collect()
}

/// Returns the names of types in a type: `Call` for `&[Call]`, `Request` for `&Request<'a>`.
fn names(of: &str) -> impl Iterator<Item = &str> {
    of.split(|c: char| !c.is_alphanumeric()).filter(|name| !name.is_empty())
}

#[test]
fn no_parameter_selects_what_a_bridged_function_does() {
    let code = code();
    let enums: BTreeSet<&str> = declared(&code, "enum", ('{', '}')).into_iter().map(|(name, _)| name).collect();
    let structs: BTreeMap<&str, Vec<(String, String)>> =
        declared(&code, "struct", ('{', '}')).into_iter().map(|(name, fields)| (name, typed(fields))).collect();
    let functions = declared(&code, "fn", ('(', ')'));
    assert!(
        functions.len() > 60 && enums.contains("Kind") && structs["Piece"].len() == 2,
        "the bridge is read wrongly"
    );
    let selects = |of: &str| names(of).any(|name| name == "bool" || enums.contains(name));
    let mut found = BTreeSet::new();
    let mut passed: Vec<String> = Vec::new();
    for ((name, parameters), named) in functions.into_iter().zip(without_receiver(&code)) {
        let parameters = typed(parameters);
        let receiver = parameters.iter().find(|(name, _)| name == "self").map(|(_, of)| of.trim_start_matches('&'));
        let whose = receiver.unwrap_or(named);
        for (parameter, of) in parameters.iter().filter(|(name, _)| name != "self") {
            if selects(of) {
                found.insert(format!("{whose}::{name}: {parameter}"));
            }
            passed.push(of.clone());
        }
    }
    // Fields of these structs may be structs, whose fields count as well.
    let mut seen = BTreeSet::new();
    while let Some(of) = passed.pop() {
        for (name, fields) in names(&of).filter_map(|name| structs.get_key_value(name)) {
            if seen.insert(*name) {
                passed.extend(fields.iter().map(|(_, of)| of.clone()));
                let data = fields.iter().filter(|(_, of)| selects(of));
                found.extend(data.map(|(field, _)| format!("{name}: {field}")));
            }
        }
    }
    let listed: BTreeSet<String> =
        FACTS.iter().flat_map(|(of, names, _)| names.iter().map(move |name| format!("{of}: {name}"))).collect();
    let (new, gone): (Vec<_>, Vec<_>) = (found.difference(&listed).collect(), listed.difference(&found).collect());
    assert!(new.is_empty(), "name a function for each meaning, or say in FACTS why it is data: {new:#?}");
    assert!(gone.is_empty(), "listed, and not in the bridge: {gone:#?}");
}
