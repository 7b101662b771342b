"""The core's cost model (``src/select/cost.rs``) for commands: describes a machine, and predicts times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_sagellm._private.units import show_time

#: all_reduce inside hosts and between their leaders, as the engine executes it. It consists of several schedules, so
#: `--check` omits it.
TWO_LEVELS = "hierarchical"


@dataclass(frozen=True)
class Link:
    """Seconds for an empty message, for each further message at the same time, and per byte."""

    alpha: float
    overhead: float
    beta: float

    def numbers(self) -> tuple[float, float, float]:
        return self.alpha, self.overhead, self.beta

    def __str__(self) -> str:
        speed = f"{1e-9 / self.beta:.3g} GB/s" if self.beta else "no limit"
        return f"{show_time(self.alpha)}, {speed}, {show_time(self.overhead)} a further message"


@dataclass(frozen=True)
class Machine:
    host: Link
    network: Link
    #: Seconds per combined byte.
    gamma: float
    ranks_per_host: int


@dataclass(frozen=True)
class Prediction:
    seconds: float
    segments: int


def predict(
    core: Any, op: str, names: Sequence[str], ranks: int, sizes: Sequence[float], machine: Machine
) -> dict[str, list[Prediction]]:
    """Predicted times by algorithm, one for each size. `core` is the extension module."""
    found: dict[str, list[Prediction]] = {}
    for name in names:
        times: list[tuple[float, int]] = core.predict(
            op,
            name,
            ranks,
            [float(size) for size in sizes],
            machine.host.numbers(),
            machine.network.numbers(),
            machine.gamma,
            machine.ranks_per_host,
        )
        found[name] = [Prediction(seconds, segments) for seconds, segments in times]
    return found


def algorithms(core: Any, op: str) -> list[str]:
    """The algorithms that have a schedule for the collective; a ValueError if there is no such collective."""
    found: list[str] = core.algorithms_of(op)
    return found


def show_machine(machine: Machine) -> None:
    print(f"inside a host    {machine.host}")
    print(f"between hosts    {machine.network}")
    print(f"combining        {1e-9 / machine.gamma:.3g} GB/s")
