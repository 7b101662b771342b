"""Exchange of blocks and tokens between the ranks that hold parts of the same sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_sagellm.api.arguments import checked_dense, in_memory


def ring_exchange(tensors: Sequence[torch.Tensor], group: Any = None) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Passes blocks (keys and values, for example) around the ring of ranks while the caller computes.

    There are as many steps as ranks. Each step yields a rank and the blocks of this rank, beginning with the caller's
    own. The blocks of the next step are in flight meanwhile. Every rank passes the same number of tensors with the same
    shapes and dtypes, and takes all steps. The yielded blocks must not be changed, and are valid until the next step.

    Example::

        query, scores = torch.ones(4, 8), {}
        for source, (key, value) in torch_sagellm.ring_exchange([torch.ones(4, 8), torch.ones(4, 8)]):
            scores[source] = query @ key.T  # while the next blocks are in flight
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError("sagellm ring_exchange: got a tensor, expected a list of tensors")
    own = list(tensors)
    for tensor in own:
        checked_dense("ring_exchange", tensor)
    return _around(own, group)


def _around(tensors: list[torch.Tensor], group: Any) -> Iterator[tuple[int, list[torch.Tensor]]]:
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    current = [in_memory(tensor) for tensor in tensors]
    for step in range(ranks):
        source = (me - step) % ranks
        if step + 1 == ranks:
            yield source, current
            return
        coming = [torch.empty_like(tensor) for tensor in current]
        sends = [dist.P2POp(dist.isend, each, group=group, group_peer=(me + 1) % ranks) for each in current]
        receives = [dist.P2POp(dist.irecv, each, group=group, group_peer=(me - 1) % ranks) for each in coming]
        works = dist.batch_isend_irecv(sends + receives)
        yield source, current
        for work in works:
            work.wait()
        current = coming


class _Exchange(torch.autograd.Function):  # type: ignore[misc]  # torch has no annotations for mypy
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, split: int, join: int, group: Any) -> torch.Tensor:
        ctx.dims = (split, join, group)
        return _exchange(tensor, split, join, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        split, join, group = ctx.dims
        return _exchange(grad, join, split, group), None, None, None


def _exchange(tensor: torch.Tensor, split: int, join: int, group: Any) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    split, join = split % tensor.dim(), join % tensor.dim()
    # Each part is copied once. If the first dimension is joined, the received data needs no further copy.
    parts = tensor.unflatten(split, (ranks, -1))
    sent = in_memory(parts.transpose(0, 1) if split == 1 else parts.movedim(split, 0))
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    return came.flatten(0, 1) if join == 0 else came.movedim(0, join).flatten(join, join + 1)


def exchange_tokens(tensor: torch.Tensor, split_dim: int, join_dim: int, group: Any = None) -> torch.Tensor:
    """Splits one dimension and joins another: rank r gets part r of ``split_dim``, and all parts of ``join_dim``.

    With a tensor (tokens / ranks, heads, size) on each rank, ``exchange_tokens(tensor, 1, 0)`` returns (tokens, heads /
    ranks, size): all tokens for some of the heads, as attention needs them. ``exchange_tokens(tensor, 0, 1)`` reverses
    it. Gradients pass through. The size of ``split_dim`` must be a multiple of the number of ranks, and both must be
    dimensions of the tensor (ValueError).

    Example::

        heads = torch_sagellm.exchange_tokens(torch.ones(4, 2, 8), split_dim=1, join_dim=0)
    """
    checked_dense("exchange_tokens", tensor)
    ranks = dist.get_world_size(group)
    for name, dimension in (("split_dim", split_dim), ("join_dim", join_dim)):
        if not -tensor.dim() <= dimension < tensor.dim():
            raise ValueError(
                f"sagellm exchange_tokens: {name} is {dimension}, expected a dimension of a tensor of shape "
                f"{tuple(tensor.shape)}"
            )
    if tensor.shape[split_dim] % ranks:
        raise ValueError(
            f"sagellm exchange_tokens: dimension {split_dim} is {tensor.shape[split_dim]}, expected a multiple of the "
            f"{ranks} ranks"
        )
    if not (tensor.requires_grad and torch.is_grad_enabled()):  # a node in the graph takes as long as a small exchange
        return _exchange(tensor, split_dim, join_dim, group)
    result: torch.Tensor = _Exchange.apply(tensor, split_dim, join_dim, group)
    return result
