"""Groups with another backend for GPUs: ``"cpu:sagellm,cuda:nccl"``, the recommended form on machines with GPUs.

No GPU is needed: torch creates the CPU's backend as usual, and gloo takes the place of CUDA's backend, which no tensor
of these tests uses. nccl itself refuses to be created without a device, whatever the CPU's backend is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from harness import Context, beyond_gloo, run_fresh, torch_at_least
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torch_sagellm
from torch_sagellm._private import load

pytestmark = beyond_gloo("this is about a group with two backends")
BACKEND = "cpu:sagellm,cuda:gloo"


def ours(group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether this package serves the group's CPU tensors."""
    found = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
    return isinstance(found, load.extension().SageBackend)


def everything(context: Context) -> int:
    context.init(backend=BACKEND)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert ours() and dist.get_backend_config() == BACKEND
    numbers = torch.full((4,), float(rank))
    dist.all_reduce(numbers)
    assert numbers.tolist() == [sum(range(ranks))] * 4
    objects: list[object] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": each} for each in range(ranks)]
    box = [rank]
    dist.broadcast_object_list(box, src=1)
    assert box == [1]
    dist.barrier()
    # Groups that are created without a backend's name inherit both backends.
    group = dist.new_group(list(range(ranks)))
    assert ours(group) and ours(init_device_mesh("cpu", (ranks,)).get_group())
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((2, 3), float(rank + 1))).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None and gradient.tolist() == [[sum(range(1, ranks + 1)) * 2 / ranks] * 3]
    count = int(torch_sagellm.get_stats()["all_reduce_count"])
    dist.destroy_process_group()
    return count


@pytest.mark.parametrize("ranks", [2, 3])
def test_cpu_tensors_of_such_a_group_are_ours(ranks: int) -> None:
    assert min(run_fresh(everything, ranks)) >= 2


def objects(context: Context) -> None:
    context.init(backend=BACKEND)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gathered: list[object] | None = [None] * ranks if rank == 0 else None
    dist.gather_object({"rank": rank}, gathered, dst=0)
    assert gathered is None or gathered == [{"rank": each} for each in range(ranks)]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {each}" for each in range(ranks)] if rank == 1 else None, src=1)
    assert mine == [f"for {rank}"]
    box = [None]
    if rank == 0:
        dist.send_object_list([("pair", 7)], dst=1)
    elif rank == 1:
        dist.recv_object_list(box, src=0)
        assert box == [("pair", 7)]
    counts = torch_sagellm.get_stats()
    assert counts["gather_count"] and counts["scatter_count"], counts
    dist.destroy_process_group()


def test_object_collectives_of_such_a_group() -> None:
    run_fresh(objects, 2)


def meshes(context: Context) -> None:
    context.init(backend=BACKEND)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for name, members in (("rows", [rank % 2, rank % 2 + 2]), ("columns", [rank // 2 * 2, rank // 2 * 2 + 1])):
        group = mesh.get_group(name)
        assert ours(group) and dist.get_process_group_ranks(group) == members
        numbers = torch.full((3,), float(rank))
        dist.all_reduce(numbers, group=group)
        assert numbers.tolist() == [float(sum(members))] * 3
    whole = torch.arange(32.0).reshape(8, 4)
    shared = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert shared.to_local().shape == (4, 2) and torch.equal(shared.full_tensor(), whole)
    assert torch.equal(distribute_tensor(whole, mesh["rows"], [Shard(0)]).full_tensor(), whole)
    dist.destroy_process_group()


def test_device_meshes_of_such_a_group() -> None:
    run_fresh(meshes, 4)


def splits(context: Context) -> None:
    context.init(backend=BACKEND)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [[each for each in range(ranks) if each % 2 == part] for part in range(2)]
    # torch splits a group only if the backend of the default device, here CUDA's, can be split. Both backends can.
    child = dist.split_group(split_ranks=parts)
    assert ours(child) and dist.get_process_group_ranks(child) == parts[rank % 2]
    assert dist.get_backend_config(child) == BACKEND
    numbers = torch.full((3,), float(rank))
    dist.all_reduce(numbers, group=child)
    assert numbers.tolist() == [float(sum(parts[rank % 2]))] * 3
    dist.destroy_process_group(child)
    dist.destroy_process_group()


@pytest.mark.skipif(not torch_at_least(2, 15), reason="split_group of older torch needs a device")
def test_groups_split_from_such_a_group() -> None:
    run_fresh(splits, 3)


def checkpoints(context: Context, folder: str) -> None:
    """The checkpoint planner uses the group: local plans to rank 0, the global plan to all ranks, then the write
    results."""
    context.init(backend=BACKEND)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))

    def state(factor: float) -> dict[str, Any]:
        whole = torch.arange(24.0).reshape(8, 3) * factor
        return {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "whole": whole[0].clone(), "step": int(factor)}

    for name, save in (("now", checkpoint.save), ("later", checkpoint.async_save)):
        before = dict(torch_sagellm.get_stats())
        done = save(state(3), checkpoint_id=f"{folder}/{name}")
        if name == "later":
            done.result()
        found = state(0)
        checkpoint.load(found, checkpoint_id=f"{folder}/{name}")
        assert isinstance(found["sharded"], DTensor) and found["step"] == 3
        assert torch.equal(found["sharded"].full_tensor(), state(3)["sharded"].full_tensor())
        assert torch.equal(found["whole"], state(3)["whole"])
        after = torch_sagellm.get_stats()
        assert after["gather_count"] > before.get("gather_count", 0), f"rank {rank}: {name} used another backend"
    dist.destroy_process_group()


def test_checkpoints_are_planned_over_such_a_group(tmp_path: Path) -> None:
    run_fresh(checkpoints, 2, str(tmp_path))


def without_a_device(context: Context) -> str:
    try:
        context.init(backend="cpu:sagellm,cuda:nccl")
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.skipif(
    torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs torch with nccl, and no GPU"
)
def test_without_a_gpu_nccl_itself_refuses_as_it_does_beside_gloo() -> None:
    for said in run_fresh(without_a_device, 2):
        assert said == "" or "sagellm" not in said, said
