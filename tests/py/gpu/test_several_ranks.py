"""Two and four ranks share one NVIDIA card. Results are tested, but not speed, because the ranks use the card in turns.

NCCL allows several ranks on one card since 2.30.3, as an experiment. These tests do not show what changes
if every rank has its own card.
"""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from card import needs_shared_card, needs_shared_rival, on_card, same_as_nccl
from harness import Context
from test_one_rank import captured, eager
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

pytestmark = [needs_shared_card, pytest.mark.timeout(120)]
both = pytest.mark.parametrize("ranks", [2, 4])


@both
def test_every_collective_gives_the_numbers_of_the_cpu(ranks: int) -> None:
    """With two ranks, results are equal bit for bit; with four, the library adds numbers in its own order."""
    on_card(ranks, on_device.every_call, (), ranks == 2)


@both
def test_rule_20_messages_of_all_ranks_do_not_wait_for_each_other(ranks: int) -> None:
    """Messages are sent one by one (two ranks both send first), then as a batch. A receive from any rank is refused."""
    on_card(ranks, on_device.messages)


@both
def test_rule_32_kernels_of_all_ranks_keep_their_order(ranks: int) -> None:
    """Late kernels, side streams, futures."""
    on_card(ranks, on_device.order)


@both
def test_tensors_of_the_host_and_the_device_are_under_way_together(ranks: int) -> None:
    """Host and device tensors, objects and subgroups in one group."""
    on_card(ranks, on_device.host_and_device)


def beside_nccl(ctx: Context, device: str) -> None:
    """In the form that is recommended with GPUs, torch's nccl has the GPU and this package the CPU."""
    from torch_sagellm._private import load

    ranks = ctx.world_size
    for kind in ("cpu", device):
        value = torch.full((100,), ctx.rank + 1.0, device=kind)
        dist.all_reduce(value)
        assert value.eq(ranks * (ranks + 1) / 2).all()
    objects: list[object] = [None] * ranks
    dist.all_gather_object(objects, {"rank": ctx.rank})
    assert objects == [{"rank": each} for each in range(ranks)]
    for group in (dist.new_group(list(range(ranks))), init_device_mesh("cpu", (ranks,)).get_group()):
        assert isinstance(group._get_backend(torch.device("cpu")), load.extension().SageBackend)
        assert not isinstance(group._get_backend(torch.device(device)), load.extension().SageBackend)
        dist.barrier(group=group)
    model = DistributedDataParallel(torch.nn.Linear(3, 1).to(device))
    model(torch.full((2, 3), ctx.rank + 1.0, device=device)).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None and gradient.tolist() == [[ranks + 1.0] * 3]


@needs_shared_rival
def test_a_group_with_nccl_for_the_gpu_and_this_package_for_the_cpu() -> None:
    on_card(2, beside_nccl, backend="cpu:sagellm,cuda:nccl")


@both
def test_the_path_is_told_and_counted(ranks: int) -> None:
    """Each rank itself combines what NCCL cannot combine."""
    on_card(ranks, on_device.path_taken, "nccl")


def test_every_type_and_op_gives_the_numbers_of_the_cpu() -> None:
    """Only with two ranks does a composed call have something to combine."""
    on_card(2, on_device.every_type, "nccl")


def test_lists_of_any_length() -> None:
    """By a list, by a region and one by one."""
    on_card(2, on_device.lists)


def test_a_group_that_is_bound_to_its_device() -> None:
    """Both ranks name the same card."""
    import torch

    on_card(2, eager, device_id=torch.device("cuda", 0))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_captured_call_is_played_again(asynchronous: bool) -> None:
    """Both ranks replay their graphs."""
    on_card(2, captured, asynchronous)


@needs_shared_rival
@pytest.mark.parametrize("program", [on_device.ddp, on_device.fsdp], ids=["ddp", "fsdp2"])
def test_two_ranks_train_as_over_nccl(program: Any) -> None:
    """Losses and parameters, bit for bit."""
    same_as_nccl(2, program)


def alike(ctx: Context, device: str, program: Any) -> list[Any]:
    losses, parameters = program(device, ctx.rank)
    gathered: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(gathered, [each.tolist() for each in parameters])
    assert all(each == gathered[0] for each in gathered), "the ranks' parameters differ"
    expected, _ = program("cpu", ctx.rank)
    assert losses == pytest.approx(expected, rel=1e-3), (losses, expected)
    return losses


@pytest.mark.parametrize("program", [on_device.ddp, on_device.fsdp], ids=["ddp", "fsdp2"])
def test_four_ranks_train_alike(program: Any) -> None:
    """All ranks have the same parameters, and their losses are near those of the CPU."""
    assert len(on_card(4, alike, program)) == 4
