"""Runs functions of the tests on several ranks, each a fresh process that opens the simulators through ctypes.

A test names a function of its own file; every rank calls it with a :class:`Rank` and returns plain data. No wait is
endless: a job that takes longer than its limit is killed and fails.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build
import numpy as np

HERE = Path(__file__).resolve().parent
#: Seconds within which an expected event occurs, even on a busy machine.
SOON = 20.0
#: Seconds for which a finished rank waits for the other ranks to end.
LAST_LOOK = 5.0


class Library:
    """The functions of one library. Whole numbers travel in 64 bits, which C takes for ints, sizes and pointers."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.handle = ctypes.CDLL(str(path))

    def has(self, name: str) -> bool:
        return hasattr(self.handle, name)

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self.handle, name)

        def call(*arguments: Any) -> int:
            result: int = function(*(ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments))
            return result

        return call

    def text(self, name: str, *arguments: Any) -> str:
        """For functions that return ``const char*``."""
        function = getattr(self.handle, name)
        function.restype = ctypes.c_char_p
        found: bytes = function(*(ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments))
        return found.decode()


@dataclass
class Rank:
    """One rank of a job."""

    rank: int
    size: int
    folder: Path

    def library(self, name: str) -> Library:
        return Library(build.build()[name])

    def publish(self, name: str, data: bytes) -> None:
        unfinished = self.folder / f"new-{name}-{self.rank}"
        unfinished.write_bytes(data)
        unfinished.rename(self.folder / name)

    def fetch(self, name: str) -> bytes:
        file = self.folder / name
        found: bytes = until(lambda: file.read_bytes() if file.exists() else None, name)
        return found

    def share(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Returns on every rank the bytes that rank 0 made."""
        if self.rank == 0:
            self.publish(name, make())
        return self.fetch(name)

    def barrier(self, name: str) -> None:
        self.publish(f"{name}.{self.rank}", b"here")
        for rank in range(self.size):
            self.fetch(f"{name}.{rank}")


def until(look: Callable[[], Any], what: str = "it", limit: float = SOON) -> Any:
    """Polls until the function returns something other than None or False."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        found = look()
        if found is not None and found is not False:
            return found
        time.sleep(0.001)
    raise TimeoutError(f"{what} did not come within {limit} s")


def address(array: np.ndarray[Any, Any]) -> int:
    """Returns the address of the first element, which is a device address too, because device memory is host memory."""
    return int(array.ctypes.data)


class Job:
    """Running ranks. Use it as a context, so that no process is left behind."""

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        environment: dict[str, str] | None = None,
        each: Callable[[int], dict[str, str]] | None = None,
        **arguments: Any,
    ) -> None:
        """
        :param function: of a test file; called as ``function(rank, **arguments)``.
        :param environment: variables of every rank.
        :param each: variables of one rank.
        """
        build.build()
        self.folder = tempfile.TemporaryDirectory(prefix="sagellm-sim-")
        self.size = size
        (Path(self.folder.name) / "arguments").write_text(json.dumps(arguments))
        module = Path(sys.modules[function.__module__].__file__ or "").stem
        self.processes = []
        for rank in range(size):
            command = [sys.executable, str(Path(__file__).resolve()), module, function.__name__, str(rank), str(size)]
            variables = {
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
                **(environment or {}),
                **(each(rank) if each else {}),
            }
            self.processes.append(subprocess.Popen([*command, self.folder.name], env=variables))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait(timeout=10)
        self.folder.cleanup()

    def result(self, rank: int, limit: float = 60.0) -> Any:
        """Returns the value that the rank returned.

        :raises AssertionError: with the rank's traceback, if the rank failed.
        """
        try:
            code = self.processes[rank].wait(timeout=limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} is still running after {limit} s") from None
        file = Path(self.folder.name) / f"result.{rank}"
        assert file.exists(), f"rank {rank} ended with status {code} and no result"
        outcome = json.loads(file.read_text())
        assert "error" not in outcome, f"rank {rank}:\n{outcome['error']}"
        return outcome["value"]

    def results(self, limit: float = 90.0) -> list[Any]:
        """Returns the values of all ranks. Reports the first rank that failed, not ranks that then waited for it."""
        deadline = time.monotonic() + limit
        left = set(range(self.size))
        while left and time.monotonic() < deadline:
            for rank in [rank for rank in left if self.processes[rank].poll() is not None]:
                self.result(rank)
                left.remove(rank)
            time.sleep(0.002)
        assert not left, f"ranks {sorted(left)} are still running after {limit} s"
        return [self.result(rank) for rank in range(self.size)]


def run(
    function: Callable[..., Any], size: int, environment: dict[str, str] | None = None, **arguments: Any
) -> list[Any]:
    """Runs a function on ``size`` ranks, and returns their values."""
    with Job(function, size, environment, **arguments) as job:
        return job.results()


def main() -> None:
    """Runs one rank."""
    module, function, rank, size, folder = sys.argv[1:]
    path = Path(folder)
    try:
        body = getattr(importlib.import_module(module), function)
        arguments = json.loads((path / "arguments").read_text())
        outcome = {"value": body(Rank(int(rank), int(size), path), **arguments)}
    except BaseException:
        outcome = {"error": traceback.format_exc()}
    unfinished = path / f"unfinished.{rank}"
    unfinished.write_text(json.dumps(outcome))
    unfinished.rename(path / f"result.{rank}")
    sys.stdout.flush()
    # The process that made the id serves the store in which the ranks look for each other at first uses. So it stays
    # until the other ranks have ended, or have had time to end.
    end = time.monotonic() + LAST_LOOK
    while time.monotonic() < end and not all((path / f"result.{each}").exists() for each in range(int(size))):
        time.sleep(0.005)
    # Streams that hang on purpose must not delay the end of the process.
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.modules.setdefault("ranks", sys.modules["__main__"])
    main()
