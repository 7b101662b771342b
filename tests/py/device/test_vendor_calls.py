"""Side effects and requirements of a call: the thread's device, memory, names, captures, signals, messages to oneself.

The simulators refuse what would only damage a real library. Nothing here says anything about real hardware.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
import simdevice
import torch
import torch.distributed as dist
from harness import Context, expect_raises, launch, run_fresh, torch_at_least
from limits import patience
from on_device import backend_of, counted, holds, total
from simulated import CARD, ONE_CARD, VENDORS, NeedsSimulatorError, environment, exit_code, start
from test_held_tensors import settled

#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)


# ------------------------------------------------------------------------------------------------ the thread's device


def other_device(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor)
    assert torch.accelerator.current_device_index() == 0
    if ONE_CARD:
        raise NeedsSimulatorError("this machine has one card")
    value = torch.empty(100, device=f"{name}:1").fill_(ctx.rank + 1)
    dist.all_reduce(value)
    holds(value, total(2))
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    holds(value, 2 * total(2))
    parts = [torch.empty(100, device=f"{name}:1") for _ in range(2)]
    dist.all_gather(parts, value)
    for part in parts:
        holds(part, 2 * total(2))
    work = dist.isend(value, 1) if ctx.rank == 0 else dist.irecv(value, 0)
    assert work is not None
    work.wait()
    assert torch.accelerator.current_device_index() == 0, "the caller's device was not put back"
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
def test_tensors_of_a_device_that_is_not_the_current_one(vendor: str, libraries: dict[str, Path]) -> None:
    """The library launches on the thread's current device, so this must be the tensors' device for the whole call."""
    run_fresh(other_device, 2, vendor, env=environment(vendor, libraries))


# ------------------------------------------------------------------------------------------------ memory


def synchronous_memory(ctx: Context, vendor: str, native: bool) -> None:
    device, name = start(ctx, vendor, native=native)
    flat = torch.ones(64, device=name)
    forms: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(64, device=name)),
        lambda: dist.all_reduce(torch.ones(8, 8, device=name).t()),  # through a temporary
        lambda: dist.all_gather([torch.empty(64, device=name) for _ in range(2)], flat),
        lambda: dist.reduce_scatter_tensor(torch.empty(32, device=name), flat),
    ]
    for form in forms:  # the first calls make everything that is made only once
        form()
    before = settled(device)
    for at, form in enumerate(forms):
        with device.held():  # the call returns although no work on the device has begun
            form()
            gc.collect()
            assert device.blocks() == before, f"form {at} holds {device.blocks() - before} pieces of memory"
    torch.accelerator.synchronize(name)
    holds(flat, 1)
    dist.destroy_process_group()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_synchronous_call_holds_no_memory_when_it_has_returned(
    vendor: str, native: bool, libraries: dict[str, Path]
) -> None:
    """Memory that is freed on the caller's stream is reused only after the call, so the call need not keep it."""
    run_fresh(synchronous_memory, 2, vendor, native, env=environment(vendor, libraries))


class Owned(torch.Tensor):
    """A tensor that records the system's name of the thread that frees it."""

    given_back: ClassVar[list[str]] = []

    def __del__(self) -> None:
        Owned.given_back.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())


def outputs_of_a_dropped_work(ctx: Context, vendor: str) -> None:
    device, name = start(ctx, vendor, delay=0.0)
    with device.held():  # so the calling thread cannot see the end of the call
        value = torch.ones(64, device=name).as_subclass(Owned)
        dist.all_reduce(value, async_op=True)
        del value
    torch.accelerator.synchronize(name)
    counted("all_reduce", 1)
    deadline = time.monotonic() + 20
    while not Owned.given_back:  # without any call of this package
        assert time.monotonic() < deadline, "the tensor was never given back"
        time.sleep(0.01)
        gc.collect()
    assert set(Owned.given_back) == {"sagellm-call"}, Owned.given_back
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
def test_tensors_of_a_dropped_work_are_given_back_on_python_threads(vendor: str, libraries: dict[str, Path]) -> None:
    """Freeing a tensor may run Python, and the thread that watches the device must not wait for the GIL."""
    run_fresh(outputs_of_a_dropped_work, 2, vendor, env=environment(vendor, libraries))


# ------------------------------------------------------------------------------------------------ captures


