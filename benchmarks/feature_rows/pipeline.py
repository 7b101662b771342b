"""A pipeline of two stages, written with a ProcessGroupManager's neighbours, compared with torch's ScheduleGPipe."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import torch_sagellm
from feature_rows.row import HERE, Made, Row


def by_neighbours(groups: torch_sagellm.ProcessGroupManager, stage: nn.Module, whole: Tensor, count: int) -> None:
    """Runs all micro-batches forward, then all backward. The last stage adds up the loss."""
    before, after = groups.pp_prev_rank, groups.pp_next_rank
    inputs, outputs, sends = [], [], []
    for own in whole.chunk(count):
        if before is not None:
            own = torch.empty_like(own)
            dist.recv(own, before, group=groups.pp_group)
            own.requires_grad_()
        inputs.append(own)
        outputs.append(stage(own))
        if after is not None:
            sends.append(dist.isend(outputs[-1].detach(), after, group=groups.pp_group))
    for own, output in zip(inputs, outputs, strict=True):
        if after is None:
            output.square().mean().backward()
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, after, group=groups.pp_group)
            output.backward(gradient)
        if before is not None:
            assert own.grad is not None
            sends.append(dist.isend(own.grad, before, group=groups.pp_group))
    for send in sends:
        assert send is not None
        send.wait()


def gpipe(rows: int, width: int = 256, count: int = 8) -> Callable[[], Made]:
    def make() -> Made:
        groups = torch_sagellm.ProcessGroupManager(pp_size=dist.get_world_size())
        torch.manual_seed(1)
        whole = torch.randn(rows * count, width)
        torch.manual_seed(2 + groups.pp_rank)
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        theirs = copy.deepcopy(net)
        stage = PipelineStage(theirs, groups.pp_rank, groups.pp_size, torch.device("cpu"), group=groups.pp_group)
        schedule = ScheduleGPipe(stage, count, loss_fn=lambda output, _: output.square().mean(), scale_grads=False)

        def gradients(module: nn.Module) -> list[Tensor]:
            found = []
            for parameter in module.parameters():
                assert parameter.grad is not None
                found.append(parameter.grad)
                parameter.grad = None
            return found

        def ours() -> list[Tensor]:
            by_neighbours(groups, net, whole, count)
            return gradients(net)

        def torchs() -> list[Tensor]:
            if groups.pp_is_first_stage:
                schedule.step(whole)
            else:
                schedule.step(target=whole)
            return gradients(theirs)

        for one, other in zip(ours(), torchs(), strict=True):
            torch.testing.assert_close(one, other)
        return ours, torchs, groups.destroy

    return make


GPIPE = "torch's ScheduleGPipe"
ROWS = [
    Row("pipeline", "pp_next_rank, 8 micro-batches of 4 rows", GPIPE, HERE, 1.0, gpipe(4)),
    Row("pipeline", "pp_next_rank, 8 micro-batches of 256 rows", GPIPE, HERE, 1.0, gpipe(256)),
]
