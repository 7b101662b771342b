"""Collectives through which gradients pass: each backward pass is the dual of the forward collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sagellm.api.arguments import in_memory


def gather_last(tensor: Tensor, group: Any) -> Tensor:
    """Concatenates the tensors of all ranks along the last dimension."""
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


# torch calls `forward` and `backward` by these names, with its own context object. torch has no annotations for mypy.
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


def copy_to_all(tensor: Tensor, group: Any) -> Tensor:
    """Returns the same tensor; its gradient is summed over the ranks, because all ranks use the tensor."""
    result: Tensor = _Copy.apply(tensor, group)
    return result


def reduce_from_all(tensor: Tensor, group: Any) -> Tensor:
    """Returns the sum over the ranks; each rank gets the unchanged gradient."""
    result: Tensor = _Reduce.apply(tensor, group)
    return result


def gather_from_all(tensor: Tensor, group: Any) -> Tensor:
    """Concatenates the parts of all ranks along the last dimension; each rank gets the gradient of its part."""
    result: Tensor = _Gather.apply(tensor, group)
    return result


def slice_of_all(tensor: Tensor, group: Any) -> Tensor:
    """Returns this rank's part of the last dimension; the gradients of all parts are concatenated."""
    result: Tensor = _Slice.apply(tensor, group)
    return result
