"""Writes the statistics for Prometheus as NCCL Inspector does, so that dashboards for NCCL Inspector also show our
groups.

Metrics, labels and the file name are those of ``NCCL_INSPECTOR_PROM_DUMP=1``. Values are means since the group was
created or its statistics were reset; ``gpu`` is the rank, ``algo_proto`` the path.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_sagellm.observe import export, stats
from torch_sagellm.observe.ras import NAMES
from torch_sagellm.observe.watch import MESSAGES

if TYPE_CHECKING:
    from torch_sagellm import _C

UNITS = ("B", "KB", "MB", "GB", "TB")
HELP = {
    "nccl_bus_bandwidth_gbs": "Bus bandwidth of collectives in GB/s.",
    "nccl_collective_exec_time_microseconds": "Time of a collective in microseconds.",
    "nccl_p2p_bus_bandwidth_gbs": "Bandwidth of messages in GB/s.",
    "nccl_p2p_exec_time_microseconds": "Time of a message in microseconds.",
}


def size_range(nbytes: float) -> str:
    """The range of a size, such as ``4-5KB``: the size in its unit (a power of 1024), rounded down, and one more."""
    if nbytes < 1:
        return "0B"
    unit = min(int(math.log2(nbytes) // 10), len(UNITS) - 1)
    lower = int(nbytes / 1024**unit)
    return f"{lower}-{lower + 1}{UNITS[unit]}"


def _samples(member: stats.Member) -> Iterator[tuple[str, dict[str, object], float]]:
    """Yields metric, labels and value, for every kind, range of sizes and path of a group."""
    from torch_sagellm._private import load

    raw: _C.Stats = member.backend._stats()
    base: dict[str, object] = {
        "version": load.version(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID", "unknown"),
        "node": socket.gethostname(),
        "gpu": f"rank{raw['rank']}",
        "comm_name": member.name,
        "n_nodes": member.backend._explain("barrier", 0, "float32")["hosts"],
        "nranks": raw["size"],
    }
    # Several size classes of the core may be in one range, but Prometheus accepts only one sample for a name and
    # labels.
    rows: dict[tuple[str, str, str], list[_C.Cell]] = {}
    for cell in raw["cells"]:
        if cell["kind"] in NAMES and cell["count"] and cell["took"]:
            rows.setdefault((cell["kind"], size_range(cell["whole"] / cell["count"]), cell["path"]), []).append(cell)
    for (kind, sizes, path), cells in rows.items():
        whole, took = sum(cell["whole"] for cell in cells), sum(cell["took"] for cell in cells)
        factor = stats.BUS_FACTORS.get(kind)
        bandwidth = whole / took * (factor(raw["size"]) if factor else 1.0)
        micros = took / sum(cell["count"] for cell in cells) / 1e3
        if kind in MESSAGES:
            labels = {**base, "p2p_operation": NAMES[kind], "message_size": sizes}
            yield "nccl_p2p_bus_bandwidth_gbs", labels, bandwidth
            yield "nccl_p2p_exec_time_microseconds", labels, micros
        else:
            labels = {**base, "collective": NAMES[kind], "message_size": sizes, "algo_proto": path}
            yield "nccl_bus_bandwidth_gbs", labels, bandwidth
            yield "nccl_collective_exec_time_microseconds", labels, micros


def write_inspector(folder: str | os.PathLike[str], group: Any = "all") -> str:
    """Writes this rank's statistics in the format of NCCL Inspector, and returns the path of the file.

    ``folder`` is the folder of a node exporter's textfile collector. The file
    ``nccl_inspector_metrics_<host>_<pid>.prom`` in it is replaced atomically. ``group`` as for ``get_stats``. Call it
    as often as Prometheus should get new values.

    Example::

        torch_sagellm.write_inspector(".")  # as often as the values should be updated
    """
    lines = export.Lines()
    for member in stats.members(group):
        for name, labels, value in _samples(member):
            lines.add(name, "gauge", HELP[name], labels, value)
    path = Path(folder) / f"nccl_inspector_metrics_{socket.gethostname()}_{os.getpid()}.prom"
    export.write_atomically(path, lines.text().encode())
    return str(path)
