"""Every command with normal, odd and wrong input. A command that is not in ``TABLE`` fails here.

The commands run in this process, because Python and torch take seconds to start. Cases that need a process (a pipe
without a reader, a closed stdout, Ctrl-C, a kill) are tested below with a few processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import IS_GLOO

from torch_sagellm.cli import arguments, bench, certify, demo, doctor, measure, show, tune
from torch_sagellm.cli import ranks as processes
from torch_sagellm.cli.main import COMMANDS, main
from torch_sagellm.observe import timeline, watch

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(IS_GLOO, reason="gloo: this is about the package's own commands"),
    pytest.mark.usefixtures("cache"),
]


@dataclass
class Row:
    """The tests of one command. Words in braces are names of ``files``."""

    #: Arguments with which the command succeeds without starting ranks.
    normal: str
    #: Arguments, the exit code, and words of stderr (or, for a probe's answer, of stdout).
    wrong: list[tuple[str, int, str]]
    #: Arguments with which the command prints one JSON document; empty if it has no JSON output.
    as_json: str = ""
    #: Whether the output must fit into 80 columns.
    fits: bool = True


TABLE: dict[str, Row] = {
    "info": Row("", [("extra", 2, "no argument 'extra'"), ("--jsn", 2, "did you mean '--json'?")], "--json"),
    "doctor": Row(
        "--no-self-test",
        [
            ("--peer ''", 2, "is no HOST"),
            ("--peer host:99999", 2, "'99999' is no port"),
            ("--peer 127.0.0.1:1", 1, "nobody listens at port 1"),
            ("--listen 0", 2, "is no port"),
            ("--listen 70000", 2, "is no port"),
            ("--peer a --listen", 2, "not allowed with"),
            ("--rdzv-conf x", 2, "--rdzv-conf"),
            ("--stall -1", 2, "no number of seconds"),
        ],
        "--no-self-test --json",
    ),
    "demo": Row(
        "",
        [
            ("trai", 2, "did you mean 'train'?"),
            ("hang --steps 3", 2, "belongs to"),
            ("hang --kind stp", 2, "did you mean 'stop'?"),
            ("hang --timeout 1e-9", 2, "too short"),
            ("--save {folder}/none/x.pt", 2, "there is no folder"),
            ("--save /proc/x.pt", 2, "cannot be written"),
            ("--save ''", 2, "the name is empty"),
            ("--save {folder}", 2, "this is a folder"),
            ("--ranks 1", 2, "number of ranks from 2"),
            ("--ranks 256", 2, "--yes starts them"),
        ],
    ),
    "bench": Row(
        "--sizes 8",
        [
            ("--op bcast", 2, "did you mean 'broadcast'?"),
            ("--sizes ''", 2, "is no size"),
            ("--device cuda:7", 2, "expected cpu"),
            ("--json {folder}", 2, "this is a folder"),
            ("--json {folder}/none/x.json", 2, "there is no folder"),
            ("--json /proc/x.json", 2, "cannot be written"),
            ("--json ''", 2, "the name is empty"),
            ("--plot {folder}", 2, "ends with .png"),
            ("--plot {folder}/x.foo", 2, "ends with .png"),
            ("--plot {folder}/none/x.png", 2, "there is no folder"),
        ],
        "--sizes 8 --json",
    ),
    "certify": Row(
        "--report {folder}/new.md --device cpu",
        [
            ("--device cuda:7", 2, "expected cpu"),
            ("--device cpu --report {folder}", 2, "this is a folder"),
            ("--device cpu --report {folder}/none/x.md", 2, "there is no folder"),
            ("--device cpu --json {folder}", 2, "this is a folder"),
            ("--device cpu --json /proc/x.json", 2, "cannot be written"),
        ],
        "--json --report {folder}/new.md --device cpu",
    ),
    "health": Row(
        "--dir {status}",
        [
            ("--dir ''", 2, "the name is empty"),
            ("--dir {empty}", 2, "is no folder"),
            ("--dir {folder}/none --live", 2, "there is no folder"),
            ("--dir {folder}/none", 1, "there is no folder"),
            ("--dir {folder}", 1, "no process has written its status"),
            ("--dir {closed}", 2, "cannot be read"),
            ("--dir {status} --expect -1", 2, "is no number"),
        ],
        "--dir {status} --json",
        fits=False,  # the output ends with a path
    ),
    "top": Row(
        "--dir {status} --once",
        [
            ("--dir ''", 2, "the name is empty"),
            ("--dir {empty} --once", 2, "is no folder"),
            ("--dir {folder}/none --once", 1, "there is no folder"),
            ("--dir {closed} --once", 2, "cannot be read"),
            ("--dir {status} --every 0", 2, "is no interval"),
            ("--dir {status} --once --rank 77", 1, ""),
        ],
        "--dir {status} --json",
        fits=False,  # one row per group, which a terminal clips
    ),
    "trace": Row(
        "{trace} -o {folder}/merged.json",
        [
            ("''", 2, "the name is empty"),
            ("", 2, "arguments are required"),
            ("{folder}/none", 2, "there is no file or folder"),
            ("{empty} -o {folder}/o.json", 2, "it is empty"),
            ("{binary} -o {folder}/o.json", 2, "neither JSON nor a pickle"),
            ("{half} -o {folder}/o.json", 2, "is no trace of write_trace"),
            ("{list} -o {folder}/o.json", 2, "it holds a list"),
            ("{short} -o {folder}/o.json", 2, "it holds no operations"),
            ("/dev/null -o {folder}/o.json", 2, "there is no file or folder"),
            ("{trace} -o {folder}", 2, "this is a folder"),
            ("{trace} -o /proc/x.json", 2, "cannot be written"),
            ("{nothing} -o {folder}/o.json", 1, "hold no operations"),
        ],
        "{trace} -o {folder}/merged.json --json",
        fits=False,  # the output ends with a path
    ),
    "simulate": Row(
        "--ranks 2,16 --sizes 8,1MiB --op allreduce",
        [
            ("--op all_redcue", 2, "did you mean 'all_reduce'?"),
            ("--algorithms ''", 2, "is no algorithm"),
            ("--link x", 2, "is no link"),
            ("--link 1ms,0GB", 2, "must be over 0"),
            ("--ranks ,", 2, "is no number of ranks"),
            ("--plot {folder}", 2, "ends with .png"),
            ("--plot {folder}/none/x.png", 2, "there is no folder"),
            ("--strategy ddp", 2, "did you mean 'dp'?"),
            ("--strategy tp --ranks 3", 2, "no multiple of the 3 ranks"),
            ("--strategy dp --plot x.png", 2, "no effect with --strategy"),
            ("--check --ranks 300", 2, "--check starts from 2 to 8 ranks"),
        ],
        "--ranks 2 --sizes 8 --json",
    ),
    "tune": Row(
        "--dry-run --max-size 4KiB",
        [("--max-size 3", 2, "below 1KiB"), ("--budget nan", 2, "number of seconds"), ("--ranks 1", 2, "from 2 to")],
        "--dry-run --max-size 4KiB --json",
    ),
    "table": Row("--ranks 3", [("extra", 2, "no argument 'extra'"), ("--ranks 0", 2, "from 1 to 256")], "--json"),
    "explain": Row(
        "AllReduce 1MiB",
        [
            ("'' 8", 2, "no operation"),
            ("all_redcue 8", 2, "did you mean 'all_reduce'?"),
            ("all_reduce ''", 2, "is no size"),
            ("all_reduce -1", 2, "'-1' is no size"),
            ("all_reduce 8 --dtype ''", 2, "no type of elements"),
            ("all_reduce", 2, "the bytes are missing"),
            ("barrier 8", 2, "have no effect"),
            ("AllToAll 1MiB", 2, "have no effect"),
        ],
        "all_reduce 8 --json",
    ),
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Files and folders with all kinds of odd content, by name."""
    found = {"folder": tmp_path}
    contents: dict[str, bytes] = {
        "empty": b"",
        "binary": bytes(range(256)) * 8,
        "half": b'{"traceEvents": [',
        "list": b"[]",
        "short": b'{"format": 1}',
        "nothing": b'{"traceEvents": []}',
    }
    for name, content in contents.items():
        found[name] = tmp_path / f"{name}.json"
        found[name].write_bytes(content)
    found["trace"] = tmp_path / "trace.json"
    call = timeline.Slice(0, "0", "all_reduce", 1000, 2000, 2000, {"number": 1, "state": "done"})
    found["trace"].write_text(json.dumps({"traceEvents": timeline.events([call])}))
    found["status"] = tmp_path / "status"
    found["status"].mkdir()
    for at, text in enumerate(("", "{", "[]", '{"format": 1}', '{"format": 1, "process": 3}')):
        (found["status"] / f"{watch.PREFIX}odd-{at}.json").write_text(text)
    own = watch.here()
    about = {"rank": 0, "pid": os.getpid(), "host": os.uname().nodename, "boot_id": own.boot_id}
    about |= {"pid_namespace": own.pid_namespace, "began": int((watch._stat(os.getpid()) or ["0"] * 20)[19])}
    pending = {
        "kind": "all_reduce",
        "number": 1,
        "bytes": 8,
        "state": "pending",
        "since": time.time(),
        "site": "a.py:1",
    }
    group = {
        "name": "0",
        "ranks": [0],
        "rank": 0,
        "kinds": {"all_reduce": 1},
        "pending": pending,
        "last": None,
        "fault": None,
        "waited_for": [],
    }
    group["per_second"] = {"count": 1.0, "bytes": 8.0, "waiting": 0.0}
    status = {"format": 1, "written": time.time(), "every": 60.0, "process": about, "groups": [group]}
    (found["status"] / f"{watch.PREFIX}own.json").write_text(json.dumps(status))
    # root may read every folder, so the answer of `os.access` is replaced.
    found["closed"] = tmp_path / "closed"
    found["closed"].mkdir()
    allowed = os.access
    monkeypatch.setattr(watch.os, "access", lambda path, mode: path != found["closed"] and allowed(path, mode))
    return found


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the start of ranks: commands that measure get a fixed answer."""

    def started(command: str, count: int, *_: object, **__: object) -> tuple[list[processes.Ended], Any]:
        row = bench.Row("all_reduce", "sagellm", 8, 2, "float32", "sum", 1e-6, 1.0, 1.0, 0)
        answers = {"rows": json.dumps([vars(row)]), "found": json.dumps({"calls": 1, "wrong": 0, "refused": []})}
        print(f"{command}: {count} ranks", file=sys.stdout)
        return [processes.Ended("", "")] * count, argparse.Namespace(get=answers.__getitem__)

    for module in (bench, certify, tune, measure):
        monkeypatch.setattr(module.processes, "run", started)
    monkeypatch.setattr(doctor.ranks, "run", started)
    monkeypatch.setattr(demo.ranks, "run_program", lambda *_: [processes.Ended("", "")])
    monkeypatch.delenv("SAGELLM_STATUS_DIR", raising=False)
    monkeypatch.setattr(certify, "report", lambda *_: "# report")


def run(command: str, words: str, files: dict[str, Path]) -> int:
    """Runs a command. Returns its exit code; any other exception fails the test."""
    try:
        return main([command, *shlex.split(words.format(**files))])
    except SystemExit as end:
        return int(end.code or 0)


def test_the_table_has_every_command_and_every_json() -> None:
    assert set(TABLE) == set(COMMANDS), "a new command stands in TABLE, with what is typed wrongly"
    for name, row in TABLE.items():
        parser = argparse.ArgumentParser()
        COMMANDS[name].add_arguments(parser)
        has = any("--json" in action.option_strings for action in parser._actions)
        assert has == bool(row.as_json), f"{name}: --json and as_json go together"
        assert has or name == "demo", f"{name} has no --json"


@pytest.mark.parametrize("command", COMMANDS)
def test_normal_input_at_80_columns_and_in_every_terminal(
    command: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for terminal, variables in ((False, {}), (True, {"NO_COLOR": "1"}), (True, {"TERM": "dumb"})):
        for name in ("NO_COLOR", "TERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(type(sys.stdout), "isatty", lambda _, answer=terminal: answer, raising=False)
        assert run(command, TABLE[command].normal, files) == 0
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err, said
        if TABLE[command].fits and show.is_terminal(sys.stdout):
            assert not [line for line in said.out.splitlines() if len(line) > 80 and " " in line.strip()], said.out


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_input_is_refused_in_one_line(
    command: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for words, code, expected in TABLE[command].wrong:
        got = run(command, words, files)
        said = capsys.readouterr()
        assert got == code, (words, got, said)
        assert expected in said.err + (said.out if code == 1 else ""), (words, said)
        assert code == 1 or (len(said.err.splitlines()) == 1 and not said.out), (words, said)
        assert code == 1 or said.err.startswith(f"torch-sagellm {command}: "), (words, said)
        assert not (files["folder"] / "o.json").exists(), "nothing is written where nothing was merged"


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_fit_into_a_terminal_of_80_columns(
    command: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words, code, _ in TABLE[command].wrong:
        said = []
        for terminal in (False, True):
            monkeypatch.setattr(show, "is_terminal", lambda _, answer=terminal: answer)
            assert run(command, words, files) == code
            said.append(capsys.readouterr().err)
        # A single word that is longer than the line, such as a path, is not broken.
        assert not [line for line in said[1].splitlines() if len(line) > 80 and " " in line.strip()], said
        assert said[0].split() == said[1].split(), said


#: For each mode of a command: the options that have an effect in it. All others are refused there.
MODES: dict[str, set[str]] = {
    "doctor --listen 29512": {"json"},
    "doctor --peer 127.0.0.1:1": {"json"},
    "demo train": {"ranks", "steps", "shared", "save", "yes"},
    "demo hang": {"ranks", "kind", "timeout", "yes"},
    "health --live --dir {status}": {"dir", "rank", "all_hosts", "json"},
    "top --once --dir {status}": {"dir", "rank", "json"},
    "top --json --dir {status}": {"dir", "rank", "once"},
    "simulate --sizes 8": {"op", "ranks", "ranks_per_host", "link", "host", "reduce", "algorithms", "plot", "check"}
    | {"json", "strategy"},
    "simulate --check": {"op", "ranks", "sizes", "algorithms", "json", "strategy"},
    "simulate --strategy tp": {"ranks", "ranks_per_host", "link", "host", "reduce", "json"}
    | {"layers", "hidden", "sequence", "batch", "item"},
}
#: A valid value of each option that is refused in some mode.
VALUES = {"expect": "1", "stall": "1", "every": "1", "group_timeout": "1", "rdzv_conf": "timeout=1", "peer": "a"}
VALUES |= {"steps": "1", "save": "x", "kind": "stop", "timeout": "1", "op": "all_reduce", "sizes": "8", "plot": "x.png"}
VALUES |= {"algorithms": "ring", "link": "1us,1GB", "host": "1us,1GB", "reduce": "1GB", "ranks_per_host": "1"}
VALUES |= {"params": "7B", "kv_hidden": "1", "bucket": "1MiB", "listen": "1"}


@pytest.mark.parametrize("mode", MODES)
def test_an_option_without_an_effect_is_refused(
    mode: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.peer, "listen", lambda _: pytest.fail("it listened"))
    name, *own = mode.split()
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    for action in parser._actions:
        option = next((each for each in action.option_strings if each.startswith("--")), "")
        if not option or option == "--help" or option in own or action.dest in MODES[mode]:
            continue
        value = [] if action.nargs == 0 else [VALUES.get(action.dest, "1")]
        assert run(name, shlex.join([*own, option, *value]), files) == 2, option
        said = capsys.readouterr()
        words = ("no effect with", "an effect with", "belongs to", "not allowed with")
        assert option in said.err and any(each in said.err for each in words) and not said.out, (option, said)


@pytest.mark.parametrize("command", [name for name, row in TABLE.items() if row.as_json])
def test_json_is_one_document_and_nothing_else(
    command: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, TABLE[command].as_json, files) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt, 130, "interrupted"), (BrokenPipeError, 0, ""), (OSError(28, "No space left"), 1, "No space")],
)
def test_what_ends_a_command_ends_it_in_order(
    command: str,
    error: Any,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ended(_: object) -> int:
        raise error

    monkeypatch.setattr(COMMANDS[command], "run", ended)
    words = {"trace": ["x"], "explain": ["all_reduce", "8"]}.get(command, [])
    assert main([command, *words]) == code
    found = capsys.readouterr().err
    assert said in found and len(found.splitlines()) == bool(said), found


def test_a_pipe_a_device_and_a_link_stay_what_they_are(tmp_path: Path, files: dict[str, Path]) -> None:
    """The trace goes into the pipe. If a link points to a file that does not exist yet, the command creates that
    file."""
    pipe, link = tmp_path / "named", tmp_path / "link.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    link.symlink_to("behind.json")
    try:
        assert run("trace", "{trace} -o {folder}/named", files) == 0 and pipe.is_fifo()
        assert b"traceEvents" in os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    arguments.check_output("--json", link)
    assert link.is_symlink() and not (tmp_path / "behind.json").exists()
    for _ in range(2):
        assert run("trace", "{trace} -o {folder}/link.json", files) == 0
        assert link.is_symlink() and "traceEvents" in (tmp_path / "behind.json").read_text()


def test_an_output_is_tried_before_anything_is_measured(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("kept")
    arguments.check_output("--json", there)
    arguments.check_output("--json", tmp_path / "new")
    assert there.read_text() == "kept" and not (tmp_path / "new").exists()
    os.mkfifo(tmp_path / "pipe")
    arguments.check_output("--json", tmp_path / "pipe")  # opening a pipe would wait for a reader


# ------------------------------------------------------------------------------------------------ whole processes


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch_sagellm", *words]


def test_a_closed_or_unread_stdout_ends_quietly(files: dict[str, Path]) -> None:
    line = shlex.join(command("health", "--dir", str(files["status"])))
    for tail in ("| true; exit ${PIPESTATUS[0]}", ">&-", ">&- 2>&-"):
        done = subprocess.run(["bash", "-c", f"{line} {tail}"], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and not done.stderr, (tail, done)


#: Ends by itself after a minute.
RANK = "import os, sys, time\nopen(sys.argv[1] + '/' + str(os.getpid()), 'w')\ntime.sleep(60)"
#: Starts two ranks like a command does. The ranks write their process ids to files.
PARENT = """
import sys
from torch_sagellm.cli import main, ranks
def run(_):
    calls = [["-c", {rank!r}, sys.argv[1]]] * 2
    ranks.MODULE = []
    ranks.start(calls, [dict(__import__("os").environ)] * 2, 60.0, None)
    return 0
main.COMMANDS["info"].run = run
main._prepare = lambda _: None
sys.exit(main.main(["info"]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_ranks_as_well(tmp_path: Path, number: int, code: int) -> None:
    words = [sys.executable, "-c", PARENT.format(rank=RANK), str(tmp_path)]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline and parent.poll() is None:
            time.sleep(0.02)
        parent.send_signal(number)
        _, said = parent.communicate(timeout=60)
    finally:
        parent.kill()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert parent.returncode == code and "Traceback" not in said and len(pids) == 2, said
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
