"""Experts over several ranks and overlapped communication, compared with plain loops on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_fresh, run_ranks
from moe_sizes import few_are_many

pytestmark = beyond_gloo("experts and overlap over several ranks")

EXPERTS, WIDTH, CHOICES = 12, 5, 2


def weights_of(expert: int) -> torch.Tensor:
    torch.manual_seed(100 + expert)
    return torch.randn(WIDTH, WIDTH, dtype=torch.float64)


def tokens_of(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rank)
    tokens = torch.randn(count, WIDTH, dtype=torch.float64)
    chosen = (torch.rand(count, CHOICES) ** 2 * EXPERTS).long()  # experts with low numbers are chosen more often
    return tokens, chosen, torch.rand(count, CHOICES, dtype=torch.float64)


def by_loop(
    tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, capacity: int | None
) -> tuple[torch.Tensor, int]:
    """Computes one assignment after the other. Returns the output and the number of dropped assignments."""
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


def experts(ctx: Context, factor: float | None, pad: bool, hierarchical: bool = False) -> None:
    import torch_sagellm

    moe = torch_sagellm.MoEDispatcher(EXPERTS, capacity_factor=factor, pad=pad, hierarchical=hierarchical)

    def count_of(rank: int) -> int:
        """Ranks have different numbers of tokens, except with padding; rank 0 of several has none."""
        return 40 if pad or ctx.world_size == 1 else 30 * rank

    count = count_of(ctx.rank)
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
    for rank in [ctx.rank] if pad else range(ctx.world_size):  # with padding, a rank knows only its own tokens
        demand += torch.bincount(tokens_of(rank, count_of(rank))[1].reshape(-1), minlength=EXPERTS)
    assert math.isclose(routing.imbalance, float(demand.max() / demand.mean()), rel_tol=1e-6)
    slope = torch.arange(float(output.numel()), dtype=torch.float64).reshape(output.shape)
    (output * slope).sum().backward()
    if count:
        (expected * slope).sum().backward()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert "results, expected" in expect_raises(ValueError, lambda: moe.combine(torch.ones(999, WIDTH), routing))


def with_size(ctx: Context, many: bool, fn: Callable[..., None], *args: Any) -> None:
    with few_are_many(many):
        fn(ctx, *args)


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("factor", "pad"), [(None, False), (0.5, False), (4.0, False), (1.0, True)])
def test_tokens_reach_their_experts_and_come_back_as_in_a_loop(
    world_size: int, factor: float | None, pad: bool, many: bool
) -> None:
    run_ranks(with_size, world_size, many, experts, factor, pad)


def wrapped_rows(ctx: Context) -> None:
    """Rank 1 passes what functional collectives return: tensors without memory of their own."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    import torch_sagellm

    wrap = AsyncCollectiveTensor if ctx.rank else lambda tensor: tensor
    moe = torch_sagellm.MoEDispatcher(EXPERTS)
    tokens, chosen, weights = tokens_of(ctx.rank, 20)
    rows, routing = moe.dispatch(wrap(tokens.clone()), chosen)
    assert torch.equal(rows, moe.dispatch(tokens, chosen)[0])
    assert torch.equal(moe.combine(wrap(rows.clone()), routing, weights), moe.combine(rows, routing, weights))


def test_rows_of_tensors_without_memory_of_their_own() -> None:
    run_ranks(wrapped_rows, 2)


def one_rank_by_gloo(ctx: Context) -> None:
    """A single rank exchanges nothing, and no memory is kept twice."""
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(engine="delegate"))
    with few_are_many():
        experts(ctx, None, False)
        moe = torch_sagellm.MoEDispatcher(EXPERTS)
        tokens, chosen, weights = tokens_of(0, 20)
        torch_sagellm.reset_stats()
        for _ in range(3):
            rows, routing = moe.dispatch(tokens, chosen)
            output = moe.combine(rows, routing, weights)
            torch.testing.assert_close(output, tokens * weights.sum(1, keepdim=True))
        assert torch_sagellm.get_stats()["total_count"] == 0
        addresses = [each.data_ptr() for each in moe._spare]
        assert len(addresses) == len(set(addresses))


def test_a_single_rank_of_a_group_that_gloo_serves_makes_no_call() -> None:
    run_fresh(one_rank_by_gloo, 1)


