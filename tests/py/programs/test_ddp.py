"""DistributedDataParallel programs, unchanged: buckets, unused parameters, hooks, no_sync, Join, sparse gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, run_fresh, run_ranks
from same import Net, batch, same_as_gloo, weights
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

LOSS = torch.nn.functional.cross_entropy


def train(model: DDP, steps: int = 4, optimizer: Any = None, **call: Any) -> list[torch.Tensor]:
    """Trains a few steps. Returns the weights after them."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        data, labels = batch(step)
        optimizer.zero_grad()
        LOSS(model(data, **call), labels).backward()
        optimizer.step()
    return weights(model)


def plain(options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())  # DDP's initial broadcast makes the weights equal
    return train(DDP(Net(), **options))


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.001},
        {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
def test_ddp(options: dict[str, Any], world_size: int) -> None:
    """Pitfall 1: bucket sizes from one tensor each to all in one; static graph; views."""
    same_as_gloo(plain, world_size, options)


def unused() -> list[torch.Tensor]:
    model = DDP(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        data, labels = batch(step)
        optimizer.zero_grad()
        LOSS(model(data, use_spare=(step + dist.get_rank()) % 2 == 0), labels).backward()
        optimizer.step()
    return weights(model)


def test_ddp_find_unused_parameters() -> None:
    """In each step one of the two ranks uses the branch `spare`, and the other does not."""
    same_as_gloo(unused, 2)


def hooked(name: str, bucket_mb: float = 0.002) -> list[torch.Tensor]:
    model = DDP(Net(), bucket_cap_mb=bucket_mb)
    group = dist.group.WORLD
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == "post_localSGD":
        local = post_localSGD_hook.PostLocalSGDState(group, dist.new_group(), start_localSGD_iter=2)
        model.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
    elif name.startswith("quantization"):
        model.register_comm_hook(group, getattr(quantization_hooks, name))
    elif name == "fp16 of powerSGD":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))
    else:
        model.register_comm_hook(group, getattr(default_hooks, name))
    return train(model, steps=5)


@pytest.mark.parametrize(
    "name",
    [
        "allreduce_hook",
        "fp16_compress_hook",
        "bf16_compress_hook",
        "post_localSGD",
    ],
)
def test_rule_09_ddp_comm_hooks(name: str) -> None:
    """Rule 9: hooks that chain futures, issue collectives in callbacks and block on futures."""
    same_as_gloo(hooked, 2, name, loose="16" in name)  # sums of 16 bits are rounded once here, by gloo at every step


def hooked_alone(ctx: Context, name: str) -> None:
    found = torch.cat([each.reshape(-1).float() for each in hooked(name, bucket_mb=25)])
    assert found.isfinite().all()
    parameters = found[: sum(each.numel() for each in Net().parameters())]
    copies = [torch.empty_like(parameters) for _ in range(ctx.world_size)]
    dist.all_gather(copies, parameters)
    assert all(torch.equal(copies[0], each) for each in copies), "ranks hold different weights"
    torch.manual_seed(0)
    start = torch.cat([each.detach().reshape(-1) for each in Net().parameters()])
    assert not torch.equal(parameters, start), "nothing was learned"


@beyond_gloo("two blocking callbacks hang for ever")
@pytest.mark.parametrize(
    "name", ["powerSGD", "fp16 of powerSGD", "quantization_pertensor_hook", "quantization_perchannel_hook"]
)
def test_rule_09_ddp_comm_hooks_that_gloo_does_not_survive(name: str) -> None:
    """Rule 9: hooks that chain collectives in callbacks and block on futures there; weights stay equal on all ranks.

    There is one bucket. With several, torch's hooks issue from callbacks while autograd issues later buckets. That
    order is the same on all ranks only if futures are complete at issue, as on a device's stream.
    """
    run_ranks(hooked_alone, 2, name, fresh_group=True)


def own_hook() -> list[torch.Tensor]:
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations that are given
        buffer = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    model = DDP(Net(), bucket_cap_mb=0.002)
    model.register_comm_hook(None, hook)
    return train(model)


def test_ddp_with_a_hook_of_the_users() -> None:
    """The form that the documentation shows."""
    same_as_gloo(own_hook, 2)


