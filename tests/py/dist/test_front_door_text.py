"""Scripts by a user who has read the list of the API's names, but neither the code nor docs/api.md.

Each script uses the names, the order of arguments and the defaults of that list, with tensors whose results are known.
What these scripts expect is promised to users. Other files test the details of each module.
"""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, in_new_process, run_fresh, run_ranks
from torch import nn

pytestmark = beyond_gloo("the Python API of this package")


def raises(kind: type[BaseException], call: Any, *words: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    for word in words:
        assert word in str(raised.value), (word, str(raised.value))


@pytest.mark.quick
def test_operations_by_name_and_backends_of_other_people() -> None:
    from torch_sagellm import CommBackendProtocol, CommOp

    values = {
        "ALL_REDUCE": "all_reduce",
        "ALL_GATHER": "all_gather",
        "REDUCE_SCATTER": "reduce_scatter",
        "BROADCAST": "broadcast",
        "REDUCE": "reduce",
        "GATHER": "gather",
        "SCATTER": "scatter",
        "ALL_TO_ALL": "all_to_all",
        "SEND": "send",
        "RECV": "recv",
        "BARRIER": "barrier",
    }
    assert {op.name: op.value for op in CommOp} == values and CommOp("all_reduce") is CommOp.ALL_REDUCE
    assert str(CommOp.BARRIER) == "barrier"

    class Mine(CommBackendProtocol):
        def all_reduce(self, tensor: Any, op: str = "sum", async_op: bool = False) -> Any:
            return tensor

        def fused_all_reduce(self, tensors: Any, op: str = "sum") -> Any:
            return tensors

        def all_gather(self, tensor: Any, output: Any = None, async_op: bool = False) -> Any:
            return tensor

        def reduce_scatter(self, tensor: Any, op: str = "sum", async_op: bool = False) -> Any:
            return tensor

        def get_stats(self) -> Any:
            return {}

    assert Mine().get_stats() == {}
    for name in ("all_reduce", "fused_all_reduce", "all_gather", "reduce_scatter", "get_stats"):
        lacking = type("Lacking", (CommBackendProtocol,), {k: v for k, v in vars(Mine).items() if k != name})
        raises(TypeError, lacking, name)


def backends(ctx: Context) -> None:
    from torch_sagellm import GlooBackend, HCCLBackend, NCCLBackend, create_comm_backend

    comm = create_comm_backend("auto", rank=ctx.rank, world_size=ctx.world_size)
    assert (comm.rank, comm.world_size) == (ctx.rank, ctx.world_size) and comm.stats
    assert create_comm_backend("auto", rank=ctx.rank, world_size=ctx.world_size) is comm
    assert create_comm_backend("cpu", group=dist.group.WORLD, fusion=True).world_size == ctx.world_size
    gloo = create_comm_backend("gloo")
    assert isinstance(gloo, GlooBackend)
    assert GlooBackend(ctx.rank, ctx.world_size).all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    raises(ValueError, lambda: create_comm_backend("mpi"), "auto", "cpu", "nccl", "hccl", "cncl", "gloo")
    raises(ValueError, lambda: create_comm_backend("cpu", world_size=7))
    if not torch.cuda.is_available():
        raises(RuntimeError, lambda: NCCLBackend(ctx.rank, ctx.world_size))
    raises(RuntimeError, lambda: HCCLBackend(ctx.rank, ctx.world_size))


def methods(ctx: Context) -> None:
    from torch_sagellm import create_comm_backend, safe_all_reduce

    comm, me, other = create_comm_backend(), ctx.rank, 1 - ctx.rank
    for op, result in {"sum": 3.0, "avg": 1.5, "mean": 1.5, "max": 2.0, "min": 1.0, "prod": 2.0}.items():
        tensor = torch.full((4,), float(me + 1))
        assert comm.all_reduce(tensor, op=op) is tensor and tensor.tolist() == [result] * 4, op
    for op, result in {
        dist.ReduceOp.SUM: 3.0,
        dist.ReduceOp(dist.ReduceOp.AVG): 1.5,
        dist.ReduceOp.PRODUCT: 2.0,
    }.items():
        assert comm.all_reduce(torch.full((4,), float(me + 1)), op=op).tolist() == [result] * 4, op
    assert comm.reduce_scatter(torch.arange(4.0), op=dist.ReduceOp.MAX).tolist() == [[0.0, 1.0], [2.0, 3.0]][me]
    raises(ValueError, lambda: comm.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND), "all_reduce", "sum", "ReduceOp")
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.int64)]
    assert comm.fused_all_reduce(tensors, op="sum")[0] is tensors[0]
    assert tensors[0].tolist() == [2.0] * 3 and tensors[1].tolist() == [2, 2]
    output = torch.empty(2)
    assert comm.all_gather(torch.tensor([float(me)])).tolist() == [0.0, 1.0]
    comm.all_gather(torch.tensor([float(me)]), output)
    assert output.tolist() == [0.0, 1.0]
    assert comm.reduce_scatter(torch.arange(4.0), op="sum").tolist() == [[0.0, 2.0], [4.0, 6.0]][me]
    assert comm.broadcast(torch.tensor([me]), root_rank=1).tolist() == [1]
    assert me == 1 or comm.reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    if me == 1:
        comm.reduce(torch.ones(2))
    gathered = comm.gather(torch.tensor([me]))
    assert gathered is None or gathered.tolist() == [0, 1]
    assert comm.scatter(torch.arange(2) if me == 0 else None, torch.zeros(1, dtype=torch.int64)).tolist() == [me]
    exchanged = torch.empty(2)
    comm.all_to_all(torch.tensor([10.0 * me, 10.0 * me + 1]), exchanged)
    assert exchanged.tolist() == [0.0 + me, 10.0 + me]
    if me == 0:
        comm.send(torch.ones(2), 1, tag=4)
    else:
        received = torch.zeros(2)
        comm.recv(received, 0, tag=4)
        assert received.tolist() == [1.0, 1.0]
    box = torch.zeros(1)
    sending, receiving = comm.isend(torch.tensor([float(me)]), other), comm.irecv(box, other)
    assert receiving.wait() is box and box.item() == other
    sending.wait()
    comm.barrier()
    for future, result in (
        (comm.all_reduce(torch.ones(2), async_op=True), [2.0, 2.0]),
        (comm.all_gather(torch.ones(1), async_op=True), [1.0, 1.0]),
        (comm.reduce_scatter(torch.ones(2), async_op=True), [2.0]),
    ):
        assert isinstance(future, torch.futures.Future) and future.wait().tolist() == result
    raises(ValueError, lambda: comm.all_reduce(torch.ones(1), op="median"), "sum", "avg", "max", "min", "prod")
    assert comm.get_stats() and str(comm.explain("all_reduce", 1 << 20))
    assert comm.safe_all_reduce(torch.ones(1), op="sum", timeout=30).item() == 2.0
    assert safe_all_reduce(torch.ones(1)).item() == 2.0
    assert safe_all_reduce(torch.full((1,), float(me)), "max", 5, comm).item() == 1.0
    raises(ValueError, lambda: safe_all_reduce(torch.ones(1), "median"), "sum", "prod")
    assert comm.all_reduce(torch.ones(1), timeout=30).item() == 2.0


