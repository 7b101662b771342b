"""The error of an operation whose deadline passed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import DistBackendError

Result = TypeVar("Result")

#: Recognizes the core's report that the deadline of an operation passed (tests/golden/timeout.txt).
_TIMED_OUT = re.compile(r"\bTimed out after\b")
#: Finds the missing ranks in this report: "rank 1 (pid ...". No parenthesis follows the rank that reports.
_RANK = re.compile(r"\brank (\d+) \(")


class CommTimeoutError(DistBackendError, TimeoutError):  # type: ignore[misc]  # torch's class has no annotations
    """An operation did not end within its timeout.

    It is a ``torch.distributed.DistBackendError``, which programs for torch catch, and a ``TimeoutError``. The text
    names the operation, how long it took, and what each missing rank does. The group has failed on every rank: its
    other operations end with an error, and continuing needs a new group.

    Example::

        try:
            torch_sagellm.safe_all_reduce(torch.ones(4), timeout=60)
        except torch_sagellm.CommTimeoutError as error:
            print("no answer from ranks", error.missing_ranks)
    """

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks that the operation waited for, in ascending order; empty if the text names none."""
        return sorted({int(rank) for rank in _RANK.findall(str(self))})


def translated(error: DistBackendError) -> DistBackendError:
    """The same error, converted to a ``CommTimeoutError`` if it says that a deadline passed."""
    text = str(error)
    if isinstance(error, CommTimeoutError) or not _TIMED_OUT.search(text):
        return error
    return CommTimeoutError(text)


def with_timeouts(call: Callable[[], Result]) -> Result:
    """Returns the result of ``call``; raises a ``CommTimeoutError`` if a deadline passes in it."""
    try:
        return call()
    except DistBackendError as error:
        found = translated(error)
        if found is error:
            raise
        raise found from error
