"""Groups derived from other groups, with device tensors: split, and shrunk after a rank has died; over simulators."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, expect_raises, launch, run_fresh, torch_at_least
from on_device import backend_of, holds
from simulated import VENDORS, environment, exit_code, start

#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)

splitting = pytest.mark.skipif(not torch_at_least(2, 13), reason="split_group of older torch needs a cuda device")

#: The functions that split and that shrink a communicator; None if the library has no such function.
SPLITS = {"nccl": "ncclCommSplit", "hccl": "HcclCreateSubCommConfig", "cncl": None}
SHRINKS = {"nccl": "ncclCommShrink", "hccl": None, "cncl": None}


def calls(tmp: str, function: str | None) -> int:
    """Returns the number of calls of this process to a function of a simulated library."""
    path = Path(f"{tmp}.{os.getpid()}")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(function is not None and line.split()[0] == function for line in lines)


def bound(ctx: Context, vendor: str, **options: Any) -> tuple[str, str]:
    """Creates a group whose ranks are bound to device 0 and therefore have a communicator."""
    _, name = start(ctx, vendor, bound=True, **options)
    return name, os.environ["SAGELLM_SIM_TRACE"]


def adds(group: Any, name: str, ranks: list[int]) -> None:
    """Checks that `group` has these ranks and adds on the device and on the CPU."""
    assert dist.get_process_group_ranks(group) == ranks
    me = dist.get_rank()
    for where in (name, "cpu"):
        for asynchronous in (False, True):
            value = torch.full((33,), float(me + 1), device=where)
            work = dist.all_reduce(value, group=group, async_op=asynchronous)
            if work is not None:
                work.wait()
            holds(value, sum(rank + 1 for rank in ranks))


def splits(ctx: Context, vendor: str) -> None:
    name, trace = bound(ctx, vendor)
    native = SPLITS[vendor]
    # A group that the other ranks do not know about.
    if ctx.rank < 2:
        alone = dist.new_group([0, 1], use_local_synchronization=True)
        adds(alone, name, [0, 1])
        dist.destroy_process_group(alone)
    # The ranks call the same split twice. Rank 1 gets no new group from either call.
    for turn in range(2):
        pairs = dist.split_group(split_ranks=[[0, 2]])
        assert calls(trace, native) == (turn + 1) * (native is not None)
        if ctx.rank == 1:
            assert pairs in (None, dist.GroupMember.NON_GROUP_MEMBER)
        else:
            adds(pairs, name, [0, 2])
    # Two groups from one split; then a split of such a group, whose communicator HCCL cannot split.
    apart = dist.split_group(split_ranks=[[0, 1], [2]])
    assert calls(trace, native) == 3 * (native is not None)
    adds(apart, name, [2] if ctx.rank == 2 else [0, 1])
    if ctx.rank < 2:
        inner = dist.split_group(apart, split_ranks=[[0], [1]])
        assert calls(trace, native) == (4 if vendor == "nccl" else 3 * (native is not None))
        adds(inner, name, [ctx.rank])
        dist.destroy_process_group(inner)
    # The parent stays usable.
    adds(None, name, [0, 1, 2])
    dist.destroy_process_group()


@splitting
@pytest.mark.parametrize("vendor", VENDORS)
def test_split_makes_the_communicator_out_of_the_parents_where_the_library_can(
    vendor: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """One rank is outside of all new groups. A library that cannot split creates the communicator from a new id.
    Ranks outside of a group take no part in its `new_group`."""
    run_fresh(splits, 3, vendor, env=environment(vendor, libraries, SAGELLM_SIM_TRACE=str(tmp_path / "trace")))


def splits_unlike(ctx: Context, vendor: str) -> None:
    name, trace = bound(ctx, vendor)
    if ctx.rank == 1:
        backend_of(name).abort()  # this rank has no communicator any more, and reports that
    text = expect_raises(RuntimeError, lambda: dist.split_group(split_ranks=[[0, 1]]))
    assert "abort" in text, text
    assert calls(trace, SPLITS[vendor]) == 0
    os._exit(0)


@splitting
def test_a_rank_without_its_communicator_keeps_the_others_out_of_the_library(
    libraries: dict[str, Path], tmp_path: Path
) -> None:
    """A rank that cannot split votes no; otherwise its peers would wait in the library until the deadline."""
    more = environment("nccl", libraries, SAGELLM_SIM_TRACE=str(tmp_path / "trace"))
    with launch(splits_unlike, 2, "nccl", env=more) as job:
        assert [exit_code(rank) for rank in job.ranks] == [0, 0]


def shrinks(ctx: Context, vendor: str, flag: int, busy: bool) -> None:
    name, trace = bound(ctx, vendor, timeout=timedelta(seconds=60))
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    holds(value, 3)
    if ctx.rank == 1:
        ctx.tell("ready")
        ctx.listen()
        os.kill(os.getpid(), signal.SIGKILL)
    work = None
    if busy:
        work = dist.all_reduce(value, async_op=True)  # never completes, because rank 1 is dead
    ctx.tell("ready")
    ctx.listen()
    rest = dist.shrink_group([1], shrink_flags=flag)
    if not busy:  # else the watch may have aborted the old communicator before
        assert calls(trace, SHRINKS[vendor]) == (SHRINKS[vendor] is not None)
    assert dist.get_world_size() == 2 and dist.get_rank() == ctx.rank // 2
    value = torch.full((10,), float(ctx.rank), device=name)
    dist.all_reduce(value, group=rest)
    holds(value, 2)
    if work is not None:
        text = expect_raises(RuntimeError, lambda: work.wait(timedelta(seconds=30)))
        assert "rank 1" in text or "shrink() was called" in text, text
    ctx.tell("done")
    os._exit(0)


@pytest.mark.parametrize("flag,busy", [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("vendor", VENDORS)
def test_those_that_are_left_go_on_in_a_smaller_group(
    vendor: str, flag: int, busy: bool, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """After a kill. The library shrinks the old communicator, if it can and if nothing has aborted the communicator."""
    more = environment(vendor, libraries, SAGELLM_SIM_TRACE=str(tmp_path / "trace"))
    if busy:  # else the death would be raised in the survivors' next statements
        more["SAGELLM_ON_DEVICE_FAILURE"] = "none"
    with launch(shrinks, 3, vendor, flag, busy, env=more) as job:
        assert [job.hear(rank) for rank in range(3)] == ["ready"] * 3
        job.say(1, "die")
        assert exit_code(job.ranks[1]) == -signal.SIGKILL
        for rank in (0, 2):
            job.say(rank, "go on")
        assert [job.hear(rank) for rank in (0, 2)] == ["done"] * 2


def shrinks_in_flight(ctx: Context, vendor: str) -> None:
    name, trace = bound(ctx, vendor, timeout=timedelta(seconds=60))
    value = torch.full((1000,), float(ctx.rank + 1), device=name)
    works = [dist.all_reduce(value, async_op=True) for _ in range(20)]
    if ctx.rank == 1:
        for work in works:
            work.wait()
        holds(value, 6 * 3**19)
        dist.destroy_process_group()
        return
    dist.shrink_group([1])  # called while operations are in flight
    assert calls(trace, SHRINKS[vendor]) == (SHRINKS[vendor] is not None)
    for work in works:
        work.wait()
    holds(value, 6 * 3**19)
    dist.all_reduce(value)
    holds(value, 12 * 3**19)
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
def test_what_is_under_way_ends_well_before_a_group_shrinks(
    vendor: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """Without the abort flag, operations in flight must complete first. Otherwise the library would end them and leave
    wrong numbers without an error."""
    more = environment(vendor, libraries, SAGELLM_SIM_TRACE=str(tmp_path / "trace"), SAGELLM_SIM_SLOW_US="5000")
    run_fresh(shrinks_in_flight, 3, vendor, env=more)
