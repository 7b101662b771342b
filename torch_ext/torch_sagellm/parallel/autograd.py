"""Collectives that gradients pass through: each backward pass is the collective that belongs to the forward one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sagellm.api import hosts
from torch_sagellm.api.arguments import in_memory


def gather_last(tensor: Tensor, group: Any) -> Tensor:
    """The tensors of all ranks side by side along the last dimension."""
    first = in_memory(tensor.movedim(-1, 0))
    whole = first.new_empty((first.shape[0] * dist.get_world_size(group), *first.shape[1:]))
    dist.all_gather_into_tensor(whole, first, group=group)
    return whole.movedim(0, -1)


def slice_last(tensor: Tensor, group: Any) -> Tensor:
    """This rank's part of the last dimension."""
    return tensor.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


def _sum(tensor: Tensor, group: Any) -> Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


# torch calls forward and backward by these names, with a context of its own; it has no annotations for mypy.
class _Copy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _Reduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_last(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return slice_last(grad, ctx.group), None


class _Slice(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return slice_last(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_last(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any, among: hosts.Hosts | None
    ) -> Tensor:
        ctx.sizes = (sent, received, group, among)
        return _exchanged(rows, sent, received, group, among)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent, received, group, among = ctx.sizes
        return _exchanged(grad, received, sent, group, among), None, None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: Any, among: hosts.Hosts | None) -> Tensor:
    if among is not None:
        return hosts.exchange(rows, sent, received, among)
    came = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(came, in_memory(rows), received, sent, group=group)
    return came


def copy_to_all(tensor: Tensor, group: Any) -> Tensor:
    """The same tensor; its gradient is summed over the ranks, which all use it."""
    result: Tensor = _Copy.apply(tensor, group)
    return result


def reduce_from_all(tensor: Tensor, group: Any) -> Tensor:
    """The sum over the ranks; the gradient goes to each of them as it is."""
    result: Tensor = _Reduce.apply(tensor, group)
    return result


def gather_from_all(tensor: Tensor, group: Any) -> Tensor:
    """The parts of all ranks along the last dimension; each rank gets the gradient of its part."""
    result: Tensor = _Gather.apply(tensor, group)
    return result


def slice_of_all(tensor: Tensor, group: Any) -> Tensor:
    """This rank's part of the last dimension; the gradients of all parts are put together again."""
    result: Tensor = _Slice.apply(tensor, group)
    return result


def exchange_rows(
    rows: Tensor, sent: list[int], received: list[int], group: Any, among: hosts.Hosts | None = None
) -> Tensor:
    """Sends ``sent[r]`` rows to each rank r and returns the ``received[r]`` rows that come, in the order of the ranks.

    Gradients travel the other way. ``among`` has both go in two steps.
    """
    result: Tensor = _AllToAll.apply(rows, sent, received, group, among)
    return result
