"""What a program sees when calls fail on an NVIDIA card, and the first calls of each sort. The ranks share one card.

`tests/py/device` tests the same on simulators, with every sort of call and of failure.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from card import PATIENCE, needs_shared_card
from failing_calls import SORTS, WAYS, failed, firsts, nobody_calls_again, use, waited
from harness import Context, expect_raises, launch, run_fresh
from limits import patience
from on_device import SHARED_CARD, holds, total

pytestmark = [needs_shared_card, pytest.mark.timeout(150)]
#: Timeout, in seconds, of the groups whose calls must time out.
DEADLINE = 2
EXIT_CODE = 70


def connected(timeout: float) -> Any:
    """Creates a further group and its communicator. The timeout applies to the group's calls."""
    group = dist.new_group(timeout=PATIENCE)
    backend = group._get_backend(torch.device("cuda"))
    backend.eager_connect_single_device(torch.device("cuda", 0))
    backend._set_default_timeout(timedelta(seconds=timeout))
    return group


def together() -> None:
    """Waits for all ranks, on the CPU, in the default group."""
    dist.all_reduce(torch.ones(1))


def begin(ctx: Context, bound: bool = False) -> None:
    torch.cuda.set_device(0)
    ctx.init(timeout=PATIENCE, **{"device_id": torch.device("cuda", 0)} if bound else {})


def end(ctx: Context, word: Any) -> None:
    """Sends the word to the test, and ends the process without leaving the groups, because some of them have failed."""
    ctx.tell(word)
    ctx.listen()
    os._exit(0)


# ------------------------------------------------------------------------------------------------ first calls


def late(ctx: Context) -> dict[str, float]:
    begin(ctx)
    took = {}
    for sort in SORTS:
        call = firsts(ctx.rank, "cuda", connected(60))[sort]
        together()
        if ctx.rank == 1:
            time.sleep(0.3)
        start = time.monotonic()
        out = call()
        took[sort] = time.monotonic() - start
        torch.cuda.synchronize()
        if out is not None:
            holds(out, 1)
    together()
    return took


def test_a_rank_that_comes_late_is_waited_for() -> None:
    """Each sort of call in a new group; two ranks that both send first do not wait for each other."""
    values = run_fresh(late, 2, env=SHARED_CARD, timeout=100)
    print("host seconds of first calls:", {sort: round(took, 3) for sort, took in values[0].items()})


def never(ctx: Context) -> None:
    begin(ctx)
    found = []
    for sort in SORTS:
        group = connected(DEADLINE)
        call = firsts(ctx.rank, "cuda", group)[sort]
        together()
        if ctx.rank == 0:
            start = time.monotonic()
            found.append((sort, *failed(call), time.monotonic() - start))
        together()
    end(ctx, found)


def test_rule_35_a_first_call_that_a_rank_does_not_join_ends_at_its_deadline() -> None:
    with launch(never, 2, env=SHARED_CARD) as job:
        found = job.hear(0, 100)
        print("seconds:", {sort: round(took, 2) for sort, _, _, took in found})
        for sort, kind, text, took in found:
            assert f"Timed out after {DEADLINE}.0 s" in text and "rank 1" in text, (sort, kind, text)
            assert DEADLINE * 0.95 < took < DEADLINE + patience(2), (sort, took)
        job.hear(1)
        for rank in range(2):
            job.say(rank, "go")


def interrupted(ctx: Context) -> None:
    begin(ctx)
    found = []
    for sort in ("all_reduce", "all_to_all", "isend and irecv"):
        call = firsts(ctx.rank, "cuda", connected(300))[sort]
        together()
        if ctx.rank == 0:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            start = time.monotonic()
            found.append((sort, *failed(call), time.monotonic() - start))
        together()
    end(ctx, found)


def test_rule_35_ctrl_c_ends_a_first_call() -> None:
    with launch(interrupted, 2, env=SHARED_CARD) as job:
        found = job.hear(0, 100)
        print("seconds:", [(sort, kind, round(took, 2)) for sort, kind, _, took in found])
        for sort, kind, text, took in found:
            assert kind == "KeyboardInterrupt", (sort, kind, text)
            assert took < 0.5 + patience(1), (sort, took)
        job.hear(1)
        for rank in range(2):
            job.say(rank, "go")


# ------------------------------------------------------------------------------------------------ later calls


