"""The name "gloo" served by this package: which backend serves each way of requesting gloo, which gloo delegates use,
and how to undo it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, monitored_barrier, run_fresh, torch_at_least
from limits import patience

pytestmark = beyond_gloo("is about the name of gloo")


def ours(group: Any = None) -> bool:
    from torch_sagellm._private import load

    group = dist.group.WORLD if group is None else group
    backend = group._get_backend(torch.device("cpu"))
    return isinstance(backend, load.extension().SageBackend)


def every_way(ctx: Context) -> None:
    import torch_sagellm

    torch_sagellm.serve_as("gloo")
    torch_sagellm.serve_as("gloo")
    ctx.init(backend="gloo")
    assert dist.get_backend() == "gloo" and ours()
    total = torch.full((4,), float(ctx.rank))
    dist.all_reduce(total)
    assert total.tolist() == [float(sum(range(ctx.world_size)))] * 4
    assert ours(dist.new_group(backend="gloo"))
    some = dist.new_group([0, 1])
    assert ctx.rank > 1 or ours(some)
    assert ours(dist.new_group(backend="cpu:gloo"))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ctx.world_size,))
    assert ours(mesh.get_group())
    objects: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(objects, {"rank": ctx.rank})
    assert objects == [{"rank": rank} for rank in range(ctx.world_size)]
    dist.monitored_barrier()
    dist.barrier()
    made = dist.ProcessGroupGloo(
        ctx.store(ctx.key + "direct"), ctx.rank, ctx.world_size, timeout=dist.default_pg_timeout
    )
    assert type(made).__name__ == "SageBackend" and made.size() == ctx.world_size
    work = made.allreduce([total])
    if work is not None:
        work.wait()
    assert total.tolist() == [float(sum(range(ctx.world_size))) * ctx.world_size] * 4
    made.shutdown()
    stats = torch_sagellm.get_stats()
    assert stats["ops"]["all_reduce"]["count"] >= 1, "it is counted"
    assert "shared memory" in dist.group.WORLD._get_backend(torch.device("cpu")).describe()
    from torch_sagellm._private import delegate

    class Options:
        store, group_rank, group_size = ctx.store(ctx.key + "real"), ctx.rank, ctx.world_size
        timeout, group_id, global_ranks_in_group = dist.default_pg_timeout, "real", list(range(ctx.world_size))

    real = delegate.build("gloo", Options, delegate.PREFIX, ["127.0.0.1"])
    assert type(real) is torch._C._distributed_c10d.ProcessGroupGloo, "links and delegates are torch's own"
    assert isinstance(real, torch._C._distributed_c10d.ProcessGroupGloo)
    real.barrier().wait()  # gloo: if a rank leaves too early, its peer fails to connect


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_way_to_ask_for_gloo_is_served(world_size: int) -> None:
    run_fresh(every_way, world_size)


def both(ctx: Context, call: Callable[[Any, int], Any]) -> None:
    """Makes the same call in a group of torch's gloo and in one of ours. Both must have the same results, or both must
    refuse."""
    import torch_sagellm
    from torch_sagellm.api import serve_as

    torch_sagellm.serve_as("gloo")
    found = []
    for name, make in (("real", serve_as.real()), ("served", dist.ProcessGroupGloo)):
        group = make(ctx.store(f"{ctx.key}/{name}"), ctx.rank, ctx.world_size, timeout=dist.default_pg_timeout)
        found.append(call(group, ctx.rank))
        group.barrier().wait()
        group.shutdown()
    for number, (theirs, our) in enumerate(zip(*found, strict=True)):
        assert theirs == our, f"result {number}: gloo {theirs}, served {our}"


def lists_of_tensors(group: Any, rank: int) -> list[Any]:
    results: list[Any] = []

    def values(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.arange(1, 6, dtype=dtype) + 10 * i + 3 * rank for i in range(count)]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.BOR):
        tensors = values(3, torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        group.allreduce(tensors, options).wait()
        results += tensors
    twice = torch.ones(3)
    group.allreduce([twice, twice]).wait()
    empty = [torch.empty(0), torch.empty(0)]
    group.allreduce(empty).wait()
    tensors = values(2)
    work = group.allreduce(tensors)
    work.wait()
    results += [twice, *empty, *tensors, *work.get_future().value()]
    # Ranks may pass lists of different lengths.
    tensors = values(1 + rank)
    group.allreduce(tensors).wait()
    results += tensors[:1]
    for root_tensor in (0, 1):
        tensors = values(2)
        send = dist.BroadcastOptions()
        send.rootRank, send.rootTensor = 1, root_tensor
        group.broadcast(tensors, send).wait()
        results += tensors
    inputs = values(2)
    outputs = [[torch.zeros(5) for _ in range(2 * group.size())] for _ in inputs]
    group.allgather(outputs, inputs).wait()
    return [each.tolist() for each in [*results, *outputs[0], *outputs[1]]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_lists_of_tensors_are_what_they_are_in_gloo(world_size: int) -> None:
    """A rank's list of several tensors counts as several ranks."""
    run_fresh(both, world_size, lists_of_tensors)


