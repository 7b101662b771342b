"""Order between a vendor's library and torch's streams: a group of one rank over simulated HCCL.

The tests run for every combination of two facts about a device: whether torch's streams return their raw handle, and
whether a queue on the host precedes the streams. Kernels and collectives are slow, so that a missing dependency shows.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simdevice
import torch
import torch.distributed as dist
from harness import TIMES_WORKS, Context, error_of, expect_raises, run_fresh
from on_device import backend_of
from simulated import environment
from simulated import start as start_group

KERNEL = 0.02  # seconds
COUNT = 1000
WAYS = [(native, queue) for native in (True, False) for queue in (None, 0.003)]
ways = pytest.mark.parametrize("native,queue", WAYS, ids=lambda each: str(each))


#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)
#: Runs a test body on one rank over the simulators.
Run = Callable[..., Any]


@pytest.fixture
def run(libraries: dict[str, Path], tmp_path: Path) -> Run:
    def on_one_rank(body: Callable[..., Any], *args: Any, slow: float = KERNEL, timeout: float = 60) -> Any:
        us = str(int(slow * 1e6))
        env = environment("hccl", libraries, SAGELLM_SIM_SLOW_US=us, SAGELLM_SIM_TRACE=str(tmp_path / "trace"))
        return run_fresh(body, 1, *args, env=env, timeout=timeout)

    return on_one_rank


def start(ctx: Context, native: bool, queue: float | None) -> simdevice.Device:
    """Installs the device and creates a group that has its communicator for the device."""
    device, _ = start_group(ctx, "hccl", queue=queue, delay=KERNEL, native=native)
    copy(full(0), full(0)).wait()
    return device


def copy(source: torch.Tensor, target: torch.Tensor, async_op: bool = True) -> Any:
    """Makes a call of the library that copies: an all_gather of one rank."""
    return dist.all_gather_into_tensor(target, source, async_op=async_op)


def full(value: float, where: str = "npu") -> torch.Tensor:
    """Returns a tensor that a slow kernel fills. The kernel has not run yet when this returns."""
    return torch.empty(COUNT, device=where).fill_(value)


def holds(tensor: torch.Tensor, value: float) -> None:
    found = tensor.cpu()
    assert (found == value).all(), (value, found.unique())


def asynchronous(ctx: Context, native: bool, queue: float | None) -> None:
    device = start(ctx, native, queue)
    with device.held():
        source, target = full(3), full(9)
        work = copy(source, target)
        # The caller's stream continues. Its later writes must neither overtake the operation nor be overtaken by it.
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
    assert work.is_success() and error_of(work) is None


@ways
def test_rule_32_streams_are_ordered_both_ways(native: bool, queue: float | None, run: Run) -> None:
    """Rule 32: the library runs after the earlier work of the caller's stream, and the stream's work after wait() runs
    after the library. wait() does not block the host."""
    run(asynchronous, native, queue)


def without_wait(ctx: Context) -> None:
    device = start(ctx, True, None)
    source, target = full(3), full(9)
    torch.npu.synchronize()
    device.kernel_delay(0)
    work = copy(source, target)
    early = target.clone()
    holds(early, 9)
    work.wait()
    holds(target, 3)


def test_rule_32_the_device_shows_what_is_not_ordered(run: Run) -> None:
    """The control: code that does not wait reads the old numbers. Otherwise the tests of this file would prove
    nothing."""
    run(without_wait, slow=0.5)


def freed_early(ctx: Context, native: bool, queue: float | None) -> None:
    start(ctx, native, queue)
    targets, works = [], []
    for turn in range(4):
        source, target = full(turn), full(-1)
        works.append(copy(source, target))
        targets.append(target)
        del source
        # The next tensor of this size would get the same memory.
        full(100 + turn)
    dropped = full(-1)
    works.append(copy(full(7), dropped))
    del dropped
    fresh = full(50)
    for work in works:
        work.wait()
    for turn, target in enumerate(targets):
        holds(target, turn)
    holds(fresh, 50)


@ways
def test_rule_10_tensors_live_until_the_stream_has_passed(native: bool, queue: float | None, run: Run) -> None:
    """Rule 10: the memory of a tensor that is dropped right after the call is not reused before the device has
    finished."""
    run(freed_early, native, queue)


def synchronous(ctx: Context, native: bool, queue: float | None) -> None:
    start(ctx, native, queue)
    side = torch.npu.Stream()
    for stream in (torch.npu.current_stream(), side):
        with stream:
            source, target = full(4), full(9)
            copy(source, target, async_op=False)
            source.fill_(0)
            after = target * 2
            holds(after, 8)
            # torch's operators run before and after the library's call.
            value = full(8)
            dist.all_reduce(value, dist._make_nccl_premul_sum(0.5))
            holds(value, 4)
            dist.all_reduce(value, dist.ReduceOp.AVG, async_op=True).wait()
            holds(value, 4)


@ways
def test_a_synchronous_operation_is_in_the_callers_stream(native: bool, queue: float | None, run: Run) -> None:
    """No wait is needed, on the default stream and on another one; operators before and after keep their order."""
    run(synchronous, native, queue)


def many(ctx: Context, native: bool, queue: float | None) -> None:
    device = start(ctx, native, queue)
    device.kernel_delay(0.001)
    turns = 40
    value = full(0)
    for turn in range(turns):
        value.add_(1)
        target = full(-1)
        work = copy(value, target, async_op=turn % 3 > 0)
        if work is not None:
            work.wait()
        value = target.clone()
    holds(value, turns)
    if native:
        return
    calls = Path(f"{os.environ['SAGELLM_SIM_TRACE']}.{os.getpid()}").read_text()
    streams = set(re.findall(r"HcclAllGather .*stream=(\w+)", calls))
    assert len(streams) == 1, "one raw stream of the group's own"
    recorded = re.findall(rf"aclrtRecordEvent event=(\w+) stream={streams.pop()}$", calls, re.M)
    assert len(recorded) > turns > len(set(recorded)) > 0, "raw events are used again"


@ways
def test_raw_events_are_used_again_only_when_no_stream_waits_for_them(
    native: bool, queue: float | None, run: Run
) -> None:
    """If an event were recorded again while a wait for it is still in the host queue, the wait would pass too early."""
    run(many, native, queue)


def many_streams(ctx: Context) -> None:
    """Makes calls on many streams of the program. Then calls barriers until they no longer wait for calls that have
    ended."""
    start(ctx, True, None)
    trace = Path(f"{os.environ['SAGELLM_SIM_TRACE']}.{os.getpid()}")
    count = 20
    # Kept, because the handle of a destroyed stream may be reused.
    streams = [torch.npu.Stream() for _ in range(count)]
    for stream in streams:
        with stream:
            copy(full(1), full(0), async_op=False)
    torch.npu.synchronize()
    waits, end = count, time.monotonic() + 20
    while waits > 1 and time.monotonic() < end:
        time.sleep(0.05)
        before = trace.read_text().count("aclrtStreamWaitEvent ")
        dist.barrier(device_ids=[0])
        waits = trace.read_text().count("aclrtStreamWaitEvent ") - before
    assert waits <= 1, f"a barrier waits for {waits} streams of {count}, and all have ended"
    assert trace.read_text().count("aclrtStreamWaitEvent ") > 0, "the trace names such a wait in another way"


def test_rule_33_a_barrier_waits_for_no_stream_whose_calls_have_ended(run: Run) -> None:
    """The end events of calls are released when they have passed, even if a program calls on many streams."""
    run(many_streams, slow=0.0)


def second_device(ctx: Context, native: bool) -> None:
    start(ctx, native, None)
    assert torch.npu.current_device() == 0
    found: list[BaseException] = []

    def body() -> None:
        try:
            source, target = full(6, "npu:1"), full(9, "npu:1")
            work = copy(source, target)
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
def test_threads_get_the_device_of_the_tensors(native: bool, run: Run) -> None:
    """A runtime has a current device per thread. Our threads must set it before they use a raw handle, also a handle of
    another device."""
    run(second_device, native)


def futures(ctx: Context) -> None:
    start(ctx, True, 0.002)
    source, target = full(3), full(9)
    work = copy(source, target)
    future = work.get_future()
    assert future.done(), "a device's future is complete at issue"
    seen = torch.npu.Stream()
    with seen:
        (value,) = future.wait()
        assert value.data_ptr() == target.data_ptr()
        holds(value.clone(), 3)
    assert work.get_future() is not None and work.result()[0].data_ptr() == target.data_ptr()


def test_futures_order_the_stream_that_takes_the_value(run: Run) -> None:
    """The value is a list of tensors. wait() and callbacks make the current stream wait for the operation."""
    run(futures)


def child_takes_a_future(ctx: Context) -> None:
    device = start(ctx, True, None)
    target = full(9)
    with device.held():
        work: Any = copy(full(3), target)
        assert work.get_future().done(), "the parent's is complete at issue: what the child gets is the fork's doing"
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = []
            try:
                for take in (work.get_future, work.get_future_result):
                    try:
                        take().wait()
                        said.append("nothing was raised")
                    except (ValueError, RuntimeError) as error:
                        said.append(str(error))
            finally:
                os.write(write, "\n".join(said).encode())
                os._exit(0)
        os.close(write)
        texts = os.read(read, 10_000).decode().split("\n")
        os.waitpid(pid, 0)
    assert len(texts) == 2 and all("forked child" in text for text in texts), texts
    work.wait()
    holds(target, 3)


def test_rule_26_a_forked_child_that_waits_for_a_future_of_a_device_is_refused(run: Run) -> None:
    """Rule 26: the child has neither the device nor the thread that sees the end of the operation. The parent's work
    completes as usual."""
    run(child_takes_a_future)


def host_waits(ctx: Context, native: bool) -> None:
    from datetime import timedelta

    device = start(ctx, native, None)
    source, target = full(3), full(9)
    copy(source, target)
    work: Any = dist.barrier(device_ids=[0], async_op=True)
    work.wait()
    assert work.is_completed()
    with device.held():
        work = copy(full(3), target)
        text = expect_raises(RuntimeError, lambda: work.wait(timedelta(milliseconds=20)))
    assert "20 ms" in text and "goes on" in text
    work.wait(timedelta(seconds=20))
    assert work.is_completed()
    device.kernel_delay(KERNEL)
    if not TIMES_WORKS:
        return
    assert "enable_collectives_timing" in expect_raises(RuntimeError, work._get_duration)
    backend_of("npu")._enable_collectives_timing()
    work = copy(source, target)
    work.wait(timedelta(seconds=20))
    assert KERNEL * 1000 <= work._get_duration() < 10_000


@pytest.mark.parametrize("native", [True, False])
def test_rule_11_a_wait_with_a_timeout_blocks_the_host(native: bool, run: Run) -> None:
    """Rule 11 on a device: an elapsed wait raises only in its caller. A barrier's wait blocks. Durations come from
    events."""
    run(host_waits, native)


def leaves(ctx: Context) -> None:
    start(ctx, True, 0.01)
    for _ in range(5):
        copy(full(1), full(2))


def test_exit_with_work_on_the_device(run: Run) -> None:
    """Nothing hangs or aborts if the process ends before the device has finished."""
    run(leaves, slow=0.2, timeout=20)
