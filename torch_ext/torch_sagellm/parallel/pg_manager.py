"""A process's only ``ProcessGroupManager``, for programs that read it from a module."""

from __future__ import annotations

from typing import Any

from torch_sagellm.parallel.groups import ProcessGroupManager

__all__ = ["ProcessGroupManager", "process_group_manager", "setup_process_group_manager"]

#: The manager that ``setup_process_group_manager`` created last; None before the first call.
process_group_manager: ProcessGroupManager | None = None


def setup_process_group_manager(
    tp_size: int, cp_size: int, pp_size: int, dp_size: int, **more: Any
) -> ProcessGroupManager:
    """Creates the manager, stores it as ``process_group_manager`` of this module, and returns it; all ranks call it."""
    global process_group_manager
    process_group_manager = ProcessGroupManager(tp_size, cp_size, pp_size, dp_size, **more)
    return process_group_manager
