#!/usr/bin/env python3
"""Data parallel: every rank has the whole model and a part of each batch, and torch averages the gradients.

    torchrun --standalone --nproc-per-node=2 examples/01_data_parallel.py

Only the name in `init_process_group` is specific to this package. The check trains the same model on one process with
the whole batches: the parameters must be equal at the end.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_sagellm

STEPS = 20
BATCH = 32  # samples per rank


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def batch(step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the samples of all ranks and their targets, the same on every rank."""
    inputs = torch.randn(ranks * BATCH, 16, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.square().sum(1, keepdim=True)


def train(model: nn.Module, ranks: int, mine: slice) -> list[float]:
    # Plain SGD, because Adam divides by the size of the gradient, so a difference in the gradient's last bit would
    # become visible.
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step, ranks)
        loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("sagellm")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    parallel = DistributedDataParallel(make_model())
    losses = train(parallel, ranks, slice(rank * BATCH, (rank + 1) * BATCH))

    alone = make_model()
    train(alone, ranks, slice(None))
    for ours, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4), (ours - theirs).abs().max()

    if rank == 0:
        stats = torch_sagellm.get_stats()
        print(f"loss of rank 0: {losses[0]:.2f} -> {losses[-1]:.2f} in {STEPS} steps over {ranks} ranks")
        print(f"{stats['all_reduce_count']} all_reduces, {stats['total_bytes']} bytes in all")
        print("the parameters are those of one process with the whole batches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
