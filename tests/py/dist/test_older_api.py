"""Programs for the former API, unchanged: module paths, argument orders, names."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, in_new_process, run_ranks

pytestmark = beyond_gloo("the package's calls")
ROOT = Path(__file__).resolve().parents[3]


def usage(ctx: Context) -> None:
    """The backend as a serving engine uses it."""
    from core.protocols.comm_backend import CommBackendProtocol, CommOp
    from sage.llm.engines.sagellm.comm_backend import CommFusionBuffer
    from sage.llm.engines.sagellm.comm_backend.collective_ops import create_comm_backend
    from sage.llm.engines.sagellm.comm_backend.topology import TopologyManager

    import torch_sagellm

    assert create_comm_backend is torch_sagellm.create_comm_backend and CommOp.ALL_REDUCE.value == "all_reduce"
    backend = create_comm_backend(backend_type="auto")
    assert isinstance(backend, CommBackendProtocol)
    tensor = torch.ones(64, 64)
    assert backend.all_reduce(tensor, op="sum") is tensor
    future = backend.all_reduce(tensor, op="sum", async_op=True)
    assert isinstance(future, torch.futures.Future) and future.wait() is tensor
    assert tensor[0, 0] == ctx.world_size**2
    tensors = [torch.ones(512) for _ in range(10)]
    assert backend.fused_all_reduce(tensors, op="sum")[9][0] == ctx.world_size
    assert {"all_reduce_count", "total_bytes", "avg_latency_ms"} <= backend.get_stats().keys()
    topology = create_comm_backend("auto", topology_manager=TopologyManager())
    assert topology.all_reduce(torch.ones(4)).tolist() == [ctx.world_size] * 4
    buffer = CommFusionBuffer(max_size_mb=1)
    assert not buffer.add_tensor(torch.zeros(500_000)), "2 MB into 1 MiB"
    assert buffer.add_tensor(torch.ones(3)) and buffer.add_tensor(torch.ones(4, dtype=torch.float64))
    assert (buffer.offset, buffer.buffer.numel()) == (44, 1 << 20)
    assert [each.tolist() for each in buffer.flush_and_all_reduce(backend)] == [[ctx.world_size] * n for n in (3, 4)]
    assert buffer.offset == 0
    memory = torch_sagellm.CommunicationBuffer(1000)
    assert memory.get_buffer(10).data_ptr() == memory.get_buffer(20).data_ptr() == memory.buffer.data_ptr()


def primitives(ctx: Context) -> None:
    """The functions of a guide to parallel primitives."""
    from torch_sagellm import all_gather, all_reduce, all_to_all, broadcast, irecv, isend, recv, reduce_scatter, send

    me, ranks = ctx.rank, ctx.world_size
    assert all_reduce(torch.full((2,), float(me + 1)), dist.ReduceOp.MAX, dist.group.WORLD).tolist() == [ranks] * 2
    assert all_reduce(torch.ones(2)).tolist() == [ranks] * 2
    parts = all_gather(torch.full((2, 3), float(me)), dist.group.WORLD)
    assert isinstance(parts, list) and torch.cat(parts, dim=-1).shape == (2, 3 * ranks)
    assert [each[0, 0].item() for each in parts] == list(range(ranks))
    given = [torch.full((3,), float(me + part)) for part in range(ranks)]
    expected = [float(sum(range(ranks)) + ranks * me)] * 3
    assert reduce_scatter(given).tolist() == reduce_scatter(torch.cat(given), "sum").tolist() == expected
    assert broadcast(torch.tensor([me]), src=1).item() == 1
    whole = torch.arange(2.0 * ranks) + 100 * me
    send_list = [whole[part::ranks] for part in range(ranks)]  # strided views
    recv_list = [torch.empty(2) for _ in range(ranks)]
    came = all_to_all(send_list, recv_list)
    assert all(one is other for one, other in zip(came, recv_list, strict=True))
    assert [each.tolist() for each in recv_list] == [
        [me + 100.0 * peer, me + ranks + 100.0 * peer] for peer in range(ranks)
    ]
    assert [each.tolist() for each in all_to_all(send_list)] == [each.tolist() for each in recv_list]
    following, previous = (me + 1) % ranks, (me - 1) % ranks
    sent, taken = isend(torch.full((3,), float(me)), following), irecv(torch.empty(3), previous)
    assert taken.wait().tolist() == [previous] * 3 and sent.wait()[0] == me
    if me % 2 == 0:
        send(torch.full((3,), float(me)), dst=me + 1)
    else:
        assert recv(torch.empty(3), src=me - 1).tolist() == [me - 1] * 3
    refused: list[Any] = [
        lambda: all_to_all(torch.ones(ranks)),
        lambda: all_to_all(send_list, recv_list[1:]),
        lambda: reduce_scatter(given[1:]),
        lambda: all_reduce(torch.ones(1), "median"),
    ]
    for call in refused:
        assert "sagellm" in expect_raises(ValueError, call)


def grid(ctx: Context) -> None:
    """The groups as a training framework creates them."""
    import scaletorch.parallel.pg_manager as pgm
    from scaletorch.parallel.pg_manager import ProcessGroupManager, setup_process_group_manager

    made = setup_process_group_manager(tp_size=2, cp_size=1, pp_size=ctx.world_size // 2, dp_size=1)
    assert pgm.process_group_manager is made and isinstance(made, ProcessGroupManager)
    own = made.ranks("tp")
    assert (made.tp_world_size, made.pp_world_size) == (2, ctx.world_size // 2)
    assert (made.cp_world_size, made.dp_world_size, made.cp_dp_world_size) == (1, 1, 1)
    assert (made.cp_send_rank, made.cp_recv_rank) == (made.cp_next_rank, made.cp_prev_rank)
    total = torch.full((4,), float(ctx.rank))
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=made.tp_group)
    assert total.tolist() == [float(sum(own))] * 4
    made.destroy()


def older(ctx: Context) -> None:
    import torch_sagellm.compat

    assert torch_sagellm.compat.install() is None  # a second call changes nothing
    names: dict[str, object] = {}
    exec("from sage.llm.engines.sagellm.comm_backend import *\nfrom core.protocols import CommBackendProtocol", names)
    assert names["CommFusionBuffer"] is torch_sagellm.CommFusionBuffer
    assert names["CommBackendProtocol"] is torch_sagellm.CommBackendProtocol
    usage(ctx)
    primitives(ctx)
    grid(ctx)


@pytest.mark.parametrize("world_size", [2, 4])
def test_programs_run_as_they_were_written(world_size: int) -> None:
    run_ranks(older, world_size)


INSTALLED = """
import json, os, sys, tempfile
folder = tempfile.mkdtemp()
installed = ("core/__init__.py", "core/protocols.py", "sage/llm/__init__.py", "scaletorch.py")
for number, path in enumerate(installed):
    os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
    open(os.path.join(folder, path), "w").write(f"mine = {number}")
