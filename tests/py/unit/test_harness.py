"""How the test process waits for the ranks of the pool."""

from __future__ import annotations

import os
import time

import pytest
from harness import Context, Rank, run_ranks


def pauses(ctx: Context, seconds: float) -> int:
    time.sleep(seconds)
    return ctx.rank


def ends(ctx: Context) -> None:
    if ctx.rank == 1:
        os._exit(3)


def test_the_pool_sleeps_until_a_rank_says_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the ranks is a tenth of a second after the last one, or follows a message."""
    run_ranks(pauses, 2, 0.0)
    looks, pump = 0, Rank.pump

    def counted(self: Rank) -> None:
        nonlocal looks
        looks += 1
        pump(self)

    monkeypatch.setattr(Rank, "pump", counted)
    begin = time.monotonic()
    assert run_ranks(pauses, 2, 0.5) == [0, 1]
    assert looks <= 2 * ((time.monotonic() - begin) / 0.1 + 4)


def test_a_rank_of_the_pool_that_ends_is_reported() -> None:
    with pytest.raises(AssertionError, match="rank 1: exit code 3"):
        run_ranks(ends, 2)
    assert run_ranks(pauses, 2, 0.0) == [0, 1]
