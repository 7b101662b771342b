"""Groups over two hosts with unusual networks: all ranks connect and compute, or all raise the same error in time.

Each host is a network namespace with its own host name and /etc/hosts (`net.py`). The long test creates
`SAGELLM_TEST_NETWORKS` groups.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, launch
from limits import patience

pytestmark = beyond_gloo("takes the address of the host's name, and lets ranks wait for five timeouts")

#: Timeouts in seconds: of groups that can be created, and of groups that cannot.
TIMEOUT, SHORT = 60.0, 4.0
VARIABLE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Scene:
    """A network, and the outcome of a group in it."""

    #: Arguments of `net.Network`.
    network: dict[str, Any] = field(default_factory=dict)
    #: Address of a host's own name in its /etc/hosts, or "" if the name is not in the file.
    named: Callable[[int], str] = lambda host: net.address(host)
    #: GLOO_SOCKET_IFNAME of each host, or "" if it is not set.
    interfaces: tuple[str, str] = ("", "")
    #: Words of the error that all ranks raise; empty if the ranks connect.
    error: tuple[str, ...] = ()
    store: Callable[[int], str] = net.address
    #: The host on which the store runs.
    server: int = 0
    timeout: float = TIMEOUT


REMEDY = "GLOO_SOCKET_IFNAME"
SCENES = {
    "a name of 127.0.1.1": Scene(named=lambda host: "127.0.1.1"),
    "a name of 127.0.0.1": Scene(named=lambda host: "127.0.0.1"),
    "a name of ::1": Scene(named=lambda host: "::1"),
    "a name that is unknown": Scene(named=lambda host: ""),
    "a name of another host": Scene(named=lambda host: net.address(1 - host)),
    "IPv6 alone": Scene({"families": "6"}, lambda host: net.address6(host), store=net.address6),
    "IPv6 alone, the interface named": Scene(
        {"families": "6"}, lambda host: "::1", (net.INTERFACE, net.INTERFACE), store=net.address6
    ),
    "both families": Scene({"families": "46"}, lambda host: "127.0.1.1"),
    "both families, the store by IPv6": Scene({"families": "46"}, lambda host: "127.0.1.1", store=net.address6),
    "a second interface that leads nowhere, under the host's name": Scene({"second": True}, net.dead_end),
    "one of two interfaces named": Scene({"second": True}, net.dead_end, (net.INTERFACE, net.INTERFACE)),
    "several names in the variable": Scene(interfaces=("eth0,lo", " eth0 , eth0")),
    "packets of 1280 bytes": Scene({"families": "46", "mtu": 1280}),
    "an interface that one host lacks": Scene(
        interfaces=(net.INTERFACE, "eth9"), error=("rank", "on host b: ", "names 'eth9', which this host", REMEDY)
    ),
    "the loopback named on one host": Scene(
        interfaces=(net.INTERFACE, "lo"), error=("on host b can listen at 127.0.0.1", "alone", REMEDY)
    ),
    "an interface named that leads nowhere": Scene(
        {"second": True},
        interfaces=(net.SECOND, net.SECOND),
        error=("could not connect with the others", REMEDY),
        timeout=SHORT,
    ),
    "a firewall that drops": Scene(
        {"apart": (0, 1)}, server=2, error=("could not connect with the others", REMEDY, "firewall"), timeout=SHORT
    ),
}
QUICK = ("a name of 127.0.1.1", "IPv6 alone, the interface named", "an interface that one host lacks")


@contextmanager
def played(scene: Scene) -> Iterator[tuple[net.Network, dist.TCPStore]]:
    """Creates the network and its store."""
    try:
        with net.Network(max(2, scene.server + 1), **scene.network) as network:
            where = scene.store(scene.server)

            def serve() -> dist.TCPStore:
                limit = timedelta(seconds=patience(30))
                return dist.TCPStore(where, 0, is_master=True, wait_for_workers=False, timeout=limit)

            yield network, net.inside(network.names[scene.server], serve)
    except net.Unavailable as reason:
        pytest.skip(f"network namespaces may not be made here: {reason}")


def meets(ctx: Context, name: str, names: list[str], port: int, times: int) -> list[tuple[str, float]]:
    """Returns for each group the error of its creation, or "" if its calls gave correct results, and the seconds until
    that outcome."""
    scene = SCENES[name]
    host = 2 * ctx.rank // ctx.world_size
    net.enter(names[host])
    own = scene.named(host)
    net.call_itself("ab"[host], f"127.0.0.1 localhost\n{f'{own} {chr(97 + host)}' if own else ''}\n", ctx.tmp)
    os.environ[VARIABLE] = scene.interfaces[host]
    limit = timedelta(seconds=patience(30))
    client = dist.TCPStore(scene.store(scene.server), port, is_master=False, timeout=limit)
    ctx.tell("here")
    ctx.listen()
    return [attempt(ctx, scene, dist.PrefixStore(f"{number}", client)) for number in range(times)]


def attempt(ctx: Context, scene: Scene, store: dist.Store) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        ctx.init(store=store, timeout=timedelta(seconds=scene.timeout))
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - begin
    seconds = time.monotonic() - begin
    computes(ctx)
    dist.destroy_process_group()
    return "", seconds


def computes(ctx: Context) -> None:
    """Collectives and messages between the hosts, of one element and of many packets."""
    me, n = ctx.rank, ctx.world_size
    for count in (1, 300_000):
        found = torch.full((count,), float(me + 1))
        dist.all_reduce(found)
        assert found.unique().tolist() == [n * (n + 1) / 2]
        if me == 0:
            dist.send(torch.full((count,), 7.0), n - 1)
        elif me == n - 1:
            dist.recv(found, 0)
            assert found.unique().tolist() == [7.0]
    dist.barrier()


def one_error_or_right(name: str, world_size: int, times: int = 1) -> float:
    """Starts the ranks of a scene and checks that all ranks have the same outcome for each group. Returns the longest
    time until an outcome."""
    scene = SCENES[name]
    with played(scene) as (network, store), launch(meets, world_size, name, network.names, store.port, times) as job:
        for rank in range(world_size):
            assert job.hear(rank, 60) == "here"
        for rank in range(world_size):
            job.say(rank, "go")
        said = job.values(90 + times * (scene.timeout + 5))
    for each in zip(*said, strict=True):
        texts = [text for text, _ in each]
        assert texts == [texts[0]] * world_size, "\n".join(texts)
        assert all(word in texts[0] for word in scene.error) and bool(texts[0]) == bool(scene.error), texts[0]
        if scene.error:
            assert max(seconds for _, seconds in each) < scene.timeout + 1 + patience(1), each
    return max(seconds for each in said for _, seconds in each)


@pytest.mark.quick
@pytest.mark.parametrize("name", QUICK)
def test_hosts_meet_by_addresses_that_work(name: str) -> None:
    one_error_or_right(name, 2)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", SCENES)
def test_two_hosts_connect_or_all_ranks_raise_one_error_in_time(name: str, world_size: int) -> None:
    one_error_or_right(name, world_size)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", SCENES)
def test_so_it_is_each_time(name: str, world_size: int, say: Callable[[str], None]) -> None:
    """The outcome is the same for each of many groups that the same processes create one after the other."""
    times = int(os.environ.get("SAGELLM_TEST_NETWORKS", "200"))
    say(f"{times} groups, the slowest after {one_error_or_right(name, world_size, times):.2f} s")
