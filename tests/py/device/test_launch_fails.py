"""If a call fails on one rank after it took its number, the group must fail on all ranks. Otherwise later calls of one
rank would be matched with other calls of its peers."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, expect_raises, launch, torch_at_least
from limits import patience
from on_device import backend_of, holds
from simulated import CARD, VENDORS, NeedsSimulatorError, environment, on_simulator_alone, start

pytestmark = pytest.mark.timeout(900)
#: Timeout of the groups, in seconds: far longer than the second within which the other ranks must get the error.
DEADLINE = 30


def single(name: str, rank: int) -> Any:
    return dist.all_reduce(torch.full((4,), rank + 1.0, device=name), async_op=True)


def packed(name: str, rank: int, parts: list[torch.Tensor] | None = None) -> Any:
    """Sums a list, which is packed into a temporary."""
    parts = parts or [torch.full((n,), rank + 1.0, device=name) for n in (3, 5)]
    return backend_of(name).allreduce_coalesced(parts, dist.AllreduceCoalescedOptions())


def message(name: str, rank: int) -> Any:
    value = torch.full((4,), rank + 1.0, device=name)
    return dist.isend(value, 1) if rank == 0 else dist.irecv(value, 0)


def batch(name: str, rank: int) -> Any:
    out = torch.empty(4, device=name)
    pair = [dist.P2POp(dist.isend, torch.ones(4, device=name), 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]
    return dist.batch_isend_irecv(pair)[0]


def region(name: str, rank: int) -> Any:
    sums = [torch.full((n,), rank + 1.0, device=name) for n in (3, 5)]
    with dist._coalescing_manager(device=torch.device(name), async_ops=True) as made:
        for each in sums:
            dist.broadcast(each, 0)
    return made.works[0]


CALLS: dict[str, tuple[Callable[[str, int], Any], str]] = {
    "single": (single, "all_reduce number 3"),
    "list": (packed, "all_reduce_coalesced number 3"),
    "message": (message, "send with rank 1"),
    "batch": (batch, "send with rank 1"),
    "region": (region, "broadcast number"),
    "child": (single, "all_reduce number"),
}


def fails_once(ctx: Context, vendor: str, what: str, how: str) -> None:
    call = CALLS[what][0]
    if how == "refused" and CARD:
        raise NeedsSimulatorError("no card refuses a launch")
    if how == "refused" and ctx.rank == 0:
        # The simulator refuses the call with this number; the calls that prepare the test have smaller ones.
        os.environ["SAGELLM_SIM_REFUSE_AT"] = "7" if what == "message" else "3"
    device, name = start(ctx, vendor, timeout=timedelta(seconds=DEADLINE), bound=what == "child")
    if what == "child":
        group = dist.split_group(split_ranks=[[0, 1]], timeout=timedelta(seconds=DEADLINE))
        assert group is not None
        dist.distributed_c10d._update_default_pg(group)
    for _ in range(2):
        value = torch.ones(4, device=name)
        dist.all_reduce(value)
        holds(value, 2)
    if what == "message":
        for _ in range(2):  # makes both communicators
            value = torch.ones(4, device=name)
            dist.send(value, 1) if ctx.rank == 0 else dist.recv(value, 0)
    torch.accelerator.synchronize()
    dist.barrier()
    parts = [torch.full((n,), ctx.rank + 1.0, device=name) for n in (3, 5)]
    torch.accelerator.synchronize()
    # Both ranks must have left the barrier before rank 0's call fails. If the group fails before a rank sees that the
    # device has finished a call, the rank counts this call as failed; this holds for the barrier, too.
    ctx.tell("past the barrier")
    own, begin = "", time.monotonic()
    with device.full() if how == "memory" and ctx.rank == 0 else nullcontext():
        try:
            ctx.listen()  # from now on the failure of rank 0 may be raised here
            begin = time.monotonic()
            work = packed(name, ctx.rank, parts) if what == "list" else call(name, ctx.rank)
        except RuntimeError as error:
            own = str(error)
        else:
            own = expect_raises(RuntimeError, lambda: work.wait(timedelta(seconds=DEADLINE)))
    took = time.monotonic() - begin
    later = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(4, device=name)))
    ctx.tell((own, took, later))
    ctx.listen()  # if this rank exited, the other rank would report that instead
    os._exit(0)


#: CNCL cannot split communicators. Only a list allocates device memory before its launch, so only a list can run out.
CASES = [(vendor, what, "refused") for vendor in VENDORS for what in CALLS if (vendor, what) != ("cncl", "child")]
if not torch_at_least(2, 13):  # split_group of older torch needs a cuda device
    CASES = [case for case in CASES if case[1] != "child"]
CASES += [(vendor, "list", "memory") for vendor in VENDORS]


@pytest.mark.parametrize("vendor,what,how", CASES)
def test_a_call_that_fails_on_one_rank_fails_the_group_on_all(
    vendor: str, what: str, how: str, libraries: dict[str, Path]
) -> None:
    """The library refuses a launch, or torch has no memory to prepare one; the other rank learns which call failed."""
    with launch(fails_once, 2, vendor, what, how, env=environment(vendor, libraries)) as job:
        assert [job.hear(rank) for rank in range(2)] == ["past the barrier"] * 2
        for rank in range(2):
            job.say(rank, "go")
        said = [job.hear(rank) for rank in range(2)]
        words = "out of memory" if how == "memory" else "failed in"
        assert words in said[0][0], said[0]
        whole = CALLS[what][1]
        for own, took, later in (said[1], (said[0][2], said[0][1], said[0][2])):
            assert whole in own and "could not be launched on this rank" in own and words in own, said
            assert "rank 0 of group" in own and "rank 0 of group" in later, said
            assert took < patience(1), said
        for rank in range(2):
            job.say(rank, "go")


@contextmanager
def one_more_thread() -> Iterator[None]:
    """Within the block only one thread with a stack of the default size can be started: two such stacks are larger than
    the address space that the process has left."""
    stack = 1 << 30
    attributes = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None)
    libc.pthread_getattr_default_np(attributes)
    usual = ctypes.c_size_t()
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(usual))

    def set_size(size: int) -> None:
        assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size)) == 0
        assert libc.pthread_setattr_default_np(attributes) == 0

    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    set_size(stack)
    resource.setrlimit(resource.RLIMIT_AS, (used + stack * 3 // 2, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        set_size(usual.value)


def threads() -> set[str]:
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


def lacks_a_thread(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor, timeout=timedelta(seconds=DEADLINE))
    other = dist.new_group(timeout=timedelta(seconds=DEADLINE))
    dist.barrier()
    own = ""
    with one_more_thread() if ctx.rank == 0 else nullcontext():
        try:
            work = single(name, ctx.rank)
        except RuntimeError as error:
            own = str(error)
        else:
            own = expect_raises(RuntimeError, lambda: work.wait(timedelta(seconds=DEADLINE)))
        started = threads()
    ctx.tell((own, started))
    ctx.listen()  # the other rank has its error
    value = torch.ones(4, device=name)
    dist.all_reduce(value, group=other)
    holds(value, 2)
    ctx.tell(threads())
    ctx.listen()
    os._exit(0)


@on_simulator_alone
def test_a_call_for_which_no_thread_is_left_fails_its_group_and_the_next_one_starts_the_thread(
    libraries: dict[str, Path],
) -> None:
    """The first call on a device starts the thread that watches calls, and a second thread for the case that the first
    one's queries hang. If the system refuses the second thread, the call fails on all ranks, and the next call starts
    it."""
    with launch(lacks_a_thread, 2, "nccl", env=environment("nccl", libraries)) as job:
        (own, started), (others, _) = (job.hear(rank) for rank in range(2))
        assert "Resource temporarily unavailable" in own, own
        assert "sagellm-device" in started and "sagellm-overdue" not in started, started
        assert "rank 0 of group" in others and "could not be launched on this rank" in others, others
        for rank in range(2):
            job.say(rank, "go")
        for rank in range(2):
            assert {"sagellm-device", "sagellm-overdue"} <= job.hear(rank)
        for rank in range(2):
            job.say(rank, "go")
