"""Tensors on devices that vendors' libraries carry: the whole way from Python to the vendor's ABI, over simulators.

The device is that of `simdevice`, its streams and events are those of a simulated runtime, and the library below the
core is a simulator of NCCL, HCCL or CNCL (tests/vendor): asynchronous, and as strict as the real ones are.
Nothing here says anything about real hardware.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import simdevice
import torch
import torch.distributed as dist
from harness import Context, Rank, expect_raises, launch, run_fresh
from test_staged import backend_of, calls, holds

#: By vendor: torch's name of the device, what its streams are, and the variables that name the simulators.
VENDORS: dict[str, tuple[str, str, dict[str, str]]] = {
    # torch's own cuda cannot be simulated: the device has another name and the option says who carries it.
    "nccl": ("simcuda", "cuda", {"SAGELLM_NCCL_LIBRARY": "nccl", "SAGELLM_CUDA_LIBRARY": "cuda"}),
    "hccl": ("npu", "acl", {"SAGELLM_HCCL_LIBRARY": "hccl", "SAGELLM_ACL_LIBRARY": "acl"}),
    "cncl": ("mlu", "cnrt", {"SAGELLM_CNCL_LIBRARY": "cncl", "SAGELLM_CNRT_LIBRARY": "cnrt"}),
}
ROOT = Path(__file__).resolve().parents[3]
#: The first test builds the simulators, which takes minutes on a busy machine; every job has a deadline of its own.
pytestmark = pytest.mark.timeout(900)


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sagellm_simulators", ROOT / "tests/vendor/build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def libraries() -> dict[str, Path]:
    """Both the device and the simulators, built before the first deadline runs."""
    simdevice.library_path()
    built: dict[str, Path] = builder().build()
    return built


def environment(vendor: str, libraries: dict[str, Path], **more: str) -> dict[str, str]:
    _, flavour, variables = VENDORS[vendor]
    named = {variable: str(libraries[form]) for variable, form in variables.items()}
    return (
        named
        | {
            "SAGELLM_TEST_RUNTIME": str(libraries[flavour]),
            "SAGELLM_SIM_TIMEOUT_MS": "20000",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # all ranks use device 0
        }
        | more
    )


def start(
    ctx: Context, vendor: str, queue: float | None = None, delay: float = 0.001, native: bool = True, **options: Any
) -> tuple[Any, str]:
    """The device over the vendor's simulated runtime, and a default group whose tensors the vendor carries."""
    import sagellm

    name, flavour, _ = VENDORS[vendor]
    device = simdevice.install(name)
    device.use_library(os.environ["SAGELLM_TEST_RUNTIME"], flavour)
    device.native_handles(native)
    device.kernel_delay(delay)
    device.host_queue(queue)
    who = vendor if vendor == "nccl" else "auto"
    ctx.init(pg_options=sagellm.Options(vendor=who), **options)
    return device, name


def told_of(work: Any) -> Any:
    import sagellm

    return sagellm.explain(work)


# ------------------------------------------------------------------------------------------------ every call


def every_call(ctx: Context, vendor: str, queue: float | None, native: bool) -> None:
    _, name = start(ctx, vendor, queue, native=native)
    n, rank = ctx.world_size, ctx.rank
    on_cpu, on_device = calls(n, rank, "cpu"), calls(n, rank, name)
    for what in on_cpu:
        if what == "all_reduce of several types" and vendor == "cncl":
            continue  # it has no 64-bit floats: test_what_a_library_has_not_is_refused
        for a in (False, True):
            work, expected = on_cpu[what](a)
            if work is not None:
                work.wait()
            work, results = on_device[what](a)
            if work is not None:
                work.wait()
            for one, other in zip(results, expected, strict=True):
                # A kernel on the caller's stream sees the result, without a synchronisation of the device.
                found = (one * 1).cpu()
                assert one.device.type == name and found.dtype == other.dtype, what
                assert torch.equal(found, other), (what, a, found, other)
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize(
    "world_size,queue,native",
    [(1, None, True), (2, None, True), (3, None, True), (2, 0.001, False), (2, None, False)],
)
def test_every_collective_gives_the_numbers_of_the_cpu(
    vendor: str, world_size: int, queue: float | None, native: bool, libraries: dict[str, Path]
) -> None:
    """Rule 32: each collective, synchronous and not, with and without torch's raw handles and a queue on the host."""
    run_fresh(every_call, world_size, vendor, queue, native, env=environment(vendor, libraries), timeout=120)


