"""The Work object: waits with a timeout, futures and their callbacks, results, numbers, exceptions, hooks."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import members
from harness import (
    TIMES_WORKS,
    Context,
    beyond_gloo,
    error_of,
    expect_raises,
    launch,
    run_fresh,
    run_ranks,
    torch_at_least,
)
from limits import patience

CPU = torch.device("cpu")


def _backend(group: Any = None) -> Any:
    return (group or dist.distributed_c10d._get_default_group())._get_backend(CPU)


def completes_alone(ctx: Context) -> None:
    for count in (1, 100_000):
        tensor = torch.ones(count)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        end = time.monotonic() + patience(10)
        while not work.is_completed():
            assert time.monotonic() < end, "is_completed never became true without wait"
            time.sleep(0.001)
        assert work.is_success() and (tensor == ctx.world_size).all()
        work.wait()
        work.synchronize()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pitfall_06_work_completes_without_wait(world_size: int) -> None:
    """Pitfall 6: polling threads see the completion although no thread waits."""
    run_ranks(completes_alone, world_size)


def future_values(ctx: Context) -> None:
    n = ctx.world_size
    tensor = torch.ones(5)
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor, async_op=True),
        "broadcast": lambda: dist.broadcast(tensor, 0, async_op=True),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(5 * n), tensor, async_op=True),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(5), torch.ones(5 * n), async_op=True),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(5 * n), torch.ones(5 * n), async_op=True),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([tensor, torch.ones(2)], async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
        "all_gather": lambda: dist.all_gather([torch.empty(5) for _ in range(n)], tensor, async_op=True),
    }
    for name, call in calls.items():
        work: Any = call()
        future = work.get_future() if name != "all_reduce_coalesced" or hasattr(work, "get_future") else work
        value = future.wait()
        if name != "barrier":
            assert isinstance(value, (list, tuple)), (name, value)
        assert future.done(), name
        if name == "all_reduce_coalesced":
            assert len(value) == 2
        if name in ("all_reduce", "broadcast"):
            assert isinstance(value, list) and len(value) == 1 and torch.equal(value[0], tensor), (name, value)


@beyond_gloo("no futures of reduce_scatter_single")
@pytest.mark.quick
@pytest.mark.parametrize("world_size", [1, 2])
def test_pitfall_01_the_value_of_a_future_is_a_list_of_tensors(world_size: int) -> None:
    """Pitfall 1: the value is a list even for one tensor, for every collective."""
    run_ranks(future_values, world_size)


def future_then(ctx: Context) -> None:
    for turn in range(10):
        tensor = torch.full((1000 * turn + 1,), float(ctx.rank + 1))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        future = work.get_future().then(lambda done: [each / 2 for each in done.value()])
        (half,) = future.wait()
        assert (half == sum(range(1, ctx.world_size + 1)) / 2).all()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert work.get_future().done() and work.get_future().value()[0].data_ptr() == tensor.data_ptr()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_futures_with_then_and_after_the_end(world_size: int) -> None:
    """then() before completion, getFuture after it; the value is the caller's tensor."""
    run_ranks(future_then, world_size)


def callback_issues(ctx: Context) -> None:
    tensor = torch.ones(4)
    first = dist.all_reduce(tensor, async_op=True)
    assert first is not None

    def again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        value = done.value()[0].clone()
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        return work.get_future().wait()[0]  # blocks on a future inside a callback, as PowerSGD does

    out = first.get_future().then(again).wait()
    assert (out == ctx.world_size**2).all(), out


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_09_a_callback_may_issue_collectives_and_block(world_size: int) -> None:
    """Rule 9: callbacks run on no progress thread, and no lock is held."""
    run_ranks(callback_issues, world_size)


