"""Device tensors that vendors' libraries carry: the whole path from Python to the vendor's ABI, over simulators.

The device is that of `simdevice`, its streams and events are those of a simulated runtime, and the core uses a
simulator of NCCL, HCCL or CNCL (tests/simulators), which is asynchronous and as strict as the real library. Nothing
here says anything about real hardware.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_device
import pytest
import simdevice
import torch
import torch.distributed as dist
from harness import Context, expect_raises, launch, run_fresh
from on_device import backend_of, holds
from simulated import CARD, VENDORS, environment, exit_code, start

ROOT = Path(__file__).resolve().parents[3]
#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)


def on_simulator(
    ctx: Context, vendor: str, body: Callable[..., Any], args: tuple[Any, ...], how: dict[str, Any]
) -> Any:
    """Runs a body of `on_device` in a new group."""
    _, name = start(ctx, vendor, **how)
    value = body(ctx, name, *args)
    dist.destroy_process_group()
    return value


# ------------------------------------------------------------------------------------------------ every call


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize(
    "world_size,queue,native",
    [(1, None, True), (2, None, True), (3, None, True), (2, 0.001, False), (2, None, False)],
)
def test_every_collective_gives_the_numbers_of_the_cpu(
    vendor: str, world_size: int, queue: float | None, native: bool, libraries: dict[str, Path]
) -> None:
    """Rule 32: each collective, synchronous and asynchronous, with and without torch's raw handles and a queue on the
    host."""
    # CNCL has no 64-bit floats: test_what_a_library_has_not_is_refused_or_converted_where_allowed
    without = ("all_reduce of several types",) if vendor == "cncl" else ()
    exact = not CARD or world_size < 3  # NCCL may add the parts of three ranks in another order
    given = (vendor, on_device.every_call, (without, exact), {"queue": queue, "native": native})
    run_fresh(on_simulator, world_size, *given, env=environment(vendor, libraries), timeout=120)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("vendor", VENDORS)
def test_every_type_and_op_gives_the_numbers_of_the_cpu(
    vendor: str, world_size: int, libraries: dict[str, Path]
) -> None:
    """Includes operations that are cast, divided, scaled or combined by each rank. `tests/it/device_lowering.rs` tests
    the same on a model."""
    without = (torch.float64, torch.complex128) if vendor == "cncl" else ()
    given = (vendor, on_device.every_type, (vendor, without), {})
    run_fresh(on_simulator, world_size, *given, env=environment(vendor, libraries))


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_path_is_told_and_counted_and_cpu_tensors_share_the_group(vendor: str, libraries: dict[str, Path]) -> None:
    """Explain names the library and the steps that were composed, statistics count, and one backend object serves both
    devices."""
    run_fresh(on_simulator, 2, vendor, on_device.path_taken, (vendor,), {}, env=environment(vendor, libraries))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("vendor", VENDORS)
def test_tensors_of_the_host_and_the_device_are_under_way_together(
    vendor: str, world_size: int, libraries: dict[str, Path]
) -> None:
    """Host and device tensors, objects and subgroups in one group."""
    run_fresh(on_simulator, world_size, vendor, on_device.host_and_device, (), {}, env=environment(vendor, libraries))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("vendor", VENDORS)
def test_lists_of_any_length(vendor: str, world_size: int, libraries: dict[str, Path]) -> None:
    """Several dtypes, and a thousand small tensors as a list, in a region and one by one."""
    run_fresh(on_simulator, world_size, vendor, on_device.lists, (), {}, env=environment(vendor, libraries))


@pytest.mark.parametrize("vendor", VENDORS)
def test_lists_of_tensors_travel_from_rank_to_rank(vendor: str, libraries: dict[str, Path]) -> None:
    run_fresh(on_simulator, 2, vendor, on_device.lists_travel, (), {}, env=environment(vendor, libraries))


@pytest.mark.parametrize("vendor", VENDORS)
def test_lists_of_tensors_need_no_rank_but_their_two(vendor: str, libraries: dict[str, Path]) -> None:
    """Only the two ranks take part, even if this is the group's first call on its device."""
    run_fresh(on_simulator, 3, vendor, on_device.lists_of_two, (), {}, env=environment(vendor, libraries))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("vendor", VENDORS)