def in_debug_mode(ctx: Context) -> None:
    """torch's wrapper of the backend sees the exchanges and compares them."""
    import torch_sagellm
    from torch_sagellm._private import groups

    ctx.init()
    assert groups.is_wrapped(None)
    for factor, pad in ((None, False), (1.0, True)):
        experts(ctx, factor, pad)
    moe = torch_sagellm.MoEDispatcher(EXPERTS)
    assert moe._in_place(torch.ones(1)) is None


def test_rows_are_gathered_in_debug_mode() -> None:
    run_fresh(in_debug_mode, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def experts_by_gloo(ctx: Context) -> None:
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(engine="delegate"))
    for many in (False, True):
        for factor, pad in ((None, False), (0.5, False), (1.0, True)):
            with_size(ctx, many, experts, factor, pad)
        with_size(ctx, many, ahead)


def test_rows_are_gathered_and_sorted_in_a_group_that_gloo_serves() -> None:
    run_fresh(experts_by_gloo, 2)


def experts_over_hosts(ctx: Context, names: list[str], place: list[int], two_steps: bool) -> None:
    from net import enter

    import torch_sagellm

    enter(names[place[ctx.rank]])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size))
    for factor, pad in ((None, False), (1.0, True)):
        experts(ctx, factor, pad, hierarchical=True)
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


def exchanges(ctx: Context) -> None:
    """Counts operations: two all_to_alls (dispatch, combine), and an all_gather of the counts if they are unknown."""
    import torch_sagellm

    tokens, chosen, weights = tokens_of(ctx.rank, 24)
    for pad, counts in ((False, 1), (True, 0)):
        moe = torch_sagellm.MoEDispatcher(EXPERTS, capacity_factor=2.0, pad=pad)
        torch_sagellm.reset_stats()
        rows, routing = moe.dispatch(tokens, chosen)
        moe.combine(rows, routing, weights)
        found = torch_sagellm.get_stats()
        assert (found["all_to_all_count"], found["all_gather_count"]) == (2, counts)
        assert found["total_count"] == 2 + counts
    assert found["ops"]["all_to_all"]["bytes"] == 2 * sum(routing.sent) * WIDTH * 8


def test_rows_travel_in_one_exchange_and_counts_only_where_they_are_not_known() -> None:
    run_ranks(exchanges, 2)


def sizes(ctx: Context) -> None:
    """One rank has many rows and the other has few, so only the first one keeps the memory of its exchanges."""
    import torch_sagellm

    moe = torch_sagellm.MoEDispatcher(EXPERTS)
    tokens = torch.randn(10 if ctx.rank else 5000, 64)
    chosen = torch.randint(0, EXPERTS, (len(tokens), CHOICES))
    rows, routing = moe.dispatch(tokens, chosen)
    torch.testing.assert_close(moe.combine(rows, routing), tokens * CHOICES)
    assert bool(moe._spare) == (ctx.rank == 0)


def test_a_rank_with_many_rows_exchanges_them_with_a_rank_that_has_few() -> None:
    run_ranks(sizes, 2)


def ahead(ctx: Context) -> None:
    """Several dispatches are in flight, with combines between them. Memory that is reused belongs to no pending
    operation."""
    import torch_sagellm

    moe = torch_sagellm.MoEDispatcher(EXPERTS)
    batches = [tokens_of(ctx.rank + 10 * number, 9 + 20 * number * ctx.rank) for number in range(4)]
    plain = []
    for tokens, chosen, weights in batches:
        rows, routing = moe.dispatch(tokens, chosen)
        plain.append((rows, moe.combine(rows * 3, routing, weights)))
    given = [tokens.clone().requires_grad_() for tokens, _, _ in batches]
    coming = []
    for tokens, (_, chosen, _) in zip(given, batches, strict=True):
        coming.append(moe.dispatch_async(tokens, chosen))
        with torch.no_grad():
            tokens.zero_()  # the memory may be reused immediately
    for number, (pending, (tokens, _, weights)) in enumerate(zip(coming, batches, strict=True)):
        rows, routing = pending.wait()
        assert pending.wait()[0] is rows and torch.equal(rows, plain[number][0])
        output = moe.combine(rows * 3, routing, weights)
        assert torch.equal(output, plain[number][1])
        output.sum().backward()
        expected = (3 * weights.sum(1, keepdim=True)).expand_as(tokens)
        torch.testing.assert_close(given[number].grad, expected, rtol=1e-12, atol=1e-12)
    with torch.inference_mode():
        again, _ = moe.dispatch(*batches[1][:2])
    assert torch.equal(again, plain[1][0]) and torch.equal(moe.dispatch(*batches[1][:2])[0], again)


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_rows_of_several_calls_travel_at_once(many: bool) -> None:
    run_ranks(with_size, 3, many, ahead)


