"""Compressed sums against plain ones: error bounds, bytes, residuals, and DistributedDataParallel with many buckets."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_ranks
from torch import nn

pytestmark = beyond_gloo("compressed sums")


def addends(ranks: int, size: int) -> list[torch.Tensor]:
    every = []
    for rank in range(ranks):
        torch.manual_seed(rank)
        every.append(torch.randn(size) * torch.logspace(-3, 3, max(size, 1))[:size])
    return every


def bounds(ctx: Context, size: int) -> None:
    import sagellm

    every = addends(ctx.world_size, size)
    exact = torch.stack(every).double().sum(0)
    magnitude = torch.stack(every).double().abs().sum(0)
    for how, relative in {"fp16": 2.0**-11, "bf16": 2.0**-8}.items():
        stats = sagellm.CompressionStats()
        found = sagellm.compressed_all_reduce(every[ctx.rank].clone(), how, stats=stats)
        assert ((found - exact).abs() <= relative * (magnitude + exact.abs()) * 1.01 + 1e-7).all(), how
        assert (stats.plain_bytes, stats.sent_bytes, stats.calls) == (size * 4, size * 2, 1)
        assert stats.saved_bytes == size * 2
    found = sagellm.compressed_all_reduce(every[ctx.rank].clone(), sagellm.Int8(64), op="avg")
    for begin in range(0, size, 64):
        part = slice(begin, min(begin + 64, size))
        largest = [float(each[part].abs().max()) for each in every]
        allowed = sum(largest) / 254
        allowed += (float(exact[part].abs().max()) + allowed) / 254
        off = float((found[part] * ctx.world_size - exact[part]).abs().max())
        assert off <= allowed * 1.01 + 1e-7, (begin, off, allowed)
    same = found.clone()
    dist.broadcast(same, 0)
    assert torch.equal(same, found), "every rank has the same sum"
    column = torch.stack(every, 1)[:, ctx.rank]
    assert sagellm.compressed_all_reduce(column, "fp16") is column, "strided, in place"
    assert ((column - exact).abs() <= 2.0**-11 * (magnitude + exact.abs()) * 1.01 + 1e-7).all()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("size", [0, 1, 64, 1000, 5000])
def test_errors_stay_within_their_bounds_and_ranks_agree(world_size: int, size: int) -> None:
    run_ranks(bounds, world_size, size)


def kept(ctx: Context) -> None:
    import sagellm

    method = sagellm.TopK(0.1)
    total, plain = torch.zeros(100), torch.zeros(100)
    for step in range(20):
        torch.manual_seed(10 * step + ctx.rank)
        addend = torch.randn(100)
        exact = addend.clone()
        dist.all_reduce(exact)
        plain += exact
        total += sagellm.compressed_all_reduce(addend, method, key="one")
    left = method.residual("one")
    assert left is not None and method.residual("other") is None
    rest = left.clone()
    dist.all_reduce(rest)
    torch.testing.assert_close(total + rest, plain, rtol=1e-4, atol=1e-4)
    whole = sagellm.compressed_all_reduce(torch.arange(5.0), sagellm.TopK(1.0))
    assert whole.tolist() == (torch.arange(5.0) * ctx.world_size).tolist()
    stats = sagellm.CompressionStats()
    sagellm.compressed_all_reduce(torch.ones(1000), sagellm.TopK(0.01), stats=stats)
    assert stats.sent_bytes == 10 * (8 + 4)
    for text, call in {
        "expected one of fp16": lambda: sagellm.compressed_all_reduce(torch.ones(1), "zip"),
        "op='max'": lambda: sagellm.compressed_all_reduce(torch.ones(1), "fp16", op="max"),
        "expected floats": lambda: sagellm.compressed_all_reduce(torch.ones(1, dtype=torch.int32), "fp16"),
        "ratio is 0": lambda: sagellm.TopK(0),
        "block is 0": lambda: sagellm.Int8(0),
    }.items():
        assert text in expect_raises(ValueError, call)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_top_k_leaves_out_comes_later(world_size: int) -> None:
    run_ranks(kept, world_size)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def train(ctx: Context, how: str) -> list[float]:
    import sagellm

    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.01)
    hook: sagellm.CompressionHook | None = None
    if how == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        hook = sagellm.PowerSGDHook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=3))
    elif how:
        hook = sagellm.CompressionHook(sagellm.TopK(0.2) if how == "topk" else how)
    if hook is not None:
        net.register_comm_hook(None, hook)
    torch.manual_seed(5)
    inputs = torch.randn(64, 32)
    targets = inputs.sum(1, keepdim=True).tanh()
    mine = slice(ctx.rank, None, ctx.world_size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (net(inputs[mine]) - targets[mine]).square().mean()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        losses.append(float(shown) / ctx.world_size)
    for parameter in net.parameters():
        same = parameter.detach().clone()
        dist.broadcast(same, 0)
        assert torch.equal(same, parameter), "the ranks' weights stay equal"
    if hook is not None:
        assert hook.stats.calls > 60 * 2, hook.stats
        assert how in ("powersgd",) or hook.stats.saved_bytes > 0
        hook.close()
    return losses


def converges(ctx: Context, how: str) -> tuple[list[float], list[float]]:
    return train(ctx, ""), train(ctx, how)


@pytest.mark.parametrize("how", ["fp16", "bf16", "int8", "topk", "powersgd"])
def test_training_converges_with_several_buckets(how: str) -> None:
    for plain, compressed in run_ranks(converges, 2, how):
        assert plain[-1] < 0.2 * plain[0], "the model learns"
        assert math.isclose(compressed[0], plain[0], rel_tol=1e-3), "the first step begins with the same weights"
        assert compressed[-1] < 1.5 * plain[-1] + 0.02, (how, plain[-1], compressed[-1])