def test_rule_20_messages_of_both_directions_do_not_wait_for_each_other(
    vendor: str, world_size: int, libraries: dict[str, Path]
) -> None:
    """Rule 20: two ranks that both send first, a ring of three, a batch, and a plain pair. A receive from any rank is
    refused."""
    run_fresh(on_simulator, world_size, vendor, on_device.messages, (), {}, env=environment(vendor, libraries))


def refused(ctx: Context) -> None:
    _, name = start(ctx, "cncl")
    wide = torch.ones(4, device=name, dtype=torch.float64)
    assert "64-bit floats" in expect_raises(ValueError, lambda: dist.all_reduce(wide))
    assert "64-bit floats" in expect_raises(ValueError, lambda: dist.broadcast(wide, 0))
    # No number was used and nothing was sent, so the group is usable.
    value = torch.ones(4, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    dist.destroy_process_group()


def converted(ctx: Context) -> None:
    _, name = start(ctx, "cncl")
    wide = torch.full((5,), ctx.rank + 0.5, device=name, dtype=torch.float64)
    dist.all_reduce(wide)
    holds(wide, 2.0)
    wide.fill_(ctx.rank + 0.25)
    dist.broadcast(wide, 1)
    holds(wide, 1.25)
    dist.destroy_process_group()


def test_what_a_library_has_not_is_refused_or_converted_where_allowed(libraries: dict[str, Path]) -> None:
    """CNCL's device stores float64 in 32 bits, so it is refused, or converted if the user allows it."""
    run_fresh(refused, 2, env=environment("cncl", libraries))
    run_fresh(converted, 2, env=environment("cncl", libraries, SAGELLM_DOUBLE_AS_FLOAT="1"))


def lists(ctx: Context, vendor: str) -> None:
    from torch_sagellm import explain

    _, name = start(ctx, vendor)
    # A tensor above the size limit for packing is a separate call; all calls are one launch.
    parts = [torch.full((n,), ctx.rank + 1.0, device=name) for n in (10, 300_000, 5, 0, 270_000, 7)]
    asked = dist.AllreduceCoalescedOptions()
    asked.asyncOp = True
    work = backend_of().allreduce_coalesced(parts, asked)
    work.wait()
    for part in parts:
        holds(part, 3)
    whole = explain(work)
    told = [each.decided for each in [whole, *whole.parts]]
    assert len(told) == 3 and all("one of 3 calls issued together" in each for each in told), told
    assert "4 tensors in one call" in told[0] and "tensors" not in told[1] + told[2], told
    parts = [torch.full((n,), ctx.rank + 1.0, device=name) for n in (10, 20, 30)]
    work = backend_of().allreduce_coalesced(parts, asked)
    work.wait()
    told = [explain(work).decided]
    assert "3 tensors in one call" in told[0] and "together" not in told[0], told
    # Calls on both devices in one region have one Work with one future.
    group = dist.group.WORLD
    assert group is not None
    host, there = torch.ones(4), torch.ones(5, device=name)
    group._start_coalescing(torch.device(name))
    dist.all_reduce(host, async_op=True)
    dist.all_reduce(there, async_op=True)
    work = group._end_coalescing(torch.device(name))
    values = work.get_future().wait()
    work.wait()
    for value, length in zip(sorted(values, key=len), (4, 5), strict=True):
        assert len(value) == length
        holds(value, 2)
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
def test_lists_are_packed_where_small_and_one_launch(vendor: str, libraries: dict[str, Path]) -> None:
    """Large tensors of a list are not copied; a region with host and device tensors has one future."""
    run_fresh(lists, 2, vendor, env=environment(vendor, libraries))


def internal_format(ctx: Context) -> None:
    _, name = start(ctx, "hccl")
    library = torch.library.Library("npu", "DEF")
    library.define("get_npu_format(Tensor self) -> int")
    # Like torch_npu's operator of this name, returns ND, or FRACTAL_NZ for a tensor that was cast to that format.
    library.impl("get_npu_format", lambda tensor: 29 if tensor.numel() == 77 else 2, "PrivateUse1")
    text = expect_raises(ValueError, lambda: dist.all_reduce(torch.ones(77, device=name)))
    assert "internal format" in text and "npu_format_cast" in text, text
    value = torch.ones(76, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    dist.destroy_process_group()


def test_internal_formats_are_refused_with_the_fix(libraries: dict[str, Path]) -> None:
    """torch_npu may store a tensor's elements in another order. Then nothing is sent, and the group stays usable."""
    run_fresh(internal_format, 2, env=environment("hccl", libraries))


# ------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("queue,native", [(None, True), (0.005, False), (None, False)])
def test_rule_32_kernels_of_both_sides_keep_their_order(
    vendor: str, queue: float | None, native: bool, libraries: dict[str, Path]
) -> None:
    """Rule 32: a late kernel is not overtaken, and memory that is freed early is not reused too soon."""
    how = {"queue": queue, "delay": 0.05, "native": native}
    run_fresh(on_simulator, 2, vendor, on_device.order, (), how, env=environment(vendor, libraries))


# ------------------------------------------------------------------------------------------------ graphs


def captured(ctx: Context, asynchronous: bool, pending: bool, told: bool) -> None:
    device, name = start(ctx, "nccl", delay=0.0)
    driver = ctypes.CDLL(os.environ["SAGELLM_TEST_RUNTIME"])
    n = ctx.world_size
    value, gathered = torch.empty(100, device=name).fill_(1), torch.empty(100 * n, device=name).fill_(0)
    dist.all_reduce(value)  # makes the communicator
    on_device.counted("all_reduce", 1)
    works = []
    if pending:
        # The watching thread polls this operation during the capture.
        with torch.Stream(device=name):
            device.kernel_delay(0.3)
            late = torch.empty(50, device=name).fill_(ctx.rank + 1)
            device.kernel_delay(0.0)
            works.append(dist.all_reduce(late, async_op=True))
    stream = ctypes.c_void_p(torch.accelerator.current_stream().native_handle)
    graph, playable = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
    with device.capturing(told):
        for work in (
            dist.all_reduce(value, async_op=asynchronous),
            dist.all_gather_into_tensor(gathered, value, async_op=asynchronous),
        ):
            if work is not None:
                work.wait()
        time.sleep(0.1)
    code = driver.cuStreamEndCapture(stream, ctypes.byref(graph))
    assert code == 0, f"the capture was broken: {code}"
    holds(value, n)
    assert driver.cuGraphInstantiateWithFlags(ctypes.byref(playable), graph, ctypes.c_uint64(0)) == 0
    for turn in (2, 3, 4):
        assert driver.cuGraphLaunch(playable, stream) == 0
        holds(gathered, n**turn)
    for work in works:
        work.wait()
        holds(late, on_device.total(n))
    dist.all_reduce(value)
    holds(value, n**5)
    dist.destroy_process_group()


@pytest.mark.skipif(not simdevice.Device.can_capture(), reason="this torch does not ask devices about captures")
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_rule_31_a_captured_call_is_played_again(
    asynchronous: bool, pending: bool, told: bool, libraries: dict[str, Path]
) -> None:
    """A graph of two calls gives correct numbers at every launch, even with an operation in flight at the same time.

    If `told`, torch's part of the device reports the capture; otherwise only the runtime does.
    """
    run_fresh(captured, 2, asynchronous, pending, told, env=environment("nccl", libraries))


def replay_hangs(ctx: Context, idle: bool) -> None:
    device, name = start(ctx, "nccl", delay=0.0)
    driver = ctypes.CDLL(os.environ["SAGELLM_TEST_RUNTIME"])
    value = torch.empty(100, device=name).fill_(1)
    dist.all_reduce(value)  # makes the communicator
    holds(value, ctx.world_size)
    time.sleep(idle)  # until the thread that watches devices sleeps
    stream = ctypes.c_void_p(torch.accelerator.current_stream().native_handle)
    graph, playable = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
    with device.capturing():
        dist.all_reduce(value)
    assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
    assert driver.cuGraphInstantiateWithFlags(ctypes.byref(playable), graph, ctypes.c_uint64(0)) == 0
    dist.barrier()
    if ctx.rank == 0:
        assert driver.cuGraphLaunch(playable, stream) == 0
        ctx.tell("launched")
        ctx.tell(expect_raises(dist.DistBackendError, torch.accelerator.synchronize))
    ctx.listen()
    os._exit(0)


@pytest.mark.skipif(not simdevice.Device.can_capture(), reason="this torch does not ask devices about captures")
@pytest.mark.parametrize("idle", [False, True], ids=["at once", "after a while"])
def test_a_replay_that_waits_for_a_dead_rank_ends(idle: bool, libraries: dict[str, Path]) -> None:
    """No thread watches the replay itself, but while a group has captured calls, a thread checks for dead ranks."""
    with launch(replay_hangs, 2, idle, env=environment("nccl", libraries, SAGELLM_SIM_TIMEOUT_MS="300000")) as job:
        assert job.hear(0) == "launched"
        job.signal(1, signal.SIGKILL)
        text = job.hear(0)
        assert "rank 1 (pid" in text and "a replay of all_reduce" in text, text
        job.say(0, "go")


def captures_again(ctx: Context) -> None:
    """Captures again and again in a group that then ends, like a program with changing shapes."""
    import torch_sagellm

    device, name = start(ctx, "nccl", delay=0.0)
    driver = ctypes.CDLL(os.environ["SAGELLM_TEST_RUNTIME"])
    stream = ctypes.c_void_p(torch.accelerator.current_stream().native_handle)

    def memory_of_groups() -> int:
        return sum("/memfd:sagellm" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = memory_of_groups()
    group = dist.new_group(pg_options=torch_sagellm.Options(vendor="nccl"))
    value = torch.empty(100, device=name).fill_(1)
    dist.all_reduce(value, group=group)  # makes the communicator
    holds(value, ctx.world_size)
    assert memory_of_groups() > before, "or the test shows nothing"
    for _ in range(20):
        graph = ctypes.c_size_t()
        assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
        with device.capturing():
            dist.all_reduce(value, group=group)
        assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
        assert driver.cuGraphDestroy(graph) == 0
    dist.destroy_process_group(group)
    del group
    gc.collect()
    deadline = time.monotonic() + 20
    while memory_of_groups() > before:
        assert time.monotonic() < deadline, "a captured call keeps its group"
        time.sleep(0.05)
    dist.destroy_process_group()


@pytest.mark.skipif(not simdevice.Device.can_capture(), reason="this torch does not ask devices about captures")
def test_captured_calls_keep_nothing_of_a_group_that_has_ended(libraries: dict[str, Path]) -> None:
    run_fresh(captures_again, 2, env=environment("nccl", libraries))


#: The functions of the simulated runtimes that begin and end a capture.
CAPTURES = {
    "nccl": ("cuStreamBeginCapture_v2", "cuStreamEndCapture"),
    "hccl": ("aclmdlRICaptureBegin", "aclmdlRICaptureEnd"),
    "cncl": ("cnrtQueueBeginCapture", "cnrtQueueEndCapture"),
}


def first_in_capture(ctx: Context, vendor: str, told: bool) -> None:
    device, name = start(ctx, vendor)
    value = torch.ones(10, device=name)
    torch.accelerator.synchronize(name)
    runtime, (begin, end) = ctypes.CDLL(os.environ["SAGELLM_TEST_RUNTIME"]), CAPTURES[vendor]
    stream, graph = ctypes.c_void_p(torch.accelerator.current_stream().native_handle), ctypes.c_size_t()
    assert getattr(runtime, begin)(stream, 0) == 0
    with device.capturing(told):
        text = expect_raises(ValueError, lambda: dist.all_reduce(value))
    assert getattr(runtime, end)(stream, ctypes.byref(graph)) == 0, "the capture was broken"
    assert "captured" in text and "before the capture" in text, text
    dist.all_reduce(value)
    holds(value, ctx.world_size)
    dist.destroy_process_group()


@pytest.mark.skipif(not simdevice.Device.can_capture(), reason="this torch does not ask devices about captures")
@pytest.mark.parametrize("vendor,told", [("nccl", True), ("nccl", False), ("hccl", False), ("cncl", False)])
def test_rule_31_a_first_call_within_a_capture_is_refused(vendor: str, told: bool, libraries: dict[str, Path]) -> None:
    """The call would have to create the communicator. The group stays usable, even if only the runtime reports the
    capture."""
    run_fresh(first_in_capture, 2, vendor, told, env=environment(vendor, libraries))


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.skipif(CARD, reason="a card computes other bits than the CPU; tests/py/gpu compares with torch's nccl")
@pytest.mark.parametrize("program", [on_device.ddp, on_device.fsdp], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_training_gives_the_losses_and_parameters_of_the_cpu(
    vendor: str, program: Callable[..., Any], libraries: dict[str, Path]
) -> None:
    """Four steps of DistributedDataParallel and of `fully_shard` give the same bits."""
    given = (vendor, on_device.trained_as_on_the_cpu, (program, False, 4), {"delay": 0.0})
    first, second = run_fresh(on_simulator, 2, *given, env=environment(vendor, libraries), timeout=90)
    assert len(first) == len(second) == 4


# ------------------------------------------------------------------------------------------------ failure


def peer_dies(ctx: Context, vendor: str) -> str:
    from datetime import timedelta

    _, name = start(ctx, vendor, timeout=timedelta(seconds=40))
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    if ctx.rank == 1:
        ctx.listen()  # until the other rank's operation is in flight
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(value, async_op=True)
    begin = time.monotonic()
    ctx.tell("issued")
    try:
        work.wait(timedelta(seconds=30))
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    took = time.monotonic() - begin
    assert took < 10, took
    os._exit(0 if "rank 1" in text and "all_reduce" in text else 3)


def hangs(ctx: Context, vendor: str) -> str:
    from datetime import timedelta

    _, name = start(ctx, vendor)
    dist.all_reduce(torch.ones(10, device=name))
    ctx.set_timeout(timedelta(seconds=3))
    if ctx.rank == 1:
        ctx.listen()
        os._exit(0)
    work = dist.all_reduce(torch.ones(10, device=name), async_op=True)
    text = ""
    try:
        work.wait(timedelta(seconds=30))
    except RuntimeError as error:
        text = str(error)
    ctx.tell(text)
    os._exit(0)


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_dead_peer_ends_what_waits_for_it(vendor: str, libraries: dict[str, Path]) -> None:
    """The error names the rank and the operation, and comes long before the deadline."""
    with launch(peer_dies, 2, vendor, env=environment(vendor, libraries)) as job:
        assert job.hear(0) == "issued"
        job.say(1, "go")
        assert exit_code(job.ranks[0]) == 0


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_missing_rank_is_named_at_the_deadline(vendor: str, libraries: dict[str, Path]) -> None:
    """The stalled operation fails with its number and the rank that has not issued it."""
    with launch(hangs, 2, vendor, env=environment(vendor, libraries)) as job:
        text = job.hear(0)
        assert "Timed out after 3.0 s in all_reduce number 2" in text, text
        assert (
            "rank 1" in text and "has not entered it, its last collective is all_reduce number 1 on a device" in text
        ), text
        job.say(1, "go")


def first_message_without_a_receive(ctx: Context, vendor: str) -> None:
    """A first message to rank 1, which dies or does not receive."""
    from datetime import timedelta

    _, name = start(ctx, vendor)
    dist.barrier()
    ctx.set_timeout(timedelta(seconds=3))
    if ctx.rank == 1:
        ctx.tell("ready")
        if ctx.listen() == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    elif ctx.rank == 0:
        text = expect_raises(RuntimeError, lambda: dist.isend(torch.ones(10, device=name), 1))
        # The group has failed.
        ctx.tell(text + " / " + expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(10, device=name))))
    os._exit(0)


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_first_message_without_a_receive_ends_at_the_deadline(vendor: str, libraries: dict[str, Path]) -> None:
    """Both ranks must call to create the communicator of their messages. The error names the rank that has not
    called."""
    with launch(first_message_without_a_receive, 2, vendor, env=environment(vendor, libraries)) as job:
        text = job.hear(0)
        assert text.count("Timed out after 3.0 s in its first message with rank 1") == 2, text
        job.say(1, "go")


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_first_message_to_a_rank_that_dies_ends_at_once(vendor: str, libraries: dict[str, Path]) -> None:
    """The error comes long before the deadline and has the pid."""
    with launch(first_message_without_a_receive, 2, vendor, env=environment(vendor, libraries)) as job:
        assert job.hear(1) == "ready"
        job.say(1, "die")
        text = job.hear(0)
        assert f"rank 1 (pid {job.ranks[1].pid}" in text and "Timed out" not in text, text


def leaves_first(ctx: Context, vendor: str) -> None:
    """Rank 0 leaves while rank 1 is dead or is late to receive what rank 0 has sent."""
    from datetime import timedelta

    _, name = start(ctx, vendor, timeout=timedelta(seconds=300))
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    dist.broadcast(value.clone(), 0)  # the first broadcast would wait for the other rank
    if ctx.rank == 1:
        ctx.tell("idle")
        if ctx.listen() == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        ctx.listen()
        value.fill_(7)
    if ctx.rank == 1 or ctx.listen() == "send":
        dist.broadcast(value, 0)
    ctx.tell("leaves")
    dist.destroy_process_group()
    holds(value, 7)


@pytest.mark.parametrize("vendor", VENDORS)
def test_leaving_does_not_wait_for_a_dead_peer(vendor: str, libraries: dict[str, Path]) -> None:
    """Takes far less than the group's timeout, although the simulated library waits for the other rank without
    limit."""
    patient = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(leaves_first, 2, vendor, env=patient) as job:
        assert job.hear(1) == "idle"
        job.say(1, "die")
        assert exit_code(job.ranks[1]) == -signal.SIGKILL
        job.say(0, "leave")
        job.say(0, "do not send")
        assert exit_code(job.ranks[0]) == 0


@pytest.mark.parametrize("vendor", VENDORS)
def test_leaving_waits_for_a_peer_that_lives(vendor: str, libraries: dict[str, Path]) -> None:
    """A message arrives although the receiver calls long after the sender called `destroy_process_group`."""
    patient = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(leaves_first, 2, vendor, env=patient) as job:
        assert job.hear(1) == "idle"
        job.say(0, "leave")
        job.say(0, "send")
        assert job.hear(0) == "leaves"
        time.sleep(6)  # longer than a rank waits for its peers after one of them has died
        job.say(1, "go on")
        assert [exit_code(rank) for rank in job.ranks] == [0, 0]


def third_leaves(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor)
    if ctx.rank > 0:
        value = torch.empty(10, device=name).fill_(ctx.rank)
        for late in (False, True):
            work = dist.irecv(value, 2) if ctx.rank == 1 else None
            if late:
                ctx.tell("waits") if ctx.rank == 1 else ctx.listen()
            work = work or dist.isend(value, 1)
            assert work is not None
            work.wait()
            holds(value, 2)
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
def test_messages_go_on_when_a_third_rank_leaves(vendor: str, libraries: dict[str, Path]) -> None:
    with launch(third_leaves, 3, vendor, env=environment(vendor, libraries)) as job:
        assert exit_code(job.ranks[0]) == 0
        assert job.hear(1) == "waits"
        time.sleep(1.5)  # longer than ranks wait for data of a rank that has left
        job.say(2, "go")
        assert [exit_code(rank) for rank in job.ranks] == [0, 0, 0]


def just_ends(ctx: Context, vendor: str) -> None:
    from datetime import timedelta

    device, name = start(ctx, vendor, timeout=timedelta(seconds=300))
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    if ctx.rank == 1:
        ctx.listen()  # never issues what rank 0 has in flight
    else:
        device.kernel_delay(0.0)
        ctx.kept = dist.all_reduce(value, async_op=True)  # type: ignore[attr-defined]  # alive when the process exits
        ctx.tell("under way")


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_process_ends_although_work_is_under_way(vendor: str, libraries: dict[str, Path]) -> None:
    """The exit waits neither for `destroy_process_group`, which is not called, nor for an operation that never ends."""
    patient = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(just_ends, 2, vendor, env=patient, normal_exit=True) as job:
        assert job.hear(0) == "under way"
        assert exit_code(job.ranks[0]) == 0
        job.say(1, "go")


def leaves_early(ctx: Context, vendor: str) -> None:
    device, name = start(ctx, vendor)
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    torch.accelerator.synchronize(name)
    device.kernel_delay(0.3)
    work = dist.all_reduce(value.add_(0), async_op=True)
    dist.destroy_process_group()
    work.wait()  # an error here would mean that the communicator was closed during the operation
    holds(value, 4)


@pytest.mark.parametrize("vendor", VENDORS)
def test_work_under_way_ends_well_before_the_group_does(vendor: str, libraries: dict[str, Path]) -> None:
    """`destroy_process_group` right after an operation loses no data."""
    run_fresh(leaves_early, 2, vendor, env=environment(vendor, libraries), normal_exit=True)


def asynchronous_error(ctx: Context, vendor: str, before: int) -> None:
    from datetime import timedelta

    _, name = start(ctx, vendor, timeout=timedelta(seconds=20))
    value = torch.ones(10, device=name)
    earlier = [dist.all_reduce(value, async_op=True) for _ in range(before)]
    work = dist.all_reduce(value, async_op=True)
    begin = time.monotonic()
    text = expect_raises(RuntimeError, lambda: work.wait(timedelta(seconds=15)))
    took = time.monotonic() - begin
    # Every later call has the same error, on the device and on the CPU.
    for late in (value, torch.ones(3)):
        later = expect_raises(RuntimeError, lambda late=late: dist.all_reduce(late))
        assert LATE_WORDS[vendor] in later, later
    ctx.tell((text, took, len(earlier)))
    ctx.listen()  # if this rank exited, the other rank would report that instead
    os._exit(0)


#: Texts of the simulated libraries for an operation that has failed on the device.
LATE_WORDS = {
    "nccl": "remote process exited or there was a network error (simulated NCCL) (ncclResult_t 6)",
    "hccl": "error cqe (simulated HCCL) (HcclResult 21)",
    "cncl": "CNCL_RET_ERR_ASYNC_ERROR (simulated CNCL) (cnclResult_t 0x16)",
}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("vendor", VENDORS)
def test_an_error_that_comes_up_later_reaches_the_work(vendor: str, before: int, libraries: dict[str, Path]) -> None:
    """The simulated library fails an operation. The error of the operation's Work has a number and the library's text.

    If other operations are in flight, the error may be detected at one of those.
    """
    more = environment(vendor, libraries, SAGELLM_SIM_ERROR_AT=str(before + 1))
    with launch(asynchronous_error, 2, vendor, before, env=more) as job:
        for text, took, _ in [job.hear(rank) for rank in range(2)]:
            numbers = [f"all_reduce number {number} on " in text for number in range(1, before + 2)]
            assert any(numbers) and LATE_WORDS[vendor] in text, text
            assert took < 10, took
        for rank in range(2):
            job.say(rank, "go")
        assert [exit_code(rank) for rank in job.ranks] == [0, 0]


def without_library(ctx: Context) -> None:
    import torch_sagellm

    simdevice.install("npu")
    ctx.init()
    value = torch.ones(5, device="npu")
    dist.all_reduce(value)
    holds(value, 2)
    reason = dist.group.WORLD._get_backend(torch.device("cpu"))._device_reason("npu")
    assert "HCCL was not found" in reason and "Tried" in reason, reason
    dist.destroy_process_group()
    assert torch_sagellm is not None


def test_without_a_library_tensors_go_through_host_memory_and_the_reason_says_what_was_tried() -> None:
    """A slow path is always reported."""
    run_fresh(without_library, 2)


def named_library(ctx: Context) -> None:
    import torch_sagellm

    simdevice.install("npu")
    ctx.init(pg_options=torch_sagellm.Options(vendor="hccl:/nowhere/libhccl.so"))
    assert "/nowhere/libhccl.so" in expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(2, device="npu")))
    dist.destroy_process_group()


