//! Checks the direction of dependencies. A file of `src/` uses only its own module and modules of lower layers; the
//! list of layers is in `src/lib.rs`. Engines do not use each other. No files use each other in a cycle, neither by
//! paths nor by methods (`methods`). The folders of `cpp/` are checked by their includes (`cpp`), the Python package by
//! its imports. Further tests check the names of tests, the list of tests for Miri (`miri`), the parameters of bridged
//! functions (`bridge`), and that the product contains no code that only tests use (`testing`).

mod bridge;
mod cpp;
mod methods;
mod miri;
mod sources;
mod testing;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use self::sources::products;

/// Returns the layer number of each module, counted from the top, read from the list in `src/lib.rs`. A line of the
/// list is one layer; the names of its modules come first.
fn layers() -> BTreeMap<String, usize> {
    let text = include_str!("../../src/lib.rs");
    let list = text.split("//! ```text\n").nth(1).and_then(|rest| rest.split("//! ```").next());
    let lines = list.expect("lib.rs lists the layers").lines().enumerate();
    let modules = lines.flat_map(|(layer, line)| {
        let names = line.trim_start_matches("//!").trim().split("  ").next().unwrap_or("");
        names.split(' ').map(|name| (name.to_string(), layer + 1)).collect::<Vec<_>>()
    });
    modules.chain([("lib".to_string(), 0)]).collect()
}

fn layer(module: &str) -> usize {
    *layers().get(module).unwrap_or_else(|| panic!("module {module} has no layer: add it to the list in src/lib.rs"))
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    files_that_end(folder, &["rs"], found);
}

fn files_that_end(folder: &Path, ends: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files_that_end(&path, ends, found);
        } else if path.extension().is_some_and(|end| ends.iter().any(|known| end == *known)) {
            found.push(path);
        }
    }
}

/// Returns the modules that the code `text` names as `crate::<module>`, also inside `use crate::{a, b::c}`.
fn uses(text: &str) -> Vec<String> {
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
    let mut wrong = Vec::new();
    for (file, code) in products() {
        for used in uses(&code) {
            if used != file[0] && layer(&used) <= layer(&file[0]) {
                wrong.push(format!("{} uses crate::{used}", file.join("/")));
            }
        }
    }
    assert!(wrong.is_empty(), "upward arrows:\n{}", wrong.join("\n"));
}

/// The folders of `engine/` do not use each other: code that several of them need is in `engine/` itself. These are the
/// files of `engine/` that all of its folders may use.
const SHARED_BY_ENGINES: [&str; 4] = ["loader", "order", "pieces", "verify"];

/// A module as the list of its folders' names and its file's name.
type Module = Vec<String>;

/// Returns every file of the product, as a module, with the files that it names by `crate::`, `self::` or `super::`. A
/// name that a file only re-exports by `pub use` counts for the file that defines it. Uses between a file and the
/// `mod.rs` of its folder do not count.
fn named_files() -> BTreeMap<Module, BTreeSet<Module>> {
    let products = products();
    let mut passed_on: BTreeMap<Module, Module> = BTreeMap::new();
    for (me, code) in &products {
        let public = code.split("\npub").skip(1).map(|rest| rest.trim_start_matches("(super)"));
        let statements = public.filter_map(|rest| rest.strip_prefix(" use ")?.split(';').next());
        for path in statements.flat_map(|statement| paths(statement, me)) {
            passed_on.insert(me.iter().cloned().chain(path.last().cloned()).collect(), path);
        }
    }
    let file = |mut path: Module| -> Module {
        let mut end = path.len();
        while !products.contains_key(&path[..end]) && end > 0 {
            match passed_on.get(&path[..end]).filter(|of| **of != path) {
                Some(of) => (path, end) = (of.clone(), of.len()),
                None => end -= 1,
            }
        }
        path[..end].to_vec()
    };
    let named = products.iter().map(|(me, code)| {
        let mut found: BTreeSet<Module> = paths(code, me).into_iter().map(file).collect();
        found.retain(|other| !me.starts_with(other) && !other.starts_with(me));
        (me.clone(), found)
    });
    named.collect()
}

