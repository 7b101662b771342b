"""The Python API on tensors of a device: `tests/py/programs/front_door.py` on four ranks, and backends by name."""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, run_fresh
from simulated import VENDORS, environment, start

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "programs"))
import front_door

import torch_sagellm


def every_call(ctx: Context, vendor: str) -> None:
    _, device = start(ctx, vendor)
    front_door.collectives("auto", f"{device}:0")
    comm = torch_sagellm.create_comm_backend()
    assert comm.backend_type == vendor
    found = (
        f"SAGELLM_VENDOR names it for devices of type {device}" if vendor == "nccl" else f"a device of type {device}"
    )
    assert comm.reason.startswith("auto: ") and found in comm.reason


def named(vendor: str) -> dict[str, str]:
    """Returns the variable that selects NCCL for the device, because torch's own cuda device cannot be simulated."""
    return {"SAGELLM_VENDOR": "nccl"} if vendor == "nccl" else {}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("vendor", VENDORS)
def test_four_ranks(libraries: dict[str, Path], vendor: str) -> None:
    """The name "auto" finds the library by the device, or by SAGELLM_VENDOR."""
    run_fresh(every_call, 4, vendor, env=environment(vendor, libraries, **named(vendor)), timeout=120)


def by_name(ctx: Context, vendor: str) -> None:
    _, device = start(ctx, vendor)
    made = {"nccl": torch_sagellm.NCCLBackend, "hccl": torch_sagellm.HCCLBackend, "cncl": torch_sagellm.CNCLBackend}[
        vendor
    ]
    comm = made(ctx.rank, ctx.world_size)
    assert (type(comm), comm.rank, comm.world_size) == (made, ctx.rank, ctx.world_size)
    tensor = torch.full((5,), float(ctx.rank), device=device)
    assert comm.all_reduce(tensor) is tensor and tensor.tolist() == [1.0] * 5
    assert comm.all_gather(torch.full((1,), ctx.rank, device=device)).tolist() == [0, 1]
    assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3, "and tensors on the CPU"
    assert comm.get_stats()["host_staged_count"] == 0, "by the library"
    other = next(each for each in (torch_sagellm.HCCLBackend, torch_sagellm.CNCLBackend) if each is not made)
    with pytest.raises(RuntimeError, match=f"{other.__name__}: this process has a device of type {device}, expected"):
        other(ctx.rank, ctx.world_size)
    example = textwrap.dedent((inspect.getdoc(made) or "").partition("Example::\n")[2])
    names = {"torch_sagellm": torch_sagellm, "dist": dist, "torch": torch}
    exec(example.replace(f'"{made.device_type}"', f'"{device}"'), names)
    assert type(names["comm"]) is made


@pytest.mark.timeout(150)
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_backend_made_by_the_name_of_its_library(libraries: dict[str, Path], vendor: str) -> None:
    run_fresh(by_name, 2, vendor, env=environment(vendor, libraries, **named(vendor)), timeout=120)


def through_the_host(ctx: Context, vendor: str) -> None:
    _, device = start(ctx, vendor)
    comm = torch_sagellm.GlooBackend(ctx.rank, ctx.world_size)
    assert comm.group is not dist.group.WORLD, "whose library carries tensors on the device"
    assert comm is not torch_sagellm.create_comm_backend("gloo")
    before = torch_sagellm.get_stats()["total_count"]
    tensor = torch.full((5,), float(ctx.rank), device=device)
    assert comm.all_reduce(tensor) is tensor and tensor.tolist() == [6.0] * 5
    assert comm.get_stats()["host_staged_count"] == 1 and comm.explain("all_reduce", 20, device=device).staged
    front_door.collectives("gloo", f"{device}:0")
    assert torch_sagellm.get_stats()["total_count"] == before, "nothing by the library"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("vendor", ["hccl", "cncl"])
def test_the_backend_named_gloo_carries_tensors_through_host_memory(libraries: dict[str, Path], vendor: str) -> None:
    run_fresh(through_the_host, 4, vendor, env=environment(vendor, libraries), timeout=120)
