"""The link between hosts by UCX (docs/internals/ucx.md). Hosts are network namespaces; UCX uses TCP between them."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from datetime import timedelta
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
import ucx
from harness import IS_GLOO, Context, expect_raises, launch
from limits import patience
from net import enter
from reference import make, same_bits
from test_multihost import left_in_the_middle, on_place

pytestmark = [
    pytest.mark.skipif(IS_GLOO, reason="gloo does not use UCX"),
    pytest.mark.skipif(bool(ucx.missing()), reason=ucx.missing()),
]

ENV = {"GLOO_SOCKET_IFNAME": net.INTERFACE, **ucx.BY_UCX}
TCP = {"GLOO_SOCKET_IFNAME": net.INTERFACE}
MIB = 1 << 18  # floats


def start(ctx: Context, names: list[str], seconds: float = 60, **more: Any) -> None:
    enter(names[ctx.rank * len(names) // ctx.world_size])
    net.see_own_interfaces()
    store = dist.FileStore(f"{ctx.tmp}/store", ctx.world_size)
    ctx.init(store=store, timeout=timedelta(seconds=seconds), **more)


@pytest.mark.parametrize("place", [[0, 1], [0, 1, 0, 1]])
def test_every_kind_of_call_is_exact(hosts: list[str], place: list[int]) -> None:
    with launch(on_place, len(place), hosts, place, {}, env=ENV) as job:
        job.values(200)


def test_every_kind_of_call_is_exact_on_three_hosts(three_hosts: list[str]) -> None:
    with launch(on_place, 3, three_hosts, [0, 1, 2], {}, env=ENV) as job:
        job.values(200)


def floats(ctx: Context, names: list[str]) -> str:
    """Returns the hash of the results of all_reduces, whose bits depend on the order of the sums."""
    start(ctx, names)
    found = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 1000, 30_000, 4 * MIB):
            tensor = make(dtype, count, ctx.rank)
            dist.all_reduce(tensor)
            found.update(tensor.view(torch.uint8).numpy().tobytes())
    dist.destroy_process_group()
    return found.hexdigest()


@pytest.mark.parametrize("more", [{}, {"UCX_TLS": "all"}, {"SAGELLM_FUSION": "0", "UCX_RNDV_THRESH": "1k"}])
def test_the_bits_are_those_of_the_link_over_tcp(three_hosts: list[str], more: dict[str, str]) -> None:
    """The bits are also the same if UCX uses the shared memory of this machine, or if it leaves even short data at the
    sender.

    The links are not measured, because the order of large sums would then depend on the measurement.
    """
    hashes = set()
    for env in (TCP, {**ENV, "SAGELLM_LOG": "info", **more}):
        with launch(floats, 3, three_hosts, env={**env, "SAGELLM_MEASURE_LINK": "0"}) as job:
            hashes.update(job.values(100))
            outputs = [each.output() for each in job.ranks]
    assert len(hashes) == 1
    assert all("the link between hosts is UCX" in output for output in outputs), outputs


def test_a_rank_that_leaves_in_the_middle_of_an_operation_fails_that_group_only(three_hosts: list[str]) -> None:
    """The world's group, which uses the same endpoints, works afterwards."""
    with launch(left_in_the_middle, 3, three_hosts, env=ENV) as job:
        found = job.values(100)[1:]
    assert any(failed for failed, _ in found), found
    assert all(longest < 10 for _, longest in found), found


