"""``torch-sagellm table``: the algorithm that a group uses for each operation and size, and what decided it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from torch_sagellm._private.units import parse_size, show_size, show_time
from torch_sagellm.cli import arguments
from torch_sagellm.cli.show import fit
from torch_sagellm.observe import explain

if TYPE_CHECKING:
    from torch_sagellm import _C

HELP = "print every choice of a group, and its source"
DESCRIPTION = """Prints, for each operation and range of sizes, the algorithm that a group of so many ranks of this
host uses, what decided it (a rule, a measurement, the defaults) and what was measured."""
EXAMPLES = """examples:
  torch-sagellm table
  torch-sagellm table --ranks 4
  SAGELLM_ALGORITHM='all_reduce:0-64KiB=slots' torch-sagellm table
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=arguments.ranks(), default=2, help="ranks of the group, all on this host (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON, times in nanoseconds")


def sizes_text(text: str) -> str:
    """Converts a range of the core such as ``4097-24MiB`` (both ends inclusive) to ``over 4 KiB to 24 MiB``."""
    first, _, last = text.partition("-")
    over, most = parse_size(first) - 1, parse_size(last) if last else None
    if most is None:
        return "all" if over < 0 else f"over {show_size(over)}"
    return f"up to {show_size(most)}" if over < 0 else f"over {show_size(over)} to {show_size(most)}"


def run(parsed: argparse.Namespace) -> int:
    from torch_sagellm._private import load

    table: _C.ChoiceTable = load.extension().table_without_group(parsed.ranks)
    if parsed.json:
        print(json.dumps(table, indent=1))
        return 0
    print(fit(f"measured table: {table['note']}", 2))
    for rule in table["rules"]:
        print(f"rule: {rule}")
    print(f"\n{'op':<14} {'sizes':<22} {'algorithm':<16} {'decided by':<15} measured")
    for row in table["rows"]:
        median = explain.seconds(row["measured_ns"])
        measured = "-" if median is None else show_time(median)
        print(f"{row['kind']:<14} {sizes_text(row['sizes']):<22} {row['way']:<16} {row['reason']:<15} {measured}")
    return 0
