"""The status of a job in the JSON format of NCCL's ``ncclras -f json``, for tools that read that format.

A communicator is a process group. Fields without a counterpart on a CPU (device numbers, versions of CUDA) are -1 or 0,
and ``sagellm_version`` is added to ``nccl_version``. This module needs no torch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from torch_sagellm._private import load
from torch_sagellm.observe import watch

#: NCCL's name of each operation that it counts, by our name.
NAMES = {
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "send": "Send",
    "recv": "Recv",
    "all_to_all": "AlltoAll",
    "scatter": "Scatter",
    "gather": "Gather",
}
#: NCCL's result codes: success, and an error of another process.
SUCCESS, REMOTE_ERROR = 0, 6
NO_DEVICE = -1


def report(processes: Sequence[watch.Process], took: float = 0.0) -> dict[str, Any]:
    """The document. ``took`` is the time that reading the files took, in seconds."""
    # Groups with the same name but different members stay separate; two jobs in one folder have such groups.
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[watch.Process, dict[str, Any]]]] = {}
    for process in processes:
        for group in process.groups:
            groups.setdefault((group["name"], tuple(group["ranks"])), []).append((process, group))
    silent = sum(process.condition != watch.RUNNING for process in processes)
    return {
        "nccl_version": "",
        "sagellm_version": load.version(),
        "cuda_runtime_version": 0,
        "cuda_driver_version": 0,
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
        "communicators_count": len(groups),
        "communicators": [_communicator(name, ranks, found) for (name, ranks), found in sorted(groups.items())],
        "ras": {"collection_time_sec": round(took, 3), "timeouts_count": silent},
    }


def _communicator(
    name: str, ranks: Sequence[int], found: Sequence[tuple[watch.Process, dict[str, Any]]]
) -> dict[str, Any]:
    digest = hashlib.sha256(f"{name}:{ranks}".encode()).hexdigest()
    running = [(process, group) for process, group in found if process.condition == watch.RUNNING]
    there = {group["rank"] for _, group in running}
    lost = {group["rank"]: process for process, group in found}
    missing = [_missing(rank, lost.get(rank)) for rank in range(len(ranks)) if rank not in there]
    return {
        "hash": f"0x{digest[:16]}",
        "secondary_hash": f"0x{digest[16:32]}:0x{digest[32:48]}",
        "name": name,
        "size": len(ranks),
        "ranks_count": len(running),
        "missing_ranks_count": len(missing),
        "ranks": [_rank(process, group) for process, group in sorted(running, key=lambda one: one[1]["rank"])],
        "missing_ranks": missing,
    }


def _where(rank: int, process: watch.Process | None) -> dict[str, Any]:
    about = process.raw["process"] if process else {"host": "", "pid": 0}
    return {
        "rank": rank,
        "host": about["host"],
        "pid": about["pid"],
        "cuda_dev": NO_DEVICE,
        "nvml_dev": NO_DEVICE,
    }


def _rank(process: watch.Process, group: dict[str, Any]) -> dict[str, Any]:
    counts = group["kinds"]
    return {
        **_where(group["rank"], process),
        "status": {
            "init_state": SUCCESS,
            "async_error": REMOTE_ERROR if group["fault"] else SUCCESS,
            "finalize_called": False,
            "destroy_flag": False,
            "abort_flag": False,
        },
        "collective_counts": {theirs: counts.get(ours, 0) for ours, theirs in NAMES.items()},
    }


def _missing(rank: int, process: watch.Process | None) -> dict[str, Any]:
    dead = process is not None and process.condition == watch.ENDED
    return {**_where(rank, process), "status": {"unresponsive": not dead, "considered_dead": dead}}
