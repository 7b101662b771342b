"""Converts lists of tensors to messages: their description, where the list is cut, and the bytes of each message.

Both ranks compute these from dtypes and shapes alone. Work for each of thousands of small tensors is done in the
extension, because a Python loop takes longer than sending the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from torch_sagellm._private import load

#: In bytes. A backend that is not ours sends tensors smaller than SMALL packed together, in messages of at most PACK.
SMALL, PACK = 32 << 10, 1 << 20
#: In bytes. Our backend sends a list of tensors as one message of at most JOINED, without packing them. For each tensor
#: this takes about 50 ns more than packing it, so tensors smaller than TINY are packed there, too. A tensor of LARGE or
#: more is a message by itself. This is as fast as joining it with others, and a fifth faster if both ranks can reach
#: the tensor, because the tensor is then copied only once.
JOINED, TINY, LARGE = 4 << 20, 1 << 10, 1 << 20


class Run(NamedTuple):
    """A number of equal tensors that follow each other in a list."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    number: int

    @property
    def nbytes(self) -> int:
        """The size in bytes of one of the tensors."""
        return prod(self.shape) * int(self.dtype.itemsize)


@dataclass
class Listed:
    """Tensors that are sent or received, with their description."""

    tensors: list[Tensor]
    runs: list[Run]
    #: Whether all are contiguous in CPU memory, so that the extension can copy them.
    plain: bool

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device if self.tensors else torch.device("cpu")


def plain(tensors: list[Tensor], written: bool) -> Listed | None:
    """The list if the extension accepts all its tensors, as it does for nearly all lists; otherwise None."""
    if not all(isinstance(each, Tensor) for each in tensors[:1]):
        return None
    found = load.extension()._runs(tensors, written)
    if found is None:
        return None
    runs = [Run(*each) for each in found]
    return Listed(tensors, runs, True) if all(travels(run.dtype) for run in runs) else None


def described(tensors: list[Tensor]) -> list[Run]:
    """The description of any tensors that were checked."""
    runs = groupby(tensors, key=lambda each: (each.dtype, each.shape))
    return [Run(dtype, tuple(shape), sum(1 for _ in run)) for (dtype, shape), run in runs]


@cache
def name(dtype: torch.dtype) -> str:
    """The dtype's name as an attribute of torch."""
    return str(dtype).removeprefix("torch.")


@cache
def travels(dtype: torch.dtype) -> bool:
    """Whether a number of this dtype is whole bytes without further data, unlike in quantised tensors."""
    if name(dtype).startswith(("q", "float4", "bits")):
        return False
    if dtype.is_complex:  # torch warns when some complex tensors are created
        return True
    try:
        return bool(torch.empty(2, dtype=dtype).view(torch.uint8).numel() == 2 * dtype.itemsize)
    except (RuntimeError, TypeError):
        return False


@dataclass
class Message:
    """The tensors from ``begin`` to ``end`` (exclusive). Tensors without data among them need no bytes."""

    begin: int
    end: int
    nbytes: int
    #: The tensors with data.
    parts: list[Run]

    @property
    def is_one(self) -> bool:
        """Whether it has a single tensor with data, which is then its first tensor."""
        return len(self.parts) == 1 and self.parts[0].number == 1

    @property
    def is_tiny(self) -> bool:
        """Whether its tensors have on average less than TINY bytes."""
        return self.nbytes < TINY * sum(run.number for run in self.parts)


def messages(runs: Sequence[Run], most: int, alone: int | None, mixed: bool) -> Iterator[Message]:
    """Cuts a list into messages; each has at most ``most`` bytes, or is one larger tensor.

    A tensor of ``alone`` bytes or more is a message by itself (None: no tensor is). The tensors in a message have one
    dtype, unless ``mixed``.

    Both ranks cut by the same rule. Tensors without data do not end a message.
    """
    message = Message(0, 0, 0, [])
    at = 0
    for run in runs:
        size = run.nbytes
        large = alone is not None and size >= alone
        left = run.number if size else 0
        if left and message.parts and (large or not (mixed or message.parts[-1].dtype is run.dtype)):
            yield message
            message = Message(at, at, 0, [])
        begin = at
        while left:
            least = 0 if message.parts else 1
            take = min(left, least if large else max((most - message.nbytes) // size, least))
            if take:
                if not message.parts:
                    message.begin = begin
                message.parts.append(run._replace(number=take))
                begin, left = begin + take, left - take
                message.end, message.nbytes = begin, message.nbytes + take * size
            if left or large:
                yield message
                message = Message(begin, begin, 0, [])
        at += run.number
    if message.parts:
        yield message


def packed(listed: Listed, message: Message) -> Tensor:
    """The bytes to send; for a single contiguous tensor the tensor itself."""
    run = listed.tensors[message.begin : message.end]
    if message.is_one:
        return run[0].detach().contiguous()
    if listed.plain:
        whole = torch.empty(message.nbytes, dtype=torch.uint8)
        load.extension()._pack(listed.tensors, message.begin, message.end, whole)
        return whole
    return _flatten_dense_tensors([each for each in run if each.nbytes])


def room(listed: Listed, message: Message) -> Tensor:
    """The memory that receives the bytes.

    For a single contiguous tensor this is the tensor itself. Otherwise `unpack` copies the bytes to the tensors
    afterwards.
    """
    if _is_itself(listed, message):
        return listed.tensors[message.begin].detach()
    return torch.empty(message.nbytes, dtype=torch.uint8)


def unpack(listed: Listed, message: Message, whole: Tensor) -> None:
    """Copies the bytes that were received in ``room`` to their tensors."""
    if _is_itself(listed, message):
        return
    if listed.plain:
        load.extension()._unpack(whole, listed.tensors, message.begin, message.end)
        return
    run = [each for each in listed.tensors[message.begin : message.end] if each.nbytes]
    with torch.inference_mode():  # every tensor may be written in this mode
        torch._foreach_copy_(run, list(_unflatten_dense_tensors(whole.view(run[0].dtype), run)))


def _is_itself(listed: Listed, message: Message) -> bool:
    return message.is_one and listed.tensors[message.begin].is_contiguous()


def made(runs: Sequence[Run]) -> list[Tensor]:
    """Creates new tensors on the CPU. Equal small tensors are parts of one memory block of at most PACK bytes."""
    tensors: list[Tensor] = []
    for run in runs:
        size = run.nbytes
        if run.number == 1 or not 0 < size < SMALL:
            tensors += [torch.empty(run.shape, dtype=run.dtype) for _ in range(run.number)]
            continue
        for at in range(0, run.number, PACK // size):
            block = torch.empty(min(PACK // size, run.number - at), *run.shape, dtype=run.dtype)
            tensors += [each.detach() for each in block.unbind(0)]  # separate for autograd
    return tensors
