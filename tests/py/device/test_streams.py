"""The stream machinery for vendors' libraries, driven by a launcher of the tests on the test device.

Every combination of two facts of a device: whether torch's streams tell their raw handle, and whether a queue on the
host stands in front of the streams. Kernels take their time, so what is not ordered is seen.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import simdevice
import torch
from harness import Context, expect_raises, run_fresh

KERNEL = 0.02  # seconds
COUNT = 1000
WAYS = [(native, queue) for native in (True, False) for queue in (None, 0.003)]
ways = pytest.mark.parametrize("native,queue", WAYS, ids=lambda each: str(each))


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Built before the first deadline runs."""
    simdevice.library_path()


def start(ctx: Context, native: bool, queue: float | None, name: str = "npu") -> tuple[simdevice.Device, Any]:
    """The device and an operation on it that copies.

    There is a group, as in any program: with the first one comes the step at exit that stops the watch of works.
    """
    from sagellm import _load

    ctx.init()
    device = simdevice.install(name)
    device.native_handles(native)
    device.kernel_delay(KERNEL)
    device.host_queue(queue)
    return device, _load.extension()._Echo(device.launcher())


def full(value: float, where: str = "npu") -> torch.Tensor:
    """A tensor that a slow kernel fills; it is not there yet when this returns."""
    return torch.empty(COUNT, device=where).fill_(value)


def holds(tensor: torch.Tensor, value: float) -> None:
    found = tensor.cpu()
    assert (found == value).all(), (value, found.unique())


def asynchronous(ctx: Context, native: bool, queue: float | None) -> None:
    device, echo = start(ctx, native, queue)
    with device.held():
        source, target = full(3), full(9)
        work = echo.copy([source], [target], async_op=True)
        # The caller's stream goes on; what it writes next may not overtake, nor be overtaken by, the operation.
        other = full(1)
        work.wait()
        assert not work.is_completed(), "nothing can have run"
        after = target.clone()
        source.fill_(5)
    holds(after, 3)
    holds(other, 1)
    holds(source, 5)
    end = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < end
    assert work.is_success() and work.exception() is None


@ways
def test_rule_32_streams_are_ordered_both_ways(native: bool, queue: float | None) -> None:
    """Rule 32: behind what the caller's stream held, and before what it holds after wait(), which blocks no host."""
    run_fresh(asynchronous, 1, native, queue)


def without_wait(ctx: Context) -> None:
    device, echo = start(ctx, True, None)
    source, target = full(3), full(9)
    torch.npu.synchronize()
    device.kernel_delay(0.5)
    work = echo.copy([source], [target], async_op=True)
    device.kernel_delay(0)
    early = target.clone()
    holds(early, 9)
    work.wait()
    holds(target, 3)


def test_rule_32_the_device_shows_what_is_not_ordered() -> None:
    """The control: who does not wait reads the old numbers. Otherwise the tests of this file would prove nothing."""
    run_fresh(without_wait, 1)


def freed_early(ctx: Context, native: bool, queue: float | None) -> None:
    _, echo = start(ctx, native, queue)
    targets, works = [], []
    for turn in range(4):
        source, target = full(turn), full(-1)
        works.append(echo.copy([source], [target], async_op=True))
        targets.append(target)
        del source
        # The next tensor of that size would be given the same memory.
        full(100 + turn)
    dropped = full(-1)
    works.append(echo.copy([full(7)], [dropped], async_op=True))
    del dropped
    fresh = full(50)
    for work in works:
        work.wait()
    for turn, target in enumerate(targets):
        holds(target, turn)
    holds(fresh, 50)


@ways
def test_rule_10_tensors_live_until_the_stream_has_passed(native: bool, queue: float | None) -> None:
    """Rule 10: a tensor that is dropped right after the call is not given out again before the device is through."""
    run_fresh(freed_early, 1, native, queue)


def synchronous(ctx: Context, native: bool, queue: float | None) -> None:
    _, echo = start(ctx, native, queue)
    side = torch.npu.Stream()
    for stream in (torch.npu.current_stream(), side):
        with stream:
            source, target = full(4), full(9)
            echo.copy([source], [target], async_op=False)
            source.fill_(0)
            after = target * 2
            holds(after, 8)
            source, target = full(4), full(9)
            # Operators of torch on both sides of the raw part.
            echo.copy([source], [target], async_op=False, scale=0.5)
            holds(target, 4)
            echo.copy([source], [target], async_op=True, scale=2.0).wait()
            holds(target, 4)


