"""Every function of the bridge between C++ and Rust is called by a test that BRIDGE.md names."""

from __future__ import annotations

import re
from pathlib import Path

import bridge
import pytest

HERE = Path(__file__).resolve().parents[1]


def rows() -> list[tuple[set[str], list[str]]]:
    """Returns the rows of BRIDGE.md: functions in the notation of `bridge.bridged`, and the tests that call them."""
    found = []
    for line in (HERE / "BRIDGE.md").read_text().splitlines():
        cells = [re.findall(r"`(\w+)`", cell) for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1]:
            types, names, tests = cells
            functions: set[str] = set()
            for name in names:
                possible = {f"{of}::{name}" for of in types} or {name}
                # If the row has two types, the function may belong to either. A function of neither must fail the test.
                functions |= possible & set(bridge.bridged()) or possible
            found.append((functions, tests))
    return found


@pytest.mark.quick
def test_every_bridged_function_is_called_by_a_test() -> None:
    """A new function of the bridge in src/ffi needs a test, and a row of BRIDGE.md that names the test."""
    bridged = bridge.bridged()
    assert len(bridged) == len(set(bridged)) > 40, "the bridge is read wrongly"
    listed = set().union(*(functions for functions, _ in rows()))
    assert sorted(set(bridged) - listed) == [], "no test is named for these"
    assert sorted(listed - set(bridged)) == [], "these are not bridged any more"


@pytest.mark.quick
def test_the_tests_that_it_names_exist() -> None:
    """Every test that BRIDGE.md names exists in tests/py."""
    tests = "\n".join(path.read_text() for path in HERE.rglob("test_*.py"))
    for functions, names in rows():
        assert names, functions
        for name in names:
            assert f"def {name}(" in tests, f"{name} of {sorted(functions)} is nowhere"


@pytest.mark.quick
def test_the_names_of_the_glue_are_those_of_the_source() -> None:
    """The call counters see symbols of C++ or of the generated glue, and map them to these names."""
    assert bridge.plain("sagellm$cxxbridge1$198$Store$set") == "Store::set"
    assert bridge.plain("sagellm$cxxbridge1$check_interrupt") == "check_interrupt"
    assert bridge.plain("sagellm::RustOp::wait(long) const") == "RustOp::wait"
    meet = "RustRendezvous::meet"
    assert bridge.plain(f"sagellm::{meet}(sagellm::Setup const&, std::shared_ptr<sagellm::Store>)") == meet
