"""What the worker processes of vLLM load for ``vllm_tokens.py``: the class whose methods the program may call in them.

vLLM has its own path over shared memory for the ranks of one host. Unless ``ECOSYSTEM_PRIVATE_PATH`` is 1, this file
disables that path before a worker makes its groups, so that the groups carry every tensor.
"""

from __future__ import annotations

import os
from typing import Any

from report import report

if os.environ.get("ECOSYSTEM_PRIVATE_PATH") != "1":
    from vllm.distributed.device_communicators import cpu_communicator

    # vLLM asks this function whether the ranks share memory; the answer is now no.
    cpu_communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


class Reporting:
    """The methods of this class become methods of vLLM's worker."""

    rank: int

    def tell(self, milliseconds: float, found: dict[str, Any]) -> None:
        """Writes this rank's report."""
        report(self.rank, milliseconds, **found)
