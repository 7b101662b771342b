"""A rank is killed, stopped or missing, or makes a different call: its peers soon get an error that names it, and can
continue."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import IS_GLOO, Context, beyond_gloo, error_of, expect_raises, launch, monitored_barrier
from helpers import alive, nothing_left, shm_files_of, sockets_of, unix_sockets, until, work_for_ever
from limits import patience

Told = tuple[float, str]
#: When a call began and when it ended, and its error.
Timed = tuple[float, float, str]


def _leave() -> None:
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def killed_in_the_middle(ctx: Context, victim: int, kind: str) -> Told | None:
    """All ranks work and the test kills the victim. The other ranks return the time and the text of their error."""
    ctx.init(timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1))
    ctx.tell("ready")
    if kind == "blocked":
        if ctx.rank == victim:
            time.sleep(60)
        text = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(10)))
    elif kind == "async":
        if ctx.rank == victim:
            time.sleep(60)
        works: list[Any] = [dist.all_reduce(torch.ones(100 * i + 1), async_op=True) for i in range(20)]
        ctx.tell("issued")
        end = time.monotonic() + 30
        # No thread waits, so the operations must fail without one.
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < end, "pending operations did not end"
            time.sleep(0.002)
        text = expect_raises(RuntimeError, works[-1].wait)
        assert expect_raises(RuntimeError, works[0].wait)
        assert error_of(works[-1]) is not None and not works[-1].is_success()
    elif kind == "recv":
        if ctx.rank == victim:
            time.sleep(60)
        text = expect_raises(RuntimeError, lambda: dist.recv(torch.ones(10), victim))
    else:
        text = expect_raises(RuntimeError, work_for_ever)
    failed = time.monotonic()
    again = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(1)))  # later operations fail immediately
    assert time.monotonic() - failed < patience(1.0) and again
    _leave()
    return failed, text


@pytest.mark.quick
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("kind", ["blocked", "async", "working", "recv"])
def test_kill_9_fails_the_others_in_under_a_second(kind: str, victim: int) -> None:
    """Every pending and every later operation fails with an error that names rank, pid and operation; pitfall 15."""
    with launch(killed_in_the_middle, 3, victim, kind) as job:
        others = [rank for rank in range(3) if rank != victim]
        for rank in range(3):
            assert job.hear(rank) == "ready"
        if kind == "async":
            for rank in others:  # an earlier death would fail the call that issues
                assert job.hear(rank) == "issued"
        else:
            time.sleep(0.5)  # until the other ranks are in their calls
        pid, killed = job.pid(victim), time.monotonic()
        job.signal(victim, signal.SIGKILL)
        for rank in others:
            outcome = job.wait_rank(rank, 20)
            assert outcome.code == 0 and outcome.value, job.report()
            failed, text = outcome.value
            if IS_GLOO:
                continue
            assert failed - killed < patience(1.0), f"rank {rank} learned it after {failed - killed:.3f} s"
            assert f"rank {victim}" in text and str(pid) in text, text
            assert re.search(r"all_reduce|recv", text), text
    nothing_left(each.pid for each in job.ranks)


def survivors(ctx: Context, victim: int) -> list[float]:
    ctx.init(timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    trained: list[float] = []

    def step() -> None:
        loss = model(torch.ones(2, 4) * (dist.get_rank() + 1)).pow(2).mean()
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.001 * parameter.grad
        trained.append(loss.item())

    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for _ in range(5):
        step()
    ctx.tell("ready")
    if ctx.rank == victim:
        time.sleep(60)
    expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(3)))
    start = time.monotonic()
    _leave()
    rank = ctx.rank if ctx.rank < victim else ctx.rank - 1
    ctx.init(key=f"{ctx.key}-second", rank=rank, world_size=2, timeout=timedelta(seconds=20))
    assert time.monotonic() - start < patience(5)
    for _ in range(20):
        step()
    weights: list[Any] = [None, None]
    dist.all_gather_object(weights, [parameter.tolist() for parameter in model.parameters()])
    assert weights[0] == weights[1]
    dist.destroy_process_group()
    assert len(trained) == 25 and all(0.0 <= loss < 1e6 for loss in trained)
    return trained


@pytest.mark.quick
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_make_a_new_group_and_finish_the_training(victim: int) -> None:
    """One of three ranks is killed. The other two create a new group, with a new prefix in the same store, and
    continue."""
    with launch(survivors, 3, victim) as job:
        for rank in range(3):
            job.hear(rank)
        time.sleep(0.1)
        job.signal(victim, signal.SIGKILL)
        for rank in range(3):
            if rank != victim:
                outcome = job.wait_rank(rank, 40)
                assert outcome.code == 0, job.report()


def small_group_of_survivors(ctx: Context) -> None:
    ctx.init(timeout=timedelta(seconds=60))
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1))
    ctx.tell("ready")
    if ctx.rank == 2:
        time.sleep(60)
    text = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(1)))
    assert "rank 2" in text, text
    for turn in range(10):
        found = torch.full((turn + 1,), 1.0)
        dist.all_reduce(found, group=pair)
        assert (found == 2.0).all()
    dist.destroy_process_group(pair)
    _leave()


@beyond_gloo("does not name the rank")
def test_a_group_without_the_dead_rank_goes_on() -> None:
    """The death of a rank does not affect groups without this rank."""
    with launch(small_group_of_survivors, 3) as job:
        for rank in range(3):
            job.hear(rank)
        job.signal(2, signal.SIGKILL)
        for rank in range(2):
            assert job.wait_rank(rank, 20).code == 0, job.report()


def messages_beside_a_death(ctx: Context) -> None:
    ctx.init(timeout=timedelta(seconds=60))
    dist.barrier()
    if ctx.rank == 0:
        _leave()
    ctx.tell("ready")
    ctx.listen()
    if ctx.rank == 0:
        return
    backend, end = dist.group.WORLD._get_backend(torch.device("cpu")), time.monotonic() + patience(20)
    while not {0, 1} <= set(backend._gone()):
        assert time.monotonic() < end, "the ends of ranks 0 and 1 were not noticed"
        time.sleep(0.01)
    # Without the death the message would arrive: it needs neither rank 0 nor rank 1.
    value = torch.ones(1)
    call = dist.send if ctx.rank == 2 else dist.recv
    text = expect_raises(RuntimeError, lambda: call(value, 5 - ctx.rank))
    assert "rank 1 (pid" in text and "ended" in text, text
    _leave()


@beyond_gloo("a message goes on")
def test_a_death_fails_a_call_that_does_not_need_the_rank_although_another_has_left() -> None:
    """Rank 0 has left in order and its process has ended before rank 1 is killed."""
    with launch(messages_beside_a_death, 4) as job:
        for rank in range(4):
            assert job.hear(rank) == "ready"
        job.say(0, "go")
        assert job.wait_rank(0, 20).code == 0, job.report()
        job.signal(1, signal.SIGKILL)
        for rank in (2, 3):
            job.say(rank, "go")
            assert job.wait_rank(rank, 20).code == 0, job.report()


def stopped(ctx: Context) -> Timed | None:
    ctx.init()
    dist.all_reduce(torch.ones(1))
    ctx.set_timeout(timedelta(seconds=2))
    ctx.tell("ready")
    if ctx.rank == 1:
        time.sleep(60)
    start = time.monotonic()
    text = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(10)))
    ended = time.monotonic()
    _leave()
    return start, ended, text


@pytest.mark.quick
def test_a_stopped_rank_is_named_at_the_deadline() -> None:
    """After SIGSTOP, the error at the timeout names `rank 1` and its last operation."""
    with launch(stopped, 3) as job:
        for rank in range(3):
            job.hear(rank)
        job.signal(1, signal.SIGSTOP)
        outcomes = [job.wait_rank(rank, 20) for rank in (0, 2)]
        assert all(outcome.code == 0 for outcome in outcomes), job.report()
        first = min(outcome.value[0] for outcome in outcomes)
        for outcome in outcomes:
            began, ended, text = outcome.value
            # The rank that calls first reaches the deadline and fails the group, so the other may wait for less.
            assert ended - first > 2 * 0.95 and ended - began < 2 + patience(1), (first, began, ended)
            if not IS_GLOO:
                assert "rank 1" in text and "all_reduce" in text, text
                assert not re.search(r"rank [02] \([^)]*\) has not", text), text


def missing(ctx: Context, call: str) -> str:
    ctx.init()
    dist.broadcast(torch.ones(1), 0)
    ctx.tell("ready")
    ctx.listen()
    ctx.set_timeout(timedelta(seconds=1))
    text = ""
    if ctx.rank in (0, 3):
        tensor = torch.ones(8)
        calls = {
            "all_reduce": lambda: dist.all_reduce(tensor),
            "barrier": lambda: dist.barrier(),
            "all_gather": lambda: dist.all_gather([torch.ones(8) for _ in range(4)], tensor),
            "all_reduce, large": lambda: dist.all_reduce(torch.ones(1_000_000)),
        }
        text = expect_raises(RuntimeError, calls[call])
    ctx.tell("done")
    ctx.listen()
    _leave()
    return text


@beyond_gloo("names no rank")
@pytest.mark.parametrize("call", ["all_reduce", "barrier", "all_gather", "all_reduce, large"])
def test_missing_ranks_are_named_with_their_last_operation(call: str) -> None:
    """Two of four ranks do not call: the error names `rank 1` and `rank 2` with their last operations."""
    with launch(missing, 4, call) as job:
        for word in ("ready", "done"):
            for rank in range(4):
                assert job.hear(rank) == word
            for rank in range(4):
                job.say(rank, "go")
        texts = job.values()
    for rank in (0, 3):
        assert "rank 1" in texts[rank] and "rank 2" in texts[rank], texts[rank]
        assert call.split(",")[0] in texts[rank] and "broadcast" in texts[rank], texts[rank]


def monitored(ctx: Context, wait_all_ranks: bool) -> str:
    ctx.init(timeout=timedelta(seconds=30))
    text = ""
    if ctx.rank not in (1, 2):
        text = expect_raises(
            RuntimeError, lambda: monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=wait_all_ranks)
        )
    ctx.tell("done")
    ctx.listen()
    found = torch.ones(2)
    if ctx.backend != "gloo":
        dist.all_reduce(found)  # rule 1: the timeout of a monitored barrier does not poison the group
        assert found.tolist() == [4.0, 4.0]
    _leave()
    return text


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_rule_01_monitored_barrier_names_the_missing_and_poisons_nothing(wait_all_ranks: bool) -> None:
    """Rule 1: rank 0 names the first missing rank, or all of them. Afterwards the group works."""
    with launch(monitored, 4, wait_all_ranks) as job:
        for rank in range(4):
            job.hear(rank)
        for rank in range(4):
            job.say(rank, "go")
        texts = job.values()
    found = {int(each) for each in re.findall(r"\d+", texts[0].split("timeout", 1)[0])}
    assert 1 in found or "1" in texts[0]
    if wait_all_ranks:
        assert re.search(r"1\D+2", texts[0]), texts[0]


def monitored_zero(ctx: Context) -> str:
    ctx.init()
    dist.barrier()
    text = ""
    if ctx.rank == 0:
        start = time.monotonic()
        text = expect_raises(RuntimeError, lambda: monitored_barrier(timeout=timedelta(seconds=0)))
        assert time.monotonic() - start < patience(1.0)
    ctx.tell("done")
    ctx.listen()
    _leave()
    return text


@beyond_gloo("takes 0 for its own default")
def test_rule_11_monitored_barrier_with_timeout_zero_means_now() -> None:
    """Rule 11: here 0 does not mean "the group's timeout"."""
    with launch(monitored_zero, 2) as job:
        for rank in range(2):
            job.hear(rank)
        for rank in range(2):
            job.say(rank, "go")
        assert "1" in job.values()[0]


def different(ctx: Context, pair: str) -> str:
    ctx.init(timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))
    tensor = torch.full((6,), float(ctx.rank + 1))
    n = ctx.world_size
    calls: dict[str, tuple[Any, Any]] = {
        "kind": (lambda: dist.all_reduce(tensor), lambda: dist.broadcast(tensor, 0)),
        "count": (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(torch.ones(7))),
        "dtype": (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(torch.ones(6, dtype=torch.int32))),
        "op": (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX)),
        "root": (lambda: dist.broadcast(tensor, 0), lambda: dist.broadcast(tensor, 1)),
        "large": (lambda: dist.all_reduce(torch.ones(400_000)), lambda: dist.all_reduce(torch.ones(400_001))),
        "barrier": (lambda: dist.barrier(), lambda: dist.all_reduce(tensor)),
        "async": (lambda: dist.all_reduce(tensor, async_op=True).wait(), lambda: dist.barrier()),  # type: ignore[union-attr]
        "uneven": (
            lambda: dist.all_gather([torch.empty(2) for _ in range(n)], torch.ones(2)),
            lambda: dist.all_gather([torch.empty(3) for _ in range(n)], torch.ones(3)),
        ),
        "splits": (
            lambda: dist.all_to_all_single(torch.empty(2), torch.ones(2), [1, 1], [1, 1]),
            lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [2, 2]),
        ),
    }
    start = time.monotonic()

    def wrong() -> None:
        calls[pair][min(ctx.rank, 1)]()
        dist.all_reduce(torch.ones(1))  # a rank whose part was legal (a root only sends) gets the error here

    text = expect_raises(RuntimeError, wrong)
    assert time.monotonic() - start < patience(4), "waited for the deadline"
    assert tensor.tolist() == [float(ctx.rank + 1)] * 6, "user data was touched"
    assert expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(1)))
    _leave()
    ctx.init(key=f"{ctx.key}-second", timeout=timedelta(seconds=20))
    found = torch.ones(1)
    dist.all_reduce(found)
    assert found.item() == n
    dist.destroy_process_group()
    return text


WORDS = {
    "kind": ("all_reduce", "broadcast"),
    "count": ("24", "28"),
    "dtype": ("float32", "int32"),
    "op": ("SUM", "MAX"),
    "root": ("root 0", "root 1"),
    "large": ("1600000", "1600004"),
    "barrier": ("barrier", "all_reduce"),
    "async": ("barrier", "all_reduce"),
    "uneven": ("16", "24"),
    "splits": ("4", "8"),
}


@beyond_gloo("sees no mismatch")
@pytest.mark.quick
@pytest.mark.parametrize("pair", list(WORDS))
def test_rule_05_different_calls_show_both(pair: str) -> None:
    """Rule 5: the error has both calls and comes before data is written. Afterwards a new group works."""
    with launch(different, 2, pair) as job:
        for text in job.values():
            for word in WORDS[pair]:
                assert word in text, f"{word!r} is not in: {text}"


def legal_finisher(ctx: Context) -> str:
    """Rank 0 completes a broadcast, in which it only sends, before rank 1's different call is detected."""
    ctx.init(timeout=timedelta(seconds=5))
    dist.barrier()
    if ctx.rank == 0:
        with contextlib.suppress(RuntimeError):
            dist.broadcast(torch.ones(4), 0)
        time.sleep(1.0)
        text = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(4)))
    else:
        time.sleep(0.3)
        text = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(4)))
    _leave()
    return text