def blocking_callbacks(ctx: Context, count: int) -> None:
    groups = members([range(ctx.world_size)] * count)
    outs = []
    for i, group in enumerate(groups):
        tensor = torch.full((3,), float(i + 1))
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None

        def again(done: Any, group: Any = group) -> torch.Tensor:
            value = done.value()[0].clone()
            time.sleep(0.05)
            inner = dist.all_reduce(value, group=group, async_op=True)
            assert inner is not None
            return inner.get_future().wait()[0]

        outs.append(work.get_future().then(again))
    for i, out in enumerate(outs):
        assert (out.wait() == (i + 1) * ctx.world_size**2).all()
    for group in groups:
        dist.destroy_process_group(group)


@beyond_gloo("two blocking callbacks hang for ever")
@pytest.mark.quick
@pytest.mark.parametrize("count", [2, 6])
def test_rule_09_many_blocking_callbacks_at_once(count: int) -> None:
    """Rule 9: the callback pool grows while all of its threads are blocked."""
    run_ranks(blocking_callbacks, 2, count)


def callbacks_of_callbacks(ctx: Context) -> None:
    """Callbacks that wait for futures that they have requested: two futures at a time, and one future in the callback
    of another. This tests that no callback waits for ever; what a wait costs is a row of benchmarks/features.py
    (powersgd)."""
    n = ctx.world_size

    def reduced(value: float) -> Any:
        work: Any = dist.all_reduce(torch.full((3,), value), async_op=True)
        return work.get_future()

    def two(_: Any) -> list[torch.Tensor]:
        first, second = reduced(1.0), reduced(2.0)
        both = first.then(lambda done: [*done.value(), *second.wait()])
        third = second.then(lambda done: [*done.value(), *reduced(3.0).wait()])
        return [*both.wait(), *third.wait()]

    for _ in range(100):
        found = reduced(0.0).then(two).wait()
        assert [each[0].item() for each in found] == [n, 2 * n, 2 * n, 3 * n]


@beyond_gloo("two blocking callbacks hang for ever")
@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 4])
def test_rule_09_a_callback_may_wait_for_futures_that_it_has_requested(world_size: int) -> None:
    """Rule 9: the futures complete while the callback waits, also if they complete together."""
    run_ranks(callbacks_of_callbacks, world_size)


def wait_elapses(ctx: Context) -> None:
    tensor = torch.ones(3)
    if ctx.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        start = time.monotonic()
        expect_raises(RuntimeError, lambda: work.wait(timedelta(milliseconds=200)))
        # Rank 1 comes only later, so the wait ends by its own limit, and long before the timeout of the operation.
        assert 0.15 < time.monotonic() - start < patience(5)
        assert not work.is_completed()
        expect_raises(RuntimeError, lambda: work.wait(timedelta(milliseconds=100)))
        ctx.store().set("elapsed", "")
        work.wait()
    else:
        ctx.store().wait(["elapsed"])
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 3


@beyond_gloo("a wait that elapses may poison the group")
@pytest.mark.quick
def test_rule_11_a_wait_that_elapses_leaves_the_work_usable() -> None:
    """Rule 11 and pitfall 2: an elapsed wait raises only in its caller. The operation continues."""
    run_ranks(wait_elapses, 2)


def wait_long_ago_done(ctx: Context) -> None:
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.wait(timedelta(seconds=20)) and work.wait() and work.wait(timedelta(milliseconds=1))
    assert work.is_completed() and work.is_success() and error_of(work) is None


def test_wait_may_be_repeated() -> None:
    """wait() after the end, with and without a timeout."""
    run_ranks(wait_long_ago_done, 2)


def sequence(ctx: Context) -> None:
    group = dist.distributed_c10d._get_default_group()
    backend = _backend()
    start = backend._get_sequence_number_for_group()
    if torch_at_least(2, 15):  # older torch returns numbers only for its own backends
        assert group._get_sequence_number_for_group() == start
    for turn in range(1, 6):
        dist.all_reduce(torch.ones(2), async_op=bool(turn % 2))
        assert backend._get_sequence_number_for_group() == start + turn
    dist.barrier()
    dist.broadcast(torch.ones(1), 0)
    assert backend._get_sequence_number_for_group() == start + 7
    work: Any = dist.all_reduce(torch.ones(2), async_op=True)
    if torch_at_least(2, 15):
        assert work._get_sequence_number() == start + 8
    work.wait()
    assert backend._get_sequence_number_for_group() == start + 8


