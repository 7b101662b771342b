"""Trains with DeepSpeed's ZeRO on the CPU and reports the losses. The first argument is the stage: 1, 2 or 3."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from report import report, step


def main() -> None:
    """Trains and reports."""
    stage = int(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)
    source = torch.Generator().manual_seed(11 + dist.get_rank())
    losses = []
    for _ in range(40):
        inputs = torch.randn(4, 16, generator=source)
        loss = engine(inputs).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        step()
    report(losses=losses)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
