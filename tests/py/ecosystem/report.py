"""What a program of this folder reports to its test: its numbers, and how many operations the groups of sagellm
counted.

Each rank writes its own file, ``$ECOSYSTEM_REPORT.<rank>``: the test compares all of these files. Besides the numbers
that are compared, a file contains the time of a step, for ``speed.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VARIABLE = "ECOSYSTEM_REPORT"
#: Number of first steps that are not timed, because DDP rebuilds its buckets and memory is allocated.
WARMING = 4
_ended: list[float] = []


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Returns a hash of all bits of these tensors, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def operations() -> int:
    """Collectives that this process's groups of sagellm have completed; 0 if none of its groups is ours."""
    import torch_sagellm

    return sum(group["total_count"] for group in torch_sagellm.get_stats("all").values())


def step() -> None:
    """Call it at the end of each step."""
    _ended.append(time.perf_counter())


def step_ms() -> float | None:
    """Returns the median time of a step in milliseconds, or None if too few were counted."""
    times = [1e3 * (end - begin) for begin, end in zip(_ended[WARMING:], _ended[WARMING + 1 :], strict=False)]
    return statistics.median(times) if times else None


def report(rank: int | None = None, milliseconds: float | None = None, **found: Any) -> None:
    """Writes this rank's file. Call it while the groups still exist. ``milliseconds`` is the time of a step, if the
    program timed it itself."""
    if rank is None:
        rank = dist.get_rank()
    told = {"name": dist.get_backend(), "operations": operations(), "found": found, "ms": milliseconds or step_ms()}
    path = Path(f"{os.environ[VARIABLE]}.{rank}")
    path.write_text(json.dumps(told))
