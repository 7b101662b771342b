"""Explanations without ranks: the start rules, hypothetical groups, refused rules, tables on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import IS_GLOO

import torch_sagellm
from torch_sagellm._private import load
from torch_sagellm.observe import explain, stats

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(IS_GLOO, reason="gloo: this is about the package's own choice"),
    pytest.mark.usefixtures("cache"),
]


MIB = 1 << 20


def test_an_explanation_of_what_might_be() -> None:
    small = torch_sagellm.explain("all_reduce", 8, ranks=2)
    assert (small.choice, small.reason, small.recorded) == ("slots", "fits_slot", None)
    assert small.predicted is not None and small.measured is None
    large = torch_sagellm.explain("all_reduce", MIB, dtype=torch.bfloat16, ranks=2)
    assert large.choice.startswith("rounds(") and large.path == "shared memory of one host"
    slots = next(other for other in large.rejected if other.way == "slots")
    assert slots.predicted is None and "a slot holds 4KiB" in slots.why_not
    text = str(large)
    assert "all_reduce of 1MiB on 2 ranks" in text and "decided by" in text and "not taken" in text
    assert torch_sagellm.explain("barrier", ranks=3).reason == "nothing_to_move"
    assert torch_sagellm.explain("all_to_all", ranks=3).reason == "no_common_size"
    assert torch_sagellm.explain("all_reduce", 8, ranks=1).path == "local copy, the group has one rank"


def answer(**changes: Any) -> Any:
    """Returns the core's answer about an all_reduce between hosts."""
    found = {
        "kind": "all_reduce",
        "bytes": 64,
        "ranks": 4,
        "hosts": 2,
        "slot_bytes": 4096,
        "choice": "direct(leaders=1)",
        "reason": "model",
        "code": 7,
        "decided": "d",
        "predicted_ns": 50_000,
        "scaled_ns": 0,
        "scaled_by": "",
        "measured_ns": 0,
        "table": "t",
        "overruled": [],
        "rejected": [],
        "past": None,
    }
    assert changes.keys() <= found.keys()
    return {**found, **changes}


def test_an_explanation_between_hosts_is_read() -> None:
    found = explain.read(answer(rejected=[{"way": "ring", "predicted_ns": 70_000, "why_not": "slower"}]))
    assert "a link between them" in found.path and found.rejected[0].predicted == 7e-5
    assert (found.predicted, found.measured, found.sequence, found.recorded) == (5e-5, None, None, None)
    assert "on 4 ranks on 2 hosts" in str(found)


def test_a_past_operation_says_with_whom_it_went() -> None:
    for batch, words in (
        ((26, 17, 42, 1664), "together    with operations 17 to 42, one batch of 1664 bytes"),
        ((26, 17, 42, 0), "together    with operations 17 to 42, one batch of 0 bytes"),
        ((26, 17, 42, -1), "together    with operations 17 to 42, which ended in the same pass"),
        ((5, 17, 42, -1), "together    with 4 others, numbers 17 to 42, which ended in the same pass"),
        ((3, 18, 18, -1), "together    with 2 others, which ended in the same pass"),
        ((1, 18, 18, -1), "together    alone"),
    ):
        together = dict(zip(("operations", "first", "last", "bytes"), batch, strict=True))
        past = {"number": 18, "host_staged": False, "recorded": 7, "batch": together, "took_ns": 21_500}
        found = explain.read(answer(past=past))
        assert (found.sequence, found.recorded) == (18, 7) and words in str(found)
        assert str(found).startswith("all_reduce number 18 of 64 bytes")
        assert found.took == 21.5e-6 and "took        22 us, with waits for other ranks" in str(found)
    pending = {"number": 18, "host_staged": False, "recorded": 0, "batch": None, "took_ns": 0}
    waiting = explain.read(answer(past=pending))
    assert waiting.took is None and "took" not in str(waiting)
    assert (waiting.recorded, waiting.batch) == (None, None) and "together" not in str(waiting)


def test_the_core_names_the_operations_and_the_types_that_torch_combines() -> None:
    core = load.extension()
    assert core.KINDS[:6] == ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter")
    assert core.KINDS[6:] == ("reduce_scatter", "all_to_all", "barrier", "send", "recv")
    assert set(explain.ALIASES.values()) <= set(core.KINDS) and stats.BUS_FACTORS.keys() <= set(core.KINDS)
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in core.DTYPES) and len(core.DTYPES) == 16
    for call in (lambda: core.explain_without_group("sum", 8, "float32", 2), lambda: core.predict("send", *COSTS)):
        with pytest.raises(ValueError, match=r"is called .*; there are all_reduce, broadcast"):
            call()
    with pytest.raises(ValueError, match="no element type is called"):
        core.explain_without_group("all_reduce", 8, "float31", 2)