@beyond_gloo("sees no mismatch")
def test_rule_05_a_rank_that_finished_legally_learns_it_at_its_next_call() -> None:
    """Rule 5: the rank that detects the mismatch poisons the group. The error has both calls on every rank."""
    with launch(legal_finisher, 2) as job:
        for text in job.values():
            assert "broadcast" in text and "all_reduce" in text, text


def leaves_after_last(ctx: Context, turns: int) -> None:
    for turn in range(turns):
        ctx.init(key=f"{ctx.key}-{turn}")
        found = torch.ones(10 if turn % 2 else 100_000)
        if ctx.rank == 0:
            dist.all_reduce(found)
        else:
            time.sleep(0.001 * (turn % 5))
            dist.all_reduce(found)
        assert (found == ctx.world_size).all()
        dist.destroy_process_group()


@beyond_gloo("loses this race")
def test_rule_21_destroy_right_after_the_last_collective() -> None:
    """Rule 21 and pitfall 10: whichever rank leaves first, its peers still receive its last data."""
    with launch(leaves_after_last, 3, 20) as job:
        job.values(90)


def dies_after_last(ctx: Context) -> float:
    ctx.init()
    dist.barrier()
    found = torch.ones(1000)
    if ctx.rank == 1:
        dist.all_reduce(found)
        dist.isend(torch.full((10,), 5.0), 0)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    dist.all_reduce(found)
    assert (found == 2).all()
    got = torch.empty(10)
    dist.recv(got, 1)
    assert (got == 5.0).all()
    text = expect_raises(RuntimeError, lambda: dist.all_reduce(found))
    assert "rank 1" in text, text
    _leave()
    return found[0].item()


