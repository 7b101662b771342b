"""Sharded programs on a CPU mesh: FSDP1, FSDP2, HSDP, DTensor, tensor parallel, pipelines, checkpoints, compile."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from harness import Context, run_ranks
from same import batch, same_as_gloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LOSS = torch.nn.functional.cross_entropy
warnings.filterwarnings("ignore", category=FutureWarning)


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 30), torch.nn.ReLU(), torch.nn.Linear(30, 17), torch.nn.ReLU(), torch.nn.Linear(17, 3)
    )


def steps(model: torch.nn.Module, count: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(count):
        data, labels = batch(step)
        optimizer.zero_grad()
        loss = LOSS(model(data), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp1() -> Any:
    model = FullyShardedDataParallel(
        net(), device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), use_orig_params=True
    )
    losses = steps(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state


@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp1(world_size: int) -> None:
    """FullyShardedDataParallel with uneven shards and a full state dict."""
    same_as_gloo(fsdp1, world_size)


def fsdp2(shape: tuple[int, ...], mixed: bool) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = net()
    options: dict[str, Any] = {"mesh": mesh}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    losses = steps(model)
    full = [parameter.full_tensor() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    assert full
    return losses, full


@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp2(world_size: int) -> None:
    """fully_shard on a one-dimensional mesh."""
    same_as_gloo(fsdp2, world_size, (world_size,), False)


def pooled() -> Any:
    torch.manual_seed(1)
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_allocate_memory_from_process_group_for_comm(True)
    return steps(model)


def test_rule_28_fsdp2_that_asks_for_the_pool_trains_to_the_same_bits() -> None:
    """Rule 28: gloo has no pool of memory; ours provides the memory that is sent and received."""
    same_as_gloo(pooled, 2)


def test_fsdp2_mixed_precision() -> None:
    """bfloat16 all-gather, float32 reduce-scatter."""
    same_as_gloo(fsdp2, 2, (2,), True, loose=True)


def test_hsdp() -> None:
    """Replicated in one dimension, sharded in the other: all_reduce after reduce_scatter on subgroups."""
    same_as_gloo(fsdp2, 4, (2, 2), False)


def dtensors() -> Any:
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    whole = torch.arange(7.0 * 5).reshape(7, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    everywhere = columns.redistribute(mesh, [Replicate()])
    partial = DTensor.from_local(whole * (dist.get_rank() + 1), mesh, [Partial()])
    summed = partial.redistribute(mesh, [Shard(0)]).full_tensor()
    product = (rows @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])).full_tensor()
    assert torch.equal(everywhere.to_local(), whole)
    assert torch.equal(summed, whole * (n * (n + 1) // 2))
    return [columns.to_local(), summed, product]


@pytest.mark.parametrize("world_size", [2, 3])
def test_dtensor_redistribution(world_size: int) -> None:
    """Shard to shard, shard to replicate, partial to shard; uneven rows."""
    same_as_gloo(dtensors, world_size)


class FeedForward(torch.nn.Module):
    """Two layers, one split by columns, the other by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 24)
        self.down = torch.nn.Linear(24, 8)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(data)))


def tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(FeedForward(), mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_tensor_parallel() -> None:
    """parallelize_module: an all_reduce per layer forward and backward."""
    same_as_gloo(tensor_parallel, 2)


def mesh_2d() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(FeedForward(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8) * (mesh["dp"].get_local_rank() + 1)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    total = torch.ones(3) * dist.get_rank()
    dist.all_reduce(total, group=mesh.get_group("tp"))
    return losses, total


def test_two_dimensional_mesh_fsdp2_and_tensor_parallel() -> None:
    """Both together, each in the groups of its dimension."""
    same_as_gloo(mesh_2d, 4)


def pipeline(kind: str) -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2 * n)]

    def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out - target).pow(2).mean()

    device = torch.device("cpu")
    if kind == "interleaved":
        stages = [PipelineStage(layers[rank + n * i], rank + n * i, 2 * n, device) for i in range(2)]
        schedule: Any = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss_of)
    else:
        stage = PipelineStage(torch.nn.Sequential(layers[2 * rank], layers[2 * rank + 1]), rank, n, device)
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stage, n_microbatches=4, loss_fn=loss_of)
    torch.manual_seed(2)
    data, target = torch.randn(8, 8), torch.randn(8, 8)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(data) if n > 1 else schedule.step(data, target=target)
    elif rank == n - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    grads = [p.grad.clone() for layer in layers for p in layer.parameters() if p.grad is not None]
    assert grads
    return grads, [each.detach() for each in losses]


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_pipeline_schedules(world_size: int, kind: str) -> None:
    """Activations and gradients are sent by batches of isend and irecv."""
    same_as_gloo(pipeline, world_size, kind)


