"""What it costs to watch a program: ``step`` and ``monitor_communication``, measured against the same calls alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import torch_sagellm
from feature_rows.row import HERE, Made, Row, nothing

#: All_reduces of one training step, and the float32 elements of each.
CALLS, ELEMENTS = 50, 2048


def reduce_all(tensor: torch.Tensor) -> None:
    for _ in range(CALLS):
        dist.all_reduce(tensor, dist.ReduceOp.AVG)


def stepped() -> Made:
    ours, theirs = torch.ones(ELEMENTS), torch.ones(ELEMENTS)

    def in_a_step() -> None:
        with torch_sagellm.step():
            reduce_all(ours)

    in_a_step()
    reduce_all(theirs)
    assert torch.equal(ours, theirs) and torch_sagellm.step().report().steps >= 1
    return in_a_step, lambda: reduce_all(theirs), nothing


def monitored() -> Made:
    ours, theirs = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
    watch = torch_sagellm.monitor_communication("the row", printed=False)
    watched: Callable[[torch.Tensor], None] = watch(reduce_all)
    watched(ours)
    reduce_all(theirs)
    assert torch.equal(ours, theirs)
    return lambda: watched(ours), lambda: reduce_all(theirs), nothing


CASE = f"{CALLS} all_reduces of {ELEMENTS * 4 >> 10} KiB"
ALONE = "the same calls without it"
ROWS = [
    Row("step", CASE, ALONE, HERE, 1.02, stepped),
    Row("monitor", CASE, ALONE, HERE, 1.05, monitored),
]