def messages(ctx: Context, names: list[str]) -> None:
    start(ctx, names)
    n, me = ctx.world_size, ctx.rank
    sizes = [0, 1, 1000, 5000, 30_000, 40_000, MIB, 4 * MIB + 3]
    other = 1 - me if me < 2 else None
    if other is not None:
        works, got = [], []
        for tag, size in enumerate(sizes):
            works.append(dist.isend(torch.full((size,), float(me * 100 + tag)), other, tag=tag))
        for tag, size in reversed(list(enumerate(sizes))):
            got.append((tag, torch.empty(size)))
            works.append(dist.irecv(got[-1][1], other, tag=tag))
        for work in works:
            work.wait()  # type: ignore[union-attr]
        for tag, tensor in got:
            assert (tensor == other * 100 + tag).all(), tag
    dist.barrier()
    # From anyone, in strided memory, and with a receive that is dropped.
    if me == 0:
        for _ in range(2 * (n - 1)):
            grid = torch.zeros(300, 400)
            source = dist.recv(grid[:, ::2], tag=7)
            assert (grid[:, ::2] == source).all() and not grid[:, 1::2].any()
        kept = torch.zeros(MIB)
        dist.irecv(kept, 1, tag=8)
        dist.recv(torch.zeros(1), 1, tag=9)
        deadline = time.monotonic() + 20
        while not bool((kept == 3).all()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (kept == 3).all()
    else:
        for _ in range(2):
            dist.send(torch.full((400, 300), float(me)).t()[:, ::2], 0, tag=7)
        if me == 1:
            dist.send(torch.full((MIB,), 3.0), 0, tag=8)
            dist.send(torch.zeros(1), 0, tag=9)
    dist.destroy_process_group()


def test_messages_of_all_sizes_arrive_under_their_tags(three_hosts: list[str]) -> None:
    with launch(messages, 3, three_hosts, env=ENV) as job:
        job.values(100)


def survives(ctx: Context, names: list[str], count: int) -> tuple[float, str]:
    """Rank 1 is killed while rank 0 waits for it, or, with large tensors, in the middle of an operation."""
    start(ctx, names)
    pair = torch.ones(count)
    dist.all_reduce(pair)
    ctx.tell("ready")
    if ctx.rank == 1 and count < MIB:
        time.sleep(60)
    while True:
        try:
            dist.all_reduce(pair)
        except RuntimeError as error:
            return time.time(), str(error)


@pytest.mark.parametrize("count", [1, 16 * MIB])
def test_a_killed_rank_is_named_in_under_a_second(hosts: list[str], count: int) -> None:
    with launch(survives, 2, hosts, count, env=ENV) as job:
        for rank in range(2):
            job.hear(rank)
        time.sleep(0.5)
        killed = time.time()
        job.signal(1, signal.SIGKILL)
        ended, text = job.wait_rank(0, 30).value
    assert "rank 1" in text, text
    assert ended - killed < patience(1), (ended - killed, text)


def sums(ctx: Context, names: list[str], count: int) -> float:
    """Returns the seconds of the longest of many pairs of all_reduces."""
    start(ctx, names)
    ctx.tell("ready")
    longest, begin = 0.0, time.monotonic()
    while True:
        before = time.monotonic()
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        assert (tensor == 2).all()
        over = torch.tensor(float(time.monotonic() - begin > 6))
        dist.all_reduce(over)
        longest = max(longest, time.monotonic() - before)
        if over:
            break
    dist.destroy_process_group()
    return longest


@pytest.mark.parametrize("count", [1, 4 * MIB])
def test_a_stopped_rank_is_waited_for(hosts: list[str], count: int) -> None:
    with launch(sums, 2, hosts, count, env=ENV) as job:
        for rank in range(2):
            job.hear(rank)
        time.sleep(1)
        job.signal(1, signal.SIGSTOP)
        time.sleep(3)
        job.signal(1, signal.SIGCONT)
        assert job.values(60)[0] > 2


def stops_in_the_middle(ctx: Context, names: list[str]) -> tuple[str, float, float]:
    """Returns the error of the rank that goes on, the seconds of its last call, and the processor time of that call."""
    start(ctx, names)
    tensor = torch.ones(16 * MIB)
    dist.all_reduce(tensor)
    ctx.set_timeout(timedelta(seconds=4))
    ctx.tell("ready")
    while True:
        before, used = time.monotonic(), time.process_time()
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            return str(error), time.monotonic() - before, time.process_time() - used


def test_a_rank_that_is_stopped_for_long_is_named_at_the_deadline(hosts: list[str]) -> None:
    """A transfer to or from the stopped rank is in flight, and UCX cannot take it back. The rank that waits sleeps
    meanwhile."""
    with launch(stops_in_the_middle, 2, hosts, env=ENV) as job:
        for rank in range(2):
            job.hear(rank)
        time.sleep(0.5)
        job.signal(1, signal.SIGSTOP)
        text, seconds, used = job.wait_rank(0, 30).value
    assert "Timed out" in text and "rank 1" in text, text
    assert 3.5 < seconds < 9, seconds
    assert used < 2, used


def waits(ctx: Context, names: list[str]) -> str:
    """Rank 1 does not call, and in the second group it leaves."""
    start(ctx, names)
    text = ""
    group: Any = dist.new_group([0, 1])
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
    if ctx.rank == 0:
        text = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(MIB), group=group))
    dist.barrier()  # the connection still serves other groups
    other = dist.new_group([0, 1])
    if ctx.rank == 1:
        dist.destroy_process_group(other)
    else:
        text += expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(3), group=other))
    dist.barrier()
    return text


