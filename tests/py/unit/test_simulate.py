"""``python -m torch_sagellm simulate``: arguments, tables, crossover points, plot, check, and the examples of its
page."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import warm_python

from torch_sagellm._private import load
from torch_sagellm.cli import measure, predict, simulate
from torch_sagellm.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
KINDS = [kind for kind in load.extension().KINDS if kind not in ("send", "recv")]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def run_simulate(*arguments: str) -> Done:
    """Runs the command in this process, because importing torch takes longer than most of its runs."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["simulate", *arguments])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.mark.quick
def test_sizes_links_and_ranks_are_read_as_people_write_them() -> None:
    assert simulate.parse_sizes("4KiB,8") == [8, 4096]
    assert simulate.parse_sizes("1KiB..64KiB") == [1 << 10, 4 << 10, 16 << 10, 64 << 10]
    assert simulate.parse_sizes("1..5:2,3") == [1, 2, 3, 4]
    assert simulate.parse_size("1.5MB") == 1_500_000
    link = simulate.parse_link("1ms,1Gbit")
    assert (link.alpha, link.overhead, link.beta) == (1e-3, 5e-6, 8e-9)
    assert simulate.parse_link("2us,10GB/s,100ns") == predict.Link(2e-6, pytest.approx(1e-7), 1e-10)
    assert simulate.parse_ranks("2,100000") == [2, 100_000]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--sizes", "8x"], "8x"),
        (["--sizes", "8..4"], "8..4"),
        (["--ranks", "0"], "'0'"),
        (["--ranks", "100001"], "100001"),
        (["--link", "1ms"], "LATENCY,SPEED"),
        (["--host", "1ms,0GB"], "0GB"),
        (["--op", "all_shuffle"], "all_shuffle"),
        (["--strategy", "tp", "--ranks", "3"], "--hidden 4096 is no multiple of the 3 ranks"),
        (["--strategy", "ep", "--experts", "3"], "--experts 3 is no multiple of the 8 ranks"),
        (["--strategy", "dp", "--op", "all_gather"], "--op has no effect with --strategy"),
        (["--params", "1B"], "--params has an effect with --strategy alone"),
        (["--params", "7B"], "--params has an effect with --strategy alone"),
        (["--strategy", "dp", "--sizes", "8"], "--sizes has no effect with --strategy"),
        (["--check", "--link", "30us,10Gbit"], "--link has no effect with --check"),
        (["--check", "--ranks-per-host", "8"], "--ranks-per-host has no effect with --check"),
        (["--check", "--plot", "x.png"], "--plot has no effect with --check"),
        (["--check", "--sizes", "8,1GiB"], "--sizes 1GiB: --check runs sizes from 4 bytes to 16MiB"),
        (["--check", "--algorithms", "ring,hierarchical"], "hierarchical is several"),
        (["--op", "barrier", "--sizes", "8"], "--sizes has no effect with --op barrier"),
        (["--kv-hidden", "8"], "--kv-hidden has an effect with --strategy alone"),
        (["--algorithms", "bruck"], "recursive_doubling"),
        (["--ranks-per-host", "0"], "--ranks-per-host"),
        (["--plot", "/nowhere/at/all.png"], "/nowhere/at"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line(arguments: list[str], names: str) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    done = run_simulate(*arguments)
    assert done.returncode == 2, done.stdout
    assert names in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.quick
def test_without_matplotlib_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run_simulate("--plot", "x.png")
    assert done.returncode == 2
    assert "pip install matplotlib" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.quick
def test_every_collective_has_prices_that_grow_with_size_and_ranks() -> None:
    core = load.extension()
    machine = predict.Machine(predict.Link(1e-6, 0, 1e-10), predict.Link(1e-4, 1e-6, 1e-9), 1e-10, 4)
    for kind in KINDS:
        for name in predict.algorithms(core, kind):
            by_ranks = [
                [one.seconds for one in predict.predict(core, kind, [name], ranks, [8, 1 << 20], machine)[name]]
                for ranks in (1, 4, 64)
            ]
            assert by_ranks[0] == [0.0, 0.0], "one rank has nothing to exchange"
            assert all(0 < few < many for few, many in zip(by_ranks[1], by_ranks[2], strict=True)), (
                kind,
                name,
                by_ranks,
            )
            assert all(small <= large for small, large in by_ranks)
            assert all(small < large for small, large in by_ranks[1:]) or kind == "barrier"


@pytest.mark.quick
def test_crossovers_are_where_the_fastest_changes() -> None:
    def times(*seconds: float) -> list[predict.Prediction]:
        return [predict.Prediction(one, 1) for one in seconds]

    found = simulate.crossovers({"a": times(1, 2, 3, 3), "b": times(2, 2, 2, 3)}, [1, 2, 4, 8])
    assert found == [(1, "a"), (4, "b")], "of two that are equal, who was ahead stays ahead"


def test_tables_fit_into_a_terminal_of_80_columns() -> None:
    """Includes a group of one rank, which takes no time and has no fastest algorithm."""
    done = run_simulate("--ranks", "1,8", "--sizes", "8..1GiB:64")
    assert done.returncode == 0 and max(map(len, done.stdout.partition("\n\n")[2].splitlines())) < 80, done.stdout
    alone, several = re.split("^all_reduce, ", done.stdout, flags=re.M)[1:]
    assert alone.startswith("1 rank on 1 host\n") and "*" not in alone and "-0" not in alone, alone
    assert several.count("*") == len(simulate.parse_sizes("8..1GiB:64")), several


def test_a_hundred_thousand_ranks_are_priced() -> None:
    done = run_simulate("--ranks", "100000", "--sizes", "8,16MiB")
    assert done.returncode == 0, done.stderr
    assert "100000 ranks on 12500 hosts" in done.stdout
    rows = [line for line in done.stdout.splitlines() if re.match(r" +(8 B|16 MiB) ", line)]
    assert len(rows) % 2 == 0 and all("".join(rows[at::2]).count("*") == 1 for at in (0, 1)), done.stdout
    assert "fastest from 8 B on: " in done.stdout


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "times.png"
    done = run_simulate("--ranks", "4,64", "--sizes", "8..1MiB", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all"])
def test_the_check_runs_the_schedules_and_prints_the_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three is no power of two, so ranks pause in different steps. Each rank verifies its results."""
    monkeypatch.setattr(sys, "executable", warm_python())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = run_simulate("--op", kind, "--ranks", "3", "--sizes", "60", "--check")
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^ +60 B +(\w+).* [+-]\d+%$", done.stdout, re.M)
    wanted = set(predict.algorithms(load.extension(), kind)) - {predict.TWO_LEVELS}
    assert set(shown) == wanted, done.stdout
    assert re.search(r"error of the model, 3 ranks: median \d+%, worst [+-]\d+%", done.stdout)


@pytest.mark.quick
def test_the_check_would_see_a_wrong_result() -> None:
    """The verification accepts correct values and rejects a single wrong number."""
    core = load.extension()
    for kind in KINDS[:-1]:
        for rank in range(3):
            runner = measure.Runner(kind, core.program(kind, "direct", 3, 1, rank), 3, rank, 60)
            values = runner.start_values()
            if kind in ("all_reduce", "reduce", "reduce_scatter"):
                values.fill_(6.0)
            else:
                for part in range(runner.parts):
                    values[runner.starts[part] : runner.starts[part + 1]] = part + 1.0
            assert runner.is_right(values), (kind, rank)
            values += 1
            owns_none = kind in ("reduce", "gather") and rank != 0
            assert runner.is_right(values) == owns_none, (kind, rank)


def test_the_examples_of_the_help_run() -> None:
    for line in simulate.EXAMPLES.splitlines():
        if "-m torch_sagellm simulate" in line and "--check" not in line and "--plot" not in line:
            done = run_simulate(*shlex.split(line)[4:])
            assert done.returncode == 0, (line, done.stderr)