def path_taken(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor)
    work = dist.all_reduce(torch.ones(10, device=name), async_op=True)
    work.wait()
    told = told_of(work)
    assert told.reason == "vendor" and vendor in told.path.lower() and told.sequence == 1, told
    tensor = torch.full((10,), ctx.rank + 1, device=name, dtype=torch.int16)
    work = dist.all_reduce(tensor, dist.ReduceOp.BOR, async_op=True)
    work.wait()
    assert "combines it itself" in told_of(work).decided, told_of(work)
    holds(tensor, 3)
    torch.accelerator.synchronize()
    deadline = time.monotonic() + 20
    import sagellm

    while sagellm.get_stats()["all_reduce_count"] < 2:
        assert time.monotonic() < deadline, sagellm.get_stats()
        time.sleep(0.01)
    # CPU tensors of the same group take the way they always took, and both count for torch's number.
    before = int(dist.group.WORLD._get_backend(torch.device("cpu"))._get_sequence_number_for_group())
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3, device=name))
    after = int(dist.group.WORLD._get_backend(torch.device("cpu"))._get_sequence_number_for_group())
    assert after - before == 2
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_path_is_told_and_counted_and_cpu_tensors_share_the_group(vendor: str, libraries: dict[str, Path]) -> None:
    """Explain names the library and what was composed; statistics count; one backend object serves both kinds."""
    run_fresh(path_taken, 2, vendor, env=environment(vendor, libraries))


def messages(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor)
    other = (ctx.rank + 1) % 2
    mine = torch.empty(30_000, device=name).fill_(ctx.rank + 1)
    theirs = torch.empty(30_000, device=name).fill_(-1)
    # Both send first: neither direction may wait for the other.
    works = [dist.isend(mine, other), dist.irecv(theirs, other)]
    for work in works:
        work.wait()
    holds(theirs, other + 1)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine * 2, other), dist.P2POp(dist.irecv, theirs, other)]
    ):
        work.wait()
    holds(theirs, 2 * (other + 1))
    if ctx.rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(theirs, 0)
        holds(theirs, 1)
    assert "name the source" in expect_raises(ValueError, lambda: dist.recv(theirs))
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
def test_rule_20_messages_of_both_directions_do_not_wait_for_each_other(
    vendor: str, libraries: dict[str, Path]
) -> None:
    """Rule 20: two ranks that both send first; a batch; a plain pair; from anyone is refused."""
    run_fresh(messages, 2, vendor, env=environment(vendor, libraries))


def refused(ctx: Context) -> None:
    _, name = start(ctx, "cncl")
    wide = torch.ones(4, device=name, dtype=torch.float64)
    assert "64-bit floats" in expect_raises(ValueError, lambda: dist.all_reduce(wide))
    assert "64-bit floats" in expect_raises(ValueError, lambda: dist.broadcast(wide, 0))
    # No number was used and nothing was sent: the group goes on.
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
    """CNCL's device keeps float64 in 32 bits: refused, or converted explicitly."""
    run_fresh(refused, 2, env=environment("cncl", libraries))
    run_fresh(converted, 2, env=environment("cncl", libraries, SAGELLM_DOUBLE_AS_FLOAT="1"))