def test_a_deadline_and_a_rank_that_left_are_named(hosts: list[str]) -> None:
    with launch(waits, 2, hosts, env=ENV) as job:
        text = job.values(60)[0]
    print(text)
    assert "Timed out" in text and "rank 1" in text and "left" in text, text


def cannot(ctx: Context, names: list[str], change: dict[str, str]) -> str:
    if ctx.rank == 1:
        os.environ.update(change)
    return expect_raises(dist.DistBackendError, lambda: start(ctx, names, 20))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"SAGELLM_UCX_LIBRARY": "/nowhere/libucp.so.0"},
            ["rank 1", "UCX was not found", "/nowhere/libucp.so.0", "named by SAGELLM_UCX_LIBRARY"],
        ),
        ({"SAGELLM_LINK": "tcp"}, ["has SAGELLM_LINK=", "and rank", "has ", "set it alike on all ranks"]),
    ],
)
def test_if_one_rank_cannot_all_refuse_with_one_text(
    hosts: list[str], change: dict[str, str], expected: list[str]
) -> None:
    with launch(cannot, 2, hosts, change, env=ENV) as job:
        texts = job.values(60)
    print(texts[0])
    assert texts[0] == texts[1]
    assert all(each in texts[0] for each in expected), texts
    assert "firewalls" not in texts[0]


def caught() -> int:
    """Returns the mask of the signals that have a handler, without the signals of the C library."""
    with open("/proc/self/status") as lines:
        line = next(line for line in lines if line.startswith("SigCgt"))
    return int(line.split()[1], 16) & 0x7FFF_FFFF


def is_a_guest(ctx: Context, names: list[str]) -> float:
    before = caught()
    start(ctx, names)
    dist.all_reduce(torch.ones(MIB))
    assert caught() == before, (caught(), before)
    assert hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    child = os.fork()
    if child == 0:
        os._exit(0 if "forked" in expect_raises(ValueError, lambda: dist.all_reduce(torch.ones(1))) else 1)
    assert os.waitpid(child, 0)[1] == 0
    # An idle process uses no processor time, and the link still works afterwards.
    dist.barrier()
    used = time.process_time()
    time.sleep(2)
    used = time.process_time() - used
    tensor = torch.full((MIB,), float(ctx.rank))
    dist.all_reduce(tensor)
    same_bits(tensor, torch.ones(MIB), "after a fork and a pause")
    dist.destroy_process_group()
    return used


def test_the_program_is_not_changed(hosts: list[str]) -> None:
    with launch(is_a_guest, 2, hosts, env=ENV) as job:
        used = job.values(60)
        outputs = [each.output() for each in job.ranks]
    assert max(used) < 0.5, used
    assert not any(outputs), outputs


@pytest.fixture
def cables(request: pytest.FixtureRequest) -> Any:
    try:
        with net.Cables(*request.param) as made:
            yield made
    except net.Unavailable as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("cables", [(["1gbit"] * 2,)], indirect=True)
def test_two_interfaces_are_two_rails(cables: net.Cables) -> None:
    """SAGELLM_SOCKET_IFNAMES sets the interfaces that UCX uses. UCX divides long messages among them."""
    env = {**ucx.BY_UCX, "SAGELLM_SOCKET_IFNAMES": ",".join(cables.interfaces), "UCX_MAX_RNDV_RAILS": "2"}
    with launch(floats, 2, cables.names, env=env) as job:
        values = job.values(100)
    assert values[0] == values[1]
