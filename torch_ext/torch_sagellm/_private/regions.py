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

from torch_sagellm._private import groups


def manager(theirs: Any, group: Any = None, *args: Any, **named: Any) -> Any:
    """Replaces torch's own manager, which is ``theirs``."""
    from torch.distributed import distributed_c10d as c10d

    group = group or c10d._get_default_group()
    made, noted, backends = theirs(group, *args, **named), c10d._world.pg_coalesce_state, groups.backends_of(group)
    if not backends or group in noted:  # not ours, or nested: the outer manager drops the region
        return made
    return sys.modules["torch_sagellm._C"]._Manager(made, backends, partial(noted.pop, group, None))
