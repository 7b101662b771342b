"""No unfinished marks or personal paths in the sources; the rules have tests; the glossary is short and used."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def tracked() -> list[Path]:
    """Returns the text files of the checkout, without generated and ignored files."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("this is not a git checkout")
    endings = {".rs", ".py", ".pyi", ".cpp", ".hpp", ".md", ".toml", ".txt", ""}
    return [ROOT / name for name in listed.stdout.splitlines() if Path(name).suffix in endings]


@pytest.mark.quick
def test_no_unfinished_marks_and_no_machine_of_one_person() -> None:
    """No TODO, FIXME or absolute home path in the files of the checkout."""
    bad = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|/home/\w+/|/Users/\w+/")
    here = Path(__file__).resolve()
    found = []
    for path in tracked():
        if path.resolve() == here or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1):
            if bad.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


@pytest.mark.quick
def test_every_rule_of_this_stage_has_a_test() -> None:
    """tests/py/RULES.md names at least one test for each rule, except 19, and all these tests exist."""
    table = (ROOT / "tests" / "py" / "RULES.md").read_text()
    rows = re.findall(r"^\| (\d+) \|[^|]*\| (.*) \|$", table, re.M)
    covered = {int(number) for number, tests in rows if tests.strip()}
    expected = {*range(1, 19), *range(20, 37)}
    assert covered >= expected, sorted(expected - covered)
    sources = {
        path: path.read_text()
        for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("tests/**/*.rs"), *ROOT.glob("src/**/*.rs")]
    }
    everything = "\n".join(sources.values())
    for number, tests in rows:
        for name in re.findall(r"`(test_\w+|\w+_\w+)`", tests):
            assert re.search(rf"\bfn {name}\b|\bdef {name}\b", everything), (
                f"rule {number} names {name}, which is nowhere"
            )


@pytest.mark.quick
def test_words_are_few_distinct_and_used() -> None:
    """docs/words.md has at most 25 entries, none twice. The core or the shim uses each of them."""
    rows = re.findall(r"^\| ([a-z][^|]*) \| [A-Z0-9*]", (ROOT / "docs" / "words.md").read_text(), re.M)
    words = [word.strip() for row in rows for word in row.split(",")]
    assert 0 < len(rows) <= 25, f"{len(rows)} entries"
    assert len(words) == len(set(words)), sorted(words)
    sources = "\n".join(path.read_text() for folder in ("src", "cpp") for path in (ROOT / folder).rglob("*.?pp"))
    sources += "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.rs"))
    unused = [word for word in words if not re.search(rf"\b{word.replace(' ', '.')}", sources, re.I)]
    assert not unused, f"no source uses {unused}"
