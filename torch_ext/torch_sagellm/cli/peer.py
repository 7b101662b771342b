"""``torch-sagellm doctor --peer`` and ``--listen``: tests whether two hosts can form a group.

One host listens, the other connects to it. Both then act like the processes of a group: each listens at its addresses,
at ports that the system chooses, sends addresses and ports to the other host, and connects to those of the other host.
So both directions are tested, at ports like those of a job. Both hosts print the result. One peer is served.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from torch_sagellm._private import address as _address
from torch_sagellm._private.texts import printable
from torch_sagellm.cli import checks
from torch_sagellm.cli.checks import ERROR, Finding
from torch_sagellm.cli.show import fact

#: Default port of ``--listen``.
PORT = 29512
#: Seconds for each connection attempt, and for each message of the peer.
CONNECT, ANSWER = 3.0, 30.0
#: The largest accepted message of the peer, in bytes.
MOST = 1 << 16
REMEDY = (
    f"let any port through a firewall between the hosts, both ways, or name another interface by {_address.VARIABLE}"
)
FAR = (_address.V4, _address.V6)
KINDS = {
    _address.V4: "IPv4",
    _address.V6: "IPv6",
    _address.LOOPBACK_4: "IPv4 of the loopback",
    _address.LOOPBACK_6: "IPv6 of the loopback",
}


def split(text: str) -> tuple[str, int]:
    """Parses the host and the port of "host", "host:port", "::1" or "[::1]:port"."""
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") > 1:
        host, bracket, port = text, "]", ""
    else:
        host, _, port = text.partition(":")
        bracket = "]"
    if not host or not bracket or (port and not port.isdecimal()):
        raise ValueError(f"{text!r} is no HOST or HOST:PORT")
    if port and not 1 <= int(port) <= 65535:
        raise ValueError(f"{port!r} is no port from 1 to 65535")
    return host, int(port) if port else PORT


def listen(port: int) -> list[Finding]:
    """Listens, and serves one peer."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=both) as server:
        named = os.uname().nodename + (f":{port}" if port != PORT else "")
        fact("listening", f"at port {port}; run on the other host: torch-sagellm doctor --peer {named}")
        connection, where = server.accept()
    with connection:
        address = str(where[0])
        mapped = getattr(ipaddress.ip_address(address.partition("%")[0]), "ipv4_mapped", None)
        return _probe(connection, str(mapped or address), leads=False)


def connect(host: str, port: int) -> list[Finding]:
    """Connects to the host that listens, and tests with it."""
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT)
    except ConnectionRefusedError:
        what = f"nobody listens at port {port} of {host}"
        return [
            Finding(ERROR, what, f"run `torch-sagellm doctor --listen {port}` there, and leave it running meanwhile")
        ]
    except OSError as error:
        what = f"port {port} of {host} cannot be reached ({error.strerror or error})"
        return [Finding(ERROR, what, f"check the name, the route and the firewalls; {REMEDY}")]
    with connection:
        return _probe(connection, str(connection.getpeername()[0]), leads=True)


@dataclass(frozen=True)
class Side:
    """The facts that a host sends about itself."""

    name: str
    #: The address to which the host's name resolves.
    named: str
    problem: str
    #: Identifies the host's machine and network namespace.
    network: str
    #: Addresses and ports by kind, the best kind first.
    places: dict[int, list[tuple[str, int]]]

    def text(self) -> dict[str, Any]:
        return {**vars(self), "places": [[kind, found] for kind, found in self.places.items()]}

    @staticmethod
    def read(said: dict[str, Any]) -> Side:
        """Parses the peer's message; raises if it is malformed. Unprintable characters are replaced."""
        name, named, problem, network = (_clean(said[name]) for name in ("name", "named", "problem", "network"))
        places = {
            int(kind): [(_clean(address), int(port)) for address, port in found[:8]]
            for kind, found in said["places"]
            if int(kind) in KINDS and found
        }
        return Side(name, named, problem, network, places)


