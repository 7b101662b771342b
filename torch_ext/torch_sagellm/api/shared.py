"""Tensors in memory that the ranks of a host can reach: a large all_reduce of them copies nothing through a buffer.

They are ordinary CPU tensors of torch. If there is no such memory (it is full, disabled or denied, or this is a forked
child), they are in ordinary memory, and operations on them run as on all other tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from numbers import Integral
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torch_sagellm.api.arguments import checked_tensor

#: Acquired by the first call of `_extension` in this process, which then configures the log, so that the core's
#: messages appear.
_first = threading.Lock()


def _extension() -> ModuleType:
    from torch_sagellm._private import load
    from torch_sagellm.observe import log

    extension = load.extension()
    if _first.acquire(blocking=False):
        log.configure(extension)
    return extension


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """``torch.empty`` on the CPU, in memory that the other ranks of the host can reach.

    It occupies whole pages of memory, even for a few numbers. After ``resize_`` the tensor is still in such memory. It
    is on the CPU whatever torch's default device is.

    Args:
        size: as for ``torch.empty``, numbers or one sequence of numbers.
        device: only the CPU; None means the CPU too.

    Raises:
        ValueError: a size is negative, the device is not the CPU, the layout is not dense, or torch refuses the
            arguments.

    Example::

        tensor = torch_sagellm.empty(1 << 20, dtype=torch.bfloat16)
        dist.all_reduce(tensor.fill_(1))
    """
    _check_place("empty", layout, device)
    _check_dtype("empty", dtype)
    sides = _sides("empty", size)

    def plan() -> torch.Tensor:
        return torch.empty(sides, dtype=dtype, device="meta", memory_format=memory_format)

    return _made("empty", plan, requires_grad)


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """``torch.zeros`` on the CPU, in memory that the other ranks of the host can reach; see ``empty``.

    Example::

        assert torch_sagellm.zeros(2, 3).tolist() == [[0, 0, 0], [0, 0, 0]]
    """
    _check_place("zeros", layout, device)
    _check_dtype("zeros", dtype)
    sides = _sides("zeros", size)
    return _made("zeros", lambda: torch.empty(sides, dtype=dtype, device="meta"), requires_grad, zero=True)


def empty_like(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """``torch.empty_like`` on the CPU, in memory that the other ranks of the host can reach; see ``empty``.

    ``tensor`` may be on any device: only its shape, strides and dtype are used.

    Example::

        total = torch_sagellm.empty_like(torch.ones(2, 3))
        assert total.shape == (2, 3)
    """
    checked_tensor("empty_like", tensor)
    _check_dtype("empty_like", dtype)
    if tensor.layout is not torch.strided:
        raise ValueError(f"sagellm empty_like: got a tensor of layout {tensor.layout}, expected a dense one")
    return _made("empty_like", lambda: _like(tensor, dtype, memory_format), requires_grad)


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a CPU tensor in memory that the other ranks of the host can reach; see ``empty``.

    The copy is a leaf: autograd does not pass through it. It has the ``requires_grad`` of the tensor, and the copy of a
    ``torch.nn.Parameter`` is a ``Parameter``; gradients and hooks are not copied. Strides are kept if the elements are
    dense in memory.

    Raises:
        ValueError: the tensor is on another device, not dense, or of a class that wraps other tensors.

    Example::

        weights = torch_sagellm.shared(torch.nn.Parameter(torch.ones(1000)))
        assert weights.requires_grad and torch_sagellm.is_reachable(weights)

        layer = torch.nn.Linear(256, 256)
        for parameter in layer.parameters():
            parameter.data = torch_sagellm.shared(parameter.data)
    """
    checked_tensor("shared", tensor)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        local = ": pass its to_local()" if hasattr(tensor, "to_local") else ""
        raise ValueError(f"sagellm shared: got a {type(tensor).__name__}, expected a plain tensor{local}")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        kind = f"a tensor of layout {tensor.layout} on {tensor.device}"
        raise ValueError(f"sagellm shared: got {kind}, expected a dense one on the CPU")
    with torch.no_grad():
        copy = _made("shared", lambda: _like(tensor, None, torch.preserve_format), False).copy_(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def is_reachable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in memory that the other ranks of the host can reach; also true for a view of such a tensor.

    It returns False if an operation that would have written the tensor has failed, and always in a forked child.

    torch's own ``tensor.is_shared()`` has another meaning: whether ``torch.multiprocessing`` has shared the tensor.

    Example::

        assert torch_sagellm.is_reachable(torch_sagellm.empty(10)[2:])
        assert not torch_sagellm.is_reachable(torch.empty(10))
    """
    checked_tensor("is_reachable", tensor)
    return bool(_extension()._is_shared(tensor))


class shared_tensors:  # named like a function, because it is used like one
    """Within the block torch allocates CPU tensors of 16 KiB or more in memory that the host's ranks can reach.

    It applies to the thread that enters the block, for all code that runs on it. Blocks may be nested, and an exception
    ends a block. ``resize_`` of such a tensor outside a block moves it to ordinary memory. With the variable
    ``SAGELLM_SHARED_TENSORS=1`` torch does the same on all threads after the first group is created.

    Raises:
        RuntimeError: the block ends on a different thread from the one that entered it.

    Example::

        with torch_sagellm.shared_tensors():
            layer = torch.nn.Linear(256, 256)
            products = layer(torch.ones(64, 256))
        assert torch_sagellm.is_reachable(layer.weight) and torch_sagellm.is_reachable(products)
    """

    def __init__(self) -> None:
        self._threads: list[int] = []

    @property
    def entered(self) -> bool:
        """Whether a thread is within the block."""
        return bool(self._threads)

    def __enter__(self) -> None:
        extension = _extension()
        extension._share_allocations(False)
        extension._share_on_this_thread(1)
        self._threads.append(threading.get_ident())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._threads:
            raise RuntimeError("sagellm shared_tensors: the block ends, and was not entered")
        if self._threads[-1] != threading.get_ident():
            raise RuntimeError(
                "sagellm shared_tensors: the block ends on another thread than it began on, which goes on with such "
                "tensors. Enter and leave it on one thread"
            )
        self._threads.pop()
        _extension()._share_on_this_thread(-1)


def share_buckets(model: DistributedDataParallel) -> DistributedDataParallel:
    """Makes torch allocate a replica's gradient buckets in memory that the other ranks of the host can reach.

    torch creates the buckets again once, at the first call of the model after a backward pass; the new buckets are in
    such memory. Returns the model.

    Raises:
        ValueError: torch creates no new buckets, because of ``find_unused_parameters``: create the replica within
            ``shared_tensors()`` instead.

    Example::

        model = torch_sagellm.share_buckets(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256)))
        for _ in range(3):
            model(torch.ones(64, 256)).sum().backward()
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"sagellm share_buckets: got a {type(model).__name__}, expected a DistributedDataParallel")
    if model.find_unused_parameters and not model.static_graph:
        raise ValueError(
            "sagellm share_buckets: the model has find_unused_parameters=True, and torch never makes its buckets anew. "
            "Make it within `with torch_sagellm.shared_tensors():` instead"
        )
    _NewBuckets(model)
    return model


