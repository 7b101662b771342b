"""Every kind of tensor in every public call of torch.distributed and of this package. `zoo.py` has the tables, and
`zoo_tour.py` the expected outcome of each case.

A call must give the promised result, which is checked in the memory of its tensors. Otherwise every rank that passes
the tensor refuses it with an error that names the call and the reason, and nothing is sent. An ordinary collective and
messages with the same tag follow each call: they show that a refused call used no number and left no message. `LISTED`
in `zoo_tour.py` has the cases with another outcome, with the reason.
"""

from __future__ import annotations

from datetime import timedelta
from fnmatch import fnmatchcase

import net
import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, launch, run_ranks
from net import enter
from public_calls import missing
from zoo import CALLS, KINDS, RING, Visit
from zoo_tour import tour

pytestmark = beyond_gloo("the package's calls, and many of these tensors")

#: Rows of the table that make several public calls, or a call with another name.
ROWS_OF = {
    "dist.send_and_recv": ["dist.send", "dist.recv"],
    "dist.isend_and_irecv": ["dist.isend", "dist.irecv"],
    "objects.every_kind": [
        "dist.all_gather_object", "dist.scatter_object_list", "dist.broadcast_object_list", "dist.gather_object",
        "dist.send_object_list", "dist.recv_object_list",
    ],
    "package.compressed_fp16": ["package.compressed_all_reduce"],
    "package.send_tensors": ["package.recv_tensors"],
    "package.isend_tensors": ["package.irecv_tensors"],
    "package.send_pages": ["package.recv_pages"],
    "package.send_and_recv": ["package.send", "package.recv", "package.isend", "package.irecv"],
    "package.safe_all_reduce": ["comm.safe_all_reduce"],
    "comm.send_and_recv": ["comm.send", "comm.recv"],
    "comm.isend_and_irecv": ["comm.isend", "comm.irecv"],
    "layers.OverlapScheduler": ["package.OverlapScheduler"],
    "layers.ring_exchange": ["package.ring_exchange"],
    "layers.exchange_tokens": ["package.exchange_tokens"],
    "layers.MoEDispatcher": ["package.MoEDispatcher"],
    "layers.autograd": ["package.TensorParallelLinear"],
}  # fmt: skip
ELSEWHERE = {
    **dict.fromkeys(("dist.barrier", "dist.monitored_barrier", "comm.barrier"), "they take no tensor"),
    **dict.fromkeys(
        ("package.CommBackend", "package.CPUBackend", "package.GlooBackend"), "their methods are the rows of comm"
    ),
    **dict.fromkeys(("package.NCCLBackend", "package.HCCLBackend", "package.CNCLBackend"), "tests/py/device"),
    **dict.fromkeys(
        ("package.CompressionHook", "package.PowerSGDHook", "package.share_buckets"),
        "they are given the buckets of DDP, which are plain tensors",
    ),
    **dict.fromkeys(
        (
            *(f"package.{kind}Operator" for kind in ("AllReduce", "AllGather", "Broadcast", "ReduceScatter")),
            "package.DistributedCommunicator",
            "package.create_ring_topology",
        ),
        "the table RING",
    ),
}


@pytest.mark.quick
def test_every_public_call_has_a_row() -> None:
    rows = [name for row in CALLS for name in [row, *ROWS_OF.get(row, [])]]
    assert set(ROWS_OF) <= set(CALLS)
    lacking = missing(rows, ELSEWHERE)
    assert not lacking, lacking


def on_one_host(ctx: Context, name: str) -> int:
    return tour(ctx, name, dist.group.WORLD)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_every_call_with(name: str) -> None:
    assert min(run_ranks(on_one_host, 2, name)) > 60


@pytest.mark.quick
@pytest.mark.parametrize("name", KINDS)
def test_ranks_of_one_process_with(name: str) -> None:
    """Each call is followed by an ordinary call of the same ranks."""
    import torch_sagellm

    kind = KINDS[name]
    comms = [each._member for each in torch_sagellm.create_ring_topology(2)]
    for called, call in RING.items():
        for order in ([0, 1], [1, 0]):
            visits = [Visit(kind, call.role, rank, None) for rank in order]
            refused = bool(kind.foreign) or (name == "expanded" and call.role != "from")
            refused = refused or (name.startswith("float8") and call.reduces)
            chosen = [comms[rank] for rank in order]
            if refused:
                with pytest.raises((ValueError, TypeError), match=f"sagellm {called}") as raised:
                    call.run(chosen, visits)
                words = (*kind.foreign, "on the CPU", "shares memory between its elements", "only moved")
                assert any(word in str(raised.value) for word in words), raised.value
            else:
                call.run(chosen, visits)
            for each in visits:
                if refused:
                    each.forget_results()
                assert not each.wrong(), f"{called} of rank {each.me}: {each.wrong()}"
            totals = [torch.ones(2), torch.full((2,), 2.0)]
            for comm, total in zip(comms, totals, strict=True):
                comm.all_reduce(total)
            assert [each.tolist() for each in totals] == [[3.0, 3.0]] * 2, f"after {called}"


def on_two_hosts(ctx: Context, names: list[str]) -> list[int]:
    enter(names[ctx.rank])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", 2), timeout=timedelta(seconds=30))
    calls = tuple(
        called
        for called in CALLS
        if not any(fnmatchcase(called, pattern) for pattern in ("layers.ring*", "objects.*", "backend.*"))
    )
    counts = [tour(ctx, name, dist.group.WORLD, calls) for name in KINDS]
    dist.destroy_process_group()
    return counts


@pytest.mark.filterwarnings("ignore")
def test_kinds_of_tensors_over_two_hosts(hosts: list[str]) -> None:
    with launch(on_two_hosts, 2, hosts, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        assert all(min(counts) > 40 for counts in job.values(90))
