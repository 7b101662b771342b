"""How the devices of this host are joined, as a library of NVIDIA's says it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

import sagellm
from sagellm.observe import topology

pytestmark = pytest.mark.quick


class Nvml:
    """A library of two or more GPUs that are joined as told."""

    def __init__(self, devices: int, joined: bool) -> None:
        self.devices, self.joined = devices, joined

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = self.devices
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, at: Any, device: Any) -> int:
        return 0

    def nvmlDeviceGetName(self, device: Any, name: Any, size: Any) -> int:
        name.value = b"a card"
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: Any, status: Any) -> int:
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = 0 if self.joined else 1
        return 0


def test_nvlink_is_found_only_where_every_pair_has_it() -> None:
    assert topology.ask(Nvml(4, True)) == (["a card"] * 4, True)
    assert topology.ask(Nvml(4, False)) == (["a card"] * 4, False)
    assert topology.ask(Nvml(1, True)) == (["a card"], False)
    assert topology.ask(Nvml(0, True)) == ([], False)


def test_topology_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "LIBRARY", "libno-such-library.so.9")
    found = sagellm.TopologyInfo.detect()
    assert found == sagellm.TopologyInfo() and not found.is_fully_connected_nvlink()
