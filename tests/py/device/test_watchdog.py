"""Operations that hang inside a vendor's library, Works that are aborted, and durations of Works.

The simulators hang in the operation whose number is in the variable SAGELLM_SIM_HANG_AT.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from hang_texts import line_in
from harness import TIMES_WORKS, Context, Job, expect_raises, launch, run_fresh, torch_at_least
from limits import patience
from on_device import backend_of, holds
from simulated import VENDORS, environment, exit_code, start
from troubled import store_of_its_own

#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)

#: Timeout in seconds of an operation that one rank does not issue.
ABSENT = 8
#: The timeout of ranks that must get the error from another rank, whose deadline passes first.
LATER = 600
#: Longest wait for a Work on the host, in seconds. A test that comes near it has failed.
PATIENCE = 40


def error_of(work: Any) -> tuple[str, float, float]:
    """Returns the text of the error with which a work ends, and when the wait for it began and ended."""
    began = time.monotonic()
    text = expect_raises(RuntimeError, lambda: work.wait(timedelta(seconds=PATIENCE)))
    return text, began, time.monotonic()


def hangs_inside(ctx: Context, vendor: str, hanging: list[int], leaves: bool) -> None:
    if ctx.rank not in hanging:
        del os.environ["SAGELLM_SIM_HANG_AT"]  # the simulator has not read it yet
    _, name = start(ctx, vendor)
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    ctx.set_timeout(timedelta(seconds=3))
    began = time.monotonic()
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    text, _, ended = error_of(work)
    later = expect_raises(RuntimeError, lambda: dist.all_reduce(value))
    ctx.tell((name, text, began, ended, later))
    ctx.listen()  # if this rank exited, the other rank would report that instead
    if leaves:
        dist.destroy_process_group()


@pytest.mark.parametrize("hanging,leaves", [([0, 1], True), ([0, 1], False), ([1], True)], ids=str)
@pytest.mark.parametrize("vendor", VENDORS)
def test_what_hangs_inside_the_library_fails_at_the_groups_timeout(
    vendor: str, hanging: list[int], leaves: bool, libraries: dict[str, Path]
) -> None:
    """The error names operation, number and device, but no rank, and fails the group. The processes exit."""
    # The library itself would hang for far longer than the test waits.
    env = environment(vendor, libraries, SAGELLM_SIM_HANG_AT="2", SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(hangs_inside, 2, vendor, hanging, leaves, env=env) as job:
        told = [job.hear(rank) for rank in range(2)]
        first = min(began for _, _, began, _, _ in told)
        for rank, (name, text, began, ended, later) in enumerate(told):
            assert f"Timed out after 3.0 s in all_reduce number 2 on {name}:0" in text, text
            # The text comes from this rank's own check, or from the other rank's check if that rank's deadline passed
            # first.
            issued = {each: f"rank {each} (pid {job.pid(each)}) has issued it" for each in range(2)}
            other = f"(reported by rank {1 - rank})" in text
            assert issued[rank if other else 1 - rank] in text, text
            # The first deadline that passes fails the group, so the other rank may wait for less.
            assert ended - first > 3 * 0.95 and ended - began < 15, (first, began, ended)
            assert f"Timed out after 3.0 s in all_reduce number 2 on {name}:0" in later, later
        begin = time.monotonic()
        for rank in range(2):
            job.say(rank, "go")
        assert [exit_code(rank) for rank in job.ranks] == [0, 0], job.report()
        assert time.monotonic() - begin < 30


def absent(ctx: Context, vendor: str, hosts: list[str] | None = None, first: int | None = None) -> None:
    """Rank 1 does not issue the operation that the others wait for. ``hosts``: rank 0 is alone on the first host.
    ``first``: the rank whose deadline passes long before those of the others."""
    if hosts:
        with open("/proc/self/ns/net") as home:
            net.enter(hosts[min(ctx.rank, 1)])
            store = dist.FileStore(f"{ctx.tmp}/store", ctx.world_size)
            _, name = start(ctx, vendor, timeout=timedelta(seconds=30), store=store)
            net.enter_file(home)  # the simulator's communicator, which the first operation makes, spans no namespaces
    else:
        _, name = start(ctx, vendor, timeout=timedelta(seconds=30))
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    holds(value, ctx.world_size)
    dist.barrier()
    backend_of(name)._set_default_timeout(timedelta(seconds=ABSENT))
    if ctx.rank == 1:
        time.sleep(patience(60))  # mark: asleep here
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=ABSENT if first in (None, ctx.rank) else LATER)
    began = time.monotonic()
    work = backend_of(name).allreduce([value], options)
    assert work is not None
    text, _, ended = error_of(work)  # mark: waits here
    ctx.tell((name, text, began, ended))
    ctx.listen()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("over_hosts", [False, True], ids=["one_host", "two_hosts"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_rank_that_has_not_issued_an_operation_is_named_with_its_line(
    vendor: str, over_hosts: bool, ranks: int, libraries: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """Every rank that waits gets the error at most a tenth of the timeout late, even if it asks rank 1 through the
    store, as over two hosts."""
    env = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    names = request.getfixturevalue("hosts") if over_hosts else None
    if over_hosts:
        env["GLOO_SOCKET_IFNAME"] = net.INTERFACE
    with launch(absent, ranks, vendor, names, env=env) as job:
        told = [job.hear(rank) for rank in range(ranks) if rank != 1]
        first = min(began for _, _, began, _ in told)
        for name, text, began, ended in told:
            # The first deadline that passes fails the group, so a rank that has begun later waits for less.
            assert ended - first > ABSENT * 0.95, (first, began, ended)
            assert ended - began < ABSENT * 1.1 + patience(0.5), (first, began, ended)
            assert f"in all_reduce number 2 on {name}:0" in text, text
            names_the_sleeper(job, text)


def names_the_sleeper(job: Job, text: str) -> None:
    """Checks that the text names the sleeping rank. If the ranks see each other's processes, it has no host name."""
    assert re.search(rf"rank 1 \(pid {job.pid(1)}(, host [\w.-]+)?\) has not entered it", text), text
    assert f"and it is at {__file__}:{line_in(__file__, 'mark: asleep here')} in absent" in text, text