def fails(ctx: Context, why: str) -> None:
    """Rank 1 joins no call. Each way uses a new group, because a failed group stays failed."""
    begin(ctx)
    found = []
    for way in WAYS:
        group = connected(60)
        for _ in range(2):  # so that the failing call is not a first call
            way(torch.full((4,), ctx.rank + 1.0, device="cuda"), group)
            torch.cuda.synchronize()
        backend = group._get_backend(torch.device("cuda"))
        backend._set_default_timeout(timedelta(seconds=DEADLINE if why == "deadline" else 60))
        together()
        if ctx.rank == 0:
            if why == "abort":
                threading.Timer(0.3, backend.abort).start()
            start = time.monotonic()
            found.append((way.__name__, *use(way, "cuda", group), time.monotonic() - start))
            nobody_calls_again(0.3)
        together()
    good = torch.ones(4, device="cuda")
    dist.all_reduce(good)
    holds(good, 2)
    end(ctx, found)


@pytest.mark.parametrize("why", ["deadline", "abort"])
def test_rule_34_no_statement_runs_on_what_a_failed_call_has_left(why: str) -> None:
    """No form of the call lets a later statement run. Afterwards another group of the process still works."""
    with launch(fails, 2, why, env=SHARED_CARD) as job:
        found = job.hear(0, 100)
        print("seconds:", {way: round(took, 2) for way, _, _, took in found})
        for way, reached, text, _ in found:
            assert not reached, (way, found)
            assert ("Timed out after" if why == "deadline" else "abort() was called on rank 0") in text, (way, text)
        job.hear(1)
        for rank in range(2):
            job.say(rank, "go")


def dies(ctx: Context) -> None:
    """Rank 1 is killed while the others wait for it on the device; they go on without it."""
    import torch_sagellm

    begin(ctx)
    value = torch.full((1000,), ctx.rank + 1.0, device="cuda")
    dist.all_reduce(value)
    holds(value, total(ctx.world_size))
    together()
    if ctx.rank == 1:
        ctx.tell("ready")
        ctx.listen()
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.tell("ready")
    reached, text = use(waited, "cuda")
    told = time.monotonic()
    torch_sagellm.recover(timeout=30)
    value = torch.full((1000,), float(ctx.rank + 1), device="cuda")
    dist.all_reduce(value)
    holds(value, total(ctx.world_size) - 2)
    end(ctx, (reached, text, told, time.monotonic() - told))


def test_the_others_learn_of_a_death_and_go_on_without_the_rank() -> None:
    """`torch_sagellm.recover` makes a new group, with a new communicator."""
    with launch(dies, 3, env=SHARED_CARD) as job:
        assert [job.hear(rank, 60) for rank in range(3)] == ["ready"] * 3
        time.sleep(0.5)
        killed = time.monotonic()
        job.say(1, "die")
        for rank in (0, 2):
            reached, text, told, recovered = job.hear(rank, 60)
            print(f"rank {rank}: told after {told - killed:.2f} s, recovered in {recovered:.2f} s")
            assert not reached and "rank 1" in text, text
            job.say(rank, "go")


def differ(ctx: Context) -> None:
    begin(ctx)
    group = connected(30)
    value = torch.ones(8, device="cuda")
    for _ in range(2):
        dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    together()
    start = time.monotonic()
    kind, text = failed(lambda: dist.all_reduce(value[: 4 + 4 * ctx.rank], group=group))
    end(ctx, (kind, text, time.monotonic() - start))


def test_calls_that_differ_are_named() -> None:
    """The sizes differ from rank to rank, which the library does not notice."""
    with launch(differ, 2, env=SHARED_CARD) as job:
        for rank in range(2):
            kind, text, took = job.hear(rank, 60)
            print(rank, kind, round(took, 3), text)
            assert "all_reduce(16 bytes" in text and "all_reduce(32 bytes" in text, (kind, text)
        for rank in range(2):
            job.say(rank, "go")


def chosen(ctx: Context, how: str) -> None:
    begin(ctx)
    value = torch.ones(4, device="cuda")
    for _ in range(2):
        dist.all_reduce(value)
    torch.cuda.synchronize()
    on_device.backend_of("cuda")._set_default_timeout(timedelta(seconds=DEADLINE))
    together()
    if ctx.rank == 1:
        ctx.listen()
        os._exit(0)
    if how == "blocking":
        work = dist.all_reduce(value, async_op=True)
        end(ctx, [expect_raises(dist.DistBackendError, call) for call in (work.wait, lambda: dist.all_reduce(value))])
    use(waited, "cuda")
    end(ctx, "the program went on")


