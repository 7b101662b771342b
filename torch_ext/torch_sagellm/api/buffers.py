"""Lists of tensors that are reduced together, reusable memory, and a report of the data that a block of code sends."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from torch_sagellm.api.arguments import Op, OpOrOperator, checked_number, checked_result, is_real, operator_or_op
from torch_sagellm.api.shared import empty
from torch_sagellm.observe import log, stats

if TYPE_CHECKING:
    from torch_sagellm.protocols.comm_backend import CommBackendProtocol

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
MIB = 1 << 20


class CommFusionBuffer:
    """Collects tensors up to a size, and reduces all of them in one call.

    Nothing is copied: the tensors are reduced in place, with any shapes, strides and dtypes, and each is combined in
    its dtype. All ranks add the same tensors in the same order.

    Args:
        max_size_mb: its capacity, in MiB (2^20 bytes).

    Raises:
        ValueError: ``max_size_mb`` is not positive.

    Example::

        comm = torch_sagellm.create_comm_backend()
        gradients = [torch.ones(1000), torch.ones(10, dtype=torch.float64)]
        buffer = torch_sagellm.CommFusionBuffer(max_size_mb=25)
        for gradient in gradients:
            if not buffer.add_tensor(gradient):
                buffer.flush_and_all_reduce(comm)
                buffer.add_tensor(gradient)
        buffer.flush_and_all_reduce(comm)
    """

    def __init__(self, max_size_mb: float = 100) -> None:
        if not is_real(max_size_mb) or not max_size_mb > 0:
            raise ValueError(f"sagellm CommFusionBuffer: max_size_mb is {max_size_mb!r}, expected more than 0")
        self.max_bytes = int(max_size_mb * MIB)
        self.tensors: list[torch.Tensor] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def offset(self) -> int:
        """Bytes of the collected tensors, like ``nbytes``: where the next tensor would begin in ``buffer``."""
        return self.nbytes

    @property
    def buffer(self) -> torch.Tensor:
        """The collected tensors one after the other in a flat tensor of ``max_bytes`` bytes (uint8).

        It is a copy for inspection, created when it is read; the reduction uses the tensors themselves. Bytes from
        ``offset`` on are uninitialized.
        """
        flat, at = torch.empty(self.max_bytes, dtype=torch.uint8), 0
        for tensor in self.tensors:
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            flat[at : at + tensor.nbytes] = plain.view(torch.uint8)
            at += tensor.nbytes
        return flat

    def add_tensor(self, tensor: torch.Tensor) -> bool:
        """Adds a tensor, or returns False if it does not fit any more.

        A tensor that is larger than the whole buffer never fits: reduce it separately. An argument that is not a tensor
        is a TypeError. A tensor that is not dense, has no data, or is a lazily conjugated or negated view is a
        ValueError.
        """
        checked_result("CommFusionBuffer", tensor)
        if self.nbytes + tensor.nbytes > self.max_bytes:
            return False
        self.tensors.append(tensor)
        self.nbytes += tensor.nbytes
        return True

    def flush_and_all_reduce(self, backend: CommBackendProtocol, op: Op = "sum") -> list[torch.Tensor]:
        """Reduces all tensors over all ranks, in place, empties the buffer and returns the tensors.

        If the backend refuses the call, the tensors stay in the buffer.
        """
        reduced = backend.fused_all_reduce(self.tensors, op) if self.tensors else []
        self.reset()
        return reduced

    def reset(self) -> None:
        """Drops all tensors without changing them."""
        self.tensors = []
        self.nbytes = 0


class CommunicationBuffer:
    """Memory for messages that is allocated once and reused.

    It is for one user at a time: ``get_buffer`` always returns the same memory, even before ``release``. ``release``
    ends the use and changes only ``in_use``.

    Args:
        max_size: its capacity in elements.
        dtype, device: dtype and device of the elements.

    Raises:
        ValueError: ``max_size`` is less than 1.

    Example::

        buffer = torch_sagellm.CommunicationBuffer(1 << 20)
        with buffer:
            part = buffer.get_buffer(1000)  # a tensor of 1000 elements
    """

    def __init__(self, max_size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        checked_number("CommunicationBuffer", "max_size", max_size)
        self.max_size = max_size
        #: The whole memory, ``max_size`` elements; on the CPU the other ranks of the host can reach it (``empty``).
        on_cpu = torch.device(device).type == "cpu"
        self.buffer = empty(max_size, dtype=dtype) if on_cpu else torch.empty(max_size, dtype=dtype, device=device)
        self._in_use = False

    @property
    def in_use(self) -> bool:
        """True from ``get_buffer`` until ``release``."""
        return self._in_use

    def get_buffer(self, size: int) -> torch.Tensor:
        """Returns the first ``size`` elements, uninitialized.

        Raises:
            ValueError: "Buffer too small", if ``size`` is more than ``max_size``; or ``size`` is negative.
        """
        checked_number("CommunicationBuffer", "size", size, least=0)
        if size > self.max_size:
            raise ValueError(f"Buffer too small: {size} elements are asked for, and it holds {self.max_size}")
        self._in_use = True
        return self.buffer[:size]

    def release(self) -> None:
        """Ends the use of the tensor that ``get_buffer`` returned."""
        self._in_use = False

    def __enter__(self) -> CommunicationBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def batch_all_reduce(
    tensors: Sequence[torch.Tensor],
    op: OpOrOperator = "sum",
    backend: CommBackendProtocol | None = None,
) -> list[torch.Tensor]:
    """Reduces every tensor of a list over all ranks, in place, in one call; returns the tensors.

    ``backend`` None means that of ``create_comm_backend()``. Instead of an op, an ``AllReduceOperator`` may be passed:
    then the ranks are those of its communicator, and the op is "sum". Ranks of one process reduce the tensors one after
    the other.

    Example::

        torch_sagellm.batch_all_reduce([torch.ones(3), torch.ones(2, 2, dtype=torch.int64)], op="max")
    """
    operator, named = operator_or_op("batch_all_reduce", op, backend)
    if operator is not None:
        return operator._batch(tensors)
    if backend is None:
        from torch_sagellm.api.backends import create_comm_backend

        backend = create_comm_backend()
    return backend.fused_all_reduce(tensors, named)


@dataclass
class CommReport:
    """The communication of this process's groups between two points in time.

    Example::

        with torch_sagellm.monitor_communication("one call") as report:
            dist.all_reduce(torch.ones(4))
        print(report.operations, report.nbytes, report.waiting)
    """

    name: str
    #: Wall time in seconds.
    seconds: float = 0.0
    #: Number of operations that ended, by kind.
    operations: dict[str, int] = field(default_factory=dict)
    #: Bytes of these operations on this rank: for each operation the bytes of its inputs or of its outputs, whichever
    #: are more.
    nbytes: int = 0
    #: Sum of the seconds that operations of this rank waited for other ranks.
    waiting: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.operations.items())) or "no communication"
        times = f"{self.seconds * 1e3:.2f} ms, of which operations waited {self.waiting * 1e3:.2f} ms for other ranks"
        return f"{self.name}: {kinds}, {self.nbytes} bytes, {times}"


class monitor_communication:  # named like a function, because it is used like one
    """Counts the communication of this process while a block or a function runs, and prints it as one line.

    All groups of this package are counted, and also ranks that are objects of this process, each with its own calls. As
    a context manager it returns a ``CommReport``, which is filled at the end of the block. As a decorator of functions
    and methods, asynchronous ones included, it sets the function's attribute ``report`` to the report of the call that
    ended last.

    Args:
        what: the function, or a name for the report.
        printed: False writes a line to the log at level "info" instead of printing it on standard error.

    Example::

        with torch_sagellm.monitor_communication("two calls") as report:
            dist.all_reduce(torch.ones(4))
            dist.barrier()
        assert report.operations == {"all_reduce": 1, "barrier": 1}

        @torch_sagellm.monitor_communication
        def step():
            dist.all_reduce(torch.ones(4))

        step()
        print(step.report)
    """

    def __init__(self, what: str | Callable[..., Any] = "communication", *, printed: bool = True) -> None:
        self._function = what if callable(what) else None
        self._printed = printed
        name = getattr(what, "__qualname__", "communication") if callable(what) else what
        self.report = CommReport(name)
        if self._function is not None:
            functools.update_wrapper(self, self._function)
            if inspect.iscoroutinefunction(self._function):
                _mark_coroutine(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            (function,) = args  # @monitor_communication("name")
            named = monitor_communication(function, printed=self._printed)
            named.report.name = self.report.name
            return named
        if inspect.iscoroutinefunction(self._function):
            return self._awaited(self._function, args, kwargs)
        # A new context for each call, because calls may be nested and may run on several threads.
        call = monitor_communication(self.report.name, printed=self._printed)
        try:
            with call:
                return self._function(*args, **kwargs)
        finally:
            self.report = call.report

    async def _awaited(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Counts from the first step of the coroutine to its end, including what other tasks do in between."""
        call = monitor_communication(self.report.name, printed=self._printed)
        try:
            with call:
                return await function(*args, **kwargs)
        finally:
            self.report = call.report

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Binds a decorated method to its object, as Python does with functions.

        Static methods, and a context manager that is an attribute of a class, are not bound.
        """
        return MethodType(self, owner) if owner is not None and inspect.isfunction(self._function) else self

    def __enter__(self) -> CommReport:
        self.report = CommReport(self.report.name)
        self._before = _totals()
        self._began = perf_counter()
        return self.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        report = self.report
        report.seconds = perf_counter() - self._began
        for key, after in _totals().items():
            before = self._before.get(key, (0, 0, 0))
            count, nbytes, waiting = (new - old for new, old in zip(after, before, strict=True))
            if count:
                report.operations[key[-1]] = report.operations.get(key[-1], 0) + count
            report.nbytes += nbytes
            report.waiting += waiting / stats.MS / 1e3
        if self._printed:
            print(report, file=sys.stderr)
        else:
            log.logger.info("%s", report)


def _mark_coroutine(function: Any) -> None:
    """Marks a function whose call returns a coroutine, for frameworks.

    `inspect` supports the mark from Python 3.12 on.
    """
    mark = getattr(inspect, "markcoroutinefunction", None)
    if mark is not None:
        mark(function)


def _totals() -> dict[tuple[str, int, str], tuple[int, int, int]]:
    """Number of operations, bytes and nanoseconds of waiting of all groups of ours. The keys are the group's name, the
    time since which the group counts, and the kind of operation."""
    import torch.distributed as dist

    totals: dict[tuple[str, int, str], tuple[int, int, int]] = {}
    for member in stats.members("all") if dist.is_initialized() else []:
        found = member.backend._totals()
        for one in found["kinds"]:
            totals[member.name, found["since"], one["kind"]] = (one["count"], one["bytes"], one["waiting"])
    in_process = sys.modules.get("torch_sagellm.api.in_process")  # if it was never imported, there are no such ranks
    if in_process is not None:
        totals |= {("ranks of this process", 0, kind): tally for kind, tally in in_process.totals().items()}
    return totals
