"""Tensors on a device that travel through host memory: every call, its order among streams, its errors, groups.

The device is that of `simdevice`: slow kernels on asynchronous streams, and freed memory that is reused immediately.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import net
import pytest
import simdevice
import torch
import torch.distributed as dist
from harness import Context, error_of, expect_raises, launch, run_fresh
from on_device import LIST, backend_of, calls, ddp, holds, lists_travel, number, same_training

KERNEL = 0.01  # seconds


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Builds the device before the first deadline starts."""
    simdevice.library_path()


def start(ctx: Context, name: str = "npu", queue: float | None = None, delay: float = KERNEL, **options: Any) -> Any:
    """Installs the device under this name and creates a default group."""
    device = simdevice.install(name)
    device.kernel_delay(delay)
    device.host_queue(queue)
    ctx.init(**options)
    return device


# ------------------------------------------------------------------------------------------------ every call


def tensors_travel(ctx: Context) -> None:
    start(ctx, delay=0.001)
    lists_travel(ctx, "npu")


def test_lists_of_tensors_travel_from_rank_to_rank() -> None:
    run_fresh(tensors_travel, 2)


def every_call(ctx: Context, queue: float | None, options: dict[str, Any], exact: bool, **init: Any) -> None:
    if options:
        import torch_sagellm

        init["pg_options"] = torch_sagellm.Options(**options)
    start(ctx, queue=queue, delay=0.001, **init)
    n, rank = ctx.world_size, ctx.rank
    on_cpu, on_device = calls(n, rank, "cpu"), calls(n, rank, "npu")
    for name in on_cpu:
        expected = []
        try:
            for a in (False, True):
                work, results = on_cpu[name](a)
                if work is not None:
                    work.wait()
                expected.append([each.clone() for each in results])
        except RuntimeError:
            # Calls that gloo refuses on the CPU are refused here too, before anything is sent.
            assert not exact, name
            expect_raises(RuntimeError, lambda call=on_device[name]: call(False))
            continue
        for a in (False, True):
            work, results = on_device[name](a)
            assert work is not None or not a, name
            if work is not None:
                work.wait()
            for one, other in zip(results, expected[a], strict=True):
                # A kernel on the caller's stream sees the result, without a synchronisation of the device.
                found = (one * 1).cpu()
                assert one.device.type == "npu" and found.dtype == other.dtype, name
                close = torch.equal(found, other) if exact else torch.allclose(found, other)
                assert close, (name, a, found, other)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size,queue", [(1, None), (2, None), (2, 0.001), (3, None)])
def test_rule_17_every_collective_gives_the_bits_of_the_cpu(world_size: int, queue: float | None) -> None:
    """Rules 17 and 32: each collective, synchronous and asynchronous, after slow kernels and before others."""
    run_fresh(every_call, world_size, queue, {}, True)


def test_every_collective_of_a_delegated_group() -> None:
    """If gloo serves the group, gloo gets the copies in host memory."""
    run_fresh(every_call, 2, None, {"engine": "delegate"}, False)


