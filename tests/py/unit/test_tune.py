"""What `torch-sagellm tune` would measure, which results it keeps, and the lines that it writes."""

from __future__ import annotations

import pytest
from harness import IS_GLOO

import torch_sagellm
from torch_sagellm._private import load
from torch_sagellm.cli import tune
from torch_sagellm.observe import explain

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(IS_GLOO, reason="gloo: this is about the package's own choice"),
    pytest.mark.usefixtures("cache"),
]
MIB = 1 << 20


def cell(nbytes: int, chosen: str, spread: float = 0.02, op: str = "all_reduce", **medians: float) -> tune.Cell:
    """Returns a measured cell; the keyword r64 means rounds(64KiB)."""
    named = {f"rounds({name[1:]}KiB)": median for name, median in medians.items() if name != "start"}
    return tune.Cell(op, nbytes, chosen, {"start": medians["start"], **named}, spread)


def test_tune_keeps_another_way_only_beyond_the_noise() -> None:
    assert tune.winner(cell(MIB, "rounds(512KiB)", start=10e-6, r64=9.9e-6), 0.02) == "rounds(512KiB)"
    assert tune.winner(cell(MIB, "rounds(512KiB)", start=10e-6, r64=9e-6), 0.02) == "rounds(64KiB)"
    assert tune.winner(cell(MIB, "rounds(512KiB)", spread=0.2, start=10e-6, r64=9e-6), 0.02) == "rounds(512KiB)"
    assert tune.overall_spread([cell(1, "slots", spread=at / 100, start=1.0) for at in range(10)]) == 0.09


def test_tune_writes_lines_that_cover_every_size_up_to_the_largest_once() -> None:
    cells = [
        cell(1024, "slots", start=3e-6, r16=5e-6),
        cell(4096, "slots", start=4e-6, r16=2e-6),
        cell(16384, "rounds(512KiB)", start=5e-6, r16=4e-6),
        cell(65536, "rounds(512KiB)", start=6e-6, r16=6e-6),
        cell(1024, "rounds(512KiB)", op="all_to_all", start=5e-6, r16=4e-6),
        cell(4096, "rounds(512KiB)", op="all_to_all", start=6e-6, r16=4e-6),
    ]
    lines = tune.lines(cells, 0.02, 4096)
    assert lines == [
        "all_reduce:0-2048=slots 3000 ns; start 3000 ns",
        "all_reduce:2049-4096=rounds(16KiB) 2000 ns; start 4000 ns",
        "all_reduce:4097-32768=rounds(16KiB) 4000 ns; start 5000 ns",
        "all_reduce:32769-65536=rounds(512KiB) 6000 ns; start 6000 ns",
        "all_to_all:0-=rounds(16KiB) 4000 ns; start 6000 ns",
    ]
    load.extension().save_table(2, "now", "\n".join(lines))
    found = [torch_sagellm.explain("all_reduce", size, ranks=2) for size in (0, 2048, 2049, 4096, 4097, 65536)]
    assert all(one.reason == "measured" for one in found)
    # A size that was not measured has another reason.
    assert torch_sagellm.explain("all_reduce", 1 << 30, ranks=2).reason != "measured"


def test_what_tune_would_try_can_be_tried() -> None:
    for op, nbytes, start, rivals in tune.plan(2, 1 << 20):
        assert start not in rivals and len(set(rivals)) == len(rivals)
        for way in rivals:
            rule = f"{op}:0-={way}"
            answer = load.extension().explain_without_group(op, nbytes, "float32", 2, rule)
            assert explain.read(answer).choice == way
