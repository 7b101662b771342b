"""Whether the process of a rank on another host still runs, for `torch_sagellm.recover`.

Each process that has groups over several hosts or under a delegate listens at a port of the groups' address, but never
serves a connection there. The kernel completes the handshake, even if the process is stopped or busy. When the process
ends for any reason, its connections break and a new connection is refused. A refused connection is the only evidence
that the process is gone. A closed connection is no evidence, because the process closes waiting connections to empty
the queue. If a host is unreachable, or the queue of the port is full, no answer comes, and that is no evidence either.
The connections of gloo and of the link prove nothing, because a live rank whose group failed has closed them, too.
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

#: Prefix of the keys in a group's store; one key for each rank.
PREFIX = "sagellm/alive"
#: What a rank without a port publishes instead of its address.
UNKNOWN = "unknown"
#: Backlog of the port: connections that may wait at it, up to the limit of the system. The process closes them when it
#: creates its next group or recovers.
WAITING = 4096
#: Seconds between two attempts to connect to the process of one rank.
PAUSE = 1.0

_lock = threading.Lock()
#: The listening sockets of this process by address. Guarded by `_lock`.
_ports: dict[str, socket.socket] = {}
_told = False


def announce(store: Any, rank: int, addresses: list[str], agreed: bool) -> None:
    """Publishes in the store where this rank's process listens. Every rank calls it when the group is created.

    ``agreed``: all ranks have agreed to use addresses of this kind. Without that agreement a loopback address is not
    published, because on each host it means that host.
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
    """The listening socket of this process at an address; created at the first call."""
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
    """Closes the connections that wait at a port: those of finished recoveries and of strangers.

    A rank that still watches connects again.
    """
    for _ in range(2 * WAITING):  # more may arrive meanwhile
        try:
            connection, _ = port.accept()
        except OSError:  # nothing waits, or there is no descriptor left for it
            return
        connection.close()


def empty() -> None:
    """Closes the waiting connections at all ports of this process."""
    with _lock:
        for port in _ports.values():
            _empty(port)


def _leave_to_parent() -> None:
    """Runs in a forked child: closes the inherited ports, which must not stay open after the parent has ended.

    The child may open its own.
    """
    global _lock, _told
    _lock, _told = threading.Lock(), False
    for port in _ports.values():
        port.close()
    _ports.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@dataclass
class _Place:
    """The socket address at which the process of a rank listens."""

    family: int
    where: Any


def _place(text: str) -> _Place | None:
    """Parses what a rank has announced; None if it is not an address and a port."""
    words = text.split()
    try:
        address, port = words[0], int(words[1])
        with _lock:
            own = next((each for each in _ports if "%" in each), "")
        if "%" in address:  # link-local: the interface may have another name on this host
            address = address.partition("%")[0] + "%" + own.partition("%")[2]
        return _Place(*_address.socket_address(address, port))
    except (IndexError, ValueError, OSError, OverflowError):
        return None


class Watch:
    """Watches the processes of other ranks by connections that stay open as long as this object is in use."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        #: Ranks whose process exists, as their host reported at the last `look`.
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
        """Whether to call `follow` for this rank: no connection is open, it is not gone, and `PAUSE` has passed."""
        return rank not in self._open and rank not in self.gone and time.monotonic() >= self._again.get(rank, 0)

    def follow(self, rank: int, place: str) -> None:
        """Connects, without waiting for the answer, to the port that a rank's process has announced as `place`."""
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
        # Keepalive detects an unreachable host after some seconds; the kernel of a stopped process still answers it.
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
        """Reads the answers that have arrived, and updates `alive` and `gone`."""
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
        """Handles the result of a connection attempt or of a read."""
        if code in (0, errno.EINPROGRESS):
            return
        self.alive.discard(rank)
        self._open.pop(rank).close()
        if code == errno.ECONNREFUSED:
            self.gone.add(rank)
        elif code in (errno.ECONNRESET, errno.EPIPE):
            # Either the process has ended, or it has only closed this connection. A new connection shows which is true.
            self._connect(rank)
