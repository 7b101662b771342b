"""The two libraries into which CANN 9 has divided HCCL, over simulators."""

from __future__ import annotations

import os
from pathlib import Path

import on_device
import pytest
import torch.distributed as dist
from harness import Context, run_fresh
from on_device import counted
from simulated import environment, start

#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)


def opened() -> set[str]:
    """Returns the files that this process has mapped."""
    return {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}


def in_two_libraries(ctx: Context, queue: float | None, native: bool, other: str) -> None:
    _, name = start(ctx, "hccl", queue=queue, native=native)
    on_device.every_call(ctx, name)
    counted("barrier", 2)
    for variable in ("SAGELLM_HCCL_LIBRARY", "SAGELLM_HCOMM_LIBRARY"):
        assert os.path.realpath(os.environ[variable]) in opened(), (variable, opened())
    assert os.path.realpath(other) not in opened(), "HCCL as one library"
    dist.destroy_process_group()


@pytest.mark.parametrize("queue,native", [(None, True), (0.001, False)])
def test_every_collective_of_hccl_in_two_libraries_gives_the_numbers_of_the_cpu(
    queue: float | None, native: bool, libraries: dict[str, Path]
) -> None:
    """Operators in one library and communicators in another, each named by its variable; nothing else is opened."""
    two = {"SAGELLM_HCCL_LIBRARY": str(libraries["hccl_two"]), "SAGELLM_HCOMM_LIBRARY": str(libraries["hcomm"])}
    env = environment("hccl", libraries, **two)
    run_fresh(in_two_libraries, 2, queue, native, str(libraries["hccl"]), env=env, timeout=120)
