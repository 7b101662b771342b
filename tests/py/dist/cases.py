"""Helpers of the collective tests: the inputs of every rank, comparisons of results, and the sizes to test."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from harness import IS_GLOO
from reference import fold, make, same_bits

# Sizes near the limits at which an engine may change its algorithm: empty, one element, odd, a cache line, a page, a
# slot.
SIZES = [0, 1, 3, 7, 16, 63, 1000, 1023, 1024, 1025, 4097]
BULK = [262_144 + 3, 1_310_720]  # float32 elements: 1 MiB and a bit, 5 MiB


#: Options for `new_group` that keep the caller's order of ranks. Empty if this torch always sorts them.
IN_ORDER_GIVEN = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
needs_order_given = pytest.mark.skipif(not IN_ORDER_GIVEN, reason="new_group of this torch sorts the ranks")


def inputs_of(ranks: int, dtype: torch.dtype, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Returns the inputs of all ranks of the group; every rank can compute all of them."""
    return [make(dtype, count, 1000 * seed + rank) for rank in range(ranks)]


def same_reduced(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compares bits. With gloo, floats may differ by rounding, because gloo promises no order of summation."""
    if IS_GLOO and expected.dtype.is_floating_point:
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=0.5, msg=lambda text: f"{what}: {text}")
        return
    same_bits(found, expected, what)


def op_of(name: str, factor: float = 1.0) -> dist.ReduceOp:
    """Returns a reduce op by name."""
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(factor)
    return getattr(dist.ReduceOp, name)


def expected_sum(ranks: int, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the sum of `inputs_of` over the ranks."""
    return fold("SUM", inputs_of(ranks, dtype, count, seed))


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a non-contiguous tensor (every second element of a larger one) with the same values."""
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    view = wide[..., ::2]
    view.copy_(tensor)
    assert view.numel() < 2 or not view.is_contiguous()
    return view


def members(groups: Sequence[Sequence[int]]) -> list[dist.ProcessGroup]:
    """Creates groups, with the given order of ranks if this torch keeps it. Every rank of the world must make this
    call."""
    return [dist.new_group(list(ranks), **IN_ORDER_GIVEN) for ranks in groups]
