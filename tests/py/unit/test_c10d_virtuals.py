"""Every virtual function of c10d's Backend and Work is overridden, or our header says what happens without an
override."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
C10D = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
NOTE = re.compile(r"^// (refused|inherited): (?:(\w+)::)?(\w+): (\S.*)$", re.M)


def without_comments(text: str) -> str:
    """Removes the comments of C++ code."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def virtuals(path: Path) -> set[str]:
    """Returns the names of the functions that a header declares virtual, without destructors."""
    found = re.findall(r"\bvirtual\b[^;{}]*?\b(\w+)\s*\(", without_comments(path.read_text()))
    return {name for name in found if name not in ("Backend", "Work", "Options")}


def overridden(path: Path) -> set[str]:
    """Returns the names of the functions that a header declares with `override`."""
    return set(
        re.findall(r"\b(\w+)\s*\([^;{}]*\)\s*(?:const\s*)?(?:noexcept\s*)?override", without_comments(path.read_text()))
    )


def notes(path: Path) -> dict[str, str]:
    """Returns for each function that a header leaves to the base class the header's note about what that means."""
    return {name: text for _, _, name, text in NOTE.findall(path.read_text())}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("base", "own"),
    [("Backend.hpp", ("c10d/backend.hpp", "c10d/options.hpp")), ("Work.hpp", ("work/work.hpp",))],
)
def test_every_virtual_is_overridden_or_its_absence_explained(base: str, own: tuple[str, ...]) -> None:
    """A torch version with a new virtual function fails here until the header handles the function."""
    headers = [ROOT / "cpp" / name for name in own]
    declared = virtuals(C10D / base)
    assert len(declared) > 10, f"{base} was not understood: {declared}"
    explained = {**notes(ROOT / "cpp" / "c10d" / "backend.hpp"), **notes(headers[0])}
    missing = declared.difference(*map(overridden, headers)) - set(explained)
    assert not missing, f"neither overridden in {own} nor listed there as refused or inherited: {sorted(missing)}"


@pytest.mark.quick
def test_nothing_is_both_overridden_and_listed_as_refused() -> None:
    """A function with a note must not be overridden."""
    header = ROOT / "cpp" / "c10d" / "backend.hpp"
    assert not overridden(header) & set(notes(header))


@pytest.mark.quick
def test_the_reader_of_headers_sees_what_it_should() -> None:
    """Checks the reader itself: it finds functions that are known to exist."""
    assert {"allreduce", "supportsSplitting", "getBackendName"} <= virtuals(C10D / "Backend.hpp")
    assert {"wait", "getFuture", "isCompleted"} <= virtuals(C10D / "Work.hpp")