def test_a_library_that_is_named_and_missing_is_an_error() -> None:
    """A user who names a library gets this library or an error."""
    run_fresh(named_library, 2)


# ------------------------------------------------------------------------------------------------ benchmarks


def measured(ctx: Context, vendor: str) -> dict[str, Any]:
    import torch_sagellm

    sys.path.append(str(ROOT / "benchmarks"))
    import gpu

    _, name = start(ctx, vendor, delay=0.0)
    words = ["--quick", "--ops", "all_reduce,all_gather_into_tensor,barrier", "--sizes", "8,64KiB", "--many", "10"]
    arguments = gpu.parse_args([*words, "--rounds", "2", "--budget", "0.02"])
    arguments.device = name
    # The other backend cannot serve this device, so this package's backend takes its place.
    options = {"backend": ctx.backend, "pg_options": torch_sagellm.Options(vendor=vendor)}
    groups = {label: dist.new_group(**options) for label in ("sagellm", gpu.THEIRS, gpu.CONTROL)}
    single, many = gpu.measure_all(arguments, groups)
    arguments.clock = "device"
    case = gpu.Case("broadcast", 4096, torch.float32, 2, name)
    plain = [gpu.Backend(label, group) for label, group in groups.items()]
    single.append(gpu.collectives.measure(case, plain, arguments, 5.0))
    dist.destroy_process_group()
    return {"single": single, "many": many, "table": gpu.many_table(many), "verdict": gpu.verdict(single)}


def test_the_benchmark_of_devices_runs_and_checks_its_results(libraries: dict[str, Path]) -> None:
    """`benchmarks/gpu.py` without the other backend: every form, correct results, complete tables. Nothing is timed
    here."""
    (found,) = run_fresh(measured, 1, "nccl", env=environment("nccl", libraries))
    cases = [("all_reduce", 8), ("all_reduce", 64 << 10), ("all_gather_into_tensor", 8)]
    cases += [("all_gather_into_tensor", 64 << 10), ("barrier", 0), ("broadcast", 4096)]
    assert [(row["op"], row["size"]) for row in found["single"]] == cases
    for row in found["single"] + found["many"]:
        assert all(timed.get("samples", 0) > 0 for timed in row["times"].values()), row
    assert len(found["many"]) == 1 and found["table"][-1].count("|") == found["table"][-2].count("|")
    assert " of 6 cases" in found["verdict"]
