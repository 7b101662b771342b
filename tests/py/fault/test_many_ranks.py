"""Many processes on one host, far more than cores: every collective, messages, and a killed rank."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch

MANY = int(os.environ.get("SAGELLM_TEST_MANY_RANKS", "64"))
KIB = 1024


def collectives(n: int, me: int, root: int, count: int) -> None:
    """Calls each kind of collective once, with `count` numbers in a tensor or block. Each rank checks its results
    alone."""
    every = sum(range(1, n + 1))
    own = torch.full((count,), float(me + 1))
    value = own.clone()
    dist.all_reduce(value)
    assert (value == every).all(), "all_reduce"
    value = own.clone()
    dist.reduce(value, root)
    assert me != root or (value == every).all(), "reduce"
    value = own.clone()
    dist.broadcast(value, root)
    assert (value == root + 1).all(), "broadcast"
    blocks = torch.empty(n * count)
    dist.all_gather_into_tensor(blocks, own)
    of_all = torch.arange(1.0, n + 1).repeat_interleave(count)
    assert torch.equal(blocks, of_all), "all_gather"
    parts = list(torch.empty(n * count).chunk(n)) if me == root else None
    dist.gather(own, parts, root)
    assert parts is None or torch.equal(torch.cat(parts), of_all), "gather"
    value = torch.empty(count)
    dist.scatter(value, [torch.full((count,), float(q)) for q in range(n)] if me == root else None, root)
    assert (value == me).all(), "scatter"
    dist.reduce_scatter_tensor(value, of_all + me)
    assert (value == n * (me + 1) + sum(range(n))).all(), "reduce_scatter"
    dist.all_to_all_single(blocks, of_all * 1000 + me)
    assert torch.equal(blocks, (me + 1) * 1000 + torch.arange(0.0, n).repeat_interleave(count)), "all_to_all"
    dist.barrier()


def messages(n: int, me: int, count: int) -> None:
    """Messages to both neighbours, and between random pairs that are the same on all ranks."""
    draw = random.Random(n)
    pairs = [(q, (q + 1) % n) for q in range(n)] + [(q, (q - 1) % n) for q in range(n)]
    pairs += [(a, b) for a, b in (draw.sample(range(n), 2) for _ in range(n))]
    works: list[Any] = []
    received = []
    for tag, (source, to) in enumerate(pairs):
        if source == me:
            works.append(dist.isend(torch.full((count,), source * n + to), to, tag=tag))
        elif to == me:
            value = torch.empty(count, dtype=torch.int64)
            works.append(dist.irecv(value, source, tag=tag))
            received.append((value, source * n + to))
    for work in works:
        work.wait()
    assert all((value == expected).all() for value, expected in received)


def work_of_many(ctx: Context, victim: int) -> tuple[str, float, str]:
    """The program of each rank; the test kills `victim` at the end. Returns the engine's description, the time at which
    the death was reported, and the error's text."""
    began = time.monotonic()
    ctx.init(timeout=timedelta(seconds=120))
    made = time.monotonic() - began
    backend: Any = dist.group.WORLD
    said = backend._get_backend(torch.device("cpu")).describe()
    n, me = ctx.world_size, ctx.rank
    for count in (2, 3000, 80 * KIB // n * 10):
        collectives(n, me, n // 3, count)
    for count in (1, 100, 20_000):
        messages(n, me, count)
    ctx.tell((said, made))
    if me == victim:
        time.sleep(600)
    text = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(10)))
    failed = time.monotonic()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return said, failed, text


def many(ranks: int, limit: float) -> None:
    victim = ranks // 2
    with launch(work_of_many, ranks, victim) as job:
        for rank in range(ranks):
            said, made = job.hear(rank, limit)
            assert "shared memory, segment of" in said, said
            if rank == 0:
                print(f"{said}; made in {made:.1f} s")
        killed = time.monotonic()
        job.signal(victim, signal.SIGKILL)
        outcomes = job.wait(limit)
        late = 0.0
        for outcome in outcomes:
            if outcome.rank == victim:
                assert outcome.code == -signal.SIGKILL
                continue
            assert outcome.error is None and outcome.code == 0, str(outcome)
            _, failed, text = outcome.value
            assert f"rank {victim} " in text, text
            late = max(late, failed - killed)
        # The report takes less than a second if each rank has a core, but here many ranks share two cores.
        print(f"the last of {ranks - 1} heard of the death after {late:.2f} s")
        assert late < limit / 4


@pytest.mark.timeout(300)
@beyond_gloo("shares no memory")
def test_36_ranks_share_memory_on_one_host() -> None:
    """36 is more than 34, the number of ranks at which the memory was once exhausted."""
    many(36, 120)


@pytest.mark.long
@pytest.mark.timeout(1200)
@beyond_gloo("shares no memory")
def test_many_ranks_share_memory_on_one_host() -> None:
    """64 ranks, or as many as the environment says: each kind small and large, messages, and a killed rank."""
    many(MANY, 400)
