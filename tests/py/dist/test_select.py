"""Choosing in live groups: one table and one set of rules for all ranks, and explanations that are what happened."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_fresh, run_ranks

pytestmark = beyond_gloo("this is about the package's own choice")

LINES = "all_reduce:4097-=rounds(64KiB) 9000 ns; start 12000 ns"


def every_operation(context: Context) -> list[tuple[str, int | None, int]]:
    """A run of all kinds and many sizes; what was recorded and what is worked out again for each."""
    import sagellm

    ranks, works = context.world_size, []
    for count in (0, 1, 1000, 5000, 300_000):
        own, many = torch.ones(count), [torch.ones(count) for _ in range(ranks)]
        works += [
            dist.all_reduce(own, async_op=True),
            dist.all_reduce(own.to(torch.bfloat16), async_op=True),
            dist.broadcast(own.clone(), src=0, async_op=True),
            dist.reduce(own.clone(), dst=0, async_op=True),
            dist.all_gather([torch.empty(count) for _ in range(ranks)], own.clone(), async_op=True),
            dist.all_gather_into_tensor(torch.empty(count * ranks), own.clone(), async_op=True),
            dist.reduce_scatter(torch.empty(count), many, async_op=True),
            dist.all_to_all_single(torch.empty(count * ranks), torch.ones(count * ranks), async_op=True),
            dist.gather(own.clone(), many if context.rank == 0 else None, dst=0, async_op=True),
            dist.scatter(torch.empty(count), many if context.rank == 0 else None, src=0, async_op=True),
            dist.barrier(async_op=True),
        ]
        peer = (context.rank + 1) % ranks
        works += [dist.isend(own.clone(), peer), dist.irecv(torch.empty(count), (context.rank - 1) % ranks)]
    found = []
    for work in works:
        work.wait()
        explained = sagellm.explain(work)
        found.append((str(explained), explained.recorded, explained.code))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_worked_out_again_is_what_was_recorded(ranks: int) -> None:
    values = run_ranks(every_operation, ranks)
    for text, recorded, code in (one for value in values for one in value):
        assert recorded == code and code != 0, text
    assert len({tuple(code for _, _, code in value) for value in values}) == 1, "every rank took the same ways"


def with_table(context: Context, rules: list[str], option: str = "") -> dict[str, Any]:
    """A group under a table that only rank 0 can see, and rules that may differ by rank."""
    import sagellm
    from sagellm import _load

    os.environ["SAGELLM_CACHE_DIR"] = f"{context.tmp}/cache{context.rank}"
    os.environ["SAGELLM_ALGORITHM"] = rules[context.rank]
    if context.rank == 0:
        _load.extension().save_table(context.world_size, "2026-11-21", LINES)
    context.init(pg_options=sagellm.Options(algorithm=option))
    tensor = torch.ones(20_000)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    found = sagellm.explain(work)
    assert found.recorded == found.code and tensor[-1] == context.world_size
    asked = sagellm.explain("all_reduce", 80_000)
    assert (asked.choice, asked.code) == (found.choice, found.code)
    value = {"choice": found.choice, "reason": found.reason, "table": found.table, "decided": found.decided}
    dist.destroy_process_group()
    return value


def test_rank_0_decides_for_all_ranks() -> None:
    values = run_fresh(with_table, 3, ["", "", ""])
    assert {value["choice"] for value in values} == {"rounds(64KiB)"}
    assert {value["reason"] for value in values} == {"measured"}
    assert len({value["table"] for value in values}) == 1 and "cache0" in values[0]["table"]


def test_rules_come_before_the_table_and_the_option_before_the_environment() -> None:
    values = run_fresh(with_table, 2, ["*:0-=rounds(16KiB)"] * 2)
    assert {value["choice"] for value in values} == {"rounds(16KiB)"}
    values = run_fresh(with_table, 2, ["*:0-=rounds(16KiB)"] * 2, option="all_reduce:0-=rounds(8KiB)")
    assert {value["choice"] for value in values} == {"rounds(8KiB)"}
    assert "all_reduce:0-=rounds(8KiB)" in values[1]["decided"]


def warned(context: Context, rules: list[str]) -> tuple[str, list[str]]:
    """`with_table`, and what was logged meanwhile."""
    import logging

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sagellm").addHandler(handler)
    return with_table(context, rules)["choice"], heard


def test_ranks_with_other_rules_follow_rank_0_and_say_so() -> None:
    values = run_fresh(warned, 2, ["", "*:0-=rounds(16KiB)"])
    assert [choice for choice, _ in values] == ["rounds(64KiB)"] * 2
    assert not values[0][1]
    (line,) = values[1][1]
    assert "rank 1" in line and "*:0-=rounds(16KiB)" in line and "rank 0's decide" in line


def refused(context: Context) -> str:
    """Wrong rules on every rank: refused before anyone meets."""
    import sagellm

    def init(algorithm: str) -> None:
        options = sagellm.Options(algorithm=algorithm)
        context.init(pg_options=options, timeout=timedelta(seconds=20))

    text = expect_raises(ValueError, lambda: init("all_reduce:0-=teleport"))
    init("all_reduce:0-=start")
    dist.barrier()
    dist.destroy_process_group()
    return text


def test_wrong_rules_are_refused_before_anything_is_sent() -> None:
    for text in run_fresh(refused, 2):
        assert "the option algorithm" in text and "all_reduce:0-=teleport" in text and "rounds(CHUNK)" in text


def explain_a_delegated_group(context: Context) -> tuple[str, str, str]:
    """A group that gloo serves says so, and why."""
    import sagellm

    context.init(pg_options=sagellm.Options(engine="delegate"))
    found = sagellm.explain("all_reduce", 1 << 20)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    text = expect_raises(ValueError, lambda: sagellm.explain(work))
    work.wait()
    dist.destroy_process_group()
    return found.choice, found.rejected[0].why_not, text


def test_a_delegated_group_is_explained() -> None:
    for choice, why, text in run_fresh(explain_a_delegated_group, 2):
        assert choice == "gloo (delegate)" and "engine" in why
        assert "a delegate's operation" in text


def test_tune_measures_and_leaves_a_table(tmp_path: Path) -> None:
    environment = {**os.environ, "SAGELLM_CACHE_DIR": str(tmp_path)}
    words = [sys.executable, "-m", "sagellm"]
    done = subprocess.run(
        [*words, "tune", "--budget", "4", "--max-size", "16KiB"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A/A spread" in done.stdout and "written to" in done.stdout
    (table,) = tmp_path.iterdir()
    assert "all_reduce:0-" in table.read_text()
    shown = subprocess.run([*words, "table"], env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert str(table) in shown.stdout and "measured" in shown.stdout
