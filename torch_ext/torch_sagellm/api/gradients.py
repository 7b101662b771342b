"""Gradients through the collectives of operators: the backward pass of each calls the dual collective.

In a group of processes, and if each rank of one process has its own thread, a backward pass waits for the other ranks,
as its forward pass does. On the thread that created ranks of one process nothing may wait, because the other ranks make
their calls later on the same thread. There a rank's backward pass stops at the operator; when the last rank has reached
it, the backward passes of all ranks continue.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from torch_sagellm.api.arguments import Op, checked_op
from torch_sagellm.api.in_process import Member


def crosses(tensor: Any) -> bool:
    """Whether autograd records a call with this tensor."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def crossed(member: Any, kind: str, tensor: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """Calls all_reduce, all_gather or reduce_scatter (``kind``) with a tensor that autograd follows."""
    name = checked_op(kind, op)
    if isinstance(member, Member) and member.topology.made_here:
        # Along an edge of the graph, autograd would pass the gradient on immediately. So the graph gets an empty token
        # instead of the tensor, and has no edge to the tensor.
        token = torch.empty(0, dtype=tensor.dtype, requires_grad=True)
        result: torch.Tensor = _Later.apply(token, tensor.detach(), _Upstream(tensor), member, kind, name)
    else:
        result = _Waiting.apply(tensor, member, kind, name)
    return result


class _Upstream:
    """Wraps a tensor, so that an autograd function that gets the wrapper makes no edge to the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Waiting(torch.autograd.Function):  # type: ignore[misc]  # torch has no annotations for mypy
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, member: Any, kind: str, name: str) -> torch.Tensor:
        ctx.given = member, kind, name, tensor.shape
        if kind == "all_reduce":
            ctx.mark_dirty(tensor)
        return _call(member, kind, tensor, name)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        member, kind, name, shape = ctx.given
        back, gradient = _dual(member, kind, grad, name)
        return _finished(member, kind, name, back(gradient), shape), None, None, None


class _Later(torch.autograd.Function):  # type: ignore[misc]  # torch has no annotations for mypy
    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, tensor: torch.Tensor, upstream: _Upstream, member: Any, kind: str, name: str
    ) -> torch.Tensor:
        ctx.given = upstream, member, kind, name
        return _call(member, kind, tensor, name).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        upstream, member, kind, name = ctx.given
        back, given = _dual(member, kind, grad, name)
        future = back(given, async_op=True)  # does not wait, even if torch moves a deep graph to another thread
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        then = partial(_go_on, upstream.tensor, member, kind, name, future._result, keep)
        member.topology.follow(future._work.call, then)
        return (None,) * 6


def _go_on(tensor: torch.Tensor, member: Any, kind: str, name: str, came: torch.Tensor, keep: bool) -> None:
    """Continues a rank's backward pass from the tensor that was passed to an operator."""
    gradient = _finished(member, kind, name, came, tensor.shape)
    torch.autograd.backward([tensor], [gradient], retain_graph=keep)


def _call(member: Any, kind: str, tensor: torch.Tensor, name: str) -> torch.Tensor:
    arguments = {} if kind == "all_gather" else {"op": name.lower()}
    result: torch.Tensor = getattr(member, kind)(tensor, **arguments)
    return result


def _dual(member: Any, kind: str, grad: torch.Tensor, name: str) -> tuple[Any, torch.Tensor]:
    """Returns the method of the dual collective, and that method's input. The losses of all ranks count as one sum."""
    if name not in ("SUM", "AVG"):
        raise RuntimeError(
            f"sagellm {kind}: there is no gradient of op {name}, only of sum and avg; detach() the tensor"
        )
    back = {"all_reduce": "all_reduce", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}[kind]
    return getattr(member, back), grad.detach().clone(memory_format=torch.contiguous_format)


def _finished(member: Any, kind: str, name: str, came: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    gradient = came / member.world_size if name == "AVG" else came
    return gradient.reshape(shape)
