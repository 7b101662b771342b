"""One rank on an NVIDIA card: every call, the order of streams, graphs, training as over torch's own backend."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from card import needs_card, on_card, same_as_nccl
from harness import Context, expect_raises
from on_device import holds, late, total

pytestmark = [needs_card, pytest.mark.timeout(120)]


def test_every_collective_gives_the_numbers_of_the_cpu() -> None:
    """Calls work in every form (synchronous and asynchronous, contiguous and strided, lists, regions), and all are
    counted."""
    on_card(1, on_device.every_call)


def test_every_type_and_op_gives_the_numbers_of_the_cpu() -> None:
    """What NCCL supports, what is cast or combined for it, and what is refused."""
    on_card(1, on_device.every_type, "nccl")


def test_rule_32_kernels_of_both_sides_keep_their_order() -> None:
    """Results are right after a late kernel, on a side stream, and through a future. Freed memory is not reused too
    early."""
    on_card(1, on_device.order)


def test_lists_of_any_length() -> None:
    """Several types in one list; a thousand small tensors as a list, in a region and one by one."""
    on_card(1, on_device.lists)


def test_tensors_of_the_host_and_the_device_are_under_way_together() -> None:
    """One group is requested by the backend's name alone, one names the backend for both kinds of device."""
    on_card(1, on_device.host_and_device)
    on_card(1, on_device.host_and_device, backend="cpu:sagellm,cuda:sagellm")


def test_the_path_is_told_and_counted() -> None:
    """Explain names NCCL, statistics count, and nothing goes through host memory."""
    on_card(1, on_device.path_taken, "nccl")


def eager(ctx: Context, device: str) -> None:
    value = torch.ones(100, device=device)
    dist.all_reduce(value)
    holds(value, ctx.world_size)
    part = dist.new_group(list(range(ctx.world_size)))
    dist.all_reduce(value, group=part)
    holds(value, ctx.world_size**2)
    dist.barrier()


def test_a_group_that_is_bound_to_its_device() -> None:
    """`device_id=` makes the communicator immediately. A further group and a barrier then work."""
    on_card(1, eager, device_id=torch.device("cuda", 0))


def wrong(ctx: Context, device: str) -> None:
    good, before = torch.ones(6, device=device), on_device.number()
    n = ctx.world_size
    text = expect_raises(ValueError, lambda: dist.all_gather_into_tensor(torch.empty(6 * n), good))
    assert "cuda:0" in text and "cpu" in text, text
    text = expect_raises((ValueError, RuntimeError), lambda: dist.all_reduce(torch.ones(1, device=device).expand(5)))
    assert "clone" in text, text
    assert on_device.number() == before, "a refused call used a number"
    dist.all_reduce(good)
    holds(good, n)


def test_rule_02_wrong_input_is_refused_locally() -> None:
    """Calls with two devices, or with memory that overlaps itself, use no number, and the group stays usable."""
    on_card(1, wrong)


# ------------------------------------------------------------------------------------------------ graphs


def captured(ctx: Context, device: str, asynchronous: bool) -> None:
    """Captures three collectives in a graph and replays it with different numbers. Calls outside the graph continue."""
    n = ctx.world_size
    value, gathered = torch.zeros(1000, device=device), torch.zeros(1000 * n, device=device)
    part = torch.zeros(1000, device=device)
    dist.all_reduce(value)  # makes the communicator
    # The watch still polls this call when the capture begins.
    late(device)
    outside = torch.full((50,), ctx.rank + 1.0, device=device)
    before = dist.all_reduce(outside, async_op=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = value * 2
        works = [
            dist.all_reduce(doubled, async_op=asynchronous),
            dist.all_gather_into_tensor(gathered, doubled, async_op=asynchronous),
            dist.reduce_scatter_tensor(part, gathered, async_op=asynchronous),
        ]
        for work in works:
            if work is not None:
                work.wait()
        result = part + 1
    before.wait()
    holds(outside, total(n))
    for turn in (1, 2, 3):
        value.fill_(turn * (ctx.rank + 1))
        late(device)
        graph.replay()
        holds(gathered, 2 * turn * total(n))
        holds(result, 2 * turn * total(n) * n + 1)
        dist.all_reduce(outside.fill_(turn))
        holds(outside, turn * n)
    del graph


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_captured_call_is_played_again(asynchronous: bool) -> None:
    """Every replay gives the right numbers, and calls that were in flight are not affected."""
    on_card(1, captured, asynchronous)


def first_in_capture(ctx: Context, device: str) -> None:
    value = torch.ones(100, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = value + 1
        text = expect_raises(ValueError, lambda: dist.all_reduce(value))
    assert "captured" in text and "before the capture" in text, text
    graph.replay()
    holds(kept, 2)
    dist.all_reduce(value)
    holds(value, ctx.world_size)


def test_rule_31_a_first_call_within_a_capture_is_refused() -> None:
    """The call would have to create the communicator. The capture and the group continue."""
    on_card(1, first_in_capture)


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("hook", [False, True])
def test_ddp_trains_as_over_nccl(hook: bool) -> None:
    """Losses and parameters of three steps, bit for bit; plain, and with a hook that sends 16 bits."""
    same_as_nccl(1, on_device.ddp, hook)


@pytest.mark.parametrize("mixed", [False, True])
def test_fsdp2_trains_as_over_nccl(mixed: bool) -> None:
    """`fully_shard`: losses and parameters of three steps, bit for bit; float32, and bfloat16 parameters."""
    same_as_nccl(1, on_device.fsdp, mixed)


def results(ctx: Context, device: str) -> dict[str, list[Any]]:
    """Returns the results of each collective, as nested numbers."""
    found: dict[str, list[Any]] = {}
    for what, call in on_device.calls(ctx.world_size, ctx.rank, device).items():
        if what in BEYOND_NCCL:
            continue
        work, tensors = call(True)
        if work is not None:
            work.wait()
        found[what] = [each.cpu().tolist() for each in tensors]
    return found


#: What torch's backend refuses: several types in one list, and tensors that are not contiguous.
BEYOND_NCCL = {"all_reduce of several types", "all_reduce of a transposed tensor"}


def test_every_collective_gives_the_numbers_of_nccl() -> None:
    """The same calls give the same bits over torch's own backend."""
    (ours,), (theirs,) = on_card(1, results), on_card(1, results, backend="nccl")
    assert ours.keys() == theirs.keys()
    for what in ours:
        assert ours[what] == theirs[what], what
