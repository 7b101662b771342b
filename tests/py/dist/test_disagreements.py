"""Ranks that do not make the same call: on one rank one thing is changed, in every call of c10d and in every call that
takes a list. Every rank must get the error, in that call or, where it could end there rightly, in its next (rule 5).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, run_fresh
from net import enter

T = torch.Tensor
LIMIT = timedelta(seconds=30)
ENV = {"GLOO_SOCKET_IFNAME": net.INTERFACE}


def begin(ctx: Context, names: list[str]) -> None:
    """Makes the default group: over the hosts of these names, or on this one."""
    warnings.simplefilter("ignore", FutureWarning)  # torch's, about its own names
    if not names:
        ctx.init(timeout=LIMIT)
        return
    enter(names[ctx.rank * len(names) // ctx.world_size])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size), timeout=LIMIT)


def refusal(calls: Callable[[Any], object]) -> str:
    """The error that the calls meet in a new group, or that of the barrier behind them."""
    group: Any = dist.new_group(timeout=LIMIT)
    try:
        calls(group)
        dist.barrier(group=group)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()  # a rank that leaves earlier may be what the others hear of
        dist.destroy_process_group(group)
    return ""


def check(found: list[dict[str, str]], over_hosts: bool) -> None:
    """The errors of all ranks, by case. Where a rank has left the link the others may learn only that."""
    assert all(list(each) == list(found[0]) for each in found)
    for case in found[0]:
        texts = [each[case] for each in found]
        # All mismatches say what ranks must do; errors of a deadline or of a rank that left do not.
        mismatch = ["Every rank must" in text for text in texts]
        lost = ["lost the connection to rank" in text or "ended or left the group" in text for text in texts]
        told = [one or (over_hosts and other) for one, other in zip(mismatch, lost, strict=True)]
        assert any(mismatch) and all(told), f"{case}: {texts}"


# ---------------------------------------------------------------------------------------------------- every call


@dataclass(frozen=True)
class Passed:
    """What a rank passes to a call."""

    size: int
    dtype: torch.dtype = torch.float32
    op: Any = dist.ReduceOp.SUM
    root: int = 0

    def one(self) -> T:
        return torch.ones(self.size, dtype=self.dtype)

    def all(self) -> T:
        return torch.ones(self.size * dist.get_world_size(), dtype=self.dtype)

    def each(self) -> list[T]:
        return [self.one() for _ in range(dist.get_world_size())]

    def at_root(self) -> list[T] | None:
        return self.each() if dist.get_rank() == self.root else None

    def splits(self) -> list[int]:
        return [self.size] * dist.get_world_size()


CALLS: dict[str, Callable[[Any, Passed], object]] = {
    "all_reduce": lambda g, p: dist.all_reduce(p.one(), p.op, group=g),
    "reduce": lambda g, p: dist.reduce(p.one(), group_dst=p.root, op=p.op, group=g),
    "broadcast": lambda g, p: dist.broadcast(p.one(), group_src=p.root, group=g),
    "all_gather": lambda g, p: dist.all_gather(p.each(), p.one(), group=g),
    "all_gather_into_tensor": lambda g, p: dist.all_gather_into_tensor(p.all(), p.one(), group=g),
    "gather": lambda g, p: dist.gather(p.one(), p.at_root(), group_dst=p.root, group=g),
    "scatter": lambda g, p: dist.scatter(p.one(), p.at_root(), group_src=p.root, group=g),
    "reduce_scatter": lambda g, p: dist.reduce_scatter(p.one(), p.each(), p.op, group=g),
    "reduce_scatter_tensor": lambda g, p: dist.reduce_scatter_tensor(p.one(), p.all(), p.op, group=g),
    "all_to_all": lambda g, p: dist.all_to_all(p.each(), p.each(), group=g),
    "all_to_all_single": lambda g, p: dist.all_to_all_single(p.all(), p.all(), group=g),
    "all_to_all_single, splits": lambda g, p: dist.all_to_all_single(p.all(), p.all(), p.splits(), p.splits(), group=g),
    "barrier": lambda g, p: dist.barrier(group=g),
    "all_reduce_coalesced": lambda g, p: dist.all_reduce_coalesced([p.one(), p.one()], p.op, group=g),
    "all_gather_coalesced": lambda g, p: dist.all_gather_coalesced(
        [[p.one(), p.one()] for _ in range(dist.get_world_size())], [p.one(), p.one()], group=g
    ),
}
if hasattr(dist, "gather_single"):
    CALLS["gather_single"] = lambda g, p: dist.gather_single(
        p.one(), p.all() if dist.get_rank() == p.root else None, group_dst=p.root, group=g
    )


def changes(name: str, passed: Passed) -> dict[str, tuple[str, Passed]]:
    """What one rank calls and passes instead. Data that is only moved has no type (rule 5)."""
    found = {"call": ("all_reduce" if name == "barrier" else "barrier", passed)}
    if name != "barrier":
        found["size"] = (name, replace(passed, size=passed.size + 1))
    if "reduce" in name:
        found["type"] = (name, replace(passed, dtype=torch.int32))
        found["op"] = (name, replace(passed, op=dist.ReduceOp.MAX))
    if name in ("reduce", "broadcast", "gather", "gather_single", "scatter"):
        found["root"] = (name, replace(passed, root=1))
    return found


def one_rank_differs(ctx: Context, names: list[str], size: int) -> dict[str, str]:
    """Every call with every change, on each rank in turn."""
    begin(ctx, names)
    cases = [(name, what, other) for name in CALLS for what, other in changes(name, Passed(size)).items()]
    if names:
        # Over hosts two ranks that both mean to collect the data wait for each other until the deadline.
        cases = [case for case in cases if case[1] != "root" or case[0] in ("broadcast", "scatter")]
    found = {}
    for number, (name, what, other) in enumerate(cases):
        who = number % ctx.world_size
        called, passed = other if ctx.rank == who else (name, Passed(size))
        text = refusal(lambda group, called=called, passed=passed: CALLS[called](group, passed))
        found[f"{name}, rank {who} has another {what}"] = text
    dist.destroy_process_group()
    return found


@beyond_gloo("it compares nothing")
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("size", [6, 20_000])
def test_rule_05_what_differs_on_one_rank_is_an_error_on_all(size: int, world_size: int) -> None:
    """Rule 5: another call, size, type, reduce op or root, in slots and in rounds."""
    check(run_fresh(one_rank_differs, world_size, [], size), over_hosts=False)


@beyond_gloo("it compares nothing")
@pytest.mark.parametrize(("world_size", "size"), [(2, 20_000), (2, 100_000), (4, 6), (4, 100_000)])
def test_rule_05_what_differs_on_one_rank_is_an_error_on_all_hosts(
    hosts: list[str], world_size: int, size: int
) -> None:
    """The same over two hosts; 6 elements go in a frame, 20,000 in a message, 100,000 without a copy."""
    check(run_fresh(one_rank_differs, world_size, hosts, size, env=ENV, timeout=180.0), over_hosts=True)


# --------------------------------------------------------------------------------------------------------- lists

Shape = tuple[int, torch.dtype]


def regions(call: Callable[[Any, T], object]) -> Callable[[Any, list[T]], None]:
    """The calls for a list, in a region of torch's manager, which makes one call of them."""

    def together(group: Any, tensors: list[T]) -> None:
        with dist._coalescing_manager(group=group):
            for tensor in tensors:
                call(group, tensor)

    return together


