"""all_reduce on devices in two levels: inside each host, between hosts, inside again; over simulators.

The hosts are network namespaces of one machine, which the engine counts as hosts and the simulated libraries do not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from harness import Context, launch
from on_device import holds
from simulated import VENDORS, environment, start

import sagellm

#: The first test builds the simulators, which takes minutes on a busy machine; every job has a deadline of its own.
pytestmark = pytest.mark.timeout(900)

RULES = "*:0-4KiB=slots;all_reduce:1KiB-=hierarchical"


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Connected namespaces, by name."""
    try:
        with net.Network(count) as made:
            yield made.names
    except net.Unavailable as reason:
        pytest.skip(f"network namespaces may not be made here: {reason}")


def told(trace: str) -> list[str]:
    """The collectives that this process has asked the library for so far, by the end of their names."""
    path = Path(f"{trace}.{os.getpid()}")
    names = [line.split()[0].lower() for line in path.read_text().splitlines()]
    ends = ("allreduce", "reducescatter", "allgather")
    return [end for name in names for end in ends if name.endswith(end)]


def reduced(
    name: str, count: int, dtype: torch.dtype, op: Any = dist.ReduceOp.SUM, parts: int = 1, a: bool = False
) -> Any:
    """An all_reduce of `count` numbers in so many strided parts, checked against the sum; returns its Work."""
    me, n = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(count) % 7
    value = (numbers + me).to(dtype).to(name)
    expected = (numbers * n + n * (n - 1) // 2).to(dtype)
    if op == dist.ReduceOp.MAX:
        expected = (numbers + n - 1).to(dtype)
    if op == dist.ReduceOp.AVG:
        expected = ((numbers * n + n * (n - 1) // 2) / n).to(dtype)
    if parts > 1:
        wide = torch.zeros(count, parts, dtype=dtype, device=name)
        wide[:, 0] = value
        value = wide[:, 0]
        assert not value.is_contiguous()
    work = dist.all_reduce(value, op, async_op=True)
    work.wait()
    found = value.cpu()
    assert torch.equal(found, expected), (found, expected)
    return work


def levels(ctx: Context, names: list[str], place: list[int], vendor: str) -> None:
    store = dist.FileStore(f"{ctx.tmp}/store", ctx.world_size)
    with Path("/proc/self/ns/net").open() as home:
        net.enter(names[place[ctx.rank]])
        _, name = start(ctx, vendor, store=store, timeout=timedelta(seconds=60), rules=RULES)
        net.enter_file(home)  # the simulated libraries meet over the loopback of this machine
    trace = os.environ["SAGELLM_SIM_TRACE"]

    def asked(call: Any) -> tuple[list[str], str]:
        before = len(told(trace))
        work = call()
        return told(trace)[before:], str(sagellm.explain(work))

    reduced(name, 3, torch.float32)  # makes the communicators
    even = len({place.count(host) for host in place}) == 1
    two = ["reducescatter", "allreduce", "allgather"]
    cases: list[tuple[Any, list[str], str]] = [
        # Below the rule's range; a multiple of the ranks of a host; one with a rest.
        (lambda: reduced(name, 10, torch.float32), ["allreduce"], ""),
        (lambda: reduced(name, 1200, torch.float32), two, "hierarchical by a rule or line"),
        (lambda: reduced(name, 1201, torch.int64), [*two, "allreduce"], "hierarchical by a rule or line"),
        (lambda: reduced(name, 1201, torch.float16, dist.ReduceOp.MAX), [*two, "allreduce"], "hierarchical"),
        # Through temporary memory: strided, of a type that HCCL casts.
        (lambda: reduced(name, 1200, torch.float32, parts=2), two, "hierarchical"),
        (lambda: reduced(name, 1500, torch.uint8), two if 1500 % max(place.count(0), 1) == 0 else [], "hierarchical"),
    ]
    for call, functions, words in cases:
        found, text = asked(call)
        if even:
            assert found == functions, (found, functions, text)
            assert words in text, text
        else:
            assert found == ["allreduce"], found
            assert not words or "different numbers of ranks" in text, text
    _, text = asked(lambda: reduced(name, 1200, torch.float32, dist.ReduceOp.AVG))
    if even:
        expected = "own AVG is not the same in two levels" if vendor == "nccl" else "hierarchical by a rule or line"
        assert expected in text, text
    # Several in one launch, and other operations, are whole.
    tensors = [torch.full((500_000,), float(ctx.rank), device=name) for _ in range(2)]
    found, _ = asked(lambda: sagellm_list(tensors))
    assert found == ["allreduce"] * 2, found
    for tensor in tensors:
        holds(tensor, sum(range(ctx.world_size)))
    dist.destroy_process_group()


def sagellm_list(tensors: list[torch.Tensor]) -> Any:
    """Both tensors in one launch."""
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return manager.works[0]


@pytest.mark.parametrize("place", [[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1]], ids=str)
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_rule_sends_an_all_reduce_through_two_levels(
    vendor: str, place: list[int], libraries: dict[str, Path], tmp_path: Path
) -> None:
    """Also with ranks dealt out in turn; whole, with the reason, where hosts have unlike numbers of ranks."""
    with hosts(2) as names:
        more = environment(
            vendor, libraries, SAGELLM_SIM_TRACE=str(tmp_path / "trace"), GLOO_SOCKET_IFNAME=net.INTERFACE
        )
        with launch(levels, len(place), names, place, vendor, env=more) as job:
            job.values(100)
