"""The report of a program of this folder to its test: its numbers, and how many operations the groups of sagellm
counted.

Each rank writes its own file, ``$ECOSYSTEM_REPORT.<rank>``: the test compares all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VARIABLE = "ECOSYSTEM_REPORT"


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of all bits of these tensors, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def operations() -> int:
    """Collectives that this process's groups of sagellm have completed; 0 where none of its groups is ours."""
    import sagellm

    return sum(group["total_count"] for group in sagellm.get_stats("all").values())


def report(rank: int | None = None, **found: Any) -> None:
    """Writes this rank's file. Call it while the groups still exist."""
    if rank is None:
        rank = dist.get_rank()
    path = Path(f"{os.environ[VARIABLE]}.{rank}")
    path.write_text(json.dumps({"name": dist.get_backend(), "operations": operations(), "found": found}))
