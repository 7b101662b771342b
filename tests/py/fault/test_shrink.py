"""`torch.distributed.shrink_group`: the remaining ranks continue together, whether the excluded ranks live or not."""

from __future__ import annotations

import contextlib
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import GROUP_TIMEOUT, Context, Job, beyond_gloo, expect_raises, launch
from helpers import nothing_left

pytestmark = beyond_gloo("it cannot shrink a group")

ABORT = 1  # torch.distributed.distributed_c10d.SHRINK_ABORT


def adds(members: list[int], first: int) -> None:
    """Checks that the default group adds and gathers objects. `members` has its ranks' numbers in the first group;
    `first` is this rank's number there."""
    assert dist.get_world_size() == len(members) and dist.get_rank() == members.index(first)
    for asynchronous in (False, True):
        value = torch.full((1000,), float(first + 1))
        work = dist.all_reduce(value, async_op=asynchronous)
        if work is not None:
            work.wait()
        assert (value == sum(rank + 1 for rank in members)).all(), (members, value[0])
    gathered: list[int | None] = [None] * len(members)
    dist.all_gather_object(gathered, first)
    assert gathered == members


def leaves(ctx: Context, engine: str, given: bool) -> None:
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(engine=engine))
    other = dist.new_group([0, 1])
    adds([0, 1, 2, 3], ctx.rank)
    if ctx.rank in (1, 2):
        dist.destroy_process_group()
        return
    dist.shrink_group([2, 1], pg_options=torch_sagellm.Options(engine=engine) if given else None)
    adds([0, 3], ctx.rank)
    assert other not in dist.distributed_c10d._world.pg_map, "torch ends the other groups with the default one"
    dist.destroy_process_group()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("engine", ["auto", "delegate"])
def test_ranks_leave_and_the_others_shrink_the_group(engine: str, given: bool) -> None:
    """With our engine and with a delegate; with options for the new group and without."""
    with launch(leaves, 4, engine, given) as job:
        job.wait(60)
        assert all(rank.outcome.error is None for rank in job.ranks), job.report()
    nothing_left(each.pid for each in job.ranks)


def dies(ctx: Context, flag: int, waits: bool) -> None:
    ctx.init(timeout=timedelta(seconds=60))
    members = [0, 1, 2, 3]
    for victim in (2, 0):
        adds(members, ctx.rank)
        ctx.tell("ready")
        value = torch.ones(10)
        work = None
        if ctx.rank == victim:
            ctx.listen()
        elif waits:
            # With `waits` an operation in flight raises the error. Without it the rank has not used the group since the
            # death.
            expect_raises(RuntimeError, lambda value=value: dist.all_reduce(value))
        elif flag == ABORT:
            with contextlib.suppress(RuntimeError):  # raises if the death has already been noticed
                work = dist.all_reduce(value, async_op=True)
        ctx.tell("now")
        ctx.listen()
        dist.shrink_group([members.index(victim)], shrink_flags=flag)
        members.remove(victim)
        if work is not None:
            expect_raises(RuntimeError, work.wait)
    adds(members, ctx.rank)
    dist.destroy_process_group()


def kill(job: Job, victim: int, others: list[int]) -> None:
    """Kills one rank, and lets the others shrink the group."""
    for rank in [*others, victim]:
        assert job.hear(rank) == "ready"
    job.signal(victim, signal.SIGKILL)
    for rank in others:
        assert job.hear(rank) == "now"
        job.say(rank, "shrink")


@pytest.mark.parametrize("flag", [0, ABORT])
@pytest.mark.parametrize("waits", [True, False])
def test_after_a_kill_9_the_others_go_on_twice(flag: int, waits: bool) -> None:
    """From four ranks to three and two. The second victim is the rank that created the group's memory."""
    with launch(dies, 4, flag, waits) as job:
        kill(job, 2, [0, 1, 3])
        kill(job, 0, [1, 3])
        for rank in (1, 3):
            outcome = job.wait_rank(rank, 60)
            assert outcome.code == 0, job.report()
    nothing_left(each.pid for each in job.ranks)


def wrong(ctx: Context) -> None:
    ctx.init()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.supports_shrinking
    for ranks, flags, words in (
        ([ctx.rank], 0, "calls it, and is to be excluded"),
        ([7], 0, "an excluded rank is 7, expected 0 to 1"),
        ([-1], 0, "an excluded rank is -1"),
        ([1 - ctx.rank], 5, "shrink_flags is 5"),
    ):
        text = expect_raises(ValueError, lambda ranks=ranks, flags=flags: backend.shrink(ranks, flags))
        assert words in text, text
    adds([0, 1], ctx.rank)
    alone = backend.shrink([1 - ctx.rank])
    value = torch.ones(3)
    alone.allreduce([value]).wait()
    assert (alone.size(), value.tolist()) == (1, [1.0, 1.0, 1.0])
    adds([0, 1], ctx.rank)  # without the flag the old group stays usable
    os._exit(0)


def test_wrong_ranks_are_refused_and_the_group_goes_on() -> None:
    """Rule 2: nothing is sent."""
    with launch(wrong, 2) as job:
        for rank in range(2):
            assert job.wait_rank(rank, 60).code == 0, job.report()


def missing(ctx: Context) -> None:
    ctx.init(operations=timedelta(seconds=3))
    if ctx.rank == 1:
        ctx.listen()
        os._exit(0)
    text = ""
    if ctx.rank == 0:
        text = expect_raises(RuntimeError, lambda: dist.shrink_group([2]))
    ctx.tell(text)
    ctx.listen()
    os._exit(0)


def test_a_survivor_that_does_not_shrink_is_named_at_the_deadline() -> None:
    """The error names it by its rank in the new group."""
    with launch(missing, 3) as job:
        text = job.hear(0)
        assert "rank 1 " in text and "within 3" in text, text
        for rank in range(3):
            job.say(rank, "end")


def missing_at_first(ctx: Context) -> None:
    import torch_sagellm

    ctx.init(operations=timedelta(seconds=4), pg_options=torch_sagellm.Options(engine="delegate"))
    if ctx.rank == 2:
        ctx.listen()
        return
    if ctx.rank == 0:
        expect_raises(RuntimeError, lambda: dist.shrink_group([2]))
    ctx.tell("ready")
    ctx.listen()
    ctx.set_timeout(GROUP_TIMEOUT)
    dist.shrink_group([2])
    adds([0, 1], ctx.rank)
    dist.destroy_process_group()


def test_shrinking_may_be_tried_again() -> None:
    """A second attempt with the same ranks. The first attempt's keys in the store mislead neither a rank nor the
    delegate."""
    with launch(missing_at_first, 3) as job:
        for rank in (0, 1):
            assert job.hear(rank) == "ready"
        for rank in range(3):
            job.say(rank, "go")
        for rank in (0, 1):
            assert job.wait_rank(rank, 60).code == 0, job.report()
