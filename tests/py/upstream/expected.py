"""The tests of torch's own suite that cannot pass with a backend of this name, and why. No other test may fail.

Tests of `torch.testing._internal.distributed.distributed_test`, by reason. A listed test that passes is also reported,
so that the list stays true.
"""

from __future__ import annotations

REASONS: dict[str, list[str]] = {
    # c10d gives every group of a third-party backend the type CUSTOM; DDP logs that type's name.
    'DDP logs the name "custom" for every third-party backend': ["test_ddp_logging_data_cpu"],
}

EXPECTED: dict[str, str] = {name: reason for reason, names in REASONS.items() for name in names}

# The tests of the default run: every kind of call, groups, DDP with its hooks, debugging aids. The long run has the
# whole suite.
CHOSEN = [
    "test_Backend_enum_class",
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_full_group",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_max",
    "test_all_reduce_sum_async",
    "test_barrier",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_full_group",
    "test_ddp_create_graph",
    "test_destroy_full_group",
    "test_gather_checks",
    "test_get_backend",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_reduce_sum_twice",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_send_recv_with_tag_autograd_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]