@ways
def test_a_synchronous_operation_is_in_the_callers_stream(native: bool, queue: float | None) -> None:
    """No wait is needed, on the default stream and on another one; operators before and after keep their order."""
    run_fresh(synchronous, 1, native, queue)


def many(ctx: Context, native: bool, queue: float | None) -> None:
    device, echo = start(ctx, native, queue)
    device.kernel_delay(0.001)
    turns = 40
    value = full(0)
    for turn in range(turns):
        value.add_(1)
        target = full(-1)
        work = echo.copy([value], [target], async_op=turn % 3 > 0)
        work.wait()
        value = target.clone()
    holds(value, turns)
    if native:
        assert device.raw_events() == 0
    else:
        assert 0 < device.raw_events() < turns, "raw events are used again"


@ways
def test_raw_events_are_used_again_only_when_nobody_waits_for_them(native: bool, queue: float | None) -> None:
    """An event that is recorded anew while a wait for it is still in the host queue would let the wait pass."""
    run_fresh(many, 1, native, queue)


def second_device(ctx: Context, native: bool) -> None:
    _, echo = start(ctx, native, None)
    assert torch.npu.current_device() == 0
    found: list[BaseException] = []

    def body() -> None:
        try:
            source, target = full(6, "npu:1"), full(9, "npu:1")
            work = echo.copy([source], [target], async_op=True)
            (value,) = work.get_future().then(lambda done: [each * 2 for each in done.value()]).wait()
            holds(value, 12)
            work.wait()
            holds(target, 6)
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=body) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not found, found
    assert torch.npu.current_device() == 0


@pytest.mark.parametrize("native", [True, False])
def test_threads_get_the_device_of_the_tensors(native: bool) -> None:
    """A runtime knows the device by thread; ours must set it before they touch a raw handle, also of another device."""
    run_fresh(second_device, 1, native)


def futures(ctx: Context) -> None:
    _, echo = start(ctx, True, 0.002)
    source, target = full(3), full(9)
    work = echo.copy([source], [target], async_op=True)
    future = work.get_future()
    assert future.done(), "a device's future is complete at issue"
    seen = torch.npu.Stream()
    with seen:
        (value,) = future.wait()
        assert value.data_ptr() == target.data_ptr()
        holds(value.clone(), 3)
    assert work.get_future() is not None and work.result()[0].data_ptr() == target.data_ptr()


def test_futures_order_whoever_takes_the_value() -> None:
    """The value is a list of tensors; wait() and callbacks put their stream behind it."""
    run_fresh(futures, 1)


def host_waits(ctx: Context, native: bool) -> None:
    from datetime import timedelta

    device, echo = start(ctx, native, None)
    source, target = full(3), full(9)
    work = echo.copy([source], [target], async_op=True, blocks_host=True)
    work.wait()
    assert work.is_completed()
    with device.held():
        work = echo.copy([source], [target], async_op=True)
        text = expect_raises(RuntimeError, lambda: work.wait(timedelta(milliseconds=20)))
    assert "20 ms" in text and "goes on" in text
    work.wait(timedelta(seconds=20))
    assert work.is_completed()
    device.kernel_delay(KERNEL)
    assert "enable_collectives_timing" in expect_raises(RuntimeError, work._get_duration)
    echo.time()
    work = echo.copy([source], [target], async_op=True)
    work.wait(timedelta(seconds=20))
    assert KERNEL * 1000 <= work._get_duration() < 10_000


@pytest.mark.parametrize("native", [True, False])
def test_rule_11_a_wait_with_a_timeout_blocks_the_host(native: bool) -> None:
    """Rule 11 on a device: it elapses for its caller only. A barrier's wait blocks; durations come from events."""
    run_fresh(host_waits, 1, native)


def leaves(ctx: Context) -> None:
    device, echo = start(ctx, True, 0.01)
    device.kernel_delay(0.2)
    for _ in range(5):
        echo.copy([full(1)], [full(2)], async_op=True)


def test_exit_with_work_on_the_device() -> None:
    """Nothing hangs or aborts when the process ends before the device is through."""
    run_fresh(leaves, 1, timeout=20)
