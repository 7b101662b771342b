"""The option ``verify``: a bit that changes in one rank's result is found, and the error names that rank."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hang_texts import compare
from harness import Context, beyond_gloo, expect_raises, run_fresh

pytestmark = beyond_gloo("an option of this package")


def flipped(ctx: Context, size: int, **options: Any) -> str:
    """The last rank changes a bit of its result again and again while operations run. Returns the error's text."""
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(**options))
    mine = torch.full((size,), float(ctx.rank))
    result = torch.zeros(size * ctx.world_size)
    over = threading.Event()

    def flip() -> None:
        bits = memoryview(result.view(torch.int32).numpy())
        while not over.is_set():
            bits[size // 3] ^= 1 << 20

    def gather() -> None:
        for _ in range(200_000):  # on a busy machine the thread may not run during many calls
            dist.all_gather_into_tensor(result, mine)

    thread = threading.Thread(target=flip, daemon=True)
    if ctx.rank == ctx.world_size - 1:
        thread.start()
    text = expect_raises(RuntimeError, gather)
    over.set()
    ctx.tell("done")
    ctx.listen()
    return text


def texts(ranks: int, size: int, env: dict[str, str] | None = None, **options: Any) -> list[str]:
    from harness import launch

    with launch(flipped, ranks, size, env=env, **options) as job:
        for rank in range(ranks):
            job.hear(rank, 60)
        for rank in range(ranks):
            job.say(rank, "go")
        return job.values(60)


def without_numbers(text: str) -> str:
    return re.sub(r"number \d+", "number <number>", re.sub(r"0x[0-9a-f]{16}", "0x<hash>", text))


def test_a_result_that_changed_on_one_rank_is_named_with_that_rank() -> None:
    """Rank 2 of three has a different result: the other two outvote it."""
    found = texts(3, 1 << 18, env={"SAGELLM_VERIFY": "all"})
    for text in found:
        assert "kernel of rank 2 changed it" in text
    compare("corrupt", without_numbers(found[0]))


def test_two_ranks_cannot_tell_whose_result_changed() -> None:
    found = texts(2, 1 << 18, verify="sampled")
    compare("corrupt_of_two", without_numbers(found[0]))


def quiet(ctx: Context) -> None:
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(verify="all" if ctx.rank == 0 else "off"))
    other = dist.new_group(pg_options=torch_sagellm.Options(verify="sampled:warn"))
    for group in (dist.group.WORLD, other):
        for size in (1, 1000, 100_000):
            tensor = torch.full((size,), float(ctx.rank))
            dist.all_reduce(tensor, group=group)
            tensor += ctx.rank  # the program may change its result immediately
            dist.broadcast(tensor, 1, group=group)
            dist.all_reduce(tensor[::2], group=group, async_op=True).wait()
            dist.barrier(group)


def test_rank_0_decides_and_equal_results_raise_no_alarm() -> None:
    run_fresh(quiet, 3)


def test_a_wrong_value_is_refused() -> None:
    import torch_sagellm

    with pytest.raises(ValueError, match="the option verify is 'some', expected one of off, sampled, all"):
        torch_sagellm.Options(verify="some")
