"""Every public function with a group argument under TORCH_DISTRIBUTED_DEBUG=DETAIL, where torch wraps the backend of
each group in another object. The table is compared with the public names, so a new function needs a row."""

from __future__ import annotations

import inspect
import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_fresh
from test_tensor_zoo import ROWS_OF
from torch.nn.parallel import DistributedDataParallel
from zoo import CALLS, KINDS, Visit

import torch_sagellm
from torch_sagellm._private import groups

pytestmark = beyond_gloo("the package's own calls")
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
#: Rows of the zoo that torch's wrapper refuses.
REFUSED_BY_TORCH = {"dist.gather_single"}
#: Names that take a group and are in no table, with the reason.
ELSEWHERE = {
    **dict.fromkeys(("NCCLBackend", "HCCLBackend", "CNCLBackend"), "they need a device, else they are CommBackend"),
    **dict.fromkeys(
        (
            f"{each}.{call}"
            for each in ("Auto", "Compression", "Half", "Int8", "TopK")
            for call in ("all_reduce", "average")
        ),
        "compressed_all_reduce calls them",
    ),
}


def takes_group() -> Iterator[str]:
    """Yields the public functions, classes and methods with an argument named `group`."""
    for name in torch_sagellm.__all__:
        found = getattr(torch_sagellm, name)
        if inspect.isclass(found) and found.__module__.startswith("torch_sagellm") and name != "Options":
            for member, function in inspect.getmembers(found, inspect.isfunction):
                if "group" in inspect.signature(function).parameters and (member[0] != "_" or member == "__init__"):
                    yield name if member == "__init__" else f"{name}.{member}"
        elif inspect.isfunction(found) and "group" in inspect.signature(found).parameters:
            yield name


def everywhere(ctx: Context, group: Any, comm: Any) -> None:
    assert comm.group is group and "shared memory" in comm.describe()
    value = torch.ones(2)
    comm.all_reduce(value)
    assert value.tolist() == [2.0, 2.0]
    assert comm.explain("all_reduce", 8).op == "all_reduce" and comm.get_stats()["ops"]["all_reduce"]["count"] > 0


def communicator(ctx: Context, group: Any) -> None:
    comm = torch_sagellm.DistributedCommunicator(group=group)
    comm.barrier()
    assert (comm.rank, comm.world_size) == (ctx.rank, 2)


def explains(ctx: Context, group: Any) -> None:
    assert torch_sagellm.explain("all_reduce", 8, group=group).ranks == 2
    dist.all_reduce(torch.ones(2), group=group)
    assert torch_sagellm.explain(sequence=1, group=group).sequence == 1


def counts(ctx: Context, group: Any) -> None:
    torch_sagellm.reset_stats(group)
    torch_sagellm.all_reduce(torch.ones(2), group=group)
    assert torch_sagellm.get_stats(group)["ops"]["all_reduce"]["count"] == 1
    assert len(torch_sagellm.gather_stats(group)["ranks"]) == 2


def exports(ctx: Context, group: Any) -> None:
    seen: list[str] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append(name)

    folder = Path(ctx.tmp) / f"exports{ctx.rank}"
    folder.mkdir()
    dist.all_reduce(torch.ones(2), group=group)
    torch_sagellm.log_to_tensorboard(Writer(), 1, group)
    assert seen and "sagellm" in torch_sagellm.prometheus_text(group)
    with torch_sagellm.serve_prometheus(group=group) as server, urllib.request.urlopen(server.url, timeout=30) as page:
        assert b"sagellm" in page.read()
    torch_sagellm.write_prometheus(folder / "text", group)
    torch_sagellm.write_trace(folder / "trace", group)
    torch_sagellm.dump_flight_record(folder / "flight", group)
    torch_sagellm.write_inspector(folder, group)
    assert "sagellm" in (folder / "text").read_text() and json.loads((folder / "trace").read_text())["traceEvents"]
    assert (folder / "flight").exists() and len(list(folder.rglob("*"))) > 3


def steps(ctx: Context, group: Any) -> None:
    with torch_sagellm.step():
        dist.all_reduce(torch.ones(2), group=group)
    assert torch_sagellm.step().report(group).ranks == 2


