"""Runs ``torch-sagellm bench --preset quick`` under the name that older code calls; arguments override the preset.

    python benchmark/comm_benchmark.py
    python benchmark/comm_benchmark.py --op all_gather --ranks 4 --plot bandwidth.png
    torchrun --nproc-per-node=2 benchmark/comm_benchmark.py

``benchmark_all_reduce()`` is for programs that import it.

`benchmarks/` has the measurements that docs/internals/benchmarks.md shows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# If this checkout has an extension that was built in place, use its package, otherwise the installed one.
SOURCES = Path(__file__).resolve().parent.parent / "torch_ext"
if any(SOURCES.glob("torch_sagellm/_C.*.so")):
    sys.path.insert(0, str(SOURCES))

from torch_sagellm.cli.main import main  # noqa: E402

if TYPE_CHECKING:
    from torch_sagellm import CommBackend

MIB = 1 << 20


def benchmark_all_reduce(
    backend: CommBackend | None = None, sizes_mb: Sequence[float] = (1, 10, 100), iterations: int = 10
) -> list[tuple[float, float, float]]:
    """Times an all_reduce of float32 for each size in MiB, on all ranks of ``backend``.

    ``backend`` None means that of ``create_comm_backend()``.

    Rank 0 prints a line for each size. Returns for each size: the size in MiB, the median latency in ms, and the
    tensor's bytes divided by this latency, in GB/s.
    """
    import torch

    import torch_sagellm

    comm = torch_sagellm.create_comm_backend() if backend is None else backend
    found = []
    for size in sizes_mb:
        tensor = torch.zeros(max(1, int(size * MIB) // 4))
        seconds = []
        for _ in range(2 + iterations):  # two of them to warm up
            comm.barrier()
            began = time.perf_counter()
            comm.all_reduce(tensor)
            seconds.append(time.perf_counter() - began)
        median = sorted(seconds[2:])[iterations // 2]
        found.append((size, median * 1e3, tensor.nbytes / median / 1e9))
        if comm.rank == 0:
            print(f"Size: {size:g} MB, Latency: {found[-1][1]:.3f} ms, BW: {found[-1][2]:.2f} GB/s", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main(["bench", "--preset", "quick", *sys.argv[1:]]))
