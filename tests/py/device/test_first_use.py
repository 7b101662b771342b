"""The first uses of a communicator, in which a library waits on the host for the other ranks.

Like NCCL and HCCL, the simulators connect ranks not when a communicator is created, but at the first launch of each
kind, size or direction of messages. Rank 1 is late, never calls, or dies; or rank 0 is interrupted or aborts the group.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_calls import SORTS, failed, firsts
from harness import Context, launch, run_fresh
from limits import patience
from on_device import holds
from simulated import VENDORS, environment, start

#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)

#: Timeouts in seconds: for a launch that hangs, and `SHORT` for first calls, which must all time out in turn.
TIMEOUT = 3
SHORT = 1
#: The library itself would wait for far longer than any test.
HANGS = {"SAGELLM_SIM_TIMEOUT_MS": "300000"}


def connected(name: str, vendor: str, timeout: float) -> Any:
    """Returns a group of ranks 0 and 1 whose communicator exists, and its backend. `timeout` applies only to calls,
    because the creation of a group takes longer on a busy machine."""
    import torch_sagellm

    options = torch_sagellm.Options(vendor=vendor if vendor == "nccl" else "auto")
    group = dist.new_group([0, 1], timeout=timedelta(seconds=300), pg_options=options)
    backend = group._get_backend(torch.device(name))
    backend.eager_connect_single_device(torch.device(name, 0))
    backend._set_default_timeout(timedelta(seconds=timeout))
    return group, backend


def made(rank: int, name: str, vendor: str, sort: str, timeout: float) -> Any:
    """Returns the backend of a new group and the group's first call, which is of the given sort."""
    group, backend = connected(name, vendor, timeout)
    return backend, firsts(rank, name, group)[sort]


def together() -> None:
    """Waits for all ranks: an all_reduce on the CPU in the default group."""
    dist.all_reduce(torch.ones(1))


def late(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor)
    for sort in SORTS:
        _, call = made(ctx.rank, name, vendor, sort, 60)
        for turn in range(2):
            if ctx.rank == 1:
                time.sleep(0.2)
            out = call()
            torch.accelerator.synchronize()
            if out is not None and turn == 0:
                holds(out, 1)
    together()


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_rank_that_comes_late_is_waited_for(vendor: str, libraries: dict[str, Path]) -> None:
    """Each sort of call runs twice. Two ranks that both send first do not wait for each other."""
    run_fresh(late, 2, vendor, env=environment(vendor, libraries), timeout=120)


def strike() -> None:
    """Sends Ctrl-C to this process."""
    os.kill(os.getpid(), signal.SIGINT)


