"""The log of the extension's build: one line for the C++, and the compiler's message if it fails. The tests compile
small sources of their own, not `cpp/`. They load `setup.py` without its last line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[3]

#: Compiles `cpp/one.cpp` and `cpp/inner/two.cpp` below the current folder with the rules of `setup.py`.
COMPILE = """
import os, shlex, sys
from pathlib import Path
text = Path(sys.argv[1]).read_text()
body, call = text.rsplit("main()", 1)
assert not call.strip()
exec(compile(body.replace("Path(__file__).resolve().parent", "Path.cwd()"), "setup.py", "exec"))
compiler = shlex.split(os.environ.get("CXX", "g++"))
sources = [str(path.relative_to(ROOT)) for path in cpp_files()]
for target in compile_all(compiler, ["-std=c++17", "-Wall", "-Icpp"], sources, ROOT / "build" / "objects"):
    assert Path(target).is_file(), target
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "cpp" / "inner").mkdir(parents=True)
    (tmp_path / "cpp" / "torch_headers.hpp").write_text("#pragma once\n#include <string>\n")
    (tmp_path / "cpp" / "one.hpp").write_text("#pragma once\nint one();\n")
    (tmp_path / "cpp" / "one.cpp").write_text('#include "one.hpp"\nint one() { return 1; }\n')
    (tmp_path / "cpp" / "inner" / "two.cpp").write_text('#include "one.hpp"\nint two() { return one() + 1; }\n')
    return tmp_path


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Builds in edit mode, file by file, unless the environment says otherwise."""
    return subprocess.run(
        [sys.executable, "-c", COMPILE, str(ROOT / "setup.py")],
        cwd=tree,
        env={**os.environ, "CCACHE_DISABLE": "1", "SAGELLM_EDIT": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )


def times(tree: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in (tree / "build").rglob("*.o")}


def test_a_good_build_says_one_line(tree: Path) -> None:
    done = build(tree)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == 1 and "C++ of 2 files" in lines[0], done.stdout


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_usual_build_gives_the_compiler_a_file_for_each_processor(tree: Path, jobs: int) -> None:
    done = build(tree, SAGELLM_EDIT="", MAX_JOBS=str(jobs))
    assert done.returncode == 0, done.stdout
    made = sorted((tree / "build").glob("cpp-*.cpp"))
    assert [path.name for path in made] == [f"cpp-{part}-of-{jobs}.cpp" for part in range(1, jobs + 1)]
    given = [line for path in made for line in path.read_text().splitlines()]
    assert sorted(given) == ['#include "inner/two.cpp"', '#include "one.cpp"']  # each file once, and none is missing
    assert f"C++ of {jobs} file" in done.stdout


@pytest.mark.parametrize("edit", ["", "1"])
def test_a_broken_file_shows_the_compilers_message_and_no_wall_of_flags(tree: Path, edit: str) -> None:
    (tree / "cpp" / "inner" / "two.cpp").write_text("int two() {\n  return nothing_here;\n}\n")
    done = build(tree, MAX_JOBS="1", SAGELLM_EDIT=edit)
    assert done.returncode == 1
    assert "cpp/inner/two.cpp:2:10: error:" in done.stdout and "nothing_here" in done.stdout, done.stdout
    assert done.stdout.splitlines()[-1] == "sagellm: the C++ did not compile; the compiler's message is above"
    assert max(map(len, done.stdout.splitlines())) < 300, done.stdout


def test_only_what_an_edit_reaches_is_compiled_again(tree: Path) -> None:
    assert build(tree).returncode == 0
    first = times(tree)
    assert build(tree).returncode == 0 and times(tree) == first
    (tree / "cpp" / "one.cpp").write_text('#include "one.hpp"\nint one() { return 2; }\n')
    assert build(tree).returncode == 0
    second = times(tree)
    assert [Path(path).name for path in first if first[path] != second[path]] == ["one.o"]
    (tree / "cpp" / "torch_headers.hpp").write_text("#pragma once\n#include <string>\n#include <vector>\n")
    assert build(tree).returncode == 0
    third = times(tree)
    assert all(second[path] != third[path] for path in second)


def test_the_precompiled_header_is_used(tree: Path) -> None:
    (tree / "cpp" / "one.cpp").write_text("std::string one() { return {}; }\n")
    (tree / "cpp" / "inner" / "two.cpp").unlink()
    done = build(tree, CFLAGS="-Werror")
    assert done.returncode == 0, done.stdout
    assert (tree / "build" / "objects" / "torch.hpp.gch").is_file()
    assert "warning" not in done.stdout  # -Winvalid-pch would warn if a precompiled header was not used
