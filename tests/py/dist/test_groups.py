"""Groups: permuted, nested, many at the same time, used from several threads, split, created again."""

from __future__ import annotations

import itertools
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import inputs_of, members, needs_order_given, same_reduced
from harness import IS_GLOO, Context, beyond_gloo, run_fresh, run_ranks, torch_at_least
from reference import fold, make, same_bits


def permuted(ctx: Context) -> None:
    for ranks in itertools.permutations(range(ctx.world_size)):
        (group,) = members([ranks])
        me = dist.get_rank(group)
        assert ranks[me] == ctx.rank and dist.get_global_rank(group, me) == ctx.rank
        inputs = [make(torch.float32, 700, 10 + rank) for rank in ranks]
        outputs = [torch.empty(700) for _ in ranks]
        dist.all_gather(outputs, inputs[me], group=group)
        for found, each in zip(outputs, inputs, strict=True):
            same_bits(found, each, f"all_gather in {ranks}")
        total = inputs[me].clone()
        dist.all_reduce(total, group=group)
        same_reduced(total, fold("SUM", inputs), f"all_reduce in {ranks}")
        for root in ranks:
            found = inputs[me].clone()
            dist.broadcast(found, src=root, group=group)
            same_bits(found, make(torch.float32, 700, 10 + root), f"broadcast from {root} in {ranks}")
        found = torch.empty(3)
        dist.scatter(
            found,
            [torch.full((3,), float(i)) for i in range(len(ranks))] if me == 0 else None,
            group=group,
            group_src=0,
        )
        assert found.tolist() == [float(me)] * 3
        dist.destroy_process_group(group)


@pytest.mark.quick
@needs_order_given
@pytest.mark.parametrize("world_size", [2, 3])
def test_groups_in_every_order_of_ranks(world_size: int) -> None:
    """Pitfall 8: roots are group ranks on the wire and global ranks in the call. The order of ranks is the group's."""
    run_ranks(permuted, world_size)


def subsets(ctx: Context) -> None:
    n = ctx.world_size
    lists = [list(each) for size in range(1, n + 1) for each in itertools.combinations(range(n), size)]
    groups = members(lists)
    for turn in range(3):
        for ranks, group in zip(lists, groups, strict=True):
            if ctx.rank not in ranks:
                continue
            inputs = {rank: make(torch.float32, 50 + turn, rank + turn) for rank in ranks}
            found = inputs[ctx.rank].clone()
            dist.all_reduce(found, group=group)
            same_reduced(found, fold("SUM", [inputs[rank] for rank in ranks]), f"group {ranks}")
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [3, 4])
def test_every_subset_is_a_group(world_size: int) -> None:
    """All groups of one to four ranks exist at the same time."""
    run_ranks(subsets, world_size)


def many_groups(ctx: Context, count: int) -> None:
    groups = members([range(ctx.world_size)] * count)
    for turn in range(3):
        works, found = [], []
        for i, group in enumerate(groups):
            found.append(torch.full((100 + i,), float(ctx.rank + i + turn)))
            works.append(dist.all_reduce(found[-1], group=group, async_op=True))
        for work in reversed(works):
            work.wait()
        for i, each in enumerate(found):
            assert (each == sum(rank + i + turn for rank in range(ctx.world_size))).all(), (i, each)
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_25_many_groups_with_equal_members(world_size: int) -> None:
    """Rule 25: thirty groups of the same ranks, one operation in flight on each."""
    run_ranks(many_groups, world_size, 10 if IS_GLOO else 30)


def opposite_orders(ctx: Context) -> None:
    one, two = members([range(ctx.world_size)] * 2)
    for turn in range(30):
        a, b = torch.full((5,), 1.0 + turn), torch.full((70_000,), 2.0 + turn)
        first = (one, a, two, b) if ctx.rank == 0 else (two, b, one, a)
        works = [dist.all_reduce(first[1], group=first[0], async_op=True)]
        works.append(dist.all_reduce(first[3], group=first[2], async_op=True))
        for work in works if turn % 2 else reversed(works):
            work.wait()
        assert (a == (1.0 + turn) * ctx.world_size).all() and (b == (2.0 + turn) * ctx.world_size).all()
    for group in (one, two):
        dist.destroy_process_group(group)


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_25_ranks_may_issue_in_different_orders_on_two_groups(world_size: int) -> None:
    """Rules 6 and 25: rank 0 issues first on group one, the other ranks first on group two; waits in either order."""
    run_ranks(opposite_orders, world_size)