def late(ctx: Context) -> None:
    """Waits in every possible way for a rank that makes no call, each time in a new group."""
    import torch_sagellm

    ctx.init()
    waits = {
        "all_reduce": lambda comm: comm.all_reduce(torch.ones(1), timeout=0.3),
        "a future": lambda comm: comm.all_reduce(torch.ones(1), async_op=True, timeout=0.3).wait(),
        "safe_all_reduce": lambda comm: comm.safe_all_reduce(torch.ones(1), "sum", 0.3),
        "the function": lambda comm: torch_sagellm.safe_all_reduce(torch.ones(1), timeout=0.3, backend=comm),
        "all_gather": lambda comm: comm.all_gather(torch.ones(1)),
        "fused": lambda comm: comm.fused_all_reduce([torch.ones(1), torch.ones(2)]),
        "barrier": lambda comm: comm.barrier(),
        "recv": lambda comm: comm.recv(torch.ones(1), 1),
        "irecv": lambda comm: comm.irecv(torch.ones(1), 1).wait(),
    }
    for number, (name, wait) in enumerate(waits.items()):
        # The creation of the group has a long deadline, because both ranks must join within it. With equal arguments,
        # the call would return the previous group.
        comm = torch_sagellm.create_comm_backend("cpu", timeout=60 + number / 1000)
        backend: Any = comm.group._get_backend(torch.device("cpu"))
        backend._set_default_timeout(timedelta(seconds=0.3))
        if ctx.rank == 0:
            with pytest.raises(torch_sagellm.CommTimeoutError) as raised:
                wait(comm)
            assert isinstance(raised.value, TimeoutError) and isinstance(raised.value, dist.DistBackendError)
            assert "rank 1" in str(raised.value) and raised.value.missing_ranks == [1], name
            ctx.store("told").set(name, "timed out")
        else:
            ctx.store("told").wait([name])


