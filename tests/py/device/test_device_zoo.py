"""The zoo of `tests/py/dist/zoo.py` on devices: every kind of tensor that a device can hold, in every public call. The
device is simulated, with each vendor's library and without one. Without one, the tensors pass through host memory.

Results are checked in the base memory, and an ordinary collective and messages on the device follow each call.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import simdevice
import torch
import torch.distributed as dist
from harness import Context, run_fresh
from simulated import VENDORS, environment, start

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist"))
from zoo import KINDS
from zoo_tour import REFUSED, SKIPPED, Ends, Listed, Place, tour

#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)

#: Kinds of tensors that the device cannot hold, and why.
ELSEWHERE = {
    "shared": "processes share memory of the CPU",
    "sparse": "the device has none",
    "meta": "tensors without data are on a device of their own: the rows of the CPU have them",
    "quantized": "the device has none",
}
#: Cases with another outcome on a device than on the CPU.
ON_A_DEVICE = (
    Listed(("*/comm.compressed_async/*",), Ends(REFUSED), "compression in the background is for tensors on the CPU"),
    Listed(("*/package.isend_tensors/*",), Ends(REFUSED), "lists in the background are for tensors on the CPU"),
    Listed(("*/package.send_pages/*",), Ends(SKIPPED), "pages are on the CPU, and refused elsewhere: test_paged.py"),
)
BY_A_LIBRARY = (
    Listed(("*/dist.recv_from_anyone/*",), Ends(REFUSED), "a vendor's library receives from a rank that is named"),
)


def everything(ctx: Context, vendor: str) -> dict[str, int]:
    if vendor:
        device, name = start(ctx, vendor, delay=0.0)
    else:
        device, name = simdevice.install("npu"), "npu"
        ctx.init()
    device.kernel_delay(0.0)
    place = Place(name, not vendor, vendor == "nccl", (BY_A_LIBRARY if vendor else ()) + ON_A_DEVICE)
    group: Any = dist.group.WORLD
    counts = {kind: tour(ctx, kind, group, place=place) for kind in KINDS if kind not in ELSEWHERE}
    torch.accelerator.synchronize()
    dist.destroy_process_group()
    return counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vendor", ["", *VENDORS], ids=lambda vendor: vendor or "staged")
def test_every_call_on_a_device(vendor: str, libraries: dict[str, Path]) -> None:
    env = environment(vendor, libraries) if vendor else {}
    if vendor == "nccl":
        env["SAGELLM_VENDOR"] = vendor  # torch's own cuda device cannot be simulated, so this variable selects NCCL
    for counts in run_fresh(everything, 2, vendor, env=env, timeout=300):
        assert set(counts) == set(KINDS) - set(ELSEWHERE) and min(counts.values()) > 70, counts
