"""torch's coalescing manager, whose region an exception ends.

``torch.distributed``'s ``_coalescing_manager`` and ``batch_isend_irecv``, which uses it, start a region and end it
only where nothing is raised. After an exception torch would only note later calls of the group
(``pg_coalesce_state``), and so would our backend. The manager is therefore replaced by one that drops the region;
groups of other backends get torch's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

NAME = "_coalescing_manager"


def install() -> None:
    """Replaces the manager, once, in both modules of torch that have its name."""
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    theirs: Any = getattr(c10d, NAME, None)
    if theirs is None or hasattr(theirs, "_sagellm"):
        return

    @wraps(theirs)
    @contextmanager
    def manager(group: Any = None, *args: Any, **named: Any) -> Iterator[Any]:
        group = group or c10d._get_default_group()
        backends = _ours(group)
        noted = c10d._world.pg_coalesce_state
        if not backends or group in noted:  # of another backend, or inside a region, which is not this one's to drop
            with theirs(group, *args, **named) as made:
                yield made
            return
        try:
            with theirs(group, *args, **named) as made:
                yield made
        except BaseException:
            noted.pop(group, None)
            for backend in backends:
                backend._drop_region()
            raise

    manager._sagellm = True  # type: ignore[attr-defined]
    for module in (c10d, distributed):
        if getattr(module, NAME, None) is theirs:
            setattr(module, NAME, manager)


def _ours(group: Any) -> list[Any]:
    """The backends of a group that are ours; there are none before the extension was loaded."""
    extension = sys.modules.get("torch_sagellm._C")
    if extension is None:
        return []
    found = [group._get_backend(device) for device in group._device_types]
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps them.
    found = [getattr(backend, "wrapped_pg", backend) for backend in found]
    return [backend for backend in found if isinstance(backend, extension.SageBackend)]
