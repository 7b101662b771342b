"""Recovery after ranks died: the survivors agree on the remaining ranks and create a group of these ranks.

The survivors communicate in rounds through the store of the group that failed. In a round each caller of ``recover``
publishes what it observes. The members are decided by one write to the store: several ranks may try it, but only the
first succeeds (``compare_set``). The members build a group. In the same way they decide whether all of them have it. If
a member dies meanwhile, all start the next round.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_sagellm._private import alive as _alive
from torch_sagellm._private import groups
from torch_sagellm._private.texts import printable
from torch_sagellm.api.errors import CommTimeoutError
from torch_sagellm.observe import log

Result = TypeVar("Result")

#: torch's flag of a shrink: pending operations of the old group end with an error.
ABORT = 1
#: Seconds between two checks of the store.
PAUSE = 0.02
#: Seconds after which the end of a process is known for certain, unless its host is unreachable.
NOTICED = 2.0
#: Seconds after which a rank asks the hosts of ranks that have not called. Most ranks call within this time.
QUIET = 0.2
PREFIX = "sagellm/recover"


def recover(group: Any = None, timeout: float | timedelta = 30.0, leave_silent: bool = False) -> dist.ProcessGroup:
    """Creates a group of the remaining ranks after a rank died or an operation failed. All survivors call it.

    Every rank of ``group`` that is alive calls it, usually where it catches the error of an operation. The ranks agree
    on the remaining ranks, however many die meanwhile. It returns when all remaining ranks have the new group, or
    raises an error on all.

    - Ranks are numbered again, from 0, in the old order. If ``group`` is the default group, the new group replaces it:
      ``get_rank()`` and ``get_world_size()`` return the new numbers, and torch ends all other groups, which must be
      created again by ``new_group``. Otherwise the new group has the old group's global ranks without the ranks that
      are gone.
    - Tensors keep the values that the failed operation left, and its outputs are undefined. Continue from a state that
      all members have, such as the last step or a checkpoint.
    - If nothing has failed in the group and no rank is gone, it returns ``group`` itself. If something has failed but
      no rank is gone (a timeout, different calls), it returns a new group of the same ranks.
    - The new group serves the devices that the old one served. On devices that a vendor's library carries, it creates a
      new communicator at its first call, because the failure has ended the old communicator. (``dist.shrink_group``
      instead lets the library shrink the old communicator.)
    - A rank that is the only one left gets a group of one rank.
    - A rank that is alive but does not call (because it is stopped, or busy elsewhere) is never excluded. After
      ``timeout`` all other ranks get a ``CommTimeoutError`` that names it, and may call again.
    - Ranks of the same host know immediately whether a rank's process exists. Other hosts learn it from a port that
      each process of a group over several hosts, or under a delegate, opens for this purpose. So killed ranks are
      detected within a second, even if all ranks of a host were killed. If a rank of another host has left the group
      and its process continues, it counts as a rank that is alive but does not call.
    - A rank is excluded only on evidence that its process has ended. A host that has become unreachable (its power, its
      network) cannot be distinguished from a host that is cut off but continues. After ``timeout`` all other ranks get
      a ``CommTimeoutError`` that names the ranks of that host. If you know that these ranks are gone, call again with
      ``leave_silent=True`` on all remaining ranks. The same applies to a rank that could open no port; it has logged a
      warning about that.
    - A rank that was excluded and calls later gets an error.

    The store of the group must still exist. With torchrun the store does, because the launcher holds it; a store in a
    rank's process ends with that rank. A group with ``enable_reconfigure`` is torch's own, and recovers by its method
    ``reconfigure``.

    Args:
        group: the group that failed; None means the default group.
        timeout: seconds (or a timedelta) for each of two steps: until the other ranks have called, and until they have
            the new group. It must be longer than a live rank needs to notice the failure and to call.
        leave_silent: if True, ranks that have not called within ``timeout`` and without evidence that they are alive
            count as gone. If they are alive, two groups continue. The value must be the same on all ranks.

    Raises:
        CommTimeoutError: a rank that is not known to be gone did not call, or did not build the group, in time; or the
            store did not answer.
        torch.distributed.DistBackendError: the other ranks continued without this rank; the store is gone; the new
            group could not be created.
        ValueError: the group is of another backend, or this process is not a member of it.

    Example::

        try:
            dist.all_reduce(gradient)
        except dist.DistBackendError:
            torch_sagellm.recover()
            ...  # load the last checkpoint; get_rank() and get_world_size() are new
    """
    base = dist.group.WORLD if group is None else group
    if base is None or base is dist.GroupMember.NON_GROUP_MEMBER or base not in c10d._world.pg_map:
        raise ValueError("sagellm recover: this process is no member of the group, or the group was destroyed")
    backend = groups.backend_of(base)
    if backend is None:
        raise ValueError(
            f"sagellm recover: the group is of backend {dist.get_backend(base)!r}, expected one that sagellm serves"
        )
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if seconds <= 0:
        raise ValueError(f"sagellm recover: timeout is {timeout}, expected more than 0 seconds")
    with _Requests(seconds) as requests:
        members, made = _converse(backend, requests, seconds, leave_silent)
    if made is None:
        return base
    return _take_over(base, backend, members, made)


def _converse(backend: Any, requests: _Requests, seconds: float, leave_silent: bool) -> tuple[list[int], Any]:
    with _alive.Watch() as watch:
        return _Conversation(backend, requests, watch, seconds, leave_silent).run()


def _take_over(base: Any, backend: Any, members: list[int], made: Any) -> Any:
    """Replaces the old group by the new backend in torch's tables, as ``shrink_group`` does. Local."""
    of_default = base is c10d._get_default_group()
    ranks = dist.get_process_group_ranks(base)
    gone = {ranks[place] for place in range(len(ranks)) if place not in members}
    served = [kind for kind in base._device_types if groups.own(base._get_backend(kind)) is backend]
    info: Any = {"process_group": base, "is_default_group": of_default}
    new = c10d._finalize_shrunk_group(info, gone, made)
    for kind in served:
        if kind not in new._device_types:  # torch has registered the new backend for only one type
            new._register_backend(kind, dist.ProcessGroup.BackendType.CUSTOM, made)
    if of_default:
        # torch keeps the old global ranks next to the new numbers; later groups are requested by the new numbers.
        c10d._world.pg_group_ranks[new] = {rank: rank for rank in range(made.size())}
    log.logger.warning("recovered: ranks %s of %d go on as a group of %d", members, len(ranks), made.size())
    return new


