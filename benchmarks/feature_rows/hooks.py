"""Steps of DistributedDataParallel with PowerSGDHook, compared with torch's powerSGD_hook; the model has one bucket."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import torch_sagellm
from feature_rows.row import HERE, Made, Row


def powersgd() -> Made:
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    models = [nn.parallel.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=100) for _ in range(2)]

    def state() -> PowerSGDState:
        return PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=3, random_seed=7)

    hook = torch_sagellm.PowerSGDHook(state())
    models[0].register_comm_hook(None, hook)
    models[1].register_comm_hook(state(), powerSGD_hook)
    torch.manual_seed(10 + dist.get_rank())
    data = torch.randn(32, 256)

    def step(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        model(data).square().mean().backward()
        return [each.grad.clone() for each in model.parameters()]

    for _ in range(8):
        for one, other in zip(step(models[0]), step(models[1]), strict=True):
            torch.testing.assert_close(one, other)
    return lambda: step(models[0]), lambda: step(models[1]), hook.close


ROWS = [Row("powersgd", "step of 4 layers of 256 x 256", "torch's powerSGD_hook", HERE, 1.02, powersgd)]