def without_sync() -> list[torch.Tensor]:
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            for micro in range(2):
                data, labels = batch(10 * step + micro)
                LOSS(model(data), labels).backward()
        data, labels = batch(10 * step + 9)
        LOSS(model(data), labels).backward()
        optimizer.step()
    return weights(model)


def test_ddp_no_sync() -> None:
    """Gradients are accumulated over three batches."""
    same_as_gloo(without_sync, 2)


def joined() -> list[torch.Tensor]:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model]):
        for step in range(3 + 2 * dist.get_rank()):
            data, labels = batch(step)
            optimizer.zero_grad()
            LOSS(model(data), labels).backward()
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_join_with_uneven_inputs(world_size: int) -> None:
    """Ranks run out of data at different steps. From then on they join the other ranks' collectives."""
    same_as_gloo(joined, world_size)


class Words(torch.nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 4, sparse=True)
        self.last = torch.nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(words).mean(1))


def sparse() -> list[torch.Tensor]:
    model = DDP(Words())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        generator = torch.Generator().manual_seed(step + 7 * dist.get_rank())
        words = torch.randint(0, 20, (5, 3 + dist.get_rank()), generator=generator)
        optimizer.zero_grad()
        LOSS(model(words), torch.zeros(5, dtype=torch.int64)).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_sparse_embedding(world_size: int) -> None:
    """Sparse gradients with different numbers of rows are passed to plain all_reduce on the CPU."""
    same_as_gloo(sparse, world_size)


def zero(overlap: bool) -> list[torch.Tensor]:
    model = DDP(Net(), bucket_cap_mb=0.002)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    found = train(model, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert optimizer.state_dict()["state"]
    return found


def test_zero_redundancy_optimizer() -> None:
    """The state is sharded, parameters are broadcast, and the state is gathered on rank 0."""
    assert ddp_zero_hook is not None
    same_as_gloo(zero, 2, False)


def equal_everywhere() -> list[torch.Tensor]:
    found = train(DDP(Net(64), bucket_cap_mb=0.01), steps=6)
    flat = torch.cat([each.reshape(-1).float() for each in found[:10]])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    assert all(torch.equal(copies[0], each) for each in copies), "ranks hold different weights"
    return found


def test_pitfall_14_weights_stay_equal_bit_for_bit() -> None:
    """Pitfall 14: after training the ranks hold the same bits."""
    same_as_gloo(equal_everywhere, 3)


def batch_norm_sync() -> list[torch.Tensor]:
    data, _ = batch(3, size=4 + dist.get_rank())
    mine = torch.cat([data.sum(0), data.pow(2).sum(0), torch.tensor([float(len(data))])])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    total = torch.stack(everyone).sum(0)
    mean = total[:8] / total[-1]
    return [mean, total[8:16] / total[-1] - mean * mean]


def test_batch_norm_statistics_as_sync_batch_norm_gathers_them() -> None:
    """SyncBatchNorm itself runs on accelerators only; its all_gather of statistics is done here."""
    same_as_gloo(batch_norm_sync, 3)


def debug_detail(ctx: Context) -> list[float]:
    ctx.init()
    model = DDP(Net(), bucket_cap_mb=0.002)
    found = train(model)
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.barrier()
    work: Any = dist.all_reduce(total, async_op=True)
    work.wait()
    group = dist.new_group(list(range(ctx.world_size)))
    dist.all_gather([torch.empty(3) for _ in range(ctx.world_size)], total, group=group)
    for each in (dist.distributed_c10d._get_default_group(), group):
        assert "Wrapper" in type(each._get_backend(torch.device("cpu"))).__name__
    assert total.tolist() == [float(ctx.world_size**2)] * 3
    dist.destroy_process_group()
    return [each.float().sum().item() for each in found]


@pytest.mark.parametrize("world_size", [2])
def test_rule_12_debug_detail(world_size: int) -> None:
    """Rules 1 and 12: TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the group and compares sequence numbers."""
    values = run_fresh(debug_detail, world_size, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, timeout=90)
    assert values[0][:4] == values[1][:4]


def detail_mismatch(ctx: Context) -> str:
    from harness import expect_raises

    ctx.init()
    return expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(2 + ctx.rank)))


def test_debug_detail_sees_a_mismatch() -> None:
    """torch's own wrapper reports different shapes before the backend is called."""
    texts = run_fresh(detail_mismatch, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, timeout=60)
    assert all("mismatch" in text.lower() for text in texts), texts
