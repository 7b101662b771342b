"""The error of an operation whose deadline passed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from torch.distributed import DistBackendError

Result = TypeVar("Result")

#: The beginning of the core's report that the deadline of an operation passed (tests/golden/timeout.txt). These words
#: elsewhere in a text mean nothing, because the report of another failure may quote them.
_TIMED_OUT = re.compile(
    r"sagellm: rank \d+ (of group '[^'\n]*' Timed out after \d+(\.\d+)? s in |Timed out waiting for rank \d+ )"
)
#: The lines of this report that are about a missing rank: "  rank 1 (pid ...".
_RANK = re.compile(r"^  rank (\d+) \(", re.MULTILINE)


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

    def __init__(self, text: str = "", missing: Iterable[int] = ()) -> None:
        super().__init__(text)
        self._missing = sorted(set(missing))

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks that the operation waited for, in ascending order; empty if they are not known."""
        return list(self._missing)


def translated(error: DistBackendError) -> DistBackendError:
    """Returns the error, converted to a ``CommTimeoutError`` if its text says that a deadline passed."""
    text = str(error)
    # torch's exceptions carry nothing but a text out of C++.
    if isinstance(error, CommTimeoutError) or not _TIMED_OUT.match(text):
        return error
    return CommTimeoutError(text, map(int, _RANK.findall(text)))


def with_timeouts(call: Callable[[], Result]) -> Result:
    """Returns the result of ``call``; raises a ``CommTimeoutError`` if a deadline passes in it."""
    try:
        return call()
    except DistBackendError as error:
        found = translated(error)
        if found is error:
            raise
        raise found from error
