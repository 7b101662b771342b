"""`torch_sagellm.assert_same`: the error names each tensor whose bits differ, and the ranks that differ."""

from __future__ import annotations

import pytest
import torch
from harness import Context, beyond_gloo, expect_raises, run_ranks

pytestmark = beyond_gloo("the package's calls")


def compared(ctx: Context) -> None:
    import torch_sagellm

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)).to(torch.bfloat16)
    odd = ctx.world_size - 1
    torch_sagellm.assert_same(model)
    torch_sagellm.assert_same([torch.tensor([float("nan")]), torch.ones(2, 3).t(), torch.empty(0), torch.tensor(True)])
    if ctx.rank == odd:  # changes one bit
        model[0].weight.data.view(torch.int16)[1, 2] ^= 1
    text = expect_raises(AssertionError, lambda: torch_sagellm.assert_same(model))
    who = f"rank {odd} differs from the {odd} others" if odd > 1 else "rank 0 against rank 1"
    assert f"1 of 7 tensors differ between ranks; 0.weight (bfloat16 [3, 5] on this rank): {who}" in text, text
    zero = torch.tensor([-0.0 if ctx.rank == 0 else 0.0])
    text = expect_raises(AssertionError, lambda: torch_sagellm.assert_same({"scale": zero}))
    assert "scale (float32 [1]" in text
    text = expect_raises(AssertionError, lambda: torch_sagellm.assert_same([("step", torch.tensor(ctx.rank))]))
    assert " against ".join(f"rank {rank}" for rank in range(ctx.world_size)) in text
    text = expect_raises(AssertionError, lambda: torch_sagellm.assert_same([torch.ones(1) * ctx.rank] * 12))
    assert text.endswith("and 2 more")
    torch_sagellm.assert_same(zero.abs() for _ in range(2))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_tensor_that_differs_is_named_with_its_ranks(world_size: int) -> None:
    run_ranks(compared, world_size)
