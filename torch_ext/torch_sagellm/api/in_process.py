"""Ranks that are objects of one process, for learning and tests. The core serves them as it serves processes.

The ranks of a ``Topology`` meet over a store in memory and share memory, like processes of one host. Their calls are
collected here, because a loop over ranks makes them one after the other. When the last rank has made a call, the
operation is issued on all ranks together. The core works on copies, so that an operation that fails leaves no tensor
partly written. The core alone decides how data is moved and combined.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torch_sagellm._private import descriptors, load, register
from torch_sagellm.api.arguments import (
    Op,
    Seconds,
    as_timedelta,
    checked_dense,
    checked_op,
    checked_tensor,
    checked_written,
    rows_of_slice,
)
from torch_sagellm.api.calls import ISSUE, Call, Operation, agree, reduction, unset
from torch_sagellm.api.errors import CommTimeoutError, with_timeouts
from torch_sagellm.api.futures import CommFuture
from torch_sagellm.observe import log

#: The largest number of ranks that share memory on one host.
MOST_RANKS = 256
#: For `totals`: the live topologies of this process, and the counts of topologies that failed or were
#: garbage-collected.
_alive: weakref.WeakSet[Topology] = weakref.WeakSet()
_gone: deque[Totals] = deque()
#: For each kind: number of operations, bytes and nanoseconds of waiting.
Totals = dict[str, tuple[int, int, int]]


def totals() -> Totals:
    """The counts of all ranks of this process since it began, including ranks that are gone; they never decrease."""
    found: Totals = {}
    # Copies, because a topology may end on another thread, which moves its counts from `_alive` to `_gone`.
    for each in [*_gone, *(counted(topology._groups) for topology in list(_alive))]:
        _add(found, each.items())
    return found


def _add(sums: Totals, more: Iterable[tuple[str, tuple[int, int, int]]]) -> None:
    """Adds counts of kinds to ``sums``."""
    for kind, (number, nbytes, waiting) in more:
        one = sums.get(kind, (0, 0, 0))
        sums[kind] = (one[0] + number, one[1] + nbytes, one[2] + waiting)


def counted(groups: list[Any]) -> Totals:
    """The sums of the counts of some groups."""
    found: Totals = {}
    for group in list(groups):
        kinds = group._totals()["kinds"]
        _add(found, ((one["kind"], (one["count"], one["bytes"], one["waiting"])) for one in kinds))
    return found


def _end(groups: list[Any]) -> None:
    """Keeps the counts of groups, and drops the groups.

    This ends parts of a failed operation that the core still has.
    """
    if groups:
        last = counted(groups)
        while len(_gone) > 100:  # only the newest are kept separately; the others are summed
            _add(last, _gone.popleft().items())
        _gone.append(last)
        groups.clear()


class Topology:
    """All ranks of one process that form a group.

    Args:
        world_size: number of ranks, 1 to 256.
        timeout: how long a call waits for the other ranks, in seconds or as timedelta, on any thread except the one
            that created the topology.
    """

    def __init__(self, world_size: int, timeout: Seconds) -> None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MOST_RANKS:
            raise ValueError(f"sagellm: world_size is {world_size!r}, expected a number of ranks, 1 to {MOST_RANKS}")
        self.world_size = world_size
        self._timeout = as_timedelta(timeout)
        #: The thread that created the topology. Calls on this thread return immediately.
        self._maker = threading.current_thread()
        _require_descriptors(world_size)
        self._groups = _meet(world_size, self._timeout)
        weakref.finalize(self, _end, self._groups).atexit = False
        _alive.add(self)
        #: A group of one rank. Every call is first made in this group, where it changes nothing, so that the core
        #: checks the arguments immediately.
        self.alone = _meet(1, self._timeout)[0]
        #: Guards the tensors of all calls, even while an operation runs, and all fields below. Notified when calls end.
        self.changed = threading.Condition()
        #: For each rank: the number of collectives that it has called.
        self._counts = [0] * world_size
        #: Collectives that some rank has not called yet, by number; messages of which only one side was called, by
        #: ranks and tag; operations that all their ranks have called.
        self._collectives: dict[int, Operation] = {}
        self._messages: dict[tuple[int, int, int], deque[Operation]] = {}
        self._complete: list[Operation] = []
        #: Calls that have not ended, in the order of the calls.
        self._pending: list[Call] = []
        #: Class and text of the error after which no call is accepted. The error object itself would keep its stack
        #: alive.
        self._failure: tuple[Callable[[str], Exception], str] | None = None
        #: Functions to run after calls of a backward pass (`gradients`). The thread that notices the end of a call runs
        #: its function.
        self._following: list[tuple[Call, Callable[[], None]]] = []

    @property
    def made_here(self) -> bool:
        """Whether the calling thread created the topology."""
        return threading.current_thread() is self._maker

    def require_equal_counts(self, what: str) -> None:
        """Raises a RuntimeError if some ranks have called more collectives than others."""
        with self.changed:
            fewest, most = min(self._counts), max(self._counts)
        if fewest != most:
            raise RuntimeError(
                f"sagellm {what}: rank {self._counts.index(fewest)} has called {fewest} collectives and rank "
                f"{self._counts.index(most)} {most}, expected as many on every rank: make the missing calls first"
            )

    # ------------------------------------------------------------------------------------------- accepting calls

    def collective(self, call: Call, waits: bool = True) -> Operation:
        """Accepts a call as the next collective of its rank; waits for its end (`_go_on`) unless ``waits`` is False."""
        with torch.inference_mode(), self.changed:  # every tensor may be written in this mode
            self._refuse_if_unusable(call)
            number = self._counts[call.rank] + 1
            everyone = tuple(range(self.world_size))
            operation = self._collectives.get(number) or Operation(f" as collective {number}", everyone)
            self._join(call, operation)
            self._counts[call.rank] = number
            self._collectives[number] = operation
            if not operation.missing():
                del self._collectives[number]
            self._go_on(call, operation, waits)
            return operation

    def message(self, call: Call, source: int, destination: int, tag: int, waits: bool = True) -> Operation:
        """Accepts a send or a receive. Calls of two ranks with one tag match in the order in which they are made."""
        with torch.inference_mode(), self.changed:  # every tensor may be written in this mode
            self._refuse_if_unusable(call)
            waiting = self._messages.get((source, destination, tag), deque())
            matches = bool(waiting) and call.rank in waiting[0].missing()
            operation = waiting[0] if matches else Operation("", (source, destination))
            self._join(call, operation)
            if matches:
                waiting.popleft()
            else:
                waiting.append(operation)
            self._messages[source, destination, tag] = waiting
            if not waiting:
                del self._messages[source, destination, tag]
            self._go_on(call, operation, waits)
            return operation

    def wait(self, call: Call, operation: Operation) -> None:
        """Waits for a call that was made without waiting.

        The thread that created the topology does not wait: on it, a call that has not ended is an error.
        """
        with torch.inference_mode(), self.changed:
            if not (self.made_here and self._failure is None):
                self._wait(call, operation)

    def ended(self, call: Call) -> bool:
        """Whether a call has ended, possibly with an error."""
        with self.changed:
            return call.released or self._failure is not None

    def follow(self, call: Call, then: Callable[[], None]) -> None:
        """Stores a function to run after a call of a backward pass, and runs the functions that can run, in call order.

        One thread at a time runs the functions, because their collectives must be called in this order.
        """
        with self.changed:
            self._following.append((call, then))
            if not call.done:
                return
            ready = [each for each in self._following if each[0].done]
            self._following = [each for each in self._following if not each[0].done]
        for _, run in ready:
            run()

    def _refuse_if_unusable(self, call: Call) -> None:
        if self._failure is not None:
            raise self._told(call)
        for other in self._pending:
            if other.rank != call.rank and other.will_write_for(call):
                raise ValueError(
                    f"sagellm {call}: the tensor of rank {call.rank} shares memory with the one into which {other} of "
                    f"rank {other.rank} will write, expected memory of its own for each rank: pass a clone"
                )

    def _join(self, call: Call, operation: Operation) -> None:
        """Adds a call to its operation. If the call does not agree with the operation's first call, all ranks fail.

        If copying the call's tensors fails, nothing changes: the call counts as not made.
        """
        first = next(iter(operation.calls.values()), None)
        if first is not None and not agree(first, call):
            error = dist.DistBackendError(
                f"sagellm: rank {call.rank} called {call}{operation.place}, but rank {first.rank} called {first}. "
                "Every rank must call the same operations in the same order, with the same shapes and dtypes"
            )
            self._fail(error)
            raise error
        call.after = [earlier for earlier in self._pending if earlier.will_write_for(call)]
        if not call.after:
            call.take()
        operation.calls[call.rank] = call
        self._pending.append(call)
        if not operation.missing():
            self._complete.append(operation)

    def _go_on(self, call: Call, operation: Operation, waits: bool) -> None:
        """Runs operations that can run; waits for the call to end, except on the thread that created the topology."""
        while (ready := next((each for each in self._complete if not each.unfinished()), None)) is not None:
            self._complete.remove(ready)
            self._run(ready)
        if waits and not self.made_here:
            self._wait(call, operation)

    def _wait(self, call: Call, operation: Operation) -> None:
        until = time.monotonic() + (call.timeout or self._timeout).total_seconds()
        while not call.released and self._failure is None:
            if (left := until - time.monotonic()) <= 0:
                error = CommTimeoutError(*self._overdue(call, operation))
                self._fail(error)
                raise error
            self.changed.wait(left)
        if not call.released:
            raise self._told(call)

    def _overdue(self, call: Call, operation: Operation) -> tuple[str, list[int]]:
        """Returns the error text at the deadline, and the ranks without which ``call`` cannot end."""
        head = (
            f"sagellm: rank {call.rank} Timed out after {(call.timeout or self._timeout).total_seconds():g} s in {call}"
        )
        seen = [operation]
        while not (missing := operation.missing()):
            # All calls of the operation have been made, so one of them waits for an earlier call.
            earlier = operation.unfinished()[0]
            head += f", which waits for {earlier} of rank {earlier.rank}"
            operation = next(each for each in self._unfinished() if each.calls.get(earlier.rank) is earlier)
            if operation in seen:
                return f"{head}: these calls wait for each other's results", []
            seen.append(operation)
        said = "; ".join(self._absence(rank, operation) for rank in missing)
        return f"{head}{operation.place}: {said}. Where a rank needs longer, pass a larger timeout", missing

    def _absence(self, rank: int, operation: Operation) -> str:
        if operation.place:
            return f"rank {rank} (in this process) has not called it, only {self._counts[rank]} collectives"
        return f"rank {rank} (in this process) has not called its {'send' if rank == operation.ranks[0] else 'recv'}"

    def _unfinished(self) -> list[Operation]:
        waiting = [operation for queue in self._messages.values() for operation in queue]
        return [*self._collectives.values(), *waiting, *self._complete]

    # ------------------------------------------------------------------------------------------- operations run

    def _run(self, operation: Operation) -> None:
        """Runs an operation on all its ranks and stores its results; any failure fails all ranks."""
        calls = [operation.calls[rank] for rank in operation.ranks]
        try:
            issued = [ISSUE[call.kind](self._groups[call.rank], call) for call in calls]
            for work, _ in issued:
                if work is not None:
                    with_timeouts(work.wait)
            for call, (_, result) in zip(calls, issued, strict=True):
                if call.result is not None:
                    call.result.copy_(result)
        except BaseException as error:
            self._fail(error)
            raise
        for call in calls:
            call.done = True
            self._pending.remove(call)
        # In the order of the calls, so that each call reads the results of the calls before it.
        for call in self._pending:
            if not call.taken and all(earlier.done for earlier in call.after):
                call.take()
        self.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Fails all calls, and restores the previous values of the caller's tensors."""
        kind: Callable[[str], Exception] = dist.DistBackendError
        if isinstance(error, CommTimeoutError):
            kind = partial(CommTimeoutError, missing=error.missing_ranks)
        self._failure = kind, str(error) or type(error).__name__
        for call in self._pending:
            if call.result is not None and call.before is not None:
                call.result.copy_(call.before)
        self._pending, self._complete, self._collectives, self._messages = [], [], {}, {}
        self._following = []
        _end(self._groups)
        self.changed.notify_all()

    def _told(self, call: Call) -> Exception:
        """The error of a call that ends, or is refused, because another call failed."""
        assert self._failure is not None
        kind, why = self._failure
        return kind(
            f"sagellm: {call} of rank {call.rank} cannot run, because the ranks of this process have failed: make new "
            f"ones with create_ring_topology({self.world_size}). The failure was: {why}"
        )


