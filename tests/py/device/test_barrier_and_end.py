"""Over simulated libraries: a barrier also waits for calls whose Works were dropped, whichever way the program waits
for the barrier; and ranks can continue in a group that other ranks have left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, launch, run_fresh
from on_device import holds
from simulated import VENDORS, environment, start

pytestmark = pytest.mark.timeout(900)


def behind(ctx: Context, vendor: str, via: str) -> None:
    _, name = start(ctx, vendor, delay=0)
    for turn in range(4):
        first, second = (torch.full((100,), ctx.rank + 1.0, device=name) for _ in range(2))
        # One call is on the caller's stream, the other on the communicator's stream, in alternating order.
        dist.all_reduce(first, async_op=turn % 2 == 1)
        dist.all_reduce(second, async_op=turn % 2 == 0)
        work = dist.barrier(async_op=True)
        assert work is not None
        if via == "future":
            work.get_future().wait()
        elif via == "poll":
            while not work.is_completed():
                time.sleep(0.001)
        else:
            work.wait()
        holds(first, 3)
        holds(second, 3)
    dist.destroy_process_group()


@pytest.mark.parametrize("via", ["wait", "future", "poll"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_rule_33_a_barrier_of_which_a_program_has_the_work_comes_behind_all(
    vendor: str, via: str, libraries: dict[str, Path]
) -> None:
    """Every operation of the library takes 50 ms."""
    run_fresh(behind, 2, vendor, via, env=environment(vendor, libraries, SAGELLM_SIM_SLOW_US="50000"))


def goes_on(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor, delay=0)
    value = torch.full((100,), ctx.rank + 1.0, device=name)
    if ctx.rank == 0:
        dist.send(value, 1)
        ctx.listen()
    elif ctx.rank == 1:
        dist.recv(value, 0)
        holds(value, 1)
        ctx.tell("received")
    if ctx.rank in (0, 2):
        dist.destroy_process_group()
        ctx.tell("left")
        return
    ctx.listen()
    if ctx.rank == 3:
        dist.send(value, 1)
    else:
        dist.recv(value, 3)
        holds(value, 4)
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
def test_ranks_go_on_when_others_have_left_one_after_the_other(vendor: str, libraries: dict[str, Path]) -> None:
    """Rank 0 leaves after rank 2 has left. The remaining ranks still exchange messages."""
    with launch(goes_on, 4, vendor, env=environment(vendor, libraries)) as job:
        assert job.hear(2) == "left"
        assert job.hear(1) == "received"
        job.say(0, "go")
        assert job.hear(0) == "left"
        for rank in (1, 3):
            job.say(rank, "go")
        job.values()
