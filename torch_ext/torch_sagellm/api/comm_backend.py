"""The base class of all backends, with a method for each collective."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar, Literal, overload

import torch
import torch.distributed as dist

from torch_sagellm._private import groups, load
from torch_sagellm.api import fused
from torch_sagellm.api.arguments import (
    Op,
    Seconds,
    as_timedelta,
    checked_dense,
    checked_op,
    checked_result,
    checked_root,
    in_memory,
    rows_of_slice,
)
from torch_sagellm.api.compression import (
    CompressionStats,
    check_compressible,
    compressed_all_reduce,
    compression,
)
from torch_sagellm.api.compression_hooks import CompressionThread
from torch_sagellm.api.errors import with_timeouts
from torch_sagellm.api.formats import Compression
from torch_sagellm.api.futures import CommFuture, CommListFuture, Later
from torch_sagellm.api.group_choice import GroupSettings, group_for
from torch_sagellm.observe import explain as explaining
from torch_sagellm.observe import stats as statistics
from torch_sagellm.protocols.comm_backend import CommBackendProtocol
from torch_sagellm.topology import TopologyInfo, TopologyManager


class CommBackend(CommBackendProtocol):
    """Collectives over one process group, with tensors as arguments and results.

    All ranks call the same methods in the same order. Ranks are those of the group, counted from 0. Tensors are on the
    CPU or on the device of this process; each call may use either. A call that the backend refuses raises a ValueError,
    and nothing was sent. (A lazily conjugated or negated view as the result is refused, because torch would lose the
    result.) A call whose deadline passes raises a ``CommTimeoutError``. Other failures (a rank that died, ranks that
    called different operations) raise a ``torch.distributed.DistBackendError``. After either of the last two errors the
    group has failed.

    Asynchronous forms return a ``CommFuture``, a ``torch.futures.Future`` whose ``wait()`` returns what the synchronous
    form returns.

    Args:
        rank, world_size: the expected values; they are compared with the group (ValueError), and used if the group is
            started here. None means the values of the group or of torchrun.
        group: a process group to work in; None means the default group. For a group of another backend, a further group
            of ours over the same ranks is created; all these ranks must then create it, in the same order.
        algorithm: rules that assign algorithms to operations and sizes, see docs/choosing.md.
        topology_manager: the machines of the job; with it the start rules choose the algorithm if neither a user's rule
            nor a table names one.
        fusion: False disables fusion.
        timeout: deadline of each operation, in seconds or as timedelta; None means the group's.
        soft_timeout: an operation that is pending for longer (seconds or timedelta) gets one line in the log, see
            docs/hangs.md; 0 means no line, None the value of ``SAGELLM_SOFT_TIMEOUT``.
        retry: number of retries if creating the group fails because the store was not there yet, or ranks were late;
            pauses in between grow from 1 to 10 seconds. Operations are never retried.

    Example::

        comm = torch_sagellm.CPUBackend()
        rows = comm.all_gather(torch.full((1, 3), float(comm.rank)))
        assert rows.shape == (comm.world_size, 3)
    """

    #: The name in ``create_comm_backend``.
    backend_type: ClassVar[str]
    #: The option ``vendor`` of its group; None if any value is accepted.
    vendor: ClassVar[str | None] = None
    #: The type of device that this process must have; None if it needs no device.
    device_type: ClassVar[str | None] = None
    #: Why the backend is of this type: what "auto" found, or that its name was given.
    reason: str = "asked for by name"

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        algorithm: str = "",
        topology_manager: TopologyManager | TopologyInfo | None = None,
        fusion: bool = True,
        timeout: Seconds | None = None,
        soft_timeout: Seconds | None = None,
        retry: int = 0,
    ) -> None:
        settings = GroupSettings.of(
            type(self).__name__,
            self.vendor,
            rank=rank,
            world_size=world_size,
            group=group,
            algorithm=algorithm,
            topology_manager=topology_manager,
            fusion=fusion,
            timeout=timeout,
            soft_timeout=soft_timeout,
            retry=retry,
        )
        self._begin(settings)

    @classmethod
    def _with(cls, settings: GroupSettings) -> CommBackend:
        """A backend with settings that were checked already."""
        made = cls.__new__(cls)
        made._begin(settings)
        return made

    def _begin(self, settings: GroupSettings) -> None:
        self._check_device()
        self.group: Any = group_for(settings, type(self).__name__)
        self.rank: int = dist.get_rank(self.group)
        self.world_size: int = dist.get_world_size(self.group)
        self._receives: Callable[[Any], bool] = load.extension()._receives
        self._compression = CompressionStats()
        self._methods: dict[str, Compression] = {}
        #: The thread of asynchronous calls with ``compress``; created by the first of them.
        self._thread: CompressionThread | None = None

    @classmethod
    def _check_device(cls) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        if cls.device_type is None or (
            found is not None and (found.type == cls.device_type or named_vendor() == cls.vendor)
        ):
            return
        has = "no accelerator" if found is None else f"a device of type {found.type}"
        raise RuntimeError(
            f"sagellm {cls.__name__}: this process has {has}, expected {cls.device_type}. Use "
            'create_comm_backend("auto"), or "gloo" to carry tensors through host memory'
        )

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.world_size}"
        return f"<{type(self).__name__} ({self.reason}) {where}: {self.describe()}>"

    def describe(self) -> str:
        """Describes the engine that serves the group and its configuration, in one line. Also says how much memory this
        process uses for tensors that peers can reach, if any."""
        described = str(groups.backend_of(self.group).describe())
        used = load.extension()._shared_usage()["used"]
        return f"{described}; {used >> 10} KiB of tensors in memory that peers can reach" if used else described

    # ------------------------------------------------------------------------------------------- reductions

    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Op = "sum",
        async_op: Literal[False] = False,
        timeout: Seconds | None = None,
        *,
        compress: str | Compression | None = None,
        key: Any = None,
    ) -> torch.Tensor: ...
    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Op = "sum",
        *,
        async_op: Literal[True],
        timeout: Seconds | None = None,
        compress: str | Compression | None = None,
        key: Any = None,
    ) -> CommFuture: ...
    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Op = "sum",
        async_op: bool = False,
        timeout: Seconds | None = None,
        *,
        compress: str | Compression | None = None,
        key: Any = None,
    ) -> torch.Tensor | CommFuture: ...
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Op = "sum",
        async_op: bool = False,
        timeout: Seconds | None = None,
        *,
        compress: str | Compression | None = None,
        key: Any = None,
    ) -> torch.Tensor | CommFuture:
        """Combines ``tensor`` element by element over all ranks, in place, and returns it.

        ``op`` is "sum", "avg" ("mean"), "max", "min", "prod", or torch's ReduceOp. ``timeout`` is the deadline of this
        call alone. Every rank passes the same shape and dtype.

        ``compress`` sends fewer bytes, with the errors that docs/api.md states: "fp16", "bf16", "int8", "topk", or an
        object of ``torch_sagellm.Half``, ``Int8``, ``TopK``. It accepts floats, "sum" and "avg". "topk" leaves elements
        out, and keeps them for the next call with the same ``key``. It requires a key (ValueError): the parameter whose
        gradient the tensor is, a name or a number. ``get_stats()["compression"]`` counts the bytes. A call with
        ``compress`` consists of several operations, so it accepts no ``timeout``. An asynchronous one needs tensors on
        the CPU; it runs on a thread, in a separate group that the first such call creates.

        Example::

            comm = torch_sagellm.create_comm_backend()
            comm.all_reduce(torch.ones(4))  # four times the number of ranks
        """
        if compress is not None:
            return self._compressed(tensor, op, async_op, timeout, compress, key)
        if not self._receives(tensor):
            checked_result("all_reduce", tensor, sparse=True)
        options = _reduction("all_reduce", op, async_op)
        if timeout is not None:
            options = _copy_of(options, as_timedelta(timeout))
        return self._run(lambda: self.group.allreduce([tensor], options), tensor, async_op)

    def _compressed(
        self, tensor: torch.Tensor, op: Op, async_op: bool, timeout: Any, how: str | Compression, key: Any
    ) -> torch.Tensor | CommFuture:
        # Each name keeps its object, because a "topk" object stores the elements that it has not sent yet.
        method = compression(how) if not isinstance(how, str) or how not in self._methods else self._methods[how]
        check_compressible(tensor, op, method, key)
        if timeout is not None:
            raise ValueError("sagellm all_reduce: timeout does not go with compress, which takes several operations")
        if async_op and not tensor.is_cpu:
            raise ValueError(
                f"sagellm all_reduce: the tensor is on {tensor.device}, expected cpu for compress with async_op"
            )
        if isinstance(how, str):
            self._methods[how] = method

        def run(group: Any) -> torch.Tensor:
            return compressed_all_reduce(tensor, method, op=op, group=group, key=key, stats=self._compression)

        if not async_op:
            return with_timeouts(lambda: run(self.group))
        if self._thread is None:
            self._thread = CompressionThread(self.group)
        thread = self._thread
        return CommFuture(Later(thread.later(lambda: run(thread.group))), tensor)

    def safe_all_reduce(self, tensor: torch.Tensor, op: Op = "sum", timeout: Seconds = 30.0) -> torch.Tensor:
        """``all_reduce`` with a timeout; raises a ``CommTimeoutError`` that names the missing ranks."""
        result: torch.Tensor = self.all_reduce(tensor, op, timeout=timeout)
        return result

    @overload
    def fused_all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Op = "sum", async_op: Literal[False] = False
    ) -> list[torch.Tensor]: ...
    @overload
    def fused_all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Op = "sum", *, async_op: Literal[True]
    ) -> CommListFuture: ...
    @overload
    def fused_all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Op = "sum", async_op: bool = False
    ) -> list[torch.Tensor] | CommListFuture: ...
    def fused_all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Op = "sum", async_op: bool = False
    ) -> list[torch.Tensor] | CommListFuture:
        """``all_reduce`` of every tensor of a list, in place, as one operation for each dtype; returns the tensors.

        Any mix of shapes and dtypes; no two tensors may share memory. See ``torch_sagellm.fused_all_reduce``.
        """
        checked_op("fused_all_reduce", op)
        return with_timeouts(lambda: fused.fused_all_reduce(tensors, op, group=self.group, async_op=async_op))

    @overload
    def reduce(
        self, tensor: torch.Tensor, root_rank: int = 0, op: Op = "sum", async_op: Literal[False] = False
    ) -> torch.Tensor: ...
    @overload
    def reduce(
        self, tensor: torch.Tensor, root_rank: int = 0, op: Op = "sum", *, async_op: Literal[True]
    ) -> CommFuture: ...
    @overload
    def reduce(
        self, tensor: torch.Tensor, root_rank: int = 0, op: Op = "sum", async_op: bool = False
    ) -> torch.Tensor | CommFuture: ...
    def reduce(
        self, tensor: torch.Tensor, root_rank: int = 0, op: Op = "sum", async_op: bool = False
    ) -> torch.Tensor | CommFuture:
        """Combines ``tensor`` over all ranks into the tensor of ``root_rank``, in place; returns it.

        On the other ranks ``tensor`` is unchanged. torch's order is ``reduce(tensor, dst, op)`` too. A ``root_rank``
        that is not a rank of the group raises a ValueError, here and in the methods below.
        """
        checked_result("reduce", tensor)
        root = checked_root("reduce", root_rank, self.world_size, "tensor, root_rank, op")
        chosen = _reduce_op("reduce", op)
        return self._run(
            lambda: dist.reduce(tensor, group_dst=root, op=chosen, group=self.group, async_op=async_op),
            tensor,
            async_op,
        )

    @overload
    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: Op = "sum",
        async_op: Literal[False] = False,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    @overload
    def reduce_scatter(
        self, tensor: torch.Tensor, op: Op = "sum", *, async_op: Literal[True], output: torch.Tensor | None = None
    ) -> CommFuture: ...
    @overload
    def reduce_scatter(
        self, tensor: torch.Tensor, op: Op = "sum", async_op: bool = False, output: torch.Tensor | None = None
    ) -> torch.Tensor | CommFuture: ...
    def reduce_scatter(
        self, tensor: torch.Tensor, op: Op = "sum", async_op: bool = False, output: torch.Tensor | None = None
    ) -> torch.Tensor | CommFuture:
        """Combines ``tensor`` over all ranks; returns this rank's slice of the result along dimension 0.

        Dimension 0 must be a multiple of the number of ranks (ValueError). ``output``, if given, receives the slice.
        """
        checked_dense("reduce_scatter", tensor)
        chosen = _reduce_op("reduce_scatter", op)
        rows = rows_of_slice("reduce_scatter", tensor, self.world_size)
        result = tensor.new_empty((rows, *tensor.shape[1:])) if output is None else output
        checked_result("reduce_scatter", result)
        return self._run(
            lambda: dist.reduce_scatter_tensor(
                result, in_memory(tensor), op=chosen, group=self.group, async_op=async_op
            ),
            result,
            async_op,
        )

    # ------------------------------------------------------------------------------------------- moving data

    @overload
    def all_gather(
        self, tensor: torch.Tensor, output: torch.Tensor | None = None, async_op: Literal[False] = False
    ) -> torch.Tensor: ...
    @overload
    def all_gather(
        self, tensor: torch.Tensor, output: torch.Tensor | None = None, *, async_op: Literal[True]
    ) -> CommFuture: ...
    @overload
    def all_gather(
        self, tensor: torch.Tensor, output: torch.Tensor | None = None, async_op: bool = False
    ) -> torch.Tensor | CommFuture: ...
    def all_gather(
        self, tensor: torch.Tensor, output: torch.Tensor | None = None, async_op: bool = False
    ) -> torch.Tensor | CommFuture:
        """Returns the tensors of all ranks, in rank order, concatenated along dimension 0.

        Every rank passes the same shape; a scalar counts as one row. ``output``, if given, receives the result.
        """
        checked_dense("all_gather", tensor)
        rows, rest = (tensor.shape[0], tensor.shape[1:]) if tensor.dim() else (1, tensor.shape)
        result = tensor.new_empty((rows * self.world_size, *rest)) if output is None else output
        checked_result("all_gather", result)
        return self._run(
            lambda: dist.all_gather_into_tensor(result, in_memory(tensor), group=self.group, async_op=async_op),
            result,
            async_op,
        )

    @overload
    def broadcast(self, tensor: torch.Tensor, root_rank: int = 0, async_op: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def broadcast(self, tensor: torch.Tensor, root_rank: int = 0, *, async_op: Literal[True]) -> CommFuture: ...
    @overload
    def broadcast(
        self, tensor: torch.Tensor, root_rank: int = 0, async_op: bool = False
    ) -> torch.Tensor | CommFuture: ...
    def broadcast(self, tensor: torch.Tensor, root_rank: int = 0, async_op: bool = False) -> torch.Tensor | CommFuture:
        """Writes the tensor of ``root_rank`` into the tensors of the other ranks; returns it."""
        checked_result("broadcast", tensor)
        root = checked_root("broadcast", root_rank, self.world_size, "tensor, root_rank")
        return self._run(
            lambda: dist.broadcast(tensor, group_src=root, group=self.group, async_op=async_op), tensor, async_op
        )

    def gather(self, tensor: torch.Tensor, root_rank: int = 0) -> torch.Tensor | None:
        """Returns the tensors of all ranks, concatenated along dimension 0, on ``root_rank``; None on the other ranks.

        torch's ``gather(tensor, gather_list, dst)`` fills a list instead.
        """
        checked_dense("gather", tensor)
        root = checked_root("gather", root_rank, self.world_size, "tensor, root_rank")
        result = parts = None
        if self.rank == root:
            result = tensor.new_empty((self.world_size, *tensor.shape))
            parts = list(result.unbind(0))
        with_timeouts(lambda: dist.gather(in_memory(tensor), parts, group_dst=root, group=self.group))
        if result is not None and tensor.dim():
            result = result.flatten(0, 1)
        return result

    @overload
    def scatter(
        self, input: torch.Tensor | None, output: torch.Tensor, root_rank: int = 0, async_op: Literal[False] = False
    ) -> torch.Tensor: ...
    @overload
    def scatter(
        self, input: torch.Tensor | None, output: torch.Tensor, root_rank: int = 0, *, async_op: Literal[True]
    ) -> CommFuture: ...
    @overload
    def scatter(
        self, input: torch.Tensor | None, output: torch.Tensor, root_rank: int = 0, async_op: bool = False
    ) -> torch.Tensor | CommFuture: ...
    def scatter(
        self, input: torch.Tensor | None, output: torch.Tensor, root_rank: int = 0, async_op: bool = False
    ) -> torch.Tensor | CommFuture:
        """Sends every rank its slice of the ``input`` of ``root_rank`` along dimension 0.

        Returns ``output``, which receives the slice. The other ranks pass None as ``input``. Dimension 0 of ``input``
        must be a multiple of the number of ranks (ValueError). torch's order is ``scatter(output, scatter_list, src)``.
        """
        checked_result("scatter", output)
        root = checked_root("scatter", root_rank, self.world_size, "input, output, root_rank")
        lists = None
        if self.rank == root:
            if input is None:
                raise ValueError(f"sagellm scatter: rank {root} is the root and must pass an input, not None")
            checked_dense("scatter", input)
            rows = rows_of_slice("scatter", input, self.world_size)
            lists = list(in_memory(input).view(self.world_size, rows, *input.shape[1:]).unbind(0))
        return self._run(
            lambda: dist.scatter(output, lists, group_src=root, group=self.group, async_op=async_op),
            output,
            async_op,
        )

    @overload
    def all_to_all(
        self,
        input: torch.Tensor,
        output: torch.Tensor | None = None,
        input_split_sizes: list[int] | None = None,
        output_split_sizes: list[int] | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...
    @overload
    def all_to_all(
        self,
        input: torch.Tensor,
        output: torch.Tensor | None = None,
        input_split_sizes: list[int] | None = None,
        output_split_sizes: list[int] | None = None,
        *,
        async_op: Literal[True],
    ) -> CommFuture: ...
    @overload
    def all_to_all(
        self,
        input: torch.Tensor,
        output: torch.Tensor | None = None,
        input_split_sizes: list[int] | None = None,
        output_split_sizes: list[int] | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CommFuture: ...
    def all_to_all(
        self,
        input: torch.Tensor,
        output: torch.Tensor | None = None,
        input_split_sizes: list[int] | None = None,
        output_split_sizes: list[int] | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CommFuture:
        """Sends the r-th slice of ``input`` along dimension 0 to rank r; returns the received slices in rank order.

        Slices are equal, or have the numbers of rows in the two lists. Without ``output``, a tensor of the right size
        is created. torch's order is ``all_to_all_single(output, input, output_split_sizes, input_split_sizes)``.
        """
        checked_dense("all_to_all", input)
        if input_split_sizes is None:
            rows_of_slice("all_to_all", input, self.world_size)
        if output is None:
            rows = input.shape[0] if output_split_sizes is None else sum(output_split_sizes)
            output = input.new_empty((rows, *input.shape[1:]))
        result = output
        checked_result("all_to_all", result)
        return self._run(
            lambda: dist.all_to_all_single(
                result,
                in_memory(input),
                output_split_sizes=output_split_sizes,
                input_split_sizes=input_split_sizes,
                group=self.group,
                async_op=async_op,
            ),
            result,
            async_op,
        )

    # ------------------------------------------------------------------------------------------- messages, barrier

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> torch.Tensor:
        """Sends ``tensor`` to rank ``dst`` and returns it when its memory may be changed."""
        checked_dense("send", tensor)
        with_timeouts(lambda: dist.send(in_memory(tensor), group_dst=dst, group=self.group, tag=tag))
        return tensor

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> torch.Tensor:
        """Receives into ``tensor`` from rank ``src``, or from any rank if ``src`` is None; returns ``tensor``."""
        checked_result("recv", tensor)
        with_timeouts(lambda: dist.recv(tensor, group_src=src, group=self.group, tag=tag))
        return tensor

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> CommFuture:
        """``send`` as a future. ``tensor`` must not change before the future is done."""
        checked_dense("isend", tensor)
        return CommFuture(dist.isend(in_memory(tensor), group_dst=dst, group=self.group, tag=tag), tensor)

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> CommFuture:
        """``recv`` as a future."""
        checked_result("irecv", tensor)
        return CommFuture(dist.irecv(tensor, group_src=src, group=self.group, tag=tag), tensor)

    def barrier(self, timeout: Seconds | None = None) -> None:
        """Returns when all ranks have called it."""
        options = dist.BarrierOptions()
        if timeout is not None:
            options.timeout = as_timedelta(timeout)
        if hasattr(options, "asyncOp"):
            options.asyncOp = False

        def wait() -> None:
            work = self.group.barrier(options)
            if work is not None:
                work.wait()

        with_timeouts(wait)

    # ------------------------------------------------------------------------------------------- looking in

    def get_stats(self) -> dict[str, Any]:
        """The statistics of this group: ``torch_sagellm.get_stats(group=...)``.

        The entry "compression" counts the calls with ``compress`` of this object: their number, the bytes of their
        tensors, the bytes sent (scaled to the same unit), and the bytes saved.
        """
        counted = self._compression
        saved = {"saved_bytes": counted.saved_bytes}
        return {**statistics.get_stats(group=self.group), "compression": {**asdict(counted), **saved}}

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics of this group, as ``get_stats()`` returns them."""
        return self.get_stats()

    def explain(self, what: Any, nbytes: int | str | torch.Tensor | None = None, **more: Any) -> explaining.Explanation:
        """The algorithm of an operation of ``nbytes`` in this group, and why: see ``torch_sagellm.explain``."""
        return explaining.explain(str(what) if isinstance(what, str) else what, nbytes, group=self.group, **more)

    # ------------------------------------------------------------------------------------------- helpers

    @staticmethod
    def _run(call: Callable[[], Any], result: torch.Tensor, async_op: bool) -> torch.Tensor | CommFuture:
        """Makes a call that returns a Work or None. Returns ``result``, or with ``async_op`` a future of it."""
        work = with_timeouts(call)
        if async_op:
            return CommFuture(work, result)
        if work is not None:
            with_timeouts(work.wait)
        return result


def named_vendor() -> str:
    """The vendor in SAGELLM_VENDOR, which overrides every option; "" if it is not set."""
    return os.environ.get("SAGELLM_VENDOR", "").partition(":")[0].strip().lower()


def _reduce_op(what: str, op: Op) -> Any:
    return getattr(dist.ReduceOp, checked_op(what, op))


@cache
def _reduction(what: str, op: Op, async_op: bool) -> Any:
    """Options of an all_reduce, cached because creating them takes as long as a small operation."""
    options = dist.AllreduceOptions()
    options.reduceOp = _reduce_op(what, op)
    if hasattr(options, "asyncOp"):
        options.asyncOp = async_op
    return options


def _copy_of(options: Any, timeout: timedelta) -> Any:
    copy = dist.AllreduceOptions()
    copy.reduceOp = options.reduceOp
    copy.timeout = timeout
    if hasattr(options, "asyncOp"):
        copy.asyncOp = options.asyncOp
    return copy