def every_call_over_hosts(ctx: Context, names: list[str]) -> None:
    net.enter(names[ctx.rank * len(names) // ctx.world_size])
    store = dist.FileStore(f"{ctx.tmp}/store", ctx.world_size)
    every_call(ctx, None, {}, True, store=store, timeout=timedelta(seconds=60))


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_over_hosts(hosts: list[str], world_size: int) -> None:
    """Between hosts the copies are sent like CPU tensors, with the same bits."""
    with launch(every_call_over_hosts, world_size, hosts, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        job.values(120)


def messages(ctx: Context, options: dict[str, Any]) -> None:
    import torch_sagellm

    start(ctx, pg_options=torch_sagellm.Options(**options))
    other = 1 - ctx.rank
    if ctx.rank == 0:
        for tag in (1, 2, 3):
            dist.send(torch.empty(100, device="npu").fill_(tag), 1, tag=tag)
        dist.send(torch.empty(50_000, device="npu").fill_(8), 1)
        dist.isend(torch.empty(10, device="npu").fill_(9), 1, tag=9)
    else:
        got = {tag: torch.empty(100, device="npu").fill_(-1) for tag in (3, 2, 1)}
        works = {tag: dist.irecv(t, 0, tag=tag) for tag, t in got.items()}
        for tag, t in got.items():
            works[tag].wait()
            holds(t * 1, tag)
        big = torch.empty(50_000, device="npu")
        assert dist.recv(big) == 0
        holds(big, 8)
        last = torch.empty(10, device="npu").fill_(-1)
        assert dist.recv(last, 0, tag=9) == 0
        holds(last, 9)
    mine, theirs = torch.empty(30, device="npu").fill_(ctx.rank), torch.empty(30, device="npu").fill_(-1)
    pair = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    holds(theirs, other)
    assert number() == 0 or options, "messages do not use the group's number"
    if not options:
        # A collective that reads the memory of a pending receive runs after the receive.
        late = torch.empty(40, device="npu").fill_(1)
        filled = dist.irecv(late, other, tag=5)
        dist.send(torch.empty(40, device="npu").fill_(6), other, tag=5)
        copied = torch.empty(80, device="npu")
        dist.all_gather_into_tensor(copied, late)
        holds(copied, 6)
        filled.wait()
        holds(late, 6)
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"engine": "delegate"}], ids=["own", "delegated"])
def test_rule_20_messages(options: dict[str, Any]) -> None:
    """Rule 20: tags out of order, a large message, a receive from any rank, a send whose Work is dropped, a batch."""
    run_fresh(messages, 2, options)


# ------------------------------------------------------------------------------------------------ order


def late_kernels(ctx: Context, queue: float | None) -> None:
    device = start(ctx, queue=queue, delay=0.05)
    # The receiver's own kernel still writes to the tensor when the operation is issued.
    target = torch.empty(500, device="npu").fill_(7 if ctx.rank else 3)
    work = dist.broadcast(target, 0, async_op=True)
    work.wait()
    holds(target, 3)
    # Results are stored on another stream than the caller's; wait() makes the then current stream wait for them.
    side = torch.npu.Stream()
    value = torch.empty(500, device="npu").fill_(ctx.rank + 1)
    work = dist.all_reduce(value, async_op=True)
    with side:
        work.wait()
        doubled = value * 2
        holds(doubled, 6)
    # A call on another stream copies its inputs in the order of that stream.
    with side:
        value = torch.empty(500, device="npu").fill_(ctx.rank + 5)
        dist.all_reduce(value)
        holds(value, 11)
    # A list, packed by dtype.
    import torch_sagellm

    listed = [torch.empty(size, device="npu", dtype=dtype).fill_(ctx.rank) for size, dtype in LIST]
    for each in torch_sagellm.fused_all_reduce(listed):
        holds(each * 2, 2)
    device.kernel_delay(0)
    dist.destroy_process_group()


@pytest.mark.parametrize("queue", [None, 0.005])
def test_rule_32_kernels_of_both_sides_keep_their_order(queue: float | None) -> None:
    """Rule 32: late work on the caller's stream is neither missed nor overtaken."""
    run_fresh(late_kernels, 2, queue)


def never_waits_for_peers(ctx: Context) -> None:
    start(ctx)
    value = torch.empty(100_000, device="npu").fill_(ctx.rank + 1)
    if ctx.rank == 1:
        ctx.listen()
    works = [dist.all_reduce(value[at : at + 1000], async_op=True) for at in range(0, 50_000, 1000)]
    issued = number()
    assert issued == 50
    if ctx.rank == 0:
        assert not works[-1].is_completed()
        ctx.tell("issued")
    for work in works:
        work.wait()
    holds(value[:50_000], 3)
    holds(value[50_000:], ctx.rank + 1)
    dist.destroy_process_group()