/// Returns the paths, from the crate root, that the code `text` of module `me` names by `crate::`, `self::` or
/// `super::`. A list in braces gives one path for each item.
fn paths(text: &str, me: &[String]) -> Vec<Module> {
    let code = text.replace('\n', " ");
    let mut found = Vec::new();
    for root in ["crate::", "self::", "super::"] {
        for (at, _) in code.match_indices(root) {
            if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                continue; // the end of a longer path
            }
            let mut rest = &code[at..];
            let mut base = if rest.starts_with("crate") { Vec::new() } else { me.to_vec() };
            rest = rest.trim_start_matches("crate::").trim_start_matches("self::");
            while let Some(up) = rest.strip_prefix("super::") {
                base.pop();
                rest = up;
            }
            let end = rest.find(|c: char| !(c.is_alphanumeric() || "_:".contains(c))).unwrap_or(rest.len());
            base.extend(rest[..end].split("::").filter(|name| !name.is_empty()).map(str::to_string));
            match rest[end..].strip_prefix('{').and_then(|list| list.split('}').next()) {
                Some(list) => found.extend(list.split([',', '{']).map(|name| {
                    let name = name.trim().split("::").map(str::to_string);
                    base.iter().cloned().chain(name).collect::<Module>()
                })),
                None => found.push(base),
            }
        }
    }
    found
}

#[test]
fn engines_know_nothing_of_each_other() {
    let mut wrong = Vec::new();
    for (me, others) in named_files() {
        let [engine, room, ..] = &me[..] else { continue };
        for other in others.iter().filter(|other| engine == "engine" && other[0] == "engine") {
            if other[1] != *room && !SHARED_BY_ENGINES.contains(&&*other[1]) {
                wrong.push(format!("{} uses {}", me.join("/"), other.join("/")));
            }
        }
    }
    assert!(wrong.is_empty(), "between the folders of engine/:\n{}", wrong.join("\n"));
}

/// Returns for each file all files that it uses directly or through other files.
fn reached(uses: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut reached = uses.clone();
    loop {
        // Each pass follows the uses one step further.
        let mut more = reached.clone();
        for found in more.values_mut() {
            let next: Vec<Module> =
                found.iter().flat_map(|other| reached.get(other).into_iter().flatten().cloned()).collect();
            found.extend(next);
        }
        if more == reached {
            return reached;
        }
        reached = more;
    }
}

#[test]
fn no_files_use_each_other_in_a_circle() {
    let reached = reached(&named_files());
    let round: BTreeSet<String> =
        reached.iter().filter(|(me, found)| found.contains(*me)).map(|(me, _)| me.join("/")).collect();
    assert!(round.is_empty(), "files that use each other in a circle: {round:#?}");
}

/// Types with an `impl` in more than two files, and why. The state of such a type is reachable from many files, which
/// the other checks here cannot see.
const IMPLEMENTED_IN_MANY_FILES: [(&str, usize, &str); 4] = [
    ("engine/device/engine DeviceEngine", 4, "what C++ calls, in the order of a call: begin, making, lifetime"),
    ("engine/multihost/batch BatchRun", 3, "the steps of a batch, the collectives, and those over several leaders"),
    ("engine/shm/memory/area Area", 3, "the memory, what any thread may use of it, and how reads in place are checked"),
    ("group Group", 8, "the traits by which others know it, and what callers ask"),
];

