#!/usr/bin/env python3
"""Overlap and compression: gradients travel while the backward pass continues, in half of their bytes or less.

    torchrun --standalone --nproc-per-node=2 examples/07_overlap_compression.py

The first part uses a scheduler: the output of each layer is summed over the ranks while the next layer computes. The
second part trains with DistributedDataParallel and hooks that compress its buckets. The checks compare the sums with
gathered outputs, the errors with the bounds of docs/api.md, and the losses with training without compression.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_sagellm

STEPS = 30
WIDTH = 256


def overlapped_layers(rank: int) -> None:
    """Runs eight layers; each output is summed while the next layer computes."""
    torch.manual_seed(rank)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    inputs = torch.randn(512, WIDTH)
    scheduler = torch_sagellm.OverlapScheduler()
    for _ in range(8):  # the first steps measure whether overlapping pays here
        outputs, handles = [], []
        with scheduler.step():
            for layer in layers:
                output, handle = scheduler.schedule_layer(layer, inputs)
                outputs.append(output.detach())
                handles.append(handle)
            totals = [handle.wait() for handle in handles]
    report = scheduler.report()
    for output, total in zip(outputs, totals, strict=True):
        every = [torch.empty_like(output) for _ in range(dist.get_world_size())]
        dist.all_gather(every, output)
        assert torch.allclose(total, torch.stack(every).sum(0), atol=1e-5)
    if rank == 0:
        print(f"overlap: {report}")


def error_of_one_call(rank: int, ranks: int) -> None:
    """Checks that int8 is wrong by at most m / 254 for each addend, and once more for the sum; m is the largest number
    of a block of 256."""
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(rank))
    exact, packed = numbers.clone(), numbers.clone()
    dist.all_reduce(exact)
    torch_sagellm.compressed_all_reduce(packed, "int8")
    largest = numbers.view(-1, 256).abs().amax(1)
    dist.all_reduce(largest)  # for each block, the sum over the ranks of its largest number
    bound = (largest + largest) / 254 * 1.01  # apart from rounding, the largest number of a sum is at most `largest`
    error = (packed - exact).view(-1, 256).abs().amax(1)
    assert (error <= bound).all(), (error / bound).max()
    if rank == 0:
        print(f"int8 over {ranks} ranks: largest error {error.max():.4f}, bound {bound.max():.4f}")


def train(compression: str | None, rank: int) -> tuple[float, torch_sagellm.CompressionStats | None]:
    """Returns the mean of the ranks' last losses, and the hook's counts."""
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)),
        bucket_cap_mb=0.1,  # several buckets, so that those of the last layers travel while the first layers compute
    )
    hook = None if compression is None else torch_sagellm.CompressionHook(compression)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mean = torch.zeros(1)
    for step in range(STEPS):
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step * 100 + rank))
        loss = nn.functional.mse_loss(model(inputs), inputs.square().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().view(1)
    torch_sagellm.create_comm_backend().all_reduce(mean, "avg")
    if hook is None:
        return mean.item(), None
    hook.close()
    return mean.item(), hook.stats


def main() -> None:
    dist.init_process_group("sagellm")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    overlapped_layers(rank)
    error_of_one_call(rank, ranks)
    plain, _ = train(None, rank)
    for name in ("bf16", "int8"):
        loss, stats = train(name, rank)
        assert stats is not None and stats.saved_bytes > 0.4 * stats.plain_bytes, stats
        assert abs(loss - plain) < 0.05 * plain, f"{name}: the loss is {loss}, {plain} without compression"
        if rank == 0:
            share = stats.sent_bytes / stats.plain_bytes
            print(f"{name}: loss {loss:.4f} ({plain:.4f} without), {share:.0%} of the bytes in {stats.calls} buckets")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
