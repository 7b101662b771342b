"""Runs one program over the backend under test and over gloo, in the same processes, and compares the results."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Context, run_ranks

Program = Callable[..., Any]


def both(ctx: Context, program: Program, args: tuple[Any, ...], loose: bool) -> None:
    """Runs `program(*args)` twice, from the same seeds. The results (tensors, numbers, lists of them) must agree."""
    results = []
    for backend in (ctx.backend, "gloo"):
        if dist.is_initialized():
            dist.destroy_process_group()
        ctx.init(backend=backend, key=f"{ctx.key}-{len(results)}")
        random.seed(0)
        torch.manual_seed(0)
        results.append(program(*args))
        dist.barrier()
    dist.destroy_process_group()
    assert results[0] is not None, f"{program.__name__} computes nothing"
    tolerance = {"rtol": 5e-2, "atol": 2e-3} if loose else {"rtol": 2e-4, "atol": 1e-5}
    torch.testing.assert_close(results[0], results[1], **tolerance, equal_nan=True)


def same_as_gloo(program: Program, world_size: int, *args: Any, loose: bool = False, timeout: float = 110.0) -> None:
    """Runs the comparison on `world_size` ranks."""
    run_ranks(both, world_size, program, args, loose, timeout=timeout, fresh_group=True)


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """Returns copies of all parameters and buffers."""
    state = [*module.parameters(), *module.buffers()]
    return [each.detach().clone() for each in state]


class Net(torch.nn.Module):
    """A small network with parameters of several sizes, a batch norm, and a branch that may stay unused."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.second = torch.nn.Linear(width, width)
        self.spare = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, 3)

    def forward(self, data: torch.Tensor, use_spare: bool = True) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(data)))
        hidden = torch.relu(self.second(hidden))
        if use_spare:
            hidden = self.spare(hidden)
        return self.last(hidden)


def batch(step: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's data of one step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)
