"""Calls of ranks that are objects of one process: what must agree, which memory they use, how they are issued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist


def unset(shape: Any, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor whose values are not there yet: filled with NaN, or with 0 if the dtype has no NaN."""
    return _hide(torch.zeros(shape, dtype=dtype, device=device))


def _hide(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a tensor with NaN if its dtype has NaN, and returns it."""
    return tensor.fill_(float("nan")) if tensor.is_floating_point() or tensor.is_complex() else tensor


@dataclass(eq=False)
class Call:
    """One call of one rank, from its creation until its result is there."""

    rank: int
    kind: str
    #: Shape and dtype of the tensor, and the other arguments as text. They must agree with the other ranks' calls.
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    arguments: str = ""
    #: The reduce op, the root, or the peer and the tag of a message.
    option: Any = None
    #: The caller's tensors: the input, and the tensor that receives the result.
    source: torch.Tensor | None = None
    result: torch.Tensor | None = None
    #: How long the call waits for the other ranks; None means the timeout of the ``in_process.Topology``.
    timeout: timedelta | None = None
    #: Copies: of the input, which the core reads, and of the previous values of ``result``.
    given: torch.Tensor | None = None
    before: torch.Tensor | None = None
    #: Earlier calls of the same rank that write what this call reads or writes. They must end first.
    after: list[Call] = field(default_factory=list)
    taken: bool = False
    done: bool = False

    def __str__(self) -> str:
        tensor = "" if self.dtype is None else f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
        return f"{self.kind}({', '.join(text for text in (tensor, self.arguments) if text)})"

    @property
    def released(self) -> bool:
        """Whether the caller may continue: the call has ended or, for a send, the tensor was copied."""
        return self.done or (self.kind == "send" and self.taken)

    @cached_property
    def reads(self) -> range:
        """The range of addresses that the call reads; ``writes`` is the range that it writes."""
        return _addresses(self.source)

    @cached_property
    def writes(self) -> range:
        return _addresses(self.result)

    def will_write_for(self, other: Call) -> bool:
        """Whether the result of this call shares a byte with what the other call reads or writes."""
        ours = self.writes
        if not ours:
            return False
        # A topology asks this for every pair of pending calls. Nearly always the address ranges do not overlap.
        apart = all(each.stop <= ours.start or ours.stop <= each.start for each in (other.reads, other.writes))
        return not apart and (share_memory(self.result, other.source) or share_memory(self.result, other.result))

    def take(self) -> None:
        """Copies the input, and the memory that will be overwritten; then fills that memory with NaN."""
        self.taken = True
        if self.source is not None:
            plain = self.source.resolve_conj().resolve_neg()  # the core reads raw memory
            self.given = plain.clone(memory_format=torch.contiguous_format)
        if self.result is not None:
            self.before = self.result.clone()
            _hide(self.result)


@dataclass(eq=False)
class Operation:
    """The calls of several ranks that belong together."""

    #: For error texts: " as collective 3"; empty for a message.
    place: str
    #: The ranks that must call it; for a message the sender and the receiver.
    ranks: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)

    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.calls]

    def unfinished(self) -> list[Call]:
        """Earlier calls that must end before this operation can run."""
        return [earlier for call in self.calls.values() for earlier in call.after if not earlier.done]


def reduction(options: Any, op: str) -> Any:
    options.reduceOp = getattr(dist.ReduceOp, op)
    return options


def _issue_all_reduce(group: Any, call: Call) -> tuple[Any, Any]:
    return group.allreduce([call.given], reduction(dist.AllreduceOptions(), call.option)), call.given


def _issue_broadcast(group: Any, call: Call) -> tuple[Any, Any]:
    tensor = torch.empty(call.shape, dtype=call.dtype) if call.given is None else call.given
    options = dist.BroadcastOptions()
    options.rootRank = call.option
    return group.broadcast([tensor], options), tensor


def _issue_all_gather(group: Any, call: Call) -> tuple[Any, Any]:
    result = torch.empty((group.size(), *call.shape), dtype=call.dtype)
    work = group.allgather([list(result.unbind(0))], [call.given])
    return work, result.flatten(0, 1) if call.shape else result


def _issue_reduce_scatter(group: Any, call: Call) -> tuple[Any, Any]:
    assert call.given is not None and call.result is not None
    slices = call.given.view(group.size(), *call.result.shape).unbind(0)
    result = torch.empty(call.result.shape, dtype=call.dtype)
    options = reduction(dist.ReduceScatterOptions(), call.option)
    return group.reduce_scatter([result], [list(slices)], options), result


def _issue_send(group: Any, call: Call) -> tuple[Any, Any]:
    return group.send([call.given], *call.option), None


def _issue_recv(group: Any, call: Call) -> tuple[Any, Any]:
    result = torch.empty(call.shape, dtype=call.dtype)
    return group.recv([result], *call.option), result


#: Issues the call of one rank to the core. Returns a Work or None, and the tensor that holds the result after the Work
#: has ended.
ISSUE: dict[str, Callable[[Any, Call], tuple[Any, Any]]] = {
    "all_reduce": _issue_all_reduce,
    "broadcast": _issue_broadcast,
    "all_gather": _issue_all_gather,
    "reduce_scatter": _issue_reduce_scatter,
    "barrier": lambda group, _: (group.barrier(), None),
    "send": _issue_send,
    "recv": _issue_recv,
}


def agree(one: Call, other: Call) -> bool:
    """Whether two calls may belong to one operation."""
    if {one.kind, other.kind} == {"send", "recv"}:
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    return (one.kind, one.shape, one.dtype, one.arguments) == (other.kind, other.shape, other.dtype, other.arguments)


def share_memory(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether some byte belongs to both tensors."""
    if one is None or other is None or not one.numel() or not other.numel():
        return False
    start = min(one.data_ptr(), other.data_ptr())
    one_bytes, other_bytes = _bytes_of(one, start), _bytes_of(other, start)
    if one_bytes.stop <= other_bytes.start or other_bytes.stop <= one_bytes.start:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    # The ranges overlap, but the tensors may be different columns of a matrix: mark the bytes of one tensor, then look
    # up the bytes of the other.
    marks = torch.zeros(max(one_bytes.stop, other_bytes.stop), dtype=torch.bool)
    _at(marks, one, one_bytes.start).fill_(True)
    return bool(_at(marks, other, other_bytes.start).any())


def _addresses(tensor: torch.Tensor | None) -> range:
    return range(0) if tensor is None or not tensor.numel() else _bytes_of(tensor, 0)


def _bytes_of(tensor: torch.Tensor, start: int) -> range:
    """The byte range of a tensor from its first byte to after its last byte, relative to the address ``start``."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr() - start
    return range(first, first + (last + 1) * tensor.element_size())


def _at(marks: torch.Tensor, tensor: torch.Tensor, first: int) -> torch.Tensor:
    """The entries of ``marks`` for the bytes of ``tensor``; ``first`` is the index of its first byte."""
    size = tensor.element_size()
    return marks.as_strided((*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1), first)
