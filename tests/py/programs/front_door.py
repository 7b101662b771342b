"""Calls as a serving engine or a training framework makes them, written from the documentation of the API and not from
its code.

It needs one rank, or an even number. torchrun starts it, or a test calls ``collectives`` and ``above`` in an existing
group. A single rank needs no torchrun.
"""

from __future__ import annotations

import torch

import torch_sagellm
from torch_sagellm import (
    CommBackendProtocol,
    CommFusionBuffer,
    CommOp,
    CommunicationBuffer,
    OverlapScheduler,
    ProcessGroupManager,
    TensorParallelLinear,
    create_comm_backend,
)


def refused(call, words: str) -> None:
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no ValueError that names {words}")


def collectives(backend_type: str = "auto", device: str = "cpu") -> None:
    """Every method of a backend, on tensors of one device."""
    comm = create_comm_backend(backend_type)
    assert comm is create_comm_backend(backend_type)
    rank, ranks = comm.rank, comm.world_size
    total = sum(range(ranks))

    def mine(*shape: int) -> torch.Tensor:
        return torch.full(shape, float(rank), device=device)

    def holds(tensor: torch.Tensor, value: float) -> None:
        assert bool((tensor.cpu() == value).all()), (tensor, value)

    for op, value in (("sum", total), ("avg", total / ranks), ("mean", total / ranks), ("max", ranks - 1), ("min", 0)):
        tensor = mine(5)
        assert comm.all_reduce(tensor, op=op) is tensor
        holds(tensor, value)
    holds(comm.all_reduce(mine(2) + 1, "prod"), float(torch.arange(1, ranks + 1).prod()))
    holds(comm.safe_all_reduce(mine(3), timeout=60), total)
    future = comm.all_reduce(mine(7), async_op=True)
    assert isinstance(future, torch.futures.Future)
    holds(future.wait(), total)
    refused(lambda: comm.all_reduce(mine(1), op="xor"), "sum, avg")

    pair = [mine(3), torch.full((2, 2), rank, device=device, dtype=torch.int64)]
    for tensor in comm.fused_all_reduce(pair):
        holds(tensor, total)

    rows = comm.all_gather(mine(2, 3))
    assert rows.shape == (2 * ranks, 3)
    holds(rows[2 * rank : 2 * rank + 2], rank)
    holds(comm.all_gather(mine(1), async_op=True).wait()[-1], ranks - 1)
    part = comm.reduce_scatter(torch.arange(float(2 * ranks), device=device))
    assert part.tolist() == [2.0 * rank * ranks, (2.0 * rank + 1) * ranks]
    last = ranks - 1
    holds(comm.broadcast(mine(4), root_rank=last), last)
    reduced = comm.reduce(mine(4), root_rank=0)
    holds(reduced, total if rank == 0 else rank)
    gathered = comm.gather(mine(2), root_rank=0)
    assert (gathered is None) == (rank != 0)
    if gathered is not None:
        assert gathered.tolist() == [float(each) for each in range(ranks) for _ in range(2)]
    given = torch.arange(float(ranks), device=device) if rank == last else None
    holds(comm.scatter(given, torch.empty(1, device=device), root_rank=last), rank)
    came = comm.all_to_all(torch.arange(float(ranks), device=device) + 100 * rank)
    assert came.tolist() == [100.0 * each + rank for each in range(ranks)]

    uneven = torch.full((ranks * (ranks + 1) // 2,), float(rank), device=device)  # r + 1 rows for rank r
    came = comm.all_to_all(uneven, None, [each + 1 for each in range(ranks)], [rank + 1] * ranks)
    assert came.tolist() == [float(each) for each in range(ranks) for _ in range(rank + 1)]

    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    if ranks > 1:
        received = torch.empty(3, device=device)
        sending, receiving = comm.isend(mine(3), following), comm.irecv(received, before)
        holds(receiving.wait(), before)
        sending.wait()
    if rank % 2 == 0 and following != 0:
        comm.send(mine(2), following, tag=3)
    elif rank % 2 == 1:
        holds(comm.recv(torch.empty(2, device=device), before, tag=3), before)
    comm.barrier()
    stats = comm.get_stats()
    assert stats["all_reduce_count"] >= 8 and stats["total_bytes"] > 0
    assert str(comm.explain("all_reduce", 1 << 20))


class Mine(CommBackendProtocol):
    """A backend of another package, for one rank."""

    def all_reduce(self, tensor, op="sum", async_op=False, timeout=None):
        return tensor

    def fused_all_reduce(self, tensors, op="sum"):
        return tensors

    def all_gather(self, tensor, output=None, async_op=False):
        return tensor

    def reduce_scatter(self, tensor, op="sum", async_op=False):
        return tensor

    def get_stats(self):
        return {}


def above() -> None:
    """The parts that are built on a backend: buffers, groups, layers, overlap, caches."""
    comm = create_comm_backend()
    rank, ranks = comm.rank, comm.world_size
    assert CommOp.ALL_REDUCE.value == "all_reduce" and CommOp("barrier") is CommOp.BARRIER
    refused(lambda: create_comm_backend("mpi"), "nccl")
    try:
        type("Half", (CommBackendProtocol,), {})()
    except TypeError as error:
        assert "all_reduce" in str(error)
    else:
        raise AssertionError("a backend without its methods was made")

    buffer = CommFusionBuffer(max_size_mb=1)
    tensors = [torch.ones(1000), torch.ones(10, dtype=torch.int32)]
    assert all(buffer.add_tensor(tensor) for tensor in tensors)
    assert not buffer.add_tensor(torch.ones(1_000_000))
    buffer.flush_and_all_reduce(comm)
    assert all(bool((tensor == ranks).all()) for tensor in tensors)
    assert buffer.add_tensor(tensors[0])
    assert buffer.flush_and_all_reduce(Mine())[0] is tensors[0]

    memory = CommunicationBuffer(100)
    assert memory.get_buffer(10).shape == (10,) and memory.in_use
    memory.release()
    refused(lambda: memory.get_buffer(101), "Buffer too small")

    with torch_sagellm.monitor_communication("list") as report:
        torch_sagellm.batch_all_reduce([torch.ones(3), torch.ones(4)])
    assert report.operations == {"all_reduce": 1}

    refused(lambda: ProcessGroupManager(ranks, 2, 1, 1), f"= {2 * ranks}, expected {ranks}")
    tp = min(2, ranks)
    groups = ProcessGroupManager(tp_size=tp, cp_size=1, pp_size=ranks // tp, dp_size=1)
    assert groups.tp_rank == rank % tp and groups.pp_rank == rank // tp
    assert groups.pp_is_first_stage == (rank < tp) and groups.pp_is_last_stage == (rank >= ranks - tp)
    assert groups.pp_next_rank == (None if rank >= ranks - tp else rank + tp)
    for name in ("tp", "cp", "pp", "dp", "ep", "cp_dp", "pp_dp"):
        members, number = groups.ranks(name), torch.tensor([rank])
        torch.distributed.all_reduce(number, group=getattr(groups, f"{name}_group"))
        assert number.item() == sum(members) and members[getattr(groups, f"{name}_rank")] == rank, name
        assert getattr(groups, f"{name}_size") == len(members), name
    torch.manual_seed(1)
    whole = torch.nn.Linear(8, 4)
    for mode in ("column", "row"):
        layer = TensorParallelLinear.from_linear(whole, mode, group=groups.tp_group)
        assert torch.allclose(layer(torch.ones(3, 8)), whole(torch.ones(3, 8)), atol=1e-6), mode
        assert TensorParallelLinear(8, 4, tp, mode=mode, group=groups.tp_group)(torch.ones(3, 8)).shape == (3, 4)
    groups.destroy()

    scheduler = OverlapScheduler(comm)
    output, handle = scheduler.schedule_layer(torch.nn.Identity(), torch.full((4,), float(rank)))
    assert output.tolist() == [float(rank)] * 4 and handle.wait().tolist() == [float(sum(range(ranks)))] * 4
    assert 0 <= scheduler.report().share <= 1

    if ranks == 1:
        pass  # no rank to send to
    elif rank == 0:
        torch_sagellm.send_tensors([torch.ones(2), torch.arange(3)], dst=ranks - 1)
    elif rank == ranks - 1:
        assert [tensor.tolist() for tensor in torch_sagellm.recv_tensors(src=0)] == [[1.0, 1.0], [0, 1, 2]]
    communicator(rank, ranks)
    compressed(ranks)
    exchanges(rank, ranks)
    hooks(rank, ranks)
    assert torch_sagellm.explain("all_reduce", 1 << 20).choice


def communicator(rank: int, ranks: int) -> None:
    """The class for the ranks of one process, used with this job's ranks."""
    member = torch_sagellm.DistributedCommunicator(rank, ranks)
    tensor = torch.full((2,), float(rank))
    assert torch_sagellm.AllReduceOperator(member).all_reduce(tensor, op="max") is tensor and tensor[0] == ranks - 1
    assert (
        torch_sagellm.BroadcastOperator(member).broadcast(torch.tensor([rank]), root_rank=ranks - 1).item() == ranks - 1
    )
    assert torch_sagellm.AllGatherOperator(member).all_gather(torch.tensor([rank])).tolist() == list(range(ranks))
    assert torch_sagellm.ReduceScatterOperator(member).reduce_scatter(torch.ones(ranks)).tolist() == [float(ranks)]
    if ranks > 1 and rank < 2:
        if rank == 0:
            member.send(torch.tensor([1.5]), 1, tag=2)
        else:
            assert member.recv(0, (1,), torch.float32, tag=2).item() == 1.5
    member.barrier()
    for result in torch_sagellm.AllReduceOperator(member).benchmark([(64,), (4, 4)], num_trials=2):
        assert result.num_trials == 2 and result.median_seconds > 0


def compressed(ranks: int) -> None:
    """Sums in fewer bytes, as an option of ``all_reduce``."""
    comm = create_comm_backend()
    numbers = torch.linspace(-1, 1, 4096)
    for how, error in (("fp16", 1e-3), ("bf16", 1e-2), ("int8", 1e-2)):
        for async_op in (False, True):
            found = comm.all_reduce(numbers.clone(), compress=how, async_op=async_op)
            total = found.wait() if async_op else found
            assert bool(((total - ranks * numbers).abs() <= ranks * error).all()), how
    top, total = torch_sagellm.TopK(0.25), torch.zeros(8)
    for _ in range(20):
        total += comm.all_reduce(torch.arange(1.0, 9.0), compress=top, key="gradient")
    rest = comm.all_reduce(top.residual("gradient").clone())
    assert torch.allclose(total + rest, 20.0 * ranks * torch.arange(1.0, 9.0)), "what is left out is sent later"
    saved = comm.get_stats()["compression"]
    assert saved["calls"] == 26 and (ranks == 1 or saved["saved_bytes"] > 0)
    refused(lambda: comm.all_reduce(numbers, compress="fp8"), "fp16, bf16, int8, topk")


def exchanges(rank: int, ranks: int) -> None:
    """Topologies, and how layers exchange data with the other ranks."""
    manager = torch_sagellm.TopologyManager.from_json('{"hosts": 2, "full_nvlink": false}')
    assert torch_sagellm.select_all_reduce_algorithm(8, 8, manager) == "hierarchical"
    assert manager.select_all_reduce_algorithm(data_size=8, num_devices=2) != "hierarchical"
    given = create_comm_backend(topology_manager=manager)
    assert given.all_reduce(torch.ones(4)).tolist() == [float(ranks)] * 4
    refused(lambda: torch_sagellm.TopologyManager.from_json('{"hosts": 0}'), "hosts")

    seen = []
    for source, (key, value) in torch_sagellm.ring_exchange([torch.full((2,), float(rank)), torch.tensor([rank])]):
        assert key.tolist() == [float(source)] * 2 and value.tolist() == [source]
        seen.append(source)
    assert seen[0] == rank and sorted(seen) == list(range(ranks))

    tokens = torch.arange(float(2 * ranks)).reshape(1, 2 * ranks) + 100 * rank  # one token, two heads for each rank
    heads = torch_sagellm.exchange_tokens(tokens, split_dim=1, join_dim=0)
    assert heads.tolist() == [[100.0 * each + 2 * rank, 100.0 * each + 2 * rank + 1] for each in range(ranks)]
    assert torch.equal(torch_sagellm.exchange_tokens(heads, split_dim=0, join_dim=1), tokens)

    moe = torch_sagellm.MoEDispatcher(num_experts=ranks)  # expert e multiplies by e + 1
    tokens, experts = torch.full((ranks, 3), float(rank)), torch.arange(ranks)
    rows, routing = moe.dispatch(tokens, experts)
    assert rows[:, 0].tolist() == [float(each) for each in range(ranks)] and routing.dropped == 0
    combined = moe.combine(rows * (rank + 1), routing)
    assert combined[:, 0].tolist() == [float(rank * (expert + 1)) for expert in range(ranks)]
    tight = torch_sagellm.MoEDispatcher(num_experts=ranks, capacity_factor=1.0)
    _, routing = tight.dispatch(tokens, torch.zeros(ranks, dtype=torch.int64))
    assert routing.dropped == ranks - 1 and routing.imbalance == ranks


def hooks(rank: int, ranks: int) -> None:
    """Gradients in fewer bytes, the name gloo, and recovery when nothing has failed."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    torch.manual_seed(2)
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.005)
    hook = torch_sagellm.PowerSGDHook(PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2))
    model.register_comm_hook(None, hook)
    for _ in range(4):
        model(torch.full((2, 32), float(rank))).sum().backward()
    assert hook.stats.calls > 4 and hook.stats.saved_bytes > 0, hook.stats
    hook.close()

    torch_sagellm.serve_as("gloo")
    named = torch.distributed.new_group(backend="gloo")
    assert torch.distributed.get_backend(named) == "gloo"
    total = torch.ones(2)
    torch.distributed.all_reduce(total, group=named)
    assert total.tolist() == [float(ranks)] * 2
    assert torch_sagellm.get_stats(group=named)["all_reduce_count"] == 1, "it is served by sagellm"

    assert torch_sagellm.recover() is torch.distributed.group.WORLD, "nothing has failed"


if __name__ == "__main__":
    collectives()
    above()
    torch.distributed.destroy_process_group()
    print("the front door is open")
