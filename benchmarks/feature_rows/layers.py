"""Rings, token exchange, tensor-parallel layers and group managers, compared with programs that use torch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_sagellm
from feature_rows.row import HERE, HERE_4, Made, Row, nothing


def attended(query: Tensor, key: Tensor, value: Tensor, total: Tensor, weight: Tensor) -> None:
    """Adds the attention of one block of keys and values. Scores are small, so no maximum is subtracted before exp."""
    scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).exp()
    total += scores @ value
    weight += scores.sum(-1, keepdim=True)


def ring(tokens: int, heads: int = 8, width: int = 64) -> Callable[[], Made]:
    def make() -> Made:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        query, key, value = torch.randn(3, heads, tokens, width).unbind(0)

        def begin() -> tuple[Tensor, Tensor]:
            return torch.zeros_like(query), torch.zeros(heads, tokens, 1)

        def ours() -> Tensor:
            total, weight = begin()
            for _, (keys, values) in torch_sagellm.ring_exchange([key, value]):
                attended(query, keys, values, total, weight)
            return total / weight

        def plain() -> Tensor:
            total, weight = begin()
            own = [key, value]
            for step in range(ranks):
                works, coming = [], [torch.empty_like(each) for each in own]
                if step + 1 < ranks:
                    sends = [dist.P2POp(dist.isend, each, (rank + 1) % ranks) for each in own]
                    works = dist.batch_isend_irecv(
                        sends + [dist.P2POp(dist.irecv, each, (rank - 1) % ranks) for each in coming]
                    )
                attended(query, *own, total, weight)
                for work in works:
                    work.wait()
                own = coming
            return total / weight

        assert torch.equal(ours(), plain())
        return ours, plain, nothing

    return make


def tokens_for_heads(tokens: int, heads: int = 16, width: int = 64) -> Callable[[], Made]:
    def make() -> Made:
        ranks = dist.get_world_size()
        torch.manual_seed(dist.get_rank())
        given = torch.randn(tokens, heads, width)

        def ours() -> Tensor:
            return torch_sagellm.exchange_tokens(given, 1, 0)

        def plain() -> Tensor:
            sent = given.view(tokens, ranks, heads // ranks, width).transpose(0, 1).contiguous()
            came = torch.empty_like(sent)
            dist.all_to_all_single(came, sent)
            return came.view(ranks * tokens, heads // ranks, width)

        assert torch.equal(ours(), plain())
        return ours, plain, nothing

    return make


def linear(mode: str, rows: int, width: int = 512) -> Callable[[], Made]:
    """Forward and backward pass of one layer, compared with torch's ColwiseParallel or RowwiseParallel (DTensors)."""

    def make() -> Made:
        torch.manual_seed(0)
        whole = nn.Linear(width, width)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        style = (
            ColwiseParallel(output_layouts=Replicate())
            if mode == "column"
            else RowwiseParallel(input_layouts=Replicate())
        )
        theirs = parallelize_module(nn.Linear(width, width), mesh, style)
        layer = torch_sagellm.TensorParallelLinear.from_linear(whole, mode)
        with torch.no_grad():
            theirs.weight.to_local().copy_(layer.weight)
            bias = theirs.bias.to_local()
            bias.copy_(layer.bias)
        given = torch.randn(rows, width)

        def step(module: nn.Module) -> Tensor:
            inputs = given.clone().requires_grad_()
            module(inputs).square().sum().backward()
            assert inputs.grad is not None
            for parameter in module.parameters():
                parameter.grad = None
            return inputs.grad

        torch.testing.assert_close(step(layer), step(theirs), rtol=1e-4, atol=1e-4)
        return lambda: step(layer), lambda: step(theirs), nothing

    return make


def groups(by_hand: bool) -> Made:
    """Creates the groups of a 2 x 2 layout, uses them once, and destroys them.

    With ``by_hand`` the compared program creates the same seven groups: each rank also calls ``new_group`` for groups
    that it is not in, as torch requires by default. Otherwise the compared program creates a DeviceMesh, which has four
    of the groups.
    """

    def used(mine: list[dist.ProcessGroup]) -> list[float]:
        sums = []
        for group in mine:
            one = torch.full((1,), float(dist.get_rank()))
            dist.all_reduce(one, group=group)
            sums.append(one.item())
        return sums

    def ours() -> list[float]:
        manager = torch_sagellm.ProcessGroupManager(tp_size=2, cp_size=1, pp_size=1, dp_size=2)
        sums = used([manager.dp_group, manager.tp_group])
        manager.destroy()
        return sums

    def each_by_hand() -> list[float]:
        joined = {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]], "one": [[0], [1], [2], [3]]}
        # The manager's seven groups: dp, tp, two with the ranks of dp (cp_dp, pp_dp), three of one rank (cp, pp, ep).
        mine = []
        for name in ("dp", "tp", "dp", "dp", "one", "one", "one"):
            for ranks in joined[name]:
                made = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    mine.append(made)
        sums = used(mine[:2])
        for group in mine:
            dist.destroy_process_group(group)
        return sums

    def mesh() -> list[float]:
        mesh = init_device_mesh("cpu", (2, 1, 1, 2), mesh_dim_names=("dp", "pp", "cp", "tp"))
        mine = [mesh.get_group(name) for name in ("dp", "tp", "pp", "cp")]
        sums = used(mine[:2])
        for group in mine:
            dist.destroy_process_group(group)
        return sums

    plain = each_by_hand if by_hand else mesh
    assert ours() == plain()
    return ours, plain, nothing


RING, TOKENS, TENSORS = "batch_isend_irecv by hand", "all_to_all_single by hand", "DTensor"
ROWS = [
    Row("context", "ring attention, 512 tokens a rank", RING, HERE, 1.02, ring(512)),
    Row("context", "ring attention, 32 tokens a rank", RING, HERE, 1.05, ring(32)),
    Row("context", "exchange_tokens, 1,024 tokens", TOKENS, HERE, 1.0, tokens_for_heads(1024)),
    Row("context", "exchange_tokens, 16 tokens", TOKENS, HERE, 1.05, tokens_for_heads(16)),
    Row("tensor", "TensorParallelLinear, column, 256 rows", TENSORS, HERE, 1.0, linear("column", 256)),
    Row("tensor", "TensorParallelLinear, row, 256 rows", TENSORS, HERE, 1.0, linear("row", 256)),
    Row("tensor", "TensorParallelLinear, row, 4 rows", TENSORS, HERE, 1.0, linear("row", 4)),
    Row("groups", "ProcessGroupManager, dp 2, tp 2", "its 7 groups by new_group", HERE_4, 1.0, lambda: groups(True)),
    Row("groups", "ProcessGroupManager, dp 2, tp 2", "a DeviceMesh of 4 groups", HERE_4, 1.0, lambda: groups(False)),
]
