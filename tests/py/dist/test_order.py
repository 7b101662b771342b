"""The order of one rank's own calls, and disagreements between ranks: barriers, lists, messages, shared memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_fresh, run_ranks

# Numbers of float32 elements: below and above the capacity of a slot, and more than a stage buffer holds.
SIZES = [8, 1000, 10_000, 1 << 19]


def barrier_implies_wait(ctx: Context, size: int, how: str) -> None:
    """Drops the Works of collectives and calls a barrier. Afterwards their results must be complete."""
    n = ctx.world_size
    for turn in range(5):
        tensors = [torch.full((size,), float(i + turn)) for i in range(16)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        if how == "sync":
            dist.barrier()
        else:
            work: Any = dist.barrier(async_op=True)
            work.wait()
        wrong = [i for i, tensor in enumerate(tensors) if not bool((tensor == (i + turn) * n).all())]
        assert not wrong, f"{size} elements, turn {turn}: operations {wrong} had not ended"


@pytest.mark.quick
@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("size", SIZES)
def test_rule_33_a_barrier_ends_behind_every_earlier_collective(size: int, how: str) -> None:
    """Rule 33: operations issued before a barrier have ended when it ends. gloo does the same, and nccl by the order of
    its stream."""
    run_ranks(barrier_implies_wait, 3, size, how)


def barrier_on_a_delegate(ctx: Context, size: int) -> None:
    """Rule 33 in a group that gloo serves."""
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(engine="delegate"))
    barrier_implies_wait(ctx, size, "sync")
    dist.destroy_process_group()


@beyond_gloo("it is the delegate")
def test_rule_33_a_barrier_ends_behind_every_earlier_collective_of_a_delegate() -> None:
    """Rule 33: a delegate's own barrier waits for the operations that were issued before it."""
    run_fresh(barrier_on_a_delegate, 2, 10_000)


def barrier_behind_sparse(ctx: Context) -> None:
    """A sparse all_reduce consists of messages, for which a barrier alone would not wait."""
    for turn in range(5):
        tensor = torch.eye(200).mul(turn + 1).to_sparse()
        dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        assert torch.equal(tensor.to_dense(), torch.eye(200) * (turn + 1) * ctx.world_size)


def test_rule_33_a_barrier_ends_behind_sparse_all_reduces() -> None:
    """Rule 33 for the one collective that the core does not see as one operation."""
    run_ranks(barrier_behind_sparse, 3)


# ------------------------------------------------------------------------------------------------ disagreement


def uneven_all_gather(ctx: Context, lists: list[list[int]]) -> str:
    """Calls all_gather; each rank passes its own list of sizes."""
    sizes = lists[ctx.rank]
    outputs = [torch.full((size,), -9.0) for size in sizes]
    text = expect_raises(RuntimeError, lambda: dist.all_gather(outputs, torch.zeros(sizes[ctx.rank])))
    touched = [rank for rank, output in enumerate(outputs) if rank != ctx.rank and not bool((output == -9).all())]
    assert not touched, f"blocks of ranks {touched} were written"
    expect_raises(RuntimeError, dist.barrier)
    return text


def uneven_reduce_scatter(ctx: Context, lists: list[list[int]]) -> str:
    """Calls reduce_scatter; each rank passes its own list of sizes."""
    sizes = lists[ctx.rank]
    output = torch.full((sizes[ctx.rank],), -9.0)
    text = expect_raises(RuntimeError, lambda: dist.reduce_scatter(output, [torch.zeros(size) for size in sizes]))
    assert bool((output == -9).all()), "the result was written"
    expect_raises(RuntimeError, dist.barrier)
    return text


def in_fresh_group(ctx: Context, call: Callable[[Context, list[list[int]]], str], lists: list[list[int]]) -> str:
    """Runs the call in a new default group, because the disagreement ends the group."""
    ctx.init(timeout=timedelta(seconds=10))
    try:
        return call(ctx, lists)
    finally:
        dist.destroy_process_group()


