"""Sums in fewer bytes: 16 bits, whole numbers of eight bits with a scale per block, or the largest elements only.

``compressed_all_reduce`` is one call; ``CompressionHook`` is the same for the buckets of DistributedDataParallel. Each
class below states its error bound for one call; the elements that ``TopK`` leaves out are added to the next call.
"""

# No annotations from the future here: DistributedDataParallel reads those of a hook, and does not take texts.
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class CompressionStats:
    """The bytes that this rank would have passed to an all_reduce, and the bytes that it passed instead.

    Example::

        stats = sagellm.CompressionStats()
        sagellm.compressed_all_reduce(torch.ones(4096), "fp16", stats=stats)
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

        class Plain(sagellm.Compression):
            name = "plain"

            def all_reduce(self, tensor, group, key=None):
                dist.all_reduce(tensor, group=group)
                return tensor.nbytes

        sagellm.compressed_all_reduce(torch.ones(4), Plain())
    """

    #: Its name in ``compressed_all_reduce``.
    name: str

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        """Sums a contiguous float tensor over the ranks of ``group``, in place; returns the bytes that it passed on.

        ``key`` names the tensor for compressions that keep a remainder from call to call.
        """


class Half(Compression):
    """16 bits: each rank's numbers are rounded once, the core adds them in 32 bits, and the sum is rounded once.

    The relative error of each addend and of the sum is at most 2^-11 for float16 (whose largest number is 65,504) and
    2^-8 for bfloat16.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16`` (ValueError otherwise).

    Example::

        sagellm.compressed_all_reduce(torch.ones(512), sagellm.Half(torch.bfloat16))
    """

    def __init__(self, dtype: torch.dtype) -> None:
        names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        if dtype not in names:
            raise ValueError(f"sagellm Half: dtype is {dtype}, expected one of {', '.join(map(str, names))}")
        self.dtype = dtype
        self.name = names[dtype]

    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        half = tensor.to(self.dtype)
        dist.all_reduce(half, group=group)
        tensor.copy_(half)
        return int(half.nbytes)


