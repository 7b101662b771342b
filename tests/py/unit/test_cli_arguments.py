"""Every option of every command with odd values: accepted, or rejected with status 2 and one line, without a
traceback."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import IS_GLOO

import torch_sagellm
from torch_sagellm.cli import arguments, bench, ranks, show, tune
from torch_sagellm.cli.main import COMMANDS, _parsers, main

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(IS_GLOO, reason="gloo: this is about the package's own commands"),
    pytest.mark.usefixtures("cache"),
]
ODD = ("", "-1", "x", "1.5", "nan", "inf", "9" * 21)
#: Options that accept any text: names of files and of a device, an address, algorithms, and a type that the core knows.
TEXTS = {
    "-o",
    "--output",
    "--dir",
    "--json",
    "--report",
    "--save",
    "--plot",
    "--device",
    "--peer",
    "--algorithms",
    "--dtype",
    "paths",
}


def options() -> list[tuple[str, str]]:
    """Returns (command, option) for each option that takes a value. Options that accept any text are left out."""
    _, commands = _parsers()
    return [
        (name, action.option_strings[-1])
        for name, parser in commands.items()
        for action in parser._actions
        if action.option_strings and action.nargs != 0 and action.option_strings[-1] not in TEXTS
    ]


def run(*words: str) -> int:
    """Runs a command in this process. Returns its exit code."""
    try:
        return main(list(words))
    except SystemExit as end:
        return int(end.code or 0)


FINE = {(option, "1.5") for option in ("--group-timeout", "--stall", "--budget", "--every", "--limit")} | {
    ("--rdzv-conf", "")
}
GIVEN = {"explain": ("all_reduce", "8")}


@pytest.mark.parametrize(("command", "option"), options())
def test_an_odd_value_is_refused_in_one_line(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ODD:
        if (option, value) in FINE:
            continue
        code = run(command, *GIVEN.get(command, ()), f"{option}={value}")
        said = capsys.readouterr().err
        assert code == 2 and len(said.splitlines()) == 1 and "Traceback" not in said, (value, code, said)


@pytest.mark.parametrize("command", ["bench", "explain", "table", "tune", "simulate"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "1000000"])
def test_wrong_numbers_of_ranks_have_one_text(command: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, *GIVEN.get(command, ()), f"--ranks={value}") == 2
    assert f"{value!r} is no number of ranks from " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["allreduce", "AllReduce", "all-reduce", "ALL_REDUCE"])
def test_operations_are_taken_as_people_write_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["explain", name, "1MiB"]) == 0 and main(["simulate", "--op", name, "--sizes", "8", "--ranks", "2"]) == 0
    )
    capsys.readouterr()
    assert arguments.one_of([*bench.collectives.OPS, "all"])(name) == "all_reduce"
    assert torch_sagellm.explain(name, "1KiB", ranks=2).nbytes == 1024
    assert arguments.one_of(bench.collectives.OPS)("reducescatter") == "reduce_scatter"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("bench", "--sizes", "0"), "size of 0"),
        (("bench", "--sizes", "8,100TiB"), "is no size"),
        (("bench", "--sizes", "900000GiB"), "and this machine has"),
        (("bench", "--redop", "max", "--op", "all_gather"), "all_gather combines no numbers"),
        (("bench", "--redop", "avg", "--dtype", "int32"), "--redop avg: of int32 there is none"),
        (("bench", "--redop", "avg", "--compare", "gloo"), "--redop avg: gloo has none"),
        (("explain", "all_reduce", "999999999999999999999"), "more than any memory holds"),
        (("explain", "all_reduce", "8", "--dtype", "foo"), "dtype=foo is no type of elements"),
        (("explain", "all_reduce", "8", "--dtype", "float8_e4m3fn"), "cannot be combined; expected one of"),
        (("tune", "--max-size", "3"), "below 1KiB"),
        (("tune", "--budget", "0"), "'0' is no number of seconds over 0"),
        (("health", "--dir", "/nonexistent", "--live"), "there is no folder /nonexistent"),
        (("doctor", "--rdzv-conf", "join_timeout=abc"), "'abc' is no number"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert expected in said and len(said.splitlines()) == 1, said


def test_a_rival_that_torch_lacks_is_refused_before_ranks_start(capsys: pytest.CaptureFixture[str]) -> None:
    if dist.is_mpi_available():
        pytest.skip("this torch has mpi")
    assert run("bench", "--compare", "mpi") == 2 and "made without mpi" in capsys.readouterr().err


def test_under_a_launcher_its_number_of_ranks_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("bench", "--ranks", "4") == 2 and "a launcher has started 2 ranks" in capsys.readouterr().err
    for name in ("MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "x")
        assert run("bench") == 2 and f"{name}='x' is no whole number" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_many_ranks_for_few_cores_are_not_started_unasked(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "run", started)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert run(command, "--ranks", "9") == 2
    assert "9 ranks are 9 processes, and this machine gives them 2 cores; --yes starts them" in capsys.readouterr().err
    assert run(command, "--ranks", "9", "--yes") != 2 and run(command, "--ranks", "8") != 2
    assert "interrupted" in capsys.readouterr().err


def test_a_table_of_a_busy_machine_is_written_with_force_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [tune.Cell("all_reduce", 1024, "slots", {"start": 1e-6}, 16.0)]
    monkeypatch.setattr(tune, "_run_ranks", lambda *_: found)
    assert run("tune") == 1 and "differed by 1600 %" in capsys.readouterr().err
    assert run("tune", "--force") == 0 and "written to" in capsys.readouterr().out


def test_where_no_table_can_be_written_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAGELLM_CACHE_DIR", "/proc/nope")
    monkeypatch.setattr(tune, "_run_ranks", lambda *_: pytest.fail("it measured"))
    assert run("tune") == 2 and "/proc/nope: no table can be written there" in capsys.readouterr().err


def test_a_full_disk_ends_a_command_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "torch_sagellm", "table"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr == "torch-sagellm table: [Errno 28] No space left on device\n"


def test_what_a_model_says_is_called_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "all_reduce", "1MiB"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  predicted ")]
    assert "by constants of another machine" in line, line


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SAGELLM_FUSION", "maybe", "SAGELLM_FUSION=maybe: expected 1 or 0"),
        ("SAGELLM_ALGORITHM", "foo", 'SAGELLM_ALGORITHM: rule "foo": there is no'),
    ],
)
def test_a_variable_that_every_group_refuses_is_refused_before_ranks_start(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(ranks, "start", lambda *_: pytest.fail("ranks were started"))
    commands = [("bench",), ("demo",), ("demo", "hang"), ("certify", "--report", "-"), ("simulate", "--check")]
    for words in [*commands, *([("tune",)] if variable != "SAGELLM_ALGORITHM" else [])]:  # tune sets its own rules
        assert run(*words) == 2, words
        err = capsys.readouterr().err
        assert err.startswith(f"torch-sagellm {words[0]}: {said}") and len(err.splitlines()) == 1, err
    assert run("doctor") == 1
    found = capsys.readouterr()
    assert "not run: no group can be made" in found.out and f"error: {variable}=" in found.out and not found.err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("sagellm: the option fusion is 3"), "the option fusion is 3"),
        (RuntimeError("sagellm all_reduce: rank 1 ended"), "rank 1 ended"),
        (MemoryError(), "out of memory: no reason was given"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (
            RuntimeError("[enforce fail] can't allocate memory: 8\nframe #0"),
            "out of memory: [enforce fail] can't allocate",
        ),
    ],
)
def test_a_rank_says_in_one_line_what_it_knows_the_cause_of(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object) -> int:
        raise error

    monkeypatch.setattr(ranks, "end_with_parent", lambda: None)
    monkeypatch.setattr("torch_sagellm.cli.main._close_stdout", lambda: None)
    monkeypatch.setattr("torch_sagellm.cli.main._run_rank", failing)
    assert main(["_rank", "bench", "1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"torch-sagellm bench, rank 1: {said}") and len(err.splitlines()) == 1, err
    # Under a launcher the command itself is the rank. A bug of ours keeps its traceback.
    monkeypatch.setattr(COMMANDS["bench"], "run", failing)
    if str(error).startswith("sagellm"):
        assert run("bench") in (1, 2) and capsys.readouterr().err == f"torch-sagellm bench: {said}\n"
    monkeypatch.setattr(COMMANDS["bench"], "run", lambda _: exec("raise RuntimeError('sagellm: internal error: x')"))
    with pytest.raises(RuntimeError, match="internal error"):
        run("bench")


def test_a_warning_of_the_package_is_one_line_and_others_are_as_usual(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warns(_: object) -> int:
        warnings.warn("sagellm: half of it works", RuntimeWarning, stacklevel=2)
        warnings.warn("sagellm: x. Until then groups of this backend are refused", RuntimeWarning, stacklevel=2)
        warnings.warn("of another package", RuntimeWarning, stacklevel=2)
        return 0

    usual: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: usual.append(str(message)))
    monkeypatch.setattr(COMMANDS["table"], "run", warns)
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = before  # pytest records instead
        assert run("table") == 0 and warnings.showwarning is before
    assert capsys.readouterr().err == "torch-sagellm table: warning: half of it works\n"
    assert usual == ["of another package"]


def test_a_name_that_only_gloo_lets_ours_serve_ends_commands_that_use_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr has what the package reports, in one line of the command, not as a Python warning with a line of code."""
    environment = {**os.environ, "SAGELLM_AS": "garbage"}
    words = [sys.executable, "-m", "torch_sagellm", "table"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    said = "torch-sagellm table: SAGELLM_AS='garbage', expected one of gloo, or unset\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_sizes_are_exact_and_bounded() -> None:
    assert arguments.size(str((1 << 60) + 1)) == (1 << 60) + 1
    for text in ("-1", "1e6", "4EiB", str(1 << 62)):
        with pytest.raises(argparse.ArgumentTypeError):
            arguments.size(text)


def test_no_processes_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tells apart processes that have not started yet, that have exited without an error, and that run on other
    hosts."""
    from torch_sagellm.observe import watch

    folder = ("--dir", str(tmp_path))
    assert run("health", *folder) == 1 and "no process has written its status" in capsys.readouterr().out
    together = [threading.Thread(target=watch.leave_in_order, args=(tmp_path,)) for _ in range(20)]
    for each in together:
        each.start()
    for each in together:
        each.join()
    assert run("health", *folder) == 1 and "20 processes have ended in order" in capsys.readouterr().out
    assert run("top", *folder, "--once") == 1 and "20 processes have ended in order" in capsys.readouterr().out
    (tmp_path / f"{watch.PREFIX}elsewhere-1.json").write_text(
        '{"format": 1, "written": 9e9, "every": 1, "groups": [], "process": {"rank": 3, "pid": 1, "host": "elsewhere", '
        '"boot_id": "b", "pid_namespace": "n", "began": 1}}'
    )
    assert run("health", *folder) == 1 and "1 of elsewhere have: --all-hosts" in capsys.readouterr().out
    for command in (("health",), ("top", "--once")):
        assert run(*command, *folder, "--rank", "2") == 1 and "there are those of 3" in capsys.readouterr().out


def test_every_command_is_covered() -> None:
    """`options` returns options of every command that has options with values."""
    assert {command for command, _ in options()} >= set(COMMANDS) - {"info", "trace"}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_help_fits_into_80_columns_and_has_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*([command] if command else []), "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > 80]
    assert "examples:" in lines and any(line.startswith(f"  torch-sagellm {command}") for line in lines), lines


def test_what_is_printed_fits_into_the_terminal_and_is_not_cut_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [("explain", "broadcast", "64KiB", "--ranks", "4"), ("table", "--ranks", "4"), ("info",)]
    words += [("simulate", "--sizes", "8", "--ranks", "4"), ("simulate", "--strategy", "dp", "--params", "7B")]
    plain = {}
    for each in words:
        assert run(*each) == 0
        plain[each] = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(show, "is_terminal", lambda _: True)
    for each in words:
        assert run(*each) == 0
        lines = capsys.readouterr().out.splitlines()
        # A single word that is longer than the line, such as a path, is not broken.
        assert not [line for line in lines if len(line) > 80 and " " in line.strip()], each
        if each[0] != "simulate":
            said = [
                sorted(word for word in text.split() if not word.isdecimal()) for text in (" ".join(lines), plain[each])
            ]
            assert said[0] == said[1], each  # numbers such as the free memory may differ between two runs


def test_findings_fit_into_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SAGELLM_RING", "x")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(show, "is_terminal", lambda _: True)
    for words, text in (("--no-self-test", "operations\n  fix: "), ("--peer=127.0.0.1:1", "listens at port 1 of")):
        run("doctor", words)
        said = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
        assert text in said and not [line for line in said.splitlines() if len(line) > 80 and " " in line.strip()], said


def test_a_narrow_terminal_shows_every_figure_of_the_wide_table() -> None:
    """A narrow table leaves out only the number of elements, which follows from the size and the type."""
    job = bench.Job(["reduce_scatter"], [1 << 33], "bfloat16", "prod", 5, 20, ["sagellm", "gloo"], "cpu")
    names = ("sagellm", "gloo")
    rows = [
        bench.Row("reduce_scatter", each, 1 << 33, 1 << 32, "bfloat16", "prod", 3.5, 2.25, 4.5, 7) for each in names
    ]
    for head, lines, most in (
        (bench._head(job, 2, ""), bench.line(rows), 135),
        (bench._head(job, 2, "", True), "", 80),
    ):
        text = lines or bench.line(rows, narrow=True)
        assert max(map(len, [*head, *text.splitlines()])) <= most, (head, text)
        assert len(text.splitlines()[0]) == len(head[-1]) and text.count("3500000.00") == 2 and "1.00x" in text, text
        assert ("4294967296" in text) == bool(lines)


def test_a_model_says_one_digit() -> None:
    found = torch_sagellm.explain("all_reduce", "1MiB", ranks=2)
    for other in found.rejected:
        for about, number in re.findall(r"(about )?([\d.]+) [num]?s", other.why_not):
            assert about and len(number.replace(".", "").lstrip("0").rstrip("0")) <= 1, other
