"""One torch.distributed backend over shared memory, NCCL, HCCL and CNCL, with fusion, algorithm choice and statistics.

``init_process_group("sagellm")`` is all that a program needs.

torch finds the name by way of the module `_torch_sagellm_autoload`, which imports this package when a group is made.
Here too nothing is loaded before it is used: no extension, no thread, no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import _torch_sagellm_autoload

if TYPE_CHECKING:
    from torch_sagellm._C import Options as Options
    from torch_sagellm._fused import fused_all_reduce as fused_all_reduce
    from torch_sagellm._serve_as import serve_as as serve_as
    from torch_sagellm.api.backends import CNCLBackend as CNCLBackend
    from torch_sagellm.api.backends import CPUBackend as CPUBackend
    from torch_sagellm.api.backends import GlooBackend as GlooBackend
    from torch_sagellm.api.backends import HCCLBackend as HCCLBackend
    from torch_sagellm.api.backends import NCCLBackend as NCCLBackend
    from torch_sagellm.api.backends import create_comm_backend as create_comm_backend
    from torch_sagellm.api.backends import safe_all_reduce as safe_all_reduce
    from torch_sagellm.api.buffers import CommFusionBuffer as CommFusionBuffer
    from torch_sagellm.api.buffers import CommReport as CommReport
    from torch_sagellm.api.buffers import CommunicationBuffer as CommunicationBuffer
    from torch_sagellm.api.buffers import batch_all_reduce as batch_all_reduce
    from torch_sagellm.api.buffers import monitor_communication as monitor_communication
    from torch_sagellm.api.comm_backend import CommBackend as CommBackend
    from torch_sagellm.api.compression import Compression as Compression
    from torch_sagellm.api.compression import CompressionHook as CompressionHook
    from torch_sagellm.api.compression import CompressionStats as CompressionStats
    from torch_sagellm.api.compression import Half as Half
    from torch_sagellm.api.compression import Int8 as Int8
    from torch_sagellm.api.compression import PowerSGDHook as PowerSGDHook
    from torch_sagellm.api.compression import TopK as TopK
    from torch_sagellm.api.compression import compressed_all_reduce as compressed_all_reduce
    from torch_sagellm.api.errors import CommTimeoutError as CommTimeoutError
    from torch_sagellm.api.futures import CommFuture as CommFuture
    from torch_sagellm.api.recovery import recover as recover
    from torch_sagellm.collective_ops import AllGatherOperator as AllGatherOperator
    from torch_sagellm.collective_ops import AllReduceOperator as AllReduceOperator
    from torch_sagellm.collective_ops import BenchmarkResult as BenchmarkResult
    from torch_sagellm.collective_ops import BroadcastOperator as BroadcastOperator
    from torch_sagellm.collective_ops import DistributedCommunicator as DistributedCommunicator
    from torch_sagellm.collective_ops import ReduceScatterOperator as ReduceScatterOperator
    from torch_sagellm.collective_ops import create_ring_topology as create_ring_topology
    from torch_sagellm.observe.explain import Alternative as Alternative
    from torch_sagellm.observe.explain import Batch as Batch
    from torch_sagellm.observe.explain import Explanation as Explanation
    from torch_sagellm.observe.explain import explain as explain
    from torch_sagellm.observe.export import Endpoint as Endpoint
    from torch_sagellm.observe.export import log_to_tensorboard as log_to_tensorboard
    from torch_sagellm.observe.export import prometheus_text as prometheus_text
    from torch_sagellm.observe.export import serve_prometheus as serve_prometheus
    from torch_sagellm.observe.export import write_prometheus as write_prometheus
    from torch_sagellm.observe.export import write_trace as write_trace
    from torch_sagellm.observe.flight import convert_dumps as convert_dumps
    from torch_sagellm.observe.flight import dump_flight_record as dump_flight_record
    from torch_sagellm.observe.inspector import write_inspector as write_inspector
    from torch_sagellm.observe.recorder import debug_handlers as debug_handlers
    from torch_sagellm.observe.stats import Gathered as Gathered
    from torch_sagellm.observe.stats import gather_stats as gather_stats
    from torch_sagellm.observe.stats import get_stats as get_stats
    from torch_sagellm.observe.stats import reset_stats as reset_stats
    from torch_sagellm.observe.timeline import Merged as Merged
    from torch_sagellm.observe.timeline import merge_traces as merge_traces
    from torch_sagellm.parallel.context import exchange_tokens as exchange_tokens
    from torch_sagellm.parallel.context import ring_exchange as ring_exchange
    from torch_sagellm.parallel.groups import ProcessGroupManager as ProcessGroupManager
    from torch_sagellm.parallel.moe import MoEDispatcher as MoEDispatcher
    from torch_sagellm.parallel.moe import Routing as Routing
    from torch_sagellm.parallel.overlap import OverlapHandle as OverlapHandle
    from torch_sagellm.parallel.overlap import OverlapReport as OverlapReport
    from torch_sagellm.parallel.overlap import OverlapScheduler as OverlapScheduler
    from torch_sagellm.parallel.tensor import TensorParallelLinear as TensorParallelLinear
    from torch_sagellm.parallel.transfer import recv_tensors as recv_tensors
    from torch_sagellm.parallel.transfer import send_tensors as send_tensors
    from torch_sagellm.protocols.comm_backend import CommBackendProtocol as CommBackendProtocol
    from torch_sagellm.protocols.comm_backend import CommOp as CommOp
    from torch_sagellm.topology import TopologyInfo as TopologyInfo
    from torch_sagellm.topology import TopologyManager as TopologyManager
    from torch_sagellm.topology import select_all_reduce_algorithm as select_all_reduce_algorithm

#: Where the functions of the package live; their modules are loaded when the first of them is used.
_HOMES = {
    "Alternative": "observe.explain",
    "Batch": "observe.explain",
    "Explanation": "observe.explain",
    "explain": "observe.explain",
    "fused_all_reduce": "_fused",
    "serve_as": "_serve_as",
    "TopologyInfo": "topology",
    "TopologyManager": "topology",
    "select_all_reduce_algorithm": "topology",
    "get_stats": "observe.stats",
    "reset_stats": "observe.stats",
    "gather_stats": "observe.stats",
    "Gathered": "observe.stats",
    "prometheus_text": "observe.export",
    "write_prometheus": "observe.export",
    "serve_prometheus": "observe.export",
    "Endpoint": "observe.export",
    "write_trace": "observe.export",
    "log_to_tensorboard": "observe.export",
    "merge_traces": "observe.timeline",
    "Merged": "observe.timeline",
    "write_inspector": "observe.inspector",
    "debug_handlers": "observe.recorder",
    "dump_flight_record": "observe.flight",
    "convert_dumps": "observe.flight",
    "CommOp": "protocols.comm_backend",
    "CommBackendProtocol": "protocols.comm_backend",
    "CommTimeoutError": "api.errors",
    "recover": "api.recovery",
    "CommBackend": "api.comm_backend",
    "CommFuture": "api.futures",
    "CPUBackend": "api.backends",
    "NCCLBackend": "api.backends",
    "HCCLBackend": "api.backends",
    "CNCLBackend": "api.backends",
    "GlooBackend": "api.backends",
    "create_comm_backend": "api.backends",
    "safe_all_reduce": "api.backends",
    "CommFusionBuffer": "api.buffers",
    "CommReport": "api.buffers",
    "CommunicationBuffer": "api.buffers",
    "batch_all_reduce": "api.buffers",
    "monitor_communication": "api.buffers",
    "AllGatherOperator": "collective_ops",
    "AllReduceOperator": "collective_ops",
    "BenchmarkResult": "collective_ops",
    "BroadcastOperator": "collective_ops",
    "DistributedCommunicator": "collective_ops",
    "ReduceScatterOperator": "collective_ops",
    "create_ring_topology": "collective_ops",
    "ProcessGroupManager": "parallel.groups",
    "MoEDispatcher": "parallel.moe",
    "Routing": "parallel.moe",
    "OverlapHandle": "parallel.overlap",
    "OverlapReport": "parallel.overlap",
    "OverlapScheduler": "parallel.overlap",
    "TensorParallelLinear": "parallel.tensor",
    "CompressionStats": "api.compression",
    "Compression": "api.compression",
    "Half": "api.compression",
    "Int8": "api.compression",
    "TopK": "api.compression",
    "compressed_all_reduce": "api.compression",
    "CompressionHook": "api.compression",
    "PowerSGDHook": "api.compression",
    "exchange_tokens": "parallel.context",
    "ring_exchange": "parallel.context",
    "recv_tensors": "parallel.transfer",
    "send_tensors": "parallel.transfer",
}
__all__ = ["Options", "__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Loads names that need the extension or its build record on first use."""
    if name == "Options":
        from torch_sagellm import _load

        return _load.extension().Options
    if name == "__version__":
        from torch_sagellm import _load

        return _load.version()
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"torch_sagellm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'torch_sagellm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _public(module: str, name: str) -> Any:
    """A public name that older code imports from ``module``, whichever module of this package it lives in."""
    if name in __all__ and _HOMES.get(name) != module.removeprefix("torch_sagellm."):
        return __getattr__(name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _is_command_line() -> bool:
    """This process is a command of ours, which registers the backend itself if it uses torch."""
    import os
    import sys

    if sys.argv[:1] == ["-m"]:  # while Python looks for the module that it is to run
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["torch_sagellm"]
    return os.path.basename(sys.argv[0] if sys.argv else "") == "torch-sagellm"


# `import torch_sagellm` registers the backend where torch's autoloading is off. It may import torch, and torch then
# calls the same function in the middle of this line, so it must be the last one. The command line does not wait for
# torch's import where it needs no torch, as in a probe that is run every few seconds.
if not _is_command_line():
    _torch_sagellm_autoload.register()
