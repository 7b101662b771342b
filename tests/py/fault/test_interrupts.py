"""Ctrl-C in the calls that create and end groups raises KeyboardInterrupt long before the deadline, and the exit is
clean."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from harness import Context, Job, beyond_gloo, launch
from net import enter

pytestmark = beyond_gloo("waits in one call that hears of no signal")

#: The groups' timeout, and the seconds within which the interrupted call must end. Other tests may share the cores.
TIMEOUT = timedelta(seconds=90)
SOON = 10.0


def interrupted(ctx: Context, call: Callable[[], Any]) -> float:
    """Tells the test that the call begins now. Returns the time at which the call raised KeyboardInterrupt."""
    try:
        ctx.tell("calling")  # the test may send a signal from here on
        call()
    except KeyboardInterrupt:
        return time.monotonic()
    raise AssertionError("the call returned")


def interrupt(job: Job, rank: int, others: list[int]) -> None:
    """Sends SIGINT to a rank that blocks in a call. Checks that the call and then the program end soon and without
    error."""
    assert job.hear(rank, 60) == "calling"
    time.sleep(1.0)  # until the rank waits
    begin = time.monotonic()
    job.signal(rank, signal.SIGINT)
    outcome = job.wait_rank(rank, 60)
    assert outcome.error is None and outcome.code == 0, job.report()
    assert outcome.value - begin < SOON, job.report()
    assert time.monotonic() - begin < 2 * SOON, job.report()
    assert outcome.output == "", job.report()
    for other in others:
        job.say(other, "end")


def first_group(ctx: Context, late: int) -> float | None:
    """One rank does not join the first group."""
    if ctx.rank == late:
        ctx.listen(80)
        return None
    store = ctx.store()
    return interrupted(ctx, lambda: ctx.init(store=store, timeout=TIMEOUT))


@pytest.mark.parametrize("late", [0, 1])
def test_ctrl_c_ends_the_wait_for_the_ranks_of_the_first_group(late: int) -> None:
    """Interrupts rank 0, which gathers the ranks, or rank 1, which waits for rank 0."""
    with launch(first_group, 2, late) as job:
        interrupt(job, 1 - late, [late])


def further_group(ctx: Context, late: int) -> float | None:
    """One rank does not join a further group."""
    ctx.init(timeout=TIMEOUT)
    dist.barrier()
    if ctx.rank == late:
        ctx.listen(80)
        return None
    return interrupted(ctx, lambda: dist.new_group([0, 1]))


@pytest.mark.parametrize("late", [0, 1])
def test_ctrl_c_ends_the_wait_for_the_ranks_of_a_further_group(late: int) -> None:
    with launch(further_group, 2, late) as job:
        interrupt(job, 1 - late, [late])


def built_elsewhere(ctx: Context) -> float:
    """The call that creates a delegate (a group of torch's) never returns."""
    from torch_sagellm._private import delegate

    held = threading.Event()
    facts = delegate.Facts(None, 0, 1, TIMEOUT, "test", [0])
    making = delegate.Making(facts, SimpleNamespace(id="0"), [])
    return interrupted(ctx, lambda: making.result(lambda: held.wait(80)))


def test_ctrl_c_ends_the_wait_for_a_group_of_torchs() -> None:
    """A delegate and a link are each created by one call, which waits for the peers and may ignore signals. So a
    separate thread makes the call."""
    with launch(built_elsewhere, 1) as job:
        interrupt(job, 0, [])


def on_two_hosts(ctx: Context, names: list[str]) -> None:
    enter(names[ctx.rank])
    store = dist.FileStore(f"{ctx.tmp}/store", ctx.world_size)
    ctx.init(store=store, timeout=TIMEOUT)


def opens_a_link(ctx: Context, names: list[str], late: int) -> float | None:
    """One rank has met the others of a group over two hosts, but does not open the link."""
    from torch_sagellm._private import delegate

    make = delegate.make

    def make_late(*arguments: Any) -> Any:
        ctx.listen(80)
        return make(*arguments)

    if ctx.rank == late:
        delegate.make = make_late
        on_two_hosts(ctx, names)
        return None
    return interrupted(ctx, lambda: on_two_hosts(ctx, names))


@pytest.mark.parametrize("late", [0, 1])
def test_ctrl_c_ends_the_opening_of_a_link(hosts: list[str], late: int) -> None:
    with launch(opens_a_link, 2, hosts, late, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        interrupt(job, 1 - late, [])


def leaves(ctx: Context, names: list[str]) -> float | None:
    """Rank 0 leaves before its data has been received."""
    on_two_hosts(ctx, names)
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    if ctx.rank == 1:
        ctx.listen(80)
        return None
    dist.broadcast(torch.ones(40_000), 0)  # sent from a copy, so it does not wait for rank 1
    return interrupted(ctx, dist.destroy_process_group)


def test_ctrl_c_ends_the_leaving_of_a_group_over_hosts(hosts: list[str]) -> None:
    """The call waits up to half a minute until its data has arrived. Ctrl-C ends this wait."""
    with launch(leaves, 2, hosts, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        interrupt(job, 0, [])


class Interrupted(logging.Handler):
    """A log handler that gets Ctrl-C while it writes its first line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if len(self.lines) == 1:
            signal.raise_signal(signal.SIGINT)


def writes_its_log(ctx: Context) -> list[str]:
    handler = Interrupted()
    logging.getLogger("sagellm").addHandler(handler)
    logging.getLogger("sagellm").setLevel(logging.INFO)
    try:
        ctx.init(timeout=TIMEOUT)
    except KeyboardInterrupt:
        return handler.lines
    raise AssertionError(f"the interrupt was lost; lines: {handler.lines}")


def test_ctrl_c_while_a_line_of_the_log_is_written_is_raised_and_the_line_is_not_lost() -> None:
    """The core's lines are written between bytecodes of the program, so an interrupt there belongs to the program."""
    with launch(writes_its_log, 1) as job:
        (lines,) = job.values()
    assert len(lines) > 1 and lines[0] == lines[1], lines
