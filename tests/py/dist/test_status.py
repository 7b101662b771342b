"""Inspecting a running job from outside: each process's status file, and the output of health, top and the RAS
report."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, launch, run_script
from limits import patience

from torch_sagellm.cli import top
from torch_sagellm.cli.main import main
from torch_sagellm.observe import ras, watch

pytestmark = beyond_gloo("writes no status")


def working(ctx: Context) -> None:
    """Calls an all_reduce and then obeys the test's words until "stop"."""
    ctx.init()
    dist.all_reduce(torch.ones(1000))
    ctx.tell("ready")
    while (word := ctx.listen()) != "stop":
        if word == "reduce":
            with contextlib.suppress(Exception):
                dist.all_reduce(torch.ones(1000))
        elif word == "fork":
            child = os.fork()
            if child == 0:
                time.sleep(3)
                os._exit(0)
            os.waitpid(child, 0)
        ctx.tell(word)
    dist.destroy_process_group()


def command(*words: str) -> tuple[int, str]:
    """Runs a command of the package. Returns its exit code and its output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(list(words))
    return code, out.getvalue()


def until(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Polls `what` until its answer is true and returns the answer. Raises an AssertionError with the last answer after
    `seconds`."""
    end = time.monotonic() + patience(seconds)
    while not (found := what()):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def seen(folder: Path, rank: int, call: int) -> Callable[[], Any]:
    """Returns a check: whether the status file of `rank` shows call number `call` or a later one."""

    def look() -> Any:
        for process in watch.read(folder):
            for group in process.groups if process.rank == rank else []:
                if group["last"] and group["last"]["number"] >= call:
                    return group
        return None

    return look