class _Requests:
    """Sends requests to a store on a separate thread, because the store's client waits for an answer without a
    deadline."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="sagellm-recover-store", daemon=True).start()

    def __enter__(self) -> _Requests:
        return self

    def __exit__(self, *_: object) -> None:
        self._asked.put(None)

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            request, answer = asked
            try:
                answer.put((request(), None))
            except BaseException as error:  # raised in the thread that asked
                answer.put((None, error))

    def ask(self, request: Callable[[], Result]) -> Result:
        """Returns the result of the request, or raises its error; a CommTimeoutError if there is no answer in time."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((request, answer))
        where = "Start the ranks with torchrun, whose launcher holds the store, so that no rank's end takes it away"
        try:
            value, error = answer.get(timeout=self.seconds)
        except queue.Empty:
            text = (
                f"sagellm recover: Timed out after {self.seconds:g} s: the store of the group does not answer. {where}"
            )
            raise CommTimeoutError(text) from None
        if error is not None:
            text = f"sagellm recover: the store of the group is gone ({str(error).splitlines()[0]}). {where}"
            raise dist.DistBackendError(text) from error
        found: Result = value
        return found


@dataclass
class _Heard:
    """The facts that the ranks have published in one round."""

    read: set[int] = field(default_factory=set)
    #: The ranks that called, and those that built their group.
    called: set[int] = field(default_factory=set)
    built: set[int] = field(default_factory=set)
    #: Ranks that some rank knows to be gone; and for each rank, the ranks whose processes it sees.
    gone: set[int] = field(default_factory=set)
    sees: dict[int, set[int]] = field(default_factory=dict)
    #: Whether some rank's group has failed.
    faulty: bool = False
    #: For each rank: why it could not build its group.
    failed: dict[int, str] = field(default_factory=dict)

    def alive(self) -> set[int]:
        """Ranks whose process exists, according to a rank that is not gone itself."""
        return {seen for rank, seen_by in self.sees.items() if rank not in self.gone for seen in seen_by}


