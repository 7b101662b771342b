#!/usr/bin/env python3
"""Context parallel: each rank has a part of a long sequence. Shows two ways to compute attention over the whole
sequence.

    torchrun --standalone --nproc-per-node=2 examples/05_context.py

In the ring, blocks of keys and values travel around while each rank keeps its queries, so a rank needs memory for one
part only. In the exchange of tokens, an all_to_all gives each rank all tokens of some of the heads, and another
all_to_all returns the results. The number of heads must then be a multiple of the number of ranks. The check computes
attention over the whole sequence on one process.
"""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist
from torch.nn import functional

import torch_sagellm

TOKENS = 256  # tokens per rank
HEADS = 12  # a multiple of 2, 3, 4 and 6, so the exchange works with each of these numbers of ranks
SIZE = 16


def ring_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of this rank's queries (tokens, heads, size) over the keys and values of all ranks.

    Combines each block's scores with those of earlier blocks by the largest score and the sum of the exponentials.
    """
    me, scale = dist.get_rank(), 1 / math.sqrt(SIZE)
    largest = query.new_full((HEADS, TOKENS, 1), -math.inf)
    total = query.new_zeros(HEADS, TOKENS, 1)
    result = query.new_zeros(HEADS, TOKENS, SIZE)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    for source, (keys, values) in torch_sagellm.ring_exchange([key, value]):
        if source > me:
            continue  # all tokens of this block come after this rank's tokens
        scores = torch.einsum("qhs,khs->hqk", query, keys) * scale
        if source == me:
            scores = scores.masked_fill(later, -math.inf)
        new = torch.maximum(largest, scores.amax(2, keepdim=True))
        weights = (scores - new).exp()
        before = (largest - new).exp()
        total = total * before + weights.sum(2, keepdim=True)
        result = result * before + torch.einsum("hqk,khs->hqs", weights, values)
        largest = new
    return (result / total).transpose(0, 1)


def exchanged_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Computes the same result, from all tokens of HEADS / ranks of the heads."""
    some_heads = [torch_sagellm.exchange_tokens(each, split_dim=1, join_dim=0) for each in (query, key, value)]
    return torch_sagellm.exchange_tokens(plain_attention(*some_heads), split_dim=0, join_dim=1)


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    heads_first = [each.transpose(0, 1) for each in (query, key, value)]
    return functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1)


def main() -> None:
    dist.init_process_group("sagellm")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if HEADS % ranks:
        if rank == 0:
            print(
                f"05_context.py: {HEADS} heads cannot be split over {ranks} ranks; start 2, 3, 4, 6 or 12",
                file=sys.stderr,
            )
        dist.destroy_process_group()
        sys.exit(2)
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(ranks * TOKENS, HEADS, SIZE, generator=generator) for _ in range(3)]
    mine = [each.chunk(ranks)[rank] for each in whole]
    expected = plain_attention(*whole).chunk(ranks)[rank]

    for way in (ring_attention, exchanged_attention):
        torch_sagellm.reset_stats()
        error = (way(*mine) - expected).abs().max().item()
        assert error < 1e-5, f"{way.__name__} differs by {error}"
        stats = torch_sagellm.get_stats()
        if rank == 0:
            calls = ", ".join(f"{stats[f'{op}_count']} {op}" for op in ("send", "recv", "all_to_all"))
            print(f"{way.__name__:<20} {ranks} x {TOKENS} tokens: {calls}; largest difference {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
