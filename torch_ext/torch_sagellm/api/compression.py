"""Sums in fewer bytes: 16 bits, whole numbers of eight bits with a scale per block, or the largest elements only.

``compressed_all_reduce`` is one call; ``CompressionHook`` is the same for the buckets of DistributedDataParallel. Each
class below states its error bound for one call; the elements that ``TopK`` leaves out are added to the next call.
"""

# No annotations from the future here: DistributedDataParallel reads those of a hook, and does not take texts.
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from torch_sagellm.api import hosts
from torch_sagellm.api.arguments import Op, checked_dense, checked_op, checked_tensor, checked_written
from torch_sagellm.api.group_choice import our_backend

logger = logging.getLogger("sagellm")


@dataclass
class CompressionStats:
    """The bytes of the tensors, and of them the share that a plain all_reduce would have sent in their place.

    ``sent_bytes`` / ``plain_bytes`` is what leaves a host, or a rank where all are on one host, over what leaves it in
    a plain all_reduce of the same tensors.

    Example::

        stats = torch_sagellm.CompressionStats()
        torch_sagellm.compressed_all_reduce(torch.ones(4096), "fp16", stats=stats)
        assert stats.saved_bytes == stats.plain_bytes // 2
    """

    calls: int = 0
    plain_bytes: int = 0
    sent_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """The bytes saved; negative where compression cost more than it saved."""
        return self.plain_bytes - self.sent_bytes


class Compression(ABC):
    """A way to sum a tensor over ranks in fewer bytes.

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
    #: Whether it keeps a remainder from call to call, so that each tensor needs a ``key``.
    needs_key: bool = False

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        """Sums a contiguous float tensor over the ranks of ``group``, in place; returns the bytes that it sent.

        That is ``tensor.nbytes`` times what leaves the host over what leaves it in a plain all_reduce.

        ``key`` names the tensor for compressions that keep a remainder from call to call. A tuple of parameters says
        that the tensor holds their gradients, one behind the other: a bucket of DistributedDataParallel holds others
        from the second step on.
        """

    def average(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        """The same for the average. A format whose sums may be too large for it divides earlier than this one."""
        sent = self.all_reduce(tensor, group, key)
        tensor /= dist.get_world_size(group)
        return sent


class Half(Compression):
    """16 bits: each rank's numbers are rounded once, the core adds them in 32 bits, and the result is rounded once.

    The relative error of each addend and of the result is at most 2^-11 for float16 (whose largest number is 65,504)
    and 2^-8 for bfloat16. An average is finite where its addends are: it is divided before the sum is rounded.

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
        # bfloat16 has the range of the 32 bits in which numbers are added: the sum of its largest would not fit.
        if self.dtype is torch.float16 and _has_average(group):
            return self._reduce(tensor, tensor, dist.ReduceOp.AVG, group)
        return self._reduce(tensor, tensor / dist.get_world_size(group), dist.ReduceOp.SUM, group)

    def _reduce(self, tensor: torch.Tensor, addend: torch.Tensor, op: Any, group: Any) -> int:
        half = addend.to(self.dtype)
        dist.all_reduce(half, op=op, group=group)
        tensor.copy_(half)
        return int(half.nbytes)


