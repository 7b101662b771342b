"""Overlaps the communication of one layer with the computation of the next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch_sagellm.api.arguments import Op
from torch_sagellm.api.comm_backend import CommBackend
from torch_sagellm.api.futures import CommFuture

logger = logging.getLogger("sagellm")


@dataclass(frozen=True)
class OverlapReport:
    """How much of the communication was hidden behind computation, in seconds.

    Hidden time is the gain of a step: the time of a step that waits for each operation right after issuing it, minus
    the time of a step that overlaps operations. Hidden time needs steps of both kinds, which ``OverlapScheduler.step``
    measures; without them it is unknown. A short wait of the caller is no evidence of a gain, because operations slow
    down the computation if all cores compute.

    Example::

        scheduler = torch_sagellm.OverlapScheduler()
        for _ in range(8):
            with scheduler.step():
                scheduler.schedule(torch.ones(1 << 20))
        print(scheduler.report().share)
    """

    #: Number of operations that have ended.
    operations: int
    #: Sum over the operations of the time from issue to end.
    under_way: float
    #: How long the caller waited for the operations.
    waiting: float
    #: Seconds of a step without overlap, of a step with overlap, and of the waits in a step without overlap. A step has
    #: the value of its slowest rank, and these are the medians over the steps. None before all steps are measured.
    serial: float | None = None
    overlapping: float | None = None
    alone: float | None = None

    @property
    def communication(self) -> float:
        """The communication time of a step without overlap, that is, its waits; 0 before it is measured."""
        return self.alone or 0.0

    @property
    def overlapped(self) -> float:
        """The hidden time of a step; negative if overlapping made it slower, 0 before it is measured."""
        return 0.0 if self.serial is None or self.overlapping is None else self.serial - self.overlapping

    @property
    def share(self) -> float:
        """``overlapped`` / ``communication``, at most 1; 0 if there was no communication, or before it is measured."""
        return min(self.overlapped / self.alone, 1.0) if self.alone else 0.0

    @property
    def pays(self) -> bool | None:
        """Whether a step is faster with overlap; None before it is measured."""
        return None if self.serial is None else self.overlapped > 0

    def __str__(self) -> str:
        text = f"{self.operations} operations, {self.waiting * 1e3:.2f} ms waited for, "
        if self.serial is None or self.overlapping is None:
            return text + "hidden time not measured: run each step in `with scheduler.step():`"
        text += f"a step takes {self.serial * 1e3:.2f} ms without overlap and {self.overlapping * 1e3:.2f} ms with it, "
        if not self.pays:
            return text + "so overlapping does not pay here and is off"
        return text + f"{self.share:.0%} of {self.communication * 1e3:.2f} ms of communication hidden"


class OverlapHandle:
    """An operation in flight; ``wait()`` returns its tensor.

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
        """Whether the operation has ended."""
        return bool(self._future.done())

    def wait(self) -> torch.Tensor:
        """Returns the tensor when the operation has ended; may be called again."""
        began = perf_counter()
        result: torch.Tensor = self._future.wait()
        if not self._waited:
            self._waited = True
            ended = perf_counter()
            self._scheduler._add((self._ended or ended) - self._began, ended - began)
        return result


