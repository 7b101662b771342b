"""The Python API's collectives on tensors of a device: `tests/py/programs/front_door.py` on four ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import Context, run_fresh
from simulated import VENDORS, environment, start

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "programs"))
import front_door

import sagellm


def every_call(ctx: Context, vendor: str) -> None:
    _, device = start(ctx, vendor)
    front_door.collectives("auto", f"{device}:0")
    assert sagellm.create_comm_backend().backend_type == vendor


@pytest.mark.timeout(150)
@pytest.mark.parametrize("vendor", VENDORS)
def test_four_ranks(libraries: dict[str, Path], vendor: str) -> None:
    """ "auto" finds the library by the device, or by SAGELLM_VENDOR: torch's own cuda cannot be simulated."""
    more = {"SAGELLM_VENDOR": "nccl"} if vendor == "nccl" else {}
    run_fresh(every_call, 4, vendor, env=environment(vendor, libraries, **more), timeout=120)
