"""``torch-sagellm --version``: what is installed, including the kernels that this processor runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _torch_sagellm_autoload
from torch_sagellm._private import load
from torch_sagellm.cli.show import fact


def facts() -> dict[str, Any]:
    """The facts by name. If no group can be created, ``extension`` has the reason."""
    found: dict[str, Any] = {"version": load.version(), "commit": load.commit(), "serves": load.minors()}
    try:
        import torch
    except Exception as error:  # torch is missing or broken
        return {**found, "torch": None, "extension": f"cannot be used: {error}", "kernels": None}
    found["torch"] = torch.__version__
    try:
        extension = load.extension()
    except _torch_sagellm_autoload.Unusable as error:
        return {**found, "extension": f"cannot be used: {error}", "kernels": None}
    return {**found, "extension": Path(str(extension.__file__)).name, "kernels": extension.doctor()["kernels"]}


def show(as_json: bool) -> int:
    found = facts()
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"torch-sagellm {found.pop('version')}")
    for name, value in found.items():
        fact(name, ", ".join(value) if isinstance(value, list) else value or "unknown")
    return 0
