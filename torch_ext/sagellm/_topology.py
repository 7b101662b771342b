"""How this host's GPUs are joined, by NVML where it is there. Everything else works without it."""

from __future__ import annotations

from itertools import combinations
from typing import Any


def nvlink() -> tuple[list[str], bool]:
    """Names of the GPUs, and whether every pair of at least two has NVLink between them.

    NVML is asked through the package ``pynvml``; without it, without a driver or without GPUs the answer is
    ``([], False)``.
    """
    try:
        import pynvml
    except ImportError:
        return [], False
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], False
    try:
        return _ask(pynvml)
    except (pynvml.NVMLError, AttributeError):
        return [], False
    finally:
        pynvml.nvmlShutdown()


def _ask(nvml: Any) -> tuple[list[str], bool]:
    devices = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
    names = [nvml.nvmlDeviceGetName(device) for device in devices]
    texts = [name.decode() if isinstance(name, bytes) else str(name) for name in names]
    joined = [
        nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
        for one, other in combinations(devices, 2)
    ]
    return texts, bool(joined) and all(joined)
