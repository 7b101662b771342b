#!/usr/bin/env python3
"""Host time per call on one GPU, from the call to its return, against torch's own nccl backend in the same process.

There is one rank, so nothing moves between devices; device time and bandwidth need several ranks (collectives.py
--device cuda). The backends take turns (A B A B). A second, equal nccl group shows the noise (A/A). Ten and a thousand
small all_reduces are issued in every form: by fused_all_reduce, within torch's coalescing manager, and one by one.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import collectives
import torch
import torch.distributed as dist
from collectives import Backend
from measure import machine as machines
from measure import report
from measure.cases import DTYPES, FIXED_SIZE, MANY, OPS, Case

from torch_sagellm._private.units import parse_size, show_size

EXAMPLES = """examples:
  python benchmarks/gpu.py                                 everything, about six minutes
  python benchmarks/gpu.py --quick                         fewer sizes and rounds, under a minute
  python benchmarks/gpu.py --ops all_reduce --sizes 8,1MiB --rounds 20
"""
#: The operations that one rank can run alone. The many small operations have a separate table.
SINGLE = [op for op in OPS if op not in MANY and op != "ping_pong"]
THEIRS = "nccl"
CONTROL = f"{THEIRS} #2"
#: Columns: title, name of the group, form of the operation.
FORMS = [
    ("sagellm fused", "sagellm", "fused"),
    ("sagellm fused, apart", "sagellm", "apart"),
    ("sagellm region", "sagellm", "region"),
    ("sagellm one by one", "sagellm", "all_reduce"),
    ("nccl one by one", THEIRS, "all_reduce"),
    ("nccl region", THEIRS, "region"),
    ("nccl region #2", CONTROL, "region"),
]
#: Ratios in the second table: the first column divided by the second.
RATIOS = [
    ("nccl one by one", "sagellm fused"),
    ("nccl region", "sagellm fused"),
    ("nccl region", "sagellm fused, apart"),
    ("nccl region", "sagellm region"),
    ("nccl one by one", "sagellm one by one"),
    ("nccl region", "nccl region #2"),
]


def measure_all(args: argparse.Namespace, groups: dict[str, dist.ProcessGroup]) -> tuple[list[Any], list[Any]]:
    """Measures every operation and size, then the many small ones, on the groups "sagellm", "nccl" and "nccl #2"."""
    plain = [Backend(label, group) for label, group in groups.items()]
    single = [
        (op, size, plain, "issue")
        for op in args.ops.split(",")
        for size in ([FIXED_SIZE[op]] if op in FIXED_SIZE else map(parse_size, args.sizes.split(",")))
    ]
    many = [
        (f"all_reduce_x{n}", 2048, [Backend(label, groups[who], f"{form}_x{n}") for label, who, form in FORMS], "alone")
        for n in map(int, args.many.split(","))
    ]
    results, begin = [], time.monotonic()
    for done, (op, size, backends, clock) in enumerate([*single, *many]):
        args.clock = clock
        case = Case(op, size, DTYPES[args.dtype], collectives.buffer_sets(args, op, size), args.device)
        share = 1.5 * (args.limit - (time.monotonic() - begin)) / (len(single) + len(many) - done)
        result = collectives.measure(case, backends, args, share)
        results.append(result)
        collectives.progress(done + 1, len(single) + len(many), case, result, begin, THEIRS)
    return results[: len(single)], results[len(single) :]


def verdict(results: list[Any]) -> str:
    """The number of cases in which a call took no longer than nccl's."""
    rows = [row["times"] for row in results if all("median" in row["times"][name] for name in ("sagellm", THEIRS))]
    counts = [sum(row["sagellm"][at] <= row[THEIRS][at] for row in rows) for at in ("median", "p10")]
    return f"At most the host time of nccl: {counts[0]} of {len(rows)} cases by the median, {counts[1]} by the p10."


