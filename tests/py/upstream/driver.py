"""Runs torch's own distributed test suite (the one in the wheel) against a backend. Prints one JSON line per test.

    python driver.py BACKEND WORLD_SIZE [TEST ...]

The suite reads its backend from the environment at import and uses the name for two things: to choose which tests a
backend runs, and to make groups. Here it is imported under the name "gloo", so that it chooses the CPU tests; then the
real name replaces "gloo". Ranks are forked from this process, which has imported everything and made no group.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import unittest
from typing import Any


def prepare(backend: str, world_size: int) -> Any:
    """Imports the suite for `backend`, and returns the test class."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size), INIT_METHOD="env://", TEMP_DIR=tempfile.mkdtemp())
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.distributed_test as suite

    torch.set_num_threads(1)
    if backend != "gloo":
        os.environ["BACKEND"] = backend
        suite.BACKEND = Name(backend)
        if not dist.is_backend_available(backend):
            raise SystemExit(f"the backend {backend!r} is not known to torch")
        for names in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
            names.append(backend)

    class TestBackend(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        """The whole suite; ranks are forks of this process."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
            torch.backends.cudnn.flags(enabled=True).__enter__()

    return TestBackend


class Name(str):
    """The backend's name. It also compares equal to "gloo", because tests select their kind of backend by that name."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Lines(unittest.TestResult):
    """Prints each result as it comes."""

    started = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.started = time.monotonic()

    def _line(self, test: unittest.TestCase, status: str, text: str = "") -> None:
        name = test.id().rsplit(".", 1)[-1]
        seconds = round(time.monotonic() - self.started, 2)
        line = {"test": name, "status": status, "seconds": seconds, "text": text[-4000:]}
        print("RESULT " + json.dumps(line), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._line(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._line(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._line(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._line(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]


def main() -> None:
    """Runs the named tests, or all."""
    backend, world_size, *names = sys.argv[1:]
    case = prepare(backend, int(world_size))
    loader = unittest.TestLoader()
    if not names:
        names = list(loader.getTestCaseNames(case))
    unittest.TestSuite(case(name) for name in names).run(Lines())


if __name__ == "__main__":
    main()
