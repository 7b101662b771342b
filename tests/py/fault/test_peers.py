"""Rule 25: groups of the same processes share the descriptors that report each other's death, and nothing else."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, run_fresh

pytestmark = beyond_gloo("each group has its own connections")


def descriptors() -> list[str]:
    """Returns the targets of this process's open descriptors."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the descriptor of this listing
    return sorted(found)


def sums_up(group: dist.ProcessGroup) -> None:
    """Checks that operations on the group give correct results."""
    for count in (3, 200_000):
        found = torch.full((count,), float(dist.get_rank(group) + 1))
        dist.all_reduce(found, group=group)
        assert (found == sum(range(1, dist.get_world_size(group) + 1))).all()


def founder() -> Any:
    """Returns the backend of the default group, in which the ranks first met."""
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def fifty_more(ctx: Context) -> None:
    ctx.init()
    everyone = list(range(ctx.world_size))
    dist.destroy_process_group(dist.new_group(everyone))  # creates everything that is created only once
    before = descriptors()
    groups = []
    for turn in range(50):
        ranks = everyone if turn % 3 == 0 else everyone[::-1] if turn % 3 == 1 else everyone[1:]
        groups.append(dist.new_group(ranks, sort_ranks=False))
    mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    for group in mine:
        sums_up(group)
    assert descriptors() == before
    for group in mine:
        dist.destroy_process_group(group)
    assert descriptors() == before
    dist.destroy_process_group()
    assert len(descriptors()) < len(before)


def test_rule_25_fifty_more_groups_open_nothing() -> None:
    """Rule 25: with the same members, in another order, or with some of them, no descriptor is opened or left."""
    run_fresh(fifty_more, 3)


def one_dies(ctx: Context, victim: int) -> dict[str, str]:
    """An operation is pending in each group that has the victim when it is killed. Returns the errors of these
    groups."""
    ctx.init(timeout=timedelta(seconds=60))
    everyone = list(range(ctx.world_size))
    others = [rank for rank in everyone if rank != victim]
    lists = {"equal": everyone, "turned": everyone[::-1], "equal too": everyone, "others": others}
    lists["pair"] = sorted({victim, others[-1]})
    made = {name: dist.new_group(ranks, sort_ranks=False) for name, ranks in lists.items()}
    groups = {name: made[name] for name, ranks in lists.items() if ctx.rank in ranks}
    for group in groups.values():
        sums_up(group)
    ctx.tell("ready")
    if ctx.rank == victim:
        time.sleep(60)
    pending: dict[str, Any] = {
        name: dist.all_reduce(torch.ones(10), group=group, async_op=True)
        for name, group in groups.items()
        if name != "others"
    }
    ctx.tell("issued")
    said = {name: expect_raises(RuntimeError, work.wait) for name, work in pending.items()}
    sums_up(groups["others"])  # this group has lost no rank
    return said


@pytest.mark.parametrize("victim", [0, 2])
def test_rule_25_a_death_is_noticed_in_every_group(victim: int) -> None:
    """Rule 25: each group names the dead process by its rank in that group. A group without it continues."""
    with launch(one_dies, 3, victim) as job:
        for rank in range(3):
            assert job.hear(rank) == "ready"
        others = [rank for rank in range(3) if rank != victim]
        for rank in others:  # an earlier death would fail the call that issues
            assert job.hear(rank) == "issued"
        pid = job.pid(victim)
        job.signal(victim, signal.SIGKILL)
        for rank in others:
            outcome = job.wait_rank(rank, 30)
            assert outcome.code == 0 and outcome.value, job.report()
            for name, text in outcome.value.items():
                place = 2 - victim if name == "turned" else victim
                place = min(place, 1) if name == "pair" else place
                assert f"rank {place} (pid {pid}" in text, f"{name}: {text}"


def first_one_goes(ctx: Context) -> None:
    ctx.init()
    before = descriptors()
    one, two = dist.new_group(), dist.new_group()
    pending = dist.all_reduce(torch.ones(5), group=two, async_op=True) if ctx.rank == 0 else None
    sums_up(one)
    dist.destroy_process_group(one)
    founder().shutdown()
    time.sleep(0.1)  # if a watch ended, that would be reported in this time
    if ctx.rank != 0:
        dist.all_reduce(torch.ones(5), group=two)
    elif pending is not None:
        pending.wait()
    sums_up(two)
    assert descriptors() == before
    ctx.tell("ready")
    text = expect_raises(RuntimeError, lambda: [dist.all_reduce(torch.ones(3), group=two) for _ in range(1 << 30)])
    assert "rank 1 (pid" in text and "ended" in text, text


def test_rule_25_the_first_group_may_go_before_the_second() -> None:
    """Rule 25: after the first group has ended, the other groups work and report deaths."""
    with launch(first_one_goes, 2) as job:
        assert job.hear(0) == "ready" and job.hear(1) == "ready"
        job.signal(1, signal.SIGKILL)
        assert job.wait_rank(0, 30).code == 0, job.report()


def faults_stay(ctx: Context) -> None:
    ctx.init(timeout=timedelta(seconds=20))
    one, two, three = (dist.new_group() for _ in range(3))
    one._get_backend(torch.device("cpu")).abort()
    expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(3), group=one))
    text = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(3 + ctx.rank), group=two))
    assert "all_reduce(12 bytes" in text and "all_reduce(16 bytes" in text, text
    sums_up(three)
    if ctx.rank == 0:
        dist.destroy_process_group(three)
    else:
        text = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(3), group=three))
        assert "left" in text, text
    dist.all_reduce(torch.ones(3))  # the group in which the processes met is not affected
    sums_up(dist.distributed_c10d._get_default_group())


def test_rule_25_faults_stay_in_their_group() -> None:
    """Rule 25: an abort, a different call or a leaving rank ends one group and no other."""
    run_fresh(faults_stay, 2)


def forks(ctx: Context) -> None:
    ctx.init()
    group = dist.new_group()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        texts = []
        for call in (lambda: dist.all_reduce(torch.ones(1), group=group), dist.new_group):
            try:
                call()
                texts.append("nothing was raised")
            except (ValueError, RuntimeError) as error:
                texts.append(str(error).splitlines()[0])
        os.write(write, "\n".join(texts).encode())
        os._exit(0)
    os.close(write)
    texts = os.read(read, 10_000).decode().splitlines()
    os.waitpid(pid, 0)
    assert len(texts) == 2 and all("fork" in text for text in texts), texts
    sums_up(group)
    sums_up(dist.new_group())
    dist.destroy_process_group()


def test_rules_25_and_26_a_forked_child_has_no_companions() -> None:
    """Rules 25 and 26: the child can neither call its parent's group nor create a group. The parent can still create
    groups."""
    run_fresh(forks, 2)
