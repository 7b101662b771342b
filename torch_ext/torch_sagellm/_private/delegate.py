"""Connects the ranks of a group: through a delegate if the engine cannot serve them, or through the link between hosts.

The delegate is created here, in Python, because torch ships the classes of its groups without their headers. The C++
side then calls it as a c10d backend and releases it in shutdown.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch_sagellm._private import descriptors, load, variables
from torch_sagellm._private.texts import printable

#: Prefix of the delegate's keys, which must differ from the rendezvous's keys in the same store.
PREFIX = "delegate"
DEFAULT = "gloo"
#: Seconds from the timeout until the caller stops waiting for the other ranks' errors, because the store may be gone.
GRACE = 1.0
#: Seconds between two checks in the store for the failure of another rank.
LOOK = 0.1


def _gloo(c10d: Any, store: Any, options: Any, addresses: list[str]) -> Any:
    from torch_sagellm._private import address
    from torch_sagellm.api import serve_as

    if not addresses:
        raise RuntimeError("it has no address")
    _require_descriptors(options)
    kind = serve_as.real()  # torch's own gloo, even if this package serves that name
    asked = kind._Options()
    asked._timeout = options.timeout
    # torch sets these two on its gloo groups; they appear in messages.
    asked.global_ranks_in_group = options.global_ranks_in_group
    asked.group_name = options.group_id
    asked._devices = address.devices(addresses)
    asked._threads = 2 * len(addresses)  # as torch does
    return kind(store, options.group_rank, options.group_size, asked)


def _require_descriptors(options: Any) -> None:
    """Raises a DistBackendError if too few descriptors are left for a gloo group.

    gloo's thread would end the process if it got no descriptor.
    """
    from torch.distributed import DistBackendError

    # A gloo group needs one connection to each other rank, its own port, its event loop, and files that it opens
    # temporarily.
    needed = options.group_size + 8
    if lack := descriptors.lack(needed):
        raise DistBackendError(
            f"sagellm: group {options.group_id!r} needs a gloo group, which opens about {needed} files, and of the "
            f"{lack.limit} that this process may open {lack.used} are in use; raise the limit (ulimit -n)"
        )


def _mpi(c10d: Any, store: Any, options: Any, addresses: list[str]) -> Any:
    return c10d.ProcessGroupMPI.create(options.global_ranks_in_group)


def _ucc(c10d: Any, store: Any, options: Any, addresses: list[str]) -> Any:
    return c10d.ProcessGroupUCC(store, options.group_rank, options.group_size, timeout=options.timeout)


#: Each creator works in every supported torch without torch's private functions.
BUILT_IN: dict[str, tuple[str, Callable[[Any, Any, Any, list[str]], Any]]] = {
    "gloo": ("ProcessGroupGloo", _gloo),
    "mpi": ("ProcessGroupMPI", _mpi),
    "ucc": ("ProcessGroupUCC", _ucc),
}


def check(name: str) -> str:
    """Returns the name in lower case, or raises a ValueError. Every rank calls this before the ranks wait for each
    other."""
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
    """Stands in for the struct in which torch describes a group, with the fields that this package reads."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


def make(name: str, options: Any, decided: Any, addresses: list[str], links: int = 1, link: str = "tcp") -> list[Any]:
    """Connects the ranks of a group that spans hosts, or creates a group's delegate. Every rank calls it.

    It succeeds on all ranks, or all ranks raise the same error, because a rank that fails publishes its error in the
    store. This takes at most a second longer than the group's timeout. With gloo alone, a rank could wait for a peer
    for five timeouts.
    """
    wanted = check(name)

    def run() -> list[Any]:
        if decided.spans_hosts:
            paths = [addresses[number % len(addresses)] for number in range(links)] if links > 1 else []
            decided._connect(addresses[0], " ".join(paths), link)
            return []
        # Keys of an earlier attempt at the same group may be in the store, and gloo would use them.
        made = build(wanted, options, f"{PREFIX}/{decided.id}", addresses)
        if wanted == DEFAULT:
            # After this barrier every rank has its delegate, so no rank goes on with a group that others lack.
            made.barrier().wait(options.timeout)
        return [made]

    return Making(options, decided, addresses).result(run)