def unread(ctx: Context, vendor: str, hosts: list[str], sign: signal.Signals) -> None:
    """Rank 1 does not issue the second operation of its second group.

    ``sign`` stops or ends the store's server. One thread makes the requests of both groups.
    """
    with open("/proc/self/ns/net") as home:
        net.enter(hosts[ctx.rank])
        store, server = store_of_its_own(ctx, net.address(0))
        _, name = start(ctx, vendor, timeout=timedelta(seconds=30), store=store)
        second = dist.new_group(timeout=timedelta(seconds=ABSENT))
        net.enter_file(home)  # as in `absent`
    for group in (None, second):
        value = torch.ones(10, device=name)
        dist.all_reduce(value, group=group)
        holds(value, 2)
    ctx.tell("ready")
    ctx.listen()
    if server is not None:
        server.send_signal(sign)
        ctx.tell(error_of(dist.all_reduce(value, group=second, async_op=True))[0])
        server.kill()
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize(
    "sign,why",
    [
        (signal.SIGSTOP, r"the store has not responded for (?:[1-9]|\d\d+)\.\d s"),
        (signal.SIGKILL, r"the store has failed \(.+\)"),
    ],
    ids=["stopped", "ended"],
)
def test_if_the_store_does_not_answer_the_error_says_so(
    sign: signal.Signals, why: str, libraries: dict[str, Path], hosts: list[str]
) -> None:
    """After half of the timeout, the waiting rank begins to ask the other rank, but it cannot read the answer."""
    env = environment("hccl", libraries, SAGELLM_SIM_TIMEOUT_MS="300000", GLOO_SOCKET_IFNAME=net.INTERFACE)
    with launch(unread, 2, "hccl", hosts, sign, env=env) as job:
        assert [job.hear(rank) for rank in range(2)] == ["ready", "ready"]
        job.say(0, "go")
        text = job.hear(0)
        assert re.search(f"the ranks have not said what they do, because {why}", text), text