def many_table(results: list[Any]) -> list[str]:
    """A table of all forms of ten and of a thousand small all_reduces, with the ratios of their p10."""
    labels = [label for label, _, _ in FORMS]
    head = ["calls", *labels, *(f"{theirs} / {ours}" for theirs, ours in RATIOS)]
    lines = ["", "## Many small all_reduces of 2 KiB, host time of all together", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + " ---: |" * len(head)]
    for row in results:
        times = row["times"]
        cells = [row["op"].rpartition("_x")[2], *(report.cell(times[label]) for label in labels)]
        for theirs, ours in RATIOS:
            known = "p10" in times[theirs] and "p10" in times[ours]
            cells.append(f"{times[theirs]['p10'] / times[ours]['p10']:.2f}" if known else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def run(args: argparse.Namespace) -> int:
    """Creates the groups, measures, prints and writes; returns the exit code."""
    device = collectives.use_device(args)
    machine = machines.describe()
    # This program exchanges its own data over gloo; no measured operation uses this group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    patience = timedelta(seconds=args.timeout)
    names = {"sagellm": "sagellm", THEIRS: THEIRS, CONTROL: THEIRS}
    groups = {label: dist.new_group(backend=backend, timeout=patience) for label, backend in names.items()}
    collectives.quiet_collector()
    begin, busy, own = time.monotonic(), machines.busy_seconds(), time.process_time()
    results, many = measure_all(args, groups)
    seconds = time.monotonic() - begin
    others = machines.busy_seconds() - busy - (time.process_time() - own)
    found = {
        "date": date.today().isoformat(), "machine": machine, "device": device, "clock": "issue", "ranks": 1,
        "reference": THEIRS, "dtype": args.dtype, "labels": list(groups), "rounds": args.rounds,
        "budget_seconds": args.budget, "buffers": args.buffers, "seconds": round(seconds, 1),
        "others": round(max(0.0, others / (seconds * machines.usable_cores())), 3),
        "command": f"benchmarks/gpu.py {' '.join(sys.argv[1:])}".strip(), "results": results, "many": many,
    }  # fmt: skip
    print(report.markdown(found) + "\n".join([*many_table(many), "", verdict(results), ""]))
    folder = args.out / f"{found['date']}-{machines.slug(machine)}"
    for line in report.write(found, folder, args.name):
        print(line, file=sys.stderr)
    failed = [
        (r["op"], r["size"], who, t["error"]) for r in results + many for who, t in r["times"].items() if "error" in t
    ]
    for op, size, label, error in failed:
        print(f"FAILED: {label}, {op}, {show_size(size)}: {error}", file=sys.stderr)
    dist.destroy_process_group()
    return 1 if failed else 0


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ops", default=",".join(SINGLE), help=f"default: {', '.join(SINGLE)}")
    add("--sizes", help=f"bytes of the whole tensor (default: {collectives.SIZES})")
    add("--many", default="10,1000", help="how many small all_reduces together (default: 10,1000)")
    add("--dtype", default="float32", choices=DTYPES, help="default: float32")
    add("--quick", action="store_true", help=f"sizes {collectives.QUICK_SIZES}, fewer rounds")
    add("--rounds", type=int, help="turns per backend and case (default: 10, quick: 4)")
    add("--budget", type=float, help="seconds of timed calls per backend and case (default: 0.3, quick: 0.06)")
    add("--limit", type=float, help="seconds for all cases; slow ones get fewer rounds (default: 360, quick: 45)")
    add("--buffers", type=int, default=4, help="sets of buffers used in turn (default: 4)")
    add("--timeout", type=float, default=60, help="seconds until a stuck operation is an error (default: 60)")
    add(
        "--out", type=Path, default=Path(__file__).parent / "runs", help="folder for results (default: benchmarks/runs)"
    )
    add("--name", default="gpu-host-time", help="name of the result files (default: gpu-host-time)")
    args = parser.parse_args(words)
    args.sizes = args.sizes or (collectives.QUICK_SIZES if args.quick else collectives.SIZES)
    args.rounds = args.rounds or (4 if args.quick else 10)
    args.budget = args.budget or (0.06 if args.quick else 0.3)
    args.limit = args.limit or (45 if args.quick else 360)
    args.device, args.cold = "cuda", False
    if unknown := set(args.ops.split(",")) - set(SINGLE):
        parser.error(f"unknown operation {', '.join(sorted(unknown))}; known: {', '.join(SINGLE)}")
    if unknown := set(args.many.split(",")) - {"10", "1000"}:
        parser.error(f"--many {', '.join(sorted(unknown))}: expected 10, 1000 or both")
    try:
        for size in args.sizes.split(","):
            parse_size(size)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> int:
    args = parse_args()
    if not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} finds none, so there is nothing to measure", file=sys.stderr)
        return 1
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
