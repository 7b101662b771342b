#!/usr/bin/env python3
"""How near `explain` is to the time of a call, after a group has made 1,000 calls of an operation.

Each operation is called 1,000 times with the sizes of `CALLED`, in random order. Then `explain` is asked for these
sizes and for those of `BETWEEN`, which were never called. Then the calls go on in the same way, and afterwards with
the sizes of `BETWEEN`. An error is the predicted time divided by the median time of these later calls, minus 1. Both
are times from a call's issue to its end, without what Python and torch do around it, on rank 0. The goal is 25 % for
the sizes that were called.

    python benchmarks/explained.py
    python benchmarks/explained.py --places 2x1,2x1:1ms

A place is hosts x ranks, and after a colon the delay or the rate between the hosts. Places of several hosts need root,
because hosts are network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import machine
from measure import ranks as processes
from measure.cases import DTYPES, Case
from measure.stats import percentile

import torch_sagellm
from torch_sagellm._private.units import parse_size, show_size

PLACES = "1x2,1x4,2x1,2x2,4x1,2x1:1ms,2x2:1ms,2x1:1gbit"
OPS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
CALLED = ("8", "4KiB", "64KiB", "1MiB")
BETWEEN = ("512", "16KiB", "256KiB")
CALLS = 1000
GOAL = 0.25
#: Later calls of each size.
LATER = 250


def shuffled(cases: dict[str, Case], count: int) -> list[str]:
    """Calls each case ``count`` times, in a random order that is equal on all ranks; returns the order.

    With a fixed order the ranks may fall into a rhythm in which the same calls always wait for a late rank.
    """
    order = [*cases] * count
    random.Random(count).shuffle(order)
    calls = {size: case.calls(dist.group.WORLD) for size, case in cases.items()}
    for number, size in enumerate(order):
        calls[size][number % len(calls[size])]()
    return order


def later(cases: dict[str, Case]) -> dict[str, list[float]]:
    """Calls all cases; returns the microseconds of each case's calls on this rank.

    The times are read afterwards, so reading delays no call. The group remembers its last 1,024 operations.
    """
    work = dist.barrier(async_op=True)
    work.wait()
    last = torch_sagellm.explain(work).sequence or 0
    taken: dict[str, list[float]] = {size: [] for size in cases}
    for number, size in enumerate(shuffled(cases, LATER), last + 1):
        taken[size].append((torch_sagellm.explain(sequence=number).took or 0.0) * 1e6)
    return taken


def asked(case: Case) -> torch_sagellm.Explanation:
    """What `explain` says. A case's size is that of the whole tensor, and `explain` asks for the size of one rank's
    part."""
    mine = case.size // case.ranks if case.op == "all_gather_into_tensor" else case.size
    return torch_sagellm.explain(case.op, mine)


def run_rank(place: str) -> None:
    """Runs all operations of one place; rank 0 writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("sagellm")
    rows: list[dict[str, Any]] = []
    for op in OPS:
        called, between = (
            {size: Case(op, parse_size(size), DTYPES["float32"], 2) for size in sizes} for sizes in (CALLED, BETWEEN)
        )
        shuffled(called, CALLS // len(called))
        cases = called | between
        said = {size: asked(case) for size, case in cases.items()}
        taken = later(called) | later(between)
        for size, found in said.items():
            usual = percentile(taken[size], 0.5)
            row = {"place": place, "op": op, "size": cases[size].size, "called": size in CALLED, "usual": usual}
            model = found.by_model if found.by_model is not None else found.predicted
            for name, value in (("predicted", found.predicted), ("model", model)):
                row[name] = None if value is None else value * 1e6
            rows.append(row)
    if dist.get_rank() == 0:
        Path(os.environ["EXPLAINED_INTO"]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def run_place(place: str, into: Path) -> int:
    """Starts the ranks of a place; they write their rows into a file."""
    layout, _, link = place.partition(":")
    hosts, each = map(int, layout.split("x"))
    common: dict[str, Any] = {"EXPLAINED_INTO": str(into), "EXPLAINED_PLACE": place, "OMP_NUM_THREADS": "1"}
    # Times that earlier groups kept on this machine would be used, too.
    common["SAGELLM_KEEP_TIMES"] = "0"
    if hosts == 1:
        with processes.here() as where:
            return processes.run(each, {**where, **common})
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/py"))
    import net

    delay = float(link.removesuffix("ms")) if link.endswith("ms") else 0.0
    with net.Network(hosts, link if link.endswith("bit") else None, delay, congestion="cubic") as network:
        where = {"MASTER_ADDR": network.address(0), "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": net.INTERFACE}
        prefixes = [["ip", "netns", "exec", network.names[number // each]] for number in range(hosts * each)]
        return processes.run(hosts * each, {**where, **common}, prefixes)


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each place and operation: the errors of the called sizes, and of the sizes between them."""

    def error(row: dict[str, Any], of: str) -> str:
        if row[of] is None:
            return "-"
        found = row[of] / row["usual"] - 1
        missed = of == "predicted" and row["called"] and abs(found) > GOAL
        return f"**{found:+.0%}**" if missed else f"{found:+.0%}"

    lines = ["| place | operation | called sizes | sizes between | model alone |", "| --- | --- | --- | --- | --- |"]
    for place, op in dict.fromkeys((row["place"], row["op"]) for row in rows):
        mine = [row for row in rows if (row["place"], row["op"]) == (place, op)]
        called = [row for row in mine if row["called"]]
        cells = [
            ", ".join(error(row, "predicted") for row in mine if row["called"] is which) for which in (True, False)
        ]
        cells.append(", ".join(error(row, "model") for row in called))
        lines.append(f"| {place} | {op} | " + " | ".join(cells) + " |")
    called = [row for row in rows if row["called"] and row["predicted"] is not None]
    within = sum(abs(row["predicted"] / row["usual"] - 1) <= GOAL for row in called)
    sizes = f"Called sizes: {', '.join(map(show_size, map(parse_size, CALLED)))}; between: {', '.join(BETWEEN)}."
    return "\n".join([*lines, "", f"{sizes} Within {GOAL:.0%}: {within} of {len(called)} called sizes."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", default=PLACES, help="hosts x ranks[:link], ... (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file, too")
    args = parser.parse_args()
    if processes.is_rank():
        run_rank(os.environ["EXPLAINED_PLACE"])
        return 0
    rows: list[dict[str, Any]] = []
    for place in args.places.split(","):
        if os.geteuid() != 0 and not place.startswith("1x"):
            print(f"{place}: left out, it needs root", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "rows.json"
            if code := run_place(place, into):
                print(f"{place}: a rank ended with {code}", file=sys.stderr)
                return code
            rows += json.loads(into.read_text())
            print(f"{place}: done", file=sys.stderr, flush=True)
    print(table(rows))
    if args.json:
        about = {"date": date.today().isoformat(), "machine": machine.describe()}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
