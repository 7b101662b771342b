"""`sagellm._alive`: what a connection says about the process at the other end."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from sagellm import _alive

pytestmark = pytest.mark.quick


def until(watch: _alive.Watch, seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not seen():
        watch.look()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_process_that_runs_or_is_stopped_is_alive_until_it_ends() -> None:
    """A connection to a killed process breaks, and a new one is refused."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        port = socket.create_server(("127.0.0.1", 0))
        os.write(write, str(port.getsockname()[1]).encode())
        signal.pause()
        os._exit(0)
    place = f"127.0.0.1 {os.read(read, 100).decode()}"
    try:
        with _alive.Watch() as watch:
            assert watch.asks(7)
            watch.follow(7, place)
            until(watch, lambda: watch.alive == {7})
            assert not watch.asks(7) and not watch.gone
            os.kill(child, signal.SIGSTOP)
            with _alive.Watch() as later:
                later.follow(7, place)
                until(later, lambda: later.alive == {7})
            os.kill(child, signal.SIGKILL)
            until(watch, lambda: watch.gone == {7})
            assert not watch.alive and not watch.asks(7)
            with _alive.Watch() as later:
                later.follow(7, place)
                until(later, lambda: later.gone == {7})
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_a_rank_that_announced_nothing_is_not_known() -> None:
    """And asked again, but not at once."""
    with _alive.Watch() as watch:
        watch.follow(1, "")
        watch.look()
        assert not watch.asks(1) and not watch.alive and not watch.gone


def test_a_process_opens_one_port_which_its_children_do_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is announced where the only address is the loopback: another host would ask itself."""
    store = dist.HashStore()
    monkeypatch.setattr(_alive, "_looked", False)
    monkeypatch.setattr(_alive, "_listening", None)
    monkeypatch.setattr(_alive, "_addresses", lambda: [(socket.AF_INET, "127.0.0.1")])
    _alive.announce(store, 0)
    assert store.get(f"{_alive.PREFIX}/0") == b""
    port = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(_alive, "_listening", port)
    for rank in (1, 2):
        _alive.announce(store, rank)
        assert store.get(f"{_alive.PREFIX}/{rank}").decode() == f"127.0.0.1 {port.getsockname()[1]}"
    child = os.fork()
    if child == 0:
        try:
            os.fstat(port.fileno() if port.fileno() >= 0 else -1)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert port.fileno() >= 0
    port.close()
