"""Runs ``torch-sagellm bench`` with the preset ``quick``, under the name of older code; arguments override the preset.

    python benchmark/comm_benchmark.py
    python benchmark/comm_benchmark.py --op all_gather --ranks 4 --plot bandwidth.png
    torchrun --nproc-per-node=2 benchmark/comm_benchmark.py

`benchmarks/` has the measurements that docs/internals/benchmarks.md shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

# From a checkout in which the package was built in place; else the installed one is used.
SOURCES = Path(__file__).resolve().parent.parent / "torch_ext"
if any(SOURCES.glob("torch_sagellm/_C.*.so")):
    sys.path.insert(0, str(SOURCES))

from torch_sagellm.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["bench", "--preset", "quick", *sys.argv[1:]]))
