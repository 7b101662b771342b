"""Several connections between two processes, over several cables of which some fail (docs/internals/paths.md)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from harness import IS_GLOO, Context, expect_raises, launch
from limits import patience
from net import enter
from reference import fold, make, same_bits

pytestmark = pytest.mark.skipif(IS_GLOO, reason="gloo has one connection")

MIB = 1 << 18  # floats
STALLED = "nothing arrives on the connection"


@pytest.fixture
def cables(request: pytest.FixtureRequest) -> Iterator[net.Cables]:
    try:
        with net.Cables(*request.param) as made:
            yield made
    except net.Unavailable as why:
        pytest.skip(str(why))


def variables(cables: net.Cables, **more: str) -> dict[str, str]:
    return {"SAGELLM_SOCKET_IFNAMES": ",".join(cables.interfaces), **more}


def reduced(n: int, me: int, count: int) -> tuple[torch.Tensor, float]:
    """Returns the result of one all_reduce of ``count`` floats, and its seconds."""
    found = make(torch.float32, count, me)
    dist.barrier()
    begin = time.monotonic()
    dist.all_reduce(found)
    return found, time.monotonic() - begin


def loses_cables(ctx: Context, names: list[str], victims: list[str], after: float) -> list[float]:
    n, me = ctx.world_size, ctx.rank
    enter(names[me * 2 // n])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", n), timeout=timedelta(seconds=30))
    count = 64 * MIB
    whole, usual = reduced(n, me, count)
    cutting = threading.Timer(after * usual, lambda: [net.cut(names[0], victim) for victim in victims])
    if me == 0:
        cutting.start()
    found, failing = reduced(n, me, count)
    same_bits(found, whole, "the same call without a failure")
    again, after_it = reduced(n, me, count)
    same_bits(again, whole, "after the failure")
    if n == 2:  # with more ranks the order between hosts differs
        same_bits(whole, fold("SUM", [make(torch.float32, count, rank) for rank in range(n)]), "the reference")
    for size in (1, 1000, 100_000):
        tensor = torch.full((size,), float(me))
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [n * (n - 1) / 2]
    dist.destroy_process_group()
    return [usual, failing, after_it]


FOUR = (["1gbit"] * 4,)


@pytest.mark.parametrize("cables", [FOUR], indirect=True)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (2, 2), (4, 1)])
def test_others_take_over_when_a_cable_fails_in_the_middle(cables: net.Cables, world_size: int, victim: int) -> None:
    names = [cables.interfaces[victim]]
    with launch(loses_cables, world_size, cables.names, names, 0.4, env=variables(cables)) as job:
        times = job.values(100)
        outputs = [each.output() for each in job.ranks]
    print(times)
    for usual, failing, _ in times:
        assert failing < 2 * usual + patience(1.5), times
    assert all(output.count(STALLED) <= 3 for output in outputs), outputs
    assert any(STALLED in output for output in outputs), outputs


@pytest.mark.parametrize("cables", [FOUR], indirect=True)
def test_one_cable_of_four_is_enough(cables: net.Cables) -> None:
    with launch(loses_cables, 2, cables.names, cables.interfaces[:3], 0.4, env=variables(cables)) as job:
        print(job.values(100))


@pytest.mark.parametrize("cables", [(["1gbit"] * 2, False, True)], indirect=True)
def test_cables_with_link_local_addresses_take_over_too(cables: net.Cables) -> None:
    with launch(loses_cables, 2, cables.names, cables.interfaces[:1], 0.4, env=variables(cables)) as job:
        print(job.values(100))


@pytest.mark.parametrize("cables", [(["1gbit", "100mbit"], True)], indirect=True)
def test_a_cable_that_drops_packets_changes_no_bit(cables: net.Cables) -> None:
    with launch(loses_cables, 2, cables.names, [], 0.4, env=variables(cables, SAGELLM_LINKS="3")) as job:
        print(job.values(100))


def loses_all(ctx: Context, names: list[str], victims: list[str]) -> str:
    n, me = ctx.world_size, ctx.rank
    enter(names[me * 2 // n])
    store = dist.FileStore(f"{ctx.tmp}/store", n)
    ctx.init(store=store, timeout=timedelta(seconds=6))
    reduced(n, me, MIB)
    if me != 0:
        store.set("reduced", "here too")
    else:
        store.wait(["reduced"])  # without the cables, rank 1 could not get the last of its data
        for victim in victims:
            net.cut(names[0], victim)

    def reduce_twice() -> None:
        # Before the cables were cut, rank 1 may have sent all that rank 0 needs for the first all_reduce.
        for _ in range(2):
            dist.all_reduce(torch.ones(MIB))

    return expect_raises(RuntimeError, reduce_twice)


@pytest.mark.parametrize("cables", [(["1gbit"] * 2,)], indirect=True)
def test_when_all_cables_fail_the_deadline_names_the_other_rank(cables: net.Cables) -> None:
    with launch(loses_all, 2, cables.names, cables.interfaces, env=variables(cables)) as job:
        texts = job.values(60)
    for me, text in enumerate(texts):
        assert "Timed out" in text and f"rank {1 - me}" in text, texts


def dies_after_a_cable(ctx: Context, names: list[str], victim: str) -> float:
    """Rank 1 writes to a file when it dies. One of the two cables has failed before. Returns the time at which the rank
    learns of the death."""
    n, me = ctx.world_size, ctx.rank
    enter(names[me * 2 // n])
    store = dist.FileStore(f"{ctx.tmp}/store", n)
    ctx.init(store=store, timeout=timedelta(seconds=30))
    reduced(n, me, MIB)
    if me == 0:
        net.cut(names[0], victim)
    reduced(n, me, 16 * MIB)  # over the other cable
    if me == 0:
        store.set("reduced", "here too")
    else:
        store.wait(["reduced"])  # rank 1 may still have to send again what the failed cable lost
        Path(ctx.tmp, "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(MIB)))
    return time.monotonic()


@pytest.mark.parametrize("cables", [(["1gbit"] * 2,)], indirect=True)
def test_a_rank_that_dies_is_noticed_although_a_cable_failed_before(cables: net.Cables) -> None:
    with launch(dies_after_a_cable, 2, cables.names, cables.interfaces[0], env=variables(cables)) as job:
        outcome = job.wait_rank(0, 60)
        died = float((job.tmp / "died").read_text())
    known = outcome.value
    assert known is not None and known - died < patience(2), (died, known, outcome.error)


def other_numbers(ctx: Context, names: list[str]) -> None:
    """Ranks that want different numbers of connections use the smallest of these numbers."""
    import torch_sagellm

    n, me = ctx.world_size, ctx.rank
    enter(names[me * 2 // n])
    store = dist.FileStore(f"{ctx.tmp}/store", n)
    options: Any = torch_sagellm.Options(links=1 + 3 * me)
    assert options.links == 1 + 3 * me and ("links" in repr(options)) == bool(me)
    ctx.init(store=store, timeout=timedelta(seconds=30), pg_options=options)
    found, _ = reduced(n, me, MIB)
    same_bits(found, fold("SUM", [make(torch.float32, MIB, rank) for rank in range(n)]), "all_reduce")
    dist.destroy_process_group()
    text = expect_raises(ValueError, lambda: torch_sagellm.Options(links=17))
    assert "links is 17, expected 1 to 16" in text


def test_ranks_may_want_different_numbers_of_connections(hosts: list[str]) -> None:
    with launch(other_numbers, 2, hosts, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        job.values(60)