#: For each case: the vendor, whether its library says nothing of the abort, and whether rank 0 is on another host.
ABORTS = [
    *((vendor, False, hosts) for vendor in VENDORS for hosts in (False, True)),
    *(("nccl", True, hosts) for hosts in (False, True)),
]


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("vendor,silent,over_hosts", ABORTS)
def test_the_rank_whose_deadline_passes_first_tells_the_others_who_is_missing(
    vendor: str, silent: bool, over_hosts: bool, first: int, libraries: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """Rank ``first`` aborts its communicators. The library of the other waiting rank reports the abort long before that
    rank's deadline. If the library is ``silent``, it reports nothing: the operation completes there, without an error
    and without its data."""
    env = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    if silent:
        env["SAGELLM_SIM_PEER_ABORT"] = "passes"
    names = request.getfixturevalue("hosts") if over_hosts else None
    if over_hosts:
        env["GLOO_SOCKET_IFNAME"] = net.INTERFACE
    with launch(absent, 3, vendor, names, first, env=env) as job:
        for rank in (first, 2 - first):
            name, text, began, ended = job.hear(rank)
            assert f"in all_reduce number 2 on {name}:0" in text, text
            assert ended - began < ABSENT + patience(5), (began, ended)
            names_the_sleeper(job, text)
            assert (f"(reported by rank {first})" in text) == (rank != first), text


def aborts(ctx: Context, vendor: str, waits: bool) -> None:
    _, name = start(ctx, vendor, timeout=timedelta(seconds=300))
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    holds(value, 2)
    if ctx.rank == 1:
        ctx.tell("past the first operation")
        ctx.listen()  # never issues what rank 0 has in flight
        os._exit(0)
    ctx.listen()
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    found: list[tuple[str, float, float]] = []
    begun = threading.Event()

    def waiting() -> None:
        begun.set()
        found.append(error_of(work))

    thread = threading.Thread(target=waiting)
    if waits:
        thread.start()
        assert begun.wait(PATIENCE)
    assert not work.is_completed()
    begin = time.monotonic()
    backend_of(name).abort()
    if not waits:
        thread.start()
    thread.join(PATIENCE)
    took = time.monotonic() - begin
    assert work.is_completed() and not work.is_success()
    later = expect_raises(RuntimeError, lambda: dist.all_reduce(value))
    ((text, _, _),) = found
    ctx.tell((text, took, later))
    dist.destroy_process_group()


@pytest.mark.parametrize("waits", [True, False], ids=["waited_for", "not_waited_for"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_an_abort_ends_what_is_under_way(vendor: str, waits: bool, libraries: dict[str, Path]) -> None:
    """The waiting Work fails immediately and not at the deadline, although the live peer has not issued the
    operation."""
    env = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(aborts, 2, vendor, waits, env=env) as job:
        # An abort would also fail the first operation if the peer still waited for it, so wait until the peer has
        # passed it.
        assert job.hear(1, PATIENCE) == "past the first operation"
        job.say(0, "go")
        text, took, later = job.hear(0, PATIENCE)
        assert took < 10, took
        for each in (text, later):
            assert "abort() was called on rank 0" in each and "Timed out" not in each, each
        assert exit_code(job.ranks[0]) == 0, job.report()
        job.say(1, "go")


#: Every operation of the simulated library takes at least this long, in milliseconds.
SLOW_MS = 60


def timed(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor)
    value = torch.ones(10, device=name)
    dist.all_reduce(value)

    def waited_for() -> Any:
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=PATIENCE))
        return work

    work = waited_for()
    assert "enable_collectives_timing" in expect_raises(RuntimeError, work._get_duration)
    backend_of(name)._enable_collectives_timing()
    assert "enable_collectives_timing" in expect_raises(RuntimeError, work._get_duration), "it was issued before"
    begin = time.monotonic()
    work = waited_for()
    # The library ran within this time, and took no less time than the simulator is set to.
    took = 1000 * (time.monotonic() - begin)
    assert SLOW_MS <= work._get_duration() <= took, (work._get_duration(), took)
    holds(value, 8)
    dist.destroy_process_group()


@pytest.mark.skipif(not TIMES_WORKS, reason="this torch times works of nccl alone")
@pytest.mark.parametrize("vendor", VENDORS)
def test_durations_are_those_of_the_device(vendor: str, libraries: dict[str, Path]) -> None:
    """With timing enabled, a Work reports the library's time in milliseconds. Without timing, the query is refused."""
    run_fresh(timed, 2, vendor, env=environment(vendor, libraries, SAGELLM_SIM_SLOW_US=str(1000 * SLOW_MS)))


def added_to_timeouts(ctx: Context, vendor: str) -> None:
    _, name = start(ctx, vendor, timeout=timedelta(seconds=60))
    value = torch.ones(10, device=name)
    dist.all_reduce(value)
    dist.barrier()
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=30))
    works: list[Any] = [dist.all_reduce(value, async_op=True)]
    assert works[0].timeout == timedelta(seconds=90)
    works[0].wait(timedelta(seconds=60))
    dist.barrier()
    works.append(dist.all_reduce(value, async_op=True))
    assert works[1].timeout == timedelta(seconds=60)
    works[1].wait()
    holds(value, 8)
    dist.destroy_process_group()


@pytest.mark.skipif(not torch_at_least(2, 15), reason="this torch has it for nccl alone")
def test_an_ephemeral_timeout_counts_for_calls_on_a_device(libraries: dict[str, Path]) -> None:
    """The added timeout applies until the first later call has ended."""
    run_fresh(added_to_timeouts, 2, "nccl", env=environment("nccl", libraries))
