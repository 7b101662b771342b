"""Communication of one layer while the next one computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch_sagellm.api.arguments import Op
from torch_sagellm.api.comm_backend import CommBackend


@dataclass(frozen=True)
class OverlapReport:
    """How much of the communication was hidden behind computation; seconds.

    Example::

        scheduler = torch_sagellm.OverlapScheduler()
        scheduler.schedule(torch.ones(1 << 20)).wait()
        print(scheduler.report().share)
    """

    #: Operations that have ended.
    operations: int
    #: From the issue of each operation to its end, all of them together.
    communication: float
    #: How long the caller waited for them.
    waiting: float

    @property
    def overlapped(self) -> float:
        """The part of the communication during which the caller did not wait."""
        return max(self.communication - self.waiting, 0.0)

    @property
    def share(self) -> float:
        """``overlapped`` / ``communication``; 0 where there was none."""
        return self.overlapped / self.communication if self.communication else 0.0

    def __str__(self) -> str:
        return (
            f"{self.operations} operations, {self.communication * 1e3:.2f} ms of communication, "
            f"{self.waiting * 1e3:.2f} ms of it waited for, {self.share:.0%} overlapped"
        )


class OverlapHandle:
    """An operation that is under way; ``wait()`` returns its tensor.

    Example::

        output, handle = torch_sagellm.OverlapScheduler().schedule_layer(torch.nn.Identity(), torch.ones(4))
        total = handle.wait()  # ``output`` summed over the ranks
    """

    def __init__(self, scheduler: OverlapScheduler, future: Any) -> None:
        self._scheduler = scheduler
        self._future = future
        self._began = perf_counter()
        self._ended: float | None = None
        self._waited = False
        future.add_done_callback(self._note)

    def _note(self, _: Any) -> None:
        self._ended = perf_counter()

    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self._future.done())

    def wait(self) -> torch.Tensor:
        """The tensor, when the operation has ended; may be called again."""
        began = perf_counter()
        result: torch.Tensor = self._future.wait()
        if not self._waited:
            self._waited = True
            ended = perf_counter()
            self._scheduler._add((self._ended or ended) - self._began, ended - began)
        return result


class OverlapScheduler:
    """Runs layers, and combines their outputs over the ranks while the caller goes on computing.

    Args:
        backend: a backend of ``create_comm_backend``; None: the one that it returns without arguments.
        op: how the results are combined: "sum", "avg", ...
        depth: operations that are under way at most, 1 or more; where there are as many, the oldest is waited for
            first.

    Raises:
        ValueError: ``depth`` is less than 1. From ``schedule_layer`` and ``schedule``: the op is unknown.

    Example::

        layers, buckets = [torch.nn.Linear(8, 8) for _ in range(3)], [torch.ones(2, 8)] * 3
        scheduler = torch_sagellm.OverlapScheduler()
        handles = []
        for layer, bucket in zip(layers, buckets):
            output, handle = scheduler.schedule_layer(layer, bucket)
            handles.append(handle)  # the next layer computes meanwhile
        results = [handle.wait() for handle in handles]
        print(scheduler.report())
    """

    def __init__(self, backend: CommBackend | None = None, op: Op = "sum", depth: int = 8) -> None:
        if depth < 1:
            raise ValueError(f"sagellm OverlapScheduler: depth is {depth}, expected 1 or more")
        if backend is None:
            from torch_sagellm.api.backends import create_comm_backend

            backend = create_comm_backend()
        self.backend, self.op, self.depth = backend, op, depth
        self._under_way: list[OverlapHandle] = []
        self._operations = 0
        self._communication = self._waiting = 0.0

    def schedule_layer(
        self, layer: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor
    ) -> tuple[torch.Tensor, OverlapHandle]:
        """Computes ``layer(input)`` and begins to combine a copy of the output over the ranks.

        Returns the output of this rank, and a handle whose ``wait()`` gives the combined one. Gradients do not pass
        through the combined output.
        """
        output = layer(input)
        return output, self.schedule(output.detach().clone(memory_format=torch.contiguous_format))

    def schedule(self, tensor: torch.Tensor) -> OverlapHandle:
        """Begins to combine ``tensor``, a bucket of gradients say, in place; it must not change until the end."""
        self._under_way = [handle for handle in self._under_way if not handle.done()]
        while len(self._under_way) >= self.depth:
            self._under_way.pop(0).wait()
        handle = OverlapHandle(self, self.backend.all_reduce(tensor, self.op, async_op=True))
        self._under_way.append(handle)
        return handle

    def report(self) -> OverlapReport:
        """The report of all operations that the caller has waited for, since the beginning or ``reset``."""
        return OverlapReport(self._operations, self._communication, self._waiting)

    def reset(self) -> None:
        """Resets the report."""
        self._operations, self._communication, self._waiting = 0, 0.0, 0.0

    def _add(self, communication: float, waiting: float) -> None:
        self._operations += 1
        self._communication += communication
        self._waiting += min(waiting, communication)
