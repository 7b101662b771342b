"""Makes a rank see a machine with two NUMA nodes, or with one that has two last-level caches. The kernel's lists are
replaced in a new mount namespace, which only that rank uses."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 16384, 1 << 18
NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")

needs_two_cpus = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or not NODES.is_dir(), reason=f"needs two CPUs, and {NODES} of the kernel"
)


def bind(node: int, caches: bool = False) -> str:
    """Binds this process to one of two nodes, each of which has one CPU; with `caches`, to one of two last-level caches
    of one node. Returns why that is impossible here, or ''."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return f"a mount namespace may not be made here: {os.strerror(ctypes.get_errno())}"
    cpus = sorted(os.sched_getaffinity(0))[:2]
    replaced = [NODES] + [CPUS / f"cpu{cpu}" / "cache" for cpu in cpus if caches]
    for path in replaced:
        if libc.mount(b"tmpfs", str(path).encode(), b"tmpfs", 0, b"size=1m") != 0:
            return f"{path} may not be replaced here: {os.strerror(ctypes.get_errno())}"
    for number, owned in enumerate([cpus] if caches else [[cpu] for cpu in cpus]):
        (NODES / f"node{number}").mkdir()
        (NODES / f"node{number}" / "cpulist").write_text(",".join(map(str, owned)) + "\n")
    for cpu in cpus if caches else []:
        path = CPUS / f"cpu{cpu}" / "cache"
        # The second user of the last level does not exist.
        for level, users in ((2, f"{cpu}"), (3, f"{cpu},{cpu + 1000}")):
            (path / f"index{level}").mkdir()
            (path / f"index{level}" / "level").write_text(f"{level}\n")
            (path / f"index{level}" / "shared_cpu_list").write_text(f"{users}\n")
    os.sched_setaffinity(0, {cpus[node]})
    return ""