def crossed_waits(ctx: Context) -> None:
    one, two = members([range(ctx.world_size)] * 2)
    for _ in range(20):
        a, b = torch.ones(3), torch.ones(200_000)
        first, second = (one, two) if ctx.rank == 0 else (two, one)
        tensors = {one: a, two: b}
        pending = dist.all_reduce(tensors[first], group=first, async_op=True)
        # This synchronous call must also drive the pending call of the other group.
        dist.all_reduce(tensors[second], group=second)
        pending.wait()
        assert (a == ctx.world_size).all() and (b == ctx.world_size).all()
    for group in (one, two):
        dist.destroy_process_group(group)


@pytest.mark.quick
def test_rule_06_a_blocked_thread_drives_every_group() -> None:
    """Rules 6 and 7: each rank blocks in a synchronous call on the group in which the other rank has only an
    asynchronous call pending."""
    run_ranks(crossed_waits, 2)


def sync_meets_async(ctx: Context) -> None:
    for turn in range(40):
        tensor = torch.full((1 + 997 * (turn % 5),), float(ctx.rank + turn))
        if (turn + ctx.rank) % 2:
            dist.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            if turn % 3 == 0:
                while not work.is_completed():
                    pass
            work.wait()
        assert (tensor == sum(rank + turn for rank in range(ctx.world_size))).all()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_07_one_rank_sync_another_async(world_size: int) -> None:
    """Rule 7: each rank chooses for itself whether a call is synchronous."""
    run_ranks(sync_meets_async, world_size)


def threads(ctx: Context, count: int, turns: int) -> None:
    groups = members([range(ctx.world_size)] * count)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(turns):
                size = [3, 1000, 20_001][(turn + index) % 3]
                inputs = [make(torch.float32, size, 100 * index + turn + 7 * rank) for rank in range(ctx.world_size)]
                found = inputs[ctx.rank].clone()
                dist.all_reduce(found, group=groups[index])
                same_reduced(found, fold("SUM", inputs), f"thread {index}, turn {turn}")
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for each in running:
        each.start()
    for each in running:
        each.join(60)
        assert not each.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_06_threads_each_with_a_group(world_size: int) -> None:
    """Pitfall 9 and rule 8: groups used from several threads do not block each other, and the interpreter's lock does
    not block them either."""
    run_ranks(threads, world_size, 4, 20)


def depth(ctx: Context, count: int) -> None:
    inputs = [inputs_of(ctx.world_size, torch.float32, 1 + 37 * (i % 90), i) for i in range(count)]
    found = [each[ctx.rank].clone() for each in inputs]
    works = [dist.all_reduce(each, async_op=True) for each in found]
    order = range(count) if ctx.rank % 2 else reversed(range(count))
    for i in order:
        works[i].wait()
    for i, each in enumerate(found):
        same_reduced(each, fold("SUM", inputs[i]), f"operation {i} of {count}")


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("count", [100, 700])
def test_rule_03_deep_queue_of_async_operations(world_size: int, count: int) -> None:
    """Rules 3 and 14: hundreds of operations are issued before the first wait. Ranks wait for them in opposite
    orders."""
    run_ranks(depth, world_size, count)


