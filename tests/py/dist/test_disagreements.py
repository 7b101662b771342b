"""Ranks that do not make the same call. One rank changes one thing, in every public call and in every call that takes a
list. Every rank must get the error: in that call or, if its part of the call could complete, in its next call (rule 5).
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
from public_calls import missing

T = torch.Tensor
LIMIT = timedelta(seconds=30)
ENV = {"GLOO_SOCKET_IFNAME": net.INTERFACE}


def begin(ctx: Context, names: list[str]) -> None:
    """Creates the default group over the hosts with these names, or on this host if no names are passed."""
    warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own deprecated names
    if not names:
        ctx.init(timeout=LIMIT)
        return
    enter(names[ctx.rank * len(names) // ctx.world_size])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size), timeout=LIMIT)


def refusal(calls: Callable[[Any], object]) -> str:
    """Runs the calls and a barrier in a new group. Returns the first error's text, or "" without an error."""
    group: Any = dist.new_group(timeout=LIMIT)
    dist.barrier()  # a rank that is still in new_group could get its peers' error there
    try:
        calls(group)
        dist.barrier(group=group)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()  # if a rank left earlier, its peers could get that as the error
        dist.destroy_process_group(group)
    return ""


def check(found: list[dict[str, str]], over_hosts: bool) -> None:
    """Checks the errors of all ranks, by case. If a rank has cut the link between hosts, its peers may see only the
    lost connection."""
    assert all(list(each) == list(found[0]) for each in found)
    for case in found[0]:
        texts = [each[case] for each in found]
        # Every mismatch error says what all ranks must do. Errors of a deadline or of a rank that left do not.
        mismatch = ["Every rank must" in text for text in texts]
        lost = ["lost the connection to rank" in text or "ended or left the group" in text for text in texts]
        told = [one or (over_hosts and other) for one, other in zip(mismatch, lost, strict=True)]
        assert any(mismatch) and all(told), f"{case}: {texts}"


# ---------------------------------------------------------------------------------------------------- every call


@dataclass(frozen=True)
class Passed:
    """The arguments that a rank passes to a call."""

    size: int
    dtype: torch.dtype = torch.float32
    op: Any = dist.ReduceOp.SUM
    root: int = 0
    how: str = "fp16"
    device: str = "cpu"

    def one(self) -> T:
        return torch.ones(self.size, dtype=self.dtype, device=self.device)

    def all(self) -> T:
        return torch.ones(self.size * dist.get_world_size(), dtype=self.dtype, device=self.device)

    def each(self) -> list[T]:
        return [self.one() for _ in range(dist.get_world_size())]

    def at_root(self) -> list[T] | None:
        return self.each() if dist.get_rank() == self.root else None

    def splits(self) -> list[int]:
        return [self.size] * dist.get_world_size()

    def few(self) -> int:
        """Returns a list's length, derived from the size."""
        return self.size % 7 + 1

    def places(self) -> list[Any]:
        return [None] * dist.get_world_size()

    def places_at_root(self) -> list[Any] | None:
        return self.places() if dist.get_rank() == self.root else None


def package() -> Any:
    import torch_sagellm

    return torch_sagellm


def comm(group: Any) -> Any:
    return package().create_comm_backend(group=group)


def compressed(group: Any, p: Passed) -> object:
    return package().compressed_all_reduce(p.one(), p.how, op=p.op, group=group, key="one")


#: What one rank may pass differently. Calls that only move data do not compare dtypes (rule 5).
MOVES, REDUCES = ("call", "size"), ("call", "size", "type", "op")


@dataclass(frozen=True)
class Row:
    """A call, and the arguments in which one rank may differ."""

    run: Callable[[Any, Passed], object]
    differs: tuple[str, ...]


def row(differs: tuple[str, ...], run: Callable[[Any, Passed], object]) -> Row:
    return Row(run, differs)


