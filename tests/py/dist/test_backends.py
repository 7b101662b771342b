"""`create_comm_backend` and its objects: every method against plain arithmetic, refused arguments, timeouts, reuse."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, run_fresh, run_ranks, run_warm, warm_python
from limits import patience
from on_device import number

pytestmark = beyond_gloo("backends as objects")


def numbers(rank: int, rows: int = 4) -> torch.Tensor:
    return torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3) + 100 * rank


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert torch.equal(found, expected), (found, expected)


def methods(ctx: Context) -> None:
    import torch_sagellm

    comm = torch_sagellm.create_comm_backend()
    ranks, me = range(ctx.world_size), ctx.rank
    assert (comm.rank, comm.world_size, type(comm)) == (me, ctx.world_size, torch_sagellm.CPUBackend)
    every = [numbers(rank, ctx.world_size) for rank in ranks]
    total = torch.stack(every).sum(0)
    mine = every[me].clone()
    assert comm.all_reduce(mine) is mine
    same(mine, total)
    for op, expected in {
        "avg": total / ctx.world_size,
        "mean": total / ctx.world_size,
        "max": every[-1],
        "min": every[0],
        "prod": torch.stack(every).prod(0),
    }.items():
        torch.testing.assert_close(comm.all_reduce(every[me].clone(), op), expected)
    same(comm.safe_all_reduce(every[me].clone()), total)
    given = [every[me].clone(), torch.full((5,), me, dtype=torch.int32)]
    returned = comm.fused_all_reduce(given)
    assert all(one is other for one, other in zip(returned, given, strict=True))
    same(given[0], total)
    same(given[1], torch.full((5,), sum(ranks), dtype=torch.int32))
    same(comm.all_gather(every[me]), torch.cat(every))
    same(comm.all_gather(torch.tensor(float(me))), torch.arange(float(ctx.world_size)))
    same(comm.all_gather(every[me].t().contiguous().t()), torch.cat(every))
    place = torch.empty(ctx.world_size * ctx.world_size, 3, dtype=torch.float64)
    assert comm.all_gather(every[me], place) is place
    same(comm.reduce_scatter(every[me]), total[me : me + 1])
    same(comm.broadcast(every[me].clone(), root_rank=1), every[1])
    reduced = comm.reduce(every[me].clone(), root_rank=1)
    same(reduced, total if me == 1 else every[me])
    gathered = comm.gather(every[me], root_rank=1)
    assert (gathered is None) == (me != 1)
    if gathered is not None:
        same(gathered, torch.cat(every))
    for shape in ((), (0, 3)):
        found = comm.gather(torch.full(shape, float(me)), root_rank=0)
        expected = [torch.full(shape, float(rank)) for rank in ranks]
        assert me != 0 or torch.equal(found, torch.cat(expected) if shape else torch.stack(expected))
    assert comm.scatter(torch.ones(0, 3) if me == 0 else None, torch.ones(0, 3)).shape == (0, 3)
    part = torch.empty(1, 3, dtype=torch.float64)
    assert comm.scatter(every[0] if me == 0 else None, part) is part
    same(part, every[0][me : me + 1])
    same(comm.all_to_all(every[me]), torch.stack([each[me] for each in every]))
    sizes = [rank + 1 for rank in ranks]
    uneven = torch.full((sum(sizes),), float(me))
    came = comm.all_to_all(uneven, None, sizes, [me + 1] * ctx.world_size)
    same(came, torch.arange(float(ctx.world_size)).repeat_interleave(me + 1))
    comm.barrier()
    found = comm.explain("all_reduce", 1024)
    assert found.ranks == ctx.world_size and found.op == "all_reduce"
    assert comm.explain(torch_sagellm.CommOp.ALL_GATHER, 1024).op == "all_gather"
    stats = comm.get_stats()
    assert stats["ops"]["all_reduce"]["count"] >= 6, stats
    assert comm.stats.keys() == stats.keys() and str(ctx.world_size) in repr(comm)
    assert comm.reason == "auto: this process has no accelerator" and comm.reason in repr(comm)
    by_name = torch_sagellm.create_comm_backend("cpu")
    assert by_name.reason == "asked for by name" and by_name.group is comm.group
    assert torch_sagellm.create_comm_backend().reason == comm.reason


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_method_gives_what_plain_arithmetic_gives(world_size: int) -> None:
    run_ranks(methods, world_size)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("device", "vendor", "chosen", "why"),
    [
        (None, "", "cpu", "this process has no accelerator"),
        ("cuda", "", "nccl", "this process has a device of type cuda"),
        ("npu", "", "hccl", "this process has a device of type npu"),
        ("mlu", "", "cncl", "this process has a device of type mlu"),
        ("cuda", "hccl", "hccl", "SAGELLM_VENDOR names it for devices of type cuda"),
        ("xpu", "", "gloo", "no library is known for devices of type xpu: they go through host memory"),
    ],
)
def test_auto_says_what_it_found(
    device: str | None, vendor: str, chosen: str, why: str, monkeypatch: Any, caplog: Any
) -> None:
    from torch_sagellm.api import backends

    monkeypatch.setenv("SAGELLM_VENDOR", vendor)
    found = None if device is None else SimpleNamespace(type=device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    with caplog.at_level(logging.INFO, "sagellm"):
        assert backends._auto() == (chosen, why)
    assert f"backend_type 'auto' is '{chosen}': {why}" in caplog.text


def futures(ctx: Context) -> None:
    import torch_sagellm

    comm = torch_sagellm.create_comm_backend()
    total = sum(numbers(rank) for rank in range(ctx.world_size))
    mine = numbers(ctx.rank)
    future = comm.all_reduce(mine, async_op=True)
    assert isinstance(future, torch.futures.Future)
    doubled = future.then(lambda ended: ended.value() * 2)
    assert future.wait() is mine
    same(doubled.wait(), 2 * total)
    same(mine, total)
    for _ in range(200):
        ended = comm.all_reduce(torch.ones(1), async_op=True)
        ended.wait()
        assert ended.value().item() == 2.0, "no moment between the end of wait() and the value"
    if ctx.rank == 0:
        early = comm.all_reduce(torch.ones(1), async_op=True)
        assert "wait() waits for it" in expect_raises(RuntimeError, early.value)
        comm.send(torch.ones(1), 1)
        assert early.wait().item() == 2.0
    else:
        comm.recv(torch.ones(1), 0)
        comm.all_reduce(torch.ones(1))
    same(comm.all_gather(numbers(ctx.rank), async_op=True).wait()[:4], numbers(0))
    same(
        comm.reduce_scatter(numbers(ctx.rank, 2), async_op=True).wait().reshape(3),
        (numbers(0, 2) + numbers(1, 2))[ctx.rank],
    )
    peer = 1 - ctx.rank
    got = torch.zeros(4, 3, dtype=torch.float64)
    sent, received = comm.isend(numbers(ctx.rank), peer, tag=7), comm.irecv(got, peer, tag=7)
    assert received.wait() is got and sent.wait() is not None
    same(got, numbers(peer))
    if ctx.rank == 0:
        comm.send(torch.ones(2), 1)
    else:
        same(comm.recv(torch.zeros(2), None), torch.ones(2))


@pytest.mark.quick
def test_asynchronous_forms_give_a_future_of_the_tensor_and_messages_arrive() -> None:
    run_ranks(futures, 2)


def delegated(ctx: Context) -> None:
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(engine="delegate"))
    comm = torch_sagellm.create_comm_backend()
    peer, got = 1 - ctx.rank, torch.zeros(2)
    sent, received = comm.isend(torch.full((2,), float(ctx.rank)), peer), comm.irecv(got, peer)
    doubled = received.then(lambda ended: ended.value() * 2)
    assert received.wait() is got and sent.wait().tolist() == [ctx.rank] * 2 and received.done()
    assert got.tolist() == [peer] * 2 and doubled.wait().tolist() == [2 * peer] * 2
    assert received.wait() is got, "a second time"
    assert received.value() is got
    same(comm.all_reduce(torch.ones(2), async_op=True).wait(), torch.full((2,), 2.0))
    dist.destroy_process_group()


def test_messages_of_a_delegate_have_futures_that_end_with_their_wait() -> None:
    """torch gives gloo's sends and receives no futures, so this package adds them."""
    run_fresh(delegated, 2)


