"""Tensors that peers can map: how long they live, and that torch treats them like other tensors."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from harness import Context, beyond_gloo
from reachable import MIB, PAGE, alone, resident, usage

import torch_sagellm

pytestmark = beyond_gloo("has no such tensors")


# ------------------------------------------------------------------------------------------------------------- life


def freed_and_used_again(ctx: Context) -> None:
    first = torch_sagellm.empty(MIB)
    at = first.data_ptr()
    assert at % PAGE == 0 and first.dtype == torch.float32
    found = usage()
    assert (found["limit"], found["used"], found["extents"]) == (256 * MIB, 4 * MIB, 1)
    first.fill_(1)
    view = first[10:]
    del first
    assert usage()["extents"] == 1 and view.sum().item() == MIB - 10
    del view
    assert (usage()["used"], usage()["extents"], usage()["cached"]) == (0, 0, 4 * MIB)
    again = torch_sagellm.empty(MIB)
    assert again.data_ptr() == at and torch_sagellm.zeros(4).data_ptr() != at
    # Of freed memory, at most a quarter of the limit stays allocated.
    before = resident()
    large = torch_sagellm.zeros(100 * MIB, dtype=torch.uint8)
    assert resident() - before > 99 * MIB  # the kernel counts some pages later
    del large
    assert resident() - before < MIB and usage()["cached"] <= 64 * MIB
    assert usage()["refused"] == 0


def test_freed_memory_is_used_again_and_goes_back_to_the_system() -> None:
    """A view keeps the memory. After the last view has gone, the next tensor or the system gets it."""
    alone(freed_and_used_again)


def resized(ctx: Context) -> None:
    own = torch_sagellm.zeros(1000)
    own.resize_(MIB)
    assert torch_sagellm.is_reachable(own) and own[:1000].count_nonzero() == 0 and usage()["extents"] == 1
    own.untyped_storage().resize_(0)
    assert usage()["extents"] == 0 and not torch_sagellm.is_reachable(own)
    own.untyped_storage().resize_(4 * MIB)
    assert torch_sagellm.is_reachable(own) and own.fill_(2).sum() == 2 * MIB
    with torch_sagellm.shared_tensors():
        made = torch.ones(MIB)
    assert torch_sagellm.is_reachable(made)
    made.resize_(2 * MIB)  # the block has ended, so this thread allocates ordinary memory again
    assert not torch_sagellm.is_reachable(made) and made[:MIB].sum() == MIB and usage()["extents"] == 1


def test_resize_keeps_the_contents_and_the_kind_of_memory_that_its_allocator_gives() -> None:
    alone(resized)


def several_owners(ctx: Context) -> None:
    one = torch_sagellm.zeros(MIB)
    other = torch.empty(0).set_(one)
    assert torch_sagellm.is_reachable(other) and other.data_ptr() == one.data_ptr()
    del one
    assert usage()["extents"] == 1 and other.count_nonzero() == 0
    array = other.numpy()
    del other
    array[5] = 3
    back = torch.from_numpy(array)
    assert torch_sagellm.is_reachable(back) and back[5] == 3
    del back, array
    assert usage()["extents"] == 0
    with torch_sagellm.shared_tensors():  # the array's memory belongs to numpy
        assert not torch_sagellm.is_reachable(torch.from_numpy(numpy.ones(MIB)))
    weight = torch.nn.Parameter(torch.ones(MIB))
    weight.data = torch_sagellm.shared(weight.data)
    assert torch_sagellm.is_reachable(weight) and usage()["extents"] == 1


def test_memory_lives_as_long_as_the_last_tensor_or_array_over_it() -> None:
    alone(several_owners)


def saved_and_sent(ctx: Context) -> None:
    from torch import multiprocessing

    tensor = torch_sagellm.shared(torch.arange(float(MIB)))
    file = io.BytesIO()
    torch.save({"tensor": tensor, "part": tensor[5:9]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["tensor"], tensor) and loaded["part"].tolist() == [5, 6, 7, 8]
    assert loaded["part"].data_ptr() == loaded["tensor"].data_ptr() + 20

    context = multiprocessing.get_context("fork")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=adds_one, args=(there, back))
    child.start()
    there.put(tensor)  # moves the tensor into shared memory of torch, which both processes have mapped
    assert back.get() == float(MIB) * (MIB - 1) / 2
    child.join(30)
    assert child.exitcode == 0 and tensor[:3].tolist() == [1, 2, 3]
    assert tensor.is_shared() and not torch_sagellm.is_reachable(tensor) and usage()["extents"] == 0

    other = torch_sagellm.zeros(MIB)
    assert not other.is_shared() and other.share_memory_().is_shared() and usage()["extents"] == 0


def adds_one(there: Any, back: Any) -> None:
    got = there.get()
    total = got.sum(dtype=torch.float64).item()
    got += 1
    back.put(total)


def test_torch_saves_loads_and_sends_them() -> None:
    """Like `share_memory_()`, torch moves the tensor into its own memory, and our memory is freed."""
    alone(saved_and_sent)


# -------------------------------------------------------------------------------------------------------- as others


def history(make: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Returns the results of autograd and of the version counters for a tensor."""
    start = torch.arange(1.0, 1 + 4096 * 4).reshape(4096, 4)
    leaf = make(start).requires_grad_()
    found: list[Any] = [leaf._version, leaf.is_leaf, leaf.stride()]
    (leaf * leaf).sum().backward()
    found += [leaf.grad.sum().item() if leaf.grad is not None else None]
    plain = make(start)
    view = plain[3:].t()
    view += 1
    plain.add_(view[0, 0].item())
    found += [plain._version, view._version, view._base is plain, plain.sum(dtype=torch.float64).item()]
    saved = make(start).requires_grad_()
    root = saved * 1
    squared = root * root
    with torch.no_grad():
        root.zero_()
    try:
        squared.sum().backward()
    except RuntimeError as error:
        found.append("modified by an inplace operation" in str(error))
    detached = plain.detach()
    detached.zero_()
    return [*found, plain._version, torch.equal(plain, torch.zeros_like(plain)), plain.is_inference()]


