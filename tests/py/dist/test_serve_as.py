"""The name "gloo" served by this package: who serves each way to ask for it, what the link uses, and the way back."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_fresh
from limits import patience

pytestmark = beyond_gloo("is about the name of gloo")


def ours(group: Any = None) -> bool:
    from sagellm import _load

    group = dist.group.WORLD if group is None else group
    backend = group._get_backend(torch.device("cpu"))
    return isinstance(backend, _load.extension().SageBackend)


def every_way(ctx: Context) -> None:
    import sagellm

    sagellm.serve_as("gloo")
    sagellm.serve_as("gloo")
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
    stats = sagellm.get_stats()
    assert stats["ops"]["all_reduce"]["count"] >= 1, "it is counted"
    assert "shared memory" in dist.group.WORLD._get_backend(torch.device("cpu")).describe()
    from sagellm import _delegate

    class Options:
        store, group_rank, group_size = ctx.store(ctx.key + "real"), ctx.rank, ctx.world_size
        timeout, group_id, global_ranks_in_group = dist.default_pg_timeout, "real", list(range(ctx.world_size))

    real = _delegate.build("gloo", Options, _delegate.PREFIX)
    assert type(real) is torch._C._distributed_c10d.ProcessGroupGloo, "links and delegates are torch's own"
    assert isinstance(real, torch._C._distributed_c10d.ProcessGroupGloo)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_way_to_ask_for_gloo_is_served(world_size: int) -> None:
    run_fresh(every_way, world_size)


def and_back(ctx: Context) -> None:
    from sagellm import _serve_as

    with _serve_as.serving():
        ctx.init(backend="gloo")
        assert ours()
        dist.destroy_process_group()
    assert not _serve_as.serves()
    ctx.init(backend="gloo", key=ctx.key + "again")
    assert not ours(), "torch's own again"
    assert type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__ == "ProcessGroupGloo"
    dist.all_reduce(torch.ones(1))


def test_the_name_goes_back_to_torch() -> None:
    run_fresh(and_back, 2)


def checked_and_changing(ctx: Context) -> None:
    from sagellm import _serve_as

    with _serve_as.serving():
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
    import sagellm

    assert "'nccl'" in expect_raises(ValueError, lambda: sagellm.serve_as("nccl"))


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
        [sys.executable, "-m", "sagellm", "doctor", "--no-self-test"],
        env={**os.environ, "SAGELLM_AS": "gloo"},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 0 and "groups called gloo" in done.stdout, done