def step_by_step(ctx: Context) -> None:
    for turn in range(60):
        count = [1, 2000, 60_000][turn % 3]
        tensors = [torch.full((count,), float(turn + i + ctx.rank)) for i in range(4)]
        if ctx.rank == 0:
            for each in tensors:
                work = dist.all_reduce(each, async_op=True)
                assert work is not None
                work.wait()
        else:
            works = [dist.all_reduce(each, async_op=True) for each in tensors]
            for work in works:
                assert work is not None
                work.wait()
        for i, each in enumerate(tensors):
            assert (each == sum(turn + i + rank for rank in range(ctx.world_size))).all()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_13_one_rank_waits_for_each_before_it_issues_the_next(world_size: int) -> None:
    """Rule 13: rank 0 issues operation k + 1 only after k has ended. The other ranks issue four at a time."""
    run_ranks(step_by_step, world_size)


def far_ahead(ctx: Context) -> None:
    count = 3000
    tensors = [torch.full((1 + i % 300,), float(i)) for i in range(count)]
    if ctx.rank == 0:
        works = [dist.all_reduce(each, async_op=True) for each in tensors]
        for work in works:
            assert work is not None
            work.wait()
    else:
        for i, each in enumerate(tensors):
            if i % 500 == 0:
                time.sleep(0.02)
            dist.all_reduce(each)
    for i, each in enumerate(tensors):
        assert (each == float(i) * ctx.world_size).all(), i


@pytest.mark.quick
def test_rule_14_a_rank_far_ahead() -> None:
    """Rule 14: one rank has issued thousands of operations, which the other rank issues one by one."""
    run_ranks(far_ahead, 2)


def mixed_kinds(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    for _ in range(10):
        works: list[Any] = []
        checks: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        for i in range(40):
            count = [1, 100, 3000, 50_000][(i // 5) % 4]
            inputs = inputs_of(n, torch.float32, count, i)
            kind = i % 5
            if kind == 0:
                out = inputs[me].clone()
                works.append(dist.all_reduce(out, async_op=True))
                checks.append((out, fold("SUM", inputs), "all_reduce"))
            elif kind == 1:
                out = inputs[me].clone()
                works.append(dist.broadcast(out, i % n, async_op=True))
                checks.append((out, inputs[i % n], "broadcast"))
            elif kind == 2:
                out = torch.empty(n * count)
                works.append(dist.all_gather_into_tensor(out, inputs[me], async_op=True))
                checks.append((out, torch.cat(inputs), "all_gather"))
            elif kind == 3:
                works.append(dist.barrier(async_op=True))
            else:
                out = torch.empty(n * count)
                blocks = [[make(torch.float32, count, a * 8 + b) for b in range(n)] for a in range(n)]
                works.append(dist.all_to_all_single(out, torch.cat(blocks[me]), async_op=True))
                checks.append((out, torch.cat([blocks[a][me] for a in range(n)]), "all_to_all"))
        for work in works:
            work.wait()
        for found, expected, what in checks:
            same_reduced(found, expected, what)


@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_01_mixed_kinds_keep_one_order(world_size: int) -> None:
    """Rule 1: forty operations of five kinds and four sizes are in flight."""
    run_ranks(mixed_kinds, world_size)


def dropped(ctx: Context) -> None:
    found = [torch.full((10,), float(i + ctx.rank)) for i in range(50)]
    for each in found:
        dist.all_reduce(each, async_op=True)  # the Work is dropped, and no thread waits
    dist.barrier()
    last = torch.ones(1)
    dist.all_reduce(last)
    for i, each in enumerate(found):
        assert (each == sum(i + rank for rank in range(ctx.world_size))).all(), (i, each)
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True)  # the program keeps neither the Work nor the tensor
    dist.barrier()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_10_work_and_tensors_dropped_at_once(world_size: int) -> None:
    """Rule 10 and pitfall 5: the operation itself keeps what it needs."""
    run_ranks(dropped, world_size)


def group_of_one(ctx: Context) -> None:
    own = [dist.new_group([rank]) for rank in range(ctx.world_size)][ctx.rank]
    found = torch.arange(5.0)
    dist.all_reduce(found, group=own)
    dist.broadcast(found, ctx.rank, group=own)
    out = torch.empty(5)
    dist.all_gather_into_tensor(out, found, group=own)
    dist.reduce_scatter_tensor(out, found, group=own)
    dist.all_to_all_single(out, found, group=own)
    dist.barrier(group=own)
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    dist.destroy_process_group(own)


def test_groups_of_one_rank() -> None:
    """Every operation in a group of one rank. (torch itself refuses a group without ranks.)"""
    run_ranks(group_of_one, 2)


def split(ctx: Context) -> None:
    import torch_sagellm

    n = ctx.world_size
    ranks = [[rank for rank in range(n) if rank % 2 == part] for part in range(2)]
    child = dist.split_group(split_ranks=[each for each in ranks if each])
    mine = ranks[ctx.rank % 2]
    assert dist.get_process_group_ranks(child) == mine
    found = torch.full((10,), float(ctx.rank))
    dist.all_reduce(found, group=child)
    assert (found == sum(mine)).all()
    again = dist.split_group(split_ranks=[[*range(n)]], timeout=timedelta(seconds=7))
    dist.all_reduce(found, group=again)
    dist.destroy_process_group(again)
    dist.destroy_process_group(child)
    # A group that a delegate serves is split into the same ranks, twice.
    parent = dist.new_group(range(n), pg_options=torch_sagellm.Options(engine="delegate"))
    for _ in range(2):
        child = dist.split_group(parent, split_ranks=[[*range(n)]])
        dist.all_reduce(found.fill_(1), group=child)
        assert (found == n).all()
        dist.destroy_process_group(child)
    dist.destroy_process_group(parent)


@pytest.mark.skipif(not torch_at_least(2, 15), reason="split_group of older torch needs a device")
@pytest.mark.parametrize("world_size", [2, 3])
def test_split_group(world_size: int) -> None:
    """Creates a child by split, ends it, and creates the next."""
    run_ranks(split, world_size)


def options(ctx: Context) -> None:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=30)
    assert backend.name().lower() == ctx.backend
    if hasattr(backend.options, "clone"):
        assert backend.options.clone()._timeout == backend.options._timeout
    group = dist.new_group(timeout=timedelta(seconds=17))
    inner = group._get_backend(torch.device("cpu"))
    assert inner.options._timeout == timedelta(seconds=17)
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timedelta(seconds=5), group)
    dist.barrier(group=group)
    assert dist.get_backend(group) == ctx.backend
    dist.destroy_process_group(group)


