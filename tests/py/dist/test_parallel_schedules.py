"""Experts over several ranks and overlapped communication, against plain loops on one rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_fresh, run_ranks

pytestmark = beyond_gloo("experts and overlap over several ranks")

EXPERTS, WIDTH, CHOICES = 12, 5, 2


def weights_of(expert: int) -> torch.Tensor:
    torch.manual_seed(100 + expert)
    return torch.randn(WIDTH, WIDTH, dtype=torch.float64)


def tokens_of(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rank)
    tokens = torch.randn(count, WIDTH, dtype=torch.float64)
    chosen = (torch.rand(count, CHOICES) ** 2 * EXPERTS).long()  # low numbers are chosen more often
    return tokens, chosen, torch.rand(count, CHOICES, dtype=torch.float64)


def by_loop(
    tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, capacity: int | None
) -> tuple[torch.Tensor, int]:
    """The output and the number of dropped assignments, one assignment after the other."""
    output, used, dropped = torch.zeros_like(tokens), [0] * EXPERTS, 0
    rows = []
    for token in range(len(tokens)):
        total = torch.zeros(WIDTH, dtype=tokens.dtype)
        for choice in range(CHOICES):
            expert = int(chosen[token, choice])
            if capacity is not None and used[expert] >= capacity:
                dropped += 1
                continue
            used[expert] += 1
            total = total + weights[token, choice] * (tokens[token] @ weights_of(expert))
        rows.append(total)
    return (torch.stack(rows) if rows else output), dropped


def experts(ctx: Context, factor: float | None, pad: bool) -> None:
    import torch_sagellm

    moe = torch_sagellm.MoEDispatcher(EXPERTS, capacity_factor=factor, pad=pad)
    count = 40 if pad else 30 * ctx.rank  # ranks have different numbers of tokens, one of them none
    tokens, chosen, weights = tokens_of(ctx.rank, count)
    capacity = None if factor is None else math.ceil(factor * count * CHOICES / EXPERTS)
    ours = [each.clone().requires_grad_() for each in (tokens, weights)]
    theirs = [each.clone().requires_grad_() for each in (tokens, weights)]
    rows, routing = moe.dispatch(ours[0], chosen)
    assert rows.shape[0] == sum(routing.rows) and len(routing.rows) == EXPERTS // ctx.world_size
    if pad:
        assert routing.rows == [capacity * ctx.world_size] * len(routing.rows), "all shapes are known before"
    first = ctx.rank * len(routing.rows)
    results = [part @ weights_of(first + at) for at, part in enumerate(rows.split(routing.rows))]
    output = moe.combine(torch.cat(results), routing, ours[1])
    expected, dropped = by_loop(theirs[0], chosen, theirs[1], capacity)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert routing.dropped == dropped and (factor != 0.5 or ctx.rank == 0 or dropped > 0), (routing.dropped, dropped)
    demand = torch.zeros(EXPERTS)
    for rank in range(ctx.world_size):
        demand += torch.bincount(tokens_of(rank, 40 if pad else 30 * rank)[1].reshape(-1), minlength=EXPERTS)
    assert math.isclose(routing.imbalance, float(demand.max() / demand.mean()), rel_tol=1e-6)
    slope = torch.arange(float(output.numel()), dtype=torch.float64).reshape(output.shape)
    (output * slope).sum().backward()
    if count:
        (expected * slope).sum().backward()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert "results, expected" in expect_raises(ValueError, lambda: moe.combine(torch.ones(999, WIDTH), routing))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("factor", "pad"), [(None, False), (0.5, False), (4.0, False), (1.0, True)])
def test_tokens_reach_their_experts_and_come_back_as_in_a_loop(
    world_size: int, factor: float | None, pad: bool
) -> None:
    run_ranks(experts, world_size, factor, pad)


def experts_over_hosts(ctx: Context, names: list[str], place: list[int], two_steps: bool) -> None:
    from net import enter

    import torch_sagellm

    enter(names[place[ctx.rank]])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size))
    for factor, pad in ((None, False), (1.0, True)):
        experts(ctx, factor, pad)
    found = []
    for hierarchical in (True, False):
        moe = torch_sagellm.MoEDispatcher(EXPERTS, hierarchical=hierarchical)
        tokens, chosen, weights = tokens_of(ctx.rank, 25 + 7 * ctx.rank)
        rows, routing = moe.dispatch(tokens, chosen)
        found.append((rows, moe.combine(rows * 2, routing, weights)))
        assert (moe._among is not None) == (two_steps and hierarchical)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other), "the same rows in the same order"
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("place", "two_steps"), [([0, 0, 1, 1], True), ([0, 1, 0, 1], True), ([0, 0, 1], False)], ids=str
)
def test_rows_go_in_two_steps_where_hosts_have_several_ranks(
    hosts: list[str], place: list[int], two_steps: bool
) -> None:
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    run_fresh(experts_over_hosts, len(place), hosts, place, two_steps, env=env, timeout=120)


def wrong_experts(ctx: Context) -> None:
    import torch_sagellm

    moe = torch_sagellm.MoEDispatcher(4)
    for text, call in {
        "multiple of the 2 ranks": lambda: torch_sagellm.MoEDispatcher(3),
        "capacity_factor is 0": lambda: torch_sagellm.MoEDispatcher(4, capacity_factor=0),
        "needs a capacity_factor": lambda: torch_sagellm.MoEDispatcher(4, pad=True),
        "expected 0 to 3": lambda: moe.dispatch(torch.ones(1, 2), torch.tensor([4])),
        "whole numbers": lambda: moe.dispatch(torch.ones(1, 2), torch.tensor([0.5])),
        "(T, D) and": lambda: moe.dispatch(torch.ones(3, 2), torch.tensor([0])),
    }.items():
        assert text in expect_raises(ValueError, call)
    rows, routing = moe.dispatch(torch.ones(3, 2), torch.tensor([[0, 1]] * 3))
    text = expect_raises(ValueError, lambda: moe.combine(rows, routing, torch.ones(2, 3)))
    assert "weights of shape (2, 3), expected (3, 2), one for each token and its experts" in text
    assert moe.combine(rows, routing, torch.full((3, 2), 0.5)).tolist() == [[1.0, 1.0]] * 3
    rows, routing = moe.dispatch(torch.ones(3, 2), torch.tensor([0, 1, 2]))
    assert moe.combine(rows, routing, torch.arange(3.0)).tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_wrong_experts_are_refused() -> None:
    run_ranks(wrong_experts, 2)


def overlap(ctx: Context) -> None:
    import torch_sagellm

    scheduler = torch_sagellm.OverlapScheduler(depth=3)
    layers = [torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(6)]
    for number, layer in enumerate(layers):
        torch.manual_seed(number)
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    inputs = [torch.full((2, 8), float(number + 10 * ctx.rank), dtype=torch.float64) for number in range(6)]
    outputs, handles = [], []
    for layer, given in zip(layers, inputs, strict=True):
        output, handle = scheduler.schedule_layer(layer, given)
        outputs.append(output)
        handles.append(handle)
    for number, (layer, output, handle) in enumerate(zip(layers, outputs, handles, strict=True)):
        torch.testing.assert_close(output, layer(inputs[number]))
        total = sum(layer(inputs[number] + 10.0 * (rank - ctx.rank)) for rank in range(ctx.world_size))
        torch.testing.assert_close(handle.wait(), total.detach())
        assert handle.wait() is not output and handle.done()
    report = scheduler.report()
    assert report.operations == 6 and 0 <= report.waiting <= report.communication
    assert 0 <= report.share <= 1 and "6 operations" in str(report)
    scheduler.reset()
    assert scheduler.report().operations == 0 and scheduler.report().share == 0
    bucket = torch.ones(4)
    assert scheduler.schedule(bucket).wait() is bucket and bucket.tolist() == [float(ctx.world_size)] * 4
    assert "depth is 0" in expect_raises(ValueError, lambda: torch_sagellm.OverlapScheduler(depth=0))


@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_are_combined_while_the_next_computes(world_size: int) -> None:
    run_ranks(overlap, world_size)
