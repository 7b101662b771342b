"""Tensors that peers can map, in groups: the environment variable, bits, failures, replicas."""

from __future__ import annotations

import copy
import io
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, run_fresh
from limits import patience
from reachable import MIB, usage

import torch_sagellm

pytestmark = beyond_gloo("has no such tensors")


# ----------------------------------------------------------------------------------------------------- in a group


def everywhere(ctx: Context) -> None:
    early = torch.ones(MIB)
    ctx.init()
    late, small = torch.full((MIB,), ctx.rank + 1.0), torch.ones(16)
    assert torch_sagellm.is_reachable(late) and not torch_sagellm.is_reachable(small)
    assert not torch_sagellm.is_reachable(early)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(MIB)))
    thread.start()
    thread.join(30)
    assert torch_sagellm.is_reachable(found[0])
    dist.all_reduce(late)
    assert bool((late == 3).all())
    described = torch_sagellm.create_comm_backend("auto").describe()
    assert described.endswith("; 8192 KiB of tensors in memory that peers can reach"), described
    # The receiver reads the sender's tensor in place.
    if ctx.rank == 0:
        dist.send(late, 1)
    else:
        dist.recv(early, 0)
        assert bool((early == 3).all())
    dist.destroy_process_group()


@pytest.mark.parametrize("value", ["1", "on"])
def test_the_variable_shares_from_the_first_group_on(value: str) -> None:
    run_fresh(everywhere, 2, env={"SAGELLM_SHARED_TENSORS": value})


def values_of(ctx: Context, kind: str) -> list[torch.Tensor]:
    """Returns the results of collectives if the tensors of all ranks, of no rank, or only of rank 0 can be mapped."""
    shares = kind == "all" or (kind == "one" and ctx.rank == 0)
    make = torch_sagellm.empty if shares else torch.empty
    found: list[torch.Tensor] = []
    for count in (1000, 5000, 100_003, 1_500_000):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            own = make(count, dtype=dtype)
            own.copy_((torch.arange(count) % 251) * (ctx.rank + 1))
            rows = make(ctx.world_size, count, dtype=dtype)
            dist.all_gather_into_tensor(rows, own)
            dist.all_reduce(own[1:])  # a view that starts in the middle of a page
            part = make(count, dtype=dtype)
            dist.reduce_scatter_tensor(part, rows.reshape(-1).clone() if not shares else torch_sagellm.shared(rows))
            sent = make(count, dtype=dtype).fill_(ctx.rank)
            dist.broadcast(sent, 1)
            found += [own, rows, part, sent]
    return [each.clone() for each in found]


def same_bits(ctx: Context) -> dict[str, Any]:
    ctx.init()
    results = {kind: values_of(ctx, kind) for kind in ("none", "all", "one")}
    for kind in ("all", "one"):
        for number, (wanted, got) in enumerate(zip(results["none"], results[kind], strict=True)):
            assert torch.equal(wanted, got), (kind, number)
    stats = torch_sagellm.get_stats()["shared_memory"]
    dist.destroy_process_group()
    return stats


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_over_them_give_the_bits_of_others(world_size: int) -> None:
    """All ranks have such tensors, no rank has them, or only one rank has them."""
    for stats in run_fresh(same_bits, world_size):
        assert stats["limit"] > 0 and stats["taken_out"] == 0 and stats["why_not"] == ""


def fails_here(ctx: Context) -> None:
    """In the first call the ranks learn where their tensors are. Rank 1 makes no second call."""
    ctx.init(operations=timedelta(seconds=patience(1)))
    tensor, other = torch_sagellm.zeros(MIB), torch_sagellm.zeros(MIB)
    dist.all_reduce(tensor[5:])
    if ctx.rank == 0:
        expect_raises(dist.DistBackendError, lambda: dist.all_reduce(tensor[5:]))
        ctx.tell("failed")
        assert not torch_sagellm.is_reachable(tensor) and torch_sagellm.is_reachable(other)
        assert usage()["taken_out"] == 4 * MIB and usage()["extents"] == 2
        assert tensor.fill_(3).sum() == 3 * MIB
        tensor.resize_(2 * MIB)
        assert torch_sagellm.is_reachable(tensor) and tensor[:MIB].sum() == 3 * MIB
    else:
        assert ctx.listen() == "end"