@beyond_gloo("its sockets are gone with the process")
@pytest.mark.quick
def test_rule_21_what_a_dead_rank_has_published_is_completed() -> None:
    """Rule 21: data that was published before the death is delivered. Only operations that need more data fail."""
    with launch(dies_after_last, 2) as job:
        assert job.wait_rank(0, 20).code == 0, job.report()


def hanging(ctx: Context, how: str) -> None:
    ctx.init(timeout=timedelta(minutes=10))
    dist.all_reduce(torch.ones(1))
    if ctx.rank == 1:
        ctx.tell("ready")
        time.sleep(60)
    try:
        ctx.tell("ready")  # the test may send a signal from here on
        if how == "sync":
            dist.all_reduce(torch.ones(5))
        elif how == "wait":
            dist.all_reduce(torch.ones(5), async_op=True).wait()  # type: ignore[union-attr]
        elif how == "recv":
            dist.recv(torch.ones(5), 1)
        elif how == "large":
            dist.all_reduce(torch.ones(1_000_000))
        else:
            dist.barrier()
    except KeyboardInterrupt:
        ctx.tell("interrupted")
        raise
    raise AssertionError("the call returned")


@beyond_gloo("waits without looking for signals")
@pytest.mark.quick
@pytest.mark.parametrize("how", ["sync", "wait", "recv", "barrier", "large"])
def test_rule_08_ctrl_c_ends_a_hanging_job(how: str) -> None:
    """Rule 8: SIGINT during a blocking wait raises KeyboardInterrupt immediately, and the process exits."""
    with launch(hanging, 2, how) as job:
        job.hear(0)
        job.hear(1)
        time.sleep(0.3)
        start = time.monotonic()
        job.signal(0, signal.SIGINT)
        assert job.hear(0) == "interrupted"
        assert time.monotonic() - start < patience(1.0)
        outcome = job.wait_rank(0, 10)
        assert time.monotonic() - start < patience(2.0)
        assert outcome.error and outcome.error["type"] == "KeyboardInterrupt", job.report()


