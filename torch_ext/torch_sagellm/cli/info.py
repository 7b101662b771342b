"""``torch-sagellm info``: versions, which engine serves which tensors, how the package was built; for a bug report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import _torch_sagellm_autoload
from torch_sagellm.cli.show import fact

HELP = "versions, what serves which tensors, and how the package was built"
DESCRIPTION = """For a bug report: prints the versions of the package, torch and Python, what the extension was built
for and from, what would serve the tensors of a group made now, and the variables that change it. `torch-sagellm doctor`
examines the machine."""
EXAMPLES = """examples:
  torch-sagellm info
  torch-sagellm info --json
"""
#: Variables of torch and of launchers that affect how a group is created.
ALSO = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_DISTRIBUTED_DEBUG", "TORCH_FR_BUFFER_SIZE", "GLOO_SOCKET_IFNAME")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(parsed: argparse.Namespace) -> int:
    found = facts()
    if parsed.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, value in found.items():
        fact(name, value)
    return 0


def facts() -> dict[str, str]:
    """The printed facts, by name."""
    import torch

    from torch_sagellm._private import load
    from torch_sagellm.api import serve_as

    named = serve_as.serves()
    return {
        "sagellm": f"{load.version()} in {Path(load.__file__).parent}",
        **_problem(),
        **_build(),
        "torch": torch.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        **_served(),
        'groups called "gloo"': f"by sagellm ({serve_as.VARIABLE})" if named else "by torch's gloo",
        **{name: os.environ[name] for name in sorted(os.environ) if name.startswith("SAGELLM_") or name in ALSO},
    }


def _problem() -> dict[str, str]:
    """The error because of which no group of this backend can be created, if there is one."""
    try:
        _torch_sagellm_autoload.look()
    except Exception as error:
        return {"groups are refused": str(error)}
    return {}


def _build() -> dict[str, str]:
    from torch_sagellm._private import load

    try:
        extension = load.extension()
    except _torch_sagellm_autoload.Unusable as error:
        return {"build": f"cannot be used: {error}"}
    from torch_sagellm import _build

    kind = Path(str(extension.__file__)).name.split(".")[1]
    source = _build.SOURCE or f"a wheel for torch {', '.join(load.minors())}"
    return {"build": f"for torch {extension.torch_version_built} and {kind}, from {source}"}


def _served() -> dict[str, str]:
    from torch_sagellm._private import load

    try:
        return served(load.extension())
    except _torch_sagellm_autoload.Unusable:
        return {}


def served(extension: Any) -> dict[str, str]:
    """For each kind of tensors: the engine or library that would serve them in a group that is created now."""
    import torch

    machine = extension.doctor()
    shared = f"by shared memory (memfd {machine['memfd']}; {machine['memory headroom']} of memory left)"
    found = {
        "cpu tensors, one host": shared,
        "cpu tensors, several hosts": "by shared memory inside a host, own schedules over TCP between hosts",
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {**found, "device tensors": "no accelerator is visible to torch"}
    return {**found, f"{accelerator.type} tensors": _on_device(accelerator.type)}


def _on_device(device: str) -> str:
    """Creates a group of one rank and asks it, because only a group decides what carries device tensors."""
    import torch.distributed as dist

    from torch_sagellm.observe import explain

    dist.init_process_group("sagellm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return explain.carrier(explain.backend_of(), device)
    finally:
        dist.destroy_process_group()