/// Returns the types of `src/`, each as its file and name, with the files that have an `impl` of the type. If several
/// files define a type of this name, an `impl` counts for the type of its file, or else of its folder.
fn implemented() -> BTreeMap<String, BTreeSet<String>> {
    let texts: Vec<(String, String)> = products().into_iter().map(|(file, code)| (file.join("/"), code)).collect();
    let name = |text: &str| -> String { text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
    let mut defined: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (file, text) in &texts {
        for line in text.lines() {
            let line =
                line.trim_start_matches("pub(super) ").trim_start_matches("pub(crate) ").trim_start_matches("pub ");
            if let Some(rest) = line.strip_prefix("struct ").or_else(|| line.strip_prefix("enum ")) {
                defined.entry(name(rest)).or_default().push(file);
            }
        }
    }
    let folders: BTreeSet<&str> =
        texts.iter().flat_map(|(file, _)| file.match_indices('/').map(|(at, _)| &file[..at])).collect();
    let folder = |file: &str| match folders.get(file) {
        Some(_) => file.to_string(),
        None => file.rsplit_once('/').map_or("", |(folder, _)| folder).to_string(),
    };
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (file, text) in &texts {
        for line in text.lines().filter(|line| line.starts_with("impl") || line.starts_with("unsafe impl")) {
            let of = line.split_once(" for ").map_or_else(
                || line.trim_start_matches("impl").trim_start_matches(|c| c != ' ').trim_start(),
                |(_, of)| of,
            );
            let Some(places) = defined.get(&name(of)) else { continue };
            let here = places.iter().find(|place| *place == file);
            let near = || places.iter().find(|place| folder(place) == folder(file));
            let place = here.or_else(near).unwrap_or(&places[0]);
            found.entry(format!("{place} {}", name(of))).or_default().insert(file.clone());
        }
    }
    found
}

#[test]
fn a_type_is_implemented_in_few_files() {
    let many = implemented().into_iter().filter(|(_, files)| files.len() > 2);
    let many: BTreeMap<String, usize> = many.map(|(of, files)| (of, files.len())).collect();
    let listed: BTreeMap<String, usize> =
        IMPLEMENTED_IN_MANY_FILES.iter().map(|(of, files, _)| (of.to_string(), *files)).collect();
    assert_eq!(many, listed, "types with an `impl` in more than two files, found and listed");
}

/// Files that may hold unsafe code, because they touch bytes or call the system or a library. A `mod.rs` stands for its
/// folder. Everywhere else unsafe code does not compile.
const UNSAFE: [&str; 51] = [
    "engine/device/communicator.rs",
    "engine/device/libs/mod.rs",
    "engine/loader.rs",
    "engine/local.rs",
    "engine/multihost/batch.rs",
    "engine/multihost/collectives.rs",
    "engine/multihost/link.rs",
    "engine/multihost/messages.rs",
    "engine/multihost/post.rs",
    "engine/multihost/probe.rs",
    "engine/multihost/transport.rs",
    "engine/multihost/ucx/mod.rs",
    "engine/multihost/vector.rs",
    "engine/multihost/wire/arrivals.rs",
    "engine/multihost/wire/carried.rs",
    "engine/multihost/wire/departures.rs",
    "engine/multihost/wire/link.rs",
    "engine/multihost/wire/memory.rs",
    "engine/multihost/wire/path.rs",
    "engine/multihost/wire/several.rs",
    "engine/multihost/wire/single.rs",
    "engine/multihost/wire/sockets.rs",
    "engine/multihost/wire/stripes.rs",
    "engine/order.rs",
    "engine/pieces.rs",
    "engine/shm/bulk.rs",
    "engine/shm/mapped/mod.rs",
    "engine/shm/mapped/relay.rs",
    "engine/shm/memory/area.rs",
    "engine/shm/memory/arena.rs",
    "engine/shm/memory/forks.rs",
    "engine/shm/memory/reach.rs",
    "engine/shm/memory/segment.rs",
    "engine/shm/p2p/incoming.rs",
    "engine/shm/p2p/outgoing.rs",
    "engine/shm/small.rs",
    "engine/shm/table.rs",
    "engine/solo.rs",
    "engine/verify.rs",
    "ffi/mod.rs",
    "os/environment.rs",
    "os/futex.rs",
    "os/numa.rs",
    "os/random.rs",
    "os/topology.rs",
    "os/watch/mod.rs",
    "reduce/mod.rs",
    "rendezvous/mod.rs",
    "rendezvous/unix_socket.rs",
    "stats/tests.rs",
    "types.rs",
];

#[test]
fn unsafe_code_is_allowed_where_the_list_says_and_with_a_reason() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    assert!(std::fs::read_to_string(src.join("lib.rs")).unwrap().contains("\n#![deny(unsafe_code)]\n"));
    let mut all = Vec::new();
    files(&src, &mut all);
    let mut found = Vec::new();
    for file in all {
        let inside = file.strip_prefix(&src).unwrap().to_str().unwrap().to_string();
        let text = std::fs::read_to_string(&file).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("allow(unsafe_code)")).collect();
        for line in &lines {
            let reason = line.split_once("// ").map_or("", |(_, reason)| reason);
            assert!(reason.len() > 10, "{inside}: {line}: say why");
            assert!(line.trim_start().starts_with('#'), "{inside}: {line}: for a file or one function");
        }
        if !lines.is_empty() {
            found.push(inside);
        }
    }
    found.sort();
    assert_eq!(found, UNSAFE);
}