def handled_signal(ctx: Context) -> None:
    ctx.init()
    hits: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: hits.append(number))
    dist.barrier()
    ctx.tell("ready")
    if ctx.rank == 1:
        time.sleep(1.5)
    found = torch.ones(3)
    dist.all_reduce(found)
    assert found.tolist() == [2.0] * 3
    if ctx.rank == 0:
        assert hits, "the handler did not run during the wait"
    dist.destroy_process_group()


@pytest.mark.quick
def test_rule_22_signals_that_do_not_raise_leave_the_wait_alone() -> None:
    """Rules 8 and 22: a Python signal handler runs while the call waits, and EINTR only causes a retry."""
    with launch(handled_signal, 2) as job:
        job.hear(0)
        job.hear(1)
        for _ in range(20):
            time.sleep(0.03)
            job.signal(0, signal.SIGUSR2)
        job.values()


def own_stop(ctx: Context) -> None:
    ctx.init()
    dist.all_reduce(torch.ones(1))
    ctx.set_timeout(timedelta(seconds=2))
    ctx.tell("ready")
    found = torch.ones(3)
    if ctx.rank == 1:
        ctx.listen()
    dist.all_reduce(found)
    assert found.tolist() == [2.0] * 3
    dist.destroy_process_group()


@beyond_gloo("its clock runs on while it is stopped")
def test_rule_22_a_stopped_waiter_does_not_blame_its_peer() -> None:
    """Rule 22: the waiting rank is stopped for longer than the timeout. After it continues, the operation completes."""
    with launch(own_stop, 2) as job:
        job.hear(0)
        job.hear(1)
        time.sleep(0.3)
        job.signal(0, signal.SIGSTOP)
        time.sleep(3.0)
        job.signal(0, signal.SIGCONT)
        time.sleep(0.2)
        job.say(1, "go")
        job.values(20)