def refusals(ctx: Context) -> None:
    import torch_sagellm

    comm = torch_sagellm.create_comm_backend("cpu")
    before = number()
    text = expect_raises(ValueError, lambda: torch_sagellm.create_comm_backend("ncl"))
    assert "auto, cpu, nccl, hccl, cncl, gloo" in text and "'ncl'" in text and "did you mean 'nccl'?" in text
    assert "retry is -1" in expect_raises(ValueError, lambda: torch_sagellm.create_comm_backend("cpu", retry=-1))
    for timeout in ("soon", float("inf"), float("nan")):
        text = expect_raises(ValueError, lambda timeout=timeout: comm.all_reduce(torch.ones(1), timeout=timeout))
        assert f"timeout is {timeout!r}, expected a finite number of seconds or a timedelta" in text
    for call in (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.gather, comm.all_to_all):
        text = expect_raises(TypeError, lambda call=call: call([1.0]))
        assert f"sagellm {call.__name__}: got a list, expected a tensor" in text
    text = expect_raises(ValueError, lambda: comm.all_to_all(torch.ones(3)))
    assert "all_to_all: dimension 0 of the tensor is 3, expected a multiple of the 2 ranks" in text
    text = expect_raises(ValueError, lambda: comm.all_reduce(torch.ones(1), "median"))
    assert "'median'" in text and "sum, avg, mean, max, min, prod" in text
    expect_raises(ValueError, lambda: comm.fused_all_reduce([torch.ones(1)], "median"))
    assert "multiple of the 2 ranks" in expect_raises(ValueError, lambda: comm.reduce_scatter(torch.ones(3)))
    assert "more than 0" in expect_raises(ValueError, lambda: comm.all_reduce(torch.ones(1), timeout=0))
    text = expect_raises(ValueError, lambda: torch_sagellm.create_comm_backend(soft_timeout=-1))
    assert "soft_timeout is -1, expected 0 seconds (no line) or more" in text
    text = expect_raises(ValueError, lambda: torch_sagellm.create_comm_backend("cpu", soft_timeout="5"))
    assert "soft_timeout is '5', expected 0 seconds" in text
    assert "rank is 7" in expect_raises(ValueError, lambda: torch_sagellm.create_comm_backend("cpu", rank=7))
    assert "world_size is 9" in expect_raises(ValueError, lambda: torch_sagellm.CPUBackend(ctx.rank, 9))
    for name, device in {"nccl": "cuda", "hccl": "npu", "cncl": "mlu"}.items():
        assert device in expect_raises(RuntimeError, lambda name=name: torch_sagellm.create_comm_backend(name))
    text = expect_raises(ValueError, lambda: comm.reduce(torch.ones(1), "sum"))
    assert "reduce: root_rank is 'sum', expected a rank from 0 to 1: reduce(tensor, root_rank, op)" in text
    for call in (
        lambda: comm.broadcast(torch.ones(1), 2),
        lambda: comm.gather(torch.ones(1), -1),
        lambda: comm.scatter(torch.ones(2), torch.ones(1), 2.0),
    ):
        assert "expected a rank from 0 to 1" in expect_raises(ValueError, call)
    if ctx.rank == 0:
        assert "must pass an input" in expect_raises(ValueError, lambda: comm.scatter(None, torch.ones(1)))
    assert number() == before, "nothing was sent"
    comm.barrier()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="it names devices that must be missing")