def hooks(ctx: Context, group: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    for hook in (
        torch_sagellm.CompressionHook("fp16", group),
        torch_sagellm.PowerSGDHook(PowerSGDState(None, start_powerSGD_iter=2), group),
    ):
        model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
        model.register_comm_hook(None, hook)
        model(torch.ones(1, 2)).sum().backward()
        assert model.module.bias.grad.tolist() == [1.0, 1.0]
        hook.close()


def recovers(ctx: Context, group: Any) -> None:
    assert torch_sagellm.recover(group) is group
    groups.backend_of(group).abort()
    expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(1), group=group))
    new = torch_sagellm.recover(group)
    value = torch.ones(2)
    dist.all_reduce(value, group=new)
    assert value.tolist() == [2.0, 2.0] and groups.backend_of(new).options.strict


#: Functions that use public names with a group. These names exchange no tensors, or are no functions.
TABLE: dict[str, tuple[tuple[str, ...], Callable[[Context, Any], None]]] = {
    "explain": (("explain",), explains),
    "statistics": (("reset_stats", "get_stats", "gather_stats"), counts),
    "files": (
        (
            *("log_to_tensorboard", "prometheus_text", "serve_prometheus", "write_prometheus", "write_trace"),
            *("dump_flight_record", "write_inspector"),
        ),
        exports,
    ),
    "steps": (("Steps.report",), steps),
    "create_comm_backend": (
        ("create_comm_backend",),
        lambda ctx, group: everywhere(ctx, group, torch_sagellm.create_comm_backend(group=group)),
    ),
    **{
        name: (
            (name,),
            lambda ctx, group, name=name: everywhere(ctx, group, getattr(torch_sagellm, name)(group=group)),  # type: ignore[misc]
        )
        for name in ("CommBackend", "CPUBackend", "GlooBackend")
    },
    "DistributedCommunicator": (("DistributedCommunicator",), communicator),
    "hooks of DDP": (("CompressionHook", "PowerSGDHook"), hooks),
    "recover": (("recover",), recovers),
}


def test_everything_that_takes_a_group_is_called() -> None:
    have = {name for names, _ in TABLE.values() for name in names}
    have |= {name.partition(".")[2] for row in CALLS for name in (row, *ROWS_OF.get(row, []))}
    lacking = set(takes_group()) - have - set(ELSEWHERE)
    assert not lacking, f"no row under DETAIL: {', '.join(sorted(lacking))}"
    assert set(ELSEWHERE) <= set(takes_group())


def started(ctx: Context) -> None:
    """Makes the default group with options that later groups inherit."""
    ctx.init(pg_options=torch_sagellm.Options(strict=True, fusion=True, soft_timeout=7, threads=3))
    wrapper = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert type(wrapper).__name__ == "_ProcessGroupWrapper", "torch wraps nothing here"


def everything(ctx: Context) -> dict[str, str]:
    started(ctx)
    failed = {}
    comm = torch_sagellm.CPUBackend(group=dist.group.WORLD)
    for name, call in CALLS.items():
        for role in () if name in REFUSED_BY_TORCH else call.roles:
            found = Visit(KINDS["plain"], role, ctx.rank, dist.group.WORLD, comm)
            call.run(found)  # a failure on one rank ends the test, because the other rank waits
            if wrong := found.wrong(call.tolerance):
                failed[f"{name}/{role}"] = wrong
    group = dist.new_group()
    for name, (_, run) in TABLE.items():
        try:
            run(ctx, group)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return failed


def test_everything_that_takes_a_group_works() -> None:
    assert run_fresh(everything, 2, env=DETAIL, timeout=90) == [{}, {}]


def inherits(ctx: Context) -> list[tuple[Any, ...]]:
    from torch.distributed.device_mesh import init_device_mesh

    started(ctx)
    mesh = init_device_mesh("cpu", (ctx.world_size,)).get_group()
    told = [groups.backend_of(group).options for group in (dist.group.WORLD, dist.new_group(), mesh)]
    dist.destroy_process_group()
    return [(each.strict, each.soft_timeout, each.threads) for each in told]


def test_a_group_without_options_has_those_of_the_group_that_has_its_ranks() -> None:
    assert run_fresh(inherits, 2, env=DETAIL, timeout=60) == [[(True, 7.0, 3)] * 3] * 2


@pytest.mark.quick
def test_our_backend_is_found_in_any_number_of_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper(SimpleNamespace):
        wrapped_pg: Any

    class Ours:
        pass

    backend = Ours()
    monkeypatch.setitem(sys.modules, "torch_sagellm._C", SimpleNamespace(SageBackend=Ours))
    assert groups.own(backend) is groups.own(Wrapper(wrapped_pg=Wrapper(wrapped_pg=backend))) is backend
    assert groups.own(Wrapper(wrapped_pg=object())) is groups.own(None) is None
    monkeypatch.delitem(sys.modules, "torch_sagellm._C")
    assert groups.own(backend) is None