@beyond_gloo("it does not compare lists")
@pytest.mark.parametrize("call", [uneven_all_gather, uneven_reduce_scatter], ids=["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("unit", [8, 1 << 18])
def test_rule_05_lists_of_sizes_that_differ_are_found(call: Callable[..., str], unit: int) -> None:
    """Rule 5: the difference is found at every size and on every rank, even if the sums are equal. It is found before a
    rank writes data of another rank."""
    for lists in ([[unit, unit], [unit // 2, unit + unit // 2]], [[unit, 2 * unit], [2 * unit, unit]]):
        for text in run_fresh(in_fresh_group, 2, call, lists):
            assert "list of sizes" in text or "lists of sizes" in text, text


# ------------------------------------------------------------------------------------------------ messages


def message_and_collective(ctx: Context, size: int) -> None:
    """An isend of memory that a collective is writing, and a collective that reads memory into which an irecv
    writes."""
    if ctx.rank == 0:
        tensor = torch.ones(size)
        works: list[Any] = [dist.all_reduce(tensor, async_op=True), dist.isend(tensor, 1)]
        for work in works:
            work.wait()
        tensor = torch.zeros(size)
        works = [dist.irecv(tensor, 1), dist.broadcast(tensor, 0, async_op=True)]
        for work in works:
            work.wait()
        assert bool((tensor == 5).all())
    else:
        time.sleep(0.1)
        tensor = torch.ones(size)
        dist.all_reduce(tensor)
        dist.recv(tensor, 0)
        assert bool((tensor == 2).all()), f"a message of {tensor[0]} overtook the all_reduce"
        time.sleep(0.1)
        dist.send(torch.full((size,), 5.0), 0)
        dist.broadcast(tensor, 0)
        assert bool((tensor == 5).all()), f"a broadcast of {tensor[0]} overtook the message"


@beyond_gloo("it orders nothing by memory")
@pytest.mark.parametrize("size", SIZES)
def test_rule_04_messages_and_collectives_on_the_same_memory_run_in_order(size: int) -> None:
    """Rule 4 holds between messages and collectives, in both orders."""
    run_ranks(message_and_collective, 2, size)


def strided_relay(ctx: Context, size: int) -> None:
    """Rank 0 issues a send of a matrix column that it has not received yet."""
    matrix = torch.full((size, 2), float(ctx.rank))
    if ctx.rank == 0:
        works: list[Any] = [dist.irecv(matrix[:, 1], 1), dist.isend(matrix[:, 1], 1, tag=1)]
        for work in works:
            work.wait()
        assert bool((matrix[:, 0] == 0).all())
    else:
        time.sleep(0.05)
        dist.send(matrix[:, 0], 0)
        dist.recv(matrix[:, 1].zero_(), 0, tag=1)
        assert bool((matrix == 1).all())


@beyond_gloo("it orders nothing by memory")
@pytest.mark.parametrize("size", SIZES)
def test_rule_04_messages_on_the_same_memory_run_in_order(size: int) -> None:
    """Rule 4 between two messages that use the same memory."""
    run_ranks(strided_relay, 2, size)


def columns(ctx: Context, size: int) -> None:
    """Neighbours exchange interleaved columns of their matrices, once with the receives first and once with the sends
    first."""
    other = 1 - ctx.rank
    for receives_first in (True, False):
        field = torch.full((size, 4), float(ctx.rank))
        calls: list[Callable[[], Any]] = [
            lambda field=field: dist.irecv(field[:, 0], other, tag=0),
            lambda field=field: dist.irecv(field[:, 3], other, tag=1),
            lambda field=field: dist.isend(field[:, 1], other, tag=0),
            lambda field=field: dist.isend(field[:, 2], other, tag=1),
        ]
        for work in [call() for call in (calls if receives_first else calls[::-1])]:
            work.wait()
        assert field[:, 0].eq(other).all() and field[:, 3].eq(other).all() and field[:, 1:3].eq(ctx.rank).all()


def swapped(ctx: Context, size: int) -> None:
    """Each rank sends a tensor and receives into the same tensor."""
    tensor = torch.full((size,), float(ctx.rank))
    works: list[Any] = [dist.isend(tensor, 1 - ctx.rank), dist.irecv(tensor, 1 - ctx.rank)]
    for work in works:
        work.wait()
    assert bool((tensor == 1 - ctx.rank).all())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("exchange", [columns, swapped], ids=["columns", "swapped"])
@beyond_gloo("it takes no strided tensors and promises nothing about buffers in use")
def test_rule_04_holds_nothing_back_that_only_lies_near(exchange: Callable[..., None], size: int) -> None:
    """Rule 4 compares elements, not the address ranges of strided tensors. A send keeps its data although a later
    operation overwrites the tensor."""
    run_ranks(exchange, 2, size)


# ------------------------------------------------------------------------------------------------ lists


def lists_that_share_memory(ctx: Context, size: int) -> None:
    """A list that contains the same memory twice is refused before anything is sent, at every size, so the group stays
    usable."""
    warnings.simplefilter("ignore", FutureWarning)
    n = ctx.world_size
    one, wide, whole = torch.ones(size), torch.ones(n * size), torch.ones(3, size)
    text = expect_raises(ValueError, lambda: dist.all_reduce_coalesced([one, whole[0], one]))
    assert "tensors 0 and 2" in text and "share memory" in text, text
    expect_raises(ValueError, lambda: dist.all_reduce_coalesced([whole[:2], whole[1:]]))

    def gathered() -> None:
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(wide, one)
            dist.all_gather_into_tensor(wide, whole[0])

    assert "share memory" in expect_raises(ValueError, gathered)

    def chained() -> None:
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(wide, one)
            dist.all_gather_into_tensor(torch.empty(n * size), wide[:size])

    assert "output tensor 0 and input tensor 1" in expect_raises(ValueError, chained)

    def reduced() -> None:
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(one, wide)
            dist.reduce_scatter_tensor(one, torch.ones(n * size))

    assert "share memory" in expect_raises(ValueError, reduced)
    # Interleaved columns share no elements, so this list is allowed, and the group is usable.
    columns = torch.full((size, 2), 1.0)
    dist.all_reduce_coalesced([columns[:, 0], columns[:, 1]])
    assert bool((columns == n).all())


@beyond_gloo("it has no such check")
@pytest.mark.parametrize("size", SIZES)
def test_lists_that_share_memory_are_refused_at_every_size(size: int) -> None:
    """A list is one operation: with memory that occurs twice, the result would depend on the size."""
    run_ranks(lists_that_share_memory, 2, size)


def outputs_that_share_memory(ctx: Context, size: int) -> None:
    """A program that does not need the results may pass one tensor as every output. The last result remains, as with
    gloo."""
    n = ctx.world_size
    out = torch.empty(size)
    dist.all_gather([out] * n, torch.full((size,), float(ctx.rank)))
    assert bool((out == n - 1).all()), out
    dist.gather(torch.full((size,), float(ctx.rank)), [out] * n if ctx.rank == 0 else None)
    assert ctx.rank > 0 or bool((out == n - 1).all())
    own = torch.full((n * size,), float(ctx.rank))
    dist.all_gather(list(own.chunk(n)), own[:size])
    assert own.reshape(n, size)[:, 0].tolist() == [float(rank) for rank in range(n)]


@pytest.mark.parametrize("size", SIZES)
def test_outputs_that_share_memory_are_stored_in_rank_order(size: int) -> None:
    """The result is that of one call per rank, in rank order, at every size."""
    run_ranks(outputs_that_share_memory, 3, size)