def checkpoint(path: str, asynchronous: bool) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net()
    fully_shard(model, mesh=mesh)
    steps(model, 1)
    state = {"model": model.state_dict()}
    folder = f"{path}/{dist.get_backend()}"
    if asynchronous:
        dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo")).result()
    else:
        dcp.save(state, checkpoint_id=folder)
    fresh = net()
    fully_shard(fresh, mesh=mesh)
    loaded = {"model": fresh.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    fresh.load_state_dict(loaded["model"])
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert isinstance(one, DTensor) and isinstance(two, DTensor)
        assert torch.equal(one.to_local(), two.to_local())
    return [parameter.full_tensor() for parameter in fresh.parameters() if isinstance(parameter, DTensor)]


def test_distributed_checkpoint() -> None:
    """DCP saves shards and loads them into another model."""
    with tempfile.TemporaryDirectory() as path:
        same_as_gloo(checkpoint, 2, path, False)


def meshes() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found = []
    for name in ("a", "b"):
        value = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(value, group=mesh.get_group(name))
        found.append(value)
    flat = mesh["a", "b"]._flatten("ab")
    value = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(value, group=flat.get_group())
    return [*found, value, torch.tensor(mesh.get_coordinate())]


def test_device_mesh() -> None:
    """Groups of rows and columns, and the flattened mesh."""
    same_as_gloo(meshes, 4)


def functional() -> Any:
    n, me = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    data = torch.arange(6.0) + 10 * me
    found = [
        funcol.all_reduce(data, "sum", group),
        funcol.all_gather_tensor(data, 0, group),
        funcol.reduce_scatter_tensor(torch.arange(4.0 * n) + me, "sum", 0, group),
        funcol.all_to_all_single(torch.arange(2.0 * n) + 100 * me, [2] * n, [2] * n, group),
        funcol.broadcast(data, 0, group),
        *funcol.all_reduce_coalesced([data, data * 2], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([data, data[:2].contiguous()], group),
        *funcol.reduce_scatter_tensor_coalesced([torch.arange(2.0 * n), torch.ones(n)], "sum", [0, 0], group),
    ]
    return [each.clone() + 0 for each in found]


@pytest.mark.parametrize("world_size", [2, 3])
def test_functional_collectives(world_size: int) -> None:
    """The operators that compiled programs use, coalesced ones too."""
    same_as_gloo(functional, world_size)


def compiled() -> Any:
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    inductor.cpp.vec_isa_ok = False  # otherwise a program is compiled to test each instruction set
    group = dist.group.WORLD

    def program(data: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(data * 2, "sum", group)
        everyone = funcol.all_gather_tensor(total + 1, 0, group)
        part = funcol.reduce_scatter_tensor(everyone.relu(), "sum", 0, group)
        return part.cos() + 1

    torch._dynamo.reset()
    data = torch.arange(12.0) * (dist.get_rank() + 1) / 7
    found = torch.compile(program, fullgraph=True)(data)
    torch.testing.assert_close(found, program(data))
    return found


@pytest.mark.timeout(300)
def test_functional_collectives_under_torch_compile() -> None:
    """Inductor compiles the program, collectives and all, into one graph."""
    same_as_gloo(compiled, 2, timeout=280)


def autograd_collectives() -> Any:
    import torch.distributed.nn.functional as dnn

    data = (torch.arange(4.0) + dist.get_rank()).requires_grad_()
    world = dist.group.WORLD  # the functions' default is the group that existed when torch imported them
    total = dnn.all_reduce(data.clone(), group=world)
    gathered = dnn.all_gather(data * 2, group=world)
    (total.pow(2).sum() + torch.stack(list(gathered)).sum()).backward()
    assert data.grad is not None
    return [total.detach(), data.grad]


def test_collectives_with_autograd() -> None:
    """torch.distributed.nn: for a third-party backend the backward pass of all_gather is an all_to_all of lists."""
    same_as_gloo(autograd_collectives, 2)


def sharded_on_pool(ctx: Context) -> int:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    assert dist.get_backend(mesh.get_group()) == ctx.backend
    return mesh.size()


def test_a_mesh_uses_the_backend_of_the_default_group() -> None:
    """init_device_mesh("cpu") after init_process_group(backend) keeps the backend."""
    assert run_ranks(sharded_on_pool, 2) == [2, 2]
