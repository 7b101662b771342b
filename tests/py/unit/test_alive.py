"""`torch_sagellm._private.alive`: what a connection to a process's port shows about the process."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator

import net
import pytest
import torch.distributed as dist
from limits import patience

from torch_sagellm._private import address, alive

pytestmark = pytest.mark.quick


def until(watch: alive.Watch, seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not seen():
        watch.look()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_process_that_runs_or_is_stopped_is_alive_until_it_ends() -> None:
    """When the process is killed, its connection breaks, and a new connection is refused."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        port = socket.create_server(("127.0.0.1", 0))
        os.write(write, str(port.getsockname()[1]).encode())
        signal.pause()
        os._exit(0)
    place = f"127.0.0.1 {os.read(read, 100).decode()}"
    try:
        with alive.Watch() as watch:
            assert watch.asks(7)
            watch.follow(7, place)
            until(watch, lambda: watch.alive == {7})
            assert not watch.asks(7) and not watch.gone
            os.kill(child, signal.SIGSTOP)
            with alive.Watch() as later:
                later.follow(7, place)
                until(later, lambda: later.alive == {7})
            os.kill(child, signal.SIGKILL)
            until(watch, lambda: watch.gone == {7})
            assert not watch.alive and not watch.asks(7)
            with alive.Watch() as later:
                later.follow(7, place)
                until(later, lambda: later.gone == {7})
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("place", ["", alive.UNKNOWN, "127.0.0.1", "127.0.0.1 x", "host 1", "\x1b[2J\0 99999999999"])
def test_a_rank_that_announced_no_place_is_not_known(place: str) -> None:
    """A rank that has announced no place is asked again, but not immediately."""
    with alive.Watch() as watch:
        watch.follow(1, place)
        watch.look()
        assert not watch.asks(1) and not watch.alive and not watch.gone


@pytest.fixture
def no_ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Resets the module to its state after import."""
    monkeypatch.setattr(alive, "_ports", {})
    monkeypatch.setattr(alive, "_told", False)
    yield
    for port in alive._ports.values():
        port.close()


def announced(addresses: list[str], agreed: bool) -> str:
    store = dist.HashStore()
    alive.announce(store, 0, addresses, agreed)
    return str(store.get(f"{alive.PREFIX}/0").decode())


def test_a_process_opens_one_port_which_its_children_do_not_keep(no_ports: None) -> None:
    """A process opens one port per address. A forked child may open its own."""
    place = announced(["127.0.0.1"], True)
    assert place == announced(["127.0.0.1"], True)
    assert place != announced(["::1"], True)
    port = alive._ports["127.0.0.1"]
    assert place == f"127.0.0.1 {port.getsockname()[1]}"
    child = os.fork()
    if child == 0:
        try:
            assert not alive._ports and port.fileno() < 0
            assert announced(["127.0.0.1"], True) not in (place, alive.UNKNOWN)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert port.fileno() >= 0


def test_a_process_without_a_port_says_so_and_warns_once(no_ports: None, caplog: pytest.LogCaptureFixture) -> None:
    """A loopback address names a different host on each host, so it is announced only if the ranks have agreed on
    it."""
    with caplog.at_level("WARNING", "sagellm"):
        assert announced(["127.0.0.1"], False) == alive.UNKNOWN
        assert announced([], True) == alive.UNKNOWN
        assert announced(["192.0.2.1"], True) == alive.UNKNOWN
    assert len(caplog.records) == 1 and "cannot tell whether this process runs" in caplog.text


def test_without_a_free_descriptor_nothing_is_announced_until_there_is_one(no_ports: None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = os.dup(0)
    os.close(used)
    store = dist.HashStore()
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        alive.announce(store, 0, ["127.0.0.1"], True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.get(f"{alive.PREFIX}/0").decode() == alive.UNKNOWN
    assert announced(["127.0.0.1"], True) != alive.UNKNOWN


# ---------------------------------------------------------------------------------------------- over kinds of networks


def listens(name: str, variable: str, backlog: int, write: int) -> None:
    """Runs in a process on another host: announces its port and is busy from then on."""
    try:
        net.enter(name)
        os.environ[address.VARIABLE] = variable
        alive.WAITING = backlog
        found = address.find(None)
        place = announced(found.chosen(""), True)
        os.write(write, f"{place}\n".encode())
        while True:  # no thread accepts connections of the port
            signal.pause()
    finally:
        os._exit(1)


FAMILIES = {
    "IPv4": ("4", net.INTERFACE),
    "IPv6": ("6", net.INTERFACE),
    "both": ("46", net.INTERFACE),
    "link-local": ("", net.INTERFACE),
    "two names": ("4", f"{net.INTERFACE}, lo"),
    "no name": ("4", ""),
}


@pytest.mark.parametrize("looks", [1, 30])
@pytest.mark.parametrize("family", FAMILIES)
def test_killed_is_found_and_busy_and_stopped_are_never_gone(family: str, looks: int) -> None:
    """All kinds of addresses are tested, also after the polls of a busy process have filled the queue of its port (a
    backlog of 8)."""
    families, variable = FAMILIES[family]
    try:
        with net.Network(2, families=families) as network:
            if not families:
                wait_for_link_local(network.names)
            net.inside(network.names[0], lambda: looks_on(network.names[1], variable, looks))
    except net.Unavailable as reason:
        pytest.skip(f"network namespaces may not be made here: {reason}")


def wait_for_link_local(names: list[str]) -> None:
    """The kernel takes about a second to check that a link-local address is unused."""
    deadline = time.monotonic() + patience(20)
    while not all(net.inside(name, lambda: address.of_interface(net.INTERFACE)) for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def looks_on(host: str, variable: str, looks: int) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        listens(host, variable, 8, write)
    try:
        with os.fdopen(read) as words:
            place = words.readline().strip()
        assert place != alive.UNKNOWN
        if "%" in place:
            announced(address.of_interface(net.INTERFACE), True)  # its own port tells `alive` which interface to use
        for number in range(looks):
            with alive.Watch() as watch:
                watch.follow(1, place)
                if number < 8:
                    until(watch, lambda: watch.alive == {1})
                else:
                    time.sleep(0.01)
                    watch.look()
                assert not watch.gone
        with alive.Watch() as watch:
            os.kill(child, signal.SIGSTOP)
            watch.follow(1, place)
            for _ in range(10):
                watch.look()
                time.sleep(0.01)
            assert not watch.gone
            os.kill(child, signal.SIGKILL)

            def found() -> bool:
                if watch.asks(1):
                    watch.follow(1, place)
                return watch.gone == {1}

            until(watch, found)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(write)
        for port in alive._ports.values():
            port.close()
        alive._ports.clear()


def test_what_waits_at_a_port_is_closed_and_those_who_look_connect_again(no_ports: None) -> None:
    place = announced(["127.0.0.1"], True)
    with alive.Watch() as watch:
        watch.follow(1, place)
        until(watch, lambda: watch.alive == {1})
        for _ in range(5):
            alive.empty()
            time.sleep(0.01)
            watch.look()
            assert not watch.gone
        until(watch, lambda: watch.alive == {1})
        alive._ports.pop("127.0.0.1").close()
        until(watch, lambda: watch.gone == {1})
