"""`torch-sagellm bench --device` runs on devices and marks every figure of a simulator as such."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import torchrun
from simulated import VENDORS, environment, on_simulator_alone

from torch_sagellm.cli import bench, collectives
from torch_sagellm.cli.main import main

#: The first test builds the simulators, which takes minutes on a busy machine; every run has its own deadline.
pytestmark = [pytest.mark.timeout(900), on_simulator_alone]

SCRIPT = Path(__file__).with_name("bench_script.py")


@pytest.mark.parametrize("vendor", VENDORS)
def test_rows_of_a_simulator_say_so(vendor: str, libraries: dict[str, Path], tmp_path: Path) -> None:
    """Every collective on four ranks gives correct values, carried by the library and not through the host."""
    name, flavour, _ = VENDORS[vendor]
    file = tmp_path / "rows.json"
    words = ["--op", "all", "--sizes", "64,64KiB", "--iterations", "2", "--warmup", "1", "--json", str(file)]
    env = environment(vendor, libraries, SAGELLM_VENDOR=vendor)
    output = torchrun(SCRIPT, 4, name, flavour, *words, env=env)
    rows = [bench.Row(**row) for row in json.loads(file.read_text())]
    assert [(row.op, row.size) for row in rows] == [(op, size) for op in collectives.OPS for size in (64, 1 << 16)]
    for row in rows:
        assert row.wrong == 0 and row.seconds > 0 and row.device == name
        assert row.simulated and str(libraries[vendor]) in row.carrier, row
    table = [line for line in output.splitlines() if line.startswith(tuple(f" {op} " for op in collectives.OPS))]
    assert len(table) == len(rows) and all(line.endswith("  simulator") for line in table), output
    assert "by a SIMULATOR of the library" in output and f"# {name} tensors by " in output, output


def test_without_a_library_the_head_says_that_tensors_pass_the_host(tmp_path: Path, libraries: dict[str, Path]) -> None:
    file = tmp_path / "rows.json"
    env = {"SAGELLM_VENDOR": "host"}
    output = torchrun(SCRIPT, 2, "npu", "host", "--sizes", "64", "--iterations", "2", "--json", str(file), env=env)
    assert "# npu tensors through host memory: " in output and "SIMULATOR" not in output, output
    (row,) = [bench.Row(**row) for row in json.loads(file.read_text())]
    assert row.wrong == 0 and not row.simulated and row.carrier.startswith("through host memory")


def test_a_device_that_is_not_there_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "mlu"]) == 2
    assert "--device mlu: torch sees " in capsys.readouterr().err
