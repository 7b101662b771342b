"""The formats in which tensors are summed in fewer bytes; each class states the error bound of one call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from torch_sagellm._private import groups
from torch_sagellm.api import encoding, hosts


class Compression(ABC):
    """A method to sum a tensor over ranks in fewer bytes.

    Example::

        class Plain(torch_sagellm.Compression):
            name = "plain"

            def all_reduce(self, tensor, group, key=None):
                dist.all_reduce(tensor, group=group)
                return tensor.nbytes

        torch_sagellm.compressed_all_reduce(torch.ones(4), Plain())
    """

    #: Its name in ``compressed_all_reduce``.
    name: str
    #: Whether it keeps a remainder from call to call, which requires a ``key`` for each tensor.
    needs_key: bool = False

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        """Sums a contiguous float tensor over the ranks of ``group``, in place; returns the bytes that it sent.

        The returned number is ``tensor.nbytes`` times a ratio: the bytes that leave the host, divided by those of a
        plain all_reduce.

        ``key`` identifies the tensor for compressions that keep a remainder from call to call. A tuple of parameters
        means that the tensor holds their gradients, one after the other. Such a key is needed because a bucket of
        DistributedDataParallel holds different parameters from the second step on.
        """

    def average(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        """Like ``all_reduce``, but averages instead of summing.

        This method divides after the sum. A format whose sums may overflow overrides it and divides before.
        """
        sent = self.all_reduce(tensor, group, key)
        tensor /= dist.get_world_size(group)
        return sent


class Half(Compression):
    """16 bits: each rank's numbers are rounded once, the core adds them in 32 bits, and the result is rounded once.

    The relative error of each addend and of the result is at most 2^-11 for float16 (whose largest number is 65,504)
    and 2^-8 for bfloat16. An average is finite if its addends are, because the sum is divided before it is rounded.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16`` (ValueError otherwise).

    Example::

        torch_sagellm.compressed_all_reduce(torch.ones(512), torch_sagellm.Half(torch.bfloat16))
    """

    def __init__(self, dtype: torch.dtype) -> None:
        names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        if dtype not in names:
            raise ValueError(f"sagellm Half: dtype is {dtype}, expected one of {', '.join(map(str, names))}")
        self.dtype = dtype
        self.name = names[dtype]

    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        return self._reduce(tensor, tensor, dist.ReduceOp.SUM, group)

    def average(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        ranks = dist.get_world_size(group)
        if not _has_average(group):
            return self._reduce(tensor, tensor / ranks, dist.ReduceOp.SUM, group)
        # The core adds in float32, which has the same range as bfloat16, so the sum of the largest numbers would
        # overflow. Therefore the numbers are divided by a power of two first, which changes only their exponents.
        scale = 2.0 ** (ranks - 1).bit_length() if self.dtype is torch.bfloat16 else 1.0
        return self._reduce(tensor, tensor, dist.ReduceOp.AVG, group, scale)

    def _reduce(self, tensor: torch.Tensor, addend: torch.Tensor, op: Any, group: Any, scale: float = 1.0) -> int:
        half = addend.to(self.dtype)
        if scale != 1 and half.data_ptr() == tensor.data_ptr():
            half = half.clone()
        if scale != 1:
            half /= scale
        dist.all_reduce(half, op=op, group=group)
        if scale != 1:
            half *= scale
        tensor.copy_(half)
        return int(half.nbytes)


class Int8(Compression):
    """Integers from -127 to 127 with a float32 scale for each block of a flat tensor.

    Every rank sums one part: it receives this part from all ranks by an all_to_all, and an all_gather distributes the
    sums. If m is the largest magnitude of a block, each addend has an error of at most m / 254; the sum then has
    another such error for its own m. If there are several hosts, and one of them has two or more ranks, each host is
    summed first, in full precision, and its sum is one addend. A host then sends 25.4 % of what it would send in a
    plain all_reduce, for any number of its ranks.

    Args:
        block: number of elements that share a scale, at least 1 (ValueError).

    Example::

        torch_sagellm.compressed_all_reduce(torch.ones(512), torch_sagellm.Int8())
    """

    name = "int8"

    def __init__(self, block: int = 256) -> None:
        if block < 1:
            raise ValueError(f"sagellm Int8: block is {block} elements, expected 1 or more")
        self.block = block

    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        return self._reduce(tensor, group, 1)

    def average(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        return self._reduce(tensor, group, dist.get_world_size(group))

    def _reduce(self, tensor: torch.Tensor, group: Any, divisor: int) -> int:
        flat = tensor.view(-1).to(torch.float32)  # the tensor's own memory if it is float32, otherwise a copy
        among = _among(group)
        if among is None:
            encoded, called = self._between(flat, group, divisor)
            _agreed(called)
            encoding.decode(encoded, self.block, flat)
            sent = self._bytes(flat.numel(), dist.get_world_size(group))
        else:
            part = _part_of_host(flat, group, among, divisor)
            if among.is_in_column:
                encoded, called = self._between(part, among.across, divisor)
                _agreed(_called_by_host(called, among, flat))
                encoding.decode(encoded, self.block, part)
            sent = self._bytes(len(part), len(among.columns[0])) * len(among.columns)
            flat.copy_(_whole_of_host(part, among)[: flat.numel()])
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))
        return sent

    def _blocks(self, numel: int, ranks: int) -> int:
        return math.ceil(numel / self.block / ranks) * ranks

    def _bytes(self, numel: int, ranks: int) -> int:
        """The encoded bytes of a tensor of ``numel`` elements that ``ranks`` ranks sum."""
        return self._blocks(numel, ranks) * (encoding.SCALE_BYTES + self.block)

    def _between(self, flat: torch.Tensor, group: Any, divisor: int) -> tuple[torch.Tensor, list[bool]]:
        """The encoded sum of ``flat`` over the ranks, and whether each rank asked for an average.

        Both steps send the other ranks' share of the encoded data, like the two steps of a plain all_reduce.
        """
        ranks = dist.get_world_size(group)
        encoded = encoding.encoded(flat, self.block, self._blocks(flat.numel(), ranks))
        encoding.mark(encoded, ranks, divisor)
        every = torch.empty_like(encoded)
        dist.all_to_all_single(every, encoded, group=group)
        called = encoding.marks(every, ranks)
        dist.all_gather_into_tensor(encoded, encoding.summed(every, self.block, ranks, divisor), group=group)
        return encoded, called


class TopK(Compression):
    """Sends the share ``ratio`` of the elements, the largest in magnitude; adds the remaining ones to the elements of
    the next call.

    No element is lost, only delayed: the sum over all calls equals that of plain calls, except for the remainder at the
    end, which ``residual(key)`` returns. If there are several hosts, and one of them has two or more ranks, each host
    is summed first. If the smallest host has n ranks, n ranks of each host then select elements, each from its part of
    the host's sum. So a host sends the same amount for any number of its ranks. An element is sent with its 32-bit
    index to every other rank (host). A tensor is identified by its ``key``: a number, a name, or the parameter whose
    gradient it is. The remainder of a parameter is dropped with the parameter. A call that fails changes no remainder.

    Args:
        ratio: more than 0 and at most 1 (ValueError).

    Example::

        remembering = torch_sagellm.TopK(0.25)
        torch_sagellm.compressed_all_reduce(torch.ones(512), remembering, key="gradient")
    """

    name = "topk"
    needs_key = True

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"sagellm TopK: ratio is {ratio}, expected more than 0 and at most 1")
        self.ratio = ratio
        self._left: dict[Any, torch.Tensor] = {}
        #: The remainders whose keys are parameters, compared by identity. The table keeps no parameter alive, and no
        #: other parameter gets the remainder of one that was freed.
        self._left_of: Any = WeakTensorKeyDictionary()

    def residual(self, key: Any) -> torch.Tensor | None:
        """The elements that this rank has not sent yet, as a flat tensor; None if no call has had this key."""
        found: torch.Tensor | None = self._kept(key).get(key)
        return found

    def _kept(self, key: Any) -> Any:
        return self._left_of if isinstance(key, torch.Tensor) else self._left

    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        return self._reduce(tensor, group, key, 1)

    def average(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        return self._reduce(tensor, group, key, dist.get_world_size(group))

    def _reduce(self, tensor: torch.Tensor, group: Any, key: Any, divisor: int) -> int:
        flat = tensor.view(-1)
        parts = _parts(key, flat.numel())
        # The tensor and the remainder change only after the exchange, so that a failed call can be repeated.
        rest = self._with_remainder(flat, parts)
        among = _among(group)
        if among is None:
            total, called = self._between(rest, group, divisor)
            _agreed(called)
            sent = self._bytes(rest, dist.get_world_size(group))
        else:
            part = _part_of_host(rest, group, among, divisor)
            total, sent = part, self._bytes(part, len(among.columns[0])) * len(among.columns)
            if among.is_in_column:
                total, called = self._between(part, among.across, divisor)
                _agreed(_called_by_host(called, among, flat))
            total = _whole_of_host(total, among)[: flat.numel()]
            rest.zero_()
            if among.is_in_column:
                # What remains of this rank's part of the host's sum is added to this rank's addend in the next call.
                begin = among.place * len(part)
                rest[begin : begin + len(part)] = part[: max(len(rest) - begin, 0)]
        flat.copy_(total)
        keys, sizes = zip(*parts, strict=True)
        for one, left in zip(keys, rest.split(sizes), strict=True):
            self._kept(one)[one] = left
        return sent

    def _count(self, numel: int) -> int:
        return max(1, math.ceil(self.ratio * numel)) if numel else 0

    def _bytes(self, rest: torch.Tensor, ranks: int) -> int:
        """The bytes of the elements of ``rest`` that are sent, for ``ranks`` ranks."""
        index = 4 if rest.numel() <= torch.iinfo(torch.int32).max else 8
        # Each rank's elements are sent to all other ranks. A plain all_reduce sends each of them 2 / ranks of the
        # tensor.
        return self._count(rest.numel()) * (index + int(rest.itemsize)) * ranks // 2

    def _between(self, rest: torch.Tensor, group: Any, divisor: int) -> tuple[torch.Tensor, list[bool]]:
        """Removes the elements to send from ``rest``.

        Returns the sum of all ranks' elements, and whether each rank asked for an average.
        """
        ranks = dist.get_world_size(group)
        count = self._count(rest.numel())
        places = encoding.largest(rest, count)
        values = rest[places]
        rest[places] = 0
        encoding.mark_places(places, divisor)
        every_place = places.new_empty(ranks * count)
        every_value = values.new_empty(ranks * count)
        dist.all_gather_into_tensor(every_place, places, group=group)
        called = encoding.marks_of_places(every_place, ranks)
        dist.all_gather_into_tensor(every_value, values, group=group)
        total = torch.zeros_like(rest)
        # Rank by rank, so that all ranks add in the same order.
        for place, value in zip(every_place.chunk(ranks), every_value.chunk(ranks), strict=True):
            total.index_add_(0, place, value / divisor)
        return total, called

    def _with_remainder(self, flat: torch.Tensor, parts: list[tuple[Any, int]]) -> torch.Tensor:
        """A copy of the elements, plus the remainder of earlier calls."""
        whole = flat.clone()
        for (key, size), addend in zip(parts, whole.split([size for _, size in parts]), strict=True):
            left = self.residual(key)
            if left is None:
                continue
            if left.numel() != size:
                shown = f"a parameter of shape {list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
                raise ValueError(
                    f"sagellm TopK: the tensor of key {shown} has {size} elements, expected the {left.numel()} of an "
                    "earlier call, which has left some of them to be sent: give each tensor a key of its own"
                )
            addend += left
        return whole


class Auto(Compression):
    """int8 between hosts for tensors of 64 KiB and more, else no compression.

    On one host int8 and top-k were slower than no compression in every measurement. Smaller tensors would save little
    (64 KiB take 0.5 ms on 1 Gbit/s) and need a second exchange; a tensor of a few bytes would even become larger.
    Between hosts int8 was measured with 4 MiB. It was faster than no compression on all links of up to 10 Gbit/s, and
    on a link without limit if each rank had a core. With two ranks per core it was 1.04 to 1.5 times slower on the link
    without limit.

    Example::

        torch_sagellm.compressed_all_reduce(torch.ones(512), "auto")
    """

    name = "auto"
    LEAST_BYTES = 64 << 10

    def _compresses(self, tensor: torch.Tensor, group: Any) -> bool:
        return tensor.nbytes >= self.LEAST_BYTES and not on_one_host(group)

    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        if self._compresses(tensor, group):
            return Int8().all_reduce(tensor, group, key)
        dist.all_reduce(tensor, group=group)
        return int(tensor.nbytes)

    def average(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        if self._compresses(tensor, group):
            return Int8().average(tensor, group, key)
        if _has_average(group):
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
            return int(tensor.nbytes)
        tensor /= dist.get_world_size(group)
        dist.all_reduce(tensor, group=group)
        return int(tensor.nbytes)


def on_one_host(group: Any) -> bool:
    """Whether all ranks of a group are on one host. Collective in the group's first call."""
    return len(set(hosts_of(group)[0])) == 1


