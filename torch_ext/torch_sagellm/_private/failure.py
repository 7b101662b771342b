"""The exception that a failed call on a device raises asynchronously in threads of the program."""

from __future__ import annotations

import os
import threading
from typing import Any


def prepare(threads: list[int], text: str) -> tuple[list[tuple[int, int, int]], Any]:
    """Selects the threads in which to raise the error, and creates its class.

    ``threads`` are system thread ids. Returns two values. The first has a tuple for each id: this id, the target's
    system id, the target's Python ident. If Python does not know the given thread, the target is the main thread: the
    given one has ended, or is one of autograd's threads, which run no code of the program. The second is the
    exception's class, because in another thread Python can raise only a class, not an object.
    """
    main = threading.main_thread()
    known = {_id(each): each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
    told = [known.get(thread, main) for thread in threads]
    return [(given, _id(to), to.ident or 0) for given, to in zip(threads, told, strict=True)], _error(text)


def _id(thread: threading.Thread) -> int:
    """The system's id of a thread.

    For the main thread the system is asked, because in a forked process Python keeps the parent's id.
    """
    return os.getpid() if thread is threading.main_thread() else thread.native_id or 0


def _error(text: str) -> Any:
    """An exception class for one text. The class is named like its base, is caught as its base, and is pickled as its
    base."""
    import torch.distributed as dist

    from torch_sagellm._private import load

    class DistBackendError(dist.DistBackendError):  # type: ignore[misc]  # torch's class has no annotations
        #: Marks our exceptions: code of ours that catches one raises it again.
        of_sagellm = True

        def __init__(self, *given: Any) -> None:
            super().__init__(*(given or (text,)))
            load.extension().told_of_failure()

        def __reduce__(self) -> Any:
            return dist.DistBackendError, self.args

    DistBackendError.__module__ = dist.DistBackendError.__module__
    DistBackendError.__qualname__ = dist.DistBackendError.__qualname__
    return DistBackendError
