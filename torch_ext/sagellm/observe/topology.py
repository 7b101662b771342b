"""How this host's GPUs are connected, from NVML where it is installed. Everything else works without it."""

from __future__ import annotations

import ctypes
from itertools import combinations
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
#: Of nvml.h: the query "are they connected by NVLink", and the answer yes.
P2P_NVLINK, P2P_OK, SUCCESS = 2, 0, 0
NAME_BYTES = 96


def nvlink() -> tuple[list[str], bool]:
    """Names of the GPUs, and whether NVLink connects every pair of at least two.

    Without the library, a driver or GPUs the answer is ``([], False)``; an unknown pair counts as not linked.
    """
    try:
        nvml: Any = ctypes.CDLL(LIBRARY)
    except OSError:
        return [], False
    try:
        if nvml.nvmlInit_v2() != SUCCESS:
            return [], False
        try:
            return ask(nvml)
        finally:
            nvml.nvmlShutdown()
    except AttributeError:  # a library that is too old for a function
        return [], False


def ask(nvml: Any) -> tuple[list[str], bool]:
    """As ``nvlink``, with an initialised library."""
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != SUCCESS:
        return [], False
    devices: list[Any] = []
    names: list[str] = []
    for at in range(count.value):
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(NAME_BYTES)
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(at), ctypes.byref(device)) != SUCCESS:
            return names, False
        devices.append(device)
        known = nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(NAME_BYTES)) == SUCCESS
        names.append(name.value.decode(errors="replace") if known else f"GPU {at}")
    pairs = [_joined(nvml, one, other) for one, other in combinations(devices, 2)]
    return names, bool(pairs) and all(pairs)


def _joined(nvml: Any, one: Any, other: Any) -> bool:
    status = ctypes.c_int(-1)
    found = nvml.nvmlDeviceGetP2PStatus(one, other, ctypes.c_int(P2P_NVLINK), ctypes.byref(status))
    return bool(found == SUCCESS and status.value == P2P_OK)
