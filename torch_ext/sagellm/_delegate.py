"""torch's own groups that sagellm uses: the delegate, for groups that the engine cannot serve, and the link of hosts.

They are made here, in Python, because torch ships the classes of its groups without their headers; the C++ side then
calls them as c10d backends, and releases them in shutdown.
"""

from __future__ import annotations

import os
import queue
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

#: Keys of the delegate must differ from those of the rendezvous in the same store, and from those of the link.
PREFIX = "delegate"
LINK_PREFIX = "link"
DEFAULT = "gloo"


def _gloo(c10d: Any, store: Any, options: Any) -> Any:
    from sagellm import _serve_as

    _require_descriptors(options)
    # torch's own gloo, also where this package serves its name.
    group = _serve_as.real()(store, options.group_rank, options.group_size, timeout=options.timeout)
    # torch sets this on its gloo groups; it appears in messages.
    group.options.global_ranks_in_group = options.global_ranks_in_group
    group.options.group_name = options.group_id
    return group


def _require_descriptors(options: Any) -> None:
    """DistBackendError where too few are left for a group of gloo: its thread ends the process when it gets none."""
    from torch.distributed import DistBackendError

    # A connection to each other rank; its own port and loop, and what it opens meanwhile.
    needed = options.group_size + 8
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # it opens one itself
        used = limit
    if limit != resource.RLIM_INFINITY and used + needed > limit:
        raise DistBackendError(
            f"sagellm: group {options.group_id!r} needs a gloo group, which opens about {needed} files, and of the "
            f"{limit} that this process may open {used} are in use; raise the limit (ulimit -n)"
        )


def _mpi(c10d: Any, store: Any, options: Any) -> Any:
    return c10d.ProcessGroupMPI.create(options.global_ranks_in_group)


def _ucc(c10d: Any, store: Any, options: Any) -> Any:
    return c10d.ProcessGroupUCC(store, options.group_rank, options.group_size, timeout=options.timeout)


#: Built the same way in every supported torch, so that none of torch's private functions is needed.
BUILT_IN: dict[str, tuple[str, Callable[[Any, Any, Any], Any]]] = {
    "gloo": ("ProcessGroupGloo", _gloo),
    "mpi": ("ProcessGroupMPI", _mpi),
    "ucc": ("ProcessGroupUCC", _ucc),
}


def check(name: str) -> str:
    """The name in lower case, or a ValueError. Every rank must fail here, before the ranks wait for each other."""
    from torch.distributed import distributed_c10d as c10d

    wanted = (name or DEFAULT).lower()
    if wanted not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        raise ValueError(f"sagellm: delegate={name!r} cannot serve CPU tensors; expected one of {known}")
    if not hasattr(c10d, BUILT_IN[wanted][0]):
        raise ValueError(f"sagellm: delegate={name!r} is not part of this torch; it was built without it")
    return wanted


@dataclass(frozen=True)
class Facts:
    """The fields that this package uses of torch's struct of facts about a group."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


def build(name: str, options: Any, prefix: str) -> Any:
    """The built-in group ``name`` over the same ranks. Collective: every rank of the group must call it.

    ``prefix`` keeps several groups over one store apart, and those of different attempts to make a group.
    """
    from torch.distributed import PrefixStore
    from torch.distributed import distributed_c10d as c10d

    wanted = check(name)
    keys = PrefixStore(prefix, options.store)
    return _interruptible(lambda: BUILT_IN[wanted][1](c10d, keys, options))


def _interruptible(make: Callable[[], Any]) -> Any:
    """The result of ``make``; a signal handler that raises ends the wait for it.

    torch's groups wait for their peers in one call that ignores signals, until the group's timeout. So it runs on a
    separate daemon thread, which keeps waiting after Ctrl-C and does not keep the program from ending.
    """
    if threading.current_thread() is not threading.main_thread():
        return make()
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            made = make()
        except BaseException as error:  # any exception is passed to the waiting caller
            done.put((None, error))
        else:
            done.put((made, None))

    threading.Thread(target=run, name="sagellm-delegate", daemon=True).start()
    made, error = done.get()
    if error is not None:
        raise error
    return made
