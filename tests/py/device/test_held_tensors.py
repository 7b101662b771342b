"""Calls hold their tensors until the caller's stream waits for them, and not longer (not until the next call)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from harness import Context, run_fresh
from limits import patience
from simulated import VENDORS, environment, start

pytestmark = pytest.mark.timeout(900)


def batch(ctx: Context, name: str) -> list[Any]:
    given, got = torch.ones(64, device=name), torch.empty(64, device=name)
    peer = (ctx.rank + 1) % 2
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, given, peer), dist.P2POp(dist.irecv, got, peer)])


def region(ctx: Context, name: str) -> list[Any]:
    with dist._coalescing_manager(device=torch.device(name), async_ops=True) as made:
        for _ in range(2):
            dist.broadcast(torch.ones(64, device=name), 0)
    return list(made.works)


def message(ctx: Context, name: str) -> list[Any]:
    value = torch.ones(64, device=name)
    return [dist.isend(value, 1) if ctx.rank == 0 else dist.irecv(value, 0)]


def every(ctx: Context, name: str) -> dict[str, Callable[[], list[Any]]]:
    """Returns each kind of call, as a function that keeps no references except the returned works."""

    def works(run: Callable[[bool], tuple[Any, list[torch.Tensor]]]) -> Callable[[], list[Any]]:
        return lambda: [run(True)[0]]

    calls = {what: works(run) for what, run in on_device.calls(2, ctx.rank, name).items()}
    calls.pop("barrier")
    # dist.all_reduce_coalesced returns torch's future, whose `wait` does not call the Work. So its tensors are held
    # until the device has finished the call, and no longer. A list is packed by operators for which this device waits,
    # so no list is passed while the device is held.
    return calls | {
        "batch": lambda: batch(ctx, name),
        "region": lambda: region(ctx, name),
        "message": lambda: message(ctx, name),
    }


def settled(device: Any) -> int:
    """Returns the number of allocations in use when no operation is in flight. Waits until the number has been stable
    for longer than an allocation may stay in the list that `comes_back_to` describes. If the number were one too high,
    the test would miss an allocation that is freed too early."""
    torch.accelerator.synchronize()
    gc.collect()
    dist.all_reduce(torch.ones(1))  # any call of this package drops the references of ended operations
    count, since = int(device.blocks()), time.monotonic()
    while time.monotonic() < since + patience(0.5):
        time.sleep(0.02)
        now = int(device.blocks())
        if now != count:
            count, since = now, time.monotonic()
    return count


def comes_back_to(device: Any, before: int) -> bool:
    """Waits until `before` allocations are in use; False if that takes too long. If the watch detects the call's end
    before the program drops the Work, the Work goes to a list that a thread empties after a tenth of a second."""
    end = time.monotonic() + patience(2)
    while device.blocks() != before and time.monotonic() < end:
        time.sleep(0.02)
        gc.collect()
    return bool(device.blocks() == before)


def holds_nothing(ctx: Context, vendor: str, native: bool) -> None:
    device, name = start(ctx, vendor, native=native, delay=0.0)
    calls = every(ctx, name)
    if vendor == "cncl":
        calls.pop("all_reduce of several types")
    for call in calls.values():  # makes communicators, streams and what libraries keep
        for work in call():
            work.wait()
        del work
    kept, before = [], settled(device)
    for what, call in calls.items():
        works = call()
        for work in works:
            work.wait()
        del works, work
        gc.collect()
        if not comes_back_to(device, before):
            kept.append((what, device.blocks() - before))
            before = settled(device)
    assert not kept, kept
    # The device may not have reached the call yet.
    for call in (
        calls["batch"],
        calls["region"],
        lambda: [dist.all_reduce(torch.ones(64, device=name), async_op=True)],
    ):
        torch.accelerator.synchronize()
        with device.held():
            works = call()
            for work in works:
                work.wait()
            del works, work
            gc.collect()
            assert device.blocks() == before, device.blocks() - before
    # The Work is dropped without a wait. The tensor is held only while the call runs, not until the next call.
    dist.all_reduce(torch.ones(64, device=name), async_op=True)
    assert comes_back_to(device, before), device.blocks() - before
    # If the program waits on a stream other than the tensor's, the tensor is held until the call ends.
    value = torch.ones(64, device=name)
    with device.held():
        work = dist.all_reduce(value, async_op=True)
        with torch.Stream(device=name):
            work.wait()
        del value, work
        gc.collect()
        assert device.blocks() > before
    assert comes_back_to(device, before), device.blocks() - before
    # A Work that is kept keeps its results.
    value = torch.ones(64, device=name)
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    del value
    on_device.holds(work.result()[0], 2)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("vendor", VENDORS)
def test_an_asynchronous_call_holds_no_tensor_beyond_wait(
    vendor: str, native: bool, libraries: dict[str, Path]
) -> None:
    """Soon after a call of any kind, a list, a batch or a region has ended, nothing is held, even without another
    call."""
    run_fresh(holds_nothing, 2, vendor, native, env=environment(vendor, libraries), timeout=120)
