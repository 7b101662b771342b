"""The functions of the bridge between C++ and Rust (`src/ffi/bridge.rs` and others), and which of them a run called.

`bridged()` reads them from the sources. As a program, this file takes two folders as arguments: the target folder of a
build that counts calls over the bridge, and the folder of the counts (`.ci/sanitized` makes both). It fails if a
function was not called, and names the function.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The files of the bridge. Each is compiled separately.
FILES = ("bridge.rs", "observe.rs", "arrays.rs", "memory.rs")
BLOCKS = ('extern "Rust"', 'unsafe extern "C++"')
#: Matches a function. It belongs to the type of `self`, or to the type that the attribute `Self` before it names.
FUNCTION = re.compile(r'(?:#\[Self = "(\w+)"\]\s*)?\bfn (\w+)\s*\(\s*(?:self: (?:&|Pin<&mut )(\w+))?')


def bridged() -> list[str]:
    """Returns every function that one language calls in the other: `Type::name`, or `name` alone."""
    found = []
    for file in FILES:
        source = (ROOT / "src" / "ffi" / file).read_text()
        for block in BLOCKS:
            start = source.find(f"\n    {block} {{")
            if start < 0:
                continue
            body = re.sub(r"//.*", "", source[start : source.index("\n    }\n", start)])
            found += [f"{of or to}::{name}" if of or to else name for of, name, to in FUNCTION.findall(body)]
    return found


def tests() -> list[str]:
    """Returns the tests that BRIDGE.md names, as arguments for pytest."""
    table = (ROOT / "tests" / "py" / "BRIDGE.md").read_text()
    names = set(re.findall(r"`(test_\w+)`", table))
    files = {path: path.read_text() for path in sorted((ROOT / "tests" / "py").rglob("test_*.py"))}
    return [
        f"{path.relative_to(ROOT)}::{name}"
        for path, text in files.items()
        for name in re.findall(r"^def (test_\w+)\(", text, re.M)
        if name in names
    ]


def called(target: Path, counters: Path) -> set[str]:
    """Returns the functions that were called in any process. `target` holds the build, `counters` a folder for each
    process."""
    found: set[str] = set()
    for name in FILES:
        notes = list(target.rglob(f"*-{name}.gcno"))
        counted = list(counters.rglob(f"*-{name}.gcda"))
        if len(notes) != 1 or not counted:
            raise SystemExit(f"{target} has {len(notes)} builds of {name} that count, {counters} {len(counted)} counts")
        found |= called_in(notes[0], counted)
    return found


def called_in(notes: Path, counted: list[Path]) -> set[str]:
    """Returns the functions of one file of the bridge that were called."""
    found: set[str] = set()
    for file in counted:
        # gcov looks for the notes in the folder of the counts.
        beside = file.with_suffix(".gcno")
        if not beside.exists():
            beside.symlink_to(notes.absolute())
        words = ["gcov", "--json-format", "--stdout", file.name]
        done = subprocess.run(words, cwd=file.parent, capture_output=True, text=True)
        if done.returncode != 0:
            continue  # a process was killed while it wrote
        for line in done.stdout.splitlines():
            for source in json.loads(line)["files"]:
                for function in source["functions"]:
                    if function["execution_count"]:
                        found.add(plain(function["demangled_name"]))
    return found


def plain(symbol: str) -> str:
    """Returns the name in the source, such as `RustOp::wait`, for a C++ function (`sagellm::RustOp::wait(long) const`)
    or for a symbol of cxx, which has `$` in place of `::`."""
    if "$cxxbridge" in symbol:
        return re.sub(r"^.*\$cxxbridge\d+\$(\d+\$)?", "", symbol).replace("$", "::")
    return symbol.split("(")[0].removeprefix("sagellm::")


def main() -> None:
    functions = bridged()
    missing = sorted(set(functions) - called(Path(sys.argv[1]), Path(sys.argv[2])))
    if missing:
        sys.exit(f"of the {len(functions)} bridged functions these were never called: {', '.join(missing)}")
    print(f"each of the {len(functions)} bridged functions was called")


if __name__ == "__main__":
    main()
