"""How much of a training step is spent waiting for communication.

The extension measures it (``cpp/work/steps.hpp``); this file reads the sums and combines them over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch_sagellm._private import load

if TYPE_CHECKING:
    from torch_sagellm import _C


@dataclass(frozen=True)
class StepReport:
    """The exposed communication of training steps over all ranks: means over ranks and steps, in seconds.

    Exposed is the time in which the thread that runs the step waits for communication: in a synchronous call, while it
    issues an asynchronous call, in ``wait()``, or off the processor while it has a future that has not completed.

    Example::

        with torch_sagellm.step():
            dist.all_reduce(torch.ones(1000))
        print(torch_sagellm.step().report().share)
    """

    ranks: int
    #: The smallest number of steps that a rank has counted.
    steps: int
    #: Time of a step.
    seconds: float
    exposed: float
    #: The part of ``exposed`` in which data moved. In each step it is the smallest wait of all ranks, because the last
    #: rank to arrive waits for no other rank.
    moving: float
    #: Exposed time divided by step time, for each rank.
    shares: tuple[float, ...]

    @property
    def waiting(self) -> float:
        """The part of ``exposed`` in which a rank waited for slower ranks."""
        return self.exposed - self.moving

    @property
    def share(self) -> float:
        """Exposed time divided by step time; 0 without a step."""
        return self.exposed / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        if not self.steps:
            return 'no step was counted: run each step in "with torch_sagellm.step():"'
        return (
            f"{self.steps} steps on {self.ranks} ranks, {self.seconds * 1e3:.2f} ms each: {self.exposed * 1e3:.2f} ms "
            f"({self.share:.1%}) waiting for communication, of which {self.waiting * 1e3:.2f} ms for slower ranks and "
            f"{self.moving * 1e3:.2f} ms for data"
        )


class Steps:
    """The training steps of this process; ``torch_sagellm.step()`` returns it.

    As a context, it is one step. A step that ends with an exception is not counted, and a step inside another one is
    part of it.

    Example::

        for _ in range(3):
            with torch_sagellm.step():
                dist.all_reduce(torch.ones(1000))
        print(torch_sagellm.step().report())  # every rank calls it
    """

    __slots__ = ("_begin", "_end")

    def __init__(self) -> None:
        extension = load.extension()
        self._begin, self._end = extension._begin_step, extension._end_step

    def __enter__(self) -> None:
        self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(kind is None)

    def report(self, group: Any = None) -> StepReport:
        """The report over the ranks of ``group``, since the beginning or the last ``reset``.

        Collective: every rank of the group must call it, after the same steps. Without a process group it is about this
        process alone.
        """
        import torch.distributed as dist

        own = load.extension()._step_sums()
        if group is None and not dist.is_initialized():
            return combined([own])
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, own, group=group)
        return combined(everyone)

    def reset(self) -> None:
        """Forgets the steps that have ended."""
        load.extension()._reset_steps()


def exposed(sums: _C.StepSums) -> int:
    """Nanoseconds for which the steps of one rank waited."""
    return sums["in_calls"] + sums["in_futures"]


def combined(ranks: list[_C.StepSums]) -> StepReport:
    """The report from the sums of all ranks."""
    counted = [each for each in ranks if each["count"]]
    count = sum(each["count"] for each in counted) or 1
    waited = sum(map(exposed, counted)) / count / 1e9
    # The last steps that every rank has kept; the smallest wait of each, as a share of the mean wait.
    kept = min((len(each["last"]) for each in ranks), default=0)
    last = [each["last"][len(each["last"]) - kept :] for each in ranks]
    total = sum(map(sum, last))
    moved = sum(map(min, zip(*last, strict=True))) * len(ranks)
    return StepReport(
        ranks=len(ranks),
        steps=min((each["count"] for each in ranks), default=0),
        seconds=sum(each["took"] for each in counted) / count / 1e9,
        exposed=waited,
        moving=waited * moved / total if total else 0.0,
        shares=tuple(exposed(each) / each["took"] if each["took"] else 0.0 for each in ranks),
    )


_steps: Steps | None = None


def step() -> Steps:
    """The training steps of this process. Use it as a context around each step; ``report`` says how long the steps
    wait.

    It measures the thread that opens the step, and the CPU tensors of all groups of this backend. It costs less than a
    microsecond per step, and nothing if it is not used.

    Example::

        with torch_sagellm.step():
            dist.all_reduce(torch.ones(1000))
        assert torch_sagellm.get_stats()["step"]["count"] >= 1
    """
    global _steps
    if _steps is None:
        _steps = Steps()
    return _steps