def buffers(ctx: Context) -> None:
    from torch_sagellm import (
        CommFusionBuffer,
        CommunicationBuffer,
        batch_all_reduce,
        create_comm_backend,
        monitor_communication,
    )

    comm = create_comm_backend()
    buffer = CommFusionBuffer(max_size_mb=1)
    first, second = torch.ones(150_000), torch.ones(3, dtype=torch.int32)
    assert buffer.add_tensor(first) is True and buffer.add_tensor(second) is True
    assert buffer.add_tensor(torch.ones(150_000)) is False
    buffer.flush_and_all_reduce(comm)
    assert first.eq(2).all() and second.tolist() == [2, 2, 2]
    assert buffer.add_tensor(first)
    buffer.reset()
    buffer.flush_and_all_reduce(comm)
    assert first.eq(2).all() and CommFusionBuffer().add_tensor(first)
    memory = CommunicationBuffer(1000)
    assert not memory.in_use
    assert memory.get_buffer(10).numel() == 10 and memory.in_use
    raises(ValueError, lambda: CommunicationBuffer(1000).get_buffer(1001), "Buffer too small")
    many = [torch.ones(2), torch.ones(5)]
    batch_all_reduce(many)
    assert many[1].eq(2).all()

    @monitor_communication
    def step() -> str:
        comm.barrier()
        return "done"

    with monitor_communication() as report:
        assert step() == "done"
    assert report.operations == {"barrier": 1} and report.seconds > 0


def grid(ctx: Context) -> None:
    from torch_sagellm import ProcessGroupManager

    groups = ProcessGroupManager(2, 1, 2, 1)
    assert groups.tp_rank == ctx.rank % 2 and groups.pp_rank == ctx.rank // 2
    assert (groups.tp_size, groups.cp_size, groups.pp_size, groups.dp_size, groups.ep_size) == (2, 1, 2, 1, 1)
    assert (groups.cp_rank, groups.dp_rank, groups.ep_rank) == (0, 0, 0)
    for name in ("tp", "cp", "pp", "dp", "ep", "cp_dp", "pp_dp"):
        assert dist.get_world_size(getattr(groups, f"{name}_group")) == (2 if "tp" in name or "pp" in name else 1)
    assert groups.pp_is_first_stage == (ctx.rank < 2) and groups.pp_is_last_stage == (ctx.rank >= 2)
    assert groups.pp_next_rank == (ctx.rank + 2 if ctx.rank < 2 else None)
    assert groups.pp_prev_rank == (ctx.rank - 2 if ctx.rank >= 2 else None)
    assert groups.cp_next_rank == groups.cp_prev_rank == ctx.rank
    assert groups.mesh.mesh.numel() == 4
    raises(ValueError, lambda: ProcessGroupManager(3, 1, 1, 1), "3", "4")


def layers(ctx: Context) -> None:
    from torch_sagellm import OverlapScheduler, TensorParallelLinear, recv_tensors, send_tensors

    torch.manual_seed(0)
    for mode in ("column", "row"):
        layer = TensorParallelLinear(6, 4, ctx.world_size, mode=mode)
        whole = nn.Linear(6, 4)
        parts = [torch.empty_like(layer.weight) for _ in range(ctx.world_size)]
        dist.all_gather(parts, layer.weight.detach())
        whole.weight.data = torch.cat(parts, 0 if mode == "column" else 1)
        bias = layer.bias.detach()
        if mode == "column":
            biases = [torch.empty_like(bias) for _ in range(ctx.world_size)]
            dist.all_gather(biases, bias)
            bias = torch.cat(biases)
        whole.bias.data = bias
        mine, theirs = torch.ones(3, 6, requires_grad=True), torch.ones(3, 6, requires_grad=True)
        torch.testing.assert_close(layer(mine), whole(theirs))
        layer(mine).sum().backward()
        whole(theirs).sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
        part = whole.weight.grad.chunk(ctx.world_size, 0 if mode == "column" else 1)[ctx.rank]
        torch.testing.assert_close(layer.weight.grad, part)
    scheduler = OverlapScheduler()
    output, handle = scheduler.schedule_layer(nn.Identity(), torch.ones(2, 2))
    assert output.eq(1).all() and handle.wait().eq(2).all()
    if ctx.rank == 0:
        send_tensors([torch.ones(2), torch.arange(3)], 1)
    else:
        first, second = recv_tensors(0)
        assert first.tolist() == [1.0, 1.0] and second.tolist() == [0, 1, 2]


