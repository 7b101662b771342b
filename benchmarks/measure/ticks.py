"""Measures calls that take turns in the ranks of the default group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist


def in_turns(calls: Mapping[str, Callable[[], object]], least: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds of each call on this rank.

    Every rank takes the same number of samples: at least ``least``, for about ``seconds``.

    Every second turn is in reverse order. A barrier before each call makes the ranks begin together.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}

    def turn(order: list[str], keep: bool) -> None:
        for name in order:
            dist.barrier()
            began = time.perf_counter()
            calls[name]()
            took = (time.perf_counter() - began) * 1e6
            if keep:
                times[name].append(took)

    order = list(calls)
    turn(order, False)
    began = time.perf_counter()
    turn(order, False)
    # Every rank uses the slowest rank's time, so that all make the same number of turns.
    one = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    for number in range(min(max(least, int(seconds / max(one.item(), 1e-5))), 2000)):
        turn(order if number % 2 else order[::-1], True)
    return times