/// Words that name a vendor or one of its products.
const NAMES: [&str; 9] = ["nccl", "hccl", "cncl", "cuda", "cambricon", "nvidia", "npu", "mlu", "ascend"];
/// Words of `NAMES` that count only as whole words, because other words begin with them.
const WHOLE: [&str; 3] = ["npu", "mlu", "ascend"];

/// The files outside of `engine/device` and `cpp/compat.hpp` that may contain such a word, with the reason.
const NAMED: [(&str, &str); 24] = [
    ("torch_ext/torch_sagellm/cli/certify.py", "torch's own backends, beside which it measures"),
    ("setup.py", "where the crate nccl-sys lies"),
    ("src/engine/shm/small.rs", "a source"),
    ("src/algorithms/ring.rs", "a source"),
    ("src/algorithms/direct.rs", "a source"),
    ("src/algorithms/double_tree.rs", "a source"),
    ("src/stats/mod.rs", "a benchmark whose way to count is followed"),
    ("src/stats/tests.rs", "a benchmark whose way to count is followed"),
    ("torch_ext/torch_sagellm/observe/stats.py", "a benchmark whose way to count is followed"),
    ("torch_ext/torch_sagellm/observe/inspector.py", "the form of a plugin whose dashboards people have"),
    ("torch_ext/torch_sagellm/observe/ras.py", "the form of a report that people's tools read"),
    ("torch_ext/torch_sagellm/cli/top.py", "the form of a report that people's tools read"),
    ("torch_ext/torch_sagellm/cli/bench.py", "a benchmark whose table is followed"),
    ("torch_ext/torch_sagellm/cli/checks.py", "the names of variables"),
    ("torch_ext/torch_sagellm/cli/libraries.py", "the names of variables, and which library each is for"),
    ("src/config.rs", "what a variable switches on"),
    ("src/os/topology.rs", "where a driver lists its cards, for the name of a machine"),
    ("torch_ext/torch_sagellm/_private/register.py", "a variable of torch"),
    ("torch_ext/torch_sagellm/_private/variables.py", "the values of a variable, and a variable of torch"),
    ("torch_ext/torch_sagellm/_C.pyi", "the values of the option"),
    ("torch_ext/torch_sagellm/api/backends.py", "the names of backends that users ask for"),
    ("torch_ext/torch_sagellm/__init__.pyi", "the names of backends that users ask for"),
    ("torch_ext/torch_sagellm/__init__.py", "what the project is, and the names of backends that users ask for"),
    ("torch_ext/torch_sagellm/api/serve_as.py", "an example of a group's names"),
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
    for folder in ["src", "cpp", "torch_ext/torch_sagellm"] {
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
        if name.starts_with("src/engine/device/")
            || ["cpp/compat.hpp", "torch_ext/torch_sagellm/_build.py"].contains(&&*name)
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

#[test]
fn the_engine_of_devices_reaches_a_library_by_its_row_alone() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine/device");
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() || path.ends_with("mod.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for library in ["nccl", "hccl", "cncl"] {
            assert!(!text.contains(&format!("libs::{library}")), "{} uses {library}'s own files", path.display());
        }
    }
}

/// Parts of the Python package, from top to bottom: the command line first, the code that every other part uses last.
const PYTHON_LAYERS: [&str; 7] = ["cli", "parallel", "api", "observe", "protocols", "", "_private"];

/// Imports from a higher part that are allowed. `register` sets up the log when the first group is created, other
/// modules write to the log, and two modules ask `api.serve_as` for torch's own gloo, which `serve_as` keeps.
const PYTHON_UPWARD: [(&str, &str); 5] = [
    ("register.py", "observe"),
    ("alive.py", "observe"),
    ("variables.py", "observe"),
    ("delegate.py", "api"),
    ("address.py", "api"),
];