def ended_by(timer: threading.Timer, call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that starts a timer and makes the call, which the timer ends. The timer's exception is raised
    inside this function, even if the timer fires before the call begins."""

    def run() -> Any:
        timer.start()
        return call()

    return run


def ended(ctx: Context, vendor: str, how: str) -> list[tuple[str, float, str, str]]:
    _, name = start(ctx, vendor, timeout=timedelta(seconds=120))
    found = []
    for sort in SORTS:
        backend, call = made(ctx.rank, name, vendor, sort, SHORT if how == "never" else 300)
        if ctx.rank == 0:
            begin = time.monotonic()
            if how != "never":
                begin += 0.5
                ends = backend.abort if how == "abort" else strike
                call = ended_by(threading.Timer(0.5, ends), call)
            found.append((sort, *failed(call), time.monotonic() - begin))
        together()
    ctx.tell(found)
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("how", ["never", "interrupt", "abort"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_rule_35_a_first_call_ends_at_its_deadline_by_a_signal_or_by_an_abort(
    vendor: str, how: str, libraries: dict[str, Path]
) -> None:
    """Rank 1 never calls. The deadline's error names rank 1; a signal or an abort ends rank 0's call immediately."""
    with launch(ended, 2, vendor, how, env=environment(vendor, libraries, **HANGS)) as job:
        for sort, kind, text, took in job.hear(0, 120):
            if how == "never":
                assert kind == "RuntimeError" or "Timed out" in text, (sort, kind, text)
                assert f"Timed out after {SHORT}.0 s" in text and "rank 1" in text, (sort, kind, text)
                assert SHORT * 0.95 < took < SHORT + patience(1), (sort, took)
            elif how == "interrupt":
                assert kind == "KeyboardInterrupt", (sort, kind, text)
                assert took < patience(1), (sort, took)
            else:
                assert "abort" in text, (sort, kind, text)
                assert took < patience(1), (sort, took)
        job.hear(1, 60)
        for rank in range(2):
            job.say(rank, "go")


def dies(ctx: Context, vendor: str, sort: str) -> None:
    _, name = start(ctx, vendor, timeout=timedelta(seconds=300))
    _, call = made(ctx.rank, name, vendor, sort, 300)
    if ctx.rank == 1:
        ctx.tell("ready")
        ctx.listen()
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.tell("calls")
    ctx.tell((*failed(call), time.monotonic()))
    os._exit(0)


@pytest.mark.parametrize("sort", ["all_reduce", "gather", "batch_isend_irecv", "isend and irecv"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_first_call_ends_when_its_peer_dies(vendor: str, sort: str, libraries: dict[str, Path]) -> None:
    """The error names the dead rank and is raised long before the deadline."""
    with launch(dies, 2, vendor, sort, env=environment(vendor, libraries, **HANGS)) as job:
        assert (job.hear(0), job.hear(1)) == ("calls", "ready")
        begin = time.monotonic()
        job.say(1, "die")
        _, text, at = job.hear(0)
        assert f"rank 1 (pid {job.pid(1)}" in text and "Timed out" not in text, text
        assert at - begin < patience(1.5), at - begin


def stuck(ctx: Context, vendor: str) -> None:
    if ctx.rank == 1:
        del os.environ["SAGELLM_SIM_STUCK_AT"]  # the simulator has not read it yet
    _, name = start(ctx, vendor)
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    torch.accelerator.synchronize()
    ctx.set_timeout(timedelta(seconds=TIMEOUT))
    begin = time.monotonic()
    ctx.tell((*failed(lambda: dist.all_reduce(value)), time.monotonic() - begin))
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("vendor", ["nccl", "cncl"])
def test_a_launch_that_does_not_return_is_ended_at_its_deadline(vendor: str, libraries: dict[str, Path]) -> None:
    """A launch that connects no ranks hangs. HCCL is not tested, because it has no abort that could end the launch."""
    env = environment(vendor, libraries, SAGELLM_SIM_STUCK_AT="2", **HANGS)
    with launch(stuck, 2, vendor, env=env) as job:
        kind, text, took = job.hear(0)
        assert kind != "no error" and "Timed out after 3.0 s in all_reduce number 2" in text, (kind, text)
        assert took < TIMEOUT + patience(1), took
        job.hear(1)
        for rank in range(2):
            job.say(rank, "go")


def given(rank: int, name: str, group: Any) -> dict[str, tuple[torch.Tensor, Callable[[], None]]]:
    """Returns first calls that send memory of rank 0, which holds ones, to rank 1: for each the memory and the call."""

    def made_of(call: Callable[[torch.Tensor], list[Any]]) -> tuple[torch.Tensor, Callable[[], None]]:
        memory = torch.full((4,), float(rank == 0), device=name)

        def run() -> None:
            for work in call(memory):
                work.wait()

        return memory, run

    def at_once(memory: torch.Tensor) -> list[Any]:
        dist.broadcast(memory, 0, group=group)
        return []

    way = dist.isend if rank == 0 else dist.irecv
    return {
        "synchronous": made_of(at_once),
        "with a Work": made_of(lambda memory: [dist.broadcast(memory, 0, group=group, async_op=True)]),
        "batch": made_of(lambda memory: dist.batch_isend_irecv([dist.P2POp(way, memory, 1 - rank, group)])),
    }


#: Milliseconds that rank 1 of `let_go` needs to connect.
CONNECTS = 400


def struck(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Makes a call that Ctrl-C ends after 0.1 s. Returns type and text of its error, and when it ended."""
    kind, text, at = "no error", "", math.inf
    try:
        kind, text = failed(ended_by(threading.Timer(0.1, strike), call))
        at = time.monotonic()
        while kind != "KeyboardInterrupt":  # the call has ended before
            time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    return kind, text, at


def let_go(ctx: Context, vendor: str) -> None:
    if ctx.rank == 0:
        del os.environ["SAGELLM_SIM_CONNECT_MS"]  # the simulator has not read it yet
    _, name = start(ctx, vendor, timeout=timedelta(seconds=120))
    found = []
    for sort in given(ctx.rank, "cpu", None):
        for _ in range(10):
            group, _ = connected(name, vendor, 120)
            memory, call = given(ctx.rank, name, group)[sort]
            together()
            begin = time.monotonic()
            together()
            kind, text, at = struck(call) if ctx.rank == 0 else (*failed(call), begin)
            if ctx.rank == 0:
                memory.fill_(100)  # rank 0 got the error, so it may write to the memory
            # Rank 1 did not call before `begin` of rank 0. If rank 1 may have connected before the signal, the signal
            # has perhaps ended nothing, so the call is repeated in a new group.
            late = torch.tensor(float(at - begin > CONNECTS / 1000))
            dist.broadcast(late, 0)
            if not late.item():
                break
        found.append((sort, kind, text, memory.tolist() if kind == "no error" else []))
        together()
    ctx.tell(found)
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("vendor", VENDORS)
def test_rule_35_who_meets_a_launch_that_was_let_go_takes_nothing_from_it(
    vendor: str, libraries: dict[str, Path]
) -> None:
    """Ctrl-C makes rank 0's call return, and rank 0 then overwrites its input. The library's launch continues until the
    abort, or for ever if the library has none. Rank 1 is in the same call by then and reaches the connection a little
    later."""
    slow = {"SAGELLM_SIM_CONNECT_MS": str(CONNECTS), "SAGELLM_SIM_ABORT_MS": "1500"}
    with launch(let_go, 2, vendor, env=environment(vendor, libraries, **slow, **HANGS)) as job:
        for sort, kind, text, _ in job.hear(0, 120):
            assert kind == "KeyboardInterrupt", (sort, kind, text)
        for sort, kind, text, numbers in job.hear(1, 120):
            assert "interrupted" in text, (sort, kind, text, numbers)
        for rank in range(2):
            job.say(rank, "go")
