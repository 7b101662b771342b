"""Collectives as objects, over ranks that are objects of one process or processes of a real group.

``create_ring_topology`` creates ranks for learning and tests: without a second process or environment variables, but
with the core's own collectives. The same operators work over the ranks of a job with ``DistributedCommunicator()``.

Example::

    comms = torch_sagellm.create_ring_topology(4)
    tensors = [torch.full((3,), float(comm.rank)) for comm in comms]
    for comm, tensor in zip(comms, tensors):
        torch_sagellm.AllReduceOperator(comm).all_reduce(tensor)
    print(tensors[0])  # tensor([6., 6., 6.])
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
import torch.distributed as dist

from torch_sagellm.api.arguments import Op, checked_number
from torch_sagellm.api.backends import create_comm_backend
from torch_sagellm.api.calls import unset
from torch_sagellm.api.comm_backend import CommBackend
from torch_sagellm.api.futures import CommFuture
from torch_sagellm.api.gradients import crossed, crosses
from torch_sagellm.api.in_process import Member, Topology
from torch_sagellm.observe.stats import BUS_FACTORS

if TYPE_CHECKING:
    from torch_sagellm.api.arguments import Seconds

__all__ = [
    "AllGatherOperator",
    "AllReduceOperator",
    "BenchmarkResult",
    "BroadcastOperator",
    "DistributedCommunicator",
    "ReduceScatterOperator",
    "create_ring_topology",
]

Shape = int | Sequence[int]
#: Calls before the first one that a benchmark measures.
WARM_UP = 2


class DistributedCommunicator:
    """One rank that communicates with the others of its group.

    ``DistributedCommunicator(rank, world_size)`` is a rank of a real group: the running process group, or the group
    that is started from torchrun's environment, or one rank alone, as in ``create_comm_backend``.
    ``create_ring_topology`` creates ranks of one process.

    All ranks call the same operations in the same order, with equal shapes and dtypes. A message matches the receive of
    the same two ranks and the same tag, in the order of the calls. A call with wrong arguments raises a ValueError or a
    TypeError and counts as not made. A call whose deadline passes raises a ``CommTimeoutError`` that names the missing
    ranks. Calls that do not match each other raise a ``torch.distributed.DistBackendError`` that shows both. After
    either of the last two errors the group has failed on all ranks.

    Args:
        rank, world_size: the expected values; they are compared with the group (ValueError).
        group: a process group to work in; None means the default group.
        timeout: deadline of each call, in seconds or as timedelta; None means the group's.

    Example::

        comm = torch_sagellm.DistributedCommunicator()  # this rank of the job
        comm.barrier()
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: Seconds | None = None,
    ) -> None:
        try:
            backend = create_comm_backend(rank=rank, world_size=world_size, group=group, timeout=timeout)
        except RuntimeError as error:
            if type(error) is not RuntimeError or dist.is_initialized():
                raise
            raise RuntimeError(f"{error}. create_ring_topology makes ranks that need no processes") from error
        self._member: Member | CommBackend = backend

    @classmethod
    def from_group(cls, group: dist.ProcessGroup, timeout: Seconds | None = None) -> DistributedCommunicator:
        """Returns this rank's communicator in ``group``; all ranks of the group must call this."""
        return cls(group=group, timeout=timeout)

    @classmethod
    def _of(cls, member: Member) -> DistributedCommunicator:
        made = cls.__new__(cls)
        made._member = member
        return made

    @property
    def rank(self) -> int:
        """This rank, counted from 0."""
        return self._member.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._member.world_size

    @property
    def next_rank(self) -> int:
        """The next rank of the ring."""
        return (self.rank + 1) % self.world_size

    @property
    def prev_rank(self) -> int:
        """The previous rank of the ring."""
        return (self.rank - 1) % self.world_size

    def __repr__(self) -> str:
        where = "in this process" if isinstance(self._member, Member) else "of a process group"
        return f"<DistributedCommunicator rank {self.rank} of {self.world_size}, {where}>"

    def send(self, data: torch.Tensor, dst_rank: int, tag: int = 0) -> None:
        """Sends a tensor to another rank; after it returns, the tensor may be changed.

        Between ranks of one process it copies the tensor and never waits for the receiver. In a real group the send of
        a large tensor waits for the receiver.
        """
        self._member.send(data, dst_rank, tag)

    def recv(
        self, src_rank: int, shape: Shape, dtype: torch.dtype, tag: int = 0, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Returns a new tensor with the data that rank ``src_rank`` sends.

        If all ranks are in one process, it returns immediately on the thread that created them. If the message has not
        been sent yet, the tensor holds NaN (0 if its dtype has no NaN) until the message is sent.
        """
        tensor = unset(_tuple(shape), dtype, device)
        self._member.recv(tensor, src_rank, tag)
        return tensor

    def isend(self, data: torch.Tensor, dst_rank: int, tag: int = 0) -> CommFuture:
        """``send`` as a future. In a real group ``data`` must not change before the future is done."""
        return self._member.isend(data, dst_rank, tag)

    def irecv(
        self, src_rank: int, shape: Shape, dtype: torch.dtype, tag: int = 0, device: torch.device | str = "cpu"
    ) -> CommFuture:
        """``recv`` as a future, whose ``wait()`` returns the new tensor."""
        return self._member.irecv(unset(_tuple(shape), dtype, device), src_rank, tag)

    def barrier(self) -> None:
        """Returns when all ranks have called it; immediately on the thread that created the ranks of one process."""
        self._member.barrier()


def create_ring_topology(world_size: int, timeout: Seconds = 60.0) -> list[DistributedCommunicator]:
    """Creates ``world_size`` ranks of this process that form a group, for learning and for tests without processes.

    They are ranks of the core: they meet and share memory like processes of one host. They combine numbers in the order
    of the ranks, and get the same bits as such processes. They accept tensors on the CPU.

    On the thread that calls this function, calls of the communicators return immediately, because the other ranks may
    make their calls only later on the same thread. So a plain loop over ranks works: a call has its result after the
    last rank has called. Until then, a tensor that receives a result holds NaN if it is floating-point or complex. With
    another dtype, a tensor that is changed in place keeps its old values, and a new tensor holds 0. Inputs are copied
    at the call. An input that is itself a pending result is copied as soon as that result is there.

    On any other thread a call returns when it has completed, as between processes.

    Gradients pass through all operators except broadcast, if the tensor requires gradients on every rank; the losses of
    all ranks count as one sum. Each rank calls ``backward`` on the thread of its forward pass. On the thread that
    created the ranks, gradients are complete after the last rank has called ``backward``. On this thread a tensor that
    is used both in an operator and elsewhere needs ``retain_graph=True``. Asynchronous forms take no part in autograd.

    If a call fails, all calls that have not completed fail, tensors that they change in place hold their previous
    values again, and the ranks accept no more calls. If the communicators are dropped, even in the middle of calls,
    their ranks end and their memory is freed.

    Args:
        world_size: number of ranks, 1 to 256 (ValueError). n ranks need n * (n + 3) descriptors, so the usual limit of
            1024 is enough for 30 ranks; above the limit a RuntimeError says how many are needed.
        timeout: how long a call on another thread waits for the other ranks, in seconds or as timedelta.

    Example::

        left, right = torch_sagellm.create_ring_topology(2)
        left.send(torch.ones(3), dst_rank=1)
        assert right.recv(src_rank=0, shape=(3,), dtype=torch.float32).tolist() == [1.0] * 3
    """
    topology = Topology(world_size, timeout)
    return [DistributedCommunicator._of(Member(topology, rank)) for rank in range(world_size)]


@dataclass(frozen=True)
class BenchmarkResult:
    """The times of one operation on one shape, measured on one rank.

    Example::

        operator = torch_sagellm.AllReduceOperator(torch_sagellm.DistributedCommunicator())
        (result,) = operator.benchmark([(1024,)], num_trials=3)
        print(result.median_seconds, result.busbw_gbs)
    """

    #: "all_reduce", "broadcast", "all_gather" or "reduce_scatter".
    op: str
    #: The shape of the tensor that each rank passes.
    shape: tuple[int, ...]
    dtype: torch.dtype
    world_size: int
    #: The size of the operation in bytes: that of the tensor that a rank passes; for all_gather, that of the result.
    nbytes: int
    #: Seconds of each trial, from the call until its result is there.
    seconds: tuple[float, ...]

    @property
    def num_trials(self) -> int:
        """The number of trials."""
        return len(self.seconds)

    @property
    def min_seconds(self) -> float:
        """The fastest trial."""
        return min(self.seconds)

    @property
    def median_seconds(self) -> float:
        """The median of the trials, in seconds."""
        return statistics.median(self.seconds)

    @property
    def mean_seconds(self) -> float:
        """The mean of the trials, in seconds."""
        return statistics.fmean(self.seconds)

    @property
    def max_seconds(self) -> float:
        """The slowest trial."""
        return max(self.seconds)

    @property
    def algbw_gbs(self) -> float:
        """Algorithm bandwidth: ``nbytes`` divided by the median time, in GB/s (10^9 bytes)."""
        return self.nbytes / self.median_seconds / 1e9

    @property
    def busbw_gbs(self) -> float:
        """Bus bandwidth, as in ``torch_sagellm.get_stats``: the traffic on the link of a rank, in GB/s.

        It is ``algbw_gbs`` times 2(n-1)/n for all_reduce, (n-1)/n for all_gather and reduce_scatter, 1 for broadcast,
        for n ranks. So except for broadcast it is 0 for one rank.
        """
        factor = BUS_FACTORS.get(self.op)
        return self.algbw_gbs * (1.0 if factor is None else factor(self.world_size))

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.op} of {dtype} {list(self.shape)}, {self.nbytes} bytes, {self.world_size} ranks: median "
            f"{self.median_seconds * 1e6:.1f} us of {self.num_trials} (fastest {self.min_seconds * 1e6:.1f}), "
            f"{self.algbw_gbs:.3f} GB/s, bus {self.busbw_gbs:.3f} GB/s"
        )


class _Operator:
    """A collective of one communicator."""

    #: The collective's name, which is also the name of a communicator's method.
    kind: ClassVar[str]

    def __init__(self, comm: DistributedCommunicator) -> None:
        if not isinstance(comm, DistributedCommunicator):
            raise TypeError(
                f"sagellm {type(self).__name__}: got a {type(comm).__name__}, expected a DistributedCommunicator"
            )
        self.comm = comm

    def benchmark(
        self, shapes: Sequence[Shape], num_trials: int = 10, dtype: torch.dtype = torch.float32
    ) -> list[BenchmarkResult]:
        """Measures the collective with its default arguments on CPU tensors of each shape; one result for each shape.

        All ranks call it with the same arguments. On the thread that created the ranks of one process a single call is
        enough, because it makes the calls of all ranks one after the other (RuntimeError if some ranks have called
        fewer collectives). The times there include collecting the calls and copying their tensors. They show how sizes
        compare, but not how fast ranks in separate processes are. To measure that, call it in a real group, or run
        ``torch-sagellm bench``.
        """
        checked_number("benchmark", "num_trials", num_trials)
        if isinstance(shapes, int):
            raise TypeError(f"sagellm benchmark: shapes is {shapes}, expected a list of shapes, such as [({shapes},)]")
        own = self.comm._member
        members = [own]
        if isinstance(own, Member) and own.topology.made_here:
            own.topology.require_equal_counts("benchmark")
            members = [Member(own.topology, rank) for rank in range(own.world_size)]
        return [self._measure(members, _tuple(shape), num_trials, dtype) for shape in shapes]

    def _measure(
        self, members: Sequence[Member | CommBackend], shape: tuple[int, ...], num_trials: int, dtype: torch.dtype
    ) -> BenchmarkResult:
        tensors = [torch.ones(shape, dtype=dtype) for _ in members]
        seconds = []
        for _ in range(WARM_UP + num_trials):
            for member, tensor in zip(members, tensors, strict=True):
                tensor.fill_(1)  # sums in place would grow from trial to trial
                member.barrier()
            began = perf_counter()
            for member, tensor in zip(members, tensors, strict=True):
                getattr(member, self.kind)(tensor)
            seconds.append(perf_counter() - began)
        size, ranks = tensors[0].nbytes, members[0].world_size
        nbytes = size * ranks if self.kind == "all_gather" else size
        return BenchmarkResult(self.kind, shape, dtype, ranks, nbytes, tuple(seconds[WARM_UP:]))


class AllReduceOperator(_Operator):
    """Combines the tensors of all ranks; all ranks get the result.

    Example::

        for comm in torch_sagellm.create_ring_topology(2):
            torch_sagellm.AllReduceOperator(comm).all_reduce(torch.ones(4), op="sum")
    """

    kind = "all_reduce"

    @overload
    def all_reduce(
        self, tensor: torch.Tensor, op: Op = "sum", async_op: Literal[False] = False, timeout: Seconds | None = None
    ) -> torch.Tensor: ...
    @overload
    def all_reduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, async_op: Literal[True], timeout: Seconds | None = None
    ) -> CommFuture: ...
    @overload
    def all_reduce(
        self, tensor: torch.Tensor, op: Op = "sum", async_op: bool = False, timeout: Seconds | None = None
    ) -> torch.Tensor | CommFuture: ...
    def all_reduce(
        self, tensor: torch.Tensor, op: Op = "sum", async_op: bool = False, timeout: Seconds | None = None
    ) -> torch.Tensor | CommFuture:
        """Combines ``tensor`` element by element over all ranks, in place, and returns it.

        ``op`` is "sum", "avg" ("mean"), "max", "min", "prod", or torch's ReduceOp. ``timeout`` is the deadline of this
        call alone, in seconds or as timedelta.

        Gradients pass through "sum" and "avg" of a tensor that is the result of other operations. On the thread that
        created the ranks of one process, the returned tensor is then a different object over the same memory. A leaf
        that requires gradients (a parameter) is reduced as it is, without being recorded by autograd.
        """
        if not async_op and crosses(tensor) and not tensor.is_leaf:
            if timeout is not None:
                raise ValueError(
                    "sagellm all_reduce: timeout does not go with a tensor that autograd follows; detach() it"
                )
            return crossed(self.comm._member, "all_reduce", tensor, op)
        return self.comm._member.all_reduce(tensor, op, async_op=async_op, timeout=timeout)

    def _batch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Implements ``batch_all_reduce`` for an operator."""
        member = self.comm._member
        if isinstance(member, CommBackend):
            return member.fused_all_reduce(tensors)
        for tensor in tensors:
            member.all_reduce(tensor)
        return list(tensors)

    def _safe(self, tensor: torch.Tensor, timeout: Seconds) -> torch.Tensor:
        """Implements ``safe_all_reduce`` for an operator."""
        self.comm._member.all_reduce(tensor, timeout=timeout)
        return tensor


class BroadcastOperator(_Operator):
    """Copies the tensor of one rank to all ranks.

    Example::

        for comm in torch_sagellm.create_ring_topology(2):
            torch_sagellm.BroadcastOperator(comm).broadcast(torch.tensor([comm.rank]), root_rank=1)
    """

    kind = "broadcast"

    @overload
    def broadcast(self, tensor: torch.Tensor, root_rank: int = 0, async_op: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def broadcast(self, tensor: torch.Tensor, root_rank: int = 0, *, async_op: Literal[True]) -> CommFuture: ...
    @overload
    def broadcast(
        self, tensor: torch.Tensor, root_rank: int = 0, async_op: bool = False
    ) -> torch.Tensor | CommFuture: ...
    def broadcast(self, tensor: torch.Tensor, root_rank: int = 0, async_op: bool = False) -> torch.Tensor | CommFuture:
        """Writes the tensor of ``root_rank`` into the tensors of the other ranks, in place; returns it.

        Gradients do not pass through it.
        """
        return self.comm._member.broadcast(tensor, root_rank, async_op=async_op)


class AllGatherOperator(_Operator):
    """Collects the tensors of all ranks on every rank.

    Example::

        ring = torch_sagellm.create_ring_topology(2)
        rows = [torch_sagellm.AllGatherOperator(comm).all_gather(torch.ones(3)) for comm in ring]
        assert rows[0].shape == (6,)
    """

    kind = "all_gather"

    @overload
    def all_gather(self, tensor: torch.Tensor, *, async_op: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def all_gather(self, tensor: torch.Tensor, *, async_op: Literal[True]) -> CommFuture: ...
    @overload
    def all_gather(self, tensor: torch.Tensor, *, async_op: bool = False) -> torch.Tensor | CommFuture: ...
    def all_gather(self, tensor: torch.Tensor, *, async_op: bool = False) -> torch.Tensor | CommFuture:
        """Returns a new tensor: the tensors of all ranks, in rank order, concatenated along dimension 0.

        A scalar counts as one row. Gradients pass through it; see ``create_ring_topology``.
        """
        if not async_op and crosses(tensor):
            return crossed(self.comm._member, "all_gather", tensor)
        return self.comm._member.all_gather(tensor, async_op=async_op)


class ReduceScatterOperator(_Operator):
    """Combines the tensors of all ranks; each rank gets a slice of the result.

    Example::

        ring = torch_sagellm.create_ring_topology(2)
        parts = [torch_sagellm.ReduceScatterOperator(comm).reduce_scatter(torch.ones(6)) for comm in ring]
        assert parts[0].tolist() == [2.0] * 3
    """

    kind = "reduce_scatter"

    @overload
    def reduce_scatter(
        self, tensor: torch.Tensor, op: Op = "sum", async_op: Literal[False] = False
    ) -> torch.Tensor: ...
    @overload
    def reduce_scatter(self, tensor: torch.Tensor, op: Op = "sum", *, async_op: Literal[True]) -> CommFuture: ...
    @overload
    def reduce_scatter(
        self, tensor: torch.Tensor, op: Op = "sum", async_op: bool = False
    ) -> torch.Tensor | CommFuture: ...
    def reduce_scatter(self, tensor: torch.Tensor, op: Op = "sum", async_op: bool = False) -> torch.Tensor | CommFuture:
        """Returns a new tensor: this rank's slice, along dimension 0, of the sum (or other ``op``) over all ranks.

        Dimension 0 must be a multiple of the number of ranks (ValueError). Gradients pass through "sum" and "avg"; see
        ``create_ring_topology``.
        """
        if not async_op and crosses(tensor):
            return crossed(self.comm._member, "reduce_scatter", tensor, op)
        return self.comm._member.reduce_scatter(tensor, op, async_op=async_op)


def _tuple(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def __getattr__(name: str) -> Any:
    """Older code imports other public names from this module too."""
    import torch_sagellm

    return torch_sagellm._public(__name__, name)