class OverlapScheduler:
    """Runs layers, and combines their outputs over the ranks while the caller continues computing.

    A step is faster this way if a core is free for the communication, or if the link is slow. If every core computes,
    it can be slower. With each training step in ``step()``, the scheduler measures both ways and keeps the faster one.

    Args:
        backend: a backend of ``create_comm_backend``; None means that of ``create_comm_backend()``.
        op: how the results are combined: "sum", "avg", ...
        depth: the largest number of operations in flight, at least 1; at the limit, the scheduler first waits for the
            oldest one.
        calibrate: steps of each kind that ``step()`` measures, at least 1. With few of them, a single
            slow step may decide.

    Raises:
        ValueError: ``depth`` or ``calibrate`` is less than 1. Raised from ``schedule_layer`` and ``schedule``: the op
            is unknown.

    Example::

        layers, buckets = [torch.nn.Linear(8, 8) for _ in range(3)], [torch.ones(2, 8)] * 3
        scheduler = torch_sagellm.OverlapScheduler()
        for _ in range(10):
            with scheduler.step():
                handles = []
                for layer, bucket in zip(layers, buckets):
                    output, handle = scheduler.schedule_layer(layer, bucket)
                    handles.append(handle)  # the next layer computes meanwhile
                results = [handle.wait() for handle in handles]
        print(scheduler.report())
    """

    def __init__(self, backend: CommBackend | None = None, op: Op = "sum", depth: int = 8, calibrate: int = 8) -> None:
        for name, number in (("depth", depth), ("calibrate", calibrate)):
            if number < 1:
                raise ValueError(f"sagellm OverlapScheduler: {name} is {number}, expected 1 or more")
        if backend is None:
            from torch_sagellm.api.backends import create_comm_backend

            backend = create_comm_backend()
        self.backend, self.op, self.depth, self.calibrate = backend, op, depth, calibrate
        self._under_way: list[OverlapHandle] = []
        self._pays: bool | None = None
        self._measured: tuple[float, ...] = ()
        self.reset()

    def schedule_layer(
        self, layer: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor
    ) -> tuple[torch.Tensor, OverlapHandle]:
        """Computes ``layer(input)`` and begins to combine a copy of the output over the ranks.

        It returns the output of this rank, and a handle whose ``wait()`` returns the combined output. Gradients do not
        pass through the combined output.
        """
        output = layer(input)
        return output, self.schedule(output.detach().clone(memory_format=torch.contiguous_format))

    def schedule(self, tensor: torch.Tensor) -> OverlapHandle:
        """Begins to combine ``tensor``, for example a bucket of gradients, in place.

        The tensor must not change until the operation has ended. In a ``step()`` without overlap, the operation has
        ended when this returns.
        """
        if self._serially:
            return self._combine(tensor)
        self._under_way = [handle for handle in self._under_way if not handle.done()]
        while len(self._under_way) >= self.depth:
            self._under_way.pop(0).wait()
        handle = OverlapHandle(self, self.backend.all_reduce(tensor, self.op, async_op=True))
        self._under_way.append(handle)
        return handle

    def _combine(self, tensor: torch.Tensor) -> OverlapHandle:
        """Like ``schedule`` without overlap. The call is synchronous, because that is faster than a wait for an
        asynchronous one."""
        began = perf_counter()
        result = self.backend.all_reduce(tensor, self.op)
        took = perf_counter() - began
        self._add(took, took)
        handle = OverlapHandle(self, CommFuture(None, result))
        handle._waited = True
        return handle

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of a training loop; when it ends, all its operations have ended, even if no caller waited for them.

        After a warm-up step, steps without and with overlap take turns (``calibrate`` of each). Then one all_reduce
        finds the slowest rank's time of each step. The medians of these times decide which way is faster, and all later
        steps use that way. Every rank calls it for the same steps. If the model or the batch has changed, ``reset``
        starts a new measurement.
        """
        number = self._steps
        measured = 0 < number <= 2 * self.calibrate
        # Order: serial, overlapped, overlapped, serial. So a machine that slows down meanwhile favours neither way.
        self._serially = number % 4 in (1, 0) if measured else number > 0 and self._pays is False
        waited, began = self._waiting, perf_counter()
        try:
            yield
            while self._under_way:
                self._under_way.pop(0).wait()
            if measured:
                took = (perf_counter() - began, self._waiting - waited)
                (self._serial if self._serially else self._overlapping).append(took)
        finally:
            self._serially = False
        self._steps += 1
        if number == 2 * self.calibrate:
            self._decide()

    def _decide(self) -> None:
        figures = [
            [took for took, _ in self._serial],
            [took for took, _ in self._overlapping],
            [waited for _, waited in self._serial],
        ]
        slowest = torch.tensor(figures, dtype=torch.float64)
        self.backend.all_reduce(slowest, "max")
        self._measured = tuple(median(steps) for steps in slowest.tolist())
        self._pays = self._measured[1] < self._measured[0]
        if not self._pays:
            logger.info("OverlapScheduler: %s", self.report())

    def report(self) -> OverlapReport:
        """The report of all operations that the caller has waited for, since the beginning or the last ``reset``."""
        return OverlapReport(self._operations, self._communication, self._waiting, *self._measured)

    def reset(self) -> None:
        """Resets the report, and makes ``step`` measure again."""
        self._operations, self._communication, self._waiting = 0, 0.0, 0.0
        self._steps, self._serially = 0, False
        self._pays, self._measured = None, ()
        #: For each measured step: its seconds, and the seconds of its waits.
        self._serial: list[tuple[float, float]] = []
        self._overlapping: list[tuple[float, float]] = []

    def _add(self, communication: float, waiting: float) -> None:
        self._operations += 1
        self._communication += communication
        self._waiting += min(waiting, communication)
