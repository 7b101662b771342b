"""`torch-sagellm bench`: which values it counts as wrong, its table, its progress, and the ranks that it starts or
joins."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Context, beyond_gloo, run_ranks, run_warm, warm_python

from torch_sagellm.cli import bench, chart, collectives
from torch_sagellm.cli.main import main

pytestmark = beyond_gloo("the command compares with it")
ROOT = Path(__file__).resolve().parents[3]


def checked(ctx: Context) -> list[str]:
    """Lists the cases in which `wrong` counts elements of a correct result, or does not count exactly one if one
    element was changed."""
    found = []
    for op in collectives.OPS:
        for dtype, redop in (
            ("float32", "sum"),
            ("float64", "avg"),
            ("bfloat16", "prod"),
            ("uint8", "max"),
            ("int64", "min"),
        ):
            case = collectives.make(op, 100, dtype, redop)
            if case.wrong(None):
                found.append(f"{op} {dtype} {redop}")
            gets = ctx.rank == 0 or op not in ("reduce", "gather")
            plain = case.call

            def spoilt(group: Any, case: collectives.Case = case, plain: Any = plain) -> None:
                plain(group)
                case.taken[-1] += 1

            case.call = spoilt
            if case.wrong(None) != int(gets):
                found.append(f"{op} {dtype} {redop}: a wrong element was not seen")
    return found


@pytest.mark.quick
def test_wrong_values_are_counted_and_right_ones_are_not() -> None:
    assert run_ranks(checked, 3) == [[]] * 3


def test_own_ranks_print_the_table_and_write_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--op", "all_gather", "--sizes", "12,4KiB", "--iterations", "3", "--compare", "gloo", "--plot", "-"]
    done = run_warm("-m", "torch_sagellm", "bench", *words, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [bench.Row(**row) for row in json.loads(file.read_text())]
    # 12 bytes are three elements. Two ranks have blocks of two elements each, which makes 16 bytes.
    assert [(row.backend, row.size, row.count) for row in rows] == [
        ("sagellm", 16, 4),
        ("gloo", 16, 4),
        ("sagellm", 4096, 1024),
        ("gloo", 4096, 1024),
    ]
    for row in rows:
        assert row.wrong == 0 and row.seconds > 0 and row.busbw == pytest.approx(row.algbw / 2)
        assert row.algbw == pytest.approx(row.size / row.seconds / 1e9)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert any(line[:5] == ["all_gather", "4096", "1024", "float32", "none"] for line in lines), done.stdout
    assert "busbw in GB/s" in done.stdout and "\x1b" not in done.stdout


def test_under_torchrun_it_measures_between_the_ranks_that_are_there() -> None:
    """Starts the bench by the script name that older code uses."""
    script = str(ROOT / "benchmark/comm_benchmark.py")
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", script, "--sizes", "64", "--iterations", "2"]
    done = run_warm(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n all_reduce ") == 1, done.stdout
    assert "2 ranks; 10 warm-ups, 2 iterations" in done.stdout, "arguments override the preset quick"


@pytest.mark.quick
def test_the_preset_is_three_sizes_that_arguments_override() -> None:
    from torch_sagellm.cli.main import _parse

    job = bench.job_of(_parse(["bench", "--preset", "quick"]))
    assert (job.sizes, job.warmup, job.iterations) == ([10**6, 10**7, 10**8], 10, 100)
    job = bench.job_of(_parse(["bench", "--preset", "quick", "--sizes", "8", "--compare", "gloo", "--op", "all"]))
    assert (job.sizes, job.iterations, job.backends) == ([8], 100, ["sagellm", "gloo"])
    assert job.ops == list(collectives.OPS)
    assert _parse(["bench", "--plot", "--ranks", "3"]).plot == _parse(["bench", "--plot", "-"]).plot == chart.HERE


@pytest.mark.quick
def test_a_chart_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", "bandwidth.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    chart.check("-")
    lines = chart.bars({"a": [(8, 1.0), (1 << 20, 4.0)], "b": [(8, 2.0)]}, 44)
    assert [line.count("#") for line in lines] == [0, 5, 10, 19] and lines[0] == "busbw in GB/s, up to 4"


@pytest.mark.parametrize(
    ("words", "drawn"),
    [
        (("simulate", "--op", "all_reduce", "--ranks", "4,8"), "[" + "#" * 15 + "." * 15 + "] 1/2 all_reduce, 8 ranks"),
        (("bench", "--sizes", "8,1KiB", "--iterations", "2"), "[" + "#" * 15 + "." * 15 + "] 1/2 all_reduce 1 KiB"),
        (("tune", "--budget", "1", "--max-size", "1KiB", "--force"), "] 1/"),
    ],
)
def test_long_commands_draw_their_progress_on_a_terminal(words: tuple[str, ...], drawn: str, tmp_path: Path) -> None:
    """stdout is a pipe and has only the table; the progress goes to the terminal on stderr."""
    screen, theirs = pty.openpty()
    try:
        command = [warm_python(), "-m", "torch_sagellm", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "SAGELLM_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=100, check=False, env=env
        )
        os.close(theirs)
        shown = os.read(screen, 1 << 16).decode()
    finally:
        os.close(screen)
    assert drawn in shown and shown.endswith(f"\r{'':<79}\r"), shown
    # A short run of `tune` may find nothing faster, and then exits with 1.
    assert done.returncode in (0, int(words[0] == "tune")) and "\r" not in done.stdout, done.stdout
