"""Ranks that call different operations on their devices. A vendor's library compares nothing, so the group does.

The error shows both calls, whether the library would hang or would return meaningless numbers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from harness import Context, launch
from limits import patience
from simulated import VENDORS, environment, start

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist"))
from test_disagreements import CALLS, Passed, changes

#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)

Call = Callable[[Any, str, bool], Any]
#: The calls of two ranks, each with the text by which the error names it.
Case = tuple[tuple[Call, str], tuple[Call, str]]


def reduces(count: int = 4, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> Call:
    return lambda group, name, a: dist.all_reduce(torch.ones(count, dtype=dtype, device=name), op, group, a)


def broadcasts(root: int, count: int = 4) -> Call:
    return lambda group, name, a: dist.broadcast(torch.ones(count, device=name), root, group, a)


def gathers(root: int) -> Call:
    def call(group: Any, name: str, a: bool) -> Any:
        outs = [torch.zeros(4, device=name) for _ in range(2)] if dist.get_rank() == root else None
        return dist.gather(torch.ones(4, device=name), outs, root, group, a)

    return call


def region(*calls: Call) -> Call:
    def call(group: Any, name: str, a: bool) -> Any:
        with dist._coalescing_manager(group, torch.device(name, 0), async_ops=a) as manager:
            for each in calls:
                each(group, name, False)
        return manager if a else None

    return call


def listed(*counts: int) -> Call:
    return lambda group, name, a: dist.all_reduce_coalesced(
        [torch.ones(count, device=name) for count in counts], group=group, async_op=a
    )


def typed(*dtypes: torch.dtype) -> Call:
    """Returns a call of the backend's own method, because torch's function refuses several dtypes."""

    def call(group: Any, name: str, a: bool) -> Any:
        ts = [torch.ones(4, dtype=dtype, device=name) for dtype in dtypes]
        return group._get_backend(torch.device(name)).allreduce_coalesced(ts, dist.AllreduceCoalescedOptions())

    return call


def gathers_uneven(*counts: int) -> Call:
    def call(group: Any, name: str, a: bool) -> Any:
        outs = [torch.zeros(count, device=name) for count in counts]
        return dist.all_gather(outs, torch.ones(counts[dist.get_rank()], device=name), group, a)

    return call


def exchanges(sent: list[int], received: list[int]) -> Call:
    def call(group: Any, name: str, a: bool) -> Any:
        out, into = torch.ones(sum(sent), device=name), torch.zeros(sum(received), device=name)
        return dist.all_to_all_single(into, out, received, sent, group, a)

    return call


#: What the error says to both ranks of an all_to_all. It shows no sizes, because the sizes differ from rank to rank
#: anyway.
MISFIT = "passed sizes that do not belong together to all_to_all()"
ONE_CALL: dict[str, Case] = {
    "kind": (
        (reduces(), "all_reduce(16 bytes, float32, SUM)"),
        (broadcasts(0, 8), "broadcast(32 bytes, root 0)"),
    ),
    "root": ((broadcasts(0), "broadcast(16 bytes, root 0)"), (broadcasts(1), "broadcast(16 bytes, root 1)")),
    "root of messages": ((gathers(0), "gather(16 bytes, root 0)"), (gathers(1), "gather(16 bytes, root 1)")),
    "op": (
        (reduces(), "all_reduce(16 bytes, float32, SUM)"),
        (reduces(op=dist.ReduceOp.MAX), "all_reduce(16 bytes, float32, MAX)"),
    ),
    "type": (
        (reduces(), "all_reduce(16 bytes, float32, SUM)"),
        (reduces(dtype=torch.int32), "all_reduce(16 bytes, int32, SUM)"),
    ),
    "size": (
        (reduces(), "all_reduce(16 bytes, float32, SUM)"),
        (reduces(8), "all_reduce(32 bytes, float32, SUM)"),
    ),
    "sizes of an all_to_all": (
        (exchanges([2, 4], [2, 3]), MISFIT),
        (exchanges([3, 2], [3, 2]), MISFIT),
    ),
}
SEVERAL: dict[str, Case] = {
    "region": (
        (region(broadcasts(0), broadcasts(0)), "broadcast(16 bytes, root 0)"),
        (region(broadcasts(0), broadcasts(1)), "broadcast(16 bytes, root 1)"),
    ),
    "list": (
        (listed(4, 4), "all_reduce(32 bytes, float32, SUM)"),
        (listed(4, 8), "all_reduce(48 bytes, float32, SUM)"),
    ),
    "types in a list": (
        (
            typed(torch.float32, torch.int32),
            "different tensors or lists of sizes to all_reduce(32 bytes, float32, SUM)",
        ),
        (
            typed(torch.float32, torch.float32),
            "different tensors or lists of sizes to all_reduce(32 bytes, float32, SUM)",
        ),
    ),
    "list of sizes": (
        (gathers_uneven(3, 5), "passed different tensors or lists of sizes to all_gather(32 bytes)"),
        (gathers_uneven(5, 3), "passed different tensors or lists of sizes to all_gather(32 bytes)"),
    ),
}
CASES = ONE_CALL | SEVERAL


def error_of(group: Any, call: Callable[[], Any]) -> str:
    """Returns the error of the group, raised by this call or by a later one."""
    end = time.monotonic() + patience(20)
    try:
        work = call()
        if work is not None:
            work.wait()
        while time.monotonic() < end:
            dist.all_reduce(torch.ones(1), group=group)
            time.sleep(0.02)
    except Exception as error:
        return str(error)
    return "no error"


def differ(ctx: Context, vendor: str, cases: list[tuple[str, bool]], timeout: float, hosts: list[str] | None) -> None:
    import torch_sagellm

    if hosts:
        with open("/proc/self/ns/net") as home:
            net.enter(hosts[ctx.rank])
            store = dist.FileStore(f"{ctx.tmp}/store", ctx.world_size)
            _, name = start(ctx, vendor, timeout=timedelta(seconds=120), store=store)
            options = torch_sagellm.Options(vendor=vendor if vendor == "nccl" else "auto")
            groups = [dist.new_group(timeout=timedelta(seconds=timeout), pg_options=options) for _ in cases]
            net.enter_file(home)  # the simulators' communicators span no namespaces
    else:
        _, name = start(ctx, vendor, timeout=timedelta(seconds=120))
        options = torch_sagellm.Options(vendor=vendor if vendor == "nccl" else "auto")
        groups = [dist.new_group(timeout=timedelta(seconds=timeout), pg_options=options) for _ in cases]
    for (what, asynchronous), group in zip(cases, groups, strict=True):
        call, _ = CASES[what][ctx.rank]
        reduces()(group, name, False)
        torch.accelerator.synchronize()
        begin = time.monotonic()
        text = error_of(group, lambda call=call, group=group, a=asynchronous: call(group, name, a))
        ctx.tell((what, text, time.monotonic() - begin))
        dist.barrier()  # on the CPU, by the default group
    ctx.listen()
    os._exit(0)


def both_calls_are_shown(job: Any, cases: list[tuple[str, bool]], limit: float) -> None:
    for what, asynchronous in cases:
        for rank in range(2):
            told, text, took = job.hear(rank, 60)
            assert told == what
            for _, shown in CASES[what]:
                assert shown in text, (what, asynchronous, rank, text)
            assert "number 2 on their devices" in text or what == "region", text
            assert took < limit, (what, took)
    for rank in range(2):
        job.say(rank, "go")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_rule_05_calls_that_differ_on_devices_fail_with_both(
    vendor: str, asynchronous: bool, libraries: dict[str, Path]
) -> None:
    """Both ranks get the error long before the deadline, whatever differs."""
    cases = [(what, asynchronous) for what in CASES]
    env = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    # HCCL's stream keeps the error of a failed operation, so each case has a separate process there.
    jobs = [[case] for case in cases] if vendor == "hccl" else [cases]
    for each in jobs:
        with launch(differ, 2, vendor, each, 100.0, None, env=env) as job:
            both_calls_are_shown(job, each, patience(10))


@pytest.mark.parametrize(
    "case", [("kind", False), ("size", True), ("list of sizes", True), ("sizes of an all_to_all", True)], ids=str
)
@pytest.mark.parametrize("vendor", VENDORS)
def test_rule_05_calls_that_differ_on_devices_over_hosts(
    vendor: str, case: tuple[str, bool], libraries: dict[str, Path], hosts: list[str]
) -> None:
    """The library only hangs. Before the deadline the ranks ask each other for their calls and find the mismatch."""
    env = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000", SAGELLM_SIM_HANG_AT="2")
    env["GLOO_SOCKET_IFNAME"] = net.INTERFACE
    with launch(differ, 2, vendor, [case], 12.0, hosts, env=env) as job:
        both_calls_are_shown(job, [case], patience(12))


#: Rows of `CALLS` that have no tensor on a device.
ON_THE_HOST = ("dist.barrier", "comm.barrier", "package.assert_same", "dist.all_gather_object", "dist.gather_object")
ON_THE_HOST += ("dist.broadcast_object_list", "dist.scatter_object_list")


def one_rank_differs(ctx: Context, vendor: str) -> None:
    """Makes every call of `CALLS` with every change, each in a new group. The rank that differs alternates."""
    import torch_sagellm

    _, device = start(ctx, vendor, timeout=timedelta(seconds=120), delay=0.0)
    usual = Passed(4, device=device)
    cases = [(name, what, other) for name in CALLS for what, other in changes(name, usual).items()]
    cases = [case for case in cases if case[0] not in ON_THE_HOST and case[1] != "call"]
    found = {}
    for number, (name, what, other) in enumerate(cases):
        options = torch_sagellm.Options(vendor=vendor if vendor == "nccl" else "auto")
        group: Any = dist.new_group(timeout=timedelta(seconds=60), pg_options=options)
        reduces()(group, device, False)
        torch.accelerator.synchronize()
        called, passed = other if ctx.rank == number % 2 else (name, usual)

        def call(called: str = called, group: Any = group, passed: Passed = passed) -> None:
            CALLS[called].run(group, passed)

        found[f"{name}, rank {number % 2} has another {what}"] = error_of(group, call)
        dist.barrier()  # on the CPU, by the default group
    ctx.tell(found)
    ctx.listen()
    os._exit(0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vendor", ["nccl", "cncl"])  # not HCCL, whose stream keeps an error for all later cases
def test_rule_05_what_differs_on_one_rank_is_an_error_of_every_call_on_a_device(
    vendor: str, libraries: dict[str, Path]
) -> None:
    env = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    if vendor == "nccl":
        env["SAGELLM_VENDOR"] = vendor
    with launch(one_rank_differs, 2, vendor, env=env) as job:
        texts = [job.hear(rank, 300) for rank in range(2)]
        for rank in range(2):
            job.say(rank, "go")
    assert len(texts[0]) > 60
    errors = {case: [each[case] for each in texts] for case in texts[0]}
    for case, said in errors.items():
        words = MISFIT if any(each in case for each in ("all_to_all", "exchange_tokens")) else "different"
        assert all(words in text for text in said), (case, said)


#: FITS: by sender, how many numbers each of three ranks sends to each rank. WRONG: in each case a sender, a receiver,
#: and the number that this receiver expects instead.
FITS = [[4, 0, 3], [1, 5, 2], [6, 7, 0]]
WRONG = [(0, 2, 5), (2, 1, 8), (1, 0, 0)]


def one_pair_differs(ctx: Context, vendor: str) -> None:
    import torch_sagellm

    _, name = start(ctx, vendor, timeout=timedelta(seconds=120), delay=0.0)
    me, told = ctx.rank, []
    for sender, receiver, room in WRONG:
        options = torch_sagellm.Options(vendor=vendor if vendor == "nccl" else "auto")
        group: Any = dist.new_group(timeout=timedelta(seconds=60), pg_options=options)
        rooms = [row[me] for row in FITS]
        for turn in range(40):  # the group keeps the signatures of far fewer calls; some ranks are ahead
            work = exchanges(FITS[me], rooms)(group, name, True)
            if turn % (5 + me) == 0:
                work.wait()
        torch.accelerator.synchronize()
        dist.barrier()
        if me == receiver:
            rooms[sender] = room
        told.append(error_of(group, lambda rooms=rooms, group=group: exchanges(FITS[me], rooms)(group, name, True)))
        dist.barrier()
    ctx.tell(told)
    ctx.listen()
    os._exit(0)


@pytest.mark.parametrize("vendor", ["nccl", "cncl"])  # not HCCL, whose stream keeps an error for all later cases
def test_rule_05_the_pair_of_an_all_to_all_whose_sizes_differ_is_named(vendor: str, libraries: dict[str, Path]) -> None:
    """Every rank gets the error, even if its own sizes fit. Sizes that all fit are never refused."""
    env = environment(vendor, libraries, SAGELLM_SIM_TIMEOUT_MS="300000")
    with launch(one_pair_differs, 3, vendor, env=env) as job:
        texts = [job.hear(rank, 120) for rank in range(3)]
        for rank in range(3):
            job.say(rank, "go")
    for at, (sender, receiver, room) in enumerate(WRONG):
        said = [each[at] for each in texts]
        brings, has = 4 * FITS[sender][receiver], 4 * room
        pair = f"rank {sender} brings {brings} bytes where rank {receiver} has room for {has}"
        assert all(MISFIT in text and pair in text for text in said), (pair, said)