@beyond_gloo("its Work numbers another way")
@pytest.mark.quick
def test_rule_01_sequence_numbers(world_size: int = 2) -> None:
    """Rule 1: every collective gets the next number of its group when it is issued, and the Work has this number."""
    run_ranks(sequence, world_size)


def results(ctx: Context) -> None:
    import warnings

    warnings.simplefilter("ignore")
    tensor = torch.ones(3)
    work: Any = dist.all_reduce(tensor, async_op=True)
    work.wait()
    (found,) = work.result()
    assert torch.equal(found, tensor)
    outputs = [torch.empty(3) for _ in range(ctx.world_size)]
    work = dist.all_gather(outputs, tensor, async_op=True)
    work.wait()
    assert len(work.result()) in (1, ctx.world_size)
    assert work.timeout >= timedelta(seconds=1)


@beyond_gloo("its Work has no timeout here")
def test_result_and_timeout_of_a_work() -> None:
    """The deprecated result(), and the timeout that applies."""
    run_ranks(results, 2)


def durations(ctx: Context) -> None:
    _backend()._enable_collectives_timing()
    work: Any = dist.all_reduce(torch.ones(100_000), async_op=True)
    work.wait()
    assert 0.0 < work._get_duration() < 10_000.0


@pytest.mark.skipif(not TIMES_WORKS, reason="this torch times works of nccl alone")
@beyond_gloo("no durations")
def test_duration_when_timing_is_on() -> None:
    """enableCollectivesTiming and getDuration, in milliseconds."""
    run_ranks(durations, 2, fresh_group=True)


def dropped_group(ctx: Context) -> None:
    (group,) = members([range(ctx.world_size)])
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    future = work.get_future()
    work.wait()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert work.is_completed() and (future.wait()[0] == ctx.world_size).all()
    del work, future
    gc.collect()


def test_pitfall_10_work_outlives_its_group() -> None:
    """Pitfall 10: Work and future are used after destroy_process_group."""
    run_ranks(dropped_group, 2)


def abort_pending(ctx: Context) -> str:
    ctx.init()
    backend = _backend()
    dist.all_reduce(torch.ones(1))
    text = ""
    if ctx.rank == 0:
        work: Any = dist.all_reduce(torch.ones(3), async_op=True)
        threading.Timer(0.2, backend.abort).start()
        start = time.monotonic()
        text = expect_raises(RuntimeError, work.wait)
        assert time.monotonic() - start < patience(3)
        assert work.is_completed() and not work.is_success()
        expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(1)))
    ctx.tell("done")
    ctx.listen()
    with __import__("contextlib").suppress(RuntimeError):
        dist.destroy_process_group()
    return text


@beyond_gloo("no abort")
def test_abort_ends_a_blocked_wait() -> None:
    """Another thread calls the backend's abort()."""
    with launch(abort_pending, 2) as job:
        for rank in range(2):
            job.hear(rank)
        for rank in range(2):
            job.say(rank, "go")
        texts = job.values()
    assert "abort" in texts[0].lower(), texts


def abort_everything(ctx: Context) -> None:
    ctx.init()
    dist.all_reduce(torch.ones(1))
    if ctx.rank == 0:
        # If rank 1 has already aborted, this call is refused.
        with __import__("contextlib").suppress(RuntimeError):
            dist.all_reduce(torch.ones(3), async_op=True)
    start = time.monotonic()
    dist.distributed_c10d._abort_process_group()
    assert time.monotonic() - start < patience(3)
    ctx.init(key="again")
    found = torch.ones(3)
    dist.all_reduce(found)
    assert found.tolist() == [2.0] * 3
    dist.destroy_process_group()