def test_what_a_failed_operation_was_to_write_is_an_ordinary_tensor() -> None:
    """Peers can no longer map the output tensor of the failed operation, until ``resize_`` gives it new memory."""
    with launch(fails_here, 2, env={"SAGELLM_SHARED_BYTES": str(256 * MIB)}) as job:
        assert job.hear(0) == "failed"
        job.say(1, "end")
        job.values()


def ddp(ctx: Context, how: str) -> tuple[list[bool], list[list[float]]]:
    """Returns for each of five steps whether peers can map the bucket; and the gradients."""
    from torch.nn.parallel import DistributedDataParallel

    ctx.init()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    if how == "in a block":
        with torch_sagellm.shared_tensors():
            model = DistributedDataParallel(layers, find_unused_parameters=True)
    else:
        model = DistributedDataParallel(layers, bucket_cap_mb=0.1)
    if how == "share_buckets":
        assert torch_sagellm.share_buckets(model) is model
    reachable: list[bool] = []

    def looks(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations that are given
        reachable.append(torch_sagellm.is_reachable(bucket.buffer()))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, looks)
    for step in range(5):
        if step == 1:
            model.module(torch.ones(4, 64))
            with torch.no_grad():
                model(torch.ones(4, 64))
            with pytest.raises(RuntimeError):  # the shapes of the two operands do not match
                model.module(torch.ones(4, 65))
        model(torch.full((4, 64), ctx.rank + step + 1.0)).sum().backward()
        assert not torch_sagellm.is_reachable(torch.empty(MIB)), "the block has ended"
    found = [parameter.grad.flatten().tolist() for parameter in layers.parameters() if parameter.grad is not None]
    dist.destroy_process_group()
    return reachable, found


def test_buckets_of_a_replica_can_be_reached_once_torch_has_made_them_anew() -> None:
    plain = run_fresh(ddp, 2, "as always")
    shared = run_fresh(ddp, 2, "share_buckets")
    block = run_fresh(ddp, 2, "in a block")
    assert not any(plain[0][0]) and all(block[0][0])
    first = shared[0][0].index(True)
    assert 0 < first < len(shared[0][0]) / 2 and all(shared[0][0][first:]), shared[0][0]
    for others in (shared, block):
        for (_, wanted), (_, got) in zip(plain, others, strict=True):
            assert wanted == got, "the gradients differ"


def failing_first(ctx: Context) -> None:
    from torch.nn.parallel import DistributedDataParallel

    ctx.init()
    model = torch_sagellm.share_buckets(DistributedDataParallel(torch.nn.Linear(64, 512)))
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 65))
    with pytest.raises(TypeError):
        model()
    assert not torch_sagellm.is_reachable(torch.empty(MIB)), "the block has ended"
    copied = copy.deepcopy(model.module)
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert torch.equal(other(torch.ones(4, 64)), model(torch.ones(4, 64)))
        assert not torch_sagellm.is_reachable(torch.empty(MIB))
    with pytest.raises(ValueError, match="find_unused_parameters"):
        torch_sagellm.share_buckets(DistributedDataParallel(torch.nn.Linear(3, 3), find_unused_parameters=True))
    with pytest.raises(TypeError, match="got a Linear, expected a DistributedDataParallel"):
        torch_sagellm.share_buckets(torch.nn.Linear(3, 3))  # type: ignore[arg-type]
    dist.destroy_process_group()


def test_a_call_of_a_replica_that_fails_leaves_no_block_open() -> None:
    run_fresh(failing_first, 2)
