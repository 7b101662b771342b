"""Test bodies for `tests/py/device` and `tests/py/gpu`: calls on a device that fail, and first calls of each sort."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Tensors = list[torch.Tensor]
#: A form of a call: takes a tensor and a group, returns the results.
Way = Callable[[torch.Tensor, Any], Tensors]


def sync(one: torch.Tensor, group: Any) -> Tensors:
    dist.all_reduce(one, group=group)
    return [one]


def waited(one: torch.Tensor, group: Any) -> Tensors:
    work = dist.all_reduce(one, group=group, async_op=True)
    work.wait()
    return [one]


def not_waited(one: torch.Tensor, group: Any) -> Tensors:
    dist.all_reduce(one, group=group, async_op=True)
    return [one]


def future(one: torch.Tensor, group: Any) -> Tensors:
    dist.all_reduce(one, group=group, async_op=True).get_future().wait()
    return [one]


def listed(one: torch.Tensor, group: Any) -> Tensors:
    both = [one, one.clone()]
    dist.all_reduce_coalesced(both, group=group)
    return both


def batch(one: torch.Tensor, group: Any) -> Tensors:
    other = 1 - dist.get_rank()
    pair = [dist.P2POp(dist.isend, one.clone(), other, group), dist.P2POp(dist.irecv, one, other, group)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return [one]


WAYS: list[Way] = [sync, waited, not_waited, future, listed, batch]


def use(way: Way, name: str, group: Any = None) -> tuple[bool, str]:
    """Uses a call's results like a program does. Returns whether the results were used, and the text of the error."""
    reached, text = False, ""
    try:
        try:
            results = way(torch.full((4,), dist.get_rank() + 1.0, device=name), group)
            torch.accelerator.synchronize()
            reached = True
            del results
        except RuntimeError as error:
            text = str(error)
            nobody_calls_again(0.3)
    # With HCCL the stream itself raises a RuntimeError. Our error is then raised while the handler above runs.
    except dist.DistBackendError as error:
        text = str(error)
    return reached, text


def nobody_calls_again(seconds: float) -> None:
    """Runs bytecode for a while, so that a pending exception would be raised here."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def firsts(rank: int, name: str, group: Any) -> dict[str, Callable[[], torch.Tensor | None]]:
    """For each sort of call: a function that makes the first call of this sort in a group of two ranks. The function
    returns the result, which must be all ones, or None if there is nothing to check."""
    ones, two = torch.ones(4, device=name), torch.ones(8, device=name)

    def also(out: torch.Tensor | None, call: Any, *args: Any, **more: Any) -> Callable[[], torch.Tensor | None]:
        def run() -> torch.Tensor | None:
            call(*args, group=group, **more)
            return out

        return run

    def batch() -> torch.Tensor:
        out = torch.zeros(4, device=name)
        ops = [dist.P2POp(dist.isend, ones, 1 - rank, group), dist.P2POp(dist.irecv, out, 1 - rank, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    def messages() -> torch.Tensor:
        # Both ranks send first.
        out = torch.zeros(4, device=name)
        works = [dist.isend(ones, 1 - rank, group), dist.irecv(out, 1 - rank, group)]
        for work in works:
            work.wait()
        return out

    def empty(count: int) -> torch.Tensor:
        return torch.zeros(count, device=name)

    large = torch.ones(1 << 19, device=name)
    whole, block, swapped, scattered = empty(8), empty(4), empty(8), empty(4)
    gathered = [empty(4), empty(4)] if rank == 0 else None
    parts = [ones, ones] if rank == 0 else None
    return {
        "all_reduce": also(None, dist.all_reduce, ones.clone()),
        "large all_reduce": also(None, dist.all_reduce, large),
        "broadcast": also(None, dist.broadcast, ones.clone(), 1),
        "reduce": also(None, dist.reduce, ones.clone(), 0),
        "all_gather": also(whole, dist.all_gather_into_tensor, whole, ones),
        "gather": also(gathered and gathered[1], dist.gather, ones, gathered, 0),
        "scatter": also(scattered, dist.scatter, scattered, parts, 0),
        "reduce_scatter": also(None, dist.reduce_scatter_tensor, block, two),
        "all_to_all": also(swapped, dist.all_to_all_single, swapped, two),
        "batch_isend_irecv": batch,
        "isend and irecv": messages,
    }


SORTS = list(firsts(0, "cpu", None))


def failed(call: Callable[[], Any]) -> tuple[str, str]:
    """Returns type and text of the error that the call or the synchronisation of the device after it raises."""
    try:
        call()
        torch.accelerator.synchronize()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "no error", ""