@beyond_gloo("no abort")
def test_abort_process_group_and_a_new_group_at_once() -> None:
    """_abort_process_group with an operation in flight; then a group with a new prefix is created."""
    run_fresh(abort_everything, 2)


def timeouts(ctx: Context) -> str:
    ctx.init(operations=timedelta(seconds=1))
    text = ""
    if ctx.rank == 0:
        tensor = torch.ones(3)
        start = time.monotonic()
        text = expect_raises(RuntimeError, lambda: dist.all_reduce(tensor))
        took = time.monotonic() - start
        assert 0.8 < took < 1 + patience(1), took
        expect_raises(RuntimeError, lambda: dist.all_reduce(tensor))
        if hasattr(_backend(), "get_error") and ctx.backend != "gloo":
            assert "SUCCESS" not in str(_backend().get_error())
    ctx.tell("done")
    ctx.listen()
    with __import__("contextlib").suppress(RuntimeError):
        dist.destroy_process_group()
    return text


@pytest.mark.quick
def test_rule_11_the_operations_own_deadline_poisons_the_group() -> None:
    """Rule 11: a call without its own timeout has the group's. The error names the missing rank."""
    from harness import IS_GLOO

    with launch(timeouts, 2) as job:
        job.hear(0)
        job.hear(1)
        job.say(0, "go")
        job.say(1, "go")
        texts = job.values()
    assert IS_GLOO or "rank 1" in texts[0], texts


def set_timeout(ctx: Context) -> float:
    ctx.init(timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(1))
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=1))
    start = time.monotonic()
    if ctx.rank == 0:
        work: Any = dist.all_reduce(torch.ones(3), async_op=True)
        expect_raises(RuntimeError, work.wait)
        future_text = expect_raises(Exception, work.get_future().wait)
        assert future_text
    took = time.monotonic() - start
    ctx.tell("done")
    ctx.listen()
    with __import__("contextlib").suppress(RuntimeError):
        dist.destroy_process_group()
    return took


@pytest.mark.skipif(not hasattr(dist, "set_timeout"), reason="this torch has no set_timeout")
def test_set_timeout_applies_to_later_operations() -> None:
    """The future has the error too (pitfall 15)."""
    with launch(set_timeout, 2) as job:
        job.hear(0)
        job.hear(1)
        job.say(0, "go")
        job.say(1, "go")
        took = job.values()[0]
    assert 0.8 < took < 1 + patience(1), took


def source_ranks(ctx: Context) -> None:
    if ctx.rank == 0:
        found = torch.empty(3)
        work = dist.irecv(found, 1)
        assert work is not None
        work.wait()
        assert work.source_rank() == 1
    elif ctx.rank == 1:
        dist.send(torch.ones(3), 0)


@beyond_gloo("a receive from a named rank knows no source")
def test_source_rank_of_a_specific_receive() -> None:
    """sourceRank equals the rank that the receive named."""
    run_ranks(source_ranks, 3)


def completion_hooks(ctx: Context) -> None:
    backend = _backend()
    assert backend.supports_coalescing in (True, False)
    assert backend.supports_splitting in (True, False)
    for i in range(20):
        dist.all_reduce(torch.ones(i + 1))
    from torch._C._distributed_c10d import _dump_fr_trace_json

    if hasattr(dist, "_dump_fr_trace_json") or _dump_fr_trace_json:
        import json

        text = _dump_fr_trace_json()
        assert isinstance(json.loads(text), dict)


def test_rule_27_flags_and_flight_recorder() -> None:
    """Rules 27 and 29: each flag is True or False, and the recorder can be dumped while it has operations."""
    run_ranks(completion_hooks, 2)


