#!/usr/bin/env python3
"""Fusion: sums many small tensors one by one, asynchronously, and as one list.

    torchrun --standalone --nproc-per-node=2 examples/02_fusion.py

Asynchronous calls are fused without a change to the program. A list also saves the cost of the single calls.
docs/fusion.md says when operations are fused. Each rank checks the sums, which it can compute alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import torch_sagellm

COUNT = 10
ROUNDS = 50


def tensors_of(rank: int) -> list[torch.Tensor]:
    """Returns tensors of several sizes and two dtypes."""
    return [
        torch.full((512 + number,), float(rank + number), dtype=torch.float32 if number % 2 else torch.float64)
        for number in range(COUNT)
    ]


def one_by_one(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)


def asynchronous(tensors: list[torch.Tensor]) -> None:
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def as_a_list(tensors: list[torch.Tensor]) -> None:
    torch_sagellm.fused_all_reduce(tensors)


def with_a_buffer(tensors: list[torch.Tensor]) -> None:
    """Uses a fusion buffer, for programs that produce their tensors one after the other."""
    comm = torch_sagellm.create_comm_backend()
    buffer = torch_sagellm.CommFusionBuffer(max_size_mb=1)
    for tensor in tensors:
        if not buffer.add_tensor(tensor):
            buffer.flush_and_all_reduce(comm)
            buffer.add_tensor(tensor)
    buffer.flush_and_all_reduce(comm)


def measure(way: Callable[[list[torch.Tensor]], None], rank: int, ranks: int) -> float:
    """Checks every result. Returns the median time of one round in microseconds."""
    times = []
    for _ in range(ROUNDS):
        tensors = tensors_of(rank)
        dist.barrier()
        began = time.perf_counter()
        way(tensors)
        times.append(time.perf_counter() - began)
        for number, tensor in enumerate(tensors):
            assert (tensor == sum(range(ranks)) + ranks * number).all(), f"{way.__name__}: tensor {number} is {tensor}"
    return sorted(times)[ROUNDS // 2] * 1e6


def main() -> None:
    dist.init_process_group("sagellm")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for way in (one_by_one, asynchronous, as_a_list, with_a_buffer):
        torch_sagellm.reset_stats()
        median = measure(way, rank, ranks)
        stats = torch_sagellm.get_stats()
        if rank == 0:
            print(
                f"{way.__name__.replace('_', ' '):<14} {COUNT} tensors in {median:7.1f} us, "
                f"{stats['all_reduce_count'] / ROUNDS:4.1f} calls a round, "
                f"{stats['fused_ops'] / ROUNDS:4.1f} of them fused"
            )
    if rank == 0:
        print("every sum was right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
