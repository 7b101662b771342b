"""``fused_all_reduce``: a list of tensors in one go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

#: What ``op`` may be called besides a ``torch.distributed.ReduceOp``.
OPS = {
    "sum": "SUM",
    "avg": "AVG",
    "mean": "AVG",
    "product": "PRODUCT",
    "prod": "PRODUCT",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


def fused_all_reduce(
    tensors: Sequence[torch.Tensor], op: str | Any = "sum", group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Reduces every tensor of a list over all ranks of ``group``, in place, as one operation a dtype.

    Args:
        tensors: any number of tensors, of any sizes, dtypes and strides, empty ones included; no two may share memory.
            Every rank passes as many, with the same shapes and dtypes in the same order.
        op: "sum", "avg" (or "mean"), "product" (or "prod"), "min", "max", "band", "bor", "bxor", or a
            ``torch.distributed.ReduceOp``.
        group: the default group if None. Groups of other backends work as far as they coalesce.

    Returns:
        The same tensors, in a new list.

    Raises:
        TypeError: something in the list is no tensor.
        ValueError: ``op`` is unknown, two tensors share memory, or the backend refuses the call; nothing was sent.
        RuntimeError: as every collective: a mismatch between ranks, a rank that died, a deadline.

    On one host, and in strict mode on several, the bits are those of one ``all_reduce`` a tensor; docs/determinism.md
    says what holds otherwise. The list is not packed into a buffer: its pieces are read and written where they lie, so
    there is no limit on its size.
    """
    import torch
    import torch.distributed as dist

    listed = list(tensors)
    for number, tensor in enumerate(listed):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"sagellm fused_all_reduce: element {number} is a {type(tensor).__name__}, expected a tensor"
            )
    _apart(listed)
    process_group: Any = group if group is not None else dist.group.WORLD
    if process_group is None:
        raise ValueError("sagellm fused_all_reduce: there is no default group; call init_process_group first")
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = _reduce_op(op)
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return listed
    # One operation for each run of equal dtypes: so each dtype once, in an order that all ranks share.
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in listed:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    together = [tensor for same in by_dtype.values() for tensor in same]
    if together:
        if hasattr(options, "asyncOp"):
            options.asyncOp = False
        work = process_group.allreduce_coalesced(together, options)
        if work is not None:
            work.wait()
    return listed


def _reduce_op(op: str | Any) -> Any:
    import torch.distributed as dist

    if not isinstance(op, str):
        return op
    if op.lower() not in OPS:
        raise ValueError(f"sagellm fused_all_reduce: op={op!r}, expected one of {', '.join(OPS)}")
    return getattr(dist.ReduceOp, OPS[op.lower()])


def _apart(tensors: list[torch.Tensor]) -> None:
    """Refuses a list in which memory comes twice: its elements would be reduced twice."""
    ranges = []
    for number, tensor in enumerate(tensors):
        if tensor.numel() == 0 or tensor.is_sparse:
            continue
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        ranges.append((str(tensor.device), begin, begin + (reach + 1) * tensor.element_size(), number))
    ranges.sort()
    for before, after in pairwise(ranges):
        if before[0] == after[0] and after[1] < before[2] and _same_memory(tensors[before[3]], tensors[after[3]]):
            first, second = sorted((before[3], after[3]))
            raise ValueError(
                f"sagellm fused_all_reduce: tensors {first} and {second} share memory, which would be reduced twice; "
                "pass each piece of memory once"
            )


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose reaches overlap really have an element in common.

    Strided tensors may interleave, like the columns of a matrix; then their elements are compared, which is slow and
    rare.
    """
    if one.is_contiguous() and other.is_contiguous():
        return True

    def addresses(tensor: torch.Tensor) -> set[int]:
        found = {tensor.data_ptr()}
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            found = {at + step * stride * tensor.element_size() for at in found for step in range(size)}
        return found

    return bool(addresses(one) & addresses(other))
