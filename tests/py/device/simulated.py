"""Groups over simulated vendors' libraries. The device is that of `simdevice`, its streams and events are those of a
simulated runtime, and the core uses a simulator of NCCL, HCCL or CNCL (tests/simulators).

With SAGELLM_TEST_CARD=1 the tests of "nccl" run on an NVIDIA card instead, which all ranks share. Tests that control
the simulator are skipped there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import simdevice
import torch
from harness import Context, Rank
from on_device import SHARED_CARD

#: For each vendor: torch's name of the device, the runtime of its streams, and the simulator for each variable that
#: names a library.
VENDORS: dict[str, tuple[str, str, dict[str, str]]] = {
    # torch's own cuda device cannot be simulated, so the device has another name, and the option `vendor` selects NCCL.
    "nccl": ("simcuda", "cuda", {"SAGELLM_NCCL_LIBRARY": "nccl", "SAGELLM_CUDA_LIBRARY": "cuda"}),
    "hccl": ("npu", "acl", {"SAGELLM_HCCL_LIBRARY": "hccl", "SAGELLM_ACL_LIBRARY": "acl"}),
    "cncl": ("mlu", "cnrt", {"SAGELLM_CNCL_LIBRARY": "cncl", "SAGELLM_CNRT_LIBRARY": "cnrt"}),
}
#: Whether the tests run on a card.
CARD = bool(os.environ.get("SAGELLM_TEST_CARD"))
#: Whether the tests run on a card, and the machine has no second one.
ONE_CARD = CARD and torch.cuda.device_count() < 2
if CARD:
    VENDORS["nccl"] = ("cuda", "cuda", {})
ROOT = Path(__file__).resolve().parents[3]


#: For modules whose programs install the simulated device themselves.
on_simulator_alone = pytest.mark.skipif(CARD, reason="its program installs the simulated device")


class NeedsSimulatorError(Exception):
    """Raised if a test that controls the simulated device runs on a card."""


class Card:
    """Takes the place of the simulated device if the tests run on a card. A test that uses a control of the device is
    then skipped."""

    def __getattr__(self, name: str) -> Any:
        raise NeedsSimulatorError(f"a card has no {name}")


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sagellm_simulators", ROOT / "tests/simulators/build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def environment(vendor: str, libraries: dict[str, Path], **more: str) -> dict[str, str]:
    if CARD:
        controls = [name for name in more if name.startswith("SAGELLM_SIM_") and name != "SAGELLM_SIM_TIMEOUT_MS"]
        if vendor != "nccl" or controls:
            pytest.skip(f"needs the simulator: {', '.join(controls) or vendor}")
        return SHARED_CARD | more
    _, flavour, variables = VENDORS[vendor]
    named = {variable: str(libraries[form]) for variable, form in variables.items()}
    return (
        named
        | {
            "SAGELLM_TEST_RUNTIME": str(libraries[flavour]),
            "SAGELLM_SIM_TIMEOUT_MS": "20000",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # all ranks use device 0
        }
        | more
    )


def start(
    ctx: Context,
    vendor: str,
    queue: float | None = None,
    delay: float = 0.001,
    native: bool = True,
    bound: bool = False,
    rules: str = "",
    **options: Any,
) -> tuple[Any, str]:
    """Installs the device over the vendor's simulated runtime and creates a default group for which the vendor's
    library carries device tensors.

    If ``bound``, the ranks are bound to device 0 and create their communicator immediately. ``rules`` is the option
    ``algorithm``.
    """
    import torch

    import torch_sagellm

    name, flavour, _ = VENDORS[vendor]
    device: Any = Card()
    if CARD:
        if not native or queue is not None:
            raise NeedsSimulatorError("a card has native handles and no queue on the host")
        torch.cuda.set_device(0)
    else:
        device = simdevice.install(name)
        device.use_library(os.environ["SAGELLM_TEST_RUNTIME"], flavour)
        device.native_handles(native)
        device.kernel_delay(delay)
        device.host_queue(queue)
    if bound:
        options["device_id"] = torch.device(name, 0)
    who = vendor if vendor == "nccl" else "auto"
    ctx.init(pg_options=torch_sagellm.Options(vendor=who, algorithm=rules), **options)
    return device, name


def load_lazily(device: Any) -> None:
    """Makes the first launch of each of torch's kernels wait until the device is idle, as on a card that loads kernels
    lazily."""
    if not CARD:
        device.lazy_kernels()


def exit_code(rank: Rank) -> int | None:
    """Waits until a rank's process has ended."""
    deadline = time.monotonic() + 60
    while rank.poll() is None and time.monotonic() < deadline:
        rank.rest(0.2)
    return rank.poll()