def _parts(key: Any, numel: int) -> list[tuple[Any, int]]:
    """The keys and sizes of a flat tensor's parts: one part, or one for each parameter of a tuple."""
    if not (isinstance(key, tuple) and key and all(isinstance(each, torch.Tensor) for each in key)):
        return [(key, numel)]
    sizes = [each.numel() for each in key]
    if sum(sizes) != numel:
        raise ValueError(
            f"sagellm: the parameters of key have {sum(sizes)} elements, and the tensor {numel}, expected as many"
        )
    return list(zip(key, sizes, strict=True))


#: For each group: the host of each rank, and the groups that sum each host first, if any. Filled in the group's first
#: compressed call.
_places: Any = WeakKeyDictionary()


def hosts_of(group: Any) -> tuple[list[Any], hosts.Hosts | None]:
    """The host of each rank, and the groups that sum each host first, if any. Collective in a group's first call."""
    base = dist.group.WORLD if group is None else group
    if base not in _places:
        where = hosts.names(base)
        _places[base] = (where, hosts.find(base, where, even=False))
    known: tuple[list[Any], hosts.Hosts | None] = _places[base]
    return known


def forget(group: Any) -> hosts.Hosts | None:
    """Drops the entry of a group that ends; returns its ``Hosts``, or None if its hosts were not summed first."""
    among: hosts.Hosts | None = _places.pop(group, (None, None))[1]
    return among


