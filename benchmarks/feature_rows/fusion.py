"""Fusion of consecutive asynchronous calls, compared with the same calls in a group without fusion."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import torch_sagellm
from feature_rows.row import HERE, HERE_4, SLOW, Made, Row


def one_by_one(count: int, nbytes: int) -> Callable[[], Made]:
    def make() -> Made:
        torch.manual_seed(dist.get_rank())
        given = [torch.randn(nbytes // 4) for _ in range(count)]
        fused = dist.new_group(pg_options=torch_sagellm.Options())
        alone = dist.new_group(pg_options=torch_sagellm.Options(fusion=False))

        def summed(group: dist.ProcessGroup) -> list[torch.Tensor]:
            tensors = [each.clone() for each in given]
            for work in [dist.all_reduce(each, group=group, async_op=True) for each in tensors]:
                work.wait()
            return tensors

        for one, other in zip(summed(fused), summed(alone), strict=True):
            assert torch.equal(one, other)

        def end() -> None:
            dist.destroy_process_group(fused)
            dist.destroy_process_group(alone)

        return lambda: summed(fused), lambda: summed(alone), end

    return make


ROWS = [
    Row("fusion", f"{count} asynchronous all_reduces of {size}", "Options(fusion=False)", place, 1.0, made)
    for place in (HERE, HERE_4, SLOW)
    for count, size, made in (
        (10, "2 KiB", one_by_one(10, 2 << 10)),
        (10, "64 KiB", one_by_one(10, 64 << 10)),
    )
]
