"""Whether the process of a rank on another host still runs, for `torch_sagellm.recover`.

Each process that has such groups listens at one port of the address that gloo listens at, and serves nobody there: the
system answers, also for a process that is stopped or busy. When the process ends, however it ends, a connection breaks
and a new one is refused, which is the only evidence that it is gone. A connection that is closed in order says nothing:
its place was needed. A host that has gone away without a word answers nothing, and where too many connections wait the
system does not answer, either: both say nothing about the process. gloo's own connections do not tell this: a live rank
whose group failed has cut them.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from torch_sagellm._private import address as _address

#: Keys in the store of a group, one for each rank.
PREFIX = "sagellm/alive"
#: What a rank writes that has no port.
UNKNOWN = "unknown"
#: Connections that wait at the port, up to this number or what the system allows. The next group or recovery of the
#: process takes them away.
WAITING = 4096
#: Seconds until a host that did not answer is asked again.
PAUSE = 1.0

_lock = threading.Lock()
#: By address.
_ports: dict[str, socket.socket] = {}
_told = False


def announce(store: Any, rank: int, addresses: list[str], agreed: bool) -> None:
    """Tells the other ranks where this one's process listens. Called by every rank when the group is made.

    ``agreed``: all ranks take addresses of this kind. Where they have not agreed, that of the loopback interface may
    mean another host to each.
    """
    usable = [each for each in addresses if agreed or not _address.is_loopback(each)]
    why = "this host has no address by which other hosts reach it"
    place = UNKNOWN
    for address in usable:
        try:
            place = f"{address} {_listen(address).getsockname()[1]}"
            break
        except OSError as error:
            why = f"no port can be opened at {address} ({error.strerror or error})"
    if place == UNKNOWN:
        _warn(why)
    store.set(f"{PREFIX}/{rank}", place)


def _warn(why: str) -> None:
    global _told
    from torch_sagellm.observe import log

    if not _told:
        _told = True
        log.logger.warning(
            "%s: other hosts cannot tell whether this process runs, so torch_sagellm.recover "
            "there does not leave it out",
            why,
        )


def _listen(address: str) -> socket.socket:
    """The port of this process at an address."""
    with _lock:
        port = _ports.get(address)
        if port is None:
            family, where = _address.socket_address(address, 0)
            port = socket.socket(family, socket.SOCK_STREAM)
            try:
                port.bind(where)
                port.listen(WAITING)
                port.setblocking(False)
            except OSError:
                port.close()
                raise
            _ports[address] = port
        _empty(port)
        return port


def _empty(port: socket.socket) -> None:
    """Closes what waits at a port, of recoveries that are over and of strangers. Those who look on connect again."""
    for _ in range(2 * WAITING):  # more may come meanwhile
        try:
            connection, _ = port.accept()
        except OSError:  # nothing waits, or there is no descriptor for it
            return
        connection.close()


def empty() -> None:
    """The same for all ports of this process."""
    with _lock:
        for port in _ports.values():
            _empty(port)


def _leave_to_parent() -> None:
    """In a forked child, which must not keep the ports open when its parent has ended, and may open its own."""
    global _lock, _told
    _lock, _told = threading.Lock(), False
    for port in _ports.values():
        port.close()
    _ports.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@dataclass
class _Place:
    """Where the process of a rank listens."""

    family: int
    where: Any


def _place(text: str) -> _Place | None:
    """What a rank has announced; None where that is no address and port."""
    words = text.split()
    try:
        address, port = words[0], int(words[1])
        with _lock:
            own = next((each for each in _ports if "%" in each), "")
        if "%" in address:  # link-local: its interface has another name and number on this host
            address = address.partition("%")[0] + "%" + own.partition("%")[2]
        return _Place(*_address.socket_address(address, port))
    except (IndexError, ValueError, OSError, OverflowError):
        return None


class Watch:
    """What this rank sees of the processes of other ranks, by connections that it keeps open meanwhile."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        #: Those whose process is there, as their host says at this time.
        self.alive: set[int] = set()
        self._places: dict[int, _Place] = {}
        self._open: dict[int, socket.socket] = {}
        self._again: dict[int, float] = {}

    def __enter__(self) -> Watch:
        empty()
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open.values():
            connection.close()

    def asks(self, rank: int) -> bool:
        """Whether `follow` should be called for this rank: nothing is known of it, and it is time to ask."""
        return rank not in self._open and rank not in self.gone and time.monotonic() >= self._again.get(rank, 0)

    def follow(self, rank: int, place: str) -> None:
        """Asks the host of a rank about its process; `place` is what the rank announced. Waits for nothing."""
        self._again[rank] = time.monotonic() + PAUSE
        found = _place(place)
        if found is not None:
            self._places[rank] = found
            self._connect(rank)

    def _connect(self, rank: int) -> None:
        place = self._places[rank]
        try:
            connection = socket.socket(place.family, socket.SOCK_STREAM)
        except OSError:
            return
        connection.setblocking(False)
        # A host that goes away without a word is seen after some seconds; it answers also for a stopped process.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._open[rank] = connection
        try:
            code = connection.connect_ex(place.where)
        except OSError as error:
            code = error.errno or errno.EINVAL
        self._note(rank, code)

    def look(self) -> None:
        """Takes in what the hosts have answered."""
        poll = select.poll()
        for connection in self._open.values():
            poll.register(connection, select.POLLIN | select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        for rank, connection in list(self._open.items()):
            if connection.fileno() not in ready:
                continue
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0:
                try:
                    code = 0 if connection.recv(1) else errno.ECONNRESET
                except BlockingIOError:
                    self.alive.add(rank)
                    continue
                except OSError as error:
                    code = error.errno or errno.ECONNRESET
            self._note(rank, code)

    def _note(self, rank: int, code: int) -> None:
        """What the system said of a connection."""
        if code in (0, errno.EINPROGRESS):
            return
        self.alive.discard(rank)
        self._open.pop(rank).close()
        if code == errno.ECONNREFUSED:
            self.gone.add(rank)
        elif code in (errno.ECONNRESET, errno.EPIPE):
            # The process has ended, or it has closed this connection: a new one tells which.
            self._connect(rank)