sys.path.insert(0, folder)
import torch_sagellm.compat
import core, core.protocols, sage.llm, scaletorch
from sage.llm.engines.sagellm.comm_backend.fusion import CommFusionBuffer
def imports(name):
    try:
        __import__(name)
        return True
    except ImportError:
        return False
print(json.dumps({
    "mine": [core.mine, core.protocols.mine, sage.llm.mine, scaletorch.mine],
    "ours": CommFusionBuffer is torch_sagellm.CommFusionBuffer,
    "missing": list(map(imports, ("core.protocols.comm_backend", "scaletorch.parallel", "core.other", "sage.other"))),
    "homes": [sys.modules[name].__name__ for name in ("torch_sagellm.collective_ops",
              "sage.llm.engines.sagellm.comm_backend.collective_ops")],
}))
"""


def test_what_is_installed_under_such_a_name_stays() -> None:
    found = in_new_process(INSTALLED)
    assert found["mine"] == [0, 1, 2, 3] and found["ours"] and found["missing"] == [False] * 4
    assert found["homes"] == ["torch_sagellm.collective_ops"] * 2


def script() -> ModuleType:
    path = ROOT / "benchmark" / "comm_benchmark.py"
    spec = importlib.util.spec_from_file_location("comm_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(ctx: Context) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = script().benchmark_all_reduce(sizes_mb=(0.001, 0.25), iterations=3)
    assert [size for size, _, _ in found] == [0.001, 0.25] and all(ms > 0 and rate > 0 for _, ms, rate in found)
    return printed.getvalue()


def test_the_benchmark_prints_a_line_a_size() -> None:
    first, second = run_ranks(measured, 2)
    lines = first.splitlines()
    assert second == "" and len(lines) == 2
    assert lines[1].startswith("Size: 0.25 MB, Latency: ") and "BW: " in lines[1]
