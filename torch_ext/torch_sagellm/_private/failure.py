"""The exception that a failed call on a device raises in the program, in the middle of whatever a thread does."""

from __future__ import annotations

import os
import threading
from typing import Any


def prepare(threads: list[int], text: str) -> tuple[list[tuple[int, int, int]], Any]:
    """Of threads, by their system's ids: the given id, and id and Python's number of the thread that is to be told.

    That is the main thread where Python does not know the given one: it has ended, or, as one of autograd's, runs no
    code of the program. The second value is the exception's class: Python raises a class in another thread, no object.
    """
    main = threading.main_thread()
    known = {_id(each): each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
    told = [known.get(thread, main) for thread in threads]
    return [(given, _id(to), to.ident or 0) for given, to in zip(threads, told, strict=True)], _error(text)


def _id(thread: threading.Thread) -> int:
    """The system's id of a thread. Python keeps that of the parent for the main thread of a forked process."""
    return os.getpid() if thread is threading.main_thread() else thread.native_id or 0


def _error(text: str) -> Any:
    """A class for one text. It looks like its base, is caught as that, and is pickled as that."""
    import torch.distributed as dist

    from torch_sagellm._private import load

    class DistBackendError(dist.DistBackendError):  # type: ignore[misc]  # torch's class has no annotations
        #: Code of ours that is interrupted by it hands it on.
        of_sagellm = True

        def __init__(self, *given: Any) -> None:
            super().__init__(*(given or (text,)))
            load.extension().told_of_failure()

        def __reduce__(self) -> Any:
            return dist.DistBackendError, self.args

    DistBackendError.__module__ = dist.DistBackendError.__module__
    DistBackendError.__qualname__ = dist.DistBackendError.__qualname__
    return DistBackendError
