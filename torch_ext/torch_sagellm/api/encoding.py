"""Encodes 32-bit floats as 8-bit integers with a scale for each block, and finds the indices of the largest elements.

On the CPU the core computes (``src/reduce/int8.rs``); on a device torch does, in the same steps. An encoded block is
its scale (the largest magnitude divided by 127), then a byte for each element. A block that contains an infinity or a
NaN decodes to NaN.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from torch_sagellm._private import load

SCALE_BYTES = 4
#: Index of the byte of a scale that has the sign bit.
_SIGN = 3 if sys.byteorder == "little" else 0


def encoded(flat: Tensor, block: int, blocks: int) -> Tensor:
    """Encodes float32 numbers into ``blocks`` blocks; the space after the last number is encoded as 0."""
    into = torch.empty(blocks * (SCALE_BYTES + block), dtype=torch.uint8, device=flat.device)
    if flat.is_cpu:
        load.extension()._int8_encode(flat, block, into)
    else:
        padded = torch.nn.functional.pad(flat, (0, blocks * block - flat.numel()))
        _pack(padded.view(blocks, block), into)
    return into


def mark(encoded: Tensor, ranks: int, divisor: int) -> None:
    """Marks the part for each of ``ranks`` ranks as part of an average; a ``divisor`` of 1 means a sum, without a mark.

    The mark is a negative sign of the part's first scale; unmarked scales are never negative. Tensors on devices are
    not marked, because the host would have to wait for the device to read a mark.
    """
    if encoded.is_cpu and encoded.numel() and divisor > 1:
        encoded.view(ranks, -1)[:, _SIGN] |= 0x80


def marks(every: Tensor, ranks: int) -> list[bool]:
    """Removes the marks of the parts that came from ``ranks`` ranks. Returns the marks; an empty list on a device."""
    if not every.is_cpu or not every.numel():
        return []
    signs = every.view(ranks, -1)[:, _SIGN]
    found = [sign > 0x7F for sign in signs.tolist()]
    if any(found):
        signs &= 0x7F
    return found


def mark_places(places: Tensor, divisor: int) -> None:
    """Like ``mark``, for the indices of a top-k sum: the first index becomes negative."""
    if places.is_cpu and places.numel() and divisor > 1:
        places[:1].bitwise_not_()


def marks_of_places(every: Tensor, ranks: int) -> list[bool]:
    """Like ``marks``, for the indices that all ranks sent."""
    if not every.is_cpu or not every.numel():
        return []
    firsts = every.view(ranks, -1)[:, 0]
    found = [first < 0 for first in firsts.tolist()]
    if any(found):
        firsts.copy_(torch.where(firsts < 0, firsts.bitwise_not(), firsts))
    return found


def summed(addends: Tensor, block: int, ranks: int, divisor: int) -> Tensor:
    """The encoded sum of the addends of all ranks, which are stored one after the other in rank order.

    Each addend is divided by ``divisor`` first.
    """
    into = addends.new_empty(addends.numel() // ranks)
    if addends.is_cpu:
        load.extension()._int8_sum(addends, block, divisor, into)
    else:
        total = torch.zeros((), device=addends.device)
        for addend in addends.chunk(ranks):
            numbers, scales = _unpacked(addend, block)
            total = total + numbers * (scales / scales.new_full((), divisor))
        _pack(total.view(-1, block), into)
    return into


def decode(from_: Tensor, block: int, into: Tensor) -> None:
    """Decodes as many numbers as ``into`` holds."""
    if from_.is_cpu:
        load.extension()._int8_decode(from_, block, into)
    else:
        numbers, scales = _unpacked(from_, block)
        into.copy_((numbers * scales).view(-1)[: into.numel()])


def _pack(rows: Tensor, into: Tensor) -> None:
    # Divisors are tensors, because some devices divide by a Python number by multiplying with its rounded inverse.
    if not len(rows):
        return
    magnitudes = rows.abs().amax(1, keepdim=True)
    scales = torch.where(magnitudes.isfinite(), magnitudes / rows.new_full((), 127.0), torch.nan)
    numbers = torch.round(rows / torch.where(scales > 0, scales, torch.ones_like(scales))).clamp(-127, 127)
    table = into.view(len(rows), SCALE_BYTES + rows.shape[1])
    table[:, :SCALE_BYTES] = scales.view(torch.uint8)
    table[:, SCALE_BYTES:] = torch.where(scales.isfinite(), numbers, 0.0).to(torch.int8).view(torch.uint8)


def _unpacked(encoded: Tensor, block: int) -> tuple[Tensor, Tensor]:
    if not encoded.numel():  # torch cannot view an empty tensor as another dtype
        return encoded.new_empty((0, block), dtype=torch.float32), encoded.new_empty((0, 1), dtype=torch.float32)
    table = encoded.view(-1, SCALE_BYTES + block)
    scales = table[:, :SCALE_BYTES].contiguous().view(torch.float32)
    return table[:, SCALE_BYTES:].contiguous().view(torch.int8).float(), scales


def largest(flat: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` elements of largest magnitude; int32 if the tensor has less than 2^31 elements."""
    small = flat.numel() <= torch.iinfo(torch.int32).max
    if flat.is_cpu and flat.dtype is torch.float32 and small:
        places = torch.empty(count, dtype=torch.int32)
        load.extension()._largest(flat, places)
        return places
    found = torch.topk(flat.abs(), count, sorted=False).indices
    return found.to(torch.int32) if small else found