def captured_statistics(ctx: Context, asynchronous: bool) -> None:
    import torch_sagellm

    device, name = start(ctx, "nccl", delay=0.0)
    driver = ctypes.CDLL(os.environ["SAGELLM_TEST_RUNTIME"])
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    counted("all_reduce", 1)
    stream = ctypes.c_void_p(torch.accelerator.current_stream().native_handle)
    graph = ctypes.c_size_t()
    assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
    with device.capturing():
        work = dist.all_reduce(value, async_op=asynchronous)
        # The host cannot wait for work that is recorded but not run.
        refused = expect_raises(ValueError, lambda: dist.barrier(device_ids=[0]))
        late = expect_raises(ValueError, lambda: dist.barrier(device_ids=[0], async_op=True))
        if work is not None:
            assert work.wait(timedelta(seconds=5)) and work.is_completed() and work.is_success()
        del work
    assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0, "the capture was broken"
    assert "captured into a graph" in refused and "outside of the capture" in refused, refused
    assert late == refused
    found = torch_sagellm.get_stats()
    assert (found["all_reduce_count"], found.get("all_reduce_failed", 0)) == (2, 0), found
    assert not [key for key, count in found.items() if key.endswith("_failed") and count], found
    dist.all_reduce(value)
    dist.barrier(device_ids=[0])
    dist.destroy_process_group()


@pytest.mark.skipif(not simdevice.Device.can_capture(), reason="this torch does not ask devices about captures")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_captured_call_is_counted_as_well_and_a_barrier_is_refused(
    asynchronous: bool, libraries: dict[str, Path]
) -> None:
    """The event of a captured call never completes, so its Work does not wait for it and ends immediately. A refused
    barrier uses no number and breaks no capture."""
    run_fresh(captured_statistics, 2, asynchronous, env=environment("nccl", libraries))


# ------------------------------------------------------------------------------------------------ barrier


def barrier_behind_all(ctx: Context, vendor: str, asynchronous: bool, named: bool) -> None:
    device, name = start(ctx, vendor, delay=0.0)
    dist.all_reduce(torch.ones(1, device=name))
    dist.barrier(device_ids=[0])
    side = torch.Stream(device=name)
    with side:
        device.kernel_delay(0.3)
        kept = torch.empty(1000, device=name).fill_(ctx.rank + 1)
        strided = torch.empty(2, 1000, device=name).fill_(ctx.rank + 1)
        device.kernel_delay(0.0)
        # The Works are dropped. A late copy kernel stores the second result; the third call is on the user's stream.
        dist.all_reduce(kept, async_op=True)
        device.kernel_delay(0.3)
        dist.all_reduce(strided.t(), async_op=True)
        late = torch.empty(1000, device=name).fill_(ctx.rank + 1)
        dist.all_reduce(late)
        device.kernel_delay(0.0)
    # Without a device number torch names the CPU, so the barrier runs there.
    work = dist.barrier(device_ids=[0] if named else None, async_op=asynchronous)
    if work is not None:
        work.wait()
    # Reads the memory without a stream: all collectives before the barrier have stored their results.
    for value in (kept, strided, late):
        memory = (ctypes.c_float * value.numel()).from_address(value.data_ptr())
        found = set(memory)
        assert found == {total(2)}, found
    dist.destroy_process_group()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_barrier_comes_behind_every_earlier_collective(
    vendor: str, asynchronous: bool, named: bool, libraries: dict[str, Path]
) -> None:
    """The barrier also waits for collectives whose Works were dropped and for collectives on other user streams."""
    run_fresh(barrier_behind_all, 2, vendor, asynchronous, named, env=environment(vendor, libraries))


def barrier_on_two_devices(ctx: Context) -> None:
    device, name = start(ctx, "nccl", delay=0.0)
    for index in range(2):
        dist.all_reduce(torch.ones(1, device=f"{name}:{index}"))
    dist.barrier(device_ids=[0])
    device.kernel_delay(0.3)
    value = torch.empty(1000, device=f"{name}:1").fill_(ctx.rank + 1)
    dist.all_reduce(value, async_op=True)
    device.kernel_delay(0.0)
    dist.barrier(device_ids=[0])
    found = set((ctypes.c_float * 1000).from_address(value.data_ptr()))
    assert found == {total(2)}, found
    dist.destroy_process_group()