def test_rule_03_issue_never_waits_for_a_peer() -> None:
    """Rules 1 and 3: fifty calls are issued, with their numbers, before the other rank makes the first."""
    with launch(never_waits_for_peers, 2) as job:
        assert job.hear(0) == "issued"
        job.say(1, "go")
        job.values()


def overlapping(ctx: Context, queue: float | None) -> None:
    start(ctx, queue=queue)
    n = ctx.world_size
    if ctx.rank:
        ctx.listen()
    value = torch.empty(1000, device="npu").fill_(1)
    chain = [dist.all_reduce(value, async_op=True) for _ in range(4)]
    part = dist.all_reduce(value[100:300], async_op=True)
    shifted = dist.all_reduce(value[200:], async_op=True)
    gathered = torch.empty(200 * n, device="npu")
    last = dist.all_gather_into_tensor(gathered, value[150:350], async_op=True)
    dist.all_reduce(value)  # a synchronous call after all of them
    if ctx.rank == 0:
        ctx.tell("issued")
    for work in (*chain, part, shifted, last):
        work.wait()
    expected = torch.ones(1000)
    expected *= n**4
    expected[100:300] *= n
    expected[200:] *= n
    assert torch.equal(gathered.cpu(), expected[150:350].repeat(n))
    assert torch.equal(value.cpu(), expected * n)
    dist.destroy_process_group()


@pytest.mark.parametrize("queue", [None, 0.002])
def test_rule_04_operations_on_the_same_memory_run_in_order(queue: float | None) -> None:
    """Rule 4: a call that reads the pending result of an earlier call gets it; full and partial overlap, no waits."""
    with launch(overlapping, 2, queue) as job:
        job.say(1, "go")
        assert job.hear(0) == "issued"
        job.values()


def messages_in_order(ctx: Context, queue: float | None, names: list[str]) -> None:
    if names:
        net.enter(names[ctx.rank])
        start(ctx, queue=queue, store=dist.FileStore(f"{ctx.tmp}/store", 2))
    else:
        start(ctx, queue=queue)
    value = torch.empty(1000, device="npu").fill_(ctx.rank + 1)
    if ctx.rank == 0:
        works = [
            dist.irecv(value[:500], 1, tag=1),
            dist.all_reduce(value, async_op=True),
            dist.isend(value[250:750], 1, tag=2),
            dist.irecv(value[600:], 1, tag=3),
        ]
        ctx.tell("issued")
        for work in reversed(works):
            assert work is not None
            work.wait()
        expected = torch.tensor([9.0] * 500 + [3.0] * 100 + [8.0] * 400)
        assert torch.equal(value.cpu(), expected)
    else:
        if not names:  # the test over hosts does not hold this rank back
            ctx.listen()
        dist.send(torch.empty(500, device="npu").fill_(7), 0, tag=1)
        dist.all_reduce(value)
        got = torch.empty(500, device="npu").fill_(-1)
        dist.recv(got, 0, tag=2)
        assert torch.equal(got.cpu(), torch.tensor([9.0] * 250 + [3.0] * 250))
        dist.send(torch.empty(400, device="npu").fill_(8), 0, tag=3)
    if not names:
        # A tensor between the elements of another shares no element with it, so neither call waits for the other.
        grid = torch.empty(100, 2, device="npu").fill_(ctx.rank + 1)
        work = dist.irecv(grid[:, 0], 1, tag=4) if ctx.rank == 0 else None
        dist.all_reduce(grid[:, 1])
        if work is None:
            dist.send(grid[:, 0], 0, tag=4)
        else:
            work.wait()
        holds(grid[:, 0], 2)
        holds(grid[:, 1], 3)
    dist.destroy_process_group()


@pytest.mark.parametrize("queue", [None, 0.002])
def test_rule_04_messages_and_collectives_on_the_same_memory_run_in_order(queue: float | None) -> None:
    with launch(messages_in_order, 2, queue, []) as job:
        assert job.hear(0) == "issued"
        job.say(1, "go")
        job.values()


