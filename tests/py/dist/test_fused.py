"""`fused_all_reduce`, explicit lists and many operations in flight give the bits of one all_reduce per tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_ranks
from on_device import number
from reference import make, same_bits

SHAPES: list[tuple[int, ...]] = [(3,), (0,), (), (70_000,), (5, 7), (1,), (300_000,)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float32, torch.float64, torch.bfloat16]


def lists(rank: int) -> list[torch.Tensor]:
    return [
        make(DTYPES[i % len(DTYPES)], max(torch.Size(shape).numel(), 0), rank + 10 * i).reshape(shape)
        for i, shape in enumerate(SHAPES * 2)
    ]


def fused(ctx: Context) -> None:
    import torch_sagellm

    for op in ("sum", "max", dist.ReduceOp.MIN):
        alone = lists(ctx.rank)
        for tensor in alone:
            dist.all_reduce(tensor, op if not isinstance(op, str) else getattr(dist.ReduceOp, op.upper()))
        together = lists(ctx.rank)
        given = list(together)
        before = number()
        returned = torch_sagellm.fused_all_reduce(together, op)
        taken = number() - before
        assert taken == len(set(DTYPES)), f"one operation a dtype, through c10d: {taken}"
        assert all(a is b for a, b in zip(returned, given, strict=True)), "the same tensors, in place"
        for one, other in zip(together, alone, strict=True):
            same_bits(one, other, f"fused {op} of {one.shape} {one.dtype}")
    assert torch_sagellm.fused_all_reduce([]) == []
    assert torch_sagellm.fused_all_reduce([torch.empty(0)])[0].numel() == 0
    columns = torch.arange(12.0).reshape(3, 4)
    torch_sagellm.fused_all_reduce([columns[:, 0], columns[:, 2].unsqueeze(0)], "avg")
    assert columns.tolist() == torch.arange(12.0).reshape(3, 4).tolist(), "the average of equal numbers"
    half = dist.new_group([0, 1])
    if ctx.rank < 2:
        pair = torch_sagellm.fused_all_reduce([torch.ones(2)], group=half)
        assert pair[0].tolist() == [2.0, 2.0]


@beyond_gloo("fused_all_reduce over mixed lists")
@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_17_and_30_fused_all_reduce_gives_the_bits_of_single_calls(world_size: int) -> None:
    """Rules 17 and 30: fused or not, the bits and numbers are the same, for lists of any dtypes, sizes and strides, and
    for empty lists."""
    run_ranks(fused, world_size)


def asynchronous(ctx: Context) -> None:
    import torch_sagellm

    comm = torch_sagellm.create_comm_backend()
    for op in ("sum", "max"):
        alone = torch_sagellm.fused_all_reduce(lists(ctx.rank), op)
        given = [lists(ctx.rank) for _ in range(4)]
        futures = [torch_sagellm.fused_all_reduce(each, op, async_op=True) for each in given[:2]]
        futures += [comm.fused_all_reduce(each, op, async_op=True) for each in given[2:]]
        counted = futures[0].then(lambda ended: len(ended.value()))
        for each, future in zip(given, futures, strict=True):
            assert isinstance(future, torch_sagellm.CommListFuture)
            for one, own, other in zip(future.wait(), each, alone, strict=True):
                assert one is own, "the same tensors, in place"
                same_bits(one, other, f"asynchronous {op} of {one.shape} {one.dtype}")
            assert future.done()
        assert counted.wait() == len(SHAPES) * 2
    assert torch_sagellm.fused_all_reduce([], async_op=True).wait() == []
    group, last = dist.new_group(), [torch.ones(3)]  # a separate group, because the error ends the group
    if ctx.rank == 0:  # rank 1 makes another call: the future raises what the synchronous form would raise
        future = torch_sagellm.fused_all_reduce(last, group=group, async_op=True)
        said = expect_raises(dist.DistBackendError, future.wait)
        assert "broadcast" in said, said
    else:
        expect_raises(dist.DistBackendError, lambda: dist.broadcast(torch.ones(3), 0, group=group))


@beyond_gloo("asynchronous fused_all_reduce")
@pytest.mark.quick
def test_rule_17_an_asynchronous_list_gives_the_same_bits_and_its_future_the_list_or_the_error() -> None:
    """Rule 17: asynchronous or not, the bits are the same."""
    run_ranks(asynchronous, 2)


def refused(ctx: Context) -> None:
    import torch_sagellm

    whole = torch.ones(10)
    wrong: Any = [whole, [1.0]]
    cases: list[tuple[Any, str, str]] = [
        ([whole[:6], whole[4:]], "sum", "tensors 0 and 1 share memory"),
        ([whole], "xor", "op='xor', expected one of sum, avg"),
        (wrong, "sum", "element 1 is a list"),
        (whole, "sum", "tensors is one tensor, expected a list of them"),
        ([whole], "bxor", "not defined for float32"),
    ]
    for tensors, op, expected in cases:
        said = expect_raises(
            (ValueError, TypeError, RuntimeError),
            lambda: torch_sagellm.fused_all_reduce(tensors, op),  # noqa: B023
        )
        assert expected in said, said
    dist.all_reduce(whole)  # nothing was sent, so the group is usable
    assert whole.tolist() == [float(ctx.world_size)] * 10


@beyond_gloo("refusals of fused_all_reduce")
def test_rule_02_a_refused_list_sends_nothing() -> None:
    """Rule 2: wrong lists are refused on the calling rank and use no sequence number."""
    run_ranks(refused, 2)


def many(ctx: Context, fusion: bool) -> None:
    from torch_sagellm import Options

    group = dist.new_group(pg_options=Options(fusion=fusion))
    tensors = [torch.full((512,), float(ctx.rank + i)) for i in range(1000)]
    works: list[Any] = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for i in range(999, -1, -1):
        works[i].wait()
    base = sum(range(ctx.world_size))
    for i, tensor in enumerate(tensors):
        assert tensor.eq(float(base + i * ctx.world_size)).all(), f"operation {i}"


@beyond_gloo("the option fusion")
@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_rule_14_many_operations_in_flight(world_size: int, fusion: bool) -> None:
    """Rule 14: one pass fuses all pending operations. Without fusion they run one by one, with the same results."""
    run_ranks(many, world_size, fusion)