class Int8(Compression):
    """Whole numbers from -127 to 127 with a float32 scale for each block of a flat tensor.

    Every rank adds one part: it gets that of all ranks by an all_to_all, and all get the sums by an all_gather. With m
    the largest magnitude of a block, an addend is off by at most m / 254, and so is the sum once more, by its own m.

    Args:
        block: elements that share a scale, 1 or more (ValueError).

    Example::

        sagellm.compressed_all_reduce(torch.ones(512), sagellm.Int8())
    """

    name = "int8"

    def __init__(self, block: int = 256) -> None:
        if block < 1:
            raise ValueError(f"sagellm Int8: block is {block} elements, expected 1 or more")
        self.block = block

    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        ranks = dist.get_world_size(group)
        flat = tensor.view(-1).to(torch.float32)
        blocks = math.ceil(flat.numel() / self.block / ranks) * ranks
        padded = torch.nn.functional.pad(flat, (0, blocks * self.block - flat.numel()))
        numbers, scales = self._pack(padded.view(blocks, self.block))
        every_number, every_scale = torch.empty_like(numbers), torch.empty_like(scales)
        dist.all_to_all_single(every_number, numbers, group=group)
        dist.all_to_all_single(every_scale, scales, group=group)
        addends = every_number.float() * every_scale
        part = addends.view(ranks, blocks // ranks, self.block).sum(0)
        summed, summed_scales = self._pack(part)
        dist.all_gather_into_tensor(numbers, summed, group=group)
        dist.all_gather_into_tensor(scales, summed_scales, group=group)
        tensor.copy_((numbers.float() * scales).view(-1)[: flat.numel()].view_as(tensor))
        return int(numbers.nbytes + scales.nbytes + summed.nbytes + summed_scales.nbytes)

    @staticmethod
    def _pack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = rows.abs().amax(1, keepdim=True) / 127
        numbers = torch.round(rows / torch.where(scales > 0, scales, torch.ones_like(scales)))
        return numbers.to(torch.int8), scales


class TopK(Compression):
    """The share ``ratio`` of the elements, those of largest magnitude; the others are added to the next call's.

    No element is lost, it only comes later: the sum over all calls is that of plain calls, except for the remainder at
    the end, which ``residual(key)`` shows. A tensor is known by its ``key``.

    Args:
        ratio: more than 0 and at most 1 (ValueError).

    Example::

        remembering = sagellm.TopK(0.25)
        sagellm.compressed_all_reduce(torch.ones(512), remembering, key="gradient")
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"sagellm TopK: ratio is {ratio}, expected more than 0 and at most 1")
        self.ratio = ratio
        self._left: dict[Any, torch.Tensor] = {}

    def residual(self, key: Any) -> torch.Tensor | None:
        """The part of a tensor that this rank has not sent yet."""
        return self._left.get(key)

    def all_reduce(self, tensor: torch.Tensor, group: Any, key: Any = None) -> int:
        ranks = dist.get_world_size(group)
        flat = tensor.view(-1)
        left = self._left.get(key)
        if left is not None and left.shape == flat.shape:
            flat += left
        count = max(1, math.ceil(self.ratio * flat.numel())) if flat.numel() else 0
        places = torch.topk(flat.abs(), count, sorted=False).indices
        values = flat[places]
        rest = flat.clone()
        rest[places] = 0
        self._left[key] = rest
        every_place = places.new_empty(ranks * count)
        every_value = values.new_empty(ranks * count)
        dist.all_gather_into_tensor(every_place, places, group=group)
        dist.all_gather_into_tensor(every_value, values, group=group)
        flat.zero_()
        # Rank by rank, so that all ranks add in the same order.
        for place, value in zip(every_place.chunk(ranks), every_value.chunk(ranks), strict=True):
            flat.index_add_(0, place, value)
        return int(places.nbytes + values.nbytes)


def compression(how: str | Compression) -> Compression:
    """A compression by its name: "fp16", "bf16", "int8" or "topk"; a ValueError names them."""
    if isinstance(how, Compression):
        return how
    if how in ("fp16", "bf16"):
        return Half(torch.float16 if how == "fp16" else torch.bfloat16)
    if how == "int8":
        return Int8()
    if how == "topk":
        return TopK()
    raise ValueError(f"sagellm: compression {how!r}, expected one of fp16, bf16, int8, topk")


def check_compressible(tensor: torch.Tensor, op: str) -> None:
    """A ValueError where there is no compressed sum of this kind."""
    if op not in ("sum", "avg", "mean"):
        raise ValueError(f"sagellm compressed_all_reduce: op={op!r}, expected one of sum, avg, mean")
    if not tensor.is_floating_point():
        raise ValueError(f"sagellm compressed_all_reduce: the tensor is {tensor.dtype}, expected floats")


def compressed_all_reduce(
    tensor: torch.Tensor,
    how: str | Compression,
    *,
    op: str = "sum",
    group: Any = None,
    key: Any = None,
    stats: CompressionStats | None = None,
) -> torch.Tensor:
    """``all_reduce`` in fewer bytes, in place; returns the tensor.

    Args:
        tensor: of floats (ValueError otherwise); every rank passes the same shape and dtype.
        how: "fp16", "bf16", "int8", "topk", or an object of one of the classes, which "topk" needs to remember what it
            left out.
        op: "sum" or "avg" ("mean").
        key: names the tensor for "topk"; its shape and dtype if None.
        stats: counts the bytes, if given.

    Raises:
        ValueError: the compression or the op is unknown, or the tensor has no floats. Nothing was sent.

    Example::

        gradient = sagellm.compressed_all_reduce(torch.ones(512), "int8", op="avg")
    """
    check_compressible(tensor, op)
    method = compression(how)
    work = tensor if tensor.is_contiguous() else tensor.contiguous()
    sent = method.all_reduce(work, group, (tuple(tensor.shape), tensor.dtype) if key is None else key)
    if op != "sum":
        work /= dist.get_world_size(group)
    if work is not tensor:
        tensor.copy_(work)
    if stats is not None:
        stats.calls += 1
        stats.plain_bytes += tensor.nbytes
        stats.sent_bytes += sent
    return tensor


class CompressionThread:
    """A thread that makes one compressed sum after the other, in a separate group.

    So all ranks call the same collectives in the same order, whatever else their other threads call.

    Args:
        group: the ranks; None the default group. All of them make the thread at the same point.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = _own_group(group)
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
        dist.destroy_process_group(self.group)


class CompressionHook:
    """Averages the gradients of DistributedDataParallel on the CPU in fewer bytes.

    One thread takes one bucket after the other, in a separate group: so all ranks call the same collectives in the same
    order, whatever the number of buckets, and the backward pass goes on meanwhile.

    Args:
        how: as in ``compressed_all_reduce``.
        group: the ranks of the model; None the default group. All of them make the hook at the same point.

    Raises:
        ValueError: the compression is unknown. From the backward pass, before anything is sent: the gradients are on a
            device; torch's own hooks serve those.

    Example::

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        hook = sagellm.CompressionHook("int8")
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
        return compressed_all_reduce(
            bucket.buffer(), self.compression, op="avg", group=self.group, key=bucket.index(), stats=self.stats
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
        powersgd = sagellm.PowerSGDHook(PowerSGDState(None, start_powerSGD_iter=2))
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