def as_ordinary(ctx: Context) -> None:
    def in_block(tensor: torch.Tensor) -> torch.Tensor:
        with torch_sagellm.shared_tensors():
            made = torch.empty_like(tensor)
        assert torch_sagellm.is_reachable(made)
        return made.copy_(tensor)

    wanted = history(lambda tensor: torch.empty_like(tensor).copy_(tensor))
    assert wanted[-4] is True  # autograd raised its error
    assert history(lambda tensor: torch_sagellm.empty_like(tensor).copy_(tensor)) == wanted
    assert history(in_block) == wanted
    with torch.inference_mode():
        assert torch_sagellm.empty(5).is_inference() and torch_sagellm.shared(torch.ones(3)).tolist() == [1, 1, 1]


def test_autograd_and_versions_are_those_of_ordinary_tensors() -> None:
    alone(as_ordinary)


def profiled(ctx: Context) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of_torch:
        kept = torch.empty(MIB)
        torch.empty(MIB)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as ours, torch_sagellm.shared_tensors():
        kept_too = torch.empty(MIB)
        torch.empty(MIB)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as asked:
        kept_last = torch_sagellm.empty(MIB)
    assert not torch_sagellm.is_reachable(kept) and torch_sagellm.is_reachable(kept_too)
    assert kept_last.nbytes == 4 * MIB

    def counted(found: Any) -> int:
        return sum(event.self_cpu_memory_usage for event in found.events())

    assert counted(of_torch) == counted(ours) == counted(asked) == 4 * MIB


def test_the_memory_profiler_counts_them_as_it_counts_others() -> None:
    alone(profiled)


def by_many_threads(ctx: Context) -> None:
    wrong: list[Any] = []

    def work(number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        kept: list[torch.Tensor] = []
        for step in range(300):
            bytes_ = int(torch.randint(1, 300_000, (), generator=draw))
            with torch_sagellm.shared_tensors():
                tensor = torch.empty(bytes_, dtype=torch.uint8)
            if torch_sagellm.is_reachable(tensor) != (bytes_ >= 16384):
                wrong.append((number, step, bytes_))
            kept.append(tensor.fill_(number))
            if len(kept) > 8:
                gone = kept.pop(int(torch.randint(0, 8, (), generator=draw)))
                if not bool((gone == number).all()):
                    wrong.append((number, step, gone.unique().tolist()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not wrong and not any(each.is_alive() for each in threads), wrong[:3]
    assert (usage()["used"], usage()["extents"], usage()["refused"]) == (0, 0, 0)


def test_many_threads_allocate_at_once() -> None:
    alone(by_many_threads)


# -------------------------------------------------------------------------------------------------------- the block


def blocks(ctx: Context) -> None:
    def reachable(count: int = MIB) -> bool:
        return torch_sagellm.is_reachable(torch.empty(count, dtype=torch.uint8))

    block = torch_sagellm.shared_tensors()
    assert not reachable()
    with block:
        assert reachable() and reachable(16384) and not reachable(16383)
        with torch_sagellm.shared_tensors(), block:
            assert reachable()
        assert reachable()
        other: list[bool] = []
        thread = threading.Thread(target=lambda: other.append(reachable()))
        thread.start()
        thread.join(30)
        assert other == [False]
    assert not reachable()
    with pytest.raises(KeyError), torch_sagellm.shared_tensors():
        raise KeyError
    assert not reachable()
    with torch_sagellm.shared_tensors():
        layer = torch.nn.Linear(256, 256)
        layer(torch.ones(256, 256)).sum().backward()
    assert torch_sagellm.is_reachable(layer.weight) and layer.weight.grad is not None
    assert torch_sagellm.is_reachable(layer.weight.grad) and not torch_sagellm.is_reachable(layer.bias)
    with pytest.raises(RuntimeError, match="was not entered"):
        block.__exit__(None, None, None)

    block.__enter__()
    thread = threading.Thread(target=leave_elsewhere, args=(block,))
    thread.start()
    thread.join(30)
    assert reachable(), "this thread is still within the block"
    block.__exit__(None, None, None)
    assert not reachable()


def leave_elsewhere(block: Any) -> None:
    with pytest.raises(RuntimeError, match="ends on another thread than it began on"):
        block.__exit__(None, None, None)


def test_a_block_holds_for_its_thread_and_ends_with_an_exception() -> None:
    alone(blocks)


def without_deleters(ctx: Context) -> None:
    from torch_sagellm._private import load

    raw = load.extension()._share_raw
    assert not raw(MIB)
    with torch_sagellm.shared_tensors():
        assert raw(MIB) and not raw(100) and not raw(0)
        assert usage()["extents"] == 0 and usage()["cached"] == MIB
    assert not raw(MIB)


def test_a_caller_that_keeps_addresses_gives_each_back_to_its_owner() -> None:
    alone(without_deleters)
