"""Every collective in every form against a plain reference computed from all ranks' inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import BULK, SIZES, expected_sum, inputs_of, op_of, same_reduced
from harness import IS_GLOO, Context, beyond_gloo, expect_raises, monitored_barrier, run_fresh, run_ranks
from reference import GLOO_REDUCIBLE, MOVABLE, REDUCIBLE, fold, make, ops_of, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

WORLDS = [1, 2, 3, 4]
DTYPES = GLOO_REDUCIBLE if IS_GLOO else REDUCIBLE
MOVED = GLOO_REDUCIBLE if IS_GLOO else MOVABLE


def _cases(dtype: torch.dtype) -> list[str]:
    return [op for op in ops_of(dtype) if not (IS_GLOO and (op == "AVG" or dtype == torch.bool))]


# ------------------------------------------------------------------------------------------------ reductions


def all_reduce_every_op(ctx: Context, dtype: torch.dtype, sizes: list[int]) -> None:
    """All ops of one dtype, in place, synchronous and asynchronous."""
    for seed, count in enumerate(sizes):
        for op in _cases(dtype):
            inputs = inputs_of(ctx.world_size, dtype, count, seed)
            expected = fold(op, inputs)
            found = inputs[ctx.rank].clone()
            dist.all_reduce(found, op_of(op))
            same_reduced(found, expected, f"all_reduce {op} {dtype} x{count}")
            found = inputs[ctx.rank].clone()
            work = dist.all_reduce(found, op_of(op), async_op=True)
            assert work is not None
            work.wait()
            same_reduced(found, expected, f"async all_reduce {op} {dtype} x{count}")


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_every_dtype_and_op_rule_17(dtype: torch.dtype, world_size: int) -> None:
    """Rule 17: every element is reduced in rank order, low precision in f32 with one rounding. The sizes are just
    above a cache line and a slot."""
    run_ranks(all_reduce_every_op, world_size, dtype, [0, 1, 3, 65, 1025, 4097])


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_all_reduce_world_of_one_and_four(dtype: torch.dtype, world_size: int) -> None:
    """The smallest and the largest world size tested here."""
    run_ranks(all_reduce_every_op, world_size, dtype, SIZES)


def all_reduce_sizes(ctx: Context, dtype: torch.dtype, sizes: list[int]) -> None:
    """Sums tensors of several sizes, each size twice with different numbers."""
    for seed, count in enumerate(sizes):
        for turn in range(2):
            inputs = inputs_of(ctx.world_size, dtype, count, seed + 100 * turn)
            found = inputs[ctx.rank].clone()
            dist.all_reduce(found)
            same_reduced(found, fold("SUM", inputs), f"{dtype} x{count}")


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_reduce_bulk(dtype: torch.dtype, world_size: int) -> None:
    """Large tensors of odd size."""
    run_ranks(all_reduce_sizes, world_size, dtype, BULK)


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_around_every_size_boundary(world_size: int) -> None:
    """Byte counts one below, at and one above every power of two from 64 B to 256 KiB."""
    sizes = [(1 << power) + step for power in range(6, 19) for step in (-1, 0, 1)]
    run_ranks(all_reduce_sizes, world_size, torch.uint8, sizes)


def bits_do_not_depend_on_size(ctx: Context) -> None:
    count = 300_001
    inputs = inputs_of(ctx.world_size, torch.float32, count, 5)
    whole = inputs[ctx.rank].clone()
    dist.all_reduce(whole)
    for start, end in [(0, 1), (1, 64), (777, 5000), (100_000, 299_999)]:
        part = inputs[ctx.rank][start:end].clone()
        dist.all_reduce(part)
        same_bits(part, whole[start:end], f"elements {start}..{end} alone and within {count}")
    copies: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(copies, whole.numpy().tobytes())
    assert all(each == copies[0] for each in copies), "ranks hold different bits"


@beyond_gloo("its ring combines in an order that depends on the place")
@pytest.mark.quick
@pytest.mark.parametrize("world_size", [3, 4])
def test_rule_17_bits_do_not_depend_on_size_or_chunk(world_size: int) -> None:
    """Rule 17 and pitfall 14: an element has the same bits alone and inside a large tensor, on every rank."""
    run_ranks(bits_do_not_depend_on_size, world_size)


def premul(ctx: Context) -> None:
    factors = [0.5 + 0.3 * rank for rank in range(ctx.world_size)]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for count in (1, 129, 5000):
            inputs = inputs_of(ctx.world_size, dtype, count, 3)
            expected = fold("PREMUL_SUM", inputs, factors)
            found = inputs[ctx.rank].clone()
            dist.all_reduce(found, op_of("PREMUL_SUM", factors[ctx.rank]))
            same_bits(found, expected, f"premul {dtype} x{count}")
            out = torch.empty(count, dtype=dtype)
            whole = torch.cat([make(dtype, count, 7 * ctx.rank + part) for part in range(ctx.world_size)])
            dist.reduce_scatter_tensor(out, whole, op_of("PREMUL_SUM", factors[ctx.rank]))
            mine = [make(dtype, count, 7 * rank + ctx.rank) for rank in range(ctx.world_size)]
            same_bits(out, fold("PREMUL_SUM", mine, factors), f"premul reduce_scatter {dtype} x{count}")


@beyond_gloo("no PREMUL_SUM")
@pytest.mark.parametrize("world_size", [2, 3])
def test_premul_sum_with_a_factor_of_each_rank(world_size: int) -> None:
    """PREMUL_SUM multiplies each rank's numbers by that rank's factor."""
    run_ranks(premul, world_size)


def nan_and_zero(ctx: Context) -> None:
    value = torch.tensor([float("nan"), 1.0, -0.0, 0.0, float("inf")])
    other = torch.tensor([2.0, float("nan"), 0.0, -0.0, float("-inf")])
    for op, zero in (("MAX", 0.0), ("MIN", -0.0)):
        found = (value if ctx.rank == 0 else other).clone()
        dist.all_reduce(found, op_of(op))
        assert found[:2].isnan().all(), (op, found)
        same_bits(found[2:4], torch.tensor([zero, zero]), op)
    found = (value if ctx.rank == 0 else other).clone()
    dist.all_reduce(found)
    assert found[[0, 1, 4]].isnan().all() and not found[2:4].any()


@beyond_gloo("MAX of NaN depends on the order")
def test_nan_is_never_lost_and_zeros_have_one_order() -> None:
    """A NaN of any rank reaches every rank; -0 counts as smaller than +0."""
    run_ranks(nan_and_zero, 2)


def reduce_to_each_root(ctx: Context) -> None:
    for root in range(ctx.world_size):
        for count in (0, 1, 1025, 70_001):
            for op in ("SUM", "MAX"):
                inputs = inputs_of(ctx.world_size, torch.float32, count, root)
                found = inputs[ctx.rank].clone()
                dist.reduce(found, root, op_of(op))
                if ctx.rank == root:
                    same_reduced(found, fold(op, inputs), f"reduce {op} to {root} x{count}")


@pytest.mark.quick
@pytest.mark.parametrize("world_size", WORLDS)
def test_reduce_to_each_root(world_size: int) -> None:
    """Every rank is the root in turn."""
    run_ranks(reduce_to_each_root, world_size)


def reduce_leaves_inputs(ctx: Context) -> None:
    inputs = inputs_of(ctx.world_size, torch.float32, 513, 1)
    found = inputs[ctx.rank].clone()
    dist.reduce(found, 0)
    if ctx.rank != 0:
        same_bits(found, inputs[ctx.rank], "a rank that is not the root")


@beyond_gloo("its reduce overwrites the inputs of other ranks")
def test_reduce_leaves_the_tensor_of_other_ranks_alone() -> None:
    """Like with NCCL, only the root's tensor changes."""
    run_ranks(reduce_leaves_inputs, 3)


