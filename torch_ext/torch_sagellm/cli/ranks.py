"""The ranks that a command starts: processes of this program on this host, which meet over loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass
class Ended:
    """A rank that has ended: its output, and its failure, or an empty text."""

    output: str
    failure: str


def run(
    command: str,
    count: int,
    *words: object,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    shown: bool = False,
) -> tuple[list[Ended], Any]:
    """Runs `run_rank(rank, count, port, *words)` of a command on every rank, and ends ranks that take too long.

    Returns how they ended, and the store in which they met. `shown` lets them print where this process does.
    """
    from torch.distributed import TCPStore

    # On a port that the system chooses: a port that is free now may be taken when the ranks look for it.
    store = TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=seconds), wait_for_workers=False)
    deadline = time.monotonic() + seconds
    children: list[subprocess.Popen[str]] = []
    ended = []
    try:
        for rank in range(count):
            called = [
                sys.executable,
                "-m",
                "torch_sagellm",
                "_rank",
                command,
                *map(str, (rank, count, store.port, *words)),
            ]
            children.append(
                subprocess.Popen(
                    called,
                    stdin=subprocess.DEVNULL,
                    stdout=None if shown else subprocess.PIPE,
                    stderr=None if shown else subprocess.STDOUT,
                    text=True,
                    env=os.environ if environment is None else environment,
                )
            )
        for child in children:
            ended.append(_wait(child, deadline, seconds))
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    return ended, store


def _wait(child: subprocess.Popen[str], deadline: float, seconds: float) -> Ended:
    try:
        output, _ = child.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        return Ended(output or "", f"did not end within {seconds:.0f} s and was ended")
    return Ended(output or "", f"ended with status {child.returncode}" if child.returncode else "")


def join(backend: str, rank: int, count: int, port: int, seconds: float, **options: Any) -> Any:
    """In a rank: makes the default group with the others; returns the store."""
    import torch.distributed as dist

    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(LOOPBACK, port, None, False, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit, **options)
    return store