def test_a_job_is_ready_then_waits_then_has_a_fault(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    code, text = command("health", "--dir", str(folder))
    assert code == watch.NOT_READY and f"0 processes in {folder}" in text
    with launch(working, 2, env={"SAGELLM_STATUS_DIR": str(folder)}) as job:
        for rank in range(2):
            job.hear(rank)
        for rank in range(2):
            group = until(seen(folder, rank, 1))
            assert group["ranks"] == [0, 1] and group["rank"] == rank and group["last"]["bytes"] == 4000
            assert group["kinds"] == {"all_reduce": 1} and not group["fault"]
        assert command("health", "--dir", str(folder), "--expect", "2")[0] == watch.READY
        code, text = command("health", "--dir", str(folder), "--expect", "3")
        assert code == watch.NOT_READY and "2 of 3 processes" in text
        assert command("health", "--dir", str(folder), "--live")[0] == 0
        assert (folder.stat().st_mode & 0o777) == 0o700

        # Rank 1 does not call the second all_reduce, so rank 0 shows it as pending.
        job.say(0, "reduce")
        group = until(seen(folder, 0, 2))
        assert group["pending"]["kind"] == "all_reduce" and group["pending"]["state"] == "pending"
        assert command("health", "--dir", str(folder))[0] == watch.READY
        code, text = command("health", "--dir", str(folder), "--stall", "0")
        assert code == watch.FAULT and "all_reduce number 2 has been pending" in text
        assert "; rank 1 has not made it; its last call was all_reduce number 1\n" in text, text
        alone = command("health", "--dir", str(folder), "--stall", "0", "--rank", "0")[1]
        assert "; rank 1 has not made it" in alone, "the ranks that are not judged are named too"
        code, text = command("top", "--dir", str(folder), "--once")
        row = next(line for line in text.splitlines() if line.strip().startswith("0 "))
        assert code == 0 and "all_reduce 2" in row and "pending" in row and "\x1b" not in text
        narrow = top.view(folder, watch.read(folder), time.time(), width=80)
        assert max(map(len, narrow[1:])) <= 80, narrow
        assert narrow[-1].startswith("(hidden, the terminal is narrow: bytes/s") and "calls/s" not in narrow[1], narrow

        # Rank 1 is killed: its process is dead, and rank 0's group has failed. Rank 0 is live, but has a fault.
        job.signal(1, signal.SIGKILL)
        until(lambda: command("health", "--dir", str(folder), "--rank", "1")[0] == watch.DEAD)
        until(lambda: command("health", "--dir", str(folder), "--rank", "0")[0] == watch.FAULT)
        code, text = command("health", "--dir", str(folder), "--rank", "0", "--json")
        judged = json.loads(text)
        assert judged["health"] == "fault" and "rank 1" in judged["findings"][0], judged
        assert command("health", "--dir", str(folder), "--rank", "0", "--live")[0] == 0
        assert command("health", "--dir", str(folder), "--live")[0] == watch.DEAD
        report = json.loads(command("top", "--dir", str(folder), "--json")[1])
        (communicator,) = report["communicators"]
        assert (communicator["size"], communicator["ranks_count"], communicator["missing_ranks_count"]) == (2, 1, 1)
        assert communicator["ranks"][0]["status"]["async_error"] == ras.REMOTE_ERROR
        assert communicator["ranks"][0]["collective_counts"]["AllReduce"] == 1
        assert communicator["missing_ranks"][0]["status"] == {"unresponsive": False, "considered_dead": True}


def test_a_stopped_process_is_told_from_one_that_ended(tmp_path: Path) -> None:
    with launch(working, 2, env={"SAGELLM_STATUS_DIR": str(tmp_path)}) as job:
        for rank in range(2):
            job.hear(rank)
            until(seen(tmp_path, rank, 1))
        job.signal(1, signal.SIGSTOP)
        until(lambda: [each.condition for each in watch.read(tmp_path)] == [watch.RUNNING, watch.STOPPED])
        code, text = command("health", "--dir", str(tmp_path))
        assert code == watch.DEAD and "rank 1" in text and "is stopped by a signal" in text
        job.signal(1, signal.SIGCONT)
        until(lambda: command("health", "--dir", str(tmp_path))[0] == watch.READY)


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    with launch(working, 2, env={"SAGELLM_STATUS_DIR": str(tmp_path)}) as job:
        for rank in range(2):
            job.hear(rank)
            until(seen(tmp_path, rank, 1))
        job.say(0, "fork")
        job.hear(0)
        pids = {each.raw["process"]["pid"] for each in watch.read(tmp_path)}
        assert pids == {job.pid(0), job.pid(1)} and len(list(tmp_path.iterdir())) == 2


PROGRAM = """
import sys, threading, time, torch, torch.distributed as dist
dist.init_process_group("sagellm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
for _ in range({tries}):
    if list(__import__("pathlib").Path({folder!r}).glob("*.json")):
        break
    time.sleep(0.05)
print([thread.name for thread in threading.enumerate() if "sagellm" in thread.name])
print(len(list(__import__("pathlib").Path({folder!r}).iterdir())))
"""


@pytest.mark.parametrize("asked", [True, False])
def test_a_process_that_ends_in_order_leaves_no_file_and_one_that_was_not_asked_none(
    asked: bool, tmp_path: Path
) -> None:
    program = PROGRAM.format(folder=str(tmp_path), tries=200 if asked else 1)
    environment = {"SAGELLM_STATUS_DIR": str(tmp_path)} if asked else {}
    done = run_script(["-c", program], env=environment, warm=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-2:] == [str(["sagellm-status"] if asked else []), str(int(asked))], done.stdout
    assert [each.name for each in tmp_path.iterdir()] == [watch.LEFT] * asked
    assert watch.ended_in_order(tmp_path) == int(asked)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = run_script(
        ["-c", PROGRAM.format(folder=str(tmp_path), tries=1)],
        env={"SAGELLM_STATUS_DIR": str(file / "below")},
        warm=True,
    )
    assert done.returncode == 0 and "no status is written" in done.stdout, done.stdout


def records_of(ctx: Context) -> None:
    ctx.init()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    works = []
    if ctx.rank == 0:
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(6)]
        found = backend._records(2)
        assert [record["number"] for record in found] == [1, 5, 6], found
        assert [record["number"] for record in backend._records()] == [1, 2, 3, 4, 5, 6]
        ctx.store().set("looked", "1")
    else:
        ctx.store().get("looked")
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(6)]
    for work in works:
        work.wait()
    assert [record["number"] for record in backend._records(2)] == [5, 6] and backend.fault == ""
    dist.destroy_process_group()