class _NewBuckets:
    """Keeps a block open from the call of a replica until its model begins, because torch creates the buckets
    meanwhile.

    Copies of the model have its hooks too; the hooks of a copy do nothing.
    """

    def __init__(self, model: DistributedDataParallel | None) -> None:
        self._block = shared_tensors()
        self._handles: list[RemovableHandle] = []
        if model is not None:
            self._handles = [
                model.register_forward_pre_hook(self._begin),
                model.module.register_forward_pre_hook(self._leave),
                model.register_forward_hook(self._end, always_call=True),
            ]

    def __reduce__(self) -> tuple[type[_NewBuckets], tuple[None]]:
        return _NewBuckets, (None,)

    def _begin(self, model: torch.nn.Module, inputs: Any) -> None:
        if self._handles:
            self._block.__enter__()

    def _leave(self, model: torch.nn.Module, inputs: Any) -> None:
        # If no block is open, the model was called without its replica, or a second time within the replica's call.
        if self._block.entered:
            self._block.__exit__(None, None, None)

    def _end(self, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self._leave(model, inputs)
        # torch's flag that it has created the new buckets. If torch has no such flag, each call opens the block.
        if getattr(model, "_has_rebuilt_buckets", False):
            for handle in self._handles:
                handle.remove()


def outlook() -> str:
    """For ``doctor``: the limit of reachable memory in this process, or why there is none.

    Allocates a tensor to find out.
    """
    from torch_sagellm._private import load, units

    extension = load.extension()
    extension._shared_tensor([1], [1], torch.uint8)
    usage = extension._shared_usage()
    if usage["limit"] == 0:
        return f"none: {usage['why_not'] or 'unknown'}"
    return f"up to {units.show_size(usage['limit'])} a process"


def _made(what: str, plan: Callable[[], torch.Tensor], requires_grad: bool, zero: bool = False) -> torch.Tensor:
    """Creates a tensor with the shape, strides and dtype of ``plan()``, which returns a tensor without data."""
    try:
        planned = plan().requires_grad_(requires_grad)
    except (RuntimeError, TypeError) as error:
        # torch's text for a wrong argument has a line for every signature of the call; keep the first line.
        raise ValueError(f"sagellm {what}: {str(error).splitlines()[0]}") from error
    made: torch.Tensor = _extension()._shared_tensor(planned.shape, planned.stride(), planned.dtype)
    if zero:
        made.zero_()
    return made.requires_grad_(requires_grad)


def _like(tensor: torch.Tensor, dtype: torch.dtype | None, memory_format: torch.memory_format) -> torch.Tensor:
    return torch.empty_like(tensor.detach(), dtype=dtype, device="meta", memory_format=memory_format)


def _sides(what: str, size: tuple[Any, ...]) -> list[int]:
    sides = size[0] if len(size) == 1 and not isinstance(size[0], Integral) else size
    if not isinstance(sides, Sequence) or any(
        not isinstance(side, Integral) or isinstance(side, bool) or side < 0 for side in sides
    ):
        raise ValueError(f"sagellm {what}: the size is {sides!r}, expected whole numbers from 0 on")
    return [int(side) for side in sides]


def _check_place(what: str, layout: torch.layout, device: torch.device | str | None) -> None:
    name = str(device)
    if device is not None and name.partition(":")[0] != "cpu":
        raise ValueError(f"sagellm {what}: the device is {name!r}, expected the CPU, whose memory ranks can share")
    if layout is not torch.strided:
        raise ValueError(f"sagellm {what}: the layout is {layout}, expected torch.strided")


def _check_dtype(what: str, dtype: Any) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"sagellm {what}: dtype is {dtype!r}, expected one of torch, such as torch.float32")