def test_wrong_input_is_refused_with_the_choices_and_nothing_is_sent() -> None:
    run_ranks(refusals, 2)


def reuse(ctx: Context) -> None:
    import torch_sagellm

    comm = torch_sagellm.create_comm_backend()
    assert comm is torch_sagellm.create_comm_backend() and comm.group is dist.group.WORLD
    assert torch_sagellm.create_comm_backend("gloo").group is dist.group.WORLD, (
        "without a device there is no difference"
    )
    alone = torch_sagellm.create_comm_backend(fusion=False, timeout=20)
    assert alone is not comm and alone is torch_sagellm.create_comm_backend(fusion=False, timeout=20)
    assert alone is torch_sagellm.create_comm_backend(fusion=False, timeout=timedelta(seconds=20)), "as long as 20"
    assert alone is torch_sagellm.create_comm_backend(fusion=False, timeout=np.int64(20)), "a number of numpy"
    assert alone.group is not dist.group.WORLD
    same(alone.all_reduce(torch.ones(2)), torch.full((2,), float(ctx.world_size)))
    ruled = torch_sagellm.create_comm_backend(algorithm="all_reduce:0-=rounds(64KiB)")
    assert ruled.explain("all_reduce", 64).choice == "rounds(64KiB)"
    told = torch_sagellm.create_comm_backend(soft_timeout=timedelta(seconds=90))
    assert told.group is not comm.group and told is torch_sagellm.create_comm_backend(
        soft_timeout=timedelta(seconds=90)
    )
    assert told.group._get_backend(torch.device("cpu")).options.soft_timeout == 90
    theirs = dist.new_group(backend="gloo")
    sibling = torch_sagellm.create_comm_backend(group=theirs)
    assert sibling.group is not theirs and dist.get_backend(sibling.group) == "sagellm"
    same(sibling.all_reduce(torch.ones(2)), torch.full((2,), float(ctx.world_size)))
    last = dist.new_group([ctx.world_size - 1])
    if ctx.rank == ctx.world_size - 1:
        only = torch_sagellm.create_comm_backend(group=last)
        assert (only.rank, only.world_size) == (0, 1)
        same(only.all_reduce(torch.ones(2)), torch.ones(2))
    dist.destroy_process_group()
    ctx.init(key=ctx.key + "again")
    again = torch_sagellm.create_comm_backend()
    assert again is not comm
    same(again.all_reduce(torch.ones(2)), torch.full((2,), float(ctx.world_size)))
    dist.destroy_process_group()


