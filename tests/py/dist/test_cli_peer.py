"""`torch-sagellm doctor --peer` and `--listen` between two hosts, which are network namespaces."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import net
import pytest
from harness import IS_GLOO, warm_python
from limits import patience

from torch_sagellm.cli import checks, peer

pytestmark = pytest.mark.skipif(IS_GLOO, reason="gloo: this is about the package's own command")


@contextmanager
def network(hosts: int = 2, **how: Any) -> Iterator[net.Network]:
    try:
        with net.Network(hosts, **how) as made:
            yield made
    except net.Unavailable as reason:
        pytest.skip(f"network namespaces may not be made here: {reason}")


def doctor(host: str, interface: str, *words: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", host, warm_python(), "-u", "-m", "torch_sagellm", "doctor", *words]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def talk(made: net.Network, address: str, interfaces: tuple[str, str]) -> list[tuple[int, str]]:
    """Returns the exit code and output of the listening host and of the asking host."""
    listening = doctor(made.names[0], interfaces[0], "--listen")
    try:
        assert listening.stdout is not None
        first = listening.stdout.readline()
        assert "torch-sagellm doctor --peer" in first, first + listening.stdout.read()
        asking = doctor(made.names[1], interfaces[1], "--peer", address)
        output, _ = asking.communicate(timeout=patience(60))
        rest, _ = listening.communicate(timeout=patience(60))
    finally:
        listening.kill()
    return [(listening.returncode, first + rest), (asking.returncode, output)]


@pytest.mark.parametrize(
    ("how", "interfaces", "address", "words"),
    [
        ({}, ("", ""), net.address(0), "10.231.77.2 (IPv4)"),
        ({"families": "6"}, ("eth0", "eth0"), net.address6(0), "fd77::2 (IPv6)"),
        ({"families": "46", "mtu": 1280}, ("", "eth0"), f"[{net.address6(0)}]:29512", "(IPv"),
    ],
)
def test_two_hosts_that_reach_each_other(
    how: dict[str, Any], interfaces: tuple[str, str], address: str, words: str
) -> None:
    with network(**how) as made:
        said = talk(made, address, interfaces)
    for code, output in said:
        assert code == 0 and words in output and "which would be taken" in output, output
        assert "from this host to the other" in output and "from the other host to this" in output, output


@pytest.mark.parametrize(
    ("interfaces", "words"),
    [
        (("eth0", "eth9"), "names 'eth9', which this host does not have (it has eth0, eth1, lo"),
        (("eth0", "lo"), "no family of addresses in common"),
        (("eth1", "eth1"), "which would be taken, cannot be reached from"),
    ],
)
def test_what_is_wrong_is_said_on_both_hosts(interfaces: tuple[str, str], words: str) -> None:
    with network(second=True) as made:
        said = talk(made, net.address(0), interfaces)
    for code, output in said:
        assert code == 1 and words in output and "fix:" in output, output


def test_a_host_that_cannot_be_reached_or_where_nobody_listens() -> None:
    with network(3, apart=(0, 1)) as made:
        (dropped,) = net.inside(made.names[0], lambda: peer.connect(net.address(1), peer.PORT))
        (refused,) = net.inside(made.names[0], lambda: peer.connect(net.address(2), peer.PORT))
    assert "cannot be reached (timed out)" in dropped.what and "firewall" in dropped.fix
    assert "nobody listens" in refused.what and "--listen 29512" in refused.fix


@pytest.mark.parametrize("said", [b"", b"\x1b[2J\xff\n", b"[]\n", b'{"name": 1}\n', b"x" * 100_000])
def test_a_peer_that_says_something_else_ends_the_talk(said: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        (found,) = peer.connect("127.0.0.1", server.getsockname()[1])
        thread.join()
    assert found.level == checks.ERROR and "broke off" in found.what
    assert all(each.isprintable() or each == "\n" for each in found.what + capsys.readouterr().out)


def test_forms_of_a_host() -> None:
    assert peer.split("host") == ("host", peer.PORT)
    assert peer.split("host:7") == ("host", 7)
    assert peer.split("fd77::1") == ("fd77::1", peer.PORT)
    assert peer.split("[fd77::1]:7") == ("fd77::1", 7)
    assert peer.split("[fd77::1]") == ("fd77::1", peer.PORT)
    for wrong in ("", ":7", "host:x", "[fd77::1", "[]:7"):
        with pytest.raises(ValueError, match="no HOST"):
            peer.split(wrong)