#: Arguments of `predict` after the kind.
COSTS = ("ring", 2, [], (0, 0, 0), (0, 0, 0), 0, 1)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: torch_sagellm.explain("all_reduce_fast", 8, ranks=2), "'all_reduce_fast' is no operation"),
        (lambda: torch_sagellm.explain("all_reduce", ranks=2), "nbytes is missing"),
        (lambda: torch_sagellm.explain("all_reduce", -1, ranks=2), "nbytes is -1"),
        (lambda: torch_sagellm.explain("all_reduce", 8, ranks=0), "ranks is 0"),
        (lambda: torch_sagellm.explain("all_reduce", 8, ranks=100_000), "up to 256"),
        (lambda: torch_sagellm.explain("all_reduce", 8, ranks=2, dtype="float8_e5m2"), "float8_e5m2"),
        (lambda: torch_sagellm.explain(), "name an operation"),
        (lambda: torch_sagellm.explain(sequence=0), "counted from 1"),
        (lambda: torch_sagellm.explain(sequence=1, ranks=2), "only group= goes with it"),
        (lambda: torch_sagellm.explain(sequence=1), "there is no process group"),
    ],
)
def test_explain_refuses_what_it_does_not_know(call: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        call()


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("all_reduce:0-64KiB=slots", "a slot holds 4KiB"),
        ("all_reduce:0-=warp", "is no algorithm; expected start, slots, rounds"),
        ("nonsense", "there is no ':'"),
    ],
)
def test_wrong_rules_are_refused_with_the_rule_in_the_text(
    rules: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGELLM_ALGORITHM", rules)
    with pytest.raises(ValueError, match="SAGELLM_ALGORITHM") as error:
        torch_sagellm.explain("all_reduce", 8, ranks=2)
    assert expected in str(error.value) and rules in str(error.value)


LINES = "all_reduce:0-4KiB=slots 3000 ns; start 3000 ns\nall_reduce:4097-=rounds(64KiB) 9000 ns; start 12000 ns"


def test_a_table_on_disk_decides_and_rules_come_before_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(load.extension().save_table(2, "2026-11-21", LINES))
    assert path.parent == cache and [*cache.iterdir()] == [path]
    found = torch_sagellm.explain("all_reduce", MIB, ranks=2)
    assert (found.choice, found.reason, found.measured) == ("rounds(64KiB)", "measured", 9e-6)
    assert found.table == str(path) and "12.00 us" in found.overruled[0]
    assert torch_sagellm.explain("all_reduce", MIB, ranks=3).reason != "measured", "a table is for one number of ranks"
    monkeypatch.setenv("SAGELLM_ALGORITHM", "*:1MiB-=rounds(32KiB)")
    found = torch_sagellm.explain("all_reduce", MIB, ranks=2)
    assert (found.choice, found.reason) == ("rounds(32KiB)", "override") and "rounds(64KiB)" in found.overruled[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text.replace("9000", "1000"), "damaged"),
        (lambda text: text[:-30], "damaged"),
        (lambda text: "", "damaged"),
        (lambda text: "\0" * 50, "damaged"),
        (lambda text: text * 100, "more than"),
    ],
)
def test_a_bad_table_is_refused_with_the_reason(change: Any, expected: str) -> None:
    path = Path(load.extension().save_table(2, "2026-11-21", LINES))
    path.write_text(change(path.read_text()))
    found = torch_sagellm.explain("all_reduce", MIB, ranks=2)
    assert found.reason != "measured" and expected in found.table and str(path) in found.table


def test_lines_that_are_no_table_are_not_written(cache: Path) -> None:
    with pytest.raises(ValueError, match="no line of a table"):
        load.extension().save_table(2, "now", "all_reduce is fast")
    assert not [*cache.iterdir()]


def test_an_import_of_the_package_loads_none_of_it() -> None:
    names = ("observe.explain", "cli.tune", "_C")
    code = f"import torch_sagellm, sys; print([n for n in {names} if 'torch_sagellm.' + n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