def gathered(group: Any, tensor: T) -> None:
    dist.all_gather_into_tensor(tensor.new_empty(tensor.numel() * dist.get_world_size()), tensor, group=group)


def scattered(group: Any, tensor: T) -> None:
    blocks = tensor.new_ones(tensor.numel() * dist.get_world_size())
    dist.reduce_scatter_tensor(tensor, blocks, group=group)


def reduced(group: Any, tensor: T) -> None:
    dist.all_reduce(tensor, group=group)


def fused(group: Any, tensors: list[T]) -> None:
    import torch_sagellm

    torch_sagellm.fused_all_reduce(tensors, group=group)


def buffered(group: Any, tensors: list[T]) -> None:
    import torch_sagellm

    buffer = torch_sagellm.CommFusionBuffer()
    assert all(buffer.add_tensor(tensor) for tensor in tensors)
    buffer.flush_and_all_reduce(torch_sagellm.create_comm_backend(group=group))


def gathered_lists(group: Any, tensors: list[T]) -> None:
    outputs = [[tensor.clone() for tensor in tensors] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(outputs, tensors, group=group)


@dataclass(frozen=True)
class Listed:
    """A call that takes a list, and the call for one of its tensors."""

    together: Callable[[Any, list[T]], object]
    alone: Callable[[Any, T], object]
    mixed: bool = False


LISTS = {
    "fused_all_reduce": Listed(fused, reduced, mixed=True),
    "CommFusionBuffer": Listed(buffered, reduced, mixed=True),
    "all_reduce_coalesced": Listed(lambda group, tensors: dist.all_reduce_coalesced(tensors, group=group), reduced),
    "all_gather_coalesced": Listed(gathered_lists, gathered),
    "region of all_reduce": Listed(regions(reduced), reduced),
    "region of all_gather_into_tensor": Listed(regions(gathered), gathered),
    "region of reduce_scatter_tensor": Listed(regions(scattered), scattered),
}


def drawn(draw: random.Random, mixed: bool) -> list[Shape]:
    """A list of two to seven tensors, of which some are empty and some, rarely, large."""
    sizes = [0, 1, 2, 3, 8, 100, 1000, *([5000, 70_000] if draw.random() < 0.3 else [])]
    types = [torch.float32, torch.int32, torch.float64] if mixed else [torch.float32]
    return [(draw.choice(sizes), draw.choice(types)) for _ in range(draw.randint(2, 7))]


def changed(draw: random.Random, shapes: list[Shape]) -> list[Shape]:
    """The list with two tensors swapped, one cut in two, or one left out: never the same list."""
    while True:
        other = list(shapes)
        at, to = draw.sample(range(len(other)), 2)
        size, dtype = other[at]
        how = draw.choice(["swap", "cut", "leave out"])
        if how == "swap":
            other[at], other[to] = other[to], other[at]
        elif how == "cut":
            part = draw.randint(0, size)
            other[at : at + 1] = [(part, dtype), (size - part, dtype)]
        else:
            del other[at]
        if other != shapes:
            return other


def lists_differ(ctx: Context, names: list[str], seeds: range) -> dict[str, str]:
    """Random lists, of which one rank has another; one by one and as a list."""
    begin(ctx, names)
    found = {}
    for seed in seeds:
        draw = random.Random(seed)
        name, call = list(LISTS.items())[seed % len(LISTS)]
        shapes = drawn(draw, call.mixed)
        other, who = changed(draw, shapes), draw.randrange(ctx.world_size)
        mine = other if ctx.rank == who else shapes

        def tensors(mine: list[Shape] = mine) -> list[T]:
            return [torch.ones(size, dtype=dtype) for size, dtype in mine]

        def alone(group: Any, call: Listed = call, tensors: Callable[[], list[T]] = tensors) -> None:
            for tensor in tensors():
                call.alone(group, tensor)

        def together(group: Any, call: Listed = call, tensors: Callable[[], list[T]] = tensors) -> None:
            call.together(group, tensors())

        for calls in (alone, together):
            case = f"seed {seed}, {name} {calls.__name__}: {shapes} and on rank {who} {other}"
            found[case] = refusal(calls)
    dist.destroy_process_group()
    return found


@beyond_gloo("it compares nothing")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rule_05_lists_are_refused_wherever_their_tensors_one_by_one_are(world_size: int) -> None:
    """Rule 5: lists of as many bytes in all are told apart by their tensors."""
    seeds = range(70 * world_size, 70 * world_size + 70)
    check(run_fresh(lists_differ, world_size, [], seeds, timeout=120.0), over_hosts=False)


@beyond_gloo("it compares nothing")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rule_05_lists_are_refused_wherever_their_tensors_are_over_hosts(hosts: list[str], world_size: int) -> None:
    """The same over two hosts, where calls that were issued one by one may travel together and are no list."""
    seeds = range(21 * world_size, 21 * world_size + 21)
    check(run_fresh(lists_differ, world_size, hosts, seeds, env=ENV, timeout=180.0), over_hosts=True)


def first_difference(ctx: Context, sizes: list[list[int]]) -> str:
    """The error of lists of these sizes, and that no tensor was touched."""
    import torch_sagellm

    ctx.init(timeout=LIMIT)
    tensors = [torch.full((size,), float(ctx.rank)) for size in sizes[ctx.rank]]
    text = ""
    try:
        torch_sagellm.fused_all_reduce(tensors)
    except RuntimeError as error:
        text = str(error)
    assert all(bool((tensor == ctx.rank).all()) for tensor in tensors), "a tensor was written"
    dist.destroy_process_group()
    return text


@beyond_gloo("it compares nothing")
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([[2, 6], [6, 2]], "tensor 0 has 8 bytes of float32 on rank"),
        ([[5, 3000, 7], [5, 2999, 8]], "tensor 1 has"),
        ([[8], [2, 6]], "one tensor and no list"),
        ([[4, 4], [4, 4, 0]], "passed 3 tensors"),
    ],
)
def test_rule_05_the_error_says_where_lists_differ(sizes: list[list[int]], words: str) -> None:
    """Which tensor, and its size on both ranks; where one rank's list ends, how many tensors each passed."""
    texts = run_fresh(first_difference, 2, sizes)
    assert all("different lists of tensors to all_reduce(" in text for text in texts), texts
    assert any(words in text for text in texts), texts
