"""Starts a benchmark once per rank on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def is_rank() -> bool:
    """Whether this process is a rank, started by `run` or by a launcher such as torchrun."""
    return "RANK" in os.environ


@contextmanager
def here() -> Iterator[dict[str, Any]]:
    """Serves the ranks' store from this process; yields the environment by which ranks on this host find the store."""
    # The system chooses the port, as for torchrun, so no free port has to be guessed.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def run(
    count: int, common: Mapping[str, Any], prefixes: Sequence[list[str]] | None = None, words: Sequence[str] = ()
) -> int:
    """Runs this program once per rank; returns the exit code.

    The command of each rank begins with its words in `prefixes` and ends with `words`. If a rank fails, the others are
    terminated.
    """
    common = {**common, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    children = []
    for rank in range(count):
        variables = {**common, "RANK": rank, "LOCAL_RANK": rank}
        environment = os.environ | {key: str(value) for key, value in variables.items()}
        prefix = prefixes[rank] if prefixes else []
        children.append(subprocess.Popen([*prefix, sys.executable, *sys.argv, *words], env=environment))
    try:
        while any(child.poll() is None for child in children):
            if any(child.poll() for child in children):
                time.sleep(2)  # the other ranks may print an error about it first
                break
            time.sleep(0.1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait()
    return next((abs(child.returncode) for child in children if child.returncode), 0)
