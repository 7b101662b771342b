"""The command line: what all commands share, and info, doctor, tune, table and explain. Other commands have their own
files."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys

import pytest
import torch
from harness import IS_GLOO, run_warm

from torch_sagellm._private import load, nearest
from torch_sagellm.cli import show
from torch_sagellm.cli.main import COMMANDS, WITHOUT_TORCH, _parse, main

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(IS_GLOO, reason="gloo: this is about the package's own choice"),
    pytest.mark.usefixtures("cache"),
]
TABLE = "all_reduce:0-4KiB=slots 3000 ns; start 3000 ns\nall_reduce:4097-=rounds(64KiB) 9000 ns; start 12000 ns"


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m torch_sagellm``."""
    return run_warm("-m", "torch_sagellm", *words)


def test_doctor_prints_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-self-test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    for name in ("sagellm", "torch", "python", "cores", "memfd", "pidfd", "kernel"):
        assert name in names, lines


def test_doctor_lets_two_ranks_talk() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_sagellm", "doctor"],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks: passed" in done.stdout and "all_reduce of 8 B" in done.stdout


def test_doctors_ranks_compute_with_one_thread_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more threads, two ranks on two cores would compete with spinning threads, and an all_reduce would seem a
    hundred times slower."""
    from torch_sagellm.cli import doctor, ranks

    given: list[str] = []

    def run(*_: object, environment: dict[str, str], **__: object) -> tuple[list[ranks.Ended], None]:
        given.append(environment["OMP_NUM_THREADS"])
        return [], None

    monkeypatch.setattr(ranks, "run", run)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert doctor.self_test() == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert doctor.self_test() == 0 and given == ["1", "3"]


def test_without_a_command_all_are_named_and_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2 and f"which command? One of {', '.join(COMMANDS)}" in capsys.readouterr().err
    assert main(["--version"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"torch-sagellm {load.version()}"
    assert main(["--version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == load.version() and found["torch"] == torch.__version__, found
    assert found["commit"] == load.commit() and found["serves"] == load.minors(), found
    assert found["extension"].startswith("_C.") and found["kernels"] in ("portable", "avx2", "avx512"), found
    assert [line.split()[0] for line in others] == list(found)[1:]
    with pytest.raises(SystemExit) as end:
        main(["--version", "info"])
    assert end.value.code == 2 and "--version stands alone, without info" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["--json"])
    assert end.value.code == 2 and "--json stands after --version" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["--verson"])
    assert end.value.code == 2 and "did you mean '--version'?" in capsys.readouterr().err


def test_every_help_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    """Every option in an example must exist, for the program and for every command."""
    for name in ("", *COMMANDS):
        with pytest.raises(SystemExit) as end:
            main([*([name] if name else []), "--help"])
        text = capsys.readouterr().out
        assert end.value.code == 0 and "examples:" in text, name
        # Joins a command that continues after a backslash.
        whole = re.sub(r" \\\n\s*", " ", text.partition("examples:")[2])
        for line in whole.splitlines():
            words = shlex.split(re.split(r"\s{2,}", line.strip())[0]) if "sagellm" in line and name else []
            if "torch-sagellm" in words and "COMMAND" not in words:
                parsed = _parse(words[words.index("torch-sagellm") + 1 :])
                assert parsed.command in COMMANDS, line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("doctr",), "did you mean 'doctor'?"),
        (("doctor", "--no-selftest"), "did you mean '--no-self-test'?"),
        (("bench", "--op", "all_redcue"), "did you mean 'all_reduce'?"),
        (("simulate", "--op", "all_redcue"), "did you mean 'all_reduce'?"),
        (("bench", "--preset", "quik"), "did you mean 'quick'?"),
        (("explain", "all_reduce_fast", "8"), "did you mean 'all_reduce'?"),
        (("explain", "all_reduce", "8", "--dtype", "float23"), "did you mean 'float32'?"),
        (("simulate", "--algorithms", "rign"), "did you mean 'ring'?"),
    ],
)
def test_a_typo_is_answered_by_the_nearest_word(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(list(words))
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and expected in said and len(said.splitlines()) == 1, said


def test_a_word_that_is_near_nothing_gets_no_guess() -> None:
    assert nearest.meant("xyzzy", ["all_reduce", "broadcast"]) == ""


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_colours_appear_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert show.paint("late", "red", io.StringIO()) == "late"
    assert show.paint("late", "red", Screen()) == "\x1b[31mlate\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert show.paint("late", "red", Screen()) == "late"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert show.paint("late", "red", Screen()) == "late"


def test_a_line_is_cut_by_what_a_terminal_shows_of_it() -> None:
    assert show.clip("\x1b[31mthis is late\x1b[0m now", 7) == "\x1b[31mthis is\x1b[0m"
    assert show.clip("\x1b[1mshort\x1b[0m", 7) == "\x1b[1mshort\x1b[0m" and show.clip("plain text", 5) == "plain"


def test_a_progress_bar_is_drawn_over_itself_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for screen, visible, expected in (
        (Screen(), True, [f"[{'.' * 30}] 0/2 first", f"[{'#' * 15}{'.' * 15}] 1/2 second", ""]),
        (Screen(), False, []),
        (io.StringIO(), True, []),
    ):
        monkeypatch.setattr(sys, "stderr", screen)
        bar = show.Bar(2, visible)
        bar.show(0, "first")
        bar.show(1, "second")
        bar.end()
        lines = screen.getvalue().split("\r")[1:]
        assert [line.rstrip() for line in lines[:3]] == expected
        assert "\n" not in screen.getvalue() and all(len(line) == 79 for line in lines[:3])


def test_info_says_what_serves_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__ and found["sagellm"].startswith(load.version())
    assert "shared memory" in found["cpu tensors, one host"] and "gloo" in found['groups called "gloo"']
    assert main(["info"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(found) < 40


@pytest.mark.parametrize("words", [("--help",), *((name, "--help") for name in WITHOUT_TORCH)])
def test_commands_that_only_read_files_do_not_import_torch(words: tuple[str, ...]) -> None:
    code = f"import sys; sys.argv = ['torch-sagellm', *{list(words)}]\nfrom torch_sagellm.cli.main import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.endswith("False\n"), done.stdout + done.stderr


def test_a_reader_that_has_enough_ends_a_command_quietly() -> None:
    words = f"{shlex.quote(sys.executable)} -m torch_sagellm --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_command_line_explains_and_prints_the_table() -> None:
    done = cli("explain", "all_reduce", "1MiB", "--ranks", "2", "--dtype", "bfloat16")
    assert done.returncode == 0 and "all_reduce of 1MiB on 2 ranks: rounds(" in done.stdout
    load.extension().save_table(2, "2026-11-21", TABLE)
    done = cli("table")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["all_reduce", "over", "4", "KiB", "rounds(64KiB)", "measured", "9.00", "us"] in rows
    assert any(row[:5] == ["broadcast", "up", "to", "4", "KiB"] for row in rows)
    done = cli("tune", "--dry-run", "--max-size", "4KiB")
    assert done.returncode == 0 and "nothing was measured" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("explain", "all_reduce_fast", "8"), "no operation"),
        (("explain", "all_reduce", "8KB"), "'8KB' is no size"),
        (("table", "--ranks", "1000"), "'1000' is no number of ranks from 1 to 256"),
        (("tune", "--ranks", "1"), "'1' is no number of ranks from 2 to 256"),
    ],
)
def test_the_command_line_says_what_is_wrong(words: tuple[str, ...], expected: str) -> None:
    done = cli(*words)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr
