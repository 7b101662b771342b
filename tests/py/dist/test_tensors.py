"""Tensors as programs have them: strided, channels-last, transposed, views, misaligned, large with a tiny result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import inputs_of, same_reduced, strided
from harness import Context, beyond_gloo, run_ranks
from reference import fold, make, same_bits


def layouts(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the same 2 x 4 x 6 x 8 values in several memory layouts."""
    shaped = base.reshape(2, 4, 6, 8)
    channels = torch.empty(2, 4, 6, 8, dtype=base.dtype).to(memory_format=torch.channels_last)
    channels.copy_(shaped)
    wide = torch.zeros(2, 4, 6, 10, dtype=base.dtype)
    narrow = wide[..., 1:9]
    narrow.copy_(shaped)
    transposed = torch.empty(8, 6, 4, 2, dtype=base.dtype).permute(3, 2, 1, 0)
    transposed.copy_(shaped)
    shifted = torch.zeros(2 * 4 * 6 * 8 + 1, dtype=base.dtype)[1:].reshape(2, 4, 6, 8)
    shifted.copy_(shaped)
    return {
        "contiguous": shaped.clone(),
        "channels-last": channels,
        "strided": strided(shaped),
        "narrowed": narrow,
        "transposed": transposed,
        "shifted by one element": shifted,
    }


def every_layout(ctx: Context, dtype: torch.dtype) -> None:
    n, me = ctx.world_size, ctx.rank
    inputs = inputs_of(n, dtype, 384, 1)
    total = fold("SUM", inputs).reshape(2, 4, 6, 8)
    for name, tensor in layouts(inputs[me]).items():
        strides = tensor.stride()
        dist.all_reduce(tensor)
        same_reduced(tensor, total, f"all_reduce, {name}")
        assert tensor.stride() == strides
    for root in range(n):
        for name, tensor in layouts(inputs[me]).items():
            dist.broadcast(tensor, root)
            same_bits(tensor, inputs[root].reshape(2, 4, 6, 8), f"broadcast, {name}")
        for name, tensor in layouts(inputs[me]).items():
            dist.reduce(tensor, root)
            if me == root:
                same_reduced(tensor, total, f"reduce, {name}")


@beyond_gloo("its strided all_reduce gives wrong numbers")
@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_broadcast_reduce_in_every_layout(world_size: int, dtype: torch.dtype) -> None:
    """Pitfall 13: non-contiguous and channels-last dense tensors."""
    run_ranks(every_layout, world_size, dtype)


def mixed_layouts(ctx: Context) -> None:
    inputs = inputs_of(ctx.world_size, torch.float32, 384, 2)
    tensor = list(layouts(inputs[ctx.rank]).values())[ctx.rank]
    dist.all_reduce(tensor)
    same_reduced(tensor, fold("SUM", inputs).reshape(2, 4, 6, 8), "layouts differ between ranks")
    tensor = list(layouts(inputs[ctx.rank]).values())[ctx.rank + 2]
    dist.broadcast(tensor, 0)
    same_bits(tensor, inputs[0].reshape(2, 4, 6, 8), "layouts differ between ranks")


@beyond_gloo("sends channels-last memory as it lies")
def test_ranks_with_different_layouts_agree_on_the_logical_order() -> None:
    """Ranks may have different strides: element [i, j] of one rank is combined with element [i, j] of the others."""
    run_ranks(mixed_layouts, 3)


def strided_lists(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    for count in (1, 30, 5000):
        inputs = inputs_of(n, torch.float32, count, 3)
        outputs = [strided(torch.zeros(count)) for _ in range(n)]
        dist.all_gather(outputs, strided(inputs[me]))
        for rank in range(n):
            same_bits(outputs[rank], inputs[rank], "all_gather into strided outputs")
        for root in range(n):
            outputs = [strided(torch.zeros(count)) for _ in range(n)]
            dist.gather(strided(inputs[me]), outputs if me == root else None, dst=root)
            for rank in range(n if me == root else 0):
                same_bits(outputs[rank], inputs[rank], "gather into strided outputs")
            found = strided(torch.zeros(count))
            dist.scatter(found, [strided(each) for each in inputs] if me == root else None, src=root)
            same_bits(found, inputs[me], "scatter, strided")
        found = strided(torch.zeros(count))
        blocks = [[make(torch.float32, count, 11 * rank + part) for part in range(n)] for rank in range(n)]
        dist.reduce_scatter(found, [strided(each) for each in blocks[me]])
        same_reduced(found, fold("SUM", [blocks[rank][me] for rank in range(n)]), "reduce_scatter, strided")
        outputs = [strided(torch.zeros(count)) for _ in range(n)]
        dist.all_to_all(outputs, [strided(each) for each in blocks[me]])
        for rank in range(n):
            same_bits(outputs[rank], blocks[rank][me], "all_to_all, strided")


@beyond_gloo("its lists must be contiguous")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_strided_tensors_in_lists(world_size: int) -> None:
    """Every list form with strided inputs and outputs."""
    run_ranks(strided_lists, world_size)


def views(ctx: Context) -> None:
    n = ctx.world_size
    inputs = inputs_of(n, torch.float32, 1000, 4)
    base = inputs[ctx.rank].clone()
    total = fold("SUM", inputs)
    works = [dist.all_reduce(base[start : start + 100], async_op=True) for start in range(0, 1000, 100)]
    for work in works:
        work.wait()
    same_reduced(base, total, "ten views of one tensor")
    leaf = inputs[ctx.rank].clone().requires_grad_()
    with torch.no_grad():
        dist.all_reduce(leaf)
    same_reduced(leaf.detach(), total, "a leaf that requires grad")
    assert leaf.grad is None
    parameter = torch.nn.Parameter(inputs[ctx.rank].clone())
    dist.all_reduce(parameter.data)
    same_reduced(parameter.data, total, "parameter.data")
    if n > 1:
        scalar = torch.tensor(float(ctx.rank))
        dist.all_reduce(scalar)
        assert scalar.item() == sum(range(n))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_views_parameters_and_scalars(world_size: int) -> None:
    """Slices that are in flight at the same time, leaf tensors, and 0-dimensional tensors."""
    run_ranks(views, world_size)


def version_counter(ctx: Context) -> None:
    tensor = torch.ones(4)
    before = tensor._version
    dist.all_reduce(tensor)
    outputs = [torch.zeros(4) for _ in range(ctx.world_size)]
    dist.all_gather(outputs, tensor)
    assert tensor._version >= before and torch.equal(outputs[0], tensor)


def test_inference_mode_and_plain_tensors() -> None:
    """Outputs may be any dense tensors, even in inference mode."""
    run_ranks(version_counter, 2)


def misaligned(ctx: Context, dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    for count in (1, 100, 1025, 40_000):
        inputs = inputs_of(ctx.world_size, dtype, count, count)
        total = fold("SUM", inputs)
        for shift in (1, 3):
            raw = torch.zeros(count * size + 64, dtype=torch.uint8)
            start = (-raw.data_ptr()) % 64 + shift * size
            tensor = raw[start : start + count * size].view(dtype)
            tensor.copy_(inputs[ctx.rank])
            dist.all_reduce(tensor)
            same_reduced(tensor, total, f"{dtype} x{count}, {shift} elements off a cache line")
            assert not raw[:start].any() and not raw[start + count * size :].any(), "wrote outside the tensor"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_misaligned_tensors_and_no_write_outside(dtype: torch.dtype) -> None:
    """Tensors that do not start at a cache line. The bytes around them stay zero."""
    run_ranks(misaligned, 2, dtype)


def overlapping(ctx: Context) -> None:
    n = ctx.world_size
    for _ in range(50):
        tensor = torch.full((5000,), float(ctx.rank + 1))
        first = dist.all_reduce(tensor, async_op=True)
        second = dist.all_reduce(tensor, async_op=True)
        third = dist.broadcast(tensor[:2500], n - 1, async_op=True)
        gathered = torch.zeros(n * 2500)
        fourth = dist.all_gather_into_tensor(gathered, tensor[1000:3500], async_op=True)
        for work in (fourth, third, second, first):
            work.wait()
        total = sum(range(1, n + 1)) * n
        assert (tensor == total).all(), tensor
        assert (gathered == total).all(), gathered


@beyond_gloo("runs them concurrently")
@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_04_overlapping_operations_run_in_order(world_size: int) -> None:
    """Rule 4: an operation runs after a pending operation that writes its memory, although the waits are in reverse
    order."""
    run_ranks(overlapping, world_size)


def staged_overlap(ctx: Context) -> None:
    wide = torch.zeros(4000)
    view = wide[::2]
    view.fill_(float(ctx.rank + 1))
    works = [dist.all_reduce(view, async_op=True) for _ in range(4)]
    works.append(dist.all_reduce(wide, async_op=True))
    for work in reversed(works):
        work.wait()
    n = ctx.world_size
    value = sum(range(1, n + 1)) * n**4
    assert (wide[::2] == value).all() and not wide[1::2].any(), wide[:8]


@beyond_gloo("runs them concurrently")
def test_rule_04_holds_for_strided_views_of_one_memory() -> None:
    """Rule 4 if the tensors are staged copies of overlapping memory."""
    run_ranks(staged_overlap, 2)


def empties(ctx: Context) -> list[Any]:
    n = ctx.world_size
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather([torch.empty(0) for _ in range(n)], empty)
    dist.all_gather_into_tensor(torch.empty(0), empty)
    dist.reduce(empty, n - 1)
    dist.all_to_all_single(torch.empty(0), empty)
    dist.all_reduce(torch.empty(3, 0, 5))
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.tolist()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_zero_elements_everywhere(world_size: int) -> None:
    """Empty tensors take part like any others."""
    assert run_ranks(empties, world_size) == [[float(world_size)]] * world_size
