"""Groups with device tensors that are created and destroyed leave nothing behind: a process has as many streams,
threads and descriptors after many groups as after a few."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, run_fresh
from on_device import holds
from simulated import VENDORS, environment, start

pytestmark = pytest.mark.timeout(600)

FEW, MANY = 4, 16
# Threads of a process. Each is started when first needed, which may be after the first groups. The second progress
# thread belongs to the simulator, whose library contains another copy of the engine.
OF_PROCESS = Counter(["sagellm-progres", "sagellm-progres", "sagellm-device", "sagellm-overdue"])


def threads() -> Counter[str]:
    """Returns the threads of this process by name; each stream of a simulator has one."""
    names: Counter[str] = Counter()
    for thread in Path("/proc/self/task").iterdir():
        try:
            names[(thread / "comm").read_text().strip()] += 1
        except OSError:
            pass  # it has just ended
    return names


def use(ctx: Context, name: str) -> None:
    """Makes a group, runs a collective of each form and messages in both directions, and destroys the group."""
    group = dist.new_group()
    value = torch.full((100,), ctx.rank + 1.0, device=name)
    dist.all_reduce(value, group=group)
    work = dist.all_reduce(value, group=group, async_op=True)
    assert work is not None
    work.wait()
    holds(value, 6)
    peer, came = 1 - ctx.rank, torch.empty(100, device=name)
    calls = [dist.P2POp(dist.isend, value, peer, group), dist.P2POp(dist.irecv, came, peer, group)]
    for work in dist.batch_isend_irecv(calls if ctx.rank == 0 else calls[::-1]):
        work.wait()
    if ctx.rank == 0:
        dist.send(value, 1, group=group)
    else:
        dist.recv(came, 0, group=group)
    holds(came, 6)
    dist.barrier(group=group)
    dist.destroy_process_group(group)


def grows(ctx: Context, vendor: str, native: bool) -> None:
    _, name = start(ctx, vendor, delay=0, native=native)
    for _ in range(FEW):
        use(ctx, name)
    gc.collect()
    time.sleep(1)  # threads of ended communicators end
    few, opened = threads() | OF_PROCESS, len(os.listdir("/proc/self/fd"))
    for _ in range(MANY - FEW):
        use(ctx, name)
    gc.collect()
    # A thread of the callback pool ends after 10 s without a job. Until a new thread has set its name, it has the name
    # of the thread that started it.
    end = time.monotonic() + 15
    while True:
        time.sleep(1)
        many, still_opened = threads(), len(os.listdir("/proc/self/fd"))
        if (not many - few and still_opened <= opened) or time.monotonic() > end:
            break
    dist.destroy_process_group()
    assert many - few == Counter(), f"threads after {FEW} groups: {few}, after {MANY}: {many}"
    assert still_opened <= opened, f"descriptors after {FEW} groups: {opened}, after {MANY}: {still_opened}"


@pytest.mark.parametrize("native", [True, False], ids=["native", "hidden"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_groups_on_devices_leave_no_streams_threads_or_descriptors(
    vendor: str, native: bool, libraries: dict[str, Path]
) -> None:
    """With torch streams that show their raw handle, and with the engine's own streams, as for devices that hide it."""
    run_fresh(grows, 2, vendor, native, env=environment(vendor, libraries))