CALLS: dict[str, Row] = {
    "dist.all_reduce": row(REDUCES, lambda g, p: dist.all_reduce(p.one(), p.op, group=g)),
    "dist.reduce": row((*REDUCES, "root"), lambda g, p: dist.reduce(p.one(), group_dst=p.root, op=p.op, group=g)),
    "dist.broadcast": row((*MOVES, "root"), lambda g, p: dist.broadcast(p.one(), group_src=p.root, group=g)),
    "dist.all_gather": row(MOVES, lambda g, p: dist.all_gather(p.each(), p.one(), group=g)),
    "dist.all_gather_into_tensor": row(MOVES, lambda g, p: dist.all_gather_into_tensor(p.all(), p.one(), group=g)),
    "dist.gather": row((*MOVES, "root"), lambda g, p: dist.gather(p.one(), p.at_root(), group_dst=p.root, group=g)),
    "dist.scatter": row((*MOVES, "root"), lambda g, p: dist.scatter(p.one(), p.at_root(), group_src=p.root, group=g)),
    "dist.reduce_scatter": row(REDUCES, lambda g, p: dist.reduce_scatter(p.one(), p.each(), p.op, group=g)),
    "dist.reduce_scatter_tensor": row(
        REDUCES, lambda g, p: dist.reduce_scatter_tensor(p.one(), p.all(), p.op, group=g)
    ),
    "dist.all_to_all": row(MOVES, lambda g, p: dist.all_to_all(p.each(), p.each(), group=g)),
    "dist.all_to_all_single": row(MOVES, lambda g, p: dist.all_to_all_single(p.all(), p.all(), group=g)),
    "dist.all_to_all_single, splits": row(
        MOVES, lambda g, p: dist.all_to_all_single(p.all(), p.all(), p.splits(), p.splits(), group=g)
    ),
    "dist.barrier": row(("call",), lambda g, p: dist.barrier(group=g)),
    "dist.all_reduce_coalesced": row(
        REDUCES, lambda g, p: dist.all_reduce_coalesced([p.one(), p.one()], p.op, group=g)
    ),
    "dist.all_gather_coalesced": row(
        MOVES,
        lambda g, p: dist.all_gather_coalesced(
            [[p.one(), p.one()] for _ in range(dist.get_world_size())], [p.one(), p.one()], group=g
        ),
    ),
    # Objects may differ between ranks, so their sizes are not compared.
    "dist.all_gather_object": row(("call",), lambda g, p: dist.all_gather_object(p.places(), "own", group=g)),
    "dist.broadcast_object_list": row(
        (*MOVES, "root"), lambda g, p: dist.broadcast_object_list(["own"] * p.few(), group_src=p.root, group=g)
    ),
    "dist.gather_object": row(
        ("call", "root"), lambda g, p: dist.gather_object("own", p.places_at_root(), group_dst=p.root, group=g)
    ),
    "dist.scatter_object_list": row(
        ("call", "root"),
        lambda g, p: dist.scatter_object_list([None], p.places_at_root(), group_src=p.root, group=g),
    ),
    "package.all_reduce": row(REDUCES, lambda g, p: package().all_reduce(p.one(), p.op, g)),
    "package.all_gather": row(MOVES, lambda g, p: package().all_gather(p.one(), g)),
    "package.reduce_scatter": row(REDUCES, lambda g, p: package().reduce_scatter(p.each(), p.op, g)),
    "package.broadcast": row((*MOVES, "root"), lambda g, p: package().broadcast(p.one(), p.root, g)),
    "package.all_to_all": row(MOVES, lambda g, p: package().all_to_all(p.each(), p.each(), g)),
    "package.fused_all_reduce": row(
        REDUCES, lambda g, p: package().fused_all_reduce([p.one(), p.one()], p.op, group=g)
    ),
    "package.CommFusionBuffer": row(REDUCES, lambda g, p: buffered(g, [p.one(), p.one()], p.op)),
    "package.batch_all_reduce": row(REDUCES, lambda g, p: package().batch_all_reduce([p.one()], p.op, backend=comm(g))),
    "package.safe_all_reduce": row(REDUCES, lambda g, p: package().safe_all_reduce(p.one(), p.op, backend=comm(g))),
    "package.compressed_all_reduce": row(("call", "size", "compression"), lambda g, p: compressed(g, p)),
    "package.OverlapScheduler": row(
        ("call", "size", "type"), lambda g, p: package().OverlapScheduler(comm(g)).schedule(p.one()).wait()
    ),
    "package.exchange_tokens": row(MOVES, lambda g, p: package().exchange_tokens(p.all().unsqueeze(1), 0, 1, group=g)),
    "package.assert_same": row(("call", "size"), lambda g, p: package().assert_same([torch.ones(1)] * p.few(), g)),
    "comm.all_reduce": row(REDUCES, lambda g, p: comm(g).all_reduce(p.one(), p.op)),
    "comm.safe_all_reduce": row(REDUCES, lambda g, p: comm(g).safe_all_reduce(p.one(), p.op)),
    "comm.fused_all_reduce": row(REDUCES, lambda g, p: comm(g).fused_all_reduce([p.one(), p.one()], p.op)),
    "comm.reduce": row((*REDUCES, "root"), lambda g, p: comm(g).reduce(p.one(), p.root, p.op)),
    "comm.reduce_scatter": row(REDUCES, lambda g, p: comm(g).reduce_scatter(p.all(), p.op)),
    "comm.all_gather": row(MOVES, lambda g, p: comm(g).all_gather(p.one())),
    "comm.broadcast": row((*MOVES, "root"), lambda g, p: comm(g).broadcast(p.one(), p.root)),
    "comm.gather": row((*MOVES, "root"), lambda g, p: comm(g).gather(p.one(), p.root)),
    "comm.scatter": row(
        (*MOVES, "root"),
        lambda g, p: comm(g).scatter(p.all() if dist.get_rank() == p.root else None, p.one(), p.root),
    ),
    "comm.all_to_all": row(MOVES, lambda g, p: comm(g).all_to_all(p.all())),
    "comm.barrier": row(("call",), lambda g, p: comm(g).barrier()),
}
if hasattr(dist, "gather_single"):
    CALLS["dist.gather_single"] = row(
        (*MOVES, "root"),
        lambda g, p: dist.gather_single(
            p.one(), p.all() if dist.get_rank() == p.root else None, group_dst=p.root, group=g
        ),
    )


