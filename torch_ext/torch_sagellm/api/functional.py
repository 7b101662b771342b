"""Collectives as plain functions with arguments in the order input, output; each returns its result.

Each function checks its tensors and then calls torch.distributed in ``group`` (None: the default group, of any
backend). Ranks in ``src`` and ``dst`` are those of the default group, as in torch. If a deadline passes, the error is a
``CommTimeoutError``.

Example::

    parts = torch_sagellm.all_gather(torch.ones(2))  # a list with a tensor of each rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_sagellm.api.arguments import Op, checked_dense, checked_op, checked_result, in_memory, rows_of_slice
from torch_sagellm.api.errors import with_timeouts
from torch_sagellm.api.futures import CommFuture

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "send",
]

Tensors = Sequence[torch.Tensor]


def all_reduce(tensor: torch.Tensor, op: Op = "sum", group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Combines ``tensor`` element by element over all ranks, in place, and returns it.

    ``op`` is "sum", "avg" ("mean"), "max", "min", "prod", or torch's ReduceOp.

    Example::

        assert torch_sagellm.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]  # two ranks
    """
    checked_result("all_reduce", tensor)
    with_timeouts(lambda: dist.all_reduce(tensor, op=_named("all_reduce", op), group=group))
    return tensor


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Returns the tensors of all ranks, which have one shape and dtype, as a list in rank order.

    Example::

        assert len(torch_sagellm.all_gather(torch.ones(3))) == dist.get_world_size()
    """
    checked_dense("all_gather", tensor)
    own = in_memory(tensor)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with_timeouts(lambda: dist.all_gather(parts, own, group=group))
    return parts


def reduce_scatter(
    tensor: torch.Tensor | Tensors, op: Op = "sum", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Combines the inputs of all ranks; returns this rank's part of the result as a new tensor.

    ``tensor`` is a list with a tensor for each rank, all of one shape, or one tensor that is divided along dimension 0.
    Dimension 0 must then be a multiple of the number of ranks (ValueError).

    Example::

        part = torch_sagellm.reduce_scatter([torch.ones(3) for _ in range(dist.get_world_size())])
        assert part.shape == (3,)
    """
    chosen, ranks = _named("reduce_scatter", op), dist.get_world_size(group)
    if isinstance(tensor, torch.Tensor):
        checked_dense("reduce_scatter", tensor)
        rows = rows_of_slice("reduce_scatter", tensor, ranks)
        whole = in_memory(tensor)
        result = whole.new_empty((rows, *tensor.shape[1:]))
        with_timeouts(lambda: dist.reduce_scatter_tensor(result, whole, op=chosen, group=group))
        return result
    parts = _checked_list("reduce_scatter", "tensor", tensor, ranks)
    result = torch.empty_like(parts[0])
    with_timeouts(lambda: dist.reduce_scatter(result, parts, op=chosen, group=group))
    return result


def broadcast(tensor: torch.Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Writes the tensor of rank ``src`` into the tensors of the other ranks, in place; returns it.

    Example::

        assert torch_sagellm.broadcast(torch.tensor([dist.get_rank()]), src=1).item() == 1
    """
    checked_result("broadcast", tensor)
    with_timeouts(lambda: dist.broadcast(tensor, src=src, group=group))
    return tensor


def all_to_all(
    send_list: Tensors, recv_list: Sequence[torch.Tensor] | None = None, group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Sends ``send_list[r]`` to each rank r; returns the tensors received from all ranks, in rank order.

    ``recv_list`` has the tensors that receive the data; without it they are created with the shapes that this rank
    sends. torch's order of arguments is the opposite: with the lists in this order, ``dist.all_to_all(output, input)``
    would exchange them in the wrong direction, without an error.

    Example::

        send = [torch.full((2,), float(rank)) for rank in range(dist.get_world_size())]
        came = torch_sagellm.all_to_all(send)
        assert all(each.tolist() == [float(dist.get_rank())] * 2 for each in came)
    """
    ranks = dist.get_world_size(group)
    given = _checked_list("all_to_all", "send_list", send_list, ranks)
    taken = [torch.empty_like(each) for each in given] if recv_list is None else list(recv_list)
    if len(taken) != ranks:
        raise ValueError(f"sagellm all_to_all: recv_list has {len(taken)} tensors, expected {ranks}, one a rank")
    for each in taken:
        checked_result("all_to_all", each)
    with_timeouts(lambda: dist.all_to_all(taken, given, group=group))
    return taken


def send(tensor: torch.Tensor, dst: int, group: dist.ProcessGroup | None = None, tag: int = 0) -> None:
    """Sends ``tensor`` to rank ``dst``; after it returns, the memory may be changed.

    Example::

        if dist.get_rank() == 0:
            torch_sagellm.send(torch.ones(3), dst=1)
        elif dist.get_rank() == 1:
            assert torch_sagellm.recv(torch.empty(3), src=0).tolist() == [1.0] * 3
    """
    checked_dense("send", tensor)
    with_timeouts(lambda: dist.send(in_memory(tensor), dst, group=group, tag=tag))


def recv(
    tensor: torch.Tensor, src: int | None = None, group: dist.ProcessGroup | None = None, tag: int = 0
) -> torch.Tensor:
    """Receives into ``tensor`` from rank ``src``, or from any rank if ``src`` is None; returns ``tensor``.

    Example::

        neighbour = dist.get_rank() ^ 1
        sent = torch_sagellm.isend(torch.ones(3), neighbour)
        assert torch_sagellm.recv(torch.empty(3), neighbour).tolist() == [1.0] * 3
        sent.wait()
    """
    checked_result("recv", tensor)
    with_timeouts(lambda: dist.recv(tensor, src, group=group, tag=tag))
    return tensor


def isend(tensor: torch.Tensor, dst: int, group: dist.ProcessGroup | None = None, tag: int = 0) -> CommFuture:
    """``send`` as a future. ``tensor`` must not change before the future is done.

    Example::

        neighbour = dist.get_rank() ^ 1
        sent, came = torch_sagellm.isend(torch.ones(3), neighbour), torch_sagellm.irecv(torch.empty(3), neighbour)
        assert came.wait().tolist() == sent.wait().tolist()
    """
    checked_dense("isend", tensor)
    return CommFuture(dist.isend(in_memory(tensor), dst, group=group, tag=tag), tensor)


def irecv(
    tensor: torch.Tensor, src: int | None = None, group: dist.ProcessGroup | None = None, tag: int = 0
) -> CommFuture:
    """``recv`` as a future, whose ``wait()`` returns ``tensor``.

    Example::

        neighbour = dist.get_rank() ^ 1
        came = torch_sagellm.irecv(torch.empty(3), neighbour)
        torch_sagellm.send(torch.ones(3), neighbour)
        assert came.wait().tolist() == [1.0] * 3
    """
    checked_result("irecv", tensor)
    return CommFuture(dist.irecv(tensor, src, group=group, tag=tag), tensor)


def _named(what: str, op: Op) -> Any:
    return getattr(dist.ReduceOp, checked_op(what, op))


def _checked_list(what: str, name: str, tensors: Tensors, ranks: int) -> list[torch.Tensor]:
    """The tensors of a list, each in contiguous memory; a ValueError unless there is one tensor for each rank."""
    if isinstance(tensors, torch.Tensor) or len(tensors) != ranks:
        got = "one tensor" if isinstance(tensors, torch.Tensor) else f"{len(tensors)} tensors"
        raise ValueError(f"sagellm {what}: {name} is {got}, expected a list of {ranks}, one a rank")
    for each in tensors:
        checked_dense(what, each)
    return [in_memory(each) for each in tensors]
