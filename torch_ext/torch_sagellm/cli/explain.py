"""``torch-sagellm explain``: the algorithm choice of one operation, and its reason."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from torch_sagellm.cli import arguments
from torch_sagellm.cli.show import fit
from torch_sagellm.observe import explain

HELP = "explain the algorithm choice of an operation"
DESCRIPTION = """Prints the algorithm that a group of so many ranks of this host would use for an operation of so many
bytes, what decided it, and why the others were not taken. Predicted times come from a model with fixed constants;
`torch-sagellm bench` measures."""
EXAMPLES = """examples:
  torch-sagellm explain all_reduce 1MiB
  torch-sagellm explain broadcast 64KiB --ranks 4
  torch-sagellm explain all_reduce 4KiB --dtype bfloat16 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", help="all_reduce, broadcast, ...")
    parser.add_argument(
        "bytes",
        type=arguments.size,
        nargs="?",
        help="bytes that one rank contributes: 4096, 64KiB, 1MiB; none for barrier and all_to_all",
    )
    parser.add_argument("--dtype", default="float32", help="element type (default: float32)")
    parser.add_argument(
        "--ranks", type=arguments.ranks(), default=2, help="ranks of the group, all on this host (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON, times in seconds")


def run(parsed: argparse.Namespace) -> int:
    kind = explain.kind_name(parsed.op)
    if parsed.bytes and kind in explain.WITHOUT_SIZE:
        raise ValueError(f"{parsed.bytes} bytes have no effect: a choice for {kind} is one for all sizes")
    if parsed.bytes is None and kind not in explain.WITHOUT_SIZE:
        raise ValueError(f"the bytes are missing; how large is the {kind}? For example 1MiB")
    found = explain.explain(parsed.op, parsed.bytes, dtype=parsed.dtype, ranks=parsed.ranks)
    print(json.dumps(asdict(found), indent=1) if parsed.json else fit(str(found), 14))
    return 0