#[test]
fn the_parts_of_the_python_package_import_only_those_below_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("torch_ext/torch_sagellm");
    let mut wrong = Vec::new();
    for (at, part) in PYTHON_LAYERS.iter().enumerate() {
        for entry in std::fs::read_dir(root.join(part)).unwrap() {
            let path = entry.unwrap().path();
            let file = path.file_name().unwrap().to_str().unwrap().to_string();
            // These files are above all parts: the package's front, the entry point of `python -m`, and a module that
            // programs import by name.
            let above = ["__init__.py", "__main__.py", "collective_ops.py"];
            if !file.ends_with(".py") || (part.is_empty() && above.contains(&&*file)) {
                continue;
            }
            for line in std::fs::read_to_string(&path).unwrap().lines() {
                let Some(rest) = line.trim_start().strip_prefix("from torch_sagellm.") else { continue };
                let other = rest.split(['.', ' ']).next().unwrap();
                let above = PYTHON_LAYERS[..at].contains(&other);
                if above && !PYTHON_UPWARD.contains(&(&*file, other)) {
                    wrong.push(format!("{part}/{file}: {}", line.trim()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "upward imports:\n{}", wrong.join("\n"));
}

/// Test files that belong to no module of `src/`: the list of the test files, the checks of the sources, and the build
/// of the simulators.
const OF_NO_MODULE: [&str; 3] = ["main", "layering", "simulators"];

/// `device_lowering.rs` tests `src/engine/device/lowering.rs`: its name is the path with `_` for `/` and without
/// `engine/`. If a module has several test files, a suffix says what each one tests.
#[test]
fn tests_are_named_after_the_modules_that_they_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = Vec::new();
    files(&root.join("src"), &mut all);
    let module = |path: &PathBuf| {
        let inside = path.strip_prefix(root.join("src")).unwrap().with_extension("");
        let name = inside.to_str().unwrap().replace('/', "_");
        name.trim_start_matches("engine_").trim_end_matches("_mod").to_string()
    };
    let modules: BTreeSet<String> = all.iter().map(module).collect();
    let mut wrong = Vec::new();
    for entry in std::fs::read_dir(root.join("tests/it")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        let of_one = || modules.iter().any(|module| name == *module || name.starts_with(&format!("{module}_")));
        if path.extension().is_some_and(|end| end == "rs") && !OF_NO_MODULE.contains(&&*name) && !of_one() {
            wrong.push(format!("tests/it/{name}.rs names no module of src/"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Comments and documents name a file by its name or by the end of its path. Every file named this way must exist.
#[test]
fn files_that_comments_and_documents_name_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = Vec::new();
    let folders = ["src", "cpp", "tests", "docs", "nccl-sys/src", "nccl-sys/tests", "torch_ext", "benchmark"];
    for folder in folders.into_iter().chain(["benchmarks", "examples"]) {
        files_that_end(&root.join(folder), &["rs", "cpp", "hpp", "py", "md"], &mut all);
    }
    all.extend(["CONTRIBUTING.md", "README.md", "setup.py", "build.rs"].map(|name| root.join(name)));
    let known: BTreeSet<PathBuf> = all.iter().map(|path| path.strip_prefix(root).unwrap().to_path_buf()).collect();
    let is_source = |name: &str| [".rs", ".cpp", ".hpp", ".py"].iter().any(|end| name.ends_with(end));
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || "_./-".contains(c));
    let mut dead = Vec::new();
    for path in &all {
        let document = path.extension().is_some_and(|end| end == "md");
        if !document && !path.extension().is_some_and(|end| ["rs", "cpp", "hpp"].iter().any(|known| end == *known)) {
            continue;
        }
        let text = std::fs::read_to_string(path).unwrap();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| document || line.contains("//")) {
            let named = line.split('`').skip(1).step_by(2).filter(|word| is_source(word) && is_name(word));
            for name in named.filter(|name| !known.iter().any(|path| path.ends_with(name))) {
                dead.push(format!("{}:{} names {name}", path.strip_prefix(root).unwrap().display(), at + 1));
            }
        }
    }
    assert!(dead.is_empty(), "{dead:#?}");
}