class _Made:
    """A call that was made without waiting, with the methods of a Work that ``CommFuture`` uses."""

    def __init__(self, topology: Topology, call: Call, operation: Operation) -> None:
        self.topology, self.call, self.operation = topology, call, operation

    def get_future(self) -> Any:
        raise RuntimeError("a call in this process has no future of torch: it ends in wait()")

    def is_completed(self) -> bool:
        return self.topology.ended(self.call)

    def wait(self) -> None:
        self.topology.wait(self.call, self.operation)


class _Future(CommFuture):
    """The future of a call in this process. Once the call has ended, ``wait()`` runs what ``then`` has chained."""

    def wait(self) -> torch.Tensor:
        """Returns the tensor when the call has ended; immediately on the thread that created the ranks, like every
        call."""
        if self._work.topology.made_here and not self._work.is_completed():
            return self._result
        return super().wait()


class Member:
    """One rank of a topology, with the methods of a ``CommBackend`` for CPU tensors."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology = topology
        self.rank = rank
        self.world_size = topology.world_size

    def all_reduce(
        self, tensor: torch.Tensor, op: Op = "sum", async_op: bool = False, timeout: Seconds | None = None
    ) -> torch.Tensor | CommFuture:
        name = checked_op("all_reduce", op)
        _require_dense("all_reduce", tensor)
        with self.topology.changed:
            self.topology.alone.allreduce([tensor], reduction(dist.AllreduceOptions(), name))
        call = self._call("all_reduce", tensor, f"op {name}", name, source=tensor, result=tensor)
        call.timeout = None if timeout is None else as_timedelta(timeout)
        return self._collective(call, tensor, async_op)

    def broadcast(self, tensor: torch.Tensor, root_rank: int = 0, async_op: bool = False) -> torch.Tensor | CommFuture:
        self._require_rank("broadcast", "root_rank", root_rank)
        self._require_movable("broadcast", tensor, written=True)
        ours = {"source" if self.rank == root_rank else "result": tensor}
        call = self._call("broadcast", tensor, f"root_rank {root_rank}", root_rank, **ours)
        return self._collective(call, tensor, async_op)

    def all_gather(self, tensor: torch.Tensor, *, async_op: bool = False) -> torch.Tensor | CommFuture:
        self._require_movable("all_gather", tensor, written=False)
        rows, rest = (tensor.shape[0], tensor.shape[1:]) if tensor.dim() else (1, tensor.shape)
        result = unset((rows * self.world_size, *rest), tensor.dtype)
        return self._collective(self._call("all_gather", tensor, "", source=tensor, result=result), result, async_op)

    def reduce_scatter(self, tensor: torch.Tensor, op: Op = "sum", async_op: bool = False) -> torch.Tensor | CommFuture:
        name = checked_op("reduce_scatter", op)
        _require_dense("reduce_scatter", tensor)
        rows = rows_of_slice("reduce_scatter", tensor, self.world_size)
        one = tensor.new_zeros(1)  # only the op and the dtype can be refused by the core here
        with self.topology.changed:
            self.topology.alone.reduce_scatter([one.clone()], [[one]], reduction(dist.ReduceScatterOptions(), name))
        result = unset((rows, *tensor.shape[1:]), tensor.dtype)
        call = self._call("reduce_scatter", tensor, f"op {name}", name, source=tensor, result=result)
        return self._collective(call, result, async_op)

    def barrier(self) -> None:
        self.topology.collective(Call(self.rank, "barrier"))

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        self._send(tensor, dst, tag, waits=True)

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> torch.Tensor:
        self._recv(tensor, src, tag, waits=True)
        return tensor

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> CommFuture:
        return self._send(tensor, dst, tag, waits=False)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> CommFuture:
        return self._recv(tensor, src, tag, waits=False)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, waits: bool) -> CommFuture:
        self._message("send", "dst_rank", dst, tag, tensor)
        call = self._call("send", tensor, f"to rank {dst}, tag {tag}", (dst, tag), source=tensor)
        return _Future(_Made(self.topology, call, self.topology.message(call, self.rank, dst, tag, waits)), tensor)

    def _recv(self, tensor: torch.Tensor, src: int, tag: int, waits: bool) -> CommFuture:
        self._message("recv", "src_rank", src, tag, tensor)
        call = self._call("recv", tensor, f"from rank {src}, tag {tag}", (src, tag), result=tensor)
        return _Future(_Made(self.topology, call, self.topology.message(call, src, self.rank, tag, waits)), tensor)

    def _call(self, kind: str, tensor: torch.Tensor, arguments: str, option: Any = None, **tensors: Any) -> Call:
        return Call(self.rank, kind, tuple(tensor.shape), tensor.dtype, arguments, option, **tensors)

    def _collective(self, call: Call, result: torch.Tensor, async_op: bool) -> torch.Tensor | CommFuture:
        operation = self.topology.collective(call, waits=not async_op)
        return _Future(_Made(self.topology, call, operation), result) if async_op else result

    def _message(self, kind: str, what: str, peer: int, tag: int, tensor: torch.Tensor) -> None:
        self._require_rank(kind, what, peer)
        if peer == self.rank:
            raise ValueError(f"sagellm {kind}: {what} is {peer}, which is this rank itself")
        if tag < 0:
            raise ValueError(f"sagellm {kind}: tag is {tag}, expected 0 or more")
        self._require_movable(kind, tensor, written=kind == "recv")

    def _require_rank(self, kind: str, what: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"sagellm {kind}: {what} is {rank}, expected 0 to {self.world_size - 1}")

    def _require_movable(self, kind: str, tensor: torch.Tensor, written: bool) -> None:
        _require_dense(kind, tensor)
        if written:  # an input's elements may share memory
            checked_written(kind, tensor)
        with self.topology.changed:
            self.topology.alone.broadcast([tensor if written else tensor.new_zeros(1)], dist.BroadcastOptions())


def _require_dense(kind: str, tensor: torch.Tensor) -> None:
    checked_tensor(kind, tensor)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"sagellm {kind}: got a {tensor.layout} tensor on {tensor.device}, expected a dense one on the CPU: ranks "
            "of one process take no others"
        )
    checked_dense(kind, tensor)


def _require_descriptors(world_size: int) -> None:
    """Raises a RuntimeError if the limit of open files is too low for the ranks, before anything is opened."""
    # Each rank watches every rank by a descriptor. While the ranks meet, each rank has two more descriptors, and one
    # for its memory.
    needed = world_size * (world_size + 3)
    if lack := descriptors.lack(needed):
        raise RuntimeError(
            f"sagellm: {world_size} ranks of one process need {needed} file descriptors, and of the {lack.limit} that "
            f"this process may have {lack.used} are in use; make fewer ranks, or raise the limit (ulimit -n)"
        )


def _meet(world_size: int, timeout: timedelta) -> list[Any]:
    """Creates the groups of ranks that meet over a store in memory.

    Each rank runs on a thread, because it waits for peers.
    """
    extension = load.extension()
    log.configure(extension)
    register._step_at_exit(extension)
    options = register._settings(extension, None)
    options.vendor = "host"  # CPU tensors need no library, and looking for one takes time
    store, ranks = dist.HashStore(), list(range(world_size))
    groups: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def meet(rank: int) -> None:
        try:
            decided = extension.rendezvous(
                store, rank, world_size, timeout, group_name="in-process", global_ranks=ranks, options=options
            )
            if decided.delegate_reason:
                raise RuntimeError(f"sagellm: the ranks of this process cannot share memory: {decided.delegate_reason}")
            groups[rank] = decided.build()
        except BaseException as error:  # raised below, on the calling thread
            errors[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,), name=f"rank {rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors.values():
        raise error
    return [groups[rank] for rank in ranks]