def test_rule_04_messages_and_collectives_over_hosts(hosts: list[str]) -> None:
    with launch(messages_in_order, 2, None, hosts, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        job.values(120)


def barrier_behind(ctx: Context, asynchronous: bool) -> None:
    device = start(ctx)
    value = torch.empty(1000, device="npu").fill_(ctx.rank + 1)
    device.kernel_delay(0.1)
    dist.all_reduce(value, async_op=True)
    work = dist.barrier(async_op=asynchronous)
    if work is not None:
        work.wait()
    device.kernel_delay(0)
    holds(value, 3)
    dist.destroy_process_group()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rule_33_a_barrier_comes_behind_collectives_whose_work_was_dropped(asynchronous: bool) -> None:
    """Storing the results takes the device 100 ms."""
    run_fresh(barrier_behind, 2, asynchronous)


def completes_alone(ctx: Context) -> None:
    start(ctx)
    value = torch.empty(100, device="npu").fill_(ctx.rank + 1)
    work = dist.all_reduce(value, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < end, "is_completed never became true without wait"
        time.sleep(0.001)
    assert work.is_success()
    holds(value, 3)  # the result was already stored
    future = work.get_future()
    assert future.done()
    (found,) = future.wait()
    assert found.data_ptr() == value.data_ptr()
    # The callback of then() runs on the device's streams and may issue further calls.
    value = torch.empty(100, device="npu").fill_(ctx.rank + 1)

    def again(done: Any) -> torch.Tensor:
        halved = done.value()[0] * 0.5
        inner = dist.all_reduce(halved, async_op=True)
        return inner.get_future().wait()[0]

    result = dist.all_reduce(value, async_op=True).get_future().then(again).wait()
    holds(result * 1, 3)
    for call in calls(ctx.world_size, ctx.rank, "npu").values():
        work, _results = call(True)
        future = work.get_future() if hasattr(work, "get_future") else None
        if future is not None:
            assert isinstance(future.wait(), list)
        else:
            work.wait()
    dist.destroy_process_group()


def test_pitfall_06_work_and_future_complete_without_wait() -> None:
    """Pitfall 6: results are stored although no thread waits. Futures know the device, and their callbacks may issue
    calls on it."""
    run_fresh(completes_alone, 2)


def dropped(ctx: Context) -> None:
    start(ctx)
    kept = [torch.empty(1000, device="npu").fill_(ctx.rank + turn) for turn in range(5)]
    for tensor in kept:
        dist.all_reduce(tensor, async_op=True)
    # The tensors of this call are dropped immediately. If nothing held them, the next allocation would reuse their
    # memory.
    source = torch.empty(1000, device="npu").fill_(1)
    dist.all_gather_into_tensor(torch.empty(2000, device="npu"), source, async_op=True)
    del source
    fresh = torch.empty(2000, device="npu").fill_(33)
    # On a device a barrier waits until earlier collectives have stored their results.
    dist.barrier(device_ids=[0])
    for turn, tensor in enumerate(kept):
        holds(tensor, 1 + 2 * turn)
    holds(fresh, 33)
    dist.destroy_process_group()


def test_rule_10_works_and_tensors_dropped_at_once() -> None:
    """Rule 10: the program keeps neither the Works nor the tensors, and the results are stored nevertheless."""
    run_fresh(dropped, 2)


# ------------------------------------------------------------------------------------------------ errors


def wrong_input(ctx: Context) -> None:
    device = start(ctx)
    good = torch.empty(6, device="npu").fill_(1)
    n = ctx.world_size
    before = number()
    cases: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
        "cpu and device": (lambda: dist.all_gather_into_tensor(torch.empty(6 * n), good), ("npu:0", "cpu")),
        "two devices": (
            lambda: dist.all_reduce_coalesced([good, torch.empty(6, device="npu:1")]),
            ("npu:0", "npu:1"),
        ),
        "list with a cpu tensor": (
            lambda: dist.all_gather([torch.empty(6, device="npu"), torch.empty(6)], good),
            ("npu:0", "cpu"),
        ),
        "wrong size": (lambda: dist.all_gather_into_tensor(torch.empty(6 * n + 1, device="npu"), good), ("13",)),
        "wrong dtype": (
            lambda: dist.all_gather_into_tensor(torch.empty(6 * n, device="npu", dtype=torch.float64), good),
            ("float64",),
        ),
        "expanded": (lambda: dist.all_reduce(torch.empty(1, device="npu").expand(5)), ("clone",)),
        "async": (
            lambda: dist.all_reduce(torch.empty(1, device="npu").expand(5), async_op=True),
            ("clone",),
        ),
        "root": (lambda: backend_of().broadcast([good], _root(9)).wait(), ("9",)),
    }
    if ctx.rank == 0:  # only one rank makes the wrong calls
        for name, (call, words) in cases.items():
            text = expect_raises((ValueError, RuntimeError), call)
            assert all(word in text for word in words), (name, text)
            assert number() == before, name
        if device.can_capture():
            with device.capturing():
                text = expect_raises(ValueError, lambda: dist.all_reduce(good))
            assert "captured" in text and "outside" in text, text
    dist.all_reduce(good)
    holds(good, n)
    assert number() == before + 1
    dist.destroy_process_group()


def _root(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def test_rule_02_wrong_input_is_refused_locally() -> None:
    """Rules 2 and 31: tensors on several devices and other wrong input use no number and do not poison the group.
    Neither does a call inside a capture."""
    run_fresh(wrong_input, 2)


def peer_dies(ctx: Context) -> None:
    start(ctx)
    value = torch.empty(100, device="npu").fill_(1)
    dist.all_reduce(value)
    if ctx.rank == 1:
        ctx.listen()  # until the other rank's operations are in flight
        os._exit(7)
    first = dist.all_reduce(value, async_op=True)
    second = dist.all_reduce(value, async_op=True)  # reads the pending result of the first
    ctx.tell("issued")
    seen: list[str] = []
    chained = second.get_future().then(lambda done: seen.append(expect_raises(RuntimeError, done.value)))
    for work in (first, second):
        text = expect_raises(RuntimeError, work.wait)
        assert "rank 1" in text, text
        assert work.is_completed() and not work.is_success()
        assert "rank 1" in str(error_of(work))
    chained.wait()
    assert len(seen) == 1 and "rank 1" in seen[0], seen
    assert "rank 1" in expect_raises(RuntimeError, lambda: dist.all_reduce(value))
    holds(value, 2)


def test_rule_21_a_dead_peer_ends_what_needs_it() -> None:
    """Rules 4 and 21: the error reaches wait(), the future and later calls. Nothing hangs, and the tensors keep their
    values."""
    with launch(peer_dies, 2) as job:
        assert job.hear(0) == "issued"
        job.say(1, "go")
        first = job.wait_rank(0, 40)
        assert first.error is None and first.code == 0, job.report()


def deadline(ctx: Context) -> None:
    start(ctx, operations=timedelta(seconds=2))
    value = torch.empty(100, device="npu").fill_(1)
    if ctx.rank == 1:
        ctx.listen()
        return
    work = dist.all_reduce(value, async_op=True)
    text = expect_raises(RuntimeError, lambda: work.wait(timedelta(milliseconds=50)))
    assert "still running" in text and not work.is_completed(), text
    text = expect_raises(RuntimeError, work.wait)
    assert "2" in text and work.is_completed(), text
    future = work.get_future()
    assert future.done()
    expect_raises(RuntimeError, future.wait)
    ctx.tell("over")


def test_rule_11_deadlines() -> None:
    """Rule 11: an elapsed wait leaves the Work usable. The operation's deadline ends it on every rank."""
    with launch(deadline, 2) as job:
        assert job.hear(0, 40) == "over"
        job.say(1, "go")
        job.values()


def leaves(ctx: Context, orderly: bool) -> None:
    start(ctx, delay=0.05)
    for _ in range(10):
        dist.all_reduce(torch.empty(1000, device="npu").fill_(1), async_op=True)
    if ctx.rank == 0:
        dist.all_reduce(torch.empty(10, device="npu"), async_op=True)  # the program never waits for this one
    if orderly:
        dist.destroy_process_group()


@pytest.mark.parametrize("orderly", [True, False])
def test_exit_with_operations_under_way(orderly: bool) -> None:
    """The process ends, with code 0, whether the group was destroyed or not."""
    for outcome in _outcomes(leaves, orderly):
        assert outcome.code == 0, str(outcome)
        assert "terminate" not in outcome.output and "Fatal" not in outcome.output, str(outcome)


def _outcomes(fn: Any, *args: Any) -> Any:
    with launch(fn, 2, *args) as job:
        return job.wait(40)


# ------------------------------------------------------------------------------------------------ groups


def registered(ctx: Context, name: str, backend: str | None) -> None:
    options = {} if backend is None else {"backend": backend}
    start(ctx, name, **options)
    group = dist.distributed_c10d._get_default_group()
    assert {each.type for each in group._device_types} == {"cpu", name}
    # One object serves both kinds, so they share numbers and order.
    host, device = torch.full((4,), 1.0 + ctx.rank), torch.empty(4, device=name).fill_(10 + ctx.rank)
    works = [dist.all_reduce(host, async_op=True), dist.all_reduce(device, async_op=True)]
    works.append(dist.all_reduce(host, async_op=True))
    for kind in ("cpu", name):
        assert int(group._get_backend(torch.device(kind))._get_sequence_number_for_group()) == 3
    for work in works:
        work.wait()
    holds(host, 6)
    holds(device, 21)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": ctx.rank})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    assert dist.distributed_c10d._get_object_coll_device(group) == "cpu"
    # A group of some of the ranks, and a group made by a split.
    alone = [dist.new_group([rank]) for rank in range(2)][ctx.rank]
    dist.all_reduce(device, group=alone)
    holds(device, 21)
    both = dist.new_group([0, 1])
    dist.broadcast(device.fill_(ctx.rank), 1, group=both)
    holds(device, 1)
    dist.barrier(group=both)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name,backend", [("npu", None), ("mlu", None), ("simcuda", "cpu:sagellm,simcuda:sagellm")], ids=str
)
def test_one_backend_serves_the_cpu_and_the_device(name: str, backend: str | None) -> None:
    """The backend is selected by the short name and by the long form. Objects are sent over the CPU, and subgroups work
    (rules 1 and 25)."""
    run_fresh(registered, 2, name, backend)


def bound(ctx: Context) -> None:
    name = "npu"
    simdevice.install(name)
    start(ctx, name, device_id=torch.device(name, ctx.rank))
    torch.npu.set_device(ctx.rank)
    value = torch.empty(10, device=torch.device(name, ctx.rank)).fill_(ctx.rank + 1)
    dist.all_reduce(value)
    holds(value, 3)
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    holds(value, 6)
    dist.barrier()
    torch.npu.set_device(0)
    # The tensors are on another device than the current one.
    value = torch.empty(10, device=f"{name}:1").fill_(ctx.rank + 1)
    dist.all_reduce(value, async_op=True).wait()
    holds(value, 3)
    assert torch.npu.current_device() == 0
    group = dist.new_group([0, 1])
    dist.all_reduce(value, group=group)
    holds(value, 6)
    dist.destroy_process_group()


def test_each_rank_has_a_device_of_its_own() -> None:
    """Each rank has a `device_id`, and tensors may be on a device that is not the current one."""
    run_fresh(bound, 2)


def told(ctx: Context, vendor: str | None) -> list[str]:
    import torch_sagellm

    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    logging.getLogger("sagellm").addHandler(Keep())
    options = {} if vendor is None else {"pg_options": torch_sagellm.Options(vendor=vendor)}
    start(ctx, **options)
    value = torch.empty(256, device="npu").fill_(1)
    for _ in range(3):
        work = dist.all_reduce(value, async_op=True)
        work.wait()
    dist.all_reduce(torch.ones(4))
    stats = torch_sagellm.get_stats()
    assert stats["all_reduce_count"] == 4 and stats["host_staged_count"] == 3
    assert stats["host_staged_bytes"] == 3 * 1024 and stats["total_bytes"] == 3 * 1024 + 16
    assert stats["ops"]["all_reduce"]["count"] == 4
    past = torch_sagellm.explain(work)
    assert past.staged and past.path.startswith("staged") and "shared memory" in past.path, past
    assert past.nbytes == 1024 and past.sequence == 3
    assert torch_sagellm.explain(sequence=3).staged and not torch_sagellm.explain(sequence=4).staged
    assert "staged" in str(past)
    might = torch_sagellm.explain("all_reduce", 1024, device="npu")
    assert might.staged and might.choice == past.choice
    assert ("vendor=" if vendor == "host" else "was not found") in might.path, might.path
    assert not torch_sagellm.explain("all_reduce", 1024).staged
    records = backend_of()._records()
    assert sum(record["host_staged"] for record in records) == 3
    dist.new_group([0, 1])
    dist.destroy_process_group()
    return lines


@pytest.mark.parametrize("vendor", [None, "host"])
def test_invariant_11_nothing_is_silently_slow(vendor: str | None) -> None:
    """One warning names the device, says what is missing and that this path is slow. explain and the statistics say
    "staged"."""
    for lines in run_fresh(told, 2, vendor, env={"SAGELLM_LOG": "info"}):
        found = [line for line in lines if "host memory" in line]
        assert len(found) == 1 and found[0].startswith("WARNING"), lines
        assert "npu:0" in found[0] and "slow" in found[0]
        assert ("vendor=" if vendor == "host" else "was not found") in found[0]


def refused(ctx: Context) -> None:
    import torch_sagellm

    simdevice.install("npu")
    text = expect_raises(ValueError, lambda: ctx.init(pg_options=torch_sagellm.Options(vendor="acme")))
    assert "acme" in text and "host" in text, text


def test_an_unknown_vendor_is_refused_by_every_rank() -> None:
    """The option and the environment variable are checked before the ranks meet."""
    run_fresh(refused, 2)
    run_fresh(refused_by_environment, 2, env={"SAGELLM_VENDOR": "ACME"})


def refused_by_environment(ctx: Context) -> None:
    simdevice.install("npu")
    text = expect_raises(ValueError, ctx.init)
    assert "SAGELLM_VENDOR='ACME', expected one of auto, host" in text, text


# ------------------------------------------------------------------------------------------------ programs


def trained(ctx: Context, queue: float | None) -> None:
    start(ctx, queue=queue, delay=0.0001)
    for hook in (False, True):
        same_training(ddp("npu", ctx.rank, hook, 2), ddp("cpu", ctx.rank, hook, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize("queue", [None, 0.0001])
def test_rule_09_ddp_trains_as_on_the_cpu(queue: float | None) -> None:
    """Two steps with several buckets, without a hook and with one that compresses: parameters equal bit for bit."""
    run_fresh(trained, 2, queue)


def detail(ctx: Context) -> None:
    start(ctx)
    value = torch.empty(10, device="npu").fill_(ctx.rank + 1)
    dist.all_reduce(value)
    dist.all_reduce(value, async_op=True).wait()
    holds(value, 6)
    dist.barrier()
    dist.destroy_process_group()


def test_rule_12_debug_detail() -> None:
    """Rules 1 and 12: torch's checking wrapper finds the numbers it expects."""
    run_fresh(detail, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
