"""Whether the process of a rank on another host still runs, for `sagellm.recover`.

Each process that has such groups listens at one port, on the address that gloo listens at, and serves nobody there: the
system answers, also for a process that is stopped or busy. When the process ends, however it ends, a connection breaks
and a new one is refused. A host that has gone away without a word answers nothing, which says nothing about its ranks.
gloo's own connections do not tell this: a live rank whose group failed has cut them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import select
import socket
import struct
import threading
import time
from typing import Any

#: Keys in the store of a group, one for each rank.
PREFIX = "sagellm/alive"
#: Connections that nobody takes up wait at the port, up to this number or what the system allows.
WAITING = 4096
#: Seconds until a host that did not answer is asked again.
PAUSE = 1.0
SIOCGIFADDR = 0x8915

_lock = threading.Lock()
_listening: socket.socket | None = None
_looked = False


def announce(store: Any, rank: int) -> None:
    """Tells the other ranks where this one's process listens. Called by every rank when the group is made."""
    global _listening, _looked
    with _lock:
        if not _looked:
            _looked, _listening = True, _listen()
            os.register_at_fork(after_in_child=_leave_to_parent)
        listening = _listening
    place = "" if listening is None else " ".join(map(str, listening.getsockname()[:2]))
    store.set(f"{PREFIX}/{rank}", place)


def _leave_to_parent() -> None:
    """In a forked child, which must not keep the port open when its parent has ended."""
    global _listening
    if _listening is not None:
        _listening.close()
        _listening = None


def _listen() -> socket.socket | None:
    """The port; None where this host has no address by which others reach it, or no descriptor is left."""
    for family, address in _addresses():
        if ipaddress.ip_address(address).is_loopback:
            continue  # it means another host to each
        with contextlib.suppress(OSError):
            port = socket.socket(family, socket.SOCK_STREAM)
            try:
                port.bind((address, 0))
                port.listen(WAITING)
            except OSError:
                port.close()
                continue
            return port
    return None


def _addresses() -> list[tuple[int, str]]:
    """The addresses of this host that gloo takes: of the interface that its variable names, or of the host's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    try:
        if interface:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
            return [(socket.AF_INET, socket.inet_ntoa(answer[20:24]))]
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        (family, str(where[0])) for family, _, _, _, where in found if family in families and "%" not in str(where[0])
    ]


class Watch:
    """What this rank sees of the processes of other ranks, by connections that it keeps open meanwhile."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        #: Those whose process is there, as their host says at this time.
        self.alive: set[int] = set()
        self._open: dict[int, socket.socket] = {}
        self._again: dict[int, float] = {}

    def __enter__(self) -> Watch:
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
        if not place:
            return
        address, port = place.split()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            return
        connection.setblocking(False)
        # A host that goes away without a word is seen after some seconds; it answers also for a stopped process.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._open[rank] = connection
        self._note(rank, connection.connect_ex((address, int(port))))

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
        if code in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE):
            self.gone.add(rank)
