"""The public calls of torch.distributed and of this package that communicate. Tests compare their tables of calls with
these, so a new call fails every test whose table lacks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch.distributed as dist

#: Calls of torch.distributed that exchange no data, or create and end groups (test_groups.py, test_split_shrink.py).
TORCHS_OTHERS = {
    "destroy_process_group", "get_backend", "get_backend_config", "get_backend_impl", "get_default_backend_for_device",
    "get_global_rank", "get_group_rank", "get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank",
    "get_world_size", "init_process_group", "is_backend_available", "is_gloo_available", "is_initialized",
    "is_mpi_available", "is_nccl_available", "is_torchelastic_launched", "is_ucc_available", "is_xccl_available",
    "new_group", "new_subgroups", "new_subgroups_by_enumeration", "record_comm", "set_timeout", "shrink_group",
    "split_group", "supports_complex",
}  # fmt: skip
#: Names in torch.distributed that are aliases of another function, or wrappers that only call it.
SAME = {
    "all_gather_single": "all_gather_into_tensor",
    "gather_into_tensor": "gather_single",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
#: Names of this package that exchange no data or only text, and classes of results.
OUR_OTHERS = {
    "Alternative", "Auto", "Batch", "BenchmarkResult", "CommBackendProtocol", "CommFuture", "CommListFuture",
    "CommOp", "CommReport", "CommTimeoutError", "CommunicationBuffer", "Compression", "CompressionStats", "Endpoint",
    "Explanation", "Gathered", "Half", "Int8", "Merged", "Options", "OverlapHandle", "OverlapReport",
    "PendingDispatch", "PendingTransfer", "ProcessGroupManager", "Routing", "StepReport", "Steps", "TopK",
    "TopologyInfo", "TopologyManager", "convert_dumps", "create_comm_backend", "debug_handlers", "dump_flight_record",
    "empty", "empty_like", "explain", "gather_stats", "get_stats", "is_reachable", "log_to_tensorboard",
    "merge_traces", "monitor_communication", "prometheus_text", "recover", "reset_stats",
    "select_all_reduce_algorithm", "serve_as", "serve_prometheus", "shared", "shared_tensors", "step",
    "write_inspector", "write_prometheus", "write_trace", "zeros",
}  # fmt: skip
#: The class whose methods are public calls.
COMM = "CommBackend"


def _public() -> set[str]:
    """Returns the public calls as "dist.name", "package.name" and "comm.name"."""
    import torch_sagellm

    torchs = {name for name in dist.distributed_c10d.__all__ if inspect.isfunction(getattr(dist, name, None))}
    torchs.add("monitored_barrier")
    comms = {name for name, _ in inspect.getmembers(torch_sagellm.CommBackend, inspect.isfunction) if name[0] != "_"}
    found = {f"dist.{SAME.get(name, name)}" for name in torchs - TORCHS_OTHERS}
    found |= {f"package.{name}" for name in torch_sagellm.__all__ if name not in OUR_OTHERS and name[0] != "_"}
    return found | {f"comm.{name}" for name in comms - {"describe", "explain", "get_stats"}}


def missing(table: Iterable[str], elsewhere: dict[str, str]) -> str:
    """Names the public calls that are neither in the table nor in `elsewhere`, which has a reason for each of its
    calls. Also names entries of `elsewhere` that are no public calls."""
    public, have = _public(), set(table)
    lacking = sorted(public - have - set(elsewhere))
    stale = sorted(set(elsewhere) - public - {f"dist.{name}" for name in SAME.values()})
    return ", ".join([*(f"{name} is missing" for name in lacking), *(f"{name} is no call" for name in stale)])
