"""The texts of errors are golden files: each says which rank, what was expected, what was passed and what to do.

`tests/golden/<name>.txt` holds each text with <pid>, <host>, <path>, <line> and <time> in place of what differs between
runs. To accept a changed text, run with SAGELLM_UPDATE_GOLDEN=1 and review the difference before the commit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hang_texts import compare
from harness import Context, beyond_gloo, expect_raises, launch, monitored_barrier

PROBLEM = (RuntimeError, ValueError)


def timeout(ctx: Context) -> str | None:
    # After half of this time rank 0 asks rank 1 what it does, and rank 1 needs time to answer.
    ctx.init(operations=timedelta(seconds=4))
    dist.broadcast(torch.ones(2), 0)
    return expect_raises(PROBLEM, lambda: dist.all_reduce(torch.ones(3))) if ctx.rank == 0 else None


def wait_elapsed(ctx: Context) -> str | None:
    ctx.init()
    if ctx.rank:
        return None
    work: Any = dist.all_reduce(torch.ones(3), async_op=True)
    return expect_raises(PROBLEM, lambda: work.wait(timedelta(milliseconds=50)))


def mismatch(ctx: Context) -> str | None:
    ctx.init()
    call: Callable[[], Any] = (
        (lambda: dist.all_reduce(torch.ones(3))) if ctx.rank == 0 else (lambda: dist.broadcast(torch.ones(5), 1))
    )

    def twice() -> None:
        call()
        dist.barrier()

    text = expect_raises(PROBLEM, twice)
    return text if ctx.rank == 0 else None


def death(ctx: Context) -> str | None:
    ctx.init()
    dist.barrier()
    if ctx.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return expect_raises(PROBLEM, lambda: dist.all_reduce(torch.ones(3)))


def left(ctx: Context) -> str | None:
    ctx.init()
    dist.barrier()
    if ctx.rank == 1:
        time.sleep(0.3)
        dist.destroy_process_group()
        return None
    return expect_raises(PROBLEM, lambda: dist.all_reduce(torch.ones(3)))


def monitored(ctx: Context) -> str | None:
    ctx.init()
    if ctx.rank:
        return None
    return expect_raises(PROBLEM, lambda: monitored_barrier(timeout=timedelta(milliseconds=200)))


def aborted(ctx: Context) -> str | None:
    ctx.init()
    if ctx.rank:
        return None
    work: Any = dist.all_reduce(torch.ones(3), async_op=True)
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()
    return expect_raises(PROBLEM, work.wait)


def alone(ctx: Context) -> str | None:
    if ctx.rank:
        return None
    return expect_raises(PROBLEM, lambda: ctx.init(timeout=timedelta(seconds=1)))


def wrong_list(ctx: Context) -> str | None:
    ctx.init()
    return expect_raises(PROBLEM, lambda: dist.all_gather([torch.ones(3)], torch.ones(3))) if ctx.rank == 0 else None


CASES = [timeout, wait_elapsed, mismatch, death, left, monitored, aborted, alone, wrong_list]


def held(ctx: Context, case: str) -> str | None:
    """Runs the case. No rank leaves before its peers have their texts."""
    text = globals()[case](ctx)
    ctx.tell("done")
    ctx.listen()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    return text


@beyond_gloo("other texts")
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_text_of_an_error(case: str) -> None:
    """The text that rank 0 gets."""
    with launch(held, 2, case) as job:
        ranks = [0] if case == "death" else [0, 1]
        for rank in ranks:
            job.hear(rank)
        for rank in ranks:
            job.say(rank, "go")
        text = job.wait_rank(0, 20).value
    assert text, job.report()
    compare(case, text)