def _probe(connection: socket.socket, peer: str, leads: bool) -> list[Finding]:
    """Tests both directions. The host that ``leads`` chooses the kind of address, as rank 0 does in a group."""
    connection.settimeout(ANSWER)
    own = _address.towards(peer)
    with contextlib.ExitStack() as stack:
        places: dict[int, list[tuple[str, int]]] = {}
        for kind, addresses in own.kinds.items():
            for address in addresses:
                family, where = _address.socket_address(address, 0)
                port = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                port.bind(where)
                port.listen()
                places.setdefault(kind, []).append((address, port.getsockname()[1]))
        named = checks.address_of(socket.gethostname())
        mine = Side(os.uname().nodename, named, own.problem, _network(), places)
        try:
            with connection.makefile("r", encoding="utf-8", errors="replace") as words:
                theirs = Side.read(_exchange(connection, words, mine.text()))
                tried = _try(theirs, mine.network == theirs.network)
                answer = _exchange(connection, words, {"tried": tried})["tried"]
                heard = {_clean(address): _clean(why) for address, why in answer.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [Finding(ERROR, f"the talk with the other host broke off ({error})", "run it again on both hosts")]
    _tell(mine, theirs)
    return list(_judge(mine, theirs, (tried, heard), leads))


def _network() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    return ""


def _exchange(connection: socket.socket, words: IO[str], said: dict[str, Any]) -> dict[str, Any]:
    connection.sendall(json.dumps(said).encode() + b"\n")
    line = words.readline(MOST)
    found = json.loads(line) if line.endswith("\n") else None
    if not isinstance(found, dict):
        raise ValueError("it said nothing that can be read")
    return found


def _try(theirs: Side, one_network: bool) -> dict[str, str]:
    """By address of the peer: "" if it could be reached, otherwise the reason."""
    found = {}
    for kind, places in theirs.places.items():
        for address, port in places if one_network or kind in FAR else []:
            try:
                socket.create_connection((_on_this_host(address), port), timeout=CONNECT).close()
                found[address] = ""
            except OSError as error:
                found[address] = error.strerror or str(error)
    return found


def _on_this_host(address: str) -> str:
    """A link-local address, with the interface of this host that reaches it: the first interface that the variables
    name."""
    bare, scope, _ = address.partition("%")
    names = os.environ.get(_address.OURS) or os.environ.get(_address.VARIABLE, "")
    name = names.split(",")[0].strip()
    return f"{bare}%{name}" if scope and name else address


def _tell(mine: Side, theirs: Side) -> None:
    for who, side in (("this host", mine), ("the other host", theirs)):
        fact(who, f"{side.name}, whose name leads to {side.named or 'no address'}")
        for kind, places in side.places.items():
            fact(f"  {KINDS[kind]}", ", ".join(address for address, _ in places))


def _judge(mine: Side, theirs: Side, results: tuple[dict[str, str], dict[str, str]], leads: bool) -> Iterator[Finding]:
    """Yields findings.

    ``results`` has this host's attempts, then the other's: for each address "", or why it could not be reached.
    """
    for who, side in (("this host", mine), ("the other host", theirs)):
        if side.problem:
            yield Finding(ERROR, f"{who}: {side.problem}", f"set {_address.VARIABLE} there to one that it has")
    first, second = (mine, theirs) if leads else (theirs, mine)
    usable = [kind for kind in first.places if kind in FAR or mine.network == theirs.network]
    chosen = next((kind for kind in usable if kind in second.places), None)
    if chosen is None:
        what = "the two hosts have no family of addresses in common by which they reach each other"
        yield Finding(ERROR, what, f"give both addresses of one family, or name other interfaces: {_address.VARIABLE}")
        return
    directions = (
        ("from this host to the other", theirs, results[0]),
        ("from the other host to this", mine, results[1]),
    )
    for direction, side, reached in directions:
        for address, _ in side.places[chosen]:
            why = reached.get(address, "it was not tried")
            if why:
                yield Finding(ERROR, f"{address}, which would be taken, cannot be reached {direction} ({why})", REMEDY)
            else:
                fact(direction, f"reached {address} ({KINDS[chosen]}), which would be taken")


def _clean(text: Any) -> str:
    """A text of the peer, at most 300 characters of it."""
    return printable(str(text))[:300]
