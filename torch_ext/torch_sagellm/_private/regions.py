"""torch's coalescing manager, with the change that an exception ends the region.

``torch.distributed``'s ``_coalescing_manager``, which ``batch_isend_irecv`` uses too, starts a region and ends it only
if no exception is raised. After an exception torch would only collect the later calls of the group
(``pg_coalesce_state``) without running them, and so would our backend. `_torch_sagellm_autoload` therefore replaces the
manager by the function below, whose result drops the region after an exception (``_C._Manager``). Groups of other
backends get torch's own manager.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any


def manager(theirs: Any, group: Any = None, *args: Any, **named: Any) -> Any:
    """Replaces torch's own manager, which is ``theirs``."""
    from torch.distributed import distributed_c10d as c10d

    group = group or c10d._get_default_group()
    made, noted, backends = theirs(group, *args, **named), c10d._world.pg_coalesce_state, _ours(group)
    if not backends or group in noted:  # not ours, or nested: the outer manager drops the region
        return made
    return sys.modules["torch_sagellm._C"]._Manager(made, backends, partial(noted.pop, group, None))


def _ours(group: Any) -> list[Any]:
    """The backends of a group that are ours; an empty list before the extension is loaded."""
    extension = sys.modules.get("torch_sagellm._C")
    if extension is None:
        return []
    found = [group._get_backend(device) for device in group._device_types]
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps each backend in another object.
    found = [getattr(backend, "wrapped_pg", backend) for backend in found]
    return [backend for backend in found if isinstance(backend, extension.SageBackend)]
