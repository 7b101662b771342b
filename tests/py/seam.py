"""The functions of the bridge between C++ and Rust (`src/bridge.rs`), and which of them a run has called.

`bridged()` reads them from the source. As a program, with the target folder of a build whose glue counts its calls
(`.ci/sanitized`), it names those that were not called since the counters were reset, and fails if there is one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = ('extern "Rust"', 'unsafe extern "C++"')
FUNCTION = re.compile(r"\bfn (\w+)\s*\(\s*(?:self: (?:&|Pin<&mut )(\w+))?")


def bridged() -> list[str]:
    """Every function that one language calls in the other: `Type::name`, or `name` alone."""
    source = (ROOT / "src" / "bridge.rs").read_text()
    found = []
    for block in BLOCKS:
        start = source.index(f"\n    {block} {{")
        body = re.sub(r"//.*", "", source[start : source.index("\n    }\n", start)])
        found += [f"{of}::{name}" if of else name for name, of in FUNCTION.findall(body)]
    return found


def tests() -> list[str]:
    """The tests that SEAM.md names, as arguments for pytest."""
    table = (ROOT / "tests" / "py" / "SEAM.md").read_text()
    names = set(re.findall(r"`(test_\w+)`", table))
    files = {path: path.read_text() for path in sorted((ROOT / "tests" / "py").rglob("test_*.py"))}
    return [
        f"{path.relative_to(ROOT)}::{name}"
        for path, text in files.items()
        for name in re.findall(r"^def (test_\w+)\(", text, re.M)
        if name in names
    ]


def called(target: Path) -> set[str]:
    """Those that the glue built below `target` has counted a call of."""
    counters = list(target.rglob("*bridge.rs.gcda"))
    if not counters:
        raise SystemExit(f"{target} has no counters of the bridge: it was not built by .ci/sanitized, or nothing ran")
    found = set()
    for file in counters:
        words = ["gcov", "--json-format", "--stdout", str(file)]
        shown = subprocess.run(words, cwd=file.parent, capture_output=True, text=True, check=True).stdout
        for line in shown.splitlines():
            for source in json.loads(line)["files"]:
                for function in source["functions"]:
                    if function["execution_count"]:
                        found.add(plain(function["demangled_name"]))
    return found


def plain(symbol: str) -> str:
    """What the source calls it: `RustOp::wait` of `sagellm::RustOp::wait(long) const`, the glue's `$` alike."""
    if "$cxxbridge" in symbol:
        return re.sub(r"^.*\$cxxbridge\d+\$(\d+\$)?", "", symbol).replace("$", "::")
    return symbol.split("(")[0].removeprefix("sagellm::")


def main() -> None:
    functions = bridged()
    missing = sorted(set(functions) - called(Path(sys.argv[1])))
    if missing:
        sys.exit(f"of the {len(functions)} bridged functions these were never called: {', '.join(missing)}")
    print(f"each of the {len(functions)} bridged functions was called")


if __name__ == "__main__":
    main()