def allocates(ctx: Context) -> None:
    import torch_sagellm

    backend, cpu = _backend(), torch.device("cpu")
    assert backend.supports_tensor_alloc(cpu) is True
    assert backend.supports_tensor_alloc(torch.device("cuda:0")) is False
    tensor = backend.allocate_tensor(10_000, dtype=torch.bfloat16, device=cpu)
    assert tensor.shape == (10_000,) and tensor.dtype == torch.bfloat16 and torch_sagellm.is_reachable(tensor)
    dist.all_reduce(tensor.fill_(1))
    assert bool((tensor == ctx.world_size).all())
    assert backend.allocate_tensor(0, dtype=torch.float32, device=cpu).numel() == 0
    elsewhere = backend.allocate_tensor(10, dtype=torch.float32, device=torch.device("meta"))
    assert elsewhere.device.type == "meta" and elsewhere.shape == (10,)
    text = expect_raises(ValueError, lambda: backend.allocate_tensor(-1, dtype=torch.float32, device=cpu))
    assert "sagellm allocate_tensor: the size is -1" in text, text


@beyond_gloo("refuses it")
def test_rule_28_the_backend_allocates_tensors_that_peers_can_reach() -> None:
    """Rule 28: this holds for the CPU; torch allocates tensors on other devices."""
    run_ranks(allocates, 2)


def delegated_pool(ctx: Context) -> bool:
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(engine="delegate"))
    found: bool = _backend().supports_tensor_alloc(torch.device("cpu"))
    dist.destroy_process_group()
    return found


@beyond_gloo("has no delegate")
def test_rule_28_a_group_that_gloo_serves_says_that_it_does_not() -> None:
    """Rule 28: a delegate would not use such tensors."""
    assert run_fresh(delegated_pool, 2) == [False, False]


def recorder(ctx: Context) -> tuple[bool, int]:
    ctx.init()
    for _ in range(5):
        dist.all_reduce(torch.ones(2))
    hooks = getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", {})
    attached = len(hooks) > 0
    dist.destroy_process_group()
    return attached, dist.get_debug_level().value if hasattr(dist.get_debug_level(), "value") else 0


@beyond_gloo("records by itself")
@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS"), reason="this torch has no generic recorder"
)
def test_rule_29_the_generic_recorder_is_off_unless_asked_for() -> None:
    """Rule 29: torch's hook costs as much as a small collective. A positive TORCH_FR_BUFFER_SIZE enables it."""
    plain = run_fresh(recorder, 2)
    asked = run_fresh(recorder, 2, env={"TORCH_FR_BUFFER_SIZE": "100"})
    assert [each[0] for each in plain] == [False, False]
    assert [each[0] for each in asked] == [True, True]


@beyond_gloo("not this package")
def raise_its_name(name: str) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise LookupError(name)

    return call


def test_rule_30_there_is_no_direct_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 30: the package's functions of torch's names call torch.distributed."""
    import torch_sagellm

    calls = {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "all_to_all",
        "barrier",
        "send",
        "recv",
        "isend",
    }
    offered = calls & set(torch_sagellm.__all__)
    assert offered == calls - {"barrier"}
    one = torch.ones(2)
    lists = {"reduce_scatter": [one], "all_to_all": [one]}
    peers = {"broadcast": [0], "send": [0], "recv": [0], "isend": [0]}
    for name in sorted(offered):
        with monkeypatch.context() as patch:
            patch.setattr(dist, "get_world_size", lambda group=None: 1)
            patch.setattr(dist, name, raise_its_name(name))
            with pytest.raises(LookupError, match=f"^{name}$"):
                getattr(torch_sagellm, name)(lists.get(name, one), *peers.get(name, []))


def no_room(ctx: Context) -> str:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        ctx.init(timeout=timedelta(seconds=10))
    except (RuntimeError, ValueError) as error:
        return str(error)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    dist.destroy_process_group()
    return ""


@beyond_gloo("uses no memory of this kind")
def test_rule_24_no_room_gives_a_reason_not_a_kill() -> None:
    """Rule 24: if the segment cannot be created, here because of a file-size limit, the group is delegated or refused
    with the reason."""
    for text in run_fresh(no_room, 2):
        assert text == "" or "sagellm" in text, text


def gil_free_wait(ctx: Context) -> int:
    """Rank 1's other thread counts while the main thread is in a call. Rank 0 calls only when that thread has counted.
    If rank 1's call kept the interpreter's lock, rank 0 would wait in vain. Returns the ticks before the call's end."""
    store = ctx.store()
    if ctx.rank == 0:
        store.wait(["ticked"])
        dist.all_reduce(torch.ones(2))
        return 0
    ticks = 0
    calling = threading.Event()

    def tick() -> None:
        nonlocal ticks
        calling.wait()
        while ticks < 100:
            ticks += 1
            time.sleep(0.002)
        store.set("ticked", "")

    thread = threading.Thread(target=tick)
    thread.start()
    calling.set()
    dist.all_reduce(torch.ones(2))
    before = ticks
    thread.join()
    return before


