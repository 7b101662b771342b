"""Finds out whether UCX is on this machine without loading UCX, which would change the signal handlers of the tests'
process."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os

#: Selects UCX over TCP, as between hosts. Otherwise UCX would use the shared memory of the one machine.
BY_UCX = {"SAGELLM_LINK": "ucx", "UCX_TLS": "tcp"}


def missing() -> str:
    """Returns why tests with UCX cannot run, or ""."""
    if named := os.environ.get("SAGELLM_UCX_LIBRARY"):
        return "" if os.path.exists(named) else f"SAGELLM_UCX_LIBRARY={named} is not there"
    if importlib.util.find_spec("libucx") or ctypes.util.find_library("ucp"):
        return ""
    return "UCX is not installed (Debian: libucx0; pip: libucx-cu12)"