def everything_is_killed(ctx: Context) -> None:
    ctx.init()
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(100_000), group=group)
    dist.isend(torch.ones(100_000), (ctx.rank + 1) % ctx.world_size)
    ctx.tell("ready")
    work_for_ever()


@pytest.mark.quick
def test_sigkill_of_all_ranks_leaves_nothing() -> None:
    """No file in /dev/shm, no socket and no process is left."""
    with launch(everything_is_killed, 3) as job:
        for rank in range(3):
            job.hear(rank)
        time.sleep(0.2)
        pids = [job.pid(rank) for rank in range(3)]
        named = set().union(*(shm_files_of(pid) for pid in pids))
        sockets = set().union(*(sockets_of(pid) for pid in pids)) & unix_sockets()
        for rank in range(3):
            job.signal(rank, signal.SIGKILL)
        for rank in range(3):
            assert job.wait_rank(rank, 10).code == -signal.SIGKILL
    assert not named, "a name was visible in /dev/shm"
    until(lambda: not any(alive(pid) for pid in pids), 5, "the end of all processes")
    assert not sockets & unix_sockets(), "a unix socket outlived its processes"
    nothing_left(each.pid for each in job.ranks)


def threads_see_death(ctx: Context) -> None:
    ctx.init(timeout=timedelta(seconds=60))
    groups = [dist.new_group() for _ in range(4)]
    dist.barrier()
    ctx.tell("ready")
    if ctx.rank == 1:
        time.sleep(60)
    texts: list[str] = []

    def wait(group: Any) -> None:
        texts.append(expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(3), group=group)))

    threads = [threading.Thread(target=wait, args=(group,)) for group in groups]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
        assert not each.is_alive(), "a thread still waits"
    assert len(texts) == 4
    if ctx.backend != "gloo":
        assert all("rank 1" in text for text in texts), texts
    _leave()


@pytest.mark.quick
def test_a_death_wakes_every_waiting_thread() -> None:
    """Four threads wait in four groups. When one rank dies, all four fail."""
    with launch(threads_see_death, 2) as job:
        job.hear(0)
        job.hear(1)
        time.sleep(0.3)
        job.signal(1, signal.SIGKILL)
        assert job.wait_rank(0, 20).code == 0, job.report()
