"""Trouble that keeps a rank from answering in one group does not affect its answers in another group. A store whose
server has ended is not polled any more."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from hang_texts import line_in
from harness import Context, beyond_gloo, expect_raises, launch
from limits import patience
from troubled import store_of_its_own

pytestmark = beyond_gloo("it does not say")

#: Seconds until the operations here fail. After half of this time the ranks are asked what they do.
TIMEOUT = 8


def second_group(ctx: Context, size: int, engine: str) -> Any:
    """Returns a group of the first `size` ranks with a separate store."""
    import torch_sagellm
    from torch_sagellm._private import delegate, register

    store = dist.FileStore(f"{ctx.tmp}/second", size)
    timeout = timedelta(seconds=patience(10))
    facts = delegate.Facts(store, ctx.rank, size, timeout, "second", list(range(size)))
    made = register.create(facts, torch_sagellm.Options(engine=engine))
    made._set_default_timeout(timedelta(seconds=TIMEOUT))
    return made


def reduce_in(group: Any) -> None:
    group.allreduce([torch.ones(3)]).wait()  # mark: waits here


def troubled(ctx: Context, trouble: str, asked: str, names: list[str] | None) -> None:
    """While the first group is in trouble, rank 1 does not make a call in the second group, which has ranks 0 and 1."""
    import torch_sagellm

    host = "127.0.0.1"
    if names:
        net.enter(names[min(ctx.rank, 1)])
        host = net.address(0)
    store, server = store_of_its_own(ctx, host)
    first = {"store": store, "pg_options": torch_sagellm.Options(engine="delegate")}
    ctx.init(timeout=timedelta(seconds=patience(15)), operations=timedelta(seconds=TIMEOUT), **first)
    second = second_group(ctx, 2, "delegate" if asked == "delegated" else "auto") if ctx.rank < 2 else None
    dist.all_reduce(torch.ones(1))
    if second is not None:
        reduce_in(second)
    ctx.tell("ready")
    ctx.listen()
    if server is not None and trouble != "locked":
        server.send_signal(signal.SIGSTOP if trouble == "stopped" else signal.SIGUSR1)
    if ctx.rank == 1:
        if trouble == "locked":
            ctypes.PyDLL(None).sleep(3 * TIMEOUT)
        time.sleep(patience(60))  # mark: asleep here
    if ctx.rank == 2:
        # Rank 2 asks rank 1 in the first group, in which rank 1 cannot answer.
        if trouble == "locked":
            dist.all_reduce(torch.ones(1), async_op=True)
        ctx.listen()
        os._exit(0)
    time.sleep(1.5)
    ctx.tell(expect_raises(RuntimeError, lambda: reduce_in(second)))
    ctx.listen()
    if server is not None:
        server.kill()
    os._exit(0)


@pytest.mark.parametrize("asked", ["shared_memory", "delegated", "over_hosts"])
@pytest.mark.parametrize("trouble", ["stopped", "slow", "locked"])
def test_trouble_in_one_group_hides_nothing_in_another(
    trouble: str, asked: str, request: pytest.FixtureRequest
) -> None:
    """The first group's store is stopped or slow, or native code holds the interpreter's lock of rank 1 while rank 1 is
    asked."""
    names = request.getfixturevalue("hosts") if asked == "over_hosts" else None
    env = {"GLOO_SOCKET_IFNAME": net.INTERFACE if names else "lo"}
    with launch(troubled, 3, trouble, asked, names, env=env) as job:
        for rank in range(3):
            assert job.hear(rank, 60) == "ready"
        for rank in (2, 1, 0):
            job.say(rank, "go")
        text = job.hear(0, 60)
        assert re.search(rf"rank 1 \(pid {job.pid(1)}(, host [\w.-]+)?\) has not entered it", text), text
        assert f"waiting at {__file__}:{line_in(__file__, 'mark: waits here')} in reduce_in" in text, text
        if trouble == "locked":
            assert "native code has kept its interpreter's lock for" in text, text
        else:
            assert f"and it is at {__file__}:{line_in(__file__, 'mark: asleep here')} in troubled" in text, text


def loses_its_store(ctx: Context, waits: bool) -> None:
    import torch_sagellm

    store, server = store_of_its_own(ctx, "127.0.0.1")
    ctx.init(store=store, operations=timedelta(seconds=TIMEOUT), pg_options=torch_sagellm.Options(engine="delegate"))
    dist.all_reduce(torch.ones(1))
    ctx.tell("ready")
    ctx.listen()
    if server is not None:
        server.send_signal(signal.SIGUSR2)
        server.wait(patience(10))
    if waits and ctx.rank == 0:
        expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(1)))
    else:
        time.sleep(1.2 * TIMEOUT)  # in this time a rank polls the store about two dozen times
    ctx.tell("done")
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("waits", [False, True])
def test_after_the_end_of_the_stores_server_no_rank_writes_a_trace(waits: bool) -> None:
    """Each rank polls the store for questions, and stops polling when the server has ended. Otherwise torch would write
    25 lines.

    The server ends between two requests, because torch writes a trace for a request that is in flight.
    """
    with launch(loses_its_store, 2, waits, env={"GLOO_SOCKET_IFNAME": "lo"}) as job:
        for word in ("ready", "done"):
            for rank in range(2):
                assert job.hear(rank, 60) == word
            for rank in range(2):
                job.say(rank, "go")
        for rank in range(2):
            output = job.wait_rank(rank).output
            assert "TCPStore" not in output and "recvVector" not in output and "frame #" not in output, output
