"""`_all_to_all_rows`, `_send_rows` and `_recv_rows` read and write rows where they are. They are compared with calls on
rows that were gathered first."""

from __future__ import annotations

import random
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
import ucx
from harness import Context, beyond_gloo, expect_raises, run_fresh, run_ranks

from torch_sagellm._private import groups

pytestmark = beyond_gloo("rows that are not contiguous")

TCP = {"GLOO_SOCKET_IFNAME": net.INTERFACE}


def splits_of(seed: int, ranks: int, most: int) -> list[list[int]]:
    """How many rows each rank sends to each rank. Some send none."""
    chance = random.Random(seed)
    return [[chance.choice((0, 1, chance.randrange(most + 1))) for _ in range(ranks)] for _ in range(ranks)]


def exchange(ours: Any, seed: int, most: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One random exchange, with and without indices on each side, synchronous or not."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    table = splits_of(seed, ranks, most)
    sent, received = table[rank], [line[rank] for line in table]
    torch.manual_seed(1000 * seed + rank)
    size = sum(sent) + 3
    source = torch.randint(0, 100, (size, *shape)).to(dtype)
    picked = torch.randint(0, size, (sum(sent),))  # a row may be sent several times
    if seed % 3 == 0:
        picked = picked.sort().values
    places = torch.randperm(sum(received) + 2)[: sum(received)]
    if seed % 4 == 1:
        places = places.sort().values
    dense = source[picked]
    came = source.new_empty((sum(received), *shape))
    dist.all_to_all_single(came, dense, received, sent)
    expected = torch.full((sum(received) + 2, *shape), 7).to(dtype)
    output = expected.clone()
    expected[places] = came
    async_op = seed % 2 == 1
    work = ours._all_to_all_rows(output, places, received, source, picked, sent, async_op)
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
    assert torch.equal(output, expected), seed
    straight = torch.empty_like(came)
    ours._all_to_all_rows(straight, None, received, source, picked, sent, False)
    assert torch.equal(straight, came), seed
    scattered = torch.full_like(output, 7)
    version = scattered._version
    ours._all_to_all_rows(scattered, places, received, dense, None, sent, False)
    assert torch.equal(scattered, expected) and scattered._version > version, seed


def exchanges(ctx: Context) -> None:
    ours = groups.backend_of(dist.group.WORLD)
    sizes = [(5, (3,), torch.uint8), (20, (4, 2), torch.float32), (60, (700,), torch.bfloat16), (0, (2,), torch.int64)]
    for seed in range(24):
        exchange(ours, seed, *sizes[seed % len(sizes)])
    for seed in range(24, 27):  # several rounds through the staging buffers; a row that is larger than a round
        exchange(ours, seed, 600, (1001,), torch.float32)
        exchange(ours, seed, 2, (1 << 20,), torch.float32)


def messages(ctx: Context) -> None:
    """Rows travel around a ring. A rank may receive by rows what was sent as a whole, and the reverse."""
    ours = groups.backend_of(dist.group.WORLD)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for seed in range(16):
        shape, dtype = [((3,), torch.uint8), ((40, 2), torch.float32), ((70_000,), torch.bfloat16)][seed % 3]
        count = random.Random(seed).randrange(30)
        torch.manual_seed(seed)
        sources = torch.randint(0, 100, (ranks, 30, *shape)).to(dtype)
        picked, places = torch.randint(0, 30, (ranks, count)), torch.randperm(31)[:count]
        expected = torch.full((31, *shape), 7).to(dtype)
        output = expected.clone()
        before = (rank - 1) % ranks
        whole = sources[before][picked[before]]
        expected[places] = whole
        if seed % 4 == 0:
            sent = dist.isend(sources[rank][picked[rank]], (rank + 1) % ranks, tag=seed)
        else:
            sent = ours._send_rows(sources[rank], picked[rank], (rank + 1) % ranks, seed)
        if seed % 4 == 1:
            straight = torch.empty_like(whole)
            dist.recv(straight, before, tag=seed)
            assert torch.equal(straight, whole), seed
        else:
            version = output._version
            ours._recv_rows(output, places, before, seed).wait()
            assert torch.equal(output, expected) and output._version > version, seed
        sent.wait()


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_of_rows_are_those_of_gathered_rows(world_size: int) -> None:
    run_ranks(messages, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_arrive_as_if_they_had_been_gathered(world_size: int) -> None:
    run_ranks(exchanges, world_size)


def reachable(ctx: Context) -> None:
    """All memory is reachable for the other ranks, which changes how contiguous tensors are exchanged."""
    import torch_sagellm

    with torch_sagellm.shared_tensors():
        exchanges(ctx)
        messages(ctx)


def mixed(ctx: Context) -> None:
    """One rank exchanges rows, the other contiguous tensors: it is the same call. The Works are dropped."""
    ours = groups.backend_of(dist.group.WORLD)
    for count in (3, 3000):
        rows, places = torch.arange(2.0 * count * 100).view(2 * count, 100) + ctx.rank, torch.randperm(2 * count)
        came, each = torch.empty_like(rows), [count, count]
        if ctx.rank:
            ours._all_to_all_rows(came, places, each, rows, None, each, True)
            dist.barrier()
            came = came[places]
        else:
            dist.all_to_all_single(came, rows, each, each, async_op=True)
            dist.barrier()
        own = torch.arange(2.0 * count * 100).view(2, count, 100)[ctx.rank]
        assert torch.equal(came, torch.cat([own, own + 1]))


def test_rows_meet_contiguous_tensors_in_one_call() -> None:
    run_ranks(mixed, 2)


def test_rows_in_memory_that_ranks_can_reach() -> None:
    run_ranks(reachable, 2)


def over_hosts(ctx: Context, names: list[str], place: list[int]) -> None:
    net.enter(names[place[ctx.rank]])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size))
    exchanges(ctx)
    messages(ctx)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("place", [[0, 1], [0, 0, 1, 1]], ids=str)
