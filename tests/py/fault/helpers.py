"""Helpers of the fault tests: what is left on the machine, long runs, waiting for a moment."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def shm_names() -> set[str]:
    """The files in /dev/shm."""
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def nothing_left(before: set[str]) -> None:
    """Fails if /dev/shm holds a name that was not there before, also after a moment (other programs use it too)."""
    until(lambda: shm_names() <= before, 3, f"the end of {shm_names() - before} in /dev/shm")


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def unix_sockets() -> set[str]:
    """Inodes of all unix sockets of this machine."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {line.split()[6] for line in lines}


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Waits for a condition, not for ever."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {timeout} s"
        time.sleep(0.002)


def work_for_ever(sizes: tuple[int, ...] = (10, 5000, 300_000)) -> None:
    """Collectives until one fails."""
    turn = 0
    while True:
        dist.all_reduce(torch.ones(sizes[turn % len(sizes)]))
        turn += 1
