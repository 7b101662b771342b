"""The package's public names, for type checkers and for readers.

Each name is listed once, in one line, with the module that defines it. That module is loaded when the name is first
used. `__init__.py` has the same list, for programs.
"""

from torch_sagellm._C import Options as Options
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
from torch_sagellm.api.compression import CompressionStats as CompressionStats
from torch_sagellm.api.compression import compressed_all_reduce as compressed_all_reduce
from torch_sagellm.api.compression_hooks import CompressionHook as CompressionHook
from torch_sagellm.api.compression_hooks import PowerSGDHook as PowerSGDHook
from torch_sagellm.api.errors import CommTimeoutError as CommTimeoutError
from torch_sagellm.api.formats import Auto as Auto
from torch_sagellm.api.formats import Compression as Compression
from torch_sagellm.api.formats import Half as Half
from torch_sagellm.api.formats import Int8 as Int8
from torch_sagellm.api.formats import TopK as TopK
from torch_sagellm.api.functional import all_gather as all_gather
from torch_sagellm.api.functional import all_reduce as all_reduce
from torch_sagellm.api.functional import all_to_all as all_to_all
from torch_sagellm.api.functional import broadcast as broadcast
from torch_sagellm.api.functional import irecv as irecv
from torch_sagellm.api.functional import isend as isend
from torch_sagellm.api.functional import recv as recv
from torch_sagellm.api.functional import reduce_scatter as reduce_scatter
from torch_sagellm.api.functional import send as send
from torch_sagellm.api.fused import fused_all_reduce as fused_all_reduce
from torch_sagellm.api.futures import CommFuture as CommFuture
from torch_sagellm.api.futures import CommListFuture as CommListFuture
from torch_sagellm.api.recovery import recover as recover
from torch_sagellm.api.sameness import assert_same as assert_same
from torch_sagellm.api.serve_as import serve_as as serve_as
from torch_sagellm.api.shared import empty as empty
from torch_sagellm.api.shared import empty_like as empty_like
from torch_sagellm.api.shared import is_reachable as is_reachable
from torch_sagellm.api.shared import share_buckets as share_buckets
from torch_sagellm.api.shared import shared as shared
from torch_sagellm.api.shared import shared_tensors as shared_tensors
from torch_sagellm.api.shared import zeros as zeros
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
from torch_sagellm.observe.steps import StepReport as StepReport
from torch_sagellm.observe.steps import Steps as Steps
from torch_sagellm.observe.steps import step as step
from torch_sagellm.observe.timeline import Merged as Merged
from torch_sagellm.observe.timeline import merge_traces as merge_traces
from torch_sagellm.parallel.context import exchange_tokens as exchange_tokens
from torch_sagellm.parallel.context import ring_exchange as ring_exchange
from torch_sagellm.parallel.groups import ProcessGroupManager as ProcessGroupManager
from torch_sagellm.parallel.moe import MoEDispatcher as MoEDispatcher
from torch_sagellm.parallel.moe import PendingDispatch as PendingDispatch
from torch_sagellm.parallel.overlap import OverlapHandle as OverlapHandle
from torch_sagellm.parallel.overlap import OverlapReport as OverlapReport
from torch_sagellm.parallel.overlap import OverlapScheduler as OverlapScheduler
from torch_sagellm.parallel.paged import recv_pages as recv_pages
from torch_sagellm.parallel.paged import send_pages as send_pages
from torch_sagellm.parallel.routing import Routing as Routing
from torch_sagellm.parallel.tensor import TensorParallelLinear as TensorParallelLinear
from torch_sagellm.parallel.transfer import PendingTransfer as PendingTransfer
from torch_sagellm.parallel.transfer import irecv_tensors as irecv_tensors
from torch_sagellm.parallel.transfer import isend_tensors as isend_tensors
from torch_sagellm.parallel.transfer import recv_tensors as recv_tensors
from torch_sagellm.parallel.transfer import send_tensors as send_tensors
from torch_sagellm.protocols.comm_backend import CommBackendProtocol as CommBackendProtocol
from torch_sagellm.protocols.comm_backend import CommOp as CommOp
from torch_sagellm.topology import TopologyInfo as TopologyInfo
from torch_sagellm.topology import TopologyManager as TopologyManager
from torch_sagellm.topology import select_all_reduce_algorithm as select_all_reduce_algorithm

__version__: str
__all__: list[str]

def __dir__() -> list[str]: ...
def _public(module: str, name: str) -> object: ...
