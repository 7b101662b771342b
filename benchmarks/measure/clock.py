"""Functions that time a block of calls: on the host alone, or until a device is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

Calls = Sequence[Callable[[], object]]
Clock = Callable[[Calls, int, int], list[float]]
#: Calls between two synchronisations. A driver queues about ten times as many entries before a call has to wait for the
#: device, and a call may queue several entries.
QUEUED = 100
#: Number of calls in one sample of a series.
TOGETHER = 20


def each(calls: Calls, count: int, start: int) -> list[float]:
    """Measures each of `count` calls, in microseconds. The operation itself keeps the ranks in step."""
    clock = time.perf_counter_ns
    taken = []
    for i in range(start, start + count):
        call = calls[i % len(calls)]
        begin = clock()
        call()
        taken.append((clock() - begin) / 1e3)
    return taken


def issue(calls: Calls, count: int, start: int, queued: int = QUEUED) -> list[float]:
    """Measures each call until it returns. The device's queue is never so full that the host must wait."""
    taken = []
    for first in range(start, start + count, queued):
        torch.accelerator.synchronize()
        taken += each(calls, min(queued, start + count - first), first)
    torch.accelerator.synchronize()
    return taken


def series(calls: Calls, count: int, start: int, finish: Callable[[], object] = lambda: None) -> list[float]:
    """Measures series of calls, each until `finish` has returned. A sample is the time of a series divided by its
    number of calls.

    Over a slow link a single call is less meaningful: a rank that calls earlier than its peer waits longer in this
    call, and the peer's next call is shorter by the same time.
    """
    taken = []
    for first in range(start, start + count, TOGETHER):
        number = min(TOGETHER, start + count - first)
        finish()
        begin = time.perf_counter_ns()
        for i in range(first, first + number):
            calls[i % len(calls)]()
        finish()
        taken.append((time.perf_counter_ns() - begin) / 1e3 / number)
    return taken


def device(calls: Calls, count: int, start: int) -> list[float]:
    """Measures series of calls, each until the device has completed it."""
    return series(calls, count, start, torch.accelerator.synchronize)


#: By the clock's name in a result. "alone" waits for the device before every call; it is for cases of many calls each.
CLOCKS: dict[str, Clock] = {
    "call": each,
    "issue": issue,
    "alone": partial(issue, queued=1),
    "device": device,
    "series": series,
}
