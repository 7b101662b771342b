"""Checks of arguments: tensors, numbers, reduce ops, timeouts, and the rows of a slice."""

from __future__ import annotations

import sys
from datetime import timedelta
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch_sagellm.collective_ops import AllReduceOperator

#: The reduce ops by name.
OPS = {"sum": "SUM", "avg": "AVG", "mean": "AVG", "max": "MAX", "min": "MIN", "prod": "PRODUCT", "product": "PRODUCT"}
#: The reduce ops by name, with the bitwise ones for integers.
OPS_AND_BITWISE = {**OPS, "band": "BAND", "bor": "BOR", "bxor": "BXOR"}
#: A reduce op as callers name it: "sum", or ``torch.distributed.ReduceOp.SUM``.
Op: TypeAlias = "str | dist.ReduceOp | dist.ReduceOp.RedOpType"
#: A reduce op, or an operator that performs the reduction.
OpOrOperator: TypeAlias = "str | dist.ReduceOp | dist.ReduceOp.RedOpType | AllReduceOperator"
Seconds = float | timedelta


def checked_tensor(what: str, tensor: Any) -> None:
    """Raises a TypeError for the call ``what`` if an argument is not a tensor."""
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.Tensor):  # the first test is ten times faster
        raise TypeError(f"sagellm {what}: got a {type(tensor).__name__}, expected a tensor")


def checked_result(what: str, tensor: Any, sparse: bool = False) -> None:
    """Raises a ValueError or a TypeError for the call ``what`` if an argument cannot receive a result.

    For a view that is conjugated or negated only when it is read, torch passes a copy to the backend and drops the
    result. For a tensor without data torch silently does nothing. ``sparse`` leaves the check of layouts to the
    backend.
    """
    checked_tensor(what, tensor)
    if tensor.is_conj() or tensor.is_neg():
        refuse_lazy_view(what, "the tensor", tensor)
    if not sparse or tensor.is_meta:
        checked_dense(what, tensor)


def refuse_lazy_view(what: str, which: str, tensor: torch.Tensor) -> NoReturn:
    """Raises the ValueError for a view that is conjugated or negated only when it is read; ``which`` names the view."""
    how = "conj" if tensor.is_conj() else "neg"
    raise ValueError(
        f"sagellm {what}: torch.is_{how} of {which} is true (x.conj(), x.conj().imag), and torch loses results "
        f"for such a view; pass its base, or resolve_{how}() of it"
    )


def checked_dense(what: str, tensor: Any) -> None:
    """Raises a ValueError or a TypeError for the call ``what`` unless an argument is a dense tensor with data."""
    checked_tensor(what, tensor)
    if tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested):
        return
    kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
    raise ValueError(
        f"sagellm {what}: got a {kind} tensor on {tensor.device}, expected a dense one (torch.strided) that has data"
    )


def checked_written(what: str, tensor: torch.Tensor) -> None:
    """Raises a ValueError for the call ``what`` if elements of a dense tensor share memory."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            f"sagellm {what}: tensor of sizes {list(tensor.shape)} and strides {list(tensor.stride())} shares memory "
            "between its elements (an expanded tensor?); pass a clone"
        )


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose memory holds its elements in order."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def wraps(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass with its own ``__torch_dispatch__``. Most of these have no memory."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


def checked_number(what: str, name: str, value: Any, least: int = 1) -> None:
    """Raises a ValueError for the call ``what`` unless an argument is a whole number of at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"sagellm {what}: {name} is {value!r}, expected a whole number from {least} on")


def is_real(value: Any) -> bool:
    """Whether the value is a real number, of Python or of numpy."""
    return isinstance(value, Real)


def rows_of_slice(what: str, tensor: torch.Tensor, world_size: int) -> int:
    """The number of rows of one rank's slice of ``tensor`` along dimension 0."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if tensor.dim() == 0 or rows % world_size:
        raise ValueError(
            f"sagellm {what}: dimension 0 of the tensor is {rows if tensor.dim() else 'missing'}, expected a "
            f"multiple of the {world_size} ranks"
        )
    return rows // world_size


def as_timedelta(seconds: Seconds) -> timedelta:
    """A timeout as a timedelta; a ValueError if it is not positive."""
    given: Any = seconds
    try:
        # timedelta itself does not accept an integer of numpy.
        found = given if isinstance(given, timedelta) else timedelta(seconds=float(given) if is_real(given) else given)
    except (TypeError, OverflowError, ValueError):  # not a number, infinite, or NaN
        raise ValueError(
            f"sagellm: timeout is {seconds!r}, expected a finite number of seconds or a timedelta"
        ) from None
    if found <= timedelta(0):
        raise ValueError(f"sagellm: timeout is {seconds}, expected more than 0 seconds")
    return found


def soft_seconds(seconds: Seconds | None) -> float | None:
    """A soft timeout in seconds; a ValueError if it is negative."""
    found = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
    if found is not None and not (is_real(found) and found >= 0):
        raise ValueError(f"sagellm: soft_timeout is {seconds!r}, expected 0 seconds (no line) or more")
    return None if found is None else float(found)


def checked_root(what: str, root_rank: int, world_size: int, order: str) -> int:
    """Checks a rank of the group; the ValueError for a wrong one shows the order of the call's arguments."""
    if not isinstance(root_rank, Integral) or not 0 <= root_rank < world_size:
        raise ValueError(
            f"sagellm {what}: root_rank is {root_rank!r}, expected a rank from 0 to {world_size - 1}: {what}({order})"
        )
    return root_rank


def checked_op(what: str, op: Op) -> str:
    """torch's name of a reduce op, given by name or as torch's object.

    For any other op it raises a ValueError that names ``what``.
    """
    if isinstance(op, str):
        if found := OPS.get(op.lower()):
            return found
    elif found := next((name for name in OPS.values() if op == getattr(dist.ReduceOp, name)), None):
        return found
    raise ValueError(f"sagellm {what}: op={op!r}, expected one of {', '.join(OPS)}, or that ReduceOp of torch")


def operator_or_op(what: str, given: Any, backend: Any) -> tuple[AllReduceOperator | None, Op]:
    """Returns (operator, "sum") for an ``AllReduceOperator``, and (None, op) for a reduce op.

    An operator has its own communicator, so a backend in addition to it is refused (ValueError).
    """
    known = sys.modules.get("torch_sagellm.collective_ops")  # if it was never imported, there is no operator
    if known is None or not isinstance(given, known.AllReduceOperator):
        return None, given
    if backend is not None:
        raise ValueError(f"sagellm {what}: got an operator and a backend, expected one of them")
    return given, "sum"