def test_a_barrier_comes_behind_collectives_on_other_devices(libraries: dict[str, Path]) -> None:
    """A rank with two devices has one order of operations."""
    run_fresh(barrier_on_two_devices, 2, env=environment("nccl", libraries))


# ------------------------------------------------------------------------------------------------ communicators


def does_not_block(ctx: Context) -> None:
    _, name = start(ctx, "nccl")
    value = torch.ones(100, device=name)
    for _ in range(3):
        dist.all_reduce(value)
    holds(value, 8)
    for work in [dist.all_reduce(value, async_op=True) for _ in range(3)]:
        work.wait()
    holds(value, 64)
    large = [torch.full((300_000,), 1.0, device=name) for _ in range(2)]
    asked = dist.AllreduceCoalescedOptions()
    asked.asyncOp = True
    backend_of().allreduce_coalesced(large, asked).wait()
    for each in large:
        holds(each, 2)
    part = dist.split_group(split_ranks=[[0, 1]]) if torch_at_least(2, 13) else None
    if part is not None:
        dist.all_reduce(value, group=part)
        holds(value, 128)
    dist.destroy_process_group()


def test_a_variable_that_keeps_communicators_from_blocking_is_met(libraries: dict[str, Path]) -> None:
    """NCCL_COMM_BLOCKING=0 overrides the option in the library, so every call must be polled until it is done.

    The simulator refuses every call on a communicator that is in progress.
    """
    env = environment("nccl", libraries, NCCL_COMM_BLOCKING="0", SAGELLM_SIM_NCCL_DELAY_US="20000")
    run_fresh(does_not_block, 2, env=env)