def test_equal_arguments_give_the_same_object_and_other_settings_a_group_of_their_own() -> None:
    run_ranks(reuse, 2)


def late(ctx: Context) -> tuple[str, list[int]]:
    import torch_sagellm

    ctx.init()
    comm = torch_sagellm.create_comm_backend()
    comm.barrier()
    if ctx.rank == 1:
        ctx.listen()
        return "", []
    began = time.monotonic()
    try:
        comm.safe_all_reduce(torch.ones(2), timeout=1)
    except TimeoutError as error:
        assert isinstance(error, torch_sagellm.CommTimeoutError | dist.DistBackendError)
        assert time.monotonic() - began < patience(10)
        ctx.tell("over")
        return str(error), error.missing_ranks
    raise AssertionError("nothing was raised")


def late_future(ctx: Context) -> tuple[str, list[int]]:
    import torch_sagellm

    ctx.init()
    comm = torch_sagellm.create_comm_backend()
    comm.barrier()
    if ctx.rank == 1:
        ctx.listen()
        return "", []
    future = comm.all_reduce(torch.ones(2), async_op=True, timeout=1)
    chained = future.then(lambda ended: ended.value())
    try:
        future.wait()
    except torch_sagellm.CommTimeoutError as error:
        assert "rank 1" in expect_raises(RuntimeError, chained.wait), "what is chained fails with it"
        ctx.tell("over")
        return str(error), error.missing_ranks
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("fn", [late, late_future])
def test_a_timeout_is_both_kinds_of_error_and_names_the_missing_rank(fn: Any) -> None:
    ranks = 3 if fn is late else 2
    with launch(fn, ranks) as job:
        for rank in range(ranks):
            assert rank == 1 or job.hear(rank) == "over"
        job.say(1, "go")
        ended = job.wait()
    for outcome in ended:
        if outcome.rank != 1:
            text, missing = outcome.value
            assert "rank 1" in text and "all_reduce" in text, text
            assert missing == [1]


