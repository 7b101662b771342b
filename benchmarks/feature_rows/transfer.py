"""Lists of tensors from rank to rank, compared with one message of the same number of bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import torch_sagellm
from feature_rows.row import HERE, Made, Place, Row, nothing


def lists(count: int, shape: tuple[int, ...], asynchronous: bool = False) -> Callable[[], Made]:
    def make() -> Made:
        rank = dist.get_rank()
        given = [torch.full(shape, float(number)) for number in range(count)]
        place = [torch.empty(shape) for _ in given]
        whole = torch.cat([each.flatten() for each in given])

        def ours() -> None:
            if asynchronous:
                begin = torch_sagellm.isend_tensors if rank == 0 else torch_sagellm.irecv_tensors
                (begin(given, 1) if rank == 0 else begin(0, out=place)).wait()
            elif rank == 0:
                torch_sagellm.send_tensors(given, 1)
            else:
                torch_sagellm.recv_tensors(0, out=place)
            dist.barrier()

        def one() -> None:
            dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)
            dist.barrier()

        ours()
        assert rank == 0 or all(torch.equal(a, b) for a, b in zip(given, place, strict=True))
        return ours, one, nothing

    return make


def pages(count: int, together: int) -> Callable[[], Made]:
    """8 layers of a cache, of which ``count`` pages of 32 KiB are sent.

    ``together``: pages with consecutive numbers.
    """

    def make() -> Made:
        rank = dist.get_rank()
        cache = torch.full((8, 4 * count, 16, 512), float(rank))
        blocks = [number // together * 2 * together + number % together for number in range(count)]
        whole = torch.full((8, count, 16, 512), 0.0)

        def ours() -> None:
            if rank == 0:
                torch_sagellm.send_pages(cache.unbind(0), blocks, 1)
            else:
                torch_sagellm.recv_pages(cache.unbind(0), blocks, 0)
            dist.barrier()

        def one() -> None:
            dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)
            dist.barrier()

        ours()
        assert float(cache.sum()) == (0.0 if rank == 0 else float(cache.numel() - whole.numel()))
        return ours, one, nothing

    return make


ONE = "one dist.send of as many bytes"
APART = Place(2, 2)
ROWS = [
    Row("transfer", "2,000 tensors of 64 B", ONE, HERE, 2.0, lists(2000, (16,))),
    Row("transfer", "2,000 tensors of 4 KiB", ONE, HERE, 2.0, lists(2000, (1024,))),
    Row("transfer", "32 tensors of 512 KiB", ONE, HERE, 1.5, lists(32, (2, 16, 64, 64))),
    Row("transfer", "isend_tensors, 32 tensors of 512 KiB", ONE, HERE, 1.5, lists(32, (2, 16, 64, 64), True)),
    Row("transfer", "send_pages, 8 layers, 64 pages of 32 KiB, single", ONE, HERE, 2.0, pages(64, 1)),
    Row("transfer", "send_pages, 8 layers, 64 pages of 32 KiB, 8 in sequence", ONE, HERE, 2.0, pages(64, 8)),
    Row("transfer", "2,000 tensors of 2 KiB", ONE, APART, 2.0, lists(2000, (512,))),
    Row("transfer", "2,000 tensors of 4 KiB", ONE, APART, 2.0, lists(2000, (1024,))),
    Row("transfer", "32 tensors of 512 KiB", ONE, APART, 1.5, lists(32, (2, 16, 64, 64))),
    Row("transfer", "send_pages, 8 layers, 64 pages of 32 KiB, single", ONE, APART, 2.0, pages(64, 1)),
]