def kinds_of_rows(ctx: Context) -> None:
    """Dispatches rows of integers and of 16-bit floats, and combines rows with more dimensions than the tokens."""
    import torch_sagellm

    moe = torch_sagellm.MoEDispatcher(EXPERTS)
    _, chosen, weights = tokens_of(ctx.rank, 17)
    for dtype in (torch.int32, torch.bfloat16, torch.float16):
        tokens = torch.arange(17 * WIDTH).reshape(17, WIDTH).to(dtype)
        rows, routing = moe.dispatch(tokens, chosen)
        assert torch.equal(moe.combine(rows, routing), tokens * CHOICES), dtype
    rows, routing = moe.dispatch(tokens.double(), chosen)
    wide = torch.stack([rows, 2 * rows], dim=2)
    scaled = tokens.double() * weights.sum(1, keepdim=True)
    torch.testing.assert_close(moe.combine(wide, routing, weights), torch.stack([scaled, 2 * scaled], dim=2))


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_rows_of_any_kind_and_shape_come_back(many: bool) -> None:
    run_ranks(with_size, 2, many, kinds_of_rows)


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


def steps(ctx: Context, slower: bool) -> None:
    """The report equals the times of the steps by a clock that the test sets, and the scheduler stops using the slower
    mode."""
    import torch_sagellm
    from torch_sagellm.parallel import overlap as module

    now = [0.0]
    usual, module.perf_counter = module.perf_counter, lambda: now[0]
    try:
        scheduler = torch_sagellm.OverlapScheduler(calibrate=2)
        took = []
        for number in range(9):
            before = now[0]
            with scheduler.step():
                serial = scheduler._serially
                bucket = torch.full((4,), float(number))
                handle = scheduler.schedule(bucket)
                assert handle.done() or not serial
                # A step computes for 10 s. Communication alone takes 4 s. Overlapping hides 3 s of it, or adds 1 s.
                now[0] += 10 + (4 if serial else 5 if slower else 1) + ctx.rank
            assert bucket.tolist() == [number * ctx.world_size] * 4, "whoever waits, a step has ended at its end"
            took.append((serial, now[0] - before))
        assert [serial for serial, _ in took] == [False, True, False, False, True] + [slower] * 4
        report = scheduler.report()
        last = ctx.world_size - 1
        assert (report.serial, report.overlapping) == (14 + last, (15 if slower else 11) + last), "of the slowest rank"
        assert report.overlapped == (-1 if slower else 3) and report.pays is not slower
        assert ("does not pay here and is off" if slower else "hidden") in str(report)
        assert torch_sagellm.OverlapReport(3, 9.0, 2.0, 14.0, 11.0, 4.0).share == 0.75
        assert torch_sagellm.OverlapReport(3, 9.0, 0.0, 14.0, 15.0, 4.0).share == -0.25, "slower is negative"
        scheduler.reset()
        assert scheduler.report().pays is None
    finally:
        module.perf_counter = usual
    assert "calibrate is 0" in expect_raises(ValueError, lambda: torch_sagellm.OverlapScheduler(calibrate=0))


@pytest.mark.parametrize("slower", [False, True])
def test_hidden_time_is_what_a_step_gains_and_the_slower_way_is_left(slower: bool) -> None:
    run_ranks(steps, 2, slower)


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
    assert report.operations == 6 and 0 <= report.waiting <= report.under_way
    assert (report.share, report.communication, report.pays) == (0, 0, None), "hidden time is not known without steps"
    assert "6 operations" in str(report) and "hidden time not measured" in str(report)
    scheduler.reset()
    assert scheduler.report().operations == 0 and scheduler.report().share == 0
    bucket = torch.ones(4)
    assert scheduler.schedule(bucket).wait() is bucket and bucket.tolist() == [float(ctx.world_size)] * 4
    assert "depth is 0" in expect_raises(ValueError, lambda: torch_sagellm.OverlapScheduler(depth=0))


@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_are_combined_while_the_next_computes(world_size: int) -> None:
    run_ranks(overlap, world_size)