class _Conversation:
    """One rank's part of a recovery."""

    def __init__(
        self, backend: Any, requests: _Requests, watch: _alive.Watch, seconds: float, leave_silent: bool
    ) -> None:
        self.backend, self.requests, self.watch, self.seconds = backend, requests, watch, seconds
        self.leave_silent = leave_silent
        self.rank = int(backend.rank())
        self.candidates = list(range(backend.size()))
        self.faulty = bool(backend._has_failed())
        store = backend._store
        self.store = requests.ask(lambda: _own_connection(store))
        self.round = 0
        self.heard = _Heard()
        self.told: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------------- the rounds

    def run(self) -> tuple[list[int], Any]:
        """Returns the members, as ranks of the old group, and the new backend, or None if no new backend is needed."""
        self._end_what_is_under_way()
        self._skip_past_rounds()
        for _ in range(len(self.candidates) + 1):
            self.heard, self.told = _Heard(), {}
            members, fresh = self._agree_on_members()
            if not fresh:
                return members, None
            made = self._build(members)
            if made is not None:
                return members, made
            self.candidates = members
            self.round += 1
        raise dist.DistBackendError("sagellm recover: every attempt lost another rank; call it again")

    def _end_what_is_under_way(self) -> None:
        """Fails the old group. Otherwise a rank might wait for this rank in an operation that does not need the dead
        ranks."""
        if not self.faulty and not self.backend._gone():
            return
        if self.backend.delegate_reason:
            self.backend.shutdown()  # gloo cannot abort, but its connections close
        else:
            self.backend.abort()

    def _skip_past_rounds(self) -> None:
        """Advances to the first round that has not ended, keeping the members that earlier rounds have decided."""
        while (decided := self._read("members")) is not None:
            members, fresh = self._members(decided)
            outcome = self._read("outcome") if fresh else "again"
            if outcome is None:
                return
            if outcome == "all":
                raise dist.DistBackendError("sagellm recover: this group was recovered already; use the new one")
            self.candidates = members
            self.round += 1

    def _members(self, decided: str) -> tuple[list[int], bool]:
        try:
            found = json.loads(decided)
            members, fresh = list(map(int, found["members"])), bool(found["fresh"])
        except (ValueError, KeyError, TypeError) as error:
            raise dist.DistBackendError(
                f"sagellm recover: the store of the group holds no list of members, but {decided[:100]!r}. Somebody "
                "else writes into it"
            ) from error
        if self.rank not in members:
            raise dist.DistBackendError(
                f"sagellm recover: the other ranks went on without rank {self.rank}: {members} are the "
                "members of the new group. End this process, or start it again as a new rank"
            )
        return members, fresh

    def _agree_on_members(self) -> tuple[list[int], bool]:
        """Waits until every candidate has called or is known to be gone. The first rank to see this decides for all.

        With ``leave_silent``, the timeout also ends the wait for ranks that are not known to be alive.
        """
        begin = time.monotonic()
        while True:
            late = time.monotonic() >= begin + self.seconds
            self._look(set(self.candidates) - self.heard.called, begin)
            self._tell(called=True, faulty=self.faulty)
            self._listen()
            missing = set(self.candidates) - self.heard.called - self.heard.gone
            waited_for = missing & self.heard.alive() if self.leave_silent else missing
            if late and waited_for:
                missing_ranks = sorted(waited_for)
                raise CommTimeoutError(self._silent(missing_ranks, "called torch_sagellm.recover()"), missing_ranks)
            if late or not missing:
                members = [rank for rank in self.candidates if rank in self.heard.called - self.heard.gone]
                fresh = len(members) < self.backend.size() or self.heard.faulty
                return self._members(self._decide("members", json.dumps({"members": members, "fresh": fresh})))
            decided = self._read("members")
            if decided is not None:
                return self._members(decided)
            time.sleep(PAUSE)

    def _build(self, members: list[int]) -> Any:
        """Returns the new backend if every member has it, None if a member died meanwhile.

        Raises an error if a member cannot create it.
        """
        building = _Building(self.backend, members, self.seconds, self.round)
        begin = time.monotonic()
        failing = None
        while True:
            self._look(set(members) - self.heard.built, begin)
            self._tell(built=building.done() and building.error is None, failed=building.failure())
            self._listen()
            outcome = self._read("outcome")
            if outcome is None and self.heard.gone & set(members):
                outcome = self._decide("outcome", "again")
            elif outcome is None and self.heard.failed and failing is None:
                failing = time.monotonic()  # perhaps because a member died, which is detected in under a second
            elif outcome is None and failing is not None and time.monotonic() >= failing + NOTICED:
                rank, text = min(self.heard.failed.items())
                text = f"sagellm recover: rank {rank} could not make the new group: {text}"
                outcome = self._decide("outcome", json.dumps({"error": text}))
            elif outcome is None and self.heard.built >= set(members):
                outcome = self._decide("outcome", "all")
            elif outcome is None and time.monotonic() >= begin + self.seconds:
                silent = [rank for rank in members if rank not in self.heard.built]
                text = self._silent(silent, "built the new group")
                outcome = self._decide("outcome", json.dumps({"error": text, "late": silent}))
            if outcome == "all":
                return building.take(self.backend.options._timeout)
            if outcome == "again":
                return None
            if outcome is not None:
                raise self._failure(outcome)
            building.wait(PAUSE)

    def _failure(self, outcome: str) -> Exception:
        """The error that the ranks have decided to raise. Its class does not depend on its text, because the text may
        quote another rank's error."""
        error: Exception
        try:
            found = json.loads(outcome)
            text, late = printable(found["error"]), found.get("late")
            error = dist.DistBackendError(text) if late is None else CommTimeoutError(text, map(int, late))
        except (ValueError, KeyError, TypeError, AttributeError):
            error = dist.DistBackendError(
                f"sagellm recover: the store of the group holds no outcome, but {outcome[:100]!r}. Somebody else "
                "writes into it"
            )
        return error

    def _look(self, waited_for: set[int], since: float) -> None:
        """Asks other hosts whether the processes of the ranks in ``waited_for`` exist there."""
        if time.monotonic() >= since + QUIET:
            here = {self.rank, *self.backend._gone(), *self.backend._watched()}
            for rank in waited_for - here - self.heard.gone:
                if self.watch.asks(rank):
                    self.watch.follow(rank, self._get(f"{_alive.PREFIX}/{rank}") or "")
        self.watch.look()

    def _silent(self, ranks: list[int], what: str) -> str:
        alive = self.heard.alive()
        states = {rank: "alive" if rank in alive else "not known to be gone" for rank in ranks}
        who = ", ".join(f"rank {rank} ({state})" for rank, state in states.items())
        text = (
            f"sagellm recover: Timed out after {self.seconds:g} s: {who} of the group's {self.backend.size()} ranks "
            f"has not {what}. "
        )
        if set(states.values()) == {"alive"}:
            what = "It is stopped, or busy elsewhere: end it or let it go on"
        else:
            what = (
                "Nothing says that its process has ended: its host does not answer, perhaps because it is down or cut "
                "off. End it or let it go on; if you know that it is gone, leave it out by leave_silent=True"
            )
        return f"{text}{what}, and call recover again on all ranks that are left"

    # -------------------------------------------------------------------------------------------------- the store

    def _key(self, name: str) -> str:
        return f"{PREFIX}/{self.round}/{name}"

    def _read(self, name: str) -> str | None:
        return self._get(self._key(name))

    def _get(self, key: str) -> str | None:
        def read() -> str | None:
            return _read(self.store.get(key)) if self.store.check([key]) else None

        return self.requests.ask(read)

    def _decide(self, name: str, value: str) -> str:
        """Proposes a value; returns the value of the first rank to propose one, which may be this rank."""
        key = self._key(name)
        return self.requests.ask(lambda: _read(self.store.compare_set(key, "", value)))

    def _tell(self, **facts: Any) -> None:
        """Publishes what this rank did and which ranks it sees, if that has changed."""
        gone = self.watch.gone.union(self.backend._gone())
        sees = self.watch.alive.union(self.backend._watched())
        news = {"rank": self.rank, "gone": sorted(gone), "sees": sorted(sees), **facts}
        if news == self.told:
            return
        self.told = news

        def tell() -> None:
            # Reserve an index in the list first. A rank that dies before it writes leaves an empty entry.
            place = self.store.add(self._key("news"), 1)
            self.store.set(self._key(f"news/{place}"), json.dumps(news))

        self.requests.ask(tell)

    def _listen(self) -> None:
        """Reads new entries. Does not wait for an entry that is still empty, but reads it again the next time."""

        def listen() -> dict[int, str]:
            count = self.store.add(self._key("news"), 0)
            keys = {place: self._key(f"news/{place}") for place in range(1, count + 1) if place not in self.heard.read}
            return {place: _read(self.store.get(key)) for place, key in keys.items() if self.store.check([key])}

        for place, text in self.requests.ask(listen).items():
            self.heard.read.add(place)
            # Any process that reaches the store may have written this entry.
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                self._note(json.loads(text))

    def _note(self, news: dict[str, Any]) -> None:
        rank, gone, sees = int(news["rank"]), set(map(int, news["gone"])), set(map(int, news["sees"]))
        self.heard.faulty |= bool(news.get("faulty"))
        self.heard.gone.update(gone)
        self.heard.sees[rank] = sees
        if news.get("called"):
            self.heard.called.add(rank)
        if news.get("built"):
            self.heard.built.add(rank)
        if news.get("failed"):
            self.heard.failed[rank] = str(news["failed"])


