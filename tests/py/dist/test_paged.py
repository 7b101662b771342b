"""`send_pages` and `recv_pages`: pages chosen by a block table on each side, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, run_ranks

pytestmark = beyond_gloo("pages of a cache")


def caches() -> list[torch.Tensor]:
    """Layers of several dtypes and page shapes. One has pages that are not contiguous, one has empty pages."""
    return [
        torch.arange(12 * 6.0).view(12, 2, 3),
        torch.arange(12 * 4).view(12, 4).to(torch.bfloat16),
        torch.arange(2 * 12 * 5).view(2, 12, 5).transpose(0, 1),
        torch.arange(12),
        torch.empty(12, 0),
        torch.arange(12 * 512.0).view(12, 512),
        torch.arange(12 * 70_000).view(12, -1).to(torch.int16),
    ]


def arrive(ctx: Context, table: list[int], into: list[int], window: int) -> None:
    import torch_sagellm

    if ctx.rank == 0:
        torch_sagellm.send_pages(caches(), table, 1, window=window)
        strided = torch.tensor(table, dtype=torch.int64).repeat_interleave(2)[::2]
        torch_sagellm.send_pages((layer for layer in caches()), strided, 1, tag=3, window=window)
    elif ctx.rank == 1:
        for tag in (0, 3):
            came, order = [torch.zeros_like(layer) for layer in caches()], []
            places = torch.tensor(into, dtype=torch.int64).repeat_interleave(2)[::2] if tag else into
            torch_sagellm.recv_pages(came, places, 0, tag=tag, ready=order.append)
            assert order == list(range(len(came)))
            for layer, given in zip(came, caches(), strict=True):
                expected = torch.zeros_like(given)
                expected[into] = given[table]
                assert torch.equal(layer, expected)
    dist.barrier()


@pytest.mark.parametrize("window", [1, 1000, 64 << 20])
@pytest.mark.parametrize(
    ("table", "into"), [([3, 4, 5], [0, 1, 2]), ([9, 0, 4, 4], [7, 1, 11, 2]), ([], []), ([0, 1, 2, 8], [5, 3, 4, 6])]
)
def test_pages_arrive_where_the_receivers_table_says(table: list[int], into: list[int], window: int) -> None:
    run_ranks(arrive, 2, table, into, window)


def of_functional(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as functional collectives return it: a subclass without memory of its own."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(tensor)


def refused(ctx: Context) -> None:
    import torch_sagellm

    cache = [torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2)]
    for text, call in {
        "window is 0": lambda: torch_sagellm.send_pages(cache, [0], 1, window=0),
        "expected a list of page numbers": lambda: torch_sagellm.recv_pages(cache, torch.ones(2), 0),
        "names a page twice": lambda: torch_sagellm.recv_pages(cache, [1, 1], 0),
        "blocks from 0 to 4, and layer 0 has pages 0 to 3": lambda: torch_sagellm.recv_pages(cache, [0, 4], 0),
        "on meta": lambda: torch_sagellm.recv_pages([torch.empty(4, 2, device="meta")], [0], 0),
        "layer 0 is a AsyncCollectiveTensor": lambda: torch_sagellm.recv_pages([of_functional(cache[0])], [0], 0),
    }.items():
        if ctx.rank == 1 or "window" not in text:
            assert text in expect_raises(ValueError, call)
    if ctx.rank == 0:
        assert "blocks from -1" in expect_raises(ValueError, lambda: torch_sagellm.send_pages(cache, [-1], 1))
        for _ in range(4):
            torch_sagellm.send_pages(cache, [2, 0], 1)
        dist.send(torch.full((256,), 7, dtype=torch.uint8), 1)
        torch_sagellm.send_pages(cache, [3], 1)
    elif ctx.rank == 1:
        text = expect_raises(RuntimeError, lambda: torch_sagellm.recv_pages(cache, [0], 0))
        assert "rank 0 has given up" in text
        for other, said in (
            (lambda: [torch.zeros(4, 2), torch.zeros(4, 3)], "layer 1 is 2 pages of [2] of float32, expected 2 pages"),
            (lambda: [torch.zeros(4, 2)], "2 layers came, expected 1"),
            (lambda: [torch.zeros(4, 2)] * 3, "2 layers came, expected 3"),
            (lambda: [torch.zeros(4, 2, dtype=torch.int32)] * 2, "of [2] of float32, expected 2 pages of [2] of int32"),
        ):
            layers = other()
            assert said in expect_raises(ValueError, lambda these=layers: torch_sagellm.recv_pages(these, [0, 1], 0))
            differs = 0 if "int32" in said else 1
            assert torch.equal(layers[0][:2], cache[0][[2, 0]]) or differs == 0
        text = expect_raises(RuntimeError, lambda: torch_sagellm.recv_pages(cache, [0], 0))
        assert "rank 0 did not call send_pages" in text
        last = torch.zeros(4, 2), torch.zeros(4, 2)
        torch_sagellm.recv_pages(last, [1], 0)
        assert last[1][1].tolist() == [6.0, 7.0], "later messages arrive"
    dist.barrier()


def test_what_does_not_fit_is_refused_and_later_pages_arrive() -> None:
    run_ranks(refused, 2)


def held_back(ctx: Context) -> Any:
    """Rank 1 calls only when rank 0 waits for it. Eight layers of 16 MiB; a window holds half a layer."""
    import torch_sagellm
    from torch_sagellm.parallel import moving

    ctx.init()
    asked: list[int] = []
    if ctx.rank == 1:
        ctx.listen()
        cache = [torch.zeros(4, 1 << 20) for _ in range(8)]
        torch_sagellm.recv_pages(cache, range(4), 0)
        assert all(bool((layer == number).all()) for number, layer in enumerate(cache))
        dist.destroy_process_group()
        return None
    begin, ours = dist.isend, moving.lists_of(None)

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            if len(asked) < 8 and not self.work.is_completed() and not told:
                told.append(len(asked))
                ctx.tell(len(asked))
            self.work.wait()

    class Lists:
        def _send_rows(self, *given: Any) -> Watched:
            return Watched(ours._send_rows(*given))

    told: list[int] = []
    dist.isend = lambda tensor, **named: Watched(begin(tensor, **named))
    moving.lists_of = lambda _: Lists()

    def computed() -> Iterator[torch.Tensor]:
        for number in range(8):
            asked.append(number)
            yield torch.full((4, 1 << 20), float(number))

    torch_sagellm.send_pages(computed(), range(4), 1, window=8 << 20)
    dist.isend = begin
    assert len(asked) == 8
    dist.destroy_process_group()
    return None


def test_a_receiver_that_has_not_called_holds_the_generator_back() -> None:
    with launch(held_back, 2) as job:
        assert job.hear(0) == 1, "the layers that were computed when the sender began to wait"
        job.say(1, "go")
        job.values(60)
