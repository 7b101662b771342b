"""What the worker processes of vLLM load for ``vllm_tokens.py``: the class whose methods the program may call in them.

vLLM has a path of its own over shared memory for the ranks of one host. Unless ``ECOSYSTEM_PRIVATE_PATH`` is 1, it is
taken out here, before a worker makes its groups, so that these carry every tensor.
"""

from __future__ import annotations

import os
from typing import Any

from report import report

if os.environ.get("ECOSYSTEM_PRIVATE_PATH") != "1":
    from vllm.distributed.device_communicators import cpu_communicator

    # Its question whether the ranks share memory: answered with no.
    cpu_communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


class Reporting:
    """Its methods become methods of vLLM's worker."""

    rank: int

    def tell(self, milliseconds: float, found: dict[str, Any]) -> None:
        """Writes this rank's report."""
        report(self.rank, milliseconds, **found)
