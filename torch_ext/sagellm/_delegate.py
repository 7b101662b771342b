"""The groups of torch's own: the one that serves what the engine cannot, and the one that links hosts.

It is built here, in Python, because torch ships the classes of its groups without their headers; the C++ side then
calls it as a c10d backend, and lets go of it in shutdown.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

#: Keys of the delegate must not meet the keys of the shared-memory set-up in the same store, nor those of the link.
PREFIX = "delegate"
LINK_PREFIX = "link"
DEFAULT = "gloo"


def _gloo(c10d: Any, store: Any, options: Any) -> Any:
    from sagellm import _serve_as

    # torch's own, also where its name is served by this package.
    group = _serve_as.real()(store, options.group_rank, options.group_size, timeout=options.timeout)
    # What torch sets on a gloo group of its own; it shows in messages.
    group.options.global_ranks_in_group = options.global_ranks_in_group
    group.options.group_name = options.group_id
    return group


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
    """The name in lower case, or a ValueError. Every rank must say no before any rank meets another."""
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
    """What is needed of torch's struct of facts about a group."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


def build_part(
    name: str, prefix: str, store: Any, rank: int, size: int, timeout: timedelta, group: str, ranks: list[int]
) -> Any:
    """``build`` for a group that was made out of another one, in C++, which calls this."""
    return build(name, Facts(store, rank, size, timeout, group, ranks), prefix)


def build(name: str, options: Any, prefix: str = PREFIX) -> Any:
    """The built-in group ``name`` over the same ranks. Collective: every rank of the group must come here.

    ``prefix`` keeps several groups over one store apart.
    """
    from torch.distributed import PrefixStore
    from torch.distributed import distributed_c10d as c10d

    wanted = check(name)
    keys = PrefixStore(prefix, options.store)
    return _interruptible(lambda: BUILT_IN[wanted][1](c10d, keys, options))


def _interruptible(make: Callable[[], Any]) -> Any:
    """What ``make`` returns; a signal handler that raises ends the wait for it.

    torch's groups wait for their peers in one call that hears of no signal, until the group's timeout. So it runs on a
    thread of its own, which after Ctrl-C goes on waiting; it keeps no program from ending.
    """
    if threading.current_thread() is not threading.main_thread():
        return make()
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            made = make()
        except BaseException as error:  # whatever it is, the caller is waiting for it
            done.put((None, error))
        else:
            done.put((made, None))

    threading.Thread(target=run, name="sagellm-delegate", daemon=True).start()
    made, error = done.get()
    if error is not None:
        raise error
    return made
