"""Makes a rank see a machine with two NUMA nodes. The kernel's list of nodes is replaced in a new mount namespace,
which only that rank uses."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 16384, 1 << 18
NODES = Path("/sys/devices/system/node")

needs_two_cpus = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or not NODES.is_dir(), reason=f"needs two CPUs, and {NODES} of the kernel"
)


def bind(node: int) -> str:
    """Binds this process to one of two nodes, each of which has one CPU. Returns why that is impossible here, or ''."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return f"a mount namespace may not be made here: {os.strerror(ctypes.get_errno())}"
    if libc.mount(b"tmpfs", str(NODES).encode(), b"tmpfs", 0, b"size=1m") != 0:
        return f"{NODES} may not be replaced here: {os.strerror(ctypes.get_errno())}"
    cpus = sorted(os.sched_getaffinity(0))
    for number in range(2):
        (NODES / f"node{number}").mkdir()
        (NODES / f"node{number}" / "cpulist").write_text(f"{cpus[number]}\n")
    os.sched_setaffinity(0, {cpus[node]})
    return ""
