"""Runs test functions on several ranks, each a real process, and returns the result of each rank.

`run_ranks(fn, 2, ...)` calls `fn(context, ...)` on two ranks of a live default group and returns their values. Ordinary
tests share one pool of processes. `launch(fn, 3, ...)` starts fresh processes, for tests that kill, stop or exit ranks,
and returns a `Job` whose every wait has a limit. All ranks are forks of one zygote that has imported torch.

Programs and commands are started by `run_script`, as a user starts them. `torchrun`, and other callers on request,
start them *warm*: in a fork that has imported torch and otherwise equals a fresh interpreter (`warm.py`). Tests of an
import, of signals to a program and of a program's parent start a fresh interpreter. So does one test of each other
kind: torchrun of an example (`test_examples.COLD`), of a script (`test_ddp_script[1]`) and of a failing script,
`doctor` with its ranks (`test_doctor_lets_two_ranks_talk`), and the first program and the first command of the pages
(`test_docs`).

The parts are in three files: `in_rank.py`, `jobs.py` and `scripts.py`. Tests import their names from here.

The environment variable SAGELLM_TEST_BACKEND selects the backend under test ("sagellm"). With "gloo" the suite checks
itself: tests of features that gloo lacks are skipped with that reason (`beyond_gloo`).
"""

from __future__ import annotations

from in_rank import (
    BACKEND,
    GROUP_TIMEOUT,
    IS_GLOO,
    TIMES_WORKS,
    Context,
    beyond_gloo,
    error_of,
    expect_raises,
    monitored_barrier,
    torch_at_least,
)
from jobs import Job, Outcome, Pool, Rank, Zygote, launch, run_fresh, run_ranks
from scripts import BEFORE, Warm, in_new_process, run_script, run_warm, torchrun, warm_python

__all__ = [
    "BACKEND",
    "BEFORE",
    "GROUP_TIMEOUT",
    "IS_GLOO",
    "TIMES_WORKS",
    "Context",
    "Job",
    "Outcome",
    "Pool",
    "Rank",
    "Warm",
    "Zygote",
    "beyond_gloo",
    "error_of",
    "expect_raises",
    "in_new_process",
    "launch",
    "monitored_barrier",
    "run_fresh",
    "run_ranks",
    "run_script",
    "run_warm",
    "torch_at_least",
    "torchrun",
    "warm_python",
]
