"""An exception ends coalescing regions and batches. Afterwards the group works as if they had never begun."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_fresh
from on_device import backend_of
from simulated import ONE_CARD, VENDORS, environment, start

pytestmark = [pytest.mark.timeout(900), beyond_gloo("torch's own manager stays open after an exception")]
CARRIERS = ["cpu", *VENDORS]


def refused_argument(ctx: Context, at: str, batch: bool) -> None:
    if batch:
        into_itself = torch.ones(1, device=at).expand(4)
        dist.batch_isend_irecv(in_order(at, good(ctx, at), dist.P2POp(dist.irecv, into_itself, 1 - ctx.rank)))
        return
    with dist._coalescing_manager(device=torch.device(at), async_ops=False):
        dist.broadcast(torch.ones(4, device=at), 0)
        dist.broadcast(torch.ones(4, device=at), 7)


def second_device(ctx: Context, at: str, batch: bool) -> None:
    other = torch.ones(4, device=at.replace(":0", ":1"))
    if batch:
        dist.batch_isend_irecv([good(ctx, at), dist.P2POp(dist.irecv, other, 1 - ctx.rank)])
        return
    with dist._coalescing_manager(device=torch.device(at), async_ops=False):
        dist.broadcast(torch.ones(4, device=at), 0)
        dist.broadcast(other, 0)


def programs_own(ctx: Context, at: str, batch: bool) -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise KeyError("the program's own")

    broken(ctx, at, batch, fail)


def ctrl_c(ctx: Context, at: str, batch: bool) -> None:
    broken(ctx, at, batch, lambda *given, **named: signal.raise_signal(signal.SIGINT))


def broken(ctx: Context, at: str, batch: bool, fail: Callable[..., None]) -> None:
    """Calls `fail` in the region, after a call of this package."""
    if batch:
        bad = good(ctx, at)
        bad.op = fail
        dist.batch_isend_irecv(in_order(at, good(ctx, at), bad))
        return
    with dist._coalescing_manager(device=torch.device(at), async_ops=False):
        dist.broadcast(torch.ones(4, device=at), 0)
        dist.all_reduce(torch.ones(4, device=at))
        fail()


def good(ctx: Context, at: str) -> Any:
    return dist.P2POp(dist.isend, torch.ones(4, device=at), 1 - ctx.rank)


def in_order(at: str, sound: Any, bad: Any) -> list[Any]:
    """Returns the batch. On the CPU a batch is issued message by message, so messages before the exception would be
    sent. There the bad message is first."""
    return [bad, sound] if at == "cpu" else [sound, bad]


WAYS: dict[Callable[[Context, str, bool], None], tuple[type[BaseException], str]] = {
    refused_argument: (ValueError, "sagellm"),
    second_device: (ValueError, "expected all on one device"),
    programs_own: (KeyError, "the program's own"),
    ctrl_c: (KeyboardInterrupt, ""),
}


def exchange(ctx: Context, at: str) -> None:
    """Checks that the next batch works."""
    got = torch.empty(4, device=at)
    given = torch.full((4,), ctx.rank + 5.0, device=at)
    pair = [dist.P2POp(dist.isend, given, 1 - ctx.rank), dist.P2POp(dist.irecv, got, 1 - ctx.rank)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    on_device.holds(got, 1 - ctx.rank + 5.0)


def region(ctx: Context, at: str) -> None:
    """Checks that the next region works."""
    sums, sent = torch.ones(6, device=at), torch.full((5,), ctx.rank + 1.0, device=at)
    with dist._coalescing_manager(device=torch.device(at), async_ops=True) as made:
        dist.broadcast(sent, 1)
    made.wait()
    with dist._coalescing_manager():
        dist.all_reduce(sums)
    on_device.holds(sums, 2)
    on_device.holds(sent, 2)


def goes_on(ctx: Context, carrier: str) -> None:
    at = "cpu"
    if carrier == "cpu":
        ctx.init()
    else:
        at = start(ctx, carrier)[1] + ":0"
    expected = {what: run(False)[1] for what, run in every(ctx, "cpu").items()}
    for way, (kind, text) in WAYS.items():
        if way is second_device and (carrier == "cpu" or ONE_CARD):
            continue
        for batch in (False, True):
            what = f"{way.__name__}, {'batch' if batch else 'manager'}"
            told = expect_raises(kind, lambda way=way, batch=batch: way(ctx, at, batch))
            assert text in told, (what, told)
            for call, run in every(ctx, at).items():
                for found, right in zip(run(False)[1], expected[call], strict=True):
                    assert torch.equal(found.cpu(), right), (what, call, found.cpu(), right)
            message(ctx, at)
            region(ctx, at)
            exchange(ctx, at)
    dist.barrier()
    dist.destroy_process_group()


def every(ctx: Context, at: str) -> dict[str, Callable[[bool], tuple[Any, list[torch.Tensor]]]]:
    calls = on_device.calls(ctx.world_size, ctx.rank, at)
    calls.pop("all_reduce of several types")  # torch's function refuses several dtypes
    return calls


def message(ctx: Context, at: str) -> None:
    value = torch.full((9,), 3.0 + ctx.rank, device=at)
    if ctx.rank == 0:
        dist.send(value, 1)
    else:
        dist.recv(value, 0)
    on_device.holds(value, 3)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_exception_inside_a_region_or_a_batch_ends_it(carrier: str, libraries: dict[str, Path]) -> None:
    """After the exception, whichever code raises it, each synchronous call gives its numbers, and the next region and
    batch work."""
    env = {} if carrier == "cpu" else environment(carrier, libraries)
    run_fresh(goes_on, 2, carrier, env=env, timeout=120)


def at_every_moment(ctx: Context, carrier: str) -> int:
    """Interrupts a region at every point at which the interpreter checks for signals (at the start of a function and
    after a call of a C function), from the region's beginning through one call to its end. Calls must work while the
    exception, and with it every frame, is alive."""
    at = "cpu"
    if carrier == "cpu":
        ctx.init()
    else:
        at = start(ctx, carrier)[1] + ":0"
    region(ctx, at)
    moment, struck = 0, True
    while struck:
        left, struck = moment, False

        def strike(frame: Any, event: str, _: Any) -> None:
            nonlocal left
            if event in ("call", "c_return"):
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        try:
            sys.setprofile(strike)
            with dist._coalescing_manager(device=torch.device(at), async_ops=True):
                dist.broadcast(torch.ones(4, device=at), 0)
            sys.setprofile(None)
        except KeyboardInterrupt:
            struck = True
            sums = torch.full((4,), ctx.rank + 1.0, device=at)
            dist.all_reduce(sums)
            on_device.holds(sums, 3)
        region(ctx, at)
        moment += 1
    dist.destroy_process_group()
    return moment


@pytest.mark.parametrize("carrier", ["cpu", "nccl"])
def test_a_signal_at_any_moment_of_a_region_ends_it(carrier: str, libraries: dict[str, Path]) -> None:
    env = {} if carrier == "cpu" else environment(carrier, libraries)
    moments = run_fresh(at_every_moment, 2, carrier, env=env, timeout=120)
    assert moments[0] == moments[1] > 20, moments


def by_hand(ctx: Context) -> None:
    """Programs that call the manager's functions themselves, and continue after a refusal."""
    _, name = start(ctx, "nccl")
    group, at = dist.group.WORLD, torch.device(name)
    assert group is not None
    group._start_coalescing(at)
    refused = expect_raises(ValueError, lambda: dist.broadcast(torch.ones(4, device=name), 7))
    value = torch.full((4,), ctx.rank + 1.0, device=name)
    dist.broadcast(value, 1)  # runs immediately, outside of a region
    on_device.holds(value, 2)
    assert expect_raises(ValueError, lambda: group._end_coalescing(at)) == refused
    assert "no open region" in expect_raises(ValueError, lambda: group._end_coalescing(at))
    with dist._coalescing_manager(device=at), pytest.raises(ValueError, match="open already"):
        group._start_coalescing(at)
    theirs = dist.new_group(backend="gloo")
    with dist._coalescing_manager(group=theirs):
        sums = torch.ones(3)
        dist.all_reduce(sums, group=theirs)
    on_device.holds(sums, 2)
    assert backend_of(name).supports_coalescing
    dist.destroy_process_group()


