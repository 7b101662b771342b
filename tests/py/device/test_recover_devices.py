"""`torch_sagellm.recover` for groups whose tensors are on devices, over simulators of the vendors' libraries."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import simdevice
import torch
import torch.distributed as dist
from harness import Context, expect_raises, launch
from on_device import holds
from simulated import VENDORS, environment, exit_code, start

#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)

#: Prefixes of the functions that create a communicator from an id, and the function that shrinks one.
MAKES = {"nccl": "ncclCommInitRank", "hccl": "HcclCommInitRootInfo", "cncl": "cnclInitComms"}
SHRINKS = "ncclCommShrink"


def calls(function: str) -> int:
    """Returns the number of calls of this process to the functions of a simulated library whose names begin with
    `function`."""
    path = Path(f"{os.environ['SAGELLM_SIM_TRACE']}.{os.getpid()}")
    return sum(line.startswith(function) for line in path.read_text().splitlines())


def adds(name: str, members: list[int], first: int) -> None:
    """Checks that the default group adds on device and CPU. `members` has its ranks' numbers in the first group;
    `first` is this rank's number there."""
    assert (dist.get_world_size(), dist.get_rank()) == (len(members), members.index(first))
    for where in (name, "cpu"):
        value = torch.full((5000,), float(first + 1), device=where)
        dist.all_reduce(value)
        holds(value, sum(rank + 1 for rank in members))
    parts = [torch.zeros(3, device=name) for _ in members]
    work = dist.all_gather(parts, torch.full((3,), float(first), device=name), async_op=True)
    assert work is not None
    work.wait()
    for part, rank in zip(parts, members, strict=True):
        holds(part, rank)


def survives(ctx: Context, vendor: str, bound: bool, victims: list[int]) -> list[float]:
    """For each victim: works on the device until the victim dies, recovers, and works again. Returns the seconds of
    each recovery."""
    import torch_sagellm

    _, name = start(ctx, vendor, bound=bound, timeout=timedelta(seconds=120))
    members, took = list(range(ctx.world_size)), []
    adds(name, members, ctx.rank)
    for victim in victims:
        value = torch.ones(1000, device=name)
        if ctx.rank == victim:
            ctx.tell("ready")
            ctx.listen()  # its peers wait for it on the device
        work = dist.all_reduce(value, async_op=True)
        ctx.tell("ready")
        assert work is not None
        text = expect_raises(RuntimeError, lambda work=work: work.wait(timedelta(seconds=60)))
        assert f"rank {members.index(victim)}" in text, text
        made = calls(MAKES[vendor])
        begin = time.monotonic()
        new = torch_sagellm.recover(timeout=60)
        took.append(time.monotonic() - begin)
        assert new is dist.group.WORLD
        members.remove(victim)
        adds(name, members, ctx.rank)
        assert calls(MAKES[vendor]) == made + 1, "a new communicator"
    assert calls(SHRINKS) == 0, "the failed communicator was aborted, and is not shrunk"
    dist.barrier()
    dist.destroy_process_group()
    return took


@pytest.mark.parametrize("bound", [False, True], ids=["at the first call", "bound"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_the_survivors_of_kill_9_go_on_on_their_devices(
    vendor: str, bound: bool, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """From four ranks to three and two. Each time the survivors wait for the device, which does not report the victim's
    death."""
    more = environment(vendor, libraries, SAGELLM_SIM_TRACE=str(tmp_path / "trace"))
    victims = [1, 0]
    with launch(survives, 4, vendor, bound, victims, env=more) as job:
        left = [0, 1, 2, 3]
        for victim in victims:
            assert [job.hear(rank) for rank in left] == ["ready"] * len(left)
            job.signal(victim, signal.SIGKILL)
            assert exit_code(job.ranks[victim]) == -signal.SIGKILL
            left.remove(victim)
        outcomes = [job.wait_rank(rank) for rank in left]
        assert all(each.code == 0 and each.error is None for each in outcomes), job.report()
        assert max(max(each.value) for each in outcomes) < 30, "at a deadline, perhaps"


def through_the_host(ctx: Context) -> None:
    import torch_sagellm

    simdevice.install("npu")
    ctx.init(timeout=timedelta(seconds=120), pg_options=torch_sagellm.Options(vendor="host"))
    adds("npu", [0, 1, 2, 3], ctx.rank)
    ctx.tell("ready")
    if ctx.rank == 3:
        ctx.listen()
    expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(10, device="npu")))
    torch_sagellm.recover(timeout=60)
    adds("npu", [0, 1, 2], ctx.rank)
    dist.barrier()
    dist.destroy_process_group()


def test_where_tensors_travel_through_the_host(libraries: dict[str, Path]) -> None:
    """The new group serves the device without a vendor's library too."""
    with launch(through_the_host, 4) as job:
        assert [job.hear(rank) for rank in range(4)] == ["ready"] * 4
        job.signal(3, signal.SIGKILL)
        outcomes = [job.wait_rank(rank) for rank in range(3)]
        assert all(each.code == 0 and each.error is None for each in outcomes), job.report()
