"""torch's coalescing manager, whose region an exception ends.

``torch.distributed``'s ``_coalescing_manager`` and ``batch_isend_irecv``, which uses it, start a region and end it
only where nothing is raised. After an exception torch would only note later calls of the group
(``pg_coalesce_state``), and so would our backend. `_torch_sagellm_autoload` therefore replaces the manager by the one
below, which drops the region (``_C._Manager``); groups of other backends get torch's own.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any


def manager(theirs: Any, group: Any = None, *args: Any, **named: Any) -> Any:
    """In place of torch's own manager, which is ``theirs``."""
    from torch.distributed import distributed_c10d as c10d

    group = group or c10d._get_default_group()
    made, noted, backends = theirs(group, *args, **named), c10d._world.pg_coalesce_state, _ours(group)
    if not backends or group in noted:  # of another backend, or inside a region, which is not this one's to drop
        return made
    return sys.modules["torch_sagellm._C"]._Manager(made, backends, partial(noted.pop, group, None))


def _ours(group: Any) -> list[Any]:
    """The backends of a group that are ours; there are none before the extension was loaded."""
    extension = sys.modules.get("torch_sagellm._C")
    if extension is None:
        return []
    found = [group._get_backend(device) for device in group._device_types]
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps them.
    found = [getattr(backend, "wrapped_pg", backend) for backend in found]
    return [backend for backend in found if isinstance(backend, extension.SageBackend)]