ALONE = """
import torch, torch_sagellm, torch.distributed as dist
comm = torch_sagellm.create_comm_backend()
assert (comm.rank, comm.world_size) == (0, 1) and dist.is_initialized()
assert comm.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
assert comm.all_gather(torch.ones(2, 2)).shape == (2, 2) and comm is torch_sagellm.create_comm_backend()
dist.destroy_process_group()
"""
MANY = """
import torch, torch_sagellm
comm = torch_sagellm.CPUBackend()
assert comm.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
torch.distributed.destroy_process_group()
"""
FOREIGN = """
import torch, torch_sagellm
try:
    torch_sagellm.CPUBackend(1, 4)
except RuntimeError as error:
    assert "torchrun" in str(error) and "MASTER_ADDR" in str(error), error
else:
    raise SystemExit("nothing was raised")
"""


@pytest.mark.parametrize("script", [ALONE, FOREIGN])
def test_without_a_group_and_an_environment_it_is_one_rank(script: str) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(
        [warm_python(), "-c", script],
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_it_starts_the_group_of_torchrun_s_environment(tmp_path: Any) -> None:
    (tmp_path / "many.py").write_text(MANY)
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "many.py")]
    done = run_warm(*run)
    assert done.returncode == 0, done.stderr


def meets_late(ctx: Context, port: int, first: int, retry: int, seconds: float) -> str:
    """Creates the group from torchrun's environment. Rank `first` starts long before the other rank."""
    import torch_sagellm
    from torch_sagellm.api import group_choice

    os.environ.update(RANK=str(ctx.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    group_choice.FIRST_PAUSE = group_choice.LONGEST_PAUSE = 0.1

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "attempt 2 of" in record.getMessage():
                ctx.tell(record.getMessage())

    logging.getLogger("sagellm").addHandler(Told())
    if ctx.rank != first:
        ctx.listen()
    try:
        comm = torch_sagellm.CPUBackend(timeout=seconds, retry=retry)
    except RuntimeError as error:
        ctx.tell(f"failed: {error}")
        return "failed"
    # The group of the second attempt has the name that the group of the first would have had.
    found = f"{comm.all_reduce(torch.ones(2)).tolist()} in {comm.group.group_name}"
    assert comm is not torch_sagellm.create_comm_backend("cpu", retry=2), "made by its class"
    again = torch_sagellm.create_comm_backend("cpu", timeout=seconds)
    assert again is torch_sagellm.create_comm_backend("cpu", timeout=seconds, retry=3), (
        "retry is no setting of the group"
    )
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("first", [0, 1])
def test_making_the_group_is_tried_again(first: int) -> None:
    """The first attempt fails because the store does not exist yet (rank 0 is late) or because rank 1 is late."""
    with launch(meets_late, 2, free_port(), first, 100, patience(1.5)) as job:
        assert "attempt 2 of 101 follows" in job.hear(first, 60)
        job.say(1 - first, "start")
        assert job.values(90) == ["[2.0, 2.0] in 0"] * 2


def test_without_retry_or_after_the_last_attempt_the_error_is_the_callers() -> None:
    for retry in (0, 1):
        with launch(meets_late, 2, free_port(), 0, retry, 0.5) as job:
            words = [job.hear(0, 60) for _ in range(retry + 1)]
            assert words[-1].startswith("failed: ") and len(words) == retry + 1, words


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fails_once(ctx: Context) -> None:
    """A failed operation is not retried."""
    import torch_sagellm

    comm = torch_sagellm.create_comm_backend("cpu", retry=5)
    before = comm.get_stats()["ops"].get("all_reduce", {"count": 0})["count"]
    expect_raises(RuntimeError, lambda: comm.all_reduce(torch.ones(2 + ctx.rank)))
    assert comm.get_stats()["ops"]["all_reduce"]["count"] <= before + 1
    for wrong in (-1, 1.5, "often"):
        assert "expected a whole number" in expect_raises(
            ValueError, lambda wrong=wrong: torch_sagellm.CPUBackend(retry=wrong)
        )


def test_operations_are_never_tried_again() -> None:
    run_ranks(fails_once, 2, fresh_group=True)


def buffers(ctx: Context) -> None:
    import torch_sagellm

    comm = torch_sagellm.create_comm_backend()
    buffer = torch_sagellm.CommFusionBuffer(max_size_mb=1000 / 2**20)
    first, second = torch.ones(100), torch.full((50,), 2, dtype=torch.int64)
    assert buffer.add_tensor(first) and buffer.add_tensor(second)
    assert not buffer.add_tensor(torch.ones(100)), "400 + 400 + 400 bytes are more than 1000"
    assert len(buffer) == 2 and buffer.offset == 800 and buffer.buffer.shape == (1000,)
    same(buffer.buffer[:400].view(torch.float32), first)
    same(buffer.buffer[400:800].view(torch.int64), second)
    returned = buffer.flush_and_all_reduce(comm)
    assert returned[0] is first and len(buffer) == 0 and buffer.nbytes == 0
    same(first, torch.full((100,), float(ctx.world_size)))
    same(second, torch.full((50,), 2 * ctx.world_size, dtype=torch.int64))
    assert buffer.flush_and_all_reduce(comm) == []
    assert not buffer.add_tensor(torch.ones(1000)), "one that is larger than the buffer never fits"
    assert buffer.add_tensor(torch.ones(250)), "all of it"
    buffer.reset()
    assert len(buffer) == 0
    shared = torch.ones(4)
    assert buffer.add_tensor(shared) and buffer.add_tensor(shared)
    expect_raises(ValueError, lambda: buffer.flush_and_all_reduce(comm))
    assert len(buffer) == 2, "refused, and still there"
    with torch_sagellm.monitor_communication("step") as report:
        dist.all_reduce(torch.ones(1000))
        dist.broadcast(torch.ones(10), 0)
    assert report.operations == {"all_reduce": 1, "broadcast": 1}, report
    assert report.nbytes >= 4000 and report.seconds > 0 and "1 all_reduce" in str(report)

    @torch_sagellm.monitor_communication
    def step(count: int) -> int:
        """A step."""
        for _ in range(count):
            dist.all_reduce(torch.ones(1))
        return count

    assert step(3) == 3 and step.report.operations == {"all_reduce": 3} and step.__doc__ == "A step."

    @torch_sagellm.monitor_communication("named")
    def other() -> None:
        torch_sagellm.batch_all_reduce([torch.ones(2), torch.ones(3)])

    other()
    assert other.report.operations == {"all_reduce": 1} and str(other.report).startswith("named:")

    class Layer:
        @torch_sagellm.monitor_communication
        def reduce(self, left: int) -> int:
            dist.all_reduce(torch.ones(1))
            return self.reduce(left - 1) + 1 if left else 0

        @torch_sagellm.monitor_communication
        @staticmethod
        def alone(value: int) -> int:
            return value

        watched = torch_sagellm.monitor_communication("context")

    layer = Layer()
    assert layer.reduce(2) == 2, "it is bound to its object"
    assert layer.reduce.report.operations == {"all_reduce": 3}, "the outermost of calls within one another ends last"
    assert layer.alone(3) == Layer.alone(3) == 3, "a static method takes no object"
    with layer.watched as report:
        dist.all_reduce(torch.ones(1))
    assert report.operations == {"all_reduce": 1}, "a context that a class holds"


def test_lists_are_collected_and_what_was_sent_is_counted() -> None:
    run_ranks(buffers, 2)


@pytest.mark.quick
def test_memory_is_used_again() -> None:
    import torch_sagellm

    buffer = torch_sagellm.CommunicationBuffer(1024)
    assert not buffer.in_use
    with buffer:
        part = buffer.get_buffer(512)
        assert part.shape == (512,) and buffer.in_use
        assert buffer.get_buffer(2).data_ptr() == part.data_ptr() == buffer.buffer.data_ptr() and buffer.in_use
        with pytest.raises(ValueError, match="size is -1, expected a whole number from 0 on"):
            buffer.get_buffer(-1)
        with pytest.raises(ValueError, match="Buffer too small"):
            buffer.get_buffer(2048)
    assert not buffer.in_use and buffer.get_buffer(0).numel() == 0
    assert torch_sagellm.CommFusionBuffer(100).max_bytes == 100 * 1024 * 1024
    assert torch_sagellm.CommFusionBuffer(np.int64(2)).max_bytes == 2 * torch_sagellm.CommFusionBuffer(1).max_bytes
    for wrong in (lambda: torch_sagellm.CommunicationBuffer(0), lambda: torch_sagellm.CommFusionBuffer(0)):
        with pytest.raises(ValueError):
            wrong()