def test_options_and_names() -> None:
    """getBackendOptions with its timeout and clone, and the backend's name."""
    run_ranks(options, 2)


def options_of(group: Any) -> dict[str, Any]:
    options = group._get_backend(torch.device("cpu")).options
    names = [
        "engine",
        "delegate",
        "fusion",
        "strict",
        "algorithm",
        "vendor",
        "topology",
        "measure_link",
        "numa",
        "soft_timeout",
        "verify",
    ]
    return {name: getattr(options, name) for name in names}


def inherits(ctx: Context) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    import torch_sagellm

    given = torch_sagellm.Options(
        engine="delegate", fusion=False, algorithm="*:0-=rounds(128KiB)", vendor="host", soft_timeout=7
    )
    ctx.init(pg_options=given, timeout=timedelta(seconds=30))
    everyone = options_of(dist.group.WORLD)
    assert everyone["engine"] == "delegate" and everyone["soft_timeout"] == 7
    for group in (dist.new_group(), dist.new_group([0, 1]), dist.new_group([ctx.rank], use_local_synchronization=True)):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            assert options_of(group) == everyone
    assert "delegate" in dist.new_group()._get_backend(torch.device("cpu")).describe()
    assert options_of(init_device_mesh("cpu", (ctx.world_size,)).get_group()) == everyone
    short = dist.new_group(timeout=timedelta(seconds=11))._get_backend(torch.device("cpu")).options
    assert short._timeout == timedelta(seconds=11), "the timeout is an argument"
    own = dist.new_group(pg_options=torch_sagellm.Options(strict=True))
    assert options_of(own) == options_of(own) | {"engine": "auto", "fusion": True, "strict": True, "soft_timeout": None}
    dist.destroy_process_group()

    # If the default group is not ours, a new group inherits the options of our first group that has all the ranks.
    ctx.init(backend="gloo", key=f"{ctx.key}/second")
    first = dist.new_group(backend="sagellm", pg_options=torch_sagellm.Options(soft_timeout=3))
    dist.new_group(backend="sagellm", pg_options=torch_sagellm.Options(soft_timeout=4))
    assert options_of(dist.new_group(backend="sagellm"))["soft_timeout"] == 3
    dist.destroy_process_group(first)
    assert options_of(dist.new_group(backend="sagellm"))["soft_timeout"] == 4
    dist.destroy_process_group()
    ctx.init(key=f"{ctx.key}/third")
    assert options_of(dist.group.WORLD)["soft_timeout"] is None
    dist.destroy_process_group()