def reduce_scatters(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    for dtype in (torch.float32, torch.float16, torch.int32):
        for op in ("SUM", "MAX"):
            for count in (0, 1, 77, 4096, 90_001):
                blocks = [[make(dtype, count, 50 * rank + part) for part in range(n)] for rank in range(n)]
                expected = fold(op, [blocks[rank][me] for rank in range(n)])
                what = f"reduce_scatter {op} {dtype} x{count}"
                out = torch.empty(count, dtype=dtype)
                dist.reduce_scatter(out, [each.clone() for each in blocks[me]], op_of(op))
                same_reduced(out, expected, what + " list")
                out = torch.empty(count, dtype=dtype)
                work = dist.reduce_scatter_tensor(out, torch.cat(blocks[me]), op_of(op), async_op=True)
                work.wait()
                same_reduced(out, expected, what + " single")
                if IS_GLOO:
                    continue  # gloo refuses the stacked input
                stacked = torch.stack(blocks[me])
                out = torch.empty(count, dtype=dtype)
                dist.reduce_scatter_tensor(out, stacked, op_of(op))
                same_reduced(out, expected, what + " stacked")


@pytest.mark.quick
@pytest.mark.parametrize("world_size", WORLDS)
def test_reduce_scatter_list_single_stacked(world_size: int) -> None:
    """Every form of reduce_scatter with equal blocks."""
    run_ranks(reduce_scatters, world_size)


def reduce_scatter_in_place(ctx: Context) -> None:
    n, count = ctx.world_size, 999
    blocks = [[make(torch.float32, count, 9 * rank + part) for part in range(n)] for rank in range(n)]
    whole = torch.cat(blocks[ctx.rank])
    out = whole[ctx.rank * count : (ctx.rank + 1) * count]
    dist.reduce_scatter_tensor(out, whole)
    same_reduced(out, fold("SUM", [blocks[rank][ctx.rank] for rank in range(n)]), "in place")


@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_scatter_into_its_own_input(world_size: int) -> None:
    """The output may be this rank's block of the input; FSDP passes it this way."""
    run_ranks(reduce_scatter_in_place, world_size)


def uneven_reduce_scatter(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    for scale in (1, 5000):
        sizes = [scale * (part + (1 if part else 0)) for part in range(n)]
        blocks = [[make(torch.float32, sizes[part], 31 * rank + part) for part in range(n)] for rank in range(n)]
        out = torch.empty(sizes[me])
        dist.reduce_scatter(out, [each.clone() for each in blocks[me]])
        same_reduced(out, fold("SUM", [blocks[rank][me] for rank in range(n)]), f"uneven {sizes}")


@beyond_gloo("equal blocks only")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reduce_scatter_of_uneven_blocks(world_size: int) -> None:
    """Lists of unequal blocks, one of them empty, work as with NCCL."""
    run_ranks(uneven_reduce_scatter, world_size)


def coalesced(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    counts = [0, 1, 130, 70_000]
    inputs = [inputs_of(n, torch.float32, count, 40 + i) for i, count in enumerate(counts)]
    tensors = [each[me].clone() for each in inputs]
    dist.all_reduce_coalesced(tensors)
    for found, each in zip(tensors, inputs, strict=True):
        same_reduced(found, fold("SUM", each), "all_reduce_coalesced")

    tensors = [each[me].clone() for each in inputs]
    with dist._coalescing_manager():
        for each in tensors:
            dist.all_reduce(each)
    for found, each in zip(tensors, inputs, strict=True):
        same_reduced(found, fold("SUM", each), "coalescing manager, all_reduce")

    tensors = [each[me].clone() for each in inputs]
    with dist._coalescing_manager(async_ops=True) as manager:
        for each in tensors:
            dist.all_reduce(each)
    manager.wait()
    for found, each in zip(tensors, inputs, strict=True):
        same_reduced(found, fold("SUM", each), "async coalescing manager, all_reduce")

    outputs = [torch.empty(n * count) for count in counts]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, each in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(out, each[me])
    manager.wait()
    for out, each in zip(outputs, inputs, strict=True):
        same_bits(out, torch.cat(each), "coalescing manager, all_gather")

    outputs = [torch.empty(count) for count in counts]
    blocks = [[[make(torch.float32, c, 77 * r + p) for p in range(n)] for r in range(n)] for c in counts]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, each in zip(outputs, blocks, strict=True):
            dist.reduce_scatter_tensor(out, torch.cat(each[me]))
    manager.wait()
    for out, each in zip(outputs, blocks, strict=True):
        same_reduced(out, fold("SUM", [each[r][me] for r in range(n)]), "coalescing manager, reduce_scatter")


@pytest.mark.quick
@pytest.mark.parametrize("world_size", WORLDS)
def test_coalesced_forms(world_size: int) -> None:
    """all_reduce_coalesced and the three fast paths of the coalescing manager, with an empty tensor in each list."""
    run_ranks(coalesced, world_size)


def coalesced_mixed(ctx: Context) -> None:
    floats, ints = torch.ones(5) * (ctx.rank + 1), torch.ones(3, dtype=torch.int64)
    text = expect_raises((ValueError, RuntimeError), lambda: dist.all_reduce_coalesced([floats, ints]))
    assert text
    dist.all_reduce(floats)
    same_bits(floats, torch.ones(5) * 3, "after the refused call")


def test_coalesced_of_mixed_dtypes_is_refused_locally() -> None:
    """A list of several dtypes is refused before anything is sent, and the group stays usable."""
    run_ranks(coalesced_mixed, 2)


def all_gather_coalesced(ctx: Context) -> None:
    import warnings

    n = ctx.world_size
    shapes = [(3,), (2, 5), (0,), (1000,)]
    inputs = [[make(torch.float32, _numel(s), 6 * r + i).reshape(s) for i, s in enumerate(shapes)] for r in range(n)]
    outputs = [[torch.empty(s) for s in shapes] for _ in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(outputs, inputs[ctx.rank])
    for rank in range(n):
        for found, each in zip(outputs[rank], inputs[rank], strict=True):
            same_bits(found, each, "all_gather_coalesced")


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for each in shape:
        count *= each
    return count


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_coalesced_list_of_lists(world_size: int) -> None:
    """The deprecated form that takes a list of lists."""
    run_ranks(all_gather_coalesced, world_size)


def sparse(ctx: Context) -> None:
    n = ctx.world_size
    dense = torch.zeros(10, 3)
    parts = []
    for rank in range(n):
        rows = torch.tensor([[rank, rank + 2, 5]])
        parts.append(torch.sparse_coo_tensor(rows, torch.full((3, 3), rank + 1.0), (10, 3)))
        dense += parts[-1].to_dense()
    found = parts[ctx.rank].clone()
    dist.all_reduce(found)
    same_bits(found.to_dense(), dense, "sparse all_reduce")
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 3), (10, 3))
    dist.all_reduce(empty)
    same_bits(empty.to_dense(), torch.zeros(10, 3), "sparse all_reduce of nothing")
    uneven = parts[ctx.rank].clone() if ctx.rank == 0 else empty.clone()
    dist.all_reduce(uneven)
    same_bits(uneven.to_dense(), parts[0].to_dense(), "sparse all_reduce with rows on one rank only")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce_of_sparse_tensors(world_size: int) -> None:
    """On CPU a sparse tensor is passed to the plain allreduce, as for Embedding(sparse=True) under DDP. Ranks may have
    different numbers of rows."""
    run_ranks(sparse, world_size)


# ------------------------------------------------------------------------------------------------ movement


def broadcasts(ctx: Context, dtype: torch.dtype) -> None:
    for root in range(ctx.world_size):
        for count in (0, 1, 5, 1025, 66_000):
            inputs = inputs_of(ctx.world_size, dtype, count, root)
            found = inputs[ctx.rank].clone()
            dist.broadcast(found, root)
            same_bits(found, inputs[root], f"broadcast {dtype} x{count} from {root}")


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_broadcast_every_dtype(dtype: torch.dtype, world_size: int) -> None:
    """Pitfall 13: float8, wide unsigned and complex tensors can be moved."""
    run_ranks(broadcasts, world_size, dtype)


def gathers(ctx: Context, dtype: torch.dtype) -> None:
    n, me = ctx.world_size, ctx.rank
    for count in (0, 1, 5, 1025, 66_000):
        inputs = inputs_of(n, dtype, count, 2)
        outputs = [torch.empty_like(inputs[0]) for _ in range(n)]
        dist.all_gather(outputs, inputs[me])
        for rank in range(n):
            same_bits(outputs[rank], inputs[rank], f"all_gather {dtype} x{count}")
        whole = torch.empty(n * count, dtype=dtype)
        dist.all_gather_into_tensor(whole, inputs[me])
        for rank in range(n):
            same_bits(whole[rank * count : (rank + 1) * count], inputs[rank], f"all_gather single {dtype}")
        for root in range(n):
            outputs = [torch.empty_like(inputs[0]) for _ in range(n)]
            dist.gather(inputs[me], outputs if me == root else None, dst=root)
            for rank in range(n if me == root else 0):
                same_bits(outputs[rank], inputs[rank], f"gather {dtype} x{count} at {root}")
            found = torch.empty_like(inputs[0])
            parts = [make(dtype, count, 60 + root + 5 * part) for part in range(n)]
            dist.scatter(found, parts if me == root else None, src=root)
            same_bits(found, parts[me], f"scatter {dtype} x{count} from {root}")


@pytest.mark.quick
@pytest.mark.parametrize("world_size", WORLDS)
def test_gather_scatter_all_gather(world_size: int) -> None:
    """List and single forms; every rank is the root of one call."""
    run_ranks(gathers, world_size, torch.float32)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_gather_scatter_all_gather_every_dtype(dtype: torch.dtype) -> None:
    """Pitfall 13 for gather, scatter and all_gather."""
    run_ranks(gathers, 2, dtype)


def all_gather_shapes(ctx: Context) -> None:
    n = ctx.world_size
    inputs = [make(torch.float32, 12, rank).reshape(3, 4) for rank in range(n)]
    for shape in [(n * 3, 4), (n, 3, 4), (n * 12,)]:
        out = torch.empty(shape)
        dist.all_gather_into_tensor(out, inputs[ctx.rank])
        same_bits(out.reshape(n, 3, 4), torch.stack(inputs), f"output shape {shape}")


@beyond_gloo("refuses the stacked shape")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_single_concatenated_and_stacked(world_size: int) -> None:
    """Pitfall 13: the output may be concatenated or stacked."""
    run_ranks(all_gather_shapes, world_size)


def all_gather_in_place(ctx: Context) -> None:
    n, count = ctx.world_size, 3001
    inputs = inputs_of(n, torch.float32, count, 8)
    whole = torch.zeros(n * count)
    mine = whole[ctx.rank * count : (ctx.rank + 1) * count]
    mine.copy_(inputs[ctx.rank])
    dist.all_gather_into_tensor(whole, mine)
    same_bits(whole, torch.cat(inputs), "in place")


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gather_in_place(world_size: int) -> None:
    """The input is this rank's part of the output; FSDP passes it this way."""
    run_ranks(all_gather_in_place, world_size)


def uneven_all_gather(ctx: Context) -> None:
    n = ctx.world_size
    for scale in (1, 30_000):
        inputs = [make(torch.float32, scale * rank, rank) for rank in range(n)]
        outputs = [torch.empty(scale * rank) for rank in range(n)]
        dist.all_gather(outputs, inputs[ctx.rank])
        for rank in range(n):
            same_bits(outputs[rank], inputs[rank], f"uneven all_gather x{scale * rank}")


@beyond_gloo("equal blocks only")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_gather_of_uneven_blocks(world_size: int) -> None:
    """Lists of unequal blocks, one of them empty, work as with NCCL."""
    run_ranks(uneven_all_gather, world_size)


def gather_single(ctx: Context) -> None:
    n = ctx.world_size
    for root in range(n):
        for count in (1, 999, 50_000):
            inputs = inputs_of(n, torch.float32, count, 3)
            out = torch.empty(n * count) if ctx.rank == root else None
            dist.gather_single(inputs[ctx.rank], out, dst=root)
            if out is not None:
                same_bits(out, torch.cat(inputs), f"gather_single at {root}")


@beyond_gloo("not supported")
@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="this torch has no gather_single")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gather_single(world_size: int) -> None:
    """gather into one output tensor at the root."""
    run_ranks(gather_single, world_size)


def all_to_alls(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    for dtype in (torch.float32, torch.int64):
        for count in (0, 1, 513, 40_001):
            block = [[make(dtype, count, 90 * a + b) for b in range(n)] for a in range(n)]
            expected = torch.cat([block[a][me] for a in range(n)])
            out = torch.empty(n * count, dtype=dtype)
            dist.all_to_all_single(out, torch.cat(block[me]))
            same_bits(out, expected, f"all_to_all_single {dtype} x{count}")
            outputs = [torch.empty(count, dtype=dtype) for _ in range(n)]
            dist.all_to_all(outputs, block[me])
            same_bits(torch.cat(outputs), expected, f"all_to_all {dtype} x{count}")


@pytest.mark.quick
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_to_all_list_and_single(world_size: int) -> None:
    """all_to_all with equal blocks, in the list form and the single form."""
    run_ranks(all_to_alls, world_size)


def uneven_all_to_all(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    for scale in (1, 700, 9000):
        # Rows[a][b]: number of rows that rank a sends to rank b.
        rows = [[scale * ((a + 2 * b) % 3) for b in range(n)] for a in range(n)]
        block = [[make(torch.float32, 2 * rows[a][b], 90 * a + b).reshape(-1, 2) for b in range(n)] for a in range(n)]
        ins, outs = rows[me], [rows[a][me] for a in range(n)]
        expected = torch.cat([block[a][me] for a in range(n)])
        out = torch.empty(sum(outs), 2)
        dist.all_to_all_single(out, torch.cat(block[me]), outs, ins)
        same_bits(out, expected, f"uneven all_to_all_single x{scale}")
        if IS_GLOO:
            continue  # gloo's list form requires equal blocks
        outputs = [torch.empty(each, 2) for each in outs]
        dist.all_to_all(outputs, block[me])
        same_bits(torch.cat(outputs), expected, f"uneven all_to_all x{scale}")


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_to_all_of_uneven_splits(world_size: int) -> None:
    """Rule 5: each pair has a different size, some are empty; list and single forms."""
    run_ranks(uneven_all_to_all, world_size)


def barriers(ctx: Context) -> None:
    import time

    for turn in range(ctx.world_size):
        if turn == ctx.rank:
            time.sleep(0.05)
        before = time.monotonic()
        dist.barrier()
        times: list[Any] = [None] * ctx.world_size
        dist.all_gather_object(times, (before, time.monotonic()))
        assert max(entered for entered, _ in times) <= min(left for _, left in times), times
    work = dist.barrier(async_op=True)
    work.wait()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", WORLDS)
def test_barrier_lets_no_rank_leave_before_all_came(world_size: int) -> None:
    """Compares clock readings of all ranks, which share one clock because they are on one host."""
    run_ranks(barriers, world_size)


def barriers_with_ids(ctx: Context, after_fakes: bool = False) -> None:
    if after_fakes:
        ctx.init()
        with FakeTensorMode():
            torch.ones(1)
    dist.barrier(device_ids=[ctx.rank])
    work = dist.barrier(device_ids=[ctx.rank], async_op=True)
    assert work is not None
    work.wait()
    total = torch.ones(3)
    dist.all_reduce(total)
    same_bits(total, torch.full((3,), float(ctx.world_size)), "after barriers with ids")


@pytest.mark.skipif(torch.accelerator.device_count() > 0, reason="the ids would name devices of this machine")
def test_barrier_takes_ids_of_devices_that_are_not_there() -> None:
    """accelerate passes its local rank to every barrier, even on machines without an accelerator."""
    run_ranks(barriers_with_ids, 2)


def test_fake_tensors_make_no_device_that_a_barrier_could_name() -> None:
    """Fake tensors install a guard for CUDA that counts one device. A barrier must not use it."""
    run_fresh(barriers_with_ids, 2, True)


def monitored(ctx: Context) -> None:
    monitored_barrier()
    monitored_barrier(wait_all_ranks=True)
    total = torch.ones(3)
    dist.all_reduce(total)
    same_bits(total, torch.full((3,), float(ctx.world_size)), "after monitored_barrier")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_monitored_barrier_when_all_come(world_size: int) -> None:
    """All ranks call; tests/py/fault tests missing ranks."""
    run_ranks(monitored, world_size)


def objects(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    mine = {"rank": me, "text": "x" * (10 ** (me + 1)), "list": list(range(me))}
    found: list[Any] = [None] * n
    dist.all_gather_object(found, mine)
    assert [each["rank"] for each in found] == list(range(n))
    assert [len(each["text"]) for each in found] == [10 ** (rank + 1) for rank in range(n)]
    sent: list[Any] = [mine, "two"] if me == n - 1 else [None, None]
    dist.broadcast_object_list(sent, src=n - 1)
    assert sent[0]["rank"] == n - 1 and sent[1] == "two"
    gathered: list[Any] | None = [None] * n if me == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    assert gathered is None or [each["rank"] for each in gathered] == list(range(n))
    out: list[Any] = [None]
    dist.scatter_object_list(out, [f"for {rank}" for rank in range(n)] if me == 0 else None, src=0)
    assert out == [f"for {me}"]
    if n > 1:
        if me == 0:
            dist.send_object_list([1, {"a": 2}], dst=1)
        elif me == 1:
            received: list[Any] = [None, None]
            dist.recv_object_list(received, src=0)
            assert received == [1, {"a": 2}]


@pytest.mark.quick
@pytest.mark.parametrize("world_size", WORLDS)
def test_object_collectives(world_size: int) -> None:
    """Pickled objects of several sizes."""
    run_ranks(objects, world_size)


def complex_numbers(ctx: Context) -> None:
    for dtype in (torch.complex64, torch.complex128):
        inputs = inputs_of(ctx.world_size, dtype, 333, 4)
        found = inputs[ctx.rank].clone()
        dist.all_reduce(found)
        same_reduced(torch.view_as_real(found), torch.view_as_real(fold("SUM", inputs)), f"{dtype}")
        whole = torch.empty(ctx.world_size * 333, dtype=dtype)
        dist.all_gather_into_tensor(whole, inputs[ctx.rank])
        assert torch.equal(whole, torch.cat(inputs))
        expect_raises(ValueError, lambda: dist.all_reduce(found, dist.ReduceOp.MAX))  # noqa: B023


@pytest.mark.parametrize("world_size", [2, 3])
def test_complex_numbers(world_size: int) -> None:
    """SUM works. MAX is refused, and the group stays usable."""
    run_ranks(complex_numbers, world_size)


def sum_known(ctx: Context) -> None:
    found = inputs_of(ctx.world_size, torch.float32, 9000, 12)[ctx.rank].clone()
    dist.all_reduce(found)
    same_reduced(found, expected_sum(ctx.world_size, 9000, 12), "9000 floats")


def test_many_default_groups_in_one_process() -> None:
    """Groups are created and destroyed twenty times in the same processes."""
    for _ in range(20):
        run_ranks(sum_known, 2, fresh_group=True)
