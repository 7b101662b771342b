"""Mixture of experts: dispatch and combine, compared with two bare all_to_alls of the same number of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import torch_sagellm
from feature_rows.row import FAR, HERE, Made, Row, nothing

WIDTH, CHOICES, EACH = 512, 2, 8


def against_bare(tokens: int, **options: object) -> Callable[[], Made]:
    def make() -> Made:
        ranks = dist.get_world_size()
        torch.manual_seed(dist.get_rank())
        given = torch.randn(tokens, WIDTH)
        experts = torch.randint(0, EACH * ranks, (tokens, CHOICES))
        weights = torch.full((tokens, CHOICES), 0.5)
        moe = torch_sagellm.MoEDispatcher(EACH * ranks, **options)  # type: ignore[arg-type]
        rows = torch.randn(tokens * CHOICES // ranks * ranks, WIDTH)
        back = torch.empty_like(rows)

        def ours() -> Tensor:
            came, routing = moe.dispatch(given, experts)
            return moe.combine(came, routing, weights)

        def bare() -> None:
            dist.all_to_all_single(back, rows)
            dist.all_to_all_single(rows, back)

        if not options.get("capacity_factor"):
            torch.testing.assert_close(ours(), given)
        return ours, bare, nothing

    return make


def by_hand(tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Dispatch and combine, written with torch's operators: one all_to_all of the counts, and two of rows."""
    ranks = dist.get_world_size()
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    leaving = torch.bincount(flat, minlength=EACH * ranks)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    sent, received = (counts.view(ranks, EACH).sum(1).tolist() for counts in (leaving, coming))
    rows = tokens[order // CHOICES]
    came = rows.new_empty(sum(received), WIDTH)
    dist.all_to_all_single(came, rows, received, sent)
    local = torch.arange(EACH).repeat(ranks).repeat_interleave(coming)
    sorting = torch.argsort(local, stable=True)
    by_expert = came[sorting]  # the experts would read these rows
    came[sorting] = by_expert
    dist.all_to_all_single(rows, came, sent, received)
    rows *= weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(tokens).index_add_(0, order // CHOICES, rows)


def against_by_hand(tokens: int) -> Callable[[], Made]:
    def make() -> Made:
        experts_of_all = EACH * dist.get_world_size()
        torch.manual_seed(dist.get_rank())
        given = torch.randn(tokens, WIDTH)
        experts = torch.randint(0, experts_of_all, (tokens, CHOICES))
        weights = torch.full((tokens, CHOICES), 0.5)
        moe = torch_sagellm.MoEDispatcher(experts_of_all)

        def ours() -> Tensor:
            came, routing = moe.dispatch(given, experts)
            return moe.combine(came, routing, weights)

        torch.testing.assert_close(ours(), by_hand(given, experts, weights))
        return ours, lambda: by_hand(given, experts, weights), nothing

    return make


def flat_and_two_steps(tokens: int) -> Callable[[], Made]:
    def make() -> Made:
        two_steps, _, _ = against_bare(tokens, hierarchical=True)()
        flat, _, _ = against_bare(tokens)()
        return two_steps, flat, nothing

    return make


def overlapped(tokens: int) -> Callable[[], Made]:
    """Four micro-batches: while experts compute, the next batch's rows are in flight. Compared with one batch after the
    other."""

    def make() -> Made:
        ranks = dist.get_world_size()
        moe = torch_sagellm.MoEDispatcher(EACH * ranks)
        torch.manual_seed(dist.get_rank())
        given = [torch.randn(tokens, WIDTH) for _ in range(4)]
        experts = [torch.randint(0, EACH * ranks, (tokens, CHOICES)) for _ in given]
        layer = torch.randn(WIDTH, WIDTH)

        def in_turn() -> list[Tensor]:
            done = []
            for batch, chosen in zip(given, experts, strict=True):
                rows, routing = moe.dispatch(batch, chosen)
                done.append(moe.combine(rows @ layer, routing))
            return done

        def ahead() -> list[Tensor]:
            done = []
            coming = moe.dispatch_async(given[0], experts[0])
            for number in range(len(given)):
                rows, routing = coming.wait()
                if number + 1 < len(given):
                    coming = moe.dispatch_async(given[number + 1], experts[number + 1])
                done.append(moe.combine(rows @ layer, routing))
            return done

        for one, other in zip(in_turn(), ahead(), strict=True):
            assert torch.equal(one, other)
        return ahead, in_turn, nothing

    return make


BARE, FLAT, HAND = "two all_to_alls of as many rows", "hierarchical=False", "torch's operators by hand"
PADDED = {"capacity_factor": 1.0, "pad": True}
ROWS = [
    Row("moe", "dispatch, combine, 1,024 tokens", HAND, HERE, 1.0, against_by_hand(1024)),
    Row("moe", "dispatch, combine, 64 tokens", HAND, HERE, 1.0, against_by_hand(64)),
    Row("moe", "dispatch, combine, 4 tokens", HAND, HERE, 1.0, against_by_hand(4)),
    Row("moe", "dispatch, combine, 1,024 tokens", BARE, HERE, 1.3, against_bare(1024)),
    Row("moe", "dispatch, combine, 64 tokens", BARE, HERE, 1.5, against_bare(64)),
    Row("moe", "dispatch, combine, 4 tokens", BARE, HERE, 2.0, against_bare(4)),
    Row("moe", "pad=True, 1,024 tokens", BARE, HERE, 1.3, against_bare(1024, **PADDED)),
    Row("moe", "pad=True, 4 tokens", BARE, HERE, 2.0, against_bare(4, **PADDED)),
    Row("moe", "dispatch_async, 4 x 256 tokens", "dispatch", HERE, 1.02, overlapped(256)),
    Row("moe", "dispatch, combine, 1,024 tokens", BARE, FAR, 1.3, against_bare(1024)),
    Row("moe", "dispatch, combine, 4 tokens", BARE, FAR, 2.0, against_bare(4)),
    Row("moe", "hierarchical=True, 1,024 tokens", FLAT, FAR, 1.0, flat_and_two_steps(1024)),
    Row("moe", "hierarchical=True, 4 tokens", FLAT, FAR, 1.0, flat_and_two_steps(4)),
    Row("moe", "dispatch_async, 4 x 256 tokens", "dispatch", FAR, 1.0, overlapped(256)),
]