def test_rows_between_hosts(hosts: list[str], place: list[int]) -> None:
    run_fresh(over_hosts, len(place), hosts, place, env=TCP, timeout=120)


@pytest.mark.skipif(bool(ucx.missing()), reason=ucx.missing())
def test_rows_between_hosts_by_ucx(hosts: list[str]) -> None:
    run_fresh(over_hosts, 2, hosts, [0, 1], env={**TCP, **ucx.BY_UCX}, timeout=120)


def wrong(ctx: Context) -> None:
    ours = groups.backend_of(dist.group.WORLD)
    rows, all_rows = torch.ones(4, 3), torch.arange(4)
    to, each = torch.zeros(4, 3), [2, 2]

    def raised(*given: Any) -> str:
        return expect_raises(ValueError, lambda: ours._all_to_all_rows(*given, False))

    assert "input has no row 4, it has 4 rows" in raised(to, None, each, rows, torch.tensor([0, 1, 2, 4]), each)
    assert "output has no row -1" in raised(to, torch.tensor([-1, 1, 2, 3]), each, rows, None, each)
    assert "row 2 of output would be written twice" in raised(to, torch.tensor([0, 2, 1, 2]), each, rows, None, each)
    assert "input and output share memory" in raised(rows[:2], None, [1, 1], rows, torch.tensor([2, 3]), [1, 1])
    assert "expected a contiguous list of int64" in raised(to, None, each, rows, all_rows.int(), each)
    assert "expected a contiguous list of int64" in raised(to, None, each, rows, torch.arange(8)[::2], each)
    assert "does not have contiguous rows" in raised(to, None, each, torch.ones(3, 4).t(), all_rows, each)
    assert "input split sizes has 0 entries, the group has 2 ranks" in raised(to, None, each, rows, all_rows, [])
    assert "add up to 3" in raised(to, None, each, rows, all_rows, [1, 2])
    assert "float64" in raised(to, None, each, rows.double(), all_rows, each)
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as wrapped

    assert "own __torch_dispatch__" in raised(to, None, each, wrapped(rows), all_rows, each)
    assert "own __torch_dispatch__" in raised(to, None, each, rows, wrapped(all_rows), each)
    other = 1 - dist.get_rank()
    found = expect_raises(ValueError, lambda: ours._send_rows(rows, torch.tensor([4]), other, 0))
    assert "send: tensor has no row 4, it has 4 rows" in found
    found = expect_raises(ValueError, lambda: ours._recv_rows(to, torch.tensor([1, 1]), other, 0))
    assert "recv: row 1 of tensor would be written twice" in found
    assert torch.equal(to, torch.zeros(4, 3)), "nothing was exchanged"
    ours._all_to_all_rows(to, all_rows.flip(0), each, rows, all_rows, each, False)
    assert torch.equal(to, rows)


def test_wrong_rows_are_refused_before_anything_is_sent() -> None:
    run_ranks(wrong, 2)


def served_by_gloo(ctx: Context) -> None:
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(engine="delegate"))
    ours, to, rows = groups.backend_of(dist.group.WORLD), torch.zeros(2, 3), torch.ones(2, 3)
    found = expect_raises(
        ValueError, lambda: ours._all_to_all_rows(to, None, [1, 1], rows, torch.arange(2), [1, 1], False)
    )
    assert "a delegate serves the group, which cannot pick rows" in found


def test_a_group_that_gloo_serves_refuses_rows() -> None:
    run_fresh(served_by_gloo, 2)