def test_a_group_that_ends_the_process_where_a_call_fails() -> None:
    env = SHARED_CARD | {"SAGELLM_ON_DEVICE_FAILURE": "exit"}
    with launch(chosen, 2, "exit", env=env) as job:
        until = time.monotonic() + 60
        while job.ranks[0].poll() is None and time.monotonic() < until:
            job.ranks[0].rest(0.2)
        assert job.ranks[0].poll() == EXIT_CODE, job.ranks[0].output()
        assert "Timed out" in job.ranks[0].output(), job.ranks[0].output()
        job.say(1, "go")


def test_a_group_whose_waits_block() -> None:
    with launch(chosen, 2, "blocking", env=SHARED_CARD | {"SAGELLM_BLOCKING_WAIT": "1"}) as job:
        for text in job.hear(0, 60):
            assert "Timed out" in text, text
        for rank in range(2):
            job.say(rank, "go")


def replays(ctx: Context) -> None:
    """A graph with a call of the group is replayed after rank 1 has died."""
    begin(ctx)
    value, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    for _ in range(2):
        dist.all_reduce(value.fill_(1))
    with torch.cuda.graph(graph):
        dist.all_reduce(value)
    together()
    if ctx.rank == 1:
        os._exit(9)
    start = time.monotonic()
    text = ""
    try:
        graph.replay()
        torch.cuda.synchronize()
    except BaseException as error:
        text = str(error)
    if not text:
        text = failed(lambda: nobody_calls_again(3))[1]
    end(ctx, (text, time.monotonic() - start))


def test_a_replay_that_waits_for_a_dead_rank_ends() -> None:
    with launch(replays, 2, env=SHARED_CARD) as job:
        text, took = job.hear(0, 60)
        print(round(took, 2), text)
        assert "rank 1" in text, text
        job.say(0, "go")


# ------------------------------------------------------------------------------------------------ memory


def memory(ctx: Context, asynchronous: bool) -> list[int]:
    """Waits for a call of 256 MiB and drops its tensor. Returns how many MiB are held right then and 0.3 s later."""
    begin(ctx)
    dist.all_reduce(torch.ones(10, device="cuda"))
    torch.cuda.synchronize()
    together()
    before = torch.cuda.memory_allocated()
    large = torch.ones(1 << 26, device="cuda")
    work = dist.all_reduce(large, async_op=asynchronous)
    if work is not None:
        work.wait()
    del large, work
    held = [torch.cuda.memory_allocated() - before]
    torch.cuda.synchronize()
    time.sleep(0.3)
    held.append(torch.cuda.memory_allocated() - before)
    together()
    dist.destroy_process_group()
    return [each >> 20 for each in held]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_memory_is_held_no_longer_than_the_call(asynchronous: bool) -> None:
    for held in run_fresh(memory, 2, asynchronous, env=SHARED_CARD, timeout=100):
        print("MiB held at once, and after 0.3 s:", held)
        assert held[1] == 0, held


# ------------------------------------------------------------------------------------------------ further calls


def further(ctx: Context) -> None:
    """Lists with their shapes, compression, and a group split off."""
    import torch_sagellm

    begin(ctx, bound=True)
    n = ctx.world_size
    on_device.lists_travel(ctx, "cuda")
    for how in ("fp16", "bf16", "int8", "topk"):
        value = torch.full((4096,), ctx.rank + 1.0, device="cuda")
        out = torch_sagellm.compressed_all_reduce(value, how)
        kept = out.cpu() != 0
        assert kept.sum() == 4096 or (how == "topk" and kept.sum() > 0), (how, kept.sum())
        assert torch.allclose(out.cpu()[kept], torch.tensor(total(n)), rtol=0.02), (how, out)
    part = dist.split_group(split_ranks=[[0], [1]])
    value = torch.ones(10, device="cuda")
    dist.all_reduce(value, group=part)
    holds(value, 1)
    dist.all_reduce(value)
    holds(value, n)
    dist.destroy_process_group()


def test_lists_compression_and_a_group_split_off() -> None:
    run_fresh(further, 2, env=SHARED_CARD, timeout=100)