def lists(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor)
    # Whoever is larger than the limit of the pack is a call of its own; all are one launch.
    parts = [torch.full((n,), ctx.rank + 1.0, device=name) for n in (10, 300_000, 5, 0, 270_000, 7)]
    asked = dist.AllreduceCoalescedOptions()
    asked.asyncOp = True
    work = backend_of().allreduce_coalesced(parts, asked)
    work.wait()
    for part in parts:
        holds(part, 3)
    whole = told_of(work)
    told = [each.decided for each in [whole, *whole.parts]]
    assert len(told) == 3 and all("one of 3 calls in one launch" in each for each in told), told
    assert "4 tensors packed" in told[0] and "packed" not in told[1] + told[2], told
    parts = [torch.full((n,), ctx.rank + 1.0, device=name) for n in (10, 20, 30)]
    work = backend_of().allreduce_coalesced(parts, asked)
    work.wait()
    assert "3 tensors packed" in told_of(work).decided and "launch" not in told_of(work).decided, told_of(work)
    # Calls on both kinds of device in one region are one work with one future.
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
    # As torch_npu's operator of this name does: ND, and FRACTAL_NZ for one that was cast.
    library.impl("get_npu_format", lambda tensor: 29 if tensor.numel() == 77 else 2, "PrivateUse1")
    text = expect_raises(ValueError, lambda: dist.all_reduce(torch.ones(77, device=name)))
    assert "internal format" in text and "npu_format_cast" in text, text
    value = torch.ones(76, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    dist.destroy_process_group()


def test_internal_formats_are_refused_with_the_fix(libraries: dict[str, Path]) -> None:
    """torch_npu may keep a tensor's elements in another order; nothing is sent then, and the group goes on."""
    run_fresh(internal_format, 2, env=environment("hccl", libraries))


# ------------------------------------------------------------------------------------------------ order


def late_kernels(ctx: Context, vendor: str, queue: float | None, native: bool) -> None:
    device, name = start(ctx, vendor, queue, delay=0.05, native=native)
    # The receiver's own kernel still writes to the tensor when the operation is issued.
    target = torch.empty(500, device=name).fill_(7 if ctx.rank else 3)
    work = dist.broadcast(target, 0, async_op=True)
    work.wait()
    holds(target * 1, 3)
    # What follows on the caller's stream without a wait may overtake nothing that was issued before it.
    value = torch.empty(500, device=name).fill_(ctx.rank + 1)
    work = dist.all_reduce(value, async_op=True)
    # The tensor is let go at once: its memory, which the device gives out again, must stay the operation's.
    kept = value.data_ptr()
    del value
    again = torch.empty(500, device=name)
    assert again.data_ptr() != kept, "memory of an operation under way was given out"
    again.fill_(-5)
    work.wait()
    holds(work.result()[0] * 1, 3)
    device.kernel_delay(0)
    dist.destroy_process_group()


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("queue,native", [(None, True), (0.005, False), (None, False)])
def test_rule_32_kernels_of_both_sides_keep_their_order(
    vendor: str, queue: float | None, native: bool, libraries: dict[str, Path]
) -> None:
    """Rule 32: a late kernel is not overtaken, and memory that was let go early is not used again too soon."""
    run_fresh(late_kernels, 2, vendor, queue, native, env=environment(vendor, libraries))


# ------------------------------------------------------------------------------------------------ training


def trained(ctx: Context, vendor: str) -> list[float]:
    _, name = start(ctx, vendor, delay=0.0)

    def losses(device: str) -> list[float]:
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(device)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        found = []
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * step + ctx.rank)
            batch = torch.randn(12, 8, generator=generator).to(device)
            loss = wrapped(batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach().cpu()))
        return found

    on_cpu, on_device = losses("cpu"), losses(name)
    assert on_cpu == on_device, (on_cpu, on_device)
    dist.destroy_process_group()
    return on_device


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_ddp_training_gives_the_losses_of_the_cpu(vendor: str, libraries: dict[str, Path]) -> None:
    """Four steps of DistributedDataParallel, to the last bit."""
    first, second = run_fresh(trained, 2, vendor, env=environment(vendor, libraries), timeout=90)
    assert len(first) == len(second) == 4


# ------------------------------------------------------------------------------------------------ failure


def exit_code(rank: Rank) -> int | None:
    """Waits for the end of a rank's process."""
    deadline = time.monotonic() + 60
    while rank.poll() is None and time.monotonic() < deadline:
        rank.rest(0.2)
    return rank.poll()


def peer_dies(ctx: Context, vendor: str) -> str:
    from datetime import timedelta

    _, name = start(ctx, vendor, timeout=timedelta(seconds=40))
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    if ctx.rank == 1:
        ctx.listen()  # until the other rank's operation is under way
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

    _, name = start(ctx, vendor, timeout=timedelta(seconds=3))
    dist.all_reduce(torch.ones(10, device=name))
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
    """The error names the rank and the operation, long before the deadline."""
    with launch(peer_dies, 2, vendor, env=environment(vendor, libraries)) as job:
        assert job.hear(0) == "issued"
        job.say(1, "go")
        assert exit_code(job.ranks[0]) == 0


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_missing_rank_is_named_at_the_deadline(vendor: str, libraries: dict[str, Path]) -> None:
    """The stalled operation fails with its number and with who has not issued it."""
    with launch(hangs, 2, vendor, env=environment(vendor, libraries)) as job:
        text = job.hear(0)
        assert "Timed out after 3.0 s in all_reduce number 2" in text, text
        assert "rank 1" in text and "has not issued it, its last on a device is all_reduce number 1" in text, text
        job.say(1, "go")