def test_the_end_of_a_refused_region_raises_the_refusal(libraries: dict[str, Path]) -> None:
    run_fresh(by_hand, 2, env=environment("nccl", libraries))


def second_thread(ctx: Context, carrier: str) -> None:
    at = "cpu"
    if carrier == "cpu":
        ctx.init()
    else:
        at = start(ctx, carrier)[1] + ":0"
    region(ctx, at)
    texts: list[str] = []

    def enters() -> None:
        manager = dist._coalescing_manager(device=torch.device(at))
        texts.append(expect_raises(ValueError, manager.__enter__))

    for call in (dist.broadcast, dist.all_reduce):  # the first goes to the backend directly, torch collects the second
        sent = torch.full((4,), ctx.rank + 1.0, device=at)
        with dist._coalescing_manager(device=torch.device(at)):
            call(sent, **({"src": 1} if call is dist.broadcast else {}))
            thread = threading.Thread(target=enters)
            thread.start()
            thread.join()
        on_device.holds(sent, 2 if call is dist.broadcast else 3)
    assert "open already" in texts[0] and "non-empty op list" in texts[1], texts
    region(ctx, at)
    exchange(ctx, at)
    dist.destroy_process_group()


@pytest.mark.parametrize("carrier", ["cpu", "nccl"])
def test_a_second_thread_gets_no_region_and_leaves_that_of_the_first_alone(
    carrier: str, libraries: dict[str, Path]
) -> None:
    """A group has one region at a time (docs/fusion.md)."""
    env = {} if carrier == "cpu" else environment(carrier, libraries)
    run_fresh(second_thread, 2, carrier, env=env)
