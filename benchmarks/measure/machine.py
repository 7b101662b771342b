"""The facts about the machine that a run records."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def cpu_model() -> str:
    """The name that the processor reports, or the architecture."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_seconds() -> float:
    """Seconds that all cores together have worked since the machine started; 0 if the kernel does not report it."""
    found = re.search(r"^cpu +([\d ]+)$", _read("/proc/stat"), re.MULTILINE)
    if not found:
        return 0.0
    ticks = [int(word) for word in found.group(1).split()[:8]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle time and waiting for disks


def describe() -> dict[str, object]:
    """Facts that explain a difference between two runs; nothing that identifies the host."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = _read(f"{index}/type")
        if kind != "Instruction":
            caches[f"L{_read(f'{index}/level')}"] = _read(f"{index}/size")
    memory = re.search(r"^MemTotal:\s*(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    try:
        ours = metadata.version("torch-sagellm")
    except metadata.PackageNotFoundError:
        ours = "not installed"
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "caches": caches,
        "virtual": "hypervisor" in _read("/proc/cpuinfo"),
        "memory_gib": round(int(memory.group(1)) / 2**20) if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sagellm": ours,
        "load_before": list(os.getloadavg()),
    }


def describe_device(kind: str) -> str:
    """The current device of this type, with the versions of the software below torch, as text."""
    module = torch.get_device_module(kind)
    name = getattr(module, "get_device_name", lambda: kind)()
    words = [f"{torch.accelerator.device_count()} x {name}"]
    if kind == "cuda":
        words += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} (torch's)"]
    return ", ".join(words)


def slug(machine: dict[str, object]) -> str:
    """A short name for a folder: "amd-epyc-2c"."""
    name = re.sub(r"\((r|tm)\)|@.*|\bcpu\b|processor", " ", str(machine["cpu"]).lower())
    words = re.sub(r"[^a-z0-9]+", " ", name).split()
    return "-".join([*words[:4], f"{machine['cores']}c"])
