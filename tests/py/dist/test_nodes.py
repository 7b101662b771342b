"""Groups whose ranks are bound to NUMA nodes or last-level caches (`src/engine/shm/nodes.rs`). These are faked
(`nodes.py`): this shows that ranks find and agree on them, and that results have the same bits, not how fast it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, run_fresh
from nodes import bind, needs_two_cpus

import torch_sagellm

pytestmark = [beyond_gloo("does not know NUMA nodes or caches"), needs_two_cpus]

COUNT = 300_001


def tensor_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.rand(COUNT, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) - 0.5
    return values.to(dtype)


def in_rank_order(ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum of all ranks' tensors: in rank order, in 32 bits, rounded once."""
    total = tensor_of(0, dtype).float()
    for rank in range(1, ranks):
        total += tensor_of(rank, dtype).float()
    return total.to(dtype)


def collectives(ctx: Context, nodes: list[int], asked: bool, caches: bool = False) -> tuple[str, str]:
    """Returns why nodes cannot be faked, and how the group describes itself."""
    impossible = bind(nodes[ctx.rank], caches)
    if impossible:
        return impossible, ""
    # The value of rank 0 decides.
    ctx.init(pg_options=torch_sagellm.Options(numa=asked if ctx.rank == 0 else not asked))
    ranks = ctx.world_size
    for dtype in (torch.float32, torch.bfloat16):
        expected = in_rank_order(ranks, dtype)
        for shared in (True, False, True):
            mine = tensor_of(ctx.rank, dtype)
            mine = torch_sagellm.shared(mine) if shared else mine
            dist.all_reduce(mine)
            assert torch.equal(mine, expected), (dtype, shared)
        mine = torch_sagellm.shared(tensor_of(ctx.rank, dtype))
        dist.reduce(mine, ranks - 2)
        assert ctx.rank != ranks - 2 or torch.equal(mine, expected)
    mine = torch_sagellm.shared(tensor_of(ctx.rank, torch.float32))
    dist.broadcast(mine, 1)
    assert torch.equal(mine, tensor_of(1, torch.float32))
    described = dist.group.WORLD._get_backend(torch.device("cpu")).describe()
    # The kernel has one node, so it accepts only what is placed there.
    placed = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "memfd:sagellm" in line]
    assert any("prefer" in line for line in placed) == ("NUMA" in described), placed
    dist.destroy_process_group()
    return "", described


@pytest.mark.parametrize(
    ("nodes", "asked", "told"),
    [
        ([0] * 7 + [1] * 7, True, True),
        ([0, 1] * 7, True, False),  # the ranks of a node have no consecutive numbers
        ([0] * 14, True, False),
        ([0] * 6 + [1] * 6, True, False),  # too few ranks
        ([0] * 7 + [1] * 7, False, False),
    ],
    ids=["in order", "in turn", "one node", "few ranks", "not asked for"],
)
def test_rule_17_ranks_on_several_numa_nodes_have_the_same_bits(nodes: list[int], asked: bool, told: bool) -> None:
    for impossible, described in run_fresh(collectives, len(nodes), nodes, asked):
        if impossible:
            pytest.skip(impossible)
        assert ("node by node on 2 NUMA nodes" in described) == told, described


@pytest.mark.parametrize(
    ("caches", "asked", "told"),
    [
        ([0] * 7 + [1] * 7, True, True),
        ([0, 1] * 7, True, False),
        ([0] * 14, True, False),
        ([0] * 7 + [1] * 7, False, False),
    ],
    ids=["in order", "in turn", "one cache", "not asked for"],
)
def test_rule_17_ranks_that_share_last_level_caches_have_the_same_bits(
    caches: list[int], asked: bool, told: bool
) -> None:
    for impossible, described in run_fresh(collectives, len(caches), caches, asked, True):
        if impossible:
            pytest.skip(impossible)
        assert ("node by node on 2 last-level caches" in described) == told, described
