"""``fused_all_reduce``: a list of tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from torch_sagellm._private import load
from torch_sagellm.api.arguments import OPS_AND_BITWISE, refuse_lazy_view

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from torch_sagellm.api.futures import CommListFuture


@overload
def fused_all_reduce(
    tensors: Sequence[torch.Tensor],
    op: str | Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: Literal[False] = False,
) -> list[torch.Tensor]: ...
@overload
def fused_all_reduce(
    tensors: Sequence[torch.Tensor],
    op: str | Any = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    async_op: Literal[True],
) -> CommListFuture: ...
@overload
def fused_all_reduce(
    tensors: Sequence[torch.Tensor],
    op: str | Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> list[torch.Tensor] | CommListFuture: ...
def fused_all_reduce(
    tensors: Sequence[torch.Tensor],
    op: str | Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> list[torch.Tensor] | CommListFuture:
    """Reduces every tensor of a list over all ranks of ``group``, in place, as one operation per dtype.

    Args:
        tensors: any number of tensors, of any sizes, dtypes and strides, empty ones included; no two may share memory.
            Every rank passes the same number, with the same shapes and dtypes in the same order.
        op: "sum", "avg" (or "mean"), "product" (or "prod"), "min", "max", "band", "bor", "bxor", or a
            ``torch.distributed.ReduceOp``.
        group: the group; None means the default group. Groups of other backends work if they support coalescing.
        async_op: True returns immediately with a ``CommListFuture``, whose ``wait()`` returns the list. Do not use the
            tensors before ``wait()`` has returned.

    Returns:
        The same tensors, in a new list.

    Raises:
        TypeError: a single tensor was passed instead of a list, or an element of the list is not a tensor.
        ValueError: ``op`` is unknown, two tensors share memory, a tensor has no data, is sparse or is a lazily
            conjugated or negated view, or the backend refuses the call. Nothing was sent.
        RuntimeError: as for every collective: a mismatch between ranks, a rank that died, a deadline.

    On one host, and in strict mode on several hosts, the bits are the same as with one ``all_reduce`` per tensor;
    docs/determinism.md describes other cases. The list is not packed into a buffer: its tensors are read and written in
    place, so there is no limit on its size.

    Example::

        gradients = [torch.ones(512), torch.ones(3, 4, dtype=torch.float64)]
        torch_sagellm.fused_all_reduce(gradients, op="avg")
    """
    import torch
    import torch.distributed as dist

    if isinstance(tensors, torch.Tensor):  # a tensor is a sequence of its rows
        raise TypeError("sagellm fused_all_reduce: tensors is one tensor, expected a list of them; pass [tensor]")
    listed = list(tensors)
    receives = _extension()._receives
    for number, tensor in enumerate(listed):
        if not receives(tensor):
            _refuse(number, tensor)
    _apart(listed)
    process_group: Any = group if group is not None else dist.group.WORLD
    if process_group is None:
        raise ValueError("sagellm fused_all_reduce: there is no default group; call init_process_group first")
    options = _named_options(op, async_op) if isinstance(op, str) else _options(op, async_op)
    work = None
    if listed and process_group is not dist.GroupMember.NON_GROUP_MEMBER:
        work = process_group.allreduce_coalesced(listed, options)
    if async_op:
        from torch_sagellm.api.futures import CommListFuture

        return CommListFuture(work, listed)
    if work is not None:
        work.wait()
    return listed


def _refuse(number: int, tensor: Any) -> NoReturn:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"sagellm fused_all_reduce: element {number} is a {type(tensor).__name__}, expected a tensor")
    if tensor.is_meta:
        raise ValueError(f"sagellm fused_all_reduce: tensor {number} is on meta, expected one that has data")
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise ValueError(
            f"sagellm fused_all_reduce: tensor {number} has the layout {layout}, expected a dense one; reduce it by "
            "torch.distributed.all_reduce, which takes sparse_coo, or pass to_dense() of it"
        )
    refuse_lazy_view("fused_all_reduce", f"tensor {number}", tensor)


@cache
def _named_options(op: str, async_op: bool) -> Any:
    """The options of a reduce op by name, cached because creating them takes as long as a small operation."""
    import torch.distributed as dist

    name = OPS_AND_BITWISE.get(op.lower())
    if name is None:
        raise ValueError(f"sagellm fused_all_reduce: op={op!r}, expected one of {', '.join(OPS_AND_BITWISE)}")
    return _options(getattr(dist.ReduceOp, name), async_op)


def _options(op: Any, async_op: bool) -> Any:
    import torch.distributed as dist

    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op
    if hasattr(options, "asyncOp"):
        options.asyncOp = async_op
    return options


@cache
def _extension() -> ModuleType:
    return load.extension()


def _apart(tensors: list[torch.Tensor]) -> None:
    """Refuses a list in which tensors share memory, because the shared elements would be reduced twice."""
    shared = _extension()._shared(tensors)
    if shared is not None:
        raise ValueError(
            f"sagellm fused_all_reduce: tensors {shared[0]} and {shared[1]} share memory, which would be reduced "
            "twice; pass each piece of memory once"
        )
