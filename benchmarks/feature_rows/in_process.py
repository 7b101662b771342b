"""Ranks that are objects of one process, measured against the same arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from feature_rows.row import HERE, Made, Row, nothing
from torch_sagellm.collective_ops import AllReduceOperator, create_ring_topology

RANKS = 4


def all_reduced(elements: int, calls: int) -> Callable[[], Made]:
    """Rank 0 of the program holds all ranks of the topology; the program's other rank waits."""

    def make() -> Made:
        mine = dist.get_rank() == 0
        ranks = [AllReduceOperator(comm) for comm in create_ring_topology(RANKS)] if mine else []
        ours = [torch.full((elements,), float(number)) for number in range(RANKS)]
        theirs = [tensor.clone() for tensor in ours]

        def by_ranks() -> None:
            for _ in range(calls):
                for rank, tensor in zip(ranks, ours, strict=False):
                    rank.all_reduce(tensor, "avg")

        def by_hand() -> None:
            for _ in range(calls if mine else 0):
                total = theirs[0].clone()
                for tensor in theirs[1:]:
                    total += tensor
                total /= RANKS
                for tensor in theirs:
                    tensor.copy_(total)

        by_ranks()
        by_hand()
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        return by_ranks, by_hand, nothing

    return make


BY_HAND = "torch's operators on one thread"
ROWS = [
    Row(
        "in_process",
        f"{RANKS} ranks of one process, 20 all_reduces of 8 KiB",
        BY_HAND,
        HERE,
        2.0,
        all_reduced(2048, 20),
    ),
    Row(
        "in_process", f"{RANKS} ranks of one process, all_reduce of 1 MiB", BY_HAND, HERE, 1.0, all_reduced(1 << 18, 1)
    ),
]