def leaves_alone(ctx: Context, vendor: str) -> None:
    """Rank 0 leaves while rank 1 is dead, or does not think of leaving."""
    from datetime import timedelta

    _, name = start(ctx, vendor, timeout=timedelta(seconds=300))
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    if ctx.rank == 1:
        ctx.tell("idle")
        if ctx.listen() == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        ctx.listen()
    begin = time.monotonic()
    dist.destroy_process_group()
    ctx.tell(time.monotonic() - begin)
    os._exit(0)


@pytest.mark.parametrize("peer", ["die", "stay"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_leaving_does_not_wait_for_a_peer_that_is_dead_or_late(
    vendor: str, peer: str, libraries: dict[str, Path]
) -> None:
    """Far within the group's timeout, although the simulated library waits for the other rank as long as it likes."""
    patient = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(leaves_alone, 2, vendor, env=patient) as job:
        assert job.hear(1) == "idle"
        if peer == "die":
            job.say(1, "die")
            assert exit_code(job.ranks[1]) == -signal.SIGKILL
        job.say(0, "leave")
        assert job.hear(0) < 60
        if peer == "stay":
            job.say(1, "leave")
            assert job.hear(1) < 60
            assert [exit_code(rank) for rank in job.ranks] == [0, 0]


def leaves_early(ctx: Context, vendor: str) -> None:
    device, name = start(ctx, vendor)
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    torch.accelerator.synchronize(name)
    device.kernel_delay(0.3)
    work = dist.all_reduce(value.add_(0), async_op=True)
    dist.destroy_process_group()
    work.wait()  # an error here would say that the communicator was closed under it
    holds(value, 4)


@pytest.mark.parametrize("vendor", VENDORS)
def test_work_under_way_ends_well_before_the_group_does(vendor: str, libraries: dict[str, Path]) -> None:
    """`destroy_process_group` right behind an operation loses nothing."""
    run_fresh(leaves_early, 2, vendor, env=environment(vendor, libraries))


def asynchronous_error(ctx: Context, vendor: str) -> None:
    from datetime import timedelta

    _, name = start(ctx, vendor, timeout=timedelta(seconds=20))
    value = torch.ones(10, device=name)
    work = dist.all_reduce(value, async_op=True)
    text = "no error"
    try:
        work.wait(timedelta(seconds=15))
    except RuntimeError as error:
        text = str(error)
    assert text != "no error"
    os._exit(0)


@pytest.mark.parametrize("vendor", VENDORS)
def test_an_error_that_comes_up_later_reaches_the_work(vendor: str, libraries: dict[str, Path]) -> None:
    """The simulated library reports an asynchronous error of its first operation."""
    with launch(asynchronous_error, 2, vendor, env=environment(vendor, libraries, SAGELLM_SIM_ERROR_AT="1")) as job:
        assert [exit_code(rank) for rank in job.ranks] == [0, 0]


def without_library(ctx: Context) -> None:
    import sagellm

    simdevice.install("npu")
    ctx.init()
    value = torch.ones(5, device="npu")
    dist.all_reduce(value)
    holds(value, 2)
    reason = dist.group.WORLD._get_backend(torch.device("cpu"))._device_reason("npu")
    assert "HCCL was not found" in reason and "Tried" in reason, reason
    dist.destroy_process_group()
    assert sagellm is not None


def test_without_a_library_tensors_go_through_host_memory_and_the_reason_says_what_was_tried() -> None:
    """Nothing is silently slower."""
    run_fresh(without_library, 2)


def named_library(ctx: Context) -> None:
    import sagellm

    simdevice.install("npu")
    ctx.init(pg_options=sagellm.Options(vendor="hccl:/nowhere/libhccl.so"))
    assert "/nowhere/libhccl.so" in expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(2, device="npu")))
    dist.destroy_process_group()


def test_a_library_that_is_named_and_missing_is_an_error() -> None:
    """Who names a library wants that one."""
    run_fresh(named_library, 2)
