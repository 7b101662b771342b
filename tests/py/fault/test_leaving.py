"""A rank that leaves without an error fails only the operations that still need it (rule 21)."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Job, beyond_gloo, expect_raises, launch


def receive_from_anyone(ctx: Context) -> None:
    ctx.init()
    if ctx.rank == 1:
        dist.send(torch.tensor([1.0]), 0)
        dist.destroy_process_group()
        ctx.tell("left")
        return
    if ctx.rank == 2:
        ctx.listen()
        dist.send(torch.tensor([2.0]), 0)
        dist.destroy_process_group()
        return
    found = torch.zeros(1)
    assert (dist.recv(found), found.item()) == (1, 1.0)
    work: Any = dist.irecv(found)
    ctx.listen()  # until rank 1 has left
    assert not work.is_completed()
    ctx.tell("still waiting")
    work.wait()
    assert found.item() == 2.0
    last: Any = dist.irecv(found)
    try:
        last.wait()
    except RuntimeError as error:
        assert "left the group" in str(error), error
    else:
        raise AssertionError("no rank is left that could send")


def _run(job: Job) -> None:
    assert job.hear(1) == "left"
    job.say(0, "go on")
    assert job.hear(0) == "still waiting"
    job.say(2, "send")
    job.values(60)


@beyond_gloo("ends the receive with an error of its sockets")
@pytest.mark.quick
def test_rule_21_a_receive_from_anyone_lives_while_anyone_can_still_send() -> None:
    """The receive continues after one rank has left. It fails when the last possible sender has left, and its error
    says so."""
    with launch(receive_from_anyone, 3, normal_exit=True) as job:
        _run(job)


def wait_for_a_dead_rank(ctx: Context) -> str | None:
    ctx.init()
    dist.all_reduce(torch.ones(1))
    if ctx.rank == 0:
        dist.destroy_process_group()
        ctx.tell("left")
        return None
    if ctx.rank == 1:
        ctx.listen()  # until it is killed
        return None
    work: Any = dist.irecv(torch.zeros(1))
    ctx.tell("waiting")
    return expect_raises(RuntimeError, work.wait)


@beyond_gloo("ends the receive with an error of its sockets")
@pytest.mark.quick
def test_rule_21_a_receive_from_anyone_names_the_rank_that_died_not_the_one_that_left() -> None:
    with launch(wait_for_a_dead_rank, 3, normal_exit=True) as job:
        assert job.hear(0) == "left"
        assert job.hear(2) == "waiting"
        job.signal(1, signal.SIGKILL)
        outcome = job.wait_rank(2, 20)
        assert outcome.code == 0, job.report()
        assert "rank 1 (" in outcome.value and "ended (killed" in outcome.value, outcome.value


def queued_behind_another(ctx: Context, same: bool) -> None:
    ctx.init()
    first = torch.full((4,), float(ctx.rank + 1))
    second = first if same else torch.full((4,), 10.0 * ctx.rank)
    if ctx.rank == 0:
        ctx.listen()
    one: Any = dist.reduce(first, dst=2, async_op=True)
    two: Any = dist.broadcast(second, src=1, async_op=True)
    one.wait()
    two.wait()
    if ctx.rank == 1:
        dist.destroy_process_group()
        ctx.tell("left")
        return
    if not same and ctx.rank == 2:
        assert first.tolist() == [6.0] * 4
    assert second.tolist() == [2.0 if same else 10.0] * 4
    # The two remaining ranks have no more operations in this group, so they may leave in any order.
    dist.destroy_process_group()


@beyond_gloo("loses this race")
@pytest.mark.quick
@pytest.mark.parametrize(("same", "fusion"), [(True, "1"), (False, "0")])
def test_rule_21_an_operation_in_the_queue_needs_only_what_it_lacks(same: bool, fusion: str) -> None:
    """Rank 1 has published its data for both operations and leaves. Rank 2's second operation is queued behind its
    first."""
    with launch(queued_behind_another, 3, same, env={"SAGELLM_FUSION": fusion}, normal_exit=True) as job:
        assert job.hear(1) == "left"
        job.say(0, "go on")
        job.values(60)
