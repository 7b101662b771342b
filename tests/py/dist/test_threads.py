"""torch's intra-op threads copy and combine for a rank that waits; see `src/threads.rs`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, run_fresh

CORES = len(os.sched_getaffinity(0))
SAYS = "threads copy and combine from 128 KiB on"


def described() -> str:
    text: str = dist.group.WORLD._get_backend(torch.device("cpu")).describe()  # type: ignore[union-attr]
    return text


def same_bits_with_threads(ctx: Context) -> str:
    import torch_sagellm

    torch.set_num_threads(3)
    ctx.init(pg_options=torch_sagellm.Options(threads=3))
    alone = dist.new_group(pg_options=torch_sagellm.Options(threads=1))
    generator = torch.Generator().manual_seed(ctx.rank)
    for count in (20_000, 200_003, 1_000_000):
        for dtype in (torch.float32, torch.bfloat16):
            given = torch.randn(count, generator=generator).to(dtype)
            shared = torch_sagellm.shared(given)
            parts = given[: count // 2 * 2]
            for tensor in (given, shared):
                found = []
                for group in (None, alone):
                    summed = tensor.clone() if tensor is given else torch_sagellm.shared(tensor)
                    dist.all_reduce(summed, group=group)
                    gathered = torch.empty(2 * count, dtype=dtype)
                    dist.all_gather_into_tensor(gathered, tensor, group=group)
                    scattered = torch.empty(count // 2, dtype=dtype)
                    dist.reduce_scatter_tensor(scattered, parts, group=group)
                    exchanged = torch.empty_like(parts)
                    dist.all_to_all_single(exchanged, parts, group=group)
                    received = tensor.clone()
                    dist.broadcast(received, src=1, group=group)
                    found.append((summed, gathered, scattered, exchanged, received))
                for one, other in zip(*found, strict=True):
                    assert torch.equal(one, other), (count, dtype)
    return described()


@beyond_gloo("is about our threads")
def test_rule_17_threads_of_torch_give_the_bits_of_one() -> None:
    for said in run_fresh(same_bits_with_threads, 2):
        assert (f"{min(3, CORES)} {SAYS}" in said) == (CORES > 1), said


def says(ctx: Context, threads: int, options: dict[str, Any]) -> str:
    import torch_sagellm

    torch.set_num_threads(threads)
    ctx.init(pg_options=torch_sagellm.Options(**options))
    summed = torch.ones(300_000)
    dist.all_reduce(summed)
    assert bool((summed == ctx.world_size).all())
    return described()


@beyond_gloo("is about our threads")
@pytest.mark.parametrize(
    ("threads", "options", "variable"),
    [
        # torchrun's number of threads, and more threads than cores. Without a number from the program, a rank uses no
        # more threads than torch, and no more than its share of the cores.
        (1, {}, None),
        (64, {}, None),
        (64, {"threads": 1}, None),
        (64, {"threads": 2}, "1"),
        # The option names more threads than torch has now. The group still reports the number on which its ranks
        # agreed.
        (1, {"threads": 2}, None),
        (64, {}, "2"),
    ],
)
def test_how_many_threads_a_rank_uses(threads: int, options: dict[str, int], variable: str | None) -> None:
    ranks = 2
    named = int(variable or options.get("threads", 0))
    expected = min(named, CORES) if named else min(threads, max(1, CORES // ranks))
    env = {} if variable is None else {"SAGELLM_THREADS": variable}
    for said in run_fresh(says, ranks, threads, options, env=env):
        assert (f"{expected} {SAYS}" in said) if expected > 1 else SAYS not in said, said


FORKS = """
import os, sys, tempfile
import torch, torch.distributed as dist

torch.set_num_threads(2)
torch.ones(10_000_000).sum()  # starts torch's threads, which a forked child does not have
summed = torch.ones(300_000)  # here, because torch's own functions hang in the child
import torch_sagellm

folder = tempfile.mkdtemp()
children = []
for rank in range(2):
    child = os.fork()
    if child == 0:
        dist.init_process_group("sagellm", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                                pg_options=torch_sagellm.Options(threads=2))
        dist.all_reduce(summed)
        said = dist.group.WORLD._get_backend(torch.device("cpu")).describe()
        os._exit(0 if float(summed[-1]) == 2.0 and "threads copy" not in said else 3)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@beyond_gloo("is about our threads")
def test_rule_26_a_forked_child_uses_no_threads_that_it_does_not_have(tmp_path: Path) -> None:
    """GNU's OpenMP hangs in a child whose parent has used its threads."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


@beyond_gloo("is about our options")
@pytest.mark.parametrize("wrong", [-1, 5000, True, "2", 1.5])
def test_a_wrong_number_is_refused(wrong: Any) -> None:
    import torch_sagellm

    with pytest.raises((TypeError, ValueError), match=r"threads is .*, expected"):
        torch_sagellm.Options(threads=wrong)


def refused(ctx: Context) -> str:
    with pytest.raises(ValueError) as found:
        ctx.init()
    return str(found.value)


@beyond_gloo("is about our variable")
def test_a_wrong_variable_is_refused() -> None:
    (text,) = run_fresh(refused, 1, env={"SAGELLM_THREADS": "two"})
    assert "SAGELLM_THREADS='two', expected a whole number from 0 (as torch) to 4096" in text