class Int8(Compression):
    """Whole numbers from -127 to 127 with a float32 scale for each block of a flat tensor.

    Every rank adds one part: it gets that of all ranks by an all_to_all, and all get the sums by an all_gather. With m
    the largest magnitude of a block, an addend is off by at most m / 254, and so is the sum once more, by its own m.
    Where several hosts have the same number of ranks, more than one, each host is summed first, in full precision: its
    sum is an addend then, and a host sends 25.4 % of what it would send in a plain all_reduce, however many ranks it
    has.

    Args:
        block: elements that share a scale, 1 or more (ValueError).

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
        flat = tensor.view(-1).to(torch.float32)
        among = _among(group)
        if among is None:
            result, sent = self._between(flat, group, divisor)
        else:
            part, sent = self._between(_part_of_host(flat, among), among.across, divisor)
            result, sent = _whole_of_host(part, among)[: flat.numel()], sent * len(among.columns)
        tensor.copy_(result.view_as(tensor))
        return sent

    def _between(self, flat: torch.Tensor, group: Any, divisor: int) -> tuple[torch.Tensor, int]:
        ranks = dist.get_world_size(group)
        blocks = math.ceil(flat.numel() / self.block / ranks) * ranks
        padded = torch.nn.functional.pad(flat, (0, blocks * self.block - flat.numel()))
        numbers, scales = self._pack(padded.view(blocks, self.block))
        every_number, every_scale = torch.empty_like(numbers), torch.empty_like(scales)
        dist.all_to_all_single(every_number, numbers, group=group)
        dist.all_to_all_single(every_scale, scales, group=group)
        addends = every_number.float() * (every_scale / divisor)
        part = addends.view(ranks, blocks // ranks, self.block).sum(0)
        summed, summed_scales = self._pack(part)
        dist.all_gather_into_tensor(numbers, summed, group=group)
        dist.all_gather_into_tensor(scales, summed_scales, group=group)
        # Both steps pass the share of the other ranks, as those of a plain all_reduce do.
        return (numbers.float() * scales).view(-1)[: flat.numel()], int(numbers.nbytes + scales.nbytes)

    @staticmethod
    def _pack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = rows.abs().amax(1, keepdim=True) / 127
        numbers = torch.round(rows / torch.where(scales > 0, scales, torch.ones_like(scales)))
        return numbers.to(torch.int8), scales


class TopK(Compression):
    """The share ``ratio`` of the elements, those of largest magnitude; the others are added to the next call's.

    No element is lost, it only comes later: the sum over all calls is that of plain calls, except for the remainder at
    the end, which ``residual(key)`` shows. Where several hosts have the same number of ranks, more than one, each host
    is summed first, and each of its ranks picks elements of its part of that sum: a host sends as much however many
    ranks it has. An element travels with its index, of 32 bits, to every other rank (host). A tensor is known by its
    ``key``: a number, a name, or the parameter whose gradient it is. The remainder of a parameter ends with the
    parameter; a call that fails changes no remainder.

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
        #: The same for parameters, by identity: they live no longer for it, and no other ever has their remainder.
        self._left_of: Any = WeakTensorKeyDictionary()

    def residual(self, key: Any) -> torch.Tensor | None:
        """The part of a tensor, flat, that this rank has not sent yet; None where no call has had this key."""
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
        # The tensor and the remainder change only when the exchange is over: a call that failed may be made again.
        rest = self._with_remainder(flat, parts)
        among = _among(group)
        if among is None:
            total, sent = self._between(rest, group, divisor)
        else:
            part = _part_of_host(rest, among)
            total, sent = self._between(part, among.across, divisor)
            total, sent = _whole_of_host(total, among)[: flat.numel()], sent * len(among.columns)
            # What this rank's part of the host's sum keeps is added to this rank's addend in the next call.
            rest.zero_()
            begin = among.place * len(part)
            rest[begin : begin + len(part)] = part[: max(len(rest) - begin, 0)]
        flat.copy_(total)
        keys, sizes = zip(*parts, strict=True)
        for one, left in zip(keys, rest.split(sizes), strict=True):
            self._kept(one)[one] = left
        return sent

    def _between(self, rest: torch.Tensor, group: Any, divisor: int) -> tuple[torch.Tensor, int]:
        """The sum of what all ranks send, which ``rest`` loses; and the bytes."""
        ranks = dist.get_world_size(group)
        count = max(1, math.ceil(self.ratio * rest.numel())) if rest.numel() else 0
        places = torch.topk(rest.abs(), count, sorted=False).indices
        values = rest[places]
        rest[places] = 0
        if rest.numel() <= torch.iinfo(torch.int32).max:
            places = places.to(torch.int32)
        every_place = places.new_empty(ranks * count)
        every_value = values.new_empty(ranks * count)
        dist.all_gather_into_tensor(every_place, places, group=group)
        dist.all_gather_into_tensor(every_value, values, group=group)
        total = torch.zeros_like(rest)
        # Rank by rank, so that all ranks add in the same order.
        for place, value in zip(every_place.chunk(ranks), every_value.chunk(ranks), strict=True):
            total.index_add_(0, place, value / divisor)
        # Each rank's elements go to all others; of a plain all_reduce 2 / ranks of the tensor do.
        return total, int(places.nbytes + values.nbytes) * ranks // 2

    def _with_remainder(self, flat: torch.Tensor, parts: list[tuple[Any, int]]) -> torch.Tensor:
        """A copy of the elements, to which what earlier calls have left out is added."""
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
    """int8 between hosts, and no compression where all ranks are on one host, where int8 and top-k were slower than
    none in every measurement.

    Example::

        torch_sagellm.compressed_all_reduce(torch.ones(512), "auto")
    """

    name = "auto"

    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        if not _on_one_host(group):
            return Int8().all_reduce(tensor, group, key)
        dist.all_reduce(tensor, group=group)
        return int(tensor.nbytes)

    def average(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        if not _on_one_host(group):
            return Int8().average(tensor, group, key)
        tensor /= dist.get_world_size(group)
        dist.all_reduce(tensor, group=group)
        return int(tensor.nbytes)


def _on_one_host(group: Any) -> bool:
    return len(set(_found(group)[0])) == 1


def _parts(key: Any, numel: int) -> list[tuple[Any, int]]:
    """The keys of a flat tensor's parts with their sizes: one, or those of a tuple of parameters."""
    if not (isinstance(key, tuple) and key and all(isinstance(each, torch.Tensor) for each in key)):
        return [(key, numel)]
    sizes = [each.numel() for each in key]
    if sum(sizes) != numel:
        raise ValueError(
            f"sagellm: the parameters of key have {sum(sizes)} elements, and the tensor {numel}, expected as many"
        )
    return list(zip(key, sizes, strict=True))


#: For each group the hosts of its ranks, and how they are summed first; found in its first compressed call.
_places: Any = WeakKeyDictionary()


def _found(group: Any) -> tuple[list[Any], hosts.Hosts | None]:
    base = dist.group.WORLD if group is None else group
    if base not in _places:
        where = hosts.names(base)
        _places[base] = (where, hosts.find(base, where))
    found: tuple[list[Any], hosts.Hosts | None] = _places[base]
    return found


def _among(group: Any) -> hosts.Hosts | None:
    """How the ranks of a group are on hosts, where each host is summed first; a collective in the first call."""
    return _found(group)[1]


def _part_of_host(flat: torch.Tensor, among: hosts.Hosts) -> torch.Tensor:
    """This rank's part of its host's sum: as many elements on every rank, with zeros behind the last."""
    ranks = len(among.columns)
    size = math.ceil(flat.numel() / ranks)
    padded = torch.nn.functional.pad(flat, (0, size * ranks - flat.numel()))
    part = padded.new_empty(size)
    dist.reduce_scatter_tensor(part, padded, group=among.inside)
    return part


def _whole_of_host(part: torch.Tensor, among: hosts.Hosts) -> torch.Tensor:
    whole = part.new_empty(part.numel() * len(among.columns))
    dist.all_gather_into_tensor(whole, part, group=among.inside)
    return whole


def _has_average(group: Any) -> bool:
    """Whether our engine serves the group, which has ReduceOp.AVG; gloo, as a backend or as our delegate, has not."""
    ours = our_backend(dist.group.WORLD if group is None else group)
    return ours is not None and not ours.delegate_reason


def compression(how: str | Compression) -> Compression:
    """A compression by its name: "fp16", "bf16", "int8", "topk" or "auto"; a ValueError names them."""
    if isinstance(how, Compression):
        return how
    if how in ("fp16", "bf16"):
        return Half(torch.float16 if how == "fp16" else torch.bfloat16)
    if how == "int8":
        return Int8()
    if how == "topk":
        return TopK()
    if how == "auto":
        return Auto()
    raise ValueError(f"sagellm: compression {how!r}, expected one of fp16, bf16, int8, topk, auto")


def check_compressible(tensor: torch.Tensor, op: Op, method: Compression, key: Any) -> None:
    """A ValueError or a TypeError where there is no compressed sum of this kind."""
    what = "compressed_all_reduce"
    checked_tensor(what, tensor)
    if checked_op(what, op) not in ("SUM", "AVG"):
        raise ValueError(f"sagellm {what}: op={op!r}, expected one of sum, avg, mean")
    if not tensor.is_floating_point() or tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        raise ValueError(f"sagellm {what}: the tensor is {tensor.dtype}, expected floats")
    checked_dense(what, tensor)
    checked_written(what, tensor)
    if method.needs_key and key is None:
        raise ValueError(
            f"sagellm {what}: {method.name} keeps what it leaves out for the next call, so it needs a key that names "
            "this tensor in every call, expected key=parameter, or a name or number"
        )


def compressed_all_reduce(
    tensor: torch.Tensor,
    how: str | Compression,
    *,
    op: Op = "sum",
    group: Any = None,
    key: Any = None,
    stats: CompressionStats | None = None,
) -> torch.Tensor:
    """``all_reduce`` in fewer bytes, in place; returns the tensor.

    Autograd does not see the call: the tensor may be a parameter, or one that a graph holds.

    Args:
        tensor: of floats (ValueError otherwise); every rank passes the same shape and dtype.
        how: "fp16", "bf16", "int8", "topk", an object of one of the classes, or "auto": int8 between hosts, and no
            compression on one host. There int8 and top-k are slower than none, which the log says once. A ``TopK``
            object keeps what it leaves out for the next call; "topk" by its name is one call alone, and what it leaves
            out is lost.
        op: "sum" or "avg" ("mean").
        key: names the tensor for a ``TopK`` object, which needs it (ValueError): the same in every call with this
            tensor, and no other's. The parameter will do whose gradient it is; the gradient itself is a new tensor in
            every step.
        stats: counts the bytes, if given.

    Raises:
        TypeError: it is no tensor.
        ValueError: the compression or the op is unknown, the tensor has no floats or is not dense (sparse, expanded,
            without data), or a key is missing. Nothing was sent.

    Example::

        gradient = torch_sagellm.compressed_all_reduce(torch.ones(512), "int8", op="avg")
    """
    method = compression(how)
    if method.needs_key and isinstance(how, str):
        if key is not None:
            raise ValueError(
                f"sagellm compressed_all_reduce: key is {key!r}, and {how!r} keeps nothing from call to call, expected "
                "an object: make one torch_sagellm.TopK(), and pass it with the key in every call"
            )
        key = how
    check_compressible(tensor, op, method, key)
    with torch.no_grad():
        own = tensor.detach()
        # In place where it can be. Methods compute with dense numbers of at least 16 bits.
        direct = own.is_contiguous() and own.element_size() > 1 and not own.is_neg() and not own.is_inference()
        work = own if direct else _dense(own)
        reduce = method.all_reduce if checked_op("compressed_all_reduce", op) == "SUM" else method.average
        _say_if_slower(method, group, tensor)
        sent = reduce(work, group, key)
        if not direct:
            # Tensors of inference mode may be written in that mode only, and all others may be written there, too.
            with torch.inference_mode():
                own.copy_(work)
    if stats is not None:
        stats.calls += 1
        stats.plain_bytes += tensor.nbytes
        stats.sent_bytes += sent
    return tensor


_said: Any = WeakKeyDictionary()


def _say_if_slower(method: Compression, group: Any, tensor: torch.Tensor) -> None:
    """One line of the log for each group on one host whose CPU tensors are compressed."""
    base = dist.group.WORLD if group is None else group
    if base in _said or not tensor.is_cpu or not isinstance(method, Int8 | TopK):
        return
    _said[base] = True
    if dist.get_world_size(base) > 1 and _on_one_host(base):
        logger.warning(
            "all ranks of this group are on one host, where %s is slower than no compression: use compress='auto', "
            "which compresses between hosts only",
            method.name,
        )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    dtype = tensor.dtype if tensor.element_size() > 1 else torch.float32
    copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    return copy.copy_(tensor)


class CompressionThread:
    """A thread that makes one compressed sum after the other, in a separate group.

    So all ranks call the same collectives in the same order, whatever else their other threads call.

    Args:
        group: the ranks; None the default group. All of them make the thread at the same point.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = _own_group(group)
        _found(self.group)  # here, because other threads make no groups beside the caller's
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sagellm-compression")

    def later(self, work: Callable[[], torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        """Makes the thread call ``work`` after all earlier calls; returns the future of its result."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # a wait for the future raises it
                future.set_exception(error)

        self._thread.submit(run)
        return future

    def close(self) -> None:
        """Ends the thread and the group; all ranks call it after the last sum."""
        self._thread.shutdown()
        among = _places.pop(self.group, (None, None))[1]
        for group in [self.group] if among is None else [among.across, among.inside, self.group]:
            dist.destroy_process_group(group)


class CompressionHook:
    """Averages the gradients of DistributedDataParallel on the CPU in fewer bytes.

    One thread takes one bucket after the other, in a separate group: so all ranks call the same collectives in the same
    order, whatever the number of buckets, and the backward pass goes on meanwhile.

    Args:
        how: as in ``compressed_all_reduce``, or "topk". What that leaves out is kept by parameter, and
            ``hook.compression.residual(parameter)`` shows it.
        group: the ranks of the model; None the default group. All of them make the hook at the same point.

    Raises:
        ValueError: the compression is unknown. From the backward pass, before anything is sent: the gradients are on a
            device; torch's own hooks serve those.

    Example::

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        hook = torch_sagellm.CompressionHook("int8")
        model.register_comm_hook(None, hook)
        model(torch.ones(2, 64)).sum().backward()
        print(hook.stats.saved_bytes)
        hook.close()
    """

    def __init__(self, how: str | Compression, group: Any = None) -> None:
        self.compression = compression(how)
        self.stats = CompressionStats()
        self._thread = CompressionThread(group)
        self.group = self._thread.group
        # DistributedDataParallel asks a hook for its names.
        self.__name__ = self.__qualname__ = f"CompressionHook({self.compression.name})"

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        device = bucket.buffer().device
        if device.type != "cpu":
            # The thread would have to order its work with the streams of the backward pass, which is not built.
            raise ValueError(
                f"sagellm {self.__name__}: the gradients are on {device}, expected cpu; on a device use the hooks of "
                "torch.distributed.algorithms.ddp_comm_hooks"
            )
        return self._thread.later(lambda: self._average(bucket))

    def _average(self, bucket: Any) -> torch.Tensor:
        # By parameters and not by the bucket's number: after the first step DistributedDataParallel fills its buckets
        # in the order in which gradients become ready.
        key = tuple(bucket.parameters())
        return compressed_all_reduce(
            bucket.buffer(), self.compression, op="avg", group=self.group, key=key, stats=self.stats
        )

    def close(self) -> None:
        """Ends the thread and the group; all ranks call it after the last step."""
        self._thread.close()


class PowerSGDHook(CompressionHook):
    """torch's PowerSGD hook for models of any number of buckets.

    torch's hook calls collectives from callbacks of futures, whose order between buckets differs from rank to rank.
    Here one thread takes one bucket after the other and waits for it. ``stats`` counts bytes as for the other formats:
    the first steps, in which torch does not compress (``start_powerSGD_iter``), save none.

    Args:
        state: a ``PowerSGDState`` of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``; its group is
            replaced by a separate one.
        group: as for ``CompressionHook``.

    Raises:
        ValueError: as for ``CompressionHook``, from the backward pass.

    Example::

        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        powersgd = torch_sagellm.PowerSGDHook(PowerSGDState(None, start_powerSGD_iter=2))
        model.register_comm_hook(None, powersgd)
        for _ in range(4):
            model(torch.ones(2, 64)).sum().backward()
        print(powersgd.stats.saved_bytes)
        powersgd.close()
    """

    def __init__(self, state: Any, group: Any = None) -> None:
        super().__init__("fp16", group)
        self.state = state
        state.process_group = self.group
        self.__name__ = self.__qualname__ = "PowerSGDHook"

    def _average(self, bucket: Any) -> torch.Tensor:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        gradients = bucket.buffer()
        before = self.state.total_numel_after_compression
        result: torch.Tensor = powerSGD_hook(self.state, bucket).wait()
        # torch counts the elements that it passes on for a bucket, and none where it does not compress it yet.
        elements = self.state.total_numel_after_compression - before or gradients.numel()
        self.stats.calls += 1
        self.stats.plain_bytes += gradients.nbytes
        self.stats.sent_bytes += elements * gradients.element_size()
        return result


def _own_group(group: Any) -> Any:
    base = dist.group.WORLD if group is None else group
    return dist.new_group(dist.get_process_group_ranks(base), use_local_synchronization=True, group_desc="sagellm hook")