def _read(value: bytes) -> str:
    """A value of the store as text."""
    return printable(value.decode(errors="replace"))


class _Building:
    """Creates the new backend on a separate thread, so that a member that dies meanwhile does not block the caller."""

    def __init__(self, backend: Any, members: list[int], seconds: float, attempt: int) -> None:
        self.backend = backend
        self.error: BaseException | None = None
        self._made: Any = None
        self._ended = threading.Event()
        options = backend.options.__copy__()
        options._timeout = timedelta(seconds=seconds)
        # A thread of an attempt that was abandoned may still wait for the same ranks.
        options._attempt = str(attempt)
        without = [rank for rank in range(backend.size()) if rank not in members]
        threading.Thread(target=self._run, args=(without, options), name="sagellm-recover-group", daemon=True).start()

    def _run(self, without: list[int], options: Any) -> None:
        made = None
        try:
            made = self.backend.shrink(without, ABORT, options)
        except BaseException as error:  # published to all members
            self.error = error
        self._made = made
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def failure(self) -> str:
        return "" if self.error is None else str(self.error)

    def wait(self, seconds: float) -> None:
        if self.done():
            time.sleep(seconds)
        else:
            self._ended.wait(seconds)

    def take(self, timeout: timedelta) -> Any:
        """The backend; its operations have ``timeout``, the timeout of the old backend."""
        self._made._set_default_timeout(timeout)
        return self._made


def _own_connection(store: Any) -> Any:
    """A second connection to the same keys, because another thread may be blocked in a request on the first one."""
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, dist.TCPStore):
        return store
    # If the server has ended, torch would try to connect until the timeout of the store, but this connection fails
    # immediately.
    socket.create_connection((inner.host, inner.port)).close()
    return store.clone() if hasattr(store, "clone") else store
