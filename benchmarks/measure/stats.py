"""Statistics, bandwidth and text: pure functions of plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from torch_sagellm._private.units import show_time
from torch_sagellm.observe.stats import BUS_FACTORS as KINDS

# By the name of a case: the share of the payload that crosses the slowest link, as a function of the number of ranks.
# With busbw = algbw * factor, figures for any number of ranks and any operation can be compared with the hardware's.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    **{
        f"{call}{count}": KINDS["all_reduce"]
        for call, counts in {
            "all_reduce": ("", "_x10", "_x1000"),
            "region": ("_x10", "_x1000"),
            "fused": ("_x10", "_x1000"),
            "apart": ("_x10", "_x1000"),
        }.items()
        for count in counts
    },
    "all_gather_into_tensor": KINDS["all_gather"],
    "reduce_scatter_tensor": KINDS["reduce_scatter"],
    "all_to_all_single": KINDS["all_to_all"],
    "gather": KINDS["gather"],
    "scatter": KINDS["scatter"],
    **dict.fromkeys(("broadcast", "reduce", "ping_pong"), lambda ranks: 1.0),
}


def percentile(values: Sequence[float], share: float) -> float:
    """The quantile at `share`, interpolated linearly between two neighbours."""
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= share <= 1:
        raise ValueError(f"share must be between 0 and 1, got {share}")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def slowest_rank(samples: Sequence[Sequence[float]]) -> list[float]:
    """The slowest rank's time of each repetition, because an operation is complete when its last rank is done."""
    if len({len(rank) for rank in samples}) > 1:
        raise ValueError(f"the ranks took different numbers of samples: {[len(rank) for rank in samples]}")
    return [max(times) for times in zip(*samples, strict=True)]


def by_pairs(times: Sequence[float]) -> list[float]:
    """The time per call of every two consecutive calls. If the number of calls is odd, the last call does not count.

    If two ranks exchange one message over a link with a delay, the rank that calls later returns immediately, and the
    other waits for two latencies; in the next call they change roles. The mean of two calls is what a program waits.
    """
    return [(first + second) / 2 for first, second in zip(times[::2], times[1::2], strict=False)]


@dataclass(frozen=True)
class Summary:
    """The times of one case on one backend, in microseconds."""

    samples: int
    median: float
    p10: float
    p99: float
    least: float
    round_p10: tuple[float, ...]  # shows drift of the machine between rounds

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def summarize(rounds: Sequence[Sequence[float]]) -> Summary:
    """Summarizes the times of each round, in microseconds. Each time is already the slowest rank's."""
    values = [us for taken in rounds for us in taken]
    return Summary(
        samples=len(values),
        median=percentile(values, 0.5),
        p10=percentile(values, 0.1),
        p99=percentile(values, 0.99),
        least=min(values),
        round_p10=tuple(round(percentile(taken, 0.1), 3) for taken in rounds if taken),
    )


def algbw(size: int, us: float) -> float:
    """Payload divided by time, in GB/s (10^9)."""
    return size / us / 1e3 if us > 0 else 0.0


def busbw(op: str, size: int, us: float, ranks: int) -> float | None:
    """Bandwidth of the slowest link by the definition of nccl-tests, in GB/s; None if no data moves."""
    factor = BUS_FACTORS.get(op)
    return None if factor is None or size == 0 else algbw(size, us) * factor(ranks)


def format_time(us: float) -> str:
    """Microseconds with three digits and a unit."""
    return show_time(us * 1e-6)


def format_bandwidth(gb: float) -> str:
    """GB/s with three digits."""
    return f"{gb:.3f}" if gb < 0.9995 else f"{gb:.2f}" if gb < 9.995 else f"{gb:.1f}"


def format_ratio(ratio: float) -> str:
    """How many times as fast as the compared calls; a ratio below 1 is marked as lost, so that no table hides it."""
    digits = 2 if ratio < 9.995 else 1 if ratio < 99.95 else 0
    return f"{ratio:.{digits}f}x" + (" (lost)" if ratio < 1 else "")
