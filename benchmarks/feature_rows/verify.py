"""The option ``verify``: an all_reduce whose results the ranks compare, measured against one without the comparison."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

import torch_sagellm
from feature_rows.row import HERE, HERE_4, Made, Place, Row

#: Bytes of the tensor, calls in one sample, and the goals (`Row.goal`) of verify="sampled" and of verify="all".
SIZES = [(8, 200, 1.03, 1.05), (64 << 10, 50, 1.02, 1.3), (1 << 20, 4, 1.01, 1.3), (16 << 20, 1, 1.01, 1.3)]


def compared(verify: str, size: int, calls: int) -> Made:
    groups = [dist.new_group(pg_options=torch_sagellm.Options(verify=each)) for each in (verify, "off")]
    torch.manual_seed(dist.get_rank())
    data = torch.randn(size // 4)
    tensors = [data.clone(), data.clone()]

    def run(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        for _ in range(calls):
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        return tensor

    for _ in range(3):
        assert torch.equal(run(tensors[0], groups[0]), run(tensors[1], groups[1]))
    ours, theirs = (partial(run, tensor, group) for tensor, group in zip(tensors, groups, strict=True))
    return ours, theirs, lambda: [dist.destroy_process_group(group) for group in groups]


def text(size: int, calls: int) -> str:
    shown = f"{size} B" if size < 1024 else f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
    return f"{calls} x {shown}" if calls > 1 else shown


def rows(place: Place) -> list[Row]:
    return [
        Row("verify", f"{mode}, {text(size, calls)}", "verify=off", place, goal, partial(compared, mode, size, calls))
        for size, calls, *goals in SIZES
        for mode, goal in zip(("sampled", "all"), goals, strict=True)
    ]


ROWS = [*rows(HERE), *rows(HERE_4)]
