"""One torch.distributed backend over shared memory, NCCL, HCCL and CNCL, with fusion, algorithm choice and statistics.

``init_process_group("sagellm")`` is all that a program needs.

torch finds the name through the module `_torch_sagellm_autoload`, which imports this package when a group is created.
Importing this package neither loads the extension nor starts a thread. A public name loads its module when it is first
used.
"""

from __future__ import annotations

import importlib
from typing import Any

import _torch_sagellm_autoload

#: Each module of this package that defines public names, and these names. `__init__.pyi` lists the same.
_NAMES = {
    "_C": ("Options",),
    "api.backends": (
        "CNCLBackend",
        "CPUBackend",
        "GlooBackend",
        "HCCLBackend",
        "NCCLBackend",
        "create_comm_backend",
        "safe_all_reduce",
    ),
    "api.buffers": (
        "CommFusionBuffer",
        "CommReport",
        "CommunicationBuffer",
        "batch_all_reduce",
        "monitor_communication",
    ),
    "api.comm_backend": ("CommBackend",),
    "api.compression": ("CompressionStats", "compressed_all_reduce"),
    "api.compression_hooks": ("CompressionHook", "PowerSGDHook"),
    "api.errors": ("CommTimeoutError",),
    "api.formats": ("Auto", "Compression", "Half", "Int8", "TopK"),
    "api.functional": (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "irecv",
        "isend",
        "recv",
        "reduce_scatter",
        "send",
    ),
    "api.fused": ("fused_all_reduce",),
    "api.futures": ("CommFuture", "CommListFuture"),
    "api.recovery": ("recover",),
    "api.sameness": ("assert_same",),
    "api.serve_as": ("serve_as",),
    "api.shared": ("empty", "empty_like", "is_reachable", "share_buckets", "shared", "shared_tensors", "zeros"),
    "collective_ops": (
        "AllGatherOperator",
        "AllReduceOperator",
        "BenchmarkResult",
        "BroadcastOperator",
        "DistributedCommunicator",
        "ReduceScatterOperator",
        "create_ring_topology",
    ),
    "observe.explain": ("Alternative", "Batch", "Explanation", "explain"),
    "observe.export": (
        "Endpoint",
        "log_to_tensorboard",
        "prometheus_text",
        "serve_prometheus",
        "write_prometheus",
        "write_trace",
    ),
    "observe.flight": ("convert_dumps", "dump_flight_record"),
    "observe.inspector": ("write_inspector",),
    "observe.recorder": ("debug_handlers",),
    "observe.stats": ("Gathered", "gather_stats", "get_stats", "reset_stats"),
    "observe.steps": ("StepReport", "Steps", "step"),
    "observe.timeline": ("Merged", "merge_traces"),
    "parallel.context": ("exchange_tokens", "ring_exchange"),
    "parallel.groups": ("ProcessGroupManager",),
    "parallel.moe": ("MoEDispatcher", "PendingDispatch"),
    "parallel.overlap": ("OverlapHandle", "OverlapReport", "OverlapScheduler"),
    "parallel.paged": ("recv_pages", "send_pages"),
    "parallel.routing": ("Routing",),
    "parallel.tensor": ("TensorParallelLinear",),
    "parallel.transfer": ("PendingTransfer", "irecv_tensors", "isend_tensors", "recv_tensors", "send_tensors"),
    "protocols.comm_backend": ("CommBackendProtocol", "CommOp"),
    "topology": ("TopologyInfo", "TopologyManager", "select_all_reduce_algorithm"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Loads the module of a name when the name is first used."""
    if name == "__version__":
        from torch_sagellm._private import load

        return load.version()
    if name == "Options":  # part of the extension; load.extension() checks it before loading it
        from torch_sagellm._private import load

        return load.extension().Options
    if name in _HOMES:
        found = getattr(importlib.import_module(f"torch_sagellm.{_HOMES[name]}"), name)
        globals()[name] = found  # the next look-up of the name takes 30 ns instead of 900
        return found
    raise _unknown("torch_sagellm", name)


def _unknown(module: str, name: str) -> AttributeError:
    """The error for an unknown name.

    For a private name the error suggests no other name, because Python also looks up private modules as attributes.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if not name.startswith("_"):
        text += importlib.import_module("torch_sagellm._private.nearest").meant(name, __all__)
    return AttributeError(text)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _public(module: str, name: str) -> Any:
    """A public name that older code imports from ``module``, whichever module of this package defines it."""
    if name in __all__ and _HOMES.get(name) != module.removeprefix("torch_sagellm."):
        return __getattr__(name)
    raise _unknown(module, name)


def _is_command_line() -> bool:
    """Whether this process is a command of ours, which registers the backend itself if it uses torch."""
    import os
    import sys

    if sys.argv[:1] == ["-m"]:  # Python is still looking for the module to run
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["torch_sagellm"]
    return os.path.basename(sys.argv[0] if sys.argv else "") == "torch-sagellm"


# `import torch_sagellm` registers the backend if torch's autoloading is off. `register` may import torch, which
# calls `register` again before it returns, so this must be the last line. The command line does not register here: a
# command that needs no torch, such as a probe that runs every few seconds, must not wait for torch.
if not _is_command_line():
    _torch_sagellm_autoload.register()
