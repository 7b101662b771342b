"""`torch_sagellm.collective_ops` with a process per rank. tests/test_distributed.py tests ranks of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, run_fresh, run_ranks
from reference import fold, make, same_bits

pytestmark = beyond_gloo("operators as objects")


def operators(ctx: Context) -> None:
    import torch_sagellm

    comm = torch_sagellm.DistributedCommunicator(ctx.rank, ctx.world_size)
    ranks, me = range(ctx.world_size), ctx.rank
    assert (comm.rank, comm.world_size, comm.next_rank) == (me, ctx.world_size, (me + 1) % ctx.world_size)
    assert "of a process group" in repr(comm)
    every = [make(torch.bfloat16, 6 * ctx.world_size, rank).reshape(-1, 3) for rank in ranks]
    total, mine = fold("SUM", every), every[me].clone()
    assert torch_sagellm.AllReduceOperator(comm).all_reduce(mine) is mine
    same_bits(mine, total)
    part = torch_sagellm.ReduceScatterOperator(comm).reduce_scatter(every[me])
    same_bits(part, total[2 * me : 2 * me + 2])
    same_bits(torch_sagellm.AllGatherOperator(comm).all_gather(part), total)
    mine = every[me].clone()
    assert torch_sagellm.BroadcastOperator(comm).broadcast(mine, root_rank=1) is mine
    same_bits(mine, every[1])
    for turn in range(2):  # even ranks send first, because a large send waits for its receive
        if me % 2 == turn:
            comm.send(every[me], comm.next_rank, tag=3)
        else:
            same_bits(comm.recv(comm.prev_rank, every[0].shape, torch.bfloat16, tag=3), every[comm.prev_rank])
    comm.barrier()
    for operator in (torch_sagellm.AllReduceOperator, torch_sagellm.AllGatherOperator):
        (result,) = operator(comm).benchmark([(8, 2)], num_trials=3)
        assert result.num_trials == 3 and result.min_seconds > 0 and result.world_size == ctx.world_size
    expect_raises(ValueError, lambda: torch_sagellm.DistributedCommunicator(me + 1))
    expect_raises(ValueError, lambda: torch_sagellm.AllReduceOperator(comm).all_reduce(every[0], "median"))


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_operators_over_processes(world_size: int) -> None:
    run_ranks(operators, world_size)


def subgroup(ctx: Context) -> None:
    import torch_sagellm

    group = dist.new_group([2, 1])
    if ctx.rank == 0:
        expect_raises(ValueError, lambda: torch_sagellm.DistributedCommunicator.from_group(group))
        return
    comm = torch_sagellm.DistributedCommunicator.from_group(group)
    assert (comm.rank, comm.world_size) == (dist.get_rank(group), 2)
    gathered = torch_sagellm.AllGatherOperator(comm).all_gather(torch.tensor([ctx.rank]))
    assert gathered.tolist() == dist.get_process_group_ranks(group)


def test_a_communicator_of_a_given_group() -> None:
    run_ranks(subgroup, 3)


def together(ctx: Context) -> None:
    """Ranks of one process work before a group of processes is created, while that group has an operation in flight,
    and after the group's end."""
    import torch_sagellm

    def local(comms: list[torch_sagellm.DistributedCommunicator]) -> None:
        tensors = [torch.full((20_000,), float(comm.rank)) for comm in comms]
        for comm, tensor in zip(comms, tensors, strict=True):
            torch_sagellm.AllReduceOperator(comm).all_reduce(tensor)
        assert all(tensor.eq(3.0).all() for tensor in tensors)

    comms = torch_sagellm.create_ring_topology(3)
    local(comms)
    ctx.init()
    local(comms)
    pending = dist.all_reduce(torch.ones(50_000), async_op=True)
    local(comms)
    pending.wait()
    local(torch_sagellm.create_ring_topology(3))
    del comms
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 4
    group = dist.new_group([1, 0])
    dist.all_reduce(total, group=group)
    assert total.tolist() == [4.0] * 4


def test_ranks_of_one_process_beside_a_group_of_processes() -> None:
    run_fresh(together, 2)


def late(ctx: Context) -> list[int]:
    import torch_sagellm

    ctx.init()
    comm = torch_sagellm.DistributedCommunicator(timeout=1.0)
    if ctx.rank == 1:
        ctx.listen()
        return []
    try:
        comm.recv(1, (2,), torch.float32)
    except torch_sagellm.CommTimeoutError as error:
        return error.missing_ranks
    raise AssertionError("no rank sent anything")


def test_a_rank_that_does_not_come_is_named_over_processes_too() -> None:
    with launch(late, 2) as job:
        assert job.wait_rank(0).value == [1]
        job.say(1, "go on")
        job.wait_rank(1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 40))
def test_random_calls_of_ranks_of_one_process(seed: int) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from test_distributed import TestRandomCalls

    TestRandomCalls().test_on_threads(seed)
    TestRandomCalls().test_in_a_loop(seed)


def gradients(ctx: Context) -> None:
    """Compares all_gather, a layer and reduce_scatter between processes with the same computation in one process."""
    import torch_sagellm

    comm, ranks = torch_sagellm.DistributedCommunicator(), ctx.world_size
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 4, dtype=torch.float64) for _ in range(ranks)]
    plain = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(ranks)]
    sum(layer(torch.cat(plain)).tanh() for layer in layers).square().sum().backward()
    expected = [plain[ctx.rank].grad, *(each.grad for each in layers[ctx.rank].parameters())]
    layers[ctx.rank].zero_grad()

    rows = plain[ctx.rank].detach().requires_grad_()
    hidden = layers[ctx.rank](torch_sagellm.AllGatherOperator(comm).all_gather(rows)).tanh()
    part = torch_sagellm.ReduceScatterOperator(comm).reduce_scatter(hidden)
    doubled = part * 2
    assert torch_sagellm.AllReduceOperator(comm).all_reduce(doubled, "avg") is doubled, "in place"
    assert doubled.requires_grad
    part.square().sum().backward()
    found = [rows.grad, *(each.grad for each in layers[ctx.rank].parameters())]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    came = comm.irecv(comm.prev_rank, (1,), torch.int64)
    comm.isend(torch.tensor([ctx.rank]), comm.next_rank).wait()
    assert came.wait().item() == comm.prev_rank
    later = torch_sagellm.AllGatherOperator(comm).all_gather(torch.tensor([ctx.rank]), async_op=True)
    assert later.wait().tolist() == list(range(ranks))
    mine = torch.ones(2)
    assert torch_sagellm.safe_all_reduce(mine, torch_sagellm.AllReduceOperator(comm), timeout=30) is mine
    assert torch_sagellm.batch_all_reduce([mine], torch_sagellm.AllReduceOperator(comm))[0].tolist() == [ranks**2] * 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_and_asynchronous_forms_over_processes(world_size: int) -> None:
    run_ranks(gradients, world_size)
