"""Helpers for the tests of tensors that peers can map."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import run_fresh

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def usage() -> dict[str, Any]:
    from torch_sagellm._private import load

    return load.extension()._shared_usage()


class Lines(logging.Handler):
    """Collects the lines of our log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("sagellm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def read(self) -> list[str]:
        from torch_sagellm._private import load

        load.extension().drain_log()
        return self.lines


def resident() -> int:
    """Returns the bytes of shared memory in this process's page tables."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssShmem")).split()[1])


def alone(function: Callable[..., Any], env: dict[str, str] | None = None) -> None:
    """Runs `function` in a new process, because the memory that it measures is counted per process."""
    run_fresh(function, 1, env=env or {"SAGELLM_SHARED_BYTES": str(256 * MIB)})
