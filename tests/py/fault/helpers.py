"""Helpers of the fault tests: leftovers on the machine, long runs, waiting for a condition."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from limits import patience


def shm_names() -> set[str]:
    """Returns the names of the files in /dev/shm, including those of other programs."""
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def nothing_left(pids: Iterable[int]) -> None:
    """Fails if /dev/shm keeps a file whose name contains this project's name or one of these process ids. (Names that
    torch and Python choose contain process ids.) Files of other programs may appear and disappear meanwhile."""
    ours = re.compile("sagellm|" + "|".join(rf"(?<!\d){pid}(?!\d)" for pid in pids))
    until(lambda: not any(ours.search(name) for name in shm_names()), 3, f"the end of {shm_names()} in /dev/shm")


def shm_files_of(pid: int) -> set[str]:
    """Returns the names of the files in /dev/shm that a process has open or mapped. Deleted files do not count."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    targets = [line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line]
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(os.readlink(fd))
    return {target for target in targets if target.startswith("/dev/shm/") and not target.endswith(" (deleted)")}


def sockets_of(pid: int) -> set[str]:
    """Returns the inodes of the sockets that a process holds."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def unix_sockets() -> set[str]:
    """Returns the inodes of all unix sockets of this machine."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {line.split()[6] for line in lines}


def alive(pid: int) -> bool:
    """Returns whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def has_stopped(pid: int) -> bool:
    """Returns whether SIGSTOP has reached all threads of a process. A thread that runs may continue for some time."""
    try:
        states = [path.read_text().rsplit(")", 1)[1].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False  # a thread has ended just now
    return all(state in ("T", "t") for state in states)


def until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Waits until the condition is true; fails after `timeout` seconds, or more on a busy machine."""
    limit = patience(timeout)
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {limit} s"
        time.sleep(0.002)


def work_for_ever(sizes: tuple[int, ...] = (10, 5000, 300_000)) -> None:
    """Calls collectives until one fails."""
    turn = 0
    while True:
        dist.all_reduce(torch.ones(sizes[turn % len(sizes)]))
        turn += 1
