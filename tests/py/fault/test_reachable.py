"""Tensors that peers can map (docs/internals/shared_tensors.md). If a rank was stopped and continues, it changes no
tensor whose operation has failed. It also does not mistake what a peer wrote after the failure for the operation's
data."""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fault.helpers import nothing_left
from harness import Context, beyond_gloo, expect_raises, launch, run_fresh
from nodes import bind, needs_two_cpus

import torch_sagellm

pytestmark = beyond_gloo("gloo writes into no peer's memory")

#: Repetitions of each case; `make test-long` sets more.
TURNS = int(os.environ.get("SAGELLM_TEST_REACHABLE", "2"))
COUNT = 12 << 20  # 48 MiB: one call takes some milliseconds, in which a rank can be stopped
KINDS = ("all_reduce", "reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "scatter", "gather", "send")


def call(kind: str, mine: torch.Tensor, result: torch.Tensor) -> None:
    """Calls one collective, or sends a block to the next rank and receives one from the rank before. The result is in
    `result`; for all_reduce, reduce and broadcast it is in `mine`."""
    if kind == "all_reduce":
        dist.all_reduce(mine)
    elif kind == "reduce":
        dist.reduce(mine, 0)
    elif kind == "broadcast":
        dist.broadcast(mine, 0)
    elif kind == "all_gather":
        dist.all_gather_into_tensor(result, mine[: COUNT // dist.get_world_size()])
    elif kind == "reduce_scatter":
        dist.reduce_scatter_tensor(result[: COUNT // dist.get_world_size()], mine)
    elif kind == "scatter":
        blocks = list(mine.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
        dist.scatter(result[: COUNT // dist.get_world_size()], blocks)
    elif kind == "gather":
        blocks = list(result.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
        dist.gather(mine[: COUNT // dist.get_world_size()], blocks)
    elif kind == "send":
        ranks, rank = dist.get_world_size(), dist.get_rank()
        sends = dist.P2POp(dist.isend, mine[: COUNT // ranks], (rank + 1) % ranks)
        receives = dist.P2POp(dist.irecv, result[: COUNT // ranks], (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
    else:
        dist.all_to_all_single(result, mine)


def right(kind: str, mine: torch.Tensor, result: torch.Tensor) -> bool:
    """Returns whether the result of a call is correct, if each rank r filled its input with the number r + 1."""
    ranks = dist.get_world_size()
    total, part = ranks * (ranks + 1) / 2, COUNT // ranks
    if kind in ("all_reduce", "broadcast"):
        return bool((mine == (total if kind == "all_reduce" else 1)).all())
    if kind == "reduce":
        return dist.get_rank() != 0 or bool((mine == total).all())
    if kind == "reduce_scatter":
        return bool((result[:part] == total).all())
    if kind == "scatter":
        return bool((result[:part] == 1).all())
    if kind == "send":
        return bool((result[:part] == (dist.get_rank() - 1) % ranks + 1).all())
    if kind == "gather" and dist.get_rank() != 0:
        return True
    return all(bool((result[rank * part : (rank + 1) * part] == rank + 1).all()) for rank in range(ranks))


def until_it_fails(ctx: Context, kind: str, victim: int, nodes: bool = False) -> str:
    """Calls until a call fails. Ranks that were not stopped then overwrite their tensors, which no peer may change. If
    `nodes`, each half of the ranks is bound to a NUMA node."""
    if nodes:
        assert not bind(ctx.rank * 2 // ctx.world_size)
    ctx.init(pg_options=torch_sagellm.Options(numa=nodes))
    mine, result = torch_sagellm.empty(COUNT), torch_sagellm.empty(COUNT)
    bystander = torch_sagellm.shared(torch.arange(1000.0))
    turn = 0
    while True:
        mine.fill_(float(ctx.rank + 1))
        try:
            call(kind, mine, result)
        except RuntimeError as error:
            said = str(error)
            break
        assert right(kind, mine, result), f"wrong numbers in call {turn}"
        turn += 1
        if turn == 3:
            # The timeout is not shortened earlier: the first calls populate the memory, which takes long if many tests
            # run at the same time. A rank may still be in such a call when another rank has already left it.
            ctx.tell("running")
            ctx.listen()
            ctx.set_timeout(timedelta(seconds=1))
    if ctx.rank != victim:
        mine.fill_(123.0)
        result.fill_(124.0)
        ctx.tell("failed")
        ctx.listen()  # until the victim has continued and has failed as well
        assert (mine == 123).all() and (result == 124).all(), "a late rank changed a tensor"
    assert (bystander == torch.arange(1000.0)).all()
    mine.add_(1)  # such tensors are ordinary memory now
    result.zero_()
    expect_raises(RuntimeError, lambda: dist.all_reduce(mine))
    return said


def stop_and_continue(kind: str, ranks: int, seed: int, nodes: bool = False) -> None:
    draw = random.Random(seed)
    victim = draw.randrange(ranks)
    with launch(until_it_fails, ranks, kind, victim, nodes) as job:
        for rank in range(ranks):
            assert job.hear(rank) == "running", job.report()
        for rank in range(ranks):
            job.say(rank, "go")
        time.sleep(draw.random() * 0.05)
        job.signal(victim, signal.SIGSTOP)
        others = [rank for rank in range(ranks) if rank != victim]
        for rank in others:
            assert job.hear(rank) == "failed", job.report()
        job.signal(victim, signal.SIGCONT)
        late = job.wait_rank(victim)
        assert late.code == 0, job.report()
        for rank in others:
            job.say(rank, "look")
        for rank in others:
            assert job.wait_rank(rank).code == 0, job.report()
        pids = [job.pid(rank) for rank in range(ranks)]
    nothing_left(pids)


@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_rule_36_a_rank_that_was_stopped_changes_nothing_when_it_goes_on(kind: str, ranks: int, turn: int) -> None:
    stop_and_continue(kind, ranks, zlib.crc32(f"{kind} {ranks} {turn}".encode()))


@needs_two_cpus
@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "broadcast"])
def test_rule_36_a_rank_of_a_numa_node_that_was_stopped_changes_nothing_when_it_goes_on(kind: str, turn: int) -> None:
    """With 14 ranks on two nodes, sums go from node to node, and results back (`src/engine/shm/mapped/relay.rs`)."""
    if impossible := run_fresh(can_bind, 1)[0]:
        pytest.skip(impossible)
    stop_and_continue(kind, 14, zlib.crc32(f"nodes {kind} {turn}".encode()), nodes=True)


def can_bind(_: Context) -> str:
    return bind(0)


def until_a_rank_dies(ctx: Context, kind: str) -> None:
    ctx.init()
    mine, result = torch_sagellm.empty(COUNT), torch_sagellm.empty(COUNT)
    turn = 0
    while True:
        mine.fill_(float(ctx.rank + 1))
        try:
            call(kind, mine, result)
        except RuntimeError as error:
            assert "rank 1" in str(error), error
            break
        assert right(kind, mine, result), f"wrong numbers in call {turn}"
        turn += 1
        if turn == 3:
            ctx.tell("running")
    mine.fill_(5.0)
    time.sleep(0.3)
    assert (mine == 5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rule_36_a_rank_that_is_killed_fails_the_others_and_its_memory_goes(kind: str) -> None:
    with launch(until_a_rank_dies, 3, kind) as job:
        for rank in range(3):
            assert job.hear(rank) == "running", job.report()
        time.sleep(random.random() * 0.05)
        job.signal(1, signal.SIGKILL)
        for rank in (0, 2):
            assert job.wait_rank(rank).code == 0, job.report()
        pids = [job.pid(rank) for rank in range(3)]
    nothing_left(pids)


def abandoned(ctx: Context) -> None:
    """Rank 1 destroys its group while an operation is pending, and overwrites its input."""
    ctx.init(operations=timedelta(seconds=20))
    mine = torch_sagellm.empty(COUNT)
    for _ in range(3):
        mine.fill_(float(ctx.rank + 1))
        dist.all_reduce(mine)
    mine.fill_(float(ctx.rank + 1))
    ctx.tell("ready")
    ctx.listen()
    if ctx.rank == 1:
        work = dist.all_reduce(mine, async_op=True)
        dist.destroy_process_group()
        mine.fill_(99.0)
        ctx.tell("left")
        time.sleep(0.3)
        assert (mine == 99).all(), "a rank that came late changed a tensor"
        del work
    else:
        said = expect_raises(RuntimeError, lambda: dist.all_reduce(mine))
        assert "rank 1" in said, said


def test_rule_36_a_rank_that_leaves_in_the_middle_is_not_taken_for_one_that_is_done() -> None:
    with launch(abandoned, 2) as job:
        for rank in range(2):
            assert job.hear(rank) == "ready"
        job.say(1, "go")
        assert job.hear(1) == "left"
        job.say(0, "go")
        for rank in range(2):
            assert job.wait_rank(rank).code == 0, job.report()


def killed_while_another_is_late(ctx: Context) -> None:
    ctx.init(operations=timedelta(seconds=60))
    mine = torch_sagellm.empty(COUNT)
    for _ in range(2):
        mine.fill_(float(ctx.rank + 1))
        dist.all_reduce(mine)
    ctx.tell("ready")
    if ctx.rank == 2:
        ctx.listen()  # late, but alive
        return
    work = dist.all_reduce(mine, async_op=True)
    ctx.tell("issued")
    if ctx.rank == 1:
        time.sleep(60)
    said = expect_raises(RuntimeError, work.wait)
    assert "rank 1" in said, said


def test_rule_36_a_death_is_noticed_while_another_rank_is_late() -> None:
    with launch(killed_while_another_is_late, 3) as job:
        for rank in range(3):
            assert job.hear(rank) == "ready"
        for rank in range(2):
            assert job.hear(rank) == "issued"
        job.signal(1, signal.SIGKILL)
        assert job.wait_rank(0, 20).code == 0, job.report()
        job.say(2, "go")


def forks_with_mapped_peers(ctx: Context) -> None:
    ctx.init()
    mine = torch_sagellm.empty(COUNT)
    for _ in range(2):
        mine.fill_(float(ctx.rank + 1))
        dist.all_reduce(mine)
    child = os.fork()
    if child == 0:
        # Memory that the child allocates may be at addresses where the parent had mapped its peers.
        mine.fill_(5.0)
        blocks = [torch.full((4 << 20,), float(turn)) for turn in range(20)]
        dist.destroy_process_group()
        good = all(bool((block == turn).all()) for turn, block in enumerate(blocks))
        os._exit(17 if good and bool((mine == 5).all()) else 18)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 17, status
    assert (mine == 3).all(), "the child has written its parent's tensor"
    mine.fill_(float(ctx.rank + 1))
    dist.all_reduce(mine)
    assert (mine == 3).all()


def test_rules_26_and_36_a_forked_child_leaves_the_memory_of_all_alone() -> None:
    run_fresh(forks_with_mapped_peers, 2)
