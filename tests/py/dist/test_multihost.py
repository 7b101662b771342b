"""Ranks on several hosts, played by network namespaces. Ranks of one host use shared memory, and our own schedules
connect the hosts.

The namespaces exist only during the test. They need root and the `ip` program; without these the tests are skipped with
that reason.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from harness import IS_GLOO, Context, beyond_gloo, expect_raises, launch, monitored_barrier, run_fresh
from net import enter
from reference import fold, make, same_bits

import torch_sagellm

ENV = {"GLOO_SOCKET_IFNAME": net.INTERFACE}


def on_hosts(ctx: Context, names: list[str]) -> list[float]:
    """Makes several kinds of calls on a group that spans the hosts."""
    warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own deprecated names
    enter(names[ctx.rank * len(names) // ctx.world_size])
    n, me = ctx.world_size, ctx.rank
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", n), timeout=timedelta(seconds=30))
    found = make(torch.float32, 1000, me)
    dist.all_reduce(found)
    total = fold("SUM", [make(torch.float32, 1000, rank) for rank in range(n)])
    torch.testing.assert_close(found, total)
    whole = torch.empty(n * 5)
    dist.all_gather_into_tensor(whole, torch.full((5,), float(me)))
    same_bits(whole, torch.arange(n).repeat_interleave(5).float(), "all_gather over hosts")
    work: Any = dist.broadcast(found, n - 1, async_op=True)
    work.wait()
    if me == 0:
        dist.send(torch.ones(7), n - 1, tag=3)
    elif me == n - 1:
        got = torch.zeros(7)
        dist.recv(got, 0, tag=3)
        assert got.tolist() == [1.0] * 7
    dist.barrier()
    assert dist.get_backend() == ctx.backend
    group = dist.new_group(list(range(n)))
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": me}, group=group)
    assert [each["rank"] for each in objects] == list(range(n))
    dist.destroy_process_group()
    return found[:3].tolist()


@pytest.mark.parametrize("world_size", [2, 4])
def test_rule_23_another_network_namespace_counts_as_another_host(hosts: list[str], world_size: int) -> None:
    """Rule 23: ranks in two namespaces are on two hosts. This is a normal case, so nothing is logged."""
    with launch(on_hosts, world_size, hosts, env=ENV) as job:
        values = job.values(90)
        outputs = [each.output() for each in job.ranks]
    assert all(value == values[0] for value in values)
    assert not any(outputs), outputs


def to_all_ranks(n: int, me: int, count: int) -> None:
    """all_to_all_single with blocks of equal size, also in place, and with blocks whose sizes differ."""
    block = count // 2

    def blocks(senders: list[int], receivers: list[int], size: Any) -> torch.Tensor:
        pairs = [(sender, to) for sender in senders for to in receivers]
        return torch.cat([torch.full((size(sender, to),), 10 * sender + to) for sender, to in pairs])

    every = list(range(n))
    for size in (lambda sender, to: block, lambda sender, to: block + 3 * sender + to):
        sent, expected = blocks([me], every, size), blocks(every, [me], size)
        found = torch.full_like(expected, -1)
        splits = [size(sender, me) for sender in every], [size(me, to) for to in every]
        dist.all_to_all_single(found, sent, *splits)
        same_bits(found, expected, f"all_to_all_single with blocks of about {block}")
    own = blocks([me], every, lambda sender, to: block)
    dist.all_to_all_single(own, own)
    same_bits(own, blocks(every, [me], lambda sender, to: block), f"all_to_all_single in place, {block}")


def on_place(ctx: Context, names: list[str], place: list[int], options: dict[str, Any]) -> None:
    """Every kind of collective with exact numbers. ``place`` has the host of each rank."""
    enter(names[place[ctx.rank]])
    n, me = ctx.world_size, ctx.rank
    if options and not IS_GLOO:
        from torch_sagellm._private import load

        options = {"pg_options": load.extension().Options(**options)}
    else:
        options = {}
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", n), timeout=timedelta(seconds=60), **options)
    for count in (0, 1, 1000, 30_000, 700_001):
        each = [make(torch.int64, count, rank) for rank in range(n)]
        found = each[me].clone()
        dist.all_reduce(found)
        same_bits(found, sum(each[1:], each[0].clone()), f"all_reduce of {count}")
        found = each[me].clone()
        dist.reduce(found, n - 1)
        if me == n - 1:
            same_bits(found, sum(each[1:], each[0].clone()), f"reduce of {count}")
        found = each[me].clone()
        dist.broadcast(found, 1)
        same_bits(found, each[1], f"broadcast of {count}")
        lists = [torch.empty_like(each[0]) for _ in range(n)]
        dist.all_gather(lists, each[me])
        for rank in range(n):
            same_bits(lists[rank], each[rank], f"all_gather of {count}")
        parts = [torch.full((count % 1000,), 10 * me + rank) for rank in range(n)]
        got = [torch.empty_like(parts[0]) for _ in range(n)]
        to_all_ranks(n, me, count)
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        same_bits(mine, torch.full_like(mine, sum(10 * rank + me for rank in range(n))), "reduce_scatter")
        dist.scatter(mine, parts if me == 0 else None, 0)
        same_bits(mine, torch.full_like(mine, me), "scatter")
        dist.gather(mine, got if me == 0 else None, 0)
        if me == 0:
            for rank in range(n):
                same_bits(got[rank], torch.full_like(mine, rank), "gather")
    works, tensors = [], [torch.full((50,), float(me + i)) for i in range(300)]
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
    for i, work in enumerate(works):
        work.wait()
        assert tensors[i].tolist() == [float(sum(rank + i for rank in range(n)))] * 50
    dist.all_reduce(halves := torch.full((9,), float(me)), op=dist.ReduceOp.AVG)
    assert halves.tolist() == [(n - 1) / 2] * 9
    sparse = torch.eye(4).to_sparse()
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == (n * torch.eye(4)).tolist()
    monitored_barrier(timedelta(seconds=30))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("place", "options"),
    [([0, 0, 1, 1], {}), ([0, 1, 0, 1], {"strict": True}), ([0, 1, 2], {"fusion": False}), ([0, 0, 1, 2, 2], {})],
)
def test_every_collective_over_hosts(three_hosts: list[str], place: list[int], options: dict[str, Any]) -> None:
    if IS_GLOO and options:
        pytest.skip("gloo has no such options")
    with launch(on_place, len(place), three_hosts, place, options, env=ENV) as job:
        job.values(150)


def first_inside(ctx: Context, names: list[str]) -> None:
    """The ranks of the first host call all_to_all long before those of the second host."""
    enter(names[ctx.rank // 2])
    n, me = ctx.world_size, ctx.rank
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", n), timeout=timedelta(seconds=60))
    signals = dist.FileStore(f"{ctx.tmp}/signals", n)
    for count in (1000, 300_000):
        sent = torch.cat([torch.full((count,), 10 * me + to) for to in range(n)])
        found = torch.full_like(sent, -1)
        if me >= 2:
            signals.wait([f"{count} 0", f"{count} 1"], timedelta(seconds=30))
        work: Any = dist.all_to_all_single(found, sent, async_op=True)
        if me < 2:
            mate, until = 1 - me, time.monotonic() + 30
            while bool((found[mate * count : (mate + 1) * count] != 10 * mate + me).any()):
                assert time.monotonic() < until, f"{count}: the block of this host's other rank has not come"
                time.sleep(0.01)
            assert not work.is_completed()
            signals.set(f"{count} {me}", "has its host's blocks")
        work.wait()
        same_bits(found, torch.cat([torch.full((count,), 10 * rank + me) for rank in range(n)]), f"blocks of {count}")
    dist.barrier()
    dist.destroy_process_group()


def test_all_to_all_moves_blocks_inside_a_host_while_others_are_in_flight(hosts: list[str]) -> None:
    with launch(first_inside, 4, hosts, env=ENV) as job:
        job.values(120)


def strict_bits(ctx: Context, names: list[str], place: list[int]) -> list[float]:
    if names:
        enter(names[place[ctx.rank]])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size), timeout=timedelta(seconds=60))
    found = make(torch.bfloat16, 5000, ctx.rank).mul(0.37)
    dist.all_reduce(found)
    dist.destroy_process_group()
    return found.float().tolist()


def test_rule_18_strict_gives_the_bits_of_one_host(hosts: list[str]) -> None:
    if IS_GLOO:
        pytest.skip("gloo has no strict mode")
    with launch(strict_bits, 4, hosts, [0, 1, 1, 0], env=ENV | {"SAGELLM_STRICT": "1"}) as job:
        far = job.values(90)
    with launch(strict_bits, 4, [], [], env={}) as job:
        near = job.values(90)
    assert all(each == near[0] for each in [*far, *near])


def many_small(ctx: Context, names: list[str], fusion: bool, rule: str) -> tuple[list[list[float]], int]:
    import torch_sagellm

    enter(names[ctx.rank])
    options = torch_sagellm.Options(fusion=fusion, algorithm=rule)
    store = dist.FileStore(f"{ctx.tmp}/store", ctx.world_size)
    ctx.init(store=store, timeout=timedelta(seconds=60), pg_options=options)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [make(dtype, 100, ctx.rank + 10 * i).mul(0.37) for i in range(200)]
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        found += [tensor.float().tolist() for tensor in tensors]
    batches = torch_sagellm.get_stats()["fused_batches"]
    dist.destroy_process_group()
    return found, batches


@pytest.mark.parametrize("rule", ["", "*:0-=recursive_doubling"])
def test_rule_18_small_sums_have_equal_bits_fused_and_alone(four_hosts: list[str], rule: str) -> None:
    """docs/determinism.md promises this by default and under one rule for all sizes. Four hosts, because over two hosts
    all orders of summation give the same bits."""
    if IS_GLOO:
        pytest.skip("gloo has no such options")
    with launch(many_small, 4, four_hosts, True, rule, env=ENV) as job:
        fused = job.values(90)
    with launch(many_small, 4, four_hosts, False, rule, env=ENV) as job:
        alone = job.values(90)
    assert all(bits == fused[0][0] for bits, _ in [*fused, *alone])
    assert all(batches > 0 for _, batches in fused)
    assert all(batches == 0 for _, batches in alone)


def other_call(ctx: Context, names: list[str]) -> str:
    enter(names[ctx.rank // 2])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size), timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(3))
    try:
        dist.all_reduce(torch.ones(10 if ctx.rank < 2 else 11))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_rule_05_different_calls_on_two_hosts_show_both(hosts: list[str]) -> None:
    if IS_GLOO:
        pytest.skip("gloo ends the process here")
    with launch(other_call, 4, hosts, env=ENV) as job:
        errors = job.values(60)
    for error in errors:
        assert "all_reduce(40 bytes" in error, error
        assert "all_reduce(44 bytes" in error, error


def killed(ctx: Context, names: list[str]) -> str:
    enter(names[ctx.rank // 2])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size), timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    if ctx.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    text = "no error"
    try:
        dist.all_reduce(torch.ones(10))
    except RuntimeError as error:
        text = str(error)
    dist.shrink_group([3])
    total = torch.full((5000,), float(ctx.rank))
    dist.all_reduce(total)
    assert (total == 3).all() and dist.get_world_size() == 3
    if ctx.rank == 0:
        dist.send(total, 2)
    elif ctx.rank == 2:
        dist.recv(total.fill_(9), 0)
        assert (total == 3).all()
    dist.barrier()
    dist.destroy_process_group()
    return text


def test_a_killed_rank_fails_the_other_host_long_before_the_deadline(hosts: list[str]) -> None:
    """The other ranks then shrink the group, over both hosts, and continue."""
    if IS_GLOO:
        pytest.skip("a test of our errors")
    with launch(killed, 4, hosts, env=ENV) as job:
        outcomes = job.wait(40)
    for rank in range(3):
        error = outcomes[rank].value
        assert error, outcomes[rank].error
        assert "rank 3" in error or "lost the connection" in error, error


def left_in_the_middle(ctx: Context, names: list[str]) -> tuple[int, float]:
    """Rank 0 destroys a group while it runs a large operation, and continues without another call to the backend.

    The world's group keeps the connections open. Returns how many operations failed on this rank, and the longest wait.
    """
    enter(names[ctx.rank])
    n, me = ctx.world_size, ctx.rank
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", n), timeout=timedelta(seconds=60))
    signals = dist.FileStore(f"{ctx.tmp}/signals", n)
    data, parts = torch.ones(4 << 20), torch.ones(n, 1 << 20)
    failed, longest = 0, 0.0
    for trial in range(24):
        group = dist.new_group()
        dist.barrier()
        calls: list[Any] = [
            lambda group=group: dist.broadcast(data, 1, group=group, async_op=True),
            lambda group=group: dist.all_reduce(data, group=group, async_op=True),
            lambda group=group: dist.all_to_all_single(parts, parts.clone(), group=group, async_op=True),
        ]
        begin = time.monotonic()
        if me == 0:
            calls[trial % 3]()
            time.sleep(0.0005 * (trial % 12))
            dist.destroy_process_group(group)
            signals.wait([f"{trial} {rank}" for rank in range(1, n)], timedelta(seconds=30))
            continue
        try:  # the group may have failed before this rank's call
            calls[trial % 3]().wait()
        except RuntimeError:
            failed += 1
        longest = max(longest, time.monotonic() - begin)
        signals.set(f"{trial} {me}", "has ended")
    dist.barrier()
    dist.destroy_process_group()
    return failed, longest


@beyond_gloo("its ranks wait for their timeout")
def test_rule_21_a_rank_that_leaves_in_the_middle_of_an_operation_fails_the_others_soon(three_hosts: list[str]) -> None:
    with launch(left_in_the_middle, 3, three_hosts, env=ENV) as job:
        found = job.values(100)[1:]
    assert any(failed for failed, _ in found), found
    assert all(longest < 10 for _, longest in found), found


def strided_and_late(ctx: Context, names: list[str]) -> None:
    enter(names[ctx.rank // 2])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size), timeout=timedelta(seconds=60))
    for turn in range(4):
        # Several segments on both lanes, through temporaries: one lane must fill a temporary before the other uses it.
        whole = torch.full((2, 3_000_000), float(ctx.rank + turn), dtype=torch.int64).t()
        assert not whole.is_contiguous()
        dist.all_reduce(whole)
        assert whole.eq(6 + 4 * turn).all()
        dist.broadcast(whole.fill_(ctx.rank), 2)
        assert whole.eq(2).all()
    data = torch.full((500_000,), float(ctx.rank))
    if ctx.rank >= 2:
        time.sleep(3)  # until the root has left
    dist.broadcast(data, 0)
    assert data.eq(0).all()
    dist.destroy_process_group()


def test_rule_21_strided_segments_and_a_root_that_leaves_early(hosts: list[str]) -> None:
    """Data that a rank has sent is delivered although the rank leaves; strided tensors of several segments arrive
    complete."""
    if IS_GLOO:
        pytest.skip("a test of our lanes")
    with launch(strided_and_late, 4, hosts, env=ENV) as job:
        job.values(120)


def half_local(ctx: Context, names: list[str]) -> None:
    enter(names[ctx.rank // 2])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size), timeout=timedelta(seconds=30))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[ctx.rank // 2]
    found = torch.full((10,), float(ctx.rank))
    dist.all_reduce(found, group=mine)
    assert found.tolist() == [float(4 * (ctx.rank // 2) + 1)] * 10
    dist.barrier()
    dist.destroy_process_group()


def test_groups_within_one_host_keep_shared_memory(hosts: list[str]) -> None:
    """The default group spans hosts. Its subgroups within one host are not delegated."""
    with launch(half_local, 4, hosts, env=ENV) as job:
        job.values(90)
        outputs = [each.output() for each in job.ranks]
    if not IS_GLOO:
        assert not any(outputs), outputs


def order_over_hosts(ctx: Context, names: list[str]) -> str:
    """A barrier ends after all earlier collectives. Messages and collectives on the same memory keep their order. At
    the end the ranks pass different lists of sizes to an all_gather; returns the error's text."""
    enter(names[ctx.rank * len(names) // ctx.world_size])
    n, me, size = ctx.world_size, ctx.rank, 50_000
    store = dist.FileStore(f"{ctx.tmp}/store", n)
    ctx.init(store=store, timeout=timedelta(seconds=30))
    for turn in range(3):
        tensors = [torch.full((size,), float(i + turn)) for i in range(12)]
        sparse = torch.eye(100).to_sparse()
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        dist.all_reduce(sparse, async_op=True)
        dist.barrier()
        wrong = [i for i, tensor in enumerate(tensors) if not bool((tensor == (i + turn) * n).all())]
        assert not wrong, f"turn {turn}: operations {wrong} had not ended"
        assert torch.equal(sparse.to_dense(), torch.eye(100) * n), "the sparse one had not ended"
    works: list[Any]
    tensor = torch.ones(size)
    if me == 0:
        works = [dist.all_reduce(tensor, async_op=True), dist.isend(tensor, n - 1)]
    else:
        time.sleep(0.1)
        works = [dist.all_reduce(tensor, async_op=True)]
        if me == n - 1:
            got = torch.zeros(size)
            dist.recv(got, 0)
            assert bool((got == n).all()), f"a message of {got[0]} overtook the all_reduce"
    for work in works:
        work.wait()
    tensor = torch.zeros(size)
    works = [dist.irecv(tensor, n - 1)] if me == 0 else []
    if me == n - 1:
        time.sleep(0.1)
        dist.send(torch.full((size,), 5.0), 0)
    works.append(dist.broadcast(tensor, 0, async_op=True))
    for work in works + works[::-1]:  # a second wait for the same message returns like the first
        work.wait()
    assert bool((tensor == 5).all()), f"a broadcast of {tensor[0]} overtook the message"
    # A mismatch cuts the link immediately, even if another rank has not finished an earlier operation. So every rank
    # waits until all have left the barrier.
    dist.barrier()
    store.set(f"left {me}", "")
    store.wait([f"left {rank}" for rank in range(n)])
    sizes = [size] * n
    # The sum of the sizes is the same, but this rank's block does not have the size that its peers expect.
    sizes[me - 1] += 1000
    text = expect_raises(
        RuntimeError, lambda: dist.all_gather([torch.empty(each) for each in sizes], torch.ones(sizes[me]))
    )
    dist.destroy_process_group()
    return text


def messages_over_hosts(ctx: Context, names: list[str]) -> None:
    """Messages between hosts behave as on one host: with dropped Works, with strided and empty tensors, from any
    source, and with two messages on the same memory."""
    enter(names[ctx.rank * len(names) // ctx.world_size])
    n, me, last = ctx.world_size, ctx.rank, ctx.world_size - 1
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", n), timeout=timedelta(seconds=30))
    for size in (1, 5_000, 300_000):
        tensor = torch.full((size,), float(me))
        if me == last:
            dist.irecv(tensor, 0)  # the Work is dropped
        elif me == 0:
            dist.isend(torch.full((size,), 7.0), last)
        dist.broadcast(tensor, last)  # must run after the message, because it uses the same memory
        assert bool((tensor == 7).all()), f"{tensor[0]} of {size}"
        square = torch.arange(float(max(size // 100, 2)) ** 2).reshape(max(size // 100, 2), -1)
        if me == 0:
            dist.send(square[:, 1], last, tag=1)
            dist.send(square.t()[::2], last, tag=1)
        elif me == last:
            got = torch.zeros_like(square)
            dist.recv(got[:, 0], tag=1)
            assert torch.equal(got[:, 0], square[:, 1]) and not got[:, 1:].any()
            rows = torch.zeros(len(square), (len(square) + 1) // 2).t()
            dist.recv(rows, 0, tag=1)
            assert torch.equal(rows, square.t()[::2])
    none = torch.empty(0)
    if me == last:
        assert dist.recv(none) == 0 and dist.recv(none, 0) == 0
        found = torch.empty(2)
        senders = sorted(dist.recv(found, tag=2) for _ in range(n - 1))
        assert senders == list(range(n - 1)) and found[0] in senders
    else:
        if me == 0:
            dist.send(none, last)
            dist.send(none, last)
        dist.send(torch.full((2,), float(me)), last, tag=2)
    # Each rank sends before it receives, and receives into the memory that it sends.
    tensor = torch.full((300_000,), float(me))
    works = [dist.isend(tensor, (me + 1) % n, tag=3), dist.irecv(tensor, (me - 1) % n, tag=3)]
    for work in works:
        work.wait()
    assert bool((tensor == (me - 1) % n).all())
    if n == 2:
        wrong = torch.zeros(100_000 if me else 200_000)
        text = expect_raises(RuntimeError, lambda: dist.send(wrong, 1) if me == 0 else dist.recv(wrong, 0))
        assert "800000 bytes" in text, text
    if me == 0:
        text = expect_raises(RuntimeError, lambda: monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True))
        assert ", ".join(str(rank) for rank in range(1, n)) + " failed to pass" in text, text
        dist.send(none, last, tag=4)
    elif me == last:
        dist.recv(none, 0, tag=4)
    dist.barrier()
    if me != 0:
        # This barrier has failed on rank 0.
        expect_raises(RuntimeError, lambda: monitored_barrier(timedelta(seconds=5)))
    monitored_barrier(timedelta(seconds=30))  # the failed barrier has not poisoned the group
    dist.destroy_process_group()


@beyond_gloo("it cancels dropped receives, refuses strided tensors and orders nothing by memory")
@pytest.mark.parametrize("world_size", [2, 4])
def test_rules_04_10_and_20_messages_are_over_hosts_what_they_are_on_one(hosts: list[str], world_size: int) -> None:
    run_fresh(messages_over_hosts, world_size, hosts, env=ENV)


@beyond_gloo("it orders nothing by memory and compares no lists")
@pytest.mark.parametrize("world_size", [2, 4])
def test_rules_04_05_and_33_hold_over_hosts(hosts: list[str], world_size: int) -> None:
    """A barrier ends after earlier collectives, operations on the same memory keep their order, and lists of sizes must
    agree."""
    for text in run_fresh(order_over_hosts, world_size, hosts, env=ENV):
        assert "sizes" in text, text


def sockets() -> int:
    """Returns the number of open TCP sockets of this process."""
    own = {
        os.stat(f"/proc/self/fd/{fd}").st_ino
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    with open("/proc/self/net/tcp") as table:
        return sum(int(line.split()[9]) in own for line in list(table)[1:])


def further_groups(ctx: Context, names: list[str]) -> tuple[int, int, int, int]:
    """Returns the numbers of TCP sockets with one group, with nine groups, with one group again, and after the last
    group has ended."""
    enter(names[ctx.rank * len(names) // ctx.world_size])
    n, me = ctx.world_size, ctx.rank
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", n), timeout=timedelta(seconds=30))
    dist.barrier()
    one = sockets()
    groups = [dist.new_group(list(range(n))) for _ in range(8)]
    # The link was measured for the first group only, so all groups predict the same time on every rank.
    predicted = [torch_sagellm.explain("all_reduce", 1 << 20, group=group).predicted for group in [None, *groups]]
    assert len(set(predicted)) == 1 and predicted[0], predicted
    for group in groups:
        tensor = torch.full((3,), float(me))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [n * (n - 1) / 2] * 3
    nine = sockets()
    for group in groups:
        dist.destroy_process_group(group)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [n] * 3
    again = sockets()
    del groups, group
    dist.destroy_process_group()
    until = time.monotonic() + 10
    while sockets() > 1 and time.monotonic() < until:
        time.sleep(0.02)
    return one, nine, again, sockets()


@beyond_gloo("each of its groups connects all ranks anew")
@pytest.mark.parametrize("world_size", [2, 4])
def test_rule_23_further_groups_over_hosts_open_no_connection(hosts: list[str], world_size: int) -> None:
    """When a further group ends, it closes no connection that other groups use. At the end one listening socket
    remains, by which `recover` finds out whether the process lives."""
    for one, nine, again, after in run_fresh(further_groups, world_size, hosts, env=ENV):
        # A connection to each other rank and a listening socket; after the last group only a listening socket.
        assert (one, nine, again, after) == (world_size + 1, world_size + 1, world_size + 1, 1)


def ends_while_made(ctx: Context, names: list[str]) -> list[tuple[int, int, list[str]]]:
    """Returns the numbers of TCP sockets and descriptors and the names of the threads, after the first groups and after
    many more."""
    enter(names[ctx.rank * len(names) // ctx.world_size])
    n = ctx.world_size
    # The default group uses gloo and none of our connections. So each group created below is the only user of our
    # connections, and closes them when it ends.
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", n), timeout=timedelta(seconds=60), backend="gloo")

    def make_one() -> Any:
        group = dist.new_group(list(range(n)), backend=ctx.backend)
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [n] * 3
        return group

    def count() -> tuple[int, int, list[str]]:
        threads = []
        for thread in os.listdir("/proc/self/task"):
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),
                open(f"/proc/self/task/{thread}/comm") as comm,
            ):
                threads.append(comm.read().strip())
        return sockets(), len(os.listdir("/proc/self/fd")), sorted(threads)

    def some(turns: int) -> tuple[int, int, list[str]]:
        group = make_one()
        for _ in range(turns):
            ending = threading.Thread(target=dist.destroy_process_group, args=[group])
            ending.start()
            group = make_one()
            ending.join()
        dist.destroy_process_group(group)
        del group
        dist.barrier()
        found, until = count(), time.monotonic() + 10
        while time.monotonic() < until:  # until the numbers no longer change
            time.sleep(0.5)
            found, before = count(), found
            if found == before:
                break
        return found

    found = [some(3), some(15)]
    dist.destroy_process_group()
    return found


@beyond_gloo("each of its groups connects all ranks anew")
@pytest.mark.parametrize("world_size", [2, 4])
def test_rule_23_a_group_is_made_while_the_last_one_ends(hosts: list[str], world_size: int) -> None:
    for first, last in run_fresh(ends_while_made, world_size, hosts, env=ENV):
        assert last[0] <= first[0], (first, last)
        # A thread that serves all groups starts when it is first needed, which may be after the first count.
        assert last[1] <= first[1] + 3 and len(last[2]) <= len(first[2]) + 3, (first, last)