@beyond_gloo("has none of these options")
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_group_without_options_has_those_of_the_group_that_has_its_ranks(world_size: int) -> None:
    """new_group and DeviceMesh pass no options, so a group inherits those of a group that has all of its ranks."""
    run_fresh(inherits, world_size)


def one_backend_object(ctx: Context) -> None:
    group = dist.distributed_c10d._get_default_group()
    assert group._device_types and torch.device("cpu") in group._device_types
    assert group._get_backend(torch.device("cpu")) is not None
    if len(group._device_types) > 1:
        names = {id(group._get_backend(device)) for device in group._device_types}
        assert len(names) <= len(group._device_types)
    assert not torch.cuda.is_available() or not torch.cuda.is_initialized()


@pytest.mark.quick
def test_pitfall_03_devices_share_one_object_and_cuda_stays_untouched() -> None:
    """Pitfall 3: creating and using a group in a CPU program does not initialise CUDA."""
    run_ranks(one_backend_object, 2)


def by_name(ctx: Context, name: str) -> None:
    ctx.init(backend=name)
    found = torch.ones(4)
    dist.all_reduce(found)
    assert found.tolist() == [2.0] * 4
    dist.destroy_process_group()


@pytest.mark.parametrize("form", ["{}", "cpu:{}", "upper", "cpu:{},cuda:gloo"])
def test_forms_of_the_name(form: str) -> None:
    """Plain, upper case, for the CPU only, and together with another backend (pitfall 4)."""
    from harness import BACKEND

    name = BACKEND.upper() if form == "upper" else form.format(BACKEND)
    run_fresh(by_name, 2, name)


def slow_creation(ctx: Context) -> None:
    if ctx.rank == 1:
        time.sleep(1.0)
    ctx.init()
    tensor = torch.ones(3)
    if ctx.rank == 0:
        for peer in range(1, ctx.world_size):
            work = dist.isend(tensor, peer)
            assert work is not None
            work.wait()
    else:
        dist.recv(tensor, 0)
    dist.destroy_process_group()


def test_rule_23_groups_are_made_by_their_creator_not_by_the_first_operation() -> None:
    """Rule 23: the creation waits for a late rank, and a first isend needs no other ranks."""
    run_fresh(slow_creation, 3)


def alone(ctx: Context) -> str:
    from harness import expect_raises

    start = time.monotonic()
    text = expect_raises((RuntimeError, ValueError), lambda: ctx.init(timeout=timedelta(seconds=2), world_size=2))
    assert time.monotonic() - start < 15
    return text


@beyond_gloo("names no rank")
def test_rule_23_creation_without_the_others_ends_at_the_timeout() -> None:
    """Rule 23: if a rank does not join before the group's timeout, the error names it."""
    (text,) = run_fresh(alone, 1)
    assert "rank 1" in text, text


def stale_keys(ctx: Context) -> None:
    for turn in range(5):
        ctx.init(key="same prefix")
        found = torch.full((3,), float(turn))
        dist.all_reduce(found)
        assert found.tolist() == [2.0 * turn] * 3
        dist.destroy_process_group()


@beyond_gloo("takes the addresses of an earlier incarnation for its own")
def test_rule_23_a_store_with_keys_of_an_earlier_incarnation() -> None:
    """Rule 23: a group uses the prefix of an earlier group, as after torchrun restarts its workers."""
    run_fresh(stale_keys, 2)
