"""The calls of the Python API by a program that knows only its documentation; `tests/py/device/test_api.py` has
devices."""

from __future__ import annotations

from pathlib import Path

import front_door
from harness import Context, beyond_gloo, run_fresh, torchrun

pytestmark = beyond_gloo("the API is this package's")


def test_the_script_runs_under_torchrun() -> None:
    """Without a group: the first call starts it from torchrun's environment."""
    assert torchrun(Path(front_door.__file__), 2).count("the front door is open") == 2


def on_the_cpu(ctx: Context) -> None:
    ctx.init()
    front_door.collectives("cpu")
    front_door.above()


def test_eight_ranks_on_the_cpu() -> None:
    run_fresh(on_the_cpu, 8, timeout=90)
