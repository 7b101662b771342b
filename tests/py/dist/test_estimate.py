"""c10d's time estimation: calls between its start and end are estimated and not made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_fresh, run_ranks

pytestmark = beyond_gloo("it estimates no times")


def estimated(call: Callable[[], object]) -> float:
    with dist._time_estimator() as estimate:
        call()
    assert estimate.estimated_time is not None
    return estimate.estimated_time


def estimates(ctx: Context) -> None:
    import torch_sagellm

    assert dist.group.WORLD._get_backend(torch.device("cpu"))._supports_time_estimate
    small, large = torch.ones(2), torch.ones(1 << 20)
    out = torch.empty(ctx.world_size << 20)
    model = estimated(lambda: dist.all_reduce(large))
    assert estimated(lambda: dist.all_reduce(small)) < model
    text = expect_raises(ValueError, lambda: estimated(lambda: dist.send(small, (ctx.rank + 1) % ctx.world_size)))
    assert "no send can be estimated" in text

    # The failed estimation above has not ended. Until it ends, the next one is refused.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert "is running" in expect_raises(ValueError, lambda: estimated(lambda: None))
    assert backend._end_time_estimate() == 0.0
    assert "has not started" in expect_raises(ValueError, backend._end_time_estimate)

    torch_sagellm.reset_stats()
    if ctx.rank == 0:  # no other rank takes part
        parts = [
            estimated(lambda: dist.all_reduce(large)),
            estimated(lambda: dist.all_gather_into_tensor(out, large)),
            estimated(lambda: dist.barrier()),
        ]

        def all_of_them() -> None:
            work = dist.all_reduce(large, async_op=True)
            assert work is not None and work.is_completed()
            assert work.wait() and work.get_future().wait()[0] is not None
            dist.all_gather_into_tensor(out, large)
            dist.barrier()

        assert estimated(all_of_them) == pytest.approx(sum(parts), rel=1e-3)
    assert torch_sagellm.get_stats()["total_count"] == 0 and (large == 1).all(), "nothing was made"

    for _ in range(20):
        dist.all_reduce(large)
    median = torch_sagellm.get_stats()["ops"]["all_reduce"]["latency"]["p50_ms"] * 1e3
    assert estimated(lambda: dist.all_reduce(large)) == pytest.approx(median, rel=0.15), "what it has measured"
    dist.barrier()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_are_estimated_and_not_made(world_size: int) -> None:
    """By the model, then by the group's own measurements; the times of several calls are added."""
    run_ranks(estimates, world_size, fresh_group=True)


def under_a_delegate(ctx: Context) -> None:
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(engine="delegate"))
    assert not dist.group.WORLD._get_backend(torch.device("cpu"))._supports_time_estimate
    expect_raises(NotImplementedError, lambda: estimated(lambda: dist.barrier()))
    dist.destroy_process_group()


def test_a_delegates_calls_are_not_estimated() -> None:
    """The package does not know the times of a delegate."""
    run_fresh(under_a_delegate, 2)