def joins_for_ever(ctx: Context, vendor: str, first: str = "all_reduce") -> None:
    _, name = start(ctx, vendor, timeout=timedelta(seconds=300))
    value = torch.ones(10, device=name)
    if ctx.rank == 2:
        ctx.listen()
    begin = time.monotonic()
    try:
        ctx.tell("joins")  # the test may send a signal from here on
        if first == "all_reduce":
            dist.all_reduce(value)
        else:
            dist.send(value, 1) if ctx.rank == 0 else dist.recv(value, 0)
        text = "no error"
    except KeyboardInterrupt:
        text = "KeyboardInterrupt"
    except RuntimeError as error:
        text = str(error)
    ctx.tell((text, time.monotonic() - begin))
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_signal_ends_the_joining_of_a_communicator_everywhere(vendor: str, libraries: dict[str, Path]) -> None:
    """Ctrl-C on one rank raises there immediately, and the other rank gets an error; the group's timeout is five
    minutes."""
    env = environment(vendor, libraries, SAGELLM_SIM_INIT="hang", SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(joins_for_ever, 2, vendor, env=env) as job:
        for rank in range(2):
            assert job.hear(rank) == "joins"
        time.sleep(1)
        begin = time.monotonic()
        job.signal(0, signal.SIGINT)
        text, _ = job.hear(0)
        assert text == "KeyboardInterrupt", text
        other, _ = job.hear(1)
        assert "rank 0" in other and "interrupted" in other, other
        assert time.monotonic() - begin < 20
        for rank in range(2):
            job.say(rank, "go")
        assert [exit_code(rank) for rank in job.ranks] == [0, 0]


@pytest.mark.parametrize("ranks,first", [(2, "all_reduce"), (3, "message")])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_death_ends_the_joining_of_a_communicator(
    vendor: str, ranks: int, first: str, libraries: dict[str, Path]
) -> None:
    """The error names the dead rank and comes long before the group's timeout of five minutes. The death of a rank
    outside the communicator changes nothing."""
    env = environment(vendor, libraries, SAGELLM_SIM_INIT="hang", SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(joins_for_ever, ranks, vendor, first, env=env) as job:
        for rank in range(2):
            assert job.hear(rank) == "joins"
        time.sleep(1)
        for dead in reversed(range(1, ranks)):
            begin = time.monotonic()
            job.signal(dead, signal.SIGKILL)
            if dead == 2:
                time.sleep(1)
        text, _ = job.hear(0)
        assert f"rank 1 (pid {job.pid(1)}" in text and "Timed out" not in text, text
        assert time.monotonic() - begin < patience(1.5)
        job.say(0, "go")


def refused_on_rank_0(ctx: Context, vendor: str, sort: str) -> None:
    if ctx.rank == 0:
        os.environ["SAGELLM_SIM_INIT"] = "refuse"
    _, name = start(ctx, vendor, timeout=timedelta(seconds=300))
    value = torch.ones(10, device=name)
    begin = time.monotonic()
    if sort == "all_reduce":
        text = expect_raises(RuntimeError, lambda: dist.all_reduce(value))
    else:
        text = expect_raises(RuntimeError, lambda: dist.send(value, 1) if ctx.rank == 0 else dist.recv(value, 0))
    ctx.tell((text, time.monotonic() - begin))
    ctx.listen()  # if this rank exited, the other rank would report that instead
    os._exit(0)


@pytest.mark.skipif(CARD, reason="no card refuses a communicator")
@pytest.mark.parametrize("sort", ["all_reduce", "message"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_communicator_that_one_rank_cannot_make_fails_the_group_on_all(
    vendor: str, sort: str, libraries: dict[str, Path]
) -> None:
    """Both ranks get the library's error; the rank that did not cause it gets it long before the group's timeout of
    five minutes."""
    env = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(refused_on_rank_0, 2, vendor, sort, env=env) as job:
        for rank in range(2):
            text, took = job.hear(rank)
            assert " failed in " in text and "Timed out" not in text, (rank, text)
            assert rank == 0 or "rank 0" in text, text
            assert took < patience(3), (rank, took)
        for rank in range(2):
            job.say(rank, "go")


def refused_in_a_group(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor)
    ctx.tell(expect_raises(RuntimeError, lambda: dist.all_to_all_single(*torch.ones(2, 4, device=name))))
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("vendor", ["nccl", "cncl"])
def test_an_error_inside_a_group_of_the_library_is_the_one_that_is_reported(
    vendor: str, libraries: dict[str, Path]
) -> None:
    """Ending the library's group then fails too, but this second error says less."""
    with launch(refused_in_a_group, 2, vendor, env=environment(vendor, libraries, SAGELLM_SIM_REFUSE_AT="1")) as job:
        for rank in range(2):
            text = job.hear(rank)
            assert "failed in exchange" in text and "GroupEnd" not in text, text
        for rank in range(2):
            job.say(rank, "go")


# ------------------------------------------------------------------------------------------------ plugins


def without_rules(ctx: Context) -> None:
    import torch_sagellm

    _, name = start(ctx, "nccl")
    work = dist.all_reduce(torch.ones(10, device=name), async_op=True)
    work.wait()
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    for variable in (b"NCCL_TUNER_PLUGIN", b"NCCL_PROFILER_PLUGIN"):
        found = getenv(variable)
        assert (found is not None) == (os.environ.get("SAGELLM_EXPLAIN") == "1"), (variable, found)
    assert ("protocol" in torch_sagellm.explain(work).choice) == (os.environ.get("SAGELLM_EXPLAIN") == "1")
    # Too late: the simulated library looked for its plug-ins when it created the first communicator.
    late = dist.new_group(pg_options=torch_sagellm.Options(vendor="nccl", algorithm="all_reduce:0-=ring"))
    value = torch.ones(10, device=name)
    dist.all_reduce(value, group=late)
    holds(value, 2)
    dist.destroy_process_group()


@pytest.mark.parametrize("explains", [False, True])
def test_the_environment_is_left_alone_until_a_plugin_is_wanted(explains: bool, libraries: dict[str, Path]) -> None:
    """Without a rule for NCCL and without SAGELLM_EXPLAIN, torch's own NCCL and child processes see no variables of
    ours."""
    more = {"SAGELLM_EXPLAIN": "1"} if explains else {}
    env = environment("nccl", libraries, SAGELLM_LOG="warning", **more)
    with launch(without_rules, 2, env=env) as job:
        job.values()
        told = ["come too late for NCCL" in rank.output() for rank in job.ranks]
        assert told == [not explains] * 2, [rank.output() for rank in job.ranks]


# ------------------------------------------------------------------------------------------------ reductions


FLOATS_8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def floats_of_8_bits(ctx: Context, vendor: str, combines: bool) -> None:
    _, name = start(ctx, vendor)
    for dtype in FLOATS_8:
        values = torch.tensor([0.5, -1.0, 2.0, 8.0]).mul(ctx.rank + 1)
        value = values.to(dtype).to(name)
        if not combines:
            text = expect_raises(ValueError, lambda value=value: dist.all_reduce(value))
            assert "float8" in text and "convert to float16" in text, text
            continue
        dist.all_reduce(value)
        assert value.cpu().float().tolist() == [1.5, -3.0, 6.0, 24.0], value.cpu()
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
        assert value.cpu().float().tolist() == [1.5, -3.0, 6.0, 24.0], value.cpu()
        text = expect_raises(ValueError, lambda value=value: dist.all_reduce(value, op=dist.ReduceOp.BAND))
        assert "BAND" in text, text
    # The CPU still refuses such sums.
    text = expect_raises(ValueError, lambda: dist.all_reduce(torch.ones(4).to(torch.float8_e5m2)))
    assert "only moved" in text, text
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor,version", [("nccl", 23007), ("nccl", 22300), ("hccl", 0), ("cncl", 0)])
def test_floats_of_8_bits_are_combined_where_the_library_can(
    vendor: str, version: int, libraries: dict[str, Path]
) -> None:
    """NCCL supports them since 2.24. The other libraries refuse them with advice."""
    env = environment(vendor, libraries, SAGELLM_SIM_NCCL_VERSION=str(version or 23007))
    run_fresh(floats_of_8_bits, 2, vendor, version >= 22400, env=env)


def factor_on_the_device(ctx: Context, vendor: str) -> None:
    device, name = start(ctx, vendor, delay=0.0)
    dist.all_reduce(torch.ones(4, device=name))
    torch.accelerator.synchronize(name)
    for dtype, factor_dtype in [
        (torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64),
        (torch.bfloat16, torch.bfloat16), (torch.int32, torch.float32),
    ]:  # fmt: skip
        if vendor == "cncl" and factor_dtype == torch.float64:
            continue
        factor = torch.zeros(1, device=name, dtype=factor_dtype)
        value = torch.ones(16, device=name, dtype=dtype).mul_(ctx.rank + 1)
        with device.held():
            # A kernel on the stream writes the number after the host has continued.
            factor.fill_(3)
            if vendor == "nccl" and dtype.is_floating_point and factor_dtype == dtype:
                # torch's own operators cannot be tested here, because the device runs some of them on the host.
                dist.all_reduce(value, op=dist._make_nccl_premul_sum(factor))
                asked = True
            else:
                asked = False
        if not asked:
            dist.all_reduce(value, op=dist._make_nccl_premul_sum(factor))
        holds(value.float(), 3 * total(2))
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_factor_on_the_device_is_read_there(vendor: str, libraries: dict[str, Path]) -> None:
    """PREMUL_SUM with a factor on the device: the host does not wait for the number, so a capture can contain the
    call."""
    run_fresh(factor_on_the_device, 2, vendor, env=environment(vendor, libraries))


# ------------------------------------------------------------------------------------------------ messages


def to_oneself(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor)
    n, rank = ctx.world_size, ctx.rank
    mine = torch.empty(1000, device=name).fill_(rank + 1)
    other = torch.empty(2, 500, device=name).fill_(10 * (rank + 1)).t()
    first, second, theirs = (torch.empty(1000, device=name).fill_(-1) for _ in range(3))
    batch = [
        dist.P2POp(dist.isend, mine, rank),
        dist.P2POp(dist.irecv, first, rank),
        dist.P2POp(dist.isend, other, rank),
        dist.P2POp(dist.irecv, second, rank),
    ]
    if n > 1:
        batch += [
            dist.P2POp(dist.isend, mine * 2, (rank + 1) % n),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % n),
        ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    holds(first, rank + 1)
    holds(second, 10 * (rank + 1))
    if n > 1:
        holds(theirs, 2 * ((rank - 1) % n + 1))
    # A rank's send to itself without the receive, and its message to itself outside of a batch, are refused before
    # anything is sent.
    lonely = [dist.P2POp(dist.isend, mine, rank)]
    text = expect_raises(ValueError, lambda: [work.wait() for work in dist.batch_isend_irecv(lonely)])
    assert "itself" in text and "4000" in text, text
    assert "this rank itself" in expect_raises(ValueError, lambda: backend_of().send([mine], rank, 0))
    dist.all_reduce(mine)
    holds(mine, total(n))
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_batch_may_hold_messages_to_oneself(vendor: str, world_size: int, libraries: dict[str, Path]) -> None:
    """Messages of a rank to itself are copies inside the device, matched in the order of the list."""
    run_fresh(to_oneself, world_size, vendor, env=environment(vendor, libraries))