def messages(send: Callable[[Any, Passed], object], receive: Callable[[Any, Passed], object]) -> Row:
    """Returns a message from rank 0 to rank 1; other ranks make no call."""

    def run(group: Any, passed: Passed) -> object:
        me = dist.get_rank()
        return (send, receive)[me](group, passed) if me < 2 else None

    return Row(run, ("size",))


def batch(group: Any, passed: Passed) -> None:
    peer = 1 - dist.get_rank()
    both = [
        dist.P2POp(dist.isend, passed.one(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, passed.one(), group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def around(group: Any, passed: Passed) -> None:
    for _ in package().ring_exchange([passed.one()], group=group):
        pass


MESSAGES: dict[str, Row] = {
    "dist.send, dist.recv": messages(
        lambda g, p: dist.send(p.one(), group_dst=1, group=g), lambda g, p: dist.recv(p.one(), group_src=0, group=g)
    ),
    "dist.isend, dist.irecv": messages(
        lambda g, p: dist.isend(p.one(), group_dst=1, group=g).wait(),
        lambda g, p: dist.irecv(p.one(), group_src=0, group=g).wait(),
    ),
    "dist.recv from anyone": messages(
        lambda g, p: dist.send(p.one(), group_dst=1, group=g), lambda g, p: dist.recv(p.one(), group=g)
    ),
    "dist.batch_isend_irecv": messages(batch, batch),
    "dist.send_object_list, dist.recv_object_list": messages(
        lambda g, p: dist.send_object_list(["own"] * p.few(), group_dst=1, group=g),
        lambda g, p: dist.recv_object_list([None] * p.few(), group_src=0, group=g),
    ),
    "package.send, package.recv": messages(
        lambda g, p: package().send(p.one(), 1, g), lambda g, p: package().recv(p.one(), 0, g)
    ),
    "package.isend, package.irecv": messages(
        lambda g, p: package().isend(p.one(), 1, g).wait(), lambda g, p: package().irecv(p.one(), 0, g).wait()
    ),
    "comm.send, comm.recv": messages(lambda g, p: comm(g).send(p.one(), 1), lambda g, p: comm(g).recv(p.one(), 0)),
    "comm.isend, comm.irecv": messages(
        lambda g, p: comm(g).isend(p.one(), 1).wait(), lambda g, p: comm(g).irecv(p.one(), 0).wait()
    ),
    "package.ring_exchange": Row(around, ("size",)),
}
ELSEWHERE = {
    "dist.monitored_barrier": "it compares nothing: it has a counter of its own (rule 1)",
    **dict.fromkeys(
        (f"package.{each}_{what}" for each in ("send", "recv") for what in ("tensors", "pages")),
        "what comes is described, and the receiver alone raises: test_p2p.py, test_paged.py",
    ),
    **dict.fromkeys(("package.isend_tensors", "package.irecv_tensors"), "the same"),
    **dict.fromkeys(
        (f"package.{kind}Backend" for kind in ("Comm", "CPU", "Gloo")), "their methods are the rows of comm"
    ),
    **dict.fromkeys((f"package.{kind}Backend" for kind in ("NCCL", "HCCL", "CNCL")), "tests/py/device"),
    **dict.fromkeys(
        (
            *(f"package.{kind}Operator" for kind in ("AllReduce", "AllGather", "Broadcast", "ReduceScatter")),
            "package.DistributedCommunicator",
        ),
        "over a group they make calls of torch.distributed",
    ),
    "package.create_ring_topology": "ranks of one process: test_collective_ops.py",
    **dict.fromkeys(
        (f"package.{name}" for name in ("CompressionHook", "PowerSGDHook", "share_buckets")), "DDP makes their calls"
    ),
    **dict.fromkeys(("package.MoEDispatcher", "package.TensorParallelLinear"), "layers, which make calls of the table"),
}


def test_every_public_call_has_a_row() -> None:
    lacking = missing({name for row in [*CALLS, *MESSAGES] for name in row.split(", ")}, ELSEWHERE)
    assert not lacking, lacking


def changes(name: str, passed: Passed) -> dict[str, tuple[str, Passed]]:
    """Returns, for each argument in which one rank may differ, the call that this rank makes, and its arguments."""
    every = {
        "call": ("dist.all_reduce" if "barrier" in name else "dist.barrier", passed),
        "size": (name, replace(passed, size=passed.size + 1)),
        "type": (name, replace(passed, dtype=torch.int32)),
        "op": (name, replace(passed, op=dist.ReduceOp.MAX)),
        "root": (name, replace(passed, root=1)),
        "compression": (name, replace(passed, how="bf16")),
    }
    return {what: every[what] for what in CALLS[name].differs}


def one_rank_differs(ctx: Context, names: list[str], size: int) -> dict[str, str]:
    """Makes every call with every change; the rank that differs changes from case to case."""
    begin(ctx, names)
    cases = [(name, what, other) for name in CALLS for what, other in changes(name, Passed(size)).items()]
    found = {}
    for number, (name, what, other) in enumerate(cases):
        who = number % ctx.world_size
        called, passed = other if ctx.rank == who else (name, Passed(size))
        text = refusal(lambda group, called=called, passed=passed: CALLS[called].run(group, passed))
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
    """Rule 5 over two hosts: 6 elements travel in a frame, 20,000 in a message, 100,000 without a copy."""
    check(run_fresh(one_rank_differs, world_size, hosts, size, env=ENV, timeout=180.0), over_hosts=True)


def messages_differ(ctx: Context, names: list[str], size: int) -> dict[str, tuple[str, str]]:
    """Returns for each call its error, and the error of a barrier after it in the same group."""
    begin(ctx, names)
    found = {}
    for number, (name, call) in enumerate(MESSAGES.items()):
        group: Any = dist.new_group(timeout=LIMIT)
        dist.barrier()  # as in `refusal`
        texts = []
        passed = Passed(size + (ctx.rank == number % 2))
        for each in (lambda call=call, g=group, p=passed: call.run(g, p), lambda g=group: dist.barrier(group=g)):
            try:
                each()
                texts.append("")
            except RuntimeError as error:
                texts.append(str(error))
        dist.barrier()
        dist.destroy_process_group(group)
        found[name] = (texts[0], texts[1])
    dist.destroy_process_group()
    return found


def check_messages(found: list[dict[str, tuple[str, str]]]) -> None:
    """The receiver gets the error. The group stays usable on all ranks, or fails on all ranks."""
    for name in MESSAGES:
        texts = [each[name] for each in found]
        assert any("bytes" in text and "Timed out" not in text for text, _ in texts[:2]), f"{name}: {texts}"
        assert texts[1][0] or "batch" in name or "ring" in name, f"{name}: {texts}"
        assert len({bool(after) for _, after in texts}) == 1, f"{name}: {texts}"
        assert not any("Timed out" in text for pair in texts for text in pair), f"{name}: {texts}"


@beyond_gloo("it compares nothing")
@pytest.mark.parametrize("size", [6, 20_000, 400_000])
def test_a_message_of_another_size_is_an_error_where_it_arrives(size: int) -> None:
    check_messages(run_fresh(messages_differ, 2, [], size))


@beyond_gloo("it compares nothing")
@pytest.mark.parametrize("size", [6, 400_000])
def test_a_message_of_another_size_is_an_error_over_hosts(hosts: list[str], size: int) -> None:
    check_messages(run_fresh(messages_differ, 2, hosts, size, env=ENV, timeout=120.0))


# --------------------------------------------------------------------------------------------------------- lists

Shape = tuple[int, torch.dtype]


def regions(call: Callable[[Any, T], object]) -> Callable[[Any, list[T]], None]:
    """Makes the calls for a list inside torch's coalescing manager, which turns them into one call."""

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
    package().fused_all_reduce(tensors, group=group)


def buffered(group: Any, tensors: list[T], op: Any = "sum") -> None:
    buffer = package().CommFusionBuffer()
    assert all(buffer.add_tensor(tensor) for tensor in tensors)
    buffer.flush_and_all_reduce(comm(group), op)


def gathered_lists(group: Any, tensors: list[T]) -> None:
    outputs = [[tensor.clone() for tensor in tensors] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(outputs, tensors, group=group)


@dataclass(frozen=True)
class Listed:
    """A call that takes a list, and the call that takes one tensor."""

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
    """Returns a random list of two to seven tensors; some are empty, and few lists have a large one."""
    sizes = [0, 1, 2, 3, 8, 100, 1000, *([5000, 70_000] if draw.random() < 0.3 else [])]
    types = [torch.float32, torch.int32, torch.float64] if mixed else [torch.float32]
    return [(draw.choice(sizes), draw.choice(types)) for _ in range(draw.randint(2, 7))]


def changed(draw: random.Random, shapes: list[Shape]) -> list[Shape]:
    """Returns the list with two tensors swapped, with one tensor split in two, or without one tensor; never the same
    list."""
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
    """Makes calls with random lists; one rank passes a list that differs. The tensors are passed as a list or one by
    one."""
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
    """Rule 5: lists with the same total bytes are distinguished by their tensors."""
    seeds = range(70 * world_size, 70 * world_size + 70)
    check(run_fresh(lists_differ, world_size, [], seeds, timeout=120.0), over_hosts=False)


@beyond_gloo("it compares nothing")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rule_05_lists_are_refused_wherever_their_tensors_are_over_hosts(hosts: list[str], world_size: int) -> None:
    """Rule 5 over two hosts. There, calls that were issued one by one may travel in one batch, which does not make them
    a list."""
    seeds = range(21 * world_size, 21 * world_size + 21)
    check(run_fresh(lists_differ, world_size, hosts, seeds, env=ENV, timeout=180.0), over_hosts=True)


def first_difference(ctx: Context, sizes: list[list[int]]) -> str:
    """Returns the error of lists with these sizes. Checks that no tensor was changed."""
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
    """The error names the tensor and its size on both ranks or, if one rank's list is shorter, both lengths."""
    texts = run_fresh(first_difference, 2, sizes)
    assert all("different lists of tensors to all_reduce(" in text for text in texts), texts
    assert any(words in text for text in texts), texts
