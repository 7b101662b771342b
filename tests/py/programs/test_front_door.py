"""A program that was written from the documentation alone calls the Python API; `tests/py/device/test_api.py` runs it
on devices."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import front_door
from harness import Context, beyond_gloo, run_fresh, torchrun, warm_python

pytestmark = beyond_gloo("the API is this package's")


def test_the_script_runs_under_torchrun() -> None:
    """There is no group: the first call creates it from torchrun's variables."""
    assert torchrun(Path(front_door.__file__), 4).count("the front door is open") == 4


def test_the_script_runs_without_torchrun() -> None:
    """One rank, without variables that name other ranks."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run(
        [warm_python(), front_door.__file__],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=env | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and done.stdout == "the front door is open\n", done.stdout + done.stderr


def on_the_cpu(ctx: Context) -> None:
    ctx.init()
    front_door.collectives("cpu")
    front_door.above()


def test_eight_ranks_on_the_cpu() -> None:
    run_fresh(on_the_cpu, 8, timeout=90)
