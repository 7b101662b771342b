"""Checks, before a group opens any file, that the limit of open files allows all files that the group will open."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple


class Lack(NamedTuple):
    """The limit of open files of this process, and the number of open files."""

    limit: int
    used: int


def lack(needed: int) -> Lack | None:
    """The limit and the number of open files if ``needed`` more would exceed the limit; otherwise None."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # listing opens a descriptor itself, and none is left
        used = limit
    return Lack(limit, used) if limit != resource.RLIM_INFINITY and used + needed > limit else None