def _among(group: Any) -> hosts.Hosts | None:
    return hosts_of(group)[1]


def _agreed(called: list[bool]) -> None:
    """Raises the error of a sum that other ranks called as an average; all ranks raise it, and no tensor has changed.

    ``called``: whether each rank asked for an average. Sums and averages send the same number of bytes, so a mark in
    the data says which of the two the rank called.
    """
    if any(called) and not all(called):
        raise dist.DistBackendError(
            "sagellm compressed_all_reduce: some ranks called it with op='sum' and others with op='avg'; no tensor has "
            "changed. Every rank must call the same collectives in the same order with the same arguments"
        )


def _called_by_host(called: list[bool], among: hosts.Hosts, like: torch.Tensor) -> list[bool]:
    """Adds what the other ranks of this host have received, because each rank exchanges data with only one rank of
    every host."""
    if not called or not among.even:  # ranks of uneven hosts have compared before (`_part_of_host`)
        return called
    own = like.new_tensor([float(any(called)), float(all(called))], dtype=torch.float32)
    every = own.new_empty(2 * len(among.columns))
    dist.all_gather_into_tensor(every, own, group=among.inside)
    return [bool(each) for each in every.tolist()]


def _part_of_host(flat: torch.Tensor, group: Any, among: hosts.Hosts, divisor: int) -> torch.Tensor:
    """This rank's part of its host's sum: the same number of elements on every rank, padded with zeros.

    If not all hosts have this rank's place, the rank has no part, and gets uninitialized memory of that size.
    """
    parts = len(among.columns)
    size = math.ceil(flat.numel() / parts)
    padded = torch.nn.functional.pad(flat, (0, size * parts - flat.numel()))
    part = padded.new_empty(size)
    if among.even:
        dist.reduce_scatter_tensor(part, padded, group=among.inside)
        return part
    # Ranks without a part send nothing between hosts that could say whether they called sum or average. Therefore all
    # ranks compare that first.
    every = flat.new_empty(dist.get_world_size(group), dtype=torch.float32)
    dist.all_gather_into_tensor(every, every.new_tensor([float(divisor > 1)]), group=group)
    _agreed([bool(each) for each in every.tolist()])
    dist.all_reduce(padded, group=among.inside)
    return padded[among.place * size :][:size] if among.is_in_column else part


def _whole_of_host(part: torch.Tensor, among: hosts.Hosts) -> torch.Tensor:
    """All parts, in the order of the places."""
    whole = part.new_empty(part.numel() * len(among.columns))
    if among.even:
        dist.all_gather_into_tensor(whole, part, group=among.inside)
        return whole
    for place, each in enumerate(whole.chunk(len(among.columns)) if len(whole) else ()):
        if place == among.place:
            each.copy_(part)
        dist.broadcast(each, group=among.inside, group_src=place)
    return whole


def _has_average(group: Any) -> bool:
    """Whether our engine serves the group. It supports ReduceOp.AVG; gloo as a backend or as our delegate does not."""
    ours = groups.backend_of(dist.group.WORLD if group is None else group)
    return ours is not None and not ours.delegate_reason