def build(wanted: str, options: Any, prefix: str, addresses: list[str]) -> Any:
    """Creates a group of torch's over the same ranks. ``prefix`` separates the keys of several groups in one store."""
    from torch.distributed import PrefixStore
    from torch.distributed import distributed_c10d as c10d

    return BUILT_IN[wanted][1](c10d, PrefixStore(prefix, options.store), options, addresses)


class Making:
    """One rank's part in connecting a group.

    torch's calls that wait for peers ignore signals. So they run on a daemon thread, which may keep waiting after an
    error and does not prevent the program from ending. A second thread checks in the store whether a rank has failed,
    so the caller never waits in a store request either.
    """

    def __init__(self, options: Any, decided: Any, addresses: list[str]) -> None:
        self.options, self.decided = options, decided
        self.seconds = options.timeout.total_seconds()
        self.own = f"rank {options.group_rank} on host {os.uname().nodename} ({', '.join(addresses) or 'no address'})"
        # Whether failures are published. Ranks that have not met have no id for their attempt to create the group.
        # Without an id they would find the failure of an earlier attempt under the same keys.
        self.tells = bool(decided.id.strip("0"))
        self._ended: queue.SimpleQueue[tuple[list[Any], str, BaseException | None]] = queue.SimpleQueue()
        self._over = threading.Event()

    def result(self, run: Callable[[], list[Any]]) -> list[Any]:
        from torch.distributed import DistBackendError

        limit = self.seconds + GRACE
        for body in (lambda: self._make(run), self._listen):
            threading.Thread(target=body, name="sagellm-delegate", daemon=True).start()
        try:
            made, text, error = self._ended.get(timeout=min(limit, threading.TIMEOUT_MAX))
        except queue.Empty:
            made, error = [], None
            text = self._timed_out()
        finally:
            self._over.set()
        if text:
            raise DistBackendError(text) from error
        return made

    def _make(self, run: Callable[[], list[Any]]) -> None:
        load.extension()._outlive_python()
        try:
            made = run()
        except BaseException as error:  # passed to the caller, and published to the other ranks
            own = self._failure(str(error).strip().partition("\n")[0])
            self._ended.put(([], self._first(own), error))
        else:
            self._ended.put((made, "", None))

    def _first(self, own: str) -> str:
        """Publishes this rank's error, and returns the error of the rank that failed first, which may be this one."""
        if not self.tells:
            return own
        with contextlib.suppress(Exception):  # the store itself may be what failed
            for _ in range(10):  # the first rank to fail may be about to write its text
                if text := printable(self.decided._tell_failure(own)):
                    return text
                time.sleep(0.02)
        return own

    def _listen(self) -> None:
        """Checks whether another rank has failed.

        Publishes a failure when the timeout is over, because gloo does not notice the timeout if no peer answers. All
        ranks ask one store, so in a large group each rank asks less often.
        """
        load.extension()._outlive_python()
        pause = LOOK * max(1.0, self.options.group_size / 32)
        end = time.monotonic() + self.seconds
        text = ""
        while self.tells and not text and not self._over.wait(max(0.0, min(pause, end - time.monotonic()))):
            if time.monotonic() >= end:
                text = self._first(self._timed_out())
            else:
                try:
                    text = printable(self.decided._told_failure())
                except Exception:  # the store is gone; the caller gets that error elsewhere
                    return
        if text:
            self._ended.put(([], text, None))

    def _timed_out(self) -> str:
        return self._failure(f"Timed out after {self.seconds:g} s")

    def _failure(self, what: str) -> str:
        text = (
            f"sagellm: group {self.options.group_id!r} of {self.options.group_size} ranks: {self.own} could not "
            f"connect with the others: {what}"
        )
        if "UCX" in what or variables.LINK in what:
            return text  # it says what to do
        return (
            f"{text}. Every rank must reach every other at its address, at any port: check "
            "firewalls and routes (`torch-sagellm doctor --peer` does), or set GLOO_SOCKET_IFNAME on every rank to the "
            "interface that leads to the other hosts"
        )