@pytest.mark.quick
def test_rule_08_waits_release_the_interpreter() -> None:
    """Rule 8: other threads of the process run while one waits."""
    assert run_ranks(gil_free_wait, 2)[1] == 100


def profiled(ctx: Context) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        tensor = torch.ones(7)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
        dist.broadcast(tensor, 0)
        dist.all_gather_into_tensor(torch.empty(7 * ctx.world_size), tensor)
        dist.barrier()
        if ctx.rank == 0:
            dist.send(tensor, 1)
        elif ctx.rank == 1:
            dist.recv(tensor, 0)
    return [event.name for event in run.events()]


@pytest.mark.quick
def test_pitfall_12_profiler_titles() -> None:
    """Pitfall 12: `<backend>:<op>` records for each call."""
    from harness import BACKEND

    names = run_ranks(profiled, 2)
    for word in ("all_reduce", "broadcast", "barrier", "send"):
        assert f"{BACKEND}:{word}" in names[0], (word, [each for each in names[0] if BACKEND in each])
    assert names[0].count(f"{BACKEND}:all_reduce") == 2
    assert f"{BACKEND}:recv" in names[1]
    assert any("all_gather" in each for each in names[0] if each.startswith(BACKEND))


def _hold_the_interpreters_lock(seconds: float) -> None:
    """Sleeps in C without releasing the interpreter's lock, like a long call of an extension."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def many_futures(ctx: Context, count: int) -> None:
    if ctx.rank == 1:
        dist.recv(torch.ones(1), 0)
        for _ in range(count):
            dist.all_reduce(torch.ones(1))
        return
    works: list[Any] = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(count)]
    futures = [work.get_future().then(lambda done: done.value()[0].item()) for work in works]
    dist.isend(torch.ones(1), 1)
    _hold_the_interpreters_lock(1.0)  # all operations end in this time, and no callback can run
    threads = len(os.listdir("/proc/self/task"))
    assert [future.wait() for future in futures] == [2.0] * count
    assert threads < 100, f"{threads} threads for {count} futures"


@beyond_gloo("needs the lock to move")
def test_rule_09_a_thousand_futures_need_few_threads() -> None:
    """Rule 9: callbacks that cannot run yet do not each occupy a thread."""
    run_ranks(many_futures, 2, 1500)


def lock_is_taken(ctx: Context) -> None:
    mine = torch.ones(1 << 20)
    dist.barrier()
    if ctx.rank == 0:

        def hold() -> None:
            time.sleep(0.2)
            _hold_the_interpreters_lock(6.0)

        holder = threading.Thread(target=hold)
        holder.start()
        dist.all_reduce(mine)
        holder.join()
    else:
        time.sleep(1.0)  # rank 0's main thread waits, and its other thread holds the interpreter's lock
        begin = time.monotonic()
        dist.all_reduce(mine)
        assert time.monotonic() - begin < 3.0, "rank 0 came only with the interpreter's lock"
    assert (mine == 2.0).all()


@pytest.mark.quick
def test_rule_08_a_thread_that_keeps_the_interpreters_lock_stalls_no_peer() -> None:
    """Rule 8: a thread that waits for the interpreter's lock drives no group, so another thread must."""
    run_ranks(lock_is_taken, 2)


