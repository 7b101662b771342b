"""Groups that name another backend for GPUs: ``"cpu:sagellm,cuda:nccl"``, the recommended form beside GPUs.

No GPU is needed: torch makes the backend of the CPU as usual, and gloo stands in for that of CUDA, which no tensor of
these tests asks for. nccl itself refuses to be made without a device, under any backend of the CPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, run_fresh
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torch_sagellm
from torch_sagellm._private import load

pytestmark = beyond_gloo("this is about a group with two backends")
BACKEND = "cpu:sagellm,cuda:gloo"


def ours(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this package serves the CPU tensors of a group."""
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
    # Groups that are made without a name take over both backends.
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
