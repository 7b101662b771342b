"""torch's own groups that sagellm uses: the delegate, for groups that the engine cannot serve, and the link of hosts.

They are made here, in Python, because torch ships the classes of its groups without their headers; the C++ side then
calls them as c10d backends, and releases them in shutdown.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch_sagellm._private import load

#: Keys of the delegate must differ from those of the rendezvous in the same store.
PREFIX = "delegate"
DEFAULT = "gloo"
#: Seconds beyond the timeout after which a caller does not wait for the others' words either: the store may be gone.
GRACE = 1.0
#: Seconds between two looks at the store for the failure of another rank.
LOOK = 0.1


def _gloo(c10d: Any, store: Any, options: Any, addresses: list[str]) -> Any:
    from torch_sagellm._private import address
    from torch_sagellm.api import serve_as

    if not addresses:
        raise RuntimeError("it has no address")
    _require_descriptors(options)
    kind = serve_as.real()  # torch's own gloo, also where this package serves its name
    asked = kind._Options()
    asked._timeout = options.timeout
    # torch sets these on its gloo groups; they appear in messages.
    asked.global_ranks_in_group = options.global_ranks_in_group
    asked.group_name = options.group_id
    asked._devices = address.devices(addresses)
    asked._threads = 2 * len(addresses)  # as torch does
    return kind(store, options.group_rank, options.group_size, asked)


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


def _mpi(c10d: Any, store: Any, options: Any, addresses: list[str]) -> Any:
    return c10d.ProcessGroupMPI.create(options.global_ranks_in_group)


def _ucc(c10d: Any, store: Any, options: Any, addresses: list[str]) -> Any:
    return c10d.ProcessGroupUCC(store, options.group_rank, options.group_size, timeout=options.timeout)


#: Built the same way in every supported torch, so that none of torch's private functions is needed.
BUILT_IN: dict[str, tuple[str, Callable[[Any, Any, Any, list[str]], Any]]] = {
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


def make(name: str, options: Any, decided: Any, addresses: list[str]) -> list[Any]:
    """Connects the ranks of a group that spans hosts, or makes the delegate of one. Every rank of the group calls it.

    It succeeds on all ranks, or all raise the same error, at the latest a second after the group's timeout, because a
    rank that fails publishes its error in the store. With gloo alone, a rank could wait for a peer for five timeouts.
    """
    wanted = check(name)

    def run() -> list[Any]:
        if decided.spans_hosts:
            decided._connect(addresses[0])
            return []
        # Keys of an earlier attempt at the same group may lie in the store, and gloo would believe them.
        made = build(wanted, options, f"{PREFIX}/{decided.id}", addresses)
        if wanted == DEFAULT:
            # When it ends here, every rank has made its own: none of them goes on with a group that others lack.
            made.barrier().wait(options.timeout)
        return [made]

    return Making(options, decided, addresses).result(run)


def build(wanted: str, options: Any, prefix: str, addresses: list[str]) -> Any:
    """The built-in group over the same ranks. ``prefix`` keeps several groups over one store apart."""
    from torch.distributed import PrefixStore
    from torch.distributed import distributed_c10d as c10d

    return BUILT_IN[wanted][1](c10d, PrefixStore(prefix, options.store), options, addresses)


class Making:
    """One rank's part in making torch's groups, which wait for their peers in calls that ignore signals.

    So they are called on a daemon thread, which keeps waiting after an error and does not keep the program from ending.
    Another one asks the store whether a rank has failed, so that the caller never waits in a request, either.
    """

    def __init__(self, options: Any, decided: Any, addresses: list[str]) -> None:
        self.options, self.decided = options, decided
        self.seconds = options.timeout.total_seconds()
        self.own = f"rank {options.group_rank} on host {os.uname().nodename} ({', '.join(addresses) or 'no address'})"
        # Ranks that have not met have no name for their attempt, and would find the failure of an earlier one.
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
        except BaseException as error:  # handed to the caller, and told to the other ranks
            own = self._failure(str(error).strip().partition("\n")[0])
            self._ended.put(([], self._first(own), error))
        else:
            self._ended.put((made, "", None))

    def _first(self, own: str) -> str:
        """The text of the first rank that failed, which may be this one."""
        if not self.tells:
            return own
        with contextlib.suppress(Exception):  # the store may be what failed
            for _ in range(10):  # the first one may be about to write it
                if text := _plain(self.decided._tell_failure(own)):
                    return text
                time.sleep(0.02)
        return own

    def _listen(self) -> None:
        """Asks whether another rank has failed, and tells the others when the time is over, which gloo does not notice
        where nothing answers. All ranks ask one store: with many, each asks less often.
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
                    text = _plain(self.decided._told_failure())
                except Exception:  # the store is gone, which the caller learns elsewhere
                    return
        if text:
            self._ended.put(([], text, None))

    def _timed_out(self) -> str:
        return self._failure(f"Timed out after {self.seconds:g} s")

    def _failure(self, what: str) -> str:
        return (
            f"sagellm: group {self.options.group_id!r} of {self.options.group_size} ranks: {self.own} could not "
            f"connect with the others: {what}. Every rank must reach every other at its address, at any port: check "
            "firewalls and routes (`torch-sagellm doctor --peer` does), or set GLOO_SOCKET_IFNAME on every rank to the "
            "interface that leads to the other hosts"
        )


def _plain(text: str) -> str:
    """A text from the store, to which anyone may write who reaches it: without what a terminal obeys."""
    return "".join(each if each.isprintable() else "?" for each in text)