def compression(ctx: Context) -> None:
    from torch_sagellm import CompressionHook, compressed_all_reduce

    for how in ("fp16", "bf16", "int8", "topk"):
        found = compressed_all_reduce(torch.ones(512), how)
        assert how == "topk" or torch.allclose(found, torch.full((512,), 2.0), rtol=1e-2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(None, CompressionHook("bf16"))
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.quick
@pytest.mark.parametrize("script", [backends, methods, buffers, layers, compression], ids=lambda each: each.__name__)
def test_a_script_on_two_ranks(script: Any) -> None:
    run_ranks(script, 2)


def test_a_rank_that_comes_late() -> None:
    run_fresh(late, 2)


def test_a_script_on_a_grid_of_four_ranks() -> None:
    run_ranks(grid, 4)


@pytest.mark.quick
def test_a_lesson_without_processes() -> None:
    """Ranks of one process, imported by the old path, in a plain loop and on threads."""
    found = in_new_process(
        """
import json
import threading
import torch
from torch_sagellm.collective_ops import (
    AllGatherOperator, AllReduceOperator, BroadcastOperator, ReduceScatterOperator, create_ring_topology,
)

comms = create_ring_topology(4)
data = [torch.full((8,), float(comm.rank + 1)) for comm in comms]
operators = [AllReduceOperator(comm) for comm in comms]
results = [operator.all_reduce(tensor, op="sum") for operator, tensor in zip(operators, data)]
assert all(result.tolist() == [10.0] * 8 for result in results)
copies = [BroadcastOperator(comm).broadcast(torch.tensor([comm.rank]), root_rank=2) for comm in comms]
assert all(copy.tolist() == [2] for copy in copies)
rows = [AllGatherOperator(comm).all_gather(torch.tensor([comm.rank])) for comm in comms]
assert all(row.tolist() == [0, 1, 2, 3] for row in rows)
parts = [ReduceScatterOperator(comm).reduce_scatter(torch.arange(4.0), op="sum") for comm in comms]
assert [part.tolist() for part in parts] == [[0.0], [4.0], [8.0], [12.0]]
comms[0].send(torch.ones(2, 2), 3, tag=1)
assert comms[3].recv(0, (2, 2), torch.float32, tag=1).eq(1).all()
comms[0].send(data=torch.ones(1), dst_rank=1)
assert comms[1].recv(src_rank=0, shape=(1,), dtype=torch.float32).item() == 1
for comm in comms:
    comm.barrier()
for kind in (AllReduceOperator, BroadcastOperator, AllGatherOperator, ReduceScatterOperator):
    figures = kind(comms[0]).benchmark([(4,), (16, 16)], num_trials=2)
    assert len(figures) == 2 and all(one.median_seconds > 0 and one.nbytes > 0 for one in figures)

sums = {}
def rank(comm):
    sums[comm.rank] = AllReduceOperator(comm).all_reduce(torch.ones(3)).sum().item()
    comm.barrier()
threads = [threading.Thread(target=rank, args=(comm,)) for comm in comms]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
print(json.dumps(sums))
"""
    )
    assert found == {str(rank): 12.0 for rank in range(4)}


@pytest.mark.quick
def test_names_signatures_and_old_import_paths() -> None:
    import torch_sagellm
    import torch_sagellm.collective_ops as collective_ops
    from torch_sagellm import topology
    from torch_sagellm.protocols import comm_backend

    for name in ("CommOp", "CommBackendProtocol"):
        assert getattr(comm_backend, name) is getattr(torch_sagellm, name)
    for name in collective_ops.__all__:
        assert getattr(collective_ops, name) is getattr(torch_sagellm, name)
        assert inspect.getdoc(getattr(torch_sagellm, name)), name
    # Older programs disagree about which module has which name. So every path offers all names, and no others.
    for module in (collective_ops, comm_backend, topology):
        for name in torch_sagellm.__all__:
            assert getattr(module, name) is getattr(torch_sagellm, name), (module.__name__, name)
        raises(AttributeError, lambda module=module: module.all_redcue, module.__name__, "all_redcue")
    for call, names in {
        torch_sagellm.CommBackend.all_reduce: ["tensor", "op", "async_op", "timeout"],
        torch_sagellm.CommBackend.all_gather: ["tensor", "output", "async_op"],
        torch_sagellm.CommBackend.reduce_scatter: ["tensor", "op", "async_op"],
        torch_sagellm.CommBackend.broadcast: ["tensor", "root_rank"],
        torch_sagellm.CommBackend.all_to_all: ["input", "output"],
        torch_sagellm.CommBackend.send: ["tensor", "dst", "tag"],
        torch_sagellm.CommBackend.safe_all_reduce: ["tensor", "op", "timeout"],
        torch_sagellm.safe_all_reduce: ["tensor", "op", "timeout"],
        torch_sagellm.ProcessGroupManager.__init__: ["tp_size", "cp_size", "pp_size", "dp_size", "ep_size"],
        torch_sagellm.TensorParallelLinear.__init__: ["in_features", "out_features", "world_size", "mode"],
        torch_sagellm.DistributedCommunicator.__init__: ["rank", "world_size"],
        torch_sagellm.DistributedCommunicator.recv: ["src_rank", "shape", "dtype", "tag"],
    }.items():
        found = [name for name in inspect.signature(call).parameters if name != "self"]
        assert found[: len(names)] == names, (call, found)
    for name in torch_sagellm.__all__:
        assert getattr(torch_sagellm, name) is not None
