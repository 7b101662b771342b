"""The command line: doctor, tune, table and explain; `simulate` has a file of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness import IS_GLOO

from sagellm import _load
from sagellm.cli.main import main

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(IS_GLOO, reason="gloo: this is about the package's own choice"),
    pytest.mark.usefixtures("cache"),
]
TABLE = "all_reduce:0-4KiB=slots 3000 ns; start 3000 ns\nall_reduce:4097-=rounds(64KiB) 9000 ns; start 12000 ns"


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m sagellm``."""
    return subprocess.run(
        [sys.executable, "-m", "sagellm", *words], capture_output=True, text=True, timeout=100, check=False
    )


def test_doctor_prints_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-self-test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    for name in ("sagellm", "torch", "python", "cores", "memfd", "pidfd", "kernel"):
        assert name in names, lines


def test_doctor_lets_two_ranks_talk() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sagellm", "doctor"], cwd="/", capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks: passed" in done.stdout and "all_reduce of 8 B" in done.stdout


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["doctor", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0 and "examples:" in capsys.readouterr().out


def test_the_command_line_explains_and_prints_the_table() -> None:
    done = cli("explain", "all_reduce", "1MiB", "--ranks", "2", "--dtype", "bfloat16")
    assert done.returncode == 0 and "all_reduce of 1MiB on 2 ranks: rounds(" in done.stdout
    _load.extension().save_table(2, "2026-11-21", TABLE)
    done = cli("table")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["all_reduce", "4097-", "rounds(64KiB)", "measured", "9.00", "us"] in rows
    assert any(row[:2] == ["broadcast", "0-4KiB"] for row in rows)
    done = cli("tune", "--dry-run", "--max-size", "4KiB")
    assert done.returncode == 0 and "nothing was measured" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("explain", "all_reduce_fast", "8"), "no operation"),
        (("explain", "all_reduce", "8KB"), "'8KB' is no size"),
        (("table", "--ranks", "1000"), "up to 256"),
        (("tune", "--ranks", "1"), "at least 2 ranks"),
    ],
)
def test_the_command_line_says_what_is_wrong(words: tuple[str, ...], expected: str) -> None:
    done = cli(*words)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr
