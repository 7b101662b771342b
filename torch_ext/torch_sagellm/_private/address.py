"""The addresses at which other ranks reach this process, and gloo's devices at these addresses.

The delegate, the link and the port of ``alive`` all listen at addresses chosen by one rule. If SAGELLM_SOCKET_IFNAMES,
or else GLOO_SOCKET_IFNAME, names interfaces, only their addresses are used. SAGELLM_SOCKET_IFNAMES also gives each
interface its own connection to each process. If neither variable names interfaces, these addresses are used, best
first:

1. the address by which this host reaches the store of the group: the other ranks reach the same store, so they are
   likely to reach this address, whatever this host's name is;
2. the address of this host's own name in /etc/hosts;
3. the address of the default route, and then of any interface that is up;
4. the loopback interface, which serves ranks of one host.

A rank puts all its addresses into its record of the rendezvous (`Addresses.text`). Rank 0 chooses the kind of address
for all ranks (src/rendezvous/addresses.rs), because the two ends of a connection must be of one address family. Finding
the addresses sends nothing, and looks up no name except the store's, to which this process has connected before.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

VARIABLE = "GLOO_SOCKET_IFNAME"
OURS = "SAGELLM_SOCKET_IFNAMES"
#: The codes of src/rendezvous/addresses.rs.
V4, V6, LOOPBACK_4, LOOPBACK_6 = 4, 6, 14, 16
SIOCGIFADDR = 0x8915
#: Documentation addresses (RFC 5737, RFC 3849), which are routed by the default route. Nothing is sent to them.
ANYWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))

LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))

_lock = threading.Lock()
#: Cached socket addresses of stores, by the host name of the store.
_stores: dict[str, list[tuple[int, Any]]] = {}
#: gloo's devices by address; each listens there for all groups of this process.
_devices: dict[str, Any] = {}


@dataclass(frozen=True)
class Addresses:
    """The addresses of this process by kind, the best kind first."""

    kinds: dict[int, list[str]] = field(default_factory=dict)
    #: The reason if there are no addresses, else "".
    problem: str = ""

    def text(self) -> str:
        """The addresses in the form of the rendezvous's record."""
        if self.problem:
            return f"! {self.problem}"
        return "\n".join(" ".join([str(kind), *found]) for kind, found in self.kinds.items())

    def chosen(self, network: str) -> list[str]:
        """The addresses of the kind on which the ranks agreed; without agreement the best ones of this process.

        ``network`` is the agreement: the kind and the number of addresses that every rank has, such as "4 1", or "".
        """
        if network:
            kind, count = map(int, network.split())
            return self.kinds[kind][:count]
        far = [found for found in self.kinds.values() if not is_loopback(found[0])]
        return next(iter([*far, *self.kinds.values()]), [])


def interfaces(variable: str) -> list[str]:
    """The interfaces that a variable names."""
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def find(store: Any) -> Addresses:
    """The addresses of this process for a group over this store."""
    for variable in (OURS, VARIABLE):
        if names := interfaces(variable):
            return _of_interfaces(names, variable)
    kinds: dict[int, list[str]] = {}
    for address in _without_variable(store):
        kinds.setdefault(kind_of(address), [address])
    return Addresses(kinds, "" if kinds else "this host has no address at all, not even that of the loopback interface")


def towards(host: str) -> Addresses:
    """The addresses of this process for groups whose store is on ``host``, or for groups without a known store ("")."""
    return find(_Server(host))


@dataclass(frozen=True)
class _Server:
    host: str


def kind_of(address: str) -> int:
    found = ipaddress.ip_address(address)
    if found.is_loopback:
        return LOOPBACK_4 if found.version == 4 else LOOPBACK_6
    return V4 if found.version == 4 else V6


def is_loopback(address: str) -> bool:
    return kind_of(address) in (LOOPBACK_4, LOOPBACK_6)


def devices(addresses: list[str]) -> list[Any]:
    """gloo's devices at these addresses. A process has one device at each address, for all its groups."""
    from torch_sagellm.api import serve_as

    made = []
    for address in addresses:
        with _lock:
            device = _devices.get(address)
        if device is None:
            device = serve_as.real().create_device(hostname=address)
            with _lock:
                device = _devices.setdefault(address, device)
        made.append(device)
    return made