def what_gloo_gets_wrong(ctx: Context) -> None:
    """Strided tensors, of which gloo reads wrong elements, and several operations on the same memory, which gloo does
    not order."""
    import torch_sagellm

    torch_sagellm.serve_as("gloo")
    group = dist.ProcessGroupGloo(ctx.store(ctx.key), ctx.rank, ctx.world_size, timeout=dist.default_pg_timeout)
    whole = torch.arange(8.0).view(4, 2)
    columns = [whole[:, 0], whole[:, 1]]
    group.allreduce(columns).wait()
    assert all(column.tolist() == [ctx.world_size * each for each in (1.0, 5.0, 9.0, 13.0)] for column in columns)
    tensors = [torch.full((70_000,), 1.0), torch.full((70_000,), 2.0)]
    works = [group.allreduce(tensors) for _ in range(4)]
    works[-1].wait()
    expected = 3.0 * ctx.world_size * (2 * ctx.world_size) ** 3
    assert all((tensor == expected).all() for tensor in tensors), (tensors[0][0], expected)
    option = dist.AllreduceOptions()
    option.reduceOp = dist.ReduceOp.AVG
    group.allreduce(tensors, option).wait()
    assert all((tensor == 2 * expected).all() for tensor in tensors), "over the ranks; gloo divides the first alone"
    outputs = [[torch.zeros(2, 4).t() for _ in range(2 * ctx.world_size)] for _ in range(2)]
    inputs = [torch.full((2, 4), float(10 * ctx.rank + i)).t() for i in range(2)]
    group.allgather(outputs, inputs).wait()
    for each in outputs:
        assert [float(tensor[3, 1]) for tensor in each] == [10.0 * r + i for r in range(ctx.world_size) for i in (0, 1)]
    group.barrier().wait()
    group.shutdown()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lists_of_tensors_keep_order_and_layout(world_size: int) -> None:
    run_fresh(what_gloo_gets_wrong, world_size)


def wrong_lists(group: Any, rank: int) -> list[bool]:
    one, two = torch.ones(2), torch.ones(3)
    send = dist.BroadcastOptions()
    send.rootTensor = 2
    calls: list[Callable[[], Any]] = [
        lambda: group.allreduce([]),
        lambda: group.allreduce([one, two]),
        lambda: group.allreduce([one, one.double()]),
        lambda: group.allreduce([torch.ones(2, 3), torch.ones(3, 2)]),
        lambda: group.broadcast([torch.ones(2, 3), torch.ones(6)], dist.BroadcastOptions()),
        lambda: group.allgather([[torch.ones(2, 3)] * 4] * 2, [torch.ones(2, 3), torch.ones(3, 2)]),
        lambda: group.broadcast([one, one.clone()], send),
        lambda: group.allgather([[one] * 4], [one, one]),
        lambda: group.allgather([[one] * 3, [one] * 4], [one, one]),
        lambda: group.reduce([one, one.clone()]),
    ]
    refused = []
    for call in calls:
        try:
            call().wait()
        except (RuntimeError, ValueError):
            refused.append(True)
        else:
            refused.append(False)
    assert all(refused), refused
    return refused