@pytest.mark.quick
def test_the_last_records_come_with_the_oldest_pending_one() -> None:
    from harness import run_fresh

    run_fresh(records_of, 2)


# ------------------------------------------------------------------------------------------------- without a job


def written(folder: Path, name: str, **changes: Any) -> None:
    """Writes a status file like a process of this host, with the facts in `changes` replaced."""
    here = watch.here()
    about = {"pid": os.getpid(), "began": watch.began(os.getpid()), "host": "here", "rank": 0, "world_size": 1}
    about |= {"boot_id": here.boot_id, "pid_namespace": here.pid_namespace, "program": "p"}
    about |= {key: changes.pop(key) for key in list(changes) if key in about}
    raw = {"format": watch.FORMAT, "written": time.time(), "every": 1.0, "process": about, "groups": []} | changes
    (folder / f"{watch.PREFIX}{name}.json").write_text(json.dumps(raw))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ({}, watch.RUNNING),
        ({"written": 1.0}, watch.SILENT),
        ({"began": 1}, watch.ENDED),  # the process id was reused by another process
        ({"pid": 1 << 30}, watch.ENDED),
        ({"pid": 1 << 30, "boot_id": "another host"}, watch.RUNNING),
        ({"pid": 1 << 30, "pid_namespace": "another container", "written": 1.0}, watch.SILENT),
    ],
)
def test_conditions_of_processes(changes: dict[str, Any], condition: str, tmp_path: Path) -> None:
    written(tmp_path, "one", **changes)
    (tmp_path / "sagellm-other.json").write_text("{}")
    (tmp_path / "sagellm-broken.json").write_text("{")
    assert [each.condition for each in watch.read(tmp_path)] == [condition]


@pytest.mark.quick
def test_a_rank_that_was_started_again_replaces_the_one_that_ended(tmp_path: Path) -> None:
    written(tmp_path, "old", began=1, written=time.time() - 100)
    assert [each.condition for each in watch.read(tmp_path)] == [watch.ENDED]
    written(tmp_path, "new")
    assert [each.condition for each in watch.read(tmp_path)] == [watch.RUNNING]


@pytest.mark.quick
def test_a_probe_is_quick_and_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAGELLM_STATUS_DIR", raising=False)
    assert main(["health"]) == 2
    written(tmp_path, "one")
    monkeypatch.setenv("SAGELLM_STATUS_DIR", str(tmp_path))
    code, text = command("health", "--all-hosts")
    assert code == watch.NOT_READY and "has no group yet" in text
    code, text = command("top", "--once")
    assert code == 0 and "no group" in text and sys.getsizeof(text) < 2000


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.quick
def test_top_draws_over_its_last_table_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "60", "LINES": "20"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    written(tmp_path, "one")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", pause)
    screen = Screen()
    with contextlib.redirect_stdout(screen):
        assert main(["top", "--dir", str(tmp_path), "--every", "7"]) == 130
    assert pauses == [7, 7]
    cleared, *tables = screen.getvalue().split("\x1b[H")
    assert cleared == "\x1b[2J" and len(tables) == 2
    for table in tables:
        lines = table.partition("\x1b[J")[0].split("\n")
        assert "torch-sagellm top" in lines[0] and any("no group" in line for line in lines), lines
        for line in lines:
            shown = line.replace("\x1b[K", "")
            assert len(re.sub(r"\x1b\[[0-9;]*m", "", shown).rstrip()) <= 60, "no line is broken into two"
            assert shown.count("\x1b[0m") * 2 == shown.count("\x1b["), "every colour ends in its line"