def socket_address(address: str, port: int) -> tuple[int, Any]:
    """Family and address for a socket, with the scope that a link-local address needs on this host."""
    infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return infos[0][0], infos[0][4]


def _forget() -> None:
    """Runs in a forked child, which does not have the devices' threads."""
    global _lock
    _lock = threading.Lock()
    # Keep a reference so that the child never frees the devices: a device's destructor waits for its thread.
    _left.append(dict(_devices))
    _devices.clear()


_left: list[dict[str, Any]] = []
os.register_at_fork(after_in_child=_forget)


# ------------------------------------------------------------------------------------------------ what this host has


def _of_interfaces(names: list[str], variable: str) -> Addresses:
    kinds: dict[int, list[str]] = {}
    present = [name for _, name in socket.if_nameindex()]
    for name in names:
        found = of_interface(name)
        if not found and name not in present:
            has = ", ".join(sorted(present))
            return Addresses(problem=f"{variable} names {name!r}, which this host does not have (it has {has})")
        if not found:
            return Addresses(problem=f"{variable} names {name!r}, which has no address")
        for kind in dict.fromkeys(map(kind_of, found)):
            kinds.setdefault(kind, []).append(next(each for each in found if kind_of(each) == kind))
    return Addresses(kinds)


def of_interface(name: str) -> list[str]:
    """The addresses of an interface as gloo uses them: IPv4 first; link-local ones last, with their scope."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        found.append(socket.inet_ntoa(answer[20:24]))
    v6 = [address for address, owner in _ipv6() if owner == name]
    return found + sorted(v6, key=lambda address: "%" in address)


def _ipv6() -> Iterator[tuple[str, str]]:
    """The usable IPv6 addresses and their interfaces, as the kernel lists them."""
    unusable = 0x08 | 0x40  # flags of the kernel: duplicate address found; duplicate detection still running
    with contextlib.suppress(OSError), open("/proc/thread-self/net/if_inet6") as lines:
        for line in lines:
            digits, _, _, scope, flags, name = line.split()
            if int(flags, 16) & unusable:
                continue
            address = str(ipaddress.IPv6Address(int(digits, 16)))
            yield (f"{address}%{name}" if int(scope, 16) == 0x20 else address), name


def _without_variable(store: Any) -> Iterator[str]:
    best = [address for family, where in _store_places(store) for address in _source(family, where)]
    best += [address for address in named_in_hosts(socket.gethostname()) if not is_loopback(address)]
    best += [address for family, anywhere in ANYWHERE for address in _source(family, (anywhere, 9))]
    if all(map(is_loopback, best)):
        every = [address for _, name in socket.if_nameindex() for address in of_interface(name)]
        best += sorted(every, key=lambda address: "%" in address)
    yield from best
    for family, loopback in LOOPBACK:
        yield from _source(family, (loopback, 9))


def _source(family: int, where: Any) -> list[str]:
    """The local address from which this host would send to ``where``. Nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(where)
            name = asking.getsockname()
    except OSError:
        return []
    address = str(name[0])
    if family == socket.AF_INET6:
        found = ipaddress.IPv6Address(address.partition("%")[0])
        if found.ipv4_mapped is not None:
            return [str(found.ipv4_mapped)]
        if found.is_link_local and "%" not in address:
            return [f"{address}%{socket.if_indextoname(name[3])}"]
    return [address]


def _store_places(store: Any) -> list[tuple[int, Any]]:
    """The socket addresses of a TCPStore's server; an empty list for other stores."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = str(getattr(store, "host", ""))
    if not host:
        return []
    with _lock:
        known = _stores.get(host)
    if known is None:
        try:
            infos = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        except OSError:
            infos = []
        known = [(family, where) for family, _, _, _, where in infos]
        with _lock:
            _stores[host] = known
    return known


def named_in_hosts(name: str, file: str = "/etc/hosts") -> list[str]:
    """The addresses of a name in /etc/hosts that this host owns.

    No name server is asked, because that may take seconds.
    """
    found = []
    with contextlib.suppress(OSError), open(file, errors="replace") as lines:
        for line in lines:
            words = line.partition("#")[0].split()
            if name in words[1:] and _is_own(words[0]):
                found.append(words[0])
    return found


def _is_own(address: str) -> bool:
    try:
        family, where = socket_address(address, 0)
        with socket.socket(family, socket.SOCK_DGRAM) as trying:
            trying.bind(where)
    except OSError:
        return False
    return True
