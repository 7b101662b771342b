"""The program gets the error of a failed call on a device before it can use what the call has left in memory."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from failing_calls import WAYS, Way, nobody_calls_again, not_waited, sync, use, waited
from harness import Context, error_of, expect_raises, launch
from limits import patience
from on_device import holds
from simulated import VENDORS, environment, exit_code, load_lazily, start

pytestmark = pytest.mark.timeout(900)
#: Timeout in seconds of calls that another rank does not join.
DEADLINE = 2
#: The exit code if the option `on_device_failure` is "exit".
EXIT_CODE = 70


def ways_of(vendor: str) -> list[Way]:
    """Returns the ways to call that the vendor supports; a stream of HCCL cannot be used after an error."""
    return WAYS[1:2] if vendor == "hccl" else WAYS


# ------------------------------------------------------------------------------------------------ raise


def absent_or_aborted(ctx: Context, vendor: str, why: str) -> None:
    """Rank 1 joins no call. Each way of calling uses a separate group."""
    import torch_sagellm

    device, name = start(ctx, vendor, timeout=timedelta(seconds=60))
    found = []
    options = torch_sagellm.Options(vendor=vendor if vendor == "nccl" else "auto")
    for way in ways_of(vendor):
        limit = timedelta(seconds=DEADLINE if why == "deadline" else 60)
        group = dist.new_group(pg_options=options.__copy__())
        first = torch.ones(4, device=name)
        dist.all_reduce(first, group=group)
        holds(first, 2)
        backend = group._get_backend(torch.device(name))
        backend._set_default_timeout(limit)
        dist.barrier()
        load_lazily(device)
        if ctx.rank == 0:
            if why == "abort":
                threading.Timer(0.3, backend.abort).start()
            reached, text = use(way, name, group)
            nobody_calls_again(0.3)
            found.append((way.__name__, reached, text))
        dist.barrier()
    ctx.tell(found)
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("why", ["deadline", "abort"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_no_statement_runs_on_what_a_failed_call_has_left(vendor: str, why: str, libraries: dict[str, Path]) -> None:
    """For every form of the call: the statement that follows a synchronisation of the device does not run."""
    # HCCL cannot be aborted: a hanging call ends at HCCL's own time limit.
    env = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000", HCCL_EXEC_TIMEOUT="5")
    with launch(absent_or_aborted, 2, vendor, why, env=env) as job:
        found = job.hear(0, 120)
        words = "Timed out after" if why == "deadline" else "abort() was called on rank 0"
        assert [each[0] for each in found] == [way.__name__ for way in ways_of(vendor)]
        for way, reached, text in found:
            assert not reached, (way, found)
            assert words in text, (way, text)
        for rank in range(2):
            job.say(rank, "go")


def reported_or_dead(ctx: Context, vendor: str, why: str, at: int) -> None:
    """The second operation fails in the library, or rank 1 dies before it."""
    device, name = start(ctx, vendor, timeout=timedelta(seconds=60))
    value = torch.ones(4, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    dist.barrier()
    if why == "death" and ctx.rank == 1:
        os._exit(9)
    load_lazily(device)
    ctx.tell((use(WAYS[at], name), name))
    nobody_calls_again(0.3)
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("why", ["library", "death"])
@pytest.mark.parametrize("vendor,way", [("nccl", way) for way in WAYS] + [("hccl", sync), ("cncl", waited)])
def test_an_error_of_the_library_and_a_death_are_raised(
    vendor: str, way: Way, why: str, libraries: dict[str, Path]
) -> None:
    """The program gets an error that names the call that failed."""
    at = {"SAGELLM_SIM_ERROR_AT": "2"} if why == "library" else {}
    with launch(reported_or_dead, 2, vendor, why, WAYS.index(way), env=environment(vendor, libraries, **at)) as job:
        for rank in range(2 if why == "library" else 1):
            (reached, text), name = job.hear(rank)
            assert not reached and text, text
            if why == "death":
                assert "rank 1" in text or vendor == "hccl", text
            elif vendor != "hccl":  # with HCCL the stream itself reports the error
                call = {"listed": "all_reduce_coalesced number 2", "batch": "(send|recv) with rank [01]"}
                seen = f"seen at {call.get(way.__name__, 'all_reduce number 2')} on {name}:0"
                assert re.search(seen, text), text
            job.say(rank, "go")


def loads_meanwhile(ctx: Context, vendor: str) -> None:
    """Rank 0 issues an all_reduce that rank 1 never joins, and then loads a kernel. The device answers no query until
    the kernel is loaded."""
    device, name = start(ctx, vendor, timeout=timedelta(seconds=60))
    value = torch.ones(4, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    dist.barrier()
    on_device.backend_of(name)._set_default_timeout(timedelta(seconds=DEADLINE))
    load_lazily(device)
    if ctx.rank == 0:
        begin = time.monotonic()

        def load() -> None:
            work = dist.all_reduce(value, async_op=True)
            torch.full((4,), 2.0, device=name)
            work.wait()
            torch.accelerator.synchronize()
            nobody_calls_again(1)

        ctx.tell((expect_raises(dist.DistBackendError, load), time.monotonic() - begin))
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("vendor", ["nccl", "cncl"])
def test_a_call_has_a_deadline_while_the_device_answers_no_query(vendor: str, libraries: dict[str, Path]) -> None:
    """While a kernel is loaded, queries of events block. The call must fail at its deadline nevertheless."""
    env = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(loads_meanwhile, 2, vendor, env=env) as job:
        text, took = job.hear(0, 60)
        assert "Timed out after 2.0 s in all_reduce number 2" in text, text
        assert took < DEADLINE + patience(3), took
        for rank in range(2):
            job.say(rank, "go")


def waits_itself(ctx: Context) -> None:
    """A thread that gets the error from its own call does not get it a second time."""
    _, name = start(ctx, "nccl")
    value = torch.ones(4, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    dist.barrier()
    ctx.set_timeout(timedelta(seconds=DEADLINE))
    if ctx.rank == 0:
        works = [dist.all_reduce(value, async_op=True) for _ in range(3)]
        for work in works:
            assert "Timed out" in expect_raises(RuntimeError, lambda work=work: work.wait(timedelta(seconds=50)))
        nobody_calls_again(0.5)
        assert "Timed out" in expect_raises(RuntimeError, lambda: dist.all_reduce(value))
        nobody_calls_again(0.5)
    ctx.tell("fine")
    ctx.listen()
    os._exit(0)


def test_an_error_that_a_call_raises_is_raised_once(libraries: dict[str, Path]) -> None:
    with launch(waits_itself, 2, env=environment("nccl", libraries, SAGELLM_SIM_TIMEOUT_MS="300000")) as job:
        assert job.hear(0) == "fine"
        for rank in range(2):
            job.say(rank, "go")


def barriers_future(ctx: Context, vendor: str) -> None:
    """The callbacks of a barrier's future run once, whether the barrier succeeds or fails. A thread that waits for the
    future gets one error."""
    import torch_sagellm

    _, name = start(ctx, vendor, timeout=timedelta(seconds=60))
    value = torch.ones(4, device=name)
    for ids in ([0], None):
        options = torch_sagellm.Options(vendor=vendor if vendor == "nccl" else "auto")
        group = dist.new_group(pg_options=options)
        dist.all_reduce(value, group=group)
        ran: list[str] = []

        def future(group: Any = group, ids: Any = ids, ran: list[str] = ran) -> Any:
            found = dist.barrier(group=group, async_op=True, device_ids=ids).get_future()
            found.add_done_callback(lambda _: ran.append("done"))
            found.then(lambda _: ran.append("then"))
            return found

        future().wait()
        nobody_calls_again(0.1)
        assert sorted(ran) == ["done", "then"], ran
        ran.clear()
        dist.barrier()
        if ctx.rank == 0:
            group._get_backend(torch.device(name))._set_default_timeout(timedelta(seconds=DEADLINE))
            if ids is None:
                dist.all_reduce(value, group=group, async_op=True)
            failing = future()
            assert "Timed out" in expect_raises(
                dist.DistBackendError, lambda failing=failing: in_one_go(0, failing.wait)
            )
            nobody_calls_again(1.5)
            assert sorted(ran) == ["done", "then"], ran
        dist.barrier()
    ctx.tell("fine")
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("vendor", ["nccl", "cncl"])
def test_rule_34_the_future_of_a_barrier_tells_once(vendor: str, libraries: dict[str, Path]) -> None:
    with launch(barriers_future, 2, vendor, env=environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")) as job:
        assert job.hear(0, 120) == "fine"
        for rank in range(2):
            job.say(rank, "go")


def in_one_go(seconds: float, call: Callable[[], Any]) -> Any:
    """Sleeps, then calls. The interpreter runs no bytecode in between, so it raises no pending exception there."""
    steps = [partial(time.sleep, seconds), partial(call)]
    return list(map(partial.__call__, steps))[1]


def beside_the_watch(ctx: Context) -> None:
    """Calls get a failure before or after the watch (the thread that raises failures) has raised it. Until `go` is set,
    the watch is held just before it raises a failure."""
    import torch_sagellm
    from torch_sagellm._private import failure

    _, name = start(ctx, "nccl", timeout=timedelta(seconds=60))
    # Without a soft timeout no line is logged. Writing one would run Python in this thread.
    options = torch_sagellm.Options(vendor="nccl", soft_timeout=0)
    groups = [dist.new_group(pg_options=options.__copy__()) for _ in range(6)]
    value = torch.ones(4, device=name)
    for group in groups:
        dist.all_reduce(value, group=group)
    torch.accelerator.synchronize()
    dist.barrier()
    if ctx.rank == 0:
        real, named, go = failure.prepare, threading.Semaphore(0), threading.Event()
        go.set()

        def prepare(threads: list[int], text: str) -> Any:
            named.release()
            go.wait(30)
            return real(threads, text)

        def late(group: Any, seconds: float) -> Any:
            group._get_backend(torch.device(name))._set_default_timeout(timedelta(seconds=seconds))
            return dist.all_reduce(value, group=group, async_op=True)

        def fails(group: Any, call: Callable[[], Any]) -> None:
            text = expect_raises(dist.DistBackendError, call)
            assert f"of group '{group.group_name}'" in text, text

        def behind(kind: type[BaseException], group: Any, work: Any) -> BaseException:
            """Returns the exception that is raised, at any bytecode, while the program handles the error of a call."""
            with pytest.raises(kind) as raised:
                try:
                    in_one_go(4, work.wait)
                except dist.DistBackendError:
                    nobody_calls_again(0.5)
            assert f"of group '{group.group_name}'" in str(raised.value.__context__), raised.value.__context__
            return raised.value

        failure.prepare = prepare
        # The call gets the error first: the watch has found the failure, but is held.
        go.clear()
        late(groups[0], 1)
        assert named.acquire(timeout=30)
        fails(groups[0], lambda: dist.all_reduce(torch.ones(1), group=groups[0]))
        go.set()
        nobody_calls_again(0.5)
        # Waiting for a Future does not call the package, so `get_future` itself raises.
        go.clear()
        work = late(groups[5], 1)
        assert named.acquire(timeout=30)
        fails(groups[5], work.get_future)
        go.set()
        nobody_calls_again(0.5)
        # The watch raises the failure first. Its exception is pending when `work.wait` gets the same failure.
        work = late(groups[1], 1)
        fails(groups[1], lambda: in_one_go(3, work.wait))
        assert named.acquire(timeout=0)
        nobody_calls_again(0.5)
        # The watch has raised the failures of two groups. The call gets one of them; the other is raised later, once.
        works = [late(groups[2], 1), late(groups[3], 1.5)]
        other = behind(dist.DistBackendError, groups[3], works[1])
        assert named.acquire(timeout=0) and named.acquire(timeout=0)
        assert f"of group '{groups[2].group_name}'" in str(other), other
        nobody_calls_again(0.5)
        # An exception that the program itself raises meanwhile is not lost.
        work, me = late(groups[4], 1), ctypes.c_ulong(threading.get_ident())
        raises = partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, me, ctypes.py_object(KeyboardInterrupt))
        threading.Timer(2.5, raises).start()
        behind(KeyboardInterrupt, groups[4], work)
        assert named.acquire(timeout=0)
        nobody_calls_again(0.5)
    ctx.tell("fine")
    ctx.listen()
    os._exit(0)


def test_rule_34_a_call_that_fails_beside_the_watch_is_told_once(libraries: dict[str, Path]) -> None:
    """The thread gets the failure once, whether the call or the watch reports it first. A pending exception of a
    different origin is not lost."""
    with launch(beside_the_watch, 2, env=environment("nccl", libraries, SAGELLM_SIM_TIMEOUT_MS="300000")) as job:
        assert job.hear(0, 120) == "fine"
        for rank in range(2):
            job.say(rank, "go")


def other_threads(ctx: Context) -> None:
    """The thread that issued the call gets the error. If this thread has ended, the main thread gets it. Failures of
    two groups raise one exception."""
    import torch_sagellm

    _, name = start(ctx, "nccl", timeout=timedelta(seconds=60))
    groups = [dist.new_group(pg_options=torch_sagellm.Options(vendor="nccl")) for _ in range(3)]
    for group in groups:
        first = torch.ones(4, device=name)
        dist.all_reduce(first, group=group)
        holds(first, 2)
        group._get_backend(torch.device(name))._set_default_timeout(timedelta(seconds=DEADLINE))
    dist.barrier()
    if ctx.rank == 0:
        told: list[tuple[bool, str]] = []
        thread = threading.Thread(target=lambda: told.append(use(sync, name, groups[0])))
        thread.start()
        thread.join()
        assert told[0][0] is False and "Timed out" in told[0][1], told

        def two() -> None:
            short = threading.Thread(target=lambda: not_waited(torch.ones(4, device=name), groups[1]))
            short.start()
            short.join()
            dist.all_reduce(torch.ones(4, device=name), group=groups[2])
            torch.accelerator.synchronize()

        assert "Timed out" in expect_raises(dist.DistBackendError, two)
        nobody_calls_again(0.5)
    ctx.tell("fine")
    ctx.listen()
    os._exit(0)


def test_the_thread_that_issued_the_call_gets_the_exception(libraries: dict[str, Path]) -> None:
    with launch(other_threads, 2, env=environment("nccl", libraries, SAGELLM_SIM_TIMEOUT_MS="300000")) as job:
        assert job.hear(0) == "fine"
        for rank in range(2):
            job.say(rank, "go")


# ------------------------------------------------------------------------------------------------ the other ways


def by_option(ctx: Context, how: str) -> Any:
    _, name = start(ctx, "nccl")
    value = torch.ones(4, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    dist.barrier()
    ctx.set_timeout(timedelta(seconds=DEADLINE))
    if ctx.rank == 1:
        ctx.listen()
        os._exit(0)
    if how == "blocking":
        work = dist.all_reduce(value, async_op=True)
        texts = [expect_raises(dist.DistBackendError, work.wait)]
        texts.append(expect_raises(dist.DistBackendError, lambda: dist.all_reduce(value)))
        nobody_calls_again(0.3)
        ctx.tell(texts)
    else:
        ctx.tell(use(sync, name))
    ctx.listen()
    os._exit(0)


def blocks(ctx: Context) -> None:
    """With blocking waits, a synchronous call returns if it succeeds. If it fails, it raises its error itself."""
    _, name = start(ctx, "nccl", delay=0.05)
    value = torch.ones(4, device=name)
    dist.all_reduce(value)
    ctx.set_timeout(timedelta(seconds=DEADLINE))
    before = time.monotonic()
    if ctx.rank == 0:
        text = expect_raises(dist.DistBackendError, lambda: dist.all_reduce(value))
        assert "Timed out" in text and time.monotonic() - before > DEADLINE / 2, text
        nobody_calls_again(0.3)
    ctx.tell("fine")
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("variable", ["SAGELLM_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"])
def test_blocking_wait_raises_in_wait(variable: str, libraries: dict[str, Path]) -> None:
    """As with nccl: `wait()` and a synchronous call return when the call has ended, and raise an error if it failed."""
    env = environment("nccl", libraries, SAGELLM_SIM_TIMEOUT_MS="300000") | {variable: "1"}
    with launch(by_option, 2, "blocking", env=env) as job:
        for text in job.hear(0):
            assert "Timed out" in text, text
        for rank in range(2):
            job.say(rank, "go")
    with launch(blocks, 2, env=env) as job:
        assert job.hear(0) == "fine"
        for rank in range(2):
            job.say(rank, "go")


def test_none_leaves_it_to_the_next_call(libraries: dict[str, Path]) -> None:
    env = environment("nccl", libraries, SAGELLM_SIM_TIMEOUT_MS="300000", SAGELLM_ON_DEVICE_FAILURE="none")
    with launch(by_option, 2, "none", env=env) as job:
        reached, text = job.hear(0)
        assert reached and not text, text
        for rank in range(2):
            job.say(rank, "go")


def test_exit_ends_the_process_with_a_code_and_a_dump(libraries: dict[str, Path], tmp_path: Path) -> None:
    """With "exit" a failed call ends the process, as with torch's nccl. The exit code is this package's own, the error
    is on stderr, and the dump is in SAGELLM_DUMP_DIR."""
    env = environment("nccl", libraries, SAGELLM_SIM_TIMEOUT_MS="300000", SAGELLM_ON_DEVICE_FAILURE="Exit")
    with launch(by_option, 2, "exit", env=env | {"SAGELLM_DUMP_DIR": str(tmp_path)}) as job:
        assert exit_code(job.ranks[0]) == EXIT_CODE, job.report()
        output = job.ranks[0].output()
        assert "Timed out after 2.0 s in all_reduce number 2" in output and "ends with code 70" in output, output
        assert list(tmp_path.iterdir()), "no dump"
        job.say(1, "go")


def wrong_word(ctx: Context) -> str:
    import torch_sagellm

    return expect_raises(ValueError, lambda: ctx.init(pg_options=torch_sagellm.Options(on_device_failure="explode")))


def test_another_word_is_refused() -> None:
    with launch(wrong_word, 1) as job:
        assert "on_device_failure" in job.values()[0] and "explode" in job.values()[0]


# ------------------------------------------------------------------------------------------------ one watch for all


def slow_abort(ctx: Context) -> None:
    """Group A fails first, and the library's abort takes long. Group B must still fail at its own deadline."""
    import torch_sagellm

    os.environ["SAGELLM_SIM_ABORT_MS"] = "30000"
    _, name = start(ctx, "nccl", timeout=timedelta(seconds=60))
    groups = [
        dist.new_group(pg_options=torch_sagellm.Options(vendor="nccl", on_device_failure="none")) for _ in range(2)
    ]
    streams = [torch.Stream(device=name) for _ in groups]
    for group in groups:
        value = torch.ones(4, device=name)
        dist.all_reduce(value, group=group)
        holds(value, 2)
    for seconds, group in zip((DEADLINE, DEADLINE + 1), groups, strict=True):
        group._get_backend(torch.device(name))._set_default_timeout(timedelta(seconds=seconds))
    dist.barrier()
    if ctx.rank == 0:
        begin, works = time.monotonic(), []
        for stream, group in zip(streams, groups, strict=True):
            with stream:
                works.append(dist.all_reduce(torch.ones(4, device=name), group=group, async_op=True))
        while not all(work.is_completed() for work in works) and time.monotonic() - begin < 25:
            time.sleep(0.02)
        ctx.tell([(work.is_completed(), str(error_of(work))) for work in works])
    ctx.listen()
    os._exit(0)


def test_one_slow_abort_does_not_stop_the_watch_of_other_groups(libraries: dict[str, Path]) -> None:
    with launch(slow_abort, 2, env=environment("nccl", libraries, SAGELLM_SIM_TIMEOUT_MS="300000")) as job:
        for ended, text in job.hear(0, 60):
            assert ended and "Timed out" in text, text
        for rank in range(2):
            job.say(rank, "go")


def test_backend_has_the_options() -> None:
    """A copy of the options keeps both values. The defaults are "raise" and no blocking wait."""
    import torch_sagellm

    options = torch_sagellm.Options(on_device_failure="none", blocking_wait=True).__copy__()
    assert (options.on_device_failure, options.blocking_wait) == ("none", True)
    assert (torch_sagellm.Options().on_device_failure, torch_sagellm.Options().blocking_wait) == ("raise", False)