def test_wrong_lists_are_refused_as_in_gloo_and_the_group_goes_on() -> None:
    run_fresh(both, 2, wrong_lists)


def on_hosts(ctx: Context, names: list[str]) -> None:
    """Lists over two hosts, and the calls of a program that knows only gloo."""
    from net import enter

    import torch_sagellm

    enter(names[ctx.rank // 2])
    torch_sagellm.serve_as("gloo")
    ctx.init(backend="gloo", store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert " hosts with " in backend.describe() and ", asked for as gloo" in backend.describe()
    tensors = [torch.full((70_000,), float(ctx.rank)), torch.full((70_000,), 1.0)]
    backend.allreduce(tensors).wait()
    assert all((each == 10).all() for each in tensors)
    dist.barrier()
    dist.destroy_process_group()


def test_lists_of_tensors_over_hosts(hosts: list[str]) -> None:
    from test_multihost import ENV

    run_fresh(on_hosts, 4, hosts, env=ENV)


def own_name(ctx: Context) -> None:
    ctx.init()
    group = dist.group.WORLD
    text = expect_raises(ValueError, lambda: group.allreduce([torch.ones(2), torch.ones(2)]))
    assert "expected one tensor, got 2" in text, text
    dist.barrier()


def test_under_our_own_name_a_list_is_still_a_mistake() -> None:
    """Under our own name a list would be taken for `all_reduce_coalesced`."""
    run_fresh(own_name, 2)


def settings(ctx: Context) -> None:
    import torch_sagellm

    torch_sagellm.serve_as("gloo")
    device = dist.ProcessGroupGloo.create_device(interface="lo")
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = [device], 1, timedelta(seconds=47)
    group = dist.ProcessGroupGloo(ctx.store(ctx.key + "made"), ctx.rank, ctx.world_size, options)
    assert isinstance(group, dist.ProcessGroupGloo) and ours_itself(group)
    assert group.options._timeout == timedelta(seconds=47)
    group._set_default_timeout(timedelta(seconds=33))
    assert group.options._timeout == timedelta(seconds=33)
    group.barrier().wait()
    group.shutdown()
    ctx.init(backend="gloo", pg_options=options)
    assert ours() and isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    assert not isinstance(dist.group.WORLD, dist.ProcessGroupGloo)
    part = dist.new_group([0, 1], pg_options=options, timeout=timedelta(seconds=21))
    if ctx.rank < 2:
        assert part._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=21)
    dist.barrier()


def ours_itself(backend: Any) -> bool:
    return type(backend).__name__ == "SageBackend"


def test_devices_and_threads_of_gloo_are_ignored_with_a_reason() -> None:
    with launch(settings, 2, env={"SAGELLM_LOG": "info"}) as job:
        job.values(60)
        said = job.ranks[0].output()
    assert "takes its interface from GLOO_SOCKET_IFNAME" in said, said
    assert said.count("groups called 'gloo' are served by sagellm") == 1, said


def by_default(ctx: Context) -> None:
    """Calls that name no backend: torch uses gloo for the CPU."""
    import torch_sagellm

    torch_sagellm.serve_as("gloo")
    dist.init_process_group(store=ctx.store(), rank=ctx.rank, world_size=ctx.world_size)
    assert ours() and dist.get_backend_config().startswith("cpu:gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, ctx.world_size // 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        assert ours(mesh.get_group(name)) and "cpu:gloo" in dist.get_backend_config(mesh.get_group(name))
    objects = [{"from": ctx.rank} if ctx.rank == 1 else None]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [{"from": 1}]
    gathered: list[Any] | None = [None] * ctx.world_size if ctx.rank == 0 else None
    dist.gather_object(ctx.rank, gathered)
    assert gathered in (None, list(range(ctx.world_size)))
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [10 * rank for rank in range(ctx.world_size)], src=0)
    assert mine == [10 * ctx.rank]
    monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
    if ctx.rank != 3:
        # All three call at the same time, so rank 0 misses only rank 3.
        store = ctx.store()
        store.set(f"calls {ctx.rank}", "")
        store.wait([f"calls {rank}" for rank in range(3)])
        text = expect_raises(RuntimeError, lambda: monitored_barrier(timeout=timedelta(seconds=1)))
        assert ctx.rank or "rank 3" in text.lower() or "ranks: 3" in text.lower(), text
    ctx.tell("done")
    ctx.listen()
    dist.destroy_process_group()


def test_what_names_no_backend_is_served_too() -> None:
    with launch(by_default, 4) as job:
        for rank in range(4):
            assert job.hear(rank) == "done"
        for rank in range(4):
            job.say(rank, "end")
        job.values(60)


def test_what_is_patched_is_where_this_torch_looks() -> None:
    """Fails if a new torch creates its groups differently; `serve_as` must then be adapted."""
    from torch.distributed import distributed_c10d as c10d

    source = inspect.getsource(c10d._new_process_group_helper)
    assert "ProcessGroupGloo" in vars(c10d) and "ProcessGroupGloo" in vars(dist)
    if torch_at_least(2, 14):
        c10d.Backend._ensure_backend_registered("gloo")
        plugin = c10d.Backend._plugins["GLOO"]
        assert plugin._fields == ("creator_fn", "extended_api") and plugin.extended_api
        assert "Backend._plugins[backend_str.upper()]" in source and "ProcessGroupGloo" not in source
    else:
        assert "GLOO" not in c10d.Backend._plugins
        assert "backend_class = ProcessGroupGloo(" in source and "isinstance(backend_class, ProcessGroupGloo)" in source


def test_what_a_group_of_gloo_offers_is_offered() -> None:
    """Everything except devices and options, which torch's own class creates."""
    import torch_sagellm
    from torch_sagellm._private import load
    from torch_sagellm.api import serve_as

    theirs, our = (set(dir(each)) for each in (serve_as.real(), load.extension().SageBackend))
    assert theirs - our <= {"Device", "Options", "_Options", "create_default_device", "create_device"}
    with serve_as.serving():
        assert theirs <= set(dir(dist.ProcessGroupGloo))
    assert torch_sagellm.serve_as is serve_as.serve_as


def test_a_torch_that_makes_groups_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import distributed_c10d as c10d

    import torch_sagellm
    from torch_sagellm.api import serve_as

    monkeypatch.delattr(c10d, "ProcessGroupGloo")
    assert "which would be replaced" in expect_raises(RuntimeError, torch_sagellm.serve_as)
    assert not serve_as.serves()


def and_back(ctx: Context) -> None:
    from torch_sagellm.api import serve_as

    with serve_as.serving():
        ctx.init(backend="gloo")
        assert ours()
        dist.destroy_process_group()
    assert not serve_as.serves()
    ctx.init(backend="gloo", key=ctx.key + "again")
    assert not ours(), "torch's own again"
    assert type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__ == "ProcessGroupGloo"
    dist.all_reduce(torch.ones(1))


def test_the_name_goes_back_to_torch() -> None:
    run_fresh(and_back, 2)


def checked_and_changing(ctx: Context) -> None:
    from torch_sagellm.api import serve_as

    with serve_as.serving():
        ctx.init(backend="gloo", enable_reconfigure=True)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert type(backend) is torch._C._distributed_c10d.ProcessGroupGloo, "what we do not offer, torch's own does"
        dist.destroy_process_group()


@pytest.mark.skipif(
    "enable_reconfigure" not in inspect.signature(dist.init_process_group).parameters,
    reason="this torch has no groups that change their members",
)
def test_a_group_that_changes_its_members_stays_torchs() -> None:
    run_fresh(checked_and_changing, 2)


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_the_checking_wrapper_of_torch_goes_around_ours(level: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("dist.destroy", "dist.all_reduce(torch.ones(2)); dist.destroy")],
        env={**os.environ, "SAGELLM_AS": "gloo", "TORCH_DISTRIBUTED_DEBUG": level},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("gloo "), done


def test_another_name_is_refused() -> None:
    import torch_sagellm

    assert "'nccl'" in expect_raises(ValueError, lambda: torch_sagellm.serve_as("nccl"))


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend(), type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("value", "expected"),
    [("gloo", "gloo SageBackend"), ("", "gloo ProcessGroupGloo"), ("mpi", "expected one of gloo")],
)
def test_the_environment_switches_it_on_in_an_unchanged_program(value: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "SAGELLM_AS": value},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert expected in done.stdout + done.stderr, done


def test_doctor_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_sagellm", "doctor", "--no-self-test"],
        env={**os.environ, "SAGELLM_AS": "gloo"},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 0 and "groups called gloo" in done.stdout, done


def looks(group: Any) -> dict[str, Any]:
    """Returns the attributes that programs read from a gloo group."""
    backend = group._get_backend(torch.device("cpu"))
    options = backend.options
    # torch 2.14 added `enable_reconfigure`; our groups always have it.
    names = ["_threads", "_timeout", "backend", *(["enable_reconfigure"] if torch_at_least(2, 14) else [])]
    return {
        "name": backend.name(),
        "group": group.name(),
        "backend": dist.get_backend(group),
        "config": dist.get_backend_config(group),
        "name of the backend": getattr(backend, "_get_backend_name", backend.name)(),
        "is gloo": isinstance(backend, dist.ProcessGroupGloo),
        "has gloo's options": isinstance(options, dist.ProcessGroupGloo._Options),
        "type": type(options).__name__.lstrip("_"),
        "devices": isinstance(options._devices, list),
        **{name: getattr(options, name, "missing") for name in names},
    }


def looks_alike(ctx: Context) -> None:
    import torch_sagellm

    ctx.init(backend="gloo")
    theirs = looks(dist.group.WORLD)
    given = dist.ProcessGroupGloo._Options()
    dist.barrier()  # gloo fails on a rank that is still connecting when another rank leaves
    dist.destroy_process_group()
    torch_sagellm.serve_as("gloo")
    ctx.init(backend="gloo", key=f"{ctx.key}/served")
    assert looks(dist.group.WORLD) == theirs
    assert isinstance(given, dist.ProcessGroupGloo._Options), "options that were made before"
    assert isinstance(dist.ProcessGroupGloo._Options(), dist.ProcessGroupGloo._Options)
    assert "asked for as gloo" in dist.group.WORLD._get_backend(torch.device("cpu")).describe()
    # Meanwhile, a group that is requested as sagellm has its own name and options.
    other = dist.new_group(backend="sagellm")._get_backend(torch.device("cpu"))
    assert other.name() == "sagellm" and other.options.backend == "sagellm"
    assert not isinstance(other, dist.ProcessGroupGloo)
    assert not isinstance(other.options, dist.ProcessGroupGloo._Options)
    assert not any(hasattr(other.options, name) for name in ("_threads", "_devices", "enable_reconfigure"))
    dist.destroy_process_group()


def test_what_programs_read_of_a_group_is_gloos() -> None:
    """Names and options equal those of torch's own gloo group in the same program."""
    run_fresh(looks_alike, 2)


def a_tensor_twice(group: Any, rank: int) -> list[Any]:
    results: list[Any] = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX):
        base = torch.arange(1, 13, dtype=torch.int64).reshape(3, 4) + rank
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = op
        lists = [[base, base], [base, base[1:]], [base[:, 0], base[:, 1], base[:, 0]], [base[0], base[2]]]
        for tensors in lists:
            group.allreduce_coalesced(tensors, options).wait()
            results += [each.tolist() for each in (*tensors, base)]
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_list_that_has_a_tensor_twice_gives_what_gloo_makes_of_it(world_size: int) -> None:
    """gloo copies the tensors, combines the copies and stores the results one after the other. So each tensor of the
    list gets the result of its own elements."""
    run_fresh(both, world_size, a_tensor_twice)
