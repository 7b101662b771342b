#!/usr/bin/env python3
"""Mixture of experts: each rank has some of the experts. Tokens travel to their experts, and the results travel back.

    torchrun --standalone --nproc-per-node=2 examples/06_moe.py

A token uses its two best experts. Without a capacity factor no token is dropped; with one, an expert accepts no more
than its share from each rank. The check runs all experts on one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import torch_sagellm

EXPERTS_A_RANK = 4
TOKENS = 64  # tokens per rank
WIDTH = 16
CHOICES = 2


def forward(
    moe: torch_sagellm.MoEDispatcher, experts: list[nn.Module], tokens: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch_sagellm.Routing]:
    """Runs the layer over all ranks: this rank's tokens (T, D) and their scores (T, experts) become outputs (T, D)."""
    weights, chosen = scores.softmax(1).topk(CHOICES)
    rows, routing = moe.dispatch(tokens, chosen)
    results = [expert(part) for expert, part in zip(experts, rows.split(routing.rows), strict=True)]
    return moe.combine(torch.cat(results), routing, weights), routing


def plain(experts: list[nn.Module], tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Runs the layer with all experts on this rank: every expert computes all tokens, and has weight 0 for tokens that
    did not choose it."""
    weights, chosen = scores.softmax(1).topk(CHOICES)
    table = torch.zeros_like(scores).scatter(1, chosen, weights)
    return sum(table[:, [number]] * expert(tokens) for number, expert in enumerate(experts))


def main() -> None:
    dist.init_process_group("sagellm")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    every = [
        nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(ranks * EXPERTS_A_RANK)
    ]
    mine = every[rank * EXPERTS_A_RANK : (rank + 1) * EXPERTS_A_RANK]
    generator = torch.Generator().manual_seed(10 + rank)
    tokens = torch.randn(TOKENS, WIDTH, generator=generator)
    # The first expert gets higher scores, so that the load is uneven.
    scores = torch.randn(TOKENS, len(every), generator=generator)
    scores[:, 0] += 1

    output, routing = forward(torch_sagellm.MoEDispatcher(len(every)), mine, tokens, scores)
    assert torch.allclose(output, plain(every, tokens, scores), atol=1e-5)
    gradients = torch.autograd.grad(output.sum(), mine[0].parameters(), allow_unused=True)
    assert any(gradient is not None for gradient in gradients)
    assert routing.dropped == 0
    print(f"rank {rank}: rows sent {routing.sent}, for its experts {routing.rows}, imbalance {routing.imbalance:.2f}")

    limited, few = forward(torch_sagellm.MoEDispatcher(len(every), capacity_factor=1.0), mine, tokens, scores)
    assert few.dropped > 0 and not torch.allclose(limited, output)
    room = -(-TOKENS * CHOICES // len(every))
    assert max(few.rows) <= ranks * room, (few.rows, room)
    print(f"rank {rank}: with capacity factor 1 {few.dropped} of {TOKENS * CHOICES} assignments found no room")
    dist.barrier()
    if rank == 0:
        print("the outputs are those of all experts on one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
