"""Ranks on two hosts, played by two network namespaces that a veth pair connects: the group is served by gloo.

The namespaces are made for the test and removed after it. That needs root and the `ip` program; where they are missing
the tests are skipped with that reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import IS_GLOO, Context, launch
from reference import fold, make, same_bits

CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    """Runs `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two connected namespaces, by name."""
    if shutil.which("ip") is None:
        pytest.skip("the program `ip` (package iproute2) is missing")
    names = [f"sage{os.getpid()}{letter}" for letter in "ab"]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            cables = [f"v{os.getpid() % 100000}{letter}" for letter in "ab"]
            ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
            for number, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
                ip("link", "set", cable, "netns", name)
                ip("-n", name, "link", "set", cable, "name", "eth0")
                ip("-n", name, "addr", "add", f"10.231.77.{number}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces may not be made here: {error.stderr.strip()}")
        yield names
    finally:
        for name in made:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def enter(name: str) -> None:
    """Moves this process into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns into {name}")


def on_hosts(ctx: Context, names: list[str]) -> list[float]:
    """Every kind of call on a group that spans the hosts."""
    enter(names[ctx.rank * len(names) // ctx.world_size])
    n, me = ctx.world_size, ctx.rank
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", n), timeout=timedelta(seconds=30))
    found = make(torch.float32, 1000, me)
    dist.all_reduce(found)
    total = fold("SUM", [make(torch.float32, 1000, rank) for rank in range(n)])
    torch.testing.assert_close(found, total)
    whole = torch.empty(n * 5)
    dist.all_gather_into_tensor(whole, torch.full((5,), float(me)))
    same_bits(whole, torch.arange(n).repeat_interleave(5).float(), "all_gather over hosts")
    work: Any = dist.broadcast(found, n - 1, async_op=True)
    work.wait()
    if me == 0:
        dist.send(torch.ones(7), n - 1, tag=3)
    elif me == n - 1:
        got = torch.zeros(7)
        dist.recv(got, 0, tag=3)
        assert got.tolist() == [1.0] * 7
    dist.barrier()
    assert dist.get_backend() == ctx.backend
    group = dist.new_group(list(range(n)))
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": me}, group=group)
    assert [each["rank"] for each in objects] == list(range(n))
    dist.destroy_process_group()
    return found[:3].tolist()


@pytest.mark.parametrize("world_size", [2, 4])
def test_rule_23_ranks_in_two_network_namespaces_are_served_by_the_delegate(hosts: list[str], world_size: int) -> None:
    """Rule 23: another network namespace counts as another host; gloo carries all, and the log says so once."""
    with launch(on_hosts, world_size, hosts, env={"GLOO_SOCKET_IFNAME": "eth0"}) as job:
        values = job.values(90)
        outputs = [each.output() for each in job.ranks]
    assert all(value == values[0] for value in values)
    if not IS_GLOO:
        told = sum(output.count("instead of shared memory") for output in outputs)
        assert told == 1, f"two groups of several ranks, one reason: one line, found {told}: {outputs}"


def half_local(ctx: Context, names: list[str]) -> None:
    enter(names[ctx.rank // 2])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size), timeout=timedelta(seconds=30))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[ctx.rank // 2]
    found = torch.full((10,), float(ctx.rank))
    dist.all_reduce(found, group=mine)
    assert found.tolist() == [float(4 * (ctx.rank // 2) + 1)] * 10
    dist.barrier()
    dist.destroy_process_group()


def test_groups_within_one_host_keep_shared_memory(hosts: list[str]) -> None:
    """The default group spans hosts; its subgroups on one host are not delegated."""
    with launch(half_local, 4, hosts, env={"GLOO_SOCKET_IFNAME": "eth0"}) as job:
        job.values(90)
        outputs = [each.output() for each in job.ranks]
    if not IS_GLOO:
        assert sum(output.count("instead of shared memory") for output in outputs) == 1, outputs
