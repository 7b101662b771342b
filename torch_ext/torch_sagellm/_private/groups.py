"""Finds the backends of this package that serve a group. Every other module asks here.

torch does not always keep our object itself: with TORCH_DISTRIBUTED_DEBUG=DETAIL it wraps the backend of every group in
another backend, which compares the calls of the ranks.
"""

from __future__ import annotations

import sys
from typing import Any


def own(backend: Any) -> Any:
    """A backend object of a group without torch's wrappers; None if it is not ours."""
    ours = getattr(sys.modules.get("torch_sagellm._C"), "SageBackend", None)
    if ours is None:  # the extension is not loaded, so no group of ours exists
        return None
    while backend is not None and not isinstance(backend, ours):
        backend = getattr(backend, "wrapped_pg", None)
    return backend


def backend_of(group: Any) -> Any:
    """The backend that serves CPU tensors of a process group; None if it is not ours."""
    import torch

    try:
        return own(group._get_backend(torch.device("cpu")))
    except RuntimeError:  # the group serves no CPU tensors
        return None


def is_wrapped(group: Any) -> bool:
    """Whether torch has wrapped the backend that serves CPU tensors of a process group (None: the default group)."""
    import torch
    import torch.distributed as dist

    backend = (dist.group.WORLD if group is None else group)._get_backend(torch.device("cpu"))
    return own(backend) is not backend


def backends_of(group: Any) -> list[Any]:
    """The backends of a process group that are ours, one for each type of device that they serve."""
    found = [own(group._get_backend(device)) for device in group._device_types]
    return [backend for backend in found if backend is not None]
