#!/usr/bin/env python3
"""Pipeline parallel: each rank has some of the layers. Micro-batches travel forward from stage to stage, and gradients
travel back.

    torchrun --standalone --nproc-per-node=2 examples/04_pipeline.py

All micro-batches run forward first, then all run backward (the schedule of GPipe). The check runs the whole model on
one process: each stage must have the same gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import torch_sagellm

WIDTH = 32
SAMPLES = 8  # samples per micro-batch
MICRO_BATCHES = 4


def stages(count: int) -> list[nn.Module]:
    """Returns the whole model in `count` parts, the same on every rank."""
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)]


def run_stage(
    stage: nn.Module, groups: torch_sagellm.ProcessGroupManager, data: torch.Tensor, targets: torch.Tensor
) -> float:
    """Runs all micro-batches forward and backward through this rank's stage. Returns the loss on the last stage, 0 on
    the other stages."""
    inputs, outputs, loss = [], [], 0.0
    for each in data.chunk(MICRO_BATCHES):
        if groups.pp_is_first_stage:
            received = each
        else:
            received = torch.empty(SAMPLES, WIDTH)
            dist.recv(received, groups.pp_prev_rank)
            received.requires_grad_()
        output = stage(received)
        if not groups.pp_is_last_stage:
            dist.send(output.detach(), groups.pp_next_rank)
        inputs.append(received)
        outputs.append(output)
    for received, output, target in zip(inputs, outputs, targets.chunk(MICRO_BATCHES), strict=True):
        if groups.pp_is_last_stage:
            part = nn.functional.mse_loss(output, target) / MICRO_BATCHES
            part.backward()
            loss += part.item()
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, groups.pp_next_rank)
            output.backward(gradient)
        if not groups.pp_is_first_stage:
            dist.send(received.grad, groups.pp_prev_rank)
    return loss


def main() -> None:
    dist.init_process_group("sagellm")
    torch.set_num_threads(1)
    groups = torch_sagellm.ProcessGroupManager(pp_size=dist.get_world_size())
    generator = torch.Generator().manual_seed(2)
    data, targets = (torch.randn(MICRO_BATCHES * SAMPLES, WIDTH, generator=generator) for _ in range(2))

    mine = stages(groups.pp_size)[groups.pp_rank]
    loss = run_stage(mine, groups, data, targets)

    whole = stages(groups.pp_size)
    expected = nn.functional.mse_loss(nn.Sequential(*whole)(data), targets)
    expected.backward()
    for ours, theirs in zip(mine.parameters(), whole[groups.pp_rank].parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6), (ours.grad - theirs.grad).abs().max()

    stats = torch_sagellm.get_stats()
    print(f"stage {groups.pp_rank} of {groups.pp_size}: {stats['send_count']} sent, {stats['recv_count']} received")
    dist.barrier()
    if groups.pp_is_last_stage:
        assert abs(loss - expected.item()) < 1e-5, (loss, expected.item())
        print(f"loss {loss:.4f}, {expected.item():.4f} on one process; the gradients of all stages are the same, too")
    groups.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