def added_to_timeouts(ctx: Context) -> None:
    """An added timeout is removed when the first operation that was issued after the addition ends. Rank 1 issues when
    rank 0 sets a key."""
    ctx.init(operations=timedelta(seconds=60))
    if ctx.rank == 1:
        for number in range(6):
            ctx.store().wait([str(number)])
            dist.all_reduce(torch.ones(3))
        return
    group: Any = dist.distributed_c10d._get_default_group()

    def issue() -> Any:
        return dist.all_reduce(torch.ones(3), async_op=True)

    def end(number: int, work: Any) -> None:
        ctx.store().set(str(number), "")
        work.wait()

    works = [issue()]
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=30))
    works += [issue(), issue()]
    group._add_ephemeral_timeout(timedelta(seconds=5))
    works.append(issue())
    assert [work.timeout.total_seconds() for work in works] == [60, 90, 90, 95]
    end(0, works[0])
    end(1, works[1])  # the end of this operation removes the 30 seconds
    works.append(issue())
    assert works[-1].timeout.total_seconds() == 65
    for number in (2, 3, 4):
        end(number, works[number])
    last = issue()
    assert last.timeout.total_seconds() == 60
    end(5, last)
    text = expect_raises(ValueError, lambda: group._add_ephemeral_timeout(timedelta(seconds=-1)))
    assert "-1000 ms" in text, text


@beyond_gloo("it ignores the call")
@pytest.mark.skipif(not torch_at_least(2, 15), reason="this torch has it for nccl alone")
def test_an_ephemeral_timeout_is_added_until_the_first_operation_after_it_has_ended() -> None:
    """`_add_ephemeral_timeout_for_all_pgs`, which a compiler calls before it makes other ranks wait."""
    run_fresh(added_to_timeouts, 2)


def late_by_more_than_the_timeout(ctx: Context) -> None:
    ctx.init()
    tensor = torch.full((3,), 0.5)
    dist.all_reduce(tensor)
    ctx.set_timeout(timedelta(seconds=2))
    if ctx.rank == 0:
        dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=60))
        dist.all_reduce(tensor)
    else:
        time.sleep(3)
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group()


@beyond_gloo("it ignores the call")
@pytest.mark.skipif(not torch_at_least(2, 15), reason="this torch has it for nccl alone")
def test_a_rank_may_be_late_by_an_ephemeral_timeout() -> None:
    """With the addition, an operation with a timeout of two seconds succeeds after three."""
    run_fresh(late_by_more_than_the_timeout, 2)


def alive_after_a_barrier(ctx: Context) -> list[int]:
    """For each of five turns: how many tensors of dropped Works are alive after the barrier that ended these Works."""
    from torch.multiprocessing.reductions import StorageWeakRef

    found = []
    for turn in range(5):
        memory = []
        if ctx.rank == 1:
            ctx.store().wait([f"issued{turn}"])
        for _ in range(50):
            tensor = torch.ones(1000)
            memory.append(StorageWeakRef(tensor.untyped_storage()))
            dist.all_reduce(tensor, async_op=True)
        del tensor
        if ctx.rank == 0:
            ctx.store().set(f"issued{turn}", "")
        dist.barrier()
        found.append(sum(not each.expired() for each in memory))
    return found


@beyond_gloo("it frees them by itself")
def test_rule_10_a_synchronous_call_leaves_no_tensors_of_dropped_works_behind() -> None:
    """Rule 10: the tensors must be freed although the program makes no further call. One may remain if another thread
    is just ending its operation."""
    for found in run_ranks(alive_after_a_barrier, 2):
        assert min(found) == 0, found
